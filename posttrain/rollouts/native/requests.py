"""Checks of generation requests: prompts, images, token ids and lengths that no engine could sample from."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from posttrain.errors import ConfigError, RolloutError
from posttrain.models.attention import rope_limits
from posttrain.types import Request, Sampling


def check_top_k(top_k: int, vocabulary: int | None) -> None:
    """Refuse to keep more tokens than there are.

    Raises:
        ConfigError: ``top_k`` is above the size of the vocabulary.
    """
    if vocabulary is not None and top_k > vocabulary:
        raise ConfigError(
            f"top_k={top_k} is above the {vocabulary} tokens of the model's vocabulary: it would leave nothing out. Fix: top_k=0 "
            f"(off), or at most {vocabulary}."
        )


def check_requests(
    requests: Sequence[Request],
    sampling: Sampling,
    context: int | None,
    vocabulary: int | None,
    *,
    placeholder: int | None = None,
) -> None:
    """Refuse what no engine could do, naming the request; one's own sampling settings go before those of the call.

    Args:
        requests: Of the call.
        sampling: Of the call.
        context: Most tokens of prompt and completion; None: unknown.
        vocabulary: Size of the vocabulary; None: unknown.
        placeholder: Id of the token that a picture's features replace; None: the engine samples from text alone.

    Raises:
        RolloutError: No token in a prompt, an id outside the vocabulary, a prompt that leaves no room in the context,
            pictures for an engine that takes none, or PT-G011: another number of placeholders than the pictures have.
        ConfigError: ``top_k`` is above the vocabulary.
    """
    for index, request in enumerate(requests):
        length, most = len(request.prompt_ids), (request.sampling or sampling).max_new_tokens
        if request.pictures and placeholder is None:
            raise RolloutError(
                f"request {index} has {len(request.pictures)} pictures, and this engine samples from text alone: it would answer "
                "about pictures it never saw. Fix: rollout_engine='auto' or 'hf'."
            )
        wanted = sum(picture.count for picture in request.pictures)
        if placeholder is not None and (placeholders := list(request.prompt_ids).count(placeholder)) != wanted:
            raise RolloutError(
                f"PT-G011: request {index} has {placeholders} image placeholders, and its {len(request.pictures)} pictures have "
                f"{wanted}."
            )
        if length == 0:
            raise RolloutError(f"request {index} has an empty prompt; give it at least one token (a bos token, say).")
        if context is not None and length + most > context:
            raise RolloutError(
                f"request {index}: a prompt of {length} tokens and max_new_tokens={most} do not fit the "
                f"model's context of {context} tokens."
            )
        # A placeholder may have no logit: nothing is ever drawn in its place.
        largest = max((token for token in request.prompt_ids if token != placeholder), default=0)
        if vocabulary is not None and largest >= vocabulary:
            raise RolloutError(
                f"request {index} holds token id {largest}, and the model has {vocabulary}: the tokenizer "
                "belongs to another model."
            )
        one = request.sampling or sampling
        check_top_k(one.top_k, vocabulary)
        named = {token for token, _ in one.logit_bias} | (set(one.stop_token_ids) if one.min_new_tokens else set())
        if vocabulary is not None and named and not (min(named) >= 0 and max(named) < vocabulary):
            raise RolloutError(
                f"request {index}: logit_bias (or stop_token_ids with min_new_tokens) names token ids {sorted(named)[:8]}, and "
                f"the model has {vocabulary}. Fix: give ids in [0, {vocabulary})."
            )


def check_rope(requests: Sequence[Request], sampling: Sampling, model: nn.Module, engine: str) -> None:
    """Refuse requests that may reach beyond the length where longrope changes the frequencies of a whole pass.

    Raises:
        RolloutError: One may; names the request.
    """
    switch, _ = rope_limits(model)
    for index, request in enumerate(requests):
        length, most = len(request.prompt_ids), (request.sampling or sampling).max_new_tokens
        if switch is not None and length + most > switch:
            raise RolloutError(
                f"request {index}: a prompt of {length} tokens and max_new_tokens={most} may reach beyond {switch} tokens, where "
                f"rope_type='longrope' changes the rotary frequencies of a whole pass: in {engine} log-probs would depend on "
                f"what is sampled with it. Fix: at most {switch} tokens in all, or rollout_engine='hf', which samples such "
                "requests one by one."
            )
