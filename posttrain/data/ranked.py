"""Rows of reward models: both answers of a pair, and answers judged step by step, as token ids."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import datasets

from posttrain.data.chat import common_prefix, render
from posttrain.data.formats import get_dataset_column_names, is_messages, strip_none
from posttrain.data.labels import one_eos
from posttrain.data.pairs import maybe_extract_prompt
from posttrain.data.tokenize import encode, one_bos, template_arguments
from posttrain.errors import DataError
from posttrain.types import Row

__all__ = ["pair_rows", "prepare_reward_dataset", "prepare_step_dataset", "step_rows", "tokenize_steps"]

logger = logging.getLogger(__name__)

SIDES = ("chosen", "rejected")
DROPPED_MOST = 0.01  # A larger share of rows that are left out is worth a warning.


# Pairs ---------------------------------------------------------------------------------------------------------------


def _pair_batch(batch: dict[str, list], indices: list[int], tokenizer: Any) -> dict[str, list]:
    texts: dict[bool, list[str]] = {True: [], False: []}
    where: list[tuple[bool, int]] = []
    for position, index in enumerate(indices):
        row = strip_none({name: column[position] for name, column in batch.items() if column[position] is not None})
        try:
            if is_messages(row.get("prompt")) and all(is_messages(row.get(side)) for side in SIDES):
                row = dict(maybe_extract_prompt(row))
            for side in SIDES:
                plain, text = _side(row, side, tokenizer)
                where.append((plain, len(texts[plain])))
                texts[plain].append(text)
        except DataError as error:
            raise DataError(f"row {index}: {error}") from error
    ids = {plain: encode(tokenizer, texts[plain], special=plain) for plain in texts}
    ids[True] = [one_eos(one_bos(x, tokenizer.bos_token_id), tokenizer) for x in ids[True]]
    whole = [ids[plain][at] for plain, at in where]
    return {"chosen_ids": whole[::2], "rejected_ids": whole[1::2]}


def _side(row: dict[str, Any], side: str, tokenizer: Any) -> tuple[bool, str]:
    """Whether one answer with its prompt is plain text, and the text."""
    answer = row.get(side)
    if not answer:
        raise DataError(f"column {side!r} is empty or missing; its columns are {sorted(row)}.")
    prompt = row.get("prompt")
    if prompt is not None and is_messages(prompt) != is_messages(answer):
        raise DataError(f"column 'prompt' and column {side!r} must both be strings or both be lists of messages.")
    whole = answer if prompt is None else prompt + answer
    return (True, whole) if isinstance(whole, str) else (False, render(tokenizer, whole, **template_arguments(row)))


def prepare_reward_dataset(
    dataset: Any, tokenizer: Any, *, max_length: int | None = 1024, name: str = "train", num_proc: int | None = None
) -> Any:
    """Tokenise preference rows whole: ``chosen_ids``, ``rejected_ids``, and ``margin`` where there is one.

    Pairs that are too long on either side, or equal on both, are left out and counted.

    Raises:
        DataError: A row that cannot be tokenised, or none left.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise DataError(f"the {name} dataset is empty.")
    streaming = isinstance(dataset, datasets.IterableDataset)
    extra: dict[str, Any] = {} if streaming else {"num_proc": num_proc}
    columns = get_dataset_column_names(dataset)
    for side in SIDES:
        if f"{side}_input_ids" in columns and f"{side}_ids" not in columns:
            logger.warning("column '%s_input_ids' is read as '%s_ids', its present name.", side, side)
            dataset = dataset.rename_column(f"{side}_input_ids", f"{side}_ids")
            columns = [f"{side}_ids" if c == f"{side}_input_ids" else c for c in columns]
    if not {"chosen_ids", "rejected_ids"} <= set(columns):
        if not set(SIDES) <= set(columns):
            raise DataError(f"the {name} rows need 'chosen' and 'rejected', and have columns {sorted(columns)}.")
        drop = [column for column in columns if column != "margin"]
        dataset = dataset.map(
            _pair_batch,
            batched=True,
            with_indices=True,
            remove_columns=drop,
            fn_kwargs={"tokenizer": tokenizer},
            **extra,
        )
    return _leave_out(dataset, name, max_length, extra)


def _usable(chosen: list[list[int]], rejected: list[list[int]], limit: int | None) -> list[bool]:
    return [a != b and (limit is None or max(len(a), len(b)) <= limit) for a, b in zip(chosen, rejected, strict=True)]


def _leave_out(dataset: Any, name: str, limit: int | None, extra: dict[str, Any]) -> Any:
    columns = ["chosen_ids", "rejected_ids"]
    kept = dataset.filter(_usable, batched=True, input_columns=columns, fn_kwargs={"limit": limit}, **extra)
    if isinstance(dataset, datasets.IterableDataset):
        return kept
    before, after = len(dataset), len(kept)
    if after < before:
        pairs = dataset.select_columns(columns)
        equal = sum(a == b for a, b in zip(pairs["chosen_ids"][:], pairs["rejected_ids"][:], strict=True))
        why = f"{equal} pairs whose two answers are equal, {before - after - equal} longer than max_length={limit}"
        if after == 0:
            raise DataError(f"no row of the {name} dataset is left: of {before}, {why}.")
        level = logging.WARNING if before - after > DROPPED_MOST * before else logging.INFO
        logger.log(level, "%s dataset: dropped %d of %d rows (%s).", name, before - after, before, why)
    return kept


