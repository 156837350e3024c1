"""What a run assumes of its images: with the text they fit the context, each has its place, and each can be read."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from posttrain.checks.registry import Context, finding, probe, register
from posttrain.data.pictures import undecoded
from posttrain.integrations import require
from posttrain.types import Finding

__all__ = [
    "ImageRow",
    "check_image_fit",
    "check_image_places",
    "image_rows",
    "image_size",
    "image_tokens",
    "unreadable",
]


def _open(picture: Any) -> Any:
    """An image object that has read no more than its header."""
    library = require("PIL.Image", "looking at images")
    if isinstance(picture, Mapping):  # As `datasets` keeps an image that it has not decoded.
        picture = picture.get("bytes") or picture.get("path")
    if isinstance(picture, bytes | bytearray):
        picture = io.BytesIO(picture)
    return library.open(picture)


def image_size(picture: Any) -> tuple[int, int]:
    """Height and width in pixels of an image object, a file, or the bytes of one; about 0.1 ms, whatever its size.

    Raises:
        OSError: It is no image, or its header is damaged.
        ValueError: There is nothing: None, or a row of `datasets` without bytes and path.
    """
    if picture is None or (isinstance(picture, Mapping) and not (picture.get("bytes") or picture.get("path"))):
        raise ValueError("there is no picture")
    if hasattr(picture, "size") and isinstance(getattr(picture, "size", None), tuple):
        width, height = picture.size
        return int(height), int(width)
    with _open(picture) as opened:
        width, height = opened.size
    return int(height), int(width)


def unreadable(picture: Any) -> str:
    """Why the pixels of a picture cannot be read, or nothing; reads all of it."""
    try:
        if hasattr(picture, "load") and not isinstance(picture, Mapping):
            picture.load()
            return ""
        with _open(picture) as opened:
            opened.load()
    except Exception as error:  # Image libraries raise whatever their format's decoder raises.
        return f"{type(error).__name__}: {error}"
    return ""


register("PT-G001", "images-do-not-fit", moment="data", title="images and text longer than the context", page="g")
register("PT-G002", "image-places", moment="data", title="as many images as there are not places for them", page="g")
register("PT-G003", "image-unreadable", moment="data", title="images that cannot be read", page="g")
register(
    "PT-G004",
    "processor-of-another-model",
    moment="config",
    title="a processor of another model",
    page="g",
)
register("PT-G008", "placeholder-typed", moment="data", title="text that stands for an image", page="g")
register("PT-G011", "images-lost", moment="first_batch", title="other placeholders than images in a pass", page="g")
register("PT-G013", "template-loses-images", moment="data", title="a template that writes other placeholders", page="g")

ROWS = 2000  # That are looked at.
LARGEST = 32  # Images whose pixels are read.
RARE = 0.005  # Share of rows that do not fit, from which on it is an error.
SHOWN = 5
MEDIUM = 448  # Pixels a side.

Size = tuple[int, int]  # Height, width.


@dataclass(frozen=True)
class ImageRow:
    """A row as this check sees it.

    Attributes:
        number: Of the row in its dataset.
        sizes: Height and width of each image.
        text_tokens: Tokens of its text, images aside.
        places: Image placeholders of its messages; None where they are put in by us.
        broken: Why images could not be read.
    """

    number: int
    sizes: tuple[Size, ...]
    text_tokens: int = 0
    places: int | None = None
    broken: tuple[str, ...] = field(default=())


def image_tokens(processor: Any, sizes: Sequence[Size]) -> list[int] | None:
    """Tokens of images of these sizes, by the processor's own arithmetic; None where it has none.

    Args:
        processor: A processor of `transformers`, or its image processor alone.
        sizes: Height and width of each.
    """
    count = getattr(processor, "_get_num_multimodal_tokens", None)
    if count is not None:
        found = count(image_sizes=[list(size) for size in sizes])
        tokens = found["num_image_tokens"] if "num_image_tokens" in found else None  # noqa: SIM401 - not always a dict.
        return None if tokens is None else [int(number) for number in tokens]
    images = getattr(processor, "image_processor", processor)
    patches = getattr(images, "get_number_of_image_patches", None)
    merge = getattr(images, "merge_size", None)
    if patches is None or not isinstance(merge, int):
        return None
    return [int(patches(*size, {})) // merge**2 for size in sizes]


def check_image_fit(
    rows: Sequence[ImageRow],
    tokens_of: Callable[[Sequence[Size]], Sequence[int] | None],
    *,
    limit: int | None,
    completion: int = 0,
    limit_name: str = "max_length",
) -> Finding | None:
    """Rows whose text, images and completion are longer than what may be read; truncation would cut into an image.

    Args:
        rows: Those to look at.
        tokens_of: Sizes to tokens, see `image_tokens`.
        limit: The least of what model, engine and config allow.
        completion: Tokens that are sampled behind a row.
        limit_name: What sets the limit.
    """
    if limit is None or not rows:
        return None
    lengths: list[tuple[int, int, ImageRow]] = []
    for row in rows:
        tokens = tokens_of(row.sizes) if row.sizes else []
        if tokens is None:
            return None
        lengths.append((sum(tokens) + row.text_tokens + completion, sum(tokens), row))
    over = [entry for entry in lengths if entry[0] > limit]
    if not over:
        return None
    worst_total, worst_images, worst = max(over, key=lambda entry: entry[0])
    ordered = sorted(total for total, *_ in lengths)
    p99 = ordered[-(-99 * len(ordered) // 100) - 1]
    named = ", ".join(str(row.number) for *_, row in over[:SHOWN]) + (", ..." if len(over) > SHOWN else "")
    behind = f" + {completion} to be generated" if completion else ""
    return finding(
        "PT-G001",
        "error" if len(over) > RARE * len(rows) else "warning",
        f"row {worst.number}: {len(worst.sizes)} images -> {worst_images} tokens + {worst.text_tokens} text{behind} > "
        f"{limit_name}={limit}. {len(over)} of {len(rows)} rows do not fit; the longest 1 % begin at {p99} tokens.",
        f"rows {named}",
        "a row that is cut inside an image has fewer places than pixels: the forward pass fails, or reads a torn image.",
        f"set max_pixels to {_pixels(over, limit, completion, tokens_of)} or less in the processor, {limit_name} to "
        f"{worst_total} or more, or leave these rows out.",
    )


def _pixels(
    over: Sequence[tuple[int, int, ImageRow]],
    limit: int,
    completion: int,
    tokens_of: Callable[[Sequence[Size]], Sequence[int] | None],
) -> int:
    """Pixels an image may have for every row to fit, if tokens grow with pixels, as they do where ``max_pixels`` matters."""
    (of_medium,) = tokens_of([(MEDIUM, MEDIUM)]) or [1]  # Of a size that no limit of a processor changes.
    most = min(max(limit - completion - row.text_tokens, 0) // max(len(row.sizes), 1) for *_, row in over)
    return most * MEDIUM**2 // max(of_medium, 1)


def check_image_places(rows: Sequence[ImageRow]) -> list[Finding]:
    """Rows with more or fewer placeholders than images, and images that cannot be read."""
    odd = [row for row in rows if row.places is not None and row.places != len(row.sizes) + len(row.broken)]
    broken = [row for row in rows if row.broken]
    found = []
    if odd:
        first = odd[0]
        found.append(
            finding(
                "PT-G002",
                "error",
                f"{len(odd)} of {len(rows)} rows have another number of image placeholders than images; row {first.number}: "
                f"{first.places} and {len(first.sizes) + len(first.broken)}.",
                f"rows {', '.join(str(row.number) for row in odd[:SHOWN])}",
                "images would be shown in the wrong places, or to nobody.",
                "give one {'type': 'image'} block an image, or none at all: then one is put before the first user message for "
                "each.",
            )
        )
    if broken:
        first = broken[0]
        found.append(
            finding(
                "PT-G003",
                "error",
                f"{len(broken)} of {len(rows)} rows hold images that cannot be read; row {first.number}: {first.broken[0]}.",
                f"rows {', '.join(str(row.number) for row in broken[:SHOWN])}",
                "the run would stop when such a row comes.",
                "leave these rows out, or write the files again.",
            )
        )
    return found


def image_rows(
    examples: Iterable[dict[str, Any]], count_text: Callable[[dict[str, Any]], int], *, start: int = 0
) -> list[ImageRow]:
    """Rows of a dataset with the sizes of their images, read from headers.

    Args:
        examples: With ``images`` or ``image``.
        count_text: Tokens of a row's text.
        start: Number of the first one.
    """
    found = []
    for number, example in enumerate(examples, start):
        pictures = example.get("images")
        pictures = [example["image"]] if pictures is None and example.get("image") is not None else list(pictures or ())
        sizes, broken = [], []
        for picture in pictures:
            try:
                sizes.append(image_size(picture))
            except (OSError, ValueError) as error:
                broken.append(f"{type(error).__name__}: {error}")
        found.append(ImageRow(number, tuple(sizes), count_text(example), _places(example), tuple(broken)))
    return found


def _places(example: dict[str, Any]) -> int | None:
    """Placeholders of a row's messages; None where there are none, as they are then put in."""
    messages = [
        m for key in ("messages", "prompt", "completion") if isinstance(example.get(key), list) for m in example[key]
    ]
    blocks = [b for m in messages if isinstance(m, dict) and isinstance(m.get("content"), list) for b in m["content"]]
    count = sum(isinstance(block, dict) and block.get("type") == "image" for block in blocks)
    return count or None


