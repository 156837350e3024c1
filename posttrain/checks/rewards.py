"""What the rewards of one generation tell: their range, their spread inside groups, and whether there is a signal."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.checks.registry import Context, finding, probe
from posttrain.data.formats import known_columns
from posttrain.types import Finding

FLAT_GENERATIONS = 20
OUTLIER_RATIO, LARGE_REWARD = 50.0, 100.0  # Times the median; and in size, where nothing divides by a spread.
HISTOGRAM_BINS = 8


def check_reward_values(rewards: Mapping[str, Sequence[float]], *, scaled: bool) -> Iterator[Finding]:
    """Outliers, and sizes that make a step large where advantages are not divided by a spread.

    Args:
        rewards: Values of each function over a generation; NaN where it did not apply.
        scaled: Whether advantages are divided by a spread.
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
                "inside a group an outlier takes all the credit: the others become indistinguishable.",
                "set reward_transform to 'log1p', 'rank' or 'clip:a:b' for it.",
            )
        elif not scaled and largest > LARGE_REWARD:
            yield finding(
                "PT-R020",
                "warning",
                f"{name} reaches {largest:g}, and advantages are not divided by a spread.",
                f"rewards/{name}",
                "the size of a step grows with the size of the reward.",
                "divide the reward, set reward_transform ('running', 'log1p', 'tanh:s'), or scale_rewards='group'.",
            )


def check_clipped(far: int, total: int, most: float, largest: float | None = None) -> Finding | None:
    """Advantages that were divided by a spread and are cut because they are far beyond it.

    Args:
        far: How many of a generation were cut.
        total: Of all.
        most: Where they are cut.
        largest: Size of the largest before the cut, where it is known.

    >>> check_clipped(1, 128, 10.0, 11.2).what
    '1 of 128 advantages were beyond 10 standard deviations (up to 11.2) and are cut there.'
    """
    if not far:
        return None
    reach = "" if largest is None else f" (up to {largest:.3g})"
    return finding(
        "PT-R028",
        "warning",
        f"{far} of {total} advantages were beyond {most:g} standard deviations{reach} and are cut there.",
        "advantages/clipped_share",
        "a reward has rare values far from all others: in a group of over 100, one completion alone would make the step.",
        "set reward_transform to 'rank' or 'clip:a:b' for it, or sample smaller groups.",
    )


def check_overlong(limit: int, ramp: int, longest: int) -> Finding | None:
    """A punishment of length that no completion is long enough for.

    Args:
        limit: Tokens at which it is whole.
        ramp: Tokens before that over which it grows.
        longest: Most tokens of a completion.
    """
    if limit <= longest:
        return None
    reach = "none of it" if longest <= limit - ramp else "only part of it"
    return finding(
        "PT-R021",
        "warning",
        f"soft_overlong_punishment_reward is whole at {limit} tokens, and completions end at max_completion_length={longest}: "
        f"{reach} is ever felt.",
        "reward_funcs",
        "completions that are cut are hardly punished.",
        f"make it get_soft_overlong_punishment({longest}, {min(ramp, longest // 5)}), or raise max_completion_length.",
    )


def histogram(values: Sequence[float]) -> str:
    """Counts of values, or of ranges where there are many different ones.

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
    """Generations in a row in which no completion was better or worse than its group.

    Args:
        flat: How many there were.
        rewards: Total rewards of their completions.
        limit: How many are too many; one, where no completion got any reward.
    """
    unscored = bool(rewards) and all(math.isnan(reward) for reward in rewards)
    if flat < (1 if unscored else limit):
        return None
    return finding(
        "PT-R022",
        "warning",
        f"all advantages of {flat} generations in a row were 0. Rewards of these completions: {histogram(rewards)}.",
        "rewards",
        "no learning signal: every completion was worth as much as the others of its group.",
        "take prompts that the model solves sometimes, give partial credit, raise temperature, or check what the reward reads; "
        "stop_without_signal=N ends such a run.",
    )


SPREAD_RATIO = 20.0  # Of two spreads.
# What every reward function can have beside the dataset's columns.
SUPPLIED = frozenset(
    [
        "prompts",
        "prompt_ids",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
        "prompt_suffixes",
    ]
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
        f"{100 * share:.4g} % of the weighted sum's variance is this function.",
        f"rewards/{top}",
        "rewards are summed: the one with the larger numbers decides every advantage, and the others count for nothing.",
        f"set reward_transform='{'log1p' if rewards[top].low >= 0 and large > 100 else 'zscore'}' (or 'rank') for it, or "
        f"reward_weights: {1 / scale:.2g} would bring it level.",
    )


@probe("data", "PT-R029", part="rewards")
def columns_of_rewards(context: Context) -> Iterable[Finding]:
    """Columns that reward functions require and the set lacks, for ``posttrain check``: trainers try the functions themselves."""
    rewards: Any = context.parts.get("rewards")
    columns = known_columns(context.train_dataset)
    if "run" not in context.parts and columns:
        yield from check_reward_columns(dict(zip(rewards.names, rewards.functions, strict=True)), columns)


def check_reward_columns(functions: Mapping[str, Callable], columns: Sequence[str]) -> Iterator[Finding]:
    """Reward functions that would fail at the first generation.

    Args:
        functions: By name.
        columns: Of the training set.
    """
    for name, function in functions.items():
        with contextlib.suppress(TypeError, ValueError):
            for column, parameter in inspect.signature(function).parameters.items():
                named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
                if named and parameter.default is parameter.empty and column not in SUPPLIED and column not in columns:
                    yield finding(
                        "PT-R029",
                        "error",
                        f"reward function `{name}` needs column `{column}`; the dataset has {sorted(columns)}.",
                        "reward_funcs",
                        "it would fail after the first generation, when data and model are loaded and time was spent.",
                        f"add or rename a column to `{column}` (dataset.rename_column), or give the parameter a default.",
                    )


# Share of the rows whose reference may be unreadable; rows that are read.
UNREADABLE_SHARE, ROWS_READ = 0.05, 100_000


def reference_column(function: Callable) -> str | None:
    """The column that a reward of this package compares answers with; None of any other.

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
    """Rows whose reference scores no answer: over 5 % is a warning, all of them an error.

    Args:
        name: Of the reward function.
        column: Where references stand.
        golds: Their values.
    """
    from posttrain.rewards.math import bare

    unread = [row for row, gold in enumerate(golds) if gold is None or not bare(gold)]
    if len(unread) <= UNREADABLE_SHARE * len(golds):
        return None
    shown = ", ".join(f"row {row}: {golds[row]!r:.60}" for row in unread[:3])
    return finding(
        "PT-R030",
        "error" if len(unread) == len(golds) else "warning",
        f"{len(unread)} of {len(golds)} references in `{column}` cannot be read by {name} ({shown}).",
        f"column {column!r}",
        "such a row gets None from it: no completion of it is right or wrong, and it teaches nothing.",
        f"drop these rows, mend the column, or give {name} the column that holds the answers.",
    )


@probe("data", "PT-R030", part="rewards")
def references_of_rewards(context: Context) -> Iterable[Finding | None]:
    """The reference column of each reward function that says which one it reads."""
    rewards: Any = context.parts.get("rewards")
    dataset: Any = context.train_dataset
    if rewards is None or not hasattr(dataset, "select"):  # A stream is read as it comes.
        return
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        column = reference_column(function)
        if column in dataset.column_names:
            head = dataset.select(range(min(ROWS_READ, len(dataset)))).select_columns([column]).with_format(None)
            yield check_references(name, str(column), head[column][:])
