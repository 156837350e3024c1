"""The order of prompts: the goldens of the specification, and resuming in any epoch."""

import copy
import logging

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.samplers import RepeatSampler, check_prompts, repeat_iterable_dataset
from posttrain.errors import ConfigError, DataError
from tests.wordings import raises


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


def test_set_epoch_also_goes_back():
    sampler = RepeatSampler(range(9), 1, seed=3)
    passes = [list(sampler) for _ in range(4)]
    for epoch in (1, 0, 3, 3, 2):
        sampler.set_epoch(epoch)
        assert list(sampler) == passes[epoch]


def test_a_pass_cut_short_does_not_shift_the_next_one():
    whole, cut = RepeatSampler(range(9), 2, seed=3), RepeatSampler(range(9), 2, seed=3)
    list(whole)
    stopped = iter(cut)
    next(stopped)
    assert list(cut) == list(whole)


def test_the_stream_of_permutations_is_private():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first = list(RepeatSampler(range(9), 1, seed=3))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    assert list(RepeatSampler(range(9), 1, seed=3)) == first


def test_no_seed_is_a_fixed_order():
    assert list(RepeatSampler(range(20), 1)) == list(RepeatSampler(range(20), 1)) != list(range(20))


def test_the_golden_of_the_data_chapter():
    sampler = RepeatSampler(range(5), 3, batch_size=2, repeat_count=2, shuffle=False)
    assert "".join(map(str, sampler)) == "000111" * 2 + "222333" * 2


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 30),
    mini=st.integers(1, 4),
    batch=st.integers(1, 6),
    repeat=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_every_chunk_repeats_whole_groups_and_the_length_is_true(n, mini, batch, repeat, shuffle):
    if n < batch:
        return
    sampler = RepeatSampler(range(n), mini, batch, repeat, shuffle, seed=1)
    out = list(sampler)
    assert len(out) == len(sampler) == n // batch * batch * mini * repeat
    block = batch * mini
    chunks = [out[i : i + block] for i in range(0, len(out), block)]
    for i, chunk in enumerate(chunks):
        assert chunk == chunks[i - i % repeat]
        assert [x for x in chunk[::mini] for _ in range(mini)] == chunk
    used = [x for chunk in chunks[::repeat] for x in chunk[::mini]]
    assert len(set(used)) == len(used)


def test_fewer_rows_than_a_chunk_is_refused():
    with raises(DataError, "2", "3") as caught:
        RepeatSampler(range(2), 4, batch_size=3)
    assert "generation batch of 12 rows contains 3 prompts, each repeated 4 times" in str(caught.value)


@pytest.mark.parametrize(("n", "level"), [(103, logging.INFO), (15, logging.WARNING)])
def test_a_dropped_tail_is_logged_and_a_large_one_is_a_warning(caplog, n, level):
    with caplog.at_level(logging.INFO, logger="posttrain"):
        RepeatSampler(range(n), 1, batch_size=10)
    (record,) = caplog.records
    assert record.levelno == level
    assert f"{n % 10} of {n} rows" in record.message


@pytest.mark.parametrize("field", ["mini_repeat_count", "batch_size", "repeat_count"])
def test_a_count_below_one_is_refused(field):
    counts = {"mini_repeat_count": 1, "batch_size": 1, "repeat_count": 1} | {field: 0}
    with pytest.raises(ConfigError, match=f"{field}=0"):
        RepeatSampler(range(4), **counts)
    with pytest.raises(ConfigError, match=f"{field}=0"):
        repeat_iterable_dataset(datasets.Dataset.from_list([{"a": 1}]).to_iterable_dataset(), **counts)
    with pytest.raises(ConfigError, match="epoch=-1"):
        RepeatSampler(range(4), 1).set_epoch(-1)


def test_an_accelerate_loader_gets_the_same_order_as_the_bare_sampler():
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    sampler = RepeatSampler(range(12), 2, batch_size=3, repeat_count=2, seed=5)
    loader = Accelerator(cpu=True).prepare(DataLoader(list(range(12)), batch_size=6, sampler=sampler, collate_fn=list))
    bare = RepeatSampler(range(12), 2, batch_size=3, repeat_count=2, seed=5)
    for _ in range(2):
        assert [x for batch in loader for x in batch] == list(bare)


def test_the_stream_has_the_sampler_s_order_and_keeps_its_columns():
    rows = [{"prompt": str(i), "answer": i} for i in range(7)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    got = list(repeat_iterable_dataset(stream, 2, batch_size=3, repeat_count=2))
    assert [row["answer"] for row in got] == list(
        RepeatSampler(range(7), 2, batch_size=3, repeat_count=2, shuffle=False)
    )
    assert got[0] == rows[0]


def test_repeated_records_are_copies():
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"prompt": [{"role": "user", "content": "x"}]}]))
    first, second = list(repeat_iterable_dataset(stream, 2))
    kept = copy.deepcopy(second)
    first["prompt"][0]["content"] = "changed"
    assert second == kept


def test_set_epoch_reaches_a_shuffle_upstream():
    def order(epoch):
        stream = (
            datasets.Dataset.from_list([{"i": i} for i in range(50)])
            .to_iterable_dataset()
            .shuffle(seed=1, buffer_size=50)
        )
        repeated = repeat_iterable_dataset(stream, 2, batch_size=5)
        repeated.set_epoch(epoch)
        return [row["i"] for row in repeated]

    assert order(0) == order(0) != order(1) == order(1)
    assert order(1)[::2] == order(1)[1::2]
    assert sorted(order(1)[::2]) == list(range(50))


def test_a_prompt_that_is_one_message_is_refused_with_its_row(tiny_tokenizer):
    rows = datasets.Dataset.from_list([{"prompt": {"role": "user", "content": "hi"}}] * 2)
    with pytest.raises(
        DataError, match="train_dataset row 0: column 'prompt' must be a string or a list of messages, not a dict"
    ):
        check_prompts(rows, "train_dataset", tiny_tokenizer)
