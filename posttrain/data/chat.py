"""Chat templates: rendering, prompt and completion boundaries, assistant masks, and end-of-turn tokens."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateSyntaxError

from posttrain.data.formats import is_conversational, warn_once
from posttrain.errors import ArgumentTypeError, ConfigError, DataError, ModelError, PosttrainError
from posttrain.types import Prompt
from posttrain.values import is_messages, strip_none

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


def template_text(processing_class: Tokenizer) -> str | None:
    """Return the chat template as text. If the tokenizer has several named templates, return the template named ``default``."""
    return _default(getattr(processing_class, "chat_template", None))


def _default(template: str | dict[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, dict) else template


def inner_tokenizer(processing_class: Tokenizer) -> Any:
    """Return the tokenizer of a processor. If the argument is a tokenizer, return it unchanged."""
    return getattr(processing_class, "tokenizer", None) or processing_class


def ids_without_token(processing_class: Tokenizer, size: int) -> frozenset[int]:
    """Return the ids below ``size`` for which the tokenizer has no token. Such ids exist if the model's embedding is padded."""
    return frozenset(range(size)) - frozenset(inner_tokenizer(processing_class).get_vocab().values())


def is_processor(processing_class: Tokenizer) -> bool:
    """Return True for a processor with an image processor, False for a tokenizer."""
    return getattr(processing_class, "image_processor", None) is not None


def with_template(processing_class: Tokenizer, template: str | None) -> Any:
    """Return a shallow copy of the tokenizer with the chat template ``template``. For a processor, return such a copy of its
    tokenizer.
    """
    shadow = copy.copy(inner_tokenizer(processing_class))
    shadow.chat_template = template
    return shadow


def tool_call(name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in OpenAI's message format."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def json_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which the arguments of tool calls are JSON text. Templates that concatenate arguments with strings
    need JSON text.
    """
    converted = []
    for message in messages:
        calls = [
            tool_call(c["function"]["name"], json.dumps(c["function"]["arguments"]))
            for c in message.get("tool_calls", ())
        ]
        converted.append({**message, "tool_calls": calls} if calls else message)
    return converted


# Keys under which a message can store the model's reasoning. A chat template reads only one of these keys and silently
# ignores the rest.
REASONING = ("reasoning_content", "thinking", "reasoning")


def check_unicode(text: str, where: str) -> None:
    """Raise an error for text with lone surrogates, which no tokenizer can encode.

    Raises:
        DataError: The text cannot be encoded as UTF-8. The message contains ``where`` and the surrounding text.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 30) : error.end + 10]
        raise DataError(
            f"{where}: the text is not valid Unicode (character {error.start}: {error.reason}): {shown!r}. Fix: read the text "
            "from its source as UTF-8 again, or repair it with text.encode('utf-8', 'replace').decode()."
        ) from error


def check_messages(messages: Any) -> None:
    """Check that each message has a role, and has content, a tool call or reasoning. Without this check, many templates would
    render an empty message as "" or "None".

    Raises:
        DataError: A message is not a mapping with a role, or has neither content nor a tool call nor reasoning.
    """
    for number, message in enumerate(messages):
        # Test the type first, because nearly all messages are dicts and this test is faster than isinstance(message,
        # Mapping).
        plain = type(message) is dict
        if not (plain or isinstance(message, Mapping)) or not isinstance(message.get("role"), str):
            keys = sorted(message) if isinstance(message, Mapping) else type(message).__name__
            raise DataError(f"message {number} must be a mapping with a role and content, but it is {keys}.")
        has_content = message.get("content") is not None or message.get("tool_calls")
        if not has_content and not any(message.get(name) for name in REASONING):
            raise DataError(
                f"message {number} (role {message['role']!r}) has no content. Its keys are {sorted(message)}. Fix: add "
                "'content', or remove the message."
            )


def fit_messages(tokenizer: Tokenizer, messages: list[dict[str, Any]], template: Any = None) -> list[dict[str, Any]]:
    """Adapt messages to the chat template. The input is not changed.

    Reasoning is moved to the key that the template reads. Tool arguments that are JSON text are decoded if the template would
    encode them a second time.
    """
    if not any(m.get(name) for m in messages for name in ("tool_calls", *REASONING) if name in m):
        return messages
    text = _default(template or tokenizer.chat_template) or ""
    reads = [name for name in REASONING if re.search(rf"""\.{name}\b|['"]{name}['"]""", text)]
    fitted = [_under_read_name(message, reads) for message in messages]
    if any(_json_calls(message) for message in fitted) and _escapes_twice(tokenizer, text):
        fitted = [_decoded(message) for message in fitted]
    return fitted


