"""What a checkpoint holds beyond transformers' own, so that a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["CheckpointMixin"]

STATE_FILE = "posttrain_state.json"


class CheckpointMixin:
    """Saves and restores `state_to_save` of `PostTrainer` beside each rank's random state."""

    accelerator: Any
    counters: dict[str, float]

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        name = f"{self.accelerator.process_index}_{STATE_FILE}"
        Path(output_dir, name).write_text(json.dumps(self.state_to_save()), encoding="utf-8")

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
