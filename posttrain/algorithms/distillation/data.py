"""Rows of distillation: prompts and answers as ids, and prompts that show the teacher more than the student."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import datasets

from posttrain.data.chat import RENDERED, tokenize_prompts
from posttrain.data.formats import is_messages, strip_none
from posttrain.data.sft import IGNORED, SupervisedOptions, label_batch
from posttrain.errors import DataError
from posttrain.training.prompts import cut_prompt
from posttrain.types import Rollout, Row


def with_prompt_column(dataset: Any) -> Any:
    """``messages`` as ``prompt`` and ``completion``, which is the last message where it is the assistant's."""
    names = getattr(dataset, "column_names", None) or ()
    if "messages" not in names or "prompt" in names:
        return dataset
    return dataset.map(_divided, remove_columns=["messages"])


def with_template_arguments(dataset: Any, kwargs: dict[str, Any] | None) -> Any:
    """``chat_template_kwargs`` of the run in every row, whose own win: answers follow the prompts that are sampled from."""
    if not kwargs:
        return dataset
    column = "chat_template_kwargs"
    return dataset.map(lambda row: {column: kwargs | (strip_none(row).get(column) or {})})


def _divided(row: dict[str, Any]) -> dict[str, Any]:
    messages = row["messages"]
    if not is_messages(messages):
        raise DataError(f"column 'messages' must be a list of messages, and it is {str(messages)[:80]!r}.")
    if len(messages) > 1 and messages[-1].get("role") == "assistant":
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    return {"prompt": messages, "completion": None}


def tokenized_answers(
    dataset: Any, tokenizer: Any, *, name: str, max_length: int | None, max_prompt_length: int | None
) -> Any:
    """A dataset with the columns ``prompt_ids`` and ``completion_ids``, and ``score_row``, the number of each row.

    Raises:
        DataError: A row without an answer token, or whose answer leaves no room for the prompt; names the row.
    """
    options = {"tokenizer": tokenizer, "name": name, "max_length": max_length, "max_prompt_length": max_prompt_length}
    function = functools.partial(_tokenized, **options)
    mapped = dataset.map(function, with_indices=True, batched=True)
    return mapped if isinstance(mapped, datasets.Dataset | datasets.IterableDataset) else dataset


def _tokenized(
    batch: dict[str, list], indices: list[int], *, tokenizer: Any, name: str, max_length: int | None,
    max_prompt_length: int | None,
) -> dict[str, list]:  # fmt: skip
    texts = {column: batch[column] for column in (*RENDERED, "completion") if column in batch}
    empty = next((i for i, answer in zip(indices, texts["completion"], strict=True) if not answer), None)
    if empty is not None:
        raise DataError(
            f"{name} row {empty}: its completion is empty, so that there is nothing to compare. Fix: leave it out."
        )
    labelled = label_batch(texts, indices, tokenizer, SupervisedOptions(completion_only_loss=True, max_length=None))
    out: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "score_row": list(indices)}
    for index, ids, labels in zip(indices, labelled["input_ids"], labelled["labels"], strict=True):
        first = next((i for i, label in enumerate(labels) if label != IGNORED), len(ids))
        if first == len(ids):
            raise DataError(f"{name} row {index}: its answer has no token of its own. Fix: leave it out.")
        if first == 0:
            raise DataError(f"{name} row {index}: its prompt has no token, and the first answer token follows nothing.")
        prompt, answer = cut_prompt(ids[:first], max_prompt_length), ids[first:]
        if max_length is not None and len(answer) >= max_length:
            raise DataError(
                f"{name} row {index}: its answer of {len(answer)} tokens leaves no prompt token in max_length={max_length}. Fix: "
                f"max_length above {len(answer)}, or a shorter answer."
            )
        out["prompt_ids"].append(cut_prompt(prompt, None if max_length is None else max_length - len(answer)))
        out["completion_ids"].append(answer)
    return out


def as_rollout(row: Row, tokenizer: Any) -> Rollout:
    """The answer of a dataset row, as if it had been sampled.

    Raises:
        DataError: The answer has images.
    """
    (ids,), pictures = row.completions, row.pictures or [[], []]
    if pictures[1]:
        raise DataError(f"an answer has {len(pictures[1])} images, and a student writes text alone. Fix: leave it out.")
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Rollout(row.prompt_ids, ids, [], "stop", text=text, pictures=tuple(pictures[0]))


def privileged_prompt(
    example: dict[str, Any], extra: str, template: str, tokenizer: Any, *, most: int | None, kwargs: dict[str, Any]
) -> list[int]:
    """Ids of an example's prompt whose last user turn is ``template`` of its text and of what only the teacher sees.

    Where there are more than ``most`` tokens the extra text is cut, from its end, never the question.
    """
    ids = _filled(example, extra, template, tokenizer, kwargs)
    if most is None or len(ids) <= most:
        return ids
    pieces = tokenizer(extra, add_special_tokens=False)["input_ids"]
    kept = tokenizer.decode(pieces[: max(len(pieces) - (len(ids) - most), 0)])
    return cut_prompt(_filled(example, kept, template, tokenizer, kwargs), most)


def _filled(example: dict[str, Any], extra: str, template: str, tokenizer: Any, kwargs: dict[str, Any]) -> list[int]:
    prompt = example["prompt"]
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    whole = extra.join(piece.replace("{prompt}", text) for piece in template.split("{privileged_context}"))
    if isinstance(prompt, str):
        filled: Any = whole
    elif prompt[-1].get("role") != "user":
        raise DataError(
            f"a prompt must end with a user turn to show the teacher more, and it ends with {prompt[-1].get('role')!r}."
        )
    else:
        filled = [*prompt[:-1], {**prompt[-1], "content": whole}]
    return tokenize_prompts([{**example, "prompt": filled}], tokenizer, chat_template_kwargs=kwargs)[0]


def joined_text(value: Any, where: str = "") -> str:
    """Privileged context as text: a string, or the texts of messages.

    Raises:
        DataError: There is none; ``where`` names the row.
    """
    if value is None:
        raise DataError(
            f"{where}privileged_context is None: the teacher would see no more than the student. Fix: leave the row out."
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(str(item["content"] if isinstance(item, dict) else item) for item in value)
    return str(value)
