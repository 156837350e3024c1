"""Dataset formats: the only place that knows column names; and the one pass that makes ids of rows and says what it left out."""

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

from posttrain.errors import ArgumentTypeError, DataError
from posttrain.types import Row

if TYPE_CHECKING:
    import datasets

    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)

MESSAGE_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")  # In this order: never a set's.
NESTED_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "tools", "chat_template_kwargs")
LOOK = 64  # Rows that decide the format of a dataset; row 0 alone misleads on mixed data.
PICTURE_COLUMNS = ("image", "images")
# Columns of token ids, which are read in place of text.
TOKENIZED = (
    "input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "reference_ids", "completion_ids", "KL_completion_ids",
)  # fmt: skip
PROMPT_COLUMNS = ("prompt", *PICTURE_COLUMNS)  # What a model is asked.
PICTURE_BLOCKS = ("image", "image_url", "image_pil")  # Types of blocks of a message that show a picture.
STREAMED = 8  # Rows of a stream that are read for pictures; of a dataset it is `LOOK`, spread over it.
# ShareGPT's speakers, as chat templates call them.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}

# From the most special to the most general: the first whose columns are all there is the type.
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


def is_messages(value: object) -> bool:
    """Whether a value is a list of messages: dicts with a role."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether a row is conversational: its text columns hold lists of messages.

    Raises:
        DataError: Some of its columns are conversational and others are text.

    >>> is_conversational({"prompt": [{"role": "user", "content": "2+2?"}]})
    True
    >>> is_conversational({"prompt": "2+2="})
    False
    """
    kinds = {name: is_messages(example[name]) for name in MESSAGE_COLUMNS if example.get(name)}
    if len(set(kinds.values())) > 1:
        raise DataError(
            f"columns {[name for name, chat in kinds.items() if chat]} hold messages and columns "
            f"{[name for name, chat in kinds.items() if not chat]} hold text. Give all of a row's columns one form."
        )
    return any(kinds.values())


def is_conversational_from_value(example: Mapping[str, Any]) -> bool:
    """Whether a row has the ``from``/``value`` layout: a ``conversations`` list of such dicts.

    >>> is_conversational_from_value({"conversations": [{"from": "human", "value": "2+2?"}]})
    True
    """
    turns = example.get("conversations")
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and {"from", "value"} <= set(turns[0])


def maybe_convert_to_chatml(example: Mapping[str, Any]) -> dict[str, Any]:
    """Rename ``from``/``value`` to ``role``/``content``, speakers to roles, and ``conversations`` to ``messages``.

    Returns:
        A new row; the given one is not changed, and one without that layout comes back equal.

    Raises:
        DataError: Both ``conversations`` and ``messages`` are there.

    >>> maybe_convert_to_chatml({"conversations": [{"from": "human", "value": "2+2?"}]})
    {'messages': [{'role': 'user', 'content': '2+2?'}]}
    """
    if "conversations" in example and "messages" in example:
        raise DataError("the row has both 'conversations' and 'messages'; remove the one that should not be trained.")
    converted: dict[str, Any] = {}
    for name, value in example.items():
        if name in (*MESSAGE_COLUMNS, "conversations") and isinstance(value, list):
            value = [_turn(turn) if isinstance(turn, Mapping) else turn for turn in value]
        converted["messages" if name == "conversations" else name] = value
    return converted


_told: set[tuple[Any, ...]] = set()


def warn_once(log: logging.Logger, message: str, *values: Any) -> None:
    """Warn of this, with these values, once a process."""
    if (message, *values) not in _told:
        _told.add((message, *values))
        log.warning(message, *values)


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {{"from": "role", "value": "content"}.get(key, key): value for key, value in turn.items()}
    role = renamed.get("role")
    if "from" in turn and role in ROLES:
        warn_once(logger, "messages from %r are taken as role %r.", role, ROLES[role])
        renamed["role"] = ROLES[role]
    return renamed


def remove_none_values(value: object) -> Any:
    """Drop mapping entries that are None, at any depth; None items of lists stay.

    Raises:
        ArgumentTypeError: The value is neither a list nor a mapping.

    >>> remove_none_values([{"a": None, "b": [None, {"c": None}]}, None])
    [{'b': [None, {}]}, None]
    """
    if not isinstance(value, list | Mapping):
        raise ArgumentTypeError(f"remove_none_values takes a list or a mapping, not {type(value).__name__}.")
    return _without_none(value)