def pair_rows(examples: Iterable[dict[str, Any]]) -> list[Row]:
    """Each pair as one row: the tokens both answers begin with, and the rest of either; ``margin`` is a column."""
    rows = []
    for example in examples:
        chosen, rejected = example["chosen_ids"], example["rejected_ids"]
        cut = min(common_prefix(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        sides = [chosen[cut:], rejected[cut:]]
        row = Row(chosen[:cut], sides, [[1] * len(side) for side in sides])
        if example.get("margin") is not None:
            row.sequence_columns["margin"] = [float(example["margin"])] * 2
        rows.append(row)
    return rows


# Steps ---------------------------------------------------------------------------------------------------------------


def tokenize_steps(
    prompt: str, steps: Sequence[str], tokenizer: Any, *, step_separator: str = "\n"
) -> tuple[list[int], list[int], list[int]]:
    """A prompt and its steps as ids.

    Returns:
        ``prompt_ids`` (after the bos token where there is one), ``completion_ids``, each step followed by the separator, and
        the index in ``completion_ids`` of each step's last token, where it is judged.
    """
    separator = tokenizer(step_separator, add_special_tokens=False)["input_ids"]
    if not separator:
        raise DataError(
            f"step_separator={step_separator!r} is no token, so a step would have no place to be judged at."
        )
    head = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    prompt_ids = head + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    completion: list[int] = []
    ends = []
    for step in steps:
        completion += tokenizer(step, add_special_tokens=False)["input_ids"] + separator
        ends.append(len(completion) - 1)
    return prompt_ids, completion, ends


def prepare_step_dataset(
    dataset: Any,
    tokenizer: Any,
    *,
    step_separator: str = "\n",
    max_length: int | None = 1024,
    max_completion_length: int | None = None,
    last_step_only: bool = False,
    soft_labels: bool = False,
    name: str = "train",
    num_proc: int | None = None,
) -> Any:
    """Tokenise stepwise rows: ``prompt_ids``, ``completion_ids``, ``positions`` of judged tokens and their ``targets``.

    Raises:
        DataError: Labels that are not one bool a step (or in [0, 1] with ``soft_labels``); no row left.
    """
    columns = get_dataset_column_names(dataset)
    if {"prompt_ids", "completion_ids", "positions", "targets"} <= set(columns):
        return dataset
    missing = sorted({"prompt", "completions", "labels"} - set(columns))
    if missing:
        raise DataError(
            f"the {name} rows need 'prompt', 'completions' and 'labels': {missing} are not in {sorted(columns)}."
        )
    streaming = isinstance(dataset, datasets.IterableDataset)
    extra: dict[str, Any] = {} if streaming else {"num_proc": num_proc}
    limits = {"limit": max_length, "completion_limit": max_completion_length}
    options = {"step_separator": step_separator, "last": last_step_only, "soft": soft_labels, **limits}
    mapped = dataset.map(
        _step_row, with_indices=True, remove_columns=columns, fn_kwargs={"tokenizer": tokenizer, **options}, **extra
    )
    kept = mapped.filter(_is_judged, input_columns=["positions"], **extra)
    if not streaming:
        lost, dropped = sum(mapped["lost"][:]), len(mapped) - len(kept)
        if len(kept) == 0:
            raise DataError(
                f"no row of the {name} dataset is left: none of {len(mapped)} has a judged step within max_length={max_length}."
            )
        if lost or dropped:
            logger.warning(
                "%s dataset: %d steps lie beyond max_length=%s or max_completion_length=%s; %d of %d rows have none left and "
                "are dropped.",
                name, lost, max_length, max_completion_length, dropped, len(mapped),
            )  # fmt: skip
    return kept.remove_columns(["lost"])


def _is_judged(positions: list[int]) -> bool:
    return bool(positions)


def _step_row(
    row: dict[str, Any],
    index: int,
    tokenizer: Any,
    *,
    step_separator: str,
    last: bool,
    soft: bool,
    limit: Any,
    completion_limit: Any,
) -> dict[str, Any]:
    steps, labels = row["completions"], row["labels"]
    for name, value in (("prompt", [row["prompt"]]), ("completions", steps)):
        if any(not isinstance(text, str) for text in value):
            raise DataError(
                f"row {index}, column {name!r}: steps are judged in plain text only, and it holds "
                f"{type(next(text for text in value if not isinstance(text, str))).__name__}. Render the messages first."
            )
    if len(steps) != len(labels):
        raise DataError(
            f"row {index}: {len(steps)} completions and {len(labels)} labels; there must be one label a step."
        )
    for label in labels:
        if not (label in (0, 1) or (soft and 0 <= label <= 1)):
            hint = "between 0 and 1" if soft else "True or False (set soft_labels=True to train on shares)"
            raise DataError(f"row {index}, column 'labels': {label!r} must be {hint}.")
    prompt, completion, ends = tokenize_steps(row["prompt"], steps, tokenizer, step_separator=step_separator)
    room = len(completion) if completion_limit is None else completion_limit
    room = min(room, len(completion) if limit is None else max(0, limit - len(prompt)))
    judged = [(end, float(label)) for end, label in zip(ends, labels, strict=True)]
    judged = judged[-1:] if last else judged
    inside = [(end, label) for end, label in judged if end < room]
    return {
        "prompt_ids": prompt,
        "completion_ids": completion[:room],
        "positions": [end for end, _ in inside],
        "targets": [label for _, label in inside],
        "lost": len(judged) - len(inside),
    }


def step_rows(examples: Iterable[dict[str, Any]]) -> list[Row]:
    """Judged answers as rows: the loss mask is 1 on each judged token; the column ``good`` says how good its step is."""
    rows = []
    for example in examples:
        length = len(example["completion_ids"])
        mask, good = [0] * length, [0.0] * length
        for position, target in zip(example["positions"], example["targets"], strict=True):
            mask[position], good[position] = 1, target
        rows.append(Row(example["prompt_ids"], [example["completion_ids"]], [mask], token_columns={"good": [good]}))
    return rows
