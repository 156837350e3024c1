"""Tokenization of preference datasets, whose rows have a prompt and several answers. Truncated and dropped rows are counted."""

from __future__ import annotations

import logging
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets

from posttrain.data.chat import (
    assistant_mask,
    common_prefix,
    encode_rows,
    one_bos,
    prompt_text,
    render,
    template_arguments,
)
from posttrain.data.formats import (
    ROW,
    PreparationReport,
    check_ids,
    features_with,
    first_row,
    get_dataset_column_names,
    given_rows,
    is_messages,
    naming,
    one_eos,
    read_columns,
    tokenized,
    undecoded,
    united,
    warn_once,
)
from posttrain.errors import DataError
from posttrain.types import Row
from posttrain.values import strip_none

if TYPE_CHECKING:
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)


SIDES = ("chosen", "rejected")
UNUSABLE = "whose prompt tokenizes differently with its answers"
FULL = "whose prompt fills max_length"
EQUAL = "with equal answers"
EMPTY = "with an empty answer"
# Maximum fraction of rows that may be dropped with the reason `UNUSABLE`. If more rows are dropped, an error is raised.
MOST_UNUSABLE = 0.01
COUNTERS = ("_truncated", "_diverged", "_inner")
HINT = "Look at the rows with posttrain inspect."


@dataclass(frozen=True)
class AnswerOptions:
    """Options for tokenizing answers. The hash of this object depends only on the values of its fields, so that cache
    fingerprints are reproducible.

    Attributes:
        branches: Answer columns: ``("chosen", "rejected")``, optionally with ``"reference"``, or ``("completion",)``.
        max_length: Maximum number of tokens of a prompt and an answer together. None: answers are not truncated.
        truncation_mode: With ``keep_start``, the end of long answers is removed. With ``keep_end``, the start of the prompt
            is removed first, and then the start of answers.
        mask_inner_turns: Whether to exclude user and tool turns inside an answer from the loss, including their template
            tokens.
        max_prompt_length: Maximum number of tokens of a prompt. The beginning of longer prompts is removed. None: no limit.
    """

    branches: tuple[str, ...] = ("chosen", "rejected")
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    mask_inner_turns: bool = False
    max_prompt_length: int | None = None


def _answer_batch(
    batch: dict[str, list], indices: list[int], tokenizer: Tokenizer, options: AnswerOptions
) -> dict[str, list]:
    """Tokenize the prompts and answers of a batch with two calls of the tokenizer: one for plain texts, and one for rendered
    conversations.
    """
    rows, texts = [], []
    for index, example in given_rows(batch, indices):
        with naming(f"row {index}"):
            rows.append(_parted(strip_none(example), options.branches))
            texts.append(_texts(rows[-1], tokenizer, options.branches))
    ids_of_rows = encode_rows(tokenizer, texts, indices)
    encoded_rows = [
        _answers(row, plain, ids, tokenizer, options)
        for row, (plain, _), ids in zip(rows, texts, ids_of_rows, strict=True)
    ]
    return {name: [encoded[name] for encoded in encoded_rows] for name in encoded_rows[0]}


def _texts(row: dict[str, Any], tokenizer: Tokenizer, branches: Sequence[str]) -> tuple[bool, list[str]]:
    """Return whether a row is plain text, and a list of the texts to tokenize. The texts are the prompt alone, and the
    prompt followed by each answer.
    """
    prompt: Any = row.get("prompt")
    answers: list[Any] = [row.get(branch) for branch in branches]
    for branch, answer in zip(branches, answers, strict=True):
        if answer is None:
            raise DataError(f"column {branch!r} is missing. The row has the columns {sorted(row)}. Fix: add it.")
    if prompt is None:
        raise DataError(
            "column 'prompt' is missing, and there are no columns 'chosen' and 'rejected' from which it could be extracted. The "
            f"row has the columns {sorted(row)}. Fix: add a 'prompt' column."
        )
    if not is_messages(prompt):
        columns = zip(("prompt", *branches), (prompt, *answers), strict=True)
        kinds = {name: "text" if isinstance(value, str) else type(value).__name__ for name, value in columns}
        if set(kinds.values()) != {"text"}:
            shown = ", ".join(f"{name!r} is {kind}" for name, kind in kinds.items())
            raise DataError(f"{shown}. Fix: use text in all columns of a row, or lists of messages in all columns.")
        return True, [prompt, *(prompt + answer for answer in answers)]
    for branch, answer in zip(branches, answers, strict=True):
        _check_messages(branch, answer)
    kwargs = template_arguments(row)
    wholes = [render(tokenizer, prompt + answer, **kwargs) for answer in answers]
    return False, [prompt_text(tokenizer, row, {}, answered=True), *wholes]


