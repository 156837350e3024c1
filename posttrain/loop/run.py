"""`Run`: the components of one run. `Progress`: the state that changes during training. `Hooks`: replaceable functions of
the training loop.
"""

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
from posttrain.loop.media import Media
from posttrain.losses.reduce import Denominators
from posttrain.methods.base import Method
from posttrain.methods.config import PostTrainingConfig
from posttrain.metrics import Metric, MetricBuffer
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.heads import evaluating
from posttrain.models.reference import Reference
from posttrain.types import WHOLE, Batch, LossTerms, ModelOutputs, Ranks, Row, State, Truncation

if TYPE_CHECKING:
    from posttrain.loop.rollout import Online
    from posttrain.loop.step import Loss


# Type of `Hooks.prepare`, where the arguments are described.
Prepare = Callable[["Run", list[Any], list[list[Batch]], str], list[list[Batch]]]


@dataclass(frozen=True)
class Hooks:
    """Functions of the loop that a subclass of a trainer may replace.

    Attributes:
        objective: Function of outputs and batch that returns unreduced loss terms. None: the method's objective is called.
        comparison: Function of a batch. It returns another function, which the output layer calls instead of computing
            log-probs; see `TokenHead.compare`. None: the output layer computes log-probs.
        loss_of: Function of run, model, batch, counts and state that returns the loss of one forward pass.
        observe: Function of run, batch and model outputs of a pass. It returns further metrics. None: no further metrics are
            logged.
        batches: Function of the run, an item of the training loader, and the index of the micro-batch in its optimizer step.
            It returns the batches of the micro-batch. Online methods generate completions in this function.
        eval_batches: Function of the run and an item of the evaluation loader that returns batches.
        prepare: Function that adds further inputs of the loss to batches, such as log-probs of a reference. Its arguments
            are the run, items of a loader, the batches of each item, and ``train`` or ``eval``. In training, it is called
            once per optimizer step with all micro-batches, after tokens were counted. None: batches are not changed.
        before_split: Function of the run and the micro-batches of the current step. It is called before a pass that does not
            fit into memory is split.
        postprocess_metrics: Function that adds derived metrics to the metrics of a log window.
        predictions: Function of the model and batches. It returns a pair (logits, labels) for each row.
        own_loss: Whether the user's code defines the loss.
    """

    objective: Callable[[ModelOutputs, Batch], LossTerms] | None
    comparison: Callable[[Batch], Any] | None
    loss_of: Callable[[Run, nn.Module, Batch, Denominators, State], Loss]
    batches: Callable[[Run, Any, int], list[Batch]]
    eval_batches: Callable[[Run, Any], list[Batch]]
    postprocess_metrics: Callable[[dict[str, float]], dict[str, float]]
    predictions: Callable[[nn.Module, list[Batch]], list[tuple[Any, Any]]]
    own_loss: bool = False
    observe: Callable[[Run, Batch, ModelOutputs], dict[str, Metric]] | None = None
    prepare: Prepare | None = None
    before_split: Callable[[Run, list[list[Batch]]], None] | None = None


@dataclass
class Progress:
    """State that changes during a run. Checkpoints store the trainer state, the counters and the method's state.

    Attributes:
        model: The policy.
        wrapped: The policy with wrappers such as DDP.
        state: Steps, epochs and log lines so far.
        own: State of the method that persists across steps; see `State.own`.
        counters: Totals since the start of the run that are logged, such as ``num_tokens``.
        buffers: Metrics of the current log window, for ``train`` and ``eval``.
        denominators: Counts of the current optimizer step. The loss is divided by them.
        sums: Statistics of the method, summed over the passes of the current optimizer step.
        truncation: Truncation of the sampler for the current rollout batch. The objective needs the probability mass that
            remains after truncation.
        reduced_by: Reduction of the last computed loss.
        max_tokens: Maximum number of tokens per pass, including padding. None: no limit, because the device has not run
            out of memory.
        tokens_seen: Two counts of this rank: the number of tokens of sequences, and the number of computed tokens including
            padding.
        bad_steps: Number of consecutive steps whose gradient was not finite.
        shown: Rows of the completions table for the last generation, one per completion of this rank.
        watchers: Functions that observe the run. The key is the moment at which a function is called. ``step`` functions
            receive the run, batches and counts. ``pass`` functions receive the batch, loss terms and model outputs.
            ``gradient`` functions receive the model and its micro-batches. ``rollout`` functions receive the run, the
            completions of this rank, the rewards of all ranks, and advantages. ``log`` functions receive the log history. A
            function that returns False is removed.
        eval_rounds: Number of batches that the current evaluation has processed.
    """

    model: nn.Module = field(init=False)
    wrapped: nn.Module = field(init=False)
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


