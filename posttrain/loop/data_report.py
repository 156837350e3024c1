"""`DataReport`: a summary of the training data, which is logged once at the start. This module also implements
``strict_data``, which turns warnings about the data into errors.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import islice
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow
import pyarrow.compute
import transformers

from posttrain.checks.pairs import PAIR_TEXT_CODES, PairScan, scan_pairs, score_columns
from posttrain.checks.registry import Severity, describe
from posttrain.checks.rows import (
    ROW_CODES,
    SUSPECTS,
    WHOLE,
    RowSample,
    TokenSequence,
    answers_of,
    columns_of,
    count_of,
    doubt,
    fault,
    is_open,
    quantiles,
    sequences_of,
    write_lines,
)
from posttrain.data.chat import tokenize_prompts
from posttrain.data.forest import to_rows
from posttrain.data.formats import (
    PROMPT_COLUMNS,
    TOKENIZED,
    first_rows,
    get_dataset_column_names,
    maybe_convert_to_chatml,
    read_columns,
    rows_at,
    shown_pieces,
    undecoded,
)
from posttrain.data.packing import LENGTHS
from posttrain.data.templates import check_template
from posttrain.errors import DataError, PosttrainError
from posttrain.types import Batch, Finding, Row
from posttrain.values import strip_none

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from posttrain.methods.base import Method
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)


# TEMPLATE_ROWS is the number of rows with which the chat template is checked. SEQUENCES_DESCRIBED is the number of sequences
# that the report shows.
TEMPLATE_ROWS, SEQUENCES_DESCRIBED = 32, 3
# Number of examples that are tokenized for the report: evenly spaced examples of a dataset, or the first examples of a
# stream.
EXAMPLES_TOKENISED, EXAMPLES_OF_STREAM = 64, 32
CHAT = ("messages", "prompt", "chosen", "conversations")


@dataclass
class DataReport:
    """Summary of a sample of the training set, with the tokens that the model receives.

    Attributes:
        rows_in, rows_out: Number of rows before and after preparation. With packing, ``rows_out`` is the number of rows
            before packing, if known. None for a stream.
        dropped: Number of dropped rows by reason.
        sampled: Number of sampled rows, evenly spaced over the set. All following values are computed from these rows.
        tokens, trained_tokens: Number of all tokens in the sampled sequences, and number of tokens that contribute to the
            loss.
        lengths: Sequence length in tokens: min, median, p95, max.
        packing_fill: Average length of packed rows, as a fraction of ``max_length``. None without packing.
        shown: Decoded example sequences. Each sequence is a list with one pair ``(text, trained)`` per token. ``trained`` is
            True if the token contributes to the loss.
        first_trained, last_trained: Most frequent first and last tokens of the token ranges that contribute to the loss,
            with their counts.
        equal_pairs: Number of pairs whose chosen and rejected answers have the same tokens.
        labels: Number of rows with each label. Only for unpaired preferences.
        findings: Findings about the rows and the chat template.
    """

    rows_in: int | None = None
    rows_out: int | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    sampled: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lengths: dict[str, float] = field(default_factory=dict)
    packing_fill: float | None = None
    shown: list[list[tuple[str, bool]]] = field(default_factory=list)
    first_trained: dict[str, int] = field(default_factory=dict)
    last_trained: dict[str, int] = field(default_factory=dict)
    equal_pairs: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def trained_share(self) -> float:
        """Number of tokens that contribute to the loss, divided by the number of all tokens."""
        return self.trained_tokens / max(self.tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {**asdict(self), "trained_share": self.trained_share}

    def __str__(self) -> str:
        rows = f"{self.rows_out} of {self.rows_in} rows" if self.rows_in is not None else "a stream of rows"
        left_out = "".join(f", {count} left out: {why}" for why, count in self.dropped.items())
        share = f"{self.trained_tokens} of {self.tokens} tokens contribute to the loss ({self.trained_share:.1%})"
        lines = [
            f"data: {rows}{left_out}; in {self.sampled} sampled rows, {share}",
            "lengths in tokens: " + ", ".join(f"{name} {value:g}" for name, value in self.lengths.items()),
        ]
        if self.packing_fill is not None:
            lines.append(f"packed rows are {self.packing_fill:.1%} full")
        if self.labels:
            lines.append("labels: " + ", ".join(f"{count} {label}" for label, count in self.labels.items()))
        for title, counts in (("begins", self.first_trained), ("ends", self.last_trained)):
            if counts:
                lines.append(f"the trained part {title} with " + ", ".join(f"{t!r} ({n})" for t, n in counts.items()))
        lines += ["".join(f"[[{text}]]" if trained else text for text, trained in piece) for piece in self.shown]
        lines += [f"{f.severity} {f.code}: {f.what} ({f.where}) {f.fix}" for f in self.findings]
        return "\n".join(lines).replace("]][[", "")


@contextmanager
def warnings_are_errors(strict: bool) -> Iterator[None]:
    """Collect the warnings that are logged in this context. With ``strict``, raise all of them as one error at the end of
    the context.

    Raises:
        DataError: ``strict`` is set and warnings were logged. The message lists all of them.
    """
    handler = BufferingHandler(sys.maxsize)
    handler.setLevel(logging.WARNING)
    package = logging.getLogger("posttrain")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
    if strict and handler.buffer:
        refuse_data([record.getMessage() for record in handler.buffer])


class DatasetHead:
    """Sample of training rows that is checked before training. The row checks, the data report and ``strict_data`` share the
    sample, so its rows are read and tokenized only once.

    Args:
        raw: Training set as it was passed to the trainer.
        prepared: Prepared training set.
        rows_of: Function that converts prepared examples to rows.
        tokenizer: Tokenizer of the run.
        args: The trainer's config: ``max_length``, ``strict_data``.
        fills_prompts: Whether environments write the prompts. If so, rows with an empty prompt are excluded from the sample.
        id_columns: Columns that contain token ids; see `Traits`.
    """

    def __init__(
        self,
        raw: object,
        prepared: Any,
        rows_of: Callable[[list[dict[str, Any]]], list[Row]],
        tokenizer: Tokenizer,
        args: PostTrainingConfig,
        *,
        fills_prompts: bool = False,
        id_columns: Collection[str] = TOKENIZED,
    ) -> None:
        self.raw, self.prepared, self.rows_of, self.tokenizer = raw, prepared, rows_of, tokenizer
        self.limit, self.strict = args.max_length, args.strict_data
        self.fills_prompts, self.id_columns = fills_prompts, id_columns
        self.streams = isinstance(prepared, datasets.IterableDataset) or not isinstance(prepared, Sized)

    @cached_property
    def examples(self) -> list[dict[str, Any]]:
        """Sampled prepared examples. They are evenly spaced over a dataset, or the first examples of a stream. Rows whose
        prompt is written by an environment are excluded.
        """
        if self.streams:
            chosen = islice(self.prepared, EXAMPLES_OF_STREAM)
        else:
            total = len(self.prepared)
            take = min(total, EXAMPLES_TOKENISED)
            chosen = rows_at(self.prepared, [total * k // take for k in range(take)])
        return [example for example in chosen if not is_open(example, self.fills_prompts)]

    @cached_property
    def sample(self) -> RowSample:
        """Rows made from `examples`, with the findings of the row checks."""
        return RowSample(self.rows_of(self.examples), self.tokenizer, self.limit)

    @cached_property
    def template_findings(self) -> list[Finding]:
        """Findings of a check of the chat template with the first raw rows."""
        return template_findings(self.raw, self.tokenizer, self.id_columns)

    def report(self, prepared_by: Any = None, ignored_codes: frozenset[str] = frozenset()) -> DataReport:
        """Return the summary of the training set.

        Args:
            prepared_by: Counts from the preparation of the set (``rows_out``, ``dropped``). None: no counts are available.
            ignored_codes: Codes of findings that do not apply to the rows of this method.

        Raises:
            DataError: ``strict_data`` is set and there are warnings.
        """
        report = _describe(self.sample)
        if not self.streams and isinstance(self.raw, Sized):
            report.rows_in = len(self.raw)
            report.rows_out = (prepared_by and prepared_by.rows_out) or len(self.prepared)
        report.dropped = dict(prepared_by.dropped) if prepared_by else {}
        if self.examples and LENGTHS in self.examples[0] and self.limit:
            report.packing_fill = statistics.fmean(len(example["input_ids"]) for example in self.examples) / self.limit
        labels = [str(bool(e["label"])) for e in self.examples if isinstance(e.get("label"), bool | int)]
        report.labels = {label: labels.count(label) for label in sorted(set(labels))}
        findings = [*self.template_findings, *self.sample.findings]
        report.findings = [finding for finding in findings if finding.code not in ignored_codes]
        if self.strict and (worse := [describe(finding) for finding in report.findings if finding.severity != "info"]):
            refuse_data(worse)
        return report


class DataReportCallback(transformers.TrainerCallback):
    """Logs the data report at the start of training, and writes it to ``data_report.json`` in the run's folder.

    Args:
        report: Function that returns the report; see `PostTrainer.data_report`.
    """

    def __init__(self, report: Callable[[], DataReport]) -> None:
        self.report = report

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the report on the main process. An error in the report does not stop the run, except with ``strict_data``."""
        if not state.is_world_process_zero:
            return
        try:
            report = self.report()
        except DataError:
            raise
        except Exception as error:
            logger.warning("the data report could not be created: %s: %s", type(error).__name__, error)
            return
        logger.info("%s", report)
        folder = Path(args.output_dir or ".").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
        (folder / "data_report.json").write_text(text + "\n", encoding="utf-8", errors="replace")


