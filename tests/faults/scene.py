"""One run under observation: at which moment something was noticed, by which code, and what was lost."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from posttrain.checks import registry as core
from posttrain.errors import PosttrainError
from posttrain.loop import checkpoint as checkpoints

LOOPBACK = re.compile(r"127\.0\.0\.1:\d+")
# What servers call a version of the weights: a run that is new every time, and the trainer's number.
VERSION = re.compile(r"\b[0-9a-f]{8}-(\d+)\b")
CODE = re.compile(r"\b(PT-[A-Z]\d{3})\b")


@dataclass(frozen=True)
class Case:
    """A fault (or, without ``expect``, a healthy run).

    Attributes:
        area: Data, template, reward, reference, tokenizer, server, version, machine or training.
        title: The fault, in a few words.
        act: Builds and trains in a `Scene`.
        expect: A pattern that the right message matches.
        by: The latest moment at which it must be noticed.
        slow: Not part of the fast subset.
    """

    area: str
    title: str
    act: Callable[[Scene], None]
    expect: str = ""
    by: str = "config"
    slow: bool = False


@dataclass
class Notice:
    """A warning or an error: what it said, and at which moment."""

    moment: str
    severity: str
    code: str
    text: str


@dataclass
class Result:
    """A line of the table."""

    case: Case
    notices: list[Notice] = field(default_factory=list)
    lost: str = "nothing"
    crashed: str = ""  # An exception that is not one of ours and that nothing announced.

    @property
    def detection(self) -> Notice | None:
        """The first thing said that names this fault."""
        return next((n for n in self.notices if re.search(self.case.expect, f"{n.code} {n.text}", re.S)), None)

    @property
    def in_time(self) -> bool:
        """Whether it was noticed by the moment at which it can be known."""
        found = self.detection
        return found is not None and rank(found.moment) <= rank(self.case.by)


def rank(moment: str) -> float:
    """Moments in their order.

    >>> [rank(m) for m in ("config", "data", "first batch", "step 3")]
    [0, 1, 2, 5.0]
    """
    if moment.startswith("step "):
        return 2 + float(moment.split()[1])
    return ("config", "data", "first batch").index(moment)


class Scene:
    """Where a case plays: a folder, a tiny tokenizer, and the moment that has been reached."""

    def __init__(self, folder: Path) -> None:
        from tests.conftest import build_tokenizer

        self.folder = folder
        self.tokenizer = build_tokenizer()
        self.stage = "config"
        self.trainer: Any = None
        self.note = ""  # What a case saw to be lost, where the folder does not tell.

    def train(self, build: Callable[[], Any], **options: Any) -> Any:
        """Build a trainer, then train with it."""
        self.stage = "building"
        self.trainer = build()
        self.stage = "training"
        self.trainer.add_callback(_Clock(self))
        self.trainer.train(**options)
        return self.trainer

    def moment(self, text: str, code: str, error: BaseException | None) -> str:
        """When something that is said now was noticed."""
        if self.stage == "training" and self.trainer.state.global_step:
            return f"step {self.trainer.state.global_step + (1 if self._inside else 0)}"
        if self.stage == "training":
            return "first batch" if self._inside else "data"
        registered = core.REGISTRY.get(code)
        if registered is not None:
            return {"first_batch": "first batch", "log_step": "step 1"}.get(registered.moment, registered.moment)
        return "data" if type(error).__name__ in ("DataError", "RewardError") else "config"

    _inside = False


class _Clock(transformers.TrainerCallback):
    """Tells the scene when an optimiser step is under way."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.scene._inside = True

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.scene._inside = True

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.scene._inside = False


class _Ear(logging.Handler):
    """Collects warnings of this package, and of faults also findings that are information."""

    def __init__(self, scene: Scene, result: Result) -> None:
        super().__init__(logging.INFO)
        self.scene, self.result = scene, result

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        code = next(iter(CODE.findall(text)), "")
        if record.levelno < logging.WARNING and (not code or self.result.case.area == "healthy"):
            return
        severity = {logging.INFO: "info", logging.WARNING: "warning"}.get(record.levelno, "error")
        self.result.notices.append(Notice(self.scene.moment(text, code, None), severity, code, text))


def observe(case: Case, folder: Path) -> Result:
    """Play one case, and write down what was said and lost."""
    torch.manual_seed(0)
    core.load()
    scene, result = Scene(folder), Result(case)
    ear, package = _Ear(scene, result), logging.getLogger("posttrain")
    level = package.level
    package.addHandler(ear)
    package.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            case.act(scene)
    except (PosttrainError, KeyboardInterrupt) as error:
        text = str(error)
        code = next(iter(CODE.findall(text)), type(error).__name__)
        result.notices.append(Notice(scene.moment(text, code, error), "error", code, text))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        result.crashed = text
        result.notices.append(Notice(scene.moment(text, "", error), "error", type(error).__name__, text))
    finally:
        package.removeHandler(ear)
        package.setLevel(level)
    result.lost = scene.note or lost(scene)
    for notice in result.notices:  # The same words in every run.
        text = LOOPBACK.sub("127.0.0.1:8000", notice.text.replace(str(folder), "runs/a"))
        notice.text = VERSION.sub(r"RUN-\1", text)
    return result


def lost(scene: Scene) -> str:
    """Steps beyond the last whole checkpoint, weights that are no numbers, checkpoints or records that cannot be read."""
    trainer = scene.trainer
    if trainer is None:
        return "nothing"
    found = []
    if any(not bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters()):
        found.append("the weights are not finite")
    for path in checkpoints.complete_checkpoints(trainer.args.output_dir):
        if broken := checkpoints.damage(path):
            found.append(f"{path.name}: {broken}")
    record = Path(trainer.args.output_dir, "metrics.jsonl")
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    steps = [json.loads(line)["step"] for line in lines]
    if (
        trainer.state.global_step
        and trainer.args.logging_steps == 1
        and trainer.state.global_step - 1 > max([0, *steps])
    ):
        found.append(f"the record ends at step {max([0, *steps])} of {trainer.state.global_step}")
    return "; ".join(found) or "nothing"


def play(case: Case) -> Result:
    """One case in a folder of its own, that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return observe(case, Path(folder))
