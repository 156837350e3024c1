"""Losses of supervised fine-tuning, computed from the log-probs of the loss tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["dft", "dft_loss", "nll", "uniform_nll"]


def nll(logp: Tensor) -> Tensor:
    """Return the ``(B, T)`` negative log-likelihoods ``-log p`` of tokens."""
    return -logp


def dft(logp: Tensor) -> Tensor:
    """Compute the DFT loss ``-sg(p) log p`` of each token, where sg stops the gradient. The factor p reduces the gradients of
    unlikely tokens.

    Reference: On the generalization of SFT (DFT), arXiv:2508.05629, equation 8.
    """
    return -logp.detach().exp() * logp


def dft_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | float | None = None) -> Tensor:
    """Compute the loss `dft` from the logits of a model: ``-sum_t m_t sg(p_t) log p_t / N``. This function can be passed to a
    trainer as ``compute_loss_func``.

    Args:
        outputs: Model output whose ``logits`` are a tensor ``(B, T, V)``. The logits at t predict the label at t + 1.
        labels: ``(B, T)`` token ids, or -100 for tokens that do not contribute to the loss.
        num_items_in_batch: Number N of tokens in the loss of the optimizer step. None: the number of labels other than -100
            in ``labels``. The divisor is at least 1, so that the loss of a batch without such labels is 0.

    Returns:
        Scalar.

    >>> from types import SimpleNamespace
    >>> float(dft_loss(SimpleNamespace(logits=torch.zeros(1, 2, 2)), torch.tensor([[0, 1]])))  # Half of ln 2.
    0.3465735...

    Reference: arXiv:2508.05629, equation 8.
    """
    targets = labels[:, 1:]
    mask = targets != -100
    logp = outputs.logits[:, :-1].float().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    count = mask.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=logp.device)
    return dft(logp).masked_fill(~mask, 0.0).sum() / count.clamp(min=1)


def uniform_nll(logits: Tensor) -> Tensor:
    """Compute the term of label smoothing, ``-1/V sum_v log p_v``, for each row of logits ``(N, V)``.

    Reference: Rethinking the Inception architecture, arXiv:1512.00567, section 7.
    """
    return logits.logsumexp(-1) - logits.mean(-1)
