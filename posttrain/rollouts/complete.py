"""`complete`: one call from prompts to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.data.chat import terminal_token_ids, tokenize_prompts
from posttrain.models.load import resolve_pad_token
from posttrain.rollouts.factory import create_engine
from posttrain.types import Request, Sampling

__all__ = ["complete"]


def complete(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    n: int = 1,
    seed: int | None = 0,
    engine: str = "auto",
) -> list[str]:
    """Complete prompts with a model as it is now, greedily unless a temperature is given.

    Args:
        model: A transformers causal language model (training mode and settings are left as they are).
        tokenizer: Its tokenizer.
        prompts: Strings, or lists of messages.
        max_new_tokens: Most tokens of a completion.
        temperature: 0 is greedy.
        n: Completions per prompt.
        seed: Of the sampling.
        engine: ``native``, ``hf`` or ``auto``.

    Returns:
        ``n`` texts a prompt, in order, without special tokens.
    """
    ids = tokenize_prompts([{"prompt": prompt} for prompt in prompts], tokenizer)
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_token_ids=terminal_token_ids(tokenizer, getattr(model, "generation_config", None)),
        seed=seed,
    )
    runner = create_engine(engine, model, pad_token_id=resolve_pad_token(tokenizer))
    rollouts = runner.generate([Request(prompt, n) for prompt in ids], sampling)
    return tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
