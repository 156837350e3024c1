r"""Ratios to a sampler that samples from a truncated vocabulary: top-k, top-p, min-p.

A token is sampled from the kept set K, renormalized::

    mu(v) = pi_s(v) / pi_s(K)   for v in K,   0 elsewhere;    pi = softmax(logits / temperature),   pi(K) = sum_{u in K} pi(u)

Engines return ``log mu`` of their tokens. Compared with the trainer's ``log pi``, every ratio would be off by the mass of K (0.95
with ``top_p=0.95``). The trainer therefore finds K from its own logits by the same rule, and the ratio compares the two
renormalized policies::

    r(v) = pi(v) / (pi(K) mu(v)),    E_mu[r] = 1 with the weights that sampled, and with other weights if they have the same K

The gradient does not include the mass; it is the gradient of ``log pi``. With advantages A and the weights that sampled, its
expectation is the gradient of ``sum_{v in K} pi(v) A(v) / pi_s(K)``, which has the policy's own probabilities of K. If ``log mu``
were trained instead, no gradient would reach the probability outside of K, and the policy of the demo collapses (docs/grpo.md).

A sampled token that is outside of the trainer's K, because of rounding or updated weights, is added to K. K is computed in vLLM's
order: min-p and top-k first, then the nucleus of top-p on the renormalized rest. All three keep the likeliest tokens, so a
threshold defines K. Ids that are never sampled (image placeholders, ``suppress_tokens``) are excluded before all three.

Reference: nucleus sampling, arXiv:1904.09751; min-p, arXiv:2407.01082.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.types import Truncation

# Numbers of top logits that are sorted to find the nucleus. If they are not enough, all logits are sorted.
CANDIDATES = (256, 4096)


def kept_from(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return the smallest logit that survives top-k, top-p and min-p, ``(n, 1)``.

    Args:
        logits: ``(n, V)``, divided by the temperature.
        truncation: The top-k, top-p and min-p to apply.

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
    """Set to minus infinity the logits that are outside of min-p, top-k and top-p, or whose ids are never sampled."""
    if truncation.never:
        logits = logits.index_fill(-1, torch.tensor(truncation.never, device=logits.device), -torch.inf)
    return logits.masked_fill(logits < kept_from(logits, truncation), -torch.inf)


def kept_log_mass(logits: Tensor, truncation: Truncation, targets: Tensor) -> Tensor:
    """Compute ``log pi(K)``, ``(n,)``. The sampled target ``(n, 1)`` is always added to K.

    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    >>> kept_log_mass(logits, Truncation(top_k=2), torch.tensor([[0]])).exp()
    tensor([0.8000])
    >>> kept_log_mass(logits, Truncation(top_k=2, never=(0,)), torch.tensor([[1]])).exp()
    tensor([0.4500])
    """
    kept = truncate(logits, truncation)
    kept.scatter_(1, targets, logits.gather(1, targets))
    return kept.logsumexp(-1) - logits.logsumexp(-1)


def _nucleus_from(logits: Tensor, top_p: float) -> Tensor:
    """Return the smallest logit inside the nucleus, ``(n, 1)``. The search widens only for rows with a larger nucleus."""
    log_z = logits.logsumexp(-1, keepdim=True)
    floor = torch.empty_like(log_z)
    rows = torch.arange(len(logits), device=logits.device)
    for size in (*(c for c in CANDIDATES if c < logits.shape[-1]), logits.shape[-1]):
        ordered = logits[rows].topk(size, dim=-1).values
        share = (ordered - log_z[rows]).exp()
        mass = share.cumsum(-1)
        # A token belongs to the nucleus if the total probability of all more likely tokens is below top_p. The first token
        # always does.
        inside = ((mass - share) < top_p).sum(-1, keepdim=True).clamp_min(1)
        floor[rows] = ordered.gather(1, inside - 1)
        rows = rows[mass[:, -1] < top_p]
        if not len(rows):
            break
    return floor
