"""Pair losses: reference values, hand-derived numbers, gradients, symmetries, extremes."""

import doctest
import itertools
import math

import pytest
import torch

from posttrain.errors import ConfigError
from posttrain.losses import preference
from posttrain.losses.divergence import (
    DIVERGENCES,
    alpha_reward,
    collision_logp,
    desensitized_sum,
    mean_logp,
    pair_values,
    wpo_weight,
)
from posttrain.losses.preference import (
    CPO_LOSSES,
    DPO_LOSSES,
    TPO_LOSSES,
    aot,
    aot_unpaired,
    apo_down,
    apo_zero,
    bco_pair,
    discopop,
    exo_pair,
    hinge,
    ipo,
    log_odds_ratio,
    mean_nll,
    nca_pair,
    orpo,
    robust,
    sigmoid,
    sigmoid_norm,
    simpo,
    smoothed_sigmoid,
    sppo_hard,
    squared_gap,
)

SCALARS = {"beta": 0.1, "label_smoothing": 0.1, "discopop_tau": 0.05}
LN2 = math.log(2)


def t(*values, dtype=torch.float64, grad=False):
    return torch.tensor(values, dtype=dtype, requires_grad=grad)


def lsig(x):
    return -math.log1p(math.exp(-x))


def sig(x):
    return 1 / (1 + math.exp(-x))


# Reference values: two pairs of constant per-token probabilities over a vocabulary of 2 --------------------------------

CHOSEN, REJECTED = t(-20.0, -35.0), t(-30.0, -25.0)
REF_CHOSEN, REF_REJECTED = t(-22.0, -33.0), t(-29.0, -27.0)
LENGTHS = (torch.tensor([10, 12]), torch.tensor([8, 15]))
GOLDEN = {
    "sigmoid": 0.733685,
    "hinge": 1.050000,
    "ipo": 24.972813,
    "exo_pair": 0.552828,
    "nca_pair": 1.407842,
    "robust": 0.739935,
    "bco_pair": 1.419407,
    "sppo_hard": 61.500000,
    "aot": 0.728685,
    "aot_unpaired": 0.713772,
    "apo_zero": 1.012427,
    "apo_down": 1.012123,
    "discopop": 0.826783,
    "sft": 2.500000,
    "sigmoid_norm": 0.692644,
}


def golden_values(**options):
    return pair_values(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, *LENGTHS, **options)


def test_the_table_holds_exactly_the_public_loss_types():
    assert list(DPO_LOSSES) == list(GOLDEN)
    assert list(CPO_LOSSES) == ["sigmoid", "hinge", "ipo", "simpo", "alphapo"]
    assert list(TPO_LOSSES) == ["sigmoid", "hinge", "ipo", "tpo-l"]


@pytest.mark.parametrize("name", GOLDEN)
def test_reference_value(name):
    assert DPO_LOSSES[name](golden_values(), **SCALARS).mean().item() == pytest.approx(GOLDEN[name], abs=1e-6)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [("forward_kl", 0.846264), ("js_divergence", 0.716864), ("alpha_divergence", 0.764401)],
)
def test_reference_value_under_a_divergence(divergence, expected):
    values = golden_values(divergence=divergence, alpha=0.5)
    assert DPO_LOSSES["sigmoid"](values, **SCALARS).mean().item() == pytest.approx(expected, abs=1e-6)


def test_reference_value_of_a_combination():
    """0.8 sigmoid + 0.2 bco_pair + 1 sft."""
    parts = {
        name: DPO_LOSSES[name](golden_values(), **SCALARS).mean().item() for name in ("sigmoid", "bco_pair", "sft")
    }
    assert 0.8 * parts["sigmoid"] + 0.2 * parts["bco_pair"] + parts["sft"] == pytest.approx(3.370830, abs=2e-6)


def tokens(total, lengths):
    """Constant log-probs as ``(B, T)`` rows, their mask and sequence index."""
    column = torch.arange(int(lengths.max()))
    mask = column < lengths[:, None]
    rows = torch.where(mask, (total / lengths)[:, None], 0.0)
    return rows, mask, torch.where(mask, torch.arange(len(lengths))[:, None], -1)


