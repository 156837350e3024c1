"""Log-probs of given sequences under a model: what a teacher or a parity probe asks a server for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.rollouts.hf import evaluating
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.serve.jobs import Score, Scored

__all__ = ["score_sequences"]

PASS_TOKENS = 2048  # Of one forward pass.
CHUNK = 256  # Positions whose logits exist at once.


def score_sequences(engine: NativeEngine, items: Sequence[Score], top: int, temperature: float) -> list[Scored]:
    """For every position from ``begin`` on: the token's log-prob, and the ``top`` most likely tokens.

    Args:
        engine: Whose model scores.
        items: Sequences of at least one token.
        top: k; 0 leaves only the token's own.
        temperature: Divides the logits.
    """
    order = sorted(range(len(items)), key=lambda i: len(items[i].ids))
    found: list[Scored | None] = [None] * len(items)
    with evaluating(engine.model):
        for group in _passes([len(items[i].ids) for i in order]):
            chosen = [order[i] for i in group]
            for i, scored in zip(chosen, _one_pass(engine, [items[i] for i in chosen], top, temperature), strict=True):
                found[i] = scored
    return [scored for scored in found if scored is not None]


def _passes(lengths: list[int]) -> list[list[int]]:
    """Neighbours that share a pass, by their padded size."""
    groups: list[list[int]] = []
    for i, length in enumerate(lengths):
        if groups and length * (len(groups[-1]) + 1) <= PASS_TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _one_pass(engine: NativeEngine, items: list[Score], top: int, temperature: float) -> list[Scored]:
    width = max(len(item.ids) for item in items)
    device = next(engine.model.parameters()).device
    # Right padding comes after every real token, which causal attention never looks at.
    ids = torch.tensor([item.ids + [engine.pad_token_id] * (width - len(item.ids)) for item in items], device=device)
    hidden = engine.trunk(input_ids=ids, use_cache=False).last_hidden_state
    result = []
    for row, item in enumerate(items):
        begin = max(item.begin, 1)  # Nothing predicts the first token.
        scored = _scored(
            engine, hidden[row, begin - 1 : len(item.ids) - 1], ids[row, begin : len(item.ids)], top, temperature
        )
        if item.begin == 0 and item.ids:
            nan = float("nan")
            scored.actual.insert(0, nan)
            scored.ids.insert(0, [item.ids[0]] * top)
            scored.logps.insert(0, [nan] * top)
        result.append(scored)
    return result


def _scored(engine: Any, hidden: Tensor, tokens: Tensor, top: int, temperature: float) -> Scored:
    """``(n, H)`` states and the ``(n,)`` tokens they predict."""
    scored = Scored([], [], [])
    for part, wanted in zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True):
        logp = torch.log_softmax(engine.logits(part) / temperature, -1)
        scored.actual += logp.gather(1, wanted[:, None]).squeeze(1).tolist()
        best = logp.topk(min(top, logp.shape[-1]), dim=-1)
        scored.ids += best.indices.tolist()
        scored.logps += best.values.tolist()
    return scored
