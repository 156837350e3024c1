"""What a run assumes of its images: with the text they fit the context, each has its place, and each can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from posttrain.checks.registry import Context, finding, probe, register
from posttrain.data.formats import MESSAGE_COLUMNS, picture_blocks, pictures_of, undecoded
from posttrain.data.pictures import ALIASES, ORIENTATION, Picture, image_size, open_source, read_picture
from posttrain.data.processors import Placed
from posttrain.errors import DataError
from posttrain.models.forward import forward
from posttrain.models.heads import picture_encoder
from posttrain.models.vision import tower_parameters
from posttrain.types import Batch, Finding

__all__ = [
    "ImageRow",
    "check_exchanged",
    "check_image_fit",
    "check_image_places",
    "check_pictures",
    "check_reach",
    "check_tower_gradients",
    "image_rows",
    "image_size",
    "image_tokens",
    "unreadable",
]


def unreadable(picture: Any) -> str:
    """Why a picture cannot be trained on, or nothing; reads all of it."""
    try:
        read_picture(picture).load()
    except (DataError, OSError) as error:
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    """What the image library said, or what we say where it was not asked."""
    cause = error.__cause__
    return str(error).lstrip(": ") if cause is None else f"{type(cause).__name__}: {cause}"


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
register("PT-G005", "images-do-not-reach", moment="first_batch", title="log-probs that no image moves", page="g")
register("PT-G006", "tiny-images", moment="data", title="images of less than 32 pixels a side", page="g")
register("PT-G007", "images-alike", moment="data", title="one image for most rows, or blank ones", page="g")
register("PT-G009", "odd-images", moment="data", title="rotated, transparent, animated or unusual images", page="g")
register("PT-G010", "remote-images", moment="data", title="images by address", page="g")
register("PT-G012", "tower-without-gradient", moment="first_batch", title="trained tower without gradient", page="g")
register("PT-G014", "images-encoded-again", moment="data", title="JPEG files that a map wrote as PNG", page="g")
register("PT-G015", "exchanged-images", moment="log_step", title="rollouts under another row's images", page="g")
register(
    "PT-G016", "engine-reads-otherwise", moment="config", title="an engine that expands images otherwise", page="g"
)
register("PT-G017", "images-not-needed", moment="log_step", title="a reward that other images give too", page="g")
register("PT-G008", "placeholder-typed", moment="data", title="text that stands for an image", page="g")
register("PT-G011", "images-lost", moment="first_batch", title="other placeholders than images in a pass", page="g")
register("PT-G013", "template-loses-images", moment="data", title="a template that writes other placeholders", page="g")

ROWS = 2000  # That are looked at.
READ = 200  # Of them, whose images are read for what they show.
LARGEST = 32  # Images whose pixels are read.
RARE = 0.005  # Share of rows that do not fit, from which on it is an error.
SHOWN = 5
SMALL = 32  # Pixels a side, below which nothing in an image can be read.
ALIKE, LEAST = 0.9, 10  # Share of rows that show one image, of at least so many rows.
MOVED = {torch.float32: 1e-4}  # Mean change of log-probs that another image must bring; 1e-2 in half precision.
GUESSED = 0.9  # Share of the reward that remains under exchanged images, from which on they are not needed.
PNG = b"\x89PNG"
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
                broken.append(_reason(error))
        found.append(ImageRow(number, tuple(sizes), count_text(example), _places(example), tuple(broken)))
    return found


def _places(example: dict[str, Any]) -> int | None:
    """Placeholders of a row's messages; None where there are none, as they are then put in."""
    messages = [
        m for key in ("messages", "prompt", "completion") if isinstance(example.get(key), list) for m in example[key]
    ]
    blocks = [b for m in messages if isinstance(m, dict) and isinstance(m.get("content"), list) for b in m["content"]]
    empty = [b for b in blocks if isinstance(b, dict) and b.get("type") == "image" and not _held(b)]
    return len(empty) or None


