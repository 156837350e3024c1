"""Checks of the rewards of a generation: their range, their standard deviation within groups, and whether there is a signal."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.checks.registry import Context, finding, probe
from posttrain.data.formats import known_columns
from posttrain.rewards.call import ROWS, TRAINERS_ARGUMENTS, parameters
from posttrain.types import Finding

FLAT_GENERATIONS = 20
OUTLIER_RATIO, LARGE_REWARD = 50.0, 100.0  # Multiple of the median; limit of the size if advantages are not scaled.
HISTOGRAM_BINS = 8


def check_reward_values(rewards: Mapping[str, Sequence[float]], *, scaled: bool) -> Iterator[Finding]:
    """Find outliers, and rewards so large that they scale up a step whose advantages are not divided by a std.

    Args:
        rewards: Values of each function over a generation; NaN where it did not apply.
        scaled: Whether advantages are divided by a standard deviation.
    """
    for name, column in rewards.items():
        sizes = sorted(abs(value) for value in column if not math.isnan(value) and value != 0)
        middle, largest = (statistics.median(sizes), sizes[-1]) if sizes else (0.0, 0.0)
        if len(sizes) > 3 and largest > OUTLIER_RATIO * middle:
            yield finding(
                "PT-R019",
                "warning",
                f"{name} is {largest:g} for one completion and about {middle:g} for the others.",
                f"rewards/{name}",
                "within a group, an outlier makes the advantages of all other completions nearly equal.",
                "set reward_transform to 'log1p', 'rank' or 'clip:a:b' for this function.",
            )
        elif not scaled and largest > LARGE_REWARD:
            yield finding(
                "PT-R020",
                "warning",
                f"{name} reaches {largest:g}, and advantages are not divided by a standard deviation.",
                f"rewards/{name}",
                "the size of a step grows with the size of the reward.",
                "divide the reward, set reward_transform ('running', 'log1p', 'tanh:s'), or set scale_rewards='group'.",
            )


def check_clipped(far: int, total: int, most: float, largest: float | None = None) -> Finding | None:
    """Return a finding about standardized advantages that were clipped because they are very large, or None.

    Args:
        far: Number of clipped advantages of a generation.
        total: Number of all advantages.
        most: Limit at which they are clipped.
        largest: Largest absolute value before clipping, if known.

    >>> check_clipped(1, 128, 10.0, 11.2).what
    '1 of 128 advantages were beyond 10 standard deviations (up to 11.2) and were clipped.'
    """
    if not far:
        return None
    reach = "" if largest is None else f" (up to {largest:.3g})"
    return finding(
        "PT-R028",
        "warning",
        f"{far} of {total} advantages were beyond {most:g} standard deviations{reach} and were clipped.",
        "advantages/clipped_share",
        "rare rewards are far from all others: in a group of over 100, one completion alone would determine the step.",
        "set reward_transform to 'rank' or 'clip:a:b' for the reward function, or sample smaller groups.",
    )


def check_overlong(limit: int, ramp: int, longest: int) -> Finding | None:
    """Return a finding about a length penalty that no completion is long enough to reach, or None.

    Args:
        limit: Number of tokens at which the penalty is -1.
        ramp: Number of tokens before the limit over which it grows.
        longest: Maximum number of tokens of a completion.
    """
    if limit <= longest:
        return None
    reach = "no completion gets a penalty" if longest <= limit - ramp else "completions get only part of the penalty"
    return finding(
        "PT-R021",
        "warning",
        f"soft_overlong_punishment_reward reaches -1 at {limit} tokens, but completions end at max_completion_length={longest}: "
        f"{reach}.",
        "reward_funcs",
        "truncated completions are hardly penalized.",
        f"use get_soft_overlong_punishment({longest}, {min(ramp, longest // 5)}), or raise max_completion_length.",
    )


def histogram(values: Sequence[float]) -> str:
    """Format the counts of values, or of ranges if there are many different values.

    >>> histogram([0.0, 0.0, 1.0])
    '0: 2, 1: 1'
    """
    known = [value for value in values if not math.isnan(value)]
    different = sorted(set(known))
    if len(different) <= HISTOGRAM_BINS:
        return ", ".join(f"{value:g}: {known.count(value)}" for value in different) or "no reward at all"
    low, width = different[0], (different[-1] - different[0]) / HISTOGRAM_BINS
    counts = [0] * HISTOGRAM_BINS
    for value in known:
        counts[min(HISTOGRAM_BINS - 1, int((value - low) / width))] += 1
    return ", ".join(f"{low + i * width:.3g} to {low + (i + 1) * width:.3g}: {n}" for i, n in enumerate(counts) if n)


def check_no_signal(flat: int, rewards: Sequence[float], *, limit: int = FLAT_GENERATIONS) -> Finding | None:
    """Return a finding about consecutive generations in which all advantages were 0, or None.

    Args:
        flat: Number of such generations.
        rewards: Total rewards of their completions.
        limit: Number of generations from which on it is a finding; 1 if no completion got any reward.
    """
    unscored = bool(rewards) and all(math.isnan(reward) for reward in rewards)
    if flat < (1 if unscored else limit):
        return None
    return finding(
        "PT-R022",
        "warning",
        f"all advantages of {flat} consecutive generations were 0. Rewards of these completions: {histogram(rewards)}.",
        "rewards",
        "there is no learning signal: all completions of a group had the same reward.",
        "use prompts that the model solves sometimes, give partial credit, raise temperature, or check the reward function's "
        "inputs. stop_without_signal=N ends such a run.",
    )


SPREAD_RATIO = 20.0  # Ratio of two standard deviations.
# Arguments that every reward function can have besides the dataset's columns.
SUPPLIED = frozenset([*ROWS, "prompt_ids", *TRAINERS_ARGUMENTS])


@dataclass
class RunningReward:
    """Range, mean and standard deviation of one function's rewards since the run began (Welford's algorithm).

    Attributes:
        count, missing: Number of rewards, and of rows without one.
        mean, squares: Mean of the rewards, and sum of squared deviations from it.
        low, high: Minimum and maximum.

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
        """Update the statistics with the rewards of a generation. NaN counts as missing."""
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
        """Return the statistics in a JSON-serializable form."""
        if not self.count:
            return {"count": 0, "missing": self.missing}
        numbers = {"mean": self.mean, "std": self.std, "min": self.low, "max": self.high}
        return {"count": self.count, "missing": self.missing, **numbers}


