"""Losses of labelled completions: reference values, hand-derived numbers, gradients, extremes."""

import doctest
import math
import statistics

import pytest
import torch

from posttrain.losses import unpaired
from posttrain.losses.unpaired import (
    BCO_LOSSES,
    KTO_LOSSES,
    Moments,
    apo_zero_unpaired,
    bco,
    density_weight,
    kl_baseline,
    kl_totals,
    kto,
    update_moments,
)


def t(*values, dtype=torch.float64, grad=False):
    return torch.tensor(values, dtype=dtype, requires_grad=grad)


RATIO = t(2.0, -2.0, -1.0, 2.0)
LABELS = torch.tensor([True, True, False, False])
WEIGHTS = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
EVEN = {"desirable_weight": 1.0, "undesirable_weight": 1.0}


def test_the_tables_hold_exactly_the_public_loss_types():
    assert list(KTO_LOSSES) == ["kto", "apo_zero_unpaired"]
    assert list(BCO_LOSSES) == ["bco"]


@pytest.mark.parametrize(("name", "expected"), [("kto", 0.628045), ("apo_zero_unpaired", 0.634321)])
def test_reference_value(name, expected):
    """The baseline is the mean of the partners' log-ratios (3, 0, 2, -1), 1."""
    baseline = kl_baseline(kl_totals(t(-40.0, -41, -38, -42) - t(-43.0, -41, -40, -41)))
    assert baseline.item() == 1.0
    values = {"log_ratio": RATIO, "desirable": LABELS, "baseline": baseline}
    loss = KTO_LOSSES[name](values, beta=0.1, **WEIGHTS)
    assert loss.mean().item() == pytest.approx(expected, abs=1e-6)


def test_reference_values_of_bco_s_first_update():
    rewards = (0.1 * RATIO).tolist()
    moments = update_moments(Moments(), statistics.fmean(rewards), statistics.pvariance(rewards), 4)
    assert moments.mean == pytest.approx(0.025)
    assert moments.var == pytest.approx(0.031875)
    assert moments.std == pytest.approx(0.206155, abs=1e-6)
    assert moments.count == 4
    values = {"log_ratio": RATIO, "desirable": LABELS, "shift": t(moments.mean), "weight": torch.ones(4)}
    loss = BCO_LOSSES["bco"](values, beta=0.1)
    assert loss.tolist() == pytest.approx([0.6095, 0.8120, 0.6326, 0.7845], abs=5e-5)


def test_hand_derived_numbers():
    """beta 0.5, L = (3, -1), z0 = 1: 1 - sig(1) = 0.268941 and 1 - sig(0.5 * 2) = 0.268941, times 2 and 3.

    Against 0: 1 - sig(1.5) = 0.182426 and sig(-0.5) = 0.377541. BCO with shift 0.5: log(1 + e^-1) = 0.313262 and, at
    reward -0.5 - 0.5 = -1, again 0.313262, times the weight 4.
    """
    labels, ratio = torch.tensor([True, False]), t(3.0, -1.0)
    weights = {"desirable_weight": 2.0, "undesirable_weight": 3.0}
    assert kto(ratio, labels, t(1.0), beta=0.5, **weights).tolist() == pytest.approx([0.537883, 0.806824], abs=2e-6)
    got = apo_zero_unpaired(ratio, labels, beta=0.5, **weights)
    assert got.tolist() == pytest.approx([0.364851, 1.132622], abs=2e-6)
    got = bco(ratio, labels, 0.5, t(9.0, 4.0), beta=0.5)
    assert got.tolist() == pytest.approx([0.313262, 1.253047], abs=2e-6)


def test_equal_models_start_at_one_half_and_ln_2():
    zero = torch.zeros(4)
    assert kto(zero, LABELS, torch.zeros(()), beta=0.1, **EVEN).tolist() == [0.5] * 4
    assert apo_zero_unpaired(zero, LABELS, beta=0.1, **EVEN).tolist() == [0.5] * 4
    assert bco(zero, LABELS, 0.0, beta=0.1).tolist() == pytest.approx([math.log(2)] * 4)


# The KL baseline ----------------------------------------------------------------------------------------------------


def test_a_negative_kl_estimate_is_clamped_to_zero():
    assert kl_baseline(kl_totals(t(-3.0, 1.0))).item() == 0.0


def test_rows_without_a_partner_are_left_out_even_when_they_are_nan():
    totals = kl_totals(t(4.0, math.nan, 2.0), torch.tensor([True, False, True]))
    assert totals.tolist() == [6.0, 2.0]
    assert kl_baseline(totals).item() == 3.0


def test_no_partner_at_all_gives_zero_not_nan():
    assert kl_baseline(kl_totals(t(4.0), torch.tensor([False]))).item() == 0.0
    assert kl_baseline(kl_totals(t())).item() == 0.0


def test_totals_of_ranks_add_up_to_those_of_one_process():
    """Unequal ranks: the mean of their means, (1 + 7) / 2, would be 4."""
    parts = kl_totals(t(1.0, 1.0, 1.0)) + kl_totals(t(7.0))
    assert torch.equal(parts, kl_totals(t(1.0, 1.0, 1.0, 7.0)))
    assert kl_baseline(parts).item() == 2.5


