"""Helpers with TRL's names that split and shuffle batches and convert datasets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import Tensor

from posttrain.data.formats import TYPES, describe_dataset, is_messages, maybe_convert_to_chatml
from posttrain.data.preference import extract_and_unpair, maybe_extract_prompt
from posttrain.errors import ArgumentTypeError, ConfigError, DataError, check_choice

if TYPE_CHECKING:
    from posttrain.types import AnyDataset


def _is_sized(value: object) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)


def _rows(where: str, batch: Mapping[str, Any]) -> int | None:
    """Return the number of rows of a batch. All entries with rows must have the same number. Return None if no entry has
    rows.
    """
    size: int | None = None
    owner = ""
    for name, value in batch.items():
        if not _is_sized(value):
            if value is None or isinstance(value, Tensor | int | float | str):
                continue
            raise ArgumentTypeError(
                f"{where}: entry {name!r} is a {type(value).__name__}; entries must be tensors, lists, numbers or None."
            )
        if size is not None and len(value) != size:
            raise DataError(
                f"{where}: entry {name!r} has {len(value)} rows, but {owner!r} has {size}. The numbers must be equal, "
                "or rows of different samples would be combined."
            )
        size, owner = len(value), owner or name
    return size


def split_tensor_dict(tensor_dict: Mapping[str, Any], num_chunks: int) -> list[dict[str, Any]]:
    """Split the rows of a batch into chunks of equal size.

    Args:
        tensor_dict: Batch. Tensors ``(N, ...)`` and lists of length N are split. Scalars, 0-d tensors and None are copied
            to every chunk.
        num_chunks: Number of chunks. It must divide N.

    Raises:
        ConfigError: ``num_chunks`` is below 1.
        DataError: N is 0, ``num_chunks`` does not divide N, or entries have different N.

    >>> split_tensor_dict({"x": torch.arange(4), "y": None}, 2)
    [{'x': tensor([0, 1]), 'y': None}, {'x': tensor([2, 3]), 'y': None}]
    """
    if num_chunks < 1:
        raise ConfigError(f"num_chunks={num_chunks} must be at least 1.")
    size = _rows("split_tensor_dict", tensor_dict)
    if size is None:
        return [dict(tensor_dict) for _ in range(num_chunks)]
    if size == 0 or size % num_chunks:
        raise DataError(
            f"split_tensor_dict: {size} rows cannot be split into {num_chunks} equal, nonempty chunks. Use a number of chunks "
            "that divides the number of rows."
        )
    step = size // num_chunks
    return [
        {name: value[start : start + step] if _is_sized(value) else value for name, value in tensor_dict.items()}
        for start in range(0, size, step)
    ]


def shuffle_sequence_dict(seq_dict: Mapping[str, Any], *, generator: torch.Generator | None = None) -> dict[str, Any]:
    """Shuffle the rows of a batch with the same random permutation for every entry.

    Args:
        seq_dict: Batch with tensors ``(N, ...)`` and lists of length N. Scalars, 0-d tensors and None are not changed.
        generator: Random generator. None: torch's global generator.

    Raises:
        DataError: Entries have different numbers of rows.
    """
    size = _rows("shuffle_sequence_dict", seq_dict)
    if size is None:
        return dict(seq_dict)
    device = "cpu" if generator is None else generator.device
    order = torch.randperm(size, generator=generator, device=device)
    positions = order.tolist()

    def shuffled(value: object) -> Any:
        if isinstance(value, Tensor):
            return value[order.to(value.device)]
        return type(value)(value[i] for i in positions)

    return {name: shuffled(value) if _is_sized(value) else value for name, value in seq_dict.items()}


# Columns of the original type that every conversion removes.
JUDGED = ("chosen", "rejected", "completion", "completions", "label", "labels")
ANSWERS = ("language-modeling", "prompt-completion", "prompt-only")
# Maps each dataset type to the types it can be converted to.
CONVERSIONS = {
    "prompt-completion": ("language-modeling", "prompt-only"),
    "preference": (*ANSWERS, "implicit-preference", "unpaired-preference"),
    "implicit-preference": (*ANSWERS, "preference", "unpaired-preference"),
    "unpaired-preference": ANSWERS,
    "stepwise-supervision": (*ANSWERS, "unpaired-preference"),
}


def convert_dataset(dataset: AnyDataset, to: str, *, separator: str = "\n", num_proc: int | None = None) -> Any:
    """Convert a dataset to another dataset type. Columns that do not belong to the original type are kept.

    | from | to |
    |---|---|
    | prompt-completion | language-modeling, prompt-only |
    | preference, implicit-preference | language-modeling, prompt-completion, prompt-only, unpaired-preference, each other |
    | unpaired-preference | language-modeling, prompt-completion (rows whose label is true), prompt-only |
    | stepwise-supervision | language-modeling, prompt-completion (rows of good steps alone), unpaired-preference, prompt-only |

    Converting pairs to unpaired-preference assumes that every chosen answer is good and every rejected answer is bad.

    Args:
        dataset: ``Dataset``, ``DatasetDict``, or the iterable version of either class.
        to: Target type. The names are the type names that `describe_dataset` returns.
        separator: Text between two steps when the steps of stepwise supervision are joined.
        num_proc: Number of processes.

    Raises:
        ConfigError: ``to`` is not a supported target type.
        DataError: The dataset cannot be converted to type ``to``, or no row remains because no answer is good.

    >>> pairs = datasets.Dataset.from_dict({"prompt": ["2+2="], "chosen": [" 4"], "rejected": [" 5"]})
    >>> convert_dataset(pairs, "prompt-completion")[0]
    {'prompt': '2+2=', 'completion': ' 4'}
    """
    check_choice("to", to, sorted({target for targets in CONVERSIONS.values() for target in targets}))
    if isinstance(dataset, dict):
        parts = {
            name: convert_dataset(part, to, separator=separator, num_proc=num_proc) for name, part in dataset.items()
        }
        return type(dataset)(parts)
    described = describe_dataset(dataset)
    kind = described["type"]
    if kind == to:
        return dataset
    possible = CONVERSIONS.get(kind, ())
    if to not in possible:
        raise DataError(
            f"a {kind} dataset (columns {described['columns']}) cannot be converted to {to}. Possible types are "
            f"{sorted(possible) or 'none'}."
        )
    extra: dict[str, Any] = {} if isinstance(dataset, datasets.IterableDataset) else {"num_proc": num_proc}
    if kind in ("unpaired-preference", "stepwise-supervision") and to not in ("prompt-only", "unpaired-preference"):
        dataset = dataset.filter(_is_good, **extra)
        if next(iter(dataset), None) is None:
            raise DataError(
                f"no row remains: none of the {kind} rows has a good answer, but a {to} dataset contains only good answers."
            )
    if to == "unpaired-preference" and "chosen" in described["columns"]:
        return extract_and_unpair(dataset, num_proc)
    used = [name for name in described["columns"] if name in (*JUDGED, "prompt")]
    return dataset.map(partial(_convert, to=to, separator=separator), remove_columns=used, **extra)


def _is_good(row: Mapping[str, Any]) -> bool:
    """Return whether the label of an answer is true, or the labels of all of its steps."""
    return bool(row["label"]) if "label" in row else all(row["labels"])


def _convert(row: Mapping[str, Any], to: str, separator: str) -> dict[str, Any]:
    """Return the columns that one row has in the target type."""
    row = maybe_convert_to_chatml(row)
    if "completions" in row:
        row |= {"completion": separator.join(row["completions"]), "label": all(row["labels"])}
    if to == "language-modeling" and "prompt" not in row:
        return _whole(row["chosen"])
    row = {**maybe_extract_prompt(row)}
    row.setdefault("completion", row.get("chosen"))
    if to == "language-modeling":
        return _whole(row["prompt"] + row["completion"])
    if to == "implicit-preference":
        return {side: row["prompt"] + row[side] for side in ("chosen", "rejected")}
    return {name: row[name] for name in dict(TYPES)[to]}


def _whole(text: Any) -> dict[str, Any]:
    return {"messages" if is_messages(text) else "text": text}
