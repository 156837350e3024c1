"""The order of prompts: the goldens of the specification, and resuming in any epoch."""

import datasets
import pytest

from posttrain.data.samplers import RepeatSampler, repeat_iterable_dataset
from posttrain.errors import DataError


def test_order_without_shuffling():
    sampler = RepeatSampler(range(7), 2, batch_size=3, repeat_count=2, shuffle=False)
    expected = [0, 0, 1, 1, 2, 2] * 2 + [3, 3, 4, 4, 5, 5] * 2
    assert list(sampler) == expected
    assert len(sampler) == len(expected) == 24


def test_order_with_seed_42_and_its_second_pass():
    sampler = RepeatSampler(range(7), 2, batch_size=3, repeat_count=2, seed=42)
    assert list(sampler) == [1, 1, 6, 6, 3, 3] * 2 + [5, 5, 4, 4, 0, 0] * 2
    assert list(sampler)[:6] == [5, 5, 3, 3, 2, 2]


def test_set_epoch_resumes_the_order_of_an_uninterrupted_run():
    sampler = RepeatSampler(range(9), 1, seed=3)
    passes = [list(sampler) for _ in range(3)]
    fresh = RepeatSampler(range(9), 1, seed=3)
    fresh.set_epoch(2)
    assert list(fresh) == passes[2] != passes[1]


def test_fewer_rows_than_a_chunk_is_refused():
    with pytest.raises(DataError, match="2 rows, fewer than the 3"):
        RepeatSampler(range(2), 1, batch_size=3)


def test_the_stream_has_the_sampler_s_order_and_keeps_its_columns():
    rows = [{"prompt": str(i), "answer": i} for i in range(7)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    got = list(repeat_iterable_dataset(stream, 2, batch_size=3, repeat_count=2))
    assert [row["answer"] for row in got] == list(RepeatSampler(range(7), 2, batch_size=3, repeat_count=2, shuffle=False))
    assert got[0] == rows[0]
