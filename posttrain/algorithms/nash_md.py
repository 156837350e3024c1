"""Nash-MD: learn to be preferred to a mixture of oneself and the reference."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from posttrain.algorithms.online_preference import OnlinePreferenceConfig, OnlinePreferenceTrainer
from posttrain.losses.reduce import sequence_sum
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.rollouts.batch import RolloutBatch
from posttrain.rollouts.mixture import MixtureEngine
from posttrain.types import Batch, ModelOutputs, Request, Rollout, Sampling

__all__ = ["NashMDConfig", "NashMDTrainer", "nash_md_terms"]


@dataclass
class NashMDConfig(OnlinePreferenceConfig):
    """Arguments of `NashMDTrainer`: those of `OnlinePreferenceConfig`, and the mixture."""

    per_epoch: ClassVar[tuple[str, ...]] = ("beta", "mixture_coef")
    in_process_because: ClassVar[str | None] = (
        "Nash-MD samples from a mixture of the policy and the reference, in process"
    )

    mixture_coef: list[float] = field(
        default_factory=lambda: [0.5],
        metadata={"help": "Share of the reference in the opponent, in [0, 1]; several: by epoch."},
    )

    def in_range(self, name: str, value: float) -> bool:
        """A share may be 0 (the policy itself) or 1 (the reference)."""
        return 0 <= value <= 1 if name == "mixture_coef" else super().in_range(name, value)


def nash_md_terms(logp: Tensor, ref_logp: Tensor, preference: Tensor, batch: Batch, *, beta: float) -> Tensor:
    """``beta sum_t sg[l_t - l_ref,t] l_t - (p - 1/2) sum_t l_t``, ``(S,)``.

    The gradient is that of ``beta KL(policy | reference)`` by its score function, token by token, and of the probability
    to be preferred.

    Args:
        logp: ``(B, T)`` under the policy.
        ref_logp: ``(B, T)`` under the reference.
        preference: ``(S,)`` p - 1/2, how much the completion is preferred to the opponent's.
        batch: Names the tokens of each sequence.
        beta: Weight of the KL.

    Reference: Nash learning from human feedback, arXiv:2312.00886, algorithm 1.
    """
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    charged = sequence_sum((logp - ref_logp).detach() * logp, *forest)
    return beta * charged - preference * sequence_sum(logp, *forest)


class NashMDTrainer(OnlinePreferenceTrainer):
    """Samples one completion from the policy and one from its geometric mixture with the reference; trains the first.

    The mixture's completion enters only through the probability that it loses, ``sigmoid(s - s')`` of their rewards, or
    what a judge says.

    Reference: Nash learning from human feedback, arXiv:2312.00886.

    >>> trainer = NashMDTrainer(
    ...     model, reward_funcs=reward, args=NashMDConfig("runs/nash_md"), train_dataset=prompts, processing_class=tok
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[NashMDConfig]] = NashMDConfig
    whole_rows: ClassVar[bool] = False
    two_samplers: ClassVar[bool] = True
    one_reward: ClassVar[bool] = True
    soft_judge: ClassVar[bool] = True
    _tag_names: ClassVar[list[str]] = ["posttrain", "nash-md"]
    _name: ClassVar[str] = "Nash-MD"
    _suffix: ClassVar[str] = "NashMD"
    _paper: ClassVar[dict[str, str]] = {"title": "Nash Learning from Human Feedback", "id": "2312.00886"}
    args: NashMDConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.reference is not None
        policy = self.accelerator.unwrap_model(self.model)
        reference = self.reference.copy or functools.partial(self.reference.active, policy)
        self.opponent = MixtureEngine(policy, reference, pad_token_id=self.pad_token_id)
        self.opponent.check(self.sampling("train"))

    def sample_opponent(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """One completion a prompt from the mixture."""
        self.opponent.mixture_coef = self.scheduled("mixture_coef")
        with self.inference(), parallel.whole_parameters(self.model_wrapped, self.accelerator):
            return self.opponent.generate([Request(prompt) for prompt in prompts], sampling)

    def trained(self, generation: RolloutBatch, mode: str) -> list[int]:
        """The policy's own completions."""
        return list(range(0, len(generation.rollouts), 2 if mode == "train" else 1))

    def generate_and_score(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """As every online trainer; the opponent's completions have done their part and are left behind."""
        whole = super().generate_and_score(examples, mode)
        if mode == "eval":
            return whole
        own = self.trained(whole, mode)
        whole.columns["opponent_scores"] = [whole.columns["scores"][i ^ 1] for i in range(len(whole.rollouts))]
        return dataclasses.replace(
            whole,
            examples=[whole.examples[i] for i in own],
            rollouts=[whole.rollouts[i] for i in own],
            completions=[whole.completions[i] for i in own],
            columns={name: [column[i] for i in own] for name, column in whole.columns.items()},
            token_columns={name: [column[i] for i in own] for name, column in whole.token_columns.items()},
        )

    def preference(self, gap: Tensor) -> Tensor:
        """``p - 1/2``: a judge's gap is ``p - (1 - p)``, a reward's goes through a sigmoid."""
        return gap / 2 if self.judge is not None else torch.sigmoid(gap) - 0.5

    def log_scores(self, scores: Tensor, known: Tensor, ended: Tensor, mode: str) -> None:
        """How often each of the two samplers ended."""
        if mode == "eval":
            return super().log_scores(scores, known, ended, mode)
        names = {"val/model_contain_eos_token": ended[::2], "val/ref_contain_eos_token": ended[1::2]}
        self.log_metrics_now({name: mean(values.float()) for name, values in names.items()})

    def pair_loss(
        self, outputs: ModelOutputs, batch: Batch, logp: Tensor, ratio: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """See `nash_md_terms`; ``rewards/*`` are raw scores, ``logps/*`` those of the policy's completion under both models."""
        assert outputs.logp is not None and batch.ref_logp is not None and batch.advantages is not None
        terms = nash_md_terms(outputs.logp, batch.ref_logp, batch.advantages, batch, beta=self.scheduled("beta"))
        known = batch.columns["compared"].bool()
        metrics = {
            "loss/score": mean(batch.advantages * logp, known),
            "loss/kl": mean(ratio, known),
            "objective/entropy": mean(-logp, known),
            "rewards/probabilities": mean(batch.advantages + 0.5, known),
            "rewards/chosen": mean(batch.columns["scores"], known),
            "rewards/rejected": mean(batch.columns["opponent_scores"], known),
            "logps/chosen": mean(logp, known),
            "logps/rejected": mean(logp - ratio, known),
            "rewards/margins": mean(ratio, known),
            "rewards/accuracies": mean((ratio > 0).float(), known),
            "mixture_coef": mean(self.scheduled("mixture_coef")),
        }
        return terms, metrics
