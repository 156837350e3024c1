"""Transforms of one reward column, for rewards whose raw size would drown the others or blow up a step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from posttrain.errors import ConfigError, did_you_mean
from posttrain.rewards.call import OURS

__all__ = [
    "TRANSFORMS",
    "RunningScale",
    "correlation",
    "count_rewards",
    "describe_shares",
    "describe_weights",
    "length_correlation",
    "load_transforms",
    "parse_transform",
    "transform_names",
    "transforms_state",
    "variance_shares",
]


Transform = Callable[[Tensor, Tensor], Tensor]
# Name -> how it is written with its numbers.
TRANSFORMS = {
    "none": "none",
    "clip": "clip:a:b",
    "log1p": "log1p",
    "rank": "rank",
    "tanh": "tanh:s",
    "zscore": "zscore",
    "running": "running",
}
SPREAD_LEAST = 1e-6  # Of the mean's size: below it rewards do not differ, and nothing is to be divided by.


def transform_names(specs: Sequence[str | None] | str | None) -> set[str]:
    """The names in what a config's ``reward_transform`` holds: one for all functions, or one each.

    >>> sorted(transform_names(["clip:0:1", None])), sorted(transform_names("rank"))
    (['clip', 'none'], ['rank'])
    """
    return {str(spec or "none").split(":")[0] for spec in ([specs] if isinstance(specs, str) else specs or ())}


def parse_transform(spec: str | None) -> Transform | None:
    """The function behind a name; it takes ``(n,)`` rewards (NaN: not scored) and ``(n,)`` group numbers.

    ``clip:a:b`` bounds to [a, b]; ``log1p`` is ``sign(r) log(1 + |r|)``; ``tanh:s`` is ``tanh(r / s)``; ``rank`` is the
    share of the group's other rewards that are smaller (ties count half), in [0, 1]; ``zscore`` is
    ``(r - mean) / (std + 1e-4)`` over all rows; ``running`` is `RunningScale`. NaN stays NaN.

    Raises:
        ConfigError: An unknown name, or numbers that are missing or make no sense.

    >>> parse_transform("clip:0:1")(torch.tensor([-3.0, 0.5, 9.0]), torch.zeros(3)).tolist()
    [0.0, 0.5, 1.0]
    """
    name, *given = str(spec or "none").split(":")
    if name not in TRANSFORMS:
        known = ", ".join(TRANSFORMS.values())
        raise ConfigError(
            f"reward_transform={spec!r} is not known{did_you_mean(name, TRANSFORMS)}. Choose one of: {known}."
        )
    numbers = _numbers(str(spec), name, given)
    if name == "none":
        return None
    if name == "running":
        return RunningScale()
    if name == "clip":
        low, high = numbers
        return lambda r, groups: r.clamp(low, high)
    if name == "tanh":
        return lambda r, groups: torch.tanh(r / numbers[0])
    return {"log1p": _log1p, "rank": _rank, "zscore": _zscore}[name]


def _numbers(spec: str, name: str, given: Sequence[str]) -> list[float]:
    wanted = TRANSFORMS[name].count(":")
    try:
        numbers = [float(text) for text in given]
    except ValueError:
        numbers = [math.nan]
    if len(given) != wanted or not all(map(math.isfinite, numbers)):
        raise ConfigError(
            f"reward_transform={spec!r} must be written as {TRANSFORMS[name]!r} with {wanted} finite numbers."
        )
    if name == "clip" and numbers[0] >= numbers[1]:
        raise ConfigError(f"reward_transform={spec!r} needs a < b; a is {numbers[0]} and b is {numbers[1]}.")
    if name == "tanh" and numbers[0] <= 0:
        raise ConfigError(f"reward_transform={spec!r} needs s > 0: rewards are divided by it.")
    return numbers


class RunningScale:
    """``r / std`` with the standard deviation of all rewards since the run began: steps have one size, whatever r is measured in.

    The mean stays (a baseline or a value takes it), so that the sign of a reward keeps its meaning. `add` takes the rewards of a
    training generation in, before they are divided; evaluation only divides. While no two rewards differ they stay as they are.

    Attributes:
        count, mean, squares: Of the rewards; sum of squared distances to the mean (Welford's sums).

    Reference: Implementation matters in deep policy gradients, arXiv:2005.12729, section 3, reward scaling.

    >>> scale = RunningScale()
    >>> scale.add(torch.tensor([0.0, 200.0]))
    >>> scale(torch.tensor([100.0, 300.0]), torch.zeros(2)).tolist()
    [1.0, 3.0]
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, rewards: Tensor) -> None:
        """Count ``(n,)`` rewards; NaN stands for none."""
        scored = rewards[~rewards.isnan()].double()
        if not len(scored):
            return
        count, gap = self.count + len(scored), float(scored.mean()) - self.mean
        self.squares += float((scored - scored.mean()).square().sum()) + gap**2 * self.count * len(scored) / count
        self.mean += gap * len(scored) / count
        self.count = count

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """``(n,)`` rewards over the spread so far."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return rewards / std if std > SPREAD_LEAST * abs(self.mean) else rewards

    def state(self) -> list[float]:
        """For JSON."""
        return [self.count, self.mean, self.squares]

    def load(self, state: Sequence[float]) -> None:
        """Undo `state`."""
        self.count, self.mean, self.squares = int(state[0]), *map(float, state[1:])


def count_rewards(transforms: Sequence[Transform | None], rewards: Tensor) -> None:
    """Let transforms that remember see ``(n, K)`` rewards of a training generation."""
    for transform, column in zip(transforms, rewards.unbind(1), strict=True):
        if isinstance(transform, RunningScale):
            transform.add(column)


def transforms_state(transforms: Sequence[Transform | None]) -> list[list[float] | None]:
    """What a resumed run must know of each; for JSON."""
    return [transform.state() if isinstance(transform, RunningScale) else None for transform in transforms]


def load_transforms(transforms: Sequence[Transform | None], state: Sequence[Sequence[float] | None]) -> None:
    """Undo `transforms_state`."""
    for transform, saved in zip(transforms, state, strict=False):
        if isinstance(transform, RunningScale) and saved is not None:
            transform.load(saved)


def _log1p(rewards: Tensor, groups: Tensor) -> Tensor:
    return rewards.sign() * rewards.abs().log1p()


def _rank(rewards: Tensor, groups: Tensor) -> Tensor:
    pair = (groups[:, None] == groups[None, :]) & ~rewards.isnan()[None, :]
    pair.fill_diagonal_(False)
    below = (rewards[:, None] > rewards[None, :]).float() + 0.5 * (rewards[:, None] == rewards[None, :]).float()
    others = pair.sum(1)
    share = torch.where(others > 0, (below * pair).sum(1) / others.clamp(min=1), torch.full_like(rewards, 0.5))
    return share.masked_fill(rewards.isnan(), math.nan)


def _zscore(rewards: Tensor, groups: Tensor) -> Tensor:
    scored = rewards[~rewards.isnan()]
    if scored.numel() < 2:
        return rewards - rewards
    return (rewards - scored.mean()) / (scored.std() + 1e-4)


REPORTED = (1, 10, 100)  # Generations after which the shares are shown.
GIVEN = ("prompts", "completions", "completion_ids", *OURS)  # Arguments that are no dataset columns.
OPPOSED = -0.5  # Correlation below which two rewards take back from each other what they give.


def variance_shares(values: Tensor, weights: Tensor) -> Tensor:
    """``w_k^2 var(r_k) / sum_j w_j^2 var(r_j)``, ``(K,)``; all 0 where nothing varies.

    Args:
        values: ``(n, K)`` rewards, NaN where a function did not apply.
        weights: ``(K,)``.

    >>> variance_shares(torch.tensor([[0.0, 0.0], [3.0, 1.0]]), torch.tensor([1.0, 1.0])).tolist()
    [0.8999999761581421, 0.10000000149011612]
    """
    known = ~values.isnan()
    count = known.sum(0).clamp_min(1)
    centred = (values - values.nansum(0) / count).nan_to_num(0.0)
    weighted = weights.square() * centred.square().sum(0) / count
    total = weighted.sum()
    return weighted / total if float(total) > 0 else torch.zeros_like(weighted)


def correlation(one: Tensor, other: Tensor) -> float | None:
    """Pearson's correlation over the rows where both are known; None where there are fewer than two or one is constant.

    Args:
        one: ``(n,)``, NaN where unknown.
        other: ``(n,)``, likewise.

    >>> correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
    1.0
    """
    known = ~(one.isnan() | other.isnan())
    a, b = one[known].double(), other[known].double()
    if a.numel() < 2:
        return None
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return None if scale < 1e-12 else round(max(-1.0, min(1.0, float(a @ b) / scale)), 9)


def length_correlation(lengths: Sequence[int], totals: Tensor) -> float | None:
    """Whether long completions earn more: the correlation of tokens with the weighted reward; None where undefined."""
    return correlation(torch.tensor(lengths, dtype=torch.float64), totals.double())


def describe_shares(names: Sequence[str], values: Tensor, weights: Tensor) -> str:
    """One line for people: the share of each function, and pairs that work against each other."""
    shares = variance_shares(values, weights)
    text = ", ".join(f"{name} {100 * float(share):.1f} %" for name, share in zip(names, shares, strict=True))
    against = []
    for i in range(len(names)):
        for j in range(i + 1, len(names)):
            found = correlation(values[:, i] * weights[i], values[:, j] * weights[j])
            if found is not None and found < OPPOSED:
                against.append(f"{names[i]} and {names[j]} (correlation {found:.2f})")
    if against:
        text += (
            f"; {', '.join(against)} cancel in their sum: multi_objective_aggregation='normalize_then_sum' keeps both"
        )
    return text


def describe_weights(
    names: Sequence[str], functions: Sequence[Callable], weights: Sequence[float], transforms: Sequence[str | None]
) -> str:
    """The table "name, weight, transform, columns it reads" of all reward functions, one a line."""
    rows = [("reward", "weight", "transform", "reads")]
    for name, function, weight, transform in zip(names, functions, weights, transforms, strict=True):
        rows.append((name, f"{weight:g}", transform or "none", _columns(function)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in rows)


def _columns(function: Callable) -> str:
    """Dataset columns that a function names; "any" where it takes all of them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "any"
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in GIVEN]
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and not named:
        return "any"
    return ", ".join(named) or "no column"
