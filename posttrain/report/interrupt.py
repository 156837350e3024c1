"""Ctrl-C that loses nothing: the step in progress is finished, a checkpoint is saved, then the run ends."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

import transformers

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["GracefulInterrupt"]

logger = logging.getLogger(__name__)


class GracefulInterrupt(transformers.TrainerCallback):
    """While training runs, the first SIGINT asks it to stop after the current step; the second stops it at once.

    Attributes:
        requested: Whether the run was asked to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning(
            "Interrupted: finishing this step, then saving a checkpoint. Press Ctrl-C again to stop at once."
        )

    def install(self) -> None:
        """Take over SIGINT; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def restore(self) -> None:
        """Give SIGINT back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Ask the loop to log, save and stop."""
        if self.requested:
            control.should_log = control.should_save = control.should_training_stop = True
        return control
