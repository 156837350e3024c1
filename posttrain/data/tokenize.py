"""Rows to token ids and labels, in batches: one template pass, one tokenizer call."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets

from posttrain.data.chat import assistant_mask, common_prefix, render
from posttrain.data.formats import is_conversational, is_messages
from posttrain.errors import DataError

__all__ = ["IGNORED", "PreparationReport", "prepare_sft_dataset", "sft_columns", "tokenize_prompts"]

logger = logging.getLogger(__name__)

IGNORED = -100
COUNTERS = ("_truncated", "_cut", "_diverged", "_no_eos")


def _encode(tokenizer: Any, texts: list[str], *, special: bool) -> list[list[int]]:
    try:
        return tokenizer(texts, add_special_tokens=special)["input_ids"]
    except Exception as error:
        for index, text in enumerate(texts):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as bad:
                raise DataError(
                    f"row {index} of the batch holds text that is not valid Unicode ({bad.reason}): {text[:80]!r}"
                ) from bad
        raise DataError(f"the tokenizer could not read a batch of {len(texts)} texts: {error}") from error


def _one_bos(ids: list[int], bos: int | None) -> list[int]:
    """A text that already begins with the bos token, tokenised with special tokens on, has two: keep one."""
    return ids[1:] if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos else ids


def _tools(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _prompt_text(tokenizer: Any, row: dict[str, Any], kwargs: dict[str, Any]) -> str:
    prompt = row["prompt"]
    last = prompt[-1]["role"] == "assistant"
    row_kwargs = kwargs | (row.get("chat_template_kwargs") or {})
    return render(
        tokenizer,
        prompt,
        add_generation_prompt=not last,
        continue_final_message=last,
        tools=_tools(row.get("tools")),
        **row_kwargs,
    )


def tokenize_prompts(
    rows: Sequence[dict[str, Any]], tokenizer: Any, *, chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """Prompts of a batch as the engine must see them; equal neighbours are tokenised once.

    Conversational prompts end with the generation prompt (or go on with the assistant's unfinished message) and get their
    special tokens from the template alone; plain ones get the tokenizer's own.
    """
    texts: list[str] = []
    index: list[int] = []
    previous: Any = None
    chat = is_conversational({"prompt": rows[0]["prompt"]})
    for row in rows:
        if previous is None or row["prompt"] != previous["prompt"] or row.get("tools") != previous.get("tools"):
            texts.append(_prompt_text(tokenizer, row, chat_template_kwargs or {}) if chat else row["prompt"])
        index.append(len(texts) - 1)
        previous = row
    ids = [_one_bos(x, tokenizer.bos_token_id) for x in _encode(tokenizer, texts, special=not chat)]
    return [ids[i] for i in index]


@dataclass
class PreparationReport:
    """What preparing a dataset did to it.

    Attributes:
        name: Which set.
        rows_in, rows_out: Before and after.
        dropped: Rows left out, by reason.
        truncated: Rows that were cut at ``max_length``.
        cut_tokens: Trained tokens lost by that.
        diverged: Rows whose prompt tokenises differently once the completion follows.
        no_eos: Rows that do not train a token that ends a sequence.
        trained_tokens, tokens: What is left.
    """

    name: str
    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    cut_tokens: int = 0
    diverged: int = 0
    no_eos: int = 0
    trained_tokens: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class _Options:
    """Hashable by value, so that the dataset's fingerprint is stable from run to run."""

    dataset_text_field: str
    completion_only_loss: bool | None
    assistant_only_loss: bool
    max_length: int | None
    truncation_mode: str


def sft_columns(batch: dict[str, list], indices: list[int], tokenizer: Any, options: _Options) -> dict[str, list]:
    """One map batch: ``input_ids``, ``labels`` (token, or -100 where not trained) and counters for the report."""
    out: dict[str, list] = {name: [] for name in ("input_ids", "labels", *COUNTERS)}
    size = len(indices)
    rows = [{name: column[i] for name, column in batch.items() if column[i] is not None} for i in range(size)]
    for position, row in enumerate(rows):
        try:
            ids, mask, diverged = _row_ids(row, tokenizer, options)
        except DataError as error:
            raise DataError(f"row {indices[position]}: {error}") from error
        labels = row["labels"] if "labels" in row and "input_ids" in row else None
        labels = [t if m else IGNORED for t, m in zip(ids, mask, strict=True)] if labels is None else list(labels)
        trained = sum(label != IGNORED for label in labels)
        no_eos = tokenizer.eos_token_id not in labels
        limit = options.max_length
        truncated = limit is not None and len(ids) > limit
        if truncated:
            part = slice(limit) if options.truncation_mode == "keep_start" else slice(-limit, None)
            ids, labels = ids[part], labels[part]
        out["input_ids"].append(ids)
        out["labels"].append(labels)
        left = sum(label != IGNORED for label in labels)
        for name, value in zip(COUNTERS, (truncated, trained - left, diverged, no_eos), strict=True):
            out[name].append(int(value))
    return out


def _row_ids(row: dict[str, Any], tokenizer: Any, options: _Options) -> tuple[list[int], list[int], bool]:
    """Token ids of a row, 1 on what is trained, and whether its prompt changed under its completion."""
    if "input_ids" in row:
        return _given_ids(row, options)
    if "messages" in row:
        return *_messages_ids(row, row["messages"], tokenizer, options), False
    if "prompt" in row and "completion" in row:
        return _prompt_completion_ids(row, tokenizer, options)
    text = row.get(options.dataset_text_field)
    if not isinstance(text, str):
        raise DataError(
            f"found none of input_ids, messages, prompt with completion, or {options.dataset_text_field!r} (a string); its "
            f"columns are {sorted(row)}. Set dataset_text_field, or rename the columns."
        )
    ids = _finish(_one_bos(_encode(tokenizer, [text], special=True)[0], tokenizer.bos_token_id), tokenizer)
    return ids, [1] * len(ids), False


def _given_ids(row: dict[str, Any], options: _Options) -> tuple[list[int], list[int], bool]:
    ids = list(row["input_ids"])
    mask = [1] * len(ids)
    names = ["assistant_masks"] + (["completion_mask"] if options.completion_only_loss is not False else [])
    for name in names:
        if name in row:
            if len(row[name]) != len(ids):
                raise DataError(f"column {name!r} has {len(row[name])} entries for {len(ids)} input_ids.")
            mask = [a and b for a, b in zip(mask, row[name], strict=True)]
    return ids, mask, False


def _finish(ids: list[int], tokenizer: Any) -> list[int]:
    """Exactly one eos at the end of a plain text."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no eos token, so a plain text cannot be ended. Set eos_token.")
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def _kwargs(row: dict[str, Any]) -> dict[str, Any]:
    return {"tools": _tools(row.get("tools")), **(row.get("chat_template_kwargs") or {})}


def _messages_ids(row: dict, messages: Any, tokenizer: Any, options: _Options) -> tuple[list[int], list[int]]:
    if not is_messages(messages):
        raise DataError(
            f"column 'messages' must be a list of messages with a role and content, and it is {str(messages)[:80]!r}."
        )
    if options.assistant_only_loss:
        return assistant_mask(tokenizer, messages, **_kwargs(row))
    ids = _encode(tokenizer, [render(tokenizer, messages, **_kwargs(row))], special=False)[0]
    return ids, [1] * len(ids)


def _prompt_completion_ids(row: dict, tokenizer: Any, options: _Options) -> tuple[list[int], list[int], bool]:
    prompt, completion = row["prompt"], row["completion"]
    if is_messages(prompt) != is_messages(completion) or not prompt or not completion:
        raise DataError(
            "prompt and completion must both be strings or both be lists of messages, and neither may be empty."
        )
    if is_messages(prompt):
        head = _encode(tokenizer, [_prompt_text(tokenizer, row, {})], special=False)[0]
        ids, said = _messages_ids(row, prompt + completion, tokenizer, options)
    else:
        head, ids = _encode(tokenizer, [prompt, prompt + completion], special=True)
        ids = _finish(ids, tokenizer)
        said = [1] * len(ids)
    # The boundary is where the tokens part: a tokenizer may merge over it, and a template may render it differently.
    boundary = common_prefix(head, ids)
    if options.completion_only_loss is not False:
        said = [0] * boundary + said[boundary:]
    return ids, said, boundary < len(head)


def _trains_something(labels: list[int]) -> bool:
    return any(label != IGNORED for label in labels[1:])


def _format(example: dict[str, Any], function: Callable[[dict], str], column: str) -> dict[str, str]:
    return {column: function(example)}


def prepare_sft_dataset(
    dataset: Any,
    tokenizer: Any,
    *,
    name: str = "train",
    dataset_text_field: str = "text",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    formatting_func: Callable[[dict], str] | None = None,
    max_length: int | None = 1024,
    truncation_mode: str = "keep_start",
    num_proc: int | None = None,
) -> tuple[Any, PreparationReport]:
    """Tokenise a dataset for supervised fine-tuning and say what that did to it.

    Returns:
        The dataset with columns ``input_ids`` and ``labels`` (and ``seq_lengths`` if it was packed before), and a report
        (counted for map-style datasets).

    Raises:
        DataError: A row that cannot be tokenised, options that contradict the rows, or no row left, with the reasons.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise DataError(f"the {name} dataset is empty.")
    if "seq_lengths" in first:
        return dataset, PreparationReport(name)
    _check_options(first, name, dataset_text_field, completion_only_loss, assistant_only_loss, formatting_func)
    streaming = isinstance(dataset, datasets.IterableDataset)
    columns = list(dataset.column_names or first)
    extra: dict[str, Any] = {} if streaming else {"num_proc": num_proc}
    if formatting_func is not None and "input_ids" not in first:
        dataset = dataset.map(
            _format,
            remove_columns=columns,
            fn_kwargs={"function": formatting_func, "column": dataset_text_field},
            **extra,
        )
        columns = [dataset_text_field]
    options = _Options(dataset_text_field, completion_only_loss, assistant_only_loss, max_length, truncation_mode)
    report = PreparationReport(name, rows_in=0 if streaming else len(dataset))
    mapped = dataset.map(
        sft_columns,
        batched=True,
        with_indices=True,
        remove_columns=columns,
        fn_kwargs={"tokenizer": tokenizer, "options": options},
        **extra,
    )
    kept = mapped.filter(_trains_something, input_columns=["labels"], **extra)
    if not streaming:
        _count(report, mapped, kept)
        _tell(report, max_length)
    return kept.remove_columns(list(COUNTERS)), report


def _check_options(
    first: dict, name: str, text_field: str, completion_only: bool | None, assistant_only: bool, formatting: Any
) -> None:
    if completion_only and formatting is not None:
        raise DataError("completion_only_loss=True with formatting_func: formatted rows have no prompt. Leave one out.")
    parted = ("prompt" in first and "completion" in first) or "completion_mask" in first or "labels" in first
    if completion_only and not parted:
        raise DataError(
            f"completion_only_loss=True, but the {name} rows have no completion (columns {sorted(first)}): everything would "
            "be trained. Give prompt and completion columns, or a completion_mask."
        )
    if assistant_only and not is_conversational(first) and "assistant_masks" not in first:
        raise DataError(
            f"assistant_only_loss=True needs conversational rows, and the {name} rows have columns {sorted(first)} without "
            "messages."
        )
    if "messages" in first and not first["messages"]:
        raise DataError(f"{name} row 0, column 'messages': it is empty. Every conversation needs at least one message.")


def _count(report: PreparationReport, mapped: Any, kept: Any) -> None:
    report.rows_out = len(kept)
    dropped = report.rows_in - report.rows_out
    if dropped:
        report.dropped["no trained token left"] = dropped
    if report.rows_out == 0:
        raise DataError(
            f"no row of the {report.name} dataset is left: of {report.rows_in}, {dropped} have no trained token "
            f"({sum(mapped['_truncated'])} were cut at max_length). Check completion_only_loss, assistant_only_loss, max_length."
        )
    report.truncated, report.cut_tokens = sum(mapped["_truncated"]), sum(mapped["_cut"])
    report.diverged, report.no_eos = sum(mapped["_diverged"]), sum(kept["_no_eos"])


def _tell(report: PreparationReport, max_length: int | None) -> None:
    """One warning a kind, with numbers."""
    n = report.rows_in
    if report.dropped:
        logger.warning(
            "%s dataset: dropped %d of %d rows (%s).", report.name, n - report.rows_out, n, "; ".join(report.dropped)
        )
    if report.truncated:
        logger.warning(
            "%s dataset: %d of %d rows were cut at max_length=%s and lost %d trained tokens.",
            report.name,
            report.truncated,
            n,
            max_length,
            report.cut_tokens,
        )
    if report.diverged:
        logger.warning(
            "%s dataset: in %d of %d rows the prompt tokenises differently once its completion follows; the boundary is where "
            "the tokens part.",
            report.name,
            report.diverged,
            n,
        )
    if report.no_eos == report.rows_out:
        logger.warning("%s dataset: no row trains the eos token, so the model will not learn to stop.", report.name)
