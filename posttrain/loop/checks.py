"""Checks of a run at four moments: on its config, on its data, on its first batch, and on every log line.

The main process runs the checks and broadcasts the findings, so that an error ends the run on all ranks.
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

from posttrain import plugins
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

# Register the checks of all modules now, so that creating a trainer imports no further modules.
load()

FILE = "preflight.json"


class Checks:
    """Runs the checks of one run: on its config, its data, its first batch, every step and every log line.

    The main process runs the checks and broadcasts the findings, so that an error ends the run on all ranks. Every
    method must be called on all ranks.

    Args:
        args: The trainer's config.
        command: The trainer's command name, such as ``"grpo"``.
        ignored_codes: Codes of findings that do not apply to the rows of this method.
        log_area: First letter of the codes that the rules for log lines (`posttrain.checks.rules`) report. Empty: these
            rules are disabled.
        log_codes: Codes of the checks that run after every log line.
        zero_gradient_is_normal: Whether a step may have a zero gradient. In online methods, the gradient is zero if all
            rewards within each group are equal.
        fills_prompts: Whether environments write the prompts. Prompts of the dataset may then be empty or equal.
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
        # Two maxima over all passes so far: the number of tokens in the loss of a pass, and the number of tokens of a
        # sequence.
        self.largest_seen = (0, 0)
        # Length of the longest training sequence in tokens. It is 0 while this length is unknown.
        self.longest_of_data = 0
        # Maximum sequence length in tokens that all models support.
        self.positions = math.inf
        self._steps = self._empty = 0
        self._written = False
        # Findings that were reported before the run record existed. They are added to the run record later.
        self._early: list[Finding] = []

    def saved_tokens(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Check the padding and stop tokens in the configs that are saved with the model. Only the first call has an effect."""
        if not self._tokens_checked:
            self._tokens_checked = True
            with self.preflight.record_check("config", ("PT-K101", "PT-K102", "PT-K103")):
                self.report(special_token_findings(model, tokenizer))

    def set_context(self, *, parts: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Set fields of the checks' `Context`, and add components of the run by name."""
        for name, value in fields.items():
            setattr(self.context, name, value)
        self.context.parts = {**self.context.parts, **(parts or {})}

    # The four points ----------------------------------------------------------------------------------------------

    def config(
        self, model: nn.Module, train_dataset: AnyDataset, eval_dataset: EvalSets | None, peft_config: PeftConfig | None
    ) -> Any:
        """Run the checks of the config before weights are loaded. Return the training set. With ``bad_rows="drop"``, bad
        rows are removed from it.
        """
        self.set_context(model_config=model_config_of(model, self.args), peft_config=peft_config)
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
        """Run the checks of the loaded model, e.g. of the precision of trained parameters, the number of processes per GPU,
        and dense attention masks.
        """
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
        """Run the checks of the data. They check sampled rows of the tokenized training set, and the chat template.

        Args:
            head: Sampled rows of the training set.
            eval_dataset: The evaluation set that was passed to the trainer.
        """
        if not self.preflight.active:
            return
        sample = None
        # Ignore errors about rows that cannot be used. Training reports these errors later, with the row number.
        with contextlib.suppress(PosttrainError):
            sample = head.sample if not head.streams and head.prepared is not None else None
        rows = sample.rows if sample is not None else ()
        self.run_probes(
            "data", train_dataset=head.raw, eval_dataset=eval_dataset, rows=rows, sample=sample, limit=head.limit
        )
        ctx = replace(self.context, rows=rows)
        with self.preflight.record_check("data", ("PT-B001", "PT-K004", "PT-K005")):
            self.report_from_main(lambda: [*self._nothing_trained(), *check_tokens(ctx), *check_reward_models(ctx)])
        with self.preflight.record_check("data", tuple(PROBLEMS)):
            self.report(
                replace(finding, severity="warning" if finding.severity == "error" else "info")
                for finding in head.template_findings
            )

    def first_batch(self, run: Run, batches: Sequence[Batch], counts: Denominators) -> None:
        """Run the checks that need the batches of the first optimizer step.

        Args:
            run: Run of the trainer.
            batches: Batches of this rank.
            counts: Counts of the step over all ranks.
        """
        self.keep(())
        self.run_probes("first_batch", batches=batches)
        ids = [int(batch.input_ids.max()) for batch in batches if batch.input_ids.numel()]
        with self.preflight.record_check("first_batch", ("PT-K004",)):
            findings = lambda: check_tokens(self.context, ids, run.reference)  # noqa: E731
            self.report_from_main(lambda: [finding for finding in findings() if finding.code == "PT-K004"])
        # Register the checks that run in every further step.
        with self.preflight.record_check("log_step", self.step_codes):
            pass
        self.write()
        if self.record is not None and run.progress.state.global_step == 0:
            self.record.add_data(lambda: describe_batches(batches, self.context.tokenizer))

    def empty_steps(self, run: Run, batches: Sequence[Batch], counts: Denominators) -> bool:
        """Count consecutive steps in which no token contributes to the loss. The third such step ends the run.

        In online methods, such steps are normal, because all completions of a step may be masked. Other checks (of rewards,
        lengths and gradients) detect runs whose completions never end.
        """
        self._empty = 0 if counts.tokens else self._empty + 1
        if self._empty >= EMPTY_STEPS and not self.zero_gradient_is_normal:
            self.report([nothing_trained(self._empty)])
        return True

    def economy(self, run: Run, batches: Sequence[Batch], counts: Denominators) -> bool:
        """Check the share of padding once, after `ECONOMY_STEPS` steps."""
        self._steps += 1
        if self._steps < min(ECONOMY_STEPS + 1, max(int(run.progress.state.max_steps or 1), 1)):
            return True
        with self.preflight.record_check("log_step", ("PT-T002",)):
            self.report([check_padding(*run.progress.tokens_seen)])
        self.finish()
        return False

    def log_line(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Run the checks of the log after each log line.

        Args:
            history: All log lines, including the new one.
        """
        with self.preflight.record_check("log_step", self.log_codes):
            self.report_from_main(lambda: [*self.log_findings(history), *self._probed("log_step", history=history)])
        return True

    def log_findings(self, history: Sequence[Mapping[str, float]]) -> Iterator[Finding]:
        """Apply the method's rules for log lines to the newest log line, and yield their findings."""
        if self.log_area == "P" or (self.log_area and history and "loss" in history[-1]):
            yield from check_log(history, self.log_area, generations_per_step=self.args.generations_per_step)

    @property
    def reads_log(self) -> bool:
        """Whether at least one check reads the log of this run."""
        return self.preflight.active and (bool(self.log_codes) or self.preflight.has("log_step", self.context))

    # Steps and gradients -----------------------------------------------------------------------------------------

    def measure_models(self) -> None:
        """Compute the maximum sequence length that the model and all teachers support."""
        teachers = [part for name, part in self.context.parts.items() if name.startswith("teacher_model")]
        self._texts = [text for model in (self.context.model, *teachers) if (text := text_of(config_of(model)))]
        self.positions = min((length for text in self._texts if (length := context_length(text))), default=math.inf)

    def has_overlong_sequence(self, batches: Sequence[Batch]) -> float:
        """Record the sizes of a step's passes. Return 1.0 if a sequence of this rank has more tokens than the model has
        positions, else 0.0.
        """
        sizes = [(b.input_ids.numel(), int(b.position_ids.max()) + 1) for b in batches if b.input_ids.numel()]
        passes, lengths = zip(*sizes, self.largest_seen, strict=True)
        self.largest_seen = max(passes), max(lengths)
        return float(max(lengths) > self.positions)

    def report_overlong(self) -> None:
        """Report a sequence that has more tokens than a model has positions. Each rank reports at most one sequence. All
        ranks must call this method together.
        """
        longest, mine = self.largest_seen[1], []
        if longest > self.positions:
            mine = [finding for text in self._texts if (finding := _positions_of(text, longest)) is not None][:1]
            self.positions = math.inf
        self.report(parallel.all_gather_objects(mine, PartialState())[:1])

    def first_gradients(self, model: nn.Module, micro_batches: Sequence[Sequence[Batch]]) -> bool:
        """Check that parameters receive gradients. This check runs in the first step that has a token in the loss and a
        finite gradient.
        """
        if self._empty:  # A step without tokens in the loss has no gradient, so check a later step.
            return True
        norms = {n: _norm(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        if norms and not any(norms.values()) and all("trainable_tokens" in name for name in norms):
            return True  # This step may have no row that contains the new tokens, so check a later step.
        if self.zero_gradient_is_normal:
            norms = {name: None if norm is None else max(norm, 1.0) for name, norm in norms.items()}
        with self.preflight.record_check("first_batch", ("PT-B001", "PT-B002", "PT-B003", "PT-G012")):
            findings = [check_first_gradients(norms)]
            if any(batch.pictures for batches in micro_batches for batch in batches):
                findings.append(plugins.module("extensions.images.checks").check_tower_gradients(norms, model))
            self.report(findings)
        self.finish()
        return False

    def _nothing_trained(self) -> Iterator[Finding | None]:
        model = self.context.model
        if model is not None and not any(parameter.requires_grad for parameter in model.parameters()):
            yield check_first_gradients({})

    # Running and reporting -----------------------------------------------------------------------------------------

    def run_probes(self, moment: Moment, **known: Any) -> None:
        """Run all checks of one moment of the run on the main process, and report their findings on every rank."""
        self.report_from_main(lambda: self._probed(moment, **known))

    def _probed(self, moment: Moment, **known: Any) -> list[Finding]:
        fields = {name: known.pop(name) for name in tuple(known) if name in Context.__dataclass_fields__}
        return self.preflight.run(moment, replace(self.context, **fields, parts={**self.context.parts, **known}))

    def report(self, findings: Iterable[Finding | None]) -> None:
        """Report findings that are equal on all ranks. A finding with severity error ends the run.

        Raises:
            PreflightError: There are errors. The message lists all of them.
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
        """Run ``look`` on the main process, and report its findings on every rank. All ranks must call this method."""
        state = PartialState()
        with parallel.failing_together(state):
            findings = list(look()) if state.is_main_process else []
        self.report(parallel.all_gather_objects(findings, state))  # type: ignore[arg-type]

    def keep(self, findings: Iterable[Finding]) -> None:
        """Write findings to the run record. If the record does not exist yet, the findings are written when it is created."""
        self._early += findings
        if self.record is not None:
            self.record.add_findings(self._early)
            self._early = []

    def finish(self) -> None:
        """Update the findings in the run's folder, if the folder already contains findings. The folder is created at the
        first step.
        """
        if self._written:
            self.write()

    def write(self, *, refused: bool = False) -> None:
        """Write ``preflight.json`` to the run's folder if there are new findings. Only the main process writes.

        Args:
            refused: Whether an error now ends the run. In this case, the file of another run in the folder is not
                overwritten.
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
    """Return the codes of the checks that run after each log line. Only codes that start with one of the given letters are
    returned. Codes in ``apart`` are excluded, because other code runs these checks.
    """
    return tuple(code for letter in letters for code in codes_of(letter, "log_step") if code not in apart)


def model_config_of(model: nn.Module, args: PostTrainingConfig) -> Any:
    """Return the model's config, or None if it cannot be read. For a path or Hub id, the config is read without the weights."""
    if not isinstance(model, str):
        return config_of(model)
    from transformers import AutoConfig

    init = args.model_init_kwargs or {}
    try:
        return AutoConfig.from_pretrained(
            model, revision=init.get("revision"), trust_remote_code=args.trust_remote_code
        )
    # Ignore this error, because loading the model will raise an error with a clearer message.
    except Exception:
        return None


def _norm(gradient: torch.Tensor | None) -> float | None:
    return None if gradient is None else float(gradient.float().norm())


# Findings from numbers -----------------------------------------------------------------------------------------

# Number of consecutive steps without a token in the loss after which a finding is reported.
EMPTY_STEPS = 3
PADDING_MOST = 0.4
ECONOMY_STEPS = 10  # Number of steps after which the share of padding is checked.


def check_first_gradients(norms: Mapping[str, float | None]) -> Finding | None:
    """Check the gradients after the first backward pass. At least one trained parameter must have a gradient, and all
    gradients must be finite.

    Args:
        norms: Gradient norm of each trained parameter. None: the parameter has no gradient.
    """
    if not norms:
        return Finding(
            "PT-B001",
            "error",
            "no parameter of the model requires a gradient.",
            "the model",
            "the run would take time, but no parameter would change.",
            "check what froze the parameters: a reference that shares all layers, a loaded adapter without "
            "is_trainable=True, or target_modules that match nothing.",
        )
    odd = sorted(name for name, norm in norms.items() if norm is not None and not math.isfinite(norm))
    if odd:
        return Finding(
            "PT-B002",
            "error",
            f"{len(odd)} of {len(norms)} gradients are not finite, for example that of {odd[0]!r}.",
            "the first step",
            "one such step sets every weight to NaN.",
            "look for rows without a trained token, lower learning_rate, or compute in float32 (bf16=False, fp16=False).",
        )
    if not any(norms.values()):
        return Finding(
            "PT-B003",
            "error",
            f"none of the {len(norms)} trained parameters got a gradient.",
            "the first step",
            "either frozen embeddings cut the graph before the first checkpointed layer, or no token of the batch "
            "contributes to the loss. The loss will stay constant.",
            "call model.enable_input_require_grads() or set gradient_checkpointing=False; check the labels of the first rows.",
        )
    return None


def nothing_trained(steps: int) -> Finding:
    """Return the finding about consecutive optimizer steps in which no token contributes to the loss."""
    return Finding(
        "PT-T001",
        "error",
        f"in {steps} consecutive steps no token contributed to the loss.",
        "the latest steps",
        "their loss is 0 and nothing is learned, but the log looks as if the run had converged.",
        "raise max_length, or check completion_mask, assistant_masks and labels: posttrain inspect shows them.",
    )


def check_padding(real: int, computed: int) -> Finding | None:
    """Return a finding if more than `PADDING_MOST` of the computed tokens are padding.

    Args:
        real: Number of tokens that belong to sequences.
        computed: Number of tokens that the model processed, including padding.
    """
    share = 1 - real / computed if computed else 0.0
    if share <= PADDING_MOST:
        return None
    return Finding(
        "PT-T002",
        "warning",
        f"{100 * share:.0f} % of the computed tokens are padding.",
        "the latest steps",
        "that share of the compute time is wasted.",
        "set packing=True, use an attention backend that supports packed rows, or set group_by_length=True.",
    )


def _positions_of(text: Any, longest: int) -> Finding | None:
    rotary = any(getattr(text, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    return check_positions(longest, context_length(text), rotary=rotary)


def check_positions(longest: int, known: int | None, *, rotary: bool) -> Finding | None:
    """Return a finding if a sequence has more tokens than the model has positions.

    Args:
        longest: Number of tokens of the longest sequence of a step.
        known: Number of positions of the model (``max_position_embeddings``). None: the config does not contain it.
        rotary: Whether positions are rotary. If so, the model can compute positions beyond ``known``, but it was not trained
            on them. Otherwise, positions are rows of an embedding table.
    """
    if known is None or longest <= known:
        return None
    return Finding(
        "PT-T003",
        "warning" if rotary else "error",
        f"a sequence has {longest} tokens, but the model has {known} positions (max_position_embeddings).",
        "the latest step",
        "the model was never trained on later positions, so it reads those tokens badly and learns little from them. "
        "Time and memory grow with the length."
        if rotary
        else "there is no embedding for later positions: the forward pass would fail.",
        f"set max_length={known} or less, or split long rows.",
    )


def embedding_rows(model: nn.Module) -> int | None:
    """Return the number of rows of a model's input embedding. Return None if the model has no input embedding, or if this
    process has only a shard of it.
    """
    try:
        shape = model.get_input_embeddings().weight.shape
    except (NotImplementedError, AttributeError):
        return None
    return int(shape[0]) if len(shape) == 2 and shape[0] else None


def check_token_rows(rows: int | None, *, tokens: int, highest: int | None, name: str = "the model") -> Finding | None:
    """Return a finding if a token id is not below the number of rows of the embedding. Such an id causes an error on a CPU
    and a device-side assertion on a GPU.

    Args:
        rows: Number of rows of the embedding. None: nothing is checked.
        tokens: Number of tokens of the tokenizer.
        highest: Largest id in the sampled rows. None: no rows were sampled.
        name: Name of the model that has this embedding, used in messages.
    """
    if rows is None:
        return None
    fix = f"call model.resize_token_embeddings({tokens}) before training, or use the tokenizer that belongs to {name}."
    if highest is not None and highest >= rows:
        return Finding(
            "PT-K004",
            "error",
            f"the rows contain the token id {highest}, but the embedding of {name} has {rows} rows.",
            name,
            "there is no embedding for this id, so the forward pass would fail. On a GPU it fails with an "
            "assertion that does not name the cause.",
            fix,
        )
    if tokens > rows:
        return Finding(
            "PT-K005",
            "warning",
            f"the tokenizer has {tokens} tokens, but the embedding of {name} has {rows} rows.",
            name,
            f"ids from {rows} on have no embedding. The run would fail at the first text that contains such a token.",
            fix,
        )
    return None


def check_tokens(context: Context, ids: Iterable[int] = (), reference: Reference | None = None) -> Iterator[Finding]:
    """Check that the embeddings of the policy and the reference have a row for each token id. The ids are those in the
    sampled rows and those in the argument ``ids``.
    """
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
    """Yield a finding for each reward model that has fewer embeddings than its tokenizer has tokens."""
    rewards: Any = context.parts.get("rewards")
    for function in () if rewards is None else rewards.functions:
        model, tokenizer = getattr(function, "model", None), getattr(function, "tokenizer", None)
        if model is not None and hasattr(tokenizer, "get_vocab"):
            name = f"the reward model {reward_name(function)}"
            if finding := check_token_rows(embedding_rows(model), tokens=len(tokenizer), highest=None, name=name):
                yield finding
