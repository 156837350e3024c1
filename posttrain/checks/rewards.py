"""Checks of the rewards of a generation: their range, their variance within groups, and the learning signal."""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from posttrain.checks.registry import Context, describe, finding, probe
from posttrain.data.formats import known_columns
from posttrain.errors import RewardError
from posttrain.losses.advantages import MOST_ADVANTAGE
from posttrain.rewards.call import ROWS, TRAINERS_ARGUMENTS, RewardTable, head, parameters
from posttrain.rewards.format import CosineScaledReward, SoftOverlongPunishment
from posttrain.types import Advantages, Finding

FLAT_GENERATIONS = 20
# A reward above OUTLIER_RATIO times the median is an outlier. LARGE_REWARD is the maximum absolute reward for which no
# finding is reported if advantages are not scaled.
OUTLIER_RATIO, LARGE_REWARD = 50.0, 100.0
HISTOGRAM_BINS = 8


def check_reward_values(rewards: Mapping[str, Sequence[float]], *, scaled: bool) -> Iterator[Finding]:
    """Find outliers among the rewards. If advantages are not divided by a standard deviation, find large rewards too.

    Args:
        rewards: Rewards of each function in a generation. NaN means that the function did not score a completion.
        scaled: Whether advantages are divided by a standard deviation.
    """
    for name, column in rewards.items():
        sizes = sorted(abs(value) for value in column if not math.isnan(value) and value != 0)
        middle, largest = (statistics.median(sizes), sizes[-1]) if sizes else (0.0, 0.0)
        if len(sizes) > 3 and largest > OUTLIER_RATIO * middle:
            yield finding(
                "PT-R019",
                "warning",
                f"{name} is {largest:g} for one completion, and about {middle:g} for the other completions.",
                f"rewards/{name}",
                "an outlier dominates its group: the advantages of all other completions become nearly equal.",
                "set reward_transform to 'log1p', 'rank' or 'clip:a:b' for this function.",
            )
        elif not scaled and largest > LARGE_REWARD:
            yield finding(
                "PT-R020",
                "warning",
                f"{name} reaches {largest:g}, and advantages are not divided by a standard deviation.",
                f"rewards/{name}",
                "the size of an update grows with the size of the reward.",
                "divide the reward, or set reward_transform ('running', 'log1p', 'tanh:s') or scale_rewards='group'.",
            )


def check_clipped(far: int, total: int, largest: float | None = None) -> Finding:
    """Return a finding about standardized advantages that were clipped.

    Args:
        far: Number of clipped advantages in a generation.
        total: Number of all advantages.
        largest: Largest absolute value before clipping, if it is known.

    >>> check_clipped(1, 128, 11.2).what
    '1 of 128 advantages were beyond 10 standard deviations (up to 11.2) and were clipped.'
    """
    reach = "" if largest is None else f" (up to {largest:.3g})"
    return finding(
        "PT-R028",
        "warning",
        f"{far} of {total} advantages were beyond {MOST_ADVANTAGE:g} standard deviations{reach} and were clipped.",
        "advantages/clipped_share",
        "a rare reward is very different from all other rewards. In a large group, one completion would determine the step.",
        "set reward_transform to 'rank' or 'clip:a:b' for the reward function, or sample smaller groups.",
    )


