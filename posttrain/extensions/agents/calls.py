"""OpenAI-compatible calls: convert request bodies to engine requests, and convert completions to responses."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from posttrain.data.chat import encode, one_bos, open_end, render_prompt, reserved_arguments, tool_call
from posttrain.data.responses import add_response_schema, parse_response
from posttrain.data.templates import supports_tool_calling
from posttrain.errors import BadRequest, DataError, ModelError, RolloutError
from posttrain.extensions.agents.session import CapturedCall, Session
from posttrain.extensions.server.bodies import read_json
from posttrain.rollouts.episodes.tokens import PlainText
from posttrain.rollouts.native.requests import check_requests
from posttrain.types import Request, Rollout, Sampling

# Parameters of OpenAI's API that are accepted but have no effect.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Sampling settings that must be the same in all calls of a run, as a mapping from request fields to `Sampling` fields.
OF_THE_RUN: dict[str, str] = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
OFF = {"presence_penalty": 0, "frequency_penalty": 0}
MOST_CHOICES = 128
# Maximum size of a request body: BYTES_PER_TOKEN bytes per token of the model's context, but at least LEAST_BYTES. If the
# context length is unknown, the maximum is MOST_BYTES.
MOST_BYTES, LEAST_BYTES, BYTES_PER_TOKEN = 16 * 2**20, 2**20, 32
# Arguments of the chat template that a request must not set, because the endpoint sets them.
OUR_OWN = reserved_arguments() | {"chat_template"}
# Keys of a message that the endpoint does not support. They are rejected, because silently ignoring a key could change the
# samples.
UNREAD = ("function_call", "audio")


class CallError(Exception):
    """Exception for a rejected call. Its response has OpenAI's format.

    Attributes:
        status: HTTP status code.
        content: Response body.
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


Stop = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    """Base class of request bodies. Unknown parameters are rejected, because silently ignoring a parameter could change the
    samples.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Stop | list[Stop] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of a completion. The text of the completion ends before the first stop string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether the last chunk of a streamed response contains the token counts."""
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(_Body):
    """Request body of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(_Body):
    """Request body of ``/v1/completions``."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def read_body(kind: type[_Body], raw: bytes) -> tuple[Any, str]:
    """Parse a request body. Return the parsed body and its digest. Retries are recognized by the digest.

    Raises:
        CallError: The body is not valid JSON, or a parameter is unknown or invalid.
    """
    try:
        content = read_json(raw)
    except BadRequest as error:
        raise CallError(f"We could not parse the JSON body of your request: {error}") from error
    if not isinstance(content, dict):
        raise CallError(f"The body of a request must be a JSON object, but is {type(content).__name__}.")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    taken = {name: value for name, value in content.items() if name not in WITHOUT_EFFECT and value is not None}
    try:
        return kind.model_validate(taken), digest
    except ValidationError as error:
        # A parameter can have several types. Report the error of the type that matched best, without the name of the type.
        first = max(error.errors(), key=lambda detail: len(detail["loc"]))
        name = ".".join(str(part) for k, part in enumerate(first["loc"]) if k == 0 or isinstance(part, int))
        if first["type"] == "extra_forbidden":
            raise CallError(
                f"Unrecognized request argument supplied: {name}. The engine of this run does not support it. "
                "Fix: remove it.",
                param=name,
                code="unknown_parameter",
            ) from error
        raise CallError(f"Invalid value for {name!r}: {first['msg']}.", param=name, code="invalid_value") from error


