"""Checkpoints of ZeRO where something is wrong with them, on another number of processes; with DeepSpeed installed alone.

That whole ones go on is shown by `tests.matrix`, in the cells ``resume``.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.matrix import zero
from tests.ranks import leave, part, run_ranks

SETTINGS = {
    "max_steps": 4,
    "use_cpu": True,
    "save_strategy": "steps",
    "save_steps": 1,
    "per_device_train_batch_size": 2,
}
KINDS = {"adam": {}, "momentum": {"optim": "sgd", "optim_args": "momentum=0.9"}}


def trainer_of(folder, stage, **settings):
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from tests.conftest import build_tokenizer
    from tests.methods.helpers import chats, sft

    unset_hf_deepspeed_config()
    tokenizer = build_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    return sft(folder, tokenizer, data=chats(24), deepspeed=zero(stage), **(SETTINGS | settings))


def write(folder, stage):
    """Two ranks: a run with Adam that keeps its best step and the last, one with momentum, and what the first ended at."""
    from tests.methods.helpers import chats

    best = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    best |= {"greater_is_better": True, "save_total_limit": 2}  # The worst is the first.
    trainer = trainer_of(folder / "adam", stage, eval_dataset=chats(1), **best)
    trainer.train()
    ended = trainer.evaluate()["eval_loss"]
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    trainer_of(folder / "momentum", stage, **KINDS["momentum"]).train()
    if trainer.accelerator.is_main_process:
        leave({"best": losses[0], "ended": ended, "losses": losses})


def resume(folder, stage, *cases):
    """Errors of resuming each checkpoint, by its path; an empty one where there is none."""
    from accelerate import PartialState

    found = {}
    for case in cases:
        kind = KINDS[Path(case).parent.name]
        try:
            trainer_of(folder / "resumed", stage, **kind).train(resume_from_checkpoint=case)
            found[case] = ""
        except Exception as error:
            found[case] = f"{type(error).__name__}: {error}"
    if PartialState().is_main_process:
        leave(found)


@pytest.fixture(scope="module", params=[2, 3])
def written(request, tmp_path_factory):
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("zero")
    arguments = ("tests.models.test_zero", "write", folder, request.param)
    return folder, request.param, run_ranks(*arguments, processes=2, folder=folder, python=sys.executable)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_best_model_is_loaded_and_kept_with_the_last_where_a_set_leaves_a_rank_without_rows(written):
    folder, _, found = written
    assert found["ended"] == found["best"] == max(found["losses"])
    assert sorted(path.name for path in (folder / "adam").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-4"]


@pytest.mark.slow
@pytest.mark.distributed
def test_what_cannot_be_read_or_joined_is_an_error_on_all_ranks_and_half_a_conversion_is_made_anew(written):
    folder, stage, _ = written
    whole = folder / "adam" / "checkpoint-1"
    cases = {name: folder / name / "adam" / "checkpoint-1" for name in ("damaged", "short", "half")}
    for place in cases.values():
        shutil.copytree(whole, place)
    shard = next(cases["damaged"].glob("global_step1/*zero_pp_rank_1_*optim_states.pt"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    next(cases["short"].glob("global_step1/*zero_pp_rank_1_*optim_states.pt")).unlink()
    (cases["half"] / "global_step1_universal" / "zero").mkdir(parents=True)
    cases["momentum"] = folder / "momentum" / "checkpoint-1"
    arguments = ("tests.models.test_zero", "resume", folder, stage, *cases.values())
    found = run_ranks(*arguments, processes=1, folder=folder, python=sys.executable)
    said = {name: found[str(place)] for name, place in cases.items()}
    assert (
        said["damaged"].startswith("CheckpointError: the shards of 2 processes")
        and "Fix: resume on 2" in said["damaged"]
    )
    assert "has 1 of 2 shards" in said["short"]
    assert "has the states ['momentum_buffer']" in said["momentum"]
    assert said["half"] == ""
    for place in cases.values():
        assert not list(place.glob("*universal"))
    arguments = (*arguments[:4], cases["damaged"])
    found = run_ranks(*arguments, processes=2, folder=folder, python=sys.executable)
    assert found[str(cases["damaged"])].startswith("CheckpointError: process 1: ")


if __name__ == "__main__":
    torch.manual_seed(0)
    action, place, which, *others = sys.argv[1:]
    globals()[action](Path(place), int(which), *others)
    part()
    os._exit(0)  # Threads of an engine that is not the last abort at the interpreter's end.
