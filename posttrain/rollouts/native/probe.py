"""Does the native engine say what the model says? Asked once per config, answered by tiny batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.attention import coarsest_dtype, disagreement, probe_cases, probe_key
from posttrain.models.forward import causal_lm, sequence_logps
from posttrain.rollouts.hf import evaluating
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Request, Rollout, Row, Sampling

__all__ = ["bfloat16_gap", "logp_gaps", "native_is_exact"]

VERDICTS: dict[str, str | None] = {}
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-5}  # Of the spread of the truth; 0.05 in half precision.


def native_is_exact(model: nn.Module) -> str | None:
    """None where the engine's log-probs equal those of the model as it was given, else the reason why it is not used."""
    key = probe_key(model)
    if key not in VERDICTS:
        try:
            VERDICTS[key] = _compare(model)
        except Exception as error:  # Any failure means the same: this model is not for this engine.
            VERDICTS[key] = f"{type(error).__name__}: {error}"
    return VERDICTS[key]


def bfloat16_gap(model: nn.Module, *, completions: int = 16, tokens: int = 24) -> float:
    """Mean absolute difference, in nats, of log-probs under weights rounded to bfloat16 and under the weights as they are.

    Over what the model writes by itself from one token on: random tokens are nothing that it will see.
    """
    vocabulary = causal_lm(model).config.get_text_config().vocab_size
    prompts = _random_prompts(vocabulary, (1, 1, 1, 1))
    engine = NativeEngine(model, pad_token_id=0, products="bfloat16")
    requests = [Request(prompt, completions // len(prompts)) for prompt in prompts]
    return float(torch.cat(logp_gaps(model, engine.generate(requests, Sampling(tokens, seed=0)))).mean())


@contextmanager
def own_precision(model: nn.Module) -> Iterator[None]:
    """Compute in the weights' own precision, also inside autocast, and where a trainer wrapped the forward in it."""
    wrapped = [
        (m, vars(m)["forward"]) for m in {model, causal_lm(model)} if {"_original_forward", "forward"} <= vars(m).keys()
    ]
    for module, _ in wrapped:
        module.forward = module._original_forward
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        for module, forward in wrapped:
            module.forward = forward


def logp_gaps(model: nn.Module, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """How far each completion's log-probs are from those of the model's own forward pass, one ``(T,)`` a rollout."""
    truth = _true_logps(model, rollouts)
    return [(t.cpu() - torch.tensor(r.logp)).abs() for t, r in zip(truth, rollouts, strict=True)]


def _true_logps(model: nn.Module, rollouts: Sequence[Rollout]) -> list[Tensor]:
    with evaluating(model), own_precision(model):
        return sequence_logps(model, [Row(r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)]) for r in rollouts])


def _random_prompts(vocabulary: int, sizes: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in sizes]


def _compare(model: nn.Module) -> str | None:
    inner: Any = causal_lm(model)
    share = TOLERANCE.get(coarsest_dtype(inner), 0.05)
    for longest, context in probe_cases(model):
        prompts = _random_prompts(inner.config.get_text_config().vocab_size, (longest, 3))
        with context:
            with evaluating(model), own_precision(model):
                rollouts = NativeEngine(model, pad_token_id=0, max_slots=3).generate(
                    [Request(p, 2) for p in prompts], Sampling(max_new_tokens=6, seed=0)
                )
            said = torch.cat([torch.tensor(r.logp) for r in rollouts])
            fault = disagreement(said, torch.cat(_true_logps(model, rollouts)), share)
        if fault:
            return fault
    return None
