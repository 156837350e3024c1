r"""Importance ratios for samples from a truncated distribution (top-k, top-p, min-p).

Top-k, top-p and min-p keep a set K of tokens. The next token is sampled from the distribution that is renormalized over K::

    mu(v) = pi_s(v) / pi_s(K)   for v in K,   0 elsewhere;    pi = softmax(logits / temperature),   pi(K) = sum_{u in K} pi(u)

Engines return ``log mu`` of sampled tokens. The plain ratio ``pi(v) / mu(v)`` would be too small by the factor ``pi(K)``
(about 0.95 with ``top_p=0.95``). The trainer therefore computes K from its own logits by the same rule. The ratio then
compares the two renormalized distributions::

    r(v) = pi(v) / (pi(K) mu(v)),    E_mu[r] = 1 with the weights that sampled, and with other weights if they have the same K

The gradient of ``log r`` is the gradient of ``log pi``. No gradient flows through ``pi(K)``. With advantages A and unchanged
weights, the expected gradient is the gradient of ``sum_{v in K} pi(v) A(v) / pi_s(K)``. If the loss contained ``log mu``
instead of ``log pi``, the gradient could not change the probability outside of K. In the demo, the policy then collapses
(docs/grpo.md).

Because of rounding or updated weights, a sampled token can be outside of the trainer's K. In this case, the token is added to
K. The rules are applied in vLLM's order: first min-p and top-k, then top-p on the renormalized probabilities of the remaining
tokens. All three rules keep the most likely tokens, so K is defined by a minimum logit. Ids that are never sampled (image
placeholders, ``suppress_tokens``) are excluded first.

Reference: nucleus sampling, arXiv:1904.09751; min-p, arXiv:2407.01082.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.types import Truncation

# Numbers of logits that are sorted to find the nucleus of top-p. The numbers are tried in this order, each with the largest
# logits. If no number is sufficient, all logits are sorted.
CANDIDATES = (256, 4096)


def kept_from(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return the ``(n, 1)`` smallest logits that top-k, top-p and min-p keep in each row.

    Args:
        logits: ``(n, V)`` logits, divided by the temperature.
        truncation: Values of top-k, top-p and min-p.

    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    >>> kept_from(logits, Truncation(top_p=0.75)).exp()
    tensor([[0.3000]])
    """
    least = torch.full_like(logits[:, :1], -torch.inf)
    if truncation.min_p:
        least = logits.amax(-1, keepdim=True) + math.log(truncation.min_p)
    if 0 < truncation.top_k < logits.shape[-1]:
        least = torch.maximum(least, logits.topk(truncation.top_k, dim=-1).values[:, -1:])
    if truncation.top_p < 1.0:
        rest = logits.masked_fill(logits < least, -torch.inf)
        least = torch.maximum(least, _nucleus_from(rest, truncation.top_p))
    return least


def truncate(logits: Tensor, truncation: Truncation) -> Tensor:
    """Set the logits of excluded tokens to minus infinity. Tokens are excluded by min-p, top-k or top-p, or because their ids
    are never sampled.
    """
    if truncation.never:
        logits = logits.index_fill(-1, torch.tensor(truncation.never, device=logits.device), -torch.inf)
    return logits.masked_fill(logits < kept_from(logits, truncation), -torch.inf)


def kept_log_mass(logits: Tensor, truncation: Truncation, targets: Tensor) -> Tensor:
    """Compute ``log pi(K)`` of each of n rows. K always includes the sampled tokens ``targets (n, 1)``.

    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    >>> kept_log_mass(logits, Truncation(top_k=2), torch.tensor([[0]])).exp()
    tensor([0.8000])
    >>> kept_log_mass(logits, Truncation(top_k=2, never=(0,)), torch.tensor([[1]])).exp()
    tensor([0.4500])
    """
    truncated = truncate(logits, truncation)
    truncated.scatter_(1, targets, logits.gather(1, targets))
    return truncated.logsumexp(-1) - logits.logsumexp(-1)


def _nucleus_from(logits: Tensor, top_p: float) -> Tensor:
    """Return the ``(n, 1)`` smallest logits inside the nucleus of top-p of each row. More logits are sorted only for rows
    with a larger nucleus.
    """
    log_z = logits.logsumexp(-1, keepdim=True)
    floor = torch.empty_like(log_z)
    rows = torch.arange(len(logits), device=logits.device)
    for size in (*(c for c in CANDIDATES if c < logits.shape[-1]), logits.shape[-1]):
        ordered = logits[rows].topk(size, dim=-1).values
        share = (ordered - log_z[rows]).exp()
        mass = share.cumsum(-1)
        # A token belongs to the nucleus if the total probability of all more likely tokens is below top_p. The most likely
        # token always belongs to the nucleus.
        inside = ((mass - share) < top_p).sum(-1, keepdim=True).clamp_min(1)
        floor[rows] = ordered.gather(1, inside - 1)
        rows = rows[mass[:, -1] < top_p]
        if not len(rows):
            break
    return floor
