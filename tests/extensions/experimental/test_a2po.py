"""A*-PO: values by hand, a regression that a loop reproduces, and a first stage that is never done twice."""

import json
import math
from dataclasses import replace

import datasets
import pytest
import torch

from posttrain import ScriptedEngine
from posttrain.errors import ConfigError, DataError
from posttrain.extensions.experimental.a2po import A2POTrainer, ValueCache, _computed_by, optimal_value, row_key
from posttrain.extensions.experimental.a2po_method import A2POConfig, a2po_objective
from posttrain.loop.rollout import settings_of
from posttrain.losses.reduce import Denominators, reduce
from posttrain.rollouts.base import Capabilities
from tests.conftest import build_model
from tests.losses.properties import Case, double, layouts, outputs, policy, toy_rows
from tests.methods.helpers import losses, prompts, scripted, weights
from tests.wordings import raises


def build(folder, tokenizer, rewards=None, data=None, engine=None, model=None, eval_dataset=None, **settings):
    base = {
        "per_device_train_batch_size": 4, "max_completion_length": 8, "max_steps": 2, "logging_steps": 1,
        "learning_rate": 1e-2, "report_to": "none", "bf16": False, "save_strategy": "no", "disable_tqdm": True,
        "seed": 7, "lr_scheduler_type": "constant", "num_value_samples": 4, "num_train_epochs": 20,
    }  # fmt: skip
    extra = {} if engine == "native" else {"rollout_engine": engine or scripted()}
    return A2POTrainer(
        model or build_model(len(tokenizer)),
        rewards or odd,
        A2POConfig(str(folder), **(base | settings)),
        train_dataset=data if data is not None else prompts(8),
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        **extra,
    )


def odd(completion_ids, **_):
    return [float(len(ids) % 2) for ids in completion_ids]


# Values ---------------------------------------------------------------------------------------------------------------


def test_values_of_the_table():
    """beta1 = 0.5, n = 8, binary: 0.5 log((k e^2 + 8 - k) / 8)."""
    for k, value in ((0, 0.0), (1, 0.29351), (4, 0.71689), (8, 1.0)):
        rewards = [1.0] * k + [0.0] * (8 - k)
        assert optimal_value(rewards, 0.5) == pytest.approx(value, abs=5e-6)
        assert optimal_value(rewards, 0.5) == pytest.approx(0.5 * math.log((k * math.e**2 + 8 - k) / 8))


def test_values_are_stable_and_pass_over_unscored_samples():
    assert optimal_value([1e4, 0.0], 0.5) == pytest.approx(1e4 + 0.5 * math.log(0.5))
    assert optimal_value([-1e4, -1e4], 1e-3) == pytest.approx(-1e4)
    assert optimal_value([1.0, math.nan], 0.5) == 1.0
    assert math.isnan(optimal_value([math.nan], 0.5))


def test_the_cache_survives_an_interrupted_line_and_ignores_other_runs(tmp_path, caplog):
    cache = ValueCache(tmp_path / "values", "run-a")
    cache.add({"p": [1.0, 0.0], "q": [math.nan]}, write=True)
    ValueCache(tmp_path / "values", "run-b").add({"p": [0.0, 0.0]}, write=True)
    with (tmp_path / "values").open("a") as file:
        file.write('{"run": "run-a", "pro')
    again = ValueCache(tmp_path / "values", "run-a")
    assert again.rewards["p"] == [1.0, 0.0]
    assert math.isnan(again.rewards["q"][0])
    assert "has an incomplete line" in caplog.text


def test_a_row_is_known_by_its_prompt_and_its_columns():
    row = {"prompt": "a", "answer": 1}
    assert row_key(row) == row_key({"answer": 1, "prompt": "a"})
    assert row_key(row) != row_key(row | {"answer": 2})
    assert row_key({"prompt": "a", "image": object()}) == row_key({"prompt": "a", "image": object()})


# The objective --------------------------------------------------------------------------------------------------------

CASE = Case(
    "a2po", lambda out, batch: a2po_objective(out, batch, A2POConfig("x", bf16=False, report_to="none", beta2=0.1))
)


def counts(batches):
    judged = sum(
        int(((batch.sequence == s) & batch.loss_mask).any()) for batch in batches for s in range(batch.num_sequences)
    )
    return Denominators(1, 1, 1, named={"judged": judged})


def gradient(batches):
    theta = policy()
    total = 0.0
    for batch in map(double, batches):
        loss = reduce(CASE.objective(outputs(theta, batch), batch), counts(batches))
        loss.backward()
        total += float(loss.detach())
    return total, theta.grad


def test_any_layout_and_split_gives_the_same_loss_and_gradient():
    results = {name: gradient(batches) for name, batches in layouts(toy_rows()).items()}
    loss, grad = results.pop("packed")
    assert grad.abs().sum() > 0
    for name, (other, theirs) in results.items():
        assert other == pytest.approx(loss, rel=1e-9), name
        assert torch.allclose(theirs, grad, atol=1e-12), name


