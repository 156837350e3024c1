"""Requests to rollout servers and their responses, in the format of vLLM's server."""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.errors import BadRequest, ConfigError, RolloutServerError
from posttrain.rollouts.sampling import reshapes
from posttrain.types import NEVER, Request, Rollout, Sampling

if TYPE_CHECKING:
    from posttrain.extensions.images.processors import PictureProcessor

# Environment variable with the API token. A token in a command-line argument would be visible in the list of processes.
API_KEY_VARIABLE = "POSTTRAIN_API_KEY"
# Loopback addresses. A server at one of these addresses can share memory with this process.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Weight version that a server reports during an update and after a failed update.
INCOMPLETE = "incomplete"
# Log-prob that vLLM returns instead of minus infinity, because JSON cannot represent infinity.
NO_LOGP = -9999.0
# vLLM's endpoint for prompts that contain token ids and images. ``/v1/completions`` does not support images.
GENERATE = "/inference/v1/generate"
# Request fields that are not sampling parameters.
BESIDE_SAMPLING = ("model", "token_ids", "content_parts", "return_token_ids")


def check_token(host: str, api_key: str | None) -> None:
    """Check that a server has a token if it does not listen on a loopback address. Without a token, any client that
    reaches the server could replace the weights.

    Raises:
        ConfigError: There is no token, and the address is not a loopback address.
    """
    if host not in LOOPBACK and not api_key:
        raise ConfigError(
            f"--host {host} needs a token, because any client that reaches the server could replace its weights. Fix: set "
            f"the environment variable {API_KEY_VARIABLE} for the server and the trainer, or listen on 127.0.0.1."
        )


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the JSON body of an error response in the format of vLLM's server."""
    return {"error": {"message": message, "code": status}}


def sampling_body(sampling: Sampling) -> dict[str, Any]:
    """Convert a `Sampling` to fields of ``/v1/completions``. All fields are sent, so that no defaults in the model's
    generation config are used.
    """
    body: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.top_logps or 0,
        # Stop only at the trainer's stop tokens. The eos token of the server's own tokenizer is ignored.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        # vLLM rejects min_tokens > max_tokens, which can occur in a late turn of an episode with few tokens left.
        "min_tokens": min(sampling.min_new_tokens, sampling.max_new_tokens),
        "stop": list(sampling.stop_strings),
    }
    if sampling.logit_bias:
        # JSON cannot represent infinity, so use a finite bias.
        body["logit_bias"] = {str(token): max(value, NEVER) for token, value in sampling.logit_bias}
    if sampling.guide is not None:
        kind, text = sampling.guide
        value = text.split("\n") if kind == "choices" else text
        body["structured_outputs"] = {"choice" if kind == "choices" else kind: value}
    return body


def pictures_body(request: Request) -> dict[str, Any]:
    """Return the image fields for `posttrain serve`: a mapping from digests to encoded images, and the position of each
    image in the prompt.
    """
    if not request.pictures:
        return {}
    sent = {image.picture.digest: base64.b64encode(image.picture.file_bytes()).decode() for image in request.pictures}
    placed = [
        {
            "digest": image.picture.digest,
            "start": image.start,
            "count": image.count,
            "size": image.picture.size,
            "background": image.picture.background,
        }
        for image in request.pictures
    ]
    return {"pictures": sent, "placed": placed}


def content_parts(request: Request, reader: PictureProcessor) -> dict[str, Any]:
    """Return the image fields for `GENERATE`: PNG images, and token ids with one placeholder per image. vLLM expands
    each placeholder to the number of tokens that the image needs.
    """
    if not request.pictures:
        return {}
    return {
        "token_ids": reader.collapsed(request.prompt_ids, request.pictures),
        "content_parts": [{"type": "image_url", "url": image.picture.address()} for image in request.pictures],
    }


