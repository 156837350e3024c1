"""Online DPO: sample two completions per prompt from the policy, and train with the DPO loss to prefer the better one of the two
completions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from posttrain.errors import ConfigError, RewardError
from posttrain.fields import NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare, config, option
from posttrain.losses.advantages import weighted_total
from posttrain.losses.preference import sigmoid, squared_gap
from posttrain.losses.reduce import sequence_sum
from posttrain.methods.base import SAMPLES, Method
from posttrain.methods.config import PictureConfig
from posttrain.methods.online_config import OnlineConfig
from posttrain.metrics import Metric, mean
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, Ranks, State

if TYPE_CHECKING:
    from posttrain.rewards.runner import RewardTable
    from posttrain.rollouts.batch import RolloutBatch
    from posttrain.types import LogProbs

logger = logging.getLogger(__name__)


PAIR_LOSS_TYPES = ("sigmoid", "ipo")
UNREAD = (
    "epsilon", "epsilon_high", "mask_truncated_completions", "sync_ref_model", "use_liger_kernel",
)  # fmt: skip


@config
class OnlineDPOConfig(PictureConfig, OnlineConfig):
    """Arguments of `OnlineDPOTrainer`. Batch sizes count prompts. Each prompt has two completions.

    ``beta`` may be a list with one value per epoch. If there are more epochs than values, the last value is used.
    """

    learning_rate: float = option(
        5e-7, "Peak learning rate. The default is for full fine-tuning. Use about ten times this value for LoRA."
    )
    disable_dropout: bool = option(
        True,
        "Set every dropout probability of the model to 0, so that policy and reference give equal log-probs for equal inputs. "
        "An adapter's lora_dropout is not changed.",
    )
    reward_model_path: str | None = option(
        None,
        "Accepted for compatibility with TRL's scripts, which load the reward model from this path. The trainer does not use "
        "it. Pass the reward model to the trainer as reward_funcs.",
    )
    max_new_tokens: PositiveInt = option(64, "Maximum number of tokens per completion, including the end token.")
    max_completion_length: PositiveInt | None = option(
        None,
        "Another name of max_new_tokens. Setting it to a different value is an error. None: the value of "
        "max_new_tokens.",
    )
    max_length: PositiveInt = option(
        512,
        "Maximum number of tokens of a prompt and its completion together, above max_new_tokens. Prompts longer than "
        "max_length - max_new_tokens lose their beginning.",
    )
    temperature: PositiveFloat = option(
        0.9,
        "Sampling temperature, above 0. Higher values make the two completions of a prompt differ more. The temperature "
        "applies only to sampling: the log-probs in the loss are computed at temperature 1.",
    )
    missing_eos_penalty: PositiveFloat | None = option(
        None,
        "Number, above 0, that is subtracted from the reward of a completion without an end-of-sequence token. It encourages "
        "the model to end completions before max_new_tokens. None: nothing is subtracted.",
    )
    beta: list[float] = field(  # type: ignore[assignment]
        default_factory=lambda: [0.1],
        metadata={
            "help": (
                "Strength of the regularization towards the reference model, above 0. A larger value keeps the policy closer "
                "to it. For loss_type='ipo', beta is called tau in the paper. A list has one value per epoch. If there are "
                "more epochs than values, the last value is used."
            )
        },
    )
    loss_type: Literal["sigmoid", "ipo"] = option(
        "sigmoid",
        "Loss of a pair of completions. 'sigmoid': the loss of DPO. 'ipo': moves the difference between the log-ratios of the "
        "better and the worse completion to the target 1 / (2 beta). The log-ratios are sums over tokens.",
    )
    num_generations: PositiveInt = option(
        2, "Number of completions per prompt. It must be 2, because the loss compares two completions."
    )
    num_generations_eval: NonNegativeInt | None = option(
        1,
        "Number of completions per prompt in evaluation. It must be 1, because evaluation only scores completions and does "
        "not compare them. 0 and None: 1.",
    )
    keep_eos_for_rewards: bool = option(
        False,
        "Append the end-of-sequence token to the text of completions that ended, before the text is passed to reward "
        "functions. It has no effect on conversations.",
    )
    vllm_gpu_memory_utilization: PositiveShare = option(
        0.55,
        "With vllm_mode='colocate': fraction of the GPU's memory that vLLM may use, above 0 and at most 1. The trainer uses "
        "the remaining memory. With vllm_mode='server', set this fraction on the server instead.",
    )

    def check_fields(self) -> None:
        """Validate every field. A single number for ``beta`` is treated as a list of one."""
        beta = self.beta
        self.beta = [beta] if isinstance(beta, int | float) else beta
        super().check_fields()
        self.beta = beta

    def __post_init__(self) -> None:
        if self.max_completion_length not in (None, self.max_new_tokens):
            raise ConfigError(
                f"max_completion_length={self.max_completion_length} and max_new_tokens={self.max_new_tokens} are two names of "
                "the same limit and have different values. Fix: set only max_new_tokens."
            )
        self.max_completion_length = self.max_new_tokens
        if isinstance(self.beta, Sequence) and len(self.beta) == 1:
            self.beta = self.beta[0]
        super().__post_init__()
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.max_new_tokens >= self.max_length:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens} must be below max_length={self.max_length}, because otherwise no space "
                "is left for the prompt. Fix: decrease max_new_tokens or increase max_length."
            )
        if self.num_generations != 2 or (self.num_generations_eval or 1) != 1:
            raise ConfigError(
                f"num_generations={self.num_generations} and num_generations_eval={self.num_generations_eval} are not "
                "supported, because training always compares 2 completions per prompt and evaluation always scores 1. Fix: "
                "remove both options."
            )
        defaults = type(self).__dataclass_fields__
        for name in UNREAD:
            if (value := getattr(self, name)) != defaults[name].default:
                raise ConfigError(f"{name}={value!r} is not supported by {type(self).__name__}. Fix: remove {name}.")

    def _check_sampling(self) -> None:
        if isinstance(self.beta, Sequence) and not self.beta:
            raise ConfigError("beta=[] is an empty list. Fix: pass one number, or a list with one number per epoch.")
        for value in self.betas:
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(
                    f"every value of beta must be above 0, but beta={self.beta!r} has the value {value!r}."
                )
        betas, self.beta = self.beta, self.betas[0]  # type: ignore[assignment]
        super()._check_sampling()
        self.beta = betas

    @property
    def betas(self) -> list[float]:
        """Values of ``beta`` as a list, one per epoch."""
        return list(self.beta) if isinstance(self.beta, Sequence) and not isinstance(self.beta, str) else [self.beta]

    def beta_at(self, epoch: float | None) -> float:
        """Return the value of ``beta`` in an epoch, which may be fractional. If there are more epochs than values, the last
        value is used.
        """
        return float(self.betas[min(int(epoch or 0), len(self.betas) - 1)])

    @property
    def train_batch_size(self) -> int:
        """Number of completions in a micro-batch, two per prompt."""
        return 2 * super().train_batch_size

    def _resolve_batches(self) -> None:
        """Resolve batch sizes. Batch sizes of online DPO count prompts. Batch sizes of other online methods count
        completions.
        """
        prompts, self.per_device_train_batch_size = (
            self.per_device_train_batch_size,
            2 * self.per_device_train_batch_size,
        )
        try:
            super()._resolve_batches()
        finally:
            self.per_device_train_batch_size = prompts


# Losses of online DPO. The losses use sums of log-ratios over tokens, without division by the completion length.
PAIR_LOSSES = {"sigmoid": sigmoid, "ipo": squared_gap}
# A warning is logged if the fraction of ties among pairs exceeds this value. Ties do not contribute to the loss.
TIES_MOST = 0.5


def sequence_sums(out: ModelOutputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each completion's summed log-probs and summed log-ratios of policy to reference, both ``(S,)``."""
    assert out.logp is not None and batch.ref_logp is not None
    forest = batch.by_sequence
    return sequence_sum(out.logp, *forest), sequence_sum(out.logp - batch.ref_logp, *forest)


