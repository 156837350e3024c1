"""GRPO end to end on a two-layer model: schedules, resume, adapters, evaluation, and what is refused."""

import json
import multiprocessing
import signal
import time

import datasets
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain import ConfigError, DataError, GRPOConfig, GRPOTrainer, ModelError, RewardError
from posttrain.errors import PreflightError
from posttrain.rollouts.base import RolloutEngine
from posttrain.types import Sampling
from tests.conftest import build_model
from tests.methods.helpers import count_a, grpo, grpo_args, losses, prompts, scripted, weights
from tests.wordings import raises


def test_a_step_changes_the_weights_and_logs_the_peer_s_names(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, beta=0.1)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(before, weights(trainer))
    (first, second) = [row for row in trainer.state.log_history if "loss" in row]
    for name in (
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "kl",
        "entropy",
        "completions/mean_length",
        "num_tokens",
        "completions/clipped_ratio",
        "clip_ratio/region_mean",
        "rewards/count_a/mean",
        "rewards/count_a/std",
        "step_time",
        "completions/max_terminated_length",
        "grad_norm",
    ):
        assert name in first, name
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl"] > 1e-6
    assert second["num_tokens"] > first["num_tokens"]


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "sapo", "vespo", "bnpo"])
def test_every_loss_type_trains(tiny_tokenizer, tmp_path, loss_type):
    trainer = grpo(tmp_path, tiny_tokenizer, loss_type=loss_type, max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert (weights(trainer) - before).abs().max() > 0


def test_accumulation_does_not_change_the_update(tiny_tokenizer, tmp_path):
    results = []
    for batch, steps in ((8, 1), (4, 2), (2, 4)):
        trainer = grpo(
            tmp_path,
            tiny_tokenizer,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            beta=0.05,
            shuffle_dataset=False,
            max_steps=1,
            optim="sgd",
        )
        trainer.train()
        results.append((losses(trainer)[0], trainer.state.log_history[0]["grad_norm"], weights(trainer)))
    for loss, norm, after in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        assert norm == pytest.approx(results[0][1], rel=1e-4)
        assert torch.allclose(after, results[0][2], atol=1e-5)


SCHEDULES = [  # gas, spg, mu -> generations in 4 optimiser steps, old log-probs stored
    (4, 4, 1, 4, False),
    (4, 2, 1, 8, False),
    (2, 4, 1, 2, True),
    (3, 2, 1, 6, True),
    (4, 4, 2, 2, True),
]


@pytest.mark.parametrize(("gas", "spg", "mu", "generations", "stored"), SCHEDULES)
def test_r1_the_schedule_generates_as_often_as_its_table_says(
    tiny_tokenizer, tmp_path, gas, spg, mu, generations, stored
):
    engine = scripted()
    trainer = grpo(
        tmp_path,
        tiny_tokenizer,
        engine=engine,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=gas,
        steps_per_generation=spg,
        num_iterations=mu,
        max_steps=4,
        num_train_epochs=50,
        data=prompts(64),
    )
    seen = []
    original = trainer.compute_loss

    def spy(model, batch, *args, **kwargs):
        seen.append(batch.old_logp is not None)
        return original(model, batch, *args, **kwargs)

    trainer.compute_loss = spy
    trainer.train()
    assert len(engine.requests) == generations * spg  # One prompt of 4 completions a slice.
    assert set(seen) == {stored}


def test_the_ratio_is_one_when_stored_logps_are_fresh(tiny_tokenizer, tmp_path):
    """The old log-probs and the policy's own must come from the same forward, or every ratio carries noise."""
    trainer = grpo(tmp_path, tiny_tokenizer, steps_per_generation=2, per_device_train_batch_size=4, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["ratio/max"] == pytest.approx(1.0, abs=1e-5)


def test_r10_a_run_that_was_stopped_equals_one_that_was_not(tiny_tokenizer, tmp_path):
    settings = {
        "engine": "native",
        "rollout_engine": "native",
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 6,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "linear",
        "beta": 0.05,
        "data": prompts(12),
        "num_train_epochs": 9,
    }
    whole = grpo(tmp_path / "whole", tiny_tokenizer, **settings)
    whole.train()
    part = grpo(tmp_path / "part", tiny_tokenizer, **settings)
    part.train(
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2")
    )  # In the middle of a generation's slices.
    steps = {row["step"]: row["loss"] for row in whole.state.log_history if "loss" in row}
    again = {row["step"]: row["loss"] for row in part.state.log_history if "loss" in row}
    assert set(again) == set(steps)
    assert all(again[s] == steps[s] for s in (3, 4, 5, 6))
    assert torch.equal(weights(whole), weights(part))
    assert whole.counters == part.counters


def test_lora_takes_the_bare_model_as_its_reference(tiny_tokenizer, tmp_path):
    from peft import LoraConfig

    trainer = grpo(
        tmp_path,
        tiny_tokenizer,
        beta=0.1,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        max_steps=3,
    )
    assert trainer.reference.copy is None
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    trainer.train()
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-5
    assert all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if "lora" not in n)


def test_an_adapter_that_came_trained_is_its_own_reference(tiny_tokenizer, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_model(len(tiny_tokenizer)), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    trainer = grpo(tmp_path, tiny_tokenizer, model=model, beta=0.1, max_steps=2)
    frozen = {n: p.clone() for n, p in model.named_parameters() if ".ref." in n}
    assert frozen
    trainer.train()
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[1] > 0
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if ".ref." in n)


def test_r37_the_reference_is_the_model_that_was_given_not_the_one_on_disk(tiny_tokenizer, tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)  # As a fine-tuning in memory would.
    trainer = grpo(tmp_path, tiny_tokenizer, model=model, beta=0.1, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)


def test_truncated_completions_can_be_left_out(tiny_tokenizer, tmp_path):
    never = scripted(stop=5)  # Token 5 does not end anything: all rows are truncated.
    trainer = grpo(tmp_path, tiny_tokenizer, engine=never, mask_truncated_completions=True)
    before = weights(trainer)
    trainer.train()
    assert torch.equal(before, weights(trainer))
    assert trainer.state.log_history[0]["completions/masked_ratio"] == 1.0


def test_evaluation_has_its_own_group_size_and_prefix(tiny_tokenizer, tmp_path):
    engine = scripted()
    trainer = grpo(
        tmp_path,
        tiny_tokenizer,
        engine=engine,
        eval_dataset=prompts(6),
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=1,
    )
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_reward", "eval_completions/mean_length"} <= set(metrics)
    assert [r.n for r in engine.requests] == [2] * 6


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_batches_of_an_evaluation_draw_apart_and_an_evaluation_repeats(tiny_tokenizer, tmp_path, engine):
    """With one draw for all batches, the mean of a thousand rows would be no surer than that of a batch."""
    seen = []

    def lengths(completion_ids, **_):
        seen.extend(map(tuple, completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "What?"}]}] * 6)
    options = {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "check_rewards": False}
    trainer = grpo(
        tmp_path, tiny_tokenizer, engine="native", rollout_engine=engine, rewards=lengths, eval_dataset=data, **options
    )
    trainer.evaluate()
    assert len(seen) == len(set(seen)) == 12
    trainer.evaluate()
    assert seen[:12] == seen[12:]


