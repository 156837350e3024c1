"""`GRPOTrainer`: compare the completions of one prompt with each other, and move towards the better ones."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from posttrain.algorithms.grpo.config import GRPOConfig
from posttrain.algorithms.grpo.objective import grpo_needs, grpo_objective
from posttrain.algorithms.online import OnlineTrainer
from posttrain.errors import ConfigError
from posttrain.losses.advantages import group_advantages
from posttrain.rewards.base import RewardTable
from posttrain.rollouts.generation import Generation
from posttrain.types import Batch, LossTerms, ModelOutputs

__all__ = ["GRPOTrainer"]


class GRPOTrainer(OnlineTrainer):
    """Group-relative policy optimisation: no value model; a completion's baseline is its group's mean.

    Args:
        model: Hub id, folder, model or peft model.
        reward_funcs: A callable ``f(prompts, completions, **columns) -> list[float | None]``, a reward model, or several.
        args: `GRPOConfig`.
        rollout_engine: An engine object; None makes the one that ``args.rollout_engine`` names.

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

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *,
        tools: list | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        **kwargs: Any,
    ) -> None:
        for name, value in {
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
        }.items():
            if value:
                raise ConfigError(f"{name} is not available in this version of GRPOTrainer. Leave it out.")
        super().__init__(model, reward_funcs, args, **kwargs)
        self.needs = grpo_needs(self.args)

    def advantages(self, generation: Generation, table: RewardTable, mode: str) -> Tensor:
        """A completion's reward against its group's mean, divided by a spread."""
        args = self.args
        stats = group_advantages(
            table.values,
            table.weights,
            self.group_size(mode),
            scale_rewards=str(args.scale_rewards),
            aggregation=args.multi_objective_aggregation,
            min_group_std=args.min_group_std,
        )
        spread = {"reward_std": stats.reward_std, "frac_reward_zero_std": stats.zero_std_share}
        self.log_rewards(table, stats.totals, stats.advantages, mode, **spread)
        return stats.advantages

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `grpo_objective`."""
        return grpo_objective(outputs, batch, self.args)
