"""Conversion of rows with images. Rows are split into segments of text, converted to token ids, and get the positions of
their images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from datasets import Features, List, Value

from posttrain.data.chat import RENDERED, assistant_spans, common_prefix, template_arguments, turn_end
from posttrain.data.formats import (
    PICTURE_COLUMNS,
    PROMPT_COLUMNS,
    given_rows,
    is_messages,
    maybe_convert_to_chatml,
    naming,
    one_eos,
    pictures_of,
)
from posttrain.data.packing import LENGTHS, best_fit_decreasing
from posttrain.data.preference import maybe_extract_prompt
from posttrain.data.sft import CUT, IGNORED, NO_ASSISTANT
from posttrain.errors import DataError
from posttrain.extensions.images.picture import Picture, conversation_pictures, filled, read_picture
from posttrain.types import Prompt, Row
from posttrain.values import strip_none

if TYPE_CHECKING:
    from posttrain.extensions.images.processors import PictureProcessor

PACKED = 256  # Number of rows that are packed in one call. Their encoded images are in memory at the same time.
HINT = "Fix: use a larger max_length (None: no limit), or smaller images. posttrain inspect shows the rows."
LONG = "longer than max_length with their images"
LARGE = "with an image of more than image_max_tokens or image_max_pixels"
MANY = "with more than max_images_per_row images"
UNREADABLE = "with an unreadable image"
# Reasons for dropping a row that only a small fraction of the rows may have. A larger fraction is an error.
LOST = (LONG, UNREADABLE, MANY)
EMPTY = "with an empty answer"
EQUAL = "with equal answers"
COUNTERS = ("_truncated", "_tokens", "_resized", "_escaped")

Segments = list[
    tuple[str, list[Picture]]
]  # Segments of a row. Each segment is a text with the images of its placeholders.
Answer = tuple[list[int], list[int]]  # Token ids and loss mask of an answer.


@dataclass(frozen=True)
class PictureOptions:
    """Options for the conversion of rows with images to token ids. Equal options have equal hashes, so that fingerprints of
    datasets are stable.

    Attributes:
        branches: Names of the answer columns. Empty: rows are documents with labels, for SFT.
        max_length: Maximum number of tokens of a prompt with its answer, including image tokens. None: no limit.
        fit: ``error``: raise an error if more than 0.5 % of the rows are too long or cannot be read. ``drop``: drop these
            rows. ``resize``: same as ``error``, but first resize images that exceed a limit of `PictureProcessor.fitted` or
            make their row longer than ``max_length``.
        train_prompt: SFT: whether the prompt contributes to the loss.
        spoken: SFT: whether the loss is restricted to assistant messages.
        text_field: SFT: name of the column with plain text.
        begins: Whether to add the tokenizer's bos token before conversations, as is done for prompts in sampling.
    """

    branches: tuple[str, ...] = ()
    max_length: int | None = 1024
    fit: Literal["error", "drop", "resize"] = "error"
    train_prompt: bool = False
    spoken: bool = False
    text_field: str = "text"
    begins: bool = False


# Rows with answers as ids ----------------------------------------------------------------------------------------


def row_batch(
    batch: dict[str, list], indices: list[int], reader: PictureProcessor, options: PictureOptions
) -> dict[str, list]:
    """Convert a batch of rows to columns of token ids. `Vision.prepare_rows` maps this function over a dataset."""
    encoded_rows: list[dict[str, Any]] = []
    for index, row in given_rows(batch, indices):
        with naming(f"row {index}"):
            encoded_rows.append(_row(strip_none(row), reader, options))
            for picture in encoded_rows[-1]["pictures"]:
                picture["row"] = index
    return {name: [encoded[name] for encoded in encoded_rows] for name in encoded_rows[0]}


def row_features(features: object, branches: Sequence[str], drop: Sequence[str]) -> Any:
    """Return the types of all columns. They cannot be inferred from the first thousand rows, because these rows may have no
    images.
    """
    ids = ["prompt_ids", *(f"{b}_ids" for b in branches)] if branches else ["input_ids", "labels"]
    types = {name: kind for name, kind in features.items() if name not in drop}
    types |= {name: List(Value("int64")) for name in [*ids, *(f"{b}_mask" for b in branches)]}
    types |= {"_counts": List(Value("int64")), "_reason": Value("string")}
    picture = {"bytes": Value("binary"), "path": Value("string"), "size": List(Value("int64")), "row": Value("int64")}
    return Features(types | {"pictures": List(picture)})


def _row(row: dict[str, Any], reader: PictureProcessor, options: PictureOptions) -> dict[str, Any]:
    """Convert one row to columns of token ids. If the row will be dropped, the result contains the reason."""
    row = dict(maybe_extract_prompt(maybe_convert_to_chatml(row)))
    if options.spoken:
        segments, plain = spoken_segments(row, reader, prompt_too=options.train_prompt), False
    else:
        segments, plain = row_segments(row, reader, options.branches, options.text_field)
    reason, read, fitted = "", [], []
    try:
        reason, where = UNREADABLE, "column 'images'"
        read = [(text, [read_picture(v, where, reader.background) for v in values]) for text, values in segments]
        reason = LARGE
        fitted = [(text, [reader.fitted(picture) for picture in pictures]) for text, pictures in read]
        if options.fit == "drop":
            # Load the images now, so that they cannot raise an error during training. The header of a truncated image file
            # can be valid.
            reason = UNREADABLE
            for picture in _held(read):
                picture.load()
        reason = ""
    except DataError:
        if options.fit != "drop":
            raise
        # Remove the images and their placeholders. The row will be dropped, so its text does not matter.
        read = fitted = [(part.replace(reader.placeholder, ""), []) for part, _ in segments]
    if not _held(fitted) and not reason and reader.family.block == "prompt":
        raise DataError(
            "the row has no image, but this model's processor needs one in every prompt. Fix: remove the row."
        )
    if reader.per_row is not None and len(_held(fitted)) > reader.per_row:
        reason = reason or MANY
    if plain or options.begins:
        fitted[0] = (reader.begun(fitted[0][0]), fitted[0][1])
    if options.fit == "resize" and not reason:
        fitted = _smaller(fitted, reader, options, plain)
    counts = {
        "_resized": sum(old != new for old, new in zip(_held(read), _held(fitted), strict=True)),
        "_escaped": sum(reader.escaped(text) for text, _ in fitted),
    }
    return _columns(*_encoded(fitted, reader, options, plain), _held(fitted), reason, reader, options) | counts


def _held(segments: Segments) -> list[Picture]:
    """Return all images of a row, in reading order."""
    return [picture for _, pictures in segments for picture in pictures]


def _encoded(
    segments: Segments, reader: PictureProcessor, options: PictureOptions, plain: bool
) -> tuple[list[int], list[Answer]]:
    """Return the prompt's token ids, and the token ids and loss mask of each answer. A document has an empty prompt."""
    several = len(segments) > 1
    parts = [
        reader.encode(text, pictures, prompt=several and not at)[0] for at, (text, pictures) in enumerate(segments)
    ]
    prompt, *answers = parts if several else ([], *parts)
    silent = {*reader.controls.values(), reader.token_id}
    if options.spoken:
        # After the prompt, every second segment is an assistant message, whose tokens contribute to the loss.
        turns = [(token, int(not at % 2 and token not in silent)) for at, ids in enumerate(answers) for token in ids]
        return prompt, [([token for token, _ in turns], [trained for _, trained in turns])]
    answers = [one_eos(ids, reader.tokenizer) if plain else ids for ids in answers]
    return prompt, [(ids, [int(token not in silent) for token in ids]) for ids in answers]


