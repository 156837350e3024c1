"""The four moments of a trainer's checks: its config, its data, its first batch, and every line of its log.

The main process looks and all ranks hear the same, so that an error ends all of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import datasets
from accelerate import PartialState

from posttrain.algorithms.data_report import DataReportMixin, refuse_data, template_findings
from posttrain.algorithms.input_rows import is_open, row_codes, usable_rows
from posttrain.checks.core import Context, Moment, codes_of
from posttrain.checks.preflight import Preflight, describe
from posttrain.data.templates import PROBLEMS
from posttrain.errors import PosttrainError, PreflightError
from posttrain.models import parallel
from posttrain.report.lock import NAME as LOCK
from posttrain.report.manifest import describe_run
from posttrain.types import Finding, Row

__all__ = ["PreflightMixin", "model_config_of"]

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
