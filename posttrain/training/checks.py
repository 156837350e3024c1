"""The four moments of a trainer's checks: its config, its data, its first batch, and every line of its log.

The main process looks and all ranks hear the same, so that an error ends all of them.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pyarrow
import pyarrow.compute
import torch
from accelerate import PartialState
from torch import nn

from posttrain.checks import training as checks
from posttrain.checks.pairs import PAIR_TEXT_CODES, PairScan, scan_pairs, score_columns
from posttrain.checks.registry import Context, Moment, Preflight, codes_of, describe
from posttrain.checks.samples import (
    ROW_CODES,
    WHOLE,
    answers_of,
    bad_rows,
    columns_of,
    doubt,
    doubtful_rows,
    fault,
    too_many,
)
from posttrain.data.formats import get_dataset_column_names
from posttrain.data.templates import PROBLEMS
from posttrain.errors import PosttrainError, PreflightError
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.report.lock import NAME as LOCK
from posttrain.report.record import describe_run
from posttrain.rollouts.episodes.environments import EMPTY_PROMPT
from posttrain.training.data_report import DataReportMixin, describe_batches, refuse_data, template_findings
from posttrain.types import Batch, Finding, Row

__all__ = [
    "HealthMixin",
    "PreflightMixin",
    "is_open",
    "model_config_of",
    "note_suspects",
    "row_codes",
    "usable_rows",
]

logger = logging.getLogger(__name__)


DEEP, STREAMED = 1000, 256  # Rows that are read whole; of the others, Arrow counts what is missing or empty.
BATCH = 20_000
PAIRS = 100_000  # Pairs that are compared with each other.
EXCERPT = 200
SUSPECTS = "suspect_pairs.jsonl"


def row_codes(dataset: Any) -> tuple[str, ...]:
    """What `usable_rows` looks for in this set."""
    pairs = not isinstance(dataset, datasets.IterableDataset) and _is_pairs(get_dataset_column_names(dataset))
    return (*ROW_CODES, *(PAIR_TEXT_CODES if pairs else ()))


def usable_rows(dataset: Any, args: Any, *, main: bool, filled: bool = False) -> tuple[Any, list[Finding]]:
    """The rows that can be trained, and what is wrong with the others.

    Args:
        dataset: As it was given.
        args: ``bad_rows``, ``bad_rows_max``, ``preflight``, ``output_dir``.
        main: Whether this process writes files.
        filled: Whether an environment fills empty prompts.

    Returns:
        The set, without bad rows if ``bad_rows="drop"``; and findings, the same on every rank.
    """
    drop = args.bad_rows == "drop"
    if args.preflight == "off" and not drop:
        return dataset, []
    columns = columns_of(get_dataset_column_names(dataset), prompts_only=hasattr(args, "max_completion_length"))
    if not columns:
        return dataset, []
    if isinstance(dataset, datasets.IterableDataset):
        if drop:
            return dataset.filter(functools.partial(_is_good, columns=columns, filled=filled)), []
        faults, doubts = _read(islice(dataset, STREAMED), columns, filled)
        looked = STREAMED if faults or doubts else 0
        return dataset, _found(faults, doubts, looked)
    faults, doubts = _read(_plain_rows(dataset, columns, len(dataset) if drop else DEEP), columns, filled)
    scan = _pairs(dataset, columns)
    if not drop:
        faults = _empty_rows(dataset, columns) | faults
        _write_suspects(dataset, scan, args.output_dir, main)
        return dataset, [*_found(faults, doubts, len(dataset)), *scan.findings()]
    bad = dict.fromkeys(scan.swapped, "a pair that appears both ways round") | doubts | faults
    _write(args.output_dir, "bad_rows.jsonl", _lines(dataset, bad, columns), main and bool(bad))
    _write_suspects(dataset, scan, args.output_dir, main)
    many = too_many(len(bad), len(dataset), most=args.bad_rows_max)
    told = [*([many] if many else [bad_rows(bad, len(dataset), dropped=True)]), *scan.findings()]
    kept = dataset.select([index for index in range(len(dataset)) if index not in bad]) if bad else dataset
    return kept, [finding for finding in told if finding is not None]


def _found(faults: dict[int, str], doubts: dict[int, str], total: int) -> list[Finding]:
    return [f for f in (bad_rows(faults, total), doubtful_rows(doubts, total)) if f is not None]


def _is_good(row: Mapping[str, Any], columns: Sequence[str], filled: bool = False) -> bool:
    return not fault(row, columns) and (not doubt(row, columns) or is_open(row, filled))


def is_open(row: Mapping[str, Any], filled: bool) -> bool:
    """Whether a row's prompt is empty for an environment to fill; ``filled`` says that there is one."""
    return filled and row.get("prompt") == EMPTY_PROMPT


