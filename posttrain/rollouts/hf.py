"""transformers ``generate`` behind the engine contract: slow, and right for every model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from posttrain.rollouts.base import check_followed, check_requests
from posttrain.types import Request, Rollout, Sampling

__all__ = ["HFEngine", "evaluating", "pinned_config"]

# Fields of `Sampling` that this engine does not hand on.
UNKNOWN = ("min_new_tokens", "stop_strings", "logit_bias", "no_repeat_ngram", "guide")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; training mode is restored (checkpointing is idle in eval mode and keeps its settings)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class _Recorder(LogitsProcessor):
    """Keeps one step of log-probs: step t's token is known at step t + 1."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature or 1.0
        self.pending: Tensor | None = None
        self.logps: list[Tensor] = []

    def settle(self, input_ids: Tensor) -> None:
        if self.pending is not None:
            self.logps.append(self.pending.gather(1, input_ids[:, -1:]).squeeze(1))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.settle(input_ids)
        self.pending = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        return scores


def pinned_config(sampling: Sampling, **further: Any) -> GenerationConfig:
    """Every field that changes the distribution is set, so that the checkpoint's own settings do not leak in."""
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:
        names = ("temperature", "top_k", "top_p", "min_p")
        drawn = {name: getattr(sampling, name) for name in names}
    settings = {
        "max_new_tokens": sampling.max_new_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "do_sample": sampling.temperature > 0,
    }
    return GenerationConfig(**settings | drawn | further)


class HFEngine:
    """Left-pads all prompts of a call into one ``generate``.

    Args:
        model: A causal language model, the trainer's own.
        pad_token_id: Written to padding.
    """

    name = "hf"
    in_process = True  # Samples with the weights that are trained: its log-probs need no correction.

    def __init__(self, model: nn.Module, *, pad_token_id: int) -> None:
        self.model: Any = model
        self.pad_token_id = pad_token_id
        self.version = 0
        self.cache_implementation: str | None = None  # Of `GenerationConfig`; None is its default.

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`."""
        text = self.model.config.get_text_config()
        check_requests(requests, sampling, getattr(text, "max_position_embeddings", None), text.vocab_size)
        check_followed(requests, sampling, "rollout_engine='hf'", UNKNOWN, own=("seed",))
        prompts = [list(request.prompt_ids) for request in requests for _ in range(request.n)]
        width, device = max(map(len, prompts)), next(self.model.parameters()).device
        ids = torch.tensor([[self.pad_token_id] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        recorder = _Recorder(sampling.temperature)
        with evaluating(self.model), _seeded(sampling.seed, device):
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=pinned_config(
                    sampling,
                    eos_token_id=list(sampling.stop_token_ids) or None,
                    pad_token_id=self.pad_token_id,
                    num_beams=1,
                    disable_compile=True,
                    cache_implementation=self.cache_implementation,
                ),
                logits_processor=LogitsProcessorList([recorder]),
            )
        recorder.settle(out)
        logps = torch.stack(recorder.logps, 1).tolist()
        return [
            self._rollout(prompt, tokens, logp, sampling)
            for prompt, tokens, logp in zip(prompts, out[:, width:].tolist(), logps, strict=True)
        ]

    def _rollout(self, prompt: list[int], tokens: list[int], logp: list[float], sampling: Sampling) -> Rollout:
        end = next((i + 1 for i, token in enumerate(tokens) if token in sampling.stop_token_ids), None)
        size = end or len(tokens)
        return Rollout(prompt, tokens[:size], logp[:size], "stop" if end else "length", self.version)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The model is the trainer's own: only the version changes."""
        self.version = version

    def close(self) -> None:
        """Nothing to free."""


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Sampling from ``seed`` without disturbing the global generator."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
