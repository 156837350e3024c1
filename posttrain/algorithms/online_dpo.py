"""Online DPO: two completions of the policy, the better one preferred as DPO does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from posttrain.algorithms.online_preference import OnlinePreferenceConfig, OnlinePreferenceTrainer, pair_terms
from posttrain.metrics import Metric
from posttrain.training.pictures import PictureConfig
from posttrain.types import Batch, ModelOutputs

__all__ = ["OnlineDPOConfig", "OnlineDPOTrainer"]


@dataclass
class OnlineDPOConfig(PictureConfig, OnlinePreferenceConfig):
    """Arguments of `OnlineDPOTrainer`: those of `OnlinePreferenceConfig`."""


class OnlineDPOTrainer(OnlinePreferenceTrainer):
    """Samples two completions a prompt and raises the better one over the other, relative to a reference.

    The first completion is chosen where its reward is above the other's; equal ones are ties and train nothing.

    Reference: Direct language model alignment from online AI feedback, arXiv:2402.04792.

    >>> trainer = OnlineDPOTrainer(
    ...     model, reward_funcs=reward, args=OnlineDPOConfig("runs/online_dpo"), train_dataset=prompts, processing_class=tok
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[OnlineDPOConfig]] = OnlineDPOConfig
    takes_images: bool = True
    _tag_names: ClassVar[list[str]] = ["posttrain", "online-dpo"]
    _name: ClassVar[str] = "Online DPO"
    _suffix: ClassVar[str] = "OnlineDPO"
    _paper: ClassVar[dict[str, str]] = {
        "title": "Direct Language Model Alignment from Online AI Feedback",
        "id": "2402.04792",
    }
    args: OnlineDPOConfig

    def pair_loss(
        self, outputs: ModelOutputs, batch: Batch, logp: Tensor, ratio: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """See `pair_terms`."""
        beta, kind = self.scheduled("beta"), self.args.loss_type
        terms, metrics = pair_terms(batch, logp, ratio, beta=beta, loss_type=kind)
        return batch.spread_rows(terms, 2), metrics | self.policy_metrics(batch, logp, ratio)
