"""What a rollout server is asked, and its answer as rollouts: nothing is taken that does not answer the question."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from posttrain.errors import BadRequest, ConfigError, RolloutServerError
from posttrain.rollouts.base import check_requests
from posttrain.types import Request, Rollout, Sampling

__all__ = [
    "ADAPTER_FIELDS",
    "API_KEY_VARIABLE",
    "CHECKSUM_HEADER",
    "DRAIN_TIMEOUT_S",
    "LEASE_HEADER",
    "LEASE_TTL_S",
    "LONGEST_LEASE_S",
    "LOOPBACK",
    "RENDEZVOUS_S",
    "SAFETENSORS",
    "SHARED_FOLDER",
    "TOGETHER",
    "UPDATE_TIMEOUT_S",
    "VERSION_HEADER",
    "WEIGHTS_GROUP",
    "Chunk",
    "check_each",
    "checked_adapter",
    "checksum",
    "derived_seed",
    "hold",
    "read_reply",
    "remove_orphans",
    "reply_of",
    "request_fields",
    "request_parts",
    "sampling_fields",
    "scores_of",
    "shared_path",
    "shared_root",
]


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


LEASE_HEADER = "X-Lease"
VERSION_HEADER = "X-Version"
CHECKSUM_HEADER = "X-Checksum"
SAFETENSORS = "application/x-safetensors"
API_KEY_VARIABLE = "POSTTRAIN_API_KEY"  # The token in the environment, where no list of processes shows it.

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # Addresses of this machine, whose memory can be shared.

LEASE_TTL_S = 90.0  # A trainer that is silent for so long has ended: its server resumes and is free again.
LONGEST_LEASE_S = 3600.0  # However long it was asked for: its holder renews it.
DRAIN_TIMEOUT_S = 120.0  # Longest wait of an update for requests that are running.
UPDATE_TIMEOUT_S = 720.0  # Longest silence between two parts of an update.
RENDEZVOUS_S = 120.0  # Until all have joined a weight-update group.
WEIGHTS_GROUP = "posttrain-weights"  # Prefix of its keys.

SHARED_FOLDER = Path("/dev/shm")
SHARED_NAME = re.compile(r"posttrain-[A-Za-z0-9_.-]{1,200}\.safetensors")
SHARED_PATTERNS = ("posttrain-[0-9]*-[0-9]*.safetensors", "posttrain-async-[0-9]*-*")  # Held while their process lives.
ADAPTER_FIELDS = ("r", "alpha", "target_modules")


def shared_root() -> Path:
    """Where weights lie for processes of this machine: shared memory, or where there is none the folder for temporary files."""
    return SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else Path(tempfile.gettempdir())


def checksum(data: Any) -> str:
    """The 128-bit xxh3 of bytes, as hexadecimal digits.

    >>> checksum(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128(data).hexdigest()


def hold(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Open and lock a file or folder for as long as this process lives; None where another holds it, or has removed it."""
    import fcntl  # Where there is none, nothing that asks for shared memory runs.

    try:
        held = os.open(path, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path)
    except OSError:
        os.close(held)
        return None
    return held


def remove_orphans(root: Path | None = None) -> None:
    """Remove shared weights that no process holds (see `hold`): theirs was killed.

    The lock of the system tells it, since numbers of processes are used again, and mean others in another container.
    """
    root = shared_root() if root is None else root
    for path in (path for pattern in SHARED_PATTERNS for path in root.glob(pattern)):
        held = hold(path)
        if held is None:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # Another user's.
                path.unlink()
        os.close(held)


def shared_path(path: str) -> Path:
    """The file that a bucket in shared memory may stand in: directly under ``/dev/shm``, called ``posttrain-*.safetensors``.

    Raises:
        ConfigError: Any other path, a link, or no file.
    """
    found = Path(path)
    if found.parent != SHARED_FOLDER or not SHARED_NAME.fullmatch(found.name):
        raise ConfigError(
            f"path={path!r} is not {SHARED_FOLDER}/posttrain-*.safetensors, the only files that are read."
        )
    if found.is_symlink() or not found.is_file():
        raise ConfigError(f"path={path!r} is no regular file on the server's machine.")
    return found


def shape_of(text: Any) -> dict[str, Any]:
    """What a server says of a model's shape, and a trainer compares with its own.

    Args:
        text: Config of the language model; heads of keys and values that it does not name are None.
    """
    return {
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None),
    }


def checked_adapter(adapter: Any) -> dict[str, Any] | None:
    """The description of an adapter whose tensors are pushed: ``{r, alpha, target_modules}``.

    Raises:
        ConfigError: Other fields, or values that cannot be.

    >>> checked_adapter({"r": 8, "alpha": 16, "target_modules": ["q_proj"]})["r"]
    8
    """
    if adapter is None:
        return None
    if not isinstance(adapter, dict) or set(adapter) != set(ADAPTER_FIELDS):
        raise ConfigError(f"adapter={adapter!r} must hold exactly {', '.join(ADAPTER_FIELDS)}.")
    r, alpha, modules = (adapter[name] for name in ADAPTER_FIELDS)
    if not isinstance(r, int) or r < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ConfigError(f"adapter: r={r!r} must be a whole number above 0, and alpha={alpha!r} a number above 0.")
    named = isinstance(modules, list) and all(isinstance(name, str) for name in modules)
    if not modules or not (named or isinstance(modules, str)):
        raise ConfigError(f"adapter: target_modules={modules!r} must be names of modules, or one pattern.")
    return adapter