def _under_read_name(message: dict[str, Any], reads: list[str]) -> dict[str, Any]:
    spelled = [name for name in REASONING if message.get(name)]
    if not spelled or not reads or set(spelled) & set(reads):
        return message
    warn_once(
        logger, "messages contain %r, which the chat template does not read. It is renamed to %r.", spelled[0], reads[0]
    )
    return {**{k: v for k, v in message.items() if k != spelled[0]}, reads[0]: message[spelled[0]]}


def _arguments(call: Any) -> Any:
    """Decode the JSON arguments of a tool call, or return None if they are not a JSON object."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return None
    try:
        value = json.loads(function["arguments"])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _json_calls(message: dict[str, Any]) -> bool:
    return any(_arguments(call) is not None for call in message.get("tool_calls") or [])


def _decoded(message: dict[str, Any]) -> dict[str, Any]:
    def decode(call: dict[str, Any]) -> dict[str, Any]:
        value = _arguments(call)
        if value is None:
            return call
        if "function" in call:
            return {**call, "function": {**call["function"], "arguments": value}}
        return {**call, "arguments": value}

    if not _json_calls(message):
        return message
    return {**message, "tool_calls": [decode(call) for call in message["tool_calls"]]}


@lru_cache(maxsize=64)
def _escapes_twice(tokenizer: Tokenizer, template: str) -> bool:
    """Return whether a template accepts tool arguments only as an object. Such a template rejects JSON text or encodes the
    text a second time.
    """

    def rendered(arguments: Any) -> str | None:
        calls = [tool_call("zq_find", arguments)]
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        # The template can raise any exception if it does not accept arguments in this form.
        except Exception:
            return None

    as_object, as_text = rendered({"zq_key": "zq"}), rendered('{"zq_key": "zq"}')
    fits = as_object is not None and "zq_key" in as_object and "'zq_key'" not in as_object
    twice = fits and (as_text is None or '\\"zq_key\\"' in as_text)
    if twice:
        logger.warning(
            "tool arguments are stored as JSON text, which the chat template would encode again. They are decoded first."
        )
    return twice


PROBE = "7f3a probe 9c1e"  # Message content for tests of a template. No chat template contains this text.


def render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Any = None,
    **template_kwargs: Any,
) -> str:
    """Render a conversation with the chat template.

    Raises:
        ModelError: The tokenizer has no chat template, or its template is not valid Jinja.
        DataError: A message has no content, the text is not valid Unicode, or the template rejected the messages.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "the rows are conversational, but the tokenizer has no chat template. Fix: set tokenizer.chat_template, use an "
            "instruction-tuned checkpoint, or convert the rows to strings."
        )
    text = _template(
        tokenizer,
        messages,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        **template_kwargs,
    )
    check_unicode(text, "messages")
    return text


def _template(tokenizer: Tokenizer, messages: list[dict[str, Any]], *, tools: Any, **options: Any) -> Any:
    """Check messages, adapt them to the template, and render them. Exceptions of the template are converted to errors that
    contain a fix.
    """
    check_messages(messages)
    fitted = fit_messages(tokenizer, messages, options.get("chat_template"))
    try:
        return tokenizer.apply_chat_template(fitted, tools=tools or None, **options)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template is not valid Jinja (line {error.lineno}: {error.message}). Fix: correct it, or set another "
            "template (chat_template_path)."
        ) from error
    except Exception as error:
        for message in messages:
            check_unicode(str(message.get("content")), "messages")
        reason, shown = str(error).rstrip("."), repr(messages)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        raise DataError(
            f"the chat template rejected the messages {shown}: {reason}. Fix: check their roles and order, or use another "
            "template (chat_template_path)."
        ) from error