def check_reward_ranges(rewards: Mapping[str, RunningReward], weights: Mapping[str, float]) -> Finding | None:
    """Find one function whose weighted rewards have over twenty times the standard deviation of every other function's.

    Args:
        rewards: Statistics by name of the function.
        weights: Weights by name of the function.
    """
    spreads = {
        name: abs(weights.get(name, 1.0)) * running.std for name, running in rewards.items() if running.count > 1
    }
    top = max(spreads, key=lambda name: spreads[name], default=None)
    others = {name: spread for name, spread in spreads.items() if name != top and spread > 0}
    if top is None or not others or spreads[top] <= SPREAD_RATIO * max(others.values()):
        return None
    share = spreads[top] ** 2 / sum(spread**2 for spread in spreads.values())
    low, high = (pick(getattr(rewards[name], end) for name in others) for pick, end in ((min, "low"), (max, "high")))
    large = max(abs(rewards[top].low), abs(rewards[top].high))
    scale = spreads[top] / max(others.values())
    return finding(
        "PT-R027",
        "warning",
        f"`{top}` ranges {rewards[top].low:,.6g} to {rewards[top].high:,.6g} (others {low:,.6g} to {high:,.6g}): "
        f"this function has {100 * share:.4g} % of the weighted sum's variance.",
        f"rewards/{top}",
        "rewards are summed, so the function with the larger numbers determines every advantage, and the others have no effect.",
        f"set reward_transform='{'log1p' if rewards[top].low >= 0 and large > 100 else 'zscore'}' (or 'rank') for it, or "
        f"set its reward_weights entry to {1 / scale:.2g}, which makes the standard deviations equal.",
    )