def check_overlong(limit: int, ramp: int, longest: int) -> Finding | None:
    """Return a finding about a length penalty that no completion can reach. If some completions can reach the penalty,
    return None.

    Args:
        limit: Number of tokens at which the penalty is -1.
        ramp: Number of tokens before the limit over which the penalty grows from 0 to -1.
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
        "truncated completions get almost no penalty.",
        f"use get_soft_overlong_punishment({longest}, {min(ramp, longest // 5)}), or increase max_completion_length.",
    )


@probe("config", "PT-R021", part="rewards")
def unreachable_penalties(context: Context) -> Iterable[Finding | None]:
    """Find length penalties that no completion can reach."""
    rewards: Any = context.parts["rewards"]
    longest = context.args.max_completion_length
    penalties = [penalty for penalty in rewards.functions if isinstance(penalty, SoftOverlongPunishment)]
    return [check_overlong(penalty.limit, penalty.cache, longest) for penalty in penalties if longest is not None]


def histogram(values: Sequence[float]) -> str:
    """Return a text with the number of occurrences of each value. If there are many different values, return the number of
    values in each of several ranges.

    >>> histogram([0.0, 0.0, 1.0])
    '0: 2, 1: 1'
    """
    valid = [value for value in values if not math.isnan(value)]
    different = sorted(set(valid))
    if len(different) <= HISTOGRAM_BINS:
        return ", ".join(f"{value:g}: {valid.count(value)}" for value in different) or "no reward at all"
    low, width = different[0], (different[-1] - different[0]) / HISTOGRAM_BINS
    counts = [0] * HISTOGRAM_BINS
    for value in valid:
        counts[min(HISTOGRAM_BINS - 1, int((value - low) / width))] += 1
    return ", ".join(f"{low + i * width:.3g} to {low + (i + 1) * width:.3g}: {n}" for i, n in enumerate(counts) if n)


def check_no_signal(flat: int, rewards: Sequence[float], *, limit: int = FLAT_GENERATIONS) -> Finding | None:
    """Return a finding if all advantages were 0 in many consecutive generations. Otherwise return None.

    Args:
        flat: Number of consecutive generations without a nonzero advantage.
        rewards: Total rewards of the completions in these generations.
        limit: Minimum number of generations for a finding. If no reward was computed, one generation is enough.
    """
    unscored = bool(rewards) and all(math.isnan(reward) for reward in rewards)
    if flat < (1 if unscored else limit):
        return None
    return finding(
        "PT-R022",
        "warning",
        f"all advantages of {flat} consecutive generations were 0. Rewards of these completions: {histogram(rewards)}.",
        "rewards",
        "there is no learning signal: in each group, all completions had the same reward.",
        "use prompts that the model sometimes solves, give partial credit, increase temperature, or check the inputs of the "
        "reward function. To stop such runs, set stop_without_signal=N.",
    )


# Maximum ratio of the largest to the second largest standard deviation of the reward functions. A larger ratio is reported.
SPREAD_RATIO = 20.0
# Names of arguments that every reward function can have. Columns of the dataset are additional arguments.
SUPPLIED = frozenset([*ROWS, "prompt_ids", *TRAINERS_ARGUMENTS])


@dataclass(frozen=True)
class RunningReward:
    """Range, mean and standard deviation of all rewards of a function since the start of the run (Welford's algorithm).

    Attributes:
        count, missing: Number of scored and of unscored completions.
        mean, squares: Mean of the rewards, and sum of squared deviations from the mean.
        low, high: Minimum and maximum.

    >>> running = RunningReward().add([1.0, 3.0, float("nan")])
    >>> running.mean, running.std, running.missing
    (2.0, 1.0, 1)
    """

    count: int = 0
    missing: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, values: Sequence[float]) -> RunningReward:
        """Return statistics that include the rewards of another generation. NaN is treated as a missing reward."""
        valid = [value for value in values if not math.isnan(value)]
        count, mean, squares = self.count, self.mean, self.squares
        for value in valid:
            count += 1
            before = value - mean
            mean += before / count
            squares += before * (value - mean)
        low, high = min([self.low, *valid]), max([self.high, *valid])
        return RunningReward(count, self.missing + len(values) - len(valid), mean, squares, low, high)

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return the statistics as a JSON-serializable dict."""
        if not self.count:
            return {"count": 0, "missing": self.missing}
        numbers = {"mean": self.mean, "std": self.std, "min": self.low, "max": self.high}
        return {"count": self.count, "missing": self.missing, **numbers}


def check_reward_ranges(rewards: Mapping[str, RunningReward], weights: Mapping[str, float]) -> Finding | None:
    """Find a reward function whose weighted rewards have 20 times the standard deviation of any other function's rewards.

    Args:
        rewards: Statistics of each function. The key is the function's name.
        weights: Weight of each function. The key is the function's name.
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
        f"`{top}` ranges from {rewards[top].low:,.6g} to {rewards[top].high:,.6g} (other functions: {low:,.6g} to {high:,.6g}). "
        f"It has {100 * share:.4g} % of the variance of the weighted sum.",
        f"rewards/{top}",
        "the sum of rewards depends almost only on this function, so the other functions have no effect on advantages.",
        f"set reward_transform='{'log1p' if rewards[top].low >= 0 and large > 100 else 'zscore'}' (or 'rank') for it, or "
        f"set its entry of reward_weights to {1 / scale:.2g}, which makes the standard deviations equal.",
    )


# Findings about one generation, compared with earlier generations ---------------------------------------------------------

# A run has no usable reward if more than UNSCORED_SHARE of the rows have no reward in UNSCORED_BATCHES consecutive batches.
UNSCORED_SHARE, UNSCORED_BATCHES = 0.5, 5
# Numbers of generations after which each reward function's share of the total variance is logged.
GENERATIONS_REPORTED = (1, 10, 100)
# A group is narrow if the standard deviation of its rewards is below NARROW_SPREAD times the standard deviation of all
# rewards. A message is logged if more than NARROW_SHARE of the groups are narrow.
NARROW_SPREAD, NARROW_SHARE = 1e-3, 0.2
# GROUPS_NEEDED is the minimum number of groups for the message about narrow groups. GROUPS_REMEMBERED is the number of most
# recent groups from which the fraction of narrow groups is computed.
GROUPS_NEEDED, GROUPS_REMEMBERED = 5, 64


class Notice(NamedTuple):
    """Message without a code. A message with a given key is logged at its first occurrence, and then at every 100th
    occurrence.
    """

    key: str
    text: str
    level: int = logging.WARNING


@dataclass(frozen=True)
class RewardHistory:
    """Statistics of earlier training generations. `findings` compares the current generation with them.

    Attributes:
        generations: Number of generations.
        unscored: Number of consecutive generations without any reward, up to the newest generation.
        mostly_unscored: Number of consecutive generations whose fraction of unscored rows is above `UNSCORED_SHARE`, up to
            the newest generation.
        running: Statistics of the rewards of each function.
        flat: Number of consecutive generations in which all advantages were 0, up to the newest generation.
        flat_rewards: Total rewards of up to `FLAT_GENERATIONS` of these generations.
        totals: Statistics of the total rewards.
        spreads: Standard deviations of up to `GROUPS_REMEMBERED` newest groups.
    """

    generations: int = 0
    unscored: int = 0
    mostly_unscored: int = 0
    running: Mapping[str, RunningReward] = field(default_factory=dict)
    flat: int = 0
    flat_rewards: Sequence[list[float]] = ()
    totals: RunningReward = RunningReward()
    spreads: Sequence[float] = ()


def extended(history: RewardHistory, table: RewardTable, made: Advantages) -> RewardHistory:
    """Return the history with one more training generation. ``table`` and ``made`` contain the rows of all ranks."""
    columns = zip(table.names, table.values.T.tolist(), strict=True)
    running = {name: history.running.get(name, RunningReward()).add(column) for name, column in columns}
    unscored = float(table.values.isnan().all(-1).float().mean()) if len(table.values) else 0.0
    flat, totals = 0 if bool(made.values.any()) else history.flat + 1, made.totals.tolist()
    spreads = [] if made.group_std is None else made.group_std[~made.group_std.isnan()].tolist()
    return RewardHistory(
        history.generations + 1,
        history.unscored + 1 if unscored == 1.0 else 0,
        history.mostly_unscored + 1 if unscored > UNSCORED_SHARE else 0,
        {**history.running, **running},
        flat,
        [*history.flat_rewards, totals][-FLAT_GENERATIONS:] if flat else [],
        history.totals.add(totals),
        [*history.spreads, *spreads][-GROUPS_REMEMBERED:],
    )


def findings(
    table: RewardTable,
    history: RewardHistory,
    *,
    scaled: bool,
    clipped: tuple[int, int, float | None] | None = None,
    columns: Sequence[str] = (),
    stop_after: int | None = None,
    min_group_std: float | None = None,
) -> Iterator[Finding | Notice | RewardError | None]:
    """Find problems with the rewards of a training generation.

    Args:
        table: Rewards of all ranks.
        history: Result of `extended` for this generation.
        scaled: Whether advantages are divided by a standard deviation.
        clipped: Three values: the number of clipped advantages, the number of all advantages, and the maximum absolute value
            before clipping (if known).
        columns: Names of the dataset columns that were passed to reward functions.
        stop_after: Number of consecutive generations without a signal after which the run stops. None: the run never stops.
        min_group_std: Standard deviation below which a group has no advantages. None if groups are not scaled separately.
    """
    if history.mostly_unscored:
        yield from _unscored_generations(table, history, columns)
    if len(table.names) > 1 and history.generations in GENERATIONS_REPORTED:
        from posttrain.rewards.runner import describe_shares

        shares = describe_shares(table.names, table.values, table.weights)
        text = f"variance share of each reward function at generation {history.generations}: {shares}"
        yield Notice(f"shares {history.generations}", text, logging.INFO)
    if clipped is not None and clipped[0]:
        yield check_clipped(*clipped)
    if len(table.names) > 1:
        yield check_reward_ranges(history.running, dict(zip(table.names, table.weights.tolist(), strict=True)))
    yield from check_reward_values(dict(zip(table.names, table.values.T.tolist(), strict=True)), scaled=scaled)
    if history.flat:
        rewards = [reward for generation in history.flat_rewards for reward in generation]
        ends = stop_after is not None and history.flat >= stop_after
        silent = check_no_signal(history.flat, rewards, limit=1 if ends else FLAT_GENERATIONS)
        if silent is not None and ends:
            yield replace(silent, severity="error")
            yield RewardError(f"{describe(silent)} The run stops because stop_without_signal={stop_after}.")
        yield silent
    if min_group_std is not None:
        yield _narrow_groups(history, min_group_std)


def unscored_rows(
    table: RewardTable, groups: Tensor, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> Iterator[Notice]:
    """Find rows that no function scored, and groups in which a function scored only some rows.

    Args:
        table: Rewards of all processes.
        groups: ``(n,)`` group number of each row.
        prompts: Prompts of this process, which the message quotes.
        columns: Dataset columns of this process, which the message quotes.
    """
    missing = table.values.isnan()  # (n, K)
    unscored = missing.all(-1)  # (n,)
    if table.names and (rows := unscored.nonzero().flatten().tolist()):
        own = rows[0] - table.start
        mine = 0 <= own < len(prompts)
        row = {name: values[own] for name, values in columns.items()} if mine else {}
        prompt = head(prompts[own]) if mine else "(on another process)"
        text = f"All reward functions returned None for row {rows[0]} (and {len(rows) - 1} more). Prompt: {prompt}."
        yield Notice("none", f"{text} Its columns: {head(row, 300)}")
    for name, lacks in zip(table.names, missing.unbind(1), strict=True):
        # If a function scored only some rows of a group, the group's total rewards are not comparable.
        if partly := len(set(groups[~lacks].tolist()) & set(groups[lacks & ~unscored].tolist())):
            yield Notice(
                f"partial {name}",
                f"in {partly} groups, {name} returned None for some completions of a prompt and a number for others. Their total "
                "rewards are not comparable. Fix: return 0.0 instead of None, or None for all completions of the prompt.",
            )


def _unscored_generations(
    table: RewardTable, history: RewardHistory, columns: Sequence[str]
) -> Iterator[Notice | RewardError]:
    """Find consecutive generations in which most or all rows have no reward."""
    names, count = ", ".join(table.names), history.mostly_unscored
    if any(running.count for running in history.running.values()) and history.unscored >= 2 * UNSCORED_BATCHES:
        yield RewardError(
            f"no completion got a reward in {history.unscored} consecutive batches: {names} returned None or NaN for every row, "
            "so the policy cannot learn. Fix: check the function for divisions by zero, and look at the last completions with "
            "posttrain report. Then resume from an earlier checkpoint."
        )
    first = history.generations == history.unscored == 1
    if first or count >= UNSCORED_BATCHES:
        share = f"{float(table.values.isnan().all(-1).float().mean()):.0%} of the rows, in {count} consecutive batches"
        which = "every row of the first batch" if first else share
        yield Notice(
            "unscored",
            f"NO USABLE REWARD: all reward functions ({names}) returned None for {which}, so the policy cannot learn. They got "
            f"the columns {columns}. The usual cause is a value that never occurs in the data, e.g. a task that is called 'code' "
            "in the data and 'coding' in the function, or references that cannot be parsed. To stop such runs, set "
            "stop_without_signal=N.",
        )


def _narrow_groups(history: RewardHistory, least: float) -> Notice | None:
    """Find groups whose rewards have a tiny standard deviation. Division by it would amplify noise to updates of normal
    size.
    """
    groups, whole = len(history.spreads), history.totals.std
    narrow = sum(std > 0 and least <= std < NARROW_SPREAD * whole for std in history.spreads)
    if groups < GROUPS_NEEDED or narrow <= NARROW_SHARE * groups:
        return None
    return Notice(
        "narrow",
        f"{narrow} of the last {groups} groups have a standard deviation below a thousandth of the standard deviation of all "
        f"rewards ({whole:.3g}), and scale_rewards='group' amplifies such differences to full updates. If they are noise, set "
        "min_group_std or scale_rewards='batch'.",
    )


# Columns that reward functions read -----------------------------------------------------------------------------------


@probe("data", "PT-R029", part="rewards")
def columns_of_rewards(context: Context) -> Iterable[Finding]:
    """Find columns that reward functions require and the dataset lacks. Only `posttrain check` runs this check."""
    rewards: Any = context.parts.get("rewards")
    columns = known_columns(context.train_dataset)
    if "run" not in context.parts and columns:
        yield from check_reward_columns(dict(zip(rewards.names, rewards.functions, strict=True)), columns)


def check_reward_columns(functions: Mapping[str, Callable], columns: Sequence[str]) -> Iterator[Finding]:
    """Find reward functions that would fail at the first generation, because a column is missing.

    Args:
        functions: Reward functions by name.
        columns: Columns of the training set.
    """
    for name, function in functions.items():
        for column, required in parameters(function)[0].items():
            if required and column not in SUPPLIED and column not in columns:
                yield finding(
                    "PT-R029",
                    "error",
                    f"reward function `{name}` needs the column `{column}`, but the dataset has {sorted(columns)}.",
                    "reward_funcs",
                    "the function would fail after the first generation, when data and model are already loaded.",
                    f"add a column `{column}`, rename a column to it (dataset.rename_column), or give the parameter a default.",
                )


# UNREADABLE_SHARE is the maximum fraction of references that cannot be parsed. ROWS_READ is the maximum number of rows that
# the check reads.
UNREADABLE_SHARE, ROWS_READ = 0.05, 100_000


def reference_column(function: Callable) -> str | None:
    """Return the column that contains references for a reward function of this package. For other functions, return None.

    >>> from posttrain.rewards import accuracy_reward
    >>> reference_column(accuracy_reward)
    'solution'
    """
    from posttrain.rewards import accuracy_reward, reasoning_accuracy_reward

    while isinstance(function, functools.partial):
        function = function.func
    reads = function in (accuracy_reward, reasoning_accuracy_reward) or isinstance(function, CosineScaledReward)
    return "solution" if reads else None


def check_references(name: str, column: str, golds: Sequence[Any]) -> Finding | None:
    """Find references that cannot be parsed. More than 5 % cause a warning, and 100 % cause an error.

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
        "the function returns None for these rows, so the model learns nothing from their completions.",
        f"remove these rows, repair the column, or pass {name} the column that contains the answers.",
    )


@probe("data", "PT-R030", part="rewards")
def references_of_rewards(context: Context) -> Iterable[Finding | None]:
    """Check the references of each reward function whose reference column is known."""
    rewards: Any = context.parts.get("rewards")
    dataset: Any = context.train_dataset
    if rewards is None or not hasattr(dataset, "select"):  # Streams have no row indices.
        return
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        column = reference_column(function)
        if column in dataset.column_names:
            head = dataset.select(range(min(ROWS_READ, len(dataset)))).select_columns([column]).with_format(None)
            yield check_references(name, str(column), head[column][:])