def test_the_baseline_has_no_gradient():
    partners, ratio = t(1.0, 2.0, grad=True), t(0.3, -0.2, 0.1, 0.4, grad=True)
    assert not kl_totals(partners).requires_grad
    baseline = t(0.5, grad=True)
    kto(ratio, LABELS, baseline[0], beta=0.1, **WEIGHTS).sum().backward()
    assert baseline.grad is None
    assert ratio.grad.abs().min() > 0


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KTO_LOSSES)
def test_gradcheck_and_direction(name):
    def loss(ratio):
        values = {"log_ratio": ratio, "desirable": LABELS, "baseline": t(0.3)[0]}
        return KTO_LOSSES[name](values, beta=0.7, **WEIGHTS)

    ratio = RATIO.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, ratio)
    loss(ratio).sum().backward()
    assert (ratio.grad < 0).tolist() == LABELS.tolist()  # Good ones are made likelier, bad ones less likely.


def test_bco_gradcheck_and_direction():
    ratio = RATIO.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: bco(x, LABELS, 0.2, t(1.0, 1.0, 3.0, 0.5), beta=0.7), ratio)
    bco(ratio, LABELS, 0.2, beta=0.7).sum().backward()
    assert (ratio.grad < 0).tolist() == LABELS.tolist()


def test_shift_and_weight_get_no_gradient_and_a_good_row_s_weight_is_not_read():
    shift, weight = t(0.1, grad=True), t(math.nan, math.inf, 2.0, 3.0, grad=True)
    ratio = RATIO.clone().requires_grad_()
    bco(ratio, LABELS, shift[0], weight, beta=0.1).sum().backward()
    assert shift.grad is None
    assert weight.grad is None
    assert torch.isfinite(ratio.grad).all()


def test_a_weight_of_zero_silences_its_label_alone():
    ratio = RATIO.clone().requires_grad_()
    kto(ratio, LABELS, t(0.0)[0], beta=0.1, desirable_weight=1.0, undesirable_weight=0.0).sum().backward()
    assert (ratio.grad == 0).tolist() == [False, False, True, True]


# Symmetries and extremes ----------------------------------------------------------------------------------------------


def test_a_bad_completion_is_a_good_one_mirrored_at_the_baseline():
    for z in (0.0, 0.7):
        mirrored = 2 * z - RATIO
        baseline = t(z)[0]
        assert torch.allclose(
            kto(RATIO, LABELS, baseline, beta=0.3, **EVEN), kto(mirrored, ~LABELS, baseline, beta=0.3, **EVEN)
        )
        assert torch.allclose(bco(RATIO, LABELS, 0.3 * z, beta=0.3), bco(mirrored, ~LABELS, 0.3 * z, beta=0.3))


def test_only_the_distance_from_the_baseline_matters():
    a = kto(RATIO, LABELS, t(0.5)[0], beta=0.3, **WEIGHTS)
    assert torch.allclose(a, kto(RATIO + 4, LABELS, t(4.5)[0], beta=0.3, **WEIGHTS))


def test_finite_in_float32_at_extreme_log_ratios():
    ratio = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    losses = [
        kto(ratio, LABELS, torch.tensor(1e4), beta=10.0, **WEIGHTS),
        apo_zero_unpaired(ratio, LABELS, beta=10.0, **WEIGHTS),
        bco(ratio, LABELS, 1e4, torch.full((4,), 10.0), beta=10.0),
    ]
    for loss in losses:
        assert torch.isfinite(loss).all()
        (grad,) = torch.autograd.grad(loss.sum(), ratio)
        assert torch.isfinite(grad).all()


# BCO's running moments and weights ------------------------------------------------------------------------------------


def test_moments_of_batches_are_those_of_all_numbers():
    numbers = [0.3, -1.2, 4.0, 0.0, 2.2, -0.7, 1.1]
    moments = Moments()
    for batch in (numbers[:3], numbers[3:4], [], numbers[4:]):
        if batch:
            moments = update_moments(moments, statistics.fmean(batch), statistics.pvariance(batch), len(batch))
        else:
            assert update_moments(moments, math.nan, math.nan, 0) is moments
    assert moments.mean == pytest.approx(statistics.fmean(numbers))
    assert moments.var == pytest.approx(statistics.pvariance(numbers))
    assert moments.std == pytest.approx(statistics.stdev(numbers))
    assert moments.count == 7


def test_one_number_has_a_mean_and_no_deviation():
    moments = update_moments(Moments(), 0.4, 0.0, 1)
    assert (moments.mean, moments.std) == (0.4, 0.0)
    assert moments.var == pytest.approx(0.0, abs=1e-20)


def test_density_weight_is_the_odds_within_its_bounds():
    """p = 0.75 is odds 3; p = 1 would divide by 0, and by the term 1e-8 it weighs 1e8 before the bound."""
    assert density_weight(t(1.0), low=0.5, high=1e9).item() == pytest.approx(1e8)
    got = density_weight(torch.tensor([0.75, 0.1, 0.0, 1.0, 0.95]), low=0.5, high=10.0)
    assert got.tolist() == pytest.approx([3.0, 0.5, 0.5, 10.0, 10.0], rel=1e-6)


def test_the_examples_in_the_docstrings_run():
    result = doctest.testmod(unpaired)
    assert result.attempted > 0
    assert result.failed == 0