def _held(block: Mapping[str, Any]) -> Any:
    """What an image block holds itself, if anything."""
    return next((block[name] for name in ALIASES if block.get(name) is not None), None)


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
    processor = context.parts.get("processor") or context.tokenizer
    if not {"image", "images"} & set(columns) or not hasattr(processor, "image_processor"):
        return []
    examples = list(islice(undecoded(context.train_dataset), ROWS))
    rows = image_rows(examples, _text_counter(processor))
    limits = {
        "max_length": context.limit or getattr(context.args, "max_length", None),
        "max_position_embeddings": getattr(_text_config(context.model_config), "max_position_embeddings", None),
    }
    known = {name: value for name, value in limits.items() if value}
    name = min(known, key=lambda key: known[key], default="max_length")
    fit = getattr(context.args, "image_fit", "error")
    most = getattr(context.args, "image_max_tokens", None) if fit == "resize" else None

    def tokens_of(sizes: Sequence[Size]) -> Sequence[int] | None:
        tokens = image_tokens(processor, sizes)
        return tokens if tokens is None or most is None else [min(one, most) for one in tokens]

    found = [
        *check_image_places(_with_pixels(rows, examples)),
        check_image_fit(
            rows,
            tokens_of,
            limit=known.get(name),
            completion=getattr(context.args, "max_completion_length", None) or 0,
            limit_name=name,
        ),
    ]
    # A trainer counted every row exactly before; rows that are dropped on request stop nothing.
    counted = context.parts.get("processor") is not None
    milder = ("PT-G001", "PT-G003") if fit == "drop" else ("PT-G001",) if counted else ()
    return [replace(one, severity="warning") if one is not None and one.code in milder else one for one in found]


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


# What images are, by their headers ----------------------------------------------------------------------------------


def check_pictures(rows: Sequence[tuple[int, Any]]) -> list[Finding]:
    """Images that say little or are not what they seem: tiny, alike, blank, odd, remote, encoded again.

    Args:
        rows: Number of the row, and what it holds as an image; several of one row come one by one.
    """
    kinds: dict[str, list[int]] = {}
    digests: dict[str, int] = {}
    for number, value in rows:
        for code in _kinds(value, digests):
            kinds.setdefault(code, []).append(number)
    most = max(digests.values(), default=0)
    if len(rows) >= LEAST and most >= ALIKE * len(rows):
        kinds.setdefault("PT-G007", []).extend(number for number, _ in rows)
    return [
        finding(
            code, severity, f"{len(set(kinds[code]))} rows have images that are {what}.", _named(kinds[code]), why, fix
        )
        for code, severity, what, why, fix in ABOUT
        if code in kinds
    ]


ABOUT: tuple[tuple[str, Any, str, str, str], ...] = (
    ("PT-G006", "warning", f"less than {SMALL} pixels high or wide", "what is written or drawn in them is gone.",
     "give larger images, or leave these rows out."),
    ("PT-G007", "warning", "blank, or one and the same for nearly all rows", "nothing can be learnt of images from them.",
     "check the column: a default image, or a map that returned one object."),
    ("PT-G009", "warning", "rotated by EXIF, transparent, animated or of another mode than RGB",
     "they are turned upright, put on image_background, cut to the first frame and converted.",
     "look at them with posttrain inspect, or convert them before."),
    ("PT-G010", "error", "remote", "nothing is downloaded while a run trains.",
     "download them first, then dataset.cast_column('images', List(Image()))."),
    ("PT-G014", "info", "JPEG files that are kept as PNG", "a map that returns images encodes them anew, six times larger.",
     "leave the image column out of what map returns."),
)  # fmt: skip


def _kinds(value: Any, digests: dict[str, int]) -> set[str]:
    """Codes of what is odd about one image; counts its digest."""
    address = value.get("path") if isinstance(value, Mapping) and not value.get("bytes") else value
    if isinstance(address, str) and address.startswith(("http://", "https://")):
        return {"PT-G010"}
    try:
        picture = read_picture(value)
    except (DataError, OSError):
        return set()  # Told by PT-G003.
    digests[picture.digest] = digests.get(picture.digest, 0) + 1
    return {code for code, holds in _signs(picture, value).items() if holds}


def _signs(picture: Picture, value: Any) -> dict[str, bool]:
    image = open_source(picture.source)
    odd = image.mode not in ("RGB", "L") or "transparency" in image.info or getattr(image, "n_frames", 1) > 1
    name = str(value.get("path") or "") if isinstance(value, Mapping) else ""
    again = isinstance(picture.source, bytes) and picture.source.startswith(PNG)
    small = image.resize((SMALL, SMALL)).convert("L").getextrema()
    return {
        "PT-G006": min(picture.size) < SMALL,
        "PT-G007": small[0] == small[1],
        "PT-G009": odd or image.getexif().get(ORIENTATION, 1) != 1,
        "PT-G014": again and name.lower().endswith((".jpg", ".jpeg")),
    }


def _named(numbers: Sequence[int]) -> str:
    found = sorted(set(numbers))
    return f"rows {', '.join(map(str, found[:SHOWN]))}{', ...' if len(found) > SHOWN else ''}"


