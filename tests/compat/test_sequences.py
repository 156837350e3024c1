"""Batches cut, shuffled and regrouped without an entry leaving its row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.compat.sequences import (
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)
from posttrain.errors import ArgumentTypeError, ConfigError, DataError

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
    with pytest.raises(DataError, match="7 rows cannot be cut into 3 equal chunks"):
        split_tensor_dict({"x": torch.arange(7)}, 3)


def test_split_never_gives_empty_chunks():
    with pytest.raises(DataError, match="2 rows cannot be cut into 3"):
        split_tensor_dict({"x": torch.arange(2)}, 3)
    with pytest.raises(DataError, match="0 rows"):
        split_tensor_dict({"x": torch.empty(0, 3)}, 3)


def test_split_takes_its_size_from_the_first_entry_that_has_one():
    chunks = split_tensor_dict({"loss": torch.tensor(1.0), "names": ["a", "b"], "x": torch.arange(2)}, 2)
    assert [c["x"].tolist() for c in chunks] == [[0], [1]]
    assert split_tensor_dict({"loss": torch.tensor(1.0)}, 2) == [{"loss": torch.tensor(1.0)}] * 2


def test_split_refuses_entries_that_disagree_about_the_rows():
    with pytest.raises(DataError, match=r"'y' has 4 rows, and 'x' has 6"):
        split_tensor_dict({"x": torch.arange(6), "y": list("abcd")}, 2)


def test_split_refuses_counts_below_one_and_entries_it_cannot_cut():
    with pytest.raises(ConfigError, match="num_chunks=0"):
        split_tensor_dict({"x": torch.arange(2)}, 0)
    with pytest.raises(ArgumentTypeError, match="'x' is a set"):
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
    with pytest.raises(DataError, match=r"'pixels' has 12 rows, and 'x' has 6.*split_pixel_values_by_grid"):
        shuffle_sequence_dict({"x": torch.arange(6), "pixels": torch.ones(12, 3)})


# split_pixel_values_by_grid


def test_grid_layout_gives_every_sample_its_own_patches():
    grid = torch.tensor([[1, 2, 2], [1, 1, 3], [1, 2, 1]])  # 4, 3 and 2 patches.
    batch = {"pixel_values": torch.arange(18).reshape(9, 2), "image_grid_thw": grid, "num_images": [2, 0, 1]}
    out = split_pixel_values_by_grid(batch)
    assert [p.shape[0] for p in out["pixel_values"]] == [7, 0, 2]
    assert [g.shape[0] for g in out["image_grid_thw"]] == [2, 0, 1]
    assert out["pixel_values"][2].tolist() == [[14, 15], [16, 17]]
    back = unsplit_pixel_values_by_grid(out)
    assert torch.equal(back["pixel_values"], batch["pixel_values"])
    assert torch.equal(back["image_grid_thw"], grid)
    assert batch["pixel_values"].shape == (9, 2)  # The caller's batch is untouched.


def test_grid_layout_refuses_totals_that_do_not_fit():
    grid = torch.tensor([[1, 2, 2], [1, 1, 3]])
    with pytest.raises(DataError, match="pixel_values has 8 rows, and image_grid_thw says 7"):
        split_pixel_values_by_grid({"pixel_values": torch.ones(8, 2), "image_grid_thw": grid, "num_images": [1, 1]})
    with pytest.raises(DataError, match="image_grid_thw has 2 rows, and num_images says 3"):
        split_pixel_values_by_grid({"pixel_values": torch.ones(7, 2), "image_grid_thw": grid, "num_images": [2, 1]})


def test_position_layout_is_cut_by_images():
    batch = {
        "pixel_values": torch.arange(3)[:, None, None].expand(3, 5, 2),
        "image_position_ids": torch.arange(3)[:, None].expand(3, 5),
        "num_images": torch.tensor([1, 2]),
    }
    out = split_pixel_values_by_grid(batch)
    assert [p[:, 0, 0].tolist() for p in out["pixel_values"]] == [[0], [1, 2]]
    assert [p[:, 0].tolist() for p in out["image_position_ids"]] == [[0], [1, 2]]


@pytest.mark.parametrize("companions", [(), ("spatial_shapes",), ("spatial_shapes", "pixel_attention_mask")])
def test_tile_layout_is_cut_by_tiles_with_or_without_spatial_shapes(companions):
    batch = {"pixel_values": torch.arange(5)[:, None], "num_images": [1, 0, 2], "num_tiles": [3, 0, 2]}
    batch |= {name: torch.arange(5)[:, None] for name in companions}
    out = split_pixel_values_by_grid(batch)
    for name in ("pixel_values", *companions):
        assert [p.flatten().tolist() for p in out[name]] == [[0, 1, 2], [], [3, 4]]
    with pytest.raises(DataError, match="pixel_values has 5 rows, and num_tiles says 4"):
        split_pixel_values_by_grid(batch | {"num_tiles": [2, 0, 2]})
    with pytest.raises(DataError, match="num_tiles has 2 entries, and num_images 3"):
        split_pixel_values_by_grid(batch | {"num_tiles": [3, 2]})


def test_spatial_shapes_without_tiles_are_refused():
    with pytest.raises(DataError, match="spatial_shapes needs num_tiles"):
        split_pixel_values_by_grid(
            {"pixel_values": torch.ones(2, 1), "spatial_shapes": torch.ones(2, 2), "num_images": [1, 1]}
        )


@pytest.mark.parametrize("sizes", [False, True])
def test_flat_layout_with_one_row_an_image_is_cut_by_images(sizes):
    batch = {"pixel_values": torch.arange(4).reshape(4, 1, 1, 1), "num_images": [2, 0, 1, 1]}
    if sizes:
        batch["image_sizes"] = torch.arange(8).reshape(4, 2)
    out = split_pixel_values_by_grid(batch)
    assert [p.flatten().tolist() for p in out["pixel_values"]] == [[0, 1], [], [2], [3]]
    if sizes:
        assert [p[:, 0].tolist() for p in out["image_sizes"]] == [[0, 2], [], [4], [6]]
    assert torch.equal(unsplit_pixel_values_by_grid(out)["pixel_values"], batch["pixel_values"])


def test_layout_with_one_row_a_sample_stays():
    batch = {"pixel_values": torch.ones(2, 3, 3, 4, 4), "num_images": [3, 1]}
    assert split_pixel_values_by_grid(batch)["pixel_values"] is batch["pixel_values"]


def test_unknown_layout_is_refused_instead_of_shuffled_by_samples():
    with pytest.raises(DataError, match=r"shape \(7, 2\) for 2 samples with num_images=\[2, 1\]"):
        split_pixel_values_by_grid({"pixel_values": torch.ones(7, 2), "num_images": [2, 1]})


def test_layout_that_fits_both_readings_is_refused():
    """Two rows, two samples, two images, both of sample 0: one row an image, or one row a sample?"""
    with pytest.raises(DataError, match=r"num_images=\[2, 0\]"):
        split_pixel_values_by_grid({"pixel_values": torch.ones(2, 2, 3, 4, 4), "num_images": [2, 0]})


def test_batch_without_images_is_unchanged():
    for batch in (
        {"x": 1},
        {"pixel_values": None, "num_images": [0]},
        {"pixel_values": torch.ones(2, 2), "num_images": None},
    ):
        assert split_pixel_values_by_grid(batch) == batch


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=4), st.integers(0, 1000))
def test_shuffling_regrouped_images_keeps_them_with_their_sample(samples, seed):
    """Each patch carries its sample's number, so a patch in another sample's place would show."""
    grid = [[1, side, 2] for sample in samples for side in sample]
    if not grid:
        return
    owners = [i for i, sample in enumerate(samples) for side in sample for _ in range(side * 2)]
    batch = {
        "sample": torch.arange(len(samples)),
        "pixel_values": torch.tensor(owners)[:, None],
        "image_grid_thw": torch.tensor(grid),
        "num_images": [len(sample) for sample in samples],
    }
    out = shuffle_sequence_dict(split_pixel_values_by_grid(batch), generator=torch.Generator().manual_seed(seed))
    for sample, pixels, count in zip(out["sample"].tolist(), out["pixel_values"], out["num_images"], strict=True):
        assert set(pixels.flatten().tolist()) <= {sample}
        assert count == len(samples[sample])
