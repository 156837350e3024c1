"""PPO end to end on two-layer models, and its objective against scalar loops and the properties of every objective."""

import dataclasses
import json
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

import posttrain
from posttrain import CheckpointError, ConfigError, DataError, ModelError, RewardError, Row
from posttrain.data import trie
from posttrain.data.forest import Layout, collate
from posttrain.extensions.experimental.ppo import PPOTrainer
from posttrain.extensions.experimental.ppo_config import PPOConfig
from posttrain.extensions.experimental.ppo_method import ppo_objective
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.online_config import RewardFields
from posttrain.types import ModelOutputs
from tests.conftest import build_masked_model, build_model, build_tokenizer, told_of_calls
from tests.losses.properties import TABLE, layouts, outputs, policy
from tests.methods.helpers import SHORT, count_a, prompts, scripted, weights
from tests.ranks import assert_same_step, leave, part, run_ranks, step_taken
from tests.wordings import raises

# Read only in methods that PPO replaces, or of rollouts by a `rollout_func` or with images, which it does not take.
UNREAD = {
    "truncation",
    "chat_template_path",
    "balance_ranks",
    "log_multimodal",
    "vllm_importance_sampling_correction",
}
FREE = ("seconds", "per_second", "runtime", "step_time", "epoch", "eps", "flos")


@pytest.fixture
def tokenizer(tiny_tokenizer):
    """Padding is a token of its own."""
    tiny_tokenizer.pad_token = "<|endoftext|>"
    return tiny_tokenizer


def ppo_args(folder, **settings):
    base = SHORT | {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2,
        "response_length": 8,
        "stop_token": "eos",
        "max_grad_norm": 0.0,
    }
    if "total_episodes" in settings or "num_train_epochs" in settings:
        del base["max_steps"]
    return PPOConfig(str(folder), **(base | settings))


def ppo(folder, tokenizer, model=None, engine=None, reward=count_a, data=None, ref=None, value=None, **settings):
    """A PPO trainer on a two-layer model with a scripted engine (or ``engine="native"``)."""
    extra = {} if engine == "native" else {"rollout_engine": engine or scripted()}
    keys = {k: settings.pop(k) for k in ("eval_dataset", "peft_config", "data_collator") if k in settings}
    return PPOTrainer(
        ppo_args(folder, **settings),
        tokenizer,
        model if model is not None else build_model(len(tokenizer)),
        ref,
        reward,
        data if data is not None else prompts(32),
        value,
        **extra,
        **keys,
    )


def classifier(size, seed=5, labels=1, **overrides):
    torch.manual_seed(seed)
    settings = build_model(size).config.to_dict() | overrides
    settings = {k: v for k, v in settings.items() if k not in ("num_labels", "id2label", "label2id")}
    return LlamaForSequenceClassification(LlamaConfig(**settings, num_labels=labels)).eval()