def _parted(row: dict[str, Any], branches: Sequence[str]) -> dict[str, Any]:
    """Separate the prompt from the answers if a row has no ``prompt`` column. The prompt is the common beginning of chosen
    and rejected. A third answer must begin with this prompt too.
    """
    parted = dict(maybe_extract_prompt(row))
    if parted.get("chosen") == row.get("chosen"):
        return parted
    prompt = parted["prompt"]
    for branch in branches[2:]:
        whole = row.get(branch)
        if whole is None:
            continue
        if whole[: len(prompt)] != prompt:
            raise DataError(
                f"column {branch!r} does not begin with the common prompt of chosen and rejected: {str(prompt)[:80]!r}. Fix: "
                "add a 'prompt' column, and remove the prompt from the answers."
            )
        parted[branch] = whole[len(prompt) :]
    return parted


def _check_messages(branch: str, answer: object) -> None:
    if not is_messages(answer):
        raise DataError(
            f"column 'prompt' contains messages, but column {branch!r} is {str(answer)[:60]!r}. Fix: use messages in both."
        )
    if answer[-1].get("role") != "assistant":
        raise DataError(
            f"column {branch!r} ends with a message of role {answer[-1].get('role')!r}. The last message of an answer must "
            "have role 'assistant'."
        )


def _answers(
    row: dict[str, Any], plain: bool, texts: list[list[int]], tokenizer: Tokenizer, options: AnswerOptions
) -> dict[str, Any]:
    """Split the tokens of a row into prompt and answers at the end of their common prefix, and truncate them. Return the
    columns of the row, including counters and the reason for dropping it.
    """
    bos, (prompt, *wholes) = tokenizer.bos_token_id, texts
    if plain:
        prompt, wholes = one_bos(prompt, bos), [one_eos(one_bos(ids, bos), tokenizer) for ids in wholes]
    boundary = min(common_prefix(prompt, ids) for ids in wholes)
    lost = len(prompt) - boundary
    prompt, answers = prompt[:boundary][-(options.max_prompt_length or boundary) :], [ids[boundary:] for ids in wholes]
    limit, start, reason, cut = options.max_length, options.truncation_mode == "keep_start", "", False
    if lost > max(4, 0.05 * (boundary + lost)):
        reason = UNUSABLE
    elif any(not answer for answer in answers):
        reason = EMPTY
    elif limit is not None and len(prompt if start else prompt[:1]) >= limit:
        reason = FULL
    elif limit is not None and len(prompt) + max(map(len, answers)) > limit:
        prompt, answers, cut = *_truncate(prompt, answers, limit, options.truncation_mode), True
    if not reason and len(answers) > 1 and answers[0] == answers[1]:
        reason = EQUAL
    others = [not plain and any(m.get("role") != "assistant" for m in row[branch]) for branch in options.branches]
    columns: dict[str, Any] = {"prompt_ids": prompt, "_reason": reason, "_inner": int(any(others))}
    columns |= {"_truncated": int(cut), "_diverged": int(lost > 0)}
    for branch, whole, answer, inner in zip(options.branches, wholes, answers, others, strict=True):
        columns[f"{branch}_ids"] = answer
        if options.mask_inner_turns:
            trained = [1] * len(whole)
            if inner:
                _, trained = assistant_mask(tokenizer, row["prompt"] + row[branch], **template_arguments(row))
            first = boundary if start else len(whole) - len(answer)
            columns[f"{branch}_mask"] = trained[first : first + len(answer)]
    return columns


def _truncate(prompt: list[int], answers: list[list[int]], limit: int, mode: str) -> tuple[list[int], list[list[int]]]:
    """Truncate a prompt with its answers to ``limit`` tokens. ``keep_start`` removes the end of answers. ``keep_end`` removes
    the start of the prompt first, and then the start of answers.
    """
    if mode == "keep_start":
        return prompt, [answer[: limit - len(prompt)] for answer in answers]
    excess = len(prompt) + max(map(len, answers)) - limit
    # Keep at least one prompt token, because the first answer token is predicted from it.
    truncated = prompt[excess:] if excess < len(prompt) else prompt[-1:]
    return truncated, [answer[-(limit - len(truncated)) :] for answer in answers]


