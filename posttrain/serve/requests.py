"""Bodies of the thin host's endpoints, under the names of vLLM's server, and the replies to them."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from posttrain.errors import BadRequest
from posttrain.rollouts.sampling import structured_guide
from posttrain.serve.engines import Job
from posttrain.types import Rollout, Sampling

__all__ = ["Completions", "Finish", "NewVersion", "Rpc", "Tokenize", "Update", "choice_of", "reply_of"]

TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
# What divides logits: a smaller number makes them infinite, which no engine can sample from.
LEAST, MOST = 1e-5, 1e5


class Body(BaseModel):
    """Unknown fields are refused: an option that is left out in silence would change what is sampled."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Completions(Body):
    """``/v1/completions``; with ``prompt_logprobs`` the prompts are scored and nothing is generated."""

    model: str | None = None
    prompt: TokenIds | Annotated[list[TokenIds], Field(min_length=1)] | str | Annotated[list[str], Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=4096)] = 1
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Literal[0] | Annotated[float, Field(ge=LEAST)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=LEAST, le=MOST)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    stop: str | list[str] = []
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    logit_bias: dict[int, Annotated[float, Field(ge=-1e9, le=1e9)]] = {}
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None
    stream: Literal[False] = False

    def sampling(self, stops: Sequence[int]) -> Sampling:
        """As the engines take it.

        Args:
            stops: Token ids that end a completion unless ``ignore_eos``.

        Raises:
            ConfigError: ``structured_outputs`` that cannot be followed.
        """
        return Sampling(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p or None,
            repetition_penalty=self.repetition_penalty,
            stop_token_ids=tuple(dict.fromkeys([*self.stop_token_ids, *(() if self.ignore_eos else stops)])),
            seed=self.seed,
            min_new_tokens=self.min_tokens,
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            logit_bias=tuple(sorted(self.logit_bias.items())),
            guide=None if self.structured_outputs is None else structured_guide(self.structured_outputs),
            top_logps=self.logprobs or 0,
        )

    def prompts(self, tokenizer: Any, context: int | None, vocabulary: int) -> list[list[int]]:
        """The prompts as token ids, each shown to fit.

        Raises:
            BadRequest: One that does not; names its index.
        """
        given: Any = [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt
        found = [tokenizer(one)["input_ids"] if isinstance(one, str) else list(one) for one in given]
        for index, ids in enumerate(found):
            if not ids:
                raise BadRequest(f"prompt {index} is empty.", index=index)
            if max(ids) >= vocabulary:
                raise BadRequest(
                    f"prompt {index} holds token id {max(ids)}, and the model has {vocabulary}.", index=index
                )
            new = 0 if self.prompt_logprobs is not None else self.max_tokens
            if context is not None and len(ids) + new > context:
                raise BadRequest(
                    f"prompt {index} of {len(ids)} tokens and max_tokens={new} do not fit the context of {context} tokens.",
                    index=index,
                )
        named = [*self.stop_token_ids, *self.logit_bias]
        if named and max(named) >= vocabulary:
            raise BadRequest(f"token id {max(named)} is named, and the model has {vocabulary}.")
        return found


class Tokenize(Body):
    """``/tokenize``: a text, or a conversation as the model's chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True


class Update(Body):
    """``/update_weights``: one bucket in shared memory, or, with ``complete``, that all buckets came."""

    path: str | None = None
    checksum: str = ""
    complete: bool = False
    partial: bool = False


class Finish(Body):
    """``/finish_weight_update``; without a version the update is given up."""

    weight_version: str | None = None


class NewVersion(Body):
    """``/update_weight_version``."""

    new_version: str


class Rpc(Body):
    """``/collective_rpc``; the host knows ``posttrain_facts``."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def choice_of(job: Job, index: int, number: int, body: Completions, tokenizer: Any) -> dict[str, Any]:
    """One completion of a job as a choice of ``/v1/completions``.

    Args:
        job: That has ended.
        index: Of the completion.
        number: Of the choice.
        body: What was asked for.
        tokenizer: Of the model; None leaves texts empty.
    """
    rollout = job.rollouts[index]
    assert rollout is not None
    begins = [sum(count for _, count in job.spans[index][:i]) for i in range(len(job.spans[index]))]
    return {
        "index": number,
        "text": "" if tokenizer is None else tokenizer.decode(rollout.token_ids, skip_special_tokens=True),
        "finish_reason": rollout.finish_reason,
        "stop_reason": None,
        "token_ids": rollout.token_ids,
        "prompt_token_ids": job.prompt_ids,
        "logprobs": None if body.logprobs is None else _logprobs(rollout, body.logprobs),
        # As vLLM's /inference/v1/generate says under which weights which tokens were written.
        "weight_versions": [
            {"version": version, "start": begin, "end": begin + count}
            for begin, (version, count) in zip(begins, job.spans[index], strict=True)
        ],
    }


def _logprobs(rollout: Rollout, top: int) -> dict[str, Any]:
    """Log-probs of the distribution that tokens were drawn from (vLLM's ``processed_logprobs``), tokens as ``token_id:ID``."""
    drawn = rollout.logp if rollout.processed_logp is None else rollout.processed_logp
    tops = []
    for t, token in enumerate(rollout.token_ids):
        # Truncation renormalises all survivors alike: their log-probs follow from the shift of the sampled token.
        shift, mass, entry = drawn[t] - rollout.logp[t], 0.0, {}
        for other, value in (rollout.top_logps or [[]] * len(drawn))[t][:top]:
            mass += math.exp(min(value + shift, 0.0))
            if mass <= 1 + 1e-3:  # What does not fit into a probability of one was cut off before drawing.
                entry[f"token_id:{other}"] = _finite(value + shift)
        tops.append(entry | {f"token_id:{token}": _finite(drawn[t])})
    raw = None if rollout.processed_logp is None else [_finite(value) for value in rollout.logp]
    return {
        "tokens": [f"token_id:{token}" for token in rollout.token_ids],
        "token_logprobs": [_finite(value) for value in drawn],
        "raw_logprobs": raw,  # Before truncation and penalties, which vLLM does not say.
        "top_logprobs": tops,
        "text_offset": [],
    }


def reply_of(choices: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """A whole reply of ``/v1/completions``."""
    written = sum(len(choice["token_ids"]) for choice in choices)
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"completion_tokens": written},
    }