def _read(rows: Any, columns: Sequence[str], filled: bool) -> tuple[dict[int, str], dict[int, str]]:
    faults: dict[int, str] = {}
    doubts: dict[int, str] = {}
    for index, row in enumerate(rows):
        if wrong := fault(row, columns):
            faults[index] = wrong
        elif (odd := doubt(row, columns)) and not is_open(row, filled):
            doubts[index] = odd
    return faults, doubts


def _plain_rows(dataset: datasets.Dataset, columns: Sequence[str], count: int) -> Iterator[dict[str, Any]]:
    """Some columns of the first rows, whatever format the dataset was given."""
    return islice(iter(dataset.select_columns(list(columns)).with_format(None)), count)


def _empty_rows(dataset: datasets.Dataset, columns: Sequence[str]) -> dict[int, str]:
    """What Arrow alone can tell of all rows: what is missing, and lists without an item."""
    found: dict[int, str] = {}
    pair = _is_pairs(columns)
    several = len(columns) > 1 and bool(set(columns) & set(WHOLE))  # Forms, of which a row needs one.
    for name in columns:
        if name == "prompt" and pair:
            continue
        start = 0
        for table in dataset.select_columns([name]).with_format("arrow").iter(batch_size=BATCH):
            column = table.column(name)
            if column.null_count and not several:
                _note(found, pyarrow.compute.is_null(column), start, f"no `{name}`")
            if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
                empty = pyarrow.compute.equal(pyarrow.compute.list_value_length(column), 0)
                _note(found, pyarrow.compute.fill_null(empty, False), start, f"empty `{name}`")
            start += table.num_rows
    return found


def _note(found: dict[int, str], mask: Any, start: int, reason: str) -> None:
    for index in pyarrow.compute.indices_nonzero(mask).to_pylist():
        found.setdefault(start + index, reason)


def _is_pairs(columns: Sequence[str]) -> bool:
    return {"chosen", "rejected"} <= set(columns)


def _pairs(dataset: datasets.Dataset, columns: Sequence[str]) -> PairScan:
    if not _is_pairs(columns):
        return PairScan()
    scores = score_columns(dataset.column_names)
    wanted = [name for name in ("prompt", "chosen", "rejected", *(scores or ())) if name in dataset.column_names]
    return scan_pairs(_plain_rows(dataset, wanted, PAIRS), scores)


