"""Faults of disks, processes, folders and versions; processes that are killed are real ones."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from posttrain.checks import machine as table
from posttrain.loop import checkpoint as checkpoints
from posttrain.report.lock import LOCK
from tests.faults import build
from tests.faults.scene import Case, Scene
from tests.forks import Forked

SAVING = {"save_strategy": "steps", "save_steps": 1}


def child(scene: Scene, what: str, until: str) -> Forked:
    """A process of its own that does ``what`` in the scene's folder, once the file ``until`` is there."""
    process = Forked(["-m", "tests.faults.child", what, scene.folder])
    deadline = time.monotonic() + 120
    while not (scene.folder / until).exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the child ended with {process.returncode} before {until} was there")
        time.sleep(0.02)
    return process


def killed_in_a_checkpoint(scene: Scene) -> None:
    """SIGKILL in the middle of writing a checkpoint; the run is then resumed."""
    process = child(scene, "stuck", "stuck")
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = [path.name for path in checkpoints.complete_checkpoints(scene.folder)]
    trainer = build.sft(scene, resume_from_checkpoint=True, **SAVING)
    after = [path.name for path in checkpoints.complete_checkpoints(scene.folder)]
    steps = [json.loads(line)["step"] for line in Path(scene.folder, "metrics.jsonl").read_text().splitlines()]
    whole = trainer.state.global_step == 3 and set(before) <= set(after) and sorted(set(steps)) == [1, 2, 3]
    scene.note = "nothing" if whole else f"{before} became {after}, steps {steps}"


def two_runs(scene: Scene) -> None:
    """Another process trains into the same folder."""
    process = child(scene, "hold", LOCK)
    try:
        build.sft(scene, **SAVING)
    finally:
        process.kill()
        process.wait()


def taken_over(scene: Scene) -> None:
    """The folder is taken by another run while this one trains."""
    import transformers

    class Taken(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            owner = {"pid": 1, "host": "node7", "since": "2026-01-02 03:04:05", "run": "other"}
            Path(scene.folder, LOCK).write_text(json.dumps(owner))

    build.sft(scene, callbacks=[Taken()], **SAVING)


def disk_fills(scene: Scene) -> None:
    """The system refuses files beyond 200 kB (RLIMIT_FSIZE), from the second checkpoint on."""
    import transformers

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    class Fills(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))

    try:
        build.sft(scene, callbacks=[Fills()], **SAVING)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        kept = [path.name for path in checkpoints.complete_checkpoints(scene.folder)]
        halves = [path.name for path in scene.folder.glob("checkpoint-*") if path.name not in kept]
        scene.note = "nothing" if kept == ["checkpoint-1"] and not halves else f"whole {kept}, torn {halves}"


def no_room(scene: Scene) -> None:
    """Less free space than one checkpoint takes."""
    import posttrain.loop.checkpoint as module

    usual, module.free_disk = module.free_disk, lambda folder: 10_000
    try:
        build.sft(scene, **SAVING)
    finally:
        module.free_disk = usual


def record_fails(scene: Scene) -> None:
    """A line of the run record meets a full disk."""
    import posttrain.report.record as module

    usual = module.os.fsync

    def full(descriptor: int) -> None:
        if scene.trainer is not None and scene.trainer.state.global_step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(descriptor)

    module.os.fsync = full
    try:
        build.sft(scene)
    finally:
        module.os.fsync = usual
        lines = Path(scene.folder, "metrics.jsonl").read_text().splitlines()
        scene.note = "nothing" if [json.loads(line)["step"] for line in lines] == [1] else f"{len(lines)} lines"


def not_writable(scene: Scene) -> None:
    """The output folder is a file."""
    path = scene.folder / "file"
    path.write_text("")
    build.sft(scene, folder=path)


def torn_checkpoint(scene: Scene) -> None:
    """Resuming from a checkpoint whose optimiser state was cut."""
    build.sft(scene, **SAVING)
    path = scene.folder / "checkpoint-3" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:100])
    scene.trainer, scene.stage = None, "config"
    scene.note = "nothing"  # It is the fault itself; the two earlier ones are whole.
    build.sft(scene, resume_from_checkpoint=str(scene.folder / "checkpoint-3"), max_steps=4, **SAVING)


def unmarked_only(scene: Scene) -> None:
    """Resuming where no checkpoint was finished."""
    (scene.folder / "checkpoint-5").mkdir()
    build.sft(scene, resume_from_checkpoint=True, **SAVING)


def older_run(scene: Scene) -> None:
    """A folder with checkpoints of another run, and a limit on how many are kept."""
    build.sft(scene, **SAVING)
    before = {p.name: p.stat().st_ino for p in checkpoints.complete_checkpoints(scene.folder)}
    scene.trainer, scene.stage = None, "config"
    build.sft(scene, save_total_limit=1, max_steps=2, **SAVING)
    kept = {p.stat().st_ino for p in scene.folder.glob("checkpoint-*")}
    scene.note = "nothing" if set(before.values()) <= kept else "checkpoints of the older run"


def of_version(package: str, version: str | None, **settings: Any) -> Any:
    """A config that needs a package which is installed in a version that does not work."""

    def act(scene: Scene) -> None:
        from posttrain.checks import machine as versions

        usual = versions.installed_version
        versions.installed_version = lambda name: version if name == package else usual(name)
        try:
            build.sft(scene, **settings)
        finally:
            versions.installed_version = usual
            assert table.installed_version is usual

    return act


def old_vllm(scene: Scene) -> None:
    """vLLM below the minimum."""
    from posttrain.checks import machine as versions

    usual = versions.installed_version
    versions.installed_version = lambda name: "0.16.0" if name == "vllm" else usual(name)
    try:
        build.online(scene, use_vllm=True, vllm_mode="colocate")
    finally:
        versions.installed_version = usual


CASES = (
    Case(
        "machine",
        "killed while a checkpoint is written",
        killed_in_a_checkpoint,
        r"only partly written",
        "data",
        slow=True,
    ),
    Case("machine", "two runs in one folder", two_runs, r"in use by process", "config", slow=True),
    Case("machine", "folder taken over during the run", taken_over, r"on node7 has used 'runs/a'", "step 1"),
    Case("machine", "disk fills up at a checkpoint", disk_fills, r"could not be written.*checkpoint-1", "step 2"),
    Case("machine", "no room for a checkpoint", no_room, r"PT-L002", "data"),
    Case("machine", "disk full at the run record", record_fails, r"run record could not be written", "step 2"),
    Case("machine", "output folder is a file", not_writable, r"cannot be written", "config"),
    Case("machine", "checkpoint cut after it was written", torn_checkpoint, r"optimizer.pt has 100 of", "data"),
    Case("machine", "no whole checkpoint to resume from", unmarked_only, r"no complete checkpoint", "data"),
    Case("machine", "checkpoints of another run in the folder", older_run, r"PT-L001", "data"),
    Case("version", "transformers too old", of_version("transformers", "5.7.0"), r"PT-V002", "config"),
    Case("version", "datasets too old", of_version("datasets", "3.6.0"), r"PT-V002", "config"),
    Case("version", "vLLM too old", old_vllm, r"PT-V002|vllm", "config"),
)