def logs(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def spied(trainer, monkeypatch=None):
    """Rows of every micro-batch, in the order they are trained."""
    seen, original = [], trainer._piece

    def piece(*args):
        rows = original(*args)
        seen.append(rows)
        return rows

    trainer._piece = piece
    return seen


# The rows of 5.5: what the chapter corrects ------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("mini_batches", [1, 2, 4])
def test_5_5_a_r49_each_mini_batch_is_one_optimiser_step(tokenizer, tmp_path, mini_batches):
    """Trap 49: with 4 accumulated batches and 3 passes, the number of mini-batches must change the number of steps."""
    trainer = ppo(
        tmp_path,
        tokenizer,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_ppo_epochs=3,
        num_mini_batches=mini_batches,
        total_episodes=16,
        learning_rate=1e-4,
    )
    steps = []
    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    pieces = spied(trainer)
    trainer.train()
    assert len(steps) == trainer.state.global_step == 2 * 3 * mini_batches
    assert trainer.args.num_total_batches == 2
    assert {len(rows) for rows in pieces} == {2}
    ratios = logs(trainer, "val/ratio")
    assert ratios[0] == pytest.approx(1.0, abs=1e-6)  # The policy that is trained is the one that sampled.
    assert ratios[3 * mini_batches] == pytest.approx(1.0, abs=1e-6)
    assert all(0.5 < ratio < 2 for ratio in ratios)  # Over slots that exist: no zeros dilute it.


def test_5_5_a_every_pass_deals_every_response_anew(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, num_mini_batches=2, num_ppo_epochs=3, max_steps=6)
    pieces = spied(trainer)
    trainer.train()
    passes = [[row.completions[0] for rows in pieces[k : k + 2] for row in rows] for k in (0, 2, 4)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert all(len(one) == 8 for one in passes)


def test_5_5_a_a_mini_batch_smaller_than_a_device_batch_is_one_piece(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, gradient_accumulation_steps=1, num_mini_batches=4, max_steps=8)
    pieces = spied(trainer)
    trainer.train()
    assert [len(rows) for rows in pieces] == [1] * 8
    assert trainer.args.gradient_accumulation_steps == 1
    assert (trainer.args.local_batch_size, trainer.args.local_mini_batch_size) == (4, 1)


def test_5_5_b_r49_metrics_exclude_padding(tokenizer, tmp_path):
    """The entropy of a response is a sum over its own tokens, and so positive; every mean is over tokens that exist."""
    trainer = ppo(tmp_path, tokenizer, max_steps=2, num_ppo_epochs=2)
    pieces = spied(trainer)
    old = []
    original = trainer.advantages

    def spied_on(generation, rewards, logps):
        old.append((logps["old_logp"], [len(r.token_ids) for r in generation.rollouts]))
        return original(generation, rewards, logps)

    trainer.advantages = spied_on
    seen = []
    objective = trainer.objective
    trainer.objective = lambda out, batch: (seen.append((out, batch)), objective(out, batch))[1]
    trainer.train()
    logp, lengths = old[0]
    assert len({*lengths}) > 2
    assert logs(trainer, "objective/entropy")[0] == pytest.approx(
        sum(-sum(row[:n]) for row, n in zip(logp, lengths, strict=True)) / len(lengths), rel=1e-5
    )
    assert logs(trainer, "objective/entropy")[0] > 0
    assert pieces
    half = len(seen) // 2  # The second optimiser step, where the ratio has left 1.
    gaps, entropies = [], []
    for out, batch in seen[half:]:
        for b, t in batch.loss_mask.nonzero().tolist():
            gaps.append(float(out.logp[b, t] - batch.old_logp[b, t]))
            entropies.append(float(out.entropy[b, t]))
    assert len(gaps) == sum(lengths)
    n, ratios = len(gaps), [math.exp(gap) for gap in gaps]
    mean = sum(ratios) / n
    expected = {
        "policy/approxkl_avg": sum(gap**2 for gap in gaps) / (2 * n),
        "policy/entropy_avg": sum(entropies) / n,
        "val/ratio": mean,
        "val/ratio_var": sum((ratio - mean) ** 2 for ratio in ratios) / n,
    }
    for name, value in expected.items():
        assert logs(trainer, name)[1] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_5_5_c_r49_a_dataset_smaller_than_a_rollout_batch_is_refused(tokenizer, tmp_path):
    with raises(ConfigError, "7", "8", "generation_batch_size=8"):
        ppo(tmp_path, tokenizer, data=prompts(7))


def test_5_5_c_logging_and_evaluation_steps_are_honoured(tokenizer, tmp_path):
    trainer = ppo(
        tmp_path, tokenizer, max_steps=6, logging_steps=2, eval_strategy="steps", eval_steps=3, eval_dataset=prompts(4)
    )
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [2, 4, 6]
    evaluations = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [3, 6]
    assert {"eval_objective/scores", "eval_objective/kl", "eval_reward", "eval_loss/value_avg"} <= set(evaluations[0])


@pytest.mark.parametrize("second", [False, True], ids=["head on the trunk", "value model"])
def test_5_5_c_a_run_that_was_stopped_equals_one_that_was_not(tokenizer, tmp_path, second):
    def build(name):
        value = classifier(len(tokenizer)) if second else None
        return ppo(
            tmp_path / name,
            tokenizer,
            engine="native",
            rollout_engine="native",
            value=value,
            num_mini_batches=2,
            max_steps=10,
            save_strategy="steps",
            save_steps=3,
            lr_scheduler_type="linear",
            reward_transform=["running"],
            data=prompts(20),
        )

    whole, part = build("whole"), build("part")
    whole.train()
    part.train(
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3")
    )  # Inside the passes over a rollout batch.
    assert torch.equal(weights(whole), weights(part))  # Policy and value function.
    assert whole.counters == part.counters
    assert whole.counters["episode"] == 3 * 8
    (scale,), (again,) = whole.rewards.transforms, part.rewards.transforms
    assert scale == again
    assert scale.count == 3 * 8  # Every reward once.
    first = {row["step"]: row["loss"] for row in whole.state.log_history if "loss" in row}
    again = {row["step"]: row["loss"] for row in part.state.log_history if "loss" in row}
    assert all(again[step] == first[step] for step in range(4, 11))


def test_5_5_d_with_an_adapter_and_a_shared_trunk_there_is_one_model(tokenizer, tmp_path):
    from peft import LoraConfig

    trainer = ppo(tmp_path, tokenizer, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), max_steps=4)
    assert trainer.ref_model is None
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert {"lora" in n or "v_head" in n for n in trained} == {True}
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if n not in trained}
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if n in trained}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in base.items())
    assert all(not torch.equal(after[n], p) for n, p in before.items() if "lora_B" in n or "v_head" in n)
    kl = logs(trainer, "objective/kl")
    assert kl[0] == pytest.approx(0, abs=1e-5)
    assert abs(kl[1]) > 1e-4  # The adapter has moved away from the model without it.


def test_5_5_d_log_probs_and_values_come_from_one_pass_and_no_logits_are_kept(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, max_steps=2)
    passes, heads = [], []
    trainer.model.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    told_of_calls(trainer.model.lm_head, lambda: heads.append(1))
    batches = []
    training_step = trainer.training_step
    trainer.training_step = lambda model, inputs, n=None: (
        batches.append(len(inputs)),
        training_step(model, inputs, n),
    )[1]
    trainer.train()
    assert passes.count(True) == sum(batches)
    assert heads == []  # Only ever read in chunks, at the tokens that were sampled.


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
def test_5_5_e_two_ranks_equal_one_with_twice_the_accumulation(tmp_path):
    """Whitened rewards and advantages, both means of the loss, and every metric, are of the whole rollout batch."""
    one, two = ranks(tmp_path / "one", 1, 2), ranks(tmp_path / "two", 2, 1)
    assert_same_step(one, two)
    assert set(one["logs"]) == set(two["logs"])
    for name, value in one["logs"].items():
        if not any(part in name for part in FREE) and name not in ("documents", "staleness/mean_updates"):
            assert two["logs"][name] == pytest.approx(value, abs=2e-5, rel=1e-5), name


def ranks(folder, processes, accumulation):
    return run_ranks("tests.extensions.experimental.test_ppo", folder, accumulation, processes=processes, folder=folder)


def worker(folder, accumulation):
    """What each process of the two-rank test runs: one optimiser step."""
    tokenizer = build_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    trainer = ppo(
        folder,
        tokenizer,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulation,
        num_ppo_epochs=1,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        use_cpu=True,
        shuffle_dataset=False,
        whiten_rewards=True,
        missing_eos_penalty=1.0,
        ref=build_model(len(tokenizer), seed=3),
        value=classifier(len(tokenizer)),
        data=prompts(16),
    )
    before = weights(trainer)
    trainer.train()
    if trainer.accelerator.is_main_process:
        leave(step_taken(trainer, before))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"missing_eos_penalty": 0.0}, "missing_eos_penalty=0.0 must be above 0"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty=-1.0 must be above 0"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"whiten_rewards": True, "num_mini_batches": 2}, "whiten_rewards=True: mini-batches of 4 responses"),
        ({"kl_estimator": "k4"}, r"kl_estimator='k4' is not known.*'k1', 'k3'"),
        ({"stop_token": "eos", "stop_token_id": 3}, "stop_token='eos' and stop_token_id=3 are both set"),
        ({"stop_token": "</s>"}, "stop_token='</s>' is unknown. Use 'eos'"),
        ({"num_mini_batches": 3}, "8 cannot be divided by 3 without a remainder: num_mini_batches must divide"),
        ({"num_ppo_epochs": 0}, "num_ppo_epochs=0 must be at least 1"),
        ({"gamma": 1.5}, "gamma=1.5 must be at least 0 and at most 1"),
        ({"cliprange": -0.1}, "cliprange=-0.1 must be at least 0"),
        ({"max_steps": 3, "total_episodes": 8}, "both set the length of the run"),
        ({"rollout_engine": "vlm"}, "rollout_engine='vlm' is not known"),
        ({"auto_find_batch_size": True}, "would change the size of a rollout batch"),
        ({"reward_transform": ["rank"]}, "PPO samples one, so every rank would be 0.5"),
        ({"reward_transform": "rank"}, "PPO samples one, so every rank would be 0.5"),
    ],
)
def test_5_5_e_options_that_cannot_work_are_refused_by_name(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match):
        ppo_args(tmp_path, **settings)


