r"""Ratios to a sampler that draws from a part of the vocabulary: top-k, top-p, min-p.

A token is drawn from the kept part K, renormalised::

    mu(v) = pi_s(v) / pi_s(K)   for v in K,   0 elsewhere;    pi = softmax(logits / temperature),   pi(K) = sum_{u in K} pi(u)

and engines say ``log mu`` of their tokens. Beside ``log pi`` of the trainer every ratio would be off by the mass of K (0.95 with
``top_p=0.95``). The trainer finds K of its own logits by the same rule, and the ratio is that of the two renormalised policies::

    r(v) = pi(v) / (pi(K) mu(v)),    E_mu[r] = 1 with the weights that sampled, and where K is the same with other ones

The mass is no part of the gradient, which is that of ``log pi``: with advantages A and the weights that sampled, its expectation
is the gradient of ``sum_{v in K} pi(v) A(v) / pi_s(K)``, the policy's own probabilities of what was kept. With ``log mu`` in its
place nothing that is trained sees the probability outside of K: on the demo's task the policy was lost so (docs/grpo.md).

A token that rounding, or weights that have moved, put outside of the trainer's K is counted with it. K is what is left by min-p
and top-k, and of that, renormalised, the nucleus of top-p: the order of vLLM. All three keep the likeliest tokens, so that a
threshold says what is in K. Ids that are never drawn (placeholders of images, ``suppress_tokens``) are out before all three.

Reference: nucleus sampling, arXiv:1904.09751; min-p, arXiv:2407.01082.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.types import Truncation

CANDIDATES = (256, 4096)  # Most likely tokens that are sorted in search of a nucleus, before all are.


def kept_from(logits: Tensor, truncation: Truncation) -> Tensor:
    """The least logit that is drawn, ``(n, 1)``.

    Args:
        logits: ``(n, V)``, divided by the temperature.
        truncation: What is left out.

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
    """Logits with those that are never drawn, or outside of min-p, top-k and top-p, at minus infinity."""
    if truncation.never:
        logits = logits.index_fill(-1, torch.tensor(truncation.never, device=logits.device), -torch.inf)
    return logits.masked_fill(logits < kept_from(logits, truncation), -torch.inf)


def kept_log_mass(logits: Tensor, truncation: Truncation, targets: Tensor) -> Tensor:
    """``log pi(K)``, ``(n,)``, where K holds the target ``(n, 1)``, which was drawn.

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
    """The smallest logit inside the nucleus, ``(n, 1)``; rows whose nucleus is wider look at more candidates, others not."""
    log_z = logits.logsumexp(-1, keepdim=True)
    floor = torch.empty_like(log_z)
    rows = torch.arange(len(logits), device=logits.device)
    for size in (*(c for c in CANDIDATES if c < logits.shape[-1]), logits.shape[-1]):
        ordered = logits[rows].topk(size, dim=-1).values
        share = (ordered - log_z[rows]).exp()
        mass = share.cumsum(-1)
        # A token belongs to the nucleus while the mass before it is below top_p; the first one always does.
        inside = ((mass - share) < top_p).sum(-1, keepdim=True).clamp_min(1)
        floor[rows] = ordered.gather(1, inside - 1)
        rows = rows[mass[:, -1] < top_p]
        if not len(rows):
            break
    return floor
