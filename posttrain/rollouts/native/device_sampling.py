"""Draws tokens on the device for rows that each have their own settings, without asking the host anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.rollouts.sampling import draw
from posttrain.types import Sampling

__all__ = ["DEAD", "NAN", "STOPPED", "Features", "Settings", "choose", "floor_of_mass", "host_decides", "is_shaped"]

STOPPED, NAN, DEAD = 1, 2, 4  # Flags of a drawn token.
INT_BITS = 32


def host_decides(sampling: Sampling) -> bool:
    """Whether the next token depends on something that only the host knows: a grammar, or repeated n-grams."""
    return sampling.guide is not None or bool(sampling.no_repeat_ngram)


def is_shaped(sampling: Sampling) -> bool:
    """Whether tokens are drawn from another distribution than the raw one."""
    cut = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p
    changed = sampling.repetition_penalty != 1.0 or sampling.min_new_tokens or sampling.logit_bias
    return bool(sampling.temperature == 0 or cut or changed)


def _wider(count: int) -> int:
    """The next power of two, 0 for 0: a captured step serves calls whose settings are of about the same size."""
    return 0 if count == 0 else 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Features:
    """What the rows of a call need; a captured step computes this and nothing else.

    Attributes:
        shaped: Some row draws from another distribution than the raw one.
        greedy: Some row takes the most likely token.
        top_k: The largest k, rounded up; 0 is off.
        top_p, min_p, penalty, least: Some row uses it.
        bias: The most biased tokens of a row, rounded up.
        stops: The most stop tokens of a row, rounded up.
        top_logps: The most of likely tokens that some row wants.
    """

    shaped: bool = False
    greedy: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False
    least: bool = False
    bias: int = 0
    stops: int = 0
    top_logps: int = 0

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> Features:
        given = list(samplings)
        return cls(
            shaped=any(map(is_shaped, given)),
            greedy=any(s.temperature == 0 for s in given),
            top_k=_wider(max((s.top_k for s in given), default=0)),
            top_p=any(s.top_p < 1.0 for s in given),
            min_p=any(bool(s.min_p) for s in given),
            penalty=any(s.repetition_penalty != 1.0 for s in given),
            least=any(s.min_new_tokens > 0 for s in given),
            bias=_wider(max((len(s.logit_bias) for s in given), default=0)),
            stops=_wider(max((len(s.stop_token_ids) for s in given), default=0)),
            top_logps=max((s.top_logps for s in given), default=0),
        )

    @property
    def width(self) -> int:
        """Numbers that a row's drawn token is told in: id, two log-probs, flags, likely ids and their log-probs."""
        return 4 + 2 * self.top_logps


class Settings:
    """What each slot was asked for, on the device; the last slot is for rows that nobody reads.

    Args:
        slots: Completions that may be written at once.
        vocabulary: V.
        features: What they need.
        device: Where the model is.
    """

    def __init__(self, slots: int, vocabulary: int, features: Features, device: torch.device) -> None:
        n = slots + 1
        # Temperature (1 for greedy rows), greedy, top-k, top-p, min-p, penalty, tokens without a stop.
        self.numbers = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]], device=device).repeat(n, 1)
        self.stops = torch.full((n, features.stops), -1, dtype=torch.long, device=device)
        self.bias_ids = torch.zeros(n, features.bias, dtype=torch.long, device=device)
        self.bias = torch.zeros(n, features.bias, device=device)
        self.seen = torch.zeros(n if features.penalty else 0, vocabulary, dtype=torch.bool, device=device)
        self.features = features

    def rows(self, samplings: Sequence[Sampling]) -> tuple[list[list[float]], list[list[int]]]:
        """Numbers and ids that `put` writes to as many slots."""
        f, numbers, ids = self.features, [], []
        for s in samplings:
            greedy = s.temperature == 0
            bias = list(s.logit_bias) + [(0, 0.0)] * (f.bias - len(s.logit_bias))
            numbers.append(
                [1.0 if greedy else s.temperature, greedy, s.top_k, s.top_p, s.min_p or 0.0, s.repetition_penalty]
                + [float(s.min_new_tokens)]
                + [added for _, added in bias]
            )
            stops = list(s.stop_token_ids) + [-1] * (f.stops - len(s.stop_token_ids))
            ids.append(stops + [token for token, _ in bias])
        return numbers, ids

    def put(self, slots: Tensor, numbers: Tensor, ids: Tensor) -> None:
        """Write rows made by `rows`, ``(n, ...)`` on the device, to ``slots (n,)``."""
        self.numbers.index_copy_(0, slots, numbers[:, :7].float())
        self.bias.index_copy_(0, slots, numbers[:, 7:].float())
        self.stops.index_copy_(0, slots, ids[:, : self.features.stops])
        self.bias_ids.index_copy_(0, slots, ids[:, self.features.stops :])


