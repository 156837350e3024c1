"""Checkpoints are whole or not there, one run owns a folder, and nothing of another run is touched; with real processes."""

import errno
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from posttrain.errors import CheckpointError, ConfigError
from posttrain.loop import checkpoint as checkpoints
from posttrain.models import parallel
from posttrain.report.lock import LOCK, FolderLock
from tests.conftest import build_model
from tests.forks import Forked
from tests.methods.helpers import chats, grpo, losses, sft, weights
from tests.wordings import raises


def start(*arguments):
    return Forked(["-m", "tests.report.folder_worker", *arguments])


def wait_for(path, process=None, seconds=120):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not appear"
        assert process is None or process.poll() is None, f"ended with {process.poll()}"
        time.sleep(0.02)


def race(folder, result, start):
    """In another process: wait for the moment, try to take the folder, and hold it."""
    Path(f"{result}.ready").touch()
    while time.time() < float(start.read_text() or "inf") if start.is_file() else True:
        time.sleep(0.001)
    try:
        lock = FolderLock(folder)
        lock.acquire()
        text = f"won {lock.run}"
    except ConfigError as error:
        text = f"lost {error}"
    part = Path(f"{result}.part")
    part.write_text(text)
    part.rename(result)
    time.sleep(600)


def made(folder, step, run="a" * 8, when=None, complete=True):
    """A checkpoint on disk, by hand."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"x" * 10)
    if complete:
        checkpoints.mark(path, run)
        content = json.loads((path / checkpoints.MARKER).read_text())
        (path / checkpoints.MARKER).write_text(
            json.dumps(content | {"time": float(when if when is not None else step)})
        )
    return path


def names(folder):
    return sorted(p.name for p in folder.glob("checkpoint-*"))


# Two processes, one folder -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [False, True])
def test_of_processes_that_race_for_a_folder_exactly_one_gets_it(tmp_path, stale):
    folder, begin = tmp_path / "run", tmp_path / "begin"
    folder.mkdir()
    if stale:  # All see the lock of a dead process at once, the moment at which a take-over can be done twice.
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        owner = {"pid": dead.pid, "host": socket.gethostname(), "since": "2026-01-02 03:04:05", "run": "dead"}
        (folder / LOCK).write_text(json.dumps(owner))
    results = [tmp_path / f"result-{i}" for i in range(4)]
    fork = multiprocessing.get_context("fork")  # What is imported here need not be imported four times more.
    processes = [fork.Process(target=race, args=(folder, result, begin), daemon=True) for result in results]
    for process in processes:
        process.start()
    try:
        for result in results:
            wait_for(Path(f"{result}.ready"))
        part = tmp_path / "begin.part"
        part.write_text(str(time.time() + 0.3))
        part.rename(begin)
        for result in results:
            wait_for(result)
        said = [result.read_text() for result in results]
        winners = [i for i, text in enumerate(said) if text.startswith("won")]
        assert len(winners) == 1, said
        pid, run = processes[winners[0]].pid, said[winners[0]].split()[1]
        assert all(f"in use by process {pid} on " in text for i, text in enumerate(said) if i != winners[0])
        assert all(f"(run {run})" in text for i, text in enumerate(said) if i != winners[0])
        with pytest.raises(ConfigError, match=f"process {pid}"):
            FolderLock(folder).check()
        processes[winners[0]].kill()
        processes[winners[0]].join()
        FolderLock(folder).check()  # Whoever died holds nothing.
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_run_that_lost_its_folder_stops_before_it_writes(tmp_path, tiny_tokenizer):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=2, save_strategy="steps", save_steps=2)

    class Taken(type(trainer.callback_handler.callbacks[0]).__mro__[1]):
        def on_step_begin(self, args, state, control, **_):
            other = json.loads(trainer.record.lock.path.read_text()) | {"pid": 1, "host": "node7"}
            trainer.record.lock.path.write_text(json.dumps(other))

    trainer.add_callback(Taken())
    with raises(CheckpointError, "1", "node7"):
        trainer.train()
    assert names(tmp_path) == []
    assert (tmp_path / LOCK).exists()  # It is the other's.


# Killed while writing ------------------------------------------------------------------------------------------


def test_a_process_killed_while_it_writes_a_checkpoint_leaves_the_earlier_ones_and_no_half(tmp_path, tiny_tokenizer):
    folder = tmp_path / "run"
    process = start("save", folder)
    try:
        wait_for(folder / "stuck", process)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    (half,) = checkpoints.leftovers(folder)
    assert half.name.startswith("checkpoint-3.tmp-")
    assert [p.name for p in checkpoints.complete_checkpoints(folder)] == ["checkpoint-1", "checkpoint-2"]
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    resumed = sft(folder, tiny_tokenizer, **options)
    resumed.train(resume_from_checkpoint=True)
    assert checkpoints.leftovers(folder) == []
    assert names(folder) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    runs = {checkpoints.marker(path)["run"] for path in checkpoints.complete_checkpoints(folder)}
    assert len(runs) == 1  # A resumed run is the same run.
    whole = sft(tmp_path / "whole", tiny_tokenizer, **options)
    whole.train()
    assert losses(resumed) == losses(whole)
    assert (weights(resumed) == weights(whole)).all()


def test_a_full_disk_leaves_the_earlier_checkpoints_and_says_which_is_whole(tmp_path, tiny_tokenizer, monkeypatch):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=3, save_strategy="steps", save_steps=1)
    usual = trainer._save_optimizer_and_scheduler

    def full(target):
        if trainer.state.global_step == 2:
            Path(target, "optimizer.pt").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(target)

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full)
    with raises(CheckpointError, "step 2", "checkpoint-1"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]
    assert checkpoints.damage(tmp_path / "checkpoint-1") == ""


@pytest.mark.parametrize("stage", ["checkpoint", "model"])
def test_a_file_that_torch_or_safetensors_could_not_write_whole_is_told_and_is_no_checkpoint(
    tmp_path, tiny_tokenizer, stage
):
    """The system's own refusal: torch's writer does not pass on its reason."""
    trainer = sft(
        tmp_path, tiny_tokenizer, max_steps=1, save_strategy="steps" if stage == "checkpoint" else "no", save_steps=1
    )
    size = checkpoints.weight_bytes(trainer.model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if stage == "model":
        trainer.train()
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * (1.3 if stage == "checkpoint" else 0.5)), before[1]))
    with raises(CheckpointError, str(tmp_path)):
        try:
            trainer.train() if stage == "checkpoint" else trainer.save_model()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == checkpoints.leftovers(tmp_path) == []


# What a run may touch ------------------------------------------------------------------------------------------


def test_rotation_removes_its_own_marked_checkpoints_and_keeps_the_best(tmp_path):
    for step in (10, 20, 30, 40):
        made(tmp_path, step, run="mine")
    made(tmp_path, 5, run="other", when=50)
    made(tmp_path, 15, complete=False)
    best = str(tmp_path / "checkpoint-10")
    gone = checkpoints.rotate(tmp_path, "mine", 2, best)
    assert [path.name for path in gone] == ["checkpoint-20", "checkpoint-30"]
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-15", "checkpoint-40", "checkpoint-5"]
    assert [p.name for p in checkpoints.rotate(tmp_path, "mine", 1)] == ["checkpoint-10"]
    assert checkpoints.rotate(tmp_path, "mine", None) == checkpoints.rotate(tmp_path, "mine", 0) == []


def test_a_fresh_run_tells_of_older_checkpoints_and_its_rotation_leaves_them(tmp_path, tiny_tokenizer, caplog):
    sft(tmp_path, tiny_tokenizer, max_steps=2, save_strategy="steps", save_steps=1).train()
    before = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in names(tmp_path)}
    caplog.clear()
    second = sft(
        tmp_path,
        tiny_tokenizer,
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        learning_rate=1e-3,
    )
    with caplog.at_level(logging.WARNING, "posttrain"):
        second.train()
    assert "PT-L001" in caplog.text and "2 checkpoints of another run (checkpoint-1, checkpoint-2)" in caplog.text
    kept = [name for name in names(tmp_path) if ".of-" in name]
    assert len(kept) == 2
    for name in kept:
        assert (tmp_path / name / "model.safetensors").read_bytes() == before[name.partition(".of-")[0]]
    assert [name for name in names(tmp_path) if ".of-" not in name] == ["checkpoint-4"]
    findings = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    assert "PT-L001" in {row["code"] for row in findings}


def test_the_end_of_a_run_with_a_best_model_and_a_limit_of_one_leaves_other_runs_and_the_last_checkpoint(
    tmp_path, tiny_tokenizer
):
    made(tmp_path, 50, run="other", when=1)
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer.args.load_best_model_at_end = True
    first = transformers.TrainerCallback()
    first.on_step_end = lambda args, state, control, **_: vars(state).update(best_global_step=1)
    trainer.add_callback(first)
    trainer.train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-50"]
    assert trainer.args.save_total_limit == 1


def test_a_checkpoint_of_the_model_alone_is_no_place_to_go_on_from(tmp_path, tiny_tokenizer):
    """transformers would begin with a new optimizer, and its learning rate anew, without a word."""
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    sft(tmp_path, tiny_tokenizer, max_steps=2, **options).train()
    with raises(CheckpointError, "checkpoint-2", "contains no optimizer", "save_only_model"):
        sft(tmp_path, tiny_tokenizer, max_steps=4, **options).train(resume_from_checkpoint=True)


def test_resuming_takes_the_whole_checkpoint_that_was_written_last(tmp_path):
    made(tmp_path, 1000, run="old", when=1)
    made(tmp_path, 20, run="new", when=2)
    made(tmp_path, 30, run="new", complete=False)
    assert checkpoints.resolve_resume(True, tmp_path) == str(tmp_path / "checkpoint-20")
    (tmp_path / "checkpoint-20" / "model.safetensors").write_bytes(b"cut")
    assert checkpoints.resolve_resume(True, tmp_path) == str(tmp_path / "checkpoint-1000")
    assert checkpoints.resolve_resume(None, tmp_path) is checkpoints.resolve_resume(False, tmp_path) is None


def test_auto_resumes_where_there_is_a_checkpoint_and_begins_anew_where_there_is_none(tmp_path):
    assert checkpoints.resolve_resume("auto", tmp_path / "nowhere") is None
    assert checkpoints.resolve_resume("auto", tmp_path) is None
    made(tmp_path, 30, run="new", complete=False)
    assert checkpoints.resolve_resume("auto", tmp_path) is None  # Its writing was interrupted.
    made(tmp_path, 20, run="new", when=1)
    assert checkpoints.resolve_resume("auto", tmp_path) == str(tmp_path / "checkpoint-20")


def test_a_checkpoint_that_lost_something_is_refused_by_name_with_what_is_whole(tmp_path, caplog):
    broken, good = made(tmp_path, 2), made(tmp_path, 1)
    (broken / "model.safetensors").write_bytes(b"cut")
    with raises(CheckpointError, "3", "10", "checkpoint-1"):
        checkpoints.resolve_resume(str(broken), tmp_path)
    (broken / "model.safetensors").unlink()
    assert checkpoints.resolve_resume(str(broken), tmp_path) == str(
        broken
    )  # Removed on purpose, perhaps; it was named.
    assert "model.safetensors is missing since it was written" in caplog.text
    (good / checkpoints.MARKER).unlink()
    assert checkpoints.resolve_resume(str(good), tmp_path) == str(good)
    assert "no file COMPLETE" in caplog.text
    (broken / checkpoints.MARKER).unlink()
    with raises(CheckpointError, "2", "checkpoint-1", "checkpoint-2"):
        checkpoints.resolve_resume(True, tmp_path)
    with raises(CheckpointError):
        checkpoints.resolve_resume(str(tmp_path / "checkpoint-9"), tmp_path)
    made(tmp_path, 10)
    (tmp_path / "checkpoint-10" / checkpoints.MARKER).unlink()
    with pytest.raises(CheckpointError, match=r"resume_from_checkpoint='.*checkpoint-10'"):  # By number, not by letter.
        checkpoints.resolve_resume(True, tmp_path)


def test_flipped_bytes_are_refused_where_they_are_named_and_passed_over_where_they_are_not(tmp_path, caplog):
    good, flipped = made(tmp_path, 1, when=1), made(tmp_path, 2, when=2)
    file = flipped / "model.safetensors"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with raises(CheckpointError, "model.safetensors", "checkpoint-2", "checkpoint-1"):
        checkpoints.resolve_resume(str(flipped), tmp_path)
    assert checkpoints.resolve_resume(True, tmp_path) == str(good)
    assert "checkpoint-2 is skipped: the bytes of model.safetensors" in caplog.text
    shutil.rmtree(good)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is damaged: the bytes of model\.safetensors") as alone:
        checkpoints.resolve_resume(True, tmp_path)
    assert "have no file" not in str(alone.value)  # It has the file, and nobody interrupted its writing.


def test_a_run_goes_on_with_its_own_rows_alone_says_from_where_and_trains_no_step_beyond_its_last(
    tmp_path, tiny_tokenizer, caplog
):
    settings = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    sft(tmp_path, tiny_tokenizer, max_steps=2, **settings).train()
    again = sft(tmp_path, tiny_tokenizer, max_steps=1, **settings)
    with caplog.at_level("INFO", "posttrain"):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and "the run ends without a step" in caplog.text
    assert f"Resuming from {tmp_path / 'checkpoint-2'}" in caplog.text
    assert not (tmp_path / "checkpoint-3").exists()
    rows = chats(12).select(range(11, -1, -1))
    other = sft(tmp_path, tiny_tokenizer, data=rows, max_steps=4, **settings)
    with raises(CheckpointError, "12 rows"):
        other.train(resume_from_checkpoint=True)
    meant = sft(tmp_path, tiny_tokenizer, data=rows, max_steps=3, ignore_data_skip=True, **settings)
    meant.train(resume_from_checkpoint=True)
    assert meant.state.global_step == 3 and "the run starts at the first row" in caplog.text


def test_a_checkpoint_of_the_same_step_replaces_its_own_and_moves_anothers_aside(tmp_path):
    for run, kept in (("mine", False), ("other", True)):
        folder = tmp_path / run
        final = made(folder, 3, run=run)
        part = checkpoints.staging(folder, 3, "mine")
        part.mkdir()
        (part / "model.safetensors").write_bytes(b"new")
        checkpoints.publish(part, final, "mine")
        assert (final / "model.safetensors").read_bytes() == b"new"
        assert checkpoints.marker(final) is None
        assert names(folder) == (["checkpoint-3", "checkpoint-3.of-other"] if kept else ["checkpoint-3"])


def test_checkpoints_of_a_run_that_was_killed_before_it_marked_them_are_replaced_and_counted(
    tmp_path, tiny_tokenizer, monkeypatch
):
    """Killed again and again between a checkpoint's name and its mark, resumed each time."""
    monkeypatch.setattr(checkpoints, "mark", _mark_or_die := MarkOrDie(checkpoints.mark))
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    for deadly in (3, 3, 5):
        _mark_or_die.step = deadly
        with pytest.raises(Killed):
            sft(tmp_path, tiny_tokenizer, **settings).train(resume_from_checkpoint=bool(names(tmp_path)) or None)
        assert f"checkpoint-{deadly}" in names(tmp_path)
    _mark_or_die.step = None
    sft(tmp_path, tiny_tokenizer, **settings).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    assert all(checkpoints.damage(tmp_path / name) == "" for name in names(tmp_path))


