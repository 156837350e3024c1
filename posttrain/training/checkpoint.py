"""Checkpoints that are whole or not there, and hold all that a resumed run needs to equal an uninterrupted one."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator
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
from posttrain.report.card import create_model_card
from posttrain.types import Finding

__all__ = ["CheckpointMixin", "checkpoint_bytes"]

logger = logging.getLogger(__name__)

STATE_FILE = "posttrain_state.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # The disk, the quota or the size a file may have is used up.
# Numbers of optimiser state a parameter, by what the optimiser's name holds; others keep two, as Adam does.
STATES = {"sgd": 0, "adafactor": 0, "lion": 1, "adagrad": 1, "rmsprop": 1}


class CheckpointMixin:
    """Writes checkpoints for `PostTrainer`, resumes from them, and looks at the machine before a run begins."""

    accelerator: Any
    args: Any
    counters: dict[str, float]
    model: Any
    processing_class: Any
    record: Any
    state: Any
    _tokens_checked = False
    _unmarked: Path | None = None  # A checkpoint whose callbacks may still add to it.
    _in_loop = False
    _run: str | None = None

    def create_model_card(
        self, model_name: str | None = None, dataset_name: Any = None, tags: Any = None, **_: Any
    ) -> None:
        """Write ``<output_dir>/README.md``: what the model is, how it was trained, how it is used."""
        create_model_card(self, model_name, dataset_name, tags)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `transformers.Trainer.save_model`; what the saved configs say of padding and stopping is looked at, once."""
        if not self._tokens_checked:
            self._tokens_checked = True
            with self.preflight.looking("config", ("PT-K101", "PT-K102", "PT-K103")):  # type: ignore[attr-defined]
                self.tell(self._special_tokens())  # type: ignore[attr-defined]
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _special_tokens(self) -> list[Finding]:
        generation = getattr(causal_lm(self.model), "generation_config", None)
        if generation is None:
            return []
        tokenizer = self.processing_class
        end = turn_end(tokenizer)
        return check_special_tokens(
            pad=tokenizer.pad_token_id,
            eos=tokenizer.eos_token_id,
            generation_pad=generation.pad_token_id,
            generation_eos=generation.eos_token_id,
            turn_end=tokenizer.convert_tokens_to_ids(end) if end else None,
        )

    # Before training ---------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Resolve what to resume from, look at disk and memory, then train as the parent does."""
        resume = parallel.run_and_share(
            lambda: checkpoints.resolve_resume(resume_from_checkpoint, self.args.output_dir), self.accelerator
        )
        if resume is not None:
            self.args.resume_from_checkpoint = resume  # Callbacks find their own state by it.
        own = (checkpoints.marker(Path(resume)) or {}).get("run") if resume else None
        self._run = parallel.all_gather_objects([own or self.record.lock.run], self.accelerator)[0]
        self.record.lock.run = self._run
        parallel.run_and_share(lambda: self._look_at_machine(resumed=resume is not None), self.accelerator)
        if not self.args.max_grad_norm and not self.is_deepspeed_enabled:  # type: ignore[attr-defined]
            self.args.max_grad_norm = (
                math.inf
            )  # Nothing is clipped; but at 0 no norm is taken, and NaN reaches the weights.
        return super().train(resume, **kwargs)  # type: ignore[misc]

    def _look_at_machine(self, *, resumed: bool) -> None:
        if not self.accelerator.is_main_process:
            return
        folder = Path(self.args.output_dir).expanduser()
        self.record.lock.acquire()
        try:
            with self.preflight.looking("config", self._machine_codes()):  # type: ignore[attr-defined]
                self.tell(self._machine_findings(folder, resumed=resumed))  # type: ignore[attr-defined]
        except Exception:
            self.record.lock.release()
            raise

    @property
    def _saves(self) -> bool:
        return str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) != "no"

    @property
    def _fills_gpu(self) -> bool:
        return self.args.device.type == "cuda" and not parallel.shards_parameters(self.accelerator)

    def _machine_codes(self) -> tuple[str, ...]:
        asked = {"PT-L001": True, "PT-L002": self._saves, "PT-L003": self._fills_gpu}
        return tuple(code for code, here in asked.items() if here)

    def _machine_findings(self, folder: Path, *, resumed: bool) -> Iterable[Finding | None]:
        others = checkpoints.strangers(folder, self._run or "")
        for path in checkpoints.leftovers(folder):  # The folder is ours, so nobody writes them any more.
            logger.warning("%s was left half-written by a run that was killed; it is removed.", path)
            shutil.rmtree(path, ignore_errors=True)
        yield check_strangers([path.name for path in others], folder=str(folder), resumed=resumed)
        needs = checkpoint_bytes(self.model, self.args)
        if self._saves:
            yield check_disk_space(free_disk(folder), needs, folder=str(folder), limit=self.args.save_total_limit)
        if self._fills_gpu:
            free, total = gpu_memory(self.args.device)
            needed = _state_bytes(self.model, self.args) + sum(
                p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad
            )
            yield check_gpu_memory(free, total, needed, device=str(self.args.device), others=gpu_processes())

    # Writing -----------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._in_loop = True
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._in_loop = False
        self._complete_checkpoint()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.create_model_card()
        self._complete_checkpoint()
        run = self._run or self.record.lock.run
        folder = Path(self._get_output_dir(trial=trial))  # type: ignore[attr-defined]
        final = folder / f"checkpoint-{self.state.global_step}"
        part = checkpoints.staging(folder, self.state.global_step, run)
        if trial is None and self.hp_search_backend is None:  # type: ignore[attr-defined]
            self.store_flos()  # type: ignore[attr-defined]
        if best := self.state.best_global_step:
            path = folder / f"checkpoint-{best}"
            if path == final or path.is_dir():
                self.state.best_model_checkpoint = str(path)
        parallel.run_and_share(lambda: self._write_checkpoint(part), self.accelerator)
        parallel.run_and_share(lambda: self._publish(part, final, run), self.accelerator)
        self._unmarked = final
        if not self._in_loop:
            self._complete_checkpoint()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))  # type: ignore[attr-defined]

    def _write_checkpoint(self, part: Path) -> None:
        """Everything of a checkpoint, beside its place."""
        with self._whole_or_nothing(part):
            if self.accelerator.is_main_process:
                self.record.lock.assert_held()
            self.save_model(str(part), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(part))  # type: ignore[attr-defined]
                self._save_scaler(str(part))  # type: ignore[attr-defined]
                self._save_rng_state(str(part))
            if self.args.should_save:
                self._save_callbacks()
                self.state.save_to_json(str(part / "trainer_state.json"))

    def _save_callbacks(self) -> None:
        """Put the state of callbacks that have one into the trainer's, as `transformers` reads it on resuming."""
        for holder in (*self.callback_handler.callbacks, self.control):  # type: ignore[attr-defined]
            if isinstance(holder, ExportableState):
                name, kept = type(holder).__name__, self.state.stateful_callbacks
                if isinstance(kept.get(name), list):
                    kept[name].append(holder.state())
                else:
                    kept[name] = holder.state()

    def _publish(self, part: Path, final: Path, run: str) -> None:
        if self.args.should_save:
            with self._whole_or_nothing(part):
                checkpoints.publish(part, final, run)

    def _complete_checkpoint(self) -> None:
        """Mark the checkpoint that was written last, callbacks included, then remove those it makes superfluous."""
        final, self._unmarked = self._unmarked, None
        if final is None:
            return
        self.accelerator.wait_for_everyone()
        parallel.run_and_share(lambda: self._mark(final), self.accelerator)

    def _mark(self, final: Path) -> None:
        if not self.args.should_save:
            return
        run = self._run or self.record.lock.run
        with self._whole_or_nothing(final, remove=False):
            checkpoints.mark(final, run)
            checkpoints.rotate(final.parent, run, self.args.save_total_limit, self.state.best_model_checkpoint)

    @contextlib.contextmanager
    def _whole_or_nothing(self, part: Path, *, remove: bool = True) -> Iterator[None]:
        """What goes wrong while a checkpoint is written leaves nothing of it, and says what is still there."""
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
                f"the checkpoint of step {self.state.global_step} could not be written into {str(part.parent)!r}: {text} "
                f"({size(free_disk(part.parent))} are free, a checkpoint needs about "
                f"{size(checkpoint_bytes(self.model, self.args))}). Nothing half-written was left; "
                + (
                    f"the last whole one is {whole.name}: free some space and resume from it"
                    if whole
                    else "there is none yet"
                )
                + ", or set save_total_limit, save_only_model=True, or another output_dir."
            ) from error

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        name = f"{self.accelerator.process_index}_{STATE_FILE}"
        Path(output_dir, name).write_text(json.dumps(self.state_to_save()), encoding="utf-8")

    # Reading -----------------------------------------------------------------------------------------------------

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        path = Path(checkpoint, f"{self.accelerator.process_index}_{STATE_FILE}")
        if path.is_file():
            self.load_saved_state(json.loads(path.read_text(encoding="utf-8")))

    def state_to_save(self) -> dict[str, Any]:
        """What a checkpoint must hold beyond the parent's, as JSON, for a resumed run to equal an uninterrupted one."""
        return {"counters": self.counters}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Undo `state_to_save`."""
        self.counters = state["counters"]


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
