"""Log-probs and entropies from logits, against float64 formulas written out in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import ConfigError, DataError
from posttrain.extensions.trl_helpers import tensors as softmax
from posttrain.extensions.trl_helpers.tensors import (
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)
from tests.wordings import raises


def logits_of(*shape, seed=0, scale=3.0, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def numpy_logp(logits):
    """log p from the definition, in float64, without any of torch's softmax."""
    x = logits.double().numpy()
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def numpy_entropy(logits):
    p = np.exp(numpy_logp(logits))
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


@pytest.fixture(params=[1, 3, 10**6], ids=["row-by-row", "three-rows", "all-at-once"])
def chunk_rows(request, monkeypatch):
    """Chunks of a few rows for V=11, so that chunk borders fall inside the tests."""
    monkeypatch.setitem(softmax.CHUNK_BYTES, "cpu", request.param * 4 * 11)
    return request.param


def test_one_index_a_row_is_gather_minus_logsumexp(chunk_rows):
    logits, index = logits_of(2, 5, 11), torch.randint(0, 11, (2, 5))
    expected = np.take_along_axis(numpy_logp(logits), index.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(selective_log_softmax(logits, index), expected, atol=1e-5)


def test_several_indices_a_row_keep_the_shape_of_the_index(chunk_rows):
    logits, index = logits_of(2, 5, 11), torch.randint(0, 11, (2, 5, 4))
    out = selective_log_softmax(logits, index)
    assert out.shape == (2, 5, 4)
    np.testing.assert_allclose(out, np.take_along_axis(numpy_logp(logits), index.numpy(), -1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_result_is_the_exact_one_rounded_once(dtype):
    """One rounding, at the end. (Torch's own half-precision log_softmax on a CPU rounds twice.)"""
    logits, index = logits_of(64, 300, dtype=dtype), torch.randint(0, 300, (64,))
    exact = torch.log_softmax(logits.double(), -1).gather(1, index[:, None])[:, 0]
    out = selective_log_softmax(logits, index)
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))
    naive = torch.log_softmax(logits, -1).gather(1, index[:, None])[:, 0]
    assert ((out - naive).double().abs() <= 2 * torch.finfo(dtype).eps * naive.double().abs()).all()


def test_half_precision_logits_can_give_float32_log_probs():
    logits, index = logits_of(64, 300, dtype=torch.bfloat16), torch.randint(0, 300, (64,))
    out = selective_log_softmax(logits, index, out_dtype=torch.float32)
    exact = torch.log_softmax(logits.double(), -1).gather(1, index[:, None])[:, 0]
    assert out.dtype == torch.float32
    assert (out - exact).abs().max() < 1e-5
    assert (out - out.bfloat16()).abs().max() > 1e-3  # Rounding would have cost this much.


def test_zero_size_batch_gives_an_empty_result_with_a_gradient():
    logits = torch.empty(0, 4, 11, requires_grad=True)
    out = selective_log_softmax(logits, torch.empty(0, 4, dtype=torch.long))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert logits.grad.shape == (0, 4, 11)
    assert entropy_from_logits(torch.empty(0, 7)).shape == (0,)


def test_rank_one_logits_take_one_index_or_several():
    logits = logits_of(11)
    expected = torch.from_numpy(numpy_logp(logits)).float()
    one = selective_log_softmax(logits, torch.tensor(3))
    assert one.shape == ()
    torch.testing.assert_close(one, expected[3])
    torch.testing.assert_close(selective_log_softmax(logits, torch.tensor([3, 0])), expected[[3, 0]])


def test_selected_minus_infinity_logit_has_log_prob_minus_infinity():
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    out = selective_log_softmax(logits, torch.tensor([[0, 1]]))
    assert out[0, 1] == -math.inf
    assert out[0, 0].item() == pytest.approx(-math.log(2))


def test_minus_infinity_logits_contribute_nothing_to_the_entropy_or_its_gradient():
    logits = torch.tensor([[1.0, -math.inf, 2.0], [0.0, -math.inf, -math.inf]], dtype=torch.float64, requires_grad=True)
    out = entropy_from_logits(logits)
    assert out[0].item() == pytest.approx(entropy_from_logits(torch.tensor([1.0, 2.0], dtype=torch.float64)).item())
    assert out[1].item() == 0.0
    out.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 1] == 0


