"""What each reward function contributes: the table shown at the start, and its share of what is learned from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["correlation", "describe_shares", "describe_weights", "length_correlation", "variance_shares"]

REPORTED = (1, 10, 100)  # Generations after which the shares are shown.
OURS = (
    "completion_ids",
    "completions",
    "environments",
    "log_extra",
    "log_metric",
    "prompt_suffixes",
    "prompts",
    "trainer_state",
)
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
    """Dataset columns that a function names; "any" where it takes whatever comes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "any"
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in OURS]
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and not named:
        return "any"
    return ", ".join(named) or "no column"