@dataclass(frozen=True)
class Run:
    """Components of one run, created by `posttrain.loop.build.build`. All state that changes is in ``progress``.

    Attributes:
        args: Config.
        method: The algorithm.
        name: Name of the trainer's class, used in messages.
        tokenizer: Tokenizer of the policy.
        vision: Object that handles images. It does nothing in a run without images.
        checks: Checks of the run and their findings.
        accelerator: Accelerator of the run.
        ranks: Processes of the run, in the form that methods use.
        pad_token_id: Padding token.
        layout: Layout of rows in forward passes.
        hooks: Functions of the loop that a subclass of the trainer may replace.
        progress: State that changes during training.
        fresh_adapter: Whether the adapter was created for this run. If so, the model without the adapter has the initial
            weights.
        router_coefficient: Weight of the load-balancing term of a mixture of experts; 0 disables it.
        reference: Frozen reference model. None: the loss needs no reference.
        forward: Function that runs a forward pass in training and evaluation. NEFTune replaces it during training.
        loss_function: The user's ``compute_loss_func``.
        online: Further components of a run that samples completions. None for other runs.
    """

    args: PostTrainingConfig
    method: Method[Any]
    name: str
    tokenizer: PreTrainedTokenizerBase
    vision: Media
    checks: Checks
    accelerator: Accelerator
    ranks: Ranks
    pad_token_id: int
    layout: Layout
    hooks: Hooks
    progress: Progress
    fresh_adapter: bool = False
    router_coefficient: float = 0.0
    reference: Reference | None = None
    forward: Callable[..., ModelOutputs] = forward
    loss_function: Callable[..., Any] | None = None
    online: Online = None  # Functions for runs that sample completions assume that this field is not None.

    @property
    def model(self) -> nn.Module:
        """The policy. FSDP and DeepSpeed may replace the object when training starts."""
        return self.progress.model

    def now(self) -> State:
        """Return the current progress of the run, in the form that methods receive."""
        state = self.progress.state
        return State(state.global_step, float(state.epoch or 0.0), self.ranks, self.progress.own)

    def watch(self, moment: str, *values: Any) -> None:
        """Call the watchers of a moment, such as ``step`` or ``log``. A watcher that returns False is removed."""
        self.progress.watchers[moment] = [look for look in self.progress.watchers.get(moment, ()) if look(*values)]

    def log(self, metrics: Mapping[str, Metric], mode: str = "train") -> None:
        """Add metrics to the current log window of a mode."""
        self.progress.buffers[mode].add(metrics)

    def reduced_metrics(self, mode: str) -> dict[str, float]:
        """Return the metrics logged since the last call, reduced over all ranks."""
        gather = partial(parallel.all_gather_objects, accelerator=self.accelerator)
        return self.hooks.postprocess_metrics(self.progress.buffers[mode].compute(gather))

    def collate(self, rows: list[Row]) -> list[Batch]:
        """Convert rows to batches, with the layout and padding token of this run."""
        traits = self.method.traits
        return collate(
            rows,
            pad_token_id=self.pad_token_id,
            layout=self.layout,
            whole_rows=traits.whole_rows,
            together=traits.single_pass,
        )

    def spare_batch(self) -> Batch:
        """Return a small batch for a rank without rows. The rank runs a forward pass with it, because forward passes may be
        collective operations.
        """
        token = int(self.pad_token_id)
        return collate([Row([token], [[token]], [[1]])], pad_token_id=token, layout=self.layout)[0].to(self.args.device)

    @contextmanager
    def inference(self, model: nn.Module | None = None) -> Iterator[nn.Module]:
        """Yield the model without DDP, in eval mode, without gradients and with the run's precision. On exit, the mode of
        each module is restored.

        DDP's forward method sometimes broadcasts buffers. This broadcast would block if other ranks did not run the same
        pass.
        """
        model = self.progress.wrapped if model is None else model
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        with evaluating(model), self.accelerator.autocast():
            yield model


@contextmanager
def with_attributes(holder: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of an object inside the context, and restore them on exit."""
    before = {name: getattr(holder, name) for name in attributes}
    for name, value in attributes.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)
