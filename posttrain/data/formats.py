"""Dataset formats: column names and row types, and `tokenized`, which tokenizes a dataset and reports the dropped rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from posttrain.errors import ArgumentTypeError, DataError
from posttrain.types import Row
from posttrain.values import NESTED_COLUMNS, is_messages, without_none

if TYPE_CHECKING:
    import datasets

    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)

# The names are in a tuple and not in a set, because their order matters.
MESSAGE_COLUMNS = (
    "prompt",
    "chosen",
    "rejected",
    "completion",
    "messages",
)
# Number of rows that are read to determine the format of a dataset. One row is not enough, because the rows of a dataset can
# have different formats.
LOOK = 64
PICTURE_COLUMNS = ("image", "images")
# Names of columns with token ids. If a dataset has these columns, their ids are used instead of the text columns.
TOKENIZED = (
    "input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "reference_ids", "completion_ids", "KL_completion_ids",
)  # fmt: skip
PROMPT_COLUMNS = ("prompt", *PICTURE_COLUMNS)  # Names of columns that contain text or messages for the model.
PICTURE_BLOCKS = ("image", "image_url", "image_pil")  # Types of content blocks that contain an image.
# Number of rows of a stream that are checked for images. For other datasets, `LOOK` evenly spaced rows are checked.
STREAMED = 8
# Map from ShareGPT's speaker names to the roles of chat templates.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}

# Dataset types with their required columns, most specific type first. The first type whose columns all exist is used.
TYPES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tokenized-reward", ("chosen_ids", "rejected_ids")),
    ("tokenized", ("input_ids",)),
    ("triple-preference", ("prompt", "chosen", "rejected", "reference")),
    ("preference", ("prompt", "chosen", "rejected")),
    ("implicit-preference", ("chosen", "rejected")),
    ("stepwise-supervision", ("prompt", "completions", "labels")),
    ("unpaired-preference", ("prompt", "completion", "label")),
    ("prompt-completion", ("prompt", "completion")),
    ("language-modeling", ("messages",)),
    ("language-modeling", ("conversations",)),
    ("self-distillation", ("prompt", "privileged_context")),
    ("prompt-only", ("prompt",)),
    ("language-modeling", ("text",)),
)


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Return whether a row is conversational, i.e. whether its text columns contain lists of messages.

    Raises:
        DataError: Some columns are conversational and others are text.

    >>> is_conversational({"prompt": [{"role": "user", "content": "2+2?"}]})
    True
    >>> is_conversational({"prompt": "2+2="})
    False
    """
    kinds = {name: is_messages(example[name]) for name in MESSAGE_COLUMNS if example.get(name)}
    if len(set(kinds.values())) > 1:
        raise DataError(
            f"columns {[name for name, chat in kinds.items() if chat]} contain messages, but columns "
            f"{[name for name, chat in kinds.items() if not chat]} contain text. Fix: use the same form in all columns of a row."
        )
    return any(kinds.values())


def is_conversational_from_value(example: Mapping[str, Any]) -> bool:
    """Return whether a row has a ``conversations`` column with dicts that have the keys ``from`` and ``value``.

    >>> is_conversational_from_value({"conversations": [{"from": "human", "value": "2+2?"}]})
    True
    """
    turns = example.get("conversations")
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and {"from", "value"} <= set(turns[0])


