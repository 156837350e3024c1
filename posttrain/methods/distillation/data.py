"""Data preparation for distillation: tokenize prompts and answers, and build teacher prompts with privileged context."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

import datasets

from posttrain.data.chat import RENDERED, cut_prompt, tokenize_prompts
from posttrain.data.formats import features_with, is_messages, known_columns, remove_none_values, united
from posttrain.data.sft import IGNORED, SupervisedOptions, label_batch
from posttrain.errors import DataError
from posttrain.types import Rollout, Row

if TYPE_CHECKING:
    from posttrain.types import AnyDataset, Tokenizer


def with_prompt_column(dataset: AnyDataset) -> Any:
    """Split the column ``messages`` into ``prompt`` and ``completion``.

    If the last message is from the assistant, it becomes the completion. All other messages become the prompt.
    """
    names = known_columns(dataset)
    if "messages" not in names or "prompt" in names:
        return dataset
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(_divided, remove_columns=["messages"])
    messages = dataset.features["messages"]
    features = features_with(dataset, drop=("messages",), prompt=messages, completion=messages)
    return dataset.map(_divided, remove_columns=["messages"], features=features)


def with_template_arguments(dataset: AnyDataset, kwargs: dict[str, Any] | None) -> Any:
    """Add the config's ``chat_template_kwargs`` to every row. The values of a row override those of the config."""
    if not kwargs:
        return dataset
    column, features = "chat_template_kwargs", None
    if isinstance(dataset, datasets.Dataset):
        sets = (datasets.Dataset.from_list([{column: kwargs}]), dataset)
        both = united(*(source.features[column] for source in sets if column in source.features))
        features = features_with(dataset, **{column: both})
    return dataset.map(lambda row: {column: kwargs | remove_none_values(row.get(column) or {})}, features=features)


def _divided(row: dict[str, Any]) -> dict[str, Any]:
    messages = row["messages"]
    if not is_messages(messages):
        raise DataError(f"column 'messages' must contain a list of messages, but contains {str(messages)[:80]!r}.")
    if len(messages) > 1 and messages[-1].get("role") == "assistant":
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    return {"prompt": messages, "completion": None}


def tokenized_answers(
    dataset: AnyDataset, tokenizer: Tokenizer, *, name: str, max_length: int | None, max_prompt_length: int | None
) -> Any:
    """Tokenize prompts and answers of a dataset. The new columns are ``prompt_ids``, ``completion_ids`` and ``score_row``.

    ``score_row`` is the number of the row.

    Raises:
        DataError: The answer of a row has no tokens, or is so long that no prompt token fits. The message contains the
            number of the row.
    """
    options = {"tokenizer": tokenizer, "name": name, "max_length": max_length, "max_prompt_length": max_prompt_length}
    function = functools.partial(_tokenized, **options)
    mapped = dataset.map(function, with_indices=True, batched=True)
    return mapped if isinstance(mapped, datasets.Dataset | datasets.IterableDataset) else dataset


def _tokenized(
    batch: dict[str, list], indices: list[int], *, tokenizer: Tokenizer, name: str, max_length: int | None,
    max_prompt_length: int | None,
) -> dict[str, list]:  # fmt: skip
    texts = {column: batch[column] for column in (*RENDERED, "completion") if column in batch}
    empty = next((i for i, answer in zip(indices, texts["completion"], strict=True) if not answer), None)
    if empty is not None:
        raise DataError(
            f"{name} row {empty}: the completion is empty, so student and teacher cannot be compared. Fix: remove the row."
        )
    labelled = label_batch(texts, indices, tokenizer, SupervisedOptions(completion_only_loss=True, max_length=None))
    out: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "score_row": list(indices)}
    for index, ids, labels in zip(indices, labelled["input_ids"], labelled["labels"], strict=True):
        first = next((i for i, label in enumerate(labels) if label != IGNORED), len(ids))
        if first == len(ids):
            raise DataError(f"{name} row {index}: the answer has no tokens. Fix: remove the row.")
        if first == 0:
            raise DataError(
                f"{name} row {index}: the prompt has no tokens, so the first answer token cannot be predicted."
            )
        prompt, answer = cut_prompt(ids[:first], max_prompt_length), ids[first:]
        if max_length is not None and len(answer) >= max_length:
            raise DataError(
                f"{name} row {index}: the answer has {len(answer)} tokens, so no prompt token fits into "
                f"max_length={max_length}. Fix: set max_length above {len(answer)}, or shorten the answer."
            )
        out["prompt_ids"].append(cut_prompt(prompt, None if max_length is None else max_length - len(answer)))
        out["completion_ids"].append(answer)
    return out


