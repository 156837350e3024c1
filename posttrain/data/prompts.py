"""Prompts that cannot be generated from, refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets

from posttrain.data.formats import is_conversational
from posttrain.data.tokenize import encode
from posttrain.errors import DataError, ModelError

__all__ = ["check_prompts"]


def check_prompts(dataset: Any, name: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Refuse a dataset without usable prompts; returns its first rows.

    Raises:
        DataError: No rows, no ``prompt`` column, a prompt without any token, or strings mixed with message lists.
        ModelError: Conversational prompts and a tokenizer without a chat template.
    """
    head = list(_take(dataset, 2))
    if not head:
        raise DataError(f"{name} is empty.")
    if "prompt" not in head[0]:
        raise DataError(
            f"{name} has no 'prompt' column; its columns are {sorted(head[0])}. Online methods need prompts."
        )
    chat = is_conversational(head[0])
    for index, prompt in enumerate(_prompts(dataset)):
        _check_prompt(prompt, index, name, chat, tokenizer)
    if chat and not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"{name} is conversational (prompts are lists of messages), but the tokenizer has no chat template. Set "
            "tokenizer.chat_template, use an instruction-tuned checkpoint, or give prompts as strings."
        )
    return head


def _check_prompt(prompt: Any, index: int, name: str, chat: bool, tokenizer: Any) -> None:
    if isinstance(prompt, list) != chat:
        raise DataError(
            f"{name} row {index}: the prompt is a {type(prompt).__name__} and in row 0 it is a "
            f"{'list of messages' if chat else 'str'}. Give all rows the same kind."
        )
    if not prompt and (chat or not encode(tokenizer, [prompt], special=True)[0]):
        what = "an empty list of messages" if chat else "empty"
        raise DataError(
            f"{name} row {index}, column 'prompt': it is {what}"
            f"{'' if chat else ', and the tokenizer begins no text with a token'}. "
            f"Give it at least one {'message' if chat else 'character'}."
        )


def _prompts(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, datasets.Dataset):
        yield from dataset.select_columns("prompt").with_format(None)["prompt"]
    else:
        for row in _take(dataset, 64):
            yield row["prompt"]


def _take(dataset: Any, count: int) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(dataset):
        if index == count:
            return
        yield row
