"""Texts to token ids, in batches: one template pass, one tokenizer call."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.data.chat import render_prompt
from posttrain.data.formats import is_conversational, strip_none
from posttrain.data.messages import check_unicode
from posttrain.errors import DataError

__all__ = ["encode", "one_bos", "open_end", "parse_tools", "prompt_text", "template_arguments", "tokenize_prompts"]

logger = logging.getLogger(__name__)


RENDERED = ("prompt", "tools", "chat_template_kwargs")  # Columns that decide what a prompt renders to.


def encode(
    tokenizer: Any, texts: list[str], *, special: bool, where: Callable[[int], str] = "text {} of the batch".format
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


def one_bos(ids: list[int], bos: int | None) -> list[int]:
    """A text that already begins with the bos token, tokenised with special tokens on, has two: keep one."""
    return ids[1:] if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos else ids


def open_end(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """A prompt without the eos that some tokenizers end every text with: behind it, nothing is left to say."""
    eos = tokenizer.eos_token_id
    if eos is None or len(ids) < 2 or ids[-1] != eos or text.rstrip().endswith(tokenizer.eos_token):
        return ids
    return ids[:-1]


def parse_tools(value: Any) -> Any:
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


def prompt_text(tokenizer: Any, row: dict[str, Any], kwargs: dict[str, Any]) -> str:
    """A conversational row's prompt as the model must see it before it answers; the row's arguments win over ``kwargs``."""
    return render_prompt(tokenizer, row["prompt"], **(kwargs | template_arguments(row)))


def tokenize_prompts(
    rows: Sequence[dict[str, Any]], tokenizer: Any, *, chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """Prompts of a batch as the engine must see them; equal neighbours are tokenised once.

    Conversational prompts end with the generation prompt (or go on with the assistant's unfinished message) and get their
    special tokens from the template alone; plain ones get the tokenizer's own.
    """
    texts: list[str] = []
    index: list[int] = []
    previous: Any = None
    chat = is_conversational({"prompt": rows[0]["prompt"]})
    for row in rows:
        if previous is None or any(row.get(name) != previous.get(name) for name in RENDERED):
            texts.append(prompt_text(tokenizer, strip_none(row), chat_template_kwargs or {}) if chat else row["prompt"])
        index.append(len(texts) - 1)
        previous = row
    ids = [one_bos(x, tokenizer.bos_token_id) for x in encode(tokenizer, texts, special=not chat)]
    if not chat:
        ids = [open_end(x, text, tokenizer) for x, text in zip(ids, texts, strict=True)]
    return [ids[i] for i in index]