def test_uniform_logits_have_entropy_log_v():
    assert entropy_from_logits(torch.zeros(4)).item() == pytest.approx(math.log(4), abs=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 4, 128])
def test_entropy_is_that_of_the_definition_for_every_chunk_size(chunk_size):
    logits = logits_of(3, 5, 11)
    np.testing.assert_allclose(entropy_from_logits(logits, chunk_size), numpy_entropy(logits), atol=1e-5)


def test_entropy_keeps_the_input_dtype_and_is_computed_wider():
    logits = logits_of(40, 500, dtype=torch.bfloat16)
    out = entropy_from_logits(logits)
    assert out.dtype == torch.bfloat16
    np.testing.assert_allclose(out.float(), numpy_entropy(logits), rtol=2**-8)
    np.testing.assert_allclose(entropy_from_logits(logits, out_dtype=torch.float32), numpy_entropy(logits), atol=1e-4)


def test_entropy_of_far_away_logits_does_not_cancel():
    """Logits near 1e4 lose the entropy in the subtraction ``log Z - sum p x`` unless they are shifted first."""
    base = logits_of(20, dtype=torch.float32, scale=1.0)
    shifted = base + 10000.0
    np.testing.assert_allclose(entropy_from_logits(shifted), numpy_entropy(shifted), atol=1e-5)


def test_one_pass_gives_what_the_two_functions_give(chunk_rows):
    logits, index = logits_of(2, 5, 11), torch.randint(0, 11, (2, 5, 2))
    logp, entropy = selective_log_softmax_and_entropy(logits, index, temperature=0.7)
    torch.testing.assert_close(logp, selective_log_softmax(logits, index, temperature=0.7))
    torch.testing.assert_close(entropy, entropy_from_logits(logits, temperature=0.7))


def test_entropy_without_gradient_leaves_only_the_gradient_of_the_log_probs():
    index = torch.randint(0, 11, (6,))
    grads = []
    for wants in (True, False):
        logits = logits_of(6, 11).requires_grad_()
        logp, entropy = selective_log_softmax_and_entropy(logits, index, entropy_requires_grad=wants)
        assert entropy.requires_grad is wants
        (logp.sum() + entropy.sum()).backward()
        grads.append(logits.grad)
    logits = logits_of(6, 11).requires_grad_()
    selective_log_softmax(logits, index).sum().backward()
    torch.testing.assert_close(grads[1], logits.grad)
    assert not torch.allclose(grads[0], grads[1])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits_and_their_gradient(temperature):
    index = torch.randint(0, 11, (6,))
    a, b = logits_of(6, 11).requires_grad_(), logits_of(6, 11).requires_grad_()
    ours = selective_log_softmax(a, index, temperature=temperature)
    naive = torch.log_softmax(b / temperature, -1).gather(1, index[:, None])[:, 0]
    torch.testing.assert_close(ours, naive)
    ours.sum().backward()
    naive.sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan])
def test_temperature_not_above_zero_is_refused(temperature):
    with raises(ConfigError, "0"):
        selective_log_softmax(torch.zeros(1, 3), torch.tensor([0]), temperature=temperature)