def _text_counter(processor: Any) -> Callable[[dict[str, Any]], int]:
    tokenizer = getattr(processor, "tokenizer", processor)

    def count(example: dict[str, Any]) -> int:
        texts = [value for key in ("prompt", "completion", "text") if isinstance(value := example.get(key), str)]
        messages = [
            m
            for key in ("messages", "prompt", "completion")
            if isinstance(example.get(key), list)
            for m in example[key]
        ]
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            blocks = content if isinstance(content, list) else []
            texts += (
                [content]
                if isinstance(content, str)
                else [b["text"] for b in blocks if isinstance(b, dict) and b.get("text")]
            )
        return sum(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else 0

    return count


@probe("data", "PT-G001", "PT-G002", "PT-G003", columns=("image", "images"))
def images(context: Context) -> list[Finding | None]:
    """The first two thousand rows of a dataset with images; pixels of the 32 largest are read."""
    columns = getattr(context.train_dataset, "column_names", None) or ()
    if not {"image", "images"} & set(columns) or not hasattr(context.tokenizer, "image_processor"):
        return []
    examples = list(islice(undecoded(context.train_dataset), ROWS))
    rows = image_rows(examples, _text_counter(context.tokenizer))
    limits = {
        "max_length": context.limit or getattr(context.args, "max_length", None),
        "max_position_embeddings": getattr(_text_config(context.model_config), "max_position_embeddings", None),
    }
    known = {name: value for name, value in limits.items() if value}
    name = min(known, key=lambda key: known[key], default="max_length")
    return [
        *check_image_places(_with_pixels(rows, examples)),
        check_image_fit(
            rows,
            lambda sizes: image_tokens(context.tokenizer, sizes),
            limit=known.get(name),
            completion=getattr(context.args, "max_completion_length", None) or 0,
            limit_name=name,
        ),
    ]


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _with_pixels(rows: Sequence[ImageRow], examples: Sequence[dict[str, Any]]) -> list[ImageRow]:
    """Rows whose largest images were read whole: a header may be fine above a file that was cut."""
    largest = sorted(
        (
            (height * width, place, index)
            for place, row in enumerate(rows)
            for index, (height, width) in enumerate(row.sizes)
        ),
        reverse=True,
    )[:LARGEST]
    torn: dict[int, list[str]] = {}
    for _, place, index in largest:
        if rows[place].broken:
            continue
        pictures = examples[place].get("images")
        why = unreadable((pictures if pictures is not None else [examples[place]["image"]])[index])
        if why:
            torn.setdefault(place, []).append(why)
    return [
        row
        if place not in torn
        else ImageRow(row.number, row.sizes[len(torn[place]) :], row.text_tokens, row.places, tuple(torn[place]))
        for place, row in enumerate(rows)
    ]