def _length(prompt: list[int], answers: list[Answer]) -> int:
    return len(prompt) + max(len(ids) for ids, _ in answers)


def _least(prompt: list[int], answers: list[Answer], reader: PictureProcessor) -> int:
    """Return the minimum length to which a row may be truncated. It includes all images and one token of each answer."""
    return len(prompt) + max(
        max((at + 1 for at, token in enumerate(ids) if token == reader.token_id), default=1) for ids, _ in answers
    )


def _smaller(segments: Segments, reader: PictureProcessor, options: PictureOptions, plain: bool) -> Segments:
    """Resize the images of a row so that the row has at most ``max_length`` tokens. If this is not possible, return
    the images unchanged.
    """
    limit, most, shown = options.max_length, 0, segments
    while limit is not None and _held(segments):
        prompt, answers = _encoded(shown, reader, options, plain)
        if _least(prompt, answers, reader) <= limit:
            return shown
        counts = [reader.expansion(picture).count for picture in _held(shown)]
        # Maximum number of tokens for each image. Several attempts may be needed, because the text around an image can
        # depend on the image's size.
        room = (limit - _length(prompt, answers) + sum(counts)) // len(counts)
        most = max(min(room, max(counts) - 1), 1) if not most else int(0.9 * most)
        try:
            shown = [(text, [reader.fitted(picture, most) for picture in pictures]) for text, pictures in segments]
        except DataError:
            break
        if most <= 1:
            break
    return segments