def test_evaluation_with_one_completion_a_prompt_has_rewards_and_no_advantage(tiny_tokenizer, tmp_path):
    data = {"eval_dataset": prompts(4), "num_generations_eval": 1, "per_device_eval_batch_size": 2}
    metrics = grpo(tmp_path / "a", tiny_tokenizer, **data).evaluate()
    assert metrics["eval_advantages/abs_max"] == metrics["eval_loss"] == 0
    assert metrics["eval_reward"] > 0
    trainer = grpo(tmp_path / "b", tiny_tokenizer, beta=0.5, **data)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(0.5 * metrics["eval_kl"], rel=1e-4) != 0  # The KL is all that is left.


def test_the_first_arguments_may_be_given_by_position_as_the_peer_has_them(tiny_tokenizer, tmp_path):
    model, args = build_model(len(tiny_tokenizer)), grpo_args(tmp_path, per_device_eval_batch_size=4)
    trainer = GRPOTrainer(
        model, count_a, args, prompts(8), prompts(4), tiny_tokenizer, None, [], rollout_engine=scripted()
    )
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (8, 4)
    assert trainer.processing_class is tiny_tokenizer


def test_several_evaluation_sets_keep_their_names_apart(tiny_tokenizer, tmp_path):
    trainer = grpo(
        tmp_path, tiny_tokenizer, eval_dataset={"a": prompts(2), "b": prompts(4)}, per_device_eval_batch_size=4
    )
    metrics = trainer.evaluate()
    assert {"eval_a_reward", "eval_b_reward"} <= set(metrics)


def test_a_stream_trains_like_its_rows(tiny_tokenizer, tmp_path):
    rows = grpo(tmp_path / "a", tiny_tokenizer, shuffle_dataset=False)
    rows.train()
    stream = grpo(tmp_path / "b", tiny_tokenizer, shuffle_dataset=False, data=prompts().to_iterable_dataset())
    stream.train()
    assert losses(rows) == losses(stream)