def pair_terms(
    batch: Batch, logp: Tensor, ratio: Tensor, *, beta: float, loss_type: str
) -> tuple[Tensor, dict[str, Metric]]:
    """Compute the loss of each pair, ``(P,)``, and the metrics of the pairs.

    Let ``h = L+ - L-`` be the difference of the log-ratios of better and worse completion. The loss is ``-logsigmoid(beta h)``
    for ``sigmoid``, and ``(h - 1 / (2 beta))^2`` for ``ipo``. The loss is 0 for ties and for pairs without scores.

    Args:
        batch: Batch of pairs. Its ``advantages`` are 1 for the better and -1 for the worse completion, or 0 for both in a tie.
        logp: Summed log-probs of the completions, ``(S,)``.
        ratio: Summed log-ratios L of policy to reference, ``(S,)``.
        beta: Strength of the regularization towards the reference.
        loss_type: ``sigmoid`` or ``ipo``.

    Reference: Online AI feedback, arXiv:2402.04792; DPO, arXiv:2305.18290, equation 7; IPO, arXiv:2310.12036, equation 17.
    """
    assert batch.advantages is not None
    sign = batch.grouped(batch.advantages, 2)[:, 0]
    better = (sign < 0).long()[:, None]  # Index of the better completion.
    (ratio_c, ratio_r), (logp_c, logp_r) = (
        torch.cat([x.gather(1, better), x.gather(1, 1 - better)], 1).unbind(1)
        for x in (batch.grouped(ratio, 2), batch.grouped(logp, 2))
    )
    decided = sign != 0
    terms = torch.where(decided, PAIR_LOSSES[loss_type](ratio_c, ratio_r, beta=beta), 0.0)
    metrics = {
        "rewards/chosen": mean(beta * ratio_c, decided),
        "rewards/rejected": mean(beta * ratio_r, decided),
        "rewards/margins": mean(beta * (ratio_c - ratio_r), decided),
        "rewards/accuracies": mean((ratio_c > ratio_r).float(), decided),
        "logps/chosen": mean(logp_c, decided),
        "logps/rejected": mean(logp_r, decided),
    }
    return terms, metrics


