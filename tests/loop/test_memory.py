"""Out of memory: the pass is divided, and the step ends with the gradient it would have had."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from posttrain.loop.passes import divided
from posttrain.models import parallel
from tests.methods.helpers import chats, grpo, losses, sft, weights
from tests.methods.test_grpo_options import logs
from tests.methods.test_judged import make
from tests.wordings import raises


def runs_out(trainer, when, *, inside="forward"):
    """Raise once (or while ``when`` says so) in a forward pass, or in the middle of a backward pass."""
    inner_loss, inner_backward = trainer.compute_loss, trainer.accelerator.backward
    seen = []

    def compute_loss(model, batch, *args, **kwargs):
        seen.append(batch.input_ids.numel())
        if inside == "forward" and when(seen):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return inner_loss(model, batch, *args, **kwargs)

    def backward(loss, **kwargs):
        inner_backward(loss, **kwargs)
        if inside == "backward" and when(seen):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    trainer.compute_loss, trainer.accelerator.backward = compute_loss, backward
    return seen


SETTINGS = {"beta": 0.05, "optim": "sgd", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}


@pytest.mark.parametrize("inside", ["forward", "backward"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_a_divided_step_is_the_step_it_would_have_been(tiny_tokenizer, tmp_path, inside, loss_type, caplog):
    whole = grpo(tmp_path / "whole", tiny_tokenizer, loss_type=loss_type, **SETTINGS)
    whole.train()
    broken = grpo(tmp_path / "broken", tiny_tokenizer, loss_type=loss_type, **SETTINGS)
    seen = runs_out(
        broken, lambda calls: len(calls) == 2, inside=inside
    )  # In the second micro-batch of the first step.
    broken.train()
    assert len(seen) > 4
    assert "out of memory in a pass of" in caplog.text
    assert losses(broken) == pytest.approx(losses(whole), abs=1e-6)
    assert torch.allclose(weights(broken), weights(whole), atol=1e-6)
    first, expected = broken.state.log_history[0], whole.state.log_history[0]
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name in ("entropy", "kl", "clip_ratio/region_mean"):  # Each token counted once.
        assert first[name] == pytest.approx(expected[name], abs=1e-6), name
    assert first["memory/halvings"] == 1


def test_a_divided_pass_counts_once_for_the_entropy_that_steers(tiny_tokenizer, tmp_path):
    steered = SETTINGS | {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 100.0, "max_steps": 2}
    whole = grpo(tmp_path / "whole", tiny_tokenizer, **steered)
    whole.train()
    broken = grpo(tmp_path / "broken", tiny_tokenizer, **steered)
    runs_out(broken, lambda calls: len(calls) == 2, inside="backward")
    broken.train()
    one, other = ([row["policy_loss"] for row in logs(trainer)] for trainer in (broken, whole))
    assert one == pytest.approx(other, abs=1e-6)
    assert broken.run.progress.own.last == pytest.approx(whole.run.progress.own.last, rel=1e-6)


def test_a_pass_that_only_keeps_ranks_in_step_says_nothing(tiny_tokenizer, tmp_path, monkeypatch):
    found = []
    for more in (0, 1):
        trainer = grpo(tmp_path / str(more), tiny_tokenizer, max_row_tokens=64, entropy_coef=0.1, **SETTINGS)
        monkeypatch.setattr(parallel, "equal_passes", lambda count, accelerator, more=more: count + more)
        trainer.train()
        found.append(logs(trainer)[0])
    names = ("loss", "grad_norm", "entropy", "policy_loss", "kl")
    assert [found[1][name] for name in names] == pytest.approx([found[0][name] for name in names], rel=1e-5)


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_bco_moves_delta_by_all_rewards_of_a_step_that_is_divided(tiny_tokenizer, tmp_path, inside):
    whole = make("bco", tmp_path / "whole", tiny_tokenizer, optim="sgd", max_steps=3)
    whole.train()
    broken = make("bco", tmp_path / "broken", tiny_tokenizer, optim="sgd", max_steps=3)
    runs_out(broken, lambda calls: len(calls) == 2, inside=inside)  # In the only pass of the second step.
    broken.train()
    assert broken.run.progress.own.moments.count == whole.run.progress.own.moments.count == 24
    one, other = ([(row["loss"], row["delta"]) for row in logs(trainer)] for trainer in (broken, whole))
    assert one == [pytest.approx(pair, abs=1e-5) for pair in other]


def test_later_passes_are_small_enough_at_once(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, max_steps=3, per_device_train_batch_size=16, num_train_epochs=9)
    limit = []

    def too_large(calls):
        limit[:] = limit or [calls[0] * 3 // 4]
        return calls[-1] > limit[0]

    seen = runs_out(trainer, too_large)
    trainer.train()
    assert sum(size > limit[0] for size in seen) == 1
    assert trainer.state.global_step == 3


def test_what_never_fits_ends_the_run_with_the_error(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer)
    seen = runs_out(trainer, lambda calls: True)
    with raises(torch.OutOfMemoryError):
        trainer.train()
    assert len(seen) <= 4


def test_a_loss_of_the_whole_micro_batch_is_not_divided(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, loss_type="bnpo")
    runs_out(trainer, lambda calls: len(calls) == 1)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_a_pass_is_whole_where_its_gradients_are_not_at_the_parameters(tiny_tokenizer, tmp_path, kind):
    """DeepSpeed on one GPU would have stepped after each half of the last pass, and counted what a broken one left behind."""
    trainer = sft(tmp_path, tiny_tokenizer)
    (batch,) = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    assert len(divided(trainer.run, [batch], batch.input_ids.numel() // 2)) == 2
    accelerator = SimpleNamespace(num_processes=1, distributed_type=f"DistributedType.{kind}")
    assert divided(replace(trainer.run, accelerator=accelerator), [batch], 1) == [batch]


def test_supervised_training_is_divided_too(tiny_tokenizer, tmp_path):
    settings = {"optim": "sgd", "gradient_accumulation_steps": 2, "data": chats(16)}
    whole = sft(tmp_path / "a", tiny_tokenizer, **settings)
    whole.train()
    broken = sft(tmp_path / "b", tiny_tokenizer, **settings)
    runs_out(broken, lambda calls: len(calls) == 2, inside="backward")
    broken.train()
    assert losses(broken) == pytest.approx(losses(whole), abs=1e-6)
    assert torch.allclose(weights(broken), weights(whole), atol=1e-6)
