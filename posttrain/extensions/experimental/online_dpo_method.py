"""Online DPO: the policy samples two completions per prompt, and the DPO loss prefers the better one."""

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
    """Arguments of `OnlineDPOTrainer`. Batch sizes are numbers of prompts. Each prompt has two completions.

    ``beta`` may be a list with one value per epoch. Epochs after the end of the list use its last value.
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
        "Accepted for scripts that load a reward model themselves. The trainer does not use it. Pass reward_funcs to the "
        "trainer instead.",
    )
    max_new_tokens: PositiveInt = option(64, "Maximum number of tokens per completion, including the end token.")
    max_completion_length: PositiveInt | None = option(
        None, "Alias of max_new_tokens. None: max_new_tokens. A different value is an error."
    )
    max_length: PositiveInt = option(
        512,
        "Maximum number of tokens of prompt and completion, above max_new_tokens. The start of a longer prompt is removed.",
    )
    temperature: PositiveFloat = option(
        0.9,
        "Sampling temperature, above 0. Higher values make the two completions of a prompt differ more. The log-probs of the "
        "loss use temperature 1.",
    )
    missing_eos_penalty: PositiveFloat | None = option(
        None,
        "Penalty, above 0, that is subtracted from the reward of a completion without an end token. It encourages completions "
        "shorter than max_new_tokens. None: no penalty.",
    )
    beta: list[float] = field(  # type: ignore[assignment]
        default_factory=lambda: [0.1],
        metadata={
            "help": (
                "Strength of the regularization towards the reference model, above 0. A larger value keeps the policy closer. "
                "For loss_type='ipo' it is tau of the paper. A list has one value per epoch; the last value is used for all "
                "later epochs."
            )
        },
    )
    loss_type: Literal["sigmoid", "ipo"] = option(
        "sigmoid",
        "Loss of a pair of completions. 'sigmoid': the loss of DPO. 'ipo': moves the difference of the two log-ratios to the "
        "target 1 / (2 beta). The log-ratios are not divided by length.",
    )
    num_generations: PositiveInt = option(
        2, "Number of completions per prompt. It must be 2, because the two completions form a pair."
    )
    num_generations_eval: NonNegativeInt | None = option(
        1,
        "Number of completions per prompt in evaluation. It must be 1, because "
        "evaluation scores completions without comparing them. 0 and None mean 1.",
    )
    keep_eos_for_rewards: bool = option(
        False,
        "Append the end token to the text of finished completions before it is passed to reward functions. Conversations are "
        "not changed.",
    )
    vllm_gpu_memory_utilization: PositiveShare = option(
        0.55,
        "Fraction of the GPU's memory for vLLM, above 0 and at most 1 (vllm_mode='colocate'). The trainer uses the remaining "
        "memory. With vllm_mode='server', set it on the server instead.",
    )

    def check_fields(self) -> None:
        """Check the value of every field. A single number for ``beta`` is converted to a list."""
        beta = self.beta
        self.beta = [beta] if isinstance(beta, int | float) else beta
        super().check_fields()
        self.beta = beta

    def __post_init__(self) -> None:
        if self.max_completion_length not in (None, self.max_new_tokens):
            raise ConfigError(
                f"max_completion_length={self.max_completion_length} and max_new_tokens={self.max_new_tokens} are "
                "names of the same limit and have different values. Set only max_new_tokens."
            )
        self.max_completion_length = self.max_new_tokens
        if isinstance(self.beta, Sequence) and len(self.beta) == 1:
            self.beta = self.beta[0]
        super().__post_init__()
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.max_new_tokens >= self.max_length:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens} must be below max_length={self.max_length}, or no prompt token "
                "fits. Lower max_new_tokens or raise max_length."
            )
        if self.num_generations != 2 or (self.num_generations_eval or 1) != 1:
            raise ConfigError(
                f"num_generations={self.num_generations} and num_generations_eval={self.num_generations_eval} are not "
                "supported. Training compares 2 completions, and evaluation scores 1. Remove both options."
            )
        defaults = type(self).__dataclass_fields__
        for name in UNREAD:
            if (value := getattr(self, name)) != defaults[name].default:
                raise ConfigError(f"{name}={value!r} is not supported by {type(self).__name__}. Remove it.")

    def _check_sampling(self) -> None:
        if isinstance(self.beta, Sequence) and not self.beta:
            raise ConfigError("beta=[] is empty. Fix: pass one value, or one per epoch.")
        for value in self.betas:
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"beta={self.beta!r}: {value!r} is out of range. Fix: use numbers above 0.")
        betas, self.beta = self.beta, self.betas[0]  # type: ignore[assignment]
        super()._check_sampling()
        self.beta = betas

    @property
    def betas(self) -> list[float]:
        """``beta`` as a list with one value per epoch."""
        return list(self.beta) if isinstance(self.beta, Sequence) and not isinstance(self.beta, str) else [self.beta]

    def beta_at(self, epoch: float | None) -> float:
        """Return the value of ``beta`` for an epoch, which may be fractional. Epochs after the end of the list use its
        last value.
        """
        return float(self.betas[min(int(epoch or 0), len(self.betas) - 1)])

    @property
    def train_batch_size(self) -> int:
        """Number of completions in a micro-batch, which is twice the number of prompts."""
        return 2 * super().train_batch_size

    def _resolve_batches(self) -> None:
        """Compute batch sizes. They are numbers of prompts here, but numbers of completions in other online methods."""
        prompts, self.per_device_train_batch_size = (
            self.per_device_train_batch_size,
            2 * self.per_device_train_batch_size,
        )
        try:
            super()._resolve_batches()
        finally:
            self.per_device_train_batch_size = prompts


# Losses of a pair. They use the sum of log-ratios of a completion, without dividing by its length.
PAIR_LOSSES = {"sigmoid": sigmoid, "ipo": squared_gap}
# A warning is logged if more than this fraction of pairs are ties, because ties do not contribute to the loss.
TIES_MOST = 0.5


def sequence_sums(out: ModelOutputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum of log-probs of each completion under the policy ``(S,)``, and the sum of its log-ratios to the
    reference ``(S,)``.
    """
    assert out.logp is not None and batch.ref_logp is not None
    forest = batch.by_sequence
    return sequence_sum(out.logp, *forest), sequence_sum(out.logp - batch.ref_logp, *forest)