def score_metrics(scores: Tensor, known: Tensor, ended: Tensor, *, pairs: bool) -> dict[str, Metric]:
    """Compute metrics of the completions of all ranks: the mean score and the fraction of completions with an end token.

    Args:
        scores: Scores after penalties, ``(n,)``. NaN: no reward function returned a reward.
        known: Bool tensor ``(n,)``, True for rows with a score.
        ended: Bool tensor ``(n,)``, True for completions with an end token.
        pairs: Whether rows ``2 i`` and ``2 i + 1`` are a pair.
    """
    metrics = {"objective/scores": mean(scores, known), "val/contain_eos_token": mean(ended.float())}
    if pairs:
        metrics["objective/scores_margin"] = mean((scores[::2] - scores[1::2]).abs(), known[::2])
    return metrics


def equal_pairs(rollouts: RolloutBatch, ranks: Ranks) -> Tensor:
    """Return a bool tensor ``(P,)`` for the pairs of all ranks. It is True for pairs with two identical completions."""
    samples = rollouts.rollouts
    same = [a.token_ids == b.token_ids for a, b in zip(samples[::2], samples[1::2], strict=True)]
    return torch.tensor(ranks.gather(same), dtype=torch.bool)


def preferred(pairs: Tensor, known: Tensor, equal: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Metric]]:
    """Compare the two scores of each pair, ``(P, 2)``. Return a tensor ``(2 P,)`` and metrics. The tensor is 1 for the
    better completion, -1 for the worse completion, and 0 for both completions of a tie.

    Raises:
        RewardError: No pair has scores for both completions.
    """
    if not bool(known.any()):
        raise RewardError(
            f"none of the {len(pairs)} pairs of this generation has rewards for both completions, because {', '.join(names)} "
            "returned None. Fix: return a number for both completions of a prompt."
        )
    gap = torch.where(known & ~equal, pairs[:, 0] - pairs[:, 1], 0.0)
    metrics = {"ties": mean((gap == 0).float(), known), "groups/unscorable": mean((~known).float())}
    return torch.stack([gap.sign(), -gap.sign()], 1).flatten(), metrics


