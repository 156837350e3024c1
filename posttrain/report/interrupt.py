"""Ctrl-C, or SIGTERM, that loses nothing: the step in progress is finished, a checkpoint is saved, then the run ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import transformers

from posttrain.models import parallel

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["GracefulInterrupt"]

logger = logging.getLogger(__name__)


SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C; what Slurm, Kubernetes and launchers send before they kill.


class GracefulInterrupt(transformers.TrainerCallback):
    """While training runs, the first SIGINT or SIGTERM asks it to stop after the current step; the second stops it at once.

    Attributes:
        requested: Whether the run was asked to stop; with several ranks, whether any of them was.
    """

    def __init__(self) -> None:
        self.requested = False
        self._accelerator: Accelerator | None = None
        self._process = 0
        self._previous: dict[int, Any] = {}

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # A fork, of a reward function say, whom somebody terminates.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning(
            "%s: finishing this step, then saving a checkpoint. Press Ctrl-C again, or send it again, to stop at once.",
            signal.Signals(number).name,
        )

    def install(self, accelerator: Accelerator) -> None:
        """Take over the signals; only the main thread can."""
        self._accelerator, self._process, self.requested = accelerator, os.getpid(), False
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Ask the loop to log, save and stop; all ranks after the same step, whichever of them was told."""
        stop = self.requested  # Read once: a signal that comes meanwhile is for the next step.
        if self._accelerator is not None:
            stop = parallel.all_reduce_sum([float(stop)], self._accelerator)[0] > 0
        if stop:
            self.requested = True
            control.should_log = control.should_save = control.should_training_stop = True
        return control