def prompt_rows(
    examples: list[dict[str, Any]], tokenizer: Tokenizer, args: PostTrainingConfig, id_columns: Collection[str] = ()
) -> list[Row]:
    """Return rows with prompts but without completions, for methods that generate completions later. ``id_columns`` are the
    columns with token ids; see `Traits`.
    """
    if examples and "input_ids" in id_columns and "input_ids" in examples[0]:
        return [Row(list(example["input_ids"]), [], []) for example in examples]
    kwargs = args.chat_template_kwargs or {}
    ids = tokenize_prompts(examples, tokenizer, chat_template_kwargs=kwargs) if examples else []
    return [Row(prompt, [], []) for prompt in ids]


def refuse_data(problems: Sequence[str]) -> None:
    """Raise the collected warnings as one error, as ``strict_data`` requires.

    Raises:
        DataError: Always. The message lists all warnings.
    """
    listed = "".join(f"\n- {text}" for text in problems)
    raise DataError(
        f"strict_data=True turns every warning about the data into an error:{listed}\nFix: correct the data, or "
        "set strict_data=False."
    )


def template_findings(raw: object, tokenizer: Tokenizer, id_columns: Collection[str] = TOKENIZED) -> list[Finding]:
    """Check the chat template with the first rows of a conversational dataset. Return no findings for other datasets."""
    if not tokenizer.chat_template or raw is None:
        return []
    columns = get_dataset_column_names(raw)
    if not set(CHAT) & set(columns) or set(columns) & set(id_columns):
        return []
    rows = [strip_none(maybe_convert_to_chatml(row)) for row in first_rows(undecoded(raw), TEMPLATE_ROWS)]
    if not any(isinstance(row.get(name), list) for row in rows for name in CHAT):
        return []
    try:
        return list(check_template(tokenizer, rows, limit=TEMPLATE_ROWS).findings)
    # Ignore rows that the template rejects. They were already reported when the rows were prepared.
    except PosttrainError:
        return []


