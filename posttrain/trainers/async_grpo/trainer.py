"""`AsyncGRPOTrainer`: GRPO on rollouts that other processes write while it trains."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from posttrain.data.forest import collate
from posttrain.data.samplers import PromptStream
from posttrain.errors import ConfigError
from posttrain.loop.online import OnlineTrainer
from posttrain.methods.async_grpo.config import AsyncGRPOConfig
from posttrain.methods.async_grpo.objective import AsyncGRPO
from posttrain.models import parallel
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch
from posttrain.rollouts.episodes.harness import take_harness
from posttrain.rollouts.workers.ledger import Ledger, MismatchGuard
from posttrain.rollouts.workers.samples import TaskSource
from posttrain.rollouts.workers.worker import check_picklable
from posttrain.trainers.arguments import (
    Adapter,
    Callbacks,
    EvalSets,
    Metrics,
    Model,
    OptimizerClass,
    Optimizers,
    Quantization,
    Rewards,
    Tokenizer,
    TrainSet,
)
from posttrain.trainers.async_grpo.rollouts import AsyncRollouts, RolloutService, warn_of_reward_models
from posttrain.types import Batch, LossTerms, ModelOutputs, Truncation

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class AsyncGRPOTrainer(OnlineTrainer):
    """Group-relative policy optimisation whose rollouts are written ahead, by processes of their own (experimental).

    Workers write and score completions with the newest weights they have; the trainer takes them from a queue as its steps
    need them, drops those that are too old, and corrects for the rest being written by older weights.

    Args:
        model: Hub id, folder or model.
        reward_funcs: As for `GRPOTrainer`; they run in the workers, so they must be defined at the top level of a module.
        args: `AsyncGRPOConfig`.
        train_dataset: Prompts; None where an environment says what is to be done.
        processing_class: The tokenizer; None loads the model's.
        rollout_worker: Writes rollouts instead of our own processes, see `RolloutWorkerProtocol`; or a `HarnessRolloutWorker`,
            which makes sessions of an agent of them.
        weight_transfer: Takes weights to it; see `WeightTransferProtocol`.
        engine_factory: ``() -> RolloutEngine``, picklable, instead of the engine that ``args.worker_engine`` names.
        tools, environment_factory: See `EpisodeSetup` and the pages on tools and environments.

    Reference: AReaL, arXiv:2505.24298; DeepSeekMath, arXiv:2402.03300, equation 3.

    >>> trainer = AsyncGRPOTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", short, train_dataset=data)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    METHOD = AsyncGRPO
    method: AsyncGRPO
    _tag_names: ClassVar[list[str]] = ["posttrain", "async-grpo"]
    args: AsyncGRPOConfig
    source: AsyncRollouts

    def __init__(
        self,
        model: Model,
        reward_funcs: Rewards | None = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: TrainSet | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: Adapter | None = None,
        tools: Sequence[Callable] | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        *,
        eval_dataset: EvalSets | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        engine_factory: Callable | None = None,
        rollout_func: Callable | None = None,
        harness: Any = None,
        rollout_engine: RolloutEngine | None = None,
        quantization_config: Quantization | None = None,
        data_collator: Callable | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ) -> None:
        rollout_worker, harness, reward_funcs = take_harness(rollout_worker, harness, reward_funcs)
        sent: dict[str, Any] = {
            "tools": tools,
            "environment_factory": environment_factory,
            "harness": harness,
            "reward_processing_classes": reward_processing_classes,
        }
        sent |= {"reward_funcs": reward_funcs, "engine_factory": engine_factory}
        if rollout_worker is None:
            check_picklable({**sent, "processing_class": processing_class})
            warn_of_reward_models(reward_funcs)
        if rollout_func is not None:
            raise ConfigError(
                "rollout_func runs in the trainer; rollouts are written elsewhere here. Give rollout_worker."
            )
        self.given = {**sent, "rollout_worker": rollout_worker, "weight_transfer": weight_transfer}
        # What tools and environments show comes after the prompt, and a sample has pictures in its prompt alone.
        self._prompt_images = not (tools or environment_factory)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            environment_factory=environment_factory,
            eval_dataset=eval_dataset,
            reward_processing_classes=reward_processing_classes,
            harness=harness,
            rollout_engine=rollout_engine,
            quantization_config=quantization_config,
            data_collator=data_collator,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if "DEEPSPEED" in str(self.accelerator.distributed_type):
            raise ConfigError("asynchronous GRPO runs on one process, DDP or FSDP2, not on DeepSpeed.")
        if rollout_worker is not None and weight_transfer is None:
            logger.warning(
                "rollout_worker without weight_transfer: it loads what lies in shared memory, or stays as it is."
            )
        args = self.args
        self.source = self.make_source()
        self.mismatch = MismatchGuard()
        self.trained_groups: int = 0
        self._new_groups: set[int] = set()
        self._step_kl = torch.zeros(2, dtype=torch.float64)
        self._skipping = False
        self.add_callback(_StepCallback(self))

    def reads_images(self) -> tuple[bool, bool]:
        """Pictures of prompts alone."""
        return self._prompt_images, False

    @property
    def truncation(self) -> Truncation:
        """Of the workers, and of the engine that evaluates: all log-probs are of what was drawn from."""
        return self.args.truncation

    def load_model(self, model_id: str, **kwargs: Any) -> Any:
        """As every trainer's, in the config's ``dtype`` unless ``model_init_kwargs`` names another."""
        return super().load_model(model_id, **{"dtype": self.args.dtype} | kwargs)

    def make_source(self) -> AsyncRollouts:
        """Workers, and the queue that they fill."""
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
            sampling=lambda: self.sampling("train"),
            reader=self.vision.reader,
        )
        return AsyncRollouts(service, self.rewards, self.reward_watch, lambda rows: self.record.add_completions(rows))

    @property
    def worker(self) -> Any:
        """Generates rollouts; None before the first step, and on processes other than the main one."""
        return self.source.service.worker

    @property
    def transfer(self) -> Any:
        """Takes weights to the engines; None before the first step."""
        return self.source.service.transfer

    @property
    def version(self) -> int:
        """Of the weights that were pushed last."""
        return self.source.service.version

    def account(self) -> dict[str, float]:
        """Where all rollouts are, in one moment: ``produced = trained + dropped + in_flight``."""
        return self.source.account()

    def schedule_text(self, prompts: int | None) -> str:
        """How rollouts and updates follow each other."""
        args = self.args
        wanted = "" if prompts is None else f" {prompts} prompts are {prompts * args.num_generations} rollouts."
        return (
            f"{args.num_rollout_workers} worker(s) write up to {args.max_inflight_tasks} rollouts at once "
            f"({args.resolved_engine}); a step trains {args.samples_per_step} of them; weights are pushed every "
            f"{args.weight_sync_steps} step(s); a rollout may be {args.max_staleness_hard} version(s) old when it is trained "
            f"({args.staleness_policy}).{wanted}"
        )

    # The loop ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train until ``max_steps``, or until ``num_train_epochs`` times as many prompts as there are have been trained."""
        args = self.args
        given, self._target = args.max_steps, math.inf
        if args.max_steps <= 0:
            self._target = math.ceil(args.num_train_epochs * len(self.train_dataset))
            args.max_steps = math.ceil(self._target * args.num_generations / (args.samples_per_step or 1))
        try:
            return super().train(resume_from_checkpoint, **kwargs)
        finally:
            args.max_steps = given
            self.source.close()
            logger.info("rollouts: %s", {k.removeprefix("async/"): int(v) for k, v in self.account().items() if v})

    def get_train_dataloader(self) -> DataLoader:
        """One tick a step: the rollouts come from the queue."""
        return DataLoader(_Ticks(), batch_size=None)

    def micro_batch(self, inputs: Any, index: int) -> list[Batch]:
        """The rollouts of this process, of those of the step."""
        batch = self.source.next(self.args.samples_per_step or 1)
        tokens = sum(len(rollout.prompt_ids) + len(rollout.token_ids) for rollout in batch.rollouts)
        self.counters["num_tokens"] += parallel.all_reduce_sum([float(tokens)], self.accelerator)[0]
        layout, budget = self.layout, self.source.token_budget
        if self.args.token_budget is not None and budget > 0:
            layout = dataclasses.replace(layout, row_tokens=min(layout.row_tokens, budget))
        return collate(batch.every_row(), pad_token_id=self.pad_token_id, layout=layout)

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `async_grpo_objective`; the mismatch of the step is added up for the guard."""
        terms = super().objective(outputs, batch)
        kl = terms.metrics["kl"]
        if self.model.training:
            self._step_kl += torch.tensor([float(kl.value), float(kl.weight)], dtype=torch.float64)
        return terms

    def before_update(self) -> None:
        """Leave the update out when policy and sampler have been too far apart for too long."""
        kl, tokens = parallel.all_reduce_sum(self._step_kl.tolist(), self.accelerator)
        self._step_kl.zero_()
        self._skipping = self.mismatch.add(kl / max(tokens, 1.0))
        if self._skipping:
            for parameter in self.model.parameters():
                parameter.grad = None

    def after_update(self, control: TrainerControl) -> None:
        """Push weights when they are due, book what was trained, and stop when enough was."""
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
            self.source.service.push_weights()  # Before the step is booked: what is written in its place gets the new version.
        if main:
            self.source.book(skipped=self._skipping)
        self._skipping = False

    def _count_groups(self, groups: set[int]) -> None:
        """The rest of a group may come with a later step: it counts once."""
        self.trained_groups += len(groups - self._new_groups)
        self._new_groups = {g for g in self._new_groups | groups if g > max(groups) - self._remembered}

    @property
    def _remembered(self) -> int:
        """Group ids this far back can still have rollouts on their way."""
        return 2 * (self.args.max_inflight_tasks + self.args.queue_maxsize)

    def postprocess_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """The window's metrics, and the account of this moment."""
        metrics = super().postprocess_metrics(metrics)
        return metrics | (self.account() if "async/staleness_mean" in metrics else {})

    # Evaluation --------------------------------------------------------------------------------------------------

    def advantages(self, generation: RolloutBatch, table: RewardTable, mode: str) -> torch.Tensor:
        """Of completions generated in this process, which is evaluation only."""
        stats = self.method.advantages(table, self.group_size(mode))
        self.reward_watch.log(generation, table, stats.totals, stats.advantages, mode)
        return stats.advantages

    def attach_logps(self, generation: RolloutBatch, mode: str) -> None:
        """Those of the engine, which is the policy itself in evaluation."""
        generation.token_columns["rollout_logp"] = self.logps_of_sampler(generation)

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_to_save(self) -> dict[str, Any]:
        """With where prompts and counts stand."""
        return super().state_to_save() | {"async": self.source.state() | {"trained_groups": self.trained_groups}}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Undo `state_to_save`."""
        super().load_saved_state(state)
        self.source.load(state["async"])
        self.trained_groups = state["async"]["trained_groups"]


class _Ticks(IterableDataset):
    """Something to count steps by."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class _StepCallback(TrainerCallback):
    """Tells the trainer when an update is about to be made, and when it was."""

    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Gradients are there."""
        self.trainer.before_update()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The step counts."""
        self.trainer.after_update(control)