def test_the_run_folder_holds_the_record(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, save_strategy="steps", save_steps=2)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][:2] == [1, 2]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["seed"] == 7
    assert len(manifest["chat_template_sha256"]) == 64
    assert manifest["versions"]["torch"] == torch.__version__.split("+")[0] or manifest["versions"]["torch"]
    table = pq.read_table(tmp_path / "completions.parquet").to_pylist()
    assert len(table) == 16
    assert {"step", "prompt", "completion", "count_a", "advantage"} <= set(table[0])
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_step_and_saves(tiny_tokenizer, tmp_path, number):
    child = []

    def press(completions, **kw):
        if trainer_box and trainer_box[0].state.global_step == 1:
            child.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)))
            child[0].start()
            signal.raise_signal(number)
        return count_a(completions, **kw)

    before = signal.signal(number, signal.default_int_handler)  # A background job has Ctrl-C ignored.
    trainer_box = []
    trainer = grpo(tmp_path, tiny_tokenizer, rewards=press, max_steps=5, save_strategy="steps", save_steps=100)
    trainer_box.append(trainer)
    trainer.train()
    assert trainer.interrupt.requested
    assert trainer.state.global_step == 2
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()
    assert signal.signal(number, before) is signal.default_int_handler
    child[0].terminate()  # What a reward function forks can be ended as ever.
    child[0].join(5)
    assert child[0].exitcode == -signal.SIGTERM


def test_seeds_differ_by_call_and_repeat_by_run(tiny_tokenizer, tmp_path):
    class Spy(RolloutEngine):
        name, seeds = "spy", []

        def __init__(self):
            self.inner = scripted()

        def generate(self, requests, sampling: Sampling):
            self.seeds.append(sampling.seed)
            return self.inner.generate(requests, sampling)

        def load_weights(self, *_): ...

        def close(self): ...

    grpo(tmp_path, tiny_tokenizer, engine=Spy(), max_steps=3).train()
    assert len(set(Spy.seeds)) == 3
    first = list(Spy.seeds)
    Spy.seeds.clear()
    grpo(tmp_path, tiny_tokenizer, engine=Spy(), max_steps=3).train()
    assert Spy.seeds == first


# Refused before the model loads -------------------------------------------------------------------------------------


@pytest.fixture
def unloadable(tiny_tokenizer, tmp_path):
    """A model folder that would fail to load: only what is checked before can raise anything else."""
    folder = tmp_path / "model"
    tiny_tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(build_model(len(tiny_tokenizer)).config.to_json_string())
    return str(folder)


def refused(error, match, model, tmp_path, data=None, rewards=count_a, **settings):
    with pytest.raises(error, match=match):
        GRPOTrainer(
            model,
            rewards,
            grpo_args(tmp_path / "out", **settings),
            train_dataset=data if data is not None else prompts(),
        )


def rows(*values):
    import datasets

    return datasets.Dataset.from_list([{"prompt": v} for v in values])


def test_bad_prompts_are_refused_before_the_model_loads(unloadable, tmp_path):
    import datasets

    good = [{"role": "user", "content": "x"}]
    cases = [
        (
            datasets.Dataset.from_list([{"text": "a"}]),
            "no 'prompt' column, which online methods need. Its columns are \\['text'\\]",
        ),
        (rows(good, [], good), "row 1, column 'prompt': it is an empty list of messages"),
        (rows("a", "", "b"), "row 1, column 'prompt': it is empty"),
        (datasets.Dataset.from_list([]), "train_dataset is empty"),
    ]
    for data, match in cases:
        refused(DataError, match, unloadable, tmp_path, data=data, preflight="off")
    refused(PreflightError, r"PT-D030: 1 of 3 rows .* First rows: 1\.", unloadable, tmp_path, data=cases[1][0])


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        ([1.0], "returned 1 rewards for 4"),
        (["good", "bad"] * 2, "returned 'good' .str."),
        ([float("nan")] * 4, "returned nan for row 0"),
    ],
)
def test_a_broken_reward_is_refused_before_the_model_loads(unloadable, tmp_path, returned, match):
    refused(RewardError, match, unloadable, tmp_path, rewards=lambda **_: returned)


def test_a_processing_class_that_is_no_tokenizer_is_refused(unloadable, tmp_path):
    with raises(TypeError, "processing_class"):
        GRPOTrainer(unloadable, count_a, grpo_args(tmp_path), train_dataset=prompts(), processing_class="gpt2")


def test_an_evaluation_set_without_the_column_of_a_reward_is_refused(tiny_tokenizer, tmp_path):
    def needs(completions, answer, **_):
        return [0.0] * len(completions)

    with raises(RewardError, "eval_dataset", "Fix: add the column", "'needs' needs the column 'answer'", "are []"):
        grpo(tmp_path, tiny_tokenizer, rewards=needs, eval_dataset=prompts().remove_columns("answer"))