def _describe(sample: RowSample) -> DataReport:
    rows, sequences, tokenizer = sample.rows, sample.sequences, sample.tokenizer
    learnt = [list(itertools.compress(sequence.ids, sequence.trained)) for sequence in sequences]
    each = lambda part, of: [(_text(t, tokenizer), f) for t, f in zip(part, of, strict=True)]  # noqa: E731
    return DataReport(
        sampled=len(rows),
        tokens=sum(len(sequence.ids) for sequence in sequences),
        trained_tokens=sum(map(len, learnt)),
        lengths=quantiles(len(sequence.ids) for sequence in sequences),
        shown=[
            shown_pieces(tokenizer, sequence.ids, sequence.trained, rows[sequence.row], sequence.completion or 0, each)
            for sequence in sequences[:SEQUENCES_DESCRIBED]
        ],
        first_trained=_counted([ids[0] for ids in learnt if ids], tokenizer),
        last_trained=_counted([ids[-1] for ids in learnt if ids], tokenizer),
        equal_pairs=sum(len(row.completions) > 1 and len(set(map(tuple, row.completions))) == 1 for row in rows),
    )


def _text(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token], skip_special_tokens=False) if 0 <= token < len(tokenizer) else f"[id {token}]"


def _counted(tokens: list[int], tokenizer: Tokenizer) -> dict[str, int]:
    counts = sorted({token: tokens.count(token) for token in tokens}.items(), key=lambda item: -item[1])
    return {_text(token, tokenizer): count for token, count in counts[:5]}