def generate_body(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields of ``/v1/completions`` to fields of `GENERATE`. ``sent`` must contain the fields of `content_parts`."""
    sampling = {k: v for k, v in sent.items() if k not in (*BESIDE_SAMPLING, "return_tokens_as_token_ids")}
    # Request one more log-prob per position, because `GENERATE` includes the sampled token in this number.
    sampling["logprobs"] += bool(sampling["logprobs"])
    return {k: sent[k] for k in BESIDE_SAMPLING} | {"sampling_params": sampling}


def completions_reply(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a response of `GENERATE` to the format of ``/v1/completions``."""
    choices = []
    for choice in reply["choices"]:
        content = choice["logprobs"]["content"]
        tops = [{f"token_id:{token['token_id']}": token["logprob"] for token in at["top_logprobs"]} for at in content]
        logprobs = {"token_logprobs": [at["logprob"] for at in content], "top_logprobs": tops}
        choices.append(choice | {"logprobs": logprobs, "prompt_token_ids": reply["prompt_token_ids"]})
    return {"choices": choices}


def check_expansion(choices: Sequence[Mapping[str, Any]], prompt: Sequence[int], url: str) -> None:
    """Check that the server and the trainer convert a prompt with images to the same token ids.

    Raises:
        BadRequest: The token ids of server and trainer differ (PT-G016).
    """
    theirs, ours = next((list(choice["prompt_token_ids"]) for choice in choices), list(prompt)), list(prompt)
    if theirs == ours:
        return
    at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    raise BadRequest(
        f"PT-G016: {url} converts a prompt with images to {len(theirs)} tokens, but the trainer to {len(ours)}. From "
        f"token {at} on, they are {theirs[at : at + 4]} on the server and {ours[at : at + 4]} in the trainer, so the "
        "processors differ. Fix: save the processor that the trainer uses in the folder of the served model.",
        url=url,
    )


@contextlib.contextmanager
def reading(reply: Any, url: str) -> Iterator[None]:
    """Convert errors in parsing a response to a `RolloutServerError`, so that the request can be sent to
    another server.

    Args:
        reply: The response, for the error message.
        url: Address of the server.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RolloutServerError(
            f"{url} returned {reply!r:.200}, which is not in the format of vLLM's endpoints ({type(error).__name__}: "
            f"{error}). Fix: use vLLM's server or 'posttrain serve'.",
            url=url,
        ) from error


def checked_choices(
    reply: dict[str, Any], prompt: Any, n: int, most: int, vocabulary: int | None, url: str
) -> list[dict[str, Any]]:
    """Check a response of ``/v1/completions`` for one prompt. Return the choices sorted by their index.

    Args:
        reply: The parsed response.
        prompt: Token ids or text of the prompt. For a text, the prompt's token ids in the response are not checked.
        n: Number of requested completions.
        most: Maximum number of tokens per completion.
        vocabulary: Vocabulary size. None if it is unknown.
        url: Address of the server, for messages.

    Raises:
        RolloutServerError: The response is for another prompt, completions or log-probs are missing, or a token id is
            outside the vocabulary.
    """
    choices = sorted(reply.get("choices") or [], key=lambda choice: choice.get("index", 0))
    wrong = "" if len(choices) == n else f"returned {len(choices)} completions instead of {n}"
    for choice in choices:
        ids, logps = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if ids is None or logps is None or len(ids) != len(logps):
            wrong = f"returned {len(logps or ())} log-probs for a completion of {len(ids or ())} tokens"
        elif not isinstance(prompt, str) and choice.get("prompt_token_ids") != list(prompt):
            wrong = "returned completions of another prompt"
        elif len(ids) > most or not (ids or choice.get("finish_reason") == "abort"):
            wrong = f"returned a completion of {len(ids)} tokens instead of 1 to {most}"
        elif ids and vocabulary and not 0 <= min(ids) <= max(ids) < vocabulary:
            wrong = f"returned token id {max(ids)}, but the vocabulary has {vocabulary} ids"
    if wrong:
        raise RolloutServerError(f"{url} {wrong}, so its response cannot be used.", url=url)
    return choices


def ranked(choice: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """Return the candidates for every token of a choice as pairs (token id, log-prob), most likely first. The
    candidates include the sampled token.
    """
    logprobs = choice["logprobs"]
    tops = logprobs.get("top_logprobs") or [None] * len(choice["token_ids"])
    lines = []
    for token, own, at in zip(choice["token_ids"], logprobs["token_logprobs"], tops, strict=True):
        # Find the sampled token by its id. It is not always the first entry, because entries are sorted by log-prob.
        pairs = {int(name.removeprefix("token_id:")): _number(value) for name, value in (at or {}).items()}
        pairs[token] = _number(own)
        lines.append(sorted(pairs.items(), key=lambda pair: -pair[1] if math.isfinite(pair[1]) else math.inf))
    return lines


def _number(value: object) -> float:
    """Convert a log-prob from a response to a number. Return NaN if the server returned no log-prob or minus infinity."""
    return math.nan if value is None or value <= NO_LOGP else float(value)


def read_choice(choice: dict[str, Any], sampling: Sampling) -> Rollout:
    """Convert a choice that `checked_choices` returned to a rollout.

    The server returns log-probs of the distribution after temperature and truncation. Log-probs before truncation are
    not available.
    """
    ids = list(choice["token_ids"])
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length", "abort"):
        reason = "stop" if ids and ids[-1] in sampling.stop_token_ids else "length"
    logps = [_number(value) for value in choice["logprobs"]["token_logprobs"]]
    tops = [at[: sampling.top_logps] for at in ranked(choice)] if sampling.top_logps else None
    drawn = list(logps) if sampling.truncation or reshapes(sampling) else None
    return Rollout(list(choice["prompt_token_ids"]), ids, logps, reason, processed_logp=drawn, top_logps=tops)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of the T tokens that follow the prompt of one sequence.

    Attributes:
        logps: Log-probs of the T tokens. NaN if the server returned no log-prob, for example for the first token of a
            sequence or for the last token of a full context.
        top_ids: The k most likely tokens at each position, most likely first.
        top_logps: Log-probs of ``top_ids``.
    """

    logps: list[float]
    top_ids: list[list[int]]
    top_logps: list[list[float]]


def scores_of(ids: Sequence[int], begin: int, entries: Sequence[Any], top: int) -> Scores:
    """Convert vLLM's ``prompt_logprobs`` of a sequence to `Scores`. The first ``begin`` tokens are skipped."""
    scores = Scores([], [], [])
    for t in range(begin, len(ids)):
        at = (entries[t] if t < len(entries) else None) or {}
        by_rank = sorted(at.items(), key=lambda entry: -entry[1]["logprob"])[:top]
        scores.top_ids.append([int(token) for token, _ in by_rank])
        scores.top_logps.append([float(entry["logprob"]) for _, entry in by_rank])
        own = at.get(str(ids[t]))
        scores.logps.append(math.nan if own is None else float(own["logprob"]))
    return scores
