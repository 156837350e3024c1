"""A*-PO: trains each completion's log-ratio to equal its reward minus the optimal value of its prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from posttrain.errors import check_rules
from posttrain.fields import NonNegativeInt, PositiveFloat, PositiveInt, config, option
from posttrain.losses.advantages import weighted_total
from posttrain.losses.reduce import sequence_sum
from posttrain.methods.base import SAMPLES, Method
from posttrain.methods.online_config import OnlineConfig
from posttrain.metrics import mean
from posttrain.rewards.runner import transform_names
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, Ranks, State

if TYPE_CHECKING:
    from posttrain.rewards.runner import RewardTable
    from posttrain.rollouts.batch import RolloutBatch
    from posttrain.types import LogProbs

logger = logging.getLogger(__name__)

OF_OTHERS = ("rank", "zscore", "running")


@config
class A2POConfig(OnlineConfig):
    """Arguments of `A2POTrainer`. Training samples one completion per prompt and compares the completion's reward with the
    prompt's value.

    Reference: Accelerating RL for LLM reasoning with optimal advantage regression, arXiv:2505.20686.
    """

    _least_generations: ClassVar[int] = 1

    learning_rate: float = option(5e-5, "Peak learning rate.")
    num_generations: PositiveInt = option(
        1,
        "Number of completions per prompt in training. It must be 1, because the baseline is the prompt's value and not the "
        "mean reward of a group.",
    )
    max_prompt_length: PositiveInt | None = option(
        512, "Maximum number of tokens of a prompt. The beginning of a longer prompt is removed. None: no limit."
    )
    temperature: PositiveFloat = option(1.0, "Sampling temperature, above 0. Log-probs of the loss use temperature 1.")
    max_completion_length: PositiveInt = option(
        256, "Maximum number of tokens per completion, including the end token."
    )
    top_k: NonNegativeInt | None = option(  # type: ignore[assignment]
        None, "Sample only from the k most likely tokens. None or 0 disables it."
    )
    num_value_samples: PositiveInt = option(
        8,
        "Number of completions of the reference model from which a prompt's value is estimated, at least 1. A larger number "
        "makes the value less noisy, and takes more time before training.",
    )
    beta1: PositiveFloat = option(
        0.5,
        "Temperature used to estimate the value; must be above 0. For beta1 near 0, the value is the reward of the best "
        "sample. For large beta1, it is the mean reward.",
    )
    filter_all_incorrect: bool = option(True, "Exclude training prompts that no sample of the reference model solved.")
    beta2: PositiveFloat = option(
        1e-3,
        "Strength of the regularization towards the reference model, above 0. The loss is the squared difference of "
        "beta2 times the log-ratio and the advantage, so a larger value keeps the policy closer to the reference.",
    )

    def __post_init__(self) -> None:
        self.top_k = self.top_k or 0
        # Check this before the parent class does. The parent's error would suggest setting beta, which A2PO does not
        # support either.
        check_rules(
            self,
            [("sync_ref_model", not self.sync_ref_model, "must be False: values are estimated with a fixed reference")],
        )
        super().__post_init__()
        rules = {
            "num_generations": (
                self.num_generations == 1,
                "must be 1: the baseline is the value of the prompt, not a group",
            ),
            "beta": (self.beta == 0, "must be 0.0: use beta2 for the regularization towards the reference"),
            "epsilon": (self.epsilon == 0.2 and self.epsilon_high is None, "is not supported: the loss has no clip"),
            "num_iterations": (self.num_iterations == 1, "must be 1: the regression has no importance ratio"),
            "dynamic_sampling": (self.dynamic_sampling == 0, "must be 0: one completion per prompt has no variance"),
            "reward_transform": (
                not transform_names(self.reward_transform) & set(OF_OTHERS),
                f"contains one of {', '.join(OF_OTHERS)}, which depend on other rewards, but values and rewards need "
                "the same scale. Use clip, log1p or tanh",
            ),
        }
        check_rules(self, ((name, *rule) for name, rule in rules.items()))


def a2po_objective(out: ModelOutputs, batch: Batch, cfg: A2POConfig) -> LossTerms:
    """Compute ``mean_i (beta2 sum_t (logp - ref_logp) - (r_i - V*_i))^2`` over completions that have a reward and a
    value.

    Reference: A*-PO, arXiv:2505.20686, equation 6.
    """
    forest = batch.by_sequence
    implicit = cfg.beta2 * sequence_sum(out.logp - batch.ref_logp, *forest)
    judged = _judged(batch)
    metrics = {"implicit_reward": mean(implicit, judged), "advantage": mean(batch.advantages, judged)}
    terms = (implicit - batch.advantages).square()
    return LossTerms(terms, judged, "token", count="judged", metrics=metrics)


def _judged(batch: Batch) -> Tensor:
    """Return a bool tensor ``(S,)``. It is True for completions with tokens in the loss. Completions without a reward or
    without a value have no tokens in the loss.
    """
    return sequence_sum(batch.loss_mask.float(), *batch.by_sequence) > 0


class A2PO(Method[A2POConfig]):
    """A*-PO: trains the log-ratio of each completion to equal its reward minus the optimal value of its prompt.

    Reference: Accelerating RL for LLM reasoning with optimal advantage regression, arXiv:2505.20686.
    """

    config_class = A2POConfig
    traits = replace(SAMPLES, own_rollouts=True, needs=frozenset({"logp"}), compares_reference=True)

    @property
    def temperature(self) -> float:
        """Temperature of the log-probs in the loss. Always 1, because the loss does not compare log-probs with the
        sampler's.
        """
        return 1.0

    def needs_old_logp(self, outlived: bool) -> bool:
        """Return False. The squared loss has no importance ratio, so it does not use log-probs of older weights."""
        return False

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Compute each completion's reward minus the value ``V*`` of its prompt. Exclude completions without a reward or a
        value.
        """
        values = torch.tensor(ranks.gather([value for (value,) in logps["v_star"]]))
        totals = weighted_total(rewards.values, rewards.weights)
        unknown = (totals - values).isnan()
        mine = unknown[rewards.start : rewards.start + len(rollouts.rollouts)]
        return Advantages(
            (totals - values).masked_fill(unknown, 0.0),
            totals,
            rewards.start,
            token_columns={name: column for name, column in logps.items() if name != "v_star"},
            left_out=frozenset(mine.nonzero().flatten().tolist()),
            metrics={"v_star": mean(values, ~values.isnan())},
        )

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the loss with `a2po_objective`."""
        return a2po_objective(outputs, batch, self.cfg)

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count the completions with tokens in the loss. The loss is divided by this number."""
        return {"judged": float(sum(int(_judged(batch).sum()) for batch in batches))}