def render_prompt(
    tokenizer: Tokenizer,
    prompt: list[dict[str, Any]],
    tools: Any = None,
    *,
    answered: bool = False,
    **template_kwargs: Any,
) -> str:
    """Render a prompt, followed by the generation prompt. If the last message is from the assistant, no generation prompt is
    added. The message is then left open, so that the model continues it.

    Args:
        tokenizer: Tokenizer with a chat template.
        prompt: Messages.
        tools: Schemas or functions.
        answered: Whether the row contains an answer. If True, the prompt may end with a message of any role.
        template_kwargs: Additional arguments of the template.

    Raises:
        DataError: The prompt is empty, or the role of its last message is neither user nor tool nor assistant.
    """
    if not prompt:
        raise DataError("the prompt of the row is empty. Fix: add at least one message.")
    last = prompt[-1].get("role")
    if not answered and last not in ("user", "tool", "assistant"):
        raise DataError(
            f"the prompt ends with a message of role {last!r}. Fix: end it with a 'user' or 'tool' message, which the model "
            "answers, or with an 'assistant' message, which the model continues."
        )
    mode = {"continue_final_message": True} if last == "assistant" else {"add_generation_prompt": True}
    return render(tokenizer, prompt, tools=tools, **mode, **template_kwargs)


KEY_SETS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completion", "label"},
)


def apply_chat_template(
    example: dict[str, Any],
    processing_class: Tokenizer | None = None,
    tools: Any = None,
    *,
    merge_prefill: bool = False,
    tokenizer: Tokenizer | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Render a conversational row as text. The column ``messages`` is renamed to ``text``. All other columns keep their names.

    Prompt and answers are split at the end of the longest common prefix of their renderings. ``prompt + answer``
    therefore always equals the rendering of the whole conversation.

    Args:
        example: Row with ``messages``; ``prompt``; ``prompt`` with ``completion`` (and ``label``); ``prompt`` with ``chosen``
            and ``rejected``; or ``chosen`` and ``rejected`` alone. Columns with other names are not returned.
        processing_class: Tokenizer with a chat template.
        tools: Schemas or functions. An empty list is the same as None.
        merge_prefill: Whether to join an assistant message at the end of the prompt with the answer into one turn. By
            default, the message and the answer are rendered as two turns.
        tokenizer: Deprecated name of ``processing_class``.
        template_kwargs: Additional arguments of the template.

    Raises:
        ArgumentTypeError: Neither or both of ``processing_class`` and ``tokenizer`` are passed.
        KeyError: The row does not have one of the combinations of columns that are listed under ``example``.
        DataError: The prompt is empty, or its last message has an unsupported role.
    """
    if (processing_class is None) == (tokenizer is None):
        raise ArgumentTypeError(
            "pass the tokenizer as processing_class, or as tokenizer (its deprecated name), but not as both."
        )
    processing_class = processing_class or tokenizer
    row = {k: example[k] for k in ("prompt", "chosen", "rejected", "completion", "messages", "label") if k in example}
    if set(row) not in KEY_SETS:
        raise KeyError(f"columns {sorted(row)} do not match a conversational type. See docs/dataset_formats.md.")
    twice = sorted(set(template_kwargs) & set(example.get("chat_template_kwargs") or {}))
    if twice:
        raise TypeError(f"{twice} are passed both as arguments and in the row's chat_template_kwargs.")
    kwargs = {"tools": tools or None, **template_kwargs, **(example.get("chat_template_kwargs") or {})}
    label = {"label": row["label"]} if "label" in row else {}
    if "messages" in row:
        return {"text": render(processing_class, row["messages"], **kwargs)}
    answers = {k: row[k] for k in ("completion", "chosen", "rejected") if k in row}
    if "prompt" not in row:
        return {k: render(processing_class, messages, **kwargs) for k, messages in answers.items()}
    prompt = render_prompt(processing_class, row["prompt"], **kwargs)
    join = _merged if merge_prefill else _appended
    whole = {k: render(processing_class, join(row["prompt"], messages), **kwargs) for k, messages in answers.items()}
    cut = min((common_prefix(prompt, text) for text in whole.values()), default=len(prompt))
    return {"prompt": prompt[:cut], **{k: text[cut:] for k, text in whole.items()}, **label}


def _appended(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if prompt[-1].get("role") == "assistant":
        warn_once(
            logger,
            "a prompt ends with an assistant message, and the answer is another assistant message, so two assistant turns "
            "follow each other. To join them into one turn, pass merge_prefill=True.",
        )
    return prompt + answer


def _merged(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if prompt[-1].get("role") != "assistant":
        return prompt + answer
    if not isinstance(prompt[-1].get("content"), str) or not isinstance(answer[0].get("content"), str):
        raise ConfigError(
            "merge_prefill=True joins texts, but the last message of the prompt or the first message of the answer has no text."
        )
    joined = {**answer[0], "content": prompt[-1]["content"] + answer[0]["content"]}
    return [*prompt[:-1], joined, *answer[1:]]


def maybe_apply_chat_template(
    example: dict[str, Any], processing_class: Tokenizer | None = None, tools: Any = None, **kwargs: Any
) -> dict:
    """Render a conversational row with `apply_chat_template`. Other rows are returned unchanged."""
    return apply_chat_template(example, processing_class, tools, **kwargs) if is_conversational(example) else example


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two id lists or two texts."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def has_generation_markers(template: str | dict | None) -> bool:
    """Return whether a template marks assistant text with ``{% generation %}``."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", _default(template) or "") is not None