def policy_metrics(batch: Batch, logp: Tensor, ratio: Tensor, beta: float) -> dict[str, Metric]:
    """Compute metrics of the policy: the KL divergence from the reference, the entropy, the KL penalty, and the reward."""
    scored = batch.columns["compared"].bool()
    return {
        "objective/kl": mean(ratio),
        "objective/entropy": mean(-logp),
        "objective/non_score_reward": mean(-beta * ratio),
        "objective/rlhf_reward": mean(batch.columns["scores"] - beta * ratio, scored),
    }


class OnlineDPO(Method[OnlineDPOConfig]):
    """DPO on two sampled completions per prompt. The completion with the higher reward is the chosen one.

    Reference: Direct language model alignment from online AI feedback, arXiv:2402.04792.
    """

    config_class = OnlineDPOConfig
    traits = replace(
        SAMPLES,
        own_rollouts=True,
        needs=frozenset({"logp"}),
        reads_images=True,
        whole_rows=True,
        compares_reference=True,
    )

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count the completions of pairs in which both completions have a score. The loss is divided by this number."""
        return {"compared": float(sum(batch.columns["compared"].sum() for batch in batches))}

    @property
    def temperature(self) -> float:
        """Temperature of the log-probs in the loss. Always 1, because the loss does not compare log-probs with the
        sampler's.
        """
        return 1.0

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Return 1 for preferred completions, -1 for the worse ones and 0 for ties. In evaluation, return 0 for all."""
        training, totals = rollouts.mode == "train", weighted_total(rewards.values, rewards.weights)
        reasons = ranks.gather([rollout.finish_reason for rollout in rollouts.rollouts])
        ended = torch.tensor([reason == "stop" for reason in reasons])
        scores = totals - (self.cfg.missing_eos_penalty or 0.0) * (~ended).float()
        pairs = scores.view(-1, 2) if training else scores
        valid = ~pairs.isnan().any(1).repeat_interleave(2) if training else ~scores.isnan()
        values, metrics = torch.zeros_like(scores), score_metrics(scores, valid, ended, pairs=training)
        if training:
            values, of_pairs = preferred(pairs, valid[::2], equal_pairs(rollouts, ranks), rewards.names)
            metrics |= of_pairs
        mine = slice(rewards.start, rewards.start + len(rollouts.rollouts))
        columns = {"compared": valid[mine].float().tolist(), "scores": scores[mine].nan_to_num(0.0).tolist()}
        return Advantages(values, totals, rewards.start, columns=columns, token_columns=logps, metrics=metrics)

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the loss of each pair in training. In evaluation, return a loss of 0 and compute the policy's metrics."""
        beta = self.cfg.beta_at(state.epoch)
        logp, ratio = sequence_sums(outputs, batch)
        compared = batch.columns["compared"].bool()
        if torch.is_grad_enabled():
            pairs, metrics = pair_terms(batch, logp, ratio, beta=beta, loss_type=self.cfg.loss_type)
            terms = batch.spread_rows(pairs, 2)
        else:
            terms, metrics = torch.zeros_like(logp), {}
        metrics |= policy_metrics(batch, logp, ratio, beta) | {"beta": mean(beta)}
        return LossTerms(terms, compared, "token", num_sequences=batch.num_sequences, count="compared", metrics=metrics)
