"""Every formula against a scalar loop in float64, and against one number derived by hand."""

import math

import pytest
import torch

from posttrain.errors import ConfigError, DataError
from posttrain.losses.advantages import group_advantages, leave_one_out_advantages, standardized
from posttrain.losses.likelihood import dft
from posttrain.losses.policy import (
    LOSS_TYPES,
    cispo,
    clipped,
    entropy_mask,
    importance_log_ratio,
    k1,
    k2,
    k3,
    off_policy_mask,
    rollout_correction,
    sapo,
    vespo_weight,
)
from posttrain.losses.reduce import Denominators, reduce
from posttrain.types import LossTerms
from tests.losses.properties import double, layouts, outputs, policy, toy_rows
from tests.losses.test_properties import config, grpo
from tests.wordings import raises

# GMPO has one ratio a completion and its own tests (test_gmpo.py).
TOKEN_LOSSES = [name for name in LOSS_TYPES if name != "gmpo"]


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


# Reductions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("token", 10 / 3), ("sequence_token", (1.5 + 7) / 2), ("constant", 10 / (2 * 4)), ("local_token", 10 / 3)],
)
def test_reductions_by_hand(reduction, expected):
    """Two sequences, terms (1, 2) and (7): token (1+2+7)/3; per sequence ((1+2)/2 + 7)/2; constant 10/(2*4)."""
    terms = LossTerms(
        t(1, 2, 7, 99)[None],
        torch.tensor([[True, True, True, False]]),
        reduction,
        sequence=torch.tensor([[0, 0, 1, -1]]),
        num_sequences=2,
        constant=4.0,
    )
    assert float(reduce(terms, Denominators(3, 2, 1))) == pytest.approx(expected)


def test_an_unknown_reduction_is_named():
    with raises(ConfigError, "'token'"):
        reduce(LossTerms(t(1)[None], torch.tensor([[True]]), "tokn"), Denominators(1, 1, 1))


# Advantages ---------------------------------------------------------------------------------------------------------

TABLE = [
    ([1, 0, 0, 1], [0.8659, -0.8659, -0.8659, 0.8659], [0.5, -0.5, -0.5, 0.5]),
    ([0, 0, 0, 1], [-0.4999, -0.4999, -0.4999, 1.4997], [-0.25, -0.25, -0.25, 0.75]),
    ([1] + [0] * 7, [2.4742] + [-0.3535] * 7, [0.875] + [-0.125] * 7),
    ([4, 8, 16, 2048], [-0.5052, -0.5013, -0.4935, 1.5000], [-515, -511, -503, 1529]),
    ([0.5, 0.5001, 0.5, 0.5], [-0.1667, 0.5, -0.1667, -0.1667], [-2.5e-5, 7.5e-5, -2.5e-5, -2.5e-5]),
]


@pytest.mark.parametrize(("rewards", "group", "none"), TABLE)
def test_group_advantages_are_the_table_s(rewards, group, none):
    r = torch.tensor(rewards, dtype=torch.float64)[:, None]
    for scale, expected in (("group", group), ("none", none)):
        got = group_advantages(r, torch.ones(1), len(rewards), scale_rewards=scale).advantages
        assert torch.allclose(got, t(*expected), atol=6e-5 if scale == "group" else 1e-6)


def test_batch_scale_uses_the_std_of_the_whole_batch():
    r = t(1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1)[:, None]
    got = group_advantages(r, torch.ones(1), 4, scale_rewards="batch").advantages
    expected = t(0.9708, -0.9708, -0.9708, 0.9708, 0, 0, 0, 0, -0.4854, -0.4854, -0.4854, 1.4562)
    assert torch.allclose(got, expected, atol=6e-5)


def test_two_rewards_summed_first_or_normalised_first():
    r = t(1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0).reshape(8, 2)
    both = [
        group_advantages(r, torch.ones(2), 4, aggregation=a).advantages
        for a in ("sum_then_normalize", "normalize_then_sum")
    ]
    assert torch.allclose(both[0], t(1.3054, 0.2611, -0.7833, -0.7833, 0.4999, 0.4999, 0.4999, -1.4997), atol=6e-5)
    assert torch.allclose(both[1], t(1.8069, 0.2796, -1.0432, -1.0432, 0.2796, 0.2796, 0.4841, -1.0432), atol=6e-5)