def as_blocks(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which each text is converted to a list with one text block. Templates of vision-language models
    expect lists of content blocks.
    """
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]


def turn_end(tokenizer: Tokenizer, rendered: Callable[..., str] | None = None) -> str:
    """Return the end-of-turn token that the template writes after an assistant message. Return "" if there is no such token."""
    return _turn_end(tokenizer, str(tokenizer.chat_template or ""), rendered)


@lru_cache(maxsize=64)
def _turn_end(tokenizer: Tokenizer, template: str, rendered: Callable[..., str] | None) -> str:
    if not template:
        return ""
    rendered = rendered or partial(render, tokenizer)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": PROBE}]
    try:
        text = rendered(messages)
    except DataError:
        text = ""
    if PROBE not in text:  # The template requires content blocks instead of a string.
        text = rendered(as_blocks(messages))
    after = text.rpartition(PROBE)[-1] if PROBE in text else ""
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return tokenizer.decode(ids[:1]) if ids and ids[0] in special else ""


def terminal_token_ids(tokenizer: Tokenizer, generation_config: Any = None) -> tuple[int, ...]:
    """Return all token ids that end generation: the eos tokens of the tokenizer, the generation config and the chat template.

    The tokenizer's eos token alone is not enough. For example, Gemma ends a turn with ``<end_of_turn>`` and Phi with
    ``<|end|>``. A trainer that checks only the tokenizer's eos token counts nearly every completion as truncated.
    """
    ids = set()
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    configured = None if generation_config is None else generation_config.eos_token_id
    ids.update([configured] if isinstance(configured, int) else configured or [])
    end = turn_end(tokenizer)
    if end:
        ids.add(int(tokenizer.convert_tokens_to_ids(end)))
    return tuple(sorted(ids))


def assistant_mask(
    tokenizer: Tokenizer, messages: list[dict], tools: Any = None, *, rendered: Callable | None = None, **kwargs: Any
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and a mask that is 1 for tokens of assistant turns. End-of-turn tokens of
    assistant turns are included.

    If the template has ``{% generation %}`` markers, the markers define the mask. Otherwise, the conversation is rendered
    twice for each assistant turn: once up to the beginning of the turn (with the generation prompt), and once up to the end of
    the turn. The text of the turn is the difference of the two renderings.

    ``rendered`` is the function that renders messages. None: `render`.
    """
    if has_generation_markers(kwargs.get("chat_template") or tokenizer.chat_template):
        out = _template(
            tokenizer,
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tools=tools,
            tokenizer_kwargs={"verbose": False},
            **kwargs,
        )
        return out["input_ids"], out["assistant_masks"]
    rendered = rendered or partial(render, tokenizer)
    text, spans = assistant_spans(rendered, messages, turn_end(tokenizer), tools=tools, **kwargs)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)  # (tokens,)
    spoken = np.zeros(len(starts), dtype=np.int64)
    for begin, stop in spans:
        spoken |= (begin <= starts) & (starts < stop)
    return encoded["input_ids"], spoken.tolist()