def test_a_loop_over_completions_gives_the_same_loss_and_slope():
    """dL/d logp_t = 2 beta2 (beta2 sum(logp - ref) - A) / n on every token of a completion."""
    (batch,) = layouts(toy_rows())["packed"]
    batch = double(batch)
    out = outputs(policy(), batch)
    out.logp = out.logp.detach().requires_grad_()
    reduce(CASE.objective(out, batch), counts([batch])).backward()
    total, n = 0.0, counts([batch]).named["judged"]
    for s in range(batch.num_sequences):
        tokens = (batch.sequence == s) & batch.loss_mask
        if tokens.any():
            gap = 0.1 * float((out.logp - batch.ref_logp)[tokens].sum()) - float(batch.advantages[s])
            total += gap**2 / n
            assert out.logp.grad[tokens].tolist() == pytest.approx([0.2 * gap / n] * int(tokens.sum()))
    assert float(reduce(CASE.objective(out, batch), counts([batch])).detach()) == pytest.approx(total)


def test_gradcheck_in_float64():
    (batch,) = layouts(toy_rows(groups=1))["packed"]
    batch = double(batch)
    theta = policy().detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: reduce(CASE.objective(outputs(t, batch), batch), counts([batch])), theta, atol=1e-6, fast_mode=True
    )


def test_a_completion_without_loss_tokens_counts_for_nothing():
    rows = [replace(row, loss_masks=[[0] * len(m) for m in row.loss_masks]) for row in toy_rows()]
    loss, grad = gradient(layouts(rows)["tree"])
    assert (loss, float(grad.abs().max())) == (0.0, 0.0)


# Training -------------------------------------------------------------------------------------------------------------


def test_a_run_trains_and_logs_its_metrics(tiny_tokenizer, tmp_path):
    trainer = build(tmp_path, tiny_tokenizer, beta2=0.1)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(before, weights(trainer))
    first = trainer.state.log_history[0]
    assert {"reward", "v_star", "implicit_reward", "advantage", "completions/mean_length"} <= set(first)
    assert first["implicit_reward"] == pytest.approx(0.0, abs=1e-6)  # The policy is the reference.
    assert first["advantage"] == pytest.approx(first["reward"] - first["v_star"], abs=1e-6)
    assert first["loss"] > 0
    assert trainer.state.log_history[1]["implicit_reward"] != 0


def test_the_loss_compares_models_at_temperature_one_whatever_is_sampled_at(tiny_tokenizer, tmp_path):
    """The scripted engine draws the same tokens at any temperature."""
    runs = [build(tmp_path / str(t), tiny_tokenizer, temperature=t, beta2=0.1) for t in (0.5, 1.0)]
    for trainer in runs:
        trainer.train()
    assert losses(runs[0]) == losses(runs[1]) and torch.equal(*map(weights, runs))
    assert settings_of(runs[0].run, "train").sampling.temperature == 0.5


def test_values_come_from_the_rewards_of_the_reference(tiny_tokenizer, tmp_path):
    engine = scripted()
    trainer = build(tmp_path, tiny_tokenizer, engine=engine, beta1=0.7)
    cache = trainer.estimate_values([trainer.train_dataset])
    for row in trainer.train_dataset:
        ids = tiny_tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        line = [engine.script(ids, index) for index in range(4)]
        assert cache.rewards[row_key(row)] == [float(len(tokens) % 2) for tokens in line]
        assert cache.value(row, 0.7) == optimal_value(cache.rewards[row_key(row)], 0.7)


