"""Checks of images: rows fit into the context, images can be read, and log-probs and rewards depend on images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from posttrain.checks.registry import Context, finding, probe
from posttrain.data.formats import MESSAGE_COLUMNS, picture_blocks, pictures_of, undecoded
from posttrain.errors import DataError
from posttrain.extensions.images.encoder import tower_parameters
from posttrain.extensions.images.picture import (
    ORIENTATION,
    Picture,
    Placed,
    open_source,
    picture_in,
    read_picture,
    shaded,
)
from posttrain.models.architecture import context_length, text_of
from posttrain.models.forward import forward
from posttrain.models.heads import evaluating, picture_encoder
from posttrain.types import Batch, Finding, Row

if TYPE_CHECKING:
    from torch import nn

ROWS_LOOKED_AT = 2000  # Number of rows at the beginning of the dataset from which rows are sampled for the check.
IMAGES_READ = 200  # Approximate number of sampled rows. Their images are opened and read.
SHARE_UNFIT = 0.005  # The finding is an error if more than this fraction of the rows does not fit into the context.
ROWS_NAMED = 5
SMALLEST_SIDE = 32  # Minimum number of pixels per side. The content of a smaller image is not recognizable.
# SHARE_ALIKE: a finding is reported if at least this share of the rows has the same image. ROWS_COMPARED: minimum number of
# rows for this comparison.
SHARE_ALIKE, ROWS_COMPARED = 0.9, 10
# Minimum mean change of log-probs, in nats, when images are exchanged. A smaller change means that the model ignores
# images. In half precision, the minimum is 1e-2.
LEAST_MOVE = {torch.float32: 1e-4}
# If the reward with exchanged images is at least this fraction of the reward with the correct images, the model does not
# need images.
SHARE_GUESSED = 0.9
PNG = b"\x89PNG"


def check_image_fit(rows: Sequence[Row], limit: int, completion: int = 0) -> Finding | None:
    """Find rows whose text, images and completion together exceed the model's context.

    Args:
        rows: Rows whose image placeholders are already expanded.
        limit: Context length in tokens.
        completion: Maximum number of tokens that are generated after a row without an answer.
    """
    lengths = [len(row.prompt_ids) + max(map(len, row.completions), default=completion) for row in rows]
    over = [i for i, length in enumerate(lengths) if length > limit and any(rows[i].pictures)]
    if not over:
        return None
    worst = max(over, key=lambda i: lengths[i])
    placed = {i: [image.count for segment in rows[i].pictures for image in segment] for i in over}
    most = min((limit - lengths[i] + sum(placed[i])) // len(placed[i]) for i in over)
    completion = 0 if rows[worst].completions else completion
    behind = f" + {completion} to be generated" if completion else ""
    smaller = f"set image_max_tokens={most} with image_fit='resize', or " if most > 0 else ""
    return finding(
        "PT-G001",
        "error" if len(over) > SHARE_UNFIT * len(rows) else "warning",
        f"row {worst}: {len(placed[worst])} images -> {sum(placed[worst])} tokens + "
        f"{lengths[worst] - sum(placed[worst]) - completion} text{behind} > the model's context of {limit}. {len(over)} of "
        f"{len(rows)} rows do not fit.",
        _named(over),
        "a row that is truncated inside an image has too few placeholders: the forward pass fails or gets a partial image.",
        f"{smaller}remove these rows.",
    )


@probe("data", "PT-G001", part="processor")
def fit(context: Context) -> list[Finding | None]:
    """Check whether the sampled rows fit into the context, including the completions that will be generated. The rows were
    truncated to ``max_length`` before.
    """
    limit = context_length(text_of(context.model_config))
    return [check_image_fit(context.rows, limit, context.args.max_completion_length or 0)] if limit else []


# Properties of images, from their headers ----------------------------------------------------------------------------------


def check_pictures(rows: Sequence[tuple[int, Any]]) -> list[Finding]:
    """Find images that are unreadable, tiny, blank, remote, re-encoded or unusual. Also find one image that nearly all rows
    share.

    Args:
        rows: Pairs of a row number and an image. A row with several images has several pairs.
    """
    kinds: dict[str, list[int]] = {}
    digests: dict[str, int] = {}
    for number, value in rows:
        for code in _kinds(value, digests):
            kinds.setdefault(code, []).append(number)
    most = max(digests.values(), default=0)
    if len(rows) >= ROWS_COMPARED and most >= SHARE_ALIKE * len(rows):
        kinds.setdefault("PT-G007", []).extend(number for number, _ in rows)
    return [
        finding(
            code, severity, f"{len(set(kinds[code]))} rows have images that are {what}.", _named(kinds[code]), why, fix
        )
        for code, severity, what, why, fix in ABOUT
        if code in kinds
    ]


ABOUT: tuple[tuple[str, Any, str, str, str], ...] = (
    ("PT-G003", "error", "unreadable", "the run would stop at such a row.",
     "remove these rows, write the files again, or set image_fit='drop'."),
    ("PT-G006", "warning", f"less than {SMALLEST_SIDE} pixels high or wide", "text and details in them are not recognizable.",
     "use larger images, or remove these rows."),
    ("PT-G007", "warning", "blank, or the same for nearly all rows", "the model cannot learn to use images from them.",
     "check the column: it may contain a default image, or a map function returned the same object for every row."),
    ("PT-G009", "warning", "rotated by EXIF, transparent, animated or of another mode than RGB",
     "they are rotated upright, put on image_background, reduced to the first frame and converted to RGB.",
     "look at the images with posttrain inspect, or convert them before training."),
    ("PT-G010", "error", "remote", "nothing is downloaded during training.",
     "download the images first, then use dataset.cast_column('images', List(Image()))."),
    ("PT-G014", "info", "JPEG files that are stored as PNG", "dataset.map re-encodes returned images at six times the size.",
     "do not return the image column from the map function."),
)  # fmt: skip


def _kinds(value: object, digests: dict[str, int]) -> set[str]:
    """Return the codes of an image's problems, and count the image in ``digests``."""
    address = value.get("path") if isinstance(value, Mapping) and not value.get("bytes") else value
    if isinstance(address, str) and address.startswith(("http://", "https://")):
        return {"PT-G010"}
    try:
        picture = read_picture(value)
        signs = _signs(picture, value)
    except (DataError, OSError, SyntaxError, ValueError):
        # PIL raises these errors for truncated or corrupt files.
        return {"PT-G003"}
    digests[picture.digest] = digests.get(picture.digest, 0) + 1
    return {code for code, holds in signs.items() if holds}


