"""`GRPOTrainer`: compare the completions of one prompt with each other, and move towards the better ones."""

from __future__ import annotations

import importlib
import logging
from collections import deque
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.algorithms.episodes import EpisodeMixin
from posttrain.algorithms.grpo.combinations import check_correction
from posttrain.algorithms.grpo.config import GRPOConfig
from posttrain.algorithms.grpo.entropy_control import EntropyControlMixin
from posttrain.algorithms.grpo.objective import grpo_needs, grpo_objective
from posttrain.algorithms.online import OnlineTrainer
from posttrain.checks.reward_range import RunningReward
from posttrain.errors import ConfigError
from posttrain.losses.advantages import AdvantageStats, group_advantages
from posttrain.metrics import MetricBuffer, mean
from posttrain.models.forward import causal_lm
from posttrain.models.fp32_head import cast_head_to_fp32
from posttrain.models.reference import active_dropout
from posttrain.report.callbacks.rollout_table import CompletionsHubCallback, RolloutTableCallback
from posttrain.report.callbacks.sync_reference import SyncRefModelCallback
from posttrain.rewards.base import RewardTable
from posttrain.rollouts.generation import Generation
from posttrain.types import Batch, LossTerms, ModelOutputs

__all__ = ["GRPOTrainer"]

logger = logging.getLogger(__name__)

TINY, MANY = 1e-3, 0.2  # Groups this narrow against all rewards are noise; more than this share of them is told.
ENOUGH, LOOKED_AT = 5, 64  # Groups before anything is said of their share, and the latest that it is a share of.
PADDING = -1e9  # No entropy is negative.


