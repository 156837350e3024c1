"""Evaluation of every trainer: what is counted, and what a user's metrics are shown."""

import random

import numpy as np
import pytest
import torch

from posttrain.data.samplers import EvalShard
from posttrain.errors import ConfigError
from tests.methods.every_trainer import EVERY, OFFLINE, PAIRED, data, every

everyone = pytest.mark.parametrize("kind", sorted(EVERY))


@pytest.fixture
def tokenizer(tiny_tokenizer):
    tiny_tokenizer.pad_token = "<|endoftext|>"
    return tiny_tokenizer


@pytest.mark.parametrize("count", range(1, 14))
@pytest.mark.parametrize(("size", "world", "group"), [(2, 2, 1), (3, 2, 1), (4, 3, 2), (1, 4, 1), (2, 2, 3)])
def test_every_row_goes_to_one_process_and_all_have_equally_many_batches(count, size, world, group):
    rows = list(range(count * group))
    parts = [list(EvalShard(size, world, rank, group).parts(rows)) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1
    rounds = [row for batches in zip(*parts, strict=True) for batch in batches for row in batch]
    assert rounds == rows


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_evaluation_keeps_its_last_batch_when_training_drops_it(kind, tokenizer, tmp_path):
    """An evaluation without a batch would report the loss 0, and `load_best_model_at_end` would choose by it."""
    settings = {"dataloader_drop_last": True, "per_device_eval_batch_size": 8}
    trainer = every(kind, tmp_path, tokenizer, eval_dataset=data(kind, 3), **settings)
    assert trainer.evaluate()["eval_loss" if kind == "sft" else "eval_completions/mean_length"] > 0


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "kto"])
def test_a_training_set_whose_only_batch_is_dropped_is_refused(kind, tokenizer, tmp_path):
    settings = {"dataloader_drop_last": True, "per_device_train_batch_size": 8}
    with pytest.raises(ConfigError, match=r"has 3 rows, and a batch on 1 ranks has 8"):
        every(kind, tmp_path, tokenizer, train=data(kind, 3), **settings)


def test_inference_restores_the_mode_of_each_module(tokenizer, tmp_path):
    run = every("sft", tmp_path, tokenizer).run
    frozen = run.model.train().model.norm.eval()
    with run.inference() as model:
        assert not any(module.training for module in model.modules())
    assert run.model.training and run.model.lm_head.training and not frozen.training


@pytest.mark.matrix
@everyone
@pytest.mark.parametrize("stream", [False, True])
def test_speeds_count_rows_of_the_dataset_and_batches(kind, stream, tokenizer, tmp_path):
    trainer = every(kind, tmp_path, tokenizer, per_device_eval_batch_size=2)
    rows = data(kind, 5)
    if stream and kind == "a2po":
        pytest.skip("A2PO refuses streams")
    found = trainer.evaluate(rows.to_iterable_dataset() if stream else rows)
    seconds = found["eval_runtime"]
    drawn = 5 * trainer.group_size("eval") if hasattr(trainer, "group_size") else 5
    assert found["eval_samples_per_second"] * seconds == pytest.approx(5, rel=0.05)
    assert found["eval_steps_per_second"] * seconds == pytest.approx(-(-drawn // 2), rel=0.05)


@pytest.mark.matrix
@everyone
def test_an_evaluation_leaves_the_random_numbers_of_training_as_they_were(kind, tokenizer, tmp_path):
    """Else dropout, and whatever a user draws, depend on how often is evaluated."""
    trainer = every(kind, tmp_path, tokenizer, per_device_eval_batch_size=2)
    torchs, numpys, pythons = torch.get_rng_state(), np.random.get_state(), random.getstate()
    trainer.evaluate(data(kind, 5))
    assert torch.equal(torchs, torch.get_rng_state()) and pythons == random.getstate()
    assert np.array_equal(numpys[1], np.random.get_state()[1]) and numpys[2] == np.random.get_state()[2]


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "kto"])
def test_metrics_get_inputs_and_losses_where_they_are_asked_for(kind, tokenizer, tmp_path):
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {"rows": len(prediction.label_ids)}

    trainer = every(
        kind, tmp_path, tokenizer, eval_dataset=data(kind, 5), compute_metrics=metrics, include_for_metrics=["inputs", "loss"],
        per_device_eval_batch_size=2,
    )  # fmt: skip
    found = trainer.evaluate()
    (shown,) = seen
    answers = 2 if kind in PAIRED else 1
    assert len(shown.inputs) == 5 * answers
    assert len(shown.losses) == found["eval_rows"]
    longest = max(
        len(row.prompt_ids) + len(ids) for row in trainer.rows(list(trainer.eval_dataset)) for ids in row.completions
    )
    assert shown.inputs.shape == (5 * answers, longest)
    if kind not in ("kto", "dpo"):  # Batches of 2, 2 and 1 rows have a loss each; these two begin at a constant.
        assert len(set(shown.losses.tolist())) == 3


