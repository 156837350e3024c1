"""Does the native engine say what the model says? Asked once per model class, answered by a tiny batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from posttrain.models.forward import causal_lm, sequence_logps
from posttrain.rollouts.hf import evaluating
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Request, Row, Sampling

__all__ = ["native_is_exact"]

VERDICTS: dict[tuple[str, str], str | None] = {}
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-5}  # 0.05 in half precision.


def native_is_exact(model: nn.Module) -> str | None:
    """None where the engine's log-probs equal the model's own forward, else the reason why it is not used."""
    inner: Any = causal_lm(model)
    dtype = next(inner.parameters()).dtype
    key = (f"{type(inner).__name__}/{inner.config.model_type}", str(dtype))
    if key not in VERDICTS:
        VERDICTS[key] = _compare(model, inner, dtype)
    return VERDICTS[key]


def _compare(model: nn.Module, inner: Any, dtype: torch.dtype) -> str | None:
    vocabulary = inner.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in (7, 3)]
    sampling = Sampling(max_new_tokens=6, seed=0)
    try:
        # The trainer may be inside autocast; both sides are compared in the weights' own precision.
        with evaluating(model), torch.autocast(next(inner.parameters()).device.type, enabled=False):
            rollouts = NativeEngine(model, pad_token_id=0, max_slots=3).generate(
                [Request(p, 2) for p in prompts], sampling
            )
            rows = [Row(r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)]) for r in rollouts]
            truth = sequence_logps(model, rows)
    except Exception as error:  # Any failure means the same: this model is not for this engine.
        return f"{type(error).__name__}: {error}"
    gap = max(float((t.cpu() - torch.tensor(r.logp)).abs().max()) for t, r in zip(truth, rollouts, strict=True))
    allowed = TOLERANCE.get(dtype, 0.05)
    return None if gap <= allowed else f"log-probs differ by {gap:.2g}, allowed {allowed:g}"
