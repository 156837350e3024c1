"""Checkpoints that are whole or not there: written beside their place, flushed, renamed, and marked as complete last."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from posttrain.errors import CheckpointError

__all__ = [
    "MARKER",
    "complete_checkpoints",
    "damage",
    "last_complete_checkpoint",
    "leftovers",
    "mark",
    "marker",
    "publish",
    "resolve_resume",
    "rotate",
    "staging",
    "strangers",
]

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"
BEGUN = f"{MARKER}.part"  # In its place until the checkpoint is whole: names the run, which may be killed before that.
MISSING = "is missing"
NAMED = re.compile(r"checkpoint-(\d+)")
LEFT = re.compile(r"checkpoint-\d+\.tmp-.+")


def staging(folder: Path, step: int, run: str) -> Path:
    """Where the checkpoint of a step is written until it is whole; no program takes it for a checkpoint."""
    return folder / f"checkpoint-{step}.tmp-{run}"


def publish(part: Path, final: Path, run: str) -> None:
    """Flush ``part`` to the disk and give it its name; what stood there is replaced if it is ours, else kept aside.

    Args:
        part: A written checkpoint, see `staging`.
        final: ``checkpoint-<step>``.
        run: Id of this run.
    """
    (part / BEGUN).write_text(json.dumps({"run": run}), encoding="utf-8")
    _flush_tree(part)
    old = None
    if final.exists():
        owner = _owner(final) or "unknown"
        old = final.with_name(f"{final.name}.tmp-{run}.old" if owner == run else f"{final.name}.of-{owner}")
        if owner != run:
            old = _free_name(old)
            logger.warning("%s is of another run: it was moved to %s.", final, old.name)
        os.rename(final, old)
    os.rename(part, final)
    _flush_folder(final.parent)
    if old is not None and ".tmp-" in old.name:
        shutil.rmtree(old, ignore_errors=True)


def mark(checkpoint: Path, run: str) -> None:
    """Say that a checkpoint is whole: a file with its run, its time, and the size of every other file."""
    _flush_tree(checkpoint)
    step = NAMED.fullmatch(checkpoint.name)
    sizes = {str(p.relative_to(checkpoint)): p.stat().st_size for p in sorted(checkpoint.rglob("*")) if p.is_file()}
    for name in (MARKER, BEGUN):
        sizes.pop(name, None)
    content = {"run": run, "step": int(step[1]) if step else None, "time": round(time.time(), 3), "files": sizes}
    part = checkpoint / BEGUN
    with part.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, checkpoint / MARKER)
    _flush_folder(checkpoint)


def _owner(checkpoint: Path) -> str | None:
    """The run that wrote a checkpoint, whole or not; None for one of another program."""
    return (marker(checkpoint) or marker(checkpoint, BEGUN) or {}).get("run")


def marker(checkpoint: Path, name: str = MARKER) -> dict[str, Any] | None:
    """What `mark` wrote; None for a checkpoint without it."""
    try:
        content = json.loads((checkpoint / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "run" in content else None


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """Marked checkpoints of a folder, the one written last at the end: steps of a later run come after those of an earlier."""
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        content = marker(path) if NAMED.fullmatch(path.name) else None
        if content is not None:
            found.append((float(content.get("time", 0.0)), int(path.name.rpartition("-")[2]), path))
    return [path for *_, path in sorted(found)]


def last_complete_checkpoint(folder: str | Path) -> Path | None:
    """The whole checkpoint that was written last; None where there is none."""
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def damage(checkpoint: Path) -> str:
    """What is missing or cut in a marked checkpoint, in words; empty when all files have the size they were written with."""
    for name, size in ((marker(checkpoint) or {}).get("files") or {}).items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} {MISSING}"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    return ""


def resolve_resume(resume: Any, folder: str | Path) -> str | None:
    """The checkpoint that ``resume_from_checkpoint`` means: a path as it is, True the last whole one of the folder.

    Raises:
        CheckpointError: There is none, only unmarked ones, or the named one lost something since it was written.
    """
    if resume is None or resume is False:
        return None
    if resume is True:
        return str(_last(Path(folder)))
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"resume_from_checkpoint={str(resume)!r} is not a folder. {_offer(path.parent)}")
    broken = damage(path)
    if broken and not broken.endswith(MISSING):
        raise CheckpointError(
            f"the checkpoint {str(path)!r} is not whole: {broken}. {_offer(path.parent, path)} If the file was changed on "
            f"purpose, remove {MARKER} there."
        )
    if broken:  # Left out on purpose, perhaps, as an optimiser's state is to save space; what needs it will say so.
        logger.warning("%s: %s since it was written.", path, broken)
    if marker(path) is None:
        logger.warning(
            "%s has no file %s: it was written by another program, or its writing was interrupted. It is used because it was "
            "named.", path, MARKER,
        )  # fmt: skip
    return str(resume)


def _last(folder: Path) -> Path:
    for path in reversed(complete_checkpoints(folder)):
        broken = damage(path)
        if not broken:
            return path
        logger.warning("%s is passed over: %s.", path, broken)
    unmarked = sorted((p for p in folder.glob("checkpoint-*") if NAMED.fullmatch(p.name)), key=lambda p: p.name)
    hint = (
        f"{len(unmarked)} without the file {MARKER} are there ({', '.join(p.name for p in unmarked[:5])}): their writing was "
        f"interrupted, or another program wrote them. Name one to use it: resume_from_checkpoint={str(unmarked[-1])!r}."
        if unmarked
        else "Start without resume_from_checkpoint, or name the folder of the run."
    )
    raise CheckpointError(f"there is no complete checkpoint in {str(folder)!r}. {hint}")


def _offer(folder: Path, but: Path | None = None) -> str:
    whole = [path for path in complete_checkpoints(folder) if path != but and not damage(path)]
    return (
        f"Complete there: {', '.join(p.name for p in whole)}." if whole else f"No complete one is in {str(folder)!r}."
    )


def strangers(folder: str | Path, run: str) -> list[Path]:
    """Checkpoints of a folder that this run did not write, in the order of their steps."""
    return [path for path in _named(Path(folder)) if _owner(path) != run]


def _named(folder: Path) -> list[Path]:
    """All checkpoints of a folder, marked or not, in the order of their steps."""
    found = [p for p in folder.glob("checkpoint-*") if NAMED.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))


def leftovers(folder: str | Path) -> list[Path]:
    """Half-written or half-removed checkpoints, of runs that were killed."""
    return sorted(path for path in Path(folder).glob("checkpoint-*") if LEFT.fullmatch(path.name))


def rotate(folder: Path, run: str, limit: int | None, keep: str | None = None) -> list[Path]:
    """Remove the oldest whole checkpoints of this run beyond ``limit``; those of others are never touched.

    Those that this run was killed in before they were marked go too: a whole one was written since.

    Args:
        folder: Where they lie.
        run: Id of this run.
        limit: How many may stay; None or 0: all.
        keep: The best one, which stays.

    Returns:
        What was removed.
    """
    if not limit or limit < 0:
        return []
    mine = [path for path in complete_checkpoints(folder) if (marker(path) or {}).get("run") == run]
    best = Path(keep).name if keep else None
    room = max(limit, 2 if best and mine and mine[-1].name != best else 1)
    removable = [path for path in mine[:-1] if path.name != best]
    gone = removable[: max(0, len(mine) - room)]
    gone += [p for p in _named(folder) if mine and marker(p) is None and _owner(p) == run and p.name != best]
    for path in gone:  # Its name goes first: a process killed meanwhile leaves no torn checkpoint that looks whole.
        old = path.with_name(f"{path.name}.tmp-{run}.old")
        os.rename(path, old)
        shutil.rmtree(old, ignore_errors=True)
    return gone


def _free_name(path: Path) -> Path:
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _flush_tree(folder: Path) -> None:
    """Wait until every file below ``folder``, and its name, is on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _flush_folder(path)


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # Not every system lets a folder be opened.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
