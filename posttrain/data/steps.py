"""Rows of process reward models: answers judged step by step, as token ids."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import datasets

from posttrain.data.formats import get_dataset_column_names
from posttrain.data.raw import ROW, check_stream, first_row, listed
from posttrain.data.tokenize import encode
from posttrain.errors import DataError
from posttrain.types import Row

__all__ = ["prepare_step_dataset", "step_rows", "tokenize_steps"]

logger = logging.getLogger(__name__)

RAW = ("prompt", "completions", "labels")
PREPARED = ("prompt_ids", "completion_ids", "positions", "targets")
HINT = "Raise max_length or max_completion_length, and look for rows without steps: posttrain inspect shows the rows."


def tokenize_steps(
    prompt: str, steps: Sequence[str], tokenizer: Any, *, step_separator: str = "\n"
) -> tuple[list[int], list[int], list[int]]:
    """A prompt and its steps as ids.

    Returns:
        ``prompt_ids`` (after the bos token where there is one), ``completion_ids``, each step followed by the separator, and
        the index in ``completion_ids`` of each step's last token, where it is judged.
    """
    separator, prompt_ids, *parts = encode(tokenizer, [step_separator, prompt, *steps], special=False)
    return _joined(prompt_ids, parts, _checked(separator, step_separator), tokenizer)


def _checked(separator: list[int], text: str) -> list[int]:
    if not separator:
        raise DataError(f"step_separator={text!r} is no token, so a step would have no place to be judged at.")
    return separator


def _joined(
    prompt: list[int], steps: list[list[int]], separator: list[int], tokenizer: Any
) -> tuple[list[int], list[int], list[int]]:
    head = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    completion: list[int] = []
    ends = []
    for step in steps:
        completion += step + separator
        ends.append(len(completion) - 1)
    return head + prompt, completion, ends


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
    first_row(dataset, name)
    columns = get_dataset_column_names(dataset)
    if set(PREPARED) <= set(columns):
        return dataset
    missing = sorted(set(RAW) - set(columns))
    if missing:
        raise DataError(
            f"the {name} rows need 'prompt', 'completions' and 'labels': {missing} are not in {sorted(columns)}."
        )
    streaming = isinstance(dataset, datasets.IterableDataset)
    extra: dict[str, Any] = {} if streaming else {"num_proc": num_proc}
    limits = {"limit": max_length, "completion_limit": max_completion_length}
    options = {"step_separator": step_separator, "last": last_step_only, "soft": soft_labels, **limits}
    mapped = dataset.map(
        _step_batch,
        batched=True,
        with_indices=True,
        remove_columns=[column for column in columns if column != ROW],
        fn_kwargs={"tokenizer": tokenizer, **options},
        **extra,
    )
    kept = mapped.filter(_is_judged, input_columns=["positions"], **extra)
    if streaming:
        check_stream((row["_reason"] for row in mapped), name, HINT)
    else:
        _tell(mapped, len(kept), name, limits)
    return kept.remove_columns(["lost", "_reason"])


def _tell(mapped: Any, kept: int, name: str, limits: dict[str, int | None]) -> None:
    lost, reasons = sum(mapped["lost"][:]), Counter(filter(None, mapped["_reason"][:]))
    if kept == 0:
        raise DataError(f"no row of the {name} dataset is left: of {len(mapped)}, {listed(reasons)}. {HINT}")
    if lost:
        logger.warning(
            "%s dataset: %d steps lie beyond max_length=%s or max_completion_length=%s and are not trained.",
            name, lost, limits["limit"], limits["completion_limit"],
        )  # fmt: skip
    if reasons:
        logger.warning("%s dataset: dropped %d of %d rows: %s.", name, reasons.total(), len(mapped), listed(reasons))


def _is_judged(positions: list[int]) -> bool:
    return bool(positions)


def _check_step_row(prompt: Any, steps: Any, labels: Any, soft: bool) -> None:
    """Refuse a row that is not one text, a list of texts, and one judgement each."""
    for name, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list):
            raise DataError(f"column {name!r} must be a list, one entry a step, and it is {str(value)[:60]!r}.")
    for name, texts in (("prompt", [prompt]), ("completions", steps)):
        odd = next((text for text in texts if not isinstance(text, str)), "")
        if odd != "":
            hint = " Render the messages first." if isinstance(odd, list | dict) else ""
            raise DataError(
                f"column {name!r}: steps are judged in plain text only, and it holds {type(odd).__name__}.{hint}"
            )
    if len(steps) != len(labels):
        raise DataError(f"{len(steps)} completions and {len(labels)} labels; there must be one label a step.")
    for label in labels:
        if not isinstance(label, int | float) or not (label in (0, 1) or (soft and 0 <= label <= 1)):
            hint = "between 0 and 1" if soft else "True or False (set soft_labels=True to train on shares)"
            raise DataError(f"column 'labels': {label!r} must be {hint}.")


def _step_batch(
    batch: dict[str, list], indices: list[int], tokenizer: Any, *, step_separator: str, soft: bool, **cut: Any
) -> dict[str, list]:
    rows = list(zip(*(batch[name] for name in RAW), strict=True))
    texts, owners = [step_separator], [-1]
    for index, (prompt, steps, labels) in zip(indices, rows, strict=True):
        try:
            _check_step_row(prompt, steps, labels, soft)
        except DataError as error:
            raise DataError(f"row {index}: {error}") from None
        texts += [prompt, *steps]
        owners += [index] * (1 + len(steps))
    found = encode(tokenizer, texts, special=False, where=lambda at: f"row {owners[at]}")
    separator, at = _checked(found[0], step_separator), 1
    out: dict[str, list] = {name: [] for name in (*PREPARED, "lost", "_reason")}
    for _, steps, labels in rows:
        ids = _joined(found[at], found[at + 1 : at + 1 + len(steps)], separator, tokenizer)
        at += 1 + len(steps)
        for name, value in _step_row(*ids, labels, **cut).items():
            out[name].append(value)
    return out


def _step_row(
    prompt: list[int],
    completion: list[int],
    ends: list[int],
    labels: list[float],
    *,
    last: bool,
    limit: int | None,
    completion_limit: int | None,
) -> dict[str, Any]:
    room = len(completion) if completion_limit is None else completion_limit
    room = min(room, len(completion) if limit is None else max(0, limit - len(prompt)))
    judged = [(end, float(label)) for end, label in zip(ends, labels, strict=True)]
    judged = judged[-1:] if last else judged
    inside = [(end, label) for end, label in judged if end < room]
    reason = "" if inside else "whose judged steps all lie beyond the limit" if judged else "without a step"
    return {
        "prompt_ids": prompt,
        "completion_ids": completion[:room],
        "positions": [end for end, _ in inside],
        "targets": [label for _, label in inside],
        "lost": len(judged) - len(inside),
        "_reason": reason,
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