@pytest.mark.parametrize(("ld_alpha", "expected"), [(0.5, 0.732003), (0.0, 0.730417), (1.0, 0.733685)])
def test_reference_value_with_length_desensitisation(ld_alpha, expected):
    shorter = torch.minimum(*LENGTHS)
    sums = [
        desensitized_sum(*tokens(total, lengths), shorter, alpha=ld_alpha)
        for total, lengths in zip((CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED), LENGTHS * 2, strict=True)
    ]
    loss = DPO_LOSSES["sigmoid"](pair_values(*sums, *LENGTHS), **SCALARS).mean()
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_reference_value_with_wpo_weights():
    weights = []
    for total, lengths in zip((CHOSEN, REJECTED), LENGTHS, strict=True):
        p = (total / lengths).exp()
        collision = lengths * collision_logp(torch.stack([p, 1 - p], -1).log())
        weights.append(wpo_weight(total, collision, lengths))
    loss = (DPO_LOSSES["sigmoid"](golden_values(), **SCALARS) * weights[0] * weights[1]).mean()
    assert loss.item() == pytest.approx(0.008701, abs=1e-6)


def reference_free(table, name, alpha=0.0, **scalars):
    row = table[name]
    pair = [mean_logp(x, n) if row.per_token else x for x, n in zip((CHOSEN, REJECTED), LENGTHS, strict=True)]
    values = dict(zip(row.tensors, (alpha_reward(x, alpha=alpha) for x in pair), strict=True))
    return row(values, **{"beta": 0.1, "label_smoothing": 0.0, "gamma": 0.5, **scalars}).mean().item()


@pytest.mark.parametrize(
    ("table", "name", "expected"),
    [
        (CPO_LOSSES, "sigmoid", 0.813262),
        (CPO_LOSSES, "hinge", 1.0),
        (CPO_LOSSES, "ipo", 24.8125),
        (CPO_LOSSES, "simpo", 0.961247),
        (TPO_LOSSES, "sigmoid", 0.813262),
        (TPO_LOSSES, "hinge", 1.0),
        (TPO_LOSSES, "ipo", 24.8125),
        (TPO_LOSSES, "tpo-l", 0.961247),
    ],
)
def test_reference_value_without_a_reference_model(table, name, expected):
    assert reference_free(table, name) == pytest.approx(expected, abs=1e-6)


def test_reference_value_of_alphapo():
    assert reference_free(CPO_LOSSES, "alphapo", alpha=0.25) == pytest.approx(0.941443, abs=1e-6)
    rewards = [
        0.1 * alpha_reward(mean_logp(x, n), alpha=0.25) for x, n in zip((CHOSEN, REJECTED), LENGTHS, strict=True)
    ]
    assert rewards[0].tolist() == pytest.approx([-0.2595, -0.4293], abs=5e-5)
    assert rewards[1].tolist() == pytest.approx([-0.6214, -0.2068], abs=5e-5)


def test_reference_values_of_orpo():
    a, b = mean_logp(CHOSEN, LENGTHS[0]), mean_logp(REJECTED, LENGTHS[1])
    assert (-orpo(a, b, beta=0.1)).tolist() == pytest.approx([-0.0143, -0.1623], abs=5e-5)
    assert -orpo(a, b, beta=1.0).mean().item() == pytest.approx(-0.8833, abs=5e-5)
    assert log_odds_ratio(a, b).mean().item() == pytest.approx(0.2340, abs=5e-5)


def test_mean_nll_weighs_tokens_not_rows():
    """(20 + 35) / (10 + 12) = 2.5 nats a token, where the mean of the rows' means would be 2.458."""
    assert mean_nll(CHOSEN, LENGTHS[0]).mean().item() == pytest.approx(2.5)
    whole = mean_nll(CHOSEN, LENGTHS[0])
    halves = [mean_nll(CHOSEN[i : i + 1], LENGTHS[0][i : i + 1], mean_length=11.0) for i in range(2)]
    assert torch.allclose(torch.cat(halves), whole)


