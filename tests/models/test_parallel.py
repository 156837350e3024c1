"""What the trainers ask of several processes, seen from one."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.state import GradientState

from posttrain import ConfigError, SFTConfig
from posttrain.models import parallel


class Engine:
    """As much of DeepSpeed's engine as accelerate's loop touches; its own ``no_sync`` refuses stages 2 and 3."""

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Accelerate calls it."""

    def no_sync(self):
        raise AssertionError("no_sync is incompatible with gradient partitioning")


@pytest.mark.parametrize(("kind", "given"), [("DEEPSPEED", {"scale_wrt_gas": False}), ("MULTI_CPU", {}), ("FSDP", {})])
def test_a_loss_over_the_whole_step_is_not_divided_again(kind, given):
    seen = []
    accelerator = SimpleNamespace(distributed_type=f"DistributedType.{kind}", backward=lambda *a, **k: seen.append(k))
    parallel.backward(accelerator, torch.zeros(()))
    assert seen == [given]


def test_deepspeed_steps_after_the_last_pass_alone():
    """Accelerate steps at every backward while gradients are to be synchronised."""
    state = GradientState()
    state._set_sync_gradients(True)
    with parallel.no_sync(Engine(), last=False):
        assert not state.sync_gradients
    assert state.sync_gradients
    with parallel.no_sync(Engine(), last=True):
        assert state.sync_gradients


def test_gradients_leave_their_parameters_under_fsdp_and_every_stage_of_deepspeed():
    for kind, late in (("FSDP", True), ("DEEPSPEED", True), ("MULTI_GPU", False), ("NO", False)):
        assert parallel.is_prepared_late(SimpleNamespace(distributed_type=f"DistributedType.{kind}")) is late


@pytest.mark.parametrize("asked", ["config", "launcher"])
def test_fsdp_that_accelerate_makes_ddp_of_is_refused(asked, monkeypatch):
    """On a CPU it does so without a word."""
    args = SimpleNamespace(fsdp=asked == "config")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(asked == "launcher").lower())
    where = {"num_processes": 2, "device": torch.device("cpu")}
    with pytest.raises(ConfigError, match=r"accelerate uses MULTI_CPU on 'cpu', so each of the 2 .* Fix: "):
        parallel.refuse_lost_sharding(SimpleNamespace(distributed_type="DistributedType.MULTI_CPU", **where), args)
    parallel.refuse_lost_sharding(SimpleNamespace(distributed_type="DistributedType.FSDP", **where), args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    ddp = SimpleNamespace(distributed_type="DistributedType.MULTI_CPU", **where)
    parallel.refuse_lost_sharding(ddp, SimpleNamespace(fsdp=None))


def test_a_cpu_that_was_asked_for_decides_on_bf16_and_not_the_gpu_beside_it(monkeypatch, tmp_path):
    on_cpu = parallel.bf16_is_faster()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: not on_cpu)
    assert parallel.bf16_is_faster() == (not on_cpu)
    assert parallel.bf16_is_faster(on_cpu=True) == on_cpu
    assert SFTConfig(str(tmp_path), use_cpu=True).bf16 == on_cpu
