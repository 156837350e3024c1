"""`NativeEngine`: rollout engine that samples from the trained weights in the trainer's process."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, PosttrainError, RolloutError, RolloutInterrupted, check_choice
from posttrain.models.architecture import context_length
from posttrain.models.attention import coarsest_dtype, rounds_to_tf32
from posttrain.models.forward import sequence_logps
from posttrain.models.heads import LogitRule, causal_lm, evaluating, picture_encoder, placeholder_of, trunk
from posttrain.models.logprob import HAS_ONEDNN
from posttrain.models.probe import probe_cases, probe_key, random_prompts, steady_disagreement
from posttrain.models.recurrent import table as recurrent
from posttrain.rollouts.adapters import fingerprint
from posttrain.rollouts.base import Capabilities, RolloutEngine, refuse_virtual_tokens
from posttrain.rollouts.native.attention import plugged_in
from posttrain.rollouts.native.layers import (
    Packed,
    Products,
    bound_threads,
    fused_layers,
    packs,
    quick_products,
    worth_packing,
)
from posttrain.rollouts.native.prefix_cache import PrefixCache
from posttrain.rollouts.native.requests import check_requests, check_rope
from posttrain.rollouts.native.sampler import SickRequests
from posttrain.rollouts.native.scheduler import Run
from posttrain.types import Request, Rollout, Row, Sampling

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

# Number of tokens per prefill pass. Short prompts share a pass, and longer prompts are split into chunks of this size. With
# smaller chunks, a larger part of the attention is between different chunks. This part is slower, because it is not causal.
PREFILL_TOKENS = 2048
# Default size of the prefix cache in bytes. It has space for 43,000 tokens of a 135M model in float32, or for 35,000 tokens
# of Qwen2.5-7B in bfloat16.
KEEP_BYTES = 2 * 10**9
FAILURE = "rollout_failure.json"


class NativeEngine(RolloutEngine):
    """Rollout engine that samples from the trained weights. It has no copy of the weights that must be updated.

    When a sequence ends, the next sequence uses its row of the batch. Each prompt is prefilled once for all of its
    completions. The common prefix of all prompts is prefilled only once. The random numbers of a sequence depend only on the
    seed and on the sequence's index. They do not depend on other sequences.

    Args:
        model: A transformers causal language model, with or without adapters. It must select its attention function by name.
        pad_token_id: Token id of padding during prefill.
        max_slots: Maximum number of sequences that generate at the same time. None: 64 on a CPU and 256 on a GPU.
        tokenizer: Tokenizer for stop strings and structured outputs.
        prefill_tokens: Maximum number of tokens of a prefill pass. A longer prompt is computed in several passes, with
            decoding steps between the passes.
        keep_bytes: Maximum size of the prefix cache in bytes.
        folder: Folder to which the prompts of a failed call are written. None: they are not written.
        products: Matrix products on a CPU. ``exact``: the weights are used unchanged. For calls with many steps, the weights
            are copied into a faster memory layout, if the copy fits into a quarter of the free memory. ``bfloat16``: copies
            are used that are rounded to bfloat16. The trained weights are not changed. Log-probs then differ by about 0.01
            nats, and the trainer corrects for this difference.

    Attributes:
        shares_weights: Whether the engine samples from exactly the trained weights. If so, its log-probs need no correction.
        counts: Statistics of the last call: the number of computed prompt tokens, the number of cached prompt tokens, and
            the number of decoding steps.
    """

    name = "native"

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int,
        max_slots: int | None = None,
        tokenizer: Tokenizer | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        keep_bytes: int = KEEP_BYTES,
        folder: str | Path | None = None,
        products: Products = "exact",
    ) -> None:
        refuse_virtual_tokens(model, "the native engine")
        self.model: Any = model
        self.inner: Any = causal_lm(model)
        self.trunk: Any = trunk(self.inner)
        self.pad_token_id = pad_token_id
        self.tokenizer = tokenizer
        self.rule = LogitRule.of(self.inner.config)
        self.recurrent = bool(recurrent.replaced(self.inner))
        device = next(model.parameters()).device
        self.max_slots = max_slots or (64 if device.type == "cpu" else 256)
        for name, value in {"prefill_tokens": prefill_tokens, "keep_bytes": keep_bytes}.items():
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        self.prefill_tokens, self.keep_bytes = prefill_tokens, keep_bytes
        self.folder = None if folder is None else Path(folder)
        self.kept: PrefixCache | None = None
        self.counts: dict[str, int] = {}
        self._weights: tuple | None = None
        self._held: Packed | None = None
        self.products = self._resolved(products, device)
        self.shares_weights = self.products != "bfloat16" or next(self.inner.parameters()).dtype == torch.bfloat16
        self.interrupted = threading.Event()
        self._stream = torch.Generator().manual_seed(0)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Sample completions; see `RolloutEngine.generate`. Each request may have its own `Sampling`.

        Raises:
            RolloutError: A request is invalid, or logits are NaN. The message describes the request.
            RolloutInterrupted: The user pressed Ctrl-C. The error contains all completions. Unfinished completions have the
                finish reason ``abort``.
        """
        text = self.inner.config.get_text_config()
        most, placeholder = context_length(text), placeholder_of(self.inner)
        check_requests(requests, sampling, most, text.vocab_size, placeholder=placeholder)
        check_rope(requests, sampling, self.model, "the native engine")
        if self.recurrent:
            recurrent.install(self.inner)
        self.interrupted.clear()
        if self.kept is not None:
            self._forget_old_weights()
        run = Run(self, requests, sampling)
        packed = self._packed()
        plugged, quick = plugged_in(self.inner, run.store), quick_products(self.inner, packed)
        fused = fused_layers(self.inner, packed or Packed())
        with evaluating(self.model), plugged, fused, quick, bound_threads():
            if packed is not None:
                run.read_from(packed)
            try:
                return run.to_the_end()
            except KeyboardInterrupt as error:
                raise RolloutInterrupted("generation was interrupted", rollouts=run.so_far()) from error
            except SickRequests as error:
                raise self._with_file(error, run) from error
            finally:
                self.counts = run.counts()
                if packed is not None and packed is not self._held:
                    # Free the copies now instead of at the next garbage collection, because the optimizer step needs their
                    # memory.
                    packed.weights.clear()

    def _resolved(self, products: Products, device: torch.device) -> Products:
        check_choice("products", products, get_args(Products))
        if products == "bfloat16" and device.type != "cpu":
            raise ConfigError(
                f"products='bfloat16' is for a CPU, but the model is on {device}: load it in bfloat16 instead, or "
                "train with bf16=True."
            )
        if products == "bfloat16" and not (HAS_ONEDNN and packs(torch.bfloat16)):
            raise ConfigError(
                "products='bfloat16' needs a torch build with oneDNN on x86, and a CPU on which oneDNN supports "
                "bfloat16 (AVX512). Use products='exact'."
            )
        return products

    @property
    def capabilities(self) -> Capabilities:
        """Properties of the engine. Log-probs equal those of the training forward pass only if weights and autocast are
        float32. This property can therefore change during a run.
        """
        kind = next(self.inner.parameters()).device.type
        coarse = torch.is_autocast_enabled(kind) or (kind == "cuda" and rounds_to_tf32())
        matches = self.shares_weights and coarsest_dtype(self.inner) == torch.float32 and not coarse
        return Capabilities(
            in_process=True,
            shares_weights=self.shares_weights,
            logprobs_match_training=matches,
            prefix_cache=True,
            pictures=picture_encoder(self.inner) is not None,
        )

    @contextmanager
    def prefix_cache(self) -> Iterator[None]:
        """Keep the KV cache between calls inside the context. It is reused for later turns of an episode, and for prompts
        with a common prefix.

        The cache has at most ``keep_bytes`` bytes. The least recently used sequences are removed first. If the weights or
        the active adapters have changed, the next call clears the cache. The cache is freed at the end of the context.
        """
        if self.kept is not None:  # An outer `prefix_cache` context is active. Use its cache.
            yield
            return
        self.kept, self._weights = PrefixCache(self.keep_bytes, stateful=self.recurrent), None
        try:
            yield
        finally:
            self.kept = self._held = None

    def _packed(self) -> Packed | None:
        """Return packed copies of the weights, or None. Copies of an earlier call are reused if the weights have not
        changed.
        """
        if torch.is_autocast_enabled("cpu"):
            return None  # Under autocast, torch rounds the weights itself. Use no copies.
        if self._held is not None:
            return self._held
        lower = self.products == "bfloat16"
        packed = Packed(bfloat16=lower) if lower or worth_packing(self.inner) else None
        if self.kept is not None:
            self._held = packed
        return packed

    def _forget_old_weights(self) -> None:
        device = next(self.model.parameters()).device.type
        now = (fingerprint(self.model), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        if now != self._weights and self.kept is not None:
            self.kept.clear()
            self._held = None
        self._weights = now

    def _with_file(self, error: SickRequests, run: Run) -> RolloutError:
        """Write the requests of a failed call to a file. Return the error with the path of this file."""
        if self.folder is None:
            return RolloutError(f"{error} Pass folder=... to the engine to save their prompts.")
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / FAILURE
        path.write_text(json.dumps(failure(error, run, self.tokenizer), indent=1) + "\n", encoding="utf-8")
        return RolloutError(f"{error} Their prompts and the generated tokens are in {path}.")

    def interrupt(self) -> None:
        """Stop the running call after its current step, from another thread. Unfinished completions get the finish reason
        ``abort``.
        """
        self.interrupted.set()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Store the version, and clear the prefix cache. Nothing is loaded, because the engine uses the trainer's weights."""
        self.version, self._held = version, None
        if self.kept is not None:
            self.kept.clear()

    def close(self) -> None:
        """Free the prefix cache."""
        if self.kept is not None:
            self.kept.clear()

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits ``(n, V)`` from final hidden states ``(n, H)``, with the model's logit scaling and soft cap."""
        x = self.inner.get_output_embeddings()(hidden).float()
        x = x if self.rule.scale == 1.0 else x * self.rule.scale
        return x if self.rule.softcap is None else self.rule.softcap * torch.tanh(x / self.rule.softcap)

    def new_seed(self) -> int:
        """Return the next seed from the engine's own random stream."""
        return int(torch.randint(2**63 - 1, (1,), generator=self._stream))


def failure(error: SickRequests, run: Run, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Return the data for reproducing a failed call: prompts, generated tokens, sampling settings and the version of the
    weights.
    """
    failed = []
    for index in error.requests:
        prompt = list(run.requests[index].prompt_ids)
        tokens = [c.tokens for c in run.live if c.running.index == index]
        text = {} if tokenizer is None else {"prompt": tokenizer.decode(prompt)}
        failed.append({"request": index, **text, "prompt_ids": prompt, "completions": tokens})
    sampling = dataclasses.asdict(run.sampling)
    return {"error": str(error), "version": run.engine.version, "sampling": sampling, "requests": failed}


VERDICTS: dict[str, str | None] = {}
# Maximum difference that `native_is_exact` accepts, as a fraction of the standard deviation of the correct log-probs. In
# half precision, the tolerance is 0.05.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-5}


def native_is_exact(model: nn.Module) -> str | None:
    """Compare the engine's log-probs with the log-probs of the model's forward pass. Return a description of the difference,
    or None if they are equal.
    """
    key = probe_key(model)
    if key not in VERDICTS:
        try:
            VERDICTS[key] = _compare(model)
        except PosttrainError as error:
            VERDICTS[key] = f"{type(error).__name__}: {error}"
        except Exception as error:  # An exception means that the engine does not support this model.
            VERDICTS[key] = _unsupported(model, error)
    return VERDICTS[key]


def _unsupported(model: nn.Module, error: Exception) -> str:
    """Describe why the engine raised an exception on a model."""
    inner: Any = causal_lm(model)
    # Some models, for example Falcon, Bloom, MPT and GPT-J, do not compute attention with a function that can be selected by
    # name.
    if not getattr(inner, "_supports_attention_backend", True):
        return (
            f"{type(inner).__name__} computes attention in its own code and does not call the attention functions of "
            "transformers, which this engine replaces"
        )
    return f"the engine cannot run this model's layers ({type(error).__name__}: {str(error).rstrip('.')})"


@contextmanager
def own_precision(model: nn.Module) -> Iterator[None]:
    """Compute in the dtype of the weights inside the context. Autocast is disabled, even if a trainer wrapped the forward
    method in autocast.
    """
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
    """Return the absolute differences between the log-probs of rollouts and those of the model's own forward pass.

    The result has one tensor ``(T,)`` per rollout.
    """
    truth = _true_logps(model, rollouts)
    return [(t.cpu() - torch.tensor(r.logp)).abs() for t, r in zip(truth, rollouts, strict=True)]


def _true_logps(model: nn.Module, rollouts: Sequence[Rollout]) -> list[Tensor]:
    rows = [
        Row(
            r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)], pictures=[list(r.pictures), []] if r.pictures else []
        )
        for r in rollouts
    ]
    with evaluating(model), own_precision(model):
        return sequence_logps(model, rows)


def _compare(model: nn.Module) -> str | None:
    inner: Any = causal_lm(model)
    share, encoder = TOLERANCE.get(coarsest_dtype(inner), 0.05), picture_encoder(inner)
    vocabulary = inner.config.get_text_config().vocab_size
    # These prompts have no images, so tokens that represent images must not be sampled.
    never = encoder.processor.never(vocabulary) if encoder is not None else []
    sampling = Sampling(max_new_tokens=6, seed=0, logit_bias=tuple((token, -math.inf) for token in never))
    for longest, context in probe_cases(model):
        prompts = random_prompts(vocabulary, (longest, 3))
        requests = [Request([0 if token in never else token for token in p], 2) for p in prompts]
        pictured = [] if encoder is None else encoder.probe_rows()
        requests += [Request(row.prompt_ids, 2, pictures=row.pictures[0]) for row in pictured]
        with context:
            with evaluating(model), own_precision(model):
                rollouts = NativeEngine(model, pad_token_id=0, max_slots=3).generate(requests, sampling)
            sampled = torch.cat([torch.tensor(r.logp) for r in rollouts])
            fault = steady_disagreement(model, sampled, lambda: torch.cat(_true_logps(model, rollouts)), share)  # noqa: B023
        if fault:
            return fault
    return None