# Number of sequences that are written to ``data.json``, and maximum number of tokens per sequence.
SHOWN_SEQUENCES, LONGEST = 6, 2000


def describe_batches(batches: Sequence[Batch], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a summary of the batches of one training step, to be written to the run's ``data.json``.

    Args:
        batches: Batches of this rank in one optimizer step.
        tokenizer: Tokenizer that decodes the ids.

    Returns:
        ``facts`` by name; ``lengths`` of all sequences, including prompts; and ``sequences``. Each sequence has a ``title``,
        ``pieces`` (pairs of a text and a flag that is True if the text contributes to the loss) and ``pictures`` (thumbnails
        in reading order).
    """
    rows = [row for batch in batches for row in to_rows(batch)]
    sequences = sequences_of(rows)
    lengths = [len(sequence.ids) for sequence in sequences]
    computed = sum(batch.input_ids.numel() for batch in batches)
    real = sum(batch.num_tokens for batch in batches)
    return {
        "facts": {
            "prompts and documents": len(rows),
            "sequences": len(lengths),
            "forward passes": len(batches),
            "tokens computed": real,
            "tokens of all sequences": sum(lengths),
            "tokens trained": sum(batch.num_loss_tokens for batch in batches),
            "padding": f"{1 - real / computed:.1%}" if computed else "-",
        },
        "lengths": lengths,
        "sequences": [_shown(sequence, rows[sequence.row], tokenizer) for sequence in sequences[:SHOWN_SEQUENCES]],
    }


def _shown(sequence: TokenSequence, row: Row, tokenizer: Tokenizer) -> dict[str, Any]:
    index = sequence.completion or 0
    which = f"row {sequence.row}" + (f", completion {index}" if len(row.completions) > 1 else "")
    flags = [*(row.prompt_mask or sequence.trained[: sequence.start]), *sequence.trained[sequence.start :]]
    pictures = [image.picture for part in (*row.pictures[:1], *row.pictures[index + 1 : index + 2]) for image in part]
    return {
        "title": f"{which} ({len(sequence.ids)} tokens)",
        "pieces": [
            list(piece) for piece in shown_pieces(tokenizer, sequence.ids[:LONGEST], flags[:LONGEST], row, index)
        ],
        "pictures": [picture.thumbnail() for picture in pictures],
    }


# Rows that cannot be used for training ------------------------------------------------------------------------------

ROWS_NAMED = 5  # Maximum number of row numbers that a message lists.
# Two numbers: how many rows of a dataset, and how many rows of a stream, are read completely at most. In the remaining rows
# of a dataset, Arrow counts only missing and empty values.
ROWS_READ_WHOLE, READ_OF_STREAM = (
    1000,
    256,
)
ARROW_BATCH = 20_000
PAIRS_COMPARED = 100_000  # Maximum number of preference pairs that are compared with each other.
EXCERPT = 200
# Columns whose names are common. Datasets of other tasks may use these names for other content.
JUDGED = frozenset(("label", "reference"))


def row_codes(dataset: AnyDataset) -> tuple[str, ...]:
    """Return the codes of the checks that `usable_rows` runs on this dataset."""
    pairs = not isinstance(dataset, datasets.IterableDataset) and _is_pairs(get_dataset_column_names(dataset))
    return (*ROW_CODES, *(PAIR_TEXT_CODES if pairs else ()))


def usable_rows(
    dataset: AnyDataset, args: PostTrainingConfig, method: Method[Any], *, main: bool, filled: bool = False
) -> tuple[Any, list[Finding]]:
    """Return the rows that can be used for training, and findings about the rows that cannot be used.

    Args:
        dataset: Dataset that was passed to the trainer.
        args: Config with ``bad_rows``, ``bad_rows_max``, ``preflight`` and ``output_dir``.
        method: Method that trains on the rows.
        main: Whether this is the main process, which writes files.
        filled: Whether an environment writes a prompt for each row whose prompt is empty.

    Returns:
        The dataset, and the findings, which are equal on every rank. With ``bad_rows="drop"``, the dataset has no bad rows.
    """
    drop = args.bad_rows == "drop"
    if args.preflight == "off" and not drop:
        return dataset, []
    samples, unread = method.traits.samples, JUDGED - {*method.branches, *method.keep}
    columns = columns_of(
        get_dataset_column_names(dataset), prompts_only=samples, unread=unread, ids=method.traits.id_columns
    )
    if not columns:
        return dataset, []
    if isinstance(dataset, datasets.IterableDataset):
        if drop:
            return dataset.filter(partial(_is_good, columns=columns, filled=filled)), []
        rows = list(islice(dataset, READ_OF_STREAM))
        faults, doubts = _read(rows, columns, filled)
        return dataset, [*bad_rows(faults, len(rows)), *doubtful_rows(doubts, len(rows))]
    faults, doubts = _read(first_rows(dataset, len(dataset) if drop else ROWS_READ_WHOLE, columns), columns, filled)
    scan = _pairs(dataset, columns)
    pairs = scan.findings() if _is_pairs(columns) else []
    if not drop:
        faults = _empty_rows(dataset, columns) | faults
        _write_suspects(dataset, scan, args.output_dir, main)
        return dataset, [*bad_rows(faults, len(dataset)), *doubtful_rows(doubts, len(dataset)), *pairs]
    bad = dict.fromkeys(scan.swapped, "a pair that also appears with chosen and rejected swapped") | doubts | faults
    if main and bad:
        write_lines(args.output_dir, "bad_rows.jsonl", _lines(dataset, bad, columns))
    _write_suspects(dataset, scan, args.output_dir, main)
    many = too_many(len(bad), len(dataset), most=args.bad_rows_max)
    findings = [*([many] if many else bad_rows(bad, len(dataset), dropped=True)), *pairs]
    usable = dataset.select([index for index in range(len(dataset)) if index not in bad]) if bad else dataset
    return usable, findings


def _is_good(row: Mapping[str, Any], columns: Sequence[str], filled: bool = False) -> bool:
    return not fault(row, columns) and (not doubt(row, columns) or is_open(row, filled))


def _read(rows: Any, columns: Sequence[str], filled: bool) -> tuple[dict[int, str], dict[int, str]]:
    faults: dict[int, str] = {}
    doubts: dict[int, str] = {}
    for index, row in enumerate(rows):
        if wrong := fault(row, columns):
            faults[index] = wrong
        elif (odd := doubt(row, columns)) and not is_open(row, filled):
            doubts[index] = odd
    return faults, doubts


def _empty_rows(dataset: datasets.Dataset, columns: Sequence[str]) -> dict[int, str]:
    """Return a dict that maps the number of each row with a missing value or an empty list to the reason. Arrow finds these
    rows without reading rows into Python.
    """
    reasons: dict[int, str] = {}
    pair = _is_pairs(columns)
    # If the dataset has alternative columns, a row needs a value in only one of them.
    several = len(columns) > 1 and bool(set(columns) & set(WHOLE))
    for name in columns:
        if name == "prompt" and pair:
            continue
        for start in range(0, len(dataset), ARROW_BATCH):
            rows = range(start, min(start + ARROW_BATCH, len(dataset)))
            column = read_columns(dataset, [name], rows, "arrow").column(name)
            if column.null_count and not several:
                _note(reasons, pyarrow.compute.is_null(column), start, f"no `{name}`")
            if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
                empty = pyarrow.compute.equal(pyarrow.compute.list_value_length(column), 0)
                _note(reasons, pyarrow.compute.fill_null(empty, False), start, f"empty `{name}`")
    return reasons


def _note(reasons: dict[int, str], mask: Any, start: int, reason: str) -> None:
    for index in pyarrow.compute.indices_nonzero(mask).to_pylist():
        reasons.setdefault(start + index, reason)


def _is_pairs(columns: Sequence[str]) -> bool:
    return {"chosen", "rejected"} <= set(columns)


def _pairs(dataset: datasets.Dataset, columns: Sequence[str]) -> PairScan:
    if not _is_pairs(columns):
        return PairScan()
    scores = score_columns(dataset.column_names)
    wanted = [name for name in (*PROMPT_COLUMNS, "chosen", "rejected", *(scores or ())) if name in dataset.column_names]
    return scan_pairs(first_rows(undecoded(dataset), PAIRS_COMPARED, wanted), scores)


def _lines(dataset: datasets.Dataset, reasons: Mapping[int, str], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for index in sorted(reasons):
        row = dataset[index]
        shown = {name: answers_of(row[name])[:EXCERPT] for name in columns if name != "label"}
        yield {"row": index, "reason": reasons[index], **shown}


def _write_suspects(dataset: datasets.Dataset, scan: PairScan, folder: str | None, main: bool) -> None:
    names = [name for name in ("prompt", "chosen", "rejected") if name in dataset.column_names]
    if main and scan.suspects:
        write_lines(folder, SUSPECTS, _lines(dataset, scan.suspects, names))


def bad_rows(reasons: Mapping[int, str], total: int, *, dropped: bool = False) -> list[Finding]:
    """Return the finding about rows that cannot be used for training. It is a warning if the rows were dropped, otherwise an
    error.

    Args:
        reasons: Maps the number of each row to the reason why it cannot be used.
        total: Number of rows that were read.
        dropped: Whether the rows were dropped. If not, the finding is an error.
    """
    why = "such a row does not contribute to the loss. A batch with only such rows has a loss of 0 or NaN."
    if dropped:
        fix = "do nothing if this is intended. bad_rows.jsonl lists the rows."
        return _about("PT-D030", "warning", reasons, total, "were dropped", why, fix)
    fix = "correct these rows, or set bad_rows='drop' to remove them (bad_rows.jsonl then lists them)."
    return _about("PT-D030", "error", reasons, total, "cannot be trained", why, fix)


def doubtful_rows(reasons: Mapping[int, str], total: int) -> list[Finding]:
    """Return the warning about rows that can be used for training, but from which the model learns nothing. The arguments
    are those of `bad_rows`.
    """
    why = (
        "a conversation without an answer, a blank answer or two equal answers teach the model nothing, or teach it to give "
        "empty answers."
    )
    fix = "inspect these rows with posttrain inspect, or set bad_rows='drop' to leave them out."
    return _about("PT-D031", "warning", reasons, total, "look wrong", why, fix)


def _about(
    code: str, severity: Severity, reasons: Mapping[int, str], total: int, verb: str, why: str, fix: str
) -> list[Finding]:
    """Return a list with one finding about rows. The finding lists the count of each reason and the first row numbers. If
    ``reasons`` is empty, the list is empty.
    """
    if not reasons:
        return []
    listed = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).most_common())
    first = sorted(reasons)
    shown = ", ".join(map(str, first[:ROWS_NAMED])) + (", ..." if len(first) > ROWS_NAMED else "")
    what = f"{count_of(len(first), total)} {verb}: {listed}. First rows: {shown}."
    return [Finding(code, severity, what, "the training set", why, fix)]


def too_many(dropped: int, total: int, *, most: float) -> Finding | None:
    """Return an error if too many rows would be dropped.

    Args:
        dropped: Number of rows that would be dropped.
        total: Number of all rows.
        most: Maximum fraction of rows that may be dropped (``bad_rows_max``).
    """
    if dropped <= most * total:
        return None
    return Finding(
        "PT-D032",
        "error",
        f"bad_rows='drop' would leave out {count_of(dropped, total)}, more than bad_rows_max={most:g} allows.",
        "the training set",
        "so many bad rows usually mean that a column has a different name or format than expected.",
        f"inspect bad_rows.jsonl and correct the dataset, or set bad_rows_max={dropped / total + 0.005:.2f} to "
        "drop these rows.",
    )
