"""Chat templates: rendering, the boundary between prompt and completion, assistant masks, tokens that end a turn."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateSyntaxError

from posttrain.data.formats import is_conversational
from posttrain.data.messages import check_messages, check_unicode, fit_messages
from posttrain.errors import ConfigError, DataError, ModelError

__all__ = [
    "AssistantSpans",
    "apply_chat_template",
    "assistant_mask",
    "common_prefix",
    "has_generation_markers",
    "maybe_apply_chat_template",
    "render",
    "render_prompt",
    "terminal_token_ids",
    "turn_end",
]

logger = logging.getLogger(__name__)

PROBE = "7f3a probe 9c1e"  # Content that no template writes by itself.


def render(
    tokenizer: Any,
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
    if not getattr(tokenizer, "chat_template", None):
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


def _template(tokenizer: Any, messages: list[dict[str, Any]], *, tools: Any, **options: Any) -> Any:
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
        reason = str(error).rstrip(".")
        raise DataError(
            f"the chat template refused the messages {_brief(messages)}: {reason}. Check their roles and order, or use another "
            "template (chat_template_path)."
        ) from error


def _brief(messages: Any) -> str:
    text = repr(messages)
    return text if len(text) <= 200 else text[:200] + "..."


def render_prompt(tokenizer: Any, prompt: list[dict[str, Any]], tools: Any = None, **template_kwargs: Any) -> str:
    """A prompt as the model must see it before it speaks: with the generation prompt, or going on with its own words.

    Raises:
        DataError: The prompt is empty, or ends with a turn that nobody answers.
    """
    if not prompt:
        raise DataError("the row has an empty prompt; it needs at least one message.")
    last = prompt[-1].get("role")
    if last not in ("user", "tool", "assistant"):
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
_prefill_told = False


def apply_chat_template(
    example: dict[str, Any],
    processing_class: Any,
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
    global _prefill_told
    if prompt[-1].get("role") == "assistant" and not _prefill_told:
        _prefill_told = True
        logger.warning(
            "a prompt ends with the assistant's words and its answer is another turn: the model will see two assistant turns. "
            "Pass merge_prefill=True to join them."
        )
    return prompt + answer


def _merged(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if prompt[-1].get("role") != "assistant":
        return prompt + answer
    if not isinstance(prompt[-1].get("content"), str) or not isinstance(answer[0].get("content"), str):
        raise ConfigError("merge_prefill=True joins text; the prompt's last message or the answer's first has none.")
    joined = {**answer[0], "content": prompt[-1]["content"] + answer[0]["content"]}
    return [*prompt[:-1], joined, *answer[1:]]


def maybe_apply_chat_template(example: dict[str, Any], processing_class: Any, tools: Any = None, **kwargs: Any) -> dict:
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
    if isinstance(template, dict):
        template = template.get("default")
    return bool(template) and re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None  # type: ignore[arg-type]


def turn_end(tokenizer: Any) -> str:
    """What the template writes right after an assistant's words: the end-of-turn token, or ``""``."""
    return _turn_end(tokenizer, str(getattr(tokenizer, "chat_template", "") or ""))


@lru_cache(maxsize=64)
def _turn_end(tokenizer: Any, template: str) -> str:
    if not template:
        return ""
    text = render(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": PROBE}])
    after = text.rsplit(PROBE, 1)[-1]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return tokenizer.decode(ids[:1]) if ids and ids[0] in special else ""


def terminal_token_ids(tokenizer: Any, generation_config: Any = None) -> tuple[int, ...]:
    """Every token after which the model has finished: the tokenizer's eos, the generation config's, the template's.

    One of them alone is not enough: Gemma ends a turn with ``<end_of_turn>``, Phi with ``<|end|>``, and a trainer that
    waits for the tokenizer's eos counts nearly every completion as truncated.
    """
    ids = set()
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    configured = getattr(generation_config, "eos_token_id", None)
    ids.update([configured] if isinstance(configured, int) else configured or [])
    end = turn_end(tokenizer)
    if end:
        ids.add(int(tokenizer.convert_tokens_to_ids(end)))
    return tuple(sorted(ids))


def assistant_mask(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **template_kwargs: Any
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and 1 on what the assistant says, its end of turn included.

    Generation markers decide where the template has them. Where it has none, each assistant turn is found by rendering
    the conversation up to it: with the generation prompt it starts, with the turn it ends.
    """
    finder = AssistantSpans(tokenizer)
    if has_generation_markers(tokenizer.chat_template):
        return finder.by_markers(messages, tools=tools, **template_kwargs)
    text, spans = finder.by_rendering(messages, tools=tools, **template_kwargs)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids, finder.mask(tokenizer, text, ids, spans)


class AssistantSpans:
    """Where the assistant speaks in rendered conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def by_markers(self, messages: list[dict[str, Any]], *, tools: Any = None, **kwargs: Any) -> tuple[list, list]:
        """Ids and mask as the template's generation markers say."""
        out = _template(
            self.tokenizer,
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tools=tools,
            tokenizer_kwargs={"verbose": False},
            **kwargs,
        )
        return out["input_ids"], out["assistant_masks"]

    def by_rendering(
        self, messages: list[dict[str, Any]], *, tools: Any = None, **kwargs: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text, and the characters of each assistant turn from its first word to its end-of-turn token.

        Raises:
            ModelError: The template renders earlier turns differently once later ones follow.
        """
        text = render(self.tokenizer, messages, tools=tools, **kwargs)
        end = turn_end(self.tokenizer)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = render(self.tokenizer, messages[:index], add_generation_prompt=True, tools=tools, **kwargs)
            last = index == len(messages) - 1
            through = text if last else render(self.tokenizer, messages[: index + 1], tools=tools, **kwargs)
            stop = through.rfind(end) + len(end) if end else len(through)
            if not (text.startswith(before) and text.startswith(through[:stop])):
                raise ModelError(
                    "the chat template renders earlier turns differently once later ones follow, so what the assistant "
                    "said cannot be found. Use a template with {% generation %} markers (chat_template_path)."
                )
            spans.append((len(before), stop))
        return text, spans

    @staticmethod
    def mask(tokenizer: Any, text: str, ids: list[int], spans: list[tuple[int, int]]) -> list[int]:
        """1 on tokens that begin inside a span; ``ids`` are the text's own, tokenised without special tokens."""
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
            "offset_mapping"
        ]
        assert len(offsets) == len(ids)
        return [int(any(a <= start < b for a, b in spans)) for start, _ in offsets]