def _without_none(value: object) -> Any:
    kind = type(value)  # Most values are text: asking whether each is a Mapping costs more than all the rest.
    if kind is str:
        return value
    if kind is list or isinstance(value, list):
        return [_without_none(item) for item in value]
    if kind is dict or isinstance(value, Mapping):
        return {
            key: item if type(item) is str else _without_none(item) for key, item in value.items() if item is not None
        }
    return value


def strip_none(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the ``None`` that Arrow writes into messages, tools and template arguments when rows differ in their keys."""
    return {
        name: _without_none(value) if name in NESTED_COLUMNS and isinstance(value, list | dict) else value
        for name, value in row.items()
    }


def has_nested_none(row: Mapping[str, Any]) -> bool:
    """Whether a ``None`` lies where a template would print it: in tool schemas, tool calls or content blocks.

    A message's own fields do not count: ``content: None`` beside a tool call is how messages are written.
    """
    if isinstance(row.get("tools"), list) and _holds_none(row["tools"]):
        return True
    for name in NESTED_COLUMNS:
        messages = row.get(name)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) or isinstance(message, Mapping):  # noqa: SIM101  The first is far faster.
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


AT_ONCE = 64  # Rows that are read at once; they may hold images.


def read_columns(
    dataset: AnyDataset, columns: Sequence[str], rows: slice | Sequence[int] = slice(None), kind: str | None = None
) -> Any:
    """Some columns of some rows of a ``Dataset``, whatever format it was given: lists by name, or a table (``"arrow"``).

    As ``with_format(kind, columns)[rows]``, which copies the set and hashes it anew before it reads.
    """
    how = {"format_type": kind, "format_columns": list(columns), "output_all_columns": False, "format_kwargs": {}}
    return dataset._getitem(rows, **how)


def rows_at(dataset: AnyDataset, rows: Sequence[int], columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Rows by their numbers, of a ``Dataset`` in one read; of ``columns`` alone where they are given."""
    import datasets

    if columns is None and not (isinstance(dataset, datasets.Dataset) and dataset.format["type"] is None):
        return [dataset[row] for row in rows]
    read = dataset[rows] if columns is None else read_columns(dataset, columns, rows)
    return [dict(zip(read, values, strict=True)) for values in zip(*read.values(), strict=True)]


def first_rows(dataset: AnyDataset, count: int, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Up to ``count`` rows from the first on, of a ``Dataset`` many at a read and of ``columns`` alone where they are given."""
    import datasets

    if not isinstance(dataset, datasets.Dataset):
        yield from islice(dataset, count)
        return
    total = min(count, len(dataset))
    for start in range(0, total, AT_ONCE):
        yield from rows_at(dataset, range(start, min(start + AT_ONCE, total)), columns)


def get_dataset_column_names(dataset: AnyDataset) -> list[str]:
    """Column names; for a stream that declares none, those of its first row."""
    return list(dataset.column_names or next(iter(dataset), {}))


def known_columns(dataset: object) -> list[str]:
    """Names of columns as far as a dataset tells them without a row being read; none of what is no dataset of ``datasets``."""
    return list(getattr(dataset, "column_names", None) or ())


class DatasetDescription(TypedDict):
    """What `describe_dataset` says: type (as the documentation names them), format, columns, and whether there are images."""

    type: str
    format: str
    columns: list[str]
    vision: bool


def describe_dataset(dataset: AnyDataset) -> DatasetDescription:
    """Decide what kind of rows a dataset holds, from its columns and up to 64 of its rows.

    Raises:
        DataError: The set is empty, no type fits its columns, or a row's form differs from the others', with its number.

    >>> import datasets
    >>> rows = datasets.Dataset.from_dict({"prompt": ["2+2="], "completion": [" 4"]})
    >>> describe_dataset(rows)["type"], describe_dataset(rows)["format"]
    ('prompt-completion', 'standard')
    """
    head = list(first_rows(dataset, LOOK))
    if not head:
        raise DataError("the dataset is empty.")
    columns = get_dataset_column_names(dataset)
    kind = next((name for name, needed in TYPES if set(needed) <= set(columns)), None)
    if kind is None:
        raise DataError(
            f"columns {sorted(columns)} fit no dataset type. Language modelling needs 'text' or 'messages'; others 'prompt' with "
            "'completion', with 'chosen' and 'rejected', or alone. Rename the columns with dataset.rename_column."
        )
    chat = _one_form(head)
    vision = "image" in columns or "images" in columns
    return {"type": kind, "format": "conversational" if chat else "standard", "columns": columns, "vision": vision}


def _one_form(head: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the rows are conversational; all of them must agree."""
    first: bool | None = None
    for index, row in enumerate(head):
        try:
            chat = is_conversational_from_value(row) or is_conversational(row)
        except DataError as error:
            if isinstance(row.get("prompt"), str):  # A string prompt beside conversations that repeat it: mended later.
                chat = True
            else:
                raise DataError(f"row {index}: {error}") from error
        nothing = {name: value in (None, [], {}) for name, value in row.items() if not isinstance(value, str)}
        empty = sorted(name for name in (*MESSAGE_COLUMNS, "conversations") if nothing.get(name))
        if empty and not chat:
            raise DataError(
                f"row {index}, column {empty[0]!r}: it is {row[empty[0]]!r}. Every row needs at least one message (or some "
                f"text) there: dataset.filter(lambda row: row[{empty[0]!r}])."
            )
        if first is None:
            first = chat
        elif chat != first:
            words = {True: "conversational", False: "plain text"}
            raise DataError(f"row {index} is {words[chat]} and row 0 is {words[first]}. Give all rows the same form.")
    return bool(first)


@contextmanager
def naming(where: str, hint: str = "") -> Iterator[None]:
    """Put the place in front of what a `DataError` says that is raised inside, and a hint behind it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}{hint}") from error


def given_rows(batch: Mapping[str, list], indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a batch of columns with their numbers; columns that are None in a row are no columns of it."""
    for position, index in enumerate(indices):
        columns = {name: column[position] for name, column in batch.items() if name != ROW}
        yield index, {name: value for name, value in columns.items() if value is not None}


ROW = "_row"  # A column of row numbers, kept through preparation so that what is found can be found again.


FIRST_BATCH = 32  # Rows of a stream that are prepared at once while the first one to train is looked for.
PEEKED = 1000  # Rows of a stream of which at least one must be trainable.


def first_row(dataset: AnyDataset, name: str, *, images: bool = False) -> dict[str, Any]:
    """The first row of a set that can be prepared.

    Args:
        dataset: ``Dataset`` or ``IterableDataset``.
        name: Of the set, for messages.
        images: Whether columns of images are fine, because something makes text of the rows.

    Raises:
        ArgumentTypeError: It is no dataset.
        DataError: It is empty, has a transform attached, or has images, which are not trained on.
    """
    import datasets

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


def undecoded(dataset: AnyDataset) -> Any:
    """A dataset (or several by name, or None) with its columns of images as paths or encoded bytes; a view, nothing is read."""
    import datasets

    if isinstance(dataset, dict):
        return {name: undecoded(subset) for name, subset in dataset.items()}
    plain = datasets.Image(decode=False)
    kinds: dict[str, Any] = {}
    # Of the info, for a set copies its features each time that they are asked for.
    info = dataset.info if isinstance(dataset, datasets.Dataset | datasets.IterableDataset) else datasets.DatasetInfo()
    for name, kind in (info.features or {}).items():
        inner = getattr(kind, "feature", None)
        if isinstance(kind, datasets.Image) and kind.decode:
            kinds[name] = plain
        elif isinstance(inner, datasets.Image) and inner.decode:
            kinds[name] = replace(kind, feature=plain)  # A list of its own length and kind.
    if not kinds or not isinstance(dataset, datasets.Dataset):
        for name, kind in kinds.items():
            dataset = dataset.cast_column(name, kind)
        return dataset
    # The rows are what they were. `cast_column` would write those of a list anew, and of a large set into a file.
    info = dataset.info.copy()
    info.features = datasets.Features(dataset.features | kinds)
    told = datasets.fingerprint.Hasher.hash((dataset._fingerprint, "undecoded"))
    return datasets.Dataset(dataset.data, info, dataset.split, dataset._indices, told).with_format(**dataset.format)


def united(first: Any, *others: Any) -> Any:
    """The type of columns that holds all of these, messages with the keys of each; None where there is none.

    For the features of a mapped set: left to itself ``map`` takes a new column's from its first 1,000 rows, where a key that only
    later messages have holds nothing yet.
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
    """Features of a set that is mapped to have these columns, by type, and not those of ``drop``; None where one has no type."""
    from datasets import Features

    kept = {name: kind for name, kind in dataset.features.items() if name not in drop}
    return None if None in columns.values() else Features(kept | columns)


def pictures_of(example: Mapping[str, Any]) -> list[Any]:
    """What the columns ``image`` and ``images`` of a row hold, as a list; None means no picture, in the list too.

    Raises:
        DataError: Both columns hold pictures.
    """
    one, several = example.get("image"), example.get("images")
    if one is not None and several is not None:
        raise DataError("the row has both 'image' and 'images'. Fix: keep one of these columns.")
    return [one] if one is not None else [value for value in several or () if value is not None]


def has_pictures(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any row has a picture, in its columns or inside its messages."""
    for row in rows:
        conversations = [row[name] for name in MESSAGE_COLUMNS if isinstance(row.get(name), list)]
        if pictures_of(row) or any(map(picture_blocks, conversations)):
            return True
    return False


def picture_blocks(messages: Any) -> list[dict[str, Any]]:
    """Blocks of a conversation that show a picture; none of what is no list of messages."""
    if not isinstance(messages, list):
        return []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return [block for block in blocks if isinstance(block, dict) and block.get("type") in PICTURE_BLOCKS]


def shows_pictures(dataset: AnyDataset) -> bool:
    """Whether rows have pictures, in columns or inside messages; a stream is told by its first rows."""
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
    # A block says its ``type``: where no column has such a key, no row has a picture.
    names = [name for name, kind in kinds.items() if "'type'" in kind or "Json" in kind]
    if not names:
        return False
    # Blocks have a key of their own for an image where any of the column holds one: then every row is looked at.
    keyed = any(kind in kinds[name] for name in names for kind in PICTURE_BLOCKS)
    step = 1 if keyed else max(1, len(dataset) // LOOK)
    return has_pictures(undecoded(dataset.with_format(None).select_columns(names)).select(range(0, len(dataset), step)))


def refuse_images(dataset: AnyDataset, name: str) -> None:
    """Columns of images are a mistake where only text is read.

    Raises:
        DataError: Names the columns, and how to leave them out.
    """
    pictures = [column for column in get_dataset_column_names(dataset) if column in (*PICTURE_COLUMNS, "pixel_values")]
    if pictures or shows_pictures(dataset):
        raise DataError(
            f"the {name} rows have images ({f'columns {pictures}' if pictures else 'inside their messages'}), and this trainer "
            "reads text alone: it would train on answers to pictures that the model never saw. Remove them if the text stands "
            f"by itself{f': dataset.remove_columns({pictures})' if pictures else ''}."
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


def _check_stream(reasons: Iterable[str], name: str, hint: str) -> None:
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


@dataclass
class PreparationReport:
    """What preparing a dataset did to it.

    Attributes:
        name: Which set.
        rows_in, rows_out: Before and after (before packing).
        dropped: Rows left out, by reason.
        truncated: Rows that were cut at ``max_length``.
        cut_tokens: Trained tokens lost by that.
        diverged: Rows whose prompt tokenises differently once the completion follows.
        inner: Rows with an answer that holds turns of others than the assistant.
        no_end: Rows that do not train a token that ends a sequence.
        double_bos: Texts that began with the bos token already.
        nested_none: Rows with a ``None`` in tool schemas, tool calls or content blocks.
        untrained_pieces: With ``bfd_split``: pieces of long rows that train nothing, and are left out.
        trained_tokens, tokens: What is left: tokens that carry loss, and all tokens.
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


OF_KEPT = ("_no_end", "_trained_tokens", "_tokens")  # Counted over the rows that are left, the others over all.


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
    """Map a dataset batch by batch to ids, and leave out the rows that the function gives a reason for.

    Args:
        dataset: ``Dataset`` or ``IterableDataset``.
        name: Of the set, for messages.
        function: ``f(batch, indices, **arguments)`` gives columns of ids, ``_reason`` (why a row is left out, or ``""``), the
            counters and the notes.
        arguments: Of the function; part of the cache's fingerprint.
        drop: Columns of the dataset that are not kept.
        counters: Columns of whole numbers; those named like a field of the report are summed into it.
        notes: Further columns for messages.
        num_proc: Processes.
        hint: What to look at where no row is left.
        features: Types of all columns of a ``Dataset``; None: those of the first rows.

    Returns:
        All rows with reasons and notes; counters by name, ``(rows,)``; the rows that are left; and the report. Only those of
        map-style datasets are counted.

    Raises:
        DataError: No row is left (of a stream, none of its first rows).
    """
    import datasets
    import pyarrow.compute as pc

    streaming = isinstance(dataset, datasets.IterableDataset)
    extra: dict[str, Any] = {} if streaming else {"num_proc": num_proc}
    named = {} if streaming else {"new_fingerprint": _fingerprint(dataset, function.__qualname__, arguments, drop)}
    if counters:
        arguments, function = arguments | {"function": function, "counters": counters}, _with_counts
    told = ["_reason", *notes, *(["_counts"] if counters else [])]
    described = {} if streaming else {"desc": f"Tokenizing {name} dataset", "features": features}
    options = {"batched": True, "with_indices": True, "remove_columns": drop, "fn_kwargs": arguments}
    if streaming:
        first = dataset.map(function, **options, batch_size=FIRST_BATCH)
        _check_stream((row["_reason"] for row in first), name, hint)
    mapped = dataset.map(function, **options, **extra, **described, **named)
    kept, report, counts = mapped, PreparationReport(name), {}
    if streaming:
        kept = mapped.filter(_is_kept, batched=True, input_columns=["_reason"])
    else:
        table = read_columns(mapped, told, kind="arrow")
        is_kept = pc.equal(table["_reason"], "")  # (rows,)
        report.rows_in, report.rows_out = len(mapped), pc.sum(is_kept).as_py()
        if report.rows_out < report.rows_in:
            report.dropped = dict(Counter(filter(None, table["_reason"].to_pylist())))
            kept = mapped.select(pc.indices_nonzero(is_kept).to_pylist())
        if not report.rows_out:
            raise DataError(
                f"no row of the {name} dataset is left: of {report.rows_in}, {listed(report.dropped)}. {hint}"
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
    return mapped, counts, kept.remove_columns(told, **named), report


def _with_counts(
    batch: dict[str, list], indices: list[int], function: Callable, counters: Sequence[str], **arguments: Any
) -> dict[str, list]:
    """What a function gives, with its counters in one column: each column costs Arrow and its schema anew."""
    columns = function(batch, indices, **arguments)
    return columns | {"_counts": list(zip(*(columns.pop(name) for name in counters), strict=True))}


def _fingerprint(dataset: AnyDataset, *about: object) -> str | None:
    """Names what a map gives by what it depends on, in one hash; ``map`` would make one of each of its own arguments too."""
    from datasets.fingerprint import Hasher

    from posttrain import __version__

    try:
        return Hasher.hash((dataset._fingerprint, __version__, *about))
    except Exception:  # What cannot be pickled has no lasting name; `map` gives it a random one, and says so.
        return None


def _is_kept(reasons: list[str]) -> list[bool]:
    return [not reason for reason in reasons]


def one_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Exactly one eos at the end of a plain text, also where a line end follows it."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError("the tokenizer has no eos token, so a plain text cannot be ended. Set eos_token.")
    if ids == [eos]:
        return ids
    kept = len(ids)
    while kept > 1:  # The text may end with eos and white space, and the tokenizer may have added an eos of its own.
        blank = ids[kept - 2] == eos and not tokenizer.decode(ids[kept - 1 : kept]).strip()
        if ids[kept - 1] != eos and not blank:
            break
        kept -= 1
    return [*ids[:kept], eos]


def shown_prompt(tokenizer: Tokenizer, ids: Sequence[int], placed: Sequence[Any]) -> str:
    """Decoded ids with ``[image 1: 640×480, 391 tokens, 12ab]`` where the placeholders of a picture are."""
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
    """Text of a sequence in pieces, and whether each is trained; a picture is one piece, its label.

    Args:
        tokenizer: Decodes.
        ids: Of a prompt and one completion.
        flags: Whether each is trained.
        row: Where they are from, with its pictures.
        index: Which of its completions.
        pieces_of: Ids and flags between pictures to pieces; None: runs of equal flags.
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
    """A dataset (or several by name, or None) whose rows are Python's lists and numbers, whatever ``with_format`` asked for.

    Columns that the format left out stay out. A transform (``with_transform``) stays too; `first_row` refuses it.
    """
    import datasets

    if isinstance(dataset, dict):
        return {name: plain_rows(subset) for name, subset in dataset.items()}
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.with_format(None)
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] in (None, "custom"):
        return dataset
    kept, every = dataset.format["columns"], dataset.format["output_all_columns"]
    dataset = dataset.with_format(None)
    return dataset if every or len(kept) == len(dataset.column_names) else dataset.select_columns(kept)
