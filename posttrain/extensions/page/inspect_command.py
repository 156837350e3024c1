"""`posttrain inspect sft --config x.yaml`: show the rows on which a training command would train.

`posttrain inspect sessions FILE` shows the recorded episodes of a harness.

The dataset and the tokenizer are the same as for the training command with the same file and options. No weights are
loaded. Only the files of ``--html`` and ``--pictures`` are written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.subject import ROWS, Subject
from posttrain.errors import ConfigError, DataError, check_choice

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from posttrain.extensions.page.inspect import Summary


EXAMPLES = 1000
CAPTION, CAPTION_WIDTH = 16, 240  # Height and minimum width of a caption above an image, in pixels.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="posttrain inspect",
        usage="posttrain inspect COMMAND --config FILE.yaml [--rows N] [--examples N] [--html FILE] [--pictures FILE] "
        "[options of COMMAND]",
        description="Show what the model receives: rows as text with colored trained tokens, lengths, padding, "
        "special tokens, and all findings of the checks. The tokenizer is loaded, but no weights.",
        allow_abbrev=False,
    )
    parser.add_argument("command", metavar="COMMAND", help="a training command: " + ", ".join(sorted(ROWS)))
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="rows to show as text (8)")
    parser.add_argument(
        "--examples",
        type=int,
        default=EXAMPLES,
        metavar="N",
        help=f"maximum number of examples to analyze ({EXAMPLES})",
    )
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained HTML file")
    parser.add_argument(
        "--pictures", metavar="FILE", help="write the images of the shown rows as the model receives them (PNG, JPEG)"
    )
    return parser


def run(argv: list[str]) -> int:
    """Run `posttrain inspect` with the command-line arguments ``argv``.

    Returns:
        0, regardless of findings.
    """
    if argv[:1] == ["sessions"]:
        return _sessions(argv[1:])
    options, rest = _parser().parse_known_args(argv)
    check_choice("command", options.command, sorted(ROWS))
    for name, count in (("rows", options.rows), ("examples", options.examples)):
        if count < 1:
            raise ConfigError(f"--{name} {count} must be at least 1.")
    for name, path in (("--html", options.html), ("--pictures", options.pictures)):
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{name} {path}: the folder {str(Path(path).parent)!r} does not exist.")
    about = {"show": options.rows, "examples": options.examples, "pictures": options.pictures}
    summary = inspect_rows(Subject(options.command, rest), **about)

    from posttrain.extensions.page.inspect import to_console, to_html

    to_console(summary)
    if options.html:
        Path(options.html).write_text(to_html(summary), encoding="utf-8")
    return 0


def _sessions(argv: list[str]) -> int:
    """Run `posttrain inspect sessions`, which shows the episodes of a replay file as trees."""
    parser = argparse.ArgumentParser(
        prog="posttrain inspect sessions", description="Show recorded episodes of a harness."
    )
    parser.add_argument("file", help="file written by harness_record")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="episodes to show (8)")
    options = parser.parse_args(argv)
    if options.rows < 1:
        raise ConfigError(f"--rows {options.rows} must be at least 1.")

    from posttrain.extensions.agents.tree import to_console

    to_console(options.file, show=options.rows)
    return 0


def inspect_rows(subject: Subject, *, show: int = 8, examples: int = EXAMPLES, pictures: str | None = None) -> Summary:
    """Summarize the rows on which a training command would train.

    Args:
        subject: Training command with its arguments.
        show: Number of rows to show as text.
        examples: Maximum number of examples to analyze. The examples are sampled with the run's seed.
        pictures: File for the images of the shown rows as the model receives them. None: no file.

    Raises:
        ConfigError: The arguments contain no model or no dataset.
        DataError: There are no rows, or they cannot be tokenized.
    """
    from posttrain.checks.rows import check_rows, dropped_rows
    from posttrain.extensions.page.inspect import summarise

    config, tokenizer = subject.config, subject.tokenizer
    drawn, total, places = subject.drawn(subject.data, examples)
    prepared, vision = subject.rows_of(drawn)
    rows, cut = prepared.rows, prepared.cut
    numbers = prepared.numbers if prepared.numbers is not None else places if len(rows) == len(places) else None
    limit = config.max_length
    missing = [] if numbers is None else sorted(set(places) - set(numbers))
    dropped = dropped_rows(len(drawn), len(rows), reasons=prepared.reasons, missing=missing)
    shown: dict[str, int] = {}
    checked = check_rows(rows, tokenizer, limit=None if cut == 0 else limit, numbers=numbers, examples=shown)
    checked = [finding for finding in checked if finding.code not in subject.method.traits.ignored_codes]
    shown = {finding.code: shown[finding.code] for finding in checked}
    findings = [*([dropped] if dropped else []), *prepared.findings, *checked]
    seen = f"{len(drawn):,}"
    part = f"the first {seen}" if total is None else f"all {seen}" if total == len(drawn) else f"{seen} of {total:,}"
    summary = summarise(
        rows,
        tokenizer,
        limit=limit,
        truncated=cut,
        findings=findings,
        show=show,
        numbers=numbers,
        examples=shown,
        batch_size=config.per_device_train_batch_size,
        title=f"{subject.name}: {part} examples of split {subject.split!r}, tokenized as {subject.source}",
    )
    if pictures:
        contact_sheet(summary, vision and vision.reader).save(pictures)
    return summary


def contact_sheet(summary: Summary, processor: ProcessorMixin) -> Any:
    """Draw the images of the shown rows on one PIL image, as the model receives them. A caption with the row number is
    above each image.

    Args:
        summary: Summary of rows with images.
        processor: Instance of `posttrain.extensions.images.processors.PictureProcessor`.

    Raises:
        DataError: No shown row has an image.
    """
    from PIL import Image, ImageDraw

    drawn = {
        f"row {shown.row}: image {number}, {img.size[0]}x{img.size[1]}, {img.digest[:4]}": seen_by_model(processor, img)
        for shown in summary.shown
        for number, img in enumerate(shown.pictures, 1)
    }
    if not drawn:
        raise DataError("none of the shown rows has an image. Fix: remove --pictures, or show more rows with --rows.")
    width = max(CAPTION_WIDTH, *(image.width for image in drawn.values()))
    sheet = Image.new("RGB", (width, sum(image.height + CAPTION for image in drawn.values())), "white")
    at, pen = 0, ImageDraw.Draw(sheet)
    for caption, image in drawn.items():
        pen.text((2, at + 2), caption, fill="black")
        sheet.paste(image, (0, at + CAPTION))
        at += image.height + CAPTION
    return sheet


def seen_by_model(processor: ProcessorMixin, picture: Any) -> Any:
    """Return an image as the model receives it. Normalization is reverted, and tiles are placed side by side."""
    import torch
    from PIL import Image

    images, prepared = processor.processor.image_processor, processor.prepare(picture)
    pixels = prepared["pixel_values"]
    if processor.family.positions == "grid":
        pixels = _unpatched(pixels, prepared["image_grid_thw"][0].tolist(), images)[None]
    strip = torch.cat(list(pixels.flatten(0, -4)), -1).float()  # (3, H, sum of W)
    if images.do_normalize:
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (images.image_mean, images.image_std))
        strip = strip * deviation + mean
    strip = strip / (images.rescale_factor if images.do_rescale else 1)
    return Image.fromarray(strip.round().clamp(0, 255).byte().permute(1, 2, 0).numpy())


def _unpatched(patches: Any, grid: Sequence[int], images: Any) -> Any:
    """Assemble pixels ``(3, H, W)`` from patches ``(h w, 3 * frames * size^2)``, which are ordered in squares of
    ``merge_size``.
    """
    (_, h, w), merge, size = grid, images.merge_size, images.patch_size
    parts = patches.view(h // merge, w // merge, merge, merge, 3, images.temporal_patch_size, size, size)[
        :, :, :, :, :, 0
    ]
    return parts.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, h * size, w * size)
