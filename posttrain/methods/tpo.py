"""TPO: a loss on pairs of answers, plus the NLL of a gold answer. It needs no reference model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from posttrain.errors import ConfigError, check_rules
from posttrain.fields import NonNegativeFloat, PositiveFloat, Share, config, option
from posttrain.losses.divergence import mean_logp
from posttrain.losses.preference import TPO_LOSSES
from posttrain.methods.preference import (
    PAIRS,
    AnswerConfig,
    ReferenceFree,
    answer_mask,
    branch_sums,
    likelihood_terms,
    reference_free_metrics,
)
from posttrain.metrics import mean
from posttrain.types import Batch, LossTerms, ModelOutputs, State


@config
class TPOConfig(AnswerConfig):
    """Arguments of `TPOTrainer`, which trains on triples of a chosen, a rejected and a gold answer."""

    learning_rate: float = option(
        5e-7, "Peak learning rate. The default is for full fine-tuning. Use about ten times this value for LoRA."
    )
    loss_type: Literal["sigmoid", "hinge", "ipo", "tpo-l"] = option(
        "sigmoid",
        "Loss of the chosen and the rejected answer. 'sigmoid': DPO's loss without a reference model, on sums of log-probs. "
        "'hinge': like 'sigmoid', but pairs with a gap above 1 / beta have no gradient. 'ipo': moves the difference of mean "
        "log-probs per token to a target value. 'tpo-l': like 'sigmoid', but on mean log-probs per token and with the margin "
        "tpo_l_gamma.",
    )
    beta: PositiveFloat = option(
        0.01,
        "Scale of the reward, above 0. For 'ipo', the target gap is 1 / (2 beta). Losses on mean log-probs per token need a "
        "beta that is one or two orders of magnitude larger than losses on sums.",
    )
    label_smoothing: Share = option(
        0.0,
        "Probability that chosen and rejected are exchanged in the data, from 0 to 1. Only loss_type='sigmoid' and 'tpo-l' "
        "use it. With other losses, a value above 0 is an error.",
    )
    tpo_alpha: NonNegativeFloat = option(
        1.0,
        "Weight of the negative log-likelihood of gold answers, at least 0. 0: gold answers are not computed, which saves "
        "time and memory.",
    )
    tpo_l_gamma: float = option(
        0.5,
        "With loss_type='tpo-l': margin by which the reward of the chosen answer should exceed that of the rejected answer.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and "label_smoothing" not in TPO_LOSSES[self.loss_type].scalars:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} has no effect with loss_type={self.loss_type!r}. Only 'sigmoid' and "
                "'tpo-l' use it. Fix: remove label_smoothing, or use one of these losses."
            )
        self.refuse_unread_by_loss(tpo_l_gamma="gamma" in TPO_LOSSES[self.loss_type].scalars)


class TPO(ReferenceFree[TPOConfig]):
    """Triple preference optimization: a loss on chosen and rejected answers plus the NLL of the gold answer.

    The prompt of a row is computed once for its three answers (prefix tree). The gold answer is in the column ``reference``.

    Reference: Triple preference optimization, arXiv:2405.16681.
    """

    config_class = TPOConfig
    branches = ("chosen", "rejected", "reference")
    likelihood_branch = 2
    traits = replace(PAIRS, answers=3, needs=frozenset({"logp", "entropy", "mean_logit", "correct"}))

    def __init__(self, cfg: TPOConfig) -> None:
        super().__init__(cfg)
        if not cfg.tpo_alpha:  # Without the NLL term, the model does not compute gold answers.
            self.branches, self.traits = self.branches[:2], replace(self.traits, answers=2)

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the preference loss and the NLL of the gold answers."""
        cfg, size = self.cfg, len(self.branches)
        has_gold = size == 3 or not cfg.tpo_alpha
        check_rules(
            cfg,
            [
                (
                    "tpo_alpha",
                    has_gold,
                    "needs gold answers, but tpo_alpha=0 in the config excluded them. Fix: set tpo_alpha in the config",
                )
            ],
        )
        formula = TPO_LOSSES[cfg.loss_type]
        logp, length = branch_sums(outputs, batch, size)
        read = mean_logp(logp, length) if formula.per_token else logp
        values = {"chosen_score": read[:, 0], "rejected_score": read[:, 1]}
        terms = formula(values, beta=cfg.beta, gamma=cfg.tpo_l_gamma, label_smoothing=cfg.label_smoothing)
        metrics = reference_free_metrics(outputs, batch, cfg.beta * read[:, :2], read)
        assert outputs.correct is not None
        metrics["mean_token_accuracy"] = mean(outputs.correct.float(), answer_mask(batch, size, 0))
        return likelihood_terms(terms, outputs, batch, metrics, weight=cfg.tpo_alpha, branches=size, branch=2)
