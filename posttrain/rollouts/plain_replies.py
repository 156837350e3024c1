"""Requests of a rollout client in the words of vLLM's completions, and its answers in those of our server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import BadRequest

__all__ = ["TOGETHER", "reply_of", "request_fields", "request_parts", "scores_of"]

TOGETHER = 64  # Prompts of one request; vLLM batches requests by itself.
NO_LOGP = -9999.0  # What vLLM writes in place of minus infinity.
PASSED_ON = ("ignore_eos", "stop_token_ids", "min_tokens", "stop", "logit_bias", "structured_outputs")


def request_fields(fields: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Settings of a request under the names of vLLM's completions; all are sent, for those of the model's folder not to count.

    Raises:
        BadRequest: One that vLLM does not have.
    """
    extra = dict(fields.get("generation_kwargs") or {})
    if fields.get("structured_outputs_regex") is not None:
        extra["structured_outputs"] = {"regex": fields["structured_outputs_regex"]}
    if unknown := sorted(extra.keys() - set(PASSED_ON)):
        raise BadRequest(f"{url}: {', '.join(unknown)}: vLLM's completions have no such setting.", url=url)
    named = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {name: fields.get(name, default) for name, default in named.items()} | extra


def request_parts(prompts: Sequence[Any], seed: Any) -> list[tuple[list[Any], int | None]]:
    """Prompts that go into one request each, with its seed: one a prompt where each has its own."""
    listed = [p if isinstance(p, str) else list(p) for p in prompts]
    if isinstance(seed, list):
        return [([prompt], own) for prompt, own in zip(listed, seed, strict=True)]
    return [(listed[i : i + TOGETHER], seed) for i in range(0, len(listed), TOGETHER)]


def reply_of(choices: list[dict[str, Any]], n: int, logprobs: int | None, version: int | None) -> dict[str, Any]:
    """As our server lays an answer out."""
    pairs = [_ranked(choice, logprobs) for choice in choices]
    reasons = [choice.get("finish_reason") for choice in choices]
    return {
        "prompt_ids": [choice["prompt_token_ids"] for choice in choices[::n]],
        "completion_ids": [choice["token_ids"] for choice in choices],
        "logprobs": None if logprobs is None else [[[v for _, v in at] for at in line] for line in pairs],
        "logprob_token_ids": None if logprobs is None else [[[i for i, _ in at] for at in line] for line in pairs],
        "finish_reasons": [reasons[i : i + n] for i in range(0, len(reasons), n)],
        "weight_version": version,
    }


def _ranked(choice: dict[str, Any], logprobs: int | None) -> list[list[tuple[int, float | None]]]:
    """For every token the pairs (id, log-prob) by rank, the sampled token among them."""
    said = choice["logprobs"]
    own = list(zip(choice["token_ids"], map(_clean, said["token_logprobs"]), strict=True))
    if not logprobs:
        return [[pair] for pair in own]
    lines = []
    for pair, at in zip(own, said["top_logprobs"], strict=True):
        pairs = {int(name.removeprefix("token_id:")): _clean(value) for name, value in at.items()} | dict([pair])
        lines.append(sorted(pairs.items(), key=lambda entry: -(NO_LOGP if entry[1] is None else entry[1])))
    return lines


def _clean(value: Any) -> float | None:
    return None if value is None or value <= NO_LOGP else float(value)


def scores_of(
    sequences: Sequence[Sequence[int]], begins: Sequence[int], known: Sequence[Any], top: int
) -> dict[str, list[Any]]:
    """As our server lays scores out: what vLLM has no entry for (the first token, the last of a full context) is null."""
    logps, ids, actual = [], [], []
    for sequence, begin, entries in zip(sequences, begins, known, strict=True):
        lines = [entries[t] if t < len(entries) else None for t in range(begin, len(sequence))]
        ranked = [sorted((at or {}).items(), key=lambda entry: entry[1]["rank"])[:top] for at in lines]
        logps.append([[_clean(entry["logprob"]) for _, entry in at] for at in ranked])
        ids.append([[int(token) for token, _ in at] for at in ranked])
        own = [
            ((at or {}).get(str(token)) or {}).get("logprob") for at, token in zip(lines, sequence[begin:], strict=True)
        ]
        actual.append([[_clean(value)] for value in own])
    tokens = [[[token] for token in sequence[begin:]] for sequence, begin in zip(sequences, begins, strict=True)]
    return {"logprobs": logps, "logprob_token_ids": ids, "actual_logprobs": actual, "actual_token_ids": tokens}