def prepare_answers(
    dataset: AnyDataset,
    tokenizer: Tokenizer,
    options: AnswerOptions,
    *,
    name: str = "train",
    num_proc: int | None = None,
    keep: tuple[str, ...] = (),
) -> tuple[Any, PreparationReport]:
    """Tokenize prompts and answers into a column ``prompt_ids`` and one column ``<branch>_ids`` per answer. The dataset
    keeps the columns in ``keep``.

    Returns:
        The tokenized dataset, and a report. The report does not count the rows of a stream.

    Raises:
        DataError: A row is invalid, prompts and answers cannot be separated in more than 1 % of the rows, or no row remains.
    """
    first_row(dataset, name)
    columns = get_dataset_column_names(dataset)
    keep = tuple(column for column in keep if column in columns)
    wanted = {"prompt_ids", *(f"{branch}_ids" for branch in options.branches)}
    if wanted <= set(columns):
        return dataset, PreparationReport(name)
    missing = [branch for branch in options.branches if branch not in columns]
    if missing:
        raise DataError(
            f"the {name} rows need the columns {list(options.branches)}, but {missing} is not in {sorted({*columns} - {ROW})}."
        )
    drop = [column for column in columns if column not in keep]
    about: dict[str, Any] = {"drop": drop, "counters": COUNTERS, "num_proc": num_proc, "hint": HINT}
    _, _, rows, report = tokenized(dataset, name, _answer_batch, {"tokenizer": tokenizer, "options": options}, **about)
    _report_dropped(report, options)
    return rows, report


def _report_dropped(report: PreparationReport, options: AnswerOptions) -> None:
    name, n = report.name, report.rows_in
    if (count := report.dropped.get(UNUSABLE, 0)) > MOST_UNUSABLE * n:
        raise DataError(
            f"{name} dataset: {count} of {n} rows {UNUSABLE}, but at most {MOST_UNUSABLE:.0%} are allowed. {HINT}"
        )
    if report.diverged:
        logger.warning(
            "%s dataset: in %d of %d rows, the end of the prompt is tokenized differently when an answer follows. From the "
            "first token that differs, the tokens belong to the answer instead of the prompt.",
            name, report.diverged, n,
        )  # fmt: skip
    if report.inner and not options.mask_inner_turns:
        logger.warning(
            "%s dataset: in %d of %d rows, an answer contains user or tool turns. These turns are trained like the "
            "assistant's text. To exclude them from the loss, set mask_inner_turns=True.",
            name, report.inner, n,
        )  # fmt: skip
    if report.truncated > 0.1 * n:
        logger.warning(
            "%s dataset: in %d of %d rows, an answer was truncated to max_length=%s.",
            name,
            report.truncated,
            n,
            options.max_length,
        )


def answer_rows(
    examples: Iterable[Mapping[str, Any]], branches: Sequence[str], columns: Mapping[str, Sequence[str]] | None = None
) -> list[Row]:
    """Convert each tokenized example to a row with the shared prompt and one completion per branch.

    Args:
        examples: Examples with ``prompt_ids`` and ``<branch>_ids``.
        branches: Names of the answers, in order.
        columns: Sequence columns of the new rows. The key is the name of a row column. The value is a list with the names of
            the example columns from which the values are read, one per branch.

    Raises:
        DataError: An answer has no tokens.
    """
    rows = []
    for index, example in enumerate(examples):
        answers = [list(example[f"{branch}_ids"]) for branch in branches]
        for branch, answer in zip(branches, answers, strict=True):
            if not answer:
                raise DataError(f"row {index} of a batch: {branch}_ids is empty. Fix: remove rows without an answer.")
        masks = [example.get(f"{branch}_mask") for branch in branches]
        masks = [list(mask or [1] * len(answer)) for mask, answer in zip(masks, answers, strict=True)]
        row = Row(list(example["prompt_ids"]), answers, masks)
        for name, sources in (columns or {}).items():
            if all(example.get(source) is not None for source in sources):
                row.sequence_columns[name] = [float(example[source]) for source in sources]
        rows.append(row)
    return rows


