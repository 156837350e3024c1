"""Chat templates: rendering, the boundary between prompt and completion, assistant masks, tokens that end a turn."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateSyntaxError

from posttrain.data.formats import is_conversational, strip_none, warn_once
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.types import Prompt

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


def template_text(processing_class: Tokenizer) -> str | None:
    """The chat template as one text: of named variants, ``default``."""
    return _default(getattr(processing_class, "chat_template", None))


def _default(template: str | dict[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, dict) else template


def inner_tokenizer(processing_class: Tokenizer) -> Any:
    """The tokenizer of a processor, or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", None) or processing_class


def ids_without_token(processing_class: Tokenizer, size: int) -> frozenset[int]:
    """Return the ids below ``size`` that the tokenizer has no token for: rows of a padded embedding."""
    return frozenset(range(size)) - frozenset(inner_tokenizer(processing_class).get_vocab().values())


def is_processor(processing_class: Tokenizer) -> bool:
    """Whether this is a processor with an image processor, not a tokenizer."""
    return getattr(processing_class, "image_processor", None) is not None


def with_template(processing_class: Tokenizer, template: str | None) -> Any:
    """A shallow copy of the (inner) tokenizer that carries ``template``."""
    shadow = copy.copy(inner_tokenizer(processing_class))
    shadow.chat_template = template
    return shadow


def tool_call(name: Any, arguments: Any) -> dict[str, Any]:
    """A call as messages hold it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def json_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the arguments of their tool calls as JSON text, as templates that concatenate them need it."""
    converted = []
    for message in messages:
        calls = [
            tool_call(c["function"]["name"], json.dumps(c["function"]["arguments"]))
            for c in message.get("tool_calls", ())
        ]
        converted.append({**message, "tool_calls": calls} if calls else message)
    return converted


# What messages call the model's reasoning; a template reads one of them, and silently leaves the others out.
REASONING = ("reasoning_content", "thinking", "reasoning")


def check_unicode(text: str, where: str) -> None:
    """Refuse text with lone surrogates, which no tokenizer reads.

    Raises:
        DataError: It cannot be written as UTF-8; names the place and shows what stands around it.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 30) : error.end + 10]
        raise DataError(
            f"{where}: text that is not valid Unicode (character {error.start}: {error.reason}): {shown!r}. Read its source as "
            "UTF-8 again, or mend it with text.encode('utf-8', 'replace').decode()."
        ) from error


def check_messages(messages: Any) -> None:
    """Refuse what many templates would render as nothing, or as the word None.

    Raises:
        DataError: A message that is no mapping with a role, or that says nothing: no content, tool call or reasoning.
    """
    for number, message in enumerate(messages):
        plain = type(message) is dict  # As nearly all are; asking whether it is a Mapping takes longer than the rest.
        if not (plain or isinstance(message, Mapping)) or not isinstance(message.get("role"), str):
            keys = sorted(message) if isinstance(message, Mapping) else type(message).__name__
            raise DataError(f"message {number} must be a mapping with a role and content, and it is {keys}.")
        said = message.get("content") is not None or message.get("tool_calls")
        if not said and not any(message.get(name) for name in REASONING):
            raise DataError(
                f"message {number} (role {message['role']!r}) has no content; its keys are {sorted(message)}. Give it a "
                "'content', or leave the message out."
            )


def fit_messages(tokenizer: Tokenizer, messages: list[dict[str, Any]], template: Any = None) -> list[dict[str, Any]]:
    """Messages as the chat template reads them; the given ones are not changed.

    Reasoning goes under the name that the template reads, and tool arguments stored as JSON text are decoded where the
    template would encode the text once more.
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
    warn_once(logger, "messages hold %r, which the chat template does not read: taken as %r.", spelled[0], reads[0])
    return {**{k: v for k, v in message.items() if k != spelled[0]}, reads[0]: message[spelled[0]]}


