"""Memory that a step frees stays with the process while a model trains on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from posttrain.models.host_memory import KeepHostMemory, _glibc

SCRIPT = """
import resource, torch
from types import SimpleNamespace
from posttrain.models.host_memory import KeepHostMemory

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
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    without, kept, after = map(int, done.stdout.split())
    assert without > 20_000, (
        "six tensors of 64 MB are 98,304 pages of 4 KB, and fewer where the kernel gives larger ones"
    )
    assert kept < without / 100
    assert after > 20_000


def test_memory_of_an_accelerator_is_no_concern_of_it():
    keep = KeepHostMemory()
    keep.on_train_begin(SimpleNamespace(device=torch.device("meta")), None, None)
    assert not keep._kept