# Unicode names of scripts without spaces between words. In these scripts, every position between two letters is treated as a
# word boundary.
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the common prefix of ``chosen`` and ``rejected`` as the prompt, and remove it from both answers.

    Conversations are compared by message. Strings are compared by character, and the prompt ends at a word boundary. Spaces at
    the boundary belong to the answers, because tokenizers merge a space with the next word.

    Returns:
        A dict with ``prompt``, ``chosen`` and ``rejected``.

    Raises:
        DataError: The answers are equal, an answer is empty, or two conversations have no common message.

    >>> extract_prompt({"chosen": "The sky is blue.", "rejected": "The sky is black."})
    {'prompt': 'The sky is', 'chosen': ' blue.', 'rejected': ' black.'}
    """
    chosen, rejected = example["chosen"], example["rejected"]
    if not chosen or not rejected:
        raise DataError(f"{'chosen' if not chosen else 'rejected'} is empty, but a pair needs two answers.")
    # Arrow adds missing keys with the value None to messages. Drop keys with the value None, so that equal messages compare
    # as equal.
    bare = strip_none({"chosen": chosen, "rejected": rejected})
    if bare["chosen"] == bare["rejected"]:
        raise DataError("chosen and rejected are equal, so the row contains no preference. Fix: remove the row.")
    cut = _shared_messages(**bare) if isinstance(chosen, list) else _shared_text(chosen, rejected)
    if isinstance(chosen, list) and cut <= 0:
        if example.get("prompt") is not None:
            raise DataError(
                f"column 'prompt' is text ({str(example['prompt'])[:60]!r}), but chosen and rejected are messages that do not "
                'begin with it. Fix: convert the prompt to messages: [{"role": "user", "content": ...}].'
            )
        raise DataError(
            "column 'prompt' is missing, and it cannot be extracted because the first messages of chosen and rejected differ. "
            f"The row has the columns {sorted(example)}. Fix: rename the prompt's column to 'prompt', or add a 'prompt' column."
        )
    return {"prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shared_messages(chosen: list[Any], rejected: list[Any]) -> int:
    cut = _shared(chosen, rejected)
    # If one conversation is a prefix of the other, shorten the prompt, because no answer may be empty.
    if cut == min(len(chosen), len(rejected)):
        cut -= 1
        while cut > 0 and chosen[cut - 1].get("role") == "assistant":
            cut -= 1
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


def maybe_extract_prompt(example: Mapping[str, Any]) -> Mapping[str, Any]:
    """Apply `extract_prompt` to a row without a prompt. If both answers of a row repeat its prompt, remove the prompt from
    the answers.

    All other rows are returned unchanged.
    """
    if "chosen" not in example or "rejected" not in example:
        return example
    prompt, chosen, rejected = example.get("prompt"), example["chosen"], example["rejected"]
    if prompt is None:
        return {**example, **extract_prompt(example)}
    # The prompt column is text, but the two conversations contain the prompt as messages.
    if is_messages(chosen) and not is_messages(prompt):
        return {**example, **extract_prompt(example)}
    # Remove keys that Arrow added with the value None; see `extract_prompt`.
    bare = strip_none({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    head = bare["prompt"]
    if isinstance(head, list) and head and bare["chosen"][: len(head)] == head == bare["rejected"][: len(head)]:
        warn_once(
            logger,
            "chosen and rejected begin with the messages of the prompt. These messages are removed from chosen and rejected.",
        )
        return {**example, "chosen": chosen[len(head) :], "rejected": rejected[len(head) :]}
    return example


def unpair_preference_dataset(dataset: AnyDataset, *, interleave: bool = True, **map_kwargs: Any) -> Any:
    """Convert pairs of answers to rows with one answer and a ``label``, which is True for chosen answers and False for
    rejected answers.

    The conversion is valid only if every chosen answer is good, and not only better than the rejected answer, and every
    rejected answer is bad.

    Args:
        dataset: ``Dataset``, ``DatasetDict`` or an iterable equivalent, with columns ``chosen`` and ``rejected``.
        interleave: Whether the two answers of a pair are consecutive rows. If False, each batch of ``map`` consists of all
            chosen answers of the batch, followed by all rejected answers. A training batch may then contain answers with only
            one label.
        map_kwargs: Additional arguments of ``dataset.map``.

    Raises:
        DataError: The dataset already has a column ``completion`` or ``label``, which would be overwritten.
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
        what = f"has no column {missing}" if missing else f"already has the column {taken}, which would be overwritten"
        raise DataError(f"the dataset cannot be unpaired, because it {what}. Its columns are {columns}.")
    if isinstance(dataset, datasets.IterableDataset):
        map_kwargs = {k: v for k, v in map_kwargs.items() if k not in ("num_proc", "desc")}
    else:
        answer = united(*(dataset.features[side] for side in SIDES))
        features = features_with(dataset, drop=SIDES, completion=answer, label=datasets.Value("bool"))
        map_kwargs = {"features": features, **map_kwargs}
    return dataset.map(partial(_unpair, interleave=interleave), batched=True, remove_columns=list(SIDES), **map_kwargs)