@pytest.mark.parametrize("rows", [2, 0])
def test_mean_nll_without_a_token_is_zero_not_nan(rows):
    logp = torch.zeros(rows, requires_grad=True)
    loss = mean_nll(logp, torch.zeros(rows, dtype=torch.long))
    loss.sum().backward()
    assert loss.tolist() == [0.0] * rows
    assert torch.isfinite(logp.grad).all()


# By hand ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_initial_values_are_those_of_equal_models(divergence):
    """All log-ratios 0, beta 0.2, eps 0.1: 1/(4 beta^2) = 6.25; exo log(1/2) - log(0.09)/2 = 0.510826."""
    zero = torch.zeros(3, dtype=torch.float64)
    values = pair_values(zero, zero, zero, zero, zero + 4, zero + 7, divergence=divergence)
    expected = {
        **dict.fromkeys(("sigmoid", "sigmoid_norm", "robust", "aot", "aot_unpaired"), LN2),
        **dict.fromkeys(("hinge", "apo_zero", "apo_down"), 1.0),
        **dict.fromkeys(("nca_pair", "bco_pair"), 2 * LN2),
        "ipo": 6.25,
        "sppo_hard": 12.5,
        "discopop": LN2 / 2 + 0.5,
        "exo_pair": -LN2 - 0.5 * math.log(0.09),
        "sft": 0.0,
    }
    assert set(expected) == set(DPO_LOSSES)
    for name, value in expected.items():
        got = DPO_LOSSES[name](values, beta=0.2, label_smoothing=0.1, discopop_tau=0.05)
        assert got.tolist() == pytest.approx([value] * 3), name


C, R = t(3.0), t(-1.0)  # beta 0.5: beta c = 1.5, beta r = -0.5, beta d = 2.


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        pytest.param(lambda: sigmoid(C, R, beta=0.5), 0.126928, id="sigmoid: log(1 + e^-2)"),
        pytest.param(lambda: hinge(C, R, beta=0.125), 0.5, id="hinge: 1 - 4/8"),
        pytest.param(lambda: squared_gap(C, R, beta=0.25), 4.0, id="gap: (4 - 2)^2"),
        pytest.param(lambda: ipo(C, R, t(2), t(4), beta=0.5), 0.5625, id="ipo: (3/2 + 1/4 - 1)^2"),
        pytest.param(
            # sig(2) = 0.880797, lsig(2) = -0.126928, lsig(-2) = -2.126928, eps 1/4:
            # 0.880797 (-0.126928 + 0.287682) + 0.119203 (-2.126928 + 1.386294) = 0.141592 - 0.088286
            lambda: exo_pair(C, R, beta=0.5, label_smoothing=0.25),
            0.053306,
            id="exo",
        ),
        pytest.param(
            # lsig(1.5) = -0.201413, lsig(-1.5) = -1.701413, lsig(0.5) = -0.474077: 0.201413 + 0.850707 + 0.237038
            lambda: nca_pair(C, R, beta=0.5),
            1.289158,
            id="nca",
        ),
        pytest.param(
            # (0.75 * 0.126928 - 0.25 * 2.126928) / 0.5 = (0.095196 - 0.531732) / 0.5
            lambda: robust(C, R, beta=0.5, label_smoothing=0.25),
            -0.873072,
            id="robust",
        ),
        pytest.param(lambda: bco_pair(C, R, beta=0.5), 0.675490, id="bco: 0.201413 + 0.474077"),
        pytest.param(lambda: sppo_hard(C, R, beta=0.5), 4.0, id="sppo: (3 - 1)^2 + (-1 + 1)^2"),
        pytest.param(
            # 0.75 * 0.126928 + 0.25 * 2.126928
            lambda: smoothed_sigmoid(C, R, beta=0.5, label_smoothing=0.25),
            0.626928,
            id="smoothed",
        ),
        pytest.param(lambda: apo_zero(C, R, beta=0.5), 0.559966, id="apo_zero: sig(-1.5) + sig(-0.5)"),
        pytest.param(lambda: apo_down(C, R, beta=0.5), 0.936777, id="apo_down: sig(1.5) + sig(-2)"),
        pytest.param(
            # a = 2, tau = 2, g = sig(1) = 0.731059: 0.268941 * 0.126928 + 0.731059 * 0.135335
            lambda: discopop(C, R, beta=0.5, discopop_tau=2.0),
            0.133074,
            id="discopop",
        ),
        pytest.param(lambda: sigmoid_norm(C, R, t(2), t(4), beta=0.8), 0.220417, id="norm: log(1 + e^-1.4)"),
        pytest.param(
            # beta u - gamma = 2 - 0.5 = 1.5
            lambda: simpo(C, R, beta=0.5, gamma=0.5, label_smoothing=0.0),
            0.201413,
            id="simpo",
        ),
        pytest.param(
            # odds 3 and 1/3: o = log 9, beta 0.5: 0.5 log(1 + 1/9)
            lambda: orpo(t(math.log(0.75)), t(math.log(0.25)), beta=0.5),
            0.052680,
            id="orpo",
        ),
    ],
)
def test_hand_derived_number(loss, expected):
    assert loss().item() == pytest.approx(expected, abs=2e-6)


