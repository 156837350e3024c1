"""`HFEngine`: rollout engine that uses transformers' ``generate``. It is slow, but supports every model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from posttrain import plugins
from posttrain.errors import ConfigError
from posttrain.losses.truncation import truncate
from posttrain.models.architecture import context_length
from posttrain.models.attention import has_recurrent_layers, rope_limits
from posttrain.models.heads import causal_lm, evaluating, learns_prompts, picture_encoder, placeholder_of
from posttrain.models.tree_attention import uninstalled
from posttrain.rollouts.base import Capabilities, RolloutEngine, check_followed
from posttrain.rollouts.native.draws import apply_rules, ends_with_string, has_rules, penalize_repetition
from posttrain.rollouts.native.requests import check_requests
from posttrain.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


@contextmanager
def without_own_settings(model: nn.Module) -> Iterator[None]:
    """Replace the model's generation config with an empty generation config inside the context.

    If an argument is None, transformers uses the value in the checkpoint's generation config. Bans, biases and forced tokens
    of the checkpoint would then change the sampled distribution.
    """
    inner: Any = causal_lm(model)
    own, inner.generation_config = inner.generation_config, GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = own


class _Shape(LogitsProcessor):
    """Logits processor that applies temperature, penalty, rules and truncation in the same way as other engines do, and
    stores log-probs.

    Log-probs are stored before and after these changes. The token of step t is known only in step t + 1, so its log-prob is
    selected in step t + 1. The repetition penalty ignores padding before the prompt. transformers' own penalty would include
    the padding.
    """

    def __init__(self, sampling: Sampling, widths: Sequence[int]) -> None:
        self.sampling, self.widths = sampling, widths
        self.temperature = sampling.temperature or 1.0
        self.changes = sampling.repetition_penalty != 1.0 or has_rules(sampling) or bool(sampling.truncation)
        self.pending: list[Tensor] = []
        self.found: list[list[Tensor]] = []

    def settle(self, input_ids: Tensor) -> None:
        """Select and store the log-probs of the tokens that were sampled in the previous step."""
        if self.pending:
            token = input_ids[:, -1:]
            self.found.append([logp.gather(1, token).squeeze(1) for logp in self.pending])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.settle(input_ids)
        raw = scores.float() / self.temperature
        self.pending = [raw.log_softmax(-1)]
        if not self.changes:
            return raw
        shaped, history = scores.float().clone(), None
        new = input_ids.shape[1] - max(self.widths)
        if self.sampling.repetition_penalty != 1.0 or self.sampling.no_repeat_ngram:
            history = [row[-(w + new) :].tolist() for row, w in zip(input_ids, self.widths, strict=True)]
        if self.sampling.repetition_penalty != 1.0:
            shaped = penalize_repetition(shaped, history or [], self.sampling.repetition_penalty)
        shaped = apply_rules(shaped / self.temperature, self.sampling, [new] * len(self.widths), history)
        if self.sampling.temperature > 0:
            shaped = truncate(shaped, self.sampling.truncation)
            self.pending.append(shaped.log_softmax(-1))
        return shaped

    def columns(self) -> list[list[list[float]]]:
        """Return the stored log-probs of each row. The first list has log-probs before any change of the logits. If the
        sampled distribution differs, a second list has the log-probs under this distribution.
        """
        return [torch.stack(parts, 1).tolist() for parts in zip(*self.found, strict=True)]


class _Strings(StoppingCriteria):
    """Stopping criterion that ends a row after a token that completes a stop string."""

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer, width: int) -> None:
        self.sampling, self.tokenizer, self.width = sampling, tokenizer, width

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        ended = [ends_with_string(row, self.sampling, self.tokenizer) for row in input_ids[:, self.width :].tolist()]
        return torch.tensor(ended, device=input_ids.device)


class _Interrupted(StoppingCriteria):
    """Stopping criterion that ends all rows after `interrupt` was called."""

    def __init__(self, interrupted: threading.Event) -> None:
        self.interrupted = interrupted

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        return torch.full((len(input_ids),), self.interrupted.is_set(), device=input_ids.device)


def pinned_config(sampling: Sampling, **further: Any) -> GenerationConfig:
    """Return a generation config that sets every field that can change the distribution, so that no setting of the
    checkpoint has an effect.
    """
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k}
        drawn |= {"top_p": sampling.top_p, "min_p": sampling.min_p}
    settings = {
        "max_new_tokens": sampling.max_new_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "do_sample": sampling.temperature > 0,
    }
    return GenerationConfig(**settings | drawn | further)


class HFEngine(RolloutEngine):
    """Rollout engine with transformers' ``generate``. Prompts are left-padded and share one call, unless padding would
    change the results; see `_calls`.

    Args:
        model: The trained causal language model.
        pad_token_id: Pad token of the tokenizer.
        tokenizer: Tokenizer for stop strings.
        cache_implementation: Field of transformers' ``GenerationConfig``. None: transformers' default.
    """

    name = "hf"
    capabilities = Capabilities(
        in_process=True,
        shares_weights=True,
        pictures=True,
        unsupported=("guide", "top_logps"),
        per_request_sampling=False,
    )

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int,
        tokenizer: Tokenizer | None = None,
        cache_implementation: str | None = None,
    ) -> None:
        self.model: Any = model
        self.tokenizer = tokenizer
        self.pad_token_id = pad_token_id
        self.cache_implementation = cache_implementation
        self.interrupted = threading.Event()
        self._warned = False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Sample completions; see `RolloutEngine.generate`.

        The sampling settings of a request may differ from those of the call only in ``max_new_tokens`` and the seed.
        The seed is ignored.

        Raises:
            ConfigError: A setting is not supported.
        """
        text = self.model.config.get_text_config()
        most = context_length(text)
        check_requests(requests, sampling, most, text.vocab_size, placeholder=placeholder_of(self.model))
        own = ("max_new_tokens", "seed")
        check_followed(requests, sampling, "rollout_engine='hf'", self.capabilities.unsupported, own)
        if sampling.stop_strings and self.tokenizer is None:
            raise ConfigError(
                "Sampling.stop_strings needs a tokenizer. Fix: pass it to the engine (HFEngine(tokenizer=...))."
            )
        self.interrupted.clear()
        rollouts: dict[int, list[Rollout]] = {}
        # Uninstall tree attention, because some models check the name of their attention implementation during generation.
        plain = uninstalled(self.model)
        with (
            plain,
            evaluating(self.model),
            without_own_settings(self.model),
            _seeded(sampling.seed, _device(self.model)),
        ):
            for together in self._calls(requests, sampling):
                alike = replace(sampling, max_new_tokens=_most(requests[together[0]], sampling))
                rollouts |= self._call([(i, requests[i]) for i in together], alike)
        return [rollout for i in range(len(requests)) for rollout in rollouts[i]]

    def _calls(self, requests: Sequence[Request], sampling: Sampling) -> list[list[int]]:
        """Group requests whose prompts can be padded to a common length without changing the results.

        In some models, only requests of equal length share a call. With virtual tokens, padding would be between the virtual
        tokens and the prompt. Llama 4 scales queries by their positions, which would include padding. Recurrent layers and
        convolutions read padding if a projection before them has a bias, in the model or in an adapter. With longrope, the
        longest row of a call selects the rotary frequencies of all rows. A request that may exceed the limit therefore runs
        alone.
        """
        switch, _ = rope_limits(self.model)
        scaled = getattr(self.model.config.get_text_config(), "attn_temperature_tuning", False)
        unpadded = scaled or learns_prompts(self.model) or has_recurrent_layers(self.model)
        encoder = picture_encoder(self.model)
        calls: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(requests):
            size, most = len(request.prompt_ids), _most(request, sampling)
            alone = switch is not None and size + most > switch
            if switch is not None and alone and size <= switch and not self._warned:
                self._warned = True
                logger.warning(
                    "completions may exceed %d tokens, where rope_type='longrope' changes the rotary frequencies: "
                    "earlier tokens are sampled with the frequencies for short sequences, but training uses the frequencies "
                    "for long sequences. Such requests are sampled one by one. Keep prompt and completion within %d tokens to "
                    "avoid this.", switch, switch,
                )  # fmt: skip
            images = () if encoder is None else encoder.call_key(i, request.pictures)
            key = (i if alone else -1, size if unpadded else -1, most, *images)
            calls.setdefault(key, []).append(i)
        return list(calls.values())

    def _call(self, requests: list[tuple[int, Request]], sampling: Sampling) -> dict[int, list[Rollout]]:
        """Run ``generate`` once on padded prompts. Return the completions by the index of their request."""
        prompts = [list(request.prompt_ids) for _, request in requests for _ in range(request.n)]
        width, device = max(map(len, prompts)), _device(self.model)
        ids = torch.tensor([[self.pad_token_id] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        shape = _Shape(sampling, [len(prompt) for prompt in prompts])
        # Disable these settings in transformers, because `_Shape` applies them.
        rest: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
        plain = replace(sampling, temperature=float(sampling.temperature > 0), **rest)
        placed = [list(request.pictures) for _, request in requests for _ in range(request.n)]
        images = {}
        if any(placed):
            images = plugins.module("extensions.images.encoder").prefill_inputs(self.model, ids, placed)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            **images,
            generation_config=pinned_config(
                plain,
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=self.pad_token_id,
                num_beams=1,
                disable_compile=True,
                cache_implementation=self.cache_implementation,
            ),
            logits_processor=LogitsProcessorList([shape]),
            stopping_criteria=StoppingCriteriaList(
                [
                    _Interrupted(self.interrupted),
                    *([_Strings(sampling, self.tokenizer, width)] if sampling.stop_strings else []),
                ]
            ),
        )
        shape.settle(out)
        rollouts = [
            self._rollout(prompt, tokens, logps, sampling)
            for prompt, tokens, *logps in zip(prompts, out[:, width:].tolist(), *shape.columns(), strict=True)
        ]
        rest_of = iter(rollouts)
        return {i: [next(rest_of) for _ in range(request.n)] for i, request in requests}

    def _rollout(self, prompt: list[int], tokens: list[int], logps: list[list[float]], sampling: Sampling) -> Rollout:
        ends = (
            i + 1
            for i, token in enumerate(tokens)
            if token in sampling.stop_token_ids
            or (sampling.stop_strings and ends_with_string(tokens[: i + 1], sampling, self.tokenizer))
        )
        end = next(ends, None)
        size = end or len(tokens)
        logp, *processed = [column[:size] for column in logps]
        drawn = processed[0] if processed else None
        reason: Any = "stop" if end else "length" if size == sampling.max_new_tokens else "abort"
        return Rollout(prompt, tokens[:size], logp, reason, self.version, processed_logp=drawn)

    def interrupt(self) -> None:
        """Stop the running call after its current step; see `RolloutEngine.interrupt`."""
        self.interrupted.set()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Store the version. The engine uses the trainer's model, so there are no weights to load."""
        self.version = version

    def close(self) -> None:
        """Do nothing, because there are no resources."""


def _most(request: Request, sampling: Sampling) -> int:
    """Return the maximum number of new tokens for this request."""
    return (request.sampling or sampling).max_new_tokens


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Set the seed inside the context, and restore the global random state on exit."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
