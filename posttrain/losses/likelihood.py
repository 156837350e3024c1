"""Losses of supervised fine-tuning, from the log-probs of the trained tokens alone."""

from __future__ import annotations

from torch import Tensor

__all__ = ["dft", "nll", "uniform_nll"]


def nll(logp: Tensor) -> Tensor:
    """``-log p``, ``(B, T)``."""
    return -logp


def dft(logp: Tensor) -> Tensor:
    """``-sg(p) log p``, ``(B, T)``: the gradient of an unlikely token no longer outweighs all others.

    Reference: On the generalization of SFT (DFT), arXiv:2508.05629, equation 8.
    """
    return -logp.detach().exp() * logp


def uniform_nll(logits: Tensor) -> Tensor:
    """``-1/V sum_v log p_v`` of each row of ``(N, V)`` logits: what label smoothing mixes into the loss, ``(N,)``.

    Reference: Rethinking the Inception architecture, arXiv:1512.00567, section 7.
    """
    return logits.logsumexp(-1) - logits.mean(-1)
