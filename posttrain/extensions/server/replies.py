"""What a rollout server is asked and what it answers, in the words of vLLM's server."""

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
    from posttrain.pictures.processors import PictureProcessor

# The token in the environment, where no list of processes shows it.
API_KEY_VARIABLE = "POSTTRAIN_API_KEY"
# Addresses of this machine, whose memory can be shared.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Version of the weights during an update, and after one that failed.
INCOMPLETE = "incomplete"
# What vLLM writes in place of minus infinity.
NO_LOGP = -9999.0
# vLLM's endpoint for token ids with pictures beside them; ``/v1/completions`` takes none.
GENERATE = "/inference/v1/generate"
# Of a request, what is no sampling parameter there.
BESIDE_SAMPLING = ("model", "token_ids", "content_parts", "return_token_ids")


def check_token(host: str, api_key: str | None) -> None:
    """Refuse to listen on an address that others reach without a token: whoever reaches the server replaces its weights.

    Raises:
        ConfigError: No token, and an address other than loopback.
    """
    if host not in LOOPBACK and not api_key:
        raise ConfigError(
            f"--host {host} without a token: whoever reaches the server could replace its weights. Fix: set the variable "
            f"{API_KEY_VARIABLE} for the server and for the trainer, or listen on 127.0.0.1."
        )


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error in the form of vLLM's server."""
    return {"error": {"message": message, "code": status}}


def sampling_body(sampling: Sampling) -> dict[str, Any]:
    """A `Sampling` as fields of ``/v1/completions``; all are sent, so that defaults of the model's folder do not count."""
    body: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.top_logps or 0,
        "ignore_eos": True,  # The trainer's stop tokens alone count, not those of the server's tokenizer.
        "stop_token_ids": list(sampling.stop_token_ids),
        # vLLM refuses more than the limit, which is low in a late turn of an episode.
        "min_tokens": min(sampling.min_new_tokens, sampling.max_new_tokens),
        "stop": list(sampling.stop_strings),
    }
    if sampling.logit_bias:
        # JSON has no infinity.
        body["logit_bias"] = {str(token): max(value, NEVER) for token, value in sampling.logit_bias}
    if sampling.guide is not None:
        kind, text = sampling.guide
        value = text.split("\n") if kind == "choices" else text
        body["structured_outputs"] = {"choice" if kind == "choices" else kind: value}
    return body


def pictures_body(request: Request) -> dict[str, Any]:
    """A request's pictures as fields that the thin host takes: encoded bytes once a digest, and where each is placed."""
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
    """A request's pictures as fields of `GENERATE`: PNGs of what the model sees, and ids with one placeholder each to expand."""
    if not request.pictures:
        return {}
    return {
        "token_ids": reader.collapsed(request.prompt_ids, request.pictures),
        "content_parts": [{"type": "image_url", "url": image.picture.address()} for image in request.pictures],
    }


