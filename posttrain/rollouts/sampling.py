"""From logits to tokens: temperature, truncation, and a draw that needs no sort and no log-softmax over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.errors import RolloutError
from posttrain.types import Sampling

__all__ = ["draw", "penalize_repetition", "sample", "truncate"]

BLOCK = 256


def penalize_repetition(logits: Tensor, history: list[list[int]], penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of tokens that occurred before, prompt included.

    Reference: CTRL, arXiv:1909.05858, section 4.1.
    """
    for row, tokens in enumerate(history):
        seen = torch.tensor(sorted(set(tokens)), device=logits.device)
        scores = logits[row, seen]
        logits[row, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    return logits


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Set logits outside top-k, top-p and min-p to minus infinity, applied in this order."""
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1.0:
        logits = logits.masked_fill(logits < _nucleus_floor(logits, sampling.top_p), -torch.inf)
    if sampling.min_p:
        floor = logits.amax(-1, keepdim=True) + torch.log(torch.tensor(sampling.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _nucleus_floor(logits: Tensor, top_p: float) -> Tensor:
    """The smallest logit inside the nucleus, ``(n, 1)``; sorts a thousand candidates before it sorts the vocabulary."""
    log_z = logits.logsumexp(-1, keepdim=True)
    for size in (min(1024, logits.shape[-1]), logits.shape[-1]):
        ordered = logits.topk(size, dim=-1).values
        mass = (ordered - log_z).exp().cumsum(-1)
        if bool((mass[:, -1] >= top_p).all()) or size == logits.shape[-1]:
            break
    # A token belongs to the nucleus while the mass before it is below top_p; the first one always does.
    inside = ((mass - (ordered - log_z).exp()) < top_p).sum(-1, keepdim=True).clamp_min(1)
    return ordered.gather(1, inside - 1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One index a row with probability proportional to ``weights``, by inverting the cumulative sum in two levels.

    Args:
        weights: ``(n, V)`` non-negative, not normalised.
        uniform: ``(n,)`` float64 in [0, 1).

    Two levels (blocks, then one block) touch the vocabulary once and keep float32 sums short, so rounding does not move
    probability between tokens.
    """
    n, size = weights.shape
    if size % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, BLOCK - size % BLOCK))
    blocks = weights.view(n, -1, BLOCK)
    mass = blocks.sum(-1).double().cumsum(-1)
    target = uniform[:, None] * mass[:, -1:]
    block = torch.searchsorted(mass, target, right=True).clamp_max(mass.shape[1] - 1)
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp_min(0)), 0.0)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1).double()
    inner = torch.searchsorted(chosen.cumsum(-1), target - before, right=True).clamp_max(BLOCK - 1)
    # Rounding may point just past the last positive weight of the block: step back onto it.
    last = (BLOCK - 1) - (chosen.flip(-1) > 0).int().argmax(-1, keepdim=True)
    return (block * BLOCK + torch.minimum(inner, last)).squeeze(1)


def sample(
    logits: Tensor, sampling: Sampling, uniform: Tensor, history: list[list[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-prob under the tempered distribution before any truncation.

    Args:
        logits: ``(n, V)``, overwritten.
        sampling: Temperature 0 is greedy, with the log-prob at temperature 1.
        uniform: ``(n,)`` float64 in [0, 1).
        history: Tokens so far, prompt included; needed for the repetition penalty alone.

    Returns:
        Tokens ``(n,)`` int64 and log-probs ``(n,)`` float32.

    Raises:
        RolloutError: A row holds NaN.
    """
    x = logits.float()
    greedy = sampling.temperature == 0
    if not greedy and sampling.temperature != 1.0:
        x = x / sampling.temperature
    top = x.amax(-1, keepdim=True)
    if bool(top.isnan().any()):
        raise RolloutError(f"the model gave NaN logits for rows {top.isnan().flatten().nonzero().flatten().tolist()}.")
    if greedy or sampling.repetition_penalty != 1.0 or _truncates(sampling):
        return _shaped(x, top, sampling, uniform, history)
    weights = x.sub_(top).exp_()  # In place: at this size a fresh tensor costs more than the arithmetic.
    token = draw(weights, uniform)
    return token, (weights.gather(1, token[:, None]).log() - weights.sum(-1, keepdim=True).log()).squeeze(1)


def _truncates(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p)


def _shaped(
    x: Tensor, top: Tensor, sampling: Sampling, uniform: Tensor, history: list[list[int]] | None
) -> tuple[Tensor, Tensor]:
    """Greedy, penalised or truncated: the draw is from other logits than the log-prob is of."""
    greedy = sampling.temperature == 0
    log_z = top.squeeze(-1) + (x - top).exp_().sum(-1).log()
    log_probs = x
    if sampling.repetition_penalty != 1.0:
        scale = 1.0 if greedy else sampling.temperature
        x = penalize_repetition(x * scale, history or [], sampling.repetition_penalty) / scale
    if greedy:
        token = x.argmax(-1)
    else:
        x = truncate(x, sampling)
        token = draw((x - x.amax(-1, keepdim=True)).exp_(), uniform)
    return token, log_probs.gather(1, token[:, None]).squeeze(1) - log_z
