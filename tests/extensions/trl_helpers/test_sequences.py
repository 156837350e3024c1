"""Batches cut, shuffled and regrouped without an entry leaving its row."""

import pytest
import torch

from posttrain.errors import ArgumentTypeError, ConfigError, DataError
from posttrain.extensions.trl_helpers.sequences import (
    shuffle_sequence_dict,
    split_tensor_dict,
)
from tests.wordings import raises

# split_tensor_dict


def test_split_cuts_tensors_and_lists_and_copies_scalars_and_none():
    batch = {
        "none": None,
        "scalar": torch.tensor(3.0),
        "number": 7,
        "list": list("abcdef"),
        "x": torch.arange(12).reshape(6, 2),
    }
    chunks = split_tensor_dict(batch, 3)
    assert [c["list"] for c in chunks] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert torch.equal(torch.cat([c["x"] for c in chunks]), batch["x"])
    for chunk in chunks:
        assert chunk["none"] is None
        assert chunk["scalar"] is batch["scalar"]
        assert chunk["number"] == 7


def test_split_never_drops_a_remainder():
    with raises(DataError, "7", "3"):
        split_tensor_dict({"x": torch.arange(7)}, 3)


def test_split_never_gives_empty_chunks():
    with raises(DataError, "2", "3"):
        split_tensor_dict({"x": torch.arange(2)}, 3)
    with raises(DataError, "0"):
        split_tensor_dict({"x": torch.empty(0, 3)}, 3)


def test_split_takes_its_size_from_the_first_entry_that_has_one():
    chunks = split_tensor_dict({"loss": torch.tensor(1.0), "names": ["a", "b"], "x": torch.arange(2)}, 2)
    assert [c["x"].tolist() for c in chunks] == [[0], [1]]
    assert split_tensor_dict({"loss": torch.tensor(1.0)}, 2) == [{"loss": torch.tensor(1.0)}] * 2


def test_split_refuses_entries_that_disagree_about_the_rows():
    with raises(DataError, "'y'", "4", "'x'", "6"):
        split_tensor_dict({"x": torch.arange(6), "y": list("abcd")}, 2)


def test_split_refuses_counts_below_one_and_entries_it_cannot_cut():
    with pytest.raises(ConfigError, match="num_chunks=0"):
        split_tensor_dict({"x": torch.arange(2)}, 0)
    with raises(ArgumentTypeError, "'x'"):
        split_tensor_dict({"x": {1, 2}}, 2)


# shuffle_sequence_dict


def test_shuffle_moves_every_entry_by_the_same_permutation_of_the_global_generator():
    batch = {"x": torch.arange(10), "names": [str(i) for i in range(10)], "none": None, "s": torch.tensor(1.0)}
    torch.manual_seed(3)
    out = shuffle_sequence_dict(batch)
    torch.manual_seed(3)
    order = torch.randperm(10).tolist()
    assert out["x"].tolist() == order != list(range(10))
    assert out["names"] == [str(i) for i in order]
    assert out["none"] is None
    assert out["s"] is batch["s"]


def test_shuffle_with_a_generator_leaves_the_global_one_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    outs = [
        shuffle_sequence_dict({"x": torch.arange(9)}, generator=torch.Generator().manual_seed(5))["x"] for _ in "ab"
    ]
    assert torch.equal(*outs)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_shuffle_refuses_a_tensor_with_another_leading_size():
    with raises(DataError, "'pixels'", "12", "'x'", "6"):
        shuffle_sequence_dict({"x": torch.arange(6), "pixels": torch.ones(12, 3)})