@dataclass
class Policy:
    """Model that answers the calls, with limits for calls.

    Attributes:
        tokenizer: Tokenizer with a chat template.
        sampling: Sampling settings of every call. The loss computes log-probs with the same settings. ``max_new_tokens``
            limits each completion.
        context: Maximum number of tokens of a prompt with its completion. None: no limit.
        vocabulary: Vocabulary size V. None: unknown.
        model: Model name that every call must contain.
        template_kwargs: Arguments of the chat template.
        unsupported: Names of `Sampling` fields that the engine does not support.
        overrides: Whether to sample a call with the run's settings if the call contains other sampling settings. False:
            reject such a call.
        call_timeout: Maximum number of seconds that a call waits for its completion.
        max_calls: Maximum number of sampled calls per session. None: no limit.
        max_tokens: Maximum number of sampled tokens per session. None: no limit.
    """

    tokenizer: Any
    sampling: Sampling
    context: int | None = None
    vocabulary: int | None = None
    model: str = "policy"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    unsupported: Sequence[str] = ()
    overrides: bool = False
    call_timeout: float = 600.0
    max_calls: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        self.calls_tools = bool(self.tokenizer.chat_template) and supports_tool_calling(self.tokenizer)
        if self.calls_tools:
            try:
                self.tokenizer = add_response_schema(copy.copy(self.tokenizer))
            except ModelError:
                # Reject calls with tools, because tool calls in the format of this template cannot be parsed.
                self.calls_tools = False
        # Use one instance for all calls, so that a special token in a text gets the same placeholder in every call.
        self.plain = PlainText(self.tokenizer) if hasattr(self.tokenizer, "all_special_tokens") else None

    @property
    def most_bytes(self) -> int:
        """Maximum size of a request body in bytes. It is several times the size of a prompt that fills the
        context.
        """
        return MOST_BYTES if self.context is None else max(LEAST_BYTES, BYTES_PER_TOKEN * self.context)

    # Prompts -------------------------------------------------------------------------------------------------------------

    def chat(self, body: ChatBody, session: Session) -> CapturedCall:
        """Convert a chat call to a prompt. Token ids that were sampled earlier in the session are reused, and only new text
        is tokenized.

        Raises:
            CallError: The messages cannot be rendered, or an option is not supported.
        """
        self._check_chat(body)
        tools = list(body.tools or ()) if body.tool_choice != "none" else []
        messages = [read_message(message, index) for index, message in enumerate(body.messages)]
        kwargs = self.template_kwargs | (body.chat_template_kwargs or {})
        try:
            text = render_prompt(self.tokenizer, self._hidden(messages), tools or None, **kwargs)
        except (DataError, ModelError) as error:
            raise CallError(str(error), param="messages") from error
        parent = session.parent_of_text(text)
        ids, parent = self._ids(session, text, parent, plain=False)
        return CapturedCall(0, ids, text, parent, messages, tools)

    def completion(self, body: CompletionBody, session: Session) -> CapturedCall:
        """Convert a call of ``/v1/completions`` to a prompt. The call contains text or token ids."""
        if isinstance(body.prompt, str):
            if not body.prompt:
                raise CallError("The prompt is empty. Pass at least one token.", param="prompt")
            ids, parent = self._ids(session, body.prompt, session.parent_of_text(body.prompt), plain=True)
            return CapturedCall(0, ids, body.prompt, parent)
        ids = list(body.prompt)
        return CapturedCall(0, ids, "", session.parent_of_ids(ids))

    def _ids(
        self, session: Session, text: str, parent: tuple[int, int] | None, *, plain: bool
    ) -> tuple[list[int], tuple[int, int] | None]:
        """Return the token ids of a rendered prompt, and the earlier completion that the prompt continues. If there is such
        a completion, only the text after it is tokenized.
        """
        if parent is not None:
            call = session.calls[parent[0]]
            rest = text[len(call.ends[parent[1]]) :]
            ids = self._encoded(rest)
            # Check the token ids, because some tokenizers encode a text differently if it is encoded without the preceding
            # text.
            if self._spells(ids, rest):
                return [*call.ids(parent[1]), *ids], parent
        if plain:
            (ids,) = encode(self.tokenizer, [text], special=True)
            return open_end(one_bos(ids, self.tokenizer.bos_token_id), text, self.tokenizer), None
        return one_bos(self._encoded(text), self.tokenizer.bos_token_id), None

    def _encoded(self, text: str) -> list[int]:
        return self.plain.ids(text) if self.plain is not None else encode(self.tokenizer, [text], special=False)[0]

    def _spells(self, ids: list[int], text: str) -> bool:
        hidden = self.plain is not None and self.plain.hidden.search(text)
        return bool(hidden) or self.decode(ids) == text

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids. Special tokens and spaces are kept."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _hidden(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace special tokens in tool results. A tool result can then neither end its own turn nor begin a turn of the
        model.
        """
        if self.plain is None:
            return messages
        return [
            m | {"content": self.plain.hide(m["content"])}
            if m["role"] == "tool" and isinstance(m.get("content"), str)
            else m
            for m in messages
        ]

    def _check_chat(self, body: ChatBody) -> None:
        if body.tools and not self.calls_tools:
            raise CallError(
                "The chat template of this model does not render tools, or its tool calls cannot be parsed. Fix: "
                "remove tools, or train a model whose template supports them.",
                param="tools",
                code="unsupported_parameter",
            )
        if body.tool_choice not in (None, "auto", "none"):
            raise CallError(
                f"tool_choice={body.tool_choice!r} forces a call, which the engine does not support. Fix: use "
                "'auto' or 'none'.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        if taken := sorted(OUR_OWN & (body.chat_template_kwargs or {}).keys()):
            raise CallError(
                f"chat_template_kwargs sets {taken}, which this endpoint sets itself. Fix: remove them.",
                param="chat_template_kwargs",
                code="invalid_value",
            )
        if body.top_logprobs and not body.logprobs:
            raise CallError("top_logprobs is set without logprobs. Fix: set logprobs=true.", param="top_logprobs")
        if body.parallel_tool_calls is False:
            raise CallError(
                "parallel_tool_calls=false is not supported, because the engine cannot limit the number of tool "
                "calls. Fix: remove it.",
                param="parallel_tool_calls",
                code="unsupported_parameter",
            )
        kind = (body.response_format or {"type": "text"}).get("type")
        if kind != "text":
            raise CallError(
                f"response_format of type {kind!r} changes the sampled distribution, so the log-probs of the loss would not "
                "match it. Fix: remove response_format, and reward the format instead.",
                param="response_format",
                code="unsupported_parameter",
            )

    # Sampling ------------------------------------------------------------------------------------------------------------

    def request(self, body: Any, call: CapturedCall, session: Session) -> Request:
        """Create the engine request of a call.

        Raises:
            CallError: The model is unknown, the sampling settings are not supported or differ from the run's settings, the
                prompt is too long, or a limit of the session is reached.
        """
        if body.model != self.model:
            raise CallError(
                f"The model {body.model!r} does not exist. Fix: use {self.model!r}, the policy that is trained.",
                param="model",
                status=404,
                code="model_not_found",
            )
        self._check_settings(body)
        self._check_budget(session)
        n, stops = body.n or 1, body.stops
        wanted = (body.max_completion_tokens if isinstance(body, ChatBody) else None) or body.max_tokens
        most = min(wanted or self.sampling.max_new_tokens, self.sampling.max_new_tokens)
        if self.context is not None and len(call.prompt_ids) >= self.context:
            raise CallError(
                f"This model's maximum context length is {self.context} tokens, but the prompt has "
                f"{len(call.prompt_ids)}. Fix: shorten the messages.",
                param="messages",
                code="context_length_exceeded",
            )
        most = most if self.context is None else min(most, self.context - len(call.prompt_ids))
        if self.max_tokens is not None:
            most = min(most, max(1, (self.max_tokens - session.counts.tokens) // n))
        if stops and "stop_strings" in self.unsupported:
            raise CallError("The engine of this run does not support stop strings. Fix: remove stop.", param="stop")
        top = (body.top_logprobs if isinstance(body, ChatBody) else body.logprobs) or 0
        if top and "top_logps" in self.unsupported:
            raise CallError("This engine returns only the log-probs of sampled tokens.", param="top_logprobs")
        bias = tuple(sorted((body.logit_bias or {}).items()))
        if bias:
            raise CallError(
                "logit_bias changes the sampled distribution, so the log-probs of the loss would not match it. "
                "Fix: remove it.",
                param="logit_bias",
                code="unsupported_parameter",
            )
        own = replace(
            self.sampling,
            max_new_tokens=most,
            stop_strings=(*self.sampling.stop_strings, *stops),
            seed=_seed(session.seed, call, body.seed, len(session.calls)),
            top_logps=top,
        )
        request = Request(call.prompt_ids, n, own)
        try:
            check_requests([request], own, self.context, self.vocabulary)
        except RolloutError as error:
            raise CallError(str(error), param="messages" if isinstance(body, ChatBody) else "prompt") from error
        return request

    def _check_settings(self, body: Any) -> None:
        """Reject a call whose sampling settings differ from the run's settings. The log-probs in the loss would
        not match the sampled distribution.
        """
        for name, value in OFF.items():
            if (requested := getattr(body, name)) not in (None, value) and not self.overrides:
                raise CallError(_other(name, requested, value), param=name, code="unsupported_value")
        for name in OF_THE_RUN:
            requested, own = getattr(body, name), getattr(self.sampling, name)
            alike = requested is None or math.isclose(max(requested, 0), own or 0, abs_tol=1e-9)
            if not alike and not self.overrides:
                raise CallError(_other(name, requested, own), param=name, code="unsupported_value")

    def _check_budget(self, session: Session) -> None:
        sampled = sum(call.state in ("waiting", "answered") for call in session.calls)
        for name, used, most in (
            ("harness_max_calls", sampled, self.max_calls),
            ("harness_max_tokens", session.counts.tokens, self.max_tokens),
        ):
            if most is not None and used >= most:
                # Use status 400, because clients do not retry requests after this status.
                raise CallError(f"This episode has reached its limit {name}={most}.", code="budget_exceeded")

    # Answers -------------------------------------------------------------------------------------------------------------

    def take(self, call: CapturedCall, rollouts: Sequence[Rollout]) -> None:
        """Store the completions of a call, and parse them to assistant messages."""
        tools = call.tools or None
        call.answers = [
            parse_response(self.tokenizer, r.token_ids, prefix=call.prompt_ids, tools=tools) for r in rollouts
        ]
        written = [self._written(call.prompt_ids, r.token_ids) for r in rollouts]
        begin = call.text or self.decode(call.prompt_ids)
        call.ends = [begin + text for text in written]
        pairs = zip(rollouts, call.answers, strict=True)
        call.completions = [replace(rollout, text=answer["content"]) for rollout, answer in pairs]

    def _written(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Decode a completion after the end of its prompt, because some tokenizers drop the first space of a text that is
        decoded alone.
        """
        tail = list(prompt[-8:])
        before, whole = self.decode(tail), self.decode([*tail, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids)


def _other(name: str, requested: Any, own: Any) -> str:
    return (
        f"{name}={requested} differs from the run's {name}={own}, so the log-probs of the loss would not match the sampled "
        f"distribution. Fix: remove {name} from the call, set it in the run's config, or set "
        "harness_sampling='override', which samples with the run's settings."
    )


def _seed(own: int, call: CapturedCall, requested: int | None, number: int) -> int:
    """Compute the seed of a call from the session's seed, the number of the call, and its prompt.

    If the call contains a seed, an equal call in the same session gets the same completion. Calls in other sessions get other
    completions.
    """
    named = json.dumps([own, call.prompt_ids, requested if requested is not None else number])
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:7], "big")