def test_masked_rows_return_zero_and_neither_their_logits_nor_index_are_read(chunk_rows):
    logits = logits_of(7, 11)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    clean = logits.clone().requires_grad_()
    poisoned = logits.clone()
    poisoned[~mask] = math.nan
    poisoned.requires_grad_()
    index = torch.randint(0, 11, (7,))
    bad = index.masked_fill(~mask, -100)
    logp, entropy = selective_log_softmax_and_entropy(poisoned, bad, row_mask=mask)
    assert (logp[~mask] == 0).all()
    assert (entropy[~mask] == 0).all()
    other, other_entropy = selective_log_softmax_and_entropy(clean, index)
    torch.testing.assert_close(logp[mask], other[mask])
    torch.testing.assert_close(entropy[mask], other_entropy[mask])
    (logp.sum() + entropy.sum()).backward()
    (other[mask].sum() + other_entropy[mask].sum()).backward()
    torch.testing.assert_close(poisoned.grad, clean.grad)


def test_all_rows_masked_gives_zeros_and_a_zero_gradient():
    logits = logits_of(3, 11).requires_grad_()
    out = selective_log_softmax(logits, torch.full((3,), -100), row_mask=torch.zeros(3, dtype=torch.bool))
    out.sum().backward()
    assert (out == 0).all()
    assert (logits.grad == 0).all()


def test_gradients_of_both_results_pass_gradcheck(chunk_rows):
    logits = logits_of(4, 11, dtype=torch.float64, scale=1.0).requires_grad_()
    index = torch.randint(0, 11, (4, 2))
    index[0] = 5  # The same token chosen twice in a row adds up.
    mask = torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(
        lambda x: selective_log_softmax_and_entropy(x, index, temperature=0.8, row_mask=mask), (logits,)
    )
    assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, 2), (logits,))


def test_gradient_of_half_precision_logits_is_computed_in_float32():
    index = torch.randint(0, 300, (32,))
    half = logits_of(32, 300, dtype=torch.bfloat16).requires_grad_()
    wide = half.detach().double().requires_grad_()
    selective_log_softmax(half, index, out_dtype=torch.float32).sum().backward()
    torch.log_softmax(wide, -1).gather(1, index[:, None]).sum().backward()
    torch.testing.assert_close(half.grad, wide.grad.bfloat16(), rtol=2**-7, atol=1e-8)


def test_autocast_does_not_round_the_results():
    logits, index = logits_of(64, 500), torch.randint(0, 500, (64,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, entropy = selective_log_softmax_and_entropy(logits, index)
    plain_logp, plain_entropy = selective_log_softmax_and_entropy(logits, index)
    assert torch.equal(logp, plain_logp)
    assert torch.equal(entropy, plain_entropy)


def test_input_logits_are_never_written_to():
    logits = logits_of(4, 11)
    before = logits.clone()
    selective_log_softmax_and_entropy(logits, torch.zeros(4, dtype=torch.long), temperature=0.5)
    entropy_from_logits(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 3, 1, 1)])
def test_index_that_does_not_fit_the_logits_is_refused_with_both_shapes(shape):
    with raises(DataError, "2", "3", "11"):
        selective_log_softmax(logits_of(2, 3, 11), torch.zeros(shape, dtype=torch.long))


def test_row_mask_of_another_shape_and_integer_logits_are_refused():
    with raises(DataError, "row_mask", "2", "3"):
        entropy_from_logits(logits_of(3, 11), row_mask=torch.ones(2, dtype=torch.bool))
    with raises(DataError, "int64"):
        entropy_from_logits(torch.zeros(3, 11, dtype=torch.long))
    with raises(ConfigError, "chunk_size=0", "1"):
        entropy_from_logits(logits_of(3, 11), 0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 10**6), st.floats(0.01, 100.0))
def test_log_probs_and_entropies_stay_in_their_ranges(rows, vocabulary, seed, scale):
    logits = logits_of(rows, vocabulary, seed=seed, scale=scale)
    logp, entropy = selective_log_softmax_and_entropy(logits, torch.arange(vocabulary).expand(rows, -1))
    np.testing.assert_allclose(logp.double().exp().sum(-1), 1.0, atol=1e-5)
    np.testing.assert_allclose(logp, numpy_logp(logits), rtol=1e-5, atol=1e-4)
    assert (entropy > -1e-5).all()
    assert (entropy < math.log(vocabulary) + 1e-5).all()
