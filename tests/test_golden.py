"""Curves of twenty steps stay what they are while code moves, and so do the names of all that is logged in them."""

import json

import pytest
import torch

from tests import surface
from tests.golden import FILE, NAMES, measure

# The file was written on a CPU with AVX512; other CPUs order their sums otherwise (seen: 2e-6 on AVX2, and with AMX).
CLOSE = 3e-6 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1e-5


def marked(name):
    return pytest.param(name, marks=pytest.mark.distributed) if name.endswith("@2") else name


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_twenty_steps_of_a_trainer_are_what_they_were(name):
    known, found = json.loads(FILE.read_text())[name], measure(name)
    assert found.keys() == known.keys()
    assert len(known["loss"]) == 20
    assert len(set(known["loss"])) > 10, "a curve that does not move pins nothing"
    for metric, values in known.items():
        assert found[metric] == pytest.approx(values, rel=CLOSE, abs=CLOSE), metric


@pytest.mark.timeout(900)  # Of all runs where it is asked alone; behind the curves above they are there.
def test_a_step_of_every_trainer_logs_what_it_did():
    before, now = json.loads(surface.FILE.read_text())["metrics"], surface.metrics()
    assert now.keys() == before.keys()
    for name in now:
        assert now[name] == before[name], name
