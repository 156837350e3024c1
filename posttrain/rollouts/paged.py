"""`PagedEngine`: rollout engine that uses transformers' continuous batching with a paged KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, RolloutError, check_choice
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

# Maximum fraction of a GPU's free memory that the KV cache may use. The remaining memory is left for training.
MEMORY_SHARE = 0.5
# Two numbers of tokens per page of the KV cache, for a CPU and for a GPU. GPU kernels support only transformers' default.
PAGE, GPU_PAGE = 32, 256
# Maximum number of tokens per forward pass (transformers' default). Memory for masks and logits is allocated for this
# number.
BATCH_TOKENS = 8192
HALF = (torch.float16, torch.bfloat16)  # Dtypes that flash attention supports.
# Fields of `Sampling` that transformers would silently ignore. It supports only temperature, top_k and top_p.
UNKNOWN = (
    "min_p", "repetition_penalty", "min_new_tokens", "stop_strings", "logit_bias", "no_repeat_ngram", "guide", "top_logps",
)  # fmt: skip


def _fields() -> set[str]:
    from transformers import ContinuousBatchingConfig

    return {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}


def page_field() -> str:
    """Return the name of the field for the page size in the installed version of ``ContinuousBatchingConfig``."""
    return "page_size" if "page_size" in _fields() else "block_size"


def check_paged(settings: dict[str, Any] | None) -> dict[str, Any]:
    """Check settings of transformers' continuous batching, and return them.

    Raises:
        ConfigError: A name is unknown.
    """
    for name in settings or {}:
        check_choice("transformers_continuous_batching_config", name, _fields())
    return dict(settings or {})


def paged_refusal(model: nn.Module) -> str | None:
    """Return the reason why transformers' continuous batching cannot sample from this model. Return None if it can."""
    try:
        refuse_virtual_tokens(model, "rollout_engine='paged'")
        refuse_pictures(model, "rollout_engine='paged'")
    except ConfigError as error:
        return str(error)
    return None


class PagedEngine(RolloutEngine):
    """Rollout engine with transformers' continuous batching. Requests join and leave a running batch, and the KV cache is
    paged.

    Weights are neither copied nor cast. With float32 weights, the engine computes in float32, even if training runs under
    autocast. It then does not use flash attention, which needs half precision. With bfloat16 weights, it computes in
    bfloat16. If the generation thread ends early or a request fails, the call returns no completions and raises an error
    that lists the lost requests. Sampling settings that transformers does not support are rejected.

    Args:
        model: The trained causal language model.
        pad_token_id: Pad token of the tokenizer.
        settings: Fields of transformers' ``ContinuousBatchingConfig``. By default, ``num_blocks`` and
            ``max_batch_tokens`` are as large as the requests need, but use at most ``max_memory_percent`` (default 0.5)
            of a GPU. CUDA graphs are disabled.

    Raises:
        ConfigError: A setting is unknown, or the model has virtual tokens.
    """

    name = "paged"

    def __init__(self, model: nn.Module, *, pad_token_id: int, settings: dict[str, Any] | None = None) -> None:
        refuse_virtual_tokens(model, "rollout_engine='paged'")
        self.model: Any = model
        self.pad_token_id = pad_token_id
        self.settings = check_paged(settings)
        # In half precision, transformers may use flash attention. Its log-probs differ slightly from the policy's.
        exact = causal_lm(model).dtype not in HALF
        self.capabilities = Capabilities(
            in_process=True, shares_weights=exact, unsupported=UNKNOWN, per_request_sampling=False
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Sample completions; see `RolloutEngine.generate`.

        The sampling settings of a request may differ from those of the call only in ``max_new_tokens`` and the seed.
        The seed is ignored.

        Raises:
            ConfigError: A setting is not supported.
            RolloutError: Requests failed, or the generation thread ended early.
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
        # Sample a seed from the global random state. transformers would sample it from a state that is restored below, and
        # every call would get the same seed.
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
                # The memory is too small for all requests at the same time. Use all available pages, so that some requests
                # wait for free pages.
                results = self._run(inner, work, sampling, pages | {"num_blocks": None})
        failed = {number: result.error for number, result in results.items() if result.error is not None}
        if failed or len(results) < len(work):
            lost = sorted({*failed, *(set(range(len(work))) - results.keys())})
            raise RolloutError(
                f"transformers' continuous batching lost the completions {lost[:8]} of "
                f"{len(work)}{'' if not failed else f': {next(iter(failed.values()))}'}. No completion of this call "
                "is used; see transformers' log. Set rollout_engine='native' to sample without continuous batching."
            )
        return [self._rollout(prompt, results[number], sampling) for number, (prompt, _) in enumerate(work)]

    def _pages(self, inner: nn.Module, work: list[tuple[list[int], int]]) -> dict[str, Any]:
        """Return the settings of continuous batching. The user's settings override the computed settings."""
        ours: dict[str, Any] = {"return_logprobs": True, "use_cuda_graph": False, "drop_unsupported_processors": False}
        if inner.dtype not in HALF and "auto_switch_to_flash" in _fields():
            ours["auto_switch_to_flash"] = False
        on_cpu = inner.device.type == "cpu"
        if not on_cpu:
            ours["max_memory_percent"] = MEMORY_SHARE
        size = self.settings.get(page_field(), PAGE if on_cpu else GPU_PAGE)
        most = max(len(prompt) + new for prompt, new in work)
        ours |= {page_field(): size, "num_blocks": 2 + len(work) * (1 + most // size)}
        ours["max_batch_tokens"] = min(BATCH_TOKENS, sum(len(prompt) for prompt, _ in work) + len(work))
        return ours | self.settings

    def _run(self, inner: nn.Module, work: list, sampling: Sampling, settings: dict[str, Any]) -> dict[int, Any]:
        """Run continuous batching, and return the results by index of the completion. A missing result was lost."""
        from transformers import ContinuousBatchingConfig

        results: dict[int, Any] = {}
        # -1 means that there is no stop token. With None, transformers would use the checkpoint's stop tokens.
        stops = list(sampling.stop_token_ids) or -1
        longest = max(new for _, new in work)
        with inner.continuous_batching_context_manager(
            generation_config=pinned_config(
                sampling, max_new_tokens=longest, eos_token_id=stops, pad_token_id=self.pad_token_id
            ),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
            block=True,
        ) as manager:
            # Pause if this version of transformers supports it, so that all requests are added before the first step.
            # Otherwise, seeded sampling would depend on timing.
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
        tokens, logps = list(result.generated_tokens), list(result.logprobs)
        ended = bool(tokens) and tokens[-1] in sampling.stop_token_ids
        cut = sampling.temperature > 0 and bool(sampling.truncation)
        # With truncation, transformers returns log-probs under the truncated distribution. They cannot be compared with the
        # trainer's log-probs.
        return Rollout(
            prompt, tokens, [] if cut else logps, "stop" if ended else "length", self.version,
            processed_logp=logps if cut else None,
        )  # fmt: skip

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Store the version of the weights. Nothing is loaded, because the engine uses the trainer's own model."""
        self.version = version

    def close(self) -> None:
        """Do nothing, because pages are freed after each call."""