def _unpair(batch: dict[str, list], *, interleave: bool) -> dict[str, list]:
    size = len(batch["chosen"])
    order = [i + side * size for i in range(size) for side in (0, 1)] if interleave else list(range(2 * size))
    doubled = {name: column * 2 for name, column in batch.items() if name not in ("chosen", "rejected")}
    doubled["completion"] = batch["chosen"] + batch["rejected"]
    doubled["label"] = [True] * size + [False] * size
    return {name: [column[i] for i in order] for name, column in doubled.items()}


def maybe_unpair_preference_dataset(dataset: AnyDataset, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Apply `unpair_preference_dataset` to a dataset with ``chosen`` and ``rejected``. Return other datasets unchanged."""
    first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    if not {"chosen", "rejected"} <= set(get_dataset_column_names(first)):
        return dataset
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)


def extract_and_unpair(dataset: AnyDataset, num_proc: int | None = None) -> Any:
    """Convert pairs to rows with one labeled answer, with or without a prompt column. Return datasets without pairs
    unchanged.
    """
    if isinstance(dataset, dict) or not {"chosen", "rejected"} <= set(get_dataset_column_names(dataset)):
        return dataset
    # Do not decode images, because decoding a JPEG and encoding it a second time would reduce its quality.
    dataset = undecoded(dataset)
    if isinstance(dataset, datasets.IterableDataset):
        return unpair_preference_dataset(dataset.map(maybe_extract_prompt))
    kinds = dataset.features
    # If answers are conversations, a text prompt is replaced with the messages that both answers begin with.
    prompt = united(kinds["chosen"], *([kinds["prompt"]] if hasattr(kinds.get("prompt"), "feature") else []))
    apart = dataset.map(maybe_extract_prompt, num_proc=num_proc, features=features_with(dataset, prompt=prompt))
    return unpair_preference_dataset(apart, num_proc=num_proc)


PAIR_HINT = "Increase max_length, or check for answers with equal tokens. `posttrain inspect` shows the rows."


def _pair_batch(
    batch: dict[str, list], indices: list[int], tokenizer: Tokenizer, max_length: int | None
) -> dict[str, list]:
    """Tokenize the prompt with each of the two answers of every pair, and determine the reasons for dropping pairs."""
    names = [f"{side}_ids" for side in SIDES]
    pairs = [list(pair) for pair in zip(*(batch[name] for name in names), strict=True)] if names[0] in batch else None
    if pairs is None:
        texts = []
        for index, example in given_rows(batch, indices):
            with naming(f"row {index}"):
                texts.append(_sides(strip_none(example), tokenizer))
        pairs = encode_rows(tokenizer, texts, indices)
        for (plain, _), pair in zip(texts, pairs, strict=True):
            if plain:
                pair[:] = [one_eos(one_bos(ids, tokenizer.bos_token_id), tokenizer) for ids in pair]
    for index, pair, margin in zip(indices, pairs, batch.get("margin", [0.0] * len(indices)), strict=True):
        with naming(f"row {index}"):
            for name, ids in zip(names, pair, strict=True):
                check_ids(ids, name, len(tokenizer))
            check_number("margin", margin)
    columns = {name: [pair[side] for pair in pairs] for side, name in enumerate(names)}
    return {**columns, "_reason": [_left_out(*pair, max_length) for pair in pairs]}


def check_number(column: str, value: object) -> None:
    """Raise an error for a value that is not a finite number, because it would make the loss infinite or NaN.

    Raises:
        DataError: The value is None, NaN, infinite, or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"column {column!r} must contain a finite number in every row, but it contains {value!r}. Fix: correct the value, "
            "or remove the row."
        )


def check_numbers(dataset: AnyDataset, columns: Sequence[str], name: str) -> None:
    """Apply `check_number` to each row of a ``Dataset`` that has all of the columns. Streams are not checked."""
    if isinstance(dataset, datasets.Dataset) and {*columns} <= {*dataset.column_names}:
        numbers = dataset[ROW] if ROW in dataset.column_names else range(len(dataset))
        for column, values in read_columns(dataset, columns).items() if columns else ():
            for row, value in zip(numbers, values, strict=True):
                with naming(f"{name} row {row}"):
                    check_number(column, value)