def read_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Convert a message from OpenAI's format to the format that chat templates expect.

    Raises:
        CallError: The role is unknown, a part of the content is not text, or a key or a tool call is not supported.
    """
    read = {name: value for name, value in message.items() if value is not None}
    role = {"developer": "system"}.get(str(read.get("role")), read.get("role"))
    where = f"messages[{index}]"
    if role not in ("system", "user", "assistant", "tool"):
        raise CallError(f"Invalid value: {role!r} is not a role.", param=f"{where}.role", code="invalid_value")
    unread = next((name for name in UNREAD if read.get(name)), None)
    if unread is not None:
        raise CallError(
            f"{where}.{unread} is not supported. Fix: use tool_calls and text.",
            param=f"{where}.{unread}",
            code="unsupported_parameter",
        )
    content = read.get("content", "")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
        other = next((kind for kind in kinds if kind != "text"), None)
        if other is not None:
            raise CallError(
                f"{where} has a part of type {other!r}, but this model supports text only. Fix: send text.",
                param=f"{where}.content",
                code="unsupported_content",
            )
        content = [part.get("text") for part in content]
        if not all(isinstance(text, str) for text in content):
            raise CallError(f"{where} has a part without text.", param=f"{where}.content", code="invalid_value")
        content = "".join(content)
    if not isinstance(content, str):
        raise CallError(f"{where}.content must be text, but is {type(content).__name__}.", param=f"{where}.content")
    fields = {name: read[name] for name in ("name", "tool_call_id", "reasoning_content") if name in read}
    if read.get("tool_calls"):
        if not isinstance(read["tool_calls"], list):
            raise CallError(f"{where}.tool_calls must be a list.", param=f"{where}.tool_calls", code="invalid_value")
        fields["tool_calls"] = [
            _given_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(read["tool_calls"])
        ]
    return {"role": role, "content": content} | fields


def _given_call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its keys in the same order as in sampled calls, because templates render keys in their
    order.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CallError(f"{where} has no function with a name.", param=where, code="invalid_value")
    ordered = tool_call(function["name"], function.get("arguments"))
    return ordered | ({"id": call["id"]} if call.get("id") is not None else {})


# Responses in OpenAI's format ----------------------------------------------------------------------------------------


def _finish(rollout: Rollout, answer: Mapping[str, Any]) -> str:
    if rollout.finish_reason == "length":
        return "length"
    return "tool_calls" if answer.get("tool_calls") else "stop"


def _before(text: str, stops: Sequence[str]) -> str:
    """Return the part of a text before the first stop string."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