def test_rows_that_nothing_scored_stay_out_of_the_statistics():
    nan = float("nan")
    stats = group_advantages(t(1, nan, 0, nan, nan, nan, nan, 5)[:, None], torch.ones(1), 4)
    expected = group_advantages(t(1, 0)[:, None], torch.ones(1), 2).advantages
    assert torch.allclose(stats.advantages[[0, 2]], expected)
    assert stats.advantages[[1, 3, 4, 5, 6, 7]].abs().max() == 0
    assert stats.totals.isnan().tolist() == [False, True, False, True, True, True, True, False]


def test_group_scaling_ignores_affine_maps_of_the_reward():
    r = torch.rand(12, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = (group_advantages(x, torch.ones(1), 4).advantages for x in (r * 100, r * 300 + 7))
    assert torch.allclose(a, b, atol=1e-5)


def test_a_spread_below_the_floor_is_no_signal():
    stats = group_advantages(t(0.5, 0.5001, 0.5, 0.5)[:, None], torch.ones(1), 4, min_group_std=1e-3)
    assert stats.advantages.abs().max() == 0
    assert group_advantages(t(1, 1, 0, 1)[:, None], torch.ones(1), 2).zero_std_share == 0.5


def test_rewards_that_cancel_in_their_sum_are_a_signal_where_each_is_normalised_first():
    """Totals 0 .1 0 .1 spread by .058, the second function by .580; a function without a weight is none."""
    cancelling = torch.tensor([[1.0, -1.0], [1.0, -0.9], [0.0, 0.0], [0.0, 0.1]])
    ones, floor = torch.ones(2), {"min_group_std": 0.1}
    each = group_advantages(cancelling, ones, 4, aggregation="normalize_then_sum", **floor)
    free = group_advantages(cancelling, ones, 4, aggregation="normalize_then_sum")
    assert torch.equal(each.advantages, free.advantages) and each.advantages.abs().min() > 0.1
    assert (each.zero_std_share, float(each.group_std)) == (0.0, pytest.approx(0.58023, abs=1e-4))
    assert group_advantages(cancelling, ones, 4, **floor).advantages.abs().max() == 0
    unweighted = torch.tensor([[1.0, 0.0], [1.0, 5.0]])
    flat = group_advantages(unweighted, torch.tensor([1.0, 0.0]), 2, aggregation="normalize_then_sum")
    assert (flat.zero_std_share, flat.advantages.abs().max()) == (1.0, 0)


def test_bad_choices_and_sizes_are_named():
    with raises(ConfigError, "'group'"):
        group_advantages(t(1, 2)[:, None], torch.ones(1), 2, scale_rewards="grup")
    with raises(DataError, "3", "2"):
        group_advantages(t(1, 2, 3)[:, None], torch.ones(1), 2)


def test_leave_one_out_is_g_over_g_minus_1_times_centred():
    assert torch.allclose(leave_one_out_advantages(t(1, 0, 0, 1), 4), t(2, -2, -2, 2) / 3)
    assert leave_one_out_advantages(t(1, float("nan")), 2).tolist() == [0, 0]


# Surrogates ---------------------------------------------------------------------------------------------------------


def test_clipping_by_hand():
    """r = 1.5, A = 2, clip at 1.2: min(3, 2.4) = 2.4. r = 0.5, A = -2, clip at 0.8: min(-1, -1.6) = -1.6."""
    log_r, a = t(1.5, 0.5).log(), t(2, -2)
    assert torch.allclose(clipped(log_r, a, epsilon=0.2, epsilon_high=0.2), t(-2.4, 1.6))


def test_delta_caps_the_case_that_clipping_leaves_open():
    """r = 50, A = -1: min(-50, -1.2) = -50 without a cap, and -4 with delta = 4."""
    log_r = t(50).log()
    assert float(clipped(log_r, t(-1), epsilon=0.2, epsilon_high=0.2)) == pytest.approx(50)
    assert float(clipped(log_r, t(-1), epsilon=0.2, epsilon_high=0.2, delta=4.0)) == pytest.approx(4)


def test_cispo_weighs_the_gradient_by_the_capped_ratio():
    """r = 10 capped at 5, A = 2: d(-5*2*logp)/dlogp = -10."""
    logp = t(-1).requires_grad_()
    cispo(t(10).log(), t(2), logp, epsilon_high=5.0).backward()
    assert float(logp.grad) == pytest.approx(-10)


def test_sapo_constants():
    """At ratio 1: (4/tau) * sigmoid(0) = 2/tau, so 2.0 and 1.90476; slope 4 s (1 - s) = 1 there, .9400 at 0.5 and 1.5."""
    value = -sapo(t(0, 0), t(1, -1), temperature_pos=1.0, temperature_neg=1.05)
    assert torch.allclose(value, t(2.0, -1.904762), atol=1e-6)
    ratio = t(0.5, 1.5, 2.0).requires_grad_()
    sapo(ratio.log(), t(1, 1, 1), temperature_pos=1.0, temperature_neg=1.05).sum().backward()
    assert torch.allclose(-ratio.grad, t(0.9400, 0.9400, 0.7864), atol=1e-4)
    ratio = t(0.5, 2.0).requires_grad_()
    sapo(ratio.log(), t(-1, -1), temperature_pos=1.0, temperature_neg=1.05).sum().backward()
    assert torch.allclose(ratio.grad, t(0.9341, 0.7681), atol=1e-4)


@pytest.mark.parametrize(
    ("w", "advantage", "phi"), [(0.5, 1, 1.1204), (1, 1, 1), (2, 1, 0.1992), (0.5, -1, 0.3398), (2, -1, 1.0827)]
)
def test_vespo_constants(w, advantage, phi):
    """phi = exp(lam + k log w - lam w), pos (k, lam) = (2, 3), neg (3, 2); e.g. w = 2, A > 0: exp(3 + 2 ln 2 - 6) = .1992."""
    ones = torch.ones(1, 1, dtype=torch.bool)
    got = vespo_weight(
        t(math.log(w))[None], t(advantage), ones, torch.zeros(1, 1, dtype=torch.long), 1, pos=(2, 3), neg=(3, 2)
    )
    assert float(got) == pytest.approx(phi, abs=1e-4)


def test_a_silenced_token_silences_its_vespo_sequence():
    forest = (torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.long), 1)
    got = vespo_weight(t(0, 0)[None], t(1), *forest, pos=(2, 3), neg=(3, 2), rollout_weight=t(1, 0)[None])
    assert float(got) < 1e-6


