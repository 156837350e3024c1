"""`data_report`: what a trainer will train on, said once at the start, and warnings about it as errors with ``strict_data``."""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import transformers

from posttrain.checks.rows import RowSample, is_open
from posttrain.data.chat import tokenize_prompts
from posttrain.data.forest import to_rows
from posttrain.data.formats import get_dataset_column_names, maybe_convert_to_chatml, strip_none
from posttrain.data.packing import LENGTHS
from posttrain.data.templates import check_template
from posttrain.errors import DataError, PosttrainError
from posttrain.types import Batch, Finding, Row

__all__ = [
    "DataReport",
    "DataReportCallback",
    "DatasetHead",
    "describe_batches",
    "prompt_rows",
    "refuse_data",
    "template_findings",
    "warnings_are_errors",
]

logger = logging.getLogger(__name__)


# Rows of a chat template's check, and sequences that are shown.
ROWS, SHOWN = 32, 3
# Examples that are always tokenised, and those that are where two seconds suffice; of a stream, its first ones.
FEW, MOST, SECONDS, STREAMED = 16, 256, 2.0, 32
CHAT = ("messages", "prompt", "chosen", "conversations")


@dataclass
class DataReport:
    """What a sample of the training set looks like to the model.

    Attributes:
        rows_in, rows_out: Rows given and rows left (before packing, where that is known); None of a stream.
        dropped: Rows left out, by reason.
        sampled: Rows that the numbers below are about, spread over the set.
        tokens, trained_tokens: Over the sampled sequences.
        lengths: Tokens of a sequence: min, median, p95, max.
        packing_fill: Share of ``max_length`` that a packed row fills; None without packing.
        shown: Decoded sequences as ``[text, trained]`` pieces, one a token.
        first_trained, last_trained: How often each token opens or ends what is trained, the most frequent first.
        equal_pairs: Pairs of answers with the same tokens.
        labels: Rows by their label (unpaired preferences).
        findings: Of the rows and of the chat template.
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
        """Trained tokens over tokens."""
        return self.trained_tokens / max(self.tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "trained_share": self.trained_share}

    def __str__(self) -> str:
        rows = f"{self.rows_out} of {self.rows_in} rows" if self.rows_in is not None else "a stream of rows"
        left_out = "".join(f", {count} left out: {why}" for why, count in self.dropped.items())
        share = f"{self.trained_tokens} of {self.tokens} tokens are trained ({self.trained_share:.1%})"
        lines = [
            f"data: {rows}{left_out}; of {self.sampled} looked at, {share}",
            "lengths in tokens: " + ", ".join(f"{name} {value:g}" for name, value in self.lengths.items()),
        ]
        if self.packing_fill is not None:
            lines.append(f"packed rows are {self.packing_fill:.1%} full")
        if self.labels:
            lines.append("labels: " + ", ".join(f"{count} {label}" for label, count in self.labels.items()))
        for title, counts in (("begins", self.first_trained), ("ends", self.last_trained)):
            if counts:
                lines.append(f"what is trained {title} with " + ", ".join(f"{t!r} ({n})" for t, n in counts.items()))
        lines += ["".join(f"[[{text}]]" if trained else text for text, trained in piece) for piece in self.shown]
        lines += [f"{f.severity} {f.code}: {f.what} ({f.where}) {f.fix}" for f in self.findings]
        return "\n".join(lines).replace("]][[", "")


@contextmanager
def warnings_are_errors(strict: bool) -> Iterator[None]:
    """With ``strict``, what is warned of while data is prepared is an error at the end.

    Raises:
        DataError: Something was warned of; all of it is told.
    """
    told = _Listener()
    package = logging.getLogger("posttrain")
    package.addHandler(told)
    try:
        yield
    finally:
        package.removeHandler(told)
    if strict and told.said:
        refuse_data(told.said)


class DatasetHead:
    """The rows that are looked at before training: read and tokenised once, for the checks, the report and ``strict_data``.

    Args:
        raw: The training set as it was given.
        prepared: As it is trained.
        rows_of: Makes rows of prepared examples.
        tokenizer: Of the run.
        limit: ``max_length``: tokens at which rows were cut.
        fills_prompts: Whether environments write the prompts, so that rows with an empty one are left out.
    """

    def __init__(
        self,
        raw: Any,
        prepared: Any,
        rows_of: Callable[[list[dict[str, Any]]], list[Row]],
        tokenizer: Any,
        *,
        limit: int | None,
        fills_prompts: bool = False,
    ) -> None:
        self.raw, self.prepared, self.rows_of, self.tokenizer = raw, prepared, rows_of, tokenizer
        self.limit, self.fills_prompts = limit, fills_prompts
        self.streams = isinstance(prepared, datasets.IterableDataset) or not hasattr(prepared, "__len__")

    @cached_property
    def _read(self) -> tuple[list[dict[str, Any]], list[Row]]:
        """Examples spread over the set, as many as are tokenised in two seconds, and their rows."""
        if self.streams:
            first = self._kept(islice(self.prepared, STREAMED))
            return first, self.rows_of(first)
        began, total = time.perf_counter(), len(self.prepared)
        few = self._kept(self.prepared[i] for i in _evenly(total, FEW))
        rows = self.rows_of(few)
        if total <= FEW:
            return few, rows
        count = min(MOST, int(SECONDS / max(time.perf_counter() - began, 1e-6) * FEW))
        places = sorted({*_evenly(total, count)} - {*_evenly(total, FEW)}) if count > FEW else []
        more = self._kept(self.prepared[i] for i in places)
        return few + more, rows + (self.rows_of(more) if more else [])

    def _kept(self, examples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [example for example in examples if not is_open(example, self.fills_prompts)]

    @property
    def examples(self) -> list[dict[str, Any]]:
        """Prepared examples."""
        return self._read[0]

    @cached_property
    def sample(self) -> RowSample:
        """Their rows, with what the checks of rows find."""
        return RowSample(self._read[1], self.tokenizer, self.limit)

    @cached_property
    def template_findings(self) -> list[Finding]:
        """What the chat template does to the first raw rows."""
        return template_findings(self.raw, self.tokenizer)

    def report(self, prepared_by: Any = None, ignored_codes: frozenset[str] = frozenset()) -> DataReport:
        """What the training set looks like to the model.

        Args:
            prepared_by: What preparation counted (``rows_out``, ``dropped``), where it did.
            ignored_codes: Codes of findings that do not concern these rows.
        """
        found = _describe(self.sample.rows, self.tokenizer)
        if not self.streams and hasattr(self.raw, "__len__"):
            found.rows_in, found.rows_out = len(self.raw), getattr(prepared_by, "rows_out", 0) or len(self.prepared)
        found.dropped = dict(getattr(prepared_by, "dropped", {}))
        if self.examples and LENGTHS in self.examples[0] and self.limit:
            found.packing_fill = statistics.fmean(len(example["input_ids"]) for example in self.examples) / self.limit
        labels = [str(bool(e["label"])) for e in self.examples if isinstance(e.get("label"), bool | int)]
        found.labels = {label: labels.count(label) for label in sorted(set(labels))}
        findings = [*self.template_findings, *self.sample.findings]
        found.findings = [finding for finding in findings if finding.code not in ignored_codes]
        return found


class DataReportCallback(transformers.TrainerCallback):
    """Logs the data report when training begins, and keeps it as ``data_report.json`` in the run's folder.

    Args:
        report: Makes it; see `PostTrainer.data_report`.
    """

    def __init__(self, report: Callable[[], DataReport]) -> None:
        self.report = report

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Main process alone; a report never stops a run, unless ``strict_data`` says that it must."""
        if not state.is_world_process_zero:
            return
        try:
            report = self.report()
        except DataError:
            raise
        except Exception as error:
            logger.warning("the data report could not be made: %s: %s", type(error).__name__, error)
            return
        logger.info("%s", report)
        folder = Path(args.output_dir or ".").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
        (folder / "data_report.json").write_text(text + "\n", encoding="utf-8", errors="replace")


