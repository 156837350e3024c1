"""The four moments of a trainer's checks: its config, its data, its first batch, and every line of its log.

The main process looks and all ranks hear the same, so that an error ends all of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.compute
import torch
import transformers
from accelerate import PartialState
from torch import nn

from posttrain.checks import training as checks
from posttrain.checks.pairs import PAIR_TEXT_CODES, PairScan, scan_pairs, score_columns
from posttrain.checks.registry import Context, Moment, Preflight, codes_of, describe
from posttrain.checks.rows import (
    ROW_CODES,
    WHOLE,
    answers_of,
    bad_rows,
    columns_of,
    doubt,
    doubtful_rows,
    fault,
    is_open,
    too_many,
)
from posttrain.data.forest import Layout
from posttrain.data.formats import get_dataset_column_names
from posttrain.data.templates import PROBLEMS
from posttrain.errors import PosttrainError, PreflightError
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.report.lock import NAME as LOCK
from posttrain.report.record import describe_run
from posttrain.training.data_report import DatasetHead, describe_batches, refuse_data
from posttrain.types import Batch, Finding

__all__ = [
    "Checks",
    "log_codes",
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
    pairs = scan.findings() if _is_pairs(columns) else []
    if not drop:
        faults = _empty_rows(dataset, columns) | faults
        _write_suspects(dataset, scan, args.output_dir, main)
        return dataset, [*_found(faults, doubts, len(dataset)), *pairs]
    bad = dict.fromkeys(scan.swapped, "a pair that appears both ways round") | doubts | faults
    _write(args.output_dir, "bad_rows.jsonl", _lines(dataset, bad, columns), main and bool(bad))
    _write_suspects(dataset, scan, args.output_dir, main)
    many = too_many(len(bad), len(dataset), most=args.bad_rows_max)
    told = [*([many] if many else [bad_rows(bad, len(dataset), dropped=True)]), *pairs]
    kept = dataset.select([index for index in range(len(dataset)) if index not in bad]) if bad else dataset
    return kept, [finding for finding in told if finding is not None]


def _found(faults: dict[int, str], doubts: dict[int, str], total: int) -> list[Finding]:
    return [f for f in (bad_rows(faults, total), doubtful_rows(doubts, total)) if f is not None]


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


class Checks(transformers.TrainerCallback):
    """Everything that is checked of a run: its config, its data, its first batch, every step, every log line.

    The main process looks and all ranks get its findings, so that an error ends all of them. Every method must be called
    by all ranks.

    Args:
        args: The trainer's config.
        trainer: The trainer's command name, such as ``"grpo"``.
        ignored_codes: Codes of findings that do not concern this method's rows.
        log_codes: Codes that the method's own checks of log lines (`log_checks`) may find.
        zero_gradient_is_normal: Whether a step may move nothing: online, where all rewards of all groups are equal.
        fills_prompts: Whether environments write the prompts, so that those of the dataset may be empty and alike.
    """

    def __init__(
        self,
        args: Any,
        *,
        trainer: str,
        ignored_codes: frozenset[str] = frozenset(),
        log_codes: tuple[str, ...] = (),
        zero_gradient_is_normal: bool = False,
        fills_prompts: bool = False,
    ) -> None:
        self.args = args
        self.preflight = Preflight(args.preflight, args.silence_findings)
        self.context = Context(
            trainer, args, processes=PartialState().num_processes, parts={"beside_the_point": ignored_codes}
        )
        self.log_codes, self.zero_gradient_is_normal = log_codes, zero_gradient_is_normal
        self.fills_prompts = fills_prompts
        # What the line that was just logged says of the run: functions of the line, one a component.
        self.log_checks: list[Callable[[dict[str, float]], Iterable[Finding | None]]] = []
        self.record: Any = None
        # Tokens of the largest pass, and of the longest sequence, that were trained.
        self.largest_seen = (0, 0)
        # Tokens of the longest sequence of the training set, once it was looked for.
        self.longest_of_data = 0
        # Tokens of this rank's sequences, and tokens computed, padding included.
        self.tokens_seen = (0, 0)
        self._trained: tuple[float, ...] = ()
        self._steps = self._bad_steps = 0
        self._first_gradients_checked = self._lengths_reported = self._written = False
        self._overlong: list[Finding] = []

    def knows(self, *, parts: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Give probes what has come to be known of the run: fields of `Context`, and parts by name."""
        for name, value in fields.items():
            setattr(self.context, name, value)
        self.context.parts = {**self.context.parts, **(parts or {})}

    # The moments -------------------------------------------------------------------------------------------------

    def config(self, model: Any, train_dataset: Any, eval_dataset: Any, peft_config: Any) -> Any:
        """First moment, before a weight is loaded; returns the training set without the rows that ``bad_rows`` drops."""
        self.knows(model_config=model_config_of(model, self.args), peft_config=peft_config)
        self.look("config", train_dataset=train_dataset, eval_dataset=eval_dataset)
        state = PartialState()
        with parallel.failing_together(state), self.preflight.looking("data", row_codes(train_dataset)):
            main = state.is_main_process
            train_dataset, findings = usable_rows(train_dataset, self.args, main=main, filled=self.fills_prompts)
            self.tell(findings)
            if self.args.strict_data and any(found.severity != "info" for found in findings):
                refuse_data([describe(found) for found in findings])
        return train_dataset

    def start(self, model: nn.Module, layout: Layout, mixed_precision: str) -> None:
        """Once the model is there: precision of what is trained, where layers are placed, dense masks over long rows."""
        trainable: dict[str, int] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                name = str(parameter.dtype).removeprefix("torch.")
                trainable[name] = trainable.get(name, 0) + parameter.numel()
        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(mixed_precision)
        config: Any = getattr(model, "config", None)
        implementation = str(getattr(config.get_text_config() if config else None, "_attn_implementation", None))
        packed = layout.kind == "tree"
        with self.preflight.looking("config", ("PT-C001", "PT-C002", "PT-C003", "PT-C004", "PT-C005")):
            self.tell([
                checks.check_precision(trainable, learning_rate=self.args.learning_rate, autocast=mixed),
                checks.check_devices(
                    visible=max(self.args.n_gpu, 1),
                    processes=self.context.processes,
                    placed=(getattr(model, "hf_device_map", None) or {}).values(),
                ),
                checks.check_dense_masks(implementation, packed=packed, row_tokens=layout.row_tokens),
            ])  # fmt: skip

    def data(self, head: DatasetHead, eval_dataset: Any) -> None:
        """Second moment: the training set is tokenised; check the sampled rows and the chat template.

        Args:
            head: The sampled rows.
            eval_dataset: As it was given.
        """
        if not self.preflight.active:
            return
        sample = None
        # What is wrong with rows that cannot be made is reported where they are trained, by number.
        with contextlib.suppress(PosttrainError):
            sample = head.sample if not head.streams and head.prepared is not None else None
        rows = sample.rows if sample is not None else ()
        self.look("data", train_dataset=head.raw, eval_dataset=eval_dataset, rows=rows, sample=sample, limit=head.limit)
        with self.preflight.looking("data", tuple(PROBLEMS)):
            self.tell(
                replace(found, severity="warning" if found.severity == "error" else "info")
                for found in head.template_findings
            )

    def step(
        self, batches: Sequence[Batch], tokens: float, sequences: float, overlong: float, state: Any
    ) -> dict[str, Metric]:
        """Third moment, at the first optimiser step, and what every one holds; ends a run that trains no token.

        Online, steps whose completions are all masked are part of learning: the checks of rewards, lengths and gradients
        tell of those that never end.

        Args:
            batches: Of this rank.
            tokens: That carry loss, over all ranks.
            sequences: Over all ranks.
            overlong: Ranks with a sequence beyond the model's positions (`has_overlong_sequence`).
            state: The trainer's.

        Returns:
            What to log of the step.
        """
        widths = [
            (batch.input_ids.numel(), int(batch.position_ids.max()) + 1) for batch in batches if batch.input_ids.numel()
        ]
        passes, lengths = zip(*widths, self.largest_seen, strict=True)
        self.largest_seen = max(passes), max(lengths)
        with self.preflight.looking("log_step", ("PT-T003",)):
            found = parallel.all_gather_objects(self._overlong, PartialState()) if overlong else []
            self.tell(found[:1])
        if self._steps == 0:
            self.look("first_batch", batches=batches)
            self.write()
            if self.record is not None and state.global_step == 0:
                self.record.add_data(lambda: describe_batches(batches, self.context.tokenizer))
        self._trained = (*self._trained, tokens)[-checks.EMPTY_STEPS :]
        if not self.zero_gradient_is_normal:
            with self.preflight.looking("log_step", ("PT-T001",)):
                self.tell([checks.check_trained_tokens([int(count) for count in self._trained])])
        real = sum(batch.num_tokens for batch in batches)
        computed = sum(batch.input_ids.numel() for batch in batches)
        self.tokens_seen = (self.tokens_seen[0] + real, self.tokens_seen[1] + computed)
        self._check_economy(state)
        return {
            "documents": mean(sequences),
            "trained_tokens": mean(tokens),
            "padding_share": mean(1 - real / computed if computed else 0.0, weight=float(computed)),
        }

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Fourth moment: the line is written; look at the log that it ends."""
        if not self.preflight.active:
            return
        with self.preflight.looking("log_step", self.log_codes):
            self.tell_from_main(
                lambda: [
                    *(found for check in self.log_checks for found in check(logs or {})),
                    *self._probed("log_step", history=state.log_history),
                ]
            )
        # From the first step on the folder is ours.
        if self._written:
            self.write()

    # Steps and gradients -----------------------------------------------------------------------------------------

    def has_overlong_sequence(self, batches: Sequence[Batch]) -> float:
        """Return 1.0 if a local sequence exceeds max_position_embeddings (reported once); all-reduced with the counts."""
        longest = max((int(batch.position_ids.max()) + 1 for batch in batches if batch.position_ids.numel()), default=0)
        config = getattr(self.context.model, "config", None)
        text = None if config is None or self._lengths_reported else config.get_text_config()
        rotary = any(getattr(text, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
        finding = checks.check_positions(longest, getattr(text, "max_position_embeddings", None), rotary=rotary)
        self._lengths_reported = self._lengths_reported or finding is not None
        self._overlong = [finding] if finding is not None else []
        return float(len(self._overlong))

    def _check_economy(self, state: Any) -> None:
        """Once, after a few steps: padding that is computed, and memory that is never used."""
        self._steps += 1
        if self._steps != min(checks.ECONOMY_STEPS + 1, max(int(state.max_steps or 1), 1)):
            return
        peak, total = device_memory(self.args.device)
        checkpointing = bool(getattr(self.args, "activation_checkpointing", None) or self.args.gradient_checkpointing)
        with self.preflight.looking("log_step", ("PT-T002", "PT-T004")):
            self.tell([
                checks.check_padding(*self.tokens_seen),
                checks.check_idle_memory(peak=peak, total=total, checkpointing=checkpointing, steps=self._steps - 1),
            ])  # fmt: skip

    def gradient(self, norm: Any, model: nn.Module, *, scaled: bool, sharded: bool, step: int) -> bool:
        """Whether a step's gradient is finite; of the first one, also whether every parameter has one.

        Args:
            norm: Before clipping; None where it was not computed.
            model: With the gradients.
            scaled: Whether a float16 scaler skips steps that overflow.
            sharded: Whether a parameter's gradient is spread over ranks.
            step: The optimiser step, from 1.

        Raises:
            PosttrainError: The third gradient in a row is not finite.
        """
        if norm is None or scaled or bool(torch.isfinite(torch.as_tensor(norm))):
            self._bad_steps = 0
            if not sharded:
                self._check_first_gradients(model)
            return True
        self._bad_steps += 1
        logger.warning(
            "step %d: the gradient norm is %s, so this step is skipped (%d in a row).", step, norm, self._bad_steps
        )
        if self._bad_steps == BAD_STEPS:
            raise PosttrainError(
                f"{BAD_STEPS} steps in a row had a gradient norm of {norm}. Fix: lower learning_rate or max_grad_norm, try "
                "bf16=False, and look at the rows of these steps; the last checkpoint is intact."
            )
        return False

    def _check_first_gradients(self, model: nn.Module) -> None:
        # A step without a trained token has no gradient, rightly; the next one will tell.
        if self._first_gradients_checked or not sum(self._trained):
            return
        self._first_gradients_checked = True
        norms = {n: _norm(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        if self.zero_gradient_is_normal:
            norms = {name: None if norm is None else max(norm, 1.0) for name, norm in norms.items()}
        with self.preflight.looking("first_batch", ("PT-B001", "PT-B002", "PT-B003")):
            self.tell([checks.check_first_gradients(norms)])

    # Looking and reporting ---------------------------------------------------------------------------------------

    def look(self, moment: Moment, **known: Any) -> None:
        """Run all probes of a moment on the main process and report to every rank what they find."""
        self.tell_from_main(lambda: self._probed(moment, **known))

    def _probed(self, moment: Moment, **known: Any) -> list[Finding]:
        fields = {name: known.pop(name) for name in tuple(known) if name in Context.__dataclass_fields__}
        return self.preflight.run(moment, replace(self.context, **fields, parts={**self.context.parts, **known}))

    def tell(self, findings: Iterable[Finding | None]) -> None:
        """Report findings that every rank has; an error among them ends the run.

        Raises:
            PreflightError: With every error.
        """
        try:
            told = self.preflight.tell(findings, log=PartialState().is_main_process)
        except PreflightError as error:
            self._keep(error.findings)
            self.write(refused=True)
            raise
        self._keep(told)

    def tell_from_main(self, look: Callable[[], Iterable[Finding | None]]) -> None:
        """Let the main process look and report to every rank; all ranks must call this."""
        state = PartialState()
        found = parallel.run_and_share(lambda: list(look()) if state.is_main_process else [], state)  # type: ignore[arg-type]
        self.tell(parallel.all_gather_objects(found, state))  # type: ignore[arg-type]

    def _keep(self, findings: Iterable[Finding]) -> None:
        if self.record is not None:
            self.record.add_findings(findings)

    def write(self, *, refused: bool = False) -> None:
        """Write ``preflight.json`` into the run's folder where something new is known; the main process alone.

        Args:
            refused: The run ends here, maybe before its folder is its own: then another run's file is left alone.
        """
        if not PartialState().is_main_process or not (self.preflight.changed or refused):
            return
        folder = Path(self.args.output_dir or ".").expanduser()
        if refused and not self._written and (folder / LOCK).exists() and self.record is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        content = self.preflight.to_dict() | {"refused": refused, "versions": describe_run()["versions"]}
        part = folder / f"{FILE}.part"
        part.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        os.replace(part, folder / FILE)
        self._written, self.preflight.changed = True, False


@cache
def log_codes(letters: str, apart: tuple[str, ...]) -> tuple[str, ...]:
    """Codes of these letters that are looked for at log lines, but for those ``apart``, which have a moment of their own."""
    return tuple(code for letter in letters for code in codes_of(letter, "log_step") if code not in apart)


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


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of an accelerator that were in use at most, and all of them; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory


def _norm(gradient: torch.Tensor | None) -> float | None:
    return None if gradient is None else float(gradient.float().norm())
