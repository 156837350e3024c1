"""Sampling from logits: temperature, rules, truncation, and a sampler without a sort and without a log-softmax over the
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.errors import RolloutError
from posttrain.losses.truncation import truncate
from posttrain.types import Sampling

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

BLOCK = 256


def penalize_repetition(logits: Tensor, history: list[list[int]], penalty: float) -> Tensor:
    """Reduce the logits of tokens that occurred in the prompt or the completion. Positive logits are divided by ``penalty``,
    and negative logits are multiplied by it.

    Reference: CTRL, arXiv:1909.05858, section 4.1.
    """
    for row, tokens in enumerate(history):
        seen = torch.tensor(sorted(set(tokens)), device=logits.device)
        scores = logits[row, seen]
        logits[row, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    return logits


def has_rules(sampling: Sampling) -> bool:
    """Return whether the settings contain rules, so that `apply_rules` would change the logits."""
    return bool(sampling.min_new_tokens or sampling.logit_bias or sampling.no_repeat_ngram)


def apply_rules(x: Tensor, sampling: Sampling, written: Sequence[int], history: list[list[int]] | None) -> Tensor:
    """Return a copy of the logits with the logit bias added. The logits of forbidden tokens are minus infinity.

    Args:
        x: Logits ``(n, V)`` after division by the temperature.
        sampling: Settings of all rows.
        written: Number of sampled tokens of each of the n completions.
        history: Tokens of each of the n rows, including the prompt. Needed only for settings that forbid repeated n-grams.
    """
    x = x.clone()
    if sampling.logit_bias:
        ids, added = zip(*sampling.logit_bias, strict=True)
        scale = sampling.temperature or 1.0
        x[:, torch.tensor(ids, device=x.device)] += x.new_tensor(added) / scale
    if sampling.min_new_tokens:
        stops = list(sampling.stop_token_ids)
        x = _forbid(x, [stops if count < sampling.min_new_tokens else [] for count in written])
    if sampling.no_repeat_ngram:
        x = _forbid(x, [banned_continuations(tokens, sampling.no_repeat_ngram) for tokens in history or []])
    return x


def ends_with_string(tokens: Sequence[int], sampling: Sampling, tokenizer: Tokenizer) -> bool:
    """Return whether a completion ends with a token that completes a stop string."""
    if not sampling.stop_strings:
        return False
    # A token may be a single byte, and a character has up to 4 bytes. Decode enough tokens for the longest stop string.
    text = tokenizer.decode(tokens[-4 * max(map(len, sampling.stop_strings)) - 8 :])
    return any(string in text for string in sampling.stop_strings)


def banned_continuations(tokens: list[int], size: int) -> list[int]:
    """Return the tokens that would repeat an n-gram of length ``size``.

    >>> banned_continuations([1, 2, 3, 1, 2], 3)
    [3]
    """
    if len(tokens) < size:
        return []
    head = tokens[len(tokens) - size + 1 :] if size > 1 else []
    spans = range(len(tokens) - size + 1)
    return sorted({tokens[i + size - 1] for i in spans if tokens[i : i + size - 1] == head})


def _forbid(logits: Tensor, rows: list[list[int]]) -> Tensor:
    """Set the logits of each row's forbidden tokens to minus infinity, in place."""
    for row, tokens in enumerate(rows):
        if tokens:
            logits[row, torch.tensor(tokens, device=logits.device)] = -torch.inf
    return logits


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample one index per row with a probability proportional to ``weights``, by inverting the cumulative sum.

    The cumulative sum is computed in two levels: over blocks, and over the positions within one block. The vocabulary is
    then read only once. Float32 sums are short, so rounding does not change the probabilities of tokens.

    Args:
        weights: Nonnegative weights ``(n, V)``, not normalized.
        uniform: Random numbers ``(n,)`` in [0, 1), as float64.
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
    # Because of rounding, the index can be after the last position with a positive weight. In this case, use that last
    # position.
    last = (BLOCK - 1) - (chosen.flip(-1) > 0).int().argmax(-1, keepdim=True)
    # If a row contains NaN, the selected token is arbitrary. `SampledTokens.rows` raises an error for this row later.
    return (block * BLOCK + torch.minimum(inner, last)).squeeze(1).clamp_max(size - 1)


