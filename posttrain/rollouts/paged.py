"""transformers' continuous batching over paged memory behind the engine contract, on the trainer's own weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, RolloutError, did_you_mean
from posttrain.models.architecture import context_length
from posttrain.models.heads import causal_lm, evaluating
from posttrain.models.tree_attention import uninstalled
from posttrain.rollouts.base import (
    Capabilities,
    RolloutEngine,
    check_followed,
    refuse_pictures,
    refuse_virtual_tokens,
)
from posttrain.rollouts.hf import pinned_config
from posttrain.rollouts.native.engine import own_precision
from posttrain.rollouts.native.requests import check_requests, check_rope
from posttrain.types import Request, Rollout, Sampling

MEMORY_SHARE = 0.5  # Of the free memory of a GPU, at most, for keys and values; the rest is for training.
PAGE, GPU_PAGE = 32, 256  # Tokens of a page; kernels for GPUs are made for transformers' own default.
BATCH_TOKENS = 8192  # Of one forward pass, at most: transformers' own default, for which it makes masks and logits.
HALF = (torch.float16, torch.bfloat16)  # What flash attention takes.
# Fields of `Sampling` that it would drop with a line in the log: it knows temperature, top_k and top_p.
UNKNOWN = (
    "min_p", "repetition_penalty", "min_new_tokens", "stop_strings", "logit_bias", "no_repeat_ngram", "guide", "top_logps",
)  # fmt: skip


def check_paged(settings: dict[str, Any] | None) -> dict[str, Any]:
    """The settings, if transformers' continuous batching knows all of them.

    Raises:
        ConfigError: An unknown name.
    """
    from transformers import ContinuousBatchingConfig

    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    for name in settings or {}:
        if name not in known:
            raise ConfigError(
                f"transformers_continuous_batching_config has {name!r}, which ContinuousBatchingConfig does not "
                f"know{did_you_mean(name, known)}."
            )
    return dict(settings or {})


def paged_refusal(model: nn.Module) -> str | None:
    """None where transformers' continuous batching can sample from this model, else the reason why not."""
    try:
        refuse_virtual_tokens(model, "rollout_engine='paged'")
        refuse_pictures(model, "rollout_engine='paged'")
    except ConfigError as error:
        return str(error)
    return None