def _signs(picture: Picture, value: object) -> dict[str, bool]:
    image = open_source(picture.source)
    odd = image.mode not in ("RGB", "L") or "transparency" in image.info or getattr(image, "n_frames", 1) > 1
    name = str(value.get("path") or "") if isinstance(value, Mapping) else ""
    again = isinstance(picture.source, bytes) and picture.source.startswith(PNG)
    small = image.resize((SMALLEST_SIDE, SMALLEST_SIDE)).convert("L").getextrema()
    return {
        "PT-G006": min(picture.size) < SMALLEST_SIDE,
        "PT-G007": small[0] == small[1],
        "PT-G009": odd or image.getexif().get(ORIENTATION, 1) != 1,
        "PT-G014": again and name.lower().endswith((".jpg", ".jpeg")),
    }


def _named(numbers: Sequence[int]) -> str:
    rows = sorted(set(numbers))
    return f"rows {', '.join(map(str, rows[:ROWS_NAMED]))}{', ...' if len(rows) > ROWS_NAMED else ''}"


@probe("data", "PT-G003", "PT-G006", "PT-G007", "PT-G009", "PT-G010", "PT-G014", part="processor")
def pictures(context: Context) -> list[Finding]:
    """Check the images in columns and messages of about 200 of the first 2,000 rows. The image files are read completely."""
    dataset = context.train_dataset
    # Without a dataset, an environment creates the prompts, and its tools return the images.
    if dataset is None:
        return []
    step = (
        max(1, min(len(dataset), ROWS_LOOKED_AT) // IMAGES_READ)
        if isinstance(dataset, Sized)
        else ROWS_LOOKED_AT // IMAGES_READ
    )
    rows = []
    for place, example in enumerate(islice(undecoded(dataset), 0, ROWS_LOOKED_AT, step)):
        blocks = [b for name in MESSAGE_COLUMNS for b in picture_blocks(example.get(name))]
        images = (*pictures_of(example), *map(picture_in, blocks))
        rows += [(place * step, image) for image in images if image is not None]
    milder = ("PT-G003", "PT-G010") if context.args.image_fit == "drop" else ()
    return [replace(result, severity="warning") if result.code in milder else result for result in check_pictures(rows)]


# Effect of images -----------------------------------------------------------------------------------------------------


@probe("first_batch", "PT-G005", part="processor")
def reach(context: Context) -> list[Finding | None]:
    """Check whether the log-probs of the first batch depend on its images. The check is skipped in runs with more than one
    process.
    """
    batch = next((candidate for candidate in context.parts.get("batches", ()) if candidate.pictures), None)
    if batch is None or context.processes > 1 or picture_encoder(context.model) is None:
        return []
    return [check_reach(context.model, batch)]


@torch.no_grad()
def check_reach(model: nn.Module, batch: Batch) -> Finding | None:
    """Check that log-probs depend on the images of their rows.

    Args:
        model: Model prepared with `install_pictures`.
        batch: Batch with images.
    """
    parameter = next(model.parameters())
    batch = batch.to(parameter.device)
    other = replace(batch, pictures=[(b, c, _another(image)) for b, c, image in batch.pictures])
    encoder = picture_encoder(model)
    with evaluating(model):
        own = forward(model, batch).logp
        counts = encoder.encoded, encoder.reused
        exchanged = forward(model, other).logp
        # Restore the counters, so that the metrics of the run do not include the images of this check.
        encoder.encoded, encoder.reused = counts
    moved = float((own - exchanged)[batch.loss_mask].abs().mean()) if own is not None and exchanged is not None else 1.0
    limit = LEAST_MOVE.get(parameter.dtype, 1e-2)
    if not moved < limit:
        return None
    return finding(
        "PT-G005",
        "error" if moved < limit / 1000 else "warning",
        f"with other images, the log-probs change by only {moved:.2g} nats on average.",
        "the first batch",
        "the model ignores its images: the projector starts at zero, or the vision tower is disconnected.",
        "load the projector's weights, or train it first (SFT with freeze_vision='tower').",
    )


def _another(placed: Placed) -> Placed:
    """Return a copy of ``placed`` with another image of the same size."""
    return replace(placed, picture=shaded(placed.picture.size, turned=True))


def check_tower_gradients(norms: Mapping[str, float | None], model: nn.Module) -> Finding | None:
    """Return a finding if trained parameters of the vision tower or projector received no gradient in a step with
    images.

    Args:
        norms: Gradient norm of each parameter in the first step. None: the parameter has no gradient.
        model: Model prepared with `install_pictures`, with or without wrappers.
    """
    if picture_encoder(model) is None:
        return None
    tower = {id(parameter) for parameter in tower_parameters(model).values()}
    trained = {name for name, parameter in model.named_parameters() if id(parameter) in tower}
    silent = sorted(name for name in trained if name in norms and norms[name] is None)
    if not silent:
        return None
    return finding(
        "PT-G012",
        "warning",
        f"{len(silent)} trained parameters of the vision tower and projector got no gradient, including {silent[0]!r}.",
        "the first step",
        "they use memory, are never updated, and make DDP hang.",
        "set freeze_vision='auto' to freeze the parameters that no feature depends on, or freeze_vision=True.",
    )


@probe("log_step", "PT-G017", part="processor")
def images_needed(context: Context) -> list[Finding | None]:
    """Check whether the newest log line shows that the reward does not depend on images. The line contains the reward with
    exchanged images if ``check_image_use`` is set.
    """
    lines = [line for line in context.parts.get("history", ()) if "eval_images/exchanged_reward" in line]
    if not lines or lines[-1] is not context.parts["history"][-1]:
        return []
    return [check_exchanged(lines[-1]["eval_reward"], lines[-1]["eval_images/exchanged_reward"])]


def check_exchanged(own: float, exchanged: float) -> Finding | None:
    """Check that the reward decreases if completions are sampled with the images of other rows.

    Args:
        own: Mean reward with the images of the rows.
        exchanged: Mean reward with the images of other rows.
    """
    if own <= 0 or exchanged < SHARE_GUESSED * own:
        return None
    return finding(
        "PT-G017",
        "warning",
        f"completions sampled with exchanged images get a reward of {exchanged:.3g}, and with their own images {own:.3g}.",
        "the evaluation",
        "the answers hardly depend on the images, so the model learns only from the text.",
        "use questions whose answer depends on the image, or a reward that depends on the image.",
    )