def test_the_sorting_losses_match_by_rank_not_by_pair():
    """Policy gaps (5, 1), reference gaps (0, 4): by rank 1 - 0 and 5 - 4, both 1; by pair they would be 5 and -3."""
    got = aot(t(5.0, 1.0), t(0.0, 0.0), t(0.0, 4.0), t(0.0, 0.0), beta=1.0, label_smoothing=0.0)
    assert got.tolist() == pytest.approx([-lsig(1.0)] * 2)
    got = aot_unpaired(t(5.0, 1.0), t(0.0, 4.0), beta=1.0, label_smoothing=0.25)
    assert got.tolist() == pytest.approx([-0.75 * lsig(1.0) - 0.25 * lsig(-1.0)] * 2)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_one_pair_of_a_sorting_loss_is_the_smoothed_sigmoid(name):
    """Both differences are (log pi+ - log rho+) - (log pi- - log rho-) when there is nothing to sort."""
    values = {k: v[:1] for k, v in golden_values().items()}
    expected = smoothed_sigmoid(values["chosen_ratio"], values["rejected_ratio"], beta=0.1, label_smoothing=0.1)
    assert torch.allclose(DPO_LOSSES[name](values, **SCALARS), expected)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_the_order_of_rows_does_not_change_a_sorting_loss(name):
    g = torch.Generator().manual_seed(3)
    columns = [torch.randn(5, generator=g, dtype=torch.float64) for _ in range(4)]
    ones, order = torch.ones(5), torch.tensor([4, 2, 0, 1, 3])
    values, mixed = pair_values(*columns, ones, ones), pair_values(*[c[order] for c in columns], ones, ones)
    assert torch.allclose(DPO_LOSSES[name](values, **SCALARS), DPO_LOSSES[name](mixed, **SCALARS))


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("name", DPO_LOSSES)
def test_gradcheck(name, divergence):
    lengths = torch.tensor([3, 5, 2]), torch.tensor([4, 1, 6])
    policy = t(-3.0, -5.3, -2.2, grad=True), t(-4.1, -4.7, -3.9, grad=True)

    def loss(chosen, rejected):
        values = pair_values(
            chosen, rejected, t(-3.5, -5.0, -2.0), t(-4.0, -5.0, -4.4), *lengths, divergence=divergence
        )
        return DPO_LOSSES[name](values, beta=0.7, label_smoothing=0.1, discopop_tau=0.5)

    assert torch.autograd.gradcheck(loss, policy)
    gradients = torch.autograd.grad(loss(*policy).sum(), policy, allow_unused=True)
    assert gradients[0].abs().sum() > 0


