"""A sequence-classification model as a reward function."""

from __future__ import annotations

import logging
from typing import Any

import torch

from posttrain.errors import ModelError

__all__ = ["ModelReward"]

logger = logging.getLogger(__name__)


class ModelReward:
    """Scores prompt and completion with a reward model, in sub-batches, cut from the left at the model's context.

    Args:
        model: Folder, hub id or model with ``num_labels=1``.
        tokenizer: The reward model's own; None loads it.
        batch_size: Rows of one forward pass.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, batch_size: int = 8) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if isinstance(model, str):
            model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        if model.config.num_labels != 1:
            raise ModelError(
                f"a reward model needs num_labels=1, and {type(model).__name__} has {model.config.num_labels}."
            )
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer or AutoTokenizer.from_pretrained(model.config._name_or_path)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.batch_size = batch_size
        self.__name__ = str(model.config._name_or_path or type(model).__name__).split("/")[-1]
        self._cut = 0

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt + completion)["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(prompt + completion, tokenize=True, return_dict=True)["input_ids"]
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and len(ids) > limit:
            self._cut += 1
            if self._cut == 1:
                logger.warning(
                    "the reward model %s reads %d tokens: longer texts lose their beginning.", self.__name__, limit
                )
            ids = ids[-limit:]
        return ids

    @torch.inference_mode()
    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        """One score a row, read at the last real token (found by position, not by comparing ids with pad)."""
        rows = [self._ids(p, c) for p, c in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            scores += self._forward(rows[start : start + self.batch_size])
        return scores

    def _forward(self, rows: list[list[int]]) -> list[float]:
        width, device = max(map(len, rows)), next(self.model.parameters()).device
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        hidden = self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(rows), device=device), mask.sum(1) - 1]
        head = getattr(self.model, "score", None) or self.model.classifier
        return head(last).float()[:, 0].tolist()
