"""ORPO: supervised fine-tuning on chosen answers with an odds-ratio penalty on rejected answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.nn import functional as F

from posttrain.fields import PositiveFloat, config, option
from posttrain.losses.divergence import mean_logp
from posttrain.losses.preference import log_odds_ratio, orpo
from posttrain.methods.preference import (
    AnswerConfig,
    ReferenceFree,
    UnreadFields,
    branch_sums,
    likelihood_terms,
    reference_free_metrics,
)
from posttrain.metrics import mean
from posttrain.types import Batch, LossTerms, ModelOutputs, Row, State


@config
class ORPOConfig(UnreadFields, AnswerConfig):
    """Arguments of `ORPOTrainer`, which adds a penalty on rejected answers to supervised fine-tuning."""

    beta: PositiveFloat = option(
        0.1,
        "Weight of the odds-ratio term, above 0 (lambda in the paper). A larger weight penalizes rejected answers more.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_unread()


class ORPO(ReferenceFree[ORPOConfig]):
    """Odds-ratio preference optimization: ``NLL(prompt and chosen) - beta * logsigmoid(log-odds ratio)``.

    This method needs no reference model. The NLL is averaged over all tokens of prompts and chosen answers in the optimizer
    step.

    Reference: ORPO, arXiv:2403.07691, equations 6 and 7.
    """

    config_class = ORPOConfig

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert examples to pairs. The prompt of a pair contributes to the loss once, although both answers share the
        prompt.
        """
        return [replace(row, prompt_mask=[1] * len(row.prompt_ids)) for row in super().rows(examples)]

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the odds-ratio loss and the NLL of prompts and chosen answers."""
        logp, length = branch_sums(outputs, batch, 2)
        means = mean_logp(logp, length)
        odds = log_odds_ratio(means[:, 0], means[:, 1])
        metrics = reference_free_metrics(outputs, batch, self.cfg.beta * means, means)
        metrics |= {"log_odds_ratio": mean(F.logsigmoid(odds)), "log_odds_chosen": mean(odds)}
        terms = orpo(means[:, 0], means[:, 1], beta=self.cfg.beta)
        return likelihood_terms(terms, outputs, batch, metrics, weight=1.0, branches=2, branch=0)
