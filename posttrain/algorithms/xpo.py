"""XPO: Online DPO against the reference's completions, with a bonus for leaving the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from posttrain.algorithms.online_preference import OnlinePreferenceConfig, OnlinePreferenceTrainer, pair_terms
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.rollouts.base import RolloutEngine, require_engine
from posttrain.types import Batch, ModelOutputs, Request, Rollout, Sampling

__all__ = ["XPOConfig", "XPOTrainer"]


@dataclass
class XPOConfig(OnlinePreferenceConfig):
    """Arguments of `XPOTrainer`: those of `OnlinePreferenceConfig`, and the weight of exploration."""

    per_epoch: ClassVar[tuple[str, ...]] = ("beta", "alpha")
    in_process_because: ClassVar[str | None] = "XPO samples from the reference too, in process"

    alpha: list[float] = field(
        default_factory=lambda: [1e-5],
        metadata={"help": "Weight of the exploration bonus, 0 or more; several: by epoch."},
    )

    def in_range(self, name: str, value: float) -> bool:
        """Without a bonus it is Online DPO against the reference."""
        return 0 <= value < float("inf") if name == "alpha" else super().in_range(name, value)


class XPOTrainer(OnlinePreferenceTrainer):
    """Samples one completion from the policy and one from the reference, and prefers the better one.

    ``L = -log sigmoid(beta h) + alpha log pi(y_r)``: the second part makes the reference's completion less likely, whichever
    was better. A tie trains that part alone.

    Args:
        reference_engine: Samples from the reference; None makes one that runs it in process.

    Reference: Exploratory preference optimization, arXiv:2405.21046, algorithm 1.

    >>> trainer = XPOTrainer(
    ...     model, reward_funcs=reward, args=XPOConfig("runs/xpo"), train_dataset=prompts, processing_class=tok
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[XPOConfig]] = XPOConfig
    two_samplers: ClassVar[bool] = True
    one_reward: ClassVar[bool] = True
    _tag_names: ClassVar[list[str]] = ["posttrain", "xpo"]
    _name: ClassVar[str] = "XPO"
    _suffix: ClassVar[str] = "XPO"
    _paper: ClassVar[dict[str, str]] = {
        "title": "Exploratory Preference Optimization: Harnessing Implicit Q*-Approximation for Sample-Efficient RLHF",
        "id": "2405.21046",
    }
    args: XPOConfig

    def __init__(self, *args: Any, reference_engine: RolloutEngine | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.reference is not None
        model = self.reference.copy or self.accelerator.unwrap_model(self.model)
        given = reference_engine
        self.opponent = self.engine_on(model) if given is None else require_engine(given, "reference_engine")

    def sample_opponent(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """One completion a prompt from the reference: adapters off (or a frozen one on) where it is the same model."""
        assert self.reference is not None
        requests = [Request(prompt) for prompt in prompts]
        with (
            self.inference() as policy,
            parallel.whole_parameters(self.model_wrapped, self.accelerator),
            self.reference.active(policy),
        ):
            return self.opponent.generate(requests, sampling)

    def log_scores(self, scores: Tensor, known: Tensor, ended: Tensor, mode: str) -> None:
        """Scores and ends of both samplers."""
        if mode == "eval":
            return super().log_scores(scores, known, ended, mode)
        kept = known[::2]
        metrics = {
            "objective/model_scores": mean(scores[::2], kept),
            "objective/ref_scores": mean(scores[1::2], kept),
            "objective/scores_margin": mean(scores[::2] - scores[1::2], kept),
            "val/model_contain_eos_token": mean(ended[::2].float()),
            "val/ref_contain_eos_token": mean(ended[1::2].float()),
        }
        self.log_metrics_now(metrics)

    def pair_loss(
        self, outputs: ModelOutputs, batch: Batch, logp: Tensor, ratio: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """`pair_terms` plus ``alpha log pi(y_r)``."""
        beta, alpha = self.scheduled("beta"), self.scheduled("alpha")
        preferred, metrics = pair_terms(batch, logp, ratio, beta=beta, loss_type=self.args.loss_type)
        explored = alpha * batch.grouped(logp, 2)[:, 1]
        known = batch.grouped(batch.columns["compared"], 2)[:, 0].bool()
        metrics |= {
            "loss/dpo": mean(preferred, known),
            "loss/xpo": mean(explored, known),
            "objective/kl": mean(ratio),
            "objective/entropy": mean(-logp),
            "alpha": mean(alpha),
        }
        return batch.spread_rows(preferred + explored, 2), metrics