def test_a_prompt_too_long_for_the_model_is_found_in_any_row_of_both_sets(tiny_tokenizer, tmp_path):
    rows = prompts(400).to_list()
    rows[399]["prompt"][0]["content"] = "word " * 2000
    long = datasets.Dataset.from_list(rows)
    limit = build_model(len(tiny_tokenizer)).config.max_position_embeddings
    for name, given in (("train_dataset", {"data": long}), ("eval_dataset", {"eval_dataset": long})):
        with pytest.raises(
            DataError, match=rf"{name} row 399: a prompt of \d+ tokens .* context of {limit} .*1 rows are too long"
        ):
            grpo(tmp_path, tiny_tokenizer, engine="native", **given)
    del rows[399]
    grpo(tmp_path, tiny_tokenizer, engine="native", data=datasets.Dataset.from_list(rows))


def test_a_reward_that_needs_a_missing_column_is_told(unloadable, tmp_path):
    def needs(completions, solution, **_):
        return [0.0] * len(completions)

    refused(RewardError, "'needs' needs the column 'solution'", unloadable, tmp_path, rewards=needs)


def test_r5_too_few_prompts_are_refused_with_the_arithmetic(unloadable, tmp_path):
    refused(
        ConfigError,
        "has 3 prompts, but a generation batch takes 4",
        unloadable,
        tmp_path,
        data=prompts(3),
        per_device_train_batch_size=16,
    )


def test_a_folder_without_tokenizer_or_template_is_refused(tiny_tokenizer, unloadable, tmp_path):
    from pathlib import Path

    refused(ModelError, "no chat template", _without(unloadable, "chat_template.jinja"), tmp_path)
    for path in Path(unloadable).glob("token*"):
        path.unlink()
    refused(ModelError, "has no tokenizer", unloadable, tmp_path)
    refused(ModelError, "has no config.json", str(tmp_path), tmp_path)
    refused(ModelError, "was not found", str(tmp_path / "nowhere"), tmp_path)


def _without(folder, name):
    from pathlib import Path

    Path(folder, name).unlink()
    return folder


def test_an_unwritable_output_dir_is_refused(unloadable, tmp_path):
    (tmp_path / "out").write_text("a file, not a folder")
    refused(ConfigError, "output_dir=.*cannot be written", unloadable, tmp_path)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"loss_type": "gpro"}, r"loss_type='gpro' is not known \(did you mean 'grpo'\?\)"),
        (
            {"num_generations": 3},
            r"8 completions .*1 process .*num_generations=3.*set num_generations to one of 2, 4, 8, or keep num_generations=3 ",
        ),
        (
            {"per_device_train_batch_size": 1, "num_generations": 8},
            "1 process .*keep num_generations=8 and set per_device_train_batch_size to 8",
        ),
        ({"num_generations": 1}, "num_generations=1 must be at least 2"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_entropy_quantile": 7}, "top_entropy_quantile=7"),
        ({"loss_type": "cispo"}, "epsilon_high=5.0"),
        ({"loss_type": "luspo"}, "importance_sampling_level='token'"),
        ({"generation_batch_size": 12}, "must be a multiple of .* = 8. Fix: set it to 8 or 16"),
        ({"generation_batch_size": 16, "steps_per_generation": 4}, "contradict each other"),
        ({"generation_kwargs": {"do_sample": False}}, "do_sample"),
        ({"sync_ref_model": True}, "no reference model"),
        ({"rollout_engine": "natve"}, "did you mean 'native'"),
        ({"gradient_checkpointing": True, "activation_checkpointing": False}, "different values"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"scale_rewards": "grup"}, "did you mean 'group'"),
        (
            {"eval_strategy": "steps", "per_device_eval_batch_size": 6, "do_eval": True},
            "is not a multiple of the group size 4",
        ),
    ],
)
def test_bad_settings_are_refused_when_the_config_is_made(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match):
        grpo_args(tmp_path, **settings)


def test_defaults_are_the_peer_s(tmp_path):
    args = GRPOConfig(str(tmp_path))
    expected = {
        "learning_rate": 1e-6,
        "logging_steps": 10,
        "num_generations": 8,
        "max_completion_length": 512,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "num_iterations": 1,
        "importance_sampling_level": "token",
        "mask_truncated_completions": False,
        "gradient_checkpointing": True,
        "remove_unused_columns": False,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "top_entropy_quantile": 1.0,
        "multi_objective_aggregation": "sum_then_normalize",
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
    }
    assert {k: getattr(args, k) for k in expected} == expected
    assert GRPOConfig(str(tmp_path), scale_rewards=False).scale_rewards == "none"
