"""A sequence classifier that scores the policy's own token ids: no text in between, nothing is tokenised twice."""

from __future__ import annotations

import logging
from typing import Any

import torch

from posttrain.data.forest import collate
from posttrain.models.attention import probe_layout
from posttrain.models.forward import forward, install_token_head
from posttrain.rewards.model import refuse_alike
from posttrain.types import Row

__all__ = ["TokenReward"]

logger = logging.getLogger(__name__)


class TokenReward:
    """Scores prompt and response ids at the response's last token, found by position.

    Args:
        model: A sequence classifier with one label and the policy's vocabulary.
        pad_token_id: Written to padding, never read.
        batch_size: Responses that are evaluated together.
    """

    def __init__(self, model: Any, *, pad_token_id: int = 0, batch_size: int = 64) -> None:
        self.model = model.eval().requires_grad_(False)
        self.pad_token_id, self.batch_size = pad_token_id, batch_size
        self.__name__ = str(model.config._name_or_path or type(model).__name__).rstrip("/").split("/")[-1]
        self._cut = 0
        self._alike_checked = False
        install_token_head(model)

    @torch.no_grad()
    def __call__(self, prompt_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """One score a response.

        Raises:
            RewardError: The first batch of several different responses got one score for all of them.
        """
        rows = [self._row(prompt, ids) for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
        device, layout = next(self.model.parameters()).device, probe_layout(self.model)
        scores: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            part = rows[start : start + self.batch_size]
            found = [0.0] * len(part)
            for batch in collate(part, pad_token_id=self.pad_token_id, layout=layout):
                values = forward(self.model, batch.to(device), frozenset({"scores"})).scores
                for origin, value in zip(batch.origin, values.tolist(), strict=True):  # type: ignore[union-attr]
                    found[origin] = value
            scores += found
        if not self._alike_checked:
            texts = map(str, zip(prompt_ids, completion_ids, strict=True))
            fix = "its weights another folder's: check that the classifier's head was trained and saved with it."
            self._alike_checked = refuse_alike(self.__name__, scores, texts, fix)
        return scores

    def _row(self, prompt: list[int], ids: list[int]) -> Row:
        """An empty response is scored at the prompt's end; what the model cannot read is cut from the left."""
        prompt, ids = (list(prompt), list(ids)) if ids else (list(prompt[:-1]), list(prompt[-1:]))
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and len(prompt) + len(ids) > limit:
            self._cut += 1
            if self._cut % 100 == 1:
                logger.warning(
                    "the reward model %s reads %d tokens: longer rows lose their beginning (%d so far).",
                    self.__name__, limit, self._cut,
                )  # fmt: skip
            ids = ids[-limit:]
            prompt = prompt[len(prompt) + len(ids) - limit :]
        return Row(prompt, [ids], [[1] * len(ids)])
