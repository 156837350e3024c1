"""The run record: what a run did, on disk, readable while it runs and after a crash."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from posttrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["RunRecord", "RunRecordCallback", "check_writable"]

logger = logging.getLogger(__name__)

SECRETS = ("hub_token", "push_to_hub_token")
PACKAGES = ("posttrain", "torch", "transformers", "accelerate", "datasets", "peft", "tokenizers")


def check_writable(output_dir: str | None) -> None:
    """Refuse an ``output_dir`` that cannot be written, before anything is computed.

    Raises:
        ConfigError: It is a file, or the system refuses to write there; the system's reason is given.
    """
    if not output_dir:
        raise ConfigError("output_dir is empty. Give a folder for checkpoints and the run record.")
    folder = Path(output_dir).expanduser()
    probe = folder / ".posttrain-write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"output_dir={output_dir!r} cannot be written: {error.strerror or error}. Choose another folder, or change its "
            "permissions."
        ) from error


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


class RunRecord:
    """Files of one run: ``manifest.json``, ``metrics.jsonl``, ``completions/*.parquet``, ``completions.parquet``.

    A line of metrics is flushed to the disk before the next step; a manifest is written whole or not at all. On resume,
    lines of steps that will be taken again are dropped.

    Args:
        output_dir: The run's folder.
    """

    def __init__(self, output_dir: str) -> None:
        self.folder = Path(output_dir)
        self.metrics_path = self.folder / "metrics.jsonl"
        self._pending: dict[str, list[dict[str, Any]]] = {"": [], "eval_": []}
        self._warned = False

    def manifest(self, **content: Any) -> None:
        """Write what identifies the run: versions, hardware, command, and whatever is given."""
        known = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "versions": {name: _version(name) for name in PACKAGES},
            "git_commit": _git_commit(),
        }
        _write_atomically(self.folder / "manifest.json", json.dumps(known | content, indent=2, default=str) + "\n")

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Append one line, and wait until it is on the disk."""
        line = {"step": step, "time": round(time.time(), 3), **values}
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=float) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Drop lines and completions of later steps, which a resumed run takes again."""
        if self.metrics_path.is_file():
            lines = self.metrics_path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            _write_atomically(self.metrics_path, "".join(line + "\n" for line in kept))
        for path in (self.folder / "completions").glob("*.parquet"):
            if int(path.stem.rsplit("_", 1)[-1]) > step:
                path.unlink()

    def add_completions(self, rows: list[dict[str, Any]], *, evaluation: bool = False) -> None:
        """Keep rows until the next `flush`; evaluation has files of its own."""
        self._pending["eval_" if evaluation else ""] += rows

    def flush(self, step: int) -> None:
        """Write the kept rows as ``completions/[eval_]completions_<step>.parquet``; a failure is told once, never raised."""
        for prefix, rows in self._pending.items():
            if not rows:
                continue
            try:
                path = self.folder / "completions" / f"{prefix}completions_{step:05d}.parquet"
                path.parent.mkdir(exist_ok=True)
                _write_parquet(path, rows)
            except Exception as error:  # A table must never stop training.
                if not self._warned:
                    logger.warning("the completions of step %d could not be written: %s", step, error)
                self._warned = True
            self._pending[prefix] = []

    def merge_completions(self) -> None:
        """Make ``completions.parquet`` of all training parts."""
        import pyarrow.parquet as pq

        parts = sorted((self.folder / "completions").glob("completions_*.parquet"))
        rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
        if rows:
            _write_parquet(self.folder / "completions.parquet", rows)


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Columns that only some rows have are padded with None; the file appears whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    part = path.with_name(path.name + ".part")
    pq.write_table(table, part)
    os.replace(part, path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")  # A line cut off by a crash.


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        out = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
        return out.stdout.strip() or None
    return None


class RunRecordCallback(transformers.TrainerCallback):
    """Keeps the run record of a trainer; only the main process writes."""

    def __init__(self, args: TrainingArguments, tokenizer: Any = None) -> None:
        self.record = RunRecord(args.output_dir or ".")
        self.args, self.tokenizer = args, tokenizer

    def add_completions(self, rows: list[dict[str, Any]], *, evaluation: bool = False) -> None:
        """See `RunRecord.add_completions`."""
        self.record.add_completions(rows, evaluation=evaluation)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the manifest; on resume, rewind."""
        if not state.is_world_process_zero:
            return
        self.record.rewind(state.global_step)
        if state.global_step and (self.record.folder / "manifest.json").is_file():
            return
        template = str(getattr(self.tokenizer, "chat_template", None) or "")
        config = {k: v for k, v in args.to_dict().items() if k not in SECRETS}
        self.record.manifest(
            seed=args.seed,
            chat_template_sha256=hashlib.sha256(template.encode()).hexdigest() if template else None,
            max_steps=state.max_steps,
            config=config,
        )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict | None = None, **_: Any
    ) -> None:
        """One line of metrics, one file of completions."""
        if state.is_world_process_zero:
            self.record.metrics(state.global_step, logs or {})
            self.record.flush(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep the merged table no older than the last checkpoint."""
        if state.is_world_process_zero:
            self.record.flush(state.global_step)
            self.record.merge_completions()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave everything on disk."""
        self.on_save(args, state, control)
