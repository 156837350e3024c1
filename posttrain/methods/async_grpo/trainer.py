"""`AsyncGRPOTrainer`: GRPO on rollouts that other processes write while it trains."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from posttrain.data.forest import collate
from posttrain.data.samplers import PromptStream
from posttrain.errors import ConfigError
from posttrain.loop.config import attributes, takes
from posttrain.loop.online import OnlineTrainer
from posttrain.losses.advantages import weighted_total
from posttrain.losses.policy import clip_metrics, clipped, importance_log_ratio, k3, rollout_correction
from posttrain.losses.reduce import spread
from posttrain.methods.async_grpo.config import AsyncGRPOConfig
from posttrain.methods.async_grpo.rollouts import AsyncRollouts, RolloutService, warn_of_reward_models
from posttrain.methods.async_grpo.worker import population_advantages
from posttrain.metrics import Metric, maximum, mean
from posttrain.models import parallel
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch
from posttrain.rollouts.episodes.harness import take_harness
from posttrain.rollouts.workers.ledger import Ledger, MismatchGuard
from posttrain.rollouts.workers.samples import TaskSource
from posttrain.rollouts.workers.worker import check_picklable
from posttrain.types import Batch, LossTerms, ModelOutputs

logger = logging.getLogger(__name__)

NEEDS = frozenset({"logp", "entropy"})


def async_grpo_objective(out: ModelOutputs, batch: Batch, cfg: AsyncGRPOConfig) -> LossTerms:
    """``-min(rho A, clip(rho, 1 - eps, 1 + eps_high) A)``, per token, divided by the tokens of the whole step.

    ``is_correction=None``: ``rho = pi / mu`` with the log-probs ``log mu`` of the weights that sampled each token. Otherwise
    ``rho = pi / pi_start`` (1, with its gradient, since all passes of a step see the same weights), and the term is weighted
    by ``pi_start / mu``, bounded: decoupled PPO, whose proximal policy costs no pass of its own here.

    Args:
        out: Log-probs and entropies of the policy.
        batch: With ``rollout_logp`` and ``advantages``.
        cfg: `AsyncGRPOConfig`.

    Reference: PPO, arXiv:1707.06347, equation 7; AReaL, arXiv:2505.24298, equation 5.
    """
    assert out.logp is not None and batch.rollout_logp is not None and batch.advantages is not None
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    advantages = spread(batch.advantages, batch.sequence)
    old = batch.rollout_logp if cfg.is_correction is None else None
    log_ratio = importance_log_ratio(out.logp, old, *forest, level="token")
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    terms = clipped(log_ratio, advantages, epsilon=cfg.epsilon, epsilon_high=high, delta=cfg.delta)
    ratio = (out.logp - batch.rollout_logp).detach().exp()
    metrics: dict[str, Metric] = {
        "entropy": mean(out.entropy, batch.loss_mask),  # type: ignore[arg-type]
        "ratio": mean(ratio, batch.loss_mask),
        "ratio/max": maximum(ratio, batch.loss_mask),
        "kl": mean(k3(batch.rollout_logp, out.logp.detach()), batch.loss_mask),
    }
    metrics |= clip_metrics(log_ratio, advantages, *forest, epsilon=cfg.epsilon, epsilon_high=high, delta=cfg.delta)
    if cfg.is_correction is not None:
        bounds = {"clip_max": cfg.is_clip_max, "clip_min": cfg.is_clip_min}
        weight = rollout_correction(out.logp.detach(), batch.rollout_logp, *forest, mode=cfg.is_correction, **bounds)
        terms = terms * weight
        metrics |= {
            "sampling/importance_sampling_ratio/mean": mean(weight, batch.loss_mask),
            "sampling/importance_sampling_ratio/max": maximum(weight, batch.loss_mask),
            "sampling/frac_masked": mean((weight == 0).float(), batch.loss_mask),
        }
    return LossTerms(
        terms,
        batch.loss_mask,
        "token",
        sequence=batch.sequence,
        num_sequences=batch.num_sequences,
        metrics=metrics,
    )


@attributes(epsilon_low="args.epsilon", epsilon_high="args.epsilon_high or args.epsilon")
@attributes("num_generations", "temperature", "max_completion_length", reward_funcs="rewards.functions", fixed=True)
class AsyncGRPOTrainer(OnlineTrainer, config=AsyncGRPOConfig):
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

    takes_episodes: ClassVar[bool] = True
    takes_images: bool = True
    needs = NEEDS
    _tag_names: ClassVar[list[str]] = ["posttrain", "async-grpo"]
    args: AsyncGRPOConfig
    source: AsyncRollouts

    @takes(
        "model, reward_funcs, args, train_dataset, processing_class, callbacks, optimizers, peft_config, tools, "
        "environment_factory, rollout_worker, weight_transfer"
    )
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
        rollout_worker, kwargs["harness"], reward_funcs = take_harness(
            rollout_worker, kwargs.get("harness"), reward_funcs
        )
        sent = {
            name: kwargs.get(name) for name in ("tools", "environment_factory", "reward_processing_classes", "harness")
        }
        sent |= {"reward_funcs": reward_funcs, "engine_factory": engine_factory}
        if rollout_worker is None:
            check_picklable({**sent, "processing_class": processing_class})
            warn_of_reward_models(reward_funcs)
        if kwargs.get("rollout_func") is not None:
            raise ConfigError(
                "rollout_func runs in the trainer; rollouts are written elsewhere here. Give rollout_worker."
            )
        self.given = {**sent, "rollout_worker": rollout_worker, "weight_transfer": weight_transfer}
        # What tools and environments show comes after the prompt, and a sample has pictures in its prompt alone.
        self.takes_images = not (kwargs.get("tools") or kwargs.get("environment_factory"))
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
        self.mismatch = MismatchGuard()
        self.trained_groups: int = 0
        self._new_groups: set[int] = set()
        self._step_kl = torch.zeros(2, dtype=torch.float64)
        self._skipping = False
        self.add_callback(_Steps(self))

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
