"""`posttrain inspect sft --config x.yaml`: the rows a training command would train on, before it costs anything.

Data and tokenizer come from the same file and flags as the training command; no weight is read and nothing is written but
the file that ``--html`` names. A command is inspected once it has registered how its examples become rows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.cli import train
from posttrain.errors import ConfigError, DataError, check_choice
from posttrain.types import Finding, Row

if TYPE_CHECKING:
    from posttrain.report.inspect import Summary


EXAMPLES = 1000
CAPTION, CAPTION_WIDTH = 16, 240  # Pixels of a line of text over a picture.


class Prepared(NamedTuple):
    """Rows as a training command makes them of examples.

    Attributes:
        rows: In the order of the examples.
        findings: What their preparation itself found.
        cut: How many were cut; None: unknown, a row of the limit's length counts.
        numbers: Row numbers in the dataset; None: those of the examples, or not known.
        reasons: Why rows were left out.
    """

    rows: list[Row]
    findings: Sequence[Finding] = ()
    cut: int | None = None
    numbers: list[int] | None = None
    reasons: str = ""


# Examples (a datasets.Dataset of the sampled ones), tokenizer and config of the command to rows.
RowsFunction = Callable[[Any, Any, Any], Prepared]


def sft_rows(examples: Any, tokenizer: Any, config: Any) -> Prepared:
    """Rows of supervised fine-tuning: one completion each, without a prompt of its own; packed rows come apart."""
    from dataclasses import replace

    from posttrain.checks.rows import diverged_prompts
    from posttrain.data.formats import ROW, listed
    from posttrain.data.sft import check_prepared, document_rows, prepare_sft_dataset, with_training_template

    if (config.dataset_kwargs or {}).get("skip_prepare_dataset"):
        check_prepared(examples, "train", len(tokenizer))
        return Prepared(document_rows(examples))
    options = with_training_template(config.supervised_options(training=True), tokenizer)
    if options.packing == "bfd":  # It keeps documents whole: they are looked at one by one.
        options = replace(options, packing=None)
    elif options.packing and ROW in examples.column_names:
        examples = examples.remove_columns(ROW)
    prepared, report = prepare_sft_dataset(examples, tokenizer, options, seed=config.seed)
    finding = diverged_prompts(report.diverged, report.rows_in)
    cut = None if options.packing else report.truncated  # Packing that splits rows cuts none.
    findings = [finding] if finding else []
    return Prepared(document_rows(prepared), findings, cut, numbers=_numbers(prepared), reasons=listed(report.dropped))


def _numbers(prepared: Any) -> list[int] | None:
    """Numbers of the rows that were left, where preparation kept them."""
    from posttrain.data.formats import ROW

    return list(prepared[ROW]) if ROW in prepared.column_names else None


def prompt_rows(examples: Any, tokenizer: Any, config: Any) -> Prepared:
    """Rows of a method that samples its completions: prompts alone, as the engine will see them."""
    from posttrain.data.chat import tokenize_prompts
    from posttrain.data.samplers import check_prompts

    check_prompts(examples, "train_dataset", tokenizer)
    kwargs = config.chat_template_kwargs or {}
    tokens = tokenize_prompts(list(examples), tokenizer, chat_template_kwargs=kwargs)
    return Prepared([Row(ids, [], []) for ids in tokens])


def picture_rows(name: str, examples: Any, vision: Any) -> Prepared:
    """Rows of command ``name`` with their images, as its trainer makes them; ``vision`` is its `Vision`."""
    from posttrain.data.formats import ROW, listed
    from posttrain.data.preference import answer_rows, extract_and_unpair
    from posttrain.data.sft import document_rows

    if ROWS[name] is prompt_rows:
        return Prepared(vision.prompt_rows(list(vision.checked_prompts(examples, "train_dataset"))))
    branches = {"sft": (), "dpo": ("chosen", "rejected")}.get(name, ("completion",))
    examples = extract_and_unpair(examples) if branches == ("completion",) else examples
    prepared, report = vision.prepare_rows(examples, branches=branches, keep=(ROW,))
    rows = answer_rows(prepared, branches) if branches else document_rows(prepared)
    placed = vision.placed(rows, list(prepared))
    return Prepared(placed, cut=report.truncated, numbers=_numbers(prepared), reasons=listed(report.dropped))


def reward_rows(examples: Any, tokenizer: Any, config: Any) -> Prepared:
    """Rows of an outcome reward model: pairs that share their prompt."""
    from posttrain.data.preference import pair_rows, prepare_reward_dataset

    prepared = prepare_reward_dataset(examples, tokenizer, max_length=config.max_length)
    return Prepared(pair_rows(prepared), numbers=_numbers(prepared))


def answer_rows_of(branches: tuple[str, ...]) -> RowsFunction:
    """Rows of a method on given answers: the shared prompt and one completion a branch."""

    def rows(examples: Any, tokenizer: Any, config: Any) -> Prepared:
        from posttrain.checks.pairs import check_pairs
        from posttrain.data.chat import terminal_token_ids
        from posttrain.data.formats import ROW
        from posttrain.data.preference import AnswerOptions, answer_rows, extract_and_unpair, prepare_answers

        if branches == ("completion",):
            examples = extract_and_unpair(examples)
        options = AnswerOptions(branches, config.max_length, config.truncation_mode, config.mask_inner_turns)
        prepared, report = prepare_answers(examples, tokenizer, options, keep=(ROW,))
        made = answer_rows(prepared, branches)
        stops = terminal_token_ids(tokenizer)
        pairs = check_pairs(made, limit=config.max_length, stops=stops) if len(branches) == 2 else []
        return Prepared(made, pairs, report.truncated, numbers=_numbers(prepared))

    return rows


_PAIRS, _ANSWER = answer_rows_of(("chosen", "rejected")), answer_rows_of(("completion",))
ROWS: dict[str, RowsFunction] = {
    "sft": sft_rows,
    "reward": reward_rows,
    "tpo": answer_rows_of(("chosen", "rejected", "reference")),
    **dict.fromkeys(("dpo", "cpo", "orpo"), _PAIRS),
    **dict.fromkeys(("kto", "bco"), _ANSWER),
    **dict.fromkeys(("grpo", "async-grpo", "gmpo", "a2po", "rloo", "online-dpo"), prompt_rows),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="posttrain inspect",
        usage="posttrain inspect COMMAND --config FILE.yaml [--rows N] [--examples N] [--html FILE] [--pictures FILE] "
        "[options of COMMAND]",
        description="Show what the model will really see: rows as text with the trained tokens coloured, lengths, padding, "
        "special tokens, and everything the checks find. Loads the tokenizer and no weights.",
        allow_abbrev=False,
    )
    parser.add_argument("command", metavar="COMMAND", help="a training command: " + ", ".join(sorted(ROWS)))
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="rows to show as text (8)")
    parser.add_argument(
        "--examples", type=int, default=EXAMPLES, metavar="N", help=f"examples to analyse, at most ({EXAMPLES})"
    )
    parser.add_argument("--html", metavar="FILE", help="write one self-contained HTML file as well")
    parser.add_argument(
        "--pictures", metavar="FILE", help="draw the images of the shown rows as the model sees them (PNG, JPEG)"
    )
    return parser


def run(argv: list[str]) -> int:
    """Inspect as ``argv`` says.

    Returns:
        0, whatever was found: this command shows, it does not judge.
    """
    options, rest = _parser().parse_known_args(argv)
    check_choice("command", options.command, sorted(ROWS))
    for name in ("rows", "examples"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: give at least 1.")
    for name, path in (("--html", options.html), ("--pictures", options.pictures)):
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{name} {path}: the folder {str(Path(path).parent)!r} does not exist.")
    # Which accelerator would train does not change the rows.
    parsed, _, _ = train.parse(options.command, rest)
    about = {"show": options.rows, "examples": options.examples, "pictures": options.pictures}
    summary = inspect_rows(options.command, parsed, **about)

    from posttrain.report.inspect import to_console, to_html

    to_console(summary)
    if options.html:
        Path(options.html).write_text(to_html(summary), encoding="utf-8")
    return 0


def inspect_rows(
    name: str, parsed: Sequence[Any], *, show: int = 8, examples: int = EXAMPLES, pictures: str | None = None
) -> Summary:
    """The summary of what command ``name`` would train on.

    Args:
        name: A registered command.
        parsed: What its parser returned: data, config, model and mixture arguments.
        show: Rows to show as text.
        examples: How many to analyse, at most; drawn with the run's seed.
        pictures: File for the images of the shown rows as the model sees them; None: none.

    Raises:
        ConfigError: No model or no data is named. DataError: Data that cannot be tokenised, or none.
    """
    from posttrain.checks.rows import check_rows, dropped_rows
    from posttrain.report.inspect import summarise

    script_args, config, model_args, mixture = parsed
    tokenizer = _tokenizer(model_args, config, generative=name != "reward")
    split = train._train_split(script_args, mixture)
    with _no_progress_bars():
        data = train._datasets(script_args, mixture, config)
        if split not in data:
            raise DataError("there is no dataset to inspect: the environment makes the prompts while it trains.")
        drawn, total, places = _drawn(data[split], examples, config.seed)
        made, vision = rows_of(name, drawn, tokenizer, parsed)
    rows, cut = made.rows, made.cut
    numbers = made.numbers if made.numbers is not None else places if len(rows) == len(places) else None
    limit = getattr(config, "max_length", None)
    missing = [] if numbers is None else sorted(set(places) - set(numbers))
    dropped = dropped_rows(len(drawn), len(rows), reasons=made.reasons, missing=missing)
    telling: dict[str, int] = {}
    checked = check_rows(rows, tokenizer, limit=None if cut == 0 else limit, numbers=numbers, examples=telling)
    findings = [*([dropped] if dropped else []), *made.findings, *checked]
    telling = {code: row for code, row in telling.items() if code in {finding.code for finding in findings}}
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
        examples=telling,
        batch_size=config.per_device_train_batch_size,
        title=f"{name}: {part} examples of split {split!r}, tokenised as {model_args.model_name_or_path}",
    )
    if pictures:
        contact_sheet(summary, vision and vision.reader).save(pictures)
    return summary


def rows_of(name: str, examples: Any, tokenizer: Any, parsed: Sequence[Any]) -> tuple[Prepared, Any]:
    """Rows of command ``name`` as its trainer makes them, and what it reads images with; None where rows are text."""
    from posttrain.training.pictures import Vision

    _, config, model_args, _ = parsed
    if train._load(train.COMMANDS[name].trainer).takes_images:
        vision = Vision(config, None, model_args.model_name_or_path, (examples,), takes=True)
        if vision.images:
            return picture_rows(name, examples, vision), vision
    return ROWS["grpo" if name == "ppo" else name](examples, tokenizer, config), None


def _tokenizer(model_args: Any, config: Any, *, generative: bool) -> Any:
    """The tokenizer as training has it when it reads its rows."""
    from posttrain.models.load import (
        changes_vocabulary,
        check_model_source,
        load_tokenizer,
        prepare_tokenizer,
        resolve_pad_token,
    )

    source = model_args.model_name_or_path
    if not source:
        raise ConfigError("--model_name_or_path is missing: whose tokenizer shall read the rows?")
    check_model_source(source, generative=generative)
    trust = config.trust_remote_code
    tokenizer = load_tokenizer(source, trust_remote_code=trust, revision=model_args.model_revision)
    if changes_vocabulary(config):
        _clone_tokens(tokenizer, load_tokenizer(config.chat_template_path, trust_remote_code=trust))
    prepare_tokenizer(tokenizer, config)
    resolve_pad_token(tokenizer)
    return tokenizer


def _clone_tokens(tokenizer: Any, other: Any) -> None:
    """Template, added tokens and eos of another tokenizer; the embeddings that training adds change no row."""
    known = tokenizer.get_vocab()
    tokenizer.chat_template = other.chat_template
    tokenizer.add_tokens([token for token in other.added_tokens_decoder.values() if token.content not in known])
    tokenizer.eos_token = other.eos_token


def _drawn(dataset: Any, count: int, seed: int) -> tuple[Any, int | None, list[int]]:
    """Up to ``count`` examples in the order of the dataset, in memory, how many there are (None of a stream), their places."""
    import datasets

    from posttrain.data.formats import ROW, undecoded

    dataset = undecoded(dataset)
    streaming = isinstance(dataset, datasets.IterableDataset)
    if streaming:
        examples, total = list(itertools.islice(dataset, count)), None
        indices = list(range(len(examples)))
    else:
        total = len(dataset)
        indices = sorted(random.Random(seed).sample(range(total), min(count, total)))
        examples = list(dataset.select(indices))
    if not examples:
        raise DataError("the dataset is empty: there is nothing to inspect.")
    # A dataset of its own in memory: preparing it leaves no cache file behind.
    made: Any = datasets.Dataset.from_list(examples, features=dataset.features)
    return made.add_column(ROW, indices), total, indices


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Reading and preparing a thousand rows takes a second; bars would only hide what is shown."""
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def contact_sheet(summary: Summary, processor: Any) -> Any:
    """One image of PIL with the shown rows' pictures as the model sees them, each under its row and label.

    Args:
        summary: With pictures.
        processor: A `posttrain.data.processors.PictureProcessor`.

    Raises:
        DataError: No row that is shown has a picture.
    """
    from PIL import Image, ImageDraw

    drawn = {
        f"row {shown.row}: image {number}, {one.size[0]}x{one.size[1]}, {one.digest[:4]}": seen_by_model(processor, one)
        for shown in summary.shown
        for number, one in enumerate(shown.pictures, 1)
    }
    if not drawn:
        raise DataError("none of the shown rows has an image. Fix: leave out --pictures, or show more rows (--rows).")
    width = max(CAPTION_WIDTH, *(image.width for image in drawn.values()))
    sheet = Image.new("RGB", (width, sum(image.height + CAPTION for image in drawn.values())), "white")
    at, pen = 0, ImageDraw.Draw(sheet)
    for caption, image in drawn.items():
        pen.text((2, at + 2), caption, fill="black")
        sheet.paste(image, (0, at + CAPTION))
        at += image.height + CAPTION
    return sheet