def _message(answer: Mapping[str, Any], name: str, stops: Sequence[str]) -> dict[str, Any]:
    """Convert a parsed answer to a message in OpenAI's format. Tool calls get ids, and their arguments are converted to
    JSON text.
    """
    calls = [
        {
            "id": f"call_{name}_{k}",
            "type": "function",
            "function": {"name": c["function"]["name"], "arguments": json.dumps(c["function"]["arguments"])},
        }
        for k, c in enumerate(answer.get("tool_calls") or ())
    ]
    content = _before(answer.get("content") or "", stops)
    reasoning = next((answer[key] for key in ("reasoning_content", "thinking") if answer.get(key)), None)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


@dataclass
class Answer:
    """Response to a call in OpenAI's format.

    Args:
        policy: Model that answered the call, with limits for calls.
        call: The sampled call.
        key: Key of the call's session. Ids in the response are derived from it.
        body: Request body.
    """

    policy: Policy
    call: CapturedCall
    key: str
    body: Any

    def __post_init__(self) -> None:
        self.name = f"{self.key[-8:]}-{self.call.number}"
        self.is_chat = isinstance(self.body, ChatBody)
        self.created = int(time.time())

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that all objects of the response have in common."""
        chat = ("chatcmpl", "chat.completion") if self.is_chat else ("cmpl", "text_completion")
        suffix = ".chunk" if kind == "chunk" and self.is_chat else ""
        return {
            "id": f"{chat[0]}-{self.name}",
            "object": chat[1] + suffix,
            "created": self.created,
            "model": self.policy.model,
        }

    @property
    def usage(self) -> dict[str, int]:
        """Number of tokens of prompt and completions."""
        prompt, written = len(self.call.prompt_ids), sum(len(r.token_ids) for r in self.call.completions)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def whole(self) -> dict[str, Any]:
        """Return the response to a call without streaming, as one object."""
        choices = [self._choice(i, r, a) for i, r, a in self._each()]
        ids = {"prompt_token_ids": self.call.prompt_ids} if self.body.return_token_ids else {}
        return self.head("whole") | {"choices": choices, "usage": self.usage} | ids

    def _each(self) -> Iterator[tuple[int, Rollout, dict[str, Any]]]:
        pairs = zip(self.call.completions, self.call.answers, strict=True)
        return ((i, rollout, answer) for i, (rollout, answer) in enumerate(pairs))

    def _choice(self, index: int, rollout: Rollout, answer: dict[str, Any]) -> dict[str, Any]:
        shown_ids = {"token_ids": rollout.token_ids} if self.body.return_token_ids else {}
        finish = {
            "index": index,
            "finish_reason": _finish(rollout, answer),
            "logprobs": self._logprobs(rollout),
        } | shown_ids
        if not self.is_chat:
            text = self._text(rollout)
            return finish | {"text": text, "finish_reason": "length" if rollout.finish_reason == "length" else "stop"}
        return finish | {"message": _message(answer, f"{self.name}_{index}", self.body.stops)}

    def _text(self, rollout: Rollout) -> str:
        return _before(self.policy.tokenizer.decode(rollout.token_ids, skip_special_tokens=True), self.body.stops)

    def _logprobs(self, rollout: Rollout, part: slice = slice(None)) -> dict[str, Any] | None:
        wanted = self.body.logprobs
        if wanted is None or wanted is False:
            return None
        tokens = [self.policy.decode([token]) for token in rollout.token_ids[part]]
        values = [float(v) if math.isfinite(v) else -9999.0 for v in rollout.logp[part]]
        tops = (rollout.top_logps or [[]] * len(rollout.token_ids))[part]
        if not self.is_chat:
            best = [{self.policy.decode([t]): v for t, v in top} for top in tops]
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": []}
        named = [[_token(self.policy.decode([t]), v) for t, v in top] for top in tops]
        pairs = zip(tokens, values, named, strict=True)
        return {"content": [_token(t, v) | {"top_logprobs": top} for t, v, top in pairs], "refusal": None}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the response as the chunks of a stream. All chunks are created after the whole completion was sampled."""
        for index, rollout, answer in self._each():
            yield from self._chat_chunks(index, rollout, answer) if self.is_chat else self._text_chunks(index, rollout)
        if self.body.includes_usage:
            yield self.head("chunk") | {"choices": [], "usage": self.usage}

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict:
        part = {"delta": delta} if self.is_chat else delta
        return self.head("chunk") | {
            "choices": [{"index": index, **part, "finish_reason": finish, "logprobs": logprobs}]
        }

    def _chat_chunks(self, index: int, rollout: Rollout, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        message = _message(answer, f"{self.name}_{index}", self.body.stops)
        yield self._chunk(index, {"role": "assistant", "content": ""}, logprobs=self._logprobs(rollout))
        if message.get("reasoning_content"):
            yield self._chunk(index, {"reasoning_content": message["reasoning_content"]})
        for piece in _pieces(message["content"] or ""):
            yield self._chunk(index, {"content": piece})
        for k, call in enumerate(message.get("tool_calls", ())):
            yield self._chunk(index, {"tool_calls": [{"index": k, **call}]})
        yield self._chunk(index, {}, _finish(rollout, answer))

    def _text_chunks(self, index: int, rollout: Rollout) -> Iterator[dict[str, Any]]:
        text = self._text(rollout)
        for number, piece in enumerate(_pieces(text) or [""]):
            yield self._chunk(index, {"text": piece}, logprobs=None if number else self._logprobs(rollout))
        yield self._chunk(index, {"text": ""}, "length" if rollout.finish_reason == "length" else "stop")


def _token(text: str, value: float) -> dict[str, Any]:
    value = value if math.isfinite(value) else -9999.0
    return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}


def _pieces(text: str, size: int = 16) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]
