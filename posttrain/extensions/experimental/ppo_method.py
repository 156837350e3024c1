"""PPO: the clipped policy loss and the clipped value loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.extensions.experimental.ppo_config import PPOConfig
from posttrain.losses.advantages import weighted_total
from posttrain.losses.policy import clipped
from posttrain.losses.ppo import (
    Moments,
    clipped_value_loss,
    gae,
    merge_moments,
    moments,
    response_masks,
    token_rewards,
    whiten,
)
from posttrain.methods.base import SAMPLES, Method
from posttrain.metrics import Metric, mean
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, Ranks, Row, State

if TYPE_CHECKING:
    from posttrain.rewards.runner import RewardTable
    from posttrain.types import LogProbs

# Name of the count of states. The value loss is divided by this count. It differs from the number of tokens in the loss.
STATES = "states"


def ppo_objective(out: ModelOutputs, batch: Batch, cfg: PPOConfig) -> LossTerms:
    """Compute ``-min(r A, clip(r, 1 - c, 1 + c) A)`` per token, plus ``vf_coef`` times the clipped value loss per
    state.

    The policy loss is averaged over the tokens of the mini-batch, the value loss over its states. A response that
    ended early also has a state after its last token.

    Args:
        out: ``logp``, ``values`` and (for metrics) ``entropy``, ``(B, T)``.
        batch: ``advantages`` and ``old_logp (B, T)``; columns ``old_values``, ``returns`` and ``states (B, T)``.
        cfg: Config with ``cliprange``, ``cliprange_value`` and ``vf_coef``.

    Reference: PPO, arXiv:1707.06347, equations 7 and 9.
    """
    assert out.logp is not None and out.values is not None and batch.old_logp is not None
    mask, states = batch.loss_mask, states_mask(batch)
    old_values, returns = batch.columns["old_values"], batch.columns["returns"]
    log_ratio = out.logp - batch.old_logp
    policy = clipped(log_ratio, batch.advantages, epsilon=cfg.cliprange, epsilon_high=cfg.cliprange)  # type: ignore[arg-type]
    value = clipped_value_loss(out.values, old_values, returns, cliprange=cfg.cliprange_value)
    moved = log_ratio.detach()
    ratio = moved.exp()
    excess = ratio - 1.0  # Subtract 1: a variance as small as 1e-9 is then representable in float32.
    value_error = (out.values.detach() - returns).square() / 2
    metrics = {
        "loss/policy_avg": mean(policy, mask),
        "loss/value_avg": mean(value, states),
        "policy/approxkl_avg": mean(moved.square() / 2, mask),
        "policy/clipfrac_avg": mean((policy.detach() > -ratio * batch.advantages).float(), mask),
        "val/clipfrac_avg": mean((value.detach() > value_error).float(), states),
        "val/ratio": mean(excess, mask),
        "val/ratio_var": mean(excess.square(), mask),
    }
    if out.entropy is not None:
        metrics["policy/entropy_avg"] = mean(out.entropy, mask)
    loss = LossTerms(policy, mask, "token", metrics=metrics)
    loss.extra.append(LossTerms(cfg.vf_coef * value, states, "token", count=STATES))
    return loss


def states_mask(batch: Batch) -> Tensor:
    """Return a mask of the positions at which the value function is trained, ``(B, T)``."""
    return batch.columns["states"] > 0


@dataclass(frozen=True, slots=True)
class Episodes:
    """Advantages and returns of the S responses of one rank as ``(S, T)`` tensors. T is the maximum number of tokens of
    a response.

    Attributes:
        advantages: Advantages, whitened over the rollout batch of all ranks. 0 where ``tokens`` is False.
        returns: Targets of the value function at each state.
        tokens: Mask that is True for the tokens of responses with a score.
        states: Mask that is True for the states of responses with a score.
        metrics: Metrics with the prefix ``objective/``.
    """

    advantages: Tensor
    returns: Tensor
    tokens: Tensor
    states: Tensor
    metrics: dict[str, Metric]


def plain_rows(generation: RolloutBatch, length: int, pad_token_id: int) -> list[Row]:
    """Convert each response to a row. If a response ended early, append one pad token that does not contribute to the loss.

    The pad token represents the state after the last token. The value of this state is computed from the hidden state
    of the last token. `token_rewards` adds the response's score to the reward of this state.
    """
    rows = []
    for rollout in generation.rollouts:
        n = len(rollout.token_ids)
        after = [pad_token_id] if n < length else []
        rows.append(Row(list(rollout.prompt_ids), [[*rollout.token_ids, *after]], [[1] * n + [0] * len(after)]))
    return rows


def episodes(
    rollouts: RolloutBatch, logps: LogProbs, scores: Tensor, cfg: PPOConfig, merged: Callable[[Moments], Moments]
) -> Episodes:
    """Compute the reward of each token from the KL penalty and the score. Then estimate advantages and whiten them over
    all ranks.

    Args:
        rollouts: This rank's responses.
        logps: ``old_logp``, ``ref_logp`` and ``old_values`` of each token. The tokens are those of the rows that
            `plain_rows` returns.
        scores: ``(S,)`` scores. NaN means that no reward function applied, so the response is excluded from training.
        cfg: Config with ``response_length``, ``kl_coef``, ``kl_estimator``, ``gamma``, ``lam`` and ``whiten_rewards``.
        merged: Function that merges the moments (count, mean, sum of squared deviations) of this rank with the moments of
            all other ranks.
    """
    width, scored = cfg.response_length, ~scores.isnan()
    grids = {name: _grid(logps[name], width) for name in ("old_logp", "ref_logp", "old_values")}
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts.rollouts])
    tokens, states = (mask & scored[:, None] for mask in response_masks(lengths, width))
    logp, values = grids["old_logp"] * tokens, grids["old_values"] * states
    rewards, kl = token_rewards(
        logp, grids["ref_logp"], scores.nan_to_num(0.0), lengths, kl_coef=cfg.kl_coef, kl_estimator=cfg.kl_estimator
    )
    rewards, kl = rewards * states, kl * tokens
    if cfg.whiten_rewards:
        rewards = _whitened(rewards, states, merged, shift_mean=False)
    advantages, returns = gae(rewards, values, gamma=cfg.gamma, lam=cfg.lam)
    charged = -cfg.kl_coef * kl.sum(1)
    metrics = {
        "objective/kl": mean(kl.sum(1), scored),
        "objective/entropy": mean(-logp.sum(1), scored),
        "objective/non_score_reward": mean(charged, scored),
        "objective/rlhf_reward": mean(charged + scores.nan_to_num(0.0), scored),
        "objective/scores": mean(scores.nan_to_num(0.0), scored),
    }
    return Episodes(_whitened(advantages, tokens, merged), returns * states, tokens, states, metrics)


def _whitened(values: Tensor, mask: Tensor, merged: Callable[[Moments], Moments], *, shift_mean: bool = True) -> Tensor:
    statistics = merged(moments(values, mask))
    return whiten(values, mask, statistics, shift_mean=shift_mean) if statistics.count else values * mask


def _grid(lists: list[list[float]], width: int) -> Tensor:
    """Convert lists of different lengths to a float64 tensor ``(S, width)``, padded with 0."""
    grid = torch.zeros(len(lists), width, dtype=torch.float64)
    for row, numbers in enumerate(lists):
        grid[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return grid


def training_rows(generation: RolloutBatch, length: int, pad_token_id: int) -> list[Row]:
    """Return one training row per response: the row from `plain_rows` with the columns that `ppo_objective` reads."""
    names, columns = ("old_logp", "old_values", "advantages", "returns", "states"), generation.token_columns
    return [
        replace(
            row,
            loss_masks=[[int(trained) for trained in columns["trained"][i]]],
            token_columns={name: [columns[name][i]] for name in names},
        )
        for i, row in enumerate(plain_rows(generation, length, pad_token_id))
    ]


def token_lists(found: Episodes, sizes: Sequence[int]) -> dict[str, list[list[float]]]:
    """Convert each tensor of `Episodes` to one list per response, with one number per token of the response's `plain_rows`
    row.
    """
    grids = {"advantages": found.advantages, "returns": found.returns}
    grids |= {"states": found.states.double(), "trained": found.tokens.double()}
    return {name: [row[:size].tolist() for row, size in zip(grid, sizes, strict=True)] for name, grid in grids.items()}


class PPO(Method[PPOConfig]):
    """Proximal policy optimization with a learned value function.

    Reference: PPO, arXiv:1707.06347.
    """

    config_class = PPOConfig
    traits = replace(
        SAMPLES,
        own_rollouts=True,
        needs=frozenset({"logp", "values", "entropy"}),
        compares_reference=True,
        id_columns=("input_ids",),
    )

    @property
    def temperature(self) -> float:
        """Temperature of sampling and of all log-probs: the config's temperature plus 1e-7, as in TRL."""
        return self.cfg.temperature + 1e-7

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Compute whitened GAE advantages, and the returns on which the value function is trained. The KL penalty is
        subtracted from the rewards.

        ``rollouts.columns["ended"]`` is 1 for responses with an end token.
        """
        cfg, mine = self.cfg, slice(rewards.start, rewards.start + len(rollouts.rollouts))
        totals = weighted_total(rewards.values, rewards.weights)
        scores = totals[mine].double()
        if cfg.missing_eos_penalty is not None:
            scores = scores - cfg.missing_eos_penalty * (
                1.0 - torch.tensor(rollouts.columns["ended"], dtype=torch.float64)
            )
        gae = episodes(rollouts, logps, scores, cfg, lambda part: merge_moments(ranks.gather([part])))
        lists = token_lists(gae, [len(numbers) for numbers in logps["old_values"]])
        return Advantages(
            gae.advantages,
            totals,
            rewards.start,
            columns={"scores": scores.tolist()},
            token_columns={**logps, **lists},
            metrics=gae.metrics,
        )

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the loss with `ppo_objective`."""
        return ppo_objective(outputs, batch, self.cfg)

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count the states of scored responses. The value loss is divided by this number."""
        return {STATES: float(sum(states_mask(batch).sum() for batch in batches))}

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Compute the mean and the variance of the importance ratio ``r`` from the logged means of ``r - 1`` and ``(r -
        1)^2``.
        """
        if "val/ratio" in metrics:
            excess = metrics["val/ratio"]
            metrics["val/ratio_var"] = max(metrics["val/ratio_var"] - excess * excess, 0.0)
            metrics["val/ratio"] = 1.0 + excess
        return metrics
