"""PPO's token rewards, generalized advantage estimation, whitening, and clipped value loss.

A response of L tokens (at most T) has one state before each token, with the indices ``0..L-1``. If ``L < T``, the response
has one more state after its last token. The score of the response is added to the reward of its last state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.errors import DataError
from posttrain.losses.policy import KL_ESTIMATORS

__all__ = [
    "Moments",
    "clipped_value_loss",
    "gae",
    "merge_moments",
    "moments",
    "response_masks",
    "token_rewards",
    "whiten",
]

# Constant that is added to the variance to avoid division by 0 if all values are equal.
WHITEN_EPS = 1e-8


def response_masks(lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return two masks for S responses of up to T tokens: a mask of tokens, and a mask of states with a value.

    ``tokens[i, t] = t < L_i`` and ``states[i, t] = t < min(L_i + 1, T)``.

    Args:
        lengths: ``(S,)`` int number of tokens of each response.
        width: T, the maximum number of tokens of a response.

    Returns:
        Two ``(S, T)`` bool masks.

    >>> [m.int().tolist() for m in response_masks(torch.tensor([1, 3]), 3)]
    [[[1, 0, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 1]]]
    """
    place = torch.arange(width, device=lengths.device)
    return place < lengths[:, None], place <= lengths[:, None]


def token_rewards(
    logp: Tensor, ref_logp: Tensor, scores: Tensor, lengths: Tensor, *, kl_coef: float, kl_estimator: str = "k1"
) -> tuple[Tensor, Tensor]:
    """Compute the reward ``r_t = -kl_coef * kl_t`` of each token, and add the score to the reward of a response's last
    state.

    Args:
        logp: ``(S, T)`` log-probs of the sampled tokens at sampling time, in nats. T is the maximum length of a response.
        ref_logp: ``(S, T)`` log-probs under the reference.
        scores: ``(S,)`` score of each response.
        lengths: ``(S,)`` int number of tokens of each response. Log-probs after the last token are ignored.
        kl_coef: Weight of the KL penalty.
        kl_estimator: ``k1`` or ``k3``, see `posttrain.losses.policy`.

    Returns:
        Two tensors ``(S, T)`` of rewards and of KL divergences. Rewards are 0 after the last state of a response, and KL
        divergences are 0 after its last token.

    Reference: Learning to summarize from human feedback, arXiv:2009.01325, section 3.4.
    """
    tokens, _ = response_masks(lengths, logp.shape[1])
    kl = torch.where(tokens, KL_ESTIMATORS[kl_estimator](logp, ref_logp), 0.0)
    last = lengths.clamp_max(logp.shape[1] - 1)[:, None]
    return (-kl_coef * kl).scatter_add(1, last, scores[:, None].to(kl.dtype)), kl


def gae(rewards: Tensor, values: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute the generalized advantages ``A_t = d_t + gamma lam A_{t+1}`` with ``d_t = r_t + gamma V_{t+1} - V_t``. After
    the last state of a response, V and A are 0.

    Args:
        rewards: ``(S, T)`` rewards r, which are 0 after a response's last state.
        values: ``(S, T)`` values V, which are 0 after a response's last state.
        gamma: Discount per token, in [0, 1].
        lam: Lambda of GAE. 1 gives the Monte-Carlo return minus the value, and 0 gives the one-step error.

    Returns:
        Two tensors ``(S, T)`` of advantages A and of returns ``A + V``.

    Reference: High-dimensional continuous control using generalized advantage estimation, arXiv:1506.02438, equation 16.

    >>> gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5), gamma=1.0, lam=0.95)[0]
    tensor([[0.4512, 0.4750, 0.5000]])
    """
    after = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], dim=1)
    delta = rewards + gamma * after - values
    advantages = torch.zeros_like(delta)
    carried = delta.new_zeros(len(delta))
    for t in reversed(range(delta.shape[1])):
        carried = delta[:, t] + gamma * lam * carried
        advantages[:, t] = carried
    return advantages, advantages + values


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean, and sum of squared deviations of a set of numbers. `merge_moments` computes the exact moments over several
    ranks.
    """

    count: float
    mean: float
    deviations: float

    @property
    def variance(self) -> float:
        """Bessel-corrected variance, or 0 for fewer than two numbers."""
        return self.deviations / (self.count - 1) if self.count > 1 else 0.0


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Compute the `Moments` of the values that the mask selects. All moments are 0 if the mask selects no value."""
    selected = values[mask.bool()].double()
    if not selected.numel():
        return Moments(0.0, 0.0, 0.0)
    mean = float(selected.mean())
    return Moments(float(selected.numel()), mean, float((selected - mean).square().sum()))


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Compute the `Moments` of the union of several sets from the moments of the sets. The result does not depend on how the
    numbers are split into ``parts``.

    Reference: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1.
    """
    parts = list(parts)
    count = sum(part.count for part in parts)
    if not count:
        return Moments(0.0, 0.0, 0.0)
    mean = sum(part.count * part.mean for part in parts) / count
    return Moments(count, mean, sum(p.deviations + p.count * (p.mean - mean) ** 2 for p in parts))


def whiten(values: Tensor, mask: Tensor, statistics: Moments, *, shift_mean: bool = True) -> Tensor:
    """Standardize the values that the mask selects to ``(v - mean) / sqrt(var + 1e-8)``. All other values become 0. With
    ``shift_mean=False``, the mean is added afterwards.

    Args:
        values: Tensor of any shape.
        mask: Bool mask of the same shape.
        statistics: Moments of all values that are whitened together, including the values of other ranks.
        shift_mean: Whether the result has the mean 0. If False, the result has the original mean.

    Returns:
        Tensor of the same shape. A single value has no variance and is returned unchanged.

    Raises:
        DataError: ``statistics.count`` is 0.
    """
    if not statistics.count:
        raise DataError(
            f"advantages cannot be whitened, because the mask of shape {tuple(mask.shape)} selects no value."
        )
    if statistics.count < 2:
        return values * mask
    scaled = (values - statistics.mean) * (statistics.variance + WHITEN_EPS) ** -0.5
    return (scaled if shift_mean else scaled + statistics.mean) * mask


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float) -> Tensor:
    """Compute the clipped squared error of the value function, ``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``.

    Args:
        values: ``(B, T)`` current values.
        old_values: ``(B, T)`` values when the response was sampled.
        returns: ``(B, T)`` returns R, which are the targets of the values.
        cliprange: Maximum distance c of the clipped value from the old value. Beyond this distance, the gradient of the
            clipped term is 0.

    Reference: Implementation matters in deep policy gradients, arXiv:2005.12729, section 3, item 1.
    """
    bounded = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return torch.maximum((values - returns).square(), (bounded - returns).square()) / 2