@probe("data", "PT-G006", "PT-G007", "PT-G009", "PT-G010", "PT-G014", part="processor")
def pictures(context: Context) -> list[Finding]:
    """Images of rows spread over the first two thousand, 200 at most, in columns and inside messages."""
    names = {"image", "images", *MESSAGE_COLUMNS} & set(getattr(context.train_dataset, "column_names", None) or ())
    if not names or not hasattr(context.parts["processor"], "image_processor"):
        return []
    rows = []
    for number, example in enumerate(islice(undecoded(context.train_dataset), 0, ROWS, ROWS // READ)):
        blocks = [b for name in MESSAGE_COLUMNS for b in picture_blocks(example.get(name))]
        held = [*pictures_of(example), *(one for b in blocks if (one := _held(b)) is not None)]
        rows += [(number * (ROWS // READ), one) for one in held]
    return check_pictures(rows)


# What images do -----------------------------------------------------------------------------------------------------


@probe("first_batch", "PT-G005", part="processor")
def reach(context: Context) -> list[Finding | None]:
    """The first batch with images, with its own images and with others of their sizes; in a run of one process."""
    batch = next((one for one in context.parts.get("batches", ()) if one.pictures), None)
    if batch is None or context.processes > 1 or picture_encoder(context.model) is None:
        return []
    return [check_reach(context.model, batch)]


@torch.no_grad()
def check_reach(model: Any, batch: Batch) -> Finding | None:
    """Log-probs that do not depend on the images of their rows.

    Args:
        model: With `posttrain.models.vision.install_pictures`.
        batch: With pictures.
    """
    parameter = next(model.parameters())
    batch = batch.to(parameter.device)
    other = replace(batch, pictures=[(b, c, _another(one)) for b, c, one in batch.pictures])
    training, encoder = model.training, picture_encoder(model)
    model.eval()
    try:
        own = forward(model, batch).logp
        counts = encoder.encoded, encoder.reused
        exchanged = forward(model, other).logp
        encoder.encoded, encoder.reused = counts  # Metrics count the run's own pictures.
    finally:
        model.train(training)
    moved = float((own - exchanged)[batch.loss_mask].abs().mean()) if own is not None and exchanged is not None else 1.0
    limit = MOVED.get(parameter.dtype, 1e-2)
    if not moved < limit:
        return None
    return finding(
        "PT-G005",
        "error" if moved < limit / 1000 else "warning",
        f"other images move the log-probs by {moved:.2g} nats on average.",
        "the first batch",
        "the model answers without looking: a projector that starts at zero, or a tower that is cut off.",
        "load the projector's weights, or train it first (SFT with freeze_vision='tower').",
    )


def _another(placed: Placed) -> Placed:
    """The same place with another picture of the same size."""
    from PIL import Image

    shade = Image.linear_gradient("L").rotate(90).resize(placed.picture.size).convert("RGB")
    return replace(placed, picture=read_picture(shade, "a shaded picture"))


def check_tower_gradients(norms: Mapping[str, float | None], model: Any, pictured: bool) -> Finding | None:
    """Trained parameters of tower and projector that got no gradient in a step with images.

    Args:
        norms: Of the first step's gradients; None where there is none.
        model: With `posttrain.models.vision.install_pictures`, wrapped or not.
        pictured: Whether the step had images.
    """
    if not pictured or picture_encoder(model) is None:
        return None
    tower = {id(parameter) for parameter in tower_parameters(model).values()}
    trained = {name for name, parameter in model.named_parameters() if id(parameter) in tower}
    silent = sorted(name for name in trained if name in norms and norms[name] is None)
    if not silent:
        return None
    return finding(
        "PT-G012",
        "warning",
        f"{len(silent)} trained parameters of tower and projector got no gradient, {silent[0]!r} among them.",
        "the first step",
        "they cost memory, never move, and hang DDP.",
        "freeze_vision='auto', which freezes what no feature depends on, or True.",
    )


@probe("log_step", "PT-G017", part="processor")
def images_needed(context: Context) -> list[Finding | None]:
    """The newest line of the log, where ``check_image_use`` measured the reward under exchanged images."""
    lines = [line for line in context.parts.get("history", ()) if "eval_images/exchanged_reward" in line]
    if not lines or lines[-1] is not context.parts["history"][-1]:
        return []
    return [check_exchanged(lines[-1]["eval_reward"], lines[-1]["eval_images/exchanged_reward"])]


def check_exchanged(own: float, exchanged: float) -> Finding | None:
    """A reward that completions get just as well when they were sampled under other rows' images.

    Args:
        own: Mean reward under the images of the rows.
        exchanged: Under those of other rows.
    """
    if own <= 0 or exchanged < GUESSED * own:
        return None
    return finding(
        "PT-G017",
        "warning",
        f"completions under exchanged images get a reward of {exchanged:.3g}, under their own {own:.3g}.",
        "the evaluation",
        "the answers are guessed without the images: what is trained is a habit of the text.",
        "give rows whose answers differ for the same question, or a reward that reads the image.",
    )
