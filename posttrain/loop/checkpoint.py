"""Functions that write and read atomic checkpoints. A checkpoint contains all state that a resumed run needs to give the
same result as an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
import xxhash
from datasets import Dataset, IterableDataset
from torch import nn
from transformers.trainer_callback import ExportableState

from posttrain.checks.machine import check_disk_space, check_gpu_memory, check_strangers, keeps_on_host
from posttrain.errors import CheckpointError
from posttrain.integrations.machine import free_disk, gpu_memory, gpu_processes
from posttrain.loop.checks import Checks
from posttrain.models import parallel
from posttrain.models.heads import adapters_of, unsaved_encoders
from posttrain.models.memory_estimate import optimizer_bytes
from posttrain.models.reference import UNREAD
from posttrain.report.files import read_json
from posttrain.types import Finding
from posttrain.values import gib

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import AnyDataset

logger = logging.getLogger(__name__)


MARKER = "COMPLETE"
# File that marks an unfinished checkpoint. It contains the run id, so that unfinished checkpoints of killed runs are
# recognized.
BEGUN = f"{MARKER}.part"
MISSING = "is missing"
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
UNFINISHED = re.compile(r"checkpoint-\d+\.tmp-.+")


def staging(folder: Path, step: int, run: str) -> Path:
    """Return the folder in which a step's checkpoint is written. Its name does not match the pattern of checkpoint folders."""
    return folder / f"checkpoint-{step}.tmp-{run}"


def publish(part: Path, final: Path, run: str) -> None:
    """Flush ``part`` to disk and rename it to ``final``. An existing checkpoint ``final`` of this run is replaced. An
    existing checkpoint of another run is renamed.

    Args:
        part: Folder with the written checkpoint, see `staging`.
        final: Path ``checkpoint-<step>``.
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
            logger.warning("%s belongs to another run. It was moved to %s.", final, old.name)
        os.rename(final, old)
    os.rename(part, final)
    _flush_folder(final.parent)
    if old is not None and ".tmp-" in old.name:
        shutil.rmtree(old, ignore_errors=True)


def mark(checkpoint: Path, run: str) -> None:
    """Mark a checkpoint as complete. The marker file contains the run id, the time, and the size and hash of every other
    file.
    """
    _flush_tree(checkpoint)
    step = CHECKPOINT_NAME.fullmatch(checkpoint.name)
    sizes = {str(p.relative_to(checkpoint)): p.stat().st_size for p in sorted(checkpoint.rglob("*")) if p.is_file()}
    for name in (MARKER, BEGUN):
        sizes.pop(name, None)
    content = {"run": run, "step": int(step[1]) if step else None, "time": round(time.time(), 3), "files": sizes}
    content["hashes"] = {name: _hash(checkpoint / name) for name in sizes}
    part = checkpoint / BEGUN
    with part.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, checkpoint / MARKER)
    _flush_folder(checkpoint)


def _owner(checkpoint: Path) -> str | None:
    """Return the id of the run that wrote a complete or incomplete checkpoint. Return None if another program wrote the
    checkpoint.
    """
    return (marker(checkpoint) or marker(checkpoint, BEGUN) or {}).get("run")


def marker(checkpoint: Path, name: str = MARKER) -> dict[str, Any] | None:
    """Return the content of a checkpoint's marker file, which `mark` wrote. Return None if there is no such file."""
    content = read_json(checkpoint / name)
    return content if "run" in content else None


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints of a folder, sorted by the time they were written."""
    complete = []
    for path in Path(folder).glob("checkpoint-*"):
        content = marker(path) if CHECKPOINT_NAME.fullmatch(path.name) else None
        if content is not None:
            complete.append((float(content.get("time", 0.0)), int(path.name.rpartition("-")[2]), path))
    return [path for *_, path in sorted(complete)]


def last_complete_checkpoint(folder: str | Path) -> Path | None:
    """Return the complete checkpoint that was written last, or None if there is no complete checkpoint."""
    complete = complete_checkpoints(folder)
    return complete[-1] if complete else None


def _hash(path: Path) -> str:
    """Return the XXH3 hash of a file (128 bits). The hash detects corruption, not tampering."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()


def damage(checkpoint: Path, *, bytes_too: bool = False) -> str:
    """Describe a file that is missing or has changed since a checkpoint was marked. Return an empty string if all files are
    intact.

    Args:
        checkpoint: Folder of the checkpoint.
        bytes_too: Whether to compare hashes in addition to sizes. Every file is then read. Checkpoints without hashes are
            compared only by sizes.
    """
    content = marker(checkpoint) or {}
    hashes = content.get("hashes", {}) if bytes_too else {}
    for name, written in (content.get("files") or {}).items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} {MISSING}"
        if path.stat().st_size != written:
            return f"{name} has {path.stat().st_size} of {written} bytes"
        if name in hashes and (now := _hash(path)) != hashes[name]:
            return f"the bytes of {name} have changed (hash {now[:12]}, when written {hashes[name][:12]})"
    return ""


