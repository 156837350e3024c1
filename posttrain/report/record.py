"""Run record: files with the config, metrics and completions of a run. The files can be read while the run is active, and
after a crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from posttrain.integrations.machine import usable_processors
from posttrain.redaction import hide_secrets
from posttrain.report.files import merge_parquet, read_json, read_line, read_rows, whole_file, write_rows
from posttrain.report.lock import FolderLock
from posttrain.types import Finding
from posttrain.values import scalar

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from posttrain.types import Tokenizer


logger = logging.getLogger(__name__)


PACKAGES = ("posttrain", "torch", "transformers", "accelerate", "datasets", "peft", "tokenizers")


def flat(value: object, name: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one mapping with dotted names.

    >>> flat({"a": {"b": 1}, "c": []})
    {'a.b': 1, 'c': []}
    """
    if not isinstance(value, Mapping) or not value:
        return {name: value} if name else {}
    dotted: dict[str, Any] = {}
    for key, inner in value.items():
        dotted |= flat(inner, f"{name}.{key}" if name else str(key))
    return dotted


def describe_run() -> dict[str, Any]:
    """Describe the time, command, software and hardware of this process."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": _command(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hardware": _hardware(),
        "versions": versions(),
        "git_commit": _git_commit(),
    }


def _command(arguments: list[str]) -> list[str]:
    """Return the command line. Secrets are replaced."""
    return [Path(arguments[0]).name, *hide_secrets(arguments[1:])] if arguments else []


def _hardware() -> dict[str, Any]:
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return {
        "machine": platform.machine(),
        "processor": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
        "cpus": usable_processors(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "cuda": torch.version.cuda,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


@functools.cache  # Cached, because reading metadata takes a tenth of the time of a short run.
def versions() -> dict[str, str | None]:
    """Return the versions of packages that affect results. The version of a package that is not installed is None."""
    installed: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _git_commit() -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip() or None
    return None


# Files of a run ------------------------------------------------------------------------------------------------------------


FILES = (
    "metrics.jsonl", "findings.jsonl", "manifest.json", "data.json", "completions.parquet", "eval_completions.parquet"
)  # fmt: skip
SUMMARY = "train_runtime"  # Metric that occurs only in the last line that a trainer logs.
PREFIXES = ("", "eval_")  # Prefixes of file names, for training and for evaluation.


class RunRecord:
    """Files of one run: ``manifest.json``, ``metrics.jsonl``, ``completions/*.parquet``, ``completions.parquet``.

    Each line of metrics is on disk before the next step begins. All other files are written atomically. When a run is resumed,
    lines and rows of the steps that the run repeats are removed. A new run in the same folder moves the record of the earlier
    run to a subfolder.

    Args:
        output_dir: Folder of the run. The folder is created when the first file is written.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self.folder = Path(output_dir).expanduser()
        self.metrics_path = self.folder / "metrics.jsonl"
        self.completions_dir = self.folder / "completions"
        self._pending: dict[str, list[dict[str, Any]]] = {prefix: [] for prefix in PREFIXES}
        self._unmerged = False
        self._warned = False
        # Record which files of an earlier run exist before anything is written. An evaluation before training may append
        # lines of this run to these files.
        self._remember_old()

    def _remember_old(self) -> None:
        self._old_bytes = self.metrics_path.stat().st_size if self.metrics_path.is_file() else 0
        self._old_parts = set(self._parts(*PREFIXES))

    def manifest(self, **content: Any) -> None:
        """Write ``manifest.json``, which contains versions, hardware, the command, and the mapping ``content``. Secrets are
        replaced.
        """
        text = json.dumps(_plain(hide_secrets(describe_run() | content)), indent=2, default=str)
        _write_atomically(self.folder / "manifest.json", text + "\n")

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line ``{"step", "time", ...}`` to ``metrics.jsonl``, and wait until it is on disk."""
        _append(self.metrics_path, {"step": step, "time": round(time.time(), 3), **values})

    def finding(self, step: int, finding: Finding) -> None:
        """Append a finding and its step to ``findings.jsonl``."""
        _append(
            self.folder / "findings.jsonl",
            {"step": step, "time": round(time.time(), 3), **dataclasses.asdict(finding)},
        )

    def data(self, content: Mapping[str, Any]) -> None:
        """Write ``data.json`` with the first batch as the model received it. An error is only logged."""
        try:
            _write_atomically(self.folder / "data.json", json.dumps(content, ensure_ascii=False, default=str))
        except (
            OSError,
            ValueError,
        ) as error:  # The run can continue, because the report does not need this file.
            self._complain("the first batch", error)

    def begin(self, step: int) -> None:
        """Prepare the folder for a run that starts after ``step``, which is 0 for a new run and above 0 for a resumed run."""
        if step:
            self.rewind(step)
        else:
            self._set_aside()
        self._remember_old()

    def rewind(self, step: int) -> None:
        """Remove metrics, findings and completions of steps after ``step``, because a resumed run repeats these steps."""
        for path in (self.metrics_path, self.folder / "findings.jsonl"):
            if path.is_file():
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                rows = [(line, read_line(line) or {}) for line in lines]
                # Remove the summary of the earlier run too, because the resumed run has not ended.
                remaining = [line for line, row in rows if row.get("step", math.inf) <= step and SUMMARY not in row]
                _write_atomically(path, "".join(line + "\n" for line in remaining))
        for path in self._parts(*PREFIXES):
            if step_of_part(path) > step:
                path.unlink()
                self._unmerged = True

    def _set_aside(self) -> None:
        """Move the record of an earlier run to ``record-1``, ``record-2``, ..., so that a new run does not overwrite it."""
        if not self._old_bytes and not self._old_parts and not (self.folder / "findings.jsonl").is_file():
            return
        number = 1
        while (aside := self.folder / f"record-{number}").exists():
            number += 1
        aside.mkdir()
        content = self.metrics_path.read_bytes() if self.metrics_path.is_file() else b""
        ours = content[self._old_bytes :]
        for name in FILES:
            if (self.folder / name).is_file():
                os.replace(self.folder / name, aside / name)
        if self._old_bytes:
            (aside / "metrics.jsonl").write_bytes(content[: self._old_bytes])
        if ours:
            _write_atomically(self.metrics_path, ours.decode("utf-8", "replace"))
        for path in sorted(self._old_parts):
            (aside / "completions").mkdir(exist_ok=True)
            os.replace(path, aside / "completions" / path.name)
        logger.warning("%s contains the record of an earlier run, which was moved to %s.", self.folder, aside)

    def _parts(self, *prefixes: str) -> list[Path]:
        """Return the completions files with one of the prefixes, in the order of their steps."""
        parts = [p for prefix in prefixes for p in self.completions_dir.glob(f"{prefix}completions_*.parquet")]
        return sorted(parts, key=lambda path: (path.name.startswith("eval_"), step_of_part(path)))

    def add_completions(self, rows: list[dict[str, Any]], *, evaluation: bool = False) -> None:
        """Store rows of completions until the next `flush`. Rows from evaluation are written to separate files."""
        self._pending["eval_" if evaluation else ""] += rows

    def flush(self, step: int) -> None:
        """Write the stored rows to ``completions/[eval_]completions_<step>.parquet``. An error is only logged."""
        for prefix, rows in self._pending.items():
            if not rows:
                continue
            self._pending[prefix] = []
            path = self.completions_dir / f"{prefix}completions_{step:05d}.parquet"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # The file may already contain rows of another evaluation set at the same step.
                earlier = read_rows(path) if path.is_file() else []
                write_rows(path, earlier + rows)
                self._unmerged = True
            except Exception as error:  # An error while the table is written must not stop training.
                self._complain(f"the completions of step {step}", error)

    def merge_completions(self) -> None:
        """Merge completions files into ``completions.parquet`` and ``eval_completions.parquet``. Errors are only logged."""
        if not self._unmerged:
            return
        try:
            for prefix in PREFIXES:
                merge_parquet(self._parts(prefix), self.folder / f"{prefix}completions.parquet")
            self._unmerged = False
        except Exception as error:
            self._complain("completions.parquet", error)

    def _complain(self, what: str, error: Exception) -> None:
        if not self._warned:
            logger.warning("%s could not be written: %s: %s", what, type(error).__name__, error)
        self._warned = True


def _append(path: Path, values: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file, and wait until it is on disk. If the line can only be written partly, it is removed."""
    line = (json.dumps(_plain(values), default=str) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            written = file.write(line)
            # Repeat the call until the whole line is written, because a single call may write only a part of the line.
            while written < len(line):
                written += file.write(line[written:])
            os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise OSError(
                error.errno,
                f"a line of the run record could not be written: {error.strerror}. All earlier lines are intact. Fix: free disk "
                "space, then resume from the last checkpoint",
                str(path),
            ) from error


def _write_atomically(path: Path, text: str) -> None:
    with whole_file(path) as part, part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _plain(value: object) -> Any:
    """Convert tensors to Python numbers, and numbers that are not finite to the text ``NaN`` or ``Infinity``."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, str | int | float | None):
        value = scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def step_of_part(path: Path) -> int:
    """Return the optimizer step in the name of a completions file. Return 0 for names without a step."""
    number = path.stem.rsplit("_", 1)[-1]
    return int(number) if number.isdigit() else 0


class RunRecordCallback(transformers.TrainerCallback):
    """Callback that writes the run record of a trainer, on the main process only.

    Args:
        args: Training arguments. ``output_dir`` is the run's folder.
        tokenizer: Tokenizer. A hash of its chat template is written to the manifest.
    """

    def __init__(self, args: TrainingArguments, tokenizer: Tokenizer | None = None) -> None:
        self.record = RunRecord(args.output_dir or ".")
        self.lock = FolderLock(self.record.folder)
        self.args, self.tokenizer = args, tokenizer
        # Functions that receive rows of completions and a bool. The bool is True if the rows come from evaluation.
        self.listeners: list[Callable[[list[dict[str, Any]], bool], None]] = []
        # Function that returns whether Ctrl-C or SIGTERM stopped the run. The trainer replaces this function.
        self.interrupted: Callable[[], bool] = lambda: False
        self._step = 0
        # Findings that were reported before the folder was locked. None once the folder is locked.
        self._findings: list[Finding] | None = []

    def add_completions(self, rows: list[dict[str, Any]], *, evaluation: bool = False) -> None:
        """Pass rows of completions to the run record (`RunRecord.add_completions`) and to the listeners."""
        if self.args.process_index == 0:
            self.record.add_completions(rows, evaluation=evaluation)
            for listener in self.listeners:
                listener(rows, evaluation)

    def add_data(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Write the result of ``describe`` as ``data.json``, on the main process only."""
        if self.args.process_index == 0:
            self.record.data(describe())

    def add_findings(self, findings: Iterable[Finding]) -> None:
        """Record findings with the current step. Only the main process writes them, because all ranks have the same
        findings.
        """
        for finding in findings if self.args.process_index == 0 else ():
            if self._findings is None:
                self.record.finding(self._step, finding)
            else:
                self._findings.append(finding)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Lock the folder, remove or move files of other runs, and write the manifest."""
        if not state.is_world_process_zero:
            return
        if not self.lock.held:
            self.lock.acquire()
        self._step = state.global_step
        self.record.begin(state.global_step)
        early, self._findings = self._findings or [], None
        self.add_findings(early)
        manifest = {"run_id": self.lock.run, "seed": args.seed, "max_steps": state.max_steps, "config": args.to_dict()}
        previous = read_json(self.record.folder / "manifest.json") if state.global_step else {}
        if previous:
            resumed = {"step": state.global_step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            manifest["first_started"] = previous.get("first_started", previous.get("started"))
            manifest["resumed"] = [*previous.get("resumed", []), resumed]
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        digest = hashlib.sha256(str(template).encode()).hexdigest() if template else None
        self.record.manifest(chat_template_sha256=digest, **manifest)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Store the current step."""
        self._step = state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict | None = None, **_: Any
    ) -> None:
        """Write one line of metrics, and one file with the completions since the last logging step."""
        if state.is_world_process_zero:
            self.record.metrics(state.global_step, {"epoch": state.epoch, **(logs or {})})
            self.record.flush(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Update the merged completions files at each checkpoint."""
        if state.is_world_process_zero:
            self.record.flush(state.global_step)
            self.record.merge_completions()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write all remaining data to disk. If the run was interrupted, record the step in the manifest."""
        self._step = state.global_step
        if state.is_world_process_zero and self.interrupted():
            path = self.record.folder / "manifest.json"
            _write_atomically(path, json.dumps(read_json(path) | {"interrupted": state.global_step}, indent=2) + "\n")
        self.stop()

    def stop(self) -> None:
        """Write all remaining data to disk and unlock the folder. The trainer calls this method after an error too. Repeated
        calls have no effect.
        """
        if self.args.process_index == 0:
            self.record.flush(self._step)
            self.record.merge_completions()
            self.lock.release()
