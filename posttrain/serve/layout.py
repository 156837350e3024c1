"""Answers as the wire has them: log-probs by rank, NaN as null, arrays in base64."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.serve.asking import Wanted
from posttrain.serve.jobs import Scored
from posttrain.types import Rollout, Sampling

__all__ = ["generation_reply", "ranked", "renormalize", "renormalized", "score_reply"]


def clean(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def generation_reply(
    wanted: Wanted, rollouts: Sequence[Sequence[Rollout]], spans: dict[tuple[int, int], Any], *, version: int, raw: bool
) -> dict[str, Any]:
    """The answer of `/generate/` and `/chat/`.

    Args:
        wanted: What was asked.
        rollouts: ``n`` for each of its asks.
        spans: By (ask, completion): runs of (version, tokens); told where they are not all of ``version``.
        version: Of the weights at the end.
        raw: Also the log-probs before truncation and penalties.
    """
    by_prompt: dict[int, Sequence[Rollout]] = dict(zip(wanted.places, rollouts, strict=True))
    nothing = Rollout([], [], [], "length")
    lines = [r for i in range(len(wanted.prompt_ids)) for r in by_prompt.get(i, [nothing] * wanted.n)]
    reasons = [[r.finish_reason for r in by_prompt.get(i, [nothing] * wanted.n)] for i in range(len(wanted.prompt_ids))]
    reply: dict[str, Any] = {
        "prompt_ids": wanted.prompt_ids,
        "completion_ids": [r.token_ids for r in lines],
        "logprobs": None,
        "logprob_token_ids": None,
        "finish_reasons": reasons,
        "weight_version": version,
    }
    if wanted.logprobs is not None:
        pairs = [ranked(r, wanted.sampling) for r in lines]
        reply["logprobs"] = [[[clean(value) for _, value in at] for at in line] for line in pairs]
        reply["logprob_token_ids"] = [[[token for token, _ in at] for at in line] for line in pairs]
    if raw:
        reply["raw_logprobs"] = [[clean(value) for value in r.logp] for r in lines]
    spans = {place: runs for place, runs in spans.items() if any(own != version for own, _ in runs)}
    if spans:
        places = {(wanted.places[ask] * wanted.n + index): found for (ask, index), found in spans.items()}
        reply["version_spans"] = [places.get(i) for i in range(len(lines))]
    if wanted.notes:
        reply["warnings"] = wanted.notes
    return reply


def ranked(rollout: Rollout, sampling: Sampling) -> list[list[tuple[int, float]]]:
    """For every token the pairs (id, log-prob) by rank, the sampled token among them.

    Log-probs are those of the distribution that the token was drawn from; greedy decoding, which draws nothing, gives the
    model's own. Truncation renormalises all survivors alike, so their log-probs follow from the sampled token's shift.
    """
    greedy = sampling.temperature == 0
    drawn = rollout.logp if greedy or rollout.processed_logp is None else rollout.processed_logp
    if not rollout.logp:
        return [[(token, math.nan)] for token in rollout.token_ids]
    lines = []
    for t, (token, own) in enumerate(zip(rollout.token_ids, drawn, strict=True)):
        others = rollout.top_logps[t] if sampling.top_logps and rollout.top_logps is not None else []
        shift = own - rollout.logp[t]
        pairs = _survivors([(i, value + shift) for i, value in others]) if others else []
        if all(i != token for i, _ in pairs):
            pairs.append((token, own))
        lines.append(sorted(pairs, key=lambda pair: -pair[1]) if len(pairs) > 1 else pairs)
    return lines


def _survivors(pairs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The most likely ones that fit into a probability of one: the rest was cut off before drawing."""
    kept, mass = [], 0.0
    for token, value in pairs:
        mass += math.exp(min(value, 0.0)) if value <= 1e-3 else math.inf
        if mass > 1 + 1e-3:
            break
        kept.append((token, value))
    return kept


def score_reply(found: Sequence[Scored], items: Sequence[Any], *, binary: bool, top: int) -> dict[str, Any]:
    """The answer of `/get_sequence_logprobs/`."""
    targets = [item.ids[item.begin :] for item in items]
    if not binary:
        return {
            "logprobs": [[[clean(v) for v in at] for at in s.logps] for s in found],
            "logprob_token_ids": [s.ids for s in found],
            "actual_logprobs": [[[clean(v)] for v in s.actual] for s in found],
            "actual_token_ids": [[[token] for token in ids] for ids in targets],
        }
    lengths = [len(ids) for ids in targets]
    shape = (len(found), max(lengths, default=0), top)
    logps, ids = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
    actual, actual_ids = np.full((*shape[:2], 1), -np.inf, np.float32), np.zeros((*shape[:2], 1), np.int32)
    for row, (scored, tokens) in enumerate(zip(found, targets, strict=True)):
        if not tokens:
            continue
        if top:
            width = len(scored.logps[-1])  # Below `top` where the vocabulary is.
            logps[row, : len(tokens), :width] = [line[:width] for line in scored.logps]
            ids[row, : len(tokens), :width] = [line[:width] for line in scored.ids]
        actual[row, : len(tokens), 0] = scored.actual
        actual_ids[row, : len(tokens), 0] = tokens
    arrays = {"logprobs": logps, "token_ids": ids, "actual_logprobs": actual, "actual_token_ids": actual_ids}
    encoded = {
        f"{name}_b64": base64.b64encode(a.astype(a.dtype.newbyteorder("<")).tobytes()).decode()
        for name, a in arrays.items()
    }
    return encoded | {"shape": list(shape), "completion_lengths": lengths}


def renormalized(logps: Sequence[float], temperature: float) -> list[float]:
    """Log-probs at temperature 1 of k tokens, as those of a distribution over these k alone at another temperature.

    >>> [round(x, 4) for x in renormalized([-0.5, -1.5], 2.0)]
    [-0.4741, -0.9741]
    """
    scaled = [value / temperature for value in logps]
    log_z = math.log(math.fsum(map(math.exp, scaled)))
    return [value - log_z for value in scaled]


def renormalize(found: Sequence[Scored], targets: Sequence[Sequence[int]], temperature: float) -> None:
    """In place; a token outside of its k has no log-prob then."""
    for scored, tokens in zip(found, targets, strict=True):
        for i, token in enumerate(tokens):
            scored.logps[i] = renormalized(scored.logps[i], temperature)
            known = dict(zip(scored.ids[i], scored.logps[i], strict=True))
            scored.actual[i] = known.get(token, math.nan)