def resolve_resume(resume: Any, folder: str | Path) -> str | None:
    """Return the checkpoint that ``resume_from_checkpoint`` selects. A path is returned unchanged. True selects the last
    complete checkpoint in the folder.

    ``"auto"`` means True if the folder has a complete checkpoint, and None otherwise.

    Raises:
        CheckpointError: There is no checkpoint, there are only unmarked checkpoints, or the selected checkpoint is damaged.
    """
    if resume is None or resume is False or (resume == "auto" and not complete_checkpoints(folder)):
        return None
    if resume is True or resume == "auto":
        return str(_last(Path(folder)))
    path = Path(str(resume))
    if not path.is_dir():
        raise CheckpointError(f"resume_from_checkpoint={str(resume)!r} is not a folder. {_offer(path.parent)}")
    broken = damage(path, bytes_too=True)
    if broken and not broken.endswith(MISSING):
        raise CheckpointError(
            f"the checkpoint {str(path)!r} is incomplete: {broken}. {_offer(path.parent, path)} If the file was "
            f"changed on purpose, remove {MARKER} from the folder."
        )
    # Log only a warning, because files may be missing on purpose (for example, the optimizer state). Code that needs a
    # missing file raises an error.
    if broken:
        logger.warning("%s: %s since it was written.", path, broken)
    if marker(path) is None:
        logger.warning(
            "%s has no file %s: the checkpoint was written by another program, or writing was interrupted. It is "
            "used because its path was passed.", path, MARKER,
        )  # fmt: skip
    return str(resume)


# File name patterns of the weights in a checkpoint. The weights are those of a whole model, of an adapter, or of the shards
# of each rank.
WHOLE = ("model*.safetensors*", "pytorch_model.bin*", "pytorch_model-*")
ADAPTERS = ("adapter_model.*", "*/adapter_model.*")
PIECES = ("pytorch_model_fsdp*", "global_step*")


def refuse_unreadable(folder: Path, model: nn.Module) -> None:
    """Raise an error if this run cannot continue from the weights or the state in a folder. Without this check, torch would
    raise an unclear error or fail silently.

    Raises:
        CheckpointError: The folder is not a checkpoint, or its weights or state are missing. The error is also raised if the
            checkpoint has an adapter and the run has none (or vice versa), if the two adapters differ, or if peft does not
            save the adapter's encoder.
    """
    whole, adapter, pieces = (
        any(path for name in kind for path in folder.glob(name)) for kind in (WHOLE, ADAPTERS, PIECES)
    )
    needed = {"weights": whole or adapter or pieces, "trainer_state.json": (folder / "trainer_state.json").is_file()}
    if lost := [name for name, there in needed.items() if not there]:
        names = sorted(path.name for path in folder.iterdir())
        inside = [path for path in complete_checkpoints(folder) if not damage(path)]
        fix = f"Fix: resume from {str(inside[-1])!r}, in this folder." if inside else _offer(folder.parent, folder)
        raise CheckpointError(
            f"{str(folder)!r} is not a checkpoint from which training can continue: it lacks {' and '.join(lost)}, "
            f"and contains {names[:12]}. {fix}"
        )
    ours = adapters_of(model)
    if whole and ours and not adapter:
        raise CheckpointError(
            f"{str(folder)!r} contains a whole model, but this run trains an adapter ({', '.join(ours)}). Fix: "
            "continue without an adapter (use_peft, peft_config); or start a new run without resume_from_checkpoint, "
            "with the checkpoint as its model."
        )
    if adapter and not ours and not whole:
        raise CheckpointError(
            f"{str(folder)!r} contains an adapter, but this run trains the whole model. Fix: pass the adapter's "
            "settings (use_peft with lora_r and its other options, or peft_config; see "
            f"{str(folder / 'adapter_config.json')!r})."
        )
    if encoded := unsaved_encoders(model):
        raise CheckpointError(
            f"{str(folder)!r} contains the virtual tokens of the adapter {encoded[0]!r}, but not the encoder that "
            "computes them, because peft does not save it. Training cannot continue. Fix: train without an "
            "interruption, or use PROMPT_TUNING or prefix_projection=False."
        )
    other = [
        f"{name}={mine} (the checkpoint's: {its})"
        for adapter_name, config in ours.items()
        for name, its, mine in _changed_settings(
            folder if adapter_name == "default" else folder / adapter_name, config.to_dict()
        )
    ]
    if other:
        raise CheckpointError(
            f"{str(folder)!r} contains an adapter that differs from this run's adapter: {', '.join(other)}. Fix: use the "
            "checkpoint's values."
        )


