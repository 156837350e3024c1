"""Checkpoints that are whole or not there, and hold all that a resumed run needs to equal an uninterrupted one."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState

from posttrain.checks.machine import check_disk_space, check_gpu_memory, check_strangers, size
from posttrain.checks.training import check_special_tokens
from posttrain.data.chat import turn_end
from posttrain.errors import CheckpointError
from posttrain.integrations.machine import free_disk, gpu_memory, gpu_processes
from posttrain.models import parallel
from posttrain.models.forward import causal_lm
from posttrain.report import checkpoints
from posttrain.training.checks import Checks
from posttrain.types import Finding

__all__ = [
    "STATE_FILE",
    "Checkpointer",
    "MachineChecks",
    "checkpoint_bytes",
    "export_callbacks",
    "special_token_findings",
]

logger = logging.getLogger(__name__)

STATE_FILE = "posttrain_state.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # The disk, the quota or the size a file may have is used up.
# Numbers of optimiser state a parameter, by what the optimiser's name holds; others keep two, as Adam does.
STATES = {"sgd": 0, "adafactor": 0, "lion": 1, "adagrad": 1, "rmsprop": 1}


class Checkpointer:
    """Writes checkpoints that are whole or not there, and removes those that are superfluous.

    A checkpoint is written into a folder of its own, moved to its place, and marked as whole once callbacks have added
    what is theirs; only marked ones are resumed from.

    Args:
        args: The trainer's config: ``output_dir``, ``save_total_limit``.
        accelerator: Of the run.
        lock: Of the run's folder; names the run.
        size: Bytes that a checkpoint takes, about.
    """

    def __init__(self, args: Any, accelerator: Any, lock: Any, size: Callable[[], int]) -> None:
        self.args, self.accelerator, self.lock, self.size = args, accelerator, lock, size
        # The run that owns the folder, told to all ranks when training begins.
        self._run: str | None = None
        # A checkpoint whose callbacks may still add to it.
        self._unmarked: Path | None = None

    @property
    def run(self) -> str:
        """The run that checkpoints belong to."""
        return self._run or self.lock.run

    def resolve(self, resume_from_checkpoint: Any) -> str | None:
        """The checkpoint to resume from, the same on all ranks; a resumed run goes on under the name of its first part."""
        resume = parallel.run_and_share(
            lambda: checkpoints.resolve_resume(resume_from_checkpoint, self.args.output_dir), self.accelerator
        )
        own = (checkpoints.marker(Path(resume)) or {}).get("run") if resume else None
        self._run = parallel.all_gather_objects([own or self.lock.run], self.accelerator)[0]
        self.lock.run = self._run
        return resume

    def save(self, write: Callable[[Path], None], folder: Path, state: Any) -> Path:
        """Let ``write`` fill a checkpoint and put it in its place, still unmarked.

        Args:
            write: Called on every rank with the folder to write into.
            folder: Where checkpoints of the run are.
            state: The trainer's; ``best_model_checkpoint`` is set where the best step's folder is known.
        """
        self.complete(state)
        final = folder / f"checkpoint-{state.global_step}"
        part = checkpoints.staging(folder, state.global_step, self.run)
        if best := state.best_global_step:
            path = folder / f"checkpoint-{best}"
            if path == final or path.is_dir():
                state.best_model_checkpoint = str(path)
        parallel.run_and_share(lambda: self._write(write, part, state), self.accelerator)
        parallel.run_and_share(lambda: self._publish(part, final, state), self.accelerator)
        self._unmarked = final
        return final

    def _write(self, write: Callable[[Path], None], part: Path, state: Any) -> None:
        with self._whole_or_nothing(part, state):
            if self.accelerator.is_main_process:
                self.lock.assert_held()
            write(part)

    def _publish(self, part: Path, final: Path, state: Any) -> None:
        if self.args.should_save:
            with self._whole_or_nothing(part, state):
                checkpoints.publish(part, final, self.run)

    def complete(self, state: Any) -> None:
        """Mark the checkpoint that was written last, callbacks included, then remove those it makes superfluous."""
        final, self._unmarked = self._unmarked, None
        if final is None:
            return
        self.accelerator.wait_for_everyone()
        parallel.run_and_share(lambda: self._mark(final, state), self.accelerator)

    def _mark(self, final: Path, state: Any) -> None:
        if not self.args.should_save:
            return
        with self._whole_or_nothing(final, state, remove=False):
            checkpoints.mark(final, self.run)
            checkpoints.rotate(final.parent, self.run, self.args.save_total_limit, state.best_model_checkpoint)

    @contextlib.contextmanager
    def _whole_or_nothing(self, part: Path, state: Any, *, remove: bool = True) -> Iterator[None]:
        """What goes wrong while a checkpoint is written leaves nothing of it; the error names what is still there."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if self.args.should_save and remove:
                shutil.rmtree(part, ignore_errors=True)
            cause = next((e for e in _causes(error) if isinstance(e, OSError) and e.errno in FULL), None)
            text = str(error)
            if cause is None and not any(os.strerror(code) in text for code in FULL):
                raise
            whole = checkpoints.last_complete_checkpoint(part.parent)
            raise CheckpointError(
                f"the checkpoint of step {state.global_step} could not be written into {str(part.parent)!r}: {text} "
                f"({size(free_disk(part.parent))} are free, a checkpoint needs about {size(self.size())}). Nothing "
                "half-written was left; "
                + (
                    f"the last whole one is {whole.name}: free some space and resume from it"
                    if whole
                    else "there is none yet"
                )
                + ", or set save_total_limit, save_only_model=True, or another output_dir."
            ) from error


