"""Scoring two completions a prompt: the layout that functions for pairs expect, and whole texts for reward models."""

from __future__ import annotations

from typing import Any

from posttrain.data.chat import one_bos
from posttrain.rewards.model import ModelReward
from posttrain.rewards.runner import RewardRunner, RewardTable

__all__ = ["PairRewards", "WholeTextReward"]


class PairRewards(RewardRunner):
    """Shows reward functions all first completions and then all second ones, columns repeated; rows come back as they were.

    Attributes:
        pairs: Whether rows are pairs, next to each other; otherwise they are shown as they stand.
    """

    pairs = True

    def rows_again(self, count: int) -> list[int]:
        """Both completions of the first two prompts: a judge compares them with each other."""
        half = count // 2
        return [0, 1, half, half + 1] if self.pairs and half > 1 else super().rows_again(count)

    def __call__(self, *, prompts: list[Any], **rows: Any) -> RewardTable:
        """As `RewardRunner`, whose rows ``0, 1, 2, 3`` become ``0, 2, 1, 3`` on the way."""
        count = len(prompts)
        if not self.pairs or count % 2:
            return super().__call__(prompts=prompts, **rows)
        order = [*range(0, count, 2), *range(1, count, 2)]

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: moved(column) for name, column in value.items()}
            return [value[i] for i in order] if isinstance(value, list) and len(value) == count else value

        table = super().__call__(prompts=moved(prompts), **{name: moved(value) for name, value in rows.items()})
        back = sorted(range(count), key=order.__getitem__)
        table.values = table.values[back]
        table.raw = None if table.raw is None else table.raw[back]
        table.extra_columns = {name: [column[i] for i in back] for name, column in table.extra_columns.items()}
        return table


class WholeTextReward(ModelReward):
    """A reward model that reads plain text with the special tokens its tokenizer adds, as it was trained to.

    A text that already begins with the bos token does not get a second one. Conversations are rendered by the template, as
    `ModelReward` does.
    """

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        if not isinstance(prompt, str):
            return super()._ids(prompt, completion)
        ids = self.tokenizer(prompt + completion, verbose=False)["input_ids"]
        return self._fitting(one_bos(ids, self.tokenizer.bos_token_id))
