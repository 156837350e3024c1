"""Reward functions over a run: what each needs, the range of what it gives, and whether one drowns the others."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.checks.core import Context, finding, probe, register
from posttrain.types import Finding

__all__ = ["SUPPLIED", "RunningReward", "check_reward_columns", "check_reward_ranges", "missing_columns"]

register(
    "PT-R023", "answers-by-spelling", moment="log_step", title="a reward compares answers by their spelling", page="d"
)
register("PT-R027", "reward-scales-apart", moment="log_step", title="one reward is larger than all others", page="j")
register(
    "PT-R029",
    "reward-column-missing",
    moment="data",
    title="a reward function needs a column that is not there",
    page="b",
)

RATIO = 20.0  # Of two spreads.
# What every reward function can have beside the dataset's columns.
SUPPLIED = frozenset(
    {
        "prompts",
        "prompt_ids",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
        "prompt_suffixes",
    }
)


@dataclass
class RunningReward:
    """Range, mean and spread of one function's rewards since the run began (Welford's sums).

    Attributes:
        count, missing: Rewards, and rows without one.
        mean, squares: Of the rewards; sum of squared distances to the mean.
        low, high: The extremes.

    >>> running = RunningReward()
    >>> running.add([1.0, 3.0, float("nan")])
    >>> running.mean, running.std, running.missing
    (2.0, 1.0, 1)
    """

    count: int = 0
    missing: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, values: Sequence[float]) -> None:
        """Count the rewards of a generation; NaN stands for none."""
        for value in values:
            if math.isnan(value):
                self.missing += 1
                continue
            self.count += 1
            before = value - self.mean
            self.mean += before / self.count
            self.squares += before * (value - self.mean)
            self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        if not self.count:
            return {"count": 0, "missing": self.missing}
        numbers = {"mean": self.mean, "std": self.std, "min": self.low, "max": self.high}
        return {"count": self.count, "missing": self.missing, **numbers}


def check_reward_ranges(rewards: Mapping[str, RunningReward], weights: Mapping[str, float]) -> Finding | None:
    """One function whose weighted rewards spread more than twenty times as far as every other's.

    Args:
        rewards: By name of the function.
        weights: By name of the function.
    """
    spreads = {
        name: abs(weights.get(name, 1.0)) * running.std for name, running in rewards.items() if running.count > 1
    }
    top = max(spreads, key=lambda name: spreads[name], default=None)
    others = {name: spread for name, spread in spreads.items() if name != top and spread > 0}
    if top is None or not others or spreads[top] <= RATIO * max(others.values()):
        return None
    share = spreads[top] ** 2 / sum(spread**2 for spread in spreads.values())
    low, high = (pick(getattr(rewards[name], end) for name in others) for pick, end in ((min, "low"), (max, "high")))
    large = max(abs(rewards[top].low), abs(rewards[top].high))
    scale = spreads[top] / max(others.values())
    return finding(
        "PT-R027",
        "warning",
        f"`{top}` ranges {rewards[top].low:,.6g} to {rewards[top].high:,.6g} (others {low:,.6g} to {high:,.6g}): "
        f"{100 * share:.4g} % of the weighted sum's variance is this function.",
        f"rewards/{top}",
        "rewards are summed: the one with the larger numbers decides every advantage, and the others count for nothing.",
        f"set reward_transform='{'log1p' if rewards[top].low >= 0 and large > 100 else 'zscore'}' (or 'rank') for it, or "
        f"reward_weights: {1 / scale:.2g} would bring it level.",
    )


def missing_columns(function: Callable, columns: Collection[str]) -> list[str]:
    """Parameters that a reward function requires and nobody supplies.

    >>> def right(completions, solution, **kwargs): ...
    >>> missing_columns(right, ["prompt", "answer"])
    ['solution']
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty)
    return [p.name for p in named if p.name not in SUPPLIED and p.name not in columns]


def check_reward_columns(functions: Mapping[str, Callable], columns: Sequence[str]) -> list[Finding]:
    """Reward functions that would fail at the first generation.

    Args:
        functions: By name.
        columns: Of the training set.
    """
    found = []
    for name, function in functions.items():
        for column in missing_columns(function, columns):
            found.append(
                finding(
                    "PT-R029",
                    "error",
                    f"reward function `{name}` needs column `{column}`; the dataset has {sorted(columns)}.",
                    "reward_funcs",
                    "it would fail after the first generation, when data and model are loaded and time was spent.",
                    f"add or rename a column to `{column}` (dataset.rename_column), or give the parameter a default.",
                )
            )
    return found


@probe("data", "PT-R029")
def columns_of_rewards(context: Context) -> Iterable[Finding]:
    """What reward functions need, against the columns there are, where nothing else may add some."""
    rewards: Any = context.parts.get("rewards")
    trainer = context.parts.get("trainer")
    names = getattr(context.train_dataset, "column_names", None)
    adds = any(getattr(trainer, name, None) for name in ("rollout_func", "environment_factory", "environments"))
    adds = adds or (trainer is not None and not type(trainer).__module__.startswith("posttrain."))  # A user's subclass.
    if rewards is None or not names or adds:
        return []
    return check_reward_columns(dict(zip(rewards.names, rewards.functions, strict=True)), names)