def test_prompts_that_nothing_solves_are_left_out_and_values_are_computed_once(tiny_tokenizer, tmp_path):
    calls = []

    def hard(completion_ids, answer, **_):
        calls.append(len(answer))
        return [float(a % 2 == 0) for a in answer]

    trainer = build(tmp_path, tiny_tokenizer, rewards=hard)
    trainer.train()
    assert sorted(trainer.train_dataset["answer"]) == [0, 2, 4, 6]
    sampled = sum(calls[1:]) - 2 * 4  # The first call is a dry run; each of two steps scores four.
    assert sampled == 8 * 4
    calls.clear()
    again = build(tmp_path, tiny_tokenizer, rewards=hard)
    again.train()
    assert sum(calls[1:]) == 2 * 4  # Values came from the file.
    other = build(tmp_path, tiny_tokenizer, rewards=hard, temperature=0.5)
    other.estimate_values([other.train_dataset])
    lines = [json.loads(line) for line in (tmp_path / "v_star.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    assert len({line["run"] for line in lines}) == 2

    def edited(completion_ids, answer, **_):
        return [float(a % 2 == 1) for a in answer]

    edited.__name__ = hard.__name__
    changed = build(tmp_path, tiny_tokenizer, rewards=edited)
    changed.train()
    assert sorted(changed.train_dataset["answer"]) == [1, 3, 5, 7]  # By its own values, though its name is the other's.


def test_rewards_that_are_not_binary_are_never_filtered(tiny_tokenizer, tmp_path, caplog):
    def centred(completion_ids, answer, **_):
        return [float(a) - 2.0 for a in answer]

    trainer = build(tmp_path, tiny_tokenizer, rewards=centred)
    trainer.train()
    assert len(trainer.train_dataset) == 8
    assert "filter_all_incorrect=True has no effect" in caplog.text


def test_values_are_made_of_transformed_rewards_like_the_advantages(tiny_tokenizer, tmp_path):
    """Rewards of 100, clipped to 1: V* is 1 and the advantage 0, not -99."""
    settings = {"rewards": lambda completions, **_: [100.0] * len(completions), "max_steps": 1}
    trainer = build(tmp_path, tiny_tokenizer, reward_transform=["clip:0:1"], **settings)
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["v_star"] == pytest.approx(1.0)
    assert first["advantage"] == pytest.approx(0.0, abs=1e-6)
    raw = build(tmp_path, tiny_tokenizer, **settings)  # The same folder: its values are of other rewards.
    assert set(map(tuple, raw.estimate_values([raw.train_dataset]).rewards.values())) == {(100.0,) * 4}


def test_fewer_prompts_left_than_a_generation_takes_is_an_error_too(tiny_tokenizer, tmp_path):
    rewards = {"rewards": lambda answer, **_: [float(a == 3) for a in answer]}
    trainer = build(tmp_path, tiny_tokenizer, **rewards)
    with raises(ConfigError, "train_dataset", "1", "4"):
        trainer.train()


def test_no_prompt_left_is_an_error_not_an_empty_run(tiny_tokenizer, tmp_path):
    trainer = build(tmp_path, tiny_tokenizer, rewards=lambda completions, **_: [0.0 for _ in completions])
    with raises(DataError, "8"):
        trainer.train()


def test_unscored_completions_are_left_out_of_the_loss(tiny_tokenizer, tmp_path):
    steps = []

    def sometimes(completion_ids, answer, trainer_state, **_):
        training = len(answer) == 4
        steps.append(training)
        return [None if training and i % 2 else float(i % 2 == 0) for i, _ in enumerate(answer)]

    trainer = build(tmp_path, tiny_tokenizer, rewards=sometimes, num_value_samples=3, max_steps=1, beta2=1e-6)
    trainer.train()
    first = trainer.state.log_history[0]
    # Two of four rows count: reward 1 each, so the loss is the mean of their (1 - V*)^2 alone.
    values = [trainer.cache.value(row, 0.5) for row in trainer.train_dataset]
    assert min((1 - v) ** 2 for v in values) - 1e-6 <= first["loss"] <= max((1 - v) ** 2 for v in values) + 1e-6
    assert first["groups/unscorable"] == 2


def test_evaluation_estimates_its_own_prompts_first_and_filters_none(tiny_tokenizer, tmp_path):
    sets = {"a": prompts(3), "b": prompts(6).select(range(3, 6))}
    trainer = build(
        tmp_path, tiny_tokenizer, rewards=lambda completions, **_: [0.0] * len(completions), eval_dataset=sets
    )
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_reward", "eval_a_v_star"} <= set(metrics)
    assert len(trainer.cache.rewards) == 6
    assert metrics["eval_a_loss"] == pytest.approx(0.0, abs=1e-9)


def test_a_stopped_run_goes_on_where_it_was(tiny_tokenizer, tmp_path):
    def hard(completion_ids, answer, **_):
        return [float((len(ids) + a) % 3 == 0) for ids, a in zip(completion_ids, answer, strict=True)]

    settings = {"rewards": hard, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "beta2": 0.1}
    whole = build(tmp_path / "whole", tiny_tokenizer, **settings)
    whole.train()
    part = build(tmp_path / "part", tiny_tokenizer, **settings)  # Another folder: values come from the checkpoint.
    part.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(part))
    assert not (tmp_path / "part" / "v_star.jsonl").exists()


def test_r50_long_prompts_lose_their_beginning(tiny_tokenizer, tmp_path, caplog):
    seen = []

    class Spy(ScriptedEngine):
        def generate(self, requests, sampling):
            seen.extend(list(r.prompt_ids) for r in requests)
            return super().generate(requests, sampling)

    trainer = build(tmp_path, tiny_tokenizer, engine=Spy(lambda ids, i: [5 + i, 2]), max_prompt_length=10)
    trainer.estimate_values([trainer.train_dataset])
    whole = tiny_tokenizer.apply_chat_template(prompts(1)[0]["prompt"], add_generation_prompt=True)["input_ids"]
    assert whole[-10:] in seen
    assert all(len(ids) == 10 for ids in seen)
    assert "max_prompt_length limits a prompt to 10 tokens" in caplog.text


def test_the_native_engine_samples_values_from_the_reference_even_late(tiny_tokenizer, tmp_path):
    trainer = build(tmp_path / "a", tiny_tokenizer, engine="native", rewards=lambda completion_ids, **_: [
        float(sum(ids) % 2) for ids in completion_ids
    ], filter_all_incorrect=False)  # fmt: skip
    first = dict(trainer.estimate_values([trainer.train_dataset]).rewards)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter))  # As much training would.
    trainer.cache = None
    (tmp_path / "a" / "v_star.jsonl").unlink()
    assert trainer.estimate_values([trainer.train_dataset]).rewards == first


