"""Samples from a geometric mixture of two models, token by token, each with its own key-value cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, ModelError
from posttrain.models.forward import causal_lm, learns_prompts
from posttrain.rollouts.base import Capabilities, RolloutEngine, check_followed, check_requests, check_rope
from posttrain.rollouts.hf import evaluating
from posttrain.rollouts.sampling import sample
from posttrain.types import Request, Rollout, Sampling

__all__ = ["MixtureEngine"]

# Fields of `Sampling` that a mixture is not drawn with.
UNKNOWN = ("min_new_tokens", "stop_strings", "logit_bias", "no_repeat_ngram", "guide", "top_logps")


@contextmanager
def _itself(model: nn.Module) -> Iterator[nn.Module]:
    yield model


class MixtureEngine(RolloutEngine):
    """Draws from ``softmax(c z_ref + (1 - c) z_policy)``: the policy at c = 0, the reference at c = 1.

    Both models read a token once: a prompt when it is prefilled, a completion token when it was drawn. A model whose share
    is 0 is not run at all. Rows that have stopped leave the batch.

    Args:
        model: The policy, a causal language model, possibly with adapters.
        reference: The other model; or a function that gives a context in which the model it yields is the reference (the
            same weights with their adapters off, say).
        pad_token_id: Written to padding.
        mixture_coef: c in [0, 1]; may be set between calls.
        max_rows: Sequences decoded together; None is 64 on a CPU and 256 on a GPU.

    Raises:
        ModelError: The policy learns virtual tokens (prompt tuning).

    Reference: Nash learning from human feedback, arXiv:2312.00886, section 7 (the regularised policy).
    """

    name = "mixture"
    capabilities = Capabilities(in_process=True, unsupported=UNKNOWN, per_request_sampling=False)

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | Callable[[], AbstractContextManager[nn.Module]],
        *,
        pad_token_id: int,
        mixture_coef: float = 0.5,
        max_rows: int | None = None,
    ) -> None:
        if learns_prompts(model):
            raise ModelError(
                "the mixture of two models cannot be sampled with prompt tuning. Use an adapter like LoRA."
            )
        self.model: Any = model
        self.reference: Any = functools.partial(_itself, reference) if isinstance(reference, nn.Module) else reference
        self.pad_token_id = pad_token_id
        self.mixture_coef = mixture_coef
        device = next(model.parameters()).device
        self.max_rows = max_rows or (64 if device.type == "cpu" else 256)
        self._stream = torch.Generator().manual_seed(0)

    @staticmethod
    def check(sampling: Sampling, requests: Sequence[Request] = ()) -> None:
        """Refuse settings that the policy's own completions would follow and the mixture's would not."""
        check_followed(requests, sampling, "the mixture of two models", UNKNOWN, fix="Leave it out")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `posttrain.rollouts.base.RolloutEngine.generate`."""
        if not 0 <= self.mixture_coef <= 1:
            raise ConfigError(f"mixture_coef={self.mixture_coef} must be in [0, 1]: 0 is the policy, 1 the reference.")
        text = causal_lm(self.model).config.get_text_config()  # type: ignore[union-attr]
        check_requests(requests, sampling, getattr(text, "max_position_embeddings", None), text.vocab_size)
        check_rope(requests, sampling, self.model, "the mixture of two models")
        self.check(sampling, requests)
        prompts = [list(request.prompt_ids) for request in requests for _ in range(request.n)]
        generator = self._stream if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        uniform = torch.rand(len(prompts), sampling.max_new_tokens, generator=generator, dtype=torch.float64)
        rollouts: list[Rollout] = []
        with evaluating(self.model):
            for start in range(0, len(prompts), self.max_rows):
                rows = slice(start, start + self.max_rows)
                rollouts += _Decoding(self, prompts[rows], uniform[rows], sampling).to_the_end()
        return rollouts

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The weights are the trainer's own: only the version changes."""
        self.version = version

    def close(self) -> None:
        """Nothing outlives a call."""


class _Decoding:
    """One batch from its prompts to its last token."""

    def __init__(self, engine: MixtureEngine, prompts: list[list[int]], uniform: Tensor, sampling: Sampling) -> None:
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        device = next(engine.model.parameters()).device
        width = max(map(len, prompts))
        pad = engine.pad_token_id
        self.uniform = uniform.to(device)
        self.inputs = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
        self.mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        self.caches: dict[str, Any] = {"policy": None, "reference": None}
        self.live = list(range(len(prompts)))
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.logps: list[list[float]] = [[] for _ in prompts]

    def to_the_end(self) -> list[Rollout]:
        """All rows, in their order."""
        for step in range(self.sampling.max_new_tokens):
            history = None
            if self.sampling.repetition_penalty != 1.0:
                history = [self.prompts[row] + self.tokens[row] for row in self.live]
            drawn, logp = sample(self._logits(), self.sampling, self.uniform[self.live, step], history)
            for row, token, value in zip(self.live, drawn.tolist(), logp.tolist(), strict=True):
                self.tokens[row].append(token)
                self.logps[row].append(value)
            self._advance(drawn)
            if not self.live:
                break
        return [self._rollout(row) for row in range(len(self.prompts))]

    def _logits(self) -> Tensor:
        """``(live, V)`` mixed logits of the next token."""
        share = self.engine.mixture_coef
        mixed: Tensor | None = None
        if share < 1:
            mixed = (1 - share) * self._run(self.engine.model, "policy")
        if share > 0:
            with self.engine.reference() as reference:
                theirs = share * self._run(reference, "reference")
            mixed = theirs if mixed is None else mixed + theirs
        assert mixed is not None
        return mixed

    def _run(self, model: nn.Module, name: str) -> Tensor:
        inner: Any = causal_lm(model)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -self.inputs.shape[1] :]
        output = inner(
            input_ids=self.inputs,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.caches[name],
            use_cache=True,
            logits_to_keep=1,
        )
        self.caches[name] = output.past_key_values
        return output.logits[:, -1].float()

    def _advance(self, drawn: Tensor) -> None:
        """The drawn tokens are the next inputs; rows that stopped leave every tensor."""
        stops = set(self.sampling.stop_token_ids)
        kept = [i for i, row in enumerate(self.live) if self.tokens[row][-1] not in stops]
        self.inputs = drawn[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(drawn)[:, None]], 1)
        if len(kept) == len(self.live):
            return
        index = torch.tensor(kept, dtype=torch.long, device=drawn.device)
        self.live = [self.live[i] for i in kept]
        self.inputs, self.mask = self.inputs[index], self.mask[index]
        for cache in self.caches.values():
            if cache is not None and kept:
                cache.batch_select_indices(index)

    def _rollout(self, row: int) -> Rollout:
        stopped = self.tokens[row][-1] in self.sampling.stop_token_ids
        return Rollout(
            self.prompts[row],
            self.tokens[row],
            self.logps[row],
            "stop" if stopped else "length",
            self.engine.version,
        )
