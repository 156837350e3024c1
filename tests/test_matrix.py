"""The short form of `tests.matrix`: sharded training on two processes is that of one, and goes on from its checkpoints on four."""

import os

import filelock
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.matrix import TOLERANCE, compared, run, saved

pytestmark = [pytest.mark.matrix, pytest.mark.slow]
CELLS, RESUME = (
    ["sft/plain", "dpo/lora", "grpo/checkpointing", "dpo qwen2_vl/plain", "sft llava/frozen"],
    "resume/FSDP2",
)
RESUME_GRPO = "resume grpo/FSDP2"
SAMPLED = "grpo native/plain"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Made once, whichever processes of the session want it: it takes a minute of both cores."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / "matrix"
    resumed = [RESUME, RESUME_GRPO]
    cells = {
        "FSDP2": [*CELLS, SAMPLED, *resumed],
        "FSDP2-4": resumed,
        "one": [*CELLS, *resumed],
        "DDP": [SAMPLED, *resumed],
    }
    with filelock.FileLock(root / "matrix.lock"):
        return {way: run(way, of_way, folder / way) for way, of_way in cells.items()}, folder


@pytest.mark.distributed
@pytest.mark.parametrize("cell", [*CELLS, SAMPLED])
def test_fsdp2_on_two_ranks_is_one_process(both, cell):
    """Losses, gradient norms, evaluation and saved weights; what ranks sample themselves is that of DDP.

    In the cells of vision-language models the second rank has no picture, in any step.
    """
    found, folder = both
    apart = compared(found, folder, "FSDP2", cell)
    assert isinstance(apart, dict), apart
    assert max(apart.values()) < TOLERANCE, apart


@pytest.mark.distributed
@pytest.mark.parametrize("cell", [RESUME, RESUME_GRPO])
@pytest.mark.parametrize("way", ["FSDP2-4", "DDP", "one"])
def test_four_ranks_two_without_shards_and_one_process_go_on_from_a_checkpoint_of_two(both, way, cell):
    found, folder = both
    apart = compared(found, folder, way, cell)
    assert isinstance(apart, dict), apart
    assert max(apart.values()) < TOLERANCE, apart


@pytest.mark.distributed
def test_sharded_ranks_that_resume_end_at_the_same_weights_bit_for_bit(both):
    _, folder = both
    place = folder / "FSDP2" / "resume" / "FSDP2"
    whole, resumed = saved(place / "whole" / "saved"), saved(place / "saved")
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert AutoModelForCausalLM.from_pretrained(place / "saved").num_parameters() > 0
