"""What a raw dataset must be before anything of it is rendered or tokenised; every refusal names the set and the row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import datasets

from posttrain.data.formats import get_dataset_column_names
from posttrain.errors import ArgumentTypeError, DataError

__all__ = ["PEEKED", "ROW", "check_ids", "check_stream", "first_row", "listed"]

ROW = "_row"  # A column of row numbers, kept through preparation so that what is found can be found again.
PEEKED = 1000  # Rows of a stream of which at least one must be trainable.
IMAGES = ("image", "images", "pixel_values")


def first_row(dataset: Any, name: str, *, images: bool = False) -> dict[str, Any]:
    """The first row of a set that can be prepared.

    Args:
        dataset: ``Dataset`` or ``IterableDataset``.
        name: Of the set, for messages.
        images: Whether columns of images are fine, because something makes text of the rows.

    Raises:
        ArgumentTypeError: It is no dataset.
        DataError: It is empty, has a transform attached, or has images, which are not trained on.
    """
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        hint = " Make one of a list of rows with datasets.Dataset.from_list(rows)." if isinstance(dataset, list) else ""
        raise ArgumentTypeError(f"the {name} dataset must be a datasets.Dataset, not {type(dataset).__name__}.{hint}")
    format_of = getattr(dataset, "format", None)
    if isinstance(format_of, dict) and format_of.get("type") == "custom":
        raise DataError(
            f"the {name} dataset has a transform attached (with_transform), which tokenising would freeze. Apply it with "
            "map, or give rows that hold token ids already (SFT: input_ids and labels with "
            'dataset_kwargs={"skip_prepare_dataset": True}).'
        )
    first = next(iter(dataset), None)
    if first is None:
        raise DataError(f"the {name} dataset is empty.")
    if not images:
        refuse_images(dataset, name)
    return first


def refuse_images(dataset: Any, name: str) -> None:
    """Columns of images are a mistake where only text is read.

    Raises:
        DataError: Names the columns, and how to leave them out.
    """
    pictures = [column for column in get_dataset_column_names(dataset) if column in IMAGES]
    if pictures:
        raise DataError(
            f"the {name} rows have images (columns {pictures}), and this trainer reads text alone: it would train on answers to "
            f"pictures that the model never saw. Remove the columns with dataset.remove_columns({pictures}) if the text "
            "stands by itself."
        )


def check_ids(ids: Any, column: str, vocabulary: int) -> list[int]:
    """Token ids that were given, as a list.

    Raises:
        DataError: They are no list of whole numbers, or not of this vocabulary.
    """
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not set(map(type, ids)) <= {int}:
        odd = next((i for i in ids if type(i) is not int), ids) if isinstance(ids, list) else ids
        raise DataError(
            f"column {column!r} must be a list of token ids (whole numbers), and it holds {str(odd)[:40]!r}."
        )
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        odd = min(ids) if min(ids) < 0 else max(ids)
        raise DataError(
            f"column {column!r} holds the id {odd}, and the tokenizer has ids from 0 to {vocabulary - 1}. Tokenise the rows "
            "with this model's tokenizer."
        )
    return list(ids)


def check_stream(reasons: Iterable[str], name: str, hint: str) -> None:
    """Refuse a stream whose first rows are all left out: it would train nothing and report success.

    Args:
        reasons: Of each row, why it is left out; "" for one that is kept. Read up to the first of these.
        name: Of the set, for messages.
        hint: What to look at.

    Raises:
        DataError: None of the first rows is kept.
    """
    counts: Counter[str] = Counter()
    for reason in islice(reasons, PEEKED):
        if not reason:
            return
        counts[reason] += 1
    raise DataError(f"no row of the {name} dataset is left: of its first {counts.total()}, {listed(counts)}. {hint}")


def listed(reasons: Mapping[str, int]) -> str:
    """Reasons with their counts, the most frequent first.

    >>> listed({"empty": 1, "too long": 2})
    '2 too long, 1 empty'
    """
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