class Killed(BaseException):
    """Stands for a signal that nothing survives."""


class MarkOrDie:
    """Marks checkpoints, but at a step it dies just before."""

    def __init__(self, usual):
        self.usual, self.step = usual, None

    def __call__(self, checkpoint, run):
        if checkpoint.name == f"checkpoint-{self.step}":
            raise Killed
        self.usual(checkpoint, run)


def test_rotation_counts_unmarked_checkpoints_of_its_own_run_and_leaves_those_of_other_programs(tmp_path):
    for step, run in ((1, "mine"), (2, "mine"), (3, "other")):
        part = checkpoints.staging(tmp_path, step, run)
        part.mkdir()
        (part / "model.safetensors").write_bytes(b"new")
        checkpoints.publish(part, tmp_path / f"checkpoint-{step}", run)  # And killed before it is marked.
    made(tmp_path, 4, complete=False)  # Of a program that marks nothing.
    made(tmp_path, 5, run="mine")
    checkpoints.rotate(tmp_path, "mine", 2)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]


def test_a_disk_without_room_is_found_before_training(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("posttrain.loop.checkpoint.free_disk", lambda folder: 1024)
    trainer = sft(tmp_path, tiny_tokenizer, save_strategy="steps", save_steps=1)
    with raises(ConfigError, "PT-L002", "1"):
        trainer.train()
    assert not (tmp_path / LOCK).exists()
    sft(tmp_path, tiny_tokenizer, save_strategy="no").train()


def test_without_clipping_a_gradient_that_is_no_number_still_never_reaches_the_weights(tmp_path, tiny_tokenizer):
    """At ``max_grad_norm=0`` and below, the parent computes no norm."""
    import torch

    trainer = sft(tmp_path, tiny_tokenizer, max_steps=2, max_grad_norm=0.0)
    before, seen = weights(trainer), []

    def spoil(gradient):
        seen.append(1)
        return gradient * float("nan")

    next(trainer.model.parameters()).register_hook(spoil)
    trainer.train()
    assert seen and torch.equal(weights(trainer), before)
    sound = [sft(tmp_path / str(norm), tiny_tokenizer, max_steps=2, max_grad_norm=norm) for norm in (0.0, -1.0, 1e9)]
    for run in sound:
        run.train()
    # A negative limit would flip the sign of the gradient.
    assert all(torch.equal(weights(sound[0]), weights(run)) for run in sound[1:])


def test_the_estimate_of_a_checkpoint_is_near_what_is_written(tmp_path, tiny_tokenizer):
    from posttrain.loop.checkpoint import checkpoint_bytes

    trainer = sft(tmp_path, tiny_tokenizer, max_steps=1, save_strategy="steps", save_steps=1)
    expected = checkpoint_bytes(trainer.model, trainer.args)
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    written = sum((folder / name).stat().st_size for name in ("model.safetensors", "optimizer.pt"))
    assert abs(written - expected) < 0.15 * expected


def run_of(kind, processes, stage=2):
    """As much of an accelerator as says what a run is."""
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    return SimpleNamespace(distributed_type=f"DistributedType.{kind}", num_processes=processes, state=state)


ZERO2, ZERO3 = "global_step2/mp_rank_00_model_states.pt", "global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("wrote", "runs", "fits"),
    [
        (ZERO2, ("DEEPSPEED", 2), True), (ZERO2, ("DEEPSPEED", 4), True), (ZERO2, ("DEEPSPEED", 2, 3), False),
        (ZERO3, ("DEEPSPEED", 1, 3), True), (ZERO3, ("DEEPSPEED", 2, 2), False), (ZERO3, ("NO", 1), False),
        (ZERO2, ("MULTI_GPU", 2), False), (ZERO2, ("FSDP", 2), False),
        ("pytorch_model_fsdp_0", ("FSDP", 4), True), ("pytorch_model_fsdp.bin", ("NO", 1), True),
        ("pytorch_model_fsdp.bin", ("MULTI_CPU", 2), True), ("pytorch_model_fsdp.bin", ("DEEPSPEED", 2), False),
        ("optimizer.pt", ("MULTI_CPU", 4), True), ("optimizer.pt", ("FSDP", 2), False),
        ("optimizer.pt", ("DEEPSPEED", 2), False),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_read_is_refused_with_both_kinds_and_numbers_of_processes(
    wrote, runs, fits, tmp_path
):
    """Left to transformers it would be left behind without a word, or end in the depths of another library."""
    for name in (wrote, "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (tmp_path / name).mkdir(parents=True)
    run = run_of(*runs)
    if fits:
        parallel.refuse_other_optimizer(tmp_path, run)
        return
    kinds = {ZERO2: "ZeRO below 3", ZERO3: "ZeRO-3", "optimizer.pt": "neither FSDP nor DeepSpeed"}
    written = kinds.get(wrote, "FSDP")
    with pytest.raises(
        CheckpointError, match=rf"by 2 processes with {written}.* run has {runs[1]} process.*Fix: resume with {written}"
    ):
        parallel.refuse_other_optimizer(tmp_path, run)


@pytest.mark.parametrize("wrote", ["optimizer.pt", "pytorch_model_fsdp.bin"])
def test_a_schedule_that_is_not_there_is_refused(wrote, tmp_path):
    """transformers would load neither the schedule nor the optimizer."""
    (tmp_path / wrote).touch()
    with raises(CheckpointError, "scheduler.pt"):
        parallel.refuse_other_optimizer(tmp_path, run_of("NO", 1))


@pytest.mark.parametrize("processes", [2, 4])
def test_a_shard_that_is_not_there_is_an_error_on_any_number_of_processes(tmp_path, processes):
    """DeepSpeed warns, and goes on with a new optimizer."""
    for name in (ZERO2, "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has 1 of 2 shards"):
        parallel.refuse_other_optimizer(tmp_path, run_of("DEEPSPEED", processes))


def state_of(processes, index=0):
    return SimpleNamespace(num_processes=processes, process_index=index)


def test_another_number_of_processes_goes_on_from_the_state_of_the_first(tmp_path):
    for index in range(2):
        checkpoints.save_state(tmp_path, {"of": index}, state_of(2, index))
    assert [checkpoints.saved_state(str(tmp_path), state_of(2, i))["of"] for i in range(2)] == [0, 1]
    assert [checkpoints.saved_state(str(tmp_path), state_of(4, i)) for i in (0, 3)] == [{"of": 0, "processes": 2}] * 2
    assert (
        checkpoints.saved_state(str(tmp_path / "none"), state_of(1)) == {} == checkpoints.saved_state(None, state_of(1))
    )


@pytest.mark.parametrize(("accumulated", "told"), [(2, True), (1, False)])
def test_a_resumed_step_of_another_number_of_rows_is_told_with_both(
    tmp_path, tiny_tokenizer, caplog, accumulated, told
):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    sft(tmp_path, tiny_tokenizer, **settings).train()
    again = sft(tmp_path, tiny_tokenizer, gradient_accumulation_steps=accumulated, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert ("took 4 rows, but a step of this run takes 8" in caplog.text) == told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rate": 3e-3}, "learning_rate=0.003 (the checkpoint's: 0.01): the optimizer continues with the checkpoint's value"),
        ({"weight_decay": 0.1}, "weight_decay=0.1 (the checkpoint's: 0.0): the optimizer continues"),
        ({"adam_beta1": 0.8, "adam_beta2": 0.9}, "adam_beta1=0.8 (the checkpoint's: 0.9), adam_beta2=0.9 (the checkpoint's: 0.999)"),
        ({"seed": 7}, "seed=7 (the checkpoint's: 42): rows come in a different order"),
        ({"shuffle_dataset": True}, "shuffle_dataset=True (the checkpoint's: False): rows come in a different order"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy=sequential (the checkpoint's: random): rows come"),
        ({"data_seed": 7}, "data_seed=7 (the checkpoint's: None): rows come in a different order"),
        ({"max_steps": 3}, "max_steps=3 (the checkpoint's: 2): the first step uses the learning rate of the checkpoint's schedule"),
        ({}, None),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_the_checkpoints_is_told_with_both_values_and_what_comes_of_it(
    tmp_path, tiny_tokenizer, caplog, given, said
):
    usual = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    sft(tmp_path, tiny_tokenizer, **usual).train()
    again = sft(tmp_path, tiny_tokenizer, **(usual | given))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert ("the checkpoint's" in caplog.text) == (said is not None)
    assert said is None or said in caplog.text
    if "learning_rate" in given:  # As the text says.
        assert [row["learning_rate"] for row in again.state.log_history if row.get("step") == 2 and "loss" in row] == [
            0.01
        ]


def test_a_configs_checkpoint_that_train_was_not_given_is_told(tmp_path, tiny_tokenizer, caplog):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    sft(tmp_path, tiny_tokenizer, **settings).train()
    path = str(tmp_path / "checkpoint-1")
    sft(tmp_path / "again", tiny_tokenizer, resume_from_checkpoint=path, **settings).train()
    assert "has no effect on train(), as in transformers, so the run starts from the beginning" in caplog.text
    caplog.clear()
    again = sft(tmp_path, tiny_tokenizer, **settings)
    again.train(resume_from_checkpoint=path)
    again.train()  # Once more from where it stands; the first call's checkpoint is no setting.
    assert "of the config has no effect" not in caplog.text
    with pytest.raises(CheckpointError, match="resume_from_checkpoint='3' is not a folder"):
        again.train(resume_from_checkpoint=3)


def lora(**settings):
    from peft import LoraConfig

    return LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | settings))


def loha(alpha=8):
    from peft import LoHaConfig

    return LoHaConfig(task_type="CAUSAL_LM", r=4, alpha=alpha, target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("wrote", "now", "said"),
    [
        (lora(), None, ["contains an adapter, but this run trains the whole model", "use_peft"]),
        (None, lora(), ["contains a whole model, but this run trains an adapter", "without resume_from_checkpoint"]),
        (lora(), lora(r=8), ["r=8 (the checkpoint's: 4)"]),
        (lora(), lora(lora_alpha=16), ["lora_alpha=16 (the checkpoint's: 8)"]),  # peft would scale it otherwise, in silence.
        (lora(), lora(target_modules=["v_proj"]), ["target_modules=['v_proj'] (the checkpoint's: ['q_proj'])"]),
        (lora(), lora(lora_dropout=0.5), []),
        (lora(), lora(init_lora_weights="gaussian"), []),
        # With these settings too, peft would load the weights into an adapter that computes something else, in silence.
        (lora(init_lora_weights="pissa"), lora(), ["init_lora_weights=True (the checkpoint's: pissa)"]),
        (lora(), lora(alpha_pattern={"q_proj": 32}), ["alpha_pattern={'q_proj': 32} (the checkpoint's: {})"]),
        (lora(trainable_token_indices=[5]), lora(trainable_token_indices=[6]), ["trainable_token_indices=[6]"]),
        (loha(), loha(alpha=16), ["alpha=16 (the checkpoint's: 8)"]),
        (lora(), lora(modules_to_save=["lm_head"]), ["modules_to_save=['lm_head'] (the checkpoint's: None)"]),
    ],
)  # fmt: skip
def test_a_checkpoint_of_an_adapter_is_no_checkpoint_of_a_whole_model_or_another_adapter(
    tmp_path, tiny_tokenizer, wrote, now, said
):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    sft(tmp_path, tiny_tokenizer, peft_config=wrote, **settings).train()
    again = sft(tmp_path, tiny_tokenizer, peft_config=now, **settings)
    if not said:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        return
    with raises(CheckpointError, "checkpoint-1") as caught:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(part in str(caught.value) for part in said)


def test_a_checkpoint_of_another_method_optimizer_or_model_is_refused(tmp_path, tiny_tokenizer):
    from tests.methods.every_trainer import every

    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    sft(tmp_path, tiny_tokenizer, **settings).train()
    model = build_model(len(tiny_tokenizer) + 8)
    fused = sft(tmp_path, tiny_tokenizer, optim="adamw_torch_fused", **settings)
    fused.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for trainer, message in (
        (
            every("dpo", tmp_path, tiny_tokenizer, ignore_data_skip=True, **settings),
            r"method=\w*DPO\w* .the checkpoint's: \w*SFT",
        ),
        (sft(tmp_path, tiny_tokenizer, optim="sgd", **settings), r"optim=sgd .the checkpoint's: adamw_torch"),
        (
            sft(tmp_path, tiny_tokenizer, model, **settings),
            r"do not fit this run's model: size mismatch for \S+: copying",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_settings_of_an_adapter_with_another_name_are_compared_too(tmp_path, tiny_tokenizer):
    from peft import get_peft_model

    def run(config):
        model = get_peft_model(build_model(len(tiny_tokenizer)), config, adapter_name="other")
        return sft(tmp_path, tiny_tokenizer, model=model, max_steps=2, save_strategy="steps", save_steps=1)

    run(lora()).train()
    with raises(CheckpointError, "lora_alpha=16 (the checkpoint's: 8)"):
        run(lora(lora_alpha=16)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    run(lora()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("names", [["other"], ["default", "other"]])
def test_the_best_model_of_an_adapter_with_another_name_is_loaded(tmp_path, tiny_tokenizer, names):
    from peft import PeftModel, get_peft_model

    model = get_peft_model(build_model(len(tiny_tokenizer)), lora(), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora())
    model.set_adapter("other")
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    # The loss rises with this learning rate, so the first checkpoint is the best.
    trainer = sft(
        tmp_path,
        tiny_tokenizer,
        model=model,
        eval_dataset=chats(4),
        load_best_model_at_end=True,
        learning_rate=30.0,
        **settings,
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best != str(tmp_path / "checkpoint-3")
    saved = PeftModel.from_pretrained(build_model(len(tiny_tokenizer)), f"{best}/other", adapter_name="other")
    theirs = saved.state_dict()
    assert all(
        torch.equal(tensor, theirs[name]) for name, tensor in trainer.model.state_dict().items() if ".other." in name
    )


@pytest.mark.parametrize("kind", ["P_TUNING", "PREFIX_TUNING"])
def test_a_checkpoint_without_the_encoder_of_virtual_tokens_is_refused(tmp_path, tiny_tokenizer, kind):
    from peft import PrefixTuningConfig, PromptEncoderConfig

    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "encoder_hidden_size": 8}
    encoder = PromptEncoderConfig(**options)
    adapter = encoder if kind == "P_TUNING" else PrefixTuningConfig(**options, prefix_projection=True)
    settings = {
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "peft_config": adapter,
        "gradient_checkpointing": False,
    }
    sft(tmp_path, tiny_tokenizer, **settings).train()
    with raises(CheckpointError, "checkpoint-1", "PROMPT_TUNING"):
        sft(tmp_path, tiny_tokenizer, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": chats(2), "load_best_model_at_end": True}
    with raises(ConfigError, "load_best_model_at_end", "PROMPT_TUNING"):
        sft(tmp_path / "best", tiny_tokenizer, **settings | evaluated)


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("model.safetensors", "it lacks weights, and contains"),
        ("trainer_state.json", "it lacks trainer_state.json, and contains"),
        ("*", "it lacks weights and trainer_state.json, and contains []"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_told_with_what_is_in_it_and_what_is_whole(
    tmp_path, tiny_tokenizer, gone, said
):
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    sft(tmp_path, tiny_tokenizer, **settings).train()
    for path in (tmp_path / "checkpoint-3").glob(gone):
        path.unlink()
    again = sft(tmp_path, tiny_tokenizer, **settings)
    with raises(CheckpointError, "checkpoint-3", "checkpoint-2") as caught:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert said in str(caught.value)
    with raises(
        CheckpointError, str(tmp_path / "checkpoint-2")
    ):  # The run's folder in the place of a checkpoint in it.
        again.train(resume_from_checkpoint=str(tmp_path))


# Random numbers and streams ------------------------------------------------------------------------------------------


def rolled(completions, **_):
    """A reward with randomness of all three kinds."""
    return [random.random() + np.random.rand() + float(torch.rand(())) for _ in completions]


def test_a_resumed_online_run_draws_the_random_numbers_of_the_uninterrupted_one(tiny_tokenizer, tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 1}
    whole = grpo(tmp_path, tiny_tokenizer, rewards=rolled, engine="native", **settings)
    whole.train()
    # At the end of an epoch, within a window, at its end; each leaves earlier checkpoints alone.
    for step in (4, 3, 2, 1):
        part = grpo(tmp_path, tiny_tokenizer, rewards=rolled, engine="native", **settings)
        part.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert torch.equal(weights(whole), weights(part)), step
        rewards = [[line["reward"] for line in run.state.log_history if "reward" in line] for run in (whole, part)]
        assert rewards[0] == rewards[1], step


def test_the_epoch_of_a_stream_counts_its_passes_once_their_length_is_known(tiny_tokenizer, tmp_path):
    settings = {"max_steps": 10, "per_device_train_batch_size": 2, "use_cpu": True, "save_strategy": "epoch"}
    trainer = sft(tmp_path, tiny_tokenizer, data=chats(8).to_iterable_dataset(), logging_steps=1, **settings)
    trainer.train()
    # In the first pass the length is unknown, and the share of max_steps stands for it.
    epochs = [line["epoch"] for line in trainer.state.log_history if "loss" in line]
    assert epochs == pytest.approx([0.1, 0.2, 0.3, 0.4, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5])
    saved = [json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text()) for step in (4, 8, 10)]
    assert [state["epoch"] for state in saved] == [1.0, 2.0, 2.5]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_resumed_in_a_later_pass_trains_the_rows_of_the_uninterrupted_run(tiny_tokenizer, tmp_path, shuffled):
    def run(checkpoint=None):
        stream = chats(5).to_iterable_dataset()  # The last step of a pass has one row of two.
        stream = stream.shuffle(seed=3, buffer_size=5) if shuffled else stream
        settings = {"max_steps": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        settings |= {"save_strategy": "steps", "save_steps": 1, "use_cpu": True}
        trainer = sft(tmp_path, tiny_tokenizer, data=stream, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run()
    # Of three steps a pass: the end of the second, within it, the end of the first, within it. Each leaves earlier ones alone.
    for step in (6, 4, 3, 1):
        part = run(str(tmp_path / f"checkpoint-{step}"))
        assert torch.equal(weights(whole), weights(part)), step
        epochs = [[line["epoch"] for line in one.state.log_history] for one in (whole, part)]
        assert epochs[0] == epochs[1], step