def seen_by_model(processor: Any, picture: Any) -> Any:
    """What the model sees of a picture, as an image of PIL: prepared, then its normalisation undone; tiles side by side."""
    import torch
    from PIL import Image

    images, prepared = processor.processor.image_processor, processor.prepare(picture)
    pixels = prepared["pixel_values"]
    if processor.family.positions == "grid":
        pixels = _unpatched(pixels, prepared["image_grid_thw"][0].tolist(), images)[None]
    strip = torch.cat(list(pixels.flatten(0, -4)), -1).float()  # (3, H, sum of W)
    if images.do_normalize:
        mean, deviation = (torch.tensor(one)[:, None, None] for one in (images.image_mean, images.image_std))
        strip = strip * deviation + mean
    strip = strip / (images.rescale_factor if images.do_rescale else 1)
    return Image.fromarray(strip.round().clamp(0, 255).byte().permute(1, 2, 0).numpy())


def _unpatched(patches: Any, grid: Sequence[int], images: Any) -> Any:
    """Pixels ``(3, H, W)`` of patches ``(h w, 3 * frames * size^2)``, which come in squares of ``merge_size``."""
    (_, h, w), merge, size = grid, images.merge_size, images.patch_size
    parts = patches.view(h // merge, w // merge, merge, merge, 3, images.temporal_patch_size, size, size)[
        :, :, :, :, :, 0
    ]
    return parts.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, h * size, w * size)
