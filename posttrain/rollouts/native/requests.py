"""Checks of generation requests: prompts, images, token ids and lengths."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from posttrain.errors import ConfigError, RolloutError
from posttrain.models.attention import rope_limits
from posttrain.types import Request, Sampling


def check_top_k(top_k: int, vocabulary: int | None) -> None:
    """Raise an error if ``top_k`` is above the vocabulary size.

    Raises:
        ConfigError: ``top_k`` is above the size of the vocabulary.
    """
    if vocabulary is not None and top_k > vocabulary:
        raise ConfigError(
            f"top_k={top_k} is above the {vocabulary} tokens of the model's vocabulary and would exclude no token. "
            f"Fix: set top_k=0 to disable it, or a number up to {vocabulary}."
        )


def check_requests(
    requests: Sequence[Request],
    sampling: Sampling,
    context: int | None,
    vocabulary: int | None,
    *,
    placeholder: int | None = None,
) -> None:
    """Raise an error for requests that no engine can serve. If a request has its own sampling settings, they override the
    call's settings.

    Args:
        requests: Requests of the call.
        sampling: Sampling settings of the call.
        context: Maximum number of tokens of prompt and completion. None: unknown.
        vocabulary: Size of the vocabulary. None: unknown.
        placeholder: Token id that image features replace. None: the engine supports only text.

    Raises:
        RolloutError: A prompt is empty, a token id is outside the vocabulary, a prompt leaves no space in the context,
            the engine does not support images, or the number of image placeholders is wrong (PT-G011).
        ConfigError: ``top_k`` is above the vocabulary size.
    """
    for index, request in enumerate(requests):
        length, most = len(request.prompt_ids), (request.sampling or sampling).max_new_tokens
        if request.pictures and placeholder is None:
            raise RolloutError(
                f"request {index} has {len(request.pictures)} images, but this engine supports text only and would "
                "ignore them. Fix: set rollout_engine='auto' or 'hf'."
            )
        wanted = sum(picture.count for picture in request.pictures)
        if placeholder is not None and (placeholders := list(request.prompt_ids).count(placeholder)) != wanted:
            raise RolloutError(
                f"PT-G011: request {index} has {placeholders} image placeholders, but its {len(request.pictures)} "
                f"images need {wanted}."
            )
        if length == 0:
            raise RolloutError(
                f"request {index} has an empty prompt. Add at least one token, for example the bos token."
            )
        if context is not None and length + most > context:
            raise RolloutError(
                f"request {index}: a prompt of {length} tokens and max_new_tokens={most} do not fit the "
                f"model's context of {context} tokens."
            )
        # Ignore placeholders, because they are never sampled and may have no logit.
        largest = max((token for token in request.prompt_ids if token != placeholder), default=0)
        if vocabulary is not None and largest >= vocabulary:
            raise RolloutError(
                f"request {index} contains the token id {largest}, but the model has {vocabulary} ids: the tokenizer "
                "belongs to another model."
            )
        cfg = request.sampling or sampling
        check_top_k(cfg.top_k, vocabulary)
        named = {token for token, _ in cfg.logit_bias} | (set(cfg.stop_token_ids) if cfg.min_new_tokens else set())
        if vocabulary is not None and named and not (min(named) >= 0 and max(named) < vocabulary):
            raise RolloutError(
                f"request {index}: logit_bias (or stop_token_ids with min_new_tokens) contains the token ids "
                f"{sorted(named)[:8]}, but the model has {vocabulary} ids. Fix: use ids in [0, {vocabulary})."
            )


def check_rope(requests: Sequence[Request], sampling: Sampling, model: nn.Module, engine: str) -> None:
    """Raise an error for requests that may exceed the length at which longrope changes the rotary frequencies of a pass.

    Raises:
        RolloutError: A request may exceed this length. The message contains the request.
    """
    switch, _ = rope_limits(model)
    for index, request in enumerate(requests):
        length, most = len(request.prompt_ids), (request.sampling or sampling).max_new_tokens
        if switch is not None and length + most > switch:
            raise RolloutError(
                f"request {index}: a prompt of {length} tokens and max_new_tokens={most} may exceed {switch} tokens, "
                f"where rope_type='longrope' changes the rotary frequencies of a whole pass. In {engine} log-probs "
                f"would depend on the other requests of the pass. Fix: use at most {switch} tokens in total, or set "
                "rollout_engine='hf', which samples such requests one by one."
            )
