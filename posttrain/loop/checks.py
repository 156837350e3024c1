"""The four moments of a trainer's checks: its config, its data, its first batch, and every line of its log.

The main process looks and all ranks hear the same, so that an error ends all of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import nn

from posttrain.checks import machine
from posttrain.checks.registry import Context, Moment, Preflight, codes_of, describe, load
from posttrain.checks.rules import check_log
from posttrain.checks.tokenizers import special_token_findings
from posttrain.data.chat import inner_tokenizer
from posttrain.data.forest import Layout
from posttrain.data.templates import PROBLEMS
from posttrain.errors import PosttrainError, PreflightError
from posttrain.loop.data_report import DatasetHead, describe_batches, refuse_data, row_codes, usable_rows
from posttrain.models import parallel
from posttrain.models.architecture import attention_name, config_of, context_length, text_of
from posttrain.models.heads import picture_encoder
from posttrain.models.vision import tower_parameters
from posttrain.report.files import whole_file
from posttrain.report.lock import LOCK
from posttrain.report.record import versions
from posttrain.rewards.call import reward_name
from posttrain.types import Batch, Finding

if TYPE_CHECKING:
    from peft import PeftConfig

    from posttrain.loop.run import Run
    from posttrain.losses.reduce import Denominators
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.models.reference import Reference
    from posttrain.types import AnyDataset, EvalSets, Tokenizer

logger = logging.getLogger(__name__)

# Every module of checks joins the register here, so that making a trainer imports nothing more.
load()

FILE = "preflight.json"


class Checks:
    """Everything that is checked of a run: its config, its data, its first batch, every step, every log line.

    The main process looks and all ranks get its findings, so that an error ends all of them. Every method must be called
    by all ranks.

    Args:
        args: The trainer's config.
        command: The trainer's command name, such as ``"grpo"``.
        ignored_codes: Codes of findings that do not concern this method's rows.
        log_area: Letter of the codes that rules over log lines may find (`posttrain.checks.rules`); "" for none.
        log_codes: These codes, but for those that are looked for at another moment.
        zero_gradient_is_normal: Whether a step may move nothing: online, where all rewards of all groups are equal.
        fills_prompts: Whether environments write the prompts, so that those of the dataset may be empty and alike.
    """

    def __init__(
        self,
        args: PostTrainingConfig,
        *,
        command: str,
        ignored_codes: frozenset[str] = frozenset(),
        log_area: str = "",
        log_codes: tuple[str, ...] = (),
        zero_gradient_is_normal: bool = False,
        fills_prompts: bool = False,
    ) -> None:
        self.args = args
        self.preflight = Preflight(args.preflight, args.silence_findings)
        self._tokens_checked = False
        self.context = Context(
            command, args, processes=PartialState().num_processes, parts={"ignored_codes": ignored_codes}
        )
        self.log_area, self.log_codes, self.zero_gradient_is_normal = log_area, log_codes, zero_gradient_is_normal
        self.step_codes = ("PT-T003",) if zero_gradient_is_normal else ("PT-T001", "PT-T003")
        self.fills_prompts = fills_prompts
        self.record: Any = None
        # Tokens of the largest pass, and of the longest sequence, that were trained.
        self.largest_seen = (0, 0)
        # Tokens of the longest sequence of the training set, once it was looked for.
        self.longest_of_data = 0
        # Most tokens of a sequence that every model has positions for.
        self.positions = math.inf
        self._steps = self._empty = 0
        self._written = False
        self._early: list[Finding] = []  # Until there is a record of the run.

    def saved_tokens(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """What the configs that are saved say of padding and stopping, once a run."""
        if not self._tokens_checked:
            self._tokens_checked = True
            with self.preflight.record_check("config", ("PT-K101", "PT-K102", "PT-K103")):
                self.report(special_token_findings(model, tokenizer))

    def knows(self, *, parts: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Give probes what has come to be known of the run: fields of `Context`, and parts by name."""
        for name, value in fields.items():
            setattr(self.context, name, value)
        self.context.parts = {**self.context.parts, **(parts or {})}

    # The moments -------------------------------------------------------------------------------------------------

    def config(
        self, model: nn.Module, train_dataset: AnyDataset, eval_dataset: EvalSets | None, peft_config: PeftConfig | None
    ) -> Any:
        """First moment, before a weight is loaded; returns the training set without the rows that ``bad_rows`` drops."""
        self.knows(model_config=model_config_of(model, self.args), peft_config=peft_config)
        named = {"model_name": model} if isinstance(model, str) else {}
        self.run_probes("config", train_dataset=train_dataset, eval_dataset=eval_dataset, **named)
        state = PartialState()
        with parallel.failing_together(state), self.preflight.record_check("data", row_codes(train_dataset)):
            about = {"main": state.is_main_process, "filled": self.fills_prompts}
            train_dataset, findings = usable_rows(train_dataset, self.args, self.context.parts["method"], **about)
            self.report(findings)
            if self.args.strict_data and any(finding.severity != "info" for finding in findings):
                refuse_data([describe(finding) for finding in findings])
        return train_dataset

    def start(self, model: nn.Module, layout: Layout) -> None:
        """Once the model is there: precision of what is trained, one process for each GPU, dense masks."""
        trainable: dict[str, int] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                name = str(parameter.dtype).removeprefix("torch.")
                trainable[name] = trainable.get(name, 0) + parameter.numel()
        attention = str(attention_name(text_of(config_of(model))))
        with self.preflight.record_check("config", ("PT-C001", "PT-C004", "PT-C005")):
            self.report([
                machine.check_precision(trainable, learning_rate=self.args.learning_rate),
                machine.check_devices(visible=max(self.args.n_gpu, 1), processes=self.context.processes),
                machine.check_dense_masks(attention, packed=layout.dense_mask, row_tokens=layout.row_tokens),
                machine.check_launch(os.environ, self.context.processes),
            ])  # fmt: skip

    def data(self, head: DatasetHead, eval_dataset: EvalSets | None) -> None:
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
        self.run_probes(
            "data", train_dataset=head.raw, eval_dataset=eval_dataset, rows=rows, sample=sample, limit=head.limit
        )
        known = replace(self.context, rows=rows)
        with self.preflight.record_check("data", ("PT-B001", "PT-K004", "PT-K005")):
            self.report_from_main(lambda: [*self._nothing_trained(), *check_tokens(known), *check_reward_models(known)])
        with self.preflight.record_check("data", tuple(PROBLEMS)):
            self.report(
                replace(finding, severity="warning" if finding.severity == "error" else "info")
                for finding in head.template_findings
            )

    def first_batch(self, run: Run, batches: Sequence[Batch], counts: Denominators) -> None:
        """Third moment: look at the batches of the first optimizer step.

        Args:
            run: Of the trainer.
            batches: Of this rank.
            counts: Of the step, over all ranks.
        """
        self.keep(())
        self.run_probes("first_batch", batches=batches)
        ids = [int(batch.input_ids.max()) for batch in batches if batch.input_ids.numel()]
        with self.preflight.record_check("first_batch", ("PT-K004",)):
            found = lambda: check_tokens(self.context, ids, run.reference)  # noqa: E731
            self.report_from_main(lambda: [finding for finding in found() if finding.code == "PT-K004"])
        with self.preflight.record_check("log_step", self.step_codes):  # They are looked for in every step from now on.
            pass
        self.write()
        if self.record is not None and run.progress.state.global_step == 0:
            self.record.add_data(lambda: describe_batches(batches, self.context.tokenizer))

    def empty_steps(self, run: Run, batches: Sequence[Batch], counts: Denominators) -> bool:
        """Count steps in a row without a trained token; the third one ends the run.

        Online, steps whose completions are all masked are part of learning: the checks of rewards, lengths and gradients
        find runs whose completions never end.
        """
        self._empty = 0 if counts.tokens else self._empty + 1
        if self._empty >= EMPTY_STEPS and not self.zero_gradient_is_normal:
            self.report([nothing_trained(self._empty)])
        return True

    def economy(self, run: Run, batches: Sequence[Batch], counts: Denominators) -> bool:
        """Look once, after a few steps, at the padding that was computed."""
        self._steps += 1
        if self._steps < min(ECONOMY_STEPS + 1, max(int(run.progress.state.max_steps or 1), 1)):
            return True
        with self.preflight.record_check("log_step", ("PT-T002",)):
            self.report([check_padding(*run.progress.tokens_seen)])
        self.finish()
        return False

    def log_line(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Fourth moment: look at the log after each of its lines.

        Args:
            history: Lines of the log; the last one has just been written.
        """
        with self.preflight.record_check("log_step", self.log_codes):
            self.report_from_main(lambda: [*self.log_findings(history), *self._probed("log_step", history=history)])
        return True

    def log_findings(self, history: Sequence[Mapping[str, float]]) -> Iterator[Finding]:
        """What the rules of the method's area say of a log whose last line has just been written."""
        if self.log_area == "P" or (self.log_area and history and "loss" in history[-1]):
            yield from check_log(history, self.log_area, generations_per_step=self.args.generations_per_step)

    @property
    def reads_log(self) -> bool:
        """Whether anything looks at the log of this run."""
        return self.preflight.active and (bool(self.log_codes) or self.preflight.has("log_step", self.context))

    # Steps and gradients -----------------------------------------------------------------------------------------

    def measure_models(self) -> None:
        """Find how long a sequence may be for the model and for its teachers."""
        teachers = [part for name, part in self.context.parts.items() if name.startswith("teacher_model")]
        self._texts = [text for model in (self.context.model, *teachers) if (text := text_of(config_of(model)))]
        self.positions = min((known for text in self._texts if (known := context_length(text))), default=math.inf)

    def has_overlong_sequence(self, batches: Sequence[Batch]) -> float:
        """Measure the passes of a step; return 1.0 if a sequence of this rank is longer than a model's positions."""
        sizes = [(b.input_ids.numel(), int(b.position_ids.max()) + 1) for b in batches if b.input_ids.numel()]
        passes, lengths = zip(*sizes, self.largest_seen, strict=True)
        self.largest_seen = max(passes), max(lengths)
        return float(max(lengths) > self.positions)

    def report_overlong(self) -> None:
        """Report a sequence that is longer than a model's positions. Each rank reports once, and all call this together."""
        longest, mine = self.largest_seen[1], []
        if longest > self.positions:
            mine = [finding for text in self._texts if (finding := _positions_of(text, longest)) is not None][:1]
            self.positions = math.inf
        self.report(parallel.all_gather_objects(mine, PartialState())[:1])

    def first_gradients(self, model: nn.Module, micro_batches: Sequence[Sequence[Batch]]) -> bool:
        """Check, in the first step with a finite gradient and a trained token, that parameters have gradients."""
        if self._empty:  # A step without a trained token has no gradient, rightly; the next one will tell.
            return True
        norms = {n: _norm(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        if norms and not any(norms.values()) and all("trainable_tokens" in name for name in norms):
            return True  # The rows may not have had these tokens yet.
        if self.zero_gradient_is_normal:
            norms = {name: None if norm is None else max(norm, 1.0) for name, norm in norms.items()}
        with self.preflight.record_check("first_batch", ("PT-B001", "PT-B002", "PT-B003", "PT-G012")):
            pictured = any(batch.pictures for batches in micro_batches for batch in batches)
            self.report([check_first_gradients(norms), check_tower_gradients(norms, model) if pictured else None])
        self.finish()
        return False

    def _nothing_trained(self) -> Iterator[Finding | None]:
        model = self.context.model
        if model is not None and not any(parameter.requires_grad for parameter in model.parameters()):
            yield check_first_gradients({})

    # Looking and reporting ---------------------------------------------------------------------------------------

    def run_probes(self, moment: Moment, **known: Any) -> None:
        """Run all probes of a moment on the main process and report to every rank what they find."""
        self.report_from_main(lambda: self._probed(moment, **known))

    def _probed(self, moment: Moment, **known: Any) -> list[Finding]:
        fields = {name: known.pop(name) for name in tuple(known) if name in Context.__dataclass_fields__}
        return self.preflight.run(moment, replace(self.context, **fields, parts={**self.context.parts, **known}))

    def report(self, findings: Iterable[Finding | None]) -> None:
        """Report findings that every rank has; an error among them ends the run.

        Raises:
            PreflightError: With every error.
        """
        try:
            reported = self.preflight.report(findings, log=PartialState().is_main_process)
        except PreflightError as error:
            self.keep(error.findings)
            self.write(refused=True)
            raise
        self.keep(reported)
        if reported:
            self.finish()

    def report_from_main(self, look: Callable[[], Iterable[Finding | None]]) -> None:
        """Let the main process look and report to every rank; all ranks must call this."""
        state = PartialState()
        with parallel.failing_together(state):
            findings = list(look()) if state.is_main_process else []
        self.report(parallel.all_gather_objects(findings, state))  # type: ignore[arg-type]

    def keep(self, findings: Iterable[Finding]) -> None:
        """Write findings into the record of the run, once there is one."""
        self._early += findings
        if self.record is not None:
            self.record.add_findings(self._early)
            self._early = []

    def finish(self) -> None:
        """Write what is known where the run has its folder: from the first step on."""
        if self._written:
            self.write()

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
        content = self.preflight.to_dict() | {"refused": refused, "versions": versions()}
        with whole_file(folder / FILE) as part:
            part.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        self._written, self.preflight.changed = True, False


@cache
def log_codes(letters: str, apart: tuple[str, ...]) -> tuple[str, ...]:
    """Codes of these letters that are looked for at log lines, but for those ``apart``, which have a moment of their own."""
    return tuple(code for letter in letters for code in codes_of(letter, "log_step") if code not in apart)


def model_config_of(model: nn.Module, args: PostTrainingConfig) -> Any:
    """The model's configuration, of a string without its weights; None where there is none to be read."""
    if not isinstance(model, str):
        return config_of(model)
    from transformers import AutoConfig

    init = args.model_init_kwargs or {}
    try:
        return AutoConfig.from_pretrained(
            model, revision=init.get("revision"), trust_remote_code=args.trust_remote_code
        )
    except Exception:  # Loading the model will say what is wrong with it.
        return None


def _norm(gradient: torch.Tensor | None) -> float | None:
    return None if gradient is None else float(gradient.float().norm())


# Numbers in, findings out ---------------------------------------------------------------------------------------

EMPTY_STEPS = 3  # In a row, without a trained token.
PADDING_MOST = 0.4
ECONOMY_STEPS = 10  # Steps after which wasted time is known.


def check_first_gradients(norms: Mapping[str, float | None]) -> Finding | None:
    """Trained parameters after the first backward pass: at least one must have a gradient, and each a finite one.

    Args:
        norms: Norm of the gradient of each parameter that requires one; None where there is no gradient.
    """
    if not norms:
        return Finding(
            "PT-B001",
            "error",
            "no parameter of the model requires a gradient.",
            "the model",
            "the run would cost time and change nothing.",
            "check what froze it: a reference that shares all layers, a loaded adapter without is_trainable=True, or "
            "target_modules that match nothing.",
        )
    odd = sorted(name for name, norm in norms.items() if norm is not None and not math.isfinite(norm))
    if odd:
        return Finding(
            "PT-B002",
            "error",
            f"{len(odd)} of {len(norms)} gradients are not finite, {odd[0]!r} among them.",
            "the first step",
            "one such step makes every weight not a number.",
            "look for rows without a trained token, lower learning_rate, or compute in float32 (bf16=False, fp16=False).",
        )
    if not any(norms.values()):
        return Finding(
            "PT-B003",
            "error",
            f"none of the {len(norms)} trained parameters got a gradient.",
            "the first step",
            "frozen embeddings cut the graph before the first checkpointed layer, or no token of the batch is trained: the loss "
            "stays flat.",
            "call model.enable_input_require_grads() or set gradient_checkpointing=False; check the labels of the first rows.",
        )
    return None


def check_tower_gradients(norms: Mapping[str, float | None], model: nn.Module) -> Finding | None:
    """Trained parameters of tower and projector that got no gradient in a step with images.

    Args:
        norms: Of the first step's gradients; None where there is none.
        model: With `posttrain.models.vision.install_pictures`, wrapped or not.
    """
    if picture_encoder(model) is None:
        return None
    tower = {id(parameter) for parameter in tower_parameters(model).values()}
    trained = {name for name, parameter in model.named_parameters() if id(parameter) in tower}
    silent = sorted(name for name in trained if name in norms and norms[name] is None)
    if not silent:
        return None
    return Finding(
        "PT-G012",
        "warning",
        f"{len(silent)} trained parameters of tower and projector got no gradient, {silent[0]!r} among them.",
        "the first step",
        "they cost memory, never move, and hang DDP.",
        "freeze_vision='auto', which freezes what no feature depends on, or True.",
    )


def nothing_trained(steps: int) -> Finding:
    """Return the finding of optimizer steps in a row without one trained token."""
    return Finding(
        "PT-T001",
        "error",
        f"{steps} steps in a row held no trained token.",
        "the latest steps",
        "their loss is 0 and nothing is learnt, while the log looks as if the run had converged.",
        "raise max_length, or check completion_mask, assistant_masks and labels: posttrain inspect shows them.",
    )


def check_padding(real: int, computed: int) -> Finding | None:
    """A batch that is mostly padding.

    Args:
        real: Tokens of sequences.
        computed: Tokens that went through the model, padding included.
    """
    share = 1 - real / computed if computed else 0.0
    if share <= PADDING_MOST:
        return None
    return Finding(
        "PT-T002",
        "warning",
        f"{100 * share:.0f} % of the tokens that were computed are padding.",
        "the latest steps",
        "that part of the time is spent on nothing.",
        "set packing=True (or use an attention backend that takes packed rows), or group_by_length=True.",
    )


def _positions_of(text: Any, longest: int) -> Finding | None:
    rotary = any(getattr(text, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    return check_positions(longest, context_length(text), rotary=rotary)


def check_positions(longest: int, known: int | None, *, rotary: bool) -> Finding | None:
    """A sequence longer than the model has seen, or than it has position embeddings for.

    Args:
        longest: Tokens of the longest sequence of a step.
        known: Positions of the model (``max_position_embeddings``); None where it has no such number.
        rotary: Whether positions are computed, so that later ones exist, untrained; else they are rows of a table.
    """
    if known is None or longest <= known:
        return None
    return Finding(
        "PT-T003",
        "warning" if rotary else "error",
        f"a sequence has {longest} tokens, and the model knows {known} positions (max_position_embeddings).",
        "the latest step",
        "the model never saw positions beyond that, so what stands there is read badly and teaches little; time and memory "
        "grow with the length."
        if rotary
        else "there is no embedding for later positions: the forward pass would fail.",
        f"set max_length={known} or less, or split long rows.",
    )


def embedding_rows(model: nn.Module) -> int | None:
    """Rows of a model's input embedding; None where it has none, or only a shard of it."""
    try:
        shape = model.get_input_embeddings().weight.shape
    except (NotImplementedError, AttributeError):
        return None
    return int(shape[0]) if len(shape) == 2 and shape[0] else None


def check_token_rows(rows: int | None, *, tokens: int, highest: int | None, name: str = "the model") -> Finding | None:
    """Ids against the rows of an embedding: one beyond the last ends a run on a CPU, and asserts on a GPU.

    Args:
        rows: Of the embedding; None is not looked at.
        tokens: Of the tokenizer.
        highest: Largest id of the rows that were looked at; None: none were.
        name: Whose embedding it is.
    """
    if rows is None:
        return None
    fix = f"model.resize_token_embeddings({tokens}) before training, or the tokenizer that belongs to {name}."
    if highest is not None and highest >= rows:
        return Finding(
            "PT-K004",
            "error",
            f"the rows hold the token id {highest}, and the embedding of {name} has {rows} rows.",
            name,
            "there is no embedding for it: the forward pass would fail, on a GPU with an assertion that names nothing.",
            fix,
        )
    if tokens > rows:
        return Finding(
            "PT-K005",
            "warning",
            f"the tokenizer has {tokens} tokens, and the embedding of {name} {rows} rows.",
            name,
            f"ids from {rows} on have no embedding; the first text that holds such a token would end the run.",
            fix,
        )
    return None


def check_tokens(context: Context, ids: Iterable[int] = (), reference: Reference | None = None) -> Iterator[Finding]:
    """Compare token ids of the sampled rows, and others, with the embedding of the policy and of the reference."""
    tokenizer = inner_tokenizer(context.tokenizer)
    if not hasattr(tokenizer, "get_vocab"):
        return
    seen = [max(part) for row in context.rows for part in (row.prompt_ids, *row.completions) if len(part)]
    highest = max([*seen, *ids], default=None)
    models = {"the model": context.model, "the reference": None if reference is None else reference.copy}
    for name, model in models.items():
        rows = None if model is None else embedding_rows(model)
        if finding := check_token_rows(rows, tokens=len(tokenizer), highest=highest, name=name):
            yield finding


def check_reward_models(context: Context) -> Iterator[Finding]:
    """A reward model reads ids of its own tokenizer: the two must belong together."""
    rewards: Any = context.parts.get("rewards")
    for function in () if rewards is None else rewards.functions:
        model, tokenizer = getattr(function, "model", None), getattr(function, "tokenizer", None)
        if model is not None and hasattr(tokenizer, "get_vocab"):
            name = f"the reward model {reward_name(function)}"
            if finding := check_token_rows(embedding_rows(model), tokens=len(tokenizer), highest=None, name=name):
                yield finding
