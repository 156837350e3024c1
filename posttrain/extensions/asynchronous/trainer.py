"""`AsyncTrainer`: base class of trainers on rollouts that other processes sample."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from posttrain.data.forest import collate
from posttrain.data.formats import first_rows
from posttrain.data.samplers import PromptStream
from posttrain.errors import ConfigError
from posttrain.extensions.asynchronous.ledger import Ledger, MismatchGuard
from posttrain.extensions.asynchronous.rollouts import AsyncRollouts, RolloutService
from posttrain.extensions.asynchronous.samples import TaskSource
from posttrain.extensions.asynchronous.worker import check_picklable
from posttrain.loop.online import OnlineTrainer
from posttrain.loop.prompts import PROMPTS_TRIED
from posttrain.loop.rollout import settings_of
from posttrain.loop.run import Hooks, Run
from posttrain.models import parallel
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Batch

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class AsyncTrainer(OnlineTrainer):
    """Trainer on rollouts from a queue that worker processes fill. It drops rollouts that are too old, and pushes new
    weights to the workers.

    The constructor of a subclass calls `sends` before the parent's constructor, and `begins` after it.
    """

    args: Any
    source: AsyncRollouts
    _prompt_images = False

    def sends(self, sent: dict[str, Any], rollout_worker: object, weight_transfer: object, tokenizer: object) -> None:
        """Set the arguments that `RolloutService` sends to the worker processes. Raise an error if an argument is not
        picklable, unless the user passed a worker.
        """
        if rollout_worker is None:
            check_picklable({**sent, "processing_class": tokenizer})
        self.given = {**sent, "rollout_worker": rollout_worker, "weight_transfer": weight_transfer}

    def begins(self) -> None:
        """Create the queue of rollouts. A subclass calls this method at the end of its constructor, because the queue uses
        the trainer's other components.
        """
        if "DEEPSPEED" in str(self.accelerator.distributed_type):
            raise ConfigError("asynchronous training supports one process, DDP and FSDP2, but not DeepSpeed.")
        if self.given["rollout_worker"] is not None and self.given["weight_transfer"] is None:
            logger.warning(
                "rollout_worker is set without weight_transfer: the worker must load weights from shared memory, "
                "or its weights are never updated."
            )
        self.source = self.make_source()
        budget = self.args.token_budget or 0
        if budget > 0 and self.given["rollout_worker"] is None:
            prompts = self.prompt_source.token_ids(list(first_rows(self.train_dataset, PROMPTS_TRIED)))
            if budget <= (shortest := min(map(len, prompts))):
                raise ConfigError(
                    f"token_budget={budget}, but the shortest of the first {len(prompts)} prompts has {shortest} tokens, so "
                    "every rollout would be dropped. Fix: increase token_budget."
                )
        self.mismatch = MismatchGuard()
        self.trained_groups: int = 0
        self._new_groups: set[int] = set()
        self._skipping = False
        self.add_callback(_StepCallback(self))

    def reads_images(self) -> tuple[bool, bool]:
        """Return whether prompts may contain images and whether completions may contain images. In asynchronous training,
        completions may not contain images.
        """
        return self._prompt_images, False

    def load_model(self, model_id: str, **kwargs: Any) -> Any:
        """Load the model in the config's ``dtype`` unless ``model_init_kwargs`` sets another dtype."""
        return super().load_model(model_id, **{"dtype": self.args.dtype} | kwargs)

    def make_source(self) -> AsyncRollouts:
        """Create the workers and the queue that they fill."""
        args = self.args
        prompts = PromptStream(self.train_dataset, args.seed, args.shuffle_dataset)
        service = RolloutService(
            args,
            self.given,
            self.weight_sync,
            tasks=TaskSource(prompts, args.num_generations, args.seed),
            ledger=Ledger(),
            tokenizer=self.processing_class,
            pad_token_id=self.pad_token_id,
            sampling=lambda: settings_of(self.run, "train").sampling,
            reader=self.vision.reader,
        )
        watch = self.reward_watch if self.scores_rewards else None
        return AsyncRollouts(service, self.rewards, watch, lambda rows: self.record.add_completions(rows))

    @property
    def scores_rewards(self) -> bool:
        """Whether rollouts have rewards. If True, the trainer checks that the rewards have variance."""
        return True

    @property
    def worker(self) -> Any:
        """The worker pool, or the worker that the user passed. None before the first step, and on all processes except the
        main process.
        """
        return self.source.service.worker

    @property
    def transfer(self) -> Any:
        """The object that sends weights to the engines. None before the first step."""
        return self.source.service.transfer

    @property
    def version(self) -> int:
        """Version of the weights that were pushed last."""
        return self.source.service.version

    def account(self) -> dict[str, float]:
        """Return the number of rollouts in each state. ``produced = trained + dropped + in_flight`` always holds."""
        return self.source.account()

    def schedule_text(self, prompts: int | None) -> str:
        """Describe when rollouts are sampled and when weights are updated."""
        args = self.args
        wanted = "" if prompts is None else f" {prompts} prompts are {prompts * args.num_generations} rollouts."
        return (
            f"{args.num_rollout_workers} worker(s) sample up to {args.max_inflight_tasks} rollouts concurrently "
            f"({args.resolved_engine}); a step trains on {args.samples_per_step} of them; weights are pushed every "
            f"{args.weight_sync_steps} step(s); a rollout may be {args.max_staleness_hard} version(s) old when it is used "
            f"({args.staleness_policy}).{wanted}"
        )

    # The loop ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train for ``max_steps`` steps. Without ``max_steps``, train until prompts were used ``num_train_epochs`` times on
        average.
        """
        args = self.args
        max_steps, self._target = args.max_steps, math.inf
        if args.max_steps <= 0:
            self._target = math.ceil(args.num_train_epochs * len(self.train_dataset))
            args.max_steps = math.ceil(self._target * args.num_generations / (args.samples_per_step or 1))
        try:
            return super().train(resume_from_checkpoint, **kwargs)
        finally:
            args.max_steps = max_steps
            self.source.close()
            logger.info("rollouts: %s", {k.removeprefix("async/"): int(v) for k, v in self.account().items() if v})

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader that yields one step number per step, because the rollouts come from the queue."""
        return DataLoader(_Ticks(), batch_size=None)

    def _hooks(self) -> Hooks:
        return dataclasses.replace(super()._hooks(), batches=self._batches)

    def _batches(self, run: Run, inputs: Any, index: int) -> list[Batch]:
        """Convert this process's rollouts of the step to batches."""
        batch = self.taken(self.source.next(self.args.samples_per_step or 1))
        tokens = sum(len(rollout.prompt_ids) + len(rollout.token_ids) for rollout in batch.rollouts)
        self.counters["num_tokens"] += parallel.all_reduce_sum([float(tokens)], self.accelerator)[0]
        layout, budget = self.layout, self.source.token_budget
        if self.args.token_budget is not None and budget > 0:
            layout = layout.adjusted(min(layout.row_tokens, budget))
        return collate(batch.every_row(), pad_token_id=self.pad_token_id, layout=layout)

    def taken(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with additional data that the objective needs. By default, the batch is returned unchanged."""
        return batch

    def before_update(self) -> None:
        """Discard the gradients, so that the update is skipped, if policy and sampler have differed too much for too many
        consecutive steps.
        """
        local = [0.0, 0.0] if self.run.progress.sums is None else self.run.progress.sums.tolist()
        kl, tokens = parallel.all_reduce_sum(local, self.accelerator)
        self._skipping = self.mismatch.add(kl / max(tokens, 1.0))
        if self._skipping:
            for parameter in self.model.parameters():
                parameter.grad = None

    def after_update(self, control: TrainerControl) -> None:
        """Push weights every ``weight_sync_steps`` steps, record the rollouts of the step, and stop the run at
        its last step.
        """
        main = self.accelerator.is_main_process
        if main and not self._skipping:
            self._count_groups({trajectory.group_id for trajectory in self.source.held})
        (trained,) = parallel.all_reduce_sum([float(self.trained_groups) if main else 0.0], self.accelerator)
        self.trained_groups = int(trained)
        if math.isfinite(self._target):
            self.state.epoch = self.trained_groups / max(1, len(self.train_dataset))
            control.should_training_stop = control.should_training_stop or self.trained_groups >= self._target
        step, last = (
            self.state.global_step,
            control.should_training_stop or self.state.global_step >= self.args.max_steps,
        )
        if (step % self.args.weight_sync_steps == 0 or self._skipping) and not last:
            # Push the weights before the step is recorded, so that new rollouts are generated with the new version.
            self.source.service.push_weights()
        if main:
            self.source.book(skipped=self._skipping)
        self._skipping = False

    def _count_groups(self, groups: set[int]) -> None:
        """Count the groups that were trained on. Each group is counted once, even if its rollouts are used in several steps."""
        self.trained_groups += len(groups - self._new_groups)
        self._new_groups = {g for g in self._new_groups | groups if g > max(groups) - self._remembered}

    @property
    def _remembered(self) -> int:
        """Number of recent group ids to store. Rollouts of these groups may still be in progress."""
        return 2 * (self.args.max_inflight_tasks + self.args.queue_maxsize)

    def postprocess_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the current counts of rollouts to the metrics that are logged."""
        metrics = super().postprocess_metrics(metrics)
        return metrics | (self.account() if "sample/staleness_mean" in metrics else {})

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_to_save(self) -> dict[str, Any]:
        """Return the parent's state with the position in the prompts and the counts of rollouts."""
        return super().state_to_save() | {"async": self.source.state() | {"trained_groups": self.trained_groups}}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_to_save` returned."""
        super().load_saved_state(state)
        self.source.load(state["async"])
        self.trained_groups = state["async"]["trained_groups"]


class _Ticks(IterableDataset):
    """Infinite dataset whose items are step numbers."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class _StepCallback(TrainerCallback):
    """Callback that calls `before_update` and `after_update` of the trainer."""

    def __init__(self, trainer: AsyncTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Check before the update how much policy and sampler differ."""
        self.trainer.before_update()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Push weights and record the step."""
        self.trainer.after_update(control)
