"""`A2POTrainer`: estimate each prompt's optimal value once, then regress one completion's log-ratio on its advantage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import torch
from torch import Tensor, nn

from posttrain.algorithms.a2po.config import A2POConfig
from posttrain.algorithms.a2po.estimate import ValueMixin, named_sets
from posttrain.algorithms.a2po.values import ValueCache
from posttrain.algorithms.online import OnlineTrainer
from posttrain.errors import DataError
from posttrain.losses.advantages import weighted_total
from posttrain.losses.reduce import sequence_sum
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.reference import Reference, disable_dropout_in_model
from posttrain.rewards.base import RewardTable
from posttrain.rollouts.generation import Generation
from posttrain.types import Batch, LossTerms, ModelOutputs, Rollout, Sampling

__all__ = ["A2POTrainer", "a2po_objective"]

logger = logging.getLogger(__name__)


def a2po_objective(out: ModelOutputs, batch: Batch, cfg: A2POConfig) -> LossTerms:
    """``mean_i (beta2 sum_t (logp - ref_logp) - (r_i - V*_i))^2`` over the completions that were scored.

    Reference: A*-PO, arXiv:2505.20686, equation 6.
    """
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    implicit = cfg.beta2 * sequence_sum(out.logp - batch.ref_logp, *forest)
    judged = _judged(batch)
    metrics = {"implicit_reward": mean(implicit, judged), "advantage": mean(batch.advantages, judged)}
    terms = (implicit - batch.advantages).square()
    return LossTerms(terms, judged, "token", count="judged", metrics=metrics)


def _judged(batch: Batch) -> Tensor:
    """Completions with a reward: the others carry no token of loss, ``(S,)`` bool."""
    return sequence_sum(batch.loss_mask.float(), batch.loss_mask, batch.sequence, batch.num_sequences) > 0


class A2POTrainer(ValueMixin, OnlineTrainer):
    """A*-PO: no group and no value model; a completion is measured against its prompt's value under the optimal policy.

    Before the first step, ``num_value_samples`` completions of the frozen reference give each prompt's
    ``V* = beta1 log mean exp(r / beta1)``; they are kept in ``output_dir/v_star.jsonl`` and in checkpoints, by what they
    depend on. Then each step samples one completion a prompt. An experimental method.

    Args:
        model: Hub id, folder, model or peft model.
        reward_funcs: As in `GRPOTrainer`.
        args: `A2POConfig`.
        train_dataset: Rows with ``prompt``; not a stream, since every prompt needs its value first.
        eval_dataset: One set, or several by name.

    Reference: Accelerating RL for LLM reasoning with optimal advantage regression, arXiv:2505.20686.
    """

    config_class: ClassVar[type[A2POConfig]] = A2POConfig
    cuts_prompts = True
    _tag_names: ClassVar[list[str]] = ["posttrain", "a2po"]
    _name: ClassVar[str] = "A2PO"
    _suffix: ClassVar[str] = "A2PO"
    args: A2POConfig

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: A2POConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Any = None,
        optimizers: tuple = (None, None),
        **kwargs: Any,
    ) -> None:
        for name, dataset in named_sets({"train_dataset": train_dataset, "eval_dataset": eval_dataset}):
            if isinstance(dataset, datasets.IterableDataset):
                raise DataError(
                    f"{name} is a stream, and A2PO estimates the value of every prompt first. Give a Dataset."
                )
        data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class}
        self._own_engine = kwargs.get("rollout_engine") is None
        super().__init__(model, reward_funcs, args, callbacks=callbacks, optimizers=optimizers, **data, **kwargs)
        disable_dropout_in_model(self.model)  # The log-ratio would carry its noise.
        self.cache: ValueCache | None = None
        self._restored: dict[str, Any] = {}
        self._filtered = False
        self._cut_told = False

    def make_reference(self) -> Reference:
        """Always: values and log-ratios are relative to it."""
        return Reference(self.model, fresh_adapter=self.fresh_adapter)

    # Stage 2: one completion a prompt ----------------------------------------------------------------------------------

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """As every online trainer's; long prompts lose their beginning, so that the question's end stays."""
        limit = self.args.max_prompt_length
        if limit is not None and any(len(prompt) > limit for prompt in prompts):
            if not self._cut_told:
                logger.warning("prompts of more than max_prompt_length=%d tokens lose their beginning.", limit)
            self._cut_told = True
            prompts = [prompt[-limit:] for prompt in prompts]
        return super().sample(prompts, sampling)

    def advantages(self, generation: Generation, table: RewardTable, mode: str) -> Tensor:
        """``r - V*``; a completion without a reward (or a prompt without a value) is left out."""
        assert self.cache is not None
        mine = [self.cache.value(example, self.args.beta1) for example in generation.examples]
        values = torch.tensor(parallel.all_gather_objects(mine, self.accelerator))
        totals = weighted_total(table.values, table.weights)
        advantages = totals - values
        unknown = advantages.isnan()
        local = unknown[table.start : table.start + len(generation.rollouts)]
        generation.left_out |= set(local.nonzero().flatten().tolist())
        advantages = advantages.masked_fill(unknown, 0.0)
        self.log_rewards(table, totals, advantages, mode)
        self.log_metrics_now({"v_star": mean(values, ~values.isnan())}, mode)
        return advantages

    def needs_old_logp(self, mode: str) -> bool:
        """Never: the regression has no importance ratio."""
        return False

    def named_counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Completions that were scored: what the loss is a mean over."""
        return {"judged": float(sum(int(_judged(batch).sum()) for batch in batches))}

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `a2po_objective`."""
        return a2po_objective(outputs, batch, self.args)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_to_save(self) -> dict[str, Any]:
        """With the rewards that values are made of."""
        values = None if self.cache is None else {"run": self.cache.run, "rewards": self.cache.rewards}
        return super().state_to_save() | {"values": values}
