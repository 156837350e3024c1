"""Dataset formats: the only place that knows column names."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypedDict

from posttrain.errors import ArgumentTypeError, DataError

__all__ = [
    "MESSAGE_COLUMNS",
    "ROW",
    "DatasetDescription",
    "describe_dataset",
    "extract_and_unpair",
    "extract_prompt",
    "get_dataset_column_names",
    "has_nested_none",
    "is_conversational",
    "is_conversational_from_value",
    "is_messages",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "remove_none_values",
    "strip_none",
    "unpair_preference_dataset",
]

logger = logging.getLogger(__name__)


MESSAGE_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")  # In this order: never a set's.
NESTED_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "tools")
LOOK = 64  # Rows that decide the format of a dataset; row 0 alone misleads on mixed data.

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


def is_messages(value: Any) -> bool:
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


_told: set[str] = set()


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {{"from": "role", "value": "content"}.get(key, key): value for key, value in turn.items()}
    role = renamed.get("role")
    if "from" in turn and role in ROLES:
        if role not in _told:
            _told.add(role)
            logger.warning("messages from %r are taken as role %r.", role, ROLES[role])
        renamed["role"] = ROLES[role]
    return renamed


def remove_none_values(value: Any) -> Any:
    """Drop mapping entries that are None, at any depth; None items of lists stay.

    Raises:
        ArgumentTypeError: The value is neither a list nor a mapping.

    >>> remove_none_values([{"a": None, "b": [None, {"c": None}]}, None])
    [{'b': [None, {}]}, None]
    """
    if not isinstance(value, list | Mapping):
        raise ArgumentTypeError(f"remove_none_values takes a list or a mapping, not {type(value).__name__}.")
    return _without_none(value)


def _without_none(value: Any) -> Any:
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
    """A row without the ``None`` that Arrow writes into messages and tools when rows differ in their keys."""
    return {
        name: _without_none(value) if name in NESTED_COLUMNS and isinstance(value, list) else value
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


def _holds_none(value: Any) -> bool:
    if type(value) is str:
        return False
    if isinstance(value, Mapping):
        return any(item is None or _holds_none(item) for item in value.values())
    return isinstance(value, list) and any(_holds_none(item) for item in value)


def get_dataset_column_names(dataset: Any) -> list[str]:
    """Column names; for a stream that declares none, those of its first row."""
    return list(dataset.column_names or next(iter(dataset), {}))


class DatasetDescription(TypedDict):
    """What `describe_dataset` says: type (as the documentation names them), format, columns, and whether there are images."""

    type: str
    format: str
    columns: list[str]
    vision: bool


def describe_dataset(dataset: Any) -> DatasetDescription:
    """Decide what kind of rows a dataset holds, from its columns and up to 64 of its rows.

    Raises:
        DataError: The set is empty, no type fits its columns, or a row's form differs from the others', with its number.

    >>> import datasets
    >>> import datasets
    >>> rows = datasets.Dataset.from_dict({"prompt": ["2+2="], "completion": [" 4"]})
    >>> describe_dataset(rows)["type"], describe_dataset(rows)["format"]
    ('prompt-completion', 'standard')
    """
    head = list(islice(dataset, LOOK))
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
        empty = sorted(n for n in (*MESSAGE_COLUMNS, "conversations") if n in row and not row[n] and row[n] != "")
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


ROW = "_row"  # A column of row numbers, kept through preparation so that what is found can be found again.


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
    import datasets

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
    import datasets

    extra = {} if isinstance(dataset, datasets.IterableDataset) else {"num_proc": num_proc}
    return unpair_preference_dataset(dataset.map(_extracted, **extra), **extra)


def _extracted(example: dict[str, Any]) -> dict[str, Any]:
    return dict(maybe_extract_prompt(example))
