"""Losses of reward models: hand-derived numbers, gradients, and extremes."""

import math

import pytest
import torch

from posttrain.losses.preference import bradley_terry, centering


def test_equal_scores_cost_ln_2_and_a_margin_adds_to_it():
    """-log sigmoid(0) = ln 2; -log sigmoid(0.0221321 - 0.5) = ln(1 + e^0.4778679) = 0.960358."""
    one = torch.tensor([1.0])
    assert float(bradley_terry(one, one)) == pytest.approx(math.log(2))
    chosen, rejected = torch.tensor([0.0221321]), torch.tensor([0.0])
    assert float(bradley_terry(chosen, rejected, torch.tensor([0.5]))) == pytest.approx(0.960358, abs=1e-6)


def test_a_constant_added_to_both_scores_changes_only_the_centering():
    chosen, rejected = torch.tensor([0.3, -1.0]), torch.tensor([-0.2, 0.5])
    assert torch.allclose(bradley_terry(chosen + 5, rejected + 5), bradley_terry(chosen, rejected), atol=1e-6)
    assert centering(torch.tensor([1.0]), torch.tensor([2.0])).item() == 9.0


def test_no_overflow_at_extreme_differences():
    far = torch.tensor([1e4, -1e4])
    loss = bradley_terry(far, -far)
    assert torch.isfinite(loss).all()
    assert loss[1] == 2e4


def test_gradcheck():
    chosen, rejected = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: bradley_terry(a, b) + 0.1 * centering(a, b), (chosen, rejected))
