"""The functions of an optimizer step, called from outside of a training loop."""

import copy

import pytest
import torch

from posttrain.loop import step
from tests.conftest import build_model
from tests.methods.helpers import chats, sft, weights


@pytest.mark.parametrize("norm", [0.0, 0.05])
def test_a_loop_of_ones_own_takes_the_step_of_the_trainer(tiny_tokenizer, tmp_path, norm):
    """Two calls of `forward_backward` with the counts of both, then `optim_step`."""
    model = build_model(len(tiny_tokenizer))
    settings = {"max_steps": 1, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    settings |= {"max_grad_norm": norm, "warmup_steps": 0, "lr_scheduler_type": "constant", "data": chats(8)}
    inside = sft(tmp_path / "inside", tiny_tokenizer, model=copy.deepcopy(model), **settings)
    inside.train()
    outside = sft(tmp_path / "outside", tiny_tokenizer, model=copy.deepcopy(model), **settings)
    run = outside.run
    micro_batches = [batches for batches, _ in zip(outside.get_train_dataloader(), range(2), strict=False)]
    counts, *_ = step.count(run, [batch for micro in micro_batches for batch in micro], 0.0)
    run.model.train()
    found = [step.forward_backward(run, run.model, micro, counts, run.now()) for micro in micro_batches]
    metrics = step.optim_step(run, run.model, outside.create_optimizer())
    (logged,) = [row for row in inside.state.log_history if "grad_norm" in row]
    assert float(metrics["grad_norm"].value) == pytest.approx(logged["grad_norm"], rel=1e-5)
    assert sum(float(one.value) for one in found) == pytest.approx(logged["loss"], rel=1e-5)
    assert torch.allclose(weights(inside), weights(outside), atol=1e-7)
    assert not torch.equal(weights(inside), torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert all(p.grad is None for p in run.model.parameters())