def _columns(
    prompt: list[int],
    answers: list[Answer],
    pictures: list[Picture],
    reason: str,
    reader: PictureProcessor,
    options: PictureOptions,
) -> dict[str, Any]:
    limit, cut, length = options.max_length, False, _length(prompt, answers)
    if limit is not None and length > limit:
        if _least(prompt, answers, reader) > limit:
            reason = reason or LONG
        else:
            answers, cut = [(ids[: limit - len(prompt)], mask[: limit - len(prompt)]) for ids, mask in answers], True
    if options.spoken and not any(answers[0][1]):
        reason = reason or (CUT if cut else NO_ASSISTANT)
    if any(not ids for ids, _ in answers):
        reason = reason or EMPTY
    if len(answers) == 2 and answers[0][0] == answers[1][0] and reader.token_id not in answers[0][0]:
        reason = reason or EQUAL
    columns: dict[str, Any] = {}
    if options.branches:
        columns["prompt_ids"] = prompt
        for branch, (ids, mask) in zip(options.branches, answers, strict=True):
            columns |= {f"{branch}_ids": ids, f"{branch}_mask": mask}
    else:
        ((ids, of_answer),), silent = answers, {*reader.controls.values(), reader.token_id}
        whole = options.train_prompt and not options.spoken
        trained = [int(whole and token not in silent) for token in prompt] + of_answer
        columns["input_ids"] = prompt + ids
        columns["labels"] = [token if m else IGNORED for token, m in zip(prompt + ids, trained, strict=True)]
    columns["pictures"] = [stored(picture) for picture in pictures]
    return columns | {"_reason": reason, "_truncated": int(cut), "_tokens": length}


def side_by_side(batch: dict[str, list], size: int) -> dict[str, list]:
    """Pack rows with their images into rows of at most ``size`` tokens by best fit. No row is split or truncated."""
    lengths = np.array([len(ids) for ids in batch["input_ids"]])
    order, counts = best_fit_decreasing(lengths, size)
    packs = np.split(order, np.cumsum(counts)[:-1])
    columns = {name: [[item for i in pack for item in rows[i]] for pack in packs] for name, rows in batch.items()}
    return columns | {LENGTHS: [lengths[pack].tolist() for pack in packs]}


def row_segments(
    row: Mapping[str, Any], reader: PictureProcessor, branches: Sequence[str], text_field: str
) -> tuple[list[tuple[str, list[Any]]], bool]:
    """Split a row into segments with their images: the prompt and each answer, or a whole document. Also return whether the
    segments are plain text instead of rendered conversations.

    Args:
        row: Conversational or text row.
        reader: Processor that renders conversations.
        branches: Names of the answer columns. Empty: rows have ``completion`` after a prompt, or are documents.
        text_field: Column of plain documents.

    Raises:
        DataError: A column has the wrong type, or the chat template renders the prompt's images differently when an answer
            follows.
    """
    images, documents = pictures_of(row), not branches and "prompt" not in row
    branches = branches or ("completion",)
    if documents:
        whole = row.get("messages", row.get(text_field))
        if is_messages(whole):
            if reader.family.block == "prompt":
                raise DataError(
                    "this model has bidirectional attention in the prompt. Fix: use separate columns 'prompt' and "
                    "'completion'."
                )
            blocks, pictures = conversation_pictures(whole, images)
            return [(reader.render(blocks, **template_arguments(row)), pictures)], False
        return [(_text(whole, text_field), images)], True
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
            raise DataError(f"column 'prompt' contains messages, but column {branch!r} is {str(answer)[:60]!r}.")
        more, pictures = conversation_pictures(answer)
        wholes.append(reader.render([*blocks, *more], **template_arguments(row)))
        inside.append(pictures)
    # A template may render the prompt differently when an answer follows. End the prompt at the first difference.
    begin = begin[: min(common_prefix(begin, whole) for whole in wholes)]
    if reader.places(begin) != len(shown):
        raise DataError("the chat template writes the prompt's images differently before an answer.")
    return [(begin, shown), *((w[len(begin) :], pictures) for w, pictures in zip(wholes, inside, strict=True))], False