def _ordered(x: Tensor) -> Tensor:
    """Float32 to int64 so that the order is kept."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _unordered(x: Tensor) -> Tensor:
    return torch.where(x < 0, (-x) | 0x80000000, x).to(torch.int32).view(torch.float32)


def floor_of_mass(logits: Tensor, mass: Tensor) -> Tensor:
    r"""The smallest logit of the nucleus: the largest t with :math:`\sum_{x_i \ge t} p_i \ge` ``mass``.

    A bisection over the bits of a float: 32 passes over the vocabulary, no sort, and no question to the host.

    Args:
        logits: ``(n, V)`` float32.
        mass: ``(n, 1)`` float32, at most 1.

    Returns:
        ``(n, 1)`` float32.
    """
    p = logits.softmax(-1)
    most = logits.amax(-1, keepdim=True)
    low = torch.full_like(most, torch.finfo(torch.float32).min)
    low, high = _ordered(low), _ordered(most)
    for _ in range(INT_BITS):
        middle = low + (high - low + 1) // 2
        enough = torch.where(logits >= _unordered(middle), p, 0.0).sum(-1, keepdim=True) >= mass
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
    return _unordered(low)


def _truncated(y: Tensor, f: Features, k: Tensor, p: Tensor, m: Tensor) -> Tensor:
    """Top-k, top-p and min-p in this order, each row by its own ``(n, 1)`` numbers; 0, 1 and 0 are off."""
    if f.top_k:
        ordered = y.topk(min(f.top_k, y.shape[-1]), dim=-1).values
        least = ordered.gather(1, (k.long() - 1).clamp(0, ordered.shape[1] - 1))
        y = y.masked_fill((y < least) & (k > 0) & (k < y.shape[-1]), -torch.inf)
    if f.top_p:
        y = y.masked_fill((y < floor_of_mass(y, p)) & (p < 1.0), -torch.inf)
    if f.min_p:
        y = y.masked_fill(y < y.amax(-1, keepdim=True) + m.log(), -torch.inf)
    return y


def _changed(y: Tensor, s: Settings, rows: Tensor, drawn: Tensor) -> Tensor:
    """Penalty, bias and forbidden stop tokens, on tempered logits ``(n, V)``."""
    f, numbers = s.features, s.numbers.index_select(0, rows)
    temperature, penalty = numbers[:, :1], numbers[:, 5:6]
    if f.penalty:
        whole = y * temperature
        scaled = torch.where(whole > 0, whole / penalty, whole * penalty)
        y = torch.where(s.seen.index_select(0, rows) & (penalty != 1.0), scaled / temperature, y)
    if f.bias:
        y = y.scatter_add(1, s.bias_ids.index_select(0, rows), s.bias.index_select(0, rows) / temperature)
    if f.least and f.stops:
        stops = s.stops.index_select(0, rows)
        early = (drawn[:, None] < numbers[:, 6:7]) & (stops >= 0)
        ban = torch.where(early, -torch.inf, torch.inf)
        y = y.scatter_reduce(1, stops.clamp_min(0), ban, "amin")
    return y


def choose(logits: Tensor, s: Settings, rows: Tensor, drawn: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of each row, and what the host will want to know about it.

    Args:
        logits: ``(n, V)``, overwritten.
        s: The settings of all slots.
        rows: ``(n,)`` int64 slot of each row.
        drawn: ``(n,)`` tokens drawn before.
        uniform: ``(n,)`` float64 in [0, 1).

    Returns:
        ``(n,)`` int64 tokens, and ``(n, width)`` int32: token, raw and processed log-prob as bits, flags, and where
        asked for the most likely ids and the bits of their log-probs.
    """
    f, numbers = s.features, s.numbers.index_select(0, rows)
    x = logits.float() / numbers[:, :1]
    best = x.amax(-1, keepdim=True)
    flags = best.isnan().squeeze(1).to(torch.int32) * NAN
    likely = []
    if f.top_logps:
        log_z = best + (x - best).exp_().sum(-1, keepdim=True).log()
        values, ids = x.topk(min(f.top_logps, x.shape[-1]), dim=-1)
        likely = [ids.to(torch.int32), _bits(values - log_z)]
    if f.shaped:
        token, raw, processed, dead = _shaped(x, best, s, rows, drawn, uniform)
        flags = flags + dead.to(torch.int32) * DEAD
    else:
        weights = x.sub_(best).exp_()
        token = draw(weights, uniform).clamp(0, logits.shape[1] - 1)
        raw = (weights.gather(1, token[:, None]).log() - weights.sum(-1, keepdim=True).log()).squeeze(1)
        processed = raw
    if f.stops:
        stopped = (token[:, None] == s.stops.index_select(0, rows)).any(1)
        flags = flags + stopped.to(torch.int32) * STOPPED
    if f.penalty:
        s.seen.index_put_((rows, token), torch.ones_like(token, dtype=torch.bool))
    told = torch.stack([token.to(torch.int32), _bits(raw), _bits(processed), flags], 1)
    return token, torch.cat([told, *likely], 1) if likely else told


def _bits(x: Tensor) -> Tensor:
    return x.float().contiguous().view(torch.int32)


def _shaped(
    x: Tensor, best: Tensor, s: Settings, rows: Tensor, drawn: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token, raw and processed log-prob, and whether no token was left, where some row changes its distribution."""
    f, numbers = s.features, s.numbers.index_select(0, rows)
    log_z = best.squeeze(-1) + (x - best).exp_().sum(-1).log()
    y = _changed(x, s, rows, drawn)
    dead = y.amax(-1).isneginf()
    kept = _truncated(y, f, *numbers[:, 2:5].split(1, 1))
    weights = (kept - kept.amax(-1, keepdim=True)).exp_()
    token = draw(weights, uniform).clamp(0, x.shape[1] - 1)
    processed = (weights.gather(1, token[:, None]).log() - weights.sum(-1, keepdim=True).log()).squeeze(1)
    if f.greedy:
        greedy = numbers[:, 1] > 0
        token = torch.where(greedy, y.argmax(-1), token)
        processed = torch.where(greedy, 0.0, processed)
    return token, x.gather(1, token[:, None]).squeeze(1) - log_z, processed, dead