@probe("data", "PT-R029", part="rewards")
def columns_of_rewards(context: Context) -> Iterable[Finding]:
    """Find columns that reward functions require and the set lacks, in ``posttrain check``. Trainers call the functions."""
    rewards: Any = context.parts.get("rewards")
    columns = known_columns(context.train_dataset)
    if "run" not in context.parts and columns:
        yield from check_reward_columns(dict(zip(rewards.names, rewards.functions, strict=True)), columns)


def check_reward_columns(functions: Mapping[str, Callable], columns: Sequence[str]) -> Iterator[Finding]:
    """Find reward functions that would fail at the first generation because of a missing column.

    Args:
        functions: Reward functions by name.
        columns: Columns of the training set.
    """
    for name, function in functions.items():
        for column, required in parameters(name, function)[0].items():
            if required and column not in SUPPLIED and column not in columns:
                yield finding(
                    "PT-R029",
                    "error",
                    f"reward function `{name}` needs column `{column}`; the dataset has {sorted(columns)}.",
                    "reward_funcs",
                    "the function would fail after the first generation, when data and model are already loaded.",
                    f"add a column `{column}` or rename one to it (dataset.rename_column), or give the parameter a default.",
                )


# Maximum share of rows whose reference is unreadable, and maximum number of rows that are read.
UNREADABLE_SHARE, ROWS_READ = 0.05, 100_000


def reference_column(function: Callable) -> str | None:
    """Return the column that a reward of this package compares answers with; None for any other function.

    >>> from posttrain.rewards import accuracy_reward
    >>> reference_column(accuracy_reward)
    'solution'
    """
    from posttrain.rewards import accuracy_reward, reasoning_accuracy_reward
    from posttrain.rewards.format import CosineScaledReward

    while isinstance(function, functools.partial):
        function = function.func
    reads = function in (accuracy_reward, reasoning_accuracy_reward) or isinstance(function, CosineScaledReward)
    return "solution" if reads else None


def check_references(name: str, column: str, golds: Sequence[Any]) -> Finding | None:
    """Find rows whose reference cannot be parsed: over 5 % is a warning, all of them an error.

    Args:
        name: Name of the reward function.
        column: Column of the references.
        golds: Values of the column.
    """
    from posttrain.rewards.math import bare

    unread = [row for row, gold in enumerate(golds) if gold is None or not bare(gold)]
    if len(unread) <= UNREADABLE_SHARE * len(golds):
        return None
    shown = ", ".join(f"row {row}: {golds[row]!r:.60}" for row in unread[:3])
    return finding(
        "PT-R030",
        "error" if len(unread) == len(golds) else "warning",
        f"{len(unread)} of {len(golds)} references in `{column}` cannot be parsed by {name} ({shown}).",
        f"column {column!r}",
        "the function returns None for such rows, so their completions get no reward and the model learns nothing from them.",
        f"drop these rows, repair the column, or pass {name} the column that contains the answers.",
    )


@probe("data", "PT-R030", part="rewards")
def references_of_rewards(context: Context) -> Iterable[Finding | None]:
    """Check the reference column of each reward function whose column is known."""
    rewards: Any = context.parts.get("rewards")
    dataset: Any = context.train_dataset
    if rewards is None or not hasattr(dataset, "select"):  # A stream cannot be read ahead.
        return
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        column = reference_column(function)
        if column in dataset.column_names:
            head = dataset.select(range(min(ROWS_READ, len(dataset)))).select_columns([column]).with_format(None)
            yield check_references(name, str(column), head[column][:])