def _arguments(call: Any) -> Any:
    """What a call's JSON text decodes to, if that is an object; else None."""
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
    """Whether a template takes arguments as an object, and encodes text again (or refuses it)."""

    def rendered(arguments: Any) -> str | None:
        calls = [tool_call("zq_find", arguments)]
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except Exception:  # Whatever a template raises says that it does not take this form.
            return None

    as_object, as_text = rendered({"zq_key": "zq"}), rendered('{"zq_key": "zq"}')
    fits = as_object is not None and "zq_key" in as_object and "'zq_key'" not in as_object
    twice = fits and (as_text is None or '\\"zq_key\\"' in as_text)
    if twice:
        logger.warning(
            "tool arguments are stored as JSON text, which the chat template would encode once more: they are decoded first."
        )
    return twice


PROBE = "7f3a probe 9c1e"  # Content that no template writes by itself.


def render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Any = None,
    **template_kwargs: Any,
) -> str:
    """One conversation as the text the model sees.

    Raises:
        ModelError: The tokenizer has no chat template, or one that is no Jinja.
        DataError: Messages without content, text that is no valid Unicode, or messages that the template refused.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "the rows are conversational, but the tokenizer has no chat template. Set tokenizer.chat_template, use an "
            "instruction-tuned checkpoint, or give the rows as strings."
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
    """The tokenizer's `apply_chat_template` on checked and fitted messages, with errors that say what to do."""
    check_messages(messages)
    fitted = fit_messages(tokenizer, messages, options.get("chat_template"))
    try:
        return tokenizer.apply_chat_template(fitted, tools=tools or None, **options)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template is not valid Jinja (line {error.lineno}: {error.message}). Mend it, or set another one "
            "(chat_template_path)."
        ) from error
    except Exception as error:
        for message in messages:
            check_unicode(str(message.get("content")), "messages")
        reason, shown = str(error).rstrip("."), repr(messages)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        raise DataError(
            f"the chat template refused the messages {shown}: {reason}. Check their roles and order, or use another "
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
    """A prompt as the model must see it before it speaks: with the generation prompt, or going on with its own words.

    Args:
        tokenizer: With a chat template.
        prompt: Messages.
        tools: Schemas or functions.
        answered: Whether the answer is there already, whoever spoke last.
        template_kwargs: For the template.

    Raises:
        DataError: The prompt is empty, or ends with a turn that nobody answers.
    """
    if not prompt:
        raise DataError("the row has an empty prompt; it needs at least one message.")
    last = prompt[-1].get("role")
    if not answered and last not in ("user", "tool", "assistant"):
        raise DataError(
            f"the prompt ends with a message of role {last!r}; it must end with 'user' or 'tool' (to be answered) or "
            "'assistant' (to be continued)."
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
    processing_class: Tokenizer,
    tools: Any = None,
    *,
    merge_prefill: bool = False,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Render a conversational row as text: ``messages`` becomes ``text``, other columns keep their names.

    A prompt and its answers are cut at the longest common prefix of their renderings, so ``prompt + answer`` is always what
    the whole conversation renders to.

    Args:
        example: One of ``messages``; ``prompt``; ``prompt`` with ``completion`` (and ``label``); ``prompt`` with ``chosen`` and
            ``rejected``; these two alone. Other columns are dropped.
        processing_class: Tokenizer with a chat template.
        tools: Schemas or functions; an empty list is none.
        merge_prefill: Join a prompt that ends with the assistant's words with the answer that goes on; otherwise they are
            two turns.
        template_kwargs: For the template.

    Raises:
        KeyError: Another set of columns.
        DataError: An empty prompt, or one that nobody answers.
    """
    row = {k: example[k] for k in ("prompt", "chosen", "rejected", "completion", "messages", "label") if k in example}
    if set(row) not in KEY_SETS:
        raise KeyError(f"columns {sorted(row)} fit no conversational type; see the documentation of dataset formats.")
    twice = sorted(set(template_kwargs) & set(example.get("chat_template_kwargs") or {}))
    if twice:
        raise TypeError(f"{twice} are given both as arguments and in the row's chat_template_kwargs.")
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
            "a prompt ends with the assistant's words and its answer is another turn: the model will see two assistant turns. "
            "Pass merge_prefill=True to join them.",
        )
    return prompt + answer


def _merged(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if prompt[-1].get("role") != "assistant":
        return prompt + answer
    if not isinstance(prompt[-1].get("content"), str) or not isinstance(answer[0].get("content"), str):
        raise ConfigError("merge_prefill=True joins text; the prompt's last message or the answer's first has none.")
    joined = {**answer[0], "content": prompt[-1]["content"] + answer[0]["content"]}
    return [*prompt[:-1], joined, *answer[1:]]


def maybe_apply_chat_template(
    example: dict[str, Any], processing_class: Tokenizer, tools: Any = None, **kwargs: Any
) -> dict:
    """`apply_chat_template` of a conversational row; any other row comes back as it is."""
    return apply_chat_template(example, processing_class, tools, **kwargs) if is_conversational(example) else example


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix of two id lists, or two texts."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def has_generation_markers(template: str | dict | None) -> bool:
    """Whether a template marks what the assistant says with ``{% generation %}``."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", _default(template) or "") is not None


def turn_end(tokenizer: Tokenizer, rendered: Callable[..., str] | None = None) -> str:
    """What the template writes right after an assistant's words: the end-of-turn token, or ``""``."""
    return _turn_end(tokenizer, str(tokenizer.chat_template or ""), rendered)


@lru_cache(maxsize=64)
def _turn_end(tokenizer: Tokenizer, template: str, rendered: Callable[..., str] | None) -> str:
    if not template:
        return ""
    text = (rendered or partial(render, tokenizer))(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": PROBE}]
    )
    after = text.rsplit(PROBE, 1)[-1]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return tokenizer.decode(ids[:1]) if ids and ids[0] in special else ""


def terminal_token_ids(tokenizer: Tokenizer, generation_config: Any = None) -> tuple[int, ...]:
    """Every token after which the model has finished: the tokenizer's eos, the generation config's, the template's.

    One of them alone is not enough: Gemma ends a turn with ``<end_of_turn>``, Phi with ``<|end|>``, and a trainer that
    waits for the tokenizer's eos counts nearly every completion as truncated.
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
    """Token ids of a conversation, and 1 on what the assistant says, its end of turn included.

    Generation markers decide where the template has them. Where it has none, each assistant turn is found by rendering
    the conversation up to it: with the generation prompt it starts, with the turn it ends; ``rendered`` does it where it is
    given, as `render` would.
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
    """The rendered text, and the characters of each assistant turn from its first word to its end-of-turn token.

    Args:
        rendered: Makes text of messages, as `render` does.
        messages: A conversation.
        end: What `turn_end` gives.
        kwargs: For ``rendered``.

    Raises:
        ModelError: The template renders earlier turns differently once later ones follow.
    """
    text, spans = rendered(messages, **kwargs), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = rendered(messages[:index], add_generation_prompt=True, **kwargs)
        through = text if index == len(messages) - 1 else rendered(messages[: index + 1], **kwargs)
        # A turn may end otherwise: behind a tool call, say, some templates write the result at once.
        stop = through.rfind(end, len(before)) + len(end) if end in through[len(before) :] else len(through)
        if not (text.startswith(before) and text.startswith(through[:stop])):
            raise ModelError(
                "the chat template renders earlier turns differently once later ones follow, so what the assistant "
                "said cannot be found. Use a template with {% generation %} markers (chat_template_path)."
            )
        spans.append((len(before), stop))
    return text, spans


RENDERED = ("prompt", "tools", "chat_template_kwargs")  # Columns that decide what a prompt renders to.


def encode(
    tokenizer: Tokenizer,
    texts: list[str],
    *,
    special: bool,
    where: Callable[[int], str] = "text {} of the batch".format,
) -> list[list[int]]:
    """Token ids of a batch of texts, with or without the tokenizer's own special tokens.

    Args:
        tokenizer: Encodes; a text longer than its ``model_max_length`` is no reason to warn: rows are cut later.
        texts: What to encode.
        special: Whether the tokenizer adds its special tokens.
        where: Names a text by its place in ``texts``, for messages.

    Raises:
        DataError: A text is no valid Unicode.
    """
    if not texts:
        return []
    try:
        return tokenizer(
            texts,
            add_special_tokens=special,
            verbose=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
    except Exception as error:
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"{where(index)}: it must be text, and it is {type(text).__name__}.") from error
            check_unicode(text, where(index))
        raise DataError(f"the tokenizer could not read a batch of {len(texts)} texts: {error}") from error


def encode_rows(
    tokenizer: Tokenizer, rows: Sequence[tuple[bool, Sequence[str]]], indices: Sequence[int]
) -> list[list[list[int]]]:
    """Token ids of the texts of each row, in two calls: plain texts with the tokenizer's special tokens, rendered ones without.

    Args:
        tokenizer: See `encode`.
        rows: Whether a row is plain text, and its texts.
        indices: Numbers of the rows, for messages.

    Raises:
        DataError: A text is no valid Unicode.
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
    """A text that already begins with the bos token, tokenised with special tokens on, has two: keep one."""
    return ids[1:] if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos else ids


def open_end(ids: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """A prompt without the eos that some tokenizers end every text with: behind it, nothing is left to say."""
    eos = tokenizer.eos_token_id
    if eos is None or len(ids) < 2 or ids[-1] != eos or text.rstrip().endswith(tokenizer.eos_token):
        return ids
    return ids[:-1]


def parse_tools(value: object) -> Any:
    """A ``tools`` column: schemas, or one JSON string of them; an empty list is none.

    Raises:
        DataError: A string that is no JSON.
    """
    if not isinstance(value, str):
        return value or None
    try:
        return json.loads(value) or None
    except ValueError as error:
        raise DataError(f"column 'tools' is text that is not valid JSON ({error}): {value[:80]!r}") from error


def template_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """What a row itself says about its rendering: its tools and ``chat_template_kwargs``."""
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise DataError(
            f"column 'chat_template_kwargs' must be a mapping for the chat template, and it is {type(kwargs).__name__}: "
            f"{str(kwargs)[:80]!r}"
        )
    return {"tools": parse_tools(row.get("tools")), **kwargs}


def prompt_text(tokenizer: Tokenizer, row: dict[str, Any], kwargs: dict[str, Any], *, answered: bool = False) -> str:
    """A conversational row's prompt as the model must see it before it answers; the row's arguments win over ``kwargs``."""
    return render_prompt(tokenizer, row["prompt"], answered=answered, **(kwargs | template_arguments(row)))


def tokenize_prompts(
    rows: Sequence[dict[str, Any]], tokenizer: Tokenizer, *, chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """Prompts of a batch as the engine must see them; equal neighbours are tokenised once.

    Conversational prompts end with the generation prompt (or go on with the assistant's unfinished message) and get their
    special tokens from the template alone; plain ones get the tokenizer's own.
    """
    chat = is_conversational({"prompt": rows[0]["prompt"]})
    alike = [list(group) for _, group in groupby(rows, key=lambda row: [row.get(name) for name in RENDERED])]
    kwargs = chat_template_kwargs or {}
    texts = [prompt_text(tokenizer, strip_none(row), kwargs) if chat else row["prompt"] for row, *_ in alike]
    ids = [one_bos(x, tokenizer.bos_token_id) for x in encode(tokenizer, texts, special=not chat)]
    if not chat:
        ids = [open_end(x, text, tokenizer) for x, text in zip(ids, texts, strict=True)]
    return [x for x, group in zip(ids, alike, strict=True) for _ in group]


def cut_prompt(ids: list[int], most: int | None) -> list[int]:
    """The last ``most`` tokens.

    Raises:
        DataError: The prompt has images and more tokens: a cut could go through an image.
    """
    if most is None or len(ids) <= most:
        return ids
    if Prompt.pictures_of(ids):
        raise DataError(
            f"a prompt with images has {len(ids)} tokens, and max_length and max_prompt_length leave it {most}: a cut would go "
            "through an image. Fix: larger limits, or smaller images."
        )
    return ids[-most:]