# The whole objective against a loop ---------------------------------------------------------------------------------


def loop(name, theta, rows, cfg):
    """The loss of online.md 2.7 written as loops over sequences and tokens."""
    logprobs = torch.log_softmax(theta, -1)
    sequences = []
    for row in rows:
        for i, ids in enumerate(row.completions):
            previous = [row.prompt_ids[-1], *ids[:-1]]
            lp = [logprobs[p, y] for p, y in zip(previous, ids, strict=True)]
            sequences.append(
                (lp, row.token_columns["old_logp"][i], row.loss_masks[i], row.sequence_columns["advantages"][i])
            )
    tokens = sum(sum(m) for _, _, m, _ in sequences)
    total = 0.0
    for lp, old, mask, a in sequences:
        n = max(sum(mask), 1)
        gaps = [x - o for x, o in zip(lp, old, strict=True)]
        mean_gap = sum(g * m for g, m in zip(gaps, mask, strict=True)) / n
        term = 0.0
        for x, gap, m in zip(lp, gaps, mask, strict=True):
            ratio = torch.exp(mean_gap if name == "luspo" else gap)
            if name == "cispo":
                piece = -ratio.detach().clamp_max(cfg.epsilon_high) * a * x
            elif name == "sapo":
                tau = 1.0 if a > 0 else 1.05
                piece = -a * 4 / tau * torch.sigmoid(tau * (ratio - 1))
            elif name == "vespo":
                k, lam = (2, 3) if a >= 0 else (3, 2)
                w = torch.exp(sum(g * q for g, q in zip(gaps, mask, strict=True)))
                piece = -torch.exp(lam + k * w.log() - lam * w).detach() * a * x
            else:
                piece = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            term = term + piece * m
        divisor = {
            "grpo": n * len(sequences),
            "sapo": n * len(sequences),
            "dr_grpo": 16 * len(sequences),
            "luspo": len(sequences),
        }
        total = total + term / divisor.get(name, tokens)
    return total


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_every_loss_type_equals_a_scalar_loop(name):
    rows, cfg = toy_rows(), config(name)
    theta = policy()
    expected = loop(name, theta, rows, cfg)
    (grad,) = torch.autograd.grad(expected, theta)
    (batch,) = layouts(rows)["packed"]
    batch, ours = double(batch), policy()
    loss = reduce(
        grpo(name).objective(outputs(ours, batch), batch), Denominators(batch.num_loss_tokens, batch.num_sequences, 1)
    )
    loss.backward()
    # Columns travel as float32, so the two agree to its precision and not to float64's.
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-7)
    assert torch.allclose(ours.grad, grad, atol=1e-6)


