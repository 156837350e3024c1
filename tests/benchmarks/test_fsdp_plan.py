"""FSDP2 at many ranks, planned on one process: the shards are those that the memory estimate counts with."""

import json

import pytest

from benchmarks import fsdp_plan
from tests import forks


@pytest.mark.parametrize("world", fsdp_plan.WORLDS)
def test_the_estimate_counts_the_shards_that_fsdp_would_keep(world):
    planned = forks.run([fsdp_plan.__file__, "--one", "tiny", world], check=True).stdout
    found, said = json.loads(planned.splitlines()[-1]), fsdp_plan.estimated("tiny", world)
    for name, size in said.items():
        assert found[name] == pytest.approx(size, rel=0.15), name  # A vector of 64 numbers is padded to the ranks.
    layers = fsdp_plan.SHAPES["tiny"]["num_hidden_layers"]
    counts = {name: count for name, (count, _) in found["collectives"].items()}
    # Each layer twice and the rest once; gradients of each once.
    assert counts == {"allgather_base": 2 * layers + 1, "reduce_scatter_base": layers + 1}
