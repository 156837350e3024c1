"""Bodies of the thin host's endpoints, under the names of vLLM's server, and the replies to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from posttrain.errors import BadRequest, RolloutError
from posttrain.rollouts.base import check_requests
from posttrain.rollouts.sampling import structured_guide
from posttrain.serve.engines import Job
from posttrain.types import Request, Rollout, Sampling

__all__ = ["Completions", "Update", "choices_of", "score_choice"]

TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
# What divides logits: a smaller number makes them infinite, which no engine can sample from.
LEAST, MOST = 1e-5, 1e5


class Body(BaseModel):
    """Unknown fields are refused: an option that is left out in silence would change what is sampled."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Completions(Body):
    """``/v1/completions``; with ``prompt_logprobs`` the prompts are scored and nothing is generated."""

    model: str | None = None
    prompt: TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
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
    stream: Literal[False] = False

    def requests(self, stops: Sequence[int], context: int | None, vocabulary: int) -> list[Request]:
        """One request a prompt, each shown to fit the context and the vocabulary.

        Args:
            stops: Token ids that end a completion unless ``ignore_eos``.
            context: Most tokens of prompt and completion; None: no limit.
            vocabulary: Of the model.

        Raises:
            ConfigError: ``structured_outputs`` that cannot be followed.
            BadRequest: A prompt that does not fit; names its index.
        """
        if self.logprobs and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1):
            raise BadRequest(
                "logprobs above 0 with truncated sampling is not offered. Fix: logprobs=0, or vLLM's server."
            )
        sampling = Sampling(
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
        prompts: Any = [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        found = [Request(ids, self.n, sampling) for ids in prompts]
        try:
            check_requests(found, sampling, context, vocabulary)
        except RolloutError as error:
            raise BadRequest(str(error)) from error
        return found


class Update(Body):
    """``/update_weights``: one bucket in shared memory, or, with ``complete``, that all buckets came."""

    path: str = ""
    checksum: str = ""
    complete: bool = False


def choices_of(job: Job, top: int) -> list[dict[str, Any]]:
    """The completions of a job as choices of ``/v1/completions``; texts are left out.

    Args:
        job: That has ended.
        top: Most likely tokens of every position that are told beside the sampled one.
    """
    return [
        {
            "finish_reason": rollout.finish_reason,
            "token_ids": rollout.token_ids,
            "prompt_token_ids": job.request.prompt_ids,
            "logprobs": _logprobs(rollout, top),
            "weight_version": job.version,
        }
        for rollout in job.rollouts.result()
    ]


def _logprobs(rollout: Rollout, top: int) -> dict[str, Any]:
    """Log-probs of the distribution that tokens were drawn from (vLLM's ``processed_logprobs``), tokens as ``token_id:ID``."""
    drawn = [_finite(value) for value in rollout.processed_logp or rollout.logp]
    best = rollout.top_logps or [[]] * len(drawn)
    tops = [
        {f"token_id:{other}": _finite(value) for other, value in at[:top]} | {f"token_id:{token}": own}
        for at, token, own in zip(best, rollout.token_ids, drawn, strict=True)
    ]
    return {"token_logprobs": drawn, "top_logprobs": tops}


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def score_choice(ids: Sequence[int], entries: Sequence[dict[int, float] | None]) -> dict[str, Any]:
    """Scores of a given sequence as a choice with ``prompt_logprobs`` and no completion."""
    listed = [at and {str(token): {"logprob": logp} for token, logp in at.items()} for at in entries]
    return {"token_ids": [], "prompt_token_ids": ids, "prompt_logprobs": listed}
