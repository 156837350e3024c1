"""Preference rows: the prompt that two answers share, and pairs taken apart into single judged answers."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import datasets

from posttrain.data.formats import get_dataset_column_names, is_messages
from posttrain.errors import DataError

__all__ = [
    "extract_and_unpair",
    "extract_prompt",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "unpair_preference_dataset",
]

logger = logging.getLogger(__name__)

# Scripts written without spaces: a split between two of their letters is a split between words, as far as anybody can tell.
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """Split off what ``chosen`` and ``rejected`` share at their beginning.

    Lists share whole messages. Strings share characters, back to a word boundary, and spaces at the boundary belong to
    the answers: tokenisers merge over them.

    Returns:
        ``prompt``, ``chosen`` and ``rejected``.

    Raises:
        DataError: The two are equal, one is empty, or two conversations share no message.

    >>> extract_prompt({"chosen": "The sky is blue.", "rejected": "The sky is black."})
    {'prompt': 'The sky is', 'chosen': ' blue.', 'rejected': ' black.'}
    """
    chosen, rejected = example["chosen"], example["rejected"]
    if not chosen or not rejected:
        raise DataError(f"{'chosen' if not chosen else 'rejected'} is empty: a pair needs two answers.")
    if chosen == rejected:
        raise DataError("chosen and rejected are equal: there is no preference in this row.")
    cut = _shared_messages(chosen, rejected) if isinstance(chosen, list) else _shared_text(chosen, rejected)
    return {"prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shared_messages(chosen: list[Any], rejected: list[Any]) -> int:
    cut = _shared(chosen, rejected)
    if cut == min(len(chosen), len(rejected)):  # One is the beginning of the other: neither answer may be empty.
        cut -= 1
        while cut > 0 and chosen[cut - 1].get("role") == "assistant":
            cut -= 1
    if cut <= 0:
        raise DataError(
            "chosen and rejected differ in their first message, so they share no prompt. Give a 'prompt' column."
        )
    return cut


def _is_word(character: str) -> bool:
    return character.isalnum() and not unicodedata.name(character, "").startswith(UNSPACED)


def _shared_text(chosen: str, rejected: str) -> int:
    def inside_a_word(cut: int) -> bool:
        after = (text[cut : cut + 1] for text in (chosen, rejected))
        return _is_word(chosen[cut - 1]) and any(character and _is_word(character) for character in after)

    cut = min(_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    while cut > 0 and inside_a_word(cut):
        cut -= 1
    while cut > 0 and chosen[cut - 1] == " ":
        cut -= 1
    return cut


_repeats_told = False


def maybe_extract_prompt(example: Mapping[str, Any]) -> Mapping[str, Any]:
    """`extract_prompt` where the row needs it; a prompt that both answers repeat is taken off them.

    A row that is no preference, or whose prompt has the form of its answers and is not repeated, comes back unchanged.
    """
    if "chosen" not in example or "rejected" not in example:
        return example
    prompt, chosen, rejected = example.get("prompt"), example["chosen"], example["rejected"]
    if prompt is None:
        return {**example, **extract_prompt(example)}
    if is_messages(chosen) and not is_messages(prompt):  # A text prompt beside conversations that begin with it.
        return {**example, **extract_prompt(example)}
    if isinstance(prompt, list) and prompt and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
        _tell_repeat()
        return {**example, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :]}
    return example


def _tell_repeat() -> None:
    global _repeats_told
    if not _repeats_told:
        _repeats_told = True
        logger.warning(
            "chosen and rejected repeat the messages of their prompt: they are taken off, or it would stand twice."
        )


def unpair_preference_dataset(dataset: Any, *, interleave: bool = True, **map_kwargs: Any) -> Any:
    """Turn pairs into single answers with a ``label``: True for chosen, False for rejected.

    Only right where every chosen answer is good and every rejected one bad by itself.

    Args:
        dataset: ``Dataset``, ``DatasetDict`` or an iterable twin with columns ``chosen`` and ``rejected``.
        interleave: Put each pair's two answers side by side; False gives all chosen and then all rejected of each batch,
            so that batches in order hold one label only.
        map_kwargs: For ``dataset.map``.

    Raises:
        DataError: A column ``completion`` or ``label`` is there already and would be overwritten.
    """
    if isinstance(dataset, dict):
        return type(dataset)(
            {k: unpair_preference_dataset(v, interleave=interleave, **map_kwargs) for k, v in dataset.items()}
        )
    columns = get_dataset_column_names(dataset)
    missing, taken = (
        [c for c in ("chosen", "rejected") if c not in columns],
        [c for c in ("completion", "label") if c in columns],
    )
    if missing or taken:
        what = f"has no column {missing}" if missing else f"already has {taken}, which would be overwritten"
        raise DataError(f"the dataset cannot be unpaired: it {what}. Its columns are {columns}.")
    if isinstance(dataset, datasets.IterableDataset):
        map_kwargs = {k: v for k, v in map_kwargs.items() if k not in ("num_proc", "desc")}
    return dataset.map(
        partial(_unpair, interleave=interleave), batched=True, remove_columns=["chosen", "rejected"], **map_kwargs
    )


def _unpair(batch: dict[str, list], *, interleave: bool) -> dict[str, list]:
    size = len(batch["chosen"])
    order = [i + side * size for i in range(size) for side in (0, 1)] if interleave else list(range(2 * size))
    doubled = {name: column * 2 for name, column in batch.items() if name not in ("chosen", "rejected")}
    doubled["completion"] = batch["chosen"] + batch["rejected"]
    doubled["label"] = [True] * size + [False] * size
    return {name: [column[i] for i in order] for name, column in doubled.items()}


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """`unpair_preference_dataset` where there are ``chosen`` and ``rejected``; anything else comes back as it is."""
    first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    if not {"chosen", "rejected"} <= set(get_dataset_column_names(first)):
        return dataset
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)


def extract_and_unpair(dataset: Any, num_proc: int | None = None) -> Any:
    """Pairs with or without a prompt column, or whose answers repeat it, as single judged answers; others as they are."""
    if isinstance(dataset, dict) or not {"chosen", "rejected"} <= set(get_dataset_column_names(dataset)):
        return dataset
    extra = {} if isinstance(dataset, datasets.IterableDataset) else {"num_proc": num_proc}
    return unpair_preference_dataset(dataset.map(_extracted, **extra), **extra)


def _extracted(example: dict[str, Any]) -> dict[str, Any]:
    return dict(maybe_extract_prompt(example))
