"""Bodies of requests, as they are documented at ``/docs``; what does not fit is answered 400."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt

from posttrain.rollouts.server.replies import LEASE_TTL_S, LONGEST_LEASE_S

__all__ = [
    "BeginUpdate",
    "Bucket",
    "Chat",
    "EndUpdate",
    "Generate",
    "InitCommunicator",
    "LeaseBody",
    "NamedParam",
    "NamedParams",
    "Pause",
    "ScoreBody",
    "Sleep",
    "WakeUp",
]

TokenIds = list[Annotated[int, Field(ge=0, strict=True)]]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Version = Annotated[int, Field(ge=1, lt=2**53, strict=True)]
# What divides logits: a smaller number makes them infinite, which no engine can sample from.
LEAST, MOST = 1e-5, 1e5


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _greedy_or_finite(value: float) -> float:
    if value != 0 and value < LEAST:
        raise ValueError(f"temperature={value:g} must be 0 (greedy) or at least {LEAST:g}")
    return value


class _Sampling(_Body):
    n: Annotated[int, Field(ge=1, le=4096, description="Completions of each prompt.")] = 1
    repetition_penalty: Annotated[float, Field(ge=LEAST, le=MOST)] = 1.0
    temperature: Annotated[float, Field(description="0 is greedy."), AfterValidator(_greedy_or_finite)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, description="-1 and 0 are off.")] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0)] | None = Field(
        default=0, description="0: of the sampled token; k: of the k most likely too; null: none."
    )
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] = Field(default_factory=dict, description="Further fields; they override these.")
    seed: Seed | list[Seed] | None = Field(default=None, description="One for all prompts, or one a prompt.")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31, description="Lower ones are begun first.")] = 0
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        default=None, description="The same request under the same id is computed once."
    )
    raw_logprobs: bool = Field(default=False, description="Also those before truncation and penalties.")
    on_overlong: Literal["error", "truncate_left", "empty"] = "error"


class Generate(_Sampling):
    """What `/generate/` takes."""

    prompts: Annotated[list[str] | list[TokenIds], Field(min_length=1)]
    images: list[list[str] | None] | None = Field(
        default=None, description="For each prompt its images, PNG in base64."
    )


class Chat(_Sampling):
    """What `/chat/` takes."""

    messages: Annotated[list[list[dict[str, Any]]], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None


class ScoreBody(_Body):
    """What `/get_sequence_logprobs/` takes."""

    sequences: list[TokenIds]
    prompt_lengths: list[StrictInt]
    top_logprobs: Annotated[int, Field(ge=0)] = 100
    temperature: Annotated[float, Field(ge=LEAST)] = 1.0
    response_format: Literal["json", "binary"] = "json"
    renormalize: bool = Field(default=False, description="Another temperature over the returned tokens alone.")


class LeaseBody(_Body):
    """What `/lease/` takes."""

    holder: Annotated[str, Field(min_length=1, max_length=300)]
    ttl_s: Annotated[float, Field(gt=0, le=LONGEST_LEASE_S)] = LEASE_TTL_S


class BeginUpdate(_Body):
    """What `/begin_update/` takes."""

    version: Version
    names: list[str] | None = None
    adapter: dict[str, Any] | None = None


class Bucket(_Body):
    """What `/update_bucket/` takes from this machine; other clients send safetensors bytes."""

    version: Version
    path: str
    size: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        default=None, description="Of the file's bytes, those that are the bucket; null: all."
    )
    checksum: str


class EndUpdate(_Body):
    """What `/end_update/` and `/abort_update/` take."""

    version: Version | None = None


class InitCommunicator(_Body):
    """What `/init_communicator/` takes."""

    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2)]
    client_device_uuid: str | None = None


class NamedParam(_Body):
    """What `/update_named_param/` takes."""

    name: str
    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]


class NamedParams(_Body):
    """What `/update_named_params/` takes."""

    version: Version | None = None
    params: list[NamedParam]
    packed: bool = True
    checksum: str | None = None


class Pause(_Body):
    """What `/pause/` takes."""

    mode: Literal["keep", "abort", "wait"] = "keep"


class Sleep(_Body):
    """What `/sleep/` takes."""

    level: Literal[1, 2] = 1


class WakeUp(_Body):
    """What `/wake_up/` takes."""

    tags: list[Literal["weights", "kv_cache"]] | None = None