def test_a_sequence_ratio_is_the_token_ratio_for_one_token():
    logp, old = torch.randn(2, 1), torch.randn(2, 1)
    forest = (torch.ones(2, 1, dtype=torch.bool), torch.tensor([[0], [1]]), 2)
    token, sequence = (importance_log_ratio(logp, old, *forest, level=level) for level in ("token", "sequence"))
    assert torch.allclose(token, sequence)
    with raises(ConfigError, "'sequence'"):
        importance_log_ratio(logp, old, *forest, level="sequnce")


# Masks, corrections, KL ---------------------------------------------------------------------------------------------


def test_off_policy_mask_keeps_good_and_near_sequences():
    """A = (1, -1, -1), mean gaps (2, .5, 2), threshold 1: keep the first for its advantage, the second for its gap."""
    gaps = torch.tensor([[2.0, 2.0, 99.0], [0.5, 0.5, 99.0], [2.0, 2.0, 99.0]])
    mask = torch.tensor([[True, True, False]] * 3)
    sequence = torch.tensor([[0, 0, -1], [1, 1, -1], [2, 2, -1]])
    keep = off_policy_mask(-gaps, torch.zeros(3, 3), torch.tensor([1.0, -1.0, -1.0]), mask, sequence, 3, threshold=1.0)
    assert keep.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("quantile", "kept"), [(0.2, [9, 10]), (0.5, [6, 7, 8, 9, 10]), (0.0, [10]), (1.0, list(range(1, 11)))]
)
def test_entropy_mask_keeps_the_top_share(quantile, kept):
    entropy = torch.arange(1, 12)[None] / 10.0
    mask = torch.ones(1, 11, dtype=torch.bool)
    mask[0, 10] = False
    got = entropy_mask(entropy, mask, quantile=quantile)
    assert (got.nonzero()[:, 1] + 1).tolist() == kept
    assert not entropy_mask(entropy, torch.zeros_like(mask), quantile=quantile).any()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [2.0, 0.5, 1.0]),
        ("token_mask", [0.0, 0.5, 1.0]),
        ("sequence_truncate", [1.5, 1.5, 1.0]),
        ("sequence_mask", [1.5, 1.5, 1.0]),
        ("geometric", [1.5**0.5, 1.5**0.5, 1.0]),
    ],
)
def test_rollout_corrections(mode, expected):
    """Ratios (3, .5) and (1), bound 2: their product is 1.5, their geometric mean sqrt(1.5)."""
    logp, mask = t(3, 0.5, 1).log()[None], torch.ones(1, 3, dtype=torch.bool)
    got = rollout_correction(logp, torch.zeros(1, 3), mask, torch.tensor([[0, 0, 1]]), 2, mode=mode, clip_max=2.0)
    assert torch.allclose(got[0], t(*expected))


def test_kl_estimators_by_hand():
    """log p = -1, log ref = -2: k1 = 1, k2 = 1/2, k3 = e^-1 + 1 - 1 = .3679."""
    a, b = t(-1), t(-2)
    assert [float(f(a, b)) for f in (k1, k2, k3)] == pytest.approx([1.0, 0.5, math.exp(-1)])
    assert torch.isfinite(k3(t(-1e4), t(0)))


def test_dft_of_two_equal_logits_is_half_the_cross_entropy():
    logp = t(math.log(0.5))
    assert float(dft(logp)) == pytest.approx(0.5 * math.log(2))


EQUAL = [0.2, 0.3, 0.7, 1000.1, 1.0, 0.0, -0.35]


@pytest.mark.parametrize("reward", EQUAL)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_equal_rewards_have_no_spread_and_no_advantage_whatever_their_mean_rounds_to(reward, size):
    rewards = torch.full((size, 1), reward)
    for settings in (
        {"scale_rewards": "group"}, {"scale_rewards": "none"}, {"aggregation": "normalize_then_sum"},
    ):  # fmt: skip
        stats = group_advantages(rewards, torch.ones(1), size, **settings)
        assert not stats.advantages.any()
        assert stats.zero_std_share == 1.0 and not stats.group_std.any()
    assert not leave_one_out_advantages(rewards[:, 0], size).any()
    assert not standardized(rewards[:, 0], torch.ones(size, dtype=torch.bool)).any()


def test_sums_that_round_apart_are_equal_and_small_differences_are_not():
    rewards = torch.tensor([[0.05, 0.3], [0.1, 0.25], [0.15, 0.2], [0.25, 0.1]])
    assert rewards.sum(1).unique().numel() > 1  # In float32.
    assert group_advantages(rewards, torch.ones(2), 4).zero_std_share == 1.0
    close = torch.tensor([[1000.0], [1000.01], [1000.0], [1000.01]])
    assert group_advantages(close, torch.ones(1), 4).advantages.abs().min() > 0.5
