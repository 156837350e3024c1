"""PPO's arithmetic against the chapter's numbers, scalar loops and float64 gradients."""

import math

import pytest
import torch

from posttrain import masked_mean, masked_var, masked_whiten
from posttrain.errors import DataError
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
from tests.wordings import raises


def wide(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_gae_of_the_chapter_s_example():
    """r = [0, 0, 1], V = 0.5, gamma 1, lambda 0.95.

    delta = [0, 0, 0.5], so A_2 = 0.5, A_1 = 0.95 * 0.5 = 0.475, A_0 = 0.95 * 0.475 = 0.45125; returns add 0.5.
    """
    advantages, returns = gae(wide([0, 0, 1]), wide([0.5, 0.5, 0.5]), gamma=1.0, lam=0.95)
    assert advantages[0].tolist() == pytest.approx([0.45125, 0.475, 0.5], abs=1e-12)
    assert returns[0].tolist() == pytest.approx([0.95125, 0.975, 1.0], abs=1e-12)


def test_gae_with_lambda_one_is_the_discounted_return_less_the_value():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    advantages, returns = gae(rewards, values, gamma=0.9, lam=1.0)
    for i in range(3):
        for t in range(6):
            discounted = sum(0.9 ** (k - t) * float(rewards[i, k]) for k in range(t, 6))
            assert float(returns[i, t]) == pytest.approx(discounted, abs=1e-12)
            assert float(advantages[i, t]) == pytest.approx(discounted - float(values[i, t]), abs=1e-12)


def test_gae_with_lambda_zero_is_the_one_step_error():
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 2, 4, generator=generator, dtype=torch.float64)
    advantages, _ = gae(rewards, values, gamma=0.9, lam=0.0)
    after = torch.cat([values[:, 1:], torch.zeros(2, 1, dtype=torch.float64)], 1)
    assert torch.allclose(advantages, rewards + 0.9 * after - values, atol=1e-14)


def test_a_short_response_beside_a_long_one_has_the_advantages_it_has_alone():
    rewards, values = wide([0.1, 0.2, 0.7, 0, 0], [0.3, 0.1, 0.4, 0.1, 0.5]), wide([0.5, 0.4, 0.3, 0, 0], [0.2] * 5)
    together, _ = gae(rewards, values, gamma=0.99, lam=0.9)
    alone, _ = gae(rewards[:1, :3], values[:1, :3], gamma=0.99, lam=0.9)
    assert torch.allclose(together[0, :3], alone[0], atol=1e-14)
    assert together[0, 3:].abs().max() == 0


@pytest.mark.parametrize(("length", "tokens", "states"), [(1, [1, 0, 0, 0], [1, 1, 0, 0]), (4, [1] * 4, [1] * 4)])
def test_a_response_that_ended_early_has_one_state_more_than_tokens(length, tokens, states):
    found = response_masks(torch.tensor([length]), 4)
    assert [mask[0].int().tolist() for mask in found] == [tokens, states]


@pytest.mark.parametrize(
    ("length", "place"),
    [(1, 1), (3, 3), (4, 3)],  # Stop at the first token, stop before the last, no stop: T = 4.
    ids=["stop at 0", "stop at 2", "no stop"],
)
def test_the_score_is_credited_after_the_last_token_or_to_it_where_there_is_no_room(length, place):
    logp, ref = wide([-1.0, -2.0, -0.5, -1.5]), wide([-1.5, -1.0, -0.5, -2.0])
    rewards, kl = token_rewards(logp, ref, torch.tensor([3.0]), torch.tensor([length]), kl_coef=0.1)
    gaps = [0.5, -1.0, 0.0, 0.5][:length] + [0.0] * (4 - length)
    assert kl[0].tolist() == pytest.approx(gaps)
    expected = [-0.1 * gap for gap in gaps]
    expected[place] += 3.0
    assert rewards[0].tolist() == pytest.approx(expected)