def _left_out(chosen: list[int], rejected: list[int], limit: int | None) -> str:
    """Return the reason for dropping a pair, or "" if the pair is kept."""
    if not chosen or not rejected:
        return "with an answer without tokens"
    if chosen == rejected:
        return "with two equal answers"
    return f"longer than max_length={limit}" if limit is not None and max(len(chosen), len(rejected)) > limit else ""


def _sides(row: dict[str, Any], tokenizer: Tokenizer) -> tuple[bool, list[str]]:
    """Return whether a pair is plain text, and the two texts to tokenize. If the row has a prompt, each text is the prompt
    followed by an answer.
    """
    if row.get("prompt") is not None and all(is_messages(row.get(side)) for side in SIDES):
        # No prompt can be extracted from a pair with equal answers. The pair is dropped later.
        equal = row["chosen"] == row["rejected"]
        row = {**row, "prompt": []} if equal else dict(maybe_extract_prompt(row))
    prompt = row.get("prompt")
    texts: list[Any] = []
    for side in SIDES:
        answer = row.get(side)
        if not answer:
            raise DataError(f"column {side!r} is empty or missing. The row has the columns {sorted(row)}.")
        for name, value in ((side, answer), ("prompt", prompt)):
            if not (value is None or isinstance(value, str) or is_messages(value) or value == []):
                raise DataError(
                    f"column {name!r} must be a string or a list of messages, not {type(value).__name__}: "
                    f"{str(value)[:60]!r}."
                )
        if prompt is not None and isinstance(prompt, str) != isinstance(answer, str):
            raise DataError(
                f"column 'prompt' and column {side!r} must both be strings or both be lists of messages, but they are "
                f"{type(prompt).__name__} and {type(answer).__name__}."
            )
        texts.append(answer if prompt is None else prompt + answer)
    if all(isinstance(text, str) for text in texts):
        return True, texts
    return False, [render(tokenizer, text, **template_arguments(row)) for text in texts]


def prepare_reward_dataset(
    dataset: AnyDataset,
    tokenizer: Tokenizer,
    *,
    max_length: int | None = 1024,
    name: str = "train",
    num_proc: int | None = None,
) -> Any:
    """Tokenize preference rows for reward models. The result has the columns ``chosen_ids`` and ``rejected_ids``. If the rows
    have a column ``margin``, the result has this column too.

    A pair is dropped and counted if its answers are equal, if an answer has no tokens, or if an answer is longer than
    ``max_length``.

    Raises:
        DataError: A row cannot be tokenized, or no row remains.
    """
    first_row(dataset, name)
    columns = get_dataset_column_names(dataset)
    for side in SIDES:
        if f"{side}_input_ids" in columns and f"{side}_ids" not in columns:
            logger.warning("column '%s_input_ids' is used as '%s_ids', which is its current name.", side, side)
            dataset = dataset.rename_column(f"{side}_input_ids", f"{side}_ids")
    columns = get_dataset_column_names(dataset)
    if not {"chosen_ids", "rejected_ids"} <= set(columns) and not set(SIDES) <= set(columns):
        raise DataError(f"the {name} rows need 'chosen' and 'rejected', but have columns {sorted({*columns} - {ROW})}.")
    arguments = {"tokenizer": tokenizer, "max_length": max_length}
    drop = [column for column in columns if column not in ("margin", ROW)]
    return tokenized(dataset, name, _pair_batch, arguments, drop=drop, num_proc=num_proc, hint=PAIR_HINT)[2]


def pair_rows(examples: Iterable[dict[str, Any]]) -> list[Row]:
    """Convert each tokenized pair to a row. The prompt of the row is the common token prefix of the two answers. A ``margin``
    becomes a sequence column.
    """
    rows = []
    for example in examples:
        chosen, rejected = example["chosen_ids"], example["rejected_ids"]
        cut = min(common_prefix(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        sides = [chosen[cut:], rejected[cut:]]
        row = Row(chosen[:cut], sides, [[1] * len(side) for side in sides])
        if example.get("margin") is not None:
            row.sequence_columns["margin"] = [float(example["margin"])] * 2
        rows.append(row)
    return rows