def export_callbacks(callbacks: Iterable[Any], state: Any) -> None:
    """Put the state of callbacks that have one into the trainer's, as `transformers` reads it on resuming."""
    for holder in callbacks:
        if isinstance(holder, ExportableState):
            name, kept = type(holder).__name__, state.stateful_callbacks
            if isinstance(kept.get(name), list):
                kept[name].append(holder.state())
            else:
                kept[name] = holder.state()


def special_token_findings(model: Any, tokenizer: Any) -> list[Finding]:
    """What the configs that are saved say of padding and stopping."""
    generation = getattr(causal_lm(model), "generation_config", None)
    if generation is None:
        return []
    end = turn_end(tokenizer)
    return check_special_tokens(
        pad=tokenizer.pad_token_id,
        eos=tokenizer.eos_token_id,
        generation_pad=generation.pad_token_id,
        generation_eos=generation.eos_token_id,
        turn_end=tokenizer.convert_tokens_to_ids(end) if end else None,
    )


class MachineChecks:
    """Disk, memory and foreign checkpoints, checked before a run begins.

    Args:
        model: With the parameters that are trained.
        args: The trainer's config.
        shards: Whether parameters are sharded over processes.
    """

    def __init__(self, model: Any, args: Any, *, shards: bool) -> None:
        self.model, self.args = model, args
        self.saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        self.fills_gpu = args.device.type == "cuda" and not shards

    @property
    def codes(self) -> tuple[str, ...]:
        """What is looked for."""
        asked = {"PT-L001": True, "PT-L002": self.saves, "PT-L003": self.fills_gpu}
        return tuple(code for code, here in asked.items() if here)

    def begin(self, checks: Checks, checkpointer: Checkpointer, *, resumed: bool) -> None:
        """Take the run's folder and report what is found; the main process alone. The folder is free again on an error."""
        checkpointer.lock.acquire()
        try:
            with checks.preflight.looking("config", self.codes):
                checks.tell(self.findings(checkpointer.run, resumed=resumed))
        except Exception:
            checkpointer.lock.release()
            raise

    def findings(self, run: str, *, resumed: bool) -> Iterable[Finding | None]:
        """What was found; folders that a killed run left half-written are removed.

        Args:
            run: The run that the folder belongs to.
            resumed: Whether it goes on from a checkpoint.
        """
        folder = Path(self.args.output_dir).expanduser()
        others = checkpoints.strangers(folder, run)
        # The folder is ours, so nobody writes them any more.
        for path in checkpoints.leftovers(folder):
            logger.warning("%s was left half-written by a run that was killed; it is removed.", path)
            shutil.rmtree(path, ignore_errors=True)
        yield check_strangers([path.name for path in others], folder=str(folder), resumed=resumed)
        needs = checkpoint_bytes(self.model, self.args)
        if self.saves:
            yield check_disk_space(free_disk(folder), needs, folder=str(folder), limit=self.args.save_total_limit)
        if self.fills_gpu:
            free, total = gpu_memory(self.args.device)
            needed = _state_bytes(self.model, self.args) + sum(
                p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad
            )
            yield check_gpu_memory(free, total, needed, device=str(self.args.device), others=gpu_processes())


def checkpoint_bytes(model: Any, args: Any) -> int:
    """About what a checkpoint takes on the disk: weights (of an adapter its own alone) and the optimiser's state."""
    adapter = hasattr(model, "peft_config")
    seen = [p for p in model.parameters() if p.requires_grad or not adapter]
    weights = sum(p.numel() * p.element_size() for p in seen)
    return weights + (0 if args.save_only_model else _state_bytes(model, args))


def _state_bytes(model: Any, args: Any) -> int:
    """Bytes of an optimiser's state, in the dtype of the weights; one byte a number where its name says 8 bits."""
    name = str(getattr(args.optim, "value", args.optim)).lower()
    states = next((count for part, count in STATES.items() if part in name), 2)
    trained = [p for p in model.parameters() if p.requires_grad]
    return states * sum(p.numel() * (1 if "8bit" in name else p.element_size()) for p in trained)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
