"""PPO in one function: the clipped surrogate of the policy, and the clipped error of the value function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from posttrain.losses.policy import clipped
from posttrain.losses.ppo import clipped_value_loss
from posttrain.metrics import mean
from posttrain.types import Batch, LossTerms, ModelOutputs

if TYPE_CHECKING:
    from posttrain.algorithms.ppo.config import PPOConfig

__all__ = ["STATES", "ppo_objective", "states_mask"]

STATES = "states"  # Count of states with a value, which is not that of trained tokens.


def ppo_objective(out: ModelOutputs, batch: Batch, cfg: PPOConfig) -> LossTerms:
    """``-min(r A, clip(r, 1 - c, 1 + c) A)`` a token, plus ``vf_coef`` times the clipped value loss a state.

    Both are means over the whole mini-batch: the first over its tokens, the second over its states, one more a response
    that ended early.

    Args:
        out: ``logp``, ``values`` and, for the log, ``entropy``, ``(B, T)``.
        batch: ``advantages`` and ``old_logp (B, T)``; columns ``old_values``, ``returns`` and ``states (B, T)``.
        cfg: ``cliprange``, ``cliprange_value``, ``vf_coef``.

    Reference: PPO, arXiv:1707.06347, equations 7 and 9.
    """
    assert out.logp is not None and out.values is not None and batch.old_logp is not None
    mask, states = batch.loss_mask, states_mask(batch)
    old_values, returns = batch.columns["old_values"], batch.columns["returns"]
    log_ratio = out.logp - batch.old_logp
    policy = clipped(log_ratio, batch.advantages, epsilon=cfg.cliprange, epsilon_high=cfg.cliprange)  # type: ignore[arg-type]
    value = clipped_value_loss(out.values, old_values, returns, cliprange=cfg.cliprange_value)
    moved = log_ratio.detach()
    excess = moved.exp() - 1.0  # Centred, so that a variance of 1e-9 survives float32.
    value_error = (out.values.detach() - returns).square() / 2
    metrics = {
        "loss/policy_avg": mean(policy, mask),
        "loss/value_avg": mean(value, states),
        "policy/approxkl_avg": mean(moved.square() / 2, mask),
        "policy/clipfrac_avg": mean((policy.detach() > -excess.add(1.0) * batch.advantages).float(), mask),
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
    """``(B, T)`` bool, where the value function is trained."""
    return batch.columns["states"] > 0