def spoken_segments(
    row: Mapping[str, Any], reader: PictureProcessor, *, prompt_too: bool
) -> list[tuple[str, list[Any]]]:
    """Split a conversation into segments with their images, for ``assistant_only_loss``. Every second segment is an
    assistant message. The other segments contain the text before and after assistant messages.

    Args:
        row: Row with ``messages``, or a conversational ``prompt`` with ``completion``.
        reader: Processor that renders conversations.
        prompt_too: Whether assistant messages in the prompt contribute to the loss.

    Raises:
        DataError: The row is not conversational. The error is also raised if the model has bidirectional attention in
            the prompt, because earlier answers would then attend to later answers.
    """
    if reader.family.block == "prompt":
        raise DataError(
            "this model has bidirectional attention in the prompt. Fix: set assistant_only_loss=False, and use "
            "'prompt' with 'completion'."
        )
    prompt, rest = row.get("prompt", []), row.get("completion", row.get("messages"))
    if not is_messages(rest) or not (prompt == [] or is_messages(prompt)):
        raise DataError(
            "assistant_only_loss=True needs conversations: 'messages', or 'prompt' and 'completion' of messages."
        )
    blocks, in_order = conversation_pictures([*prompt, *rest], pictures_of(row))
    end = turn_end(reader.tokenizer, reader.render)
    text, spans = assistant_spans(reader.render, blocks, end, **template_arguments(row))
    skipped = 0 if prompt_too else sum(message.get("role") == "assistant" for message in prompt)
    # If the conversation has no assistant message, add an empty segment for one at the end.
    places = spans[skipped:] or [(len(text), len(text))]
    cuts, pictures = [0, *(at for span in places for at in span), len(text)], iter(in_order)
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    return [(piece, list(islice(pictures, reader.places(piece)))) for piece in pieces]


def _text(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"column {column!r} must be text or messages, but it is {str(value)[:60]!r}.")
    return value


def place_pictures(rows: list[Row], examples: Iterable[Mapping[str, Any]], reader: PictureProcessor) -> list[Row]:
    """Add the images of prepared examples to their rows. A packed example has one row per document, and any other example
    has one row.

    A document is a row without a prompt. Its tokens before the first token with loss become the prompt, because some
    model families use bidirectional attention in the prompt. Rows without images are not changed.

    Raises:
        DataError: The placeholders in a row do not match its images. The error is also raised if an answer contains images
            but the model supports images only in prompts.
    """
    rest = iter(rows)
    done: list[Row] = []
    for example in examples:
        pictures = [
            read_picture(value, f"row {value.get('row')}", reader.background).resized(tuple(value["size"]))
            for value in example.get("pictures") or ()
        ]
        for row in islice(rest, len(example.get(LENGTHS) or (0,))):
            if pictures and any(reader.token_id in ids for ids in (row.prompt_ids, *row.completions)):
                row = _placed(row, pictures, reader)
            done.append(row)
        if pictures:
            raise DataError(f"PT-G011: {len(pictures)} images have no placeholders in their row.")
    return [*done, *rest]


def _placed(row: Row, pictures: list[Picture], reader: PictureProcessor) -> Row:
    """Return a row with its images. They are removed from the front of the example's list ``pictures``."""
    if not row.prompt_ids:
        (ids,), (mask,) = row.completions, row.loss_masks
        first = mask.index(1) if 1 in mask else 0
        # The prompt must not end inside an image. The first token with loss can be inside an image, because line breaks
        # between rows of tiles have loss.
        ends = {0, *accumulate(reader.expansion(picture).count for picture in pictures)}
        first = first if ids[:first].count(reader.token_id) in ends else 0
        row = replace(row, prompt_ids=ids[:first], completions=[ids[first:]], loss_masks=[mask[first:]])
    row = replace(row, pictures=reader.place_all([row.prompt_ids, *row.completions], pictures))
    if reader.family.cross and any(row.pictures[1:]):
        raise DataError(
            "an answer contains images, but in this model text before an image attends to that image, so the prompt and the "
            "other answers would attend to an image in this answer. Fix: use images only in prompts, or remove this row."
        )
    return row


def stored(picture: Picture) -> dict[str, Any]:
    """Return an image as a dict for Arrow. It contains encoded bytes or a path, and the size that the model receives."""
    source = picture.encoded().source
    data, path = (source, None) if isinstance(source, bytes) else (None, source)
    return {"bytes": data, "path": path, "size": list(picture.size)}


def picture_prompts(
    reader: PictureProcessor,
    rows: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    ids_of: Callable[[str], list[int]] | None = None,
) -> list[Prompt]:
    """Convert prompts to token ids with their images. Equal consecutive prompts are processed once.

    Args:
        reader: Processor of the run.
        rows: Rows with a conversational ``prompt``.
        kwargs: Arguments of the chat template. A row's own arguments override them.
        ids_of: Function that converts a rendered text to token ids. None: `PictureProcessor.ids`.

    Raises:
        DataError: A prompt is not a conversation, has more than ``max_images_per_row`` images, or has an unreadable image.
    """
    return _once(rows, (*RENDERED, *PICTURE_COLUMNS), lambda row: picture_prompt(reader, row, kwargs, ids_of))


