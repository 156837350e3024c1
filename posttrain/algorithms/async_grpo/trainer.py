"""`AsyncGRPOTrainer`: GRPO on rollouts that other processes write while it trains."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from posttrain.algorithms.async_grpo.config import AsyncGRPOConfig
from posttrain.algorithms.async_grpo.scoring import population_advantages
from posttrain.algorithms.async_grpo.service import RolloutService, warn_of_reward_models
from posttrain.algorithms.async_grpo.steps import NEEDS, StepPlanner, async_grpo_objective
from posttrain.data.forest import collate
from posttrain.errors import ConfigError
from posttrain.losses.advantages import weighted_total
from posttrain.models import parallel
from posttrain.report.completions import RolloutTableCallback
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch
from posttrain.rollouts.workers.ledger import DropWatch, Ledger, MismatchGuard
from posttrain.rollouts.workers.samples import RolloutSample, TaskSource, sample_rows
from posttrain.rollouts.workers.worker import check_picklable
from posttrain.training.online import OnlineTrainer
from posttrain.types import Batch, LossTerms, ModelOutputs

__all__ = ["AsyncGRPOTrainer"]

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
        tools, environment_factory: See `EpisodeParts` and the pages on tools and environments.

    Reference: AReaL, arXiv:2505.24298; DeepSeekMath, arXiv:2402.03300, equation 3.

    >>> trainer = AsyncGRPOTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", short, train_dataset=data)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[AsyncGRPOConfig]] = AsyncGRPOConfig
    takes_episodes: ClassVar[bool] = True
    needs = NEEDS
    _tag_names: ClassVar[list[str]] = ["posttrain", "async-grpo"]
    _name: ClassVar[str] = "AsyncGRPO"
    _suffix: ClassVar[str] = "AsyncGRPO"
    args: AsyncGRPOConfig

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        *,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        engine_factory: Callable[[], RolloutEngine] | None = None,
        **kwargs: Any,
    ) -> None:
        sent = {name: kwargs.get(name) for name in ("tools", "environment_factory", "reward_processing_classes")}
        sent |= {"reward_funcs": reward_funcs, "engine_factory": engine_factory}
        if rollout_worker is None:
            check_picklable({**sent, "processing_class": processing_class})
            warn_of_reward_models(reward_funcs)
        if kwargs.get("rollout_func") is not None:
            raise ConfigError(
                "rollout_func runs in the trainer; rollouts are written elsewhere here. Give rollout_worker."
            )
        self.given = {**sent, "rollout_worker": rollout_worker, "weight_transfer": weight_transfer}
        super().__init__(
            model, reward_funcs, args, train_dataset=train_dataset, processing_class=processing_class, **kwargs
        )
        if "DEEPSPEED" in str(self.accelerator.distributed_type):
            raise ConfigError("asynchronous GRPO runs on one process, DDP or FSDP2, not on DeepSpeed.")
        if rollout_worker is not None and weight_transfer is None:
            logger.warning(
                "rollout_worker without weight_transfer: it loads what lies in shared memory, or stays as it is."
            )
        args = self.args
        self.source = TaskSource(self.train_dataset, args.num_generations, args.seed, args.shuffle_dataset)
        self.ledger, self.drops = Ledger(), DropWatch(args.max_staleness)
        self.mismatch = MismatchGuard()
        self.trained_groups: int = 0
        self._new_groups: set[int] = set()
        self.service = self._make_service()
        self.planner = self._make_planner()
        self._step_kl = torch.zeros(2, dtype=torch.float64)
        self._skipping = False
        self.add_callback(_Steps(self))
        if args.log_completions:
            shown = {"shown": args.num_completions_to_print, "unique": args.log_unique_prompts}
            rows = args.samples_per_step or 1
            self.add_callback(RolloutTableCallback(self.record, self.rewards.names, rows=rows, **shown))

    def _make_service(self) -> RolloutService:
        return RolloutService(
            self.args,
            self.accelerator,
            self.given,
            source=self.source,
            ledger=self.ledger,
            tokenizer=self.processing_class,
            pad_token_id=self.pad_token_id,
            sync=self.weight_sync,
            model=lambda: self.model,
            wrapped=lambda: self.model_wrapped,
            sampling=lambda: self.sampling("train"),
            step=lambda: self.state.global_step,
            log=self.log_metrics_now,
        )

    def _make_planner(self) -> StepPlanner:
        return StepPlanner(
            self.args,
            self.accelerator,
            self.service,
            ledger=self.ledger,
            drops=self.drops,
            rewards=self.rewards,
            watch=self.reward_watch,
            tokenizer=self.processing_class,
            context=self.context,
            step=lambda: self.state.global_step,
            log=self.log_metrics_now,
            add_completions=lambda rows: self.record.add_completions(rows),
        )

    @property
    def worker(self) -> Any:
        """Writes rollouts; None before the first step, and on processes other than the main one."""
        return self.service.worker

    @property
    def transfer(self) -> Any:
        """Takes weights to the engines; None before the first step."""
        return self.service.transfer

    @property
    def version(self) -> int:
        """Of the weights that were pushed last."""
        return self.service.version

    def account(self) -> dict[str, float]:
        """Where all rollouts are, in one moment: ``produced = trained + dropped + in_flight``."""
        return self.planner.account()

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
            self.service.close()
            self.planner.held = []
            logger.info("rollouts: %s", {k.removeprefix("async/"): int(v) for k, v in self.account().items() if v})

    def get_train_dataloader(self) -> DataLoader:
        """One tick a step: the rollouts come from the queue."""
        return DataLoader(_Ticks(), batch_size=None)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[list[Batch]], None]:
        """The batches of one optimiser step; workers are started before the first."""
        self._window_start = time.perf_counter()
        for _ in itertools.islice(epoch_iterator, num_batches):
            pass
        self.service.serve()
        batches = self._batches(self.planner.next_step())
        self.denominators = self._count([batches])
        return [batches], None

    def _batches(self, shares: list[list[RolloutSample]]) -> list[Batch]:
        """Forward passes of this process; ``shares`` are the samples of each process."""
        self.counters["num_tokens"] += sum(len(sample) for share in shares for sample in share)
        rows, layout, budget = (
            sample_rows(shares[self.accelerator.process_index]),
            self.layout,
            self.planner.token_budget,
        )
        if self.args.token_budget is not None and budget > 0:
            layout = dataclasses.replace(layout, row_tokens=min(layout.row_tokens, budget))
        return collate(rows, pad_token_id=self.pad_token_id, layout=layout)

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `async_grpo_objective`; the mismatch of the step is added up for the guard."""
        terms = async_grpo_objective(outputs, batch, self.args)
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

    def after_update(self, control: Any) -> None:
        """Push weights when they are due, book what was trained, and stop when enough was."""
        main = self.accelerator.is_main_process
        if main and not self._skipping:
            self._count_groups({trajectory.group_id for trajectory in self.planner.held})
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
            self.service.push_weights()  # Before the step is booked: what is written in its place gets the new version.
        if main:
            self._book()
        self._skipping = False

    def _count_groups(self, groups: set[int]) -> None:
        """The rest of a group may come with a later step: it counts once."""
        self.trained_groups += len(groups - self._new_groups)
        self._new_groups = {g for g in self._new_groups | groups if g > max(groups) - self._remembered}

    def _book(self) -> None:
        if self._skipping:
            self.ledger.drop(self.ledger.held, "skipped", "held")
            if self.service.owns_workers:
                with self.worker.lock:
                    drained = self.worker.rollout_buffer.drain()
                    self.ledger.drop(len(drained), "skipped", "waiting")
                self.planner.held += drained
        else:
            self.ledger.train()
        for trajectory in self.planner.held:
            self.planner.close_group(trajectory.group_id)
        self.planner.held = []
        self.worker.audit() if self.service.owns_workers else self.ledger.audit()

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
        totals = weighted_total(table.values, table.weights)
        size = self.group_size(mode)
        found = torch.cat([population_advantages(group) for group in totals.view(-1, size)])
        self.reward_watch.log(generation, table, totals, found, mode)
        return found

    def attach_logps(self, generation: RolloutBatch, mode: str) -> None:
        """Those of the engine, which is the policy itself in evaluation."""
        generation.token_columns["rollout_logp"] = [list(rollout.logp) for rollout in generation.rollouts]

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_to_save(self) -> dict[str, Any]:
        """Where prompts and counts stand; rollouts under way are asked for again by whoever resumes."""
        lock = self.worker.lock if self.service.owns_workers else self.ledger.lock
        with lock:
            mine = {"source": self.source.state(), "ledger": self.ledger.state()}
        mine |= {"version": self.version, "trained_groups": self.trained_groups}
        return super().state_to_save() | {"async": mine}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Undo `state_to_save`."""
        super().load_saved_state(state)
        saved = state["async"]
        self.source.load(saved["source"])
        self.ledger.load(saved["ledger"])
        self.service.version, self.trained_groups = saved["version"], saved["trained_groups"]


class _Ticks(IterableDataset):
    """Something to count steps by."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class _Steps(TrainerCallback):
    """Tells the trainer when an update is about to be made, and when it was."""

    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gradients are there."""
        self.trainer.before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step counts."""
        self.trainer.after_update(control)
