"""Bos and eos put on tokenised preference rows that lack them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["add_bos_token_if_needed", "add_eos_token_if_needed"]

Tokens = Mapping[str, Any]


def add_bos_token_if_needed(
    bos_token_id: int | None,
    prompt_len_input_ids: int,
    prompt_tokens: Tokens,
    chosen_prompt_len_input_ids: int,
    chosen_tokens: Tokens,
    rejected_prompt_len_input_ids: int,
    rejected_tokens: Tokens,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Begin three tokenised prompts with the bos token, unless they do already.

    Args:
        bos_token_id: None leaves everything as it is.
        prompt_len_input_ids: Tokens of the prompt by itself; 0 where it is empty.
        prompt_tokens: With ``prompt_input_ids`` and ``prompt_attention_mask``.
        chosen_prompt_len_input_ids: Tokens of the prompt before the chosen answer.
        chosen_tokens: Likewise.
        rejected_prompt_len_input_ids: Tokens of the prompt before the rejected answer.
        rejected_tokens: Likewise.

    Returns:
        New dictionaries; the given ones are not changed.

    >>> row = {"prompt_input_ids": [5], "prompt_attention_mask": [1]}
    >>> add_bos_token_if_needed(1, 1, row, 1, row, 1, row)[0]
    {'prompt_input_ids': [1, 5], 'prompt_attention_mask': [1, 1]}
    """

    def begun(tokens: Tokens, length: int) -> dict[str, Any]:
        ids = tokens["prompt_input_ids"]
        if bos_token_id is None or (length and ids[0] == bos_token_id):
            return dict(tokens)
        mask = tokens["prompt_attention_mask"]
        return {**tokens, "prompt_input_ids": [bos_token_id, *ids], "prompt_attention_mask": [1, *mask]}

    return (
        begun(prompt_tokens, prompt_len_input_ids),
        begun(chosen_tokens, chosen_prompt_len_input_ids),
        begun(rejected_tokens, rejected_prompt_len_input_ids),
    )


def add_eos_token_if_needed(
    eos_token_id: int, chosen_tokens: Tokens, rejected_tokens: Tokens
) -> tuple[dict[str, Any], dict[str, Any]]:
    """End two tokenised answers (``input_ids``, ``attention_mask``) with the eos token, unless they do already.

    Returns:
        New dictionaries; the given ones are not changed.

    >>> add_eos_token_if_needed(2, {"input_ids": [5], "attention_mask": [1]}, {"input_ids": [2], "attention_mask": [1]})
    ({'input_ids': [5, 2], 'attention_mask': [1, 1]}, {'input_ids': [2], 'attention_mask': [1]})
    """

    def ended(tokens: Tokens) -> dict[str, Any]:
        ids = tokens["input_ids"]
        if ids and ids[-1] == eos_token_id:
            return dict(tokens)
        return {**tokens, "input_ids": [*ids, eos_token_id], "attention_mask": [*tokens["attention_mask"], 1]}

    return ended(chosen_tokens), ended(rejected_tokens)
