"""From token log-probs to what a preference loss reads: links, sums, weights, rewards."""

import doctest
import math

import pytest
import torch

from posttrain.errors import ConfigError
from posttrain.losses import divergence
from posttrain.losses.divergence import (
    DIVERGENCES,
    alpha_divergence,
    alpha_reward,
    collision_logp,
    desensitized_sum,
    forward_kl,
    js_divergence,
    link,
    log1mexp,
    mean_logp,
    pair_values,
    wpo_weight,
)
from tests.wordings import raises


def t(*values, dtype=torch.float64, grad=False):
    return torch.tensor(values, dtype=dtype, requires_grad=grad)


def test_the_table_holds_exactly_the_public_divergences():
    assert list(DIVERGENCES) == ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


def test_an_unknown_divergence_is_named_with_the_closest():
    with raises(ConfigError, "f_divergence_type='reverse_lk'", "'reverse_kl'"):
        link(t(0.0), divergence="reverse_lk")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reverse_kl", [2.0, 0.0]),
        ("forward_kl", [1 - math.exp(-2), 0.0]),
        ("js_divergence", [math.log(2) - math.log1p(math.exp(-2)), 0.0]),
        ("alpha_divergence", [2 - 2 * math.exp(-1), 0.0]),
    ],
)
def test_links_by_hand(name, expected):
    """L = 2 and 0: 1 - e^-L; log 2 + log sigmoid(L) = log 2 - log(1 + e^-L); at alpha 0.5 2 - 2 e^(-L/2)."""
    assert link(t(2.0, 0.0), divergence=name, alpha=0.5).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_score_never_falls_when_the_log_ratio_rises(name):
    """f is convex, so f' is monotone: no link may turn a preference around."""
    scores = link(torch.linspace(-30, 30, 601, dtype=torch.float64), divergence=name, alpha=0.3)
    assert (scores.diff() >= 0).all()
    assert scores[300] > scores[0]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_link_gradcheck(name):
    x = t(-3.0, -0.2, 0.0, 1.7, 4.0, grad=True)
    assert torch.autograd.gradcheck(lambda v: link(v, divergence=name, alpha=0.4), x)


def test_the_slope_of_each_link_is_what_the_formula_says():
    """forward e^-L; js 1 - sigmoid(L); alpha e^((alpha - 1) L), which is 1 at L = 0 for every alpha."""
    for function, expected in (
        (forward_kl, math.exp(-1.5)),
        (js_divergence, 1 / (1 + math.exp(1.5))),
        (lambda v: alpha_divergence(v, alpha=3.0), math.exp(3.0)),
    ):
        x = t(1.5, grad=True)
        function(x).sum().backward()
        assert x.grad.item() == pytest.approx(expected)