@pytest.mark.parametrize("name", CPO_LOSSES)
def test_gradcheck_without_a_reference(name):
    pair = t(-3.0, -5.3, grad=True), t(-4.1, -4.7, grad=True)
    row = CPO_LOSSES[name]
    assert torch.autograd.gradcheck(
        lambda *x: row(dict(zip(row.tensors, x, strict=True)), beta=0.7, gamma=0.3, label_smoothing=0.1), pair
    )
    assert torch.autograd.gradcheck(lambda a, b: orpo(a, b, beta=0.7), pair)
    assert torch.autograd.gradcheck(log_odds_ratio, pair)


def gradients(name, chosen, rejected, **scalars):
    pair = t(chosen, grad=True), t(rejected, grad=True)
    zero, one = t(0.0), torch.ones(1)
    loss = DPO_LOSSES[name](pair_values(*pair, zero, zero, one, one), **{**SCALARS, **scalars})
    got = torch.autograd.grad(loss.sum(), pair, allow_unused=True)
    return [0.0 if g is None else g.item() for g in got]


def test_gradients_vanish_where_the_formula_says():
    assert gradients("hinge", 6.0, -5.0) == [0.0, 0.0]  # The gap 11 is past the margin 1 / beta = 10.
    assert gradients("hinge", 5.0, -4.0) == [-0.1, 0.1]
    assert gradients("ipo", 3.0, -2.0) == [0.0, 0.0]  # The gap is its target 1 / (2 beta) = 5.
    assert gradients("sppo_hard", 5.0, -5.0) == [0.0, 0.0]
    assert gradients("exo_pair", math.log(9) / 0.1, 0.0) == pytest.approx([0, 0], abs=1e-15)  # sig = 1 - eps
    assert gradients("sft", -3.0, -2.0) == [-1.0, 0.0]  # The rejected completion does not enter.
    assert gradients("nca_pair", 0.7, -1e5)[1] == 0.0


def test_signs_of_the_initial_gradients():
    """Chosen up, rejected down; apo_down lets the chosen one rest (0.025 - 0.025) and only pushes the rejected down.

    DiscoPOP starts the wrong way round when tau is small: its slope in a at 0 is -3/4 + (1 - log 2) / (4 tau) = 0.784.
    """
    assert gradients("discopop", 0.0, 0.0) == pytest.approx([0.0784264, -0.0784264], rel=1e-5)
    for name in set(DPO_LOSSES) - {"sft", "apo_down", "discopop"}:
        up, down = gradients(name, 0.0, 0.0)
        assert up < 0 < down, name
    assert gradients("apo_down", 0.0, 0.0) == pytest.approx([0.0, 0.025])


# Symmetries -----------------------------------------------------------------------------------------------------------

X = torch.tensor(list(itertools.product((-3.0, -0.4, 0.0, 2.5), repeat=2)), dtype=torch.float64)
A, B = X[:, 0], X[:, 1]


def on_ratios(name, chosen, rejected, **scalars):
    zero, one = torch.zeros_like(chosen), torch.ones_like(chosen)
    return DPO_LOSSES[name](pair_values(chosen, rejected, zero, zero, one, one), **{**SCALARS, **scalars})


def test_swapping_a_pair_moves_the_sigmoid_losses_by_the_margin():
    for name in ("sigmoid", "sigmoid_norm"):
        assert torch.allclose(on_ratios(name, A, B) - on_ratios(name, B, A), -0.1 * (A - B))


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm"])
def test_only_the_difference_of_scores_matters(name):
    assert torch.allclose(on_ratios(name, A + 1.7, B + 1.7), on_ratios(name, A, B))


@pytest.mark.parametrize("name", ["bco_pair", "sppo_hard", "apo_zero"])
def test_negating_and_swapping_both_sides_changes_nothing(name):
    assert torch.allclose(on_ratios(name, -B, -A), on_ratios(name, A, B))


@pytest.mark.parametrize("eps", [0.0, 0.1, 0.4])
def test_robust_is_unbiased_under_flipped_labels(eps):
    """Averaged over labels flipped with probability eps it is the loss of clean labels."""
    flipped = (1 - eps) * robust(A, B, beta=0.5, label_smoothing=eps) + eps * robust(
        B, A, beta=0.5, label_smoothing=eps
    )
    assert torch.allclose(flipped, sigmoid(A, B, beta=0.5))


