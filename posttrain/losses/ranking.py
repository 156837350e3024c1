"""Losses of reward models, from the scores of answers that were compared."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["bradley_terry", "centering", "step_nll"]


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """``-log sigmoid(r+ - r- - m)``: the chosen answer scores higher, by at least the margin.

    Args:
        chosen: ``(P,)`` scores r+.
        rejected: ``(P,)`` scores r-.
        margin: ``(P,)`` m, 0 without.

    Returns:
        ``(P,)``.

    Reference: Training a helpful and harmless assistant, arXiv:2204.05862; margin: Llama 2, arXiv:2307.09288, equation 2.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference)


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``(r+ + r-)^2``, ``(P,)``: keeps the scores' mean near 0, which differences alone leave free.

    Reference: Helping or herding, arXiv:2312.09244, equation 2.
    """
    return (chosen + rejected) ** 2


def step_nll(logits: Tensor, good: Tensor) -> Tensor:
    """``-(y log p_1 + (1 - y) log p_0)`` of ``(N, 2)`` logits, y in [0, 1] says how good a step is, ``(N,)``.

    Reference: Solving math word problems with process- and outcome-based feedback, arXiv:2211.14275, section 2.4.
    """
    logp = torch.log_softmax(logits.float(), -1)
    return -(good * logp[:, 1] + (1 - good) * logp[:, 0])