class PagedEngine(RolloutEngine):
    """Continuous batching of transformers: requests join and leave a running batch, keys and values lie in pages.

    The weights stay as they are: they are neither copied nor cast, and float32 ones are sampled from in float32, also where
    training runs under autocast (flash attention, which takes half precision alone, is then left out; weights loaded in
    bfloat16 are sampled from in bfloat16). A thread that dies or a request that fails is an error
    that names the requests, and nothing is returned; settings it could not follow are refused.

    Args:
        model: A causal language model, the trainer's own.
        pad_token_id: Of the tokenizer.
        settings: Of transformers' ``ContinuousBatchingConfig``. ``num_blocks`` and ``max_batch_tokens`` are as many as the
            requests can need unless given, within ``max_memory_percent`` of a GPU (0.5 unless given); CUDA graphs are off
            unless given.

    Raises:
        ConfigError: A setting that it does not have, or a model with virtual tokens.
    """

    name = "paged"

    def __init__(self, model: nn.Module, *, pad_token_id: int, settings: dict[str, Any] | None = None) -> None:
        refuse_virtual_tokens(model, "rollout_engine='paged'")
        self.model: Any = model
        self.pad_token_id = pad_token_id
        self.settings = check_paged(settings)
        # Half precision may be sampled with flash attention, and another attention's log-probs are those of another engine.
        exact = causal_lm(model).dtype not in HALF
        self.capabilities = Capabilities(
            in_process=True, shares_weights=exact, unsupported=UNKNOWN, per_request_sampling=False
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`; a request's own settings may differ in ``max_new_tokens``, and in the seed, which is
        not read.

        Raises:
            ConfigError: A setting that continuous batching cannot follow.
            RolloutError: Requests failed, or the thread that generates ended before they did.
        """
        inner: Any = causal_lm(self.model)
        text = inner.config.get_text_config()
        check_requests(requests, sampling, context_length(text), text.vocab_size)
        check_rope(requests, sampling, inner, "continuous batching")
        check_followed(requests, sampling, "transformers' continuous batching", UNKNOWN, own=("max_new_tokens", "seed"))
        work = [
            (list(request.prompt_ids), (request.sampling or sampling).max_new_tokens)
            for request in requests
            for _ in range(request.n)
        ]
        # Drawn from the run's own numbers: transformers would draw it from what is put back below, the same in every call.
        seed = sampling.seed if sampling.seed is not None else int(torch.randint(2**31, ()))
        devices = [inner.device] if inner.device.type == "cuda" else []
        with (
            uninstalled(inner),
            evaluating(self.model),
            own_precision(self.model),
            torch.random.fork_rng(devices=devices),
        ):
            pages = self._pages(inner, work) | {"seed": seed}
            try:
                results = self._run(inner, work, sampling, pages)
            except MemoryError:
                if not devices or "num_blocks" in self.settings:
                    raise
                # All requests at once do not fit: as many pages as do, and the others wait for their turn.
                results = self._run(inner, work, sampling, pages | {"num_blocks": None})
        failed = {number: result.error for number, result in results.items() if result.error is not None}
        if failed or len(results) < len(work):
            lost = sorted({*failed, *(set(range(len(work))) - results.keys())})
            raise RolloutError(
                f"transformers' continuous batching lost completions {lost[:8]} of {len(work)}"
                f"{'' if not failed else f': {next(iter(failed.values()))}'}. Nothing of this call is used; its log says more. "
                "rollout_engine='native' samples without it."
            )
        return [self._rollout(prompt, results[number], sampling) for number, (prompt, _) in enumerate(work)]

    def _pages(self, inner: nn.Module, work: list[tuple[list[int], int]]) -> dict[str, Any]:
        """The user's settings over ours."""
        ours: dict[str, Any] = {"return_logprobs": True, "use_cuda_graph": False, "drop_unsupported_processors": False}
        if inner.dtype not in HALF:
            ours["auto_switch_to_flash"] = False
        on_cpu = inner.device.type == "cpu"
        if not on_cpu:
            ours["max_memory_percent"] = MEMORY_SHARE
        size = self.settings.get("page_size", PAGE if on_cpu else GPU_PAGE)
        most = max(len(prompt) + new for prompt, new in work)
        ours |= {"page_size": size, "num_blocks": 2 + len(work) * (1 + most // size)}
        ours["max_batch_tokens"] = min(BATCH_TOKENS, sum(len(prompt) for prompt, _ in work) + len(work))
        return ours | self.settings

    def _run(self, inner: nn.Module, work: list, sampling: Sampling, settings: dict[str, Any]) -> dict[int, Any]:
        """What came of each completion, by its number; those that are missing were lost."""
        from transformers import ContinuousBatchingConfig

        results: dict[int, Any] = {}
        stops = list(sampling.stop_token_ids) or -1  # -1 is none; None would be those of the checkpoint.
        longest = max(new for _, new in work)
        with inner.continuous_batching_context_manager(
            generation_config=pinned_config(
                sampling, max_new_tokens=longest, eos_token_id=stops, pad_token_id=self.pad_token_id
            ),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
            block=True,
        ) as manager:
            # All before the first step where this version can wait, so that a seed draws the same whatever the clock does.
            with manager.pause() if hasattr(manager, "pause") else nullcontext():
                for number, (prompt, new) in enumerate(work):
                    manager.add_request(prompt, request_id=str(number), max_new_tokens=new, eos_token_id=stops)
            while len(results) < len(work):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    results[int(result.request_id)] = result
                elif result is None and not manager.is_running():
                    break
        return results

    def _rollout(self, prompt: list[int], result: Any, sampling: Sampling) -> Rollout:
        tokens, said = list(result.generated_tokens), list(result.logprobs)
        ended = bool(tokens) and tokens[-1] in sampling.stop_token_ids
        cut = sampling.temperature > 0 and bool(sampling.truncation)
        # It says log-probs of what it drew from: after a cut those are not what a trainer computes.
        return Rollout(
            prompt, tokens, [] if cut else said, "stop" if ended else "length", self.version,
            processed_logp=said if cut else None,
        )  # fmt: skip

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The model is the trainer's own: only the version changes."""
        self.version = version

    def close(self) -> None:
        """Nothing to free: pages are given back after each call."""