def prompt_rows(examples: list[dict[str, Any]], tokenizer: Any, args: Any) -> list[Row]:
    """Rows of prompts alone, for methods whose completions come later."""
    if examples and "input_ids" in examples[0]:
        return [Row(list(example["input_ids"]), [], []) for example in examples]
    kwargs = getattr(args, "chat_template_kwargs", None) or {}
    ids = tokenize_prompts(examples, tokenizer, chat_template_kwargs=kwargs) if examples else []
    return [Row(prompt, [], []) for prompt in ids]


class _Listener(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def refuse_data(said: Sequence[str]) -> None:
    """End a run whose ``strict_data`` makes warnings errors.

    Raises:
        DataError: With all of them.
    """
    listed = "".join(f"\n- {text}" for text in said)
    raise DataError(
        f"strict_data=True makes every warning about the data an error:{listed}\nMend the data, or leave it out."
    )


def _evenly(total: int, count: int) -> list[int]:
    """Up to ``count`` of ``total`` indices, evenly spaced."""
    take = min(total, count)
    return [total * k // take for k in range(take)]


def template_findings(raw: Any, tokenizer: Any) -> list[Finding]:
    """What the chat template does to the first rows of a conversational set; nothing for other sets."""
    if not getattr(tokenizer, "chat_template", None) or raw is None:
        return []
    columns = get_dataset_column_names(raw)
    if not set(CHAT) & set(columns) or "input_ids" in columns:
        return []
    rows = [strip_none(maybe_convert_to_chatml(row)) for row in islice(raw, ROWS)]
    if not any(isinstance(row.get(name), list) for row in rows for name in CHAT):
        return []
    try:
        return list(check_template(tokenizer, rows, limit=ROWS).findings)
    except PosttrainError:  # What the template refuses was told by number when rows were prepared.
        return []


def _describe(rows: Sequence[Row], tokenizer: Any) -> DataReport:
    report = DataReport(sampled=len(rows))
    first: list[int] = []
    last: list[int] = []
    sizes: list[int] = []
    for row in rows:
        prompt = list(row.prompt_ids)
        if len(row.completions) > 1 and len({tuple(ids) for ids in row.completions}) == 1:
            report.equal_pairs += 1
        for ids, mask in zip(row.completions or [[]], row.loss_masks or [[]], strict=True):
            tokens = [*prompt, *ids]
            flags = [False] * len(prompt) + [bool(m) for m in mask]
            flags[:1] = [False] * len(flags[:1])  # Nothing predicts a first token.
            learnt = [token for token, flag in zip(tokens, flags, strict=True) if flag]
            sizes.append(len(tokens))
            report.trained_tokens += len(learnt)
            first, last = first + learnt[:1], last + learnt[-1:]
            if len(report.shown) < SHOWN:
                report.shown.append([(_text(t, tokenizer), f) for t, f in zip(tokens, flags, strict=True)])
    report.tokens = sum(sizes)
    if sizes:
        ordered = sorted(sizes)
        p95 = ordered[-(-95 * len(ordered) // 100) - 1]
        report.lengths = {"min": ordered[0], "median": statistics.median(ordered), "p95": p95, "max": ordered[-1]}
    report.first_trained, report.last_trained = _counted(first, tokenizer), _counted(last, tokenizer)
    return report


def _text(token: int, tokenizer: Any) -> str:
    return tokenizer.decode([token], skip_special_tokens=False) if 0 <= token < len(tokenizer) else f"[id {token}]"


def _counted(tokens: list[int], tokenizer: Any) -> dict[str, int]:
    counts = sorted({token: tokens.count(token) for token in tokens}.items(), key=lambda item: -item[1])
    return {_text(token, tokenizer): count for token, count in counts[:5]}


SHOWN_SEQUENCES, LONGEST = 6, 2000  # Sequences, and tokens of each.


def describe_batches(batches: Sequence[Batch], tokenizer: Any) -> dict[str, Any]:
    """What ``data.json`` of a run holds.

    Args:
        batches: This rank's batches of an optimiser step.
        tokenizer: Decodes ids.

    Returns:
        ``facts`` by name; ``lengths`` of all sequences, prompts included; ``sequences`` with a ``title`` and ``pieces``, pairs of
        text and whether it is trained.
    """
    rows = [row for batch in batches for row in to_rows(batch)]
    lengths = [len(row.prompt_ids) + len(completion) for row in rows for completion in row.completions]
    trained = sum(batch.num_loss_tokens for batch in batches)
    computed = sum(batch.input_ids.numel() for batch in batches)
    real = sum(batch.num_tokens for batch in batches)
    shown = itertools.islice(
        itertools.chain.from_iterable(_sequences(i, row, tokenizer) for i, row in enumerate(rows)), SHOWN_SEQUENCES
    )
    return {
        "facts": {
            "prompts and documents": len(rows),
            "sequences": len(lengths),
            "forward passes": len(batches),
            "tokens computed": real,
            "tokens of all sequences": sum(lengths),
            "tokens trained": trained,
            "padding": f"{1 - real / computed:.1%}" if computed else "-",
        },
        "lengths": lengths,
        "sequences": list(shown),
    }


def _sequences(number: int, row: Row, tokenizer: Any) -> list[dict[str, Any]]:
    several = len(row.completions) > 1
    made = []
    for index, (ids, mask) in enumerate(zip(row.completions, row.loss_masks, strict=True)):
        title = f"row {number}" + (f", completion {index}" if several else "")
        tokens = [*row.prompt_ids, *ids][:LONGEST]
        flags = [*(row.prompt_mask or [0] * len(row.prompt_ids)), *mask][:LONGEST]
        pieces = []
        for learnt, group in itertools.groupby(zip(tokens, flags, strict=True), key=lambda pair: bool(pair[1])):
            pieces.append([tokenizer.decode([token for token, _ in group]), learnt])
        made.append({"title": f"{title} ({len(row.prompt_ids) + len(ids)} tokens)", "pieces": pieces})
    return made