def generate_body(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``/v1/completions``, with those of `content_parts` among them, as fields of `GENERATE`."""
    sampling = {k: v for k, v in sent.items() if k not in (*BESIDE_SAMPLING, "return_tokens_as_token_ids")}
    # It tells the sampled token first and as many as were asked for in all: one more, lest the last be left out.
    sampling["logprobs"] += bool(sampling["logprobs"])
    return {k: sent[k] for k in BESIDE_SAMPLING} | {"sampling_params": sampling}


def completions_reply(reply: Mapping[str, Any]) -> dict[str, Any]:
    """A reply of `GENERATE` in the form of one of ``/v1/completions``."""
    choices = []
    for choice in reply["choices"]:
        content = choice["logprobs"]["content"]
        tops = [{f"token_id:{one['token_id']}": one["logprob"] for one in at["top_logprobs"]} for at in content]
        logprobs = {"token_logprobs": [at["logprob"] for at in content], "top_logprobs": tops}
        choices.append(choice | {"logprobs": logprobs, "prompt_token_ids": reply["prompt_token_ids"]})
    return {"choices": choices}


def check_expansion(choices: Sequence[Mapping[str, Any]], prompt: Sequence[int], url: str) -> None:
    """Compare a prompt with pictures as the server read it with the trainer's.

    Raises:
        BadRequest: PT-G016: other token ids.
    """
    theirs, ours = next((list(choice["prompt_token_ids"]) for choice in choices), list(prompt)), list(prompt)
    if theirs == ours:
        return
    at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    raise BadRequest(
        f"PT-G016: {url} read a prompt with pictures as {len(theirs)} tokens, and the trainer as {len(ours)}; from token {at} on "
        f"they are {theirs[at : at + 4]} there and {ours[at : at + 4]} here: their processors differ. Fix: save the processor "
        "that is trained with beside the model that is served.",
        url=url,
    )


@contextlib.contextmanager
def reading(reply: Any, url: str) -> Iterator[None]:
    """Whoever reads a reply that is of another form than vLLM's gets a typed error, after which others are asked.

    Args:
        reply: As it came.
        url: Of the server.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RolloutServerError(
            f"{url} answered {reply!r:.200}, which is not of the form of vLLM's endpoints ({type(error).__name__}: {error}). "
            "Fix: let it be vLLM's server or 'posttrain serve'.",
            url=url,
        ) from error


def checked_choices(
    reply: dict[str, Any], prompt: Any, n: int, most: int, vocabulary: int | None, url: str
) -> list[dict[str, Any]]:
    """The choices of a reply of ``/v1/completions`` to one prompt, in order.

    Args:
        reply: As it came.
        prompt: Token ids, or a text (whose token ids are not compared).
        n: Completions that were asked for.
        most: Tokens that a completion may have.
        vocabulary: Token ids are below it; None: unknown.
        url: Of the server, for messages.

    Raises:
        RolloutServerError: Another prompt, too few completions, tokens without log-probs, ids beyond the vocabulary.
    """
    choices = sorted(reply.get("choices") or [], key=lambda choice: choice.get("index", 0))
    wrong = "" if len(choices) == n else f"sent {len(choices)} completions and {n} were asked for"
    for choice in choices:
        ids, logps = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if ids is None or logps is None or len(ids) != len(logps):
            wrong = f"sent {len(logps or ())} log-probs for a completion of {len(ids or ())} tokens"
        elif not isinstance(prompt, str) and choice.get("prompt_token_ids") != list(prompt):
            wrong = "answered another prompt than it was asked"
        elif len(ids) > most or not (ids or choice.get("finish_reason") == "abort"):
            wrong = f"sent a completion of {len(ids)} tokens, and 1 to {most} were asked for"
        elif ids and vocabulary and not 0 <= min(ids) <= max(ids) < vocabulary:
            wrong = f"sent token id {max(ids)}, and its vocabulary has {vocabulary}"
    if wrong:
        raise RolloutServerError(f"{url} {wrong}: its answer cannot be used.", url=url)
    return choices


def ranked(choice: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """For every token of a choice the pairs (token id, log-prob) by rank, the sampled token among them."""
    logprobs = choice["logprobs"]
    tops = logprobs.get("top_logprobs") or [None] * len(choice["token_ids"])
    lines = []
    for token, own, at in zip(choice["token_ids"], logprobs["token_logprobs"], tops, strict=True):
        # The sampled token is found by its id: the first entry is the most likely token.
        pairs = {int(name.removeprefix("token_id:")): _number(value) for name, value in (at or {}).items()}
        pairs[token] = _number(own)
        lines.append(sorted(pairs.items(), key=lambda pair: -pair[1] if math.isfinite(pair[1]) else math.inf))
    return lines


def _number(value: object) -> float:
    """A log-prob; NaN where the server has none."""
    return math.nan if value is None or value <= NO_LOGP else float(value)


def read_choice(choice: dict[str, Any], sampling: Sampling) -> Rollout:
    """A choice that `checked_choices` let pass, as a rollout.

    Its log-probs are of the distribution that was sampled from; those before truncation are not known.
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
    """Log-probs of one given sequence behind its prompt, T positions.

    Attributes:
        logps: Of the T tokens that stand there; NaN where the server has none (the first token of a sequence, the last of one
            that fills the context).
        top_ids: For each position the k most likely tokens, by rank.
        top_logps: Their log-probs.
    """

    logps: list[float]
    top_ids: list[list[int]]
    top_logps: list[list[float]]


def scores_of(ids: Sequence[int], begin: int, entries: Sequence[Any], top: int) -> Scores:
    """Scores of a sequence behind its first ``begin`` tokens, from entries as vLLM's ``prompt_logprobs`` has them."""
    scores = Scores([], [], [])
    for t in range(begin, len(ids)):
        at = (entries[t] if t < len(entries) else None) or {}
        by_rank = sorted(at.items(), key=lambda entry: -entry[1]["logprob"])[:top]
        scores.top_ids.append([int(token) for token, _ in by_rank])
        scores.top_logps.append([float(entry["logprob"]) for _, entry in by_rank])
        own = at.get(str(ids[t]))
        scores.logps.append(math.nan if own is None else float(own["logprob"]))
    return scores
