"""Rows of outcome reward models: both answers of a pair as token ids."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import datasets

from posttrain.data.chat import common_prefix, render
from posttrain.data.formats import get_dataset_column_names, is_messages, strip_none
from posttrain.data.labels import one_eos
from posttrain.data.pairs import maybe_extract_prompt
from posttrain.data.raw import ROW, check_ids, check_stream, first_row, listed
from posttrain.data.tokenize import encode, one_bos, template_arguments
from posttrain.errors import DataError
from posttrain.types import Row

__all__ = ["pair_rows", "prepare_reward_dataset"]

logger = logging.getLogger(__name__)

SIDES = ("chosen", "rejected")
PAIR = ("chosen_ids", "rejected_ids")
HINT = "Raise max_length, or look for answers that are equal as tokens: posttrain inspect shows the rows."
DROPPED_MOST = 0.01  # A larger share of rows that are left out is worth a warning.


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
    rows = {plain: [i // 2 for i, (kind, _) in enumerate(where) if kind == plain] for plain in texts}
    ids = {
        plain: encode(tokenizer, texts[plain], special=plain, where=lambda at, of=rows[plain]: f"row {indices[of[at]]}")
        for plain in texts
    }
    ids[True] = [one_eos(one_bos(x, tokenizer.bos_token_id), tokenizer) for x in ids[True]]
    whole = [ids[plain][at] for plain, at in where]
    return {"chosen_ids": whole[::2], "rejected_ids": whole[1::2]}


def _side(row: dict[str, Any], side: str, tokenizer: Any) -> tuple[bool, str]:
    """Whether one answer with its prompt is plain text, and the text."""
    answer = row.get(side)
    if not answer:
        raise DataError(f"column {side!r} is empty or missing; its columns are {sorted(row)}.")
    prompt = row.get("prompt")
    for name, value in ((side, answer), ("prompt", prompt)):
        if not (value is None or isinstance(value, str) or is_messages(value) or value == []):
            raise DataError(
                f"column {name!r} must be a string or a list of messages, and it is {type(value).__name__}: {str(value)[:60]!r}."
            )
    if prompt is not None and isinstance(prompt, str) != isinstance(answer, str):
        raise DataError(
            f"column 'prompt' and column {side!r} must both be strings or both be lists of messages, and they are "
            f"{type(prompt).__name__} and {type(answer).__name__}."
        )
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
    first_row(dataset, name)
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
        drop = [column for column in columns if column not in ("margin", ROW)]
        dataset = dataset.map(
            _pair_batch,
            batched=True,
            with_indices=True,
            remove_columns=drop,
            fn_kwargs={"tokenizer": tokenizer},
            **extra,
        )
    return _leave_out(dataset, name, max_length, len(tokenizer), extra)


def _left_out(pair: Mapping[str, Any], limit: int | None) -> str:
    """Why a pair is left out; "" for one that is kept."""
    chosen, rejected = pair["chosen_ids"], pair["rejected_ids"]
    if not chosen or not rejected:
        return "with an answer without tokens"
    if chosen == rejected:
        return "with two equal answers"
    return f"longer than max_length={limit}" if limit is not None and max(len(chosen), len(rejected)) > limit else ""


def _usable(batch: dict[str, list], indices: list[int], limit: int | None, vocabulary: int) -> list[bool]:
    names = [name for name in (*PAIR, "margin") if name in batch]
    kept = []
    for index, values in zip(indices, zip(*(batch[name] for name in names), strict=True), strict=True):
        pair = dict(zip(names, values, strict=True))
        try:
            for name in PAIR:
                check_ids(pair[name], name, vocabulary)
            _check_margin(pair)
        except DataError as error:
            raise DataError(f"row {index}: {error}") from None
        kept.append(not _left_out(pair, limit))
    return kept


def _check_margin(pair: Mapping[str, Any]) -> None:
    """Refuse a margin that is no finite number; one such would make the loss no number either.

    Raises:
        DataError: It is missing in this row, text, or not finite.
    """
    if "margin" not in pair:
        return
    margin = pair["margin"]
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"column 'margin' must be a finite number in every row, and it is {margin!r}.")


def _leave_out(dataset: Any, name: str, limit: int | None, vocabulary: int, extra: dict[str, Any]) -> Any:
    arguments = {"limit": limit, "vocabulary": vocabulary}
    kept = dataset.filter(_usable, batched=True, with_indices=True, fn_kwargs=arguments, **extra)
    if isinstance(dataset, datasets.IterableDataset):
        check_stream((_left_out(pair, limit) for pair in dataset), name, HINT)
        return kept
    before, after = len(dataset), len(kept)
    if after < before:
        pairs = dataset.select_columns(list(PAIR))
        columns = zip(*(pairs[column][:] for column in PAIR), strict=True)
        why = listed(Counter(filter(None, (_left_out(dict(zip(PAIR, pair, strict=True)), limit) for pair in columns))))
        if after == 0:
            raise DataError(f"no row of the {name} dataset is left: of {before}, {why}. {HINT}")
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