def test_the_losses_of_metrics_are_those_of_their_batches(tokenizer, tmp_path):
    seen = []
    trainer = every(
        "dpo", tmp_path, tokenizer, eval_dataset=data("dpo", 4), include_for_metrics=["loss"], per_device_eval_batch_size=1,
        compute_metrics=seen.append, beta=5.0,  # A function that returns nothing gives no metrics.
    )  # fmt: skip
    whole = trainer.evaluate()["eval_loss"]
    assert np.mean(seen[0].losses) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_batch_eval_metrics_are_called_once_a_batch_and_summarise_at_the_end(kind, tokenizer, tmp_path):
    calls, counted = [], []

    def metrics(prediction, compute_result=False):
        calls.append(compute_result)
        counted.append(len(prediction.label_ids))
        return {"rows": sum(counted)} if compute_result else {}

    trainer = every(
        kind, tmp_path, tokenizer, eval_dataset=data(kind, 5), compute_metrics=metrics, batch_eval_metrics=True,
        per_device_eval_batch_size=2,
    )  # fmt: skip
    assert trainer.evaluate()["eval_rows"] == 5
    assert calls == [False, False, True]
    assert counted == [2, 2, 1]


def test_logits_may_be_preprocessed_to_several_tensors(tokenizer, tmp_path):
    shapes = {}

    def metrics(prediction):
        best, top = prediction.predictions
        shapes.update(best=best.shape, top=top.shape, kind=best.dtype.kind)
        return {"ok": 1.0}

    trainer = every(
        "sft", tmp_path, tokenizer, eval_dataset=data("sft", 5), compute_metrics=metrics, per_device_eval_batch_size=2,
        preprocess_logits_for_metrics=lambda logits, labels: (logits.argmax(-1), logits.amax((1, 2))),
    )  # fmt: skip
    assert trainer.evaluate()["eval_ok"] == 1.0
    longest = max(len(row["input_ids"]) for row in trainer.eval_dataset)
    assert shapes == {"best": (5, longest), "top": (5,), "kind": "i"}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sorted(OFFLINE))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_that_ends_begins_again_and_no_step_is_empty(kind, accumulation, tokenizer, tmp_path):
    """Three batches of two a pass over the stream: with two micro-batches a step, every second step has one."""
    steps = 7 if accumulation == 1 else 5  # The stream ends twice.
    trainer = every(
        kind, tmp_path, tokenizer, train=data(kind, 6).to_iterable_dataset(), max_steps=steps,
        gradient_accumulation_steps=accumulation, learning_rate=1e-4,
    )  # fmt: skip
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    answers = {"dpo": 2, "cpo": 2, "orpo": 2, "reward": 2, "tpo": 3}.get(kind, 1)
    assert trainer.state.global_step == len(logs) == steps
    rows = [2] * 7 if accumulation == 1 else [4, 2, 4, 2, 4]
    assert [row["documents"] for row in logs] == [n * answers for n in rows]
    assert all(row["grad_norm"] >= 0 for row in logs)


def test_a_step_cut_short_by_the_end_of_a_stream_leaves_no_gradient_behind(tokenizer, tmp_path):
    """The plain truth: the gradient of the third step is that of its own rows at the weights of the second."""
    settings = {"learning_rate": 0.0, "max_grad_norm": 1e9, "gradient_accumulation_steps": 2, "optim": "sgd"}
    stream = data("sft", 6).to_iterable_dataset()
    trainer = every("sft", tmp_path / "stream", tokenizer, train=stream, max_steps=3, **settings)
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert norms[2] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("kind", sorted(OFFLINE))
def test_rows_of_like_length_come_together(kind, tokenizer, tmp_path):
    trainer = every(
        kind, tmp_path, tokenizer, train=data(kind, 8), train_sampling_strategy="group_by_length", max_steps=2,
        eval_dataset=data(kind, 5),
    )  # fmt: skip
    columns = [name for name in trainer.train_dataset.column_names if name.endswith("_ids")]
    lengths = [sum(len(row[name]) for name in columns) for row in trainer.train_dataset]
    order = [lengths[i] for i in trainer._get_train_sampler()]
    assert sorted(order) == sorted(lengths)
    assert order[0] == max(lengths)
    trainer.train()
    assert trainer.state.global_step == 2
    assert np.isfinite(trainer.evaluate()["eval_loss"])
