"""From one dataset type to another: what a method needs, made of what there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import datasets

from posttrain.data.formats import describe_dataset, is_messages, maybe_convert_to_chatml
from posttrain.data.pairs import maybe_extract_prompt, unpair_preference_dataset
from posttrain.errors import DataError, check_choice

__all__ = ["CONVERSIONS", "convert_dataset"]

Row = Mapping[str, Any]
JUDGED = ("chosen", "rejected", "completion", "completions", "label", "labels")  # Columns that a conversion uses up.


def convert_dataset(dataset: Any, to: str, *, separator: str = "\n", num_proc: int | None = None) -> Any:
    """Turn a dataset into one of another type; columns that are no part of the old type stay.

    | from | to |
    |---|---|
    | prompt-completion | language-modeling, prompt-only |
    | preference, implicit-preference | language-modeling, prompt-completion, prompt-only, unpaired-preference, each other |
    | unpaired-preference | language-modeling, prompt-completion (rows whose label is true), prompt-only |
    | stepwise-supervision | language-modeling, prompt-completion (rows of good steps alone), unpaired-preference, prompt-only |

    To unpaired-preference is only right where every chosen answer is good and every rejected one bad by itself.

    Args:
        dataset: ``Dataset``, ``DatasetDict`` or an iterable twin.
        to: Type, as `describe_dataset` names it.
        separator: Stands between the steps of stepwise supervision once they are one answer.
        num_proc: Processes.

    Raises:
        ConfigError: ``to`` is no type that anything converts to.
        DataError: The dataset has no answer of that kind, or no row is left (none is good).

    >>> pairs = datasets.Dataset.from_dict({"prompt": ["2+2="], "chosen": [" 4"], "rejected": [" 5"]})
    >>> convert_dataset(pairs, "prompt-completion")[0]
    {'prompt': '2+2=', 'completion': ' 4'}
    """
    check_choice("to", to, sorted({target for _, target in CONVERSIONS}))
    if isinstance(dataset, dict):
        parts = {
            name: convert_dataset(part, to, separator=separator, num_proc=num_proc) for name, part in dataset.items()
        }
        return type(dataset)(parts)
    described = describe_dataset(dataset)
    kind = described["type"]
    if kind == to:
        return dataset
    if (kind, to) not in CONVERSIONS:
        known = sorted(target for source, target in CONVERSIONS if source == kind) or "nothing"
        raise DataError(
            f"a {kind} dataset (columns {described['columns']}) holds nothing to make a {to} one of; it converts to {known}."
        )
    extra: dict[str, Any] = {} if isinstance(dataset, datasets.IterableDataset) else {"num_proc": num_proc}
    if GOOD.get(kind) and to not in ("prompt-only", "unpaired-preference"):
        dataset = dataset.filter(GOOD[kind], **extra)
        if next(iter(dataset), None) is None:
            raise DataError(
                f"no row is left: none of the {kind} rows is good, and a {to} dataset holds good ones alone."
            )
    if to == "unpaired-preference" and "chosen" in described["columns"]:
        return unpair_preference_dataset(dataset.map(_explicit, **extra) if "implicit" in kind else dataset, **extra)
    convert = partial(_convert, function=CONVERSIONS[kind, to], separator=separator)
    used = [name for name in described["columns"] if name in (*JUDGED, "prompt")]
    return dataset.map(convert, remove_columns=used, **extra)


def _convert(row: Row, function: Callable[..., dict[str, Any]], separator: str) -> dict[str, Any]:
    row = maybe_convert_to_chatml(row)
    if "completions" in row:
        row = {**row, "completion": separator.join(row["completions"])}
    return function(row)


def _explicit(row: Row) -> dict[str, Any]:
    parted = maybe_extract_prompt(row)
    return {name: parted[name] for name in ("prompt", "chosen", "rejected")}


def _implicit(row: Row) -> dict[str, Any]:
    row = maybe_extract_prompt(row)
    return {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}


def _whole(text: Any) -> dict[str, Any]:
    return {"messages" if is_messages(text) else "text": text}


def _text(row: Row) -> dict[str, Any]:
    return _whole(row["prompt"] + row["completion"])


def _chosen_text(row: Row) -> dict[str, Any]:
    return _whole(_implicit(row)["chosen"] if "prompt" in row else row["chosen"])


def _chosen(row: Row) -> dict[str, Any]:
    row = _explicit(row)
    return {"prompt": row["prompt"], "completion": row["chosen"]}


def _answer(row: Row) -> dict[str, Any]:
    return {"prompt": row["prompt"], "completion": row["completion"]}


def _judged(row: Row) -> dict[str, Any]:
    return {**_answer(row), "label": all(row["labels"])}


def _prompt(row: Row) -> dict[str, Any]:
    return {"prompt": row["prompt"]}


def _shared_prompt(row: Row) -> dict[str, Any]:
    return {"prompt": _explicit(row)["prompt"]}


def _is_good(row: Row) -> bool:
    return bool(row["label"])


def _steps_are_good(row: Row) -> bool:
    return all(row["labels"])


# Type -> whether a row of it is one to imitate.
GOOD: dict[str, Callable[[Row], bool]] = {
    "unpaired-preference": _is_good,
    "stepwise-supervision": _steps_are_good,
}

# (From, to) -> what makes the new columns of a row.
CONVERSIONS: dict[tuple[str, str], Callable[[Row], dict[str, Any]]] = {
    ("prompt-completion", "language-modeling"): _text,
    ("prompt-completion", "prompt-only"): _prompt,
    ("preference", "language-modeling"): _chosen_text,
    ("preference", "prompt-completion"): _chosen,
    ("preference", "prompt-only"): _shared_prompt,
    ("preference", "implicit-preference"): _implicit,
    ("preference", "unpaired-preference"): _explicit,
    ("implicit-preference", "language-modeling"): _chosen_text,
    ("implicit-preference", "prompt-completion"): _chosen,
    ("implicit-preference", "prompt-only"): _shared_prompt,
    ("implicit-preference", "preference"): _explicit,
    ("implicit-preference", "unpaired-preference"): _explicit,
    ("unpaired-preference", "language-modeling"): _text,
    ("unpaired-preference", "prompt-completion"): _answer,
    ("unpaired-preference", "prompt-only"): _prompt,
    ("stepwise-supervision", "language-modeling"): _text,
    ("stepwise-supervision", "prompt-completion"): _answer,
    ("stepwise-supervision", "prompt-only"): _prompt,
    ("stepwise-supervision", "unpaired-preference"): _judged,
}
