"""Judges, which compare, rank or check completions. A judge can be a language model. `JudgeReward` converts a judge to a
reward function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from posttrain import plugins
from posttrain.errors import ArgumentTypeError, ConfigError, RewardError
from posttrain.rewards.runner import RewardRunner, RewardTable

NO_VERDICT = -1


def as_text(value: object) -> str:
    """Convert a prompt or a completion to text. A string is returned unchanged. For several messages, the text contains
    their roles.
    """
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return _content_text(value[0])
    return "\n\n".join(f"{message['role'].capitalize()}: {_content_text(message)}" for message in value)


def _content_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text. The text contains ``[image]`` for each image."""
    content = message.get("content") or ""
    return (
        str(content) if not isinstance(content, list) else "".join(b.get("text") or f"[{b['type']}]" for b in content)
    )


def _addresses(prompt: Any) -> list[str]:
    """Return the images of a prompt in order. Each image is a ``data:`` URL of a PNG file."""
    return [] if isinstance(prompt, str) else plugins.module("extensions.images.picture").png_addresses(prompt)


class BaseJudge(ABC):
    """Base class of all judges. The method ``judge`` of a judge returns verdicts.

    Attributes:
        vision: Whether ``judge`` accepts ``images``, a list of ``data:`` URLs for each prompt. If False, the judge gets no
            rows with images.
    """

    vision: bool = False

    @abstractmethod
    def judge(self, prompts: list[str], completions: list, shuffle_order: bool = True) -> list:
        """Return one verdict per prompt.

        Args:
            prompts: n texts.
            completions: n texts or n lists of texts, depending on the subclass.
            shuffle_order: Whether to show the completions of a prompt in random order, to avoid a position bias.
        """


class BaseRankJudge(BaseJudge):
    """Base class of judges that rank the completions of a prompt."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[list[int]]:
        """Return a ranking for each prompt: the indices of its completions, best completion first."""


class BasePairwiseJudge(BaseJudge):
    """Base class of judges that compare two completions of a prompt."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
        """Return a verdict for each prompt: the index of the better completion (0 or 1), or -1 if the judge could not
        decide.
        """


