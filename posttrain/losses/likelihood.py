"""Losses of supervised fine-tuning, from the log-probs of the trained tokens alone."""

from __future__ import annotations

from torch import Tensor

__all__ = ["dft", "nll"]


def nll(logp: Tensor) -> Tensor:
    """``-log p``, ``(B, T)``."""
    return -logp


def dft(logp: Tensor) -> Tensor:
    """``-sg(p) log p``, ``(B, T)``: the gradient of an unlikely token no longer outweighs all others.

    Reference: On the generalization of SFT (DFT), arXiv:2508.05629, equation 8.
    """
    return -logp.detach().exp() * logp