def test_k3_is_the_exponential_of_the_gap_less_the_gap_less_one():
    logp, ref = wide([-1.0, -2.0]), wide([-1.5, -1.0])
    _, kl = token_rewards(logp, ref, torch.zeros(1), torch.tensor([2]), kl_coef=1.0, kl_estimator="k3")
    assert kl[0].tolist() == pytest.approx([math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0])


def test_what_stands_behind_a_response_is_never_read():
    logp, ref = wide([-1.0, float("nan")]), wide([-1.5, 7.0])
    rewards, kl = token_rewards(logp, ref, torch.tensor([1.0]), torch.tensor([1]), kl_coef=0.1)
    assert kl.tolist() == [[0.5, 0.0]]
    assert rewards[0].tolist() == pytest.approx([-0.05, 1.0])


def test_masked_statistics_of_the_chapter():
    values, mask = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0])
    assert float(masked_mean(values, mask)) == 2.5
    assert float(masked_var(values, mask)) == 0.5
    found = moments(values, mask)
    assert (found.count, found.mean, found.variance) == (2, 2.5, 0.5)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_with_merged_moments_is_masked_whitening(shift_mean):
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(4, 7, generator=generator, dtype=torch.float64) * 3 + 5
    mask = torch.rand(4, 7, generator=generator) > 0.3
    ours = whiten(values, mask, moments(values, mask), shift_mean=shift_mean)
    theirs = masked_whiten(values, mask, shift_mean=shift_mean)
    assert torch.allclose(ours[mask], theirs[mask], atol=1e-12)
    assert ours[~mask].abs().max() == 0


def test_moments_of_the_parts_are_those_of_the_whole():
    values = torch.randn(40, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 1e4
    parts = [values[:1], values[1:1], values[1:30], values[30:]]
    merged = merge_moments(moments(part, torch.ones_like(part)) for part in parts)
    assert merged.count == 40
    assert merged.mean == pytest.approx(float(values.mean()), rel=1e-14)
    assert merged.variance == pytest.approx(float(values.var()), rel=1e-10)


def test_whitening_of_nothing_is_refused_and_of_one_value_is_none():
    values, mask = torch.tensor([3.0, 9.0]), torch.tensor([True, False])
    assert whiten(values, mask, moments(values, mask)).tolist() == [3.0, 0.0]
    with raises(DataError):
        whiten(values, torch.zeros(2), Moments(0.0, 0.0, 0.0))


def test_losses_equal_a_scalar_loop():
    generator = torch.Generator().manual_seed(4)
    ratio_log, advantages, values, old, returns = torch.randn(5, 3, 5, generator=generator, dtype=torch.float64)
    ratio_log = ratio_log / 3
    policy = clipped(ratio_log, advantages, epsilon=0.2, epsilon_high=0.2)
    value = clipped_value_loss(values, old, returns, cliprange=0.2)
    for i in range(3):
        for t in range(5):
            rho, a = math.exp(float(ratio_log[i, t])), float(advantages[i, t])
            assert float(policy[i, t]) == pytest.approx(max(-a * rho, -a * min(max(rho, 0.8), 1.2)), abs=1e-12)
            v, o, r = float(values[i, t]), float(old[i, t]), float(returns[i, t])
            near = min(max(v, o - 0.2), o + 0.2)
            assert float(value[i, t]) == pytest.approx(0.5 * max((v - r) ** 2, (near - r) ** 2), abs=1e-12)


def test_the_value_loss_stops_pulling_a_value_that_moved_far_enough():
    """V went from 0 to 0.5 towards a return of 1: beyond 0.2 the larger, clipped error has no slope."""
    value = torch.tensor([0.1, 0.5], dtype=torch.float64, requires_grad=True)
    clipped_value_loss(value, torch.zeros(2), torch.ones(2), cliprange=0.2).sum().backward()
    assert value.grad.tolist() == pytest.approx([-0.9, 0.0])


def test_gradcheck_in_float64():
    generator = torch.Generator().manual_seed(5)
    values, old, returns = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda v: clipped_value_loss(v, old, returns, cliprange=0.2), values.requires_grad_()
    )
    rewards = torch.randn(2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, v: gae(r, v, gamma=0.9, lam=0.8), (rewards, values))