def test_alpha_one_is_the_reverse_kl_and_alpha_two_and_zero_are_exponentials():
    x = t(-2.0, 0.0, 3.0)
    assert torch.equal(alpha_divergence(x, alpha=1.0), x)
    assert torch.equal(alpha_divergence(x, alpha=1 + 9e-7), x)
    assert torch.allclose(alpha_divergence(x, alpha=2.0), x.exp() - 1)
    assert torch.allclose(alpha_divergence(x, alpha=0.0), forward_kl(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("alpha", [-1.0, 0.5, 0.999, 1.001, 2.0])
def test_scores_and_gradients_stay_finite_and_keep_their_dtype(name, dtype, alpha):
    x = torch.tensor([1e4, -1e4, 88.0, -89.0, 0.0], dtype=dtype, requires_grad=True)
    score = link(x, divergence=name, alpha=alpha)
    assert score.dtype == dtype
    assert torch.isfinite(score).all()
    score.double().sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_ratios_are_scored_in_float32_and_rounded_once(dtype):
    x = torch.linspace(-8, 8, 101).to(dtype)
    for name in ("forward_kl", "alpha_divergence"):
        assert torch.equal(link(x, divergence=name, alpha=0.3), link(x.float(), divergence=name, alpha=0.3).to(dtype))


def test_the_exponent_stops_at_80_or_11_and_the_gradient_with_it():
    x = torch.tensor([-79.0, -81.0], requires_grad=True)
    score = forward_kl(x)
    assert score.tolist() == pytest.approx([-math.exp(79), -math.exp(80)], rel=1e-5)
    score.sum().backward()
    assert x.grad[0] > 0
    assert x.grad[1] == 0
    assert forward_kl(torch.tensor([-500.0], dtype=torch.float16)).item() == pytest.approx(-math.exp(11), rel=1e-3)


# Sums and weights ---------------------------------------------------------------------------------------------------


def test_an_empty_completion_has_mean_zero_not_nan():
    assert mean_logp(t(-6.0, 0.0), torch.tensor([3, 0])).tolist() == [-2.0, 0.0]


LAYOUT = torch.tensor([[-1, 0, 0, 0, 1, 1], [-1, 2, 3, 2, -1, -1]])  # Row 1 interleaves two sequences.
LOGP = torch.tensor([[9.0, -1, -2, -4, -8, -16], [9.0, -32, -64, -128, 9, 9]], dtype=torch.float64)
MASK = LAYOUT >= 0


def test_tokens_past_the_shorter_completion_are_scaled():
    """Sequence 0: -1 - 2 within the limit 2, alpha times -4 beyond; 1: all within 2; 2: -32 within 1, -128 beyond."""
    limits = torch.tensor([2, 2, 1, 1])
    got = desensitized_sum(LOGP, MASK, LAYOUT, limits, alpha=0.25)
    assert got.tolist() == [-3 - 1.0, -24, -32 - 32.0, -64]
    assert desensitized_sum(LOGP, MASK, LAYOUT, limits, alpha=1.0).tolist() == [-7, -24, -160, -64]
    assert desensitized_sum(LOGP, MASK, LAYOUT, limits, alpha=0.0).tolist() == [-3, -24, -32, -64]


def test_a_token_without_loss_does_not_count_towards_the_limit():
    mask = MASK.clone()
    mask[0, 1] = False
    got = desensitized_sum(LOGP, mask, LAYOUT, torch.tensor([1, 1, 9, 0]), alpha=0.0)
    assert got.tolist() == [-2, -8, -160, 0]


def test_tokens_of_no_sequence_are_left_out_even_when_they_are_masked_in():
    everything = torch.ones_like(MASK)
    limits = torch.tensor([2, 2, 1, 1])
    got = desensitized_sum(LOGP, everything, LAYOUT, limits, alpha=0.25)
    assert torch.equal(got, desensitized_sum(LOGP, MASK, LAYOUT, limits, alpha=0.25))


def test_alpha_zero_gives_no_gradient_past_the_limit_and_padding_none_at_all():
    logp = LOGP.clone()
    logp[0, 0] = float("nan")  # What lies outside sequences is never read.
    logp.requires_grad_()
    total = desensitized_sum(logp, MASK, LAYOUT, torch.tensor([2, 2, 1, 1]), alpha=0.0).sum()
    total.backward()
    assert logp.grad.tolist() == [[0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0]]


def test_a_sequence_without_tokens_sums_to_zero():
    got = desensitized_sum(LOGP, MASK & (LAYOUT != 1), LAYOUT, torch.tensor([2, 2, 1, 1]), alpha=0.5)
    assert got.tolist() == [-5.0, 0.0, -96.0, -64.0]


def test_desensitized_sum_gradcheck():
    logp = LOGP.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: desensitized_sum(x, MASK, LAYOUT, torch.tensor([2, 1, 1, 0]), alpha=0.3), logp
    )


def test_collision_is_the_log_of_the_summed_squares():
    """p = (3/4, 1/4): log(9/16 + 1/16) = log(5/8). Uniform over 8: log(1/8). Shifts and sizes of logits do not matter."""
    assert collision_logp(t(math.log(3), 0.0)).item() == pytest.approx(math.log(5 / 8))
    assert collision_logp(torch.full((2, 8), 1e4)).tolist() == pytest.approx([-math.log(8)] * 2, abs=2e-3)
    z = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(collision_logp(z), z.softmax(-1).square().sum(-1).log())
    assert torch.autograd.gradcheck(collision_logp, z)


def test_wpo_weight_by_hand_and_without_gradient():
    """Two tokens of p = 1/4 under (3/4, 1/4): exp(log(1/4) - log(5/8)) = 2/5. A token of p = 3/4 weighs 6/5, above 1."""
    logp = t(2 * math.log(1 / 4), math.log(3 / 4), grad=True)
    weight = wpo_weight(logp, t(2 * math.log(5 / 8), math.log(5 / 8)), torch.tensor([2, 1]))
    assert weight.tolist() == pytest.approx([0.4, 1.2])
    assert not weight.requires_grad


def test_an_empty_completion_weighs_one():
    assert wpo_weight(t(0.0), t(0.0), torch.tensor([0])).item() == 1.0


# Rewards without a reference ----------------------------------------------------------------------------------------


def test_alpha_reward_by_hand():
    """l = -2, alpha 0.25: (1 - e^0.5) / 0.25 = -2.594885. Negative alpha saturates: (1 - e^-1) / -0.5 = -1.264241."""
    assert alpha_reward(t(-2.0), alpha=0.25).item() == pytest.approx(-2.5948850828)
    assert alpha_reward(t(-2.0), alpha=-0.5).item() == pytest.approx(-1.2642411177)
    x = t(-2.0)
    assert alpha_reward(x, alpha=0.0) is x


def test_alpha_reward_is_continuous_at_zero_and_its_slope_is_a_power_of_the_probability():
    """R' = exp(-alpha l); a float32 formula with 1 - exp would lose all digits at alpha 1e-6."""
    assert alpha_reward(torch.tensor([-2.0]), alpha=1e-6).item() == pytest.approx(-2.000002, rel=1e-6)
    x = t(-2.0, grad=True)
    alpha_reward(x, alpha=0.25).sum().backward()
    assert x.grad.item() == pytest.approx(math.exp(0.5))
    assert torch.autograd.gradcheck(lambda v: alpha_reward(v, alpha=0.7), t(-3.0, -0.1, grad=True))


def test_alpha_reward_of_a_summed_log_prob_does_not_underflow():
    """A probability of e^-110 is 0 in float32, and its -0.1th power e^11 would come out as infinite."""
    assert alpha_reward(torch.tensor([-110.0]), alpha=0.1).item() == pytest.approx((1 - math.exp(11)) / 0.1, rel=1e-5)
    x = torch.tensor([-1e4, 0.0], requires_grad=True)
    reward = alpha_reward(x, alpha=0.25)
    reward.sum().backward()
    assert torch.isfinite(reward).all()
    assert torch.isfinite(x.grad).all()


def test_log1mexp_by_hand_and_against_float64():
    """log(1 - 1/2) = -log 2 at the branch point; log(1 - e^-1) = -0.458675."""
    assert log1mexp(t(-math.log(2), -1.0)).tolist() == pytest.approx([-math.log(2), -0.4586751454])
    x = torch.tensor([-1e-5, -1e-3, -0.1, -0.69, -0.70, -5.0, -20.0])
    assert torch.allclose(log1mexp(x).double(), torch.log(-torch.expm1(x.double())), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_log1mexp_of_a_certain_token_has_a_finite_value_and_gradient(dtype):
    x = torch.tensor([0.0, -1e-10, -1e-6, 1.0, -1e4, -110.0], dtype=dtype, requires_grad=True)
    y = log1mexp(x)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert y[0].item() == pytest.approx(math.log(1e-6), rel=3e-3)
    assert torch.isfinite(x.grad).all()
    assert x.grad[0] == x.grad[1] == 0


def test_log1mexp_gradcheck_on_both_branches():
    assert torch.autograd.gradcheck(log1mexp, t(-0.05, -0.5, -0.8, -3.0, grad=True))


def test_pair_values_subtracts_before_it_links_and_keeps_the_plain_sum_apart():
    one = torch.ones(1)
    values = pair_values(
        -3 * one, -5 * one, -4 * one, -4.5 * one, one, 2 * one, divergence="forward_kl", plain_chosen_logp=-7 * one
    )
    assert values["chosen_ratio"].item() == 1.0
    assert values["rejected_ratio"].item() == -0.5
    assert values["chosen_score"].item() == pytest.approx(1 - math.exp(-1))
    assert values["rejected_score"].item() == pytest.approx(1 - math.exp(0.5))
    assert values["plain_chosen_logp"].item() == -7.0


def test_the_examples_in_the_docstrings_run():
    result = doctest.testmod(divergence)
    assert result.attempted > 0
    assert result.failed == 0
