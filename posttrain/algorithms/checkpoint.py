"""What a checkpoint holds beyond transformers' own, so that a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.checks.training import check_special_tokens
from posttrain.data.chat import turn_end
from posttrain.models.forward import causal_lm
from posttrain.report.card import create_model_card
from posttrain.types import Finding

__all__ = ["CheckpointMixin"]

STATE_FILE = "posttrain_state.json"


class CheckpointMixin:
    """Saves and restores `state_to_save` of `PostTrainer` beside each rank's random state."""

    accelerator: Any
    counters: dict[str, float]
    model: Any
    processing_class: Any
    _tokens_checked = False

    def create_model_card(
        self, model_name: str | None = None, dataset_name: Any = None, tags: Any = None, **_: Any
    ) -> None:
        """Write ``<output_dir>/README.md``: what the model is, how it was trained, how it is used."""
        create_model_card(self, model_name, dataset_name, tags)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `transformers.Trainer.save_model`; what the saved configs say of padding and stopping is looked at, once."""
        if not self._tokens_checked:
            self._tokens_checked = True
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

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.create_model_card()
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

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