def test_5_5_e_a_stop_token_other_than_eos_shows_that_a_response_ended(tokenizer, tmp_path):
    lines = [[5, 6, 9], [5, 2, 6, 9], [5, 6], [5, 2, 6]]  # 9 is the stop token, 2 is eos.
    from posttrain import ScriptedEngine

    trainer = ppo(
        tmp_path,
        tokenizer,
        engine=ScriptedEngine(lines),
        reward=lambda completions, **_: [1.0] * len(completions),
        stop_token=None,
        stop_token_id=9,
        missing_eos_penalty=0.25,
        gradient_accumulation_steps=1,
        max_steps=1,
        num_ppo_epochs=1,
    )
    pieces = spied(trainer)
    trainer.train()
    ended = {tuple(row.completions[0]): row for rows in pieces for row in rows}
    assert len(ended) == 4
    assert logs(trainer, "objective/scores") == [pytest.approx(1.0 - 0.25 / 4)]
    assert logs(trainer, "reward") == [1.0]


def test_5_5_f_the_reference_adapter_is_switched_back_whatever_happens(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, model=two_adapters(tokenizer), ref_adapter_name="old", model_adapter_name="new")
    assert trainer.model.active_adapter == "new"
    with raises(RuntimeError), trainer.reference.active(trainer.model):
        assert trainer.model.active_adapter == "old"
        raise RuntimeError("boom")
    assert trainer.model.active_adapter == "new"
    old = {n: p.clone() for n, p in trainer.model.named_parameters() if ".old." in n}
    trainer.train()
    assert trainer.model.active_adapter == "new"
    assert all(torch.equal(p, old[n]) for n, p in trainer.model.named_parameters() if ".old." in n)
    assert abs(logs(trainer, "objective/kl")[0]) > 1e-3  # The adapters differ from the start.


def two_adapters(tokenizer):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(build_model(len(tokenizer)), config, adapter_name="old")
    model.add_adapter("new", config)
    return model


def test_an_adapter_that_is_not_there_is_refused(tokenizer, tmp_path):
    with raises(ConfigError, "'odl'", "'new'", "'old'"):
        ppo(tmp_path, tokenizer, model=two_adapters(tokenizer), ref_adapter_name="odl")
    with raises(ConfigError, "'old'"):
        ppo(tmp_path, tokenizer, ref_adapter_name="old")


# A rollout batch against a scalar loop -----------------------------------------------------------------------------------


def loop(logp, ref, values, score, *, width, kl_coef, k3, gamma, lam):
    """Steps 5 to 8 of the chapter for one response, in plain numbers: n_i, masks, rewards, advantages, returns."""
    last = len(logp) - 1
    rewards = [0.0] * width
    for t in range(len(logp)):
        r = ref[t] - logp[t]
        rewards[t] = -kl_coef * ((math.exp(r) - 1 - r) if k3 else -r)
    rewards[last + 1 if last + 1 < width else last] += score
    v = [values[t] if t <= last + 1 and t < len(values) else 0.0 for t in range(width)] + [0.0]
    advantages, carried = [0.0] * width, 0.0
    for t in range(width - 1, -1, -1):
        carried = rewards[t] + gamma * v[t + 1] - v[t] + gamma * lam * carried
        advantages[t] = carried
    return advantages, [a + b for a, b in zip(advantages, v, strict=False)], rewards


@pytest.mark.parametrize("k3", [False, True], ids=["k1", "k3"])
def test_a_rollout_batch_equals_a_scalar_loop(tokenizer, tmp_path, k3):
    trainer = ppo(
        tmp_path,
        tokenizer,
        ref=build_model(len(tokenizer), seed=3),
        value=classifier(len(tokenizer)),
        kl_estimator="k3" if k3 else "k1",
        kl_coef=0.3,
        gamma=0.97,
        lam=0.9,
        response_length=6,
        max_steps=1,
        num_ppo_epochs=1,
        learning_rate=0.0,
    )
    seen = []
    original = trainer.advantages

    def advantages(rollouts, rewards, logps):
        found = original(rollouts, rewards, logps)
        seen.append((rollouts.worth(found), rewards.values[:, 0].tolist()))
        return found

    trainer.advantages = advantages
    trainer.train()
    ((generation, scores),) = seen
    columns, raw, kept = generation.token_columns, [], []
    lengths = [len(r.token_ids) for r in generation.rollouts]
    assert 6 in lengths and min(lengths) < 5  # Some ran to the limit, others stopped.
    for i, n in enumerate(lengths):
        args = columns["old_logp"][i][:n], columns["ref_logp"][i][:n], columns["old_values"][i], scores[i]
        advantages, returns, _ = loop(*args, width=6, kl_coef=0.3, k3=k3, gamma=0.97, lam=0.9)
        size = min(n + 1, 6)
        assert columns["returns"][i] == pytest.approx(returns[:size], abs=1e-6)
        assert columns["states"][i] == [1.0] * size
        assert columns["trained"][i] == [1.0] * n + [0.0] * (size - n)
        raw.append((advantages[:size], n))
        kept += advantages[:n]
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((a - mean) ** 2 for a in kept) / (len(kept) - 1) + 1e-8)
    for i, (advantages, n) in enumerate(raw):
        expected = [(a - mean) / std for a in advantages[:n]] + [0.0] * (len(advantages) - n)
        assert columns["advantages"][i] == pytest.approx(expected, abs=1e-6)


