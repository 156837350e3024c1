"""CPO and its variants SimPO and AlphaPO. Their losses compare pairs of answers without a reference model."""

from __future__ import annotations

import logging
from typing import Literal

from posttrain.errors import ConfigError
from posttrain.fields import NonNegativeFloat, Share, config, option
from posttrain.losses.divergence import alpha_reward, mean_logp
from posttrain.losses.preference import CPO_LOSSES
from posttrain.methods.preference import (
    AnswerConfig,
    ReferenceFree,
    UnreadFields,
    branch_sums,
    likelihood_terms,
    reference_free_metrics,
)
from posttrain.types import Batch, LossTerms, ModelOutputs, State

logger = logging.getLogger(__name__)


@config
class CPOConfig(UnreadFields, AnswerConfig):
    """Arguments of `CPOTrainer`, which trains on pairs of answers without a reference model."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"] = option(
        "sigmoid",
        "Loss of a pair. It is a function of the gap: the log-prob of the chosen answer minus the log-prob of the rejected "
        "answer. 'sigmoid': DPO's loss without a reference model. 'hinge': like 'sigmoid', but pairs with a gap above 1 / "
        "beta have no gradient. 'ipo': moves the gap per token to a target value. 'simpo': DPO's loss on the gap per token "
        "minus the margin simpo_gamma / beta. For SimPO as published, also set cpo_alpha=0 and a beta from 2 to 2.5. "
        "'alphapo': same as 'simpo', but with cpo_alpha=0, and alpha transforms the reward.",
    )
    cpo_alpha: NonNegativeFloat = option(
        1.0,
        "Weight of an additional loss term, the negative log-likelihood of chosen answers, at least 0. It prevents chosen "
        "answers from becoming less likely. 0 disables it, as in SimPO.",
    )
    simpo_gamma: float = option(
        0.5,
        "With loss_type='simpo' or 'alphapo': margin by which the reward of the chosen answer should exceed that of the "
        "rejected answer. A common value is beta / 2. A larger margin separates the answers further.",
    )
    alpha: float = option(
        0.0,
        "With loss_type='simpo', 'alphapo' or 'ipo': parameter alpha of the reward (1 - p^(-alpha)) / alpha, where p is the "
        "geometric mean of an answer's token probabilities (AlphaPO, arXiv:2501.03884). 0: the reward is the mean log-prob "
        "per token.",
    )
    label_smoothing: Share = option(
        0.0,
        "Probability that chosen and rejected are exchanged in the data, from 0 to 1. Only loss_type='sigmoid', 'simpo' and "
        "'alphapo' use it. With other losses, a value above 0 is an error.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_unread()
        if self.loss_type == "alphapo":
            self.loss_type, self.cpo_alpha = "simpo", 0.0
        formula = CPO_LOSSES[self.loss_type]
        if self.label_smoothing and "label_smoothing" not in formula.scalars:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} has no effect with loss_type={self.loss_type!r}. Only 'sigmoid', "
                "'simpo' and 'alphapo' use it. Fix: remove label_smoothing, or use one of these losses."
            )
        if self.alpha and not formula.per_token:
            raise ConfigError(
                f"alpha={self.alpha} transforms the mean log-prob per token, but loss_type={self.loss_type!r} uses sums of "
                "log-probs. Fix: set loss_type='alphapo', or remove alpha."
            )
        self.refuse_unread_by_loss(simpo_gamma="gamma" in formula.scalars)
        self._warn_defaults()

    def _warn_defaults(self) -> None:
        fields = type(self).__dataclass_fields__
        if self.loss_type == "simpo" and self.beta == fields["beta"].default:
            logger.warning("loss_type='simpo' with the default beta=%s requires a gap of %s nats per token between "
                           "chosen and rejected answer. SimPO uses a beta from 2 to 2.5.",
                           self.beta, self.simpo_gamma / self.beta)  # fmt: skip
        if self.loss_type == "simpo" and self.cpo_alpha == fields["cpo_alpha"].default:
            logger.warning(
                "loss_type='simpo' with the default cpo_alpha=%s adds the NLL of chosen answers, which makes the loss "
                "CPO-SimPO. For SimPO, set cpo_alpha=0.",
                self.cpo_alpha,
            )


class CPO(ReferenceFree[CPOConfig]):
    """Contrastive preference optimization: train on pairs without a reference model. An answer's reward is its
    log-likelihood.

    Let R+ and R- be the rewards of the chosen and the rejected answer, and ``u = R+ - R-``. The loss is a function of u,
    plus ``cpo_alpha`` times the NLL of the chosen answers. The NLL is averaged over the tokens of the optimizer step.

    Reference: CPO, arXiv:2401.08417; SimPO, arXiv:2405.14734; AlphaPO, arXiv:2501.03884.
    """

    config_class = CPOConfig

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the preference loss and the NLL of the chosen answers."""
        cfg = self.cfg
        formula = CPO_LOSSES[cfg.loss_type]
        logp, length = branch_sums(outputs, batch, 2)
        read = mean_logp(logp, length) if formula.per_token else logp
        reward = alpha_reward(read, alpha=cfg.alpha)
        values = {"chosen_score": reward[:, 0], "rejected_score": reward[:, 1]}
        terms = formula(values, beta=cfg.beta, gamma=cfg.simpo_gamma, label_smoothing=cfg.label_smoothing)
        metrics = reference_free_metrics(outputs, batch, cfg.beta * reward, read)
        return likelihood_terms(terms, outputs, batch, metrics, weight=cfg.cpo_alpha, branches=2, branch=0)