@dataclass(slots=True)
class SampledTokens:
    """One sampled token per row.

    Attributes:
        tokens: Sampled token ids ``(n,)``, int64.
        logp: Log-probs ``(n,)`` at the sampling temperature, before penalties, rules and truncation.
        processed_logp: Log-probs ``(n,)`` under the distribution from which tokens were sampled. None: they equal ``logp``.
        top: Ids and log-probs ``(n, k)`` of the most likely tokens, before penalties, rules and truncation. None: they were
            not requested.
    """

    tokens: Tensor
    logp: Tensor
    processed_logp: Tensor | None = None
    top: tuple[Tensor, Tensor] | None = None

    def rows(self) -> list[list[float]]:
        """Copy all values to the host in one transfer. Return one list per row with the token, its log-prob, and further
        values.

        Raises:
            RolloutError: A row contains NaN, or the rules forbid all tokens of a row.
        """
        columns = [x[:, None] for x in (self.tokens, self.logp, self.processed_logp) if x is not None]
        rows = torch.cat([x.double() for x in (*columns, *(self.top or ()))], 1).tolist()
        if sick := [i for i, row in enumerate(rows) if math.isnan(row[1])]:
            raise RolloutError(f"the model returned NaN logits for rows {sick}.")
        if self.processed_logp is not None and (dead := [i for i, row in enumerate(rows) if math.isnan(row[2])]):
            raise RolloutError(f"no token is allowed in rows {dead}: the guide, bias and bans exclude all tokens.")
        return rows


def draw_tokens(
    logits: Tensor,
    sampling: Sampling,
    uniform: Tensor,
    history: list[list[int]] | None = None,
    change: Callable[[Tensor], Tensor] | None = None,
) -> SampledTokens:
    """Sample one token per row. Return it with its log-prob at the sampling temperature, before truncation.

    This function does not wait for the device. If a row has no valid token, `SampledTokens.rows` raises an error later.

    Args:
        logits: Logits ``(n, V)``, which are overwritten.
        sampling: Sampling settings. With temperature 0, the most likely token is selected, and its log-prob is computed at
            temperature 1.
        uniform: Random numbers ``(n,)`` in [0, 1), as float64.
        history: Tokens of each row, including the prompt. Needed only for the repetition penalty.
        change: Function that changes the logits after division by the temperature and before truncation. It may set logits
            to minus infinity.
    """
    x = logits.float()
    greedy = sampling.temperature == 0
    if not greedy and sampling.temperature != 1.0:
        x = x / sampling.temperature
    best = x.amax(-1, keepdim=True)
    top = _most_likely(x, best, sampling.top_logps) if sampling.top_logps else None
    if greedy or change is not None or sampling.repetition_penalty != 1.0 or sampling.truncation:
        drawn = _shaped(x, best, sampling, uniform, history, change)
        drawn.top = top
        return drawn
    # Compute in place. For small tensors, allocating memory takes longer than the computation.
    weights = x.sub_(best).exp_()
    token = draw(weights, uniform)
    logp = (weights.gather(1, token[:, None]).log() - weights.sum(-1, keepdim=True).log()).squeeze(1)
    return SampledTokens(token, logp, top=top)


def _most_likely(x: Tensor, best: Tensor, count: int) -> tuple[Tensor, Tensor]:
    log_z = best + (x - best).exp_().sum(-1, keepdim=True).log()
    values, ids = x.topk(min(count, x.shape[-1]), dim=-1)
    return ids, values - log_z


def _shaped(
    x: Tensor,
    best: Tensor,
    sampling: Sampling,
    uniform: Tensor,
    history: list[list[int]] | None,
    change: Callable[[Tensor], Tensor] | None,
) -> SampledTokens:
    """Sample tokens from a distribution other than the plain softmax: greedy, or with penalties, changes or truncation."""
    greedy = sampling.temperature == 0
    log_z = best.squeeze(-1) + (x - best).exp_().sum(-1).log()
    y = x
    if sampling.repetition_penalty != 1.0:
        scale = 1.0 if greedy else sampling.temperature
        y = penalize_repetition(y * scale, history or [], sampling.repetition_penalty) / scale
    if change is not None:
        y = change(y)
    if greedy:
        token = y.argmax(-1)
        # If no token is allowed, the log-prob is NaN, as in the other branch.
        processed = torch.zeros_like(log_z).masked_fill_(y.amax(-1).isneginf(), torch.nan)
    else:
        y = truncate(y, sampling.truncation)
        weights = (y - y.amax(-1, keepdim=True)).exp_()
        token = draw(weights, uniform)
        processed = (weights.gather(1, token[:, None]).log() - weights.sum(-1, keepdim=True).log()).squeeze(1)
    return SampledTokens(token, x.gather(1, token[:, None]).squeeze(1) - log_z, processed)