def test_the_loss_of_a_step_equals_a_scalar_loop(tokenizer, tmp_path):
    """Mean over tokens of the clipped surrogate plus vf_coef times the mean over states of the clipped error."""
    trainer = ppo(tmp_path, tokenizer, vf_coef=0.5, max_steps=2, cliprange=0.05, cliprange_value=0.05)
    seen = []
    objective = trainer.objective
    trainer.objective = lambda out, batch: (
        seen.append((trainer.state.global_step, out, batch)),
        objective(out, batch),
    )[1]
    trainer.train()
    policy_terms, value_terms = [], []
    for step, out, batch in seen:
        if step != 1:  # The second step, where ratio and values have moved.
            continue
        for b, t in (batch.sequence >= 0).nonzero().tolist():
            if batch.loss_mask[b, t]:
                rho = math.exp(float(out.logp[b, t] - batch.old_logp[b, t]))
                a = float(batch.advantages[b, t])
                policy_terms.append(max(-a * rho, -a * min(max(rho, 0.95), 1.05)))
            assert batch.columns["states"][b, t] == 1
            v, old, r = (float(x[b, t]) for x in (out.values, batch.columns["old_values"], batch.columns["returns"]))
            value_terms.append(0.5 * max((v - r) ** 2, (min(max(v, old - 0.05), old + 0.05) - r) ** 2))
    assert len(value_terms) > len(policy_terms)
    policy_loss, value_loss = (sum(terms) / len(terms) for terms in (policy_terms, value_terms))
    assert logs(trainer, "loss/policy_avg")[1] == pytest.approx(policy_loss, abs=1e-6)
    assert logs(trainer, "loss/value_avg")[1] == pytest.approx(value_loss, rel=1e-5)
    assert logs(trainer, "loss")[1] == pytest.approx(policy_loss + 0.5 * value_loss, rel=1e-5)


def test_the_logged_objective_is_score_less_charged_divergence(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, ref=build_model(len(tokenizer), seed=3), kl_coef=0.2, max_steps=1)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["objective/non_score_reward"] == pytest.approx(-0.2 * row["objective/kl"], rel=1e-5)
    assert row["objective/rlhf_reward"] == pytest.approx(
        row["objective/non_score_reward"] + row["objective/scores"], rel=1e-5
    )
    for name in ("eps", "lr", "episode", "policy/clipfrac_avg", "val/clipfrac_avg", "val/num_eos_tokens"):
        assert name in row, name
    assert (row["episode"], row["lr"]) == (8, 1e-2)


# Properties of the objective ---------------------------------------------------------------------------------------------


