"""Estimators of the divergence from the reference, one number a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["KL_ESTIMATORS", "k1", "k2", "k3"]

CLAMP = 20.0  # exp(20) is 5e8: beyond it one token would decide the whole loss.


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``logp - ref_logp``: unbiased, can be negative."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``(logp - ref_logp)^2 / 2``: biased, never negative."""
    return (logp - ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``exp(d) - d - 1`` with ``d = ref_logp - logp``: unbiased, never negative, 0 where the two agree.

    Reference: Schulman 2020, "Approximating KL divergence"; GRPO, arXiv:2402.03300, equation 4.
    """
    gap = ref_logp - logp
    return torch.exp(gap.clamp(-CLAMP, CLAMP)) - gap - 1.0


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