def pair_terms(
    batch: Batch, logp: Tensor, ratio: Tensor, *, beta: float, loss_type: str
) -> tuple[Tensor, dict[str, Metric]]:
    """Compute the loss of each pair, ``(P,)``.

    With the difference of log-ratios ``h = L+ - L-``, the loss is ``-logsigmoid(beta h)`` (``sigmoid``) or ``(h - 1 /
    (2 beta))^2`` (``ipo``). It is 0 for ties and for pairs without scores.

    Args:
        batch: Pairs. ``advantages`` are 1 for the better completion and -1 for the worse. In a tie both are 0.
        logp: ``(S,)`` sum of log-probs of each completion under the policy.
        ratio: ``(S,)`` sum of log-ratios L of each completion.
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
    """Compute the mean score ``objective/scores`` and the fraction of completions that ended, over all ranks.

    Args:
        scores: ``(n,)`` scores after subtracting penalties. NaN: no reward function applied.
        known: ``(n,)`` bool that is True for rows with a score.
        ended: ``(n,)`` bool that is True for completions with an end token.
        pairs: Whether two consecutive rows are a pair.
    """
    metrics = {"objective/scores": mean(scores, known), "val/contain_eos_token": mean(ended.float())}
    if pairs:
        metrics["objective/scores_margin"] = mean((scores[::2] - scores[1::2]).abs(), known[::2])
    return metrics


def equal_pairs(rollouts: RolloutBatch, ranks: Ranks) -> Tensor:
    """Return ``(P,)`` bool that is True for pairs with two identical completions. It includes the pairs of all ranks."""
    one = rollouts.rollouts
    same = [a.token_ids == b.token_ids for a, b in zip(one[::2], one[1::2], strict=True)]
    return torch.tensor(ranks.gather(same), dtype=torch.bool)


def preferred(pairs: Tensor, known: Tensor, equal: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Metric]]:
    """Compare the two scores of each pair, ``(P, 2)``. Return metrics and, for each completion, 1 (better), -1 (worse)
    or 0 (tie), ``(2 P,)``.

    Raises:
        RewardError: No pair has scores for both completions.
    """
    if not bool(known.any()):
        raise RewardError(
            f"none of the {len(pairs)} pairs of this generation has a reward for both completions, because "
            f"{', '.join(names)} returned None. Return a number for every completion to which a function applies."
        )
    gap = torch.where(known & ~equal, pairs[:, 0] - pairs[:, 1], 0.0)
    metrics = {"ties": mean((gap == 0).float(), known), "groups/unscorable": mean((~known).float())}
    return torch.stack([gap.sign(), -gap.sign()], 1).flatten(), metrics


def policy_metrics(batch: Batch, logp: Tensor, ratio: Tensor, beta: float) -> dict[str, Metric]:
    """Compute the KL divergence of the policy from the reference, and the mean reward with and without the KL penalty."""
    scored = batch.columns["compared"].bool()
    return {
        "objective/kl": mean(ratio),
        "objective/entropy": mean(-logp),
        "objective/non_score_reward": mean(-beta * ratio),
        "objective/rlhf_reward": mean(batch.columns["scores"] - beta * ratio, scored),
    }


class OnlineDPO(Method[OnlineDPOConfig]):
    """DPO on pairs of sampled completions. The better completion of a prompt is the chosen one.

    Reference: Direct language model alignment from online AI feedback, arXiv:2402.04792.
    """

    config_class = OnlineDPOConfig
    traits = replace(
        SAMPLES,
        own_rollouts=True,
        needs=frozenset({"logp"}),
        reads_images=True,
        cuts_prompts=True,
        whole_rows=True,
        compares_reference=True,
    )

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count the completions whose pair has scores for both completions. The loss is divided by this number."""
        return {"compared": float(sum(batch.columns["compared"].sum() for batch in batches))}

    @property
    def temperature(self) -> float:
        """Temperature of the log-probs in the loss. Always 1, because the loss has no importance ratio to the sampler."""
        return 1.0

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Return 1 (better), -1 (worse) or 0 (tie) for each completion. In evaluation, all values are 0."""
        training, totals = rollouts.mode == "train", weighted_total(rewards.values, rewards.weights)
        reasons = ranks.gather([rollout.finish_reason for rollout in rollouts.rollouts])
        ended = torch.tensor([reason == "stop" for reason in reasons])
        scores = totals - (self.cfg.missing_eos_penalty or 0.0) * (~ended).float()
        pairs = scores.view(-1, 2) if training else scores
        known = ~pairs.isnan().any(1).repeat_interleave(2) if training else ~scores.isnan()
        values, metrics = torch.zeros_like(scores), score_metrics(scores, known, ended, pairs=training)
        if training:
            values, of_pairs = preferred(pairs, known[::2], equal_pairs(rollouts, ranks), rewards.names)
            metrics |= of_pairs
        mine = slice(rewards.start, rewards.start + len(rollouts.rollouts))
        columns = {"compared": known[mine].float().tolist(), "scores": scores[mine].nan_to_num(0.0).tolist()}
        return Advantages(values, totals, rewards.start, columns=columns, token_columns=logps, metrics=metrics)

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the loss with `pair_terms`. In evaluation, compute only metrics of the policy."""
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
