"""Rollouts on the weights that are being trained."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, RolloutInterrupted
from posttrain.models.forward import LogitRule, causal_lm
from posttrain.rollouts.base import check_requests
from posttrain.rollouts.hf import evaluating
from posttrain.rollouts.native.attention import plugged_in
from posttrain.rollouts.native.products import quick_products
from posttrain.rollouts.native.run import Run
from posttrain.types import Request, Rollout, Sampling

__all__ = ["NativeEngine"]

PREFILL_TOKENS = 1024  # Short prompts share a prefill; one long prompt fills the machine by itself.


class NativeEngine:
    """Runs on the weights that are being trained: no copy, no sync, nothing that can go stale.

    A finished sequence frees its row at once and the next one takes it. Each prompt is prefilled once however many
    completions it has, and what all prompts begin with once for all of them. What a sequence draws depends on the seed and
    its own number alone, not on what runs beside it.

    Args:
        model: A transformers causal language model that dispatches attention by name, possibly with adapters.
        pad_token_id: Written to padding during prefill.
        max_slots: Sequences live at once; None is 64 on a CPU and 256 on a GPU.
        tokenizer: For stop strings and guides.
        kv_tokens: Most tokens whose keys and values are held at once; sequences wait, or are set aside and computed again,
            rather than exceed it. None: as many as the slots need.
        prefill_tokens: Tokens of one prefill pass; longer prompts are computed in pieces between decoding steps.
    """

    name = "native"
    in_process = True  # Samples with the weights that are trained: its log-probs need no correction.

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int,
        max_slots: int | None = None,
        tokenizer: Any = None,
        kv_tokens: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self.model: Any = model
        self.inner: Any = causal_lm(model)
        self.pad_token_id = pad_token_id
        self.tokenizer = tokenizer
        self.rule = LogitRule.of(self.inner.config)
        device = next(model.parameters()).device
        self.max_slots = max_slots or (64 if device.type == "cpu" else 256)
        for name, value in {"kv_tokens": kv_tokens, "prefill_tokens": prefill_tokens}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        self.kv_tokens, self.prefill_tokens = kv_tokens, prefill_tokens
        self.version = 0
        self.interrupted = threading.Event()
        self._stream = torch.Generator().manual_seed(0)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`; each request may bring its own `Sampling`.

        Raises:
            RolloutError: A request that cannot be served, or NaN logits; names the request.
            RolloutInterrupted: Ctrl-C; holds all completions, the unfinished ones with reason ``abort``.
        """
        text = self.inner.config.get_text_config()
        for given in {id(r.sampling): r.sampling or sampling for r in requests}.values():
            served = [r for r in requests if (r.sampling or sampling) is given]
            check_requests(served, given, getattr(text, "max_position_embeddings", None), text.vocab_size)
        self.interrupted.clear()
        run = Run(self, requests, sampling)
        with evaluating(self.model), plugged_in(self.inner, run.store), quick_products(self.inner):
            try:
                return run.to_the_end()
            except KeyboardInterrupt as error:
                raise RolloutInterrupted("generation was interrupted", rollouts=run.so_far()) from error

    def interrupt(self) -> None:
        """From another thread: end the running call after its current step; unfinished completions say ``abort``."""
        self.interrupted.set()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The weights are the trainer's own: only the version changes."""
        self.version = version

    def close(self) -> None:
        """Nothing outlives a call."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``(n, H)`` final hidden states to ``(n, V)`` logits, by the architecture's own rule."""
        x = self.inner.get_output_embeddings()(hidden).float()
        x = x if self.rule.scale == 1.0 else x * self.rule.scale
        return x if self.rule.softcap is None else self.rule.softcap * torch.tanh(x / self.rule.softcap)

    def new_seed(self) -> int:
        """The next seed of the engine's own stream."""
        return int(torch.randint(2**63 - 1, (1,), generator=self._stream))
