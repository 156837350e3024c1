"""Padding, compaction, truncation and masked statistics, against numpy and the vectors of the specification."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from posttrain.errors import ArgumentTypeError, ConfigError, DataError
from posttrain.extensions.trl_helpers.tensors import (
    first_true_indices,
    flush_left,
    masked_mean,
    masked_var,
    masked_whiten,
    nanmax,
    nanmin,
    nanstd,
    pad,
    pad_to_length,
    truncate_right,
)
from tests.wordings import raises

NAN = math.nan


def t(*rows, dtype=torch.long):
    return torch.tensor(rows, dtype=dtype)


# pad


def test_pad_left_puts_the_second_matrix_in_the_last_row():
    out = pad([torch.ones(2, 3), torch.ones(1, 5)], padding_side="left")
    assert out.shape == (2, 2, 5)
    assert out[0].tolist() == [[1, 1, 1, 0, 0]] * 2  # Other dimensions are filled on the right, whatever the side.
    assert out[1].tolist() == [[0] * 5, [1] * 5]


def test_pad_right_is_the_default_and_keeps_dtype():
    out = pad([torch.tensor([1, 2, 3]), torch.tensor([4])], padding_value=9)
    assert out.dtype == torch.long
    assert out.tolist() == [[1, 2, 3], [4, 9, 9]]


def test_pad_rounds_the_first_dimension_up_and_only_that():
    out = pad([torch.ones(3, 5), torch.ones(1, 2)], pad_to_multiple_of=4)
    assert out.shape == (2, 4, 5)
    assert pad([torch.ones(4)], pad_to_multiple_of=4).shape == (1, 4)
    assert pad([torch.ones(0)], pad_to_multiple_of=4).shape == (1, 0)
    left = pad([torch.tensor([1, 2, 3])], 0, "left", 4)
    assert left.tolist() == [[0, 1, 2, 3]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=5), st.booleans())
def test_pad_keeps_every_entry_and_fills_the_rest(shapes, left):
    arrays = [np.arange(a * b).reshape(a, b) + 1 for a, b in shapes]
    out = pad([torch.from_numpy(a) for a in arrays], -7, "left" if left else "right").numpy()
    for row, a in zip(out, arrays, strict=True):
        corner = row[row.shape[0] - a.shape[0] :] if left else row[: a.shape[0]]
        assert (corner[:, : a.shape[1]] == a).all()
        assert (row != -7).sum() == a.size


def test_pad_passes_gradients_to_its_inputs():
    a, b = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    (pad([a, b]) * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert a.grad.tolist() == [1, 2]
    assert b.grad.tolist() == [3]


def test_pad_refuses_mixed_dtypes_instead_of_truncating_floats():
    with raises(DataError, "1", "torch.float32", "0", "torch.int64"):
        pad([torch.tensor([1]), torch.tensor([1.5])])


def test_pad_refuses_an_untyped_empty_row_that_would_turn_ids_to_float():
    with raises(DataError, "1", "torch.int64", "0", "torch.float32"):
        pad([torch.tensor([]), torch.tensor([1, 2])])


def test_pad_refuses_mixed_devices():
    with raises(DataError, "1", "0"):
        pad([torch.ones(1), torch.ones(1, device="meta")])


def test_pad_refuses_mixed_ranks_and_scalars():
    with raises(DataError, "1", "2", "0"):
        pad([torch.ones(1), torch.ones(1, 1)])
    with raises(DataError, "0"):
        pad([torch.tensor(1)])


def test_pad_refuses_nothing_lists_unknown_sides_and_multiples_below_one():
    with raises(DataError):
        pad([])
    with raises(ArgumentTypeError, "1"):
        pad([torch.ones(1), [1.0]])
    with raises(ConfigError, "padding_side='rigth'", "'right'"):
        pad([torch.ones(1)], padding_side="rigth")
    with pytest.raises(ConfigError, match="pad_to_multiple_of=0"):
        pad([torch.ones(1)], pad_to_multiple_of=0)


@pytest.mark.parametrize("value", [0.5, NAN])
def test_pad_refuses_a_padding_value_that_integers_cannot_hold(value):
    with raises(DataError, "padding_value", "int64"):
        pad([torch.tensor([1])], padding_value=value)
    assert pad([torch.tensor([1.0]), torch.tensor([])], padding_value=0.5).tolist() == [[1.0], [0.5]]


# pad_to_length


def test_pad_to_length_fills_on_the_right_along_any_dimension():
    x = t([1, 2], [3, 4])
    assert pad_to_length(x, 3, 9).tolist() == [[1, 2, 9], [3, 4, 9]]
    assert pad_to_length(x, 3, 9, dim=0).tolist() == [[1, 2], [3, 4], [9, 9]]


def test_pad_to_length_never_cuts():
    x = t([1, 2, 3])
    assert pad_to_length(x, 2, 9) is x
    assert pad_to_length(x, 3, 9) is x


# flush_left


def test_flush_left_vector():
    mask, values = flush_left(t([0, 1, 1, 0], [0, 0, 0, 1]), t([7, 20, 21, 7], [7, 7, 7, 30]))
    assert mask.tolist() == [[1, 1], [1, 0]]
    assert values.tolist() == [[20, 21], [30, 0]]


def test_flush_left_closes_gaps_without_losing_a_token():
    mask, values = flush_left(t([0, 1, 0, 1, 0]), t([1, 2, 3, 4, 5]))
    assert mask.tolist() == [[1, 1]]
    assert values.tolist() == [[2, 4]]


def test_flush_left_accepts_bool_and_float_masks_and_keeps_their_dtype():
    for dtype in (torch.bool, torch.float32, torch.int32):
        mask, values = flush_left(t([0, 1, 1]).to(dtype), t([1, 2, 3]))
        assert mask.dtype == dtype
        assert values.tolist() == [[2, 3]]


def test_flush_left_fills_masked_positions_with_the_given_values():
    mask = t([0, 1, 1], [0, 0, 1], [0, 0, 0])
    _, ids, labels = flush_left(mask, t(*[[5, 6, 7]] * 3), t(*[[5, 6, 7]] * 3), fill_value=[9, -100])
    assert ids.tolist() == [[6, 7], [7, 9], [9, 9]]
    assert labels.tolist() == [[6, 7], [7, -100], [-100, -100]]
    _, one = flush_left(mask, t(*[[5, 6, 7]] * 3), fill_value=4)
    assert one.tolist() == [[6, 7], [7, 4], [4, 4]]


def test_flush_left_returns_the_mask_alone_without_tensors():
    out = flush_left(t([0, 0, 1], [0, 1, 1]))
    assert isinstance(out, torch.Tensor)
    assert out.tolist() == [[1, 0], [1, 1]]


def test_flush_left_of_an_empty_mask_has_no_columns():
    mask, values = flush_left(t([0, 0]), t([1, 2]))
    assert mask.shape == values.shape == (1, 0)


def test_flush_left_moves_trailing_dimensions_along():
    _, values = flush_left(t([0, 1, 0, 1]), torch.arange(8).reshape(1, 4, 2))
    assert values.tolist() == [[[2, 3], [6, 7]]]


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(bool, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8)))
def test_flush_left_keeps_the_kept_entries_in_order(mask):
    values = np.arange(mask.size).reshape(mask.shape)
    new_mask, new = flush_left(torch.from_numpy(mask), torch.from_numpy(values), fill_value=-1)
    assert new.shape[1] == mask.sum(1).max()
    for old, keep, row in zip(values, mask, new.tolist(), strict=True):
        assert row[: keep.sum()] == old[keep].tolist()
        assert set(row[keep.sum() :]) <= {-1}
    assert new_mask.sum(1).tolist() == mask.sum(1).tolist()


def test_flush_left_keeps_the_order_of_long_rows():
    """Long enough that an unstable sort would reorder equal keys."""
    mask = torch.rand(3, 5000, generator=torch.Generator().manual_seed(0)) < 0.5
    values = torch.arange(5000).expand(3, -1)
    for row, keep in zip(flush_left(mask, values)[1], mask, strict=True):
        assert torch.equal(row[: keep.sum()], keep.nonzero().flatten())


def test_flush_left_refuses_other_masks_and_shapes():
    with raises(DataError, "0", "1"):
        flush_left(t([0, 2]))
    with raises(DataError, "2"):
        flush_left(torch.ones(2))
    with raises(DataError, "0", "1", "3", "2"):
        flush_left(t([0, 1]), t([1, 2, 3]))
    with raises(DataError, "2", "1"):
        flush_left(t([0, 1]), t([1, 2]), fill_value=[1, 2])


# first_true_indices, truncate_right


def test_first_true_index_is_the_length_where_nothing_is_true():
    bools = torch.tensor([[[False, True, True], [False, False, False]], [[True, False, True], [False, False, True]]])
    assert first_true_indices(bools).tolist() == [[1, 3], [0, 2]]
    assert first_true_indices(bools, dtype=torch.int32).dtype == torch.int32
    assert first_true_indices(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


IDS = t([5, 8, 6, 8], [5, 6, 7, 5], [8, 8, 5, 6])


def test_truncate_right_vector():
    ids, mask = truncate_right(IDS, 8, 0)
    assert ids.tolist() == [[5, 8, 0, 0], [5, 6, 7, 5], [8, 0, 0, 0]]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert mask.dtype == IDS.dtype


def test_truncate_right_accepts_several_stop_tokens():
    ids, mask = truncate_right(IDS, [8, 7], 0)
    assert ids.tolist() == [[5, 8, 0, 0], [5, 6, 7, 0], [8, 0, 0, 0]]
    assert mask.sum(1).tolist() == [2, 3, 1]
    assert torch.equal(truncate_right(IDS, torch.tensor([7, 8]), 0)[0], ids)


def test_truncate_right_keeps_the_stop_token_when_it_is_also_the_pad_token():
    ids, mask = truncate_right(IDS, 8, 8)
    assert ids.tolist() == [[5, 8, 8, 8], [5, 6, 7, 5], [8, 8, 8, 8]]
    assert mask.sum(1).tolist() == [2, 4, 1]


def test_truncate_right_leaves_its_input_alone_and_refuses_no_stop_tokens():
    before = IDS.clone()
    truncate_right(IDS, 8, 0)
    assert torch.equal(IDS, before)
    with raises(DataError):
        truncate_right(IDS, [], 0)


# NaN-aware statistics


def test_nanstd_vectors():
    assert nanstd(torch.tensor([2.0, 4.0, NAN, 9.0])).item() == pytest.approx(3.6056, abs=1e-4)
    out = nanstd(torch.tensor([[NAN, 6.0], [2.0, 8.0]]), dim=1)
    assert out[0].isnan()
    assert out[1].item() == pytest.approx(4.2426, abs=1e-4)


@settings(max_examples=100, deadline=None)
@given(
    hnp.arrays(
        np.float64,
        st.just((3, 4, 2)),
        elements=st.one_of(st.just(NAN), st.floats(-100, 100)),
    ),
    st.sampled_from([None, 0, 1, -1, (0, 1), (-1, 0), (0, 1, 2)]),
    st.booleans(),
)
def test_nanstd_is_numpys_for_every_dim(x, dim, keepdim):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns where it returns NaN.
        expected = np.nanstd(x, axis=dim, ddof=1, keepdims=keepdim) if (~np.isnan(x)).any() else None
    out = nanstd(torch.from_numpy(x), dim=dim, keepdim=keepdim)
    if expected is None:
        assert out.isnan().all()
    else:
        np.testing.assert_allclose(out.numpy(), expected, atol=1e-9)


def test_nanstd_is_nan_for_one_none_or_no_number():
    for x in (torch.tensor([1.0, NAN]), torch.tensor([NAN, NAN]), torch.tensor([]), torch.tensor(3.0)):
        assert nanstd(x).isnan()


def test_nanstd_casts_integers_and_computes_half_precision_wider():
    assert nanstd(torch.tensor([1, 2, 3, 4])).item() == pytest.approx(np.std([1, 2, 3, 4], ddof=1))
    x = torch.tensor([1000.0, 1001.0, NAN, 1004.0, 1008.0], dtype=torch.float16)
    out = nanstd(x)
    assert out.dtype == torch.float16
    assert out.item() == pytest.approx(np.std([1000, 1001, 1004, 1008], ddof=1), rel=1e-3)


def test_nanstd_does_not_hide_infinity():
    assert nanstd(torch.tensor([1.0, 2.0, math.inf])).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nanmin_and_nanmax_ignore_nan_and_keep_the_dtype(dtype):
    x = torch.tensor([NAN, 3.0, -1.0, NAN, 2.0], dtype=dtype)
    assert (nanmin(x).item(), nanmax(x).item()) == (-1.0, 3.0)
    for empty in (torch.tensor([NAN, NAN], dtype=dtype), torch.tensor([], dtype=dtype)):
        for function in (nanmin, nanmax):
            out = function(empty)
            assert out.isnan()
            assert out.dtype == dtype
            assert out.shape == ()


def test_nanmin_of_integers_is_their_minimum_and_of_none_is_nan():
    assert nanmin(torch.tensor([3, 1])).item() == 1
    assert nanmax(torch.tensor([], dtype=torch.long)).isnan()


# masked statistics


def test_masked_mean_and_variance_vector():
    values, mask = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0])
    assert masked_mean(values, mask).item() == 2.5
    assert masked_var(values, mask).item() == 0.5
    assert masked_var(values, mask, unbiased=False).item() == 0.25


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(bool, (3, 5)), st.integers(0, 1000))
def test_masked_statistics_are_numpys_of_what_is_kept(mask, seed):
    x = np.random.default_rng(seed).normal(size=(3, 5)) * 4 + 2
    kept = x[mask]
    values, m = torch.from_numpy(x), torch.from_numpy(mask)
    if kept.size == 0:
        assert masked_mean(values, m).isnan()
        with raises(DataError, "15"):
            masked_var(values, m)
        with raises(DataError):
            masked_whiten(values, m)
        return
    assert masked_mean(values, m).item() == pytest.approx(kept.mean())
    assert masked_var(values, m, unbiased=False).item() == pytest.approx(kept.var(), abs=1e-12)
    if kept.size > 1:
        var = kept.var(ddof=1)
        assert masked_var(values, m.long()).item() == pytest.approx(var)
        expected = (x - kept.mean()) / np.sqrt(var + 1e-8)
        np.testing.assert_allclose(masked_whiten(values, m), expected)
        np.testing.assert_allclose(masked_whiten(values, m, shift_mean=False), expected + kept.mean())


def test_masked_mean_reduces_one_axis():
    values, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1, 1, 0], [0, 0, 1]])
    assert masked_mean(values, mask, axis=1).tolist() == [1.5, 6.0]
    assert masked_mean(values, mask, 1).tolist() == [1.5, 6.0]


def test_masked_statistics_do_not_read_what_is_masked():
    values = torch.tensor([NAN, 2.0, 3.0, math.inf], requires_grad=True)
    mask = torch.tensor([False, True, True, False])
    assert masked_mean(values, mask).item() == 2.5
    out = masked_var(values, mask)
    assert out.item() == 0.5
    out.backward()
    assert values.grad[1:3].isfinite().all()
    assert masked_mean(values, mask.float(), axis=0).item() == 2.5


def test_variance_of_a_single_value_is_zero_and_whitening_leaves_it_alone():
    values, mask = torch.tensor([5.0, 7.0]), torch.tensor([0, 1])
    assert masked_var(values, mask).item() == 0.0
    assert masked_whiten(values, mask).tolist() == [5.0, 7.0]


def test_whitening_equal_values_gives_zeros():
    assert masked_whiten(torch.full((3,), 4.0), torch.ones(3)).tolist() == [0, 0, 0]