def _changed_settings(folder: Path, now: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Yield each adapter setting that differs from the saved config: name, saved value and current value.

    Settings that change neither the weights nor the forward pass, such as dropout, are skipped.
    """
    before = read_json(folder / "adapter_config.json")
    for name in sorted(before.keys() & now.keys() - {*UNREAD}):
        its, mine = _written(before[name]), _written(now[name])
        # These initializations do not change the base weights, and a resumed run replaces the initial values.
        same = name == "init_lora_weights" and {str(its), str(mine)} <= {"True", "False", "gaussian", "orthogonal"}
        # Empty collections mean the same as None.
        if its != mine and (its or mine) and not same and "dropout" not in name:
            yield name, its, mine


def _written(value: object) -> object:
    """Return a setting in the form in which JSON stores it. Lists, such as module names, are sorted."""
    plain = json.loads(json.dumps(value, default=list))
    return sorted(plain) if isinstance(plain, list) else plain


# Texts for the warning about a setting that differs from the checkpoint's setting. Each text describes the effect of the
# difference.
OPTIMIZERS = "the optimizer continues with the checkpoint's value"
ORDER = "rows come in a different order from now on, so the run trains on some rows twice and never on other rows"
SCHEDULE = "the first step uses the learning rate of the checkpoint's schedule, and later steps use this run's schedule"
KEPT_SETTINGS = {
    "learning_rate": OPTIMIZERS, "weight_decay": OPTIMIZERS, "adam_beta1": OPTIMIZERS, "adam_beta2": OPTIMIZERS,
    "adam_epsilon": OPTIMIZERS, "seed": ORDER, "data_seed": ORDER, "max_steps": SCHEDULE, "lr_scheduler_type": SCHEDULE,
    "warmup_steps": SCHEDULE, "shuffle_dataset": ORDER, "train_sampling_strategy": ORDER, "packing": ORDER,
    "num_generations": ORDER,
}  # fmt: skip


def settings(args: TrainingArguments, max_steps: int) -> dict[str, object]:
    """Return the settings that must have the same values in a resumed run and in its checkpoint. The argument ``max_steps``
    is the actual number of steps, which may be computed from the number of epochs.
    """
    values = {name: getattr(args, name, None) for name in (*KEPT_SETTINGS, "optim")} | {"max_steps": max_steps}
    return {name: _written(value) for name, value in values.items()}


def refuse_other_run(state: Mapping[str, Any], method: str, optimizer: object) -> None:
    """Raise an error if the checkpoint's optimizer state is not usable in this run.

    Args:
        state: Saved state; see `saved_state`. Checkpoints of older releases do not contain method and optimizer.
        method: Class name of this run's method.
        optimizer: Value of ``optim`` in this run.

    Raises:
        CheckpointError: The checkpoint belongs to another method, or contains the state of another optimizer.
    """
    before, now = state.get("settings", {}), {"method": method, "optim": str(_written(optimizer))}
    other = [
        f"{name}={now[name]} (the checkpoint's: {before[name]})"
        for name in now  # The state of a fused optimizer has the same form.
        if before.get(name, now[name]).removesuffix("_fused") != now[name].removesuffix("_fused")
    ]
    if other:
        raise CheckpointError(
            f"{', '.join(other)}: the optimizer state of the checkpoint was saved with other settings. Fix: use the "
            "checkpoint's values; or start a new run without resume_from_checkpoint, with the checkpoint as its model."
        )


@contextlib.contextmanager
def refused_if_shapes_differ(folder: str) -> Iterator[None]:
    """Replace torch's error about weights with different shapes with a `CheckpointError`."""
    try:
        yield
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        shapes = str(error).split("\n\t", 2)[1].strip()
        raise CheckpointError(
            f"the weights in {str(folder)!r} do not fit this run's model: {shapes} Fix: resume with the model that the run "
            "started with; or start a new run without resume_from_checkpoint."
        ) from error


def warn_of_other_settings(state: Mapping[str, Any], now: Mapping[str, object]) -> None:
    """Log a warning for each setting that differs from the checkpoint's setting. The warning contains both values and the
    effect.
    """
    before = state.get("settings", {})
    by_effect: dict[str, list[str]] = {}
    for name, effect in KEPT_SETTINGS.items():
        if name in before and before[name] != now[name]:
            by_effect.setdefault(effect, []).append(f"{name}={now[name]} (the checkpoint's: {before[name]})")
    for effect, names in by_effect.items():
        logger.warning(
            "%s: %s. Fix: use the checkpoint's values. To use other values, start a new run with the "
                "checkpoint as its model.",
            ", ".join(names), effect,
        )  # fmt: skip


def refuse_other_rows(state: Mapping[str, Any], now: str | None, *, skips: bool) -> None:
    """Raise an error if a run would continue in the middle of an epoch with different rows than before.

    Args:
        state: Saved state; see `saved_state`.
        now: Result of `rows_fingerprint` for the current rows.
        skips: Whether the run continues at its saved position in the rows. False with ``ignore_data_skip``: the run then
            starts at the first row, so different rows are allowed.

    Raises:
        CheckpointError: The rows differ.
    """
    before = state.get("rows")
    if before == now or before is None or now is None:
        return
    text = f"the training rows have changed since the run began (then: {before}; now: {now})"
    if skips:
        raise CheckpointError(
            f"{text}. The saved position is invalid for the new rows: rows would be skipped or repeated. Fix: pass the same "
            "rows; or set ignore_data_skip=True to start at the first row; or start a new run with the checkpoint as model."
        )
    logger.warning("%s. With ignore_data_skip=True the run starts at the first row.", text)


def rows_fingerprint(dataset: object) -> str | None:
    """Return a string with the number of rows and a hash of 32 evenly spaced rows. For a stream, return ``"a stream"``.
    Return None for rows that are computed on access.
    """
    if isinstance(dataset, IterableDataset):
        return "a stream"
    supported = isinstance(dataset, list) or (isinstance(dataset, Dataset) and dataset.format["type"] != "custom")
    if not supported:
        return None
    rows = repr([dataset[number * len(dataset) // 32] for number in range(min(32, len(dataset)))])
    # Remove memory addresses, which the repr of an image contains.
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", rows).encode("utf-8", "replace")
    return f"{len(dataset)} rows, {xxhash.xxh3_64_hexdigest(text)[:8]}"


def _last(folder: Path) -> Path:
    damaged = []
    for path in reversed(complete_checkpoints(folder)):
        broken = damage(path, bytes_too=True)
        if not broken:
            return path
        logger.warning("%s is skipped: %s.", path, broken)
        damaged.append(f"{path.name} is damaged: {broken}.")
    unmarked = [path for path in _named(folder) if marker(path) is None]
    if unmarked:
        hint = (
            f"{len(unmarked)} checkpoints have no file {MARKER} ({', '.join(p.name for p in unmarked[:5])}): their writing was "
            f"interrupted, or another program wrote them. To use one: resume_from_checkpoint={str(unmarked[-1])!r}."
        )
    elif damaged:
        hint = (
            f"Start a new run in another folder. If the checkpoint was changed on purpose, remove its {MARKER} and "
            "pass its path."
        )
    else:
        hint = "Start without resume_from_checkpoint, or pass the folder of the run."
    raise CheckpointError(" ".join([f"there is no complete checkpoint in {str(folder)!r}.", *damaged, hint]))


def _offer(folder: Path, but: Path | None = None) -> str:
    whole = [path for path in complete_checkpoints(folder) if path != but and not damage(path)]
    return f"Complete: {', '.join(p.name for p in whole)}." if whole else f"{str(folder)!r} has no complete checkpoint."


def strangers(folder: str | Path, run: str) -> list[Path]:
    """Return the checkpoints in a folder that another run or program wrote, sorted by step."""
    return [path for path in _named(Path(folder)) if _owner(path) != run]


def _named(folder: Path) -> list[Path]:
    """Return all checkpoints of a folder, marked or not, sorted by step."""
    checkpoints = [p for p in folder.glob("checkpoint-*") if CHECKPOINT_NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(checkpoints, key=lambda p: int(p.name.rpartition("-")[2]))


def leftovers(folder: str | Path) -> list[Path]:
    """Return checkpoint folders that were only partly written or partly removed when the run was killed."""
    return sorted(path for path in Path(folder).glob("checkpoint-*") if UNFINISHED.fullmatch(path.name))


def rotate(folder: Path, run: str, limit: int | None, keep: str | None = None) -> list[Path]:
    """Remove the oldest complete checkpoints of this run until at most ``limit`` remain. Other runs' checkpoints are kept.

    If this run has a complete checkpoint, its unfinished checkpoints are also removed.

    Args:
        folder: Folder of the checkpoints.
        run: Id of this run.
        limit: Maximum number of checkpoints. None or 0: no limit.
        keep: Path of the best checkpoint, which is never removed.

    Returns:
        The removed checkpoints.
    """
    if not limit or limit < 0:
        return []
    mine = [path for path in complete_checkpoints(folder) if (marker(path) or {}).get("run") == run]
    best = Path(keep).name if keep else None
    room = max(limit, 2 if best and mine and mine[-1].name != best else 1)
    removable = [path for path in mine[:-1] if path.name != best]
    gone = removable[: max(0, len(mine) - room)]
    gone += [p for p in _named(folder) if mine and marker(p) is None and _owner(p) == run and p.name != best]
    # Rename the folders first. If the process is killed during removal, a partly removed checkpoint must not look complete.
    for path in gone:
        old = path.with_name(f"{path.name}.tmp-{run}.old")
        os.rename(path, old)
        shutil.rmtree(old, ignore_errors=True)
    return gone


def _free_name(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _flush_tree(folder: Path) -> None:
    """Wait until all files and folders below ``folder`` are on disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _flush_folder(path)


def _flush_folder(folder: Path) -> None:
    # Ignore errors, because some systems cannot open folders.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Error numbers (``errno``) of three errors: a full disk, an exhausted quota, and a file that exceeds the maximum size.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Texts in torch's error if it cannot write a file. This error does not contain the cause, such as a full disk.
TORCHS_WRITER = ("PytorchStreamWriter failed", "inline_container")


def _is_of_room(error: BaseException) -> bool:
    text = str(error)
    no_space = any(isinstance(e, OSError) and e.errno in NO_ROOM for e in _causes(error))
    return no_space or any(words in text for words in (*map(os.strerror, NO_ROOM), *TORCHS_WRITER))


@contextlib.contextmanager
def named_full_disk(folder: Path, size: Callable[[], int]) -> Iterator[None]:
    """Raise a clear error if a full disk prevents a model from being written completely."""
    try:
        yield
    except Exception as error:
        if not _is_of_room(error):
            raise
        raise CheckpointError(
            f"the model could not be written to {str(folder)!r}: {error} ({gib(free_disk(folder))} are free, the model needs "
            f"about {gib(size())}). The files in this folder are incomplete. Fix: free some space and save again, "
            "or resume from the last checkpoint."
        ) from error


STATE_FILE = "posttrain_state.json"


class Checkpointer:
    """Writes checkpoints atomically, and removes old checkpoints.

    A checkpoint is written to a temporary folder, which is then renamed. It is marked as complete after callbacks have added
    their files. Runs only resume from marked checkpoints.

    Args:
        args: The trainer's config: ``output_dir``, ``save_total_limit``.
        accelerator: Accelerator of the run.
        lock: Lock of the run's folder. The lock contains the id of the run.
        size: Function that returns the approximate size of a checkpoint in bytes.
    """

    def __init__(self, args: PostTrainingConfig, accelerator: Accelerator, lock: Any, size: Callable[[], int]) -> None:
        self.args, self.accelerator, self.lock, self.size = args, accelerator, lock, size
        # Id of the run that owns the folder. The main process broadcasts it to all ranks when training begins.
        self._run: str | None = None
        # Path of the latest checkpoint until it is marked as complete. Callbacks may still add files to it.
        self._unmarked: Path | None = None
        self.place = Place(None, accelerator)
        self._begun = False

    @property
    def run(self) -> str:
        """Id of the run that writes the checkpoints."""
        return self._run or self.lock.run

    def resolve(self, resume_from_checkpoint: Any, model: nn.Module) -> str | None:
        """Return the checkpoint to resume from. All ranks get the same result. A resumed run keeps its original run id."""
        with parallel.failing_together(self.accelerator):
            resume = resolve_resume(resume_from_checkpoint, self.args.output_dir)
            if resume:
                refuse_unreadable(Path(resume), model)
        if resume:
            parallel.refuse_other_optimizer(Path(resume), self.accelerator)
            logger.info("Resuming from %s.", resume)
        own = (marker(Path(resume)) or {}).get("run") if resume else None
        self._run = parallel.all_gather_objects([own or self.lock.run], self.accelerator)[0]
        self.lock.run, self.place = self._run, Place(resume, self.accelerator)
        return resume

    def take_folder(self, model: nn.Module, checks: Checks, *, resumed: bool) -> None:
        """Lock the run's folder, and report findings about disk space, memory and checkpoints of other runs. Only the main
        process calls this method.

        The folder is released if an error is raised.

        Args:
            model: Model whose weights and optimizer states will be written.
            checks: Checks of the run.
            resumed: Whether the run resumes from a checkpoint.
        """
        args, lock = self.args, self.lock
        saves = args.save_strategy != "no"
        # In a second call of train(), the optimizer states of the first call are still in memory.
        first, self._begun = not self._begun, True
        fills_gpu = first and args.device.type == "cuda" and not parallel.shards_parameters(self.accelerator)
        fills_gpu = fills_gpu and not keeps_on_host(args)
        checked = {"PT-L001": True, "PT-L002": saves, "PT-L003": fills_gpu}
        lock.acquire()
        try:
            with checks.preflight.record_check("config", [code for code, here in checked.items() if here]):
                findings = [_strangers_of(args, self.run, resumed=resumed)]
                if saves:
                    folder, needs = str(Path(args.output_dir).expanduser()), checkpoint_bytes(model, args)
                    findings += [
                        check_disk_space(free_disk(Path(folder)), needs, folder=folder, limit=args.save_total_limit)
                    ]
                if fills_gpu:
                    needed = _state_bytes(model, args) + sum(p.nbytes for p in model.parameters() if p.requires_grad)
                    about = {"device": str(args.device), "others": gpu_processes()}
                    findings += [check_gpu_memory(*gpu_memory(args.device), needed, **about)]
                checks.report(findings)
        except Exception:
            lock.release()
            raise

    def save(self, write: Callable[[Path], None], folder: Path, state: TrainerState) -> None:
        """Write a checkpoint with ``write`` and rename it to its final path. `complete` marks it later.

        Args:
            write: Function that writes a checkpoint into a folder. It is called on every rank.
            folder: Folder of the run's checkpoints.
            state: State of the trainer. Its field ``best_model_checkpoint`` is set to the folder of the best step.
        """
        self.complete(state)
        final = folder / f"checkpoint-{state.global_step}"
        part = staging(folder, state.global_step, self.run)
        if best := state.best_global_step:
            path = folder / f"checkpoint-{best}"
            if path == final or path.is_dir():
                state.best_model_checkpoint = str(path)
        with parallel.failing_together(self.accelerator):
            self._write(write, part, state)
        with parallel.failing_together(self.accelerator):
            self._publish(part, final, state)
        self._unmarked = final

    def _write(self, write: Callable[[Path], None], part: Path, state: Any) -> None:
        with self._all_or_nothing(part, state):
            if self.accelerator.is_main_process:
                self.lock.assert_owned()
            write(part)

    def _publish(self, part: Path, final: Path, state: Any) -> None:
        if self.args.should_save:
            with self._all_or_nothing(part, state):
                publish(part, final, self.run)

    def complete(self, state: Any) -> Path | None:
        """Mark the last checkpoint as complete, including the files of callbacks. Then remove old checkpoints.

        Returns:
            The folder of the checkpoint, or None if no checkpoint was written since the last call.
        """
        final, self._unmarked = self._unmarked, None
        if final is None:
            return None
        self.accelerator.wait_for_everyone()
        with parallel.failing_together(self.accelerator):
            self._mark(final, state)
        return final

    def _mark(self, final: Path, state: Any) -> None:
        if not self.args.should_save:
            return
        with self._all_or_nothing(final, state, remove=False):
            mark(final, self.run)
            rotate(final.parent, self.run, self.args.save_total_limit, state.best_model_checkpoint)

    @contextlib.contextmanager
    def _all_or_nothing(self, part: Path, state: Any, *, remove: bool = True) -> Iterator[None]:
        """Remove a checkpoint that could not be written completely. If the disk is full, the error names the last complete
        checkpoint.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if self.args.should_save and remove:
                shutil.rmtree(part, ignore_errors=True)
            if not _is_of_room(error):
                raise
            whole = last_complete_checkpoint(part.parent)
            raise CheckpointError(
                f"the checkpoint of step {state.global_step} could not be written into {str(part.parent)!r}: {error} "
                f"({gib(free_disk(part.parent))} are free, a checkpoint needs about {gib(self.size())}). "
                "Fix: free some space and "
                + (
                    f"resume from the last complete checkpoint, {whole.name}"
                    if whole
                    else "start again, because no complete checkpoint exists"
                )
                + ", or set save_total_limit, save_only_model=True, or another output_dir."
            ) from error


def save_state(folder: Path, state: dict[str, Any], accelerator: Accelerator) -> None:
    """Write the trainer's state that is needed in addition to weights. Each process writes its own file."""
    content = json.dumps(state | {"processes": accelerator.num_processes})
    (folder / f"{accelerator.process_index}_{STATE_FILE}").write_text(content, encoding="utf-8")


def saved_state(folder: str | None, accelerator: Accelerator) -> dict[str, Any]:
    """Return the state that `save_state` wrote for this process. If the number of processes has changed, return the state of
    the first process. If there is no file, return an empty dict.

    The states of processes differ only in three fields: unused rollouts, logged rows, and cached reference log-probs that
    processes have not exchanged yet. If the number of processes changed, `OnlineTrainer` raises an error for unused
    rollouts, and the log-probs are recomputed.
    """
    files = [] if folder is None else sorted(Path(folder).glob(f"*_{STATE_FILE}"))
    if not files:
        return {}
    own = accelerator.process_index if len(files) == accelerator.num_processes else 0
    return json.loads((files[0].parent / f"{own}_{STATE_FILE}").read_text(encoding="utf-8"))


class Place:
    """Position in the training rows and random states with which a resumed run continues.

    `transformers` counts the rows of a stream from the start of the first pass over the stream. It restores random states
    after the batches of the first step were read. At this time, an online method has already sampled and scored completions.
    This class therefore restores random states earlier.

    Attributes:
        checkpoint: Checkpoint whose random states must still be restored. None: they were restored, or the run is new.
        stream: Three numbers: the number of finished passes over the rows, the number of micro-batches read in the current
            pass, and the number of micro-batches in the last full pass (0 before the end of the first pass).
    """

    def __init__(self, checkpoint: str | None, accelerator: Accelerator) -> None:
        self.checkpoint, self.stream = checkpoint, [0, 0, 0]
        self._saved: list[int] | None = saved_state(checkpoint, accelerator).get("stream")
        self._iterator: Any = None

    def begin(self, start: tuple[int, int], dataset: AnyDataset, *, skips: bool) -> tuple[int, int]:
        """Return the index of the pass over the rows that a resumed run continues, and how many micro-batches of this pass
        it must skip.

        For a resumed stream, these two numbers are the saved position, or the start of the pass if ``skips`` is False.
        Otherwise, they are the argument ``start``.
        """
        if self._saved is None or not isinstance(dataset, IterableDataset):
            return start
        passes, drawn, *length = self._saved
        self.stream = [passes, drawn if skips else 0, *(length or [0])]
        return self.stream[0], self.stream[1]

    def draw(self, iterator: Any, count: int, requested: int) -> None:
        """Count the micro-batches that were read. A new iterator begins a new pass. The pass has ended if fewer than
        ``requested`` micro-batches were read.
        """
        passes, drawn, length = self.stream
        if iterator is not self._iterator:
            passes, drawn = (passes, drawn) if self._iterator is None else (passes + 1, 0)
            self._iterator = iterator
        drawn += count
        self.stream = [passes, drawn, drawn if count < requested else length]

    def epoch(self, estimate: float | None) -> float | None:
        """Return the number of passes over the rows, as a fraction. The length of a stream is unknown until its first pass
        has ended. Until then, return ``estimate``.
        """
        passes, drawn, length = self.stream
        return passes + min(drawn / length, 1.0) if length else estimate

    def restores_random(self) -> bool:
        """Return whether random states must be restored now. Only the first call after a resume returns True."""
        pending, self.checkpoint = self.checkpoint, None
        return pending is not None


def warn_of_other_rows(state: dict[str, Any], now: int) -> None:
    """Log a warning if the number of rows per optimizer step has changed since the checkpoint was written."""
    before = state.get("step_rows", now)
    if before != now:
        logger.warning(
            "a step of this checkpoint's run took %d rows, but a step of this run takes %d. The position in the epoch is "
            "counted in steps, so rows are skipped or used twice. Fix: choose per_device_train_batch_size * "
            "gradient_accumulation_steps * processes = %d.", before, now, before,
        )  # fmt: skip


def export_callbacks(callbacks: Iterable[Any], state: Any) -> None:
    """Store the state of stateful callbacks in the trainer's state. `transformers` reads it when a run resumes."""
    for holder in callbacks:
        if isinstance(holder, ExportableState):
            name, states = type(holder).__name__, state.stateful_callbacks
            if isinstance(states.get(name), list):
                states[name].append(holder.state())
            else:
                states[name] = holder.state()


def _strangers_of(args: PostTrainingConfig, run: str, *, resumed: bool) -> Finding | None:
    """Return a finding about checkpoints of other runs. In addition, remove unfinished checkpoint folders of killed runs."""
    folder = Path(args.output_dir).expanduser()
    others = strangers(folder, run)
    # This run holds the lock of the output folder, so no other process is writing these folders. They can be removed.
    for path in leftovers(folder):
        logger.warning("%s was only partly written by a run that was killed. The folder is removed.", path)
        shutil.rmtree(path, ignore_errors=True)
    return check_strangers([path.name for path in others], folder=str(folder), resumed=resumed)


def checkpoint_bytes(model: nn.Module, args: PostTrainingConfig) -> int:
    """Estimate the disk space of a checkpoint, in bytes. It is the size of the optimizer state plus the size of the saved
    weights.
    """
    return weight_bytes(model) + (0 if args.save_only_model else _state_bytes(model, args))


def weight_bytes(model: nn.Module) -> int:
    """Return the size in bytes of the weights in a checkpoint. If the model has an adapter, a checkpoint contains only the
    adapter's weights.
    """
    adapter = bool(adapters_of(model))
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not adapter)


def _state_bytes(model: nn.Module, args: PostTrainingConfig) -> int:
    sizes = [(p.numel(), p.nbytes) for p in model.parameters() if p.requires_grad]
    return optimizer_bytes(args.optim, sizes)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# Signals that end a run. They are sent by Ctrl-C, by a scheduler or launcher before it kills a process, and by a closed
# terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Number of seconds between the second signal and the forced end of the process. In this time, the process can clean up.
SECONDS_TO_END = 10.0


def _forget_wakeup() -> None:
    """Disable the signal wakeup in forked processes, because only the training process counts signals."""
    signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_wakeup)


def _signals() -> list[signal.Signals]:
    """Return the signals to handle. Under `nohup`, SIGHUP (closed terminal) is excluded, because it is ignored."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _give_back(handlers: Mapping[int, Any]) -> None:
    """Restore the handlers that `signal.signal` returned. If a handler is None, it was not set from Python and cannot be
    restored.
    """
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def without_signals() -> Iterator[None]:
    """Delay the handling of the first signal until a model is completely written. A second signal stops the process
    immediately.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def remember(number: int, _: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        logger.warning(
            "%s: the model is being written. The process ends after that. Send the signal again to stop at once.",
            signal.Signals(number).name,
        )

    before = {number: signal.signal(number, remember) for number in _signals()}
    try:
        yield
    finally:
        _give_back(before)
    if caught:
        handler = before[caught[0]]
        # Call a Python handler directly, because raising the signal would count it twice.
        handler(caught[0], None) if callable(handler) else signal.raise_signal(caught[0])


def _leave_terminal(shown: list[int]) -> None:
    """Send the output of a closed terminal to the null device. Otherwise, writing to it would raise an error and end the
    run without a checkpoint.
    """
    for number in shown:
        if not os.isatty(number):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


class EvaluationStopped(Exception):
    """Raised to stop an evaluation early after a signal requested the end of the run."""


def owes_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether an interruption skipped the evaluation that was due after the last step of ``state``."""
    if not state.global_step or any(
        row.get("step") == state.global_step and any(key.startswith("eval_") for key in row)
        for row in state.log_history
    ):
        return False
    if args.eval_strategy == transformers.IntervalStrategy.EPOCH:
        epoch = float(state.epoch or 0)
        return epoch.is_integer() and epoch >= args.eval_delay
    due = state.global_step % (state.eval_steps or 1) == 0 or state.global_step >= state.max_steps
    return args.eval_strategy == transformers.IntervalStrategy.STEPS and due and state.global_step >= args.eval_delay


class GracefulInterrupt(transformers.TrainerCallback):
    """Handles signals during training. The first SIGINT, SIGTERM or SIGHUP stops the run after the current step or
    evaluation batch. The second signal stops the run at once.

    The second signal raises KeyboardInterrupt in the main thread. This exception may not end the process, for example if a
    collective operation waits for a dead process, or if a hook catches every exception. A second thread then ends the
    process.

    Attributes:
        requested: Whether a signal requested the end of the run, on any rank.
    """

    def __init__(self) -> None:
        self.requested = False
        self._accelerator: Any = None
        self._process, self._began = 0, time.monotonic()
        self._previous: dict[int, Any] = {}
        self._over = threading.Event()
        self._sender: socket.socket | None = None
        self._wakeup = -1
        self._terminals: list[int] = []  # File descriptors of terminals that show output.
        self._evaluates = False

    def _on_signal(self, number: int, frame: Any) -> None:
        # A forked process received the signal, for example a process of a reward function.
        if os.getpid() != self._process:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGHUP:
            _leave_terminal(self._terminals)
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning(
            "%s: finishing this step or batch, then saving a checkpoint. Press Ctrl-C or send the signal again "
            "to stop at once.",
            signal.Signals(number).name,
        )

    def install(self, accelerator: Accelerator) -> None:
        """Install the signal handlers. Outside of the main thread, do nothing."""
        self._accelerator, self._process, self.requested = accelerator, os.getpid(), False
        self._began = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in _signals()}
            self._over.clear()
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
            receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            # Python writes to this socket when a signal arrives, even if the main thread is blocked.
            self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._end_on_second, args=(receiver,), daemon=True).start()

    def _end_on_second(self, receiver: socket.socket) -> None:
        """End the process `SECONDS_TO_END` seconds after the second signal, unless training ends first."""
        caught: list[int] = []
        with receiver:
            while len(caught) < 2:
                numbers = receiver.recv(64)
                if not numbers:
                    return
                caught += [number for number in numbers if number in SIGNALS]
        if not self._over.wait(SECONDS_TO_END):
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            os._exit(128 + caught[-1])

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        self._over.set()
        if self._sender is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._sender.close()
            self._sender = None
        _give_back(self._previous)
        self._previous, self._accelerator = {}, None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> Any:
        """Request that the loop logs, saves and stops. All ranks stop after the same step, even if only one rank received
        the signal.
        """
        # Read the flag only once. A signal that arrives later then applies to the next step.
        stop, late = (
            self.requested,
            args.max_hours is not None and time.monotonic() - self._began > args.max_hours * 3600,
        )
        if self._accelerator is not None:
            stop, late = (count > 0 for count in parallel.all_reduce_sum([float(stop), float(late)], self._accelerator))
        if late:
            logger.warning(
                "max_hours=%g has passed after step %d. Saving a checkpoint and stopping.",
                args.max_hours,
                state.global_step,
            )
        self.requested = self.requested or stop
        if stop or late:
            control.should_log = control.should_save = control.should_training_stop = True
        control.should_evaluate = control.should_evaluate and not stop
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        """Skip the evaluation if a signal requested the end of the run."""
        control.should_evaluate = control.should_evaluate and not (self.requested and control.should_training_stop)
        return control

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Mark the evaluation inside the context as an evaluation of the training loop. Only such an evaluation is stopped
        early.
        """
        self._evaluates = True
        try:
            yield
        finally:
            self._evaluates = False

    def leave_evaluation(self) -> None:
        """Stop an evaluation of the loop if any rank received a signal. All ranks stop after the same batch.

        Raises:
            EvaluationStopped: A rank received a signal.
        """
        if self._accelerator is None or not self._evaluates:
            return
        (ranks,) = parallel.all_reduce_sum([float(self.requested)], self._accelerator)
        if ranks:
            self.requested = True
            raise EvaluationStopped