class GRPOTrainer(EntropyControlMixin, EpisodeMixin, OnlineTrainer):
    """Group-relative policy optimisation: no value model; a completion's baseline is its group's mean.

    Args:
        model: Hub id, folder, model or peft model.
        reward_funcs: A callable ``f(prompts, completions, **columns) -> list[float | None]``, a reward model, or several.
        args: `GRPOConfig`.
        rollout_engine: An engine object; None makes the one that ``args.rollout_engine`` names.
        tools, rollout_func, environment_factory: See `EpisodeMixin` and the pages on tools and environments.

    Reference: DeepSeekMath, arXiv:2402.03300, equations 3 and 4.

    >>> def short(completions, **kwargs):
    ...     return [-len(text) / 100 for text in completions]
    >>> trainer = GRPOTrainer(model, short, train_dataset=prompts)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[GRPOConfig]] = GRPOConfig
    _tag_names: ClassVar[list[str]] = ["posttrain", "grpo"]
    _name: ClassVar[str] = "GRPO"
    _suffix: ClassVar[str] = "GRPO"
    args: GRPOConfig
    _rows: list[dict[str, Any]] = []  # noqa: RUF012 - replaced, never changed

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> None:
        if type(self).__module__.split(".")[0] != "posttrain":
            # The one door to compat/: nothing stands before the calls of a trainer that overrides none of TRL's names.
            importlib.import_module("posttrain.compat.grpo_overrides").adapt(self)
        data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class}
        kwargs |= data | {"reward_processing_classes": reward_processing_classes, "callbacks": callbacks}
        super().__init__(model, reward_funcs, args, **kwargs)
        self.check_turns()
        args = self.args
        self.needs = grpo_needs(args)
        # A threshold over the micro-batch, and a mean that is one of the micro-batch, want it in one pass.
        self.together = args.top_entropy_quantile < 1.0 or args.loss_type == "bnpo"
        self._narrow_told, self._totals = False, RunningReward()
        self._spreads_seen: deque[float] = deque(maxlen=LOOKED_AT)
        self.start_entropy_control()
        if not self.engine_is_policy:
            check_correction(args)
        if args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(self.reference, self.accelerator))
        self._log_completions()
        if dropout := active_dropout(self.model):
            logger.warning(
                "%s is active: log-probs of the policy carry its noise, and those it is compared with do not. Set "
                "disable_dropout=True.", dropout,
            )  # fmt: skip

    def check_turns(self) -> None:
        """Where a subclass must be refused once it is known whether rollouts have several turns."""

    def _log_completions(self) -> None:
        args = self.args
        if args.log_completions:
            options = {"shown": args.num_completions_to_print, "unique": args.log_unique_prompts}
            rows = args.generation_batch_size or 1
            self.add_callback(RolloutTableCallback(self.record, self.rewards.names, rows=rows, **options))
        if args.log_completions_hub_repo:
            self.add_callback(CompletionsHubCallback(args.log_completions_hub_repo))

    def _prepare_model(self, model: Any, args: Any, peft_config: Any) -> Any:
        model = super()._prepare_model(model, args, peft_config)
        if args.cast_lm_head_to_fp32:
            cast_head_to_fp32(causal_lm(model))
        return model

    def advantages(self, generation: Generation, table: RewardTable, mode: str) -> Tensor:
        """A completion's reward against its group's mean, divided by a spread."""
        args, size = self.args, self.group_size(mode)
        stats = group_advantages(
            table.values,
            table.weights,
            size,
            scale_rewards=str(args.scale_rewards),
            aggregation=args.multi_objective_aggregation,
            min_group_std=args.min_group_std,
        )
        scored = stats.totals[~stats.totals.isnan()]
        whole = float(scored.std()) if scored.numel() > 1 else 0.0
        spread = {"reward_std": whole, "frac_reward_zero_std": stats.zero_std_share}
        divided = args.scale_rewards != "none" or args.multi_objective_aggregation != "sum_then_normalize"
        advantages = self.bounded(stats.advantages, mode) if divided else stats.advantages
        self.log_rewards(table, stats.totals, advantages, mode, **spread)
        if mode == "train":
            self._warn_of_noise(stats)
        if args.mask_zero_variance_groups and size > 1:
            flat = self.flat(table, mode)  # Also where nothing was scored.
            mine = flat.repeat_interleave(size)[table.start : table.start + len(generation.rollouts)]
            generation.left_out |= set(mine.nonzero().flatten().tolist())
            self.log_metrics_now({"groups/masked": mean(flat.float())}, mode)
        return advantages

    def _warn_of_noise(self, stats: AdvantageStats) -> None:
        """Tell of groups that are narrow against all rewards so far: a generation may hold a single group."""
        self._totals.add(stats.totals.tolist())
        self._spreads_seen.extend(stats.group_std[~stats.group_std.isnan()].tolist())
        known, whole = len(self._spreads_seen), self._totals.std
        narrow = sum(spread > 0 and self.args.min_group_std <= spread < TINY * whole for spread in self._spreads_seen)
        if self._narrow_told or self.args.scale_rewards != "group" or known < ENOUGH or narrow <= MANY * known:
            return
        self._narrow_told = True
        logger.warning(
            "%d of the last %d groups spread less than a thousandth of the rewards' std so far (%.3g), and scale_rewards='group' "
            "blows that up to full-size updates. If it is noise, set min_group_std, or scale_rewards='batch'.",
            narrow, known, whole,
        )  # fmt: skip

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `grpo_objective`."""
        coefficient = None if self.controller is None else self.controller.applied
        shared = (
            self.accelerator.num_processes > 1 and self.model.training
        )  # In evaluation passes are not equally many.
        gather = self._gather_entropies if shared else None
        return grpo_objective(outputs, batch, self.args, entropy_coef=coefficient, gather=gather)

    def _gather_entropies(self, values: Tensor) -> Tensor:
        """Of all ranks, whose counts differ; one collective in every micro-batch, of which all have equally many."""
        padded = self.accelerator.pad_across_processes(values, dim=0, pad_index=PADDING)  # type: ignore[arg-type]
        gathered = self.accelerator.gather(padded)
        assert isinstance(gathered, torch.Tensor)
        return gathered[gathered != PADDING]

    # Attributes that callbacks and reward functions read, by TRL's names ---------------------------------------------

    def completion_rows(self, generation: Generation, table: RewardTable) -> list[dict[str, Any]]:
        """As the parent's, and remembered for `_logs`."""
        self._rows = super().completion_rows(generation, table)
        return self._rows

    @property
    def _metrics(self) -> dict[str, MetricBuffer]:
        return self.buffers

    @property
    def _logs(self) -> dict[str, Any]:
        names = self.rewards.names
        own = {"step", "prompt", "completion", "advantage", *names}
        columns = {key: [row.get(key) for row in self._rows] for row in self._rows for key in row}
        return {
            "prompt": columns.get("prompt", []),
            "completion": columns.get("completion", []),
            "rewards": {name: columns.get(name, []) for name in names},
            "advantages": columns.get("advantage", []),
            "extra": {key: values for key, values in columns.items() if key not in own},
        }

    @property
    def _buffered_inputs(self) -> Any:
        return self._buffer

    @_buffered_inputs.setter
    def _buffered_inputs(self, value: Any) -> None:
        if value is not None:
            raise ConfigError("_buffered_inputs holds rows of token forests; set it to None to generate again.")
        self._buffer = None

    @property
    def reward_funcs(self) -> list[Any]:
        """The reward functions, reward models as callables."""
        return self.rewards.functions

    @property
    def reward_func_names(self) -> list[str]:
        """Their names, unique."""
        return self.rewards.names

    @property
    def reward_weights(self) -> Tensor:
        """``(K,)`` weights; may be set while training."""
        return self.rewards.weights

    @reward_weights.setter
    def reward_weights(self, weights: Any) -> None:
        weights = torch.as_tensor(weights, dtype=torch.float32)
        if weights.shape != self.rewards.weights.shape:
            raise ConfigError(
                f"reward_weights has shape {tuple(weights.shape)} for {len(self.rewards.names)} reward functions. Give one each."
            )
        self.rewards.weights = weights

    @property
    def ref_model(self) -> nn.Module | None:
        """The frozen copy, where there is one; with adapters the reference is the model with its adapter off."""
        return None if self.reference is None else self.reference.copy