def test_smoothing_by_half_makes_a_label_worthless():
    for loss in (smoothed_sigmoid, exo_pair):
        assert torch.allclose(loss(A, B, beta=0.5, label_smoothing=0.5), loss(B, A, beta=0.5, label_smoothing=0.5))


def test_exo_is_never_negative():
    assert (exo_pair(3 * A, 3 * B, beta=1.0, label_smoothing=0.1) >= 0).all()


def test_a_small_tau_makes_discopop_switch_between_two_losses():
    got = discopop(t(2.0, -2.0), t(0.0, 0.0), beta=1.0, discopop_tau=1e-3)
    assert got.tolist() == pytest.approx([math.exp(-2), -lsig(-2.0)])


def test_swapping_an_orpo_pair_negates_its_log_odds_and_low_probabilities_make_it_a_difference():
    a, b = t(-0.1, -2.0, -30.0), t(-3.0, -0.7, -40.0)
    assert torch.allclose(log_odds_ratio(a, b), -log_odds_ratio(b, a))
    assert log_odds_ratio(a, b)[2].item() == pytest.approx(10.0)


def test_simpo_without_a_margin_is_the_smoothed_sigmoid_and_beta_does_not_scale_gamma():
    assert torch.allclose(
        simpo(A, B, beta=2.0, gamma=0.0, label_smoothing=0.1), smoothed_sigmoid(A, B, beta=2.0, label_smoothing=0.1)
    )
    assert torch.allclose(simpo(A, B, beta=2.0, gamma=1.0, label_smoothing=0.0), sigmoid(A - 0.5, B, beta=2.0))


def test_a_link_changes_exactly_the_losses_that_say_so():
    plain, linked = golden_values(), golden_values(divergence="js_divergence")
    changed = {n for n, row in DPO_LOSSES.items() if not torch.equal(row(plain, **SCALARS), row(linked, **SCALARS))}
    assert changed == {name for name, row in DPO_LOSSES.items() if row.uses_link}
    assert changed == {"sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm"}


@pytest.mark.parametrize("name", DPO_LOSSES)
@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_under_a_divergence_a_loss_of_sums_reads_nothing_but_the_difference_of_two_scores(name, divergence):
    """The scores lack a number of the prompt, which a loss of one side alone would see."""
    row = DPO_LOSSES[name]
    values = golden_values(divergence=divergence)
    moved = {key: value + 3.0 if key.endswith("_score") else value for key, value in values.items()}
    if not row.per_token:
        assert torch.allclose(row(values, **SCALARS), row(moved, **SCALARS))


def test_sft_reads_the_plain_sums_not_the_desensitised_ones():
    values = golden_values(plain_chosen_logp=t(-30.0, -36.0))
    assert DPO_LOSSES["sft"](values, **SCALARS).mean().item() == pytest.approx(3.0)


def test_smoothing_and_lengths_change_exactly_the_losses_that_say_so():
    values, longer = (
        golden_values(),
        {**golden_values(), "chosen_length": LENGTHS[0] * 2, "rejected_length": LENGTHS[1] * 2},
    )
    smoothed, normalised = set(), set()
    for name, row in DPO_LOSSES.items():
        plain = row(values, **SCALARS)
        if not torch.equal(plain, row(values, **{**SCALARS, "label_smoothing": 0.2})):
            smoothed.add(name)
        if not torch.equal(plain, row(longer, **SCALARS)):
            normalised.add(name)
    assert smoothed == {"exo_pair", "robust", "aot", "aot_unpaired"}
    assert smoothed == {name for name, row in DPO_LOSSES.items() if "label_smoothing" in row.scalars}
    assert normalised == {"ipo", "sigmoid_norm", "sft"}
    assert {name for name, row in DPO_LOSSES.items() if row.per_token} == {"ipo", "sigmoid_norm"}