class BaseBinaryJudge(BaseJudge):
    """Base class of judges that check one completion per prompt against a criterion."""

    @abstractmethod
    def judge(
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """Return a verdict for each completion: 1 if it meets the criterion, 0 if it does not, -1 if the judge failed."""


class JudgeReward:
    """Reward function that converts the verdicts of a judge to rewards.

    The reward depends on the type of judge:

    - pairwise: 1 for the better completion and 0 for the worse completion. Without a verdict, both completions get 0.5;
    - rank: evenly spaced rewards, from 1 for the best to 0 for the worst completion of a group;
    - binary: 1 or 0. If the judge failed for a completion, all completions of its group get 0.5.

    Args:
        judge: `BasePairwiseJudge` (groups of two), `BaseRankJudge` or `BaseBinaryJudge`.
        group_size: Number of completions per prompt. The completions of a prompt are consecutive rows.
        halves: Order of rows if ``group_size`` is 2. True: the first completions of all prompts, then the second completions
            of all prompts. False: the completions of a prompt are consecutive rows.

    >>> class Longer(BasePairwiseJudge):
    ...     def judge(self, prompts, completions, shuffle_order=True):
    ...         return [int(len(b) > len(a)) for a, b in completions]
    >>> JudgeReward(Longer())(prompts=["hi", "hi"], completions=["no", "yes"])
    [0.0, 1.0]
    """

    # This attribute has the same effect as the decorator `parallel`. Other reward functions run while the judge waits for
    # its server.
    runs_in_thread = True

    def __init__(self, judge: BaseJudge, *, group_size: int = 2, halves: bool = False) -> None:
        if not isinstance(judge, BaseJudge):
            raise ArgumentTypeError(
                f"judge must be a BasePairwiseJudge, BaseRankJudge or BaseBinaryJudge, not {type(judge).__name__}."
            )
        if isinstance(judge, BasePairwiseJudge) and group_size != 2:
            raise ConfigError(
                f"{type(judge).__name__} compares two completions per prompt, but group_size={group_size}. Fix: set "
                "group_size=2."
            )
        self.judge, self.group_size, self.halves = judge, group_size, halves
        self.__name__ = type(judge).__name__

    def __call__(
        self, prompts: list[Any], completions: list[Any], gold_completions: list[Any] | None = None, **_: Any
    ) -> list[float]:
        """Return a reward in [0, 1] for each completion.

        Raises:
            RewardError: The judge returned an invalid verdict or the wrong number of verdicts.
        """
        groups = self._groups(len(prompts))
        texts = [as_text(completion) for completion in completions]
        binary, judge = isinstance(self.judge, BaseBinaryJudge), cast(Any, self.judge)
        if binary:
            questions = [as_text(prompt) for prompt in prompts]
            gold = None if gold_completions is None else [as_text(text) for text in gold_completions]
            verdicts = judge.judge(questions, texts, gold)
        else:
            questions = [as_text(prompts[group[0]]) for group in groups]
            answers = [[texts[i] for i in group] for group in groups]
            options = {"images": [_addresses(prompts[group[0]]) for group in groups]} if judge.vision else {}
            verdicts = judge.judge(questions, answers, **options)
        if len(verdicts) != len(questions):
            raise RewardError(
                f"{self.__name__} returned {len(verdicts)} verdicts, but there are {len(questions)} prompts."
            )
        if binary:
            rewards = [self._binary([verdicts[i] for i in group]) for group in groups]
        else:
            read = self._pair if isinstance(self.judge, BasePairwiseJudge) else self._ranking
            rewards = [read(verdict, len(group)) for verdict, group in zip(verdicts, groups, strict=True)]
        pairs = [
            pair for group, scores in zip(groups, rewards, strict=True) for pair in zip(group, scores, strict=True)
        ]
        return [reward for _, reward in sorted(pairs)]

    def _groups(self, count: int) -> list[list[int]]:
        size = min(self.group_size, count)  # A dry run may have fewer rows than a group.
        if size == 0 or count % size:
            raise RewardError(
                f"{self.__name__} got {count} completions, which is not a multiple of group_size={self.group_size}."
            )
        if self.halves and size == 2:
            return [[i, i + count // 2] for i in range(count // 2)]
        return [list(range(start, start + size)) for start in range(0, count, size)]

    def _binary(self, verdicts: list[int]) -> list[float]:
        return [0.5] * len(verdicts) if NO_VERDICT in verdicts else [float(verdict) for verdict in verdicts]

    def _pair(self, verdict: Any, size: int) -> list[float]:
        if size == 1:
            return [0.5]
        if verdict not in (NO_VERDICT, 0, 1):
            raise RewardError(
                f"{self.__name__} returned {verdict!r}. A pairwise judge must return 0, 1 or -1 (no verdict)."
            )
        return {NO_VERDICT: [0.5, 0.5], 0: [1.0, 0.0], 1: [0.0, 1.0]}[int(verdict)]

    def _ranking(self, order: Sequence[int], size: int) -> list[float]:
        if sorted(order) != list(range(size)):
            raise RewardError(
                f"{self.__name__} returned the ranking {list(order)!r} for {size} completions. It must contain each index once."
            )
        return [1.0 - list(order).index(i) / max(size - 1, 1) for i in range(size)]


class PairRewards(RewardRunner):
    """Reward runner for trainers that compare two completions per prompt.

    Reward functions get the rows in another order: the first completions of all prompts, then the second completions of all
    prompts. Rewards are returned in the original order.

    Attributes:
        pairs: Whether the two completions of a prompt are consecutive rows. If False, rows are not reordered.
    """

    pairs = True

    def rows_again(self, count: int) -> list[int]:
        """Return the indices of the rows that are scored twice. A judge needs both completions of a prompt, so all rows of
        the first two prompts are scored.
        """
        half = count // 2
        return [0, 1, half, half + 1] if self.pairs and half > 1 else super().rows_again(count)

    def __call__(self, *, prompts: list[Any], **rows: Any) -> RewardTable:
        """Score rows like `RewardRunner`. Reward functions get the rows in the order ``0, 2, 4, ..., 1, 3, 5, ...``."""
        count = len(prompts)
        if not self.pairs or count % 2:
            return super().__call__(prompts=prompts, **rows)
        order = [*range(0, count, 2), *range(1, count, 2)]

        def moved(value: object) -> Any:
            if isinstance(value, dict):
                return {name: moved(column) for name, column in value.items()}
            return [value[i] for i in order] if isinstance(value, list) and len(value) == count else value

        table = super().__call__(prompts=moved(prompts), **{name: moved(value) for name, value in rows.items()})
        back = sorted(range(count), key=order.__getitem__)
        extra = {name: [column[i] for i in back] for name, column in table.extra_columns.items()}
        return replace(table, values=table.values[back], extra_columns=extra)
