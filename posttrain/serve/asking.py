"""From a request's body to prompts with settings: everything that can be refused is refused here, before a worker sees it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt

from posttrain.errors import ConfigError, did_you_mean
from posttrain.rollouts.sampling import structured_guide
from posttrain.rollouts.server.replies import LEASE_TTL_S, LONGEST_LEASE_S
from posttrain.serve.jobs import Ask
from posttrain.serve.state import Refusal
from posttrain.types import Sampling

__all__ = [
    "BeginUpdate",
    "Bucket",
    "Chat",
    "EndUpdate",
    "Generate",
    "InitCommunicator",
    "LeaseBody",
    "Limits",
    "NamedParam",
    "NamedParams",
    "Pause",
    "ScoreBody",
    "Sleep",
    "WakeUp",
    "Wanted",
    "render_chat",
    "wanted",
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


NAMED = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs", "seed")
FURTHER = ("stop", "stop_token_ids", "min_tokens", "logit_bias", "no_repeat_ngram", "ignore_eos", "structured_outputs")
RENDER_TIMEOUT_S = 5.0  # Of one conversation.
# Arguments of `apply_chat_template` that a client may not set: a template is a program, and the others are the server's.
OWN_ARGUMENTS = {
    "chat_template", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
WITHOUT_EFFECT = ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind")


@dataclass(slots=True, frozen=True)
class Limits:
    """What a server accepts.

    Attributes:
        context: Most tokens of prompt and completion; None: no limit is known.
        vocabulary: Token ids are below it; None: unknown.
        stops: Token ids that end a completion unless ``ignore_eos``.
    """

    context: int | None
    vocabulary: int | None
    max_prompts: int
    max_logprobs: int
    stops: tuple[int, ...] = ()


@dataclass(slots=True)
class Wanted:
    """A request that can be served.

    Attributes:
        asks: The prompts to complete; those that were too long and are answered empty are not among them.
        prompt_ids: Of all prompts, as they were completed.
        places: For each ask, the number of its prompt.
        logprobs: As asked; None: none.
    """

    asks: list[Ask]
    prompt_ids: list[list[int]]
    places: list[int]
    n: int
    logprobs: int | None
    sampling: Sampling
    notes: list[str] = field(default_factory=list)


def bad(message: str, **extra: Any) -> Refusal:
    """A 400."""
    return Refusal(400, "BadRequest", message, **extra)


def wanted(body: Generate | Chat, prompts: Sequence[Sequence[int]], limits: Limits, seed: int) -> Wanted:
    """Check a request and spell out what it means.

    Args:
        body: As it came.
        prompts: Its prompts as token ids.
        limits: Of this server.
        seed: Used where the request brings none.

    Raises:
        Refusal: 400, with the index and the lengths of a prompt that is at fault.
    """
    fields = _merged(body)
    if len(prompts) > limits.max_prompts:
        raise bad(f"{len(prompts)} prompts came, and --max_prompts is {limits.max_prompts}. Send them in parts.")
    notes: list[str] = []
    sampling = _sampling(fields, body, limits, notes)
    own = fields["seed"]
    if isinstance(own, list) and len(own) != len(prompts):
        raise bad(f"{len(own)} seeds came for {len(prompts)} prompts: give one, or one a prompt.")
    result = Wanted([], [], [], int(fields["n"]), fields["logprobs"], sampling, notes)
    for index, prompt in enumerate(prompts):
        ids = _fitting(list(prompt), index, sampling.max_new_tokens, limits, body.on_overlong)
        result.prompt_ids.append(list(prompt) if ids is None else ids)
        if ids is None:
            continue
        listed = isinstance(own, list)
        this = own[index] if isinstance(own, list) else seed if own is None else own
        ask = Ask(ids, result.n, _with_seed(sampling, int(this)), 0 if listed else index * result.n)
        result.asks.append(ask)
        result.places.append(index)
    return result


def _merged(body: Generate | Chat) -> dict[str, Any]:
    """Named fields, and over them what ``generation_kwargs`` says."""
    extra = body.generation_kwargs
    for name in extra:
        if name not in NAMED + FURTHER + WITHOUT_EFFECT:
            guess = did_you_mean(name, NAMED + FURTHER)
            raise bad(f"generation_kwargs: {name!r} is not known{guess}. Known: {', '.join(NAMED + FURTHER)}.")
    named = {name: extra[name] for name in NAMED if name in extra}
    if named:
        # The same checks as if they had been named: a type or a range that is wrong is told by its field.
        values = body.model_dump(exclude={"generation_kwargs"}) | named
        body = type(body).model_validate(values)
    return {name: getattr(body, name) for name in NAMED} | {name: extra.get(name) for name in FURTHER}


def _sampling(fields: dict[str, Any], body: Generate | Chat, limits: Limits, notes: list[str]) -> Sampling:
    logprobs = fields["logprobs"]
    if logprobs is not None and logprobs > limits.max_logprobs:
        raise bad(f"logprobs={logprobs}, and this server gives at most {limits.max_logprobs}: raise --max_logprobs.")
    guide = _guide(fields["structured_outputs"], body.structured_outputs_regex, notes)
    stop = fields["stop"] or []
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise bad(f"generation_kwargs: stop={stop!r} must be a string or a list of strings.")
    stops = () if fields["ignore_eos"] else limits.stops
    stops += _ids(fields["stop_token_ids"], "stop_token_ids", limits)
    sampling = Sampling(
        max_new_tokens=fields["max_tokens"],
        temperature=fields["temperature"],
        top_k=max(fields["top_k"], 0),
        top_p=fields["top_p"],
        min_p=fields["min_p"] or None,
        repetition_penalty=fields["repetition_penalty"],
        stop_token_ids=tuple(sorted(set(stops))),
        min_new_tokens=_count(fields["min_tokens"], "min_tokens"),
        stop_strings=tuple(strings),
        logit_bias=_bias(fields["logit_bias"], limits),
        no_repeat_ngram=_count(fields["no_repeat_ngram"], "no_repeat_ngram"),
        guide=guide,
        top_logps=logprobs or 0,
    )
    shaped = sampling.repetition_penalty != 1.0 or sampling.logit_bias or guide or sampling.no_repeat_ngram
    if sampling.top_logps and shaped:
        raise bad(
            f"logprobs={logprobs} with penalties, biases or structured outputs: the most likely tokens would be of another "
            "distribution than the sampled one. Ask for logprobs=0."
        )
    return sampling


def _count(value: Any, name: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise bad(f"generation_kwargs: {name}={value!r} must be a whole number from 0 on.")
    return value


def _ids(value: Any, name: str, limits: Limits) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise bad(f"generation_kwargs: {name}={value!r} must be a list of token ids.")
    for token in value:
        _check_id(token, limits, f"generation_kwargs: {name}")
    return tuple(value)


def _check_id(token: int, limits: Limits, where: str, **extra: Any) -> None:
    if token < 0 or (limits.vocabulary is not None and token >= limits.vocabulary):
        raise bad(f"{where} holds token id {token}, and the model has {limits.vocabulary}.", **extra)


def _bias(value: Any, limits: Limits) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    try:
        pairs = tuple((int(token), float(number)) for token, number in value.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise bad(f"generation_kwargs: logit_bias={value!r} must map token ids to numbers.") from error
    for token, number in pairs:
        _check_id(token, limits, "generation_kwargs: logit_bias")
        if not abs(number) <= MOST:
            raise bad(
                f"generation_kwargs: logit_bias of token {token} is {number:g}; it must be from {-MOST:g} to {MOST:g}."
            )
    return pairs


def _guide(given: Any, regex: str | None, notes: list[str]) -> tuple[str, str] | None:
    try:
        guide = None if given is None else structured_guide(given)
    except ConfigError as error:
        raise bad(f"generation_kwargs: {error}") from error
    if regex is not None and guide is not None:
        notes.append("structured_outputs_regex wins over generation_kwargs['structured_outputs'].")
    return guide if regex is None else ("regex", regex)


def _with_seed(sampling: Sampling, seed: int) -> Sampling:
    from dataclasses import replace

    return replace(sampling, seed=seed)


def _fitting(ids: list[int], index: int, new: int, limits: Limits, overlong: str) -> list[int] | None:
    """The prompt as it is completed; None where it is answered empty.

    Raises:
        Refusal: An empty prompt, an id beyond the vocabulary, or too long with ``on_overlong="error"``.
    """
    if not ids:
        raise bad(f"prompt {index} is empty; give it at least one token.", index=index)
    if limits.vocabulary is not None and (max(ids) >= limits.vocabulary or min(ids) < 0):
        _check_id(max(ids) if max(ids) >= limits.vocabulary else min(ids), limits, f"prompt {index}", index=index)
    if limits.context is None or len(ids) + new <= limits.context:
        return ids
    room = limits.context - new
    if overlong == "empty":
        return None
    if overlong == "truncate_left" and room > 0:
        return ids[-room:]
    if len(ids) > limits.context - 1:
        what = f"prompt {index} has {len(ids)} tokens, and max_model_len={limits.context} leaves room for {limits.context - 1}"
    else:
        what = (
            f"prompt {index} has {len(ids)} tokens and max_tokens={new}, together {len(ids) + new}; max_model_len is "
            f"{limits.context}, so at most {limits.context - len(ids)} can be written"
        )
    raise bad(
        f"{what}. Shorten the prompt, lower max_tokens, or set on_overlong.",
        index=index, prompt_length=len(ids), max_tokens=new, max_model_len=limits.context,
    )  # fmt: skip


def render_chat(tokenizer: Any, body: Chat) -> list[list[int]]:
    """Conversations as token ids, by the tokenizer's template.

    Raises:
        Refusal: 400, with the index of a conversation that the template refuses, or on which it does not end.
    """
    if own := sorted(OWN_ARGUMENTS & body.chat_template_kwargs.keys()):
        raise bad(
            f"chat_template_kwargs: {', '.join(own)}: the server's own. It may hold variables of the template alone."
        )
    rendered = []
    for index, messages in enumerate(body.messages):
        if not messages:
            raise bad(f"messages {index} is an empty conversation.", index=index)
        if any(_has_image(message) for message in messages):
            raise bad(f"messages {index} holds images, which the served model does not take.", index=index)
        goes_on = messages[-1].get("role") == "assistant"
        try:
            with _time_limit(RENDER_TIMEOUT_S):
                text = tokenizer.apply_chat_template(
                    messages, tools=body.tools or None, tokenize=False, add_generation_prompt=not goes_on,
                    continue_final_message=goes_on, **body.chat_template_kwargs,
                )  # fmt: skip
        except TimeoutError as error:
            raise bad(
                f"messages {index}: the chat template did not end within {RENDER_TIMEOUT_S:g} s. Fix: send less.",
                index=index,
            ) from error
        except Exception as error:
            raise bad(f"messages {index}: the chat template refuses it: {error}", index=index) from error
        rendered.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return rendered


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End Python code of this thread, at its next line, once the time is over: a loop of a template ends by nothing else.

    Raises:
        TimeoutError: It was over.
    """
    limit, before = time.monotonic() + seconds, sys.gettrace()

    def look(frame: Any, event: str, argument: Any) -> Any:
        if time.monotonic() > limit:
            raise TimeoutError
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def _has_image(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and str(part.get("type", "")).startswith("image") for part in content
    )
