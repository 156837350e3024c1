"""`Run`: what one run is made of, the typed context that every part of the loop is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerState

from posttrain.data.forest import Layout, collate
from posttrain.loop.checks import Checks
from posttrain.loop.pictures import Vision
from posttrain.losses.reduce import Denominators
from posttrain.methods.base import Method
from posttrain.methods.config import PostTrainingConfig
from posttrain.metrics import Metric, MetricBuffer
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.heads import evaluating
from posttrain.models.reference import Reference
from posttrain.types import ALONE, WHOLE, Batch, LossTerms, ModelOutputs, Ranks, Row, State, Truncation

if TYPE_CHECKING:
    from posttrain.loop.rollout import Online
    from posttrain.loop.step import Loss


@dataclass(frozen=True)
class Hooks:
    """What a subclass of a trainer may replace of the loop: its own method where it has one, else what the loop does.

    Attributes:
        objective: Outputs and batch to unreduced terms; None: the method's.
        comparison: What the output layer does instead of log-probs, see `TokenHead.compare`; None: nothing.
        loss_of: Run, model, batch, counts and state to the loss of one pass.
        observe: Batch, terms and outputs of a pass to further metrics; None: nothing looks at passes.
        eval_batches: What the evaluation loader yields, to batches.
        postprocess_metrics: The metrics of a window with those that follow from others.
        predictions: Model and batches to one (logits, labels) a row.
        own_loss: Whether the user's code says what the loss is.
    """

    objective: Callable[[ModelOutputs, Batch], LossTerms] | None
    comparison: Callable[[Batch], Any]
    loss_of: Callable[[Run, nn.Module, Batch, Denominators, State], Loss]
    eval_batches: Callable[[Any], list[Batch]]
    postprocess_metrics: Callable[[dict[str, float]], dict[str, float]]
    predictions: Callable[[nn.Module, list[Batch]], list[tuple[Any, Any]]]
    own_loss: bool = False
    observe: Callable[[Batch, LossTerms, ModelOutputs], dict[str, Metric]] | None = None


@dataclass
class Progress:
    """What changes while a run trains. Checkpoints keep the state, the counters and what the method keeps.

    Attributes:
        state: Steps, epochs and log lines so far.
        own: What the method keeps from step to step, see `State.own`.
        counters: Totals that are logged.
        buffers: Metrics of the log window, ``train`` and ``eval``.
        denominators: Counts of the present optimizer step.
        sums: Statistics of the method over the passes of the present optimizer step.
        truncation: What the sampler of the present rollout batch excludes. The objective needs the mass that remains.
        reduced_by: Reduction of the loss that was computed last.
        max_tokens: Maximum number of tokens per pass, including padding; None until memory has run out.
        tokens_seen: Trained tokens of this rank's sequences, and computed tokens including padding.
        bad_steps: Number of consecutive steps whose gradient was not finite.
        shown: One row per completion of this rank's last generation, as in the completions table.
        watchers: Functions that observe a moment. ``step`` gets the run, batches and counts; ``gradient`` the model and its
            micro-batches; ``rollout`` the completions of this rank, the rewards of all ranks, and advantages; ``log`` the log
            history. A watcher that returns False is removed.
        eval_rounds: Number of batches of the present evaluation so far.
    """

    state: TrainerState = field(default_factory=TrainerState)
    own: Any = None
    counters: dict[str, float] = field(default_factory=lambda: {"num_tokens": 0.0})
    buffers: dict[str, MetricBuffer] = field(default_factory=lambda: {"train": MetricBuffer(), "eval": MetricBuffer()})
    denominators: Denominators = field(default_factory=lambda: Denominators(1, 1, 1))
    sums: Tensor | None = None
    truncation: Truncation = WHOLE
    reduced_by: str | None = None
    max_tokens: int | None = None
    tokens_seen: tuple[int, int] = (0, 0)
    bad_steps: int = 0
    shown: list[dict[str, Any]] = field(default_factory=list)
    watchers: dict[str, list[Callable[..., bool | None]]] = field(default_factory=dict)
    eval_rounds: int = 0


@dataclass
class Run:
    """Components of one run. `posttrain.loop.build` fills it from top to bottom, in the order of its fields.

    Attributes:
        args: Its config.
        method: The algorithm.
        name: Of the trainer's class.
        progress: What changes while the run trains.
        vision: What becomes of pictures; a run of text has none.
        tokenizer: Of the policy.
        checks: What is looked for, and what was found.
        model: The policy; FSDP and DeepSpeed may put another object in its place.
        wrapped: The same as the run wraps it.
        accelerator: Of the run.
        ranks: All processes of the run, for methods.
        pad_token_id: Fills rows of different lengths.
        fresh_adapter: Whether the adapter was made for this run, so that the model without it is where it began.
        router_coefficient: Weight of the load-balancing term of a mixture of experts; 0: it is not trained.
        layout: How rows lie in a forward pass.
        reference: The frozen start of training, or another frozen model, where the loss compares with it.
        hooks: What a subclass replaces.
        forward: Forward pass of training and evaluation; NEFTune's while a run with noise trains.
        loss_function: The user's ``compute_loss_func``.
        online: What a run that samples consists of besides.
    """

    args: PostTrainingConfig
    method: Method[Any]
    name: str
    progress: Progress = field(default_factory=Progress)
    vision: Vision = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    checks: Checks = field(init=False)
    model: nn.Module = field(init=False)
    wrapped: nn.Module = field(init=False)
    accelerator: Accelerator = field(init=False)
    ranks: Ranks = ALONE
    pad_token_id: int = field(init=False)
    fresh_adapter: bool = False
    router_coefficient: float = 0.0
    layout: Layout = field(init=False)
    reference: Reference | None = None
    hooks: Hooks = field(init=False)
    forward: Callable[..., ModelOutputs] = field(default_factory=lambda: forward)
    loss_function: Callable[..., Any] | None = None
    online: Online = field(init=False)

    def now(self) -> State:
        """Return where the run stands, for the method."""
        progress = self.progress
        return State(progress.state.global_step, float(progress.state.epoch or 0.0), self.ranks, progress.own)

    def watch(self, moment: str, *values: Any) -> None:
        """Show values to the watchers of a moment, which change nothing. A watcher that returns False is not called again."""
        watchers = self.progress.watchers
        watchers[moment] = [watcher for watcher in watchers.get(moment, ()) if watcher(*values)]

    def log(self, metrics: Mapping[str, Metric], mode: str = "train") -> None:
        """Add metrics to the window of the log."""
        self.progress.buffers[mode].add(metrics)

    def reduced_metrics(self, mode: str) -> dict[str, float]:
        """The metrics of the window since the last call, over all ranks."""
        gather = partial(parallel.all_gather_objects, accelerator=self.accelerator)
        return self.hooks.postprocess_metrics(self.progress.buffers[mode].compute(gather))

    def collate(self, rows: list[Row]) -> list[Batch]:
        """Rows as forward passes."""
        traits = self.method.traits
        return collate(
            rows,
            pad_token_id=self.pad_token_id,
            layout=self.layout,
            whole_rows=traits.whole_rows,
            together=traits.single_pass,
        )

    def spare_batch(self) -> Batch:
        """One token after another: what a rank without rows runs where a forward pass is a collective."""
        token = int(self.pad_token_id)
        return collate([Row([token], [[token]], [[1]])], pad_token_id=token, layout=self.layout)[0].to(self.args.device)

    @contextmanager
    def inference(self, model: nn.Module | None = None) -> Iterator[nn.Module]:
        """Yield the model without DDP, in eval mode, without gradients, under the run's precision; restore each module's mode.

        DDP's forward sometimes broadcasts buffers. This collective would block in a pass that other ranks may not run.
        """
        model = self.wrapped if model is None else model
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        with evaluating(model), self.accelerator.autocast():
            yield model