def assistant_spans(
    rendered: Callable[..., str], messages: list[dict[str, Any]], end: str, **kwargs: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation. Return the text and the character range of each assistant turn, including its end-of-turn
    token.

    Args:
        rendered: Function that renders messages as text, such as `render`.
        messages: A conversation.
        end: End-of-turn token, as returned by `turn_end`.
        kwargs: Additional arguments of ``rendered``.

    Raises:
        ModelError: The template renders earlier turns differently when later turns follow.
    """
    text, spans = rendered(messages, **kwargs), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = rendered(messages[:index], add_generation_prompt=True, **kwargs)
        through = text if index == len(messages) - 1 else rendered(messages[: index + 1], **kwargs)
        # The text may contain no end-of-turn token. For example, some templates write the tool result directly after a tool
        # call.
        stop = through.rfind(end, len(before)) + len(end) if end in through[len(before) :] else len(through)
        if not (text.startswith(before) and text.startswith(through[:stop])):
            raise ModelError(
                "the chat template renders earlier turns differently when later turns follow, so the tokens of assistant "
                "turns cannot be located. Fix: use a template with {% generation %} markers (chat_template_path)."
            )
        spans.append((len(before), stop))
    return text, spans


# Columns that affect the rendering of a prompt.
RENDERED = ("prompt", "tools", "chat_template_kwargs")


def encode(
    tokenizer: Tokenizer,
    texts: list[str],
    *,
    special: bool,
    where: Callable[[int], str] = "text {} of the batch".format,
) -> list[list[int]]:
    """Tokenize a batch of texts.

    Args:
        tokenizer: Tokenizer. The tokenizer's warning about texts longer than ``model_max_length`` is disabled.
        texts: Texts to encode.
        special: Whether the tokenizer adds its special tokens.
        where: Function that returns a name for the text at an index of ``texts``. The name is used in error messages.

    Raises:
        DataError: A text is not valid Unicode.
    """
    if not texts:
        return []
    try:
        if _only_calls_backend(tokenizer):
            # encode_batch_fast does not compute offsets, so it takes only three quarters of the time of a call of the
            # tokenizer.
            return [enc.ids for enc in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)]
        options = {"return_attention_mask": False, "return_token_type_ids": False}
        return tokenizer(texts, add_special_tokens=special, verbose=False, **options)["input_ids"]
    except Exception as error:
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"{where(index)}: expected a string, but got {type(text).__name__}.") from error
            check_unicode(text, where(index))
        raise DataError(f"the tokenizer failed on a batch of {len(texts)} texts: {error}") from error


def _only_calls_backend(tokenizer: Tokenizer) -> bool:
    """Return whether a call of the tokenizer only calls its backend, without truncation and padding."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if not issubclass(kind, Fast) or (kind.__call__, kind._encode_plus) != (Fast.__call__, Fast._encode_plus):
        return False
    backend = tokenizer.backend_tokenizer
    same = backend.encode_special_tokens == tokenizer.split_special_tokens
    return same and backend.truncation is None and backend.padding is None


def encode_rows(
    tokenizer: Tokenizer, rows: Sequence[tuple[bool, Sequence[str]]], indices: Sequence[int]
) -> list[list[list[int]]]:
    """Tokenize the texts of several rows with two calls of the tokenizer: one for plain texts, and one for rendered
        conversations.

    The tokenizer adds its special tokens only to plain texts, because rendered conversations already contain them.

    Args:
        tokenizer: Tokenizer.
        rows: One pair per row: a bool that is True for plain texts, and a list with the row's texts.
        indices: Row numbers for error messages.

    Raises:
        DataError: A text is not valid Unicode.
    """
    ids_of_rows: list[list[list[int]]] = [[] for _ in rows]
    for special in (True, False):
        at = [place for place, (plain, texts) in enumerate(rows) if plain == special for _ in texts]
        texts = [text for plain, texts in rows if plain == special for text in texts]
        ids = encode(tokenizer, texts, special=special, where=lambda i, at=at: f"row {indices[at[i]]}")
        for place, row_ids in zip(at, ids, strict=True):
            ids_of_rows[place].append(row_ids)
    return ids_of_rows


def one_bos(ids: list[int], bos: int | None) -> list[int]:
    """Remove one bos token if the ids begin with two bos tokens. This happens if the text itself begins with the bos token."""
    return ids[1:] if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos else ids


def open_end(ids: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Remove the eos token that some tokenizers append to every text. A prompt for generation must not end with an eos
    token.
    """
    eos = tokenizer.eos_token_id
    if eos is None or len(ids) < 2 or ids[-1] != eos or text.rstrip().endswith(tokenizer.eos_token):
        return ids
    return ids[:-1]


def parse_tools(value: object) -> Any:
    """Parse the value of a ``tools`` column. The value is a list of schemas, or the JSON text of such a list. Return None
    for an empty list.

    Raises:
        DataError: The value is a string that is not valid JSON.
    """
    if not isinstance(value, str):
        return value or None
    try:
        return json.loads(value) or None
    except ValueError as error:
        raise DataError(f"column 'tools' contains text that is not valid JSON ({error}): {value[:80]!r}") from error


@lru_cache(maxsize=1)
def reserved_arguments() -> frozenset[str]:
    """Return the names of the chat template arguments that posttrain sets itself."""
    from transformers import PreTrainedTokenizerBase

    functions = (render_prompt, render, PreTrainedTokenizerBase.apply_chat_template)
    parameters = {name: p for function in functions for name, p in inspect.signature(function).parameters.items()}
    return frozenset(
        name
        for name, p in parameters.items()
        if p.kind is not p.VAR_KEYWORD and name not in ("documents", "chat_template")
    )


def check_template_arguments(kwargs: Collection[str], error: type[PosttrainError] = ConfigError) -> None:
    """Raise an error if ``chat_template_kwargs`` sets an argument that posttrain itself passes to the tokenizer.

    Raises:
        error: ``chat_template_kwargs`` contains an argument that posttrain itself sets.
    """
    if taken := sorted(reserved_arguments() & set(kwargs)):
        raise error(f"chat_template_kwargs sets {taken}, which posttrain sets itself. Fix: remove them.")


def template_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for the chat template from a row's columns ``tools`` and ``chat_template_kwargs``."""
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise DataError(
            f"column 'chat_template_kwargs' must be a mapping for the chat template, not {type(kwargs).__name__}: "
            f"{str(kwargs)[:80]!r}"
        )
    check_template_arguments(kwargs, DataError)
    return {"tools": parse_tools(row.get("tools")), **kwargs}


def prompt_text(tokenizer: Tokenizer, row: dict[str, Any], kwargs: dict[str, Any], *, answered: bool = False) -> str:
    """Render the prompt of a conversational row for generation. The row's template arguments override ``kwargs``."""
    return render_prompt(tokenizer, row["prompt"], answered=answered, **(kwargs | template_arguments(row)))


def tokenize_prompts(
    rows: Sequence[dict[str, Any]], tokenizer: Tokenizer, *, chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """Tokenize a batch of prompts for generation. Consecutive equal prompts are tokenized only once.

    Conversational prompts end with the generation prompt, or with an assistant message that the model continues. The
    special tokens of conversational prompts come from the chat template. Plain prompts get special tokens from the
    tokenizer.
    """
    chat = is_messages(rows[0]["prompt"])
    alike = [list(group) for _, group in groupby(rows, key=lambda row: [row.get(name) for name in RENDERED])]
    kwargs = chat_template_kwargs or {}
    texts = [prompt_text(tokenizer, strip_none(row), kwargs) if chat else row["prompt"] for row, *_ in alike]
    ids = [one_bos(x, tokenizer.bos_token_id) for x in encode(tokenizer, texts, special=not chat)]
    if not chat:
        ids = [open_end(x, text, tokenizer) for x, text in zip(ids, texts, strict=True)]
    return [x for x, group in zip(ids, alike, strict=True) for _ in group]


def cut_prompt(ids: list[int], most: int | None) -> list[int]:
    """Truncate a prompt from the left to ``most`` tokens.

    Raises:
        DataError: The prompt contains images and is longer than ``most``. A prompt with images is not truncated,
            because truncation could split an image.
    """
    if most is None or len(ids) <= most:
        return ids
    if Prompt.pictures_of(ids):
        raise DataError(
            f"a prompt with images has {len(ids)} tokens, but max_length and max_prompt_length allow only {most}. A prompt with "
            "images is not truncated, because truncation could split an image. Fix: increase the limits, or use smaller images."
        )
    return ids[-most:]