def _once(rows: Iterable[Mapping[str, Any]], names: Sequence[str], make: Callable[[Any], Any]) -> list[Any]:
    """Apply ``make`` to each row. Consecutive rows with equal values in the columns ``names`` share one result."""
    results: list[Any] = []
    for _, alike in groupby(rows, key=lambda row: [row.get(name) for name in names]):
        first, *others = alike
        results += [make(first)] * (1 + len(others))
    return results


def opened(examples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return examples in which all images, in columns and messages, are PIL images. Pixels are decoded on access. Equal
    consecutive examples share image objects.
    """
    shown = _once(examples, PROMPT_COLUMNS, _opened)
    return [
        {**example, **{name: value for name, value in images.items() if name in example}}
        for example, images in zip(examples, shown, strict=True)
    ]


def _opened(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt and the image columns of one example, with PIL images."""

    def read(value: object) -> Any:
        return read_picture(value, "column 'images' of a prompt").opened()

    images = [read(value) for value in pictures_of(example)]
    example_opened: dict[str, Any] = {
        "image": images[0] if example.get("image") is not None else None,
        "images": images,
    }
    prompt: Any = example.get("prompt")
    if is_messages(prompt):
        blocks, pictures = conversation_pictures(prompt, range(len(images)))
        example_opened["prompt"] = filled(
            blocks, [images[image] if isinstance(image, int) else read(image) for image in pictures]
        )
    return example_opened


def picture_prompt(
    reader: PictureProcessor,
    row: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    ids_of: Callable[[str], list[int]] | None = None,
    pictures: Sequence[Picture] | None = None,
) -> Prompt:
    """Convert one prompt to token ids with its images. `picture_prompts` converts several prompts.

    Args:
        reader: Processor of the run.
        row: Row with a conversational ``prompt``.
        kwargs: Arguments of the chat template. The row's own arguments override them.
        ids_of: Function that converts a rendered text to token ids. None: `PictureProcessor.ids`.
        pictures: Images that were already read from the messages. None: the row's images are read here.
    """
    # With ``pictures``, the messages contain all images, so drop the image columns.
    row = strip_none({k: v for k, v in row.items() if pictures is None or k not in PICTURE_COLUMNS})
    blocks, shown = conversation_of(row)
    if reader.per_row is not None and len(shown) > reader.per_row:
        raise DataError(
            f"a prompt has {len(shown)} images, but max_images_per_row={reader.per_row}. Fix: remove this row."
        )
    goes_on = blocks[-1].get("role") == "assistant"
    how = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
    text = reader.begun(reader.render(blocks, **how, **{**kwargs, **template_arguments(row)}))
    reader.sanitized += reader.escaped(text)
    if pictures is None:
        read = [read_picture(value, "column 'images' of a prompt", reader.background) for value in shown]
        pictures = [reader.fitted(picture).encoded() for picture in read]
        reader.resized += sum(a != b for a, b in zip(read, pictures, strict=True))
    return Prompt(*reader.encode(text, pictures, prompt=True, ids_of=ids_of))


def conversation_of(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the messages of a prompt with empty image blocks, and the images of these blocks.

    Raises:
        DataError: The prompt is not a conversation, or it has another number of empty image blocks than images.
    """
    row = strip_none(dict(row))
    if not is_messages(row["prompt"]):
        raise DataError("rows with images need conversational prompts: [{'role': 'user', 'content': ...}].")
    return conversation_pictures(row["prompt"], pictures_of(row))


def exchanged(examples: Sequence[Mapping[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return examples in which each prompt has the images of another prompt. Both prompts have the same number of images.
    Examples without images are not changed.

    Args:
        examples: Examples in groups of ``size`` consecutive rows.
        size: Number of rows per prompt.
    """
    rows = [conversation_of(example) for example in examples]
    exchanged_examples = [{k: v for k, v in example.items() if k not in PICTURE_COLUMNS} for example in examples]
    for count in {len(pictures) for _, pictures in rows}:
        alike = [i for i, (_, pictures) in enumerate(rows) if len(pictures) == count]
        for place, i in enumerate(alike):
            exchanged_examples[i] |= {"prompt": rows[i][0], "images": rows[alike[(place + size) % len(alike)]][1]}
    return exchanged_examples