def _lines(dataset: datasets.Dataset, reasons: Mapping[int, str], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for index in sorted(reasons):
        row = dataset[index]
        shown = {name: answers_of(row[name])[:EXCERPT] for name in columns if name != "label"}
        yield {"row": index, "reason": reasons[index], **shown}


def _write_suspects(dataset: datasets.Dataset, scan: PairScan, folder: str | None, main: bool) -> None:
    lines = _lines(dataset, scan.suspects, [c for c in ("prompt", "chosen", "rejected") if c in dataset.column_names])
    _write(folder, SUSPECTS, lines, main and bool(scan.suspects))


def note_suspects(folder: str | None, reason: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put pairs into ``suspect_pairs.jsonl``, in place of what stands there for the same reason.

    Args:
        folder: Of the run.
        reason: Why they are suspected.
        rows: Number and texts.
    """
    path = Path(folder or ".").expanduser() / SUSPECTS
    there = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    kept = [line for line in map(json.loads, there) if line["reason"] != reason]
    _write(folder, SUSPECTS, iter([*kept, *({"reason": reason, **row} for row in rows)]), bool(there or rows))


def _write(folder: str | None, name: str, lines: Iterator[dict[str, Any]], wanted: bool) -> None:
    if not wanted:
        return
    path = Path(folder or ".").expanduser() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


FILE = "preflight.json"
SAMPLE, FEW, SECONDS = 256, 16, 2.0  # Rows that are looked at, unless the first few show that they would take longer.


class PreflightMixin(DataReportMixin):
    """Runs every check of `posttrain.checks` at its moment and tells what it found."""

    signs_of: ClassVar[str] = ""  # Letters of the codes that `signs` looks for,
    looked_apart: ClassVar[tuple[str, ...]] = ()  # but for these, which have a moment of their own.
    args: Any
    model: Any = None
    processing_class: Any = None
    state: Any = None
    record: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    _preflight_written = False
    _peft_config: Any = None
    _model_config: Any = None

    @cached_property
    def preflight(self) -> Preflight:
        """What was looked for in this run, and what was seen."""
        return Preflight(self.args.preflight, self.args.silence_findings)

    # The four moments --------------------------------------------------------------------------------------------

    def check_config(self, model: Any, train_dataset: Any, eval_dataset: Any, peft_config: Any) -> Any:
        """First moment, before a weight is loaded; returns the training set without the rows that ``bad_rows`` drops."""
        self._peft_config, self._raw = peft_config, train_dataset
        self._model_config = model_config_of(model, self.args)
        self.look("config", train_dataset=train_dataset, eval_dataset=eval_dataset)
        state = PartialState()
        with parallel.failing_together(state), self.preflight.looking("data", row_codes(train_dataset)):
            main = state.is_main_process
            train_dataset, findings = usable_rows(train_dataset, self.args, main=main, filled=self._fills_prompts)
            self.tell(findings)
            if self.args.strict_data and any(found.severity != "info" for found in findings):
                refuse_data([describe(found) for found in findings])
        return train_dataset

    def check_data(self) -> None:
        """Second moment: the training set is tokenised, and a sample of it is looked at."""
        rows = self._sampled_rows() if self.preflight.active else []
        limit = getattr(self.args, "max_length", None)
        self.look("data", train_dataset=self._raw, eval_dataset=self.eval_dataset, rows=rows, limit=limit)
        if self.preflight.active:
            with self.preflight.looking("data", tuple(PROBLEMS)):
                found = template_findings(self._raw, self.processing_class)
                self.tell(replace(f, severity="warning" if f.severity == "error" else "info") for f in found)

    def check_first_batch(self, batches: Sequence[Any]) -> None:
        """Third moment: what the first optimiser step holds."""
        self.look("first_batch", batches=batches)
        self.write_preflight()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Fourth moment: write the line, then look at the log it ends."""
        super().log(logs, start_time)  # type: ignore[misc]
        if not self.preflight.active:
            return
        with self.preflight.looking("log_step", _sign_codes(self.signs_of, self.looked_apart)):
            self.tell_from_main(lambda: [*self.signs(logs), *self._probed("log_step", history=self.state.log_history)])
        if self._preflight_written:  # From the first step on the folder is ours.
            self.write_preflight()

    def signs(self, logs: dict[str, float]) -> Iterable[Finding | None]:
        """What the line that was just logged says about the run; a method adds its own."""
        return ()

    # Looking and telling -----------------------------------------------------------------------------------------

    def look(self, moment: Moment, **known: Any) -> None:
        """Run all probes of a moment on the main process and tell every rank what they see."""
        self.tell_from_main(lambda: self._probed(moment, **known))

    def _probed(self, moment: Moment, **known: Any) -> list[Finding]:
        named = {name: known.pop(name) for name in tuple(known) if name in Context.__dataclass_fields__}
        context = Context(
            trainer=type(self).__name__.removesuffix("Trainer").lower(),
            args=self.args,
            model_config=self._model_config,
            model=self.model,
            tokenizer=self.processing_class,
            peft_config=self._peft_config,
            processes=PartialState().num_processes,
            parts={
                "trainer": self,
                "rewards": getattr(self, "rewards", None),
                "beside_the_point": self.beside_the_point,
                **known,
            },
        )
        for name, value in named.items():
            setattr(context, name, value)
        return self.preflight.run(moment, context)

    def tell(self, findings: Iterable[Finding | None]) -> None:
        """Tell findings that every rank has; an error among them ends the run.

        Raises:
            PreflightError: With every error.
        """
        try:
            told = self.preflight.tell(findings, log=PartialState().is_main_process)
        except PreflightError as error:
            self._keep(error.findings)
            self.write_preflight(refused=True)
            raise
        self._keep(told)

    def tell_from_main(self, look: Callable[[], Iterable[Finding | None]]) -> None:
        """Let the main process look and every rank hear it; all ranks must call this."""
        state = PartialState()
        found = parallel.run_and_share(lambda: list(look()) if state.is_main_process else [], state)  # type: ignore[arg-type]
        self.tell(parallel.all_gather_objects(found, state))  # type: ignore[arg-type]

    def _keep(self, findings: Iterable[Finding]) -> None:
        if self.record is not None:
            self.record.add_findings(findings)

    def write_preflight(self, *, refused: bool = False) -> None:
        """Write ``preflight.json`` into the run's folder where something new is known; the main process alone.

        Args:
            refused: The run ends here, maybe before its folder is its own: then another run's file is left alone.
        """
        if not PartialState().is_main_process or not (self.preflight.changed or refused):
            return
        folder = Path(self.args.output_dir or ".").expanduser()
        if refused and not self._preflight_written and (folder / LOCK).exists() and self.record is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        content = self.preflight.to_dict() | {"refused": refused, "versions": describe_run()["versions"]}
        part = folder / f"{FILE}.part"
        part.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        os.replace(part, folder / FILE)
        self._preflight_written, self.preflight.changed = True, False

    @property
    def _fills_prompts(self) -> bool:
        """Whether environments say what is to be done, each time anew: prompts left to them are empty, and all alike."""
        return getattr(self, "environments", None) is not None

    def _examples(self, dataset: Any, count: int) -> list[Any]:
        rows = (dataset[i] for i in _spread(len(dataset), count))
        return [row for row in rows if not is_open(row, self._fills_prompts)]

    def _sampled_rows(self) -> list[Row]:
        """Rows spread over the training set, as many as are made in a second or two; none where they cannot be made."""
        dataset = self.train_dataset
        if dataset is None or isinstance(dataset, datasets.IterableDataset) or not len(dataset):
            return []
        started = time.perf_counter()
        try:
            rows = self._rows_of(self._examples(dataset, FEW))
            spent = max(time.perf_counter() - started, 1e-6)
            count = min(SAMPLE, int(SECONDS / spent * FEW))
            return rows if count <= FEW else self._rows_of(self._examples(dataset, count))
        except PosttrainError:  # What is wrong with such rows is told where they are trained, by number.
            return []


@cache
def _sign_codes(letters: str, apart: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(code for letter in letters for code in codes_of(letter, "log_step") if code not in apart)


def _spread(total: int, count: int) -> list[int]:
    take = min(total, count)
    return [total * k // take for k in range(take)]


def model_config_of(model: Any, args: Any) -> Any:
    """The model's configuration, of a string without its weights; None where there is none to be read."""
    if not isinstance(model, str):
        return getattr(model, "config", None)
    from transformers import AutoConfig

    init = args.model_init_kwargs or {}
    try:
        return AutoConfig.from_pretrained(
            model, revision=init.get("revision"), trust_remote_code=args.trust_remote_code
        )
    except Exception:  # Loading the model will say what is wrong with it.
        return None


BAD_STEPS = 3  # Gradients in a row that are not finite, after which training has diverged.


class HealthMixin(PreflightMixin):
    """Runs `posttrain.checks` for `PostTrainer` and says what they find."""

    args: Any
    accelerator: Any
    model: Any
    layout: Any
    state: Any
    processing_class: Any
    zero_gradient_is_normal = False  # An online step whose groups are all equal moves nothing, rightly.
    _bad_steps = 0
    _first_step_checked = False
    _trained: tuple[float, ...] = ()
    _tokens = (0, 0)  # Of sequences, and computed with padding.
    _steps = 0
    _told_lengths = False
    _lengths_found: list[Finding] = []  # noqa: RUF012  Replaced, never changed.

    def check_start(self) -> None:
        """Precision of what is trained, where layers lie, dense masks over long rows; rows where ``strict_data`` asks."""
        if self.args.strict_data and self.train_dataset is not None:
            self.data_report()
        trainable: dict[str, int] = {}
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                name = str(parameter.dtype).removeprefix("torch.")
                trainable[name] = trainable.get(name, 0) + parameter.numel()
        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(self.accelerator.mixed_precision)
        text = self.model.config.get_text_config() if hasattr(self.model, "config") else None
        implementation = str(getattr(text, "_attn_implementation", None))
        with self.preflight.looking("config", ("PT-C001", "PT-C002", "PT-C003", "PT-C004", "PT-C005")):
            self.tell([
                checks.check_precision(trainable, learning_rate=self.args.learning_rate, autocast=mixed),
                checks.check_devices(
                    visible=max(self.args.n_gpu, 1),
                    processes=self.accelerator.num_processes,
                    placed=(getattr(self.model, "hf_device_map", None) or {}).values(),
                ),
                checks.check_dense_masks(
                    implementation, packed=self.layout.kind == "tree", row_tokens=self.layout.row_tokens
                ),
            ])  # fmt: skip
        self.check_data()

    def check_step(self, batches: Sequence[Batch], tokens: float, sequences: float, alarms: float = 0.0) -> None:
        """Count what an optimiser step holds, and end a run whose latest steps held no trained token.

        Online, steps whose completions are all masked are part of learning: the checks of rewards, lengths and gradients
        tell of those that never end.

        Args:
            batches: Of this rank.
            tokens: That carry loss, over all ranks.
            sequences: Over all ranks.
            alarms: Ranks with something to tell of their own batches (`alarm`).
        """
        with self.preflight.looking("log_step", ("PT-T003",)):
            found = parallel.all_gather_objects(self._lengths_found, self.accelerator) if alarms else []
            self.tell(found[:1])
        if self._steps == 0:
            self.check_first_batch(batches)
        if self._steps == 0 and self.record is not None and self.state.global_step == 0:
            self.record.add_data(lambda: describe_batches(batches, self.processing_class))
        self._trained = (*self._trained, tokens)[-checks.EMPTY_STEPS :]
        if not self.zero_gradient_is_normal:
            with self.preflight.looking("log_step", ("PT-T001",)):
                self.tell([checks.check_trained_tokens([int(count) for count in self._trained])])
        real = sum(batch.num_tokens for batch in batches)
        computed = sum(batch.input_ids.numel() for batch in batches)
        share = 1 - real / computed if computed else 0.0
        self.log_metrics_now({  # type: ignore[attr-defined]
            "documents": mean(sequences),
            "trained_tokens": mean(tokens),
            "padding_share": mean(share, weight=float(computed)),
        })  # fmt: skip
        self._tokens = (self._tokens[0] + real, self._tokens[1] + computed)
        self._check_economy()

    def alarm(self, batches: Sequence[Batch]) -> float:
        """1 where a sequence of this rank is too long for the model, told once; it travels with the step's counts."""
        longest = max((int(batch.position_ids.max()) + 1 for batch in batches if batch.position_ids.numel()), default=0)
        config = getattr(self.model, "config", None)
        text = None if config is None or self._told_lengths else config.get_text_config()
        rotary = any(getattr(text, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
        finding = checks.check_positions(longest, getattr(text, "max_position_embeddings", None), rotary=rotary)
        self._told_lengths = self._told_lengths or finding is not None
        self._lengths_found = [finding] if finding is not None else []
        return float(len(self._lengths_found))

    def _check_economy(self) -> None:
        """Once, when a few steps have shown it: padding that is computed, and memory that lies idle."""
        self._steps += 1
        if self._steps != min(checks.ECONOMY_STEPS + 1, max(int(self.state.max_steps or 1), 1)):
            return
        peak, total = device_memory(self.args.device)
        checkpointing = bool(getattr(self.args, "activation_checkpointing", None) or self.args.gradient_checkpointing)
        with self.preflight.looking("log_step", ("PT-T002", "PT-T004")):
            self.tell([
                checks.check_padding(*self._tokens),
                checks.check_idle_memory(peak=peak, total=total, checkpointing=checkpointing, steps=self._steps - 1),
            ])  # fmt: skip

    def _check_first_step(self, model: nn.Module) -> None:
        if self._first_step_checked or parallel.shards_parameters(self.accelerator) or not sum(self._trained):
            return  # A step without a trained token has no gradient, rightly; the next one will tell.
        self._first_step_checked = True
        norms = {n: _norm(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        if self.zero_gradient_is_normal:
            norms = {name: None if norm is None else max(norm, 1.0) for name, norm in norms.items()}
        with self.preflight.looking("first_batch", ("PT-B001", "PT-B002", "PT-B003")):
            self.tell([checks.check_first_gradients(norms)])

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip; a gradient that is not finite must not reach the weights, and three in a row end the run."""
        norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        if norm is None or self.accelerator.mixed_precision == "fp16" or bool(torch.isfinite(torch.as_tensor(norm))):
            self._bad_steps = 0
            self._check_first_step(model)
            return norm
        self._bad_steps += 1
        logger.warning(
            "step %d: the gradient norm is %s, so this step is skipped (%d in a row).",
            self.state.global_step + 1, norm, self._bad_steps,
        )  # fmt: skip
        if self._bad_steps == BAD_STEPS:
            raise PosttrainError(
                f"{BAD_STEPS} steps in a row had a gradient norm of {norm}. Lower learning_rate or max_grad_norm, try "
                "bf16=False, and look at the rows of these steps; the last checkpoint is intact."
            )
        for parameter in model.parameters():
            parameter.grad = None
        return norm


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of an accelerator that were in use at most, and all of them; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory


def _norm(gradient: torch.Tensor | None) -> float | None:
    return None if gradient is None else float(gradient.float().norm())