def test_kinds_say_which_losses_a_pair_weight_may_multiply():
    kinds = {name: row.kind for name, row in DPO_LOSSES.items() if row.kind != "pair"}
    assert kinds == {"aot": "sorted", "aot_unpaired": "sorted", "sft": "likelihood"}


# Extremes -------------------------------------------------------------------------------------------------------------

EXTREMES = torch.tensor(list(itertools.product((-1e4, -100.0, 0.0, 100.0, 1e4), repeat=2)))


@pytest.mark.parametrize("beta", [0.001, 0.1, 10.0])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("name", DPO_LOSSES)
def test_losses_and_gradients_are_finite_in_float32_at_extreme_log_ratios(name, divergence, beta):
    for tau, alpha in ((0.05, 0.5), (2.0, 2.0)):
        pair = [EXTREMES[:, i].clone().requires_grad_() for i in range(2)]
        zero, one = torch.zeros(len(EXTREMES)), torch.ones(len(EXTREMES))
        values = pair_values(*pair, zero, zero, one, 3 * one, divergence=divergence, alpha=alpha)
        loss = DPO_LOSSES[name](values, beta=beta, label_smoothing=0.1, discopop_tau=tau)
        assert torch.isfinite(loss).all()
        for grad in torch.autograd.grad(loss.sum(), pair, allow_unused=True):
            assert grad is None or torch.isfinite(grad).all()


@pytest.mark.parametrize("name", CPO_LOSSES)
def test_losses_without_a_reference_are_finite_at_extreme_log_probs(name):
    pair = [x.clone().requires_grad_() for x in (torch.tensor([-1e4, 0.0, -1e4]), torch.tensor([0.0, -1e4, -1e4]))]
    row = CPO_LOSSES[name]
    values = dict(zip(row.tensors, (alpha_reward(x, alpha=0.25) for x in pair), strict=True))
    loss = row(values, beta=2.5, gamma=0.5, label_smoothing=0.1)
    assert torch.isfinite(loss).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss.sum(), pair))


def test_discopop_of_a_hopeless_pair_is_the_logistic_loss_not_zero_times_infinity():
    """a = -1000: exp(1000) overflows, g = sig(-20000) is 0; what is left is -lsig(-1000) = 1000."""
    assert discopop(torch.tensor([-1e4]), torch.tensor([0.0]), beta=0.1, discopop_tau=0.05).item() == 1000.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orpo_of_a_memorised_completion_has_a_finite_gradient(dtype):
    """The log-probs 0 and -1e-10: one branch of log(1 - e^x) has an infinite slope there, and 0 times it would be NaN."""
    chosen = torch.tensor([0.0, -1e-10, -1e-6, -1e4, -2.0], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([-2.0, -1e-10, 0.0, -2.0, -1e4], dtype=dtype, requires_grad=True)
    loss = orpo(chosen, rejected, beta=0.1)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(chosen.grad).all()
    assert torch.isfinite(rejected.grad).all()


@pytest.mark.parametrize("name", ["ipo", "sigmoid_norm"])
def test_an_empty_completion_does_not_make_nan(name):
    values = {**golden_values(), "chosen_length": torch.tensor([0, 12]), "chosen_score": t(0.0, -2.0)}
    assert torch.isfinite(DPO_LOSSES[name](values, **SCALARS)).all()


@pytest.mark.parametrize("eps", [0.0, 1.0, -0.1])
def test_exo_refuses_a_smoothing_without_a_logarithm(eps):
    with pytest.raises(ConfigError, match=f"label_smoothing={eps} is not valid for the loss 'exo_pair'"):
        exo_pair(A, B, beta=0.1, label_smoothing=eps)


@pytest.mark.parametrize("eps", [0.5, 0.7, -0.1])
def test_robust_refuses_a_smoothing_of_half_or_more(eps):
    with pytest.raises(ConfigError, match=f"label_smoothing={eps} is not valid for the loss 'robust'"):
        robust(A, B, beta=0.1, label_smoothing=eps)


def test_the_examples_in_the_docstrings_run():
    result = doctest.testmod(preference)
    assert result.attempted > 0
    assert result.failed == 0