def as_rollout(row: Row, tokenizer: Tokenizer) -> Rollout:
    """Convert the answer of a dataset row to a rollout. The answer is then treated like a sampled completion.

    Raises:
        DataError: The answer contains images.
    """
    (ids,), pictures = row.completions, row.pictures or [[], []]
    if pictures[1]:
        raise DataError(
            f"an answer has {len(pictures[1])} images, but the student generates only text. Fix: remove the row."
        )
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Rollout(row.prompt_ids, ids, [], "stop", text=text, pictures=tuple(pictures[0]))


def privileged_prompt(
    example: dict[str, Any], template: str, shown: Mapping[str, str], tokenizer: Tokenizer, *, most: int | None,
    kwargs: dict[str, Any],
) -> list[int]:  # fmt: skip
    """Tokenize the teacher's version of a prompt, which contains privileged context.

    The last user turn is replaced with ``template``. The fields of ``template`` are filled with the text of this turn and
    the texts in ``shown``. If the prompt has more than ``most`` tokens, the ends of the texts in ``shown`` are removed,
    starting with the last text. If the prompt is still too long, its beginning is removed.
    """
    ids = _filled(example, template, shown, tokenizer, kwargs)
    for name in reversed(shown):
        if most is None or len(ids) <= most:
            break
        pieces = tokenizer(shown[name], add_special_tokens=False)["input_ids"]
        shown = {**shown, name: tokenizer.decode(pieces[: max(len(pieces) - (len(ids) - most), 0)])}
        ids = _filled(example, template, shown, tokenizer, kwargs)
    return cut_prompt(ids, most)


def _filled(
    example: dict[str, Any], template: str, shown: Mapping[str, str], tokenizer: Tokenizer, kwargs: dict[str, Any]
) -> list[int]:
    prompt = example["prompt"]
    if isinstance(prompt, str):
        filled: Any = template.format(prompt=prompt, **shown)
    elif prompt[-1].get("role") != "user":
        raise DataError(
            "privileged context is added to the last user turn, so a prompt must end with a user turn, but it ends with "
            f"{prompt[-1].get('role')!r}."
        )
    else:
        content = prompt[-1]["content"]
        text = content if isinstance(content, str) else "".join(block["text"] for block in content)
        filled = [*prompt[:-1], {**prompt[-1], "content": template.format(prompt=text, **shown)}]
    return tokenize_prompts([{**example, "prompt": filled}], tokenizer, chat_template_kwargs=kwargs)[0]


def template_fields(template: str) -> set[str]:
    """Return the names of the fields in a format string, or ``{"{"}`` if the format string is invalid."""
    try:
        return {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError:
        return {"{"}


def text_of(value: object) -> str:
    """Convert privileged context to text.

    A string is returned unchanged. The contents of messages are joined with newlines. None is converted to "".
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(str(item["content"] if isinstance(item, dict) else item) for item in value)
    return "" if value is None else str(value)


def joined_text(value: object, where: str = "") -> str:
    """Convert privileged context to text with `text_of`. Raise an error if the text is empty.

    Raises:
        DataError: The text is empty. The message starts with ``where``, which describes the row.
    """
    text = text_of(value)
    if not text.strip():
        raise DataError(
            f"{where}privileged_context is {value!r}, so the teacher would have no more information than the "
            "student. Fix: remove the row."
        )
    return text