def toy_rows(seed=0, advantage=None):
    """Responses of unequal lengths with every column PPO wants; some have a state after their last token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n, low, high):
        return torch.randint(low, high, (n,), generator=generator).tolist()

    rows = []
    for i in range(6):
        n = draw(1, 1, 6)[0]
        size = n + i % 2
        noise = torch.randn(4, size, generator=generator, dtype=torch.float64)
        columns = {"old_logp": -2 + 0.3 * noise[0], "old_values": noise[1], "returns": noise[2], "advantages": noise[3]}
        columns["advantages"] = noise[3] if advantage is None else torch.full((size,), advantage)
        columns["states"] = torch.ones(size)
        mask = [1] * n + [0] * (size - n)
        rows.append(
            Row(draw(4, 1, TABLE), [draw(size, 1, TABLE)], [mask], {}, {k: [v.tolist()] for k, v in columns.items()})
        )
    return rows


def measured(theta, batch):
    """The bigram policy, with a value a token that depends on the same table."""
    value = torch.where(batch.sequence >= 0, theta.sin()[batch.input_ids.gather(1, batch.predictor), 0], 0.0)
    out = outputs(theta, batch)
    return ModelOutputs(logp=out.logp, entropy=out.entropy, values=value)


def wide(batch):
    columns = {name: column.double() for name, column in batch.columns.items()}
    return replace(batch, columns=columns, old_logp=batch.old_logp.double(), advantages=batch.advantages.double())


def gradient(batches, whole=None, world_size=1, **settings):
    cfg = PPOConfig("unused", bf16=False, report_to="none", **settings)
    whole = whole or batches
    named = {"states": float(sum(batch.columns["states"].sum() for batch in whole))}
    tokens = sum(batch.num_loss_tokens for batch in whole)
    counts = Denominators(tokens, sum(batch.num_sequences for batch in whole), len(whole), world_size, named)
    theta, total = policy(), 0.0
    for batch in map(wide, batches):
        loss = reduce(ppo_objective(measured(theta, batch), batch, cfg), counts)
        loss.backward()
        total += float(loss)
    return total, theta.grad


def test_any_layout_and_split_gives_the_same_loss_and_gradient():
    results = {name: gradient(batches) for name, batches in layouts(toy_rows()).items()}
    loss, expected = results.pop("packed")
    assert expected.abs().sum() > 0
    for name, (other, found) in results.items():
        assert other == pytest.approx(loss, rel=1e-6), name
        assert torch.allclose(found, expected, atol=1e-7), name


def test_two_ranks_average_to_one_process():
    batches = layouts(toy_rows())["tree"]
    _, whole = gradient(batches)
    halves = [gradient(part, batches, world_size=2)[1] for part in (batches[:2], batches[2:])]
    assert torch.allclose((halves[0] + halves[1]) / 2, whole, atol=1e-12)


def test_the_content_of_padding_does_not_matter():
    clean, dirty = layouts(toy_rows())["padded"], layouts(toy_rows())["padded"]
    for batch in dirty:
        outside = ~batch.real
        batch.input_ids[outside] = 7
        for column in (batch.old_logp, batch.advantages, batch.columns["old_values"], batch.columns["returns"]):
            column[outside] = 9.0
    assert gradient(clean)[0] == gradient(dirty)[0]


def test_good_tokens_that_became_unlikely_are_not_clipped():
    """With A > 0 the clip acts above 1 + c alone; ratios below one half lose a bit where 1 is taken off them and added again."""
    rows = toy_rows(advantage=1.0)
    (batch,) = collate(rows, pad_token_id=0, layout=Layout(row_tokens=64))
    gaps = torch.linspace(0.8, 3.0, batch.input_ids.numel()).view(batch.input_ids.shape)
    out = ModelOutputs(logp=batch.old_logp - gaps, values=torch.zeros(batch.input_ids.shape))
    cfg = PPOConfig("unused", bf16=False, report_to="none")
    assert float(ppo_objective(out, batch, cfg).metrics["policy/clipfrac_avg"].value) == 0


def test_without_advantages_and_value_loss_nothing_moves():
    assert gradient(layouts(toy_rows(advantage=0.0))["tree"], vf_coef=0.0)[1].abs().max() == 0


def test_the_on_policy_gradient_is_the_plain_policy_gradient():
    (batch,) = layouts(toy_rows())["packed"]
    batch = wide(batch)
    theta = policy()
    batch = replace(batch, old_logp=outputs(theta, batch).logp.detach())
    cfg = PPOConfig("unused", bf16=False, report_to="none", vf_coef=0.0)
    counts = Denominators(batch.num_loss_tokens, batch.num_sequences, 1, named={"states": 1.0})
    reduce(ppo_objective(measured(theta, batch), batch, cfg), counts).backward()
    plain = policy()
    logp = outputs(plain, batch).logp
    (-(batch.advantages * logp)[batch.loss_mask].sum() / batch.num_loss_tokens).backward()
    assert torch.allclose(theta.grad, plain.grad, atol=1e-12)


def test_gradcheck_in_float64():
    (batch,) = layouts(toy_rows(seed=2))["packed"]
    batch = wide(batch)
    cfg = PPOConfig("unused", bf16=False, report_to="none")
    counts = Denominators(batch.num_loss_tokens, batch.num_sequences, 1, named={"states": 9.0})
    theta = policy().detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: reduce(ppo_objective(measured(t, batch), batch, cfg), counts), theta, atol=1e-6, fast_mode=True
    )


def test_a_batch_without_tokens_gives_zero_and_no_nan():
    rows = [replace(row, loss_masks=[[0] * len(row.loss_masks[0])]) for row in toy_rows()]
    for row in rows:
        row.token_columns["states"] = [[0.0] * len(row.loss_masks[0])]
    loss, found = gradient(layouts(rows)["tree"])
    assert loss == 0
    assert found.abs().max() == 0


# Learning ----------------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(("seed", "second"), [(0, False), (1, False), (2, False), (0, True)])
def test_the_count_of_a_token_rises(tokenizer, tmp_path, seed, second):
    def count_k(completion_ids, **_):
        return [float(sum(token < 60 for token in ids)) for ids in completion_ids]

    trainer = ppo(
        tmp_path,
        tokenizer,
        engine="native",
        reward=count_k,
        value=classifier(len(tokenizer)) if second else None,
        seed=seed,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        num_ppo_epochs=2,
        max_steps=24 if second else 16,
        learning_rate=1e-2,
        temperature=1.0,
        max_grad_norm=1.0,
        kl_coef=0.01,
    )
    trainer.train()
    reward = logs(trainer, "objective/scores")
    assert sum(reward[-4:]) / 4 > sum(reward[:2]) / 2 + 1.0


def test_the_value_function_learns_what_a_response_is_worth(tokenizer, tmp_path):
    """With a constant score and no divergence every return tends to that score."""
    trainer = ppo(
        tmp_path,
        tokenizer,
        reward=lambda completions, **_: [2.0] * len(completions),
        kl_coef=0.0,
        lam=1.0,
        vf_coef=1.0,
        cliprange_value=10.0,
        max_steps=20,
        learning_rate=2e-2,
    )
    trainer.train()
    assert logs(trainer, "loss/value_avg")[0] == pytest.approx(2.0, rel=0.01)  # (0 - 2)^2 / 2, from a head that says 0.
    assert logs(trainer, "loss/value_avg")[-1] < 0.4


# Parts -------------------------------------------------------------------------------------------------------------------


def test_a_reward_model_reads_ids_at_the_last_token_of_a_response(tokenizer, tmp_path):
    """No pad, no text in between: the score is that of prompt and response alone."""
    scorer = classifier(len(tokenizer), seed=8)
    trainer = ppo(tmp_path, tokenizer, reward=scorer, max_steps=1, num_ppo_epochs=1)
    seen = []
    original = trainer.score

    def score(generation, mode):
        table = original(generation, mode)
        seen.append((generation, table))
        return table

    trainer.score = score
    trainer.train()
    ((generation, table),) = seen
    for i, rollout in enumerate(generation.rollouts):
        ids = torch.tensor([list(rollout.prompt_ids) + rollout.token_ids])
        with torch.no_grad():
            expected = scorer.score(scorer.model(ids).last_hidden_state[0, -1])
        assert float(table.values[i, 0]) == pytest.approx(float(expected), abs=1e-5)
    assert trainer.reward_model is scorer
    assert not any(p.requires_grad for p in scorer.parameters())


def test_r29_a_reward_model_that_says_one_thing_of_every_response_is_an_error(tokenizer, tmp_path):
    scorer = classifier(len(tokenizer))
    torch.nn.init.zeros_(scorer.score.weight)
    trainer = ppo(tmp_path, tokenizer, reward=scorer, max_steps=1)
    with raises(RewardError, "0"):
        trainer.train()


def test_models_may_be_given_as_folders(tokenizer, tiny_model_dir, tmp_path):
    classifier(len(tokenizer)).save_pretrained(tmp_path / "scorer")
    tokenizer.save_pretrained(tmp_path / "scorer")
    trainer = ppo(
        tmp_path / "out",
        None,
        model=tiny_model_dir,
        ref=tiny_model_dir,
        reward=str(tmp_path / "scorer"),
        value=str(tmp_path / "scorer"),
    )
    assert trainer.processing_class.pad_token_id != trainer.processing_class.eos_token_id  # It was pad = eos.
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.value_model is not trainer.reward_model


def test_pad_equal_to_eos_is_refused_in_a_tokenizer_that_was_given(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "'<|im_end|>'", "2", "pad_token"):
        ppo(tmp_path, tiny_tokenizer, model=build_model(len(tiny_tokenizer)))


def test_the_reference_cannot_be_the_policy(tokenizer, tmp_path):
    model = build_model(len(tokenizer))
    with raises(ConfigError, "ref_model"):
        ppo(tmp_path, tokenizer, model=model, ref=model)


def test_what_is_missing_is_named(tokenizer, tmp_path):
    model = build_model(len(tokenizer))
    with raises(ConfigError, "reward_model"):
        PPOTrainer(ppo_args(tmp_path), tokenizer, model, None, None, prompts(8), None)
    with raises(DataError, "train_dataset"):
        PPOTrainer(ppo_args(tmp_path), tokenizer, model, None, count_a, None, None)
    with raises(ModelError, "value_model", "num_labels=2"):
        ppo(tmp_path, tokenizer, value=classifier(len(tokenizer), labels=2))
    with raises(ModelError, "reward_model"):
        ppo(tmp_path, tokenizer, reward=build_model(len(tokenizer)))
    with raises(ModelError, "reward_model"):
        ppo(tmp_path, tokenizer, reward=classifier(64))


def test_the_reference_is_a_copy_and_has_no_value_function(tokenizer, tmp_path):
    model = build_model(len(tokenizer))
    start = {n: p.clone() for n, p in model.named_parameters()}
    trainer = ppo(tmp_path, tokenizer, model=model)
    trainer.train()
    reference = dict(trainer.ref_model.named_parameters())
    assert set(reference) == set(start)
    assert all(torch.equal(reference[n], p) for n, p in start.items())
    assert trainer.policy_model is trainer.model


def test_dropout_is_off_in_all_four_models(tokenizer, tmp_path):
    drop = {"attention_dropout": 0.3}
    value, scorer = classifier(len(tokenizer), **drop), classifier(len(tokenizer), seed=6, **drop)
    trainer = ppo(
        tmp_path,
        tokenizer,
        model=build_model(len(tokenizer), **drop),
        ref=build_model(len(tokenizer), seed=3, **drop),
        reward=scorer,
        value=value,
    )
    for model in (trainer.model, trainer.ref_model, value, scorer):
        assert model.config.attention_dropout == 0
        assert model.model.layers[0].self_attn.attention_dropout == 0


def test_the_policy_is_saved_as_a_plain_model_and_a_checkpoint_holds_the_values_too(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, value=classifier(len(tokenizer)), save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final" / "value_function.safetensors").exists()
    for folder in ("final", "checkpoint-2"):
        model, said = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not said["unexpected_keys"] and not said["missing_keys"]
        assert torch.equal(model.model.norm.weight, trainer.model.model.norm.weight)
    assert trainer.value_model is not None  # It was only out of the way while saving.
    (tmp_path / "checkpoint-2" / "value_function.safetensors").unlink()
    again = ppo(tmp_path / "b", tokenizer, value=classifier(len(tokenizer)), max_steps=4)
    with raises(CheckpointError, "value_function"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_best_checkpoint_brings_its_value_function(tokenizer, tmp_path):
    trainer = ppo(
        tmp_path,
        tokenizer,
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=prompts(4),
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    trainer.train()
    from safetensors.torch import load_file

    saved = load_file(Path(trainer.state.best_model_checkpoint) / "value_function.safetensors")
    assert torch.equal(saved["summary.weight"], trainer.value_model.summary.weight)


def test_the_config_answers_whatever_the_online_trainer_asks():
    """`PPOConfig` is no `OnlineConfig`: a new option that shared code reads would fail in the middle of a run."""
    import ast

    def reads_args(node):
        of = node.value if isinstance(node, ast.Attribute) else None
        return (isinstance(of, ast.Name) and of.id == "args") or (isinstance(of, ast.Attribute) and of.attr == "args")

    folder, known = (
        Path(posttrain.__file__).parent / "loop",
        set(dir(PPOConfig("unused", bf16=False, report_to="none"))),
    )
    for name in ("online", "scoring", "prompts", "trainer", "evaluation"):
        # What stands in a string is a name, and no read.
        tree = ast.parse((folder / f"{name}.py").read_text())
        read = {node.attr for node in ast.walk(tree) if reads_args(node)} - set(dir(datasets.Dataset))
        assert not {option for option in read if option not in known | UNREAD}, name


# Prompts, rewards and responses ------------------------------------------------------------------------------------------


def id_rows(tokenizer, padded):
    ids = [tokenizer(f"What is {i}?")["input_ids"] for i in range(8)]
    width = max(map(len, ids)) + 2
    if padded == "left, masked":
        masks = [[0] * (width - len(x)) + [1] * len(x) for x in ids]
        rows = [{"input_ids": [0] * (width - len(x)) + x, "attention_mask": m} for x, m in zip(ids, masks, strict=True)]
    elif padded == "left":
        rows = [{"input_ids": [0] * (width - len(x)) + x} for x in ids]
    else:
        rows = [{"input_ids": x} for x in ids]
    return ids, datasets.Dataset.from_list([{**row, "answer": i} for i, row in enumerate(rows)])


@pytest.mark.parametrize("padded", ["no", "left", "left, masked"])
def test_token_ids_are_prompts_whatever_pads_them(tokenizer, tmp_path, padded):
    ids, data = id_rows(tokenizer, padded)
    engine, seen = scripted(), []

    def reward(prompts, completions, prompt_ids, answer, **_):
        seen.append((prompts, prompt_ids, answer))
        return [float(len(text)) for text in completions]

    ppo(tmp_path, tokenizer, engine=engine, data=data, reward=reward, shuffle_dataset=False, max_steps=1).train()
    assert [list(request.prompt_ids) for request in engine.requests] == ids
    texts, prompt_ids, answers = seen[-1]
    assert texts == [f"What is {i}?" for i in range(8)]
    assert (prompt_ids, answers) == (ids, list(range(8)))


def test_a_collator_that_was_given_pads_and_the_padding_comes_off(tokenizer, tmp_path):
    from transformers import DataCollatorWithPadding

    ids, data = id_rows(tokenizer, "no")
    tokenizer.padding_side = "left"
    engine = scripted()
    collator = DataCollatorWithPadding(tokenizer)
    ppo(
        tmp_path,
        tokenizer,
        engine=engine,
        data=data,
        data_collator=collator,
        shuffle_dataset=False,
        max_steps=1,
        reward=lambda completions, **_: [float(len(text)) for text in completions],
    ).train()
    assert [list(request.prompt_ids) for request in engine.requests] == ids


def test_a_prompt_of_padding_alone_is_refused_by_row(tokenizer, tmp_path):
    data = datasets.Dataset.from_list([{"input_ids": [3, 4]}] * 5 + [{"input_ids": [0, 0]}] * 3)
    with raises(DataError, "train_dataset", "row 5", "'input_ids'"):
        ppo(tmp_path, tokenizer, data=data)


def test_a_prompt_and_response_that_do_not_fit_the_context_are_refused(tokenizer, tmp_path):
    with raises(ConfigError, "response_length=512"):
        ppo(tmp_path, tokenizer, response_length=512)


def test_a_stream_trains_like_its_rows(tokenizer, tmp_path):
    rows = ppo(tmp_path / "a", tokenizer, shuffle_dataset=False, max_steps=4)
    stream = ppo(tmp_path / "b", tokenizer, shuffle_dataset=False, max_steps=4, data=prompts(32).to_iterable_dataset())
    rows.train()
    stream.train()
    assert logs(rows, "loss") == logs(stream, "loss")


def test_several_rewards_are_weighed(tokenizer, tmp_path):
    def ones(completions, **_):
        return [1.0] * len(completions)

    def twos(completions, **_):
        return [2.0] * len(completions)

    trainer = ppo(tmp_path, tokenizer, reward=[ones, twos], reward_weights=[0.5, 2.0], max_steps=1)
    trainer.train()
    assert logs(trainer, "objective/scores") == [pytest.approx(4.5)]


def test_r18_scores_of_a_game_are_transformed_before_they_are_weighed(tokenizer, tmp_path):
    """tanh(2048 / 2048) = 0.76159, doubled by its weight."""
    settings = {"reward_transform": ["tanh:2048"], "reward_weights": [2.0], "max_steps": 1}
    trainer = ppo(tmp_path, tokenizer, reward=lambda completions, **_: [2048.0] * len(completions), **settings)
    trainer.train()
    assert logs(trainer, "objective/scores") == [pytest.approx(1.52319, abs=1e-5)]
    assert [v for row in trainer.state.log_history for k, v in row.items() if k.endswith("raw_mean")] == [2048.0]


def test_r26_a_reward_that_changes_its_mind_is_told_here_too(tokenizer, tmp_path, caplog):
    calls = iter(range(100_000))

    def moody(completions, **_):
        return [float(next(calls)) for _ in completions]

    ppo(tmp_path, tokenizer, reward=moody, check_reward_determinism=True, max_steps=1).train()
    assert "for the same completion (4 of 4 rows differ)" in caplog.text


def test_a_response_that_no_reward_applies_to_trains_nothing(tokenizer, tmp_path):
    def half(completions, **_):
        return [None if i % 2 else float(i) for i in range(len(completions))]

    trainer = ppo(tmp_path, tokenizer, reward=half, max_steps=1, num_ppo_epochs=1, check_rewards=False)
    pieces = spied(trainer)
    trainer.train()
    rows = [row for rows in pieces for row in rows]
    trained = [bool(sum(row.loss_masks[0])) for row in rows]
    assert trained.count(True) == 4
    assert all(bool(sum(row.token_columns["states"][0])) == on for row, on in zip(rows, trained, strict=True))
    assert logs(trainer, "objective/scores") == [pytest.approx((0 + 2 + 4 + 6) / 4)]


def test_without_a_stop_token_every_response_runs_to_its_length_and_it_is_told(tokenizer, tmp_path, caplog):
    from posttrain import ScriptedEngine

    engine = ScriptedEngine([[5, 2, 6, 7, 8, 9, 10, 11, 12]])
    with caplog.at_level(logging.WARNING, "posttrain"):
        trainer = ppo(tmp_path, tokenizer, engine=engine, stop_token=None, max_steps=1, num_ppo_epochs=1)
    assert "all have response_length=8 tokens" in caplog.text
    pieces = spied(trainer)
    trainer.train()
    assert {len(row.completions[0]) for rows in pieces for row in rows} == {8}
    assert logs(trainer, "val/num_eos_tokens") == [8]


def test_a_stop_token_that_is_no_token_is_refused(tokenizer, tmp_path):
    with raises(ConfigError, "stop_token_id=99999"):
        ppo(tmp_path, tokenizer, stop_token=None, stop_token_id=99999)


def test_r49_a_divergence_that_stays_negative_is_told_with_its_causes(tokenizer, tmp_path, caplog):
    model = build_model(len(tokenizer))
    other = build_model(len(tokenizer), seed=3)
    from posttrain import ScriptedEngine

    with torch.no_grad():  # What the scripted engine "samples", the reference finds likelier than the policy does.
        head = torch.nn.Linear(32, len(tokenizer), bias=False)
        other.lm_head = head
        head.weight.zero_()
    engine = ScriptedEngine([[5, 6, 7, 8, 9, 10, 11, 12]])
    trainer = ppo(
        tmp_path, tokenizer, model=model, ref=other, engine=engine, max_steps=12, learning_rate=0.0, stop_token=None,
        num_ppo_epochs=2, num_train_epochs=9,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "posttrain"):
        trainer.train()
    assert max(logs(trainer, "objective/kl")) < -1
    told = [r.message for r in caplog.records if "a KL cannot be negative" in r.message]
    assert len(told) == 1
    assert "ref_model that is not the initial model" in told[0]


# The run -----------------------------------------------------------------------------------------------------------------


def test_the_learning_rate_stands_still_during_the_steps_of_a_rollout_batch(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, max_steps=8, num_ppo_epochs=2, num_mini_batches=2, lr_scheduler_type="linear")
    trainer.train()
    rates = logs(trainer, "lr")
    assert rates[0] == pytest.approx(1e-2)
    assert rates[:4] == [rates[0]] * 4
    assert rates[4:] == [pytest.approx(rates[0] / 2)] * 4


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("settings", "updates", "episodes"),
    [
        ({"total_episodes": 17}, 3, 17),  # Rounded up to whole rollout batches of 8.
        ({"num_train_epochs": 1.5}, 6, 48),  # 1.5 x 32 rows.
        ({"max_steps": 5}, 3, 24),  # Two steps a rollout batch.
    ],
)
def test_the_length_of_a_run(tokenizer, tmp_path, settings, updates, episodes):
    args = ppo_args(tmp_path, **settings)
    engine = scripted()
    trainer = PPOTrainer(
        args, tokenizer, build_model(len(tokenizer)), None, count_a, prompts(32), None, rollout_engine=engine
    )
    assert (trainer.args.num_total_batches, trainer.args.total_episodes) == (updates, episodes)
    assert args.num_total_batches is None  # The caller's object is left alone.
    trainer.train()
    assert len(engine.requests) == updates * 8
    assert trainer.state.global_step == settings.get("max_steps", updates * 2)


def test_batch_sizes_are_filled_in(tmp_path):
    args = PPOConfig(str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=6, num_mini_batches=3)
    assert (args.world_size, args.micro_batch_size, args.local_batch_size, args.batch_size) == (1, 4, 24, 24)
    assert (args.mini_batch_size, args.local_mini_batch_size) == (8, 8)


def test_defaults_are_those_of_the_chapter(tmp_path):
    args = PPOConfig(str(tmp_path))
    expected = {
        "learning_rate": 3e-6, "num_ppo_epochs": 4, "num_mini_batches": 1, "total_episodes": None,
        "local_rollout_forward_batch_size": 64, "num_sample_generations": 10, "response_length": 53, "stop_token": None,
        "stop_token_id": None, "temperature": 0.7, "missing_eos_penalty": None, "kl_coef": 0.05, "kl_estimator": "k1",
        "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1, "gamma": 1.0, "lam": 0.95, "whiten_rewards": False,
        "model_adapter_name": None, "ref_adapter_name": None, "sft_model_path": "EleutherAI/pythia-160m",
        "reward_model_path": "EleutherAI/pythia-160m", "ds3_gather_for_generation": True, "dataset_num_proc": None,
        "push_to_hub": False, "logging_steps": 10,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected


def test_sample_tables_come_as_often_as_asked(tokenizer, tmp_path):
    trainer = ppo(
        tmp_path, tokenizer, max_steps=6, num_sample_generations=3, eval_dataset=prompts(6), save_strategy="no"
    )
    tables = []
    original = trainer.generate_completions
    trainer.generate_completions = lambda sampling=False: tables.append(original(sampling))
    trainer.train()
    assert len(tables) == 3
    assert {"prompt", "completion", "count_a"} <= set(tables[0][0])
    assert not any("objective/scores" in name for row in trainer.state.log_history for name in row if "eval" in name)
    assert len(trainer.__class__.generate_completions(trainer)) == 6


def test_no_tables_without_a_number_or_a_dataset(tokenizer, tmp_path):
    for settings in ({"num_sample_generations": 0, "eval_dataset": prompts(4)}, {"num_sample_generations": 10}):
        trainer = ppo(tmp_path, tokenizer, **settings)
        trainer.generate_completions = lambda **_: pytest.fail("a table was made")
        trainer.train()


def test_packed_and_padded_rows_train_alike(tokenizer, tmp_path):
    results = []
    for layout in (Layout("tree", row_tokens=256), Layout("padded", row_tokens=64)):
        trainer = ppo(tmp_path, tokenizer, value=classifier(len(tokenizer)), max_steps=2, optim="sgd")
        trainer.layout = layout
        trainer.train()
        results.append((logs(trainer, "loss"), weights(trainer)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


def test_a_critic_that_takes_no_segments_gets_a_mask(tokenizer, tmp_path):
    results = []
    for layout in (None, Layout("padded", row_tokens=64)):
        critic = build_masked_model(len(tokenizer), "SequenceClassification", num_labels=1)
        trainer = ppo(tmp_path, tokenizer, value=critic, max_steps=2, optim="sgd")
        assert trainer.layout.kind == "tree" and trainer.layout.dense_mask
        trainer.layout = layout or trainer.layout
        trainer.train()
        results.append((logs(trainer, "loss"), weights(trainer)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


def test_completions_are_in_the_record(tokenizer, tmp_path):
    import pyarrow.parquet as pq

    ppo(tmp_path, tokenizer, max_steps=2).train()
    rows = pq.read_table(tmp_path / "completions.parquet").to_pylist()
    assert len(rows) == 8
    assert {"prompt", "completion", "count_a", "score"} <= set(rows[0])


def test_the_command_line_trains_with_a_reward_function_and_with_models(
    tiny_model_dir, tokenizer, tmp_path, monkeypatch
):
    from posttrain.cli.main import main

    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + 1 ="}) + "\n" for i in range(8)))
    Path("ppo_rewards.py").write_text(
        "def length(completions, **kwargs):\n    return [len(c) / 10 for c in completions]\n"
    )
    classifier(len(tokenizer)).save_pretrained("scorer")
    tokenizer.save_pretrained("scorer")
    common = "--dataset_name rows.jsonl --response_length 4 --stop_token eos --max_steps 2 --num_ppo_epochs 2 --report_to none"
    by = {
        "function": f"--model_name_or_path {tiny_model_dir} --reward_funcs ppo_rewards.length",
        "models": f"--sft_model_path {tiny_model_dir} --reward_model_path scorer",
    }
    for name, parts in by.items():
        assert main(["ppo", *f"{parts} {common} --output_dir {name} --bf16 false".split()]) == 0
        AutoModelForCausalLM.from_pretrained(tmp_path / name)


def test_the_page_s_table_is_the_config():
    from tests.test_docs import default_of, options, own_fields

    fields = (*own_fields(PPOConfig), *dataclasses.fields(RewardFields))
    assert options("ppo.md", "option") == {f.name: default_of(f) for f in fields if f.init}


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]))
    part()


def test_responses_to_one_prompt_share_its_computation_and_nothing_else_changes(monkeypatch, tokenizer, tmp_path):
    data = datasets.Dataset.from_list([row for row in prompts(1).to_list() for _ in range(32)])
    found = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(
                "posttrain.extensions.experimental.ppo.share_prompts", lambda rows: (list(rows), list(range(len(rows))))
            )
            monkeypatch.setattr("posttrain.data.forest._grow", lambda members, layout, **_: trie.alone(members))
        trainer = ppo(tmp_path / str(shares), tokenizer, data=data, max_steps=4, learning_rate=1e-4)
        tokens = []

        def collated(run, rows, tokens=tokens):
            return [tokens.append(batch.num_tokens) or batch for batch in run.collate(rows)]

        monkeypatch.setattr("posttrain.loop.rollout.collated", collated)
        trainer.train()
        found.append((sum(tokens), logs(trainer, "loss"), logs(trainer, "objective/kl"), logs(trainer, "grad_norm")))
    (less, *ours), (more, *apart) = found
    assert less < 0.8 * more
    for mine, other in zip(ours, apart, strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-6)