def test_an_engine_with_weights_of_its_own_never_samples_values(tiny_tokenizer, tmp_path):
    """A server holds the policy's weights, which are the reference's no more: the reference samples here, also in part."""
    from peft import LoraConfig

    far = scripted()
    args = A2POConfig(
        str(tmp_path), bf16=False, report_to="none", num_value_samples=2, max_completion_length=8, disable_tqdm=True
    )
    trainer = A2POTrainer(
        build_model(len(tiny_tokenizer)), odd, args, train_dataset=prompts(8), processing_class=tiny_tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), rollout_engine=far,
    )  # fmt: skip
    far.capabilities = Capabilities(needs_weight_sync=True)
    far.generate = lambda *_: pytest.fail("the far engine was asked")
    rewards = trainer.estimate_values([trainer.train_dataset]).rewards
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter))
    trainer.cache = None
    (tmp_path / "v_star.jsonl").unlink()
    assert trainer.estimate_values([trainer.train_dataset]).rewards == rewards
    assert trainer.engine is far


def test_an_adapter_needs_no_copy_and_values_come_from_its_base(tiny_tokenizer, tmp_path):
    from peft import LoraConfig, get_peft_model  # noqa: F401

    args = A2POConfig(
        str(tmp_path), bf16=False, report_to="none", num_value_samples=2, max_steps=1, max_completion_length=8,
        per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True, filter_all_incorrect=False,
    )  # fmt: skip
    trainer = A2POTrainer(
        build_model(len(tiny_tokenizer)), odd, args, train_dataset=prompts(4), processing_class=tiny_tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    assert trainer.reference.copy is None
    trainer.train()
    assert len(trainer.cache.rewards) == 4
    assert losses(trainer) is not None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_generations": 2}, "num_generations=2 must be 1"),
        ({"beta1": 0.0}, "beta1=0.0"),
        ({"beta2": -1.0}, "beta2=-1.0"),
        ({"num_value_samples": 0}, "num_value_samples=0"),
        ({"beta": 0.1}, "use beta2 for the regularization"),
        ({"sync_ref_model": True}, "sync_ref_model=True must be False"),
        ({"num_iterations": 2}, "no importance ratio"),
        ({"dynamic_sampling": 1}, "dynamic_sampling=1 must be 0"),
        ({"reward_transform": ["rank"]}, "depend on other rewards"),
        ({"reward_transform": ["none", "zscore"]}, "depend on other rewards"),
        ({"reward_transform": "running"}, "depend on other rewards"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match):
        A2POConfig(str(tmp_path), bf16=False, report_to="none", **settings)


def test_defaults_and_streams(tiny_tokenizer, tmp_path):
    args = A2POConfig(str(tmp_path), bf16=False, report_to="none")
    expected = {
        "remove_unused_columns": False, "max_prompt_length": 512, "max_completion_length": 256, "temperature": 1.0,
        "top_p": 1.0, "num_value_samples": 8, "beta1": 0.5, "filter_all_incorrect": True, "beta2": 1e-3,
        "reward_weights": None, "trust_remote_code": False, "model_init_kwargs": None,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected
    with raises(DataError, "train_dataset"):
        build(tmp_path, tiny_tokenizer, data=prompts(4).to_iterable_dataset())
    assert isinstance(prompts(2), datasets.Dataset)
    with raises(ConfigError, "reward_weights", "2", "1"):
        build(tmp_path, tiny_tokenizer, reward_weights=[1.0, 2.0])


@pytest.mark.parametrize("learns", [True, False])
def test_values_belong_to_the_weights_of_a_reward_model_frozen_or_not(learns):
    def judge(completions, **_):
        return [0.0] * len(completions)

    judge.model = build_model(97).requires_grad_(learns)
    before = _computed_by(judge)
    assert _computed_by(judge) == before
    with torch.no_grad():
        judge.model.lm_head.weight[0, 0] += 1.0
    assert _computed_by(judge) != before
