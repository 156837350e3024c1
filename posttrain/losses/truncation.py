r"""The distribution that truncated sampling draws from, and log-probs under it.

With top-k, top-p or min-p a token is drawn from a part K of the vocabulary. The policy that acts is the renormalised one::

    mu(v) = pi(v) / sum_{u in K} pi(u)   for v in K,   0 elsewhere;    pi = softmax(logits / temperature)

so that is what importance ratios and gradients are of. Log-probs of pi instead would multiply every ratio by the mass of K
(0.95 with ``top_p=0.95``), and their gradient would miss ``-grad log sum_K pi``: a score whose mean under mu is not 0.

The trainer finds K anew, from its own logits, by the same rule as the engine: with the weights that sampled, both are one set,
the mean of the ratio is 1 and the gradient is that of mu. Once weights have moved, or round otherwise, a token may stand outside
of the trainer's K. It is kept in it: its log-prob is finite, its ratio small, and it has a gradient. Where the two sets differ,
the mean of the ratio is the mass that the trainer's mu gives to the engine's K, which is at most 1.

K is what is left by min-p and top-k, and of that, renormalised, the nucleus of top-p: the order of vLLM. All three keep the
likeliest tokens, so that a threshold says what is in K.

Reference: nucleus sampling, arXiv:1904.09751; min-p, arXiv:2407.01082; policy gradients of the distribution that acts: Sutton
et al. 2000, "Policy gradient methods for reinforcement learning with function approximation".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.types import Truncation

CANDIDATES = (256, 4096)  # Most likely tokens that are sorted in search of a nucleus, before all are.
LEFT_OUT = -1e9  # A logit of probability 0: its product with 0 is 0, which that of an infinity is not.


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
    """Logits with those outside of min-p, top-k and top-p at minus infinity."""
    return logits.masked_fill(logits < kept_from(logits, truncation), -torch.inf)


def keep_(logits: Tensor, least: Tensor, targets: Tensor) -> Tensor:
    """Leave out the logits below ``least (n, 1)``, in place, but for that of the target ``(n, 1)``, which was drawn."""
    chosen = logits.gather(1, targets)
    return logits.masked_fill_(logits < least, LEFT_OUT).scatter_(1, targets, chosen)


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
