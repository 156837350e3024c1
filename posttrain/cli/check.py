"""Command `posttrain check COMMAND`, which checks a training command without training. Its last stage tries the first step
and writes nothing to the run's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from posttrain.checks import registry
from posttrain.cli import train
from posttrain.cli.commands import TRAINING
from posttrain.cli.subject import ROWS, Subject, no_progress_bars
from posttrain.errors import ConfigError, PosttrainError, PreflightError, check_choice
from posttrain.types import Finding
from posttrain.values import visible

if TYPE_CHECKING:
    from posttrain.types import AnyDataset

REFUSED = PreflightError.exit_code
EXAMPLES = 1000
FEW_TOKENS = 8  # Maximum number of tokens per completion in a trial step.
STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


# Config fields whose default intentionally differs from TRL's default. The key is a config and a field. The value contains
# TRL's default, the reason for the difference, and the setting that gives TRL's behavior.
DIFFERENT: dict[tuple[str, str], tuple[Any, str, str]] = {
    ("KTO", "train_sampling_strategy"): (
        "sequential",
        "the baseline of KTO needs shuffled rows",
        'train_sampling_strategy="sequential"',
    ),
    ("AsyncGRPO", "vllm_server_base_url"): (
        "http://localhost:8000",
        "None means TRL's value with worker_engine='server'; otherwise workers on this machine sample completions",
        'vllm_server_base_url="http://localhost:8000"',
    ),
    ("AsyncGRPO", "max_inflight_tasks"): (
        -1,
        "-1 is replaced with the number that it resolves to",
        "max_inflight_tasks=-1",
    ),
    ("AsyncDistillation", "vllm_server_base_url"): (
        "http://localhost:8000",
        "None means TRL's value with worker_engine='server'; otherwise workers on this machine sample completions",
        'vllm_server_base_url="http://localhost:8000"',
    ),
    ("AsyncDistillation", "max_inflight_tasks"): (
        -1,
        "-1 is replaced with the number that it resolves to",
        "max_inflight_tasks=-1",
    ),
    ("AsyncDistillation", "teacher_server_urls"): (
        {"default": "http://localhost:8001"},
        "the teacher may be a model in this process",
        'teacher_server_urls="http://localhost:8001"',
    ),
    ("GKD", "shuffle_dataset"): (False, "TRL's sampler shuffles rows in this case too", "shuffle_dataset=False"),
    ("GOLD", "shuffle_dataset"): (
        False,
        "TRL's sampler shuffles rows in this case too",
        "shuffle_dataset=False",
    ),
    ("GOLD", "vllm_gpu_memory_utilization"): (
        0.9,
        "with 0.9, no memory is left for a second model",
        "vllm_gpu_memory_utilization=0.9",
    ),
    ("IWOPD", "top_p"): (0.95, "values below 1 bias the estimate", "top_p=0.95"),
    ("GMPO", "loss_type"): ("dapo", "GMPO is one of GRPO's loss types", "GRPOConfig(loss_type=...)"),
}


def differences(config: Any) -> list[str]:
    """List the fields of a config whose default intentionally differs from TRL's default, with the setting that gives TRL's
    behavior.
    """
    name = type(config).__name__.removesuffix("Config")
    listed = [
        f"{field}={ours!r} (TRL: {theirs!r}): {why}; {switch}"
        for (kind, field), (theirs, why, switch) in DIFFERENT.items()
        if kind == name and (ours := getattr(config, field)) != theirs
    ]
    if config.assistant_only_loss:
        listed.append(
            "assistant_only_loss trains the answer and its end-of-turn token. TRL's templates also train the line break after "
            "it. To use another template, set chat_template_path=FILE"
        )
    return listed


@dataclass
class Stage:
    """Result of one stage of a check. If the stage has found a problem that would prevent training, ``error`` contains the
    reason.
    """

    name: str
    result: str = ""
    error: str = ""
    seconds: float = 0.0


@dataclass
class Checkup:
    """Check of a training command in several stages. If a stage fails, the remaining stages still run. Only an invalid config
    ends the check early.

    Attributes:
        command: Name of the training command.
        tokens: Arguments of the command.
        examples: Maximum number of rows to tokenize.
        tries_step: Whether to create the trainer and try one step.
        stages: Results of the stages so far.
        findings: Findings of the checks so far.
        warnings: Warnings that the trainer logged until the end of the trial step.
    """

    command: str
    tokens: Sequence[str]
    examples: int = EXAMPLES
    tries_step: bool = False
    stages: list[Stage] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    preflight: Any = None
    known: dict[str, Any] = field(default_factory=dict)
    subject: Any = None

    def make(self) -> None:
        """Run all stages, and collect the warnings that the stages log."""
        with only_warnings() as logged:
            self._make()
        # Drop findings that `Preflight` has logged, because they are reported separately.
        texts = [(record.name, record.getMessage()) for record in logged.buffer]
        findings = [text for name, text in texts if name == registry.__name__ and text.startswith("PT-")]
        self.warnings += [text for text in dict.fromkeys(text for _, text in texts) if text not in findings]

    def _make(self) -> None:
        for name in (
            "config",
            "model",
            "tokenizer",
            "teacher",
            "rewards",
            "data",
            "settings",
            "from TRL",
            "rows",
            "output",
            "start",
        ):
            started = time.perf_counter()
            stage = Stage(name)
            try:
                stage.result = getattr(self, "_" + name.lower().replace(" ", "_"))()
            except Exception as error:
                handled = isinstance(error, (PosttrainError, ValueError, TypeError, OSError, ImportError, RuntimeError))
                stage.error = str(error) if handled and str(error) else f"{type(error).__name__}: {error}"
            stage.seconds = round(time.perf_counter() - started, 3)
            if stage.result or stage.error:
                self.stages.append(stage)
            if stage.error and name == "config":
                return

    @property
    def refused(self) -> bool:
        """True if the training command would stop before its first step."""
        strict = self.preflight is None or self.preflight.mode == "error"
        errors = any(finding.severity == "error" for finding in self.findings)
        return any(stage.error for stage in self.stages) or (strict and errors) or bool(self.failed)

    @property
    def failed(self) -> list[str]:
        """Checks that could not be completed because the code of the check raised an error."""
        results = {} if self.preflight is None else self.preflight.results
        return [f"{code}: {result.failed}" for code, result in sorted(results.items()) if result.failed]

    def to_dict(self) -> dict[str, Any]:
        """Return all results as a dict for ``--json``."""
        content = self.preflight.to_dict() if self.preflight is not None else {}
        return {
            "command": self.command,
            "refused": self.refused,
            "stages": [asdict(stage) for stage in self.stages],
            "findings": [asdict(finding) for finding in self.findings],
            "warnings": self.warnings,
            **content,
        }

    def _config(self) -> str:
        self.subject = Subject(self.command, self.tokens)
        config = self.subject.config
        self.preflight = registry.Preflight("warn" if config.preflight == "warn" else "error", config.silence_findings)
        device = str(config.device)
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps
        return f"{type(config).__name__} on {device}: {batch} rows/step per process, learning rate {config.learning_rate:g}"

    def _model(self) -> str:
        from posttrain.checks.machine import check_precision
        from posttrain.methods.config import sequence_parallel
        from posttrain.models.quantised import check_quantised

        subject, model_args = self.subject, self.subject.model_args
        check_quantised(subject.source, subject.config, model_args if model_args.use_peft else None, None)
        config = self.known["model_config"] = subject.model_config
        loaded = copy.deepcopy(config)
        if backend := dict(subject.config.model_init_kwargs or {}).get("attn_implementation"):
            loaded._attn_implementation = backend
        if (extension := sequence_parallel(subject.config)) is not None:
            about = {"supported": subject.method.traits.splits_tokens, "name": subject.kind.__name__}
            extension.check_split(subject.config, loaded, **about)
        count = _parameters(config)
        dtype = str(model_args.dtype)
        if count and not model_args.use_peft:
            self._report([check_precision({dtype: count}, learning_rate=subject.config.learning_rate)])
        size = f"{count / 1e6:.1f} M parameters, " if count else ""
        return f"{subject.source}: {(config.architectures or [config.model_type])[0]}, {size}{dtype}"

    def _tokenizer(self) -> str:
        tokenizer = self.known["tokenizer"] = self.subject.tokenizer
        template = "with a chat template" if tokenizer.chat_template else "without a chat template"
        return f"{len(tokenizer):,} tokens, {template}, eos {tokenizer.eos_token!r}, pad {tokenizer.pad_token!r}"

    def _teacher(self) -> str:
        from posttrain.cli.subject import model_config

        config = self.subject.config
        named = vars(config).get("teacher_model_name_or_path")
        if not named or config.teacher_model_server_url or config.teacher_scores:
            return ""
        lines = []
        for source in named.values() if isinstance(named, Mapping) else [named]:
            kind = model_config(source, config.trust_remote_code, config.teacher_model_revision or "main")
            lines.append(f"{source}: {(kind.architectures or [kind.model_type])[0]}")
        return ", ".join(lines)

    def _rewards(self) -> str:
        from posttrain.cli.train import reward_functions
        from posttrain.rewards.call import reward_name, unique

        script_args = self.subject.script_args
        if not isinstance(script_args, train.GRPOScriptArguments):
            return ""
        functions = [f for f in reward_functions(script_args) or [] if callable(f)]
        names = unique([reward_name(function) for function in functions])
        self.known["rewards"] = SimpleNamespace(names=names, functions=functions)
        return ", ".join(names)

    def _data(self) -> str:
        from posttrain.loop.data_report import row_codes, usable_rows

        data, split = self.subject.data, self.subject.split
        if data is None:
            return "prompts are produced by the environment during training"
        self.known["train_dataset"] = data
        with no_progress_bars(), self.preflight.record_check("data", row_codes(data)):
            self.known["usable"], findings = usable_rows(data, self.subject.config, self.subject.method, main=False)
        self._report(findings)
        tested = self.subject.splits.get(self.subject.script_args.dataset_test_split)
        test = "" if tested is None else f"; {_count(tested)}, split {self.subject.script_args.dataset_test_split!r}"
        unused = ", not evaluated (eval_strategy='no')" if test and self.subject.config.eval_strategy == "no" else ""
        return f"{_count(data)}, split {split!r}{test}{unused}; columns {', '.join(data.column_names or [])}"

    def _settings(self) -> str:
        """Run all registered checks that need only the config. Examples are the checks of versions, rollout servers and
        memory.
        """
        before = len(self.findings)
        self._report(self.preflight.run("config", self._context()))
        codes = sorted({code for probe in registry.PROBES.values() if probe.moment == "config" for code in probe.codes})
        new = len(self.findings) - before
        return f"{len(codes)} checks of settings, {new} finding{'s' if new != 1 else ''}"

    def _from_trl(self) -> str:
        """List intentional differences from TRL's defaults as the result of a stage."""
        return "\n".join(differences(self.subject.config))

    def _rows(self) -> str:
        from posttrain.loop.data_report import template_findings

        tokenizer, usable = self.known.get("tokenizer"), self.known.get("usable")
        if tokenizer is None or usable is None or self.command not in ROWS:
            return ""
        drawn, _, _ = self.subject.drawn(usable, self.examples)
        prepared, vision = self.subject.rows_of(drawn)
        if vision:
            self.known |= {"processor": vision.processor, "vision": vision}
        self.known["rows"] = prepared.rows
        limit = None if prepared.cut == 0 else self.subject.config.max_length
        milder = {"error": "warning"}
        templates = [replace(f, severity=milder.get(f.severity, "info")) for f in template_findings(drawn, tokenizer)]
        self._report([*prepared.findings, *templates, *self.preflight.run("data", self._context(limit=limit))])
        return _described(prepared.rows)

    def _output(self) -> str:
        """Check that the run's folder is writable, that the checkpoint to resume from exists, and that the Hub accepts
        uploads.
        """
        from huggingface_hub import HfApi

        from posttrain.loop.build import warn_if_replaced
        from posttrain.loop.checkpoint import resolve_resume
        from posttrain.report.lock import check_writable

        config = self.subject.config
        folder = Path(os.path.expanduser(config.output_dir or "")).absolute()
        before = {place for place in (folder, *folder.parents) if os.path.lexists(place)}
        try:
            check_writable(config.output_dir)
        finally:
            for place in (folder, *folder.parents):
                if place not in before and os.path.isdir(place):
                    with contextlib.suppress(OSError):
                        place.rmdir()
        warn_if_replaced(self.subject.model_args.model_name_or_path, config.output_dir)
        resolve_resume(train.resume_from(config), config.output_dir)
        if config.push_to_hub:
            try:
                HfApi(token=config.hub_token).whoami()
            except (OSError, ValueError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                raise ConfigError(
                    f"push_to_hub=True, but the Hub refuses this run: {reason} Fix: run hf auth login, or remove the option."
                ) from error
        return ""

    def _start(self) -> str:
        """Create the trainer in the same way as the training command. Run one step and one evaluation batch with a temporary
        output folder. With ``--no-model``, stop before the model is loaded.
        """
        if self.refused:
            return ""
        from posttrain.loop.checkpoint import resolve_resume
        from posttrain.loop.dry_step import refuse_auto_batch_size
        from posttrain.methods.config import parallel_sizes

        launch, size = self.subject.launch, parallel_sizes(self.subject.config)["sp_size"]
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if launch:
            train.with_multi_gpu(launch)  # Raises an error for unsupported options.
            world, zero_stage = train.launched(launch, config=self.subject.config)
            if zero_stage:
                refuse_auto_batch_size(self.subject.config)
        if world % size:
            raise ConfigError(
                f"sp_size={size} does not divide the command's {world} processes. Fix: pass --num_processes {size}."
            )
        script_args, config, model_args, mixture = train.parse(self.command, self.tokens)[0]
        untried, several = "", launch or size > 1
        if several:
            untried = "not tried, because the command needs several processes"
        elif config.use_vllm or self.subject.method.traits.workers_sample:
            untried = "not tried, because the engine runs in other processes"
        resume = resolve_resume(train.resume_from(config), config.output_dir)
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            config.output_dir, config.push_to_hub = folder, False
            # A check must not create a repository on the Hub.
            if "log_completions_hub_repo" in vars(config):
                config.log_completions_hub_repo = None
            # An asynchronous trainer starts its workers at the first step, so it can be created here.
            creates = self.tries_step and not several and not config.use_vllm
            kind = self.subject.kind if creates else without_model(self.subject.kind)
            try:
                trainer = train.make_trainer(self.command, script_args, config, model_args, mixture, kind=kind)
            except ModelIsNextError:
                return untried or "everything before the model is loaded"
            if untried:
                trainer.checkpoints.resolve(resume, trainer.model)
            else:
                try_step(trainer, resume)
        # Skip findings about the temporary folder. Skip findings about completions too, because the trial step samples only
        # short completions.
        skipped = registry.codes_of("R", "log_step") if trainer.method.traits.samples else ()
        reported = trainer.run.checks.preflight.reported
        self._report([finding for finding in reported if not finding.code.startswith(("PT-L", *skipped))])
        return untried or ("one step and one evaluation batch" if trainer.eval_dataset is not None else "one step")

    def _context(self, **more: Any) -> Any:
        from posttrain.models.load import get_peft_config

        subject, model_args = self.subject, self.subject.model_args
        fields = {name: value for name, value in self.known.items() if name in registry.Context.__dataclass_fields__}
        parts = {name: value for name, value in self.known.items() if name not in fields}
        parts |= {"script_args": subject.script_args, "model_args": model_args, "method": subject.method}
        return registry.Context(
            trainer=subject.kind.__name__.removesuffix("Trainer").lower(),
            args=subject.config,
            peft_config=get_peft_config(model_args) if model_args.use_peft else None,
            parts=parts,
            **fields,
            **more,
        )

    def _report(self, findings: Sequence[Finding | None]) -> None:
        self.findings += [f for f in findings if f is not None and self.preflight.add(f) == "reported"]


def _count(data: Any) -> str:
    return f"{len(data):,} rows" if isinstance(data, Sized) else "a stream"


@contextlib.contextmanager
def only_warnings() -> Iterator[BufferingHandler]:
    """Collect the warnings that posttrain logs inside the context, and hide all other log lines and progress bars.

    transformers' warning about special tokens in the model's config is collected too.
    """
    from posttrain.loop.run import with_attributes

    collected = BufferingHandler(sys.maxsize)
    collected.setLevel(logging.WARNING)
    with contextlib.ExitStack() as stack:
        for name in (None, "transformers", "datasets", "posttrain", "transformers.trainer_utils"):
            handler = collected if name in ("posttrain", "transformers.trainer_utils") else logging.NullHandler()
            stack.enter_context(with_attributes(logging.getLogger(name), {"handlers": [handler], "propagate": False}))
        stack.enter_context(no_progress_bars())
        yield collected


class ModelIsNextError(Exception):
    """Raised when the data of a run is prepared and its model would be loaded next."""


def without_model(kind: type[Any]) -> type[Any]:
    """Return a subclass of a trainer that raises `ModelIsNextError` instead of loading its model."""

    def load_model(self: Any, model_id: str, **kwargs: Any) -> Any:
        raise ModelIsNextError(model_id)

    return type(kind.__name__, (kind,), {"load_model": load_model, "__module__": kind.__module__})


def try_step(trainer: Any, resume: str | None = None) -> None:
    """Train one step with completions of a few tokens, and evaluate one batch. Nothing is saved.

    Args:
        trainer: Trainer for the trial. Do not use it afterwards, because the trial changes its model.
        resume: Checkpoint from which the run would resume. The trial step is then the step after the checkpoint.

    Raises:
        Exception: An error that would end the run before its second step.
    """
    from transformers import IntervalStrategy
    from transformers.integrations import INTEGRATION_TO_CALLBACK
    from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

    from posttrain.loop.evaluation import check_best_metric
    from posttrain.models.probe import weights_not_finite

    class StopAfterOneStep(TrainerCallback):
        def on_step_end(self, args, state, control, **_) -> None:
            control.should_training_stop = True

    args, evaluates = trainer.args, trainer.eval_dataset is not None
    for callback in (*INTEGRATION_TO_CALLBACK.values(), PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    # Do not change max_steps, because a resumed run compares it with the max_steps in the checkpoint.
    trainer.add_callback(StopAfterOneStep())
    args.save_strategy, args.load_best_model_at_end = IntervalStrategy.NO, False
    args.eval_strategy, args.eval_on_start, args.log_completions = IntervalStrategy.NO, False, False
    # Log every step, because some checks run only when a step is logged.
    args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, 1
    if trainer.method.traits.samples:
        for option in ("max_completion_length", "response_length", "max_new_tokens"):
            if vars(args).get(option):
                vars(args)[option] = min(vars(args)[option], FEW_TOKENS)
    # If the run resumes, do not change the number of rows per step, because the checkpoint's position in the dataset depends
    # on it.
    elif not resume:
        args.gradient_accumulation_steps = 1
    trainer.train(resume_from_checkpoint=resume)
    # A real run checks the special tokens when it first saves the model.
    trainer.checks.saved_tokens(trainer.model, trainer.processing_class)
    if trainer.run.progress.bad_steps:
        weights = weights_not_finite(trainer.model)
        cause = f"the weights {weights[:4]} contain NaN or infinity" if weights else "every weight is finite"
        raise PosttrainError(
            f"the gradient of the first step contains NaN or infinity; {cause}. A run stops after three such steps. Fix: "
            f"{'use an intact checkpoint' if weights else 'check the size of rewards, loss weights and learning_rate'}."
        )
    if evaluates:
        sets, count = trainer.eval_dataset, args.per_device_eval_batch_size
        # Replace the attribute eval_dataset, because a dataset that is passed to evaluate() would be prepared a second time.
        several = isinstance(sets, dict)
        trainer.eval_dataset = {k: _few(v, count) for k, v in sets.items()} if several else _few(sets, count)
        check_best_metric(args, trainer.evaluate())


def _few(rows: AnyDataset, count: int) -> AnyDataset:
    return rows.select(range(min(count, len(rows)))) if isinstance(rows, Sized) else rows.take(count)


def _parameters(config: Any) -> int:
    """Count a model's parameters from its config, without loading weights. Return 0 if the parameters cannot be counted."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def _described(rows: Sequence[Any]) -> str:
    from posttrain.checks.rows import quantiles, sequences_of

    sequences = sequences_of(rows)
    if not sequences:
        return "no rows remain"
    sizes = quantiles(len(sequence.ids) for sequence in sequences)
    trained = sum(sum(sequence.trained) for sequence in sequences)
    tokens = sum(len(sequence.ids) for sequence in sequences)
    share = f", {100 * trained / max(tokens, 1):.1f} % trained" if trained else ""
    return f"{len(rows):,} rows of {sizes['min']} to {sizes['max']} tokens (median {sizes['median']:g}){share}"


def run(argv: list[str]) -> int:
    """Run `posttrain check` with ``argv``.

    Returns:
        Exit code: 0 if the command would train, 78 if a check would stop it.
    """
    parser = argparse.ArgumentParser(
        prog="posttrain check",
        usage="posttrain check COMMAND --config FILE.yaml [--no-model] [--json] [--examples N] [options of COMMAND]",
        description="Check a training command: its config, versions, data, tokenizer and template, rows, rewards, memory and "
        "server. Then load the model, and try one step (with completions of a few tokens) and one evaluation batch. "
        "Nothing is written to the run's folder.",
        allow_abbrev=False,
    )
    parser.add_argument("command", metavar="COMMAND", help="a training command: " + ", ".join(sorted(TRAINING)))
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    parser.add_argument(
        "--examples", type=int, default=EXAMPLES, metavar="N", help=f"number of rows to tokenize (default: {EXAMPLES})"
    )
    parser.add_argument(
        "--no-model", "--no_model", action="store_true", help="do not load weights, and do not try a step"
    )
    options, rest = parser.parse_known_args(argv)
    check_choice("command", options.command, sorted(TRAINING))
    checkup = Checkup(options.command, rest, max(1, options.examples), not options.no_model)
    checkup.make()
    if options.json:
        sys.stdout.write(json.dumps(checkup.to_dict(), indent=2, ensure_ascii=False, default=str) + "\n")
    else:
        show(checkup)
    return REFUSED if checkup.refused else 0


def show(checkup: Checkup) -> None:
    """Print the stages, the findings (the most severe finding last), the warnings, and the conclusion."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    table = Table.grid(padding=(0, 2))
    for stage in checkup.stages:
        mark = Text("no", style=STYLES["error"]) if stage.error else Text("ok", style="green")
        table.add_row(mark, stage.name, Text(visible(stage.error or stage.result)))
    console.print(table)
    for finding in sorted(checkup.findings, key=lambda f: ("info", "warning", "error").index(f.severity)):
        check = registry.REGISTRY.get(finding.code)
        name = f" {check.name}" if check else ""
        console.print(Text.assemble("\n", (f"{finding.severity} {finding.code}{name}", STYLES[finding.severity])))
        words = f"{finding.what} ({finding.where})\n{finding.why}\nFix: {finding.fix}"
        console.print(Text(visible(words)), soft_wrap=False)
    for text in checkup.warnings:
        console.print(Text.assemble("\n", ("warning: ", STYLES["warning"]), visible(text)), soft_wrap=False)
    for error in checkup.failed:
        console.print(Text.assemble("\n", ("error: a check could not be completed. ", STYLES["error"]), visible(error)))
    failed = sum(bool(stage.error) for stage in checkup.stages) + len(checkup.failed)
    counts = {level: sum(f.severity == level for f in checkup.findings) for level in ("error", "warning")}
    counted = f"{counts['error'] + failed} errors, {counts['warning'] + len(checkup.warnings)} warnings"
    seconds = sum(stage.seconds for stage in checkup.stages)
    verdict = "refused" if checkup.refused else "ready to train"
    if verdict != "refused" and not checkup.tries_step:
        verdict = (
            "no problems found. Without the model, adapter targets, generation, evaluation and the memory of a step were "
            "not checked"
        )
    untried = next(
        (stage.result for stage in checkup.stages if stage.name == "start" and stage.result.startswith("not tried")), ""
    )
    if verdict != "refused" and untried:
        verdict = f"no problems found before the first step, which was {untried}"
    style = STYLES["error"] if checkup.refused else "bold green"
    console.print(Text.assemble("\n", (f"{checkup.command}: {verdict}", style), f" ({counted}; {seconds:.1f} s)"))