def maybe_convert_to_chatml(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row from the ``from``/``value`` format to messages with roles, and rename ``conversations`` to ``messages``.

    Returns:
        A new row. The input is not changed. A row in another format is returned as a copy.

    Raises:
        DataError: The row has both ``conversations`` and ``messages``.

    >>> maybe_convert_to_chatml({"conversations": [{"from": "human", "value": "2+2?"}]})
    {'messages': [{'role': 'user', 'content': '2+2?'}]}
    """
    if "conversations" in example and "messages" in example:
        raise DataError(
            "the row has both 'conversations' and 'messages', but only one of them can be trained. Fix: remove one column."
        )
    converted: dict[str, Any] = {}
    for name, value in example.items():
        if name in (*MESSAGE_COLUMNS, "conversations") and isinstance(value, list):
            value = [_turn(turn) if isinstance(turn, Mapping) else turn for turn in value]
        converted["messages" if name == "conversations" else name] = value
    return converted


_logged: set[tuple[Any, ...]] = set()


def warn_once(log: logging.Logger, message: str, *values: Any) -> None:
    """Log a warning once per process for each combination of message and values."""
    if (message, *values) not in _logged:
        _logged.add((message, *values))
        log.warning(message, *values)


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {{"from": "role", "value": "content"}.get(key, key): value for key, value in turn.items()}
    role = renamed.get("role")
    if "from" in turn and role in ROLES:
        warn_once(logger, "messages from %r are read as role %r.", role, ROLES[role])
        renamed["role"] = ROLES[role]
    return renamed


def remove_none_values(value: object) -> Any:
    """Remove keys with the value None from mappings, at any depth. List items that are None are kept.

    Raises:
        ArgumentTypeError: The value is neither a list nor a mapping.

    >>> remove_none_values([{"a": None, "b": [None, {"c": None}]}, None])
    [{'b': [None, {}]}, None]
    """
    if not isinstance(value, list | Mapping):
        raise ArgumentTypeError(f"remove_none_values expects a list or a mapping, but got {type(value).__name__}.")
    return without_none(value)


def has_nested_none(row: Mapping[str, Any]) -> bool:
    """Return whether tool schemas, tool calls or content blocks of a row contain ``None``, which a chat template could print as
    text.

    The fields of a message itself are ignored, because ``content: None`` is valid for a message with a tool call.
    """
    if isinstance(row.get("tools"), list) and _holds_none(row["tools"]):
        return True
    for name in NESTED_COLUMNS:
        messages = row.get(name)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) or isinstance(message, Mapping):  # noqa: SIM101  The first check is much faster.
                for value in message.values():
                    if isinstance(value, list) and _holds_none(value):
                        return True
    return False


def _holds_none(value: object) -> bool:
    if type(value) is str:
        return False
    if isinstance(value, Mapping):
        return any(item is None or _holds_none(item) for item in value.values())
    return isinstance(value, list) and any(_holds_none(item) for item in value)


AT_ONCE = 64  # Number of rows that are read at once. The number is small, because rows with images need much memory.


def read_columns(
    dataset: AnyDataset, columns: Sequence[str], rows: slice | Sequence[int] = slice(None), kind: str | None = None
) -> Any:
    """Read columns of some rows of a ``Dataset``. The output format that is set on the dataset is ignored. Return a dict of
    lists, or an Arrow table for ``kind="arrow"``.

    The result equals ``with_format(kind, columns)[rows]``, but the dataset is not copied and no fingerprint is computed.
    """
    how = {"format_type": kind, "format_columns": list(columns), "output_all_columns": False, "format_kwargs": {}}
    return dataset._getitem(rows, **how)


def rows_at(dataset: AnyDataset, rows: Sequence[int], columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows whose numbers are in ``rows``. All rows of a ``Dataset`` are read with one call. If ``columns`` is not
    None, only these columns are read.
    """
    import datasets

    if columns is None and not (isinstance(dataset, datasets.Dataset) and dataset.format["type"] is None):
        return [dataset[row] for row in rows]
    read = dataset[rows] if columns is None else read_columns(dataset, columns, rows)
    return [dict(zip(read, values, strict=True)) for values in zip(*read.values(), strict=True)]


def first_rows(dataset: AnyDataset, count: int, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the first ``count`` rows, or all rows if the dataset has fewer. If ``columns`` is not None, only these columns
    are read.
    """
    import datasets

    if not isinstance(dataset, datasets.Dataset):
        yield from islice(dataset, count)
        return
    total = min(count, len(dataset))
    for start in range(0, total, AT_ONCE):
        yield from rows_at(dataset, range(start, min(start + AT_ONCE, total)), columns)


def get_dataset_column_names(dataset: AnyDataset) -> list[str]:
    """Return the column names of a dataset. If a stream has no column names, read them from its first row."""
    return list(dataset.column_names or next(iter(dataset), {}))


def known_columns(dataset: object) -> list[str]:
    """Return the column names of a dataset without reading a row. Return an empty list for other objects."""
    return list(getattr(dataset, "column_names", None) or ())


class DatasetDescription(TypedDict):
    """Result of `describe_dataset`. It contains the dataset type, the format, the columns, and whether the dataset has
    images.
    """

    type: str
    format: str
    columns: list[str]
    vision: bool


def describe_dataset(dataset: AnyDataset) -> DatasetDescription:
    """Determine the type of a dataset from its columns and up to 64 of its rows.

    Raises:
        DataError: The dataset is empty, its columns do not match any type, or a row has a different format than row 0. In the
            last case, the error contains the number of the row.

    >>> import datasets
    >>> rows = datasets.Dataset.from_dict({"prompt": ["2+2="], "completion": [" 4"]})
    >>> describe_dataset(rows)["type"], describe_dataset(rows)["format"]
    ('prompt-completion', 'standard')
    """
    head = list(first_rows(dataset, LOOK))
    if not head:
        raise DataError("the dataset is empty. Fix: pass a dataset with at least one row.")
    columns = get_dataset_column_names(dataset)
    kind = next((name for name, needed in TYPES if set(needed) <= set(columns)), None)
    if kind is None:
        raise DataError(
            f"columns {sorted(columns)} do not match a dataset type. Language modeling needs 'text' or 'messages'. Other types "
            "need 'prompt', alone or with 'completion', or with 'chosen' and 'rejected'. Fix: rename columns with rename_column."
        )
    chat = _one_form(head)
    vision = "image" in columns or "images" in columns
    return {"type": kind, "format": "conversational" if chat else "standard", "columns": columns, "vision": vision}


def _one_form(head: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the rows are conversational. Raise an error if only some rows are conversational."""
    first: bool | None = None
    for index, row in enumerate(head):
        try:
            chat = is_conversational_from_value(row) or is_conversational(row)
        except DataError as error:
            # The answers may be conversations that contain the text prompt. `extract_prompt` handles such rows later.
            if isinstance(row.get("prompt"), str):
                chat = True
            else:
                raise DataError(f"row {index}: {error}") from error
        nothing = {name: value in (None, [], {}) for name, value in row.items() if not isinstance(value, str)}
        empty = sorted(name for name in (*MESSAGE_COLUMNS, "conversations") if nothing.get(name))
        if empty and not chat:
            raise DataError(
                f"row {index}, column {empty[0]!r}: it is {row[empty[0]]!r}, but every row needs at least one message or some "
                f"text. Fix: drop such rows with dataset.filter(lambda row: row[{empty[0]!r}])."
            )
        if first is None:
            first = chat
        elif chat != first:
            words = {True: "conversational", False: "plain text"}
            raise DataError(
                f"row {index} is {words[chat]}, but row 0 is {words[first]}. Fix: use one form for all rows."
            )
    return bool(first)


@contextmanager
def naming(where: str, hint: str = "") -> Iterator[None]:
    """Complete the message of a `DataError` that is raised inside the context. ``where`` is added at the beginning, unless
    the message already begins with it, and ``hint`` is added at the end.
    """
    try:
        yield
    except DataError as error:
        prefix = "" if str(error).startswith(f"{where} ") else f"{where}: "
        raise DataError(f"{prefix}{error}{hint}") from error


def given_rows(batch: Mapping[str, list], indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the content of each row of a batch that is stored as columns. Columns whose value is None are
    omitted from a row.
    """
    for position, index in enumerate(indices):
        columns = {name: column[position] for name, column in batch.items() if name != ROW}
        yield index, {name: value for name, value in columns.items() if value is not None}


ROW = "_row"  # Name of the column with the original row numbers. Messages about rows use these numbers.


# Number of rows per batch in the search for the first row of a stream with tokens in the loss.
FIRST_BATCH = 32
# Maximum number of rows that are read in the search for a row of a stream with tokens in the loss.
PEEKED = 1000


def first_row(dataset: AnyDataset, name: str, *, images: bool = False) -> dict[str, Any]:
    """Check that a dataset can be tokenized, and return its first row.

    Args:
        dataset: ``Dataset`` or ``IterableDataset``.
        name: Name of the dataset in messages.
        images: Whether image columns are allowed, e.g. because a formatting function converts rows to text.

    Raises:
        ArgumentTypeError: The object is not a dataset.
        DataError: The dataset is empty, has a transform (``with_transform``), or contains images although ``images`` is False.
    """
    import datasets

    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        hint = " Fix: convert the list with datasets.Dataset.from_list(rows)." if isinstance(dataset, list) else ""
        raise ArgumentTypeError(f"the {name} dataset must be a datasets.Dataset, not {type(dataset).__name__}.{hint}")
    format_of = getattr(dataset, "format", None)
    if isinstance(format_of, dict) and format_of.get("type") == "custom":
        raise DataError(
            f"the {name} dataset has a transform attached (with_transform), but rows are tokenized only once. Fix: apply the "
            "transform with map, or pass rows with token ids (SFT: input_ids and labels with "
            'dataset_kwargs={"skip_prepare_dataset": True}).'
        )
    first = next(iter(dataset), None)
    if first is None:
        raise DataError(f"the {name} dataset is empty. Fix: pass a dataset with at least one row.")
    if not images:
        refuse_images(dataset, name)
    return first


def undecoded(dataset: AnyDataset) -> Any:
    """Return a view of a dataset that returns images as paths or encoded bytes instead of decoding them. ``dataset`` may be a
    dict of datasets, or None.
    """
    import datasets

    if isinstance(dataset, dict):
        return {name: undecoded(subset) for name, subset in dataset.items()}
    plain = datasets.Image(decode=False)
    kinds: dict[str, Any] = {}
    # Read `info.features`, because `dataset.features` copies the features on every access.
    info = dataset.info if isinstance(dataset, datasets.Dataset | datasets.IterableDataset) else datasets.DatasetInfo()
    for name, kind in (info.features or {}).items():
        inner = getattr(kind, "feature", None)
        if isinstance(kind, datasets.Image) and kind.decode:
            kinds[name] = plain
        elif isinstance(inner, datasets.Image) and inner.decode:
            kinds[name] = replace(kind, feature=plain)  # Keep the length and type of the list.
    if not kinds or not isinstance(dataset, datasets.Dataset):
        for name, kind in kinds.items():
            dataset = dataset.cast_column(name, kind)
        return dataset
    # Change only the features. `cast_column` would rewrite rows with lists, and write a large dataset to a file.
    info = dataset.info.copy()
    info.features = datasets.Features(dataset.features | kinds)
    fingerprint = datasets.fingerprint.Hasher.hash((dataset._fingerprint, "undecoded"))
    return datasets.Dataset(dataset.data, info, dataset.split, dataset._indices, fingerprint).with_format(
        **dataset.format
    )


def united(first: Any, *others: Any) -> Any:
    """Return a column type that is valid for values of all given types, or None if no such type exists. In the returned type,
    messages have the keys of all given types.

    The returned type is passed to ``map`` as the type of a new column. By default, ``map`` infers the type from the first
    1,000 rows. Keys that occur only in messages of later rows would then be missing.
    """
    for other in others:
        if isinstance(first, dict) and isinstance(other, dict):
            first = {key: united(*(kind[key] for kind in (first, other) if key in kind)) for key in {**first, **other}}
            if None in first.values():
                return None
        elif type(first) is type(other) and hasattr(first, "feature"):
            inner = united(first.feature, other.feature)
            if inner is None:
                return None
            first = replace(first, feature=inner)
        elif getattr(first, "dtype", "") == "null":
            first = other
        elif first != other and getattr(other, "dtype", "") != "null":
            return None
    return first


def features_with(dataset: datasets.Dataset, drop: Sequence[str] = (), **columns: Any) -> datasets.Features | None:
    """Return the dataset's features with the new ``columns`` and without the columns in ``drop``. Return None if a new column
    has no type.
    """
    from datasets import Features

    remaining = {name: kind for name, kind in dataset.features.items() if name not in drop}
    return None if None in columns.values() else Features(remaining | columns)


def pictures_of(example: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns ``image`` and ``images`` of a row. List items that are None are skipped.

    Raises:
        DataError: Both columns contain images.
    """
    image, images = example.get("image"), example.get("images")
    if image is not None and images is not None:
        raise DataError("the row has both 'image' and 'images'. Fix: remove one of these columns.")
    return [image] if image is not None else [value for value in images or () if value is not None]


def is_image(value: object) -> bool:
    """Return whether a value is a PIL image. The function works even if PIL is not installed."""
    return hasattr(value, "getexif")


def has_pictures(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether any row contains an image, either in an image column or in a message."""
    for row in rows:
        conversations = [row[name] for name in MESSAGE_COLUMNS if isinstance(row.get(name), list)]
        if pictures_of(row) or any(map(picture_blocks, conversations)):
            return True
    return False


def picture_blocks(messages: Any) -> list[dict[str, Any]]:
    """Return the image blocks of a conversation, or an empty list for other values."""
    if not isinstance(messages, list):
        return []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return [block for block in blocks if isinstance(block, dict) and block.get("type") in PICTURE_BLOCKS]


def shows_pictures(dataset: AnyDataset) -> bool:
    """Return whether a dataset contains images in image columns or in messages. Only the first rows of a stream are read."""
    import datasets

    if isinstance(dataset, Mapping):
        return any(shows_pictures(subset) for subset in dataset.values())
    if {*PICTURE_COLUMNS} & {*known_columns(dataset)}:
        return True
    if isinstance(dataset, datasets.IterableDataset):
        return has_pictures(islice(undecoded(dataset.with_format(None)), STREAMED))
    if not isinstance(dataset, datasets.Dataset):
        return False
    kinds = {name: str(kind) for name, kind in dataset.info.features.items() if name in MESSAGE_COLUMNS}
    # Content blocks have the key ``type``. If the type of a column does not contain this key, its messages contain no image.
    names = [name for name, kind in kinds.items() if "'type'" in kind or "Json" in kind]
    if not names:
        return False
    # If content blocks have a key for images, some row contains an image. All rows are then checked.
    keyed = any(kind in kinds[name] for name in names for kind in PICTURE_BLOCKS)
    step = 1 if keyed else max(1, len(dataset) // LOOK)
    return has_pictures(undecoded(dataset.with_format(None).select_columns(names)).select(range(0, len(dataset), step)))


def refuse_images(dataset: AnyDataset, name: str) -> None:
    """Raise an error if a dataset contains images, for trainers that read only text.

    Raises:
        DataError: The dataset contains images. The error names the columns with images and explains how to remove them.
    """
    pictures = [column for column in get_dataset_column_names(dataset) if column in (*PICTURE_COLUMNS, "pixel_values")]
    if pictures or shows_pictures(dataset):
        raise DataError(
            f"the {name} rows have images ({f'columns {pictures}' if pictures else 'inside their messages'}), but this trainer "
            "reads only text. The model would be trained to answer questions about images without receiving the images. Fix: "
            "if the text alone is sufficient, remove the "
            f"images{f' with dataset.remove_columns({pictures})' if pictures else ''}."
        )


def check_ids(ids: Any, column: str, vocabulary: int) -> list[int]:
    """Check the token ids of a dataset column, and return them as a list.

    Raises:
        DataError: The value is not a list of integers, or an id is not in the vocabulary.
    """
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not set(map(type, ids)) <= {int}:
        odd = next((i for i in ids if type(i) is not int), ids) if isinstance(ids, list) else ids
        raise DataError(f"column {column!r} must be a list of token ids (integers), but it contains {str(odd)[:40]!r}.")
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        odd = min(ids) if min(ids) < 0 else max(ids)
        raise DataError(
            f"column {column!r} contains the id {odd}, but the tokenizer's ids are 0 to {vocabulary - 1}. Fix: tokenize the "
            "rows with this model's tokenizer."
        )
    return list(ids)


def _check_stream(reasons: Iterable[str], name: str, hint: str) -> None:
    """Raise an error if all of the first `PEEKED` rows of a stream are dropped. Without this check, training could end
    without any step.

    Args:
        reasons: Reason why each row is dropped, or "" for rows that remain. Reading stops at the first "".
        name: Name of the dataset in messages.
        hint: Advice for the user at the end of the error.

    Raises:
        DataError: All of the first `PEEKED` rows are dropped.
    """
    counts: Counter[str] = Counter()
    for reason in islice(reasons, PEEKED):
        if not reason:
            return
        counts[reason] += 1
    raise DataError(f"the first {counts.total()} rows of the {name} dataset are all dropped: {listed(counts)}. {hint}")


def listed(reasons: Mapping[str, int]) -> str:
    """Format reasons with their counts as a text. The most frequent reason is first.

    >>> listed({"empty": 1, "too long": 2})
    '2 too long, 1 empty'
    """
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))


@dataclass
class PreparationReport:
    """Counts of rows and tokens from the preparation (tokenization) of a dataset.

    Attributes:
        name: Name of the dataset.
        rows_in, rows_out: Number of rows before and after preparation. Packing comes after preparation.
        dropped: Number of dropped rows by reason.
        truncated: Number of rows truncated to ``max_length``.
        cut_tokens: Number of tokens in the loss that truncation removed.
        diverged: Number of rows in which the tokens of the prompt differ from the tokens of the prompt alone, because the
            tokenizer or the template treats it differently when the completion follows.
        inner: Number of rows in which an answer contains turns of roles other than assistant, such as tool results.
        no_end: Number of rows in which no token that ends a sequence contributes to the loss.
        double_bos: Number of texts that already began with the bos token.
        nested_none: Number of rows with a ``None`` in tool schemas, tool calls or content blocks.
        untrained_pieces: Number of segments of long rows that were dropped because they have no token in the loss. Only the
            strategy ``bfd_split`` splits rows into segments.
        trained_tokens, tokens: Number of tokens in the loss, and number of all tokens, in the remaining rows.
    """

    name: str
    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    cut_tokens: int = 0
    diverged: int = 0
    inner: int = 0
    no_end: int = 0
    double_bos: int = 0
    nested_none: int = 0
    untrained_pieces: int = 0
    trained_tokens: int = 0
    tokens: int = 0


# Counters that include only the remaining rows. All other counters include dropped rows too.
OF_KEPT = (
    "_no_end",
    "_trained_tokens",
    "_tokens",
)


def tokenized(
    dataset: AnyDataset,
    name: str,
    function: Callable[..., dict[str, list]],
    arguments: dict[str, Any],
    *,
    drop: list[str],
    counters: Sequence[str] = (),
    notes: Sequence[str] = (),
    num_proc: int | None = None,
    hint: str,
    features: Any = None,
) -> tuple[Any, dict[str, Any], Any, PreparationReport]:
    """Tokenize a dataset in batches, and drop the rows for which ``function`` returns a reason.

    Args:
        dataset: ``Dataset`` or ``IterableDataset``.
        name: Name of the dataset in messages.
        function: Function ``f(batch, indices, **arguments)`` that tokenizes a batch. The function returns columns of ids and
            the columns named in ``counters`` and ``notes``. The function also returns a column ``_reason`` with the reason
            for dropping each row, or ``""``.
        arguments: Arguments of the function. The arguments are part of the cache fingerprint.
        drop: Columns of the dataset to remove.
        counters: Names of integer columns, which begin with an underscore. If the report has a field of the same name without
            underscore, the field is set to the sum of the column.
        notes: Names of additional columns for log messages, for example a column with an excerpt of the text.
        num_proc: Number of processes.
        hint: Advice for the user at the end of the error that no row remains.
        features: Types of all columns of the tokenized ``Dataset``. None: the types are inferred from the first rows.

    Returns:
        A tuple of four items: all rows with reasons and notes, a dict from the name of a counter to its values ``(rows,)``,
        the remaining rows, and the report. Rows of a stream are not counted.

    Raises:
        DataError: No row remains. For a stream, only the first rows are checked.
    """
    import datasets
    import pyarrow.compute as pc

    streaming = isinstance(dataset, datasets.IterableDataset)
    extra: dict[str, Any] = {} if streaming else {"num_proc": num_proc}
    named = {} if streaming else {"new_fingerprint": _fingerprint(dataset, function.__qualname__, arguments, drop)}
    arguments, function = arguments | {"function": function, "counters": counters, "stream": streaming}, _columns
    internal = ["_reason", *notes, *(["_counts"] if counters else [])]
    described = {} if streaming else {"desc": f"Tokenizing {name} dataset", "features": features}
    options = {"batched": True, "with_indices": True, "remove_columns": drop, "fn_kwargs": arguments}
    if streaming:
        first = dataset.map(function, **options, batch_size=FIRST_BATCH)
        _check_stream((row["_reason"] for row in first), name, hint)
    mapped = dataset.map(function, **options, **extra, **described, **named)
    remaining, report, counts = mapped, PreparationReport(name), {}
    if streaming:
        remaining = mapped.filter(_is_kept, batched=True, input_columns=["_reason"])
    else:
        table = read_columns(mapped, internal, kind="arrow")
        is_kept = pc.equal(table["_reason"], "")  # (rows,)
        report.rows_in, report.rows_out = len(mapped), pc.sum(is_kept).as_py()
        if report.rows_out < report.rows_in:
            report.dropped = dict(Counter(filter(None, table["_reason"].to_pylist())))
            remaining = mapped.select(pc.indices_nonzero(is_kept).to_pylist())
        if not report.rows_out:
            raise DataError(
                f"all {report.rows_in} rows of the {name} dataset are dropped: {listed(report.dropped)}. {hint}"
            )
        if counters:
            numbers = table["_counts"].combine_chunks().flatten().to_numpy().reshape(-1, len(counters))
            counts, kept_rows = dict(zip(counters, numbers.T, strict=True)), is_kept.to_numpy()
        for counter, column in counts.items():
            if hasattr(report, counter[1:]):
                setattr(report, counter[1:], int((column[kept_rows] if counter in OF_KEPT else column).sum()))
        if report.dropped:
            lost, why = report.rows_in - report.rows_out, listed(report.dropped)
            logger.warning("%s dataset: dropped %d of %d rows (%s).", name, lost, report.rows_in, why)
        named["new_fingerprint"] = f"{mapped._fingerprint}-rows"
    return mapped, counts, remaining.remove_columns(internal, **named), report


def _columns(
    batch: dict[str, list],
    indices: list[int],
    function: Callable,
    counters: Sequence[str],
    stream: bool,
    **arguments: Any,
) -> dict[str, list]:
    """Call the tokenizing function. Store all of its counters in one column, because every Arrow column has a fixed cost."""
    columns = function(batch, indices, **arguments)
    if counters:
        columns["_counts"] = list(zip(*(columns.pop(name) for name in counters), strict=True))
    for name, values in columns.items() if not stream else ():
        # Convert lists of ids to arrays, because datasets would check the type of every number in a list.
        if type(next((value[0] for value in values if isinstance(value, list) and value), None)) is int:
            columns[name] = [np.asarray(value, np.int64) for value in values]
    return columns


def _fingerprint(dataset: AnyDataset, *about: object) -> str | None:
    """Compute the cache fingerprint of a ``map`` call from all inputs that affect the call's result. Without this
    fingerprint, ``map`` would hash each argument separately.
    """
    from datasets.fingerprint import Hasher

    from posttrain import __version__

    try:
        return Hasher.hash((dataset._fingerprint, __version__, *about))
    # If the arguments cannot be pickled, `map` warns and uses a random fingerprint.
    except Exception:
        return None


def _is_kept(reasons: list[str]) -> list[bool]:
    return [not reason for reason in reasons]


def one_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a plain text with exactly one eos token at the end. Whitespace after an eos token is removed."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError("the tokenizer has no eos token, so plain text cannot be terminated. Fix: set eos_token.")
    if ids == [eos]:
        return ids
    length = len(ids)
    # Remove all eos tokens and whitespace at the end. The text may end with an eos token, and the tokenizer may have
    # appended a second eos token.
    while length > 1:
        blank = ids[length - 2] == eos and not tokenizer.decode(ids[length - 1 : length]).strip()
        if ids[length - 1] != eos and not blank:
            break
        length -= 1
    return [*ids[:length], eos]


def shown_prompt(tokenizer: Tokenizer, ids: Sequence[int], placed: Sequence[Any]) -> str:
    """Decode a prompt for display. The placeholder tokens of an image are replaced with a text such as
    ``[image 1: 640×480, 391 tokens, 12ab]``.
    """
    pieces = shown_pieces(tokenizer, ids, [0] * len(ids), Row(list(ids), [], [], pictures=[list(placed)]))
    return "".join(text for text, _ in pieces)


def shown_pieces(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    flags: Sequence[Any],
    row: Row,
    index: int = 0,
    pieces_of: Callable[[list[int], list[Any]], list[tuple[str, bool]]] | None = None,
) -> list[tuple[str, bool]]:
    """Decode a sequence into consecutive texts for display. Return pairs of a text and a bool that is True if the text's
    tokens contribute to the loss. An image is one text.

    Args:
        tokenizer: Tokenizer that decodes the ids.
        ids: Token ids of a prompt and one completion.
        flags: Whether each token contributes to the loss.
        row: Row of the sequence, with its images.
        index: Index of the completion.
        pieces_of: Function that converts the ids and flags between two images to such pairs. None: consecutive tokens with
            equal flags form one text.
    """
    pieces_of = pieces_of or partial(_runs, tokenizer)
    pieces: list[tuple[str, bool]] = []
    at = 0
    for number, (image, start, end) in enumerate(row.picture_spans(index, ids), 1):
        pieces += pieces_of(list(ids[at:start]), list(flags[at:start])) if start > at else []
        pieces.append((image.picture.label(number, image.count), False))
        at = end
    return pieces + (pieces_of(list(ids[at:]), list(flags[at:])) if at < len(ids) or not pieces else [])


def _runs(tokenizer: Tokenizer, ids: list[int], flags: list[Any]) -> list[tuple[str, bool]]:
    runs = groupby(zip(ids, map(bool, flags), strict=True), key=itemgetter(1))
    return [(tokenizer.decode([token for token, _ in group]), learnt) for learnt, group in runs]


def plain_rows(dataset: AnyDataset) -> Any:
    """Return a dataset whose rows contain Python lists and numbers, even if another format was set with ``with_format``.

    ``dataset`` may be a dict of datasets, or None. Columns that the format excludes remain excluded. A transform
    (``with_transform``) is kept, and `first_row` rejects it later.
    """
    import datasets

    if isinstance(dataset, dict):
        return {name: plain_rows(subset) for name, subset in dataset.items()}
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.with_format(None)
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] in (None, "custom"):
        return dataset
    columns, every = dataset.format["columns"], dataset.format["output_all_columns"]
    dataset = dataset.with_format(None)
    return dataset if every or len(columns) == len(dataset.column_names) else dataset.select_columns(columns)
