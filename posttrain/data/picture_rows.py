"""Rows with pictures to token ids: expanded, counted before any pixel is read, and refused where a picture would be cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.data.chat import RENDERED, common_prefix, template_arguments
from posttrain.data.formats import (
    PreparationReport,
    first_row,
    get_dataset_column_names,
    is_messages,
    maybe_convert_to_chatml,
    one_eos,
    pictures_of,
    strip_none,
    tokenized,
    undecoded,
)
from posttrain.data.pictures import Background, Picture, conversation_pictures, read_picture
from posttrain.data.preference import maybe_extract_prompt
from posttrain.data.processors import PictureProcessor, Placed
from posttrain.errors import DataError
from posttrain.types import Prompt, Row

__all__ = [
    "IMAGES",
    "PictureOptions",
    "conversation_of",
    "picture_prompt",
    "picture_prompts",
    "place_pictures",
    "prepare_picture_rows",
]

logger = logging.getLogger(__name__)

IMAGES = ("image", "images")  # Columns of a row.
IGNORED = -100
RARE = 0.005  # Share of rows that do not fit which is dropped and counted; more of them is an error.
HINT = "Fix: a larger max_length (None: no limit), or smaller images; posttrain inspect shows the rows."
LONG = "longer than max_length with their images"
LARGE = "with an image of more than image_max_tokens"
MANY = "with more than max_images_per_row images"
UNREADABLE = "with an unreadable image"
EMPTY = "with an empty answer"
EQUAL = "with equal answers"
COUNTERS = ("_truncated", "_tokens", "_resized", "_escaped")


@dataclass(frozen=True)
class PictureOptions:
    """How rows with pictures become ids; hashable by value, so that the dataset's fingerprint is stable from run to run.

    Attributes:
        branches: Columns of answers; empty: documents with labels (SFT).
        max_length: Tokens of prompt and answer, images included; None: no limit.
        fit: ``error`` refuses a set in which more than 0.5 % of the rows do not fit or cannot be read, ``drop`` leaves them out;
            ``resize`` is ``error``, but images of too many placeholders are made smaller (`PictureProcessor.fitted`).
        most: Images a row may have; None: any number.
        background: What shows through transparent pixels.
        train_prompt: SFT: whether the prompt is trained too.
        text_field: SFT: column of plain text.
    """

    branches: tuple[str, ...] = ()
    max_length: int | None = 1024
    fit: Literal["error", "drop", "resize"] = "error"
    most: int | None = None
    background: Background = "white"
    train_prompt: bool = False
    text_field: str = "text"


def prepare_picture_rows(
    dataset: Any,
    reader: PictureProcessor,
    options: PictureOptions,
    *,
    name: str = "train",
    num_proc: int | None = None,
    keep: Sequence[str] = (),
) -> tuple[Any, PreparationReport]:
    """Ids of rows and their pictures as encoded bytes or paths; lengths are counted with images, and nothing is decoded.

    Returns:
        The dataset with ``pictures`` and either ``input_ids`` and ``labels``, or ``prompt_ids`` with ``<branch>_ids`` and
        ``<branch>_mask``; and a report (counted for map-style datasets).

    Raises:
        DataError: A row that cannot be read, by number and column; more than 0.5 % of the rows do not fit; or none is left.
    """
    first_row(dataset, name, images=True)
    dataset = undecoded(dataset)
    columns = get_dataset_column_names(dataset)
    if "pictures" in columns:
        return dataset, PreparationReport(name)
    drop = [column for column in columns if column not in keep]
    about: dict[str, Any] = {"drop": drop, "counters": COUNTERS, "num_proc": num_proc, "hint": HINT}
    mapped, kept, report = tokenized(dataset, name, _batch, {"reader": reader, "options": options}, **about)
    lost = {reason: count for reason, count in report.dropped.items() if reason in (LONG, UNREADABLE, MANY)}
    known = isinstance(report.rows_in, int) and report.rows_in > 0
    resized, escaped = (sum(mapped[column][:]) if known else 0 for column in ("_resized", "_escaped"))
    if resized:
        logger.warning("%s dataset: %d images are made smaller, to image_max_tokens=%s.", name, resized, reader.most)
    if escaped:
        logger.warning("%s dataset: PT-G008: %d strings that stand for an image stay text.", name, escaped)
    if options.fit != "drop" and sum(lost.values()) > RARE * report.rows_in:
        worst = max(range(len(mapped)), key=lambda i: mapped[i]["_tokens"] * (mapped[i]["_reason"] in lost))
        raise DataError(
            f"PT-G001: {sum(lost.values())} of {report.rows_in} {name} rows are left out ({lost}); row {worst} has "
            f"{mapped[worst]['_tokens']} tokens with its images, and max_length={options.max_length}. Fix: max_length of at "
            f"least {mapped[worst]['_tokens']} (None: no limit), smaller images, or "
            "image_fit='drop'."
        )
    return kept, report


def _batch(
    batch: dict[str, list], indices: list[int], reader: PictureProcessor, options: PictureOptions
) -> dict[str, list]:
    made: list[dict[str, Any]] = []
    for position, index in enumerate(indices):
        row = strip_none({name: column[position] for name, column in batch.items() if column[position] is not None})
        try:
            made.append(_row(row, reader, options))
        except DataError as error:
            raise DataError(f"row {index}: {error}") from error
    return {name: [one[name] for one in made] for name in made[0]}


def _row(row: dict[str, Any], reader: PictureProcessor, options: PictureOptions) -> dict[str, Any]:
    """One row as columns of ids, with the reason why it is left out."""
    row = dict(maybe_extract_prompt(maybe_convert_to_chatml(row)))
    segments, plain = _segments(row, reader, options)
    reason, found, resized = "", [], 0
    try:
        reason, where = UNREADABLE, "column 'images'"
        read = [(text, [read_picture(v, where, options.background) for v in values]) for text, values in segments]
        reason = LARGE
        found = [(text, [reader.fitted(picture) for picture in held]) for text, held in read]
        reason = ""
        resized = sum(
            a != b for (_, old), (_, new) in zip(read, found, strict=True) for a, b in zip(old, new, strict=True)
        )
    except DataError:
        if options.fit != "drop":
            raise
        found = [(reader.unplaced(part), []) for part, _ in segments]
    counts = {"_resized": resized, "_escaped": sum(reader.escaped(text) for text, _ in found)}
    pictures = [picture for _, held in found for picture in held]
    if not pictures and not reason and reader.family.block == "prompt":
        raise DataError(
            "the row has no image, and this model's processor takes no prompt without one. Fix: leave it out."
        )
    if options.most is not None and len(pictures) > options.most:
        reason = reason or MANY
    if plain and reader.family.block != "prompt":
        found[0] = (reader.begun(found[0][0]), found[0][1])
    placed = [reader.encode(text, held, prompt=not at and len(found) > 1) for at, (text, held) in enumerate(found)]
    (prompt, _), answers = placed[0] if len(found) > 1 else ([], []), placed[min(1, len(found) - 1) :]
    answers = [(one_eos(ids, reader.tokenizer) if plain else ids, where) for ids, where in answers]
    return _columns(prompt, answers, pictures, reason, reader, options) | counts


def _segments(
    row: dict[str, Any], reader: PictureProcessor, options: PictureOptions
) -> tuple[list[tuple[str, list[Any]]], bool]:
    """Text and pictures of the prompt and of each answer, or of a whole document; and whether they are plain text."""
    images, branches = pictures_of(row), options.branches or ("completion",)
    if not options.branches and "prompt" not in row:
        whole = row.get("messages", row.get(options.text_field))
        if is_messages(whole):
            if reader.family.block == "prompt":
                raise DataError("this model reads a prompt both ways. Fix: give 'prompt' and 'completion' apart.")
            return [reader.conversation(whole, images, **template_arguments(row))], False
        return [(_text(whole, options.text_field), images)], True
    prompt = row.get("prompt")
    answers = [row.get(branch) for branch in branches]
    if not is_messages(prompt):
        texts = [_text(value, column) for column, value in zip(("prompt", *branches), (prompt, *answers), strict=True)]
        return [(texts[0], images), *((text, []) for text in texts[1:])], True
    blocks, shown = conversation_pictures(prompt, images)
    begin = reader.render(blocks, **template_arguments(row), add_generation_prompt=True)
    wholes, inside = [], []
    for branch, answer in zip(branches, answers, strict=True):
        if not is_messages(answer):
            raise DataError(f"column 'prompt' holds messages and column {branch!r} is {str(answer)[:60]!r}.")
        more, held = conversation_pictures(answer)
        wholes.append(reader.render([*blocks, *more], **template_arguments(row)))
        inside.append(held)
    # Where a template writes the prompt differently before an answer, the boundary is where the texts part.
    begin = begin[: min(common_prefix(begin, whole) for whole in wholes)]
    if reader.places(begin) != len(shown):
        raise DataError("the chat template writes the prompt's images differently before an answer.")
    return [(begin, shown), *((w[len(begin) :], held) for w, held in zip(wholes, inside, strict=True))], False


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"column {column!r} must be text or messages, and it is {str(value)[:60]!r}.")
    return value


def _columns(
    prompt: list[int],
    answers: list[tuple[list[int], list[Placed]]],
    pictures: list[Picture],
    reason: str,
    reader: PictureProcessor,
    options: PictureOptions,
) -> dict[str, Any]:
    limit, cut = options.max_length, False
    length = len(prompt) + max(len(ids) for ids, _ in answers)
    if limit is not None and length > limit:
        ends = [max((_end(ids, one, reader) for one in placed), default=1) for ids, placed in answers]
        if len(prompt) + max(ends) > limit:
            reason = reason or LONG
        else:
            answers, cut = [(ids[: limit - len(prompt)], placed) for ids, placed in answers], True
    if any(not ids for ids, _ in answers):
        reason = reason or EMPTY
    if len(answers) == 2 and answers[0][0] == answers[1][0] and not answers[0][1]:
        reason = reason or EQUAL
    silent = set(reader.controls.values()) | {reader.token_id}
    masks = [[int(token not in silent) for token in ids] for ids, _ in answers]
    made: dict[str, Any] = {}
    if options.branches:
        made["prompt_ids"] = prompt
        for branch, (ids, _), mask in zip(options.branches, answers, masks, strict=True):
            made |= {f"{branch}_ids": ids, f"{branch}_mask": mask}
    else:
        ids, trained = prompt + answers[0][0], [int(options.train_prompt)] * len(prompt) + masks[0]
        made["input_ids"] = ids
        made["labels"] = [t if m and t not in silent else IGNORED for t, m in zip(ids, trained, strict=True)]
    made["pictures"] = [_stored(picture) for picture in pictures]
    return made | {"_reason": reason, "_truncated": int(cut), "_tokens": length}


def _end(ids: list[int], placed: Placed, reader: PictureProcessor) -> int:
    """Index behind the last placeholder of a picture."""
    at, left = placed.start, placed.count
    while left:
        left -= ids[at] == reader.token_id
        at += 1
    return at


def _stored(picture: Picture) -> dict[str, Any]:
    """A picture as a row of Arrow holds it: encoded bytes or a path."""
    source = picture.encoded().source
    return {"bytes": source, "path": None} if isinstance(source, bytes) else {"bytes": None, "path": source}


def place_pictures(
    rows: list[Row],
    examples: Iterable[Mapping[str, Any]],
    reader: PictureProcessor | None,
    background: Background = "white",
) -> list[Row]:
    """Put the pictures of prepared examples on their rows, one row an example; rows without pictures stay as they are.

    A document (a row without prompt) gets what stands before its first trained token as prompt, because what a family reads
    both ways is the prompt.

    Raises:
        DataError: A row's ids hold other placeholders than its pictures have; or an answer has some, for a model that takes
            none there.
    """
    for row, example in zip(rows, examples, strict=True):
        held = example.get("pictures") or ()
        if not held:
            continue
        if reader is None:
            raise DataError("the rows have pictures and there is no processor. Fix: pass one as processing_class.")
        pictures = [reader.fitted(read_picture(value, "column 'pictures'", background)) for value in held]
        if not row.prompt_ids:
            (ids,), (mask,) = row.completions, row.loss_masks
            first = mask.index(1) if 1 in mask else 0
            row.prompt_ids, row.completions, row.loss_masks = ids[:first], [ids[first:]], [mask[first:]]
        row.pictures = reader.place_all([row.prompt_ids, *row.completions], pictures)
        if reader.family.cross and any(row.pictures[1:]):
            raise DataError(
                "an answer holds images, and text before an image attends to it in this model: prompt and other answers would "
                "see it. Fix: images in prompts alone, or leave this row out."
            )
    return rows


def picture_prompts(
    reader: PictureProcessor,
    rows: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    ids_of: Callable[[str], list[int]] | None = None,
) -> list[Prompt]:
    """Prompts as the model reads them, with their pictures placed; equal neighbours are read once.

    Args:
        reader: Of the run.
        rows: With a conversational ``prompt``.
        kwargs: For the chat template; a row's own win.
        ids_of: See `PictureProcessor.encode`.

    Raises:
        DataError: A prompt is no conversation, holds more than ``max_images_per_row`` images, or cannot be read.
    """
    made: list[Prompt] = []
    before: Mapping[str, Any] = {}
    for row in rows:
        if not made or any(row.get(name) != before.get(name) for name in (*RENDERED, *IMAGES)):
            made.append(picture_prompt(reader, row, kwargs, ids_of))
        else:
            made.append(made[-1])
        before = row
    return made


def picture_prompt(
    reader: PictureProcessor,
    row: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    ids_of: Callable[[str], list[int]] | None = None,
    pictures: Sequence[Picture] | None = None,
) -> Prompt:
    """One of `picture_prompts`.

    Args:
        reader: Of the run.
        row: With a conversational ``prompt``.
        kwargs: For the chat template; the row's own win.
        ids_of: See `PictureProcessor.encode`.
        pictures: That were read before, of a row whose messages hold them again; None: read those of the row.
    """
    row = strip_none(dict(row))
    # The messages hold what the columns hold where pictures were read before.
    blocks, held = conversation_of(row if pictures is None else {k: v for k, v in row.items() if k not in IMAGES})
    if reader.per_row is not None and len(held) > reader.per_row:
        raise DataError(
            f"a prompt has {len(held)} images, and max_images_per_row={reader.per_row}. Fix: leave this row out."
        )
    goes_on = blocks[-1].get("role") == "assistant"
    how = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
    text = reader.render(blocks, **how, **{**kwargs, **template_arguments(row)})
    reader.sanitized += reader.escaped(text)
    if pictures is None:
        read = [read_picture(value, "column 'images' of a prompt", reader.background) for value in held]
        pictures = [reader.fitted(picture).encoded() for picture in read]
        reader.resized += sum(a != b for a, b in zip(read, pictures, strict=True))
    return Prompt(*reader.encode(text, pictures, prompt=True, ids_of=ids_of))


def conversation_of(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages of a prompt with empty image blocks, and what belongs in them.

    Raises:
        DataError: The prompt is no conversation, or has other places than images.
    """
    if not is_messages(row["prompt"]):
        raise DataError("rows with images need conversational prompts: [{'role': 'user', 'content': ...}].")
    return conversation_pictures(row["prompt"], pictures_of(row))
