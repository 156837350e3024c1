"""Memory that a step frees stays with the process while a model trains on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from posttrain.models.memory import KeepHostMemory, _glibc, gradients_first
from tests import forks
from tests.conftest import build_model

SCRIPT = """
import resource, torch
from types import SimpleNamespace
from posttrain.models.memory import KeepHostMemory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        tensors = [torch.ones(16 * 2**20) for _ in range(2)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep, args = KeepHostMemory(), SimpleNamespace(device=torch.device("cpu"))
faults()
without = faults()
keep.on_train_begin(args, None, None)
faults()
kept = faults()
keep.on_train_end(args, None, None)
print(without, kept, faults())
"""


@pytest.mark.skipif(_glibc() is None, reason="another C library")
def test_pages_are_not_cleared_again_each_step_until_training_ends():
    done = forks.run(["-c", SCRIPT], check=True)
    without, kept, after = map(int, done.stdout.split())
    # Six tensors of 64 MB are 98,304 pages of 4 KB, or 192 of 2 MB and what lies beside them.
    assert without > 192
    assert kept < without / 10
    assert after > 192


def test_memory_of_an_accelerator_is_no_concern_of_it():
    keep = KeepHostMemory()
    keep.on_train_begin(SimpleNamespace(device=torch.device("meta")), None, None)
    assert not keep._kept


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"used": torch.nn.Linear(3, 2), "aside": torch.nn.Linear(3, 2), "frozen": torch.nn.Linear(3, 2)}
    )
    model["frozen"].requires_grad_(False)
    return model


def passes(model, count):
    for number in range(count):
        model["used"](torch.full((1, 3), 1.0 + number)).sum().backward()


def test_gradients_of_several_passes_are_the_same_and_weights_that_none_reaches_have_none():
    plain, first = small(), small()
    passes(plain, 2)
    with gradients_first(first, passes=2):
        assert all(p.grad is not None for p in first["aside"].parameters())
        assert all(p.grad is None for p in first["frozen"].parameters())
        passes(first, 2)
    for a, b in zip(plain.parameters(), first.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_gradients_of_earlier_micro_batches_are_kept_and_one_pass_makes_none_before_it():
    model = small()
    passes(model, 1)
    before = {p: p.grad.clone() for p in model["used"].parameters()}
    with gradients_first(model, passes=2):
        assert all(torch.equal(p.grad, before[p]) for p in model["used"].parameters())
    with gradients_first(model, passes=1):
        assert all(p.grad is None for p in model["aside"].parameters())


def test_a_zero_gradient_that_was_computed_stays():
    model = small()
    with gradients_first(model, passes=2):
        (0.0 * model["used"](torch.ones(1, 3))).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model["used"].parameters())


def test_wrapped_models_keep_gradients_where_their_wrapper_puts_them():
    model = small()
    with gradients_first(torch.nn.DataParallel(model), passes=2):
        assert all(p.grad is None for p in model.parameters())


def test_weights_that_are_sharded_in_place_keep_the_gradients_that_several_passes_add_up():
    """FSDP2 adds to the local part of a gradient, which the gradient itself does not count as a change."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = build_model(300)
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        ids = torch.randint(3, 300, (2, 7))
        with gradients_first(model, passes=2):
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None and p.grad.full_tensor().abs().sum() > 0 for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_a_system_without_a_c_library_to_ask_trains_as_it_is(monkeypatch):
    """On Windows ctypes cannot look for None at all."""

    def cdll(name):
        raise TypeError("argument of type 'NoneType' is not iterable")

    monkeypatch.setattr("ctypes.CDLL", cdll)
    keep = KeepHostMemory()
    keep.on_train_begin(SimpleNamespace(device=torch.device("cpu")), None, None)
    keep.on_train_end(SimpleNamespace(device=torch.device("cpu")), None, None)
