"""What a rollout server is asked, and its answer as rollouts: nothing is taken that does not answer the question."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import RolloutServerError
from posttrain.rollouts.base import check_requests
from posttrain.types import Request, Rollout, Sampling

__all__ = ["Chunk", "check_each", "derived_seed", "read_reply", "sampling_fields"]

SAME = 1e-6  # Log-probs this close are one.
SEEDS = 2**62  # Seeds stay within the signed integers of every engine.


def derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of request ``index`` in a call with ``seed``: the same whichever server answers, and in whatever company.

    Multiplier and increment are Knuth's of MMIX, so that seeds of neighbours lie far apart (engines count on from them).
    """
    return None if seed is None else (seed * 6364136223846793005 + (index + 1) * 1442695040888963407) % SEEDS


def check_each(requests: Sequence[Request], sampling: Sampling, context: int | None, vocabulary: int | None) -> None:
    """`posttrain.rollouts.base.check_requests` where requests may bring their own sampling."""
    for own in {id(r.sampling): r.sampling or sampling for r in requests}.values():
        check_requests([r for r in requests if (r.sampling or sampling) is own], own, context, vocabulary)


@dataclass(eq=False)
class Chunk:
    """Requests that go to one server together: one number of completions, one sampling.

    Attributes:
        indices: Of the requests in the call.
        id: Under which a server answers once, however often it is asked.
    """

    indices: list[int]
    prompts: list[list[int]]
    n: int
    sampling: Sampling
    seeds: list[int | None]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def tokens(self) -> int:
        """That may have to be computed."""
        return sum(map(len, self.prompts)) + len(self.prompts) * self.n * self.sampling.max_new_tokens


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """A `Sampling` as the server's request has it: named fields, and the rest under vLLM's names."""
    rest: dict[str, Any] = {
        "ignore_eos": True
    }  # The trainer's stop tokens alone count, not those of the server's tokenizer.
    if sampling.stop_token_ids:
        rest["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.min_new_tokens:
        rest["min_tokens"] = sampling.min_new_tokens
    if sampling.stop_strings:
        rest["stop"] = list(sampling.stop_strings)
    if sampling.logit_bias:
        rest["logit_bias"] = {str(token): value for token, value in sampling.logit_bias}
    if sampling.no_repeat_ngram:
        rest["no_repeat_ngram"] = sampling.no_repeat_ngram
    if sampling.guide is not None:
        kind, text = sampling.guide
        rest["structured_outputs"] = {
            {"choices": "choice"}.get(kind, kind): text.split("\n") if kind == "choices" else text
        }
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.top_logps,
        "generation_kwargs": rest,
    }


def read_reply(reply: dict[str, Any], chunk: Chunk, *, url: str, vocabulary: int | None = None) -> list[Rollout]:
    """A reply as rollouts, after it has been shown to be an answer to this chunk and to nothing else.

    Raises:
        RolloutServerError: Other prompts, too few completions, tokens without log-probs, ids beyond the vocabulary.
    """
    completions, logps = reply.get("completion_ids"), reply.get("logprobs")
    owners = [prompt for prompt in chunk.prompts for _ in range(chunk.n)]

    def refuse(what: str) -> RolloutServerError:
        return RolloutServerError(f"{url} {what}: its answer cannot be used.", url=url)

    if not isinstance(completions, list) or len(completions) != len(owners):
        count = len(completions) if isinstance(completions, list) else "no list of"
        raise refuse(f"sent {count} completions for {len(chunk.prompts)} prompts x {chunk.n}")
    if "prompt_ids" in reply and reply["prompt_ids"] != chunk.prompts:
        raise refuse("answered other prompts than it was asked")
    if not isinstance(logps, list) or len(logps) != len(owners):
        raise refuse("sent no log-probs of its completions")
    tops = reply.get("logprob_token_ids") or [None] * len(owners)
    raws = reply.get("raw_logprobs") or [None] * len(owners)
    reasons = _flat(reply.get("finish_reasons") or [None] * len(owners))
    rollouts = []
    for i, (prompt, ids) in enumerate(zip(owners, completions, strict=True)):
        if len(ids) > chunk.sampling.max_new_tokens or not (ids or reasons[i] == "abort"):
            raise refuse(
                f"sent a completion of {len(ids)} tokens, and 1 to {chunk.sampling.max_new_tokens} were asked for"
            )
        if len(logps[i]) != len(ids) or (raws[i] is not None and len(raws[i]) != len(ids)):
            raise refuse(f"sent {len(logps[i])} log-probs for a completion of {len(ids)} tokens")
        if ids and vocabulary and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise refuse(f"sent token id {max(ids)}, and its vocabulary has {vocabulary}")
        rollout = _rollout(prompt, ids, logps[i], tops[i], reasons[i], chunk.sampling)
        rollouts.append(rollout if raws[i] is None else _with_raw(rollout, raws[i]))
    return rollouts


def _flat(reasons: list[Any]) -> list[Any]:
    """Finish reasons one after the other; servers group them by prompt."""
    return [r for group in reasons for r in (group if isinstance(group, list) else [group])]


def _with_raw(rollout: Rollout, raw: list[float | None]) -> Rollout:
    """What was read are log-probs of the distribution that was drawn from; those before truncation came beside them."""
    drawn = rollout.logp
    rollout.logp = [math.nan if value is None else float(value) for value in raw]
    if any(abs(a - b) > SAME for a, b in zip(drawn, rollout.logp, strict=True)):
        rollout.processed_logp = drawn
    return rollout


def _rollout(
    prompt: list[int], ids: list[int], logps: list[Any], tops: list[Any] | None, reason: Any, sampling: Sampling
) -> Rollout:
    """One completion; the log-prob is that of the sampled token, found by its id and not by its rank."""
    by_token = [_by_token(ids[t], logps[t], None if tops is None else tops[t]) for t in range(len(ids))]
    if reason not in ("stop", "length", "abort"):
        reason = "stop" if ids and ids[-1] in sampling.stop_token_ids else "length"
    most = None
    if sampling.top_logps and tops is not None:
        most = [
            [(int(k), float(v)) for k, v in zip(tops[t], logps[t], strict=True)][: sampling.top_logps]
            for t in range(len(ids))
        ]
    return Rollout(list(prompt), list(ids), by_token, reason, top_logps=most)


def _by_token(token: int, values: Any, ids: Any) -> float:
    """The sampled token's log-prob among those of the most likely; NaN where the server has none."""
    if not isinstance(values, list):
        return math.nan if values is None else float(values)
    place = ids.index(token) if ids is not None and token in ids else (0 if len(values) == 1 else None)
    value = None if place is None else values[place]
    return math.nan if value is None else float(value)
