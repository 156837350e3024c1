"""Packing: the rule's own vectors, and that no token is ever lost or doubled, whatever the dataset looks like inside."""

from collections import Counter

import datasets
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.data.packing import best_fit_decreasing, pack_dataset, split_trained, truncate_dataset
from posttrain.data.sft import SupervisedOptions, prepare_sft_dataset
from posttrain.errors import ArgumentTypeError, ConfigError, DataError
from tests.wordings import raises

DOCUMENTS = [[10, 11, 12, 13, 14, 15, 16], [20, 21], [30], [40, 41, 42, 43], [50, 51, 52]]


def dataset(documents):
    return datasets.Dataset.from_dict({"input_ids": documents}, features=features())


def features(**more):
    return datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))} | more)


def packed(documents, size, strategy, **kwargs):
    out = pack_dataset(dataset(documents), size, strategy, preserve_order=True, **kwargs)
    return out["input_ids"][:], out["seq_lengths"][:]


def tokens(data):
    return Counter(t for row in data["input_ids"] for t in row)


def test_vectors_of_each_strategy():
    assert packed(DOCUMENTS, 5, "bfd") == (
        [[10, 11, 12, 13, 14], [40, 41, 42, 43, 30], [50, 51, 52, 20, 21]],
        [[5], [4, 1], [3, 2]],
    )
    assert packed(DOCUMENTS, 5, "bfd_split") == (
        [[10, 11, 12, 13, 14], [40, 41, 42, 43, 30], [50, 51, 52, 15, 16], [20, 21]],
        [[5], [4, 1], [3, 2], [2]],
    )
    assert packed(DOCUMENTS, 5, "wrapped") == (
        [[10, 11, 12, 13, 14], [15, 16, 20, 21, 30], [40, 41, 42, 43, 50], [51, 52]],
        [[5], [2, 2, 1], [4, 1], [2]],
    )


@pytest.mark.parametrize(
    ("documents", "size", "strategy", "rows", "lengths"),
    [
        ([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]], 4, "bfd", [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], [[4], [3, 1], [2]]),
        ([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]], 4, "bfd_split", [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]], [[4], [3, 1], [2, 1]]),
        ([[], [31, 32, 33], [], [44], [55, 56]], 4, "bfd", [[31, 32, 33, 44], [55, 56]], [[3, 1], [2]]),
        ([[1, 1, 1], [2, 2, 2], [3, 3], [4, 4], [5], [6]], 5, "bfd", [[1, 1, 1, 3, 3], [2, 2, 2, 4, 4], [5, 6]], [[3, 2], [3, 2], [1, 1]]),
        ([[1] * 4, [2] * 4, [3], [4]], 5, "bfd", [[1, 1, 1, 1, 3], [2, 2, 2, 2, 4]], [[4, 1], [4, 1]]),
        ([[1, 2, 3], [], [4] * 20, [5, 6]], 8, "bfd", [[4] * 8, [1, 2, 3, 5, 6]], [[8], [3, 2]]),
        ([[1, 2, 3], [], [4] * 20, [5, 6]], 8, "bfd_split", [[4] * 8, [4] * 8, [4, 4, 4, 4, 1, 2, 3], [5, 6]], [[8], [8], [4, 3], [2]]),
    ],
)  # fmt: skip
def test_more_vectors(documents, size, strategy, rows, lengths):
    assert packed(documents, size, strategy) == (rows, lengths)


def slow_best_fit(lengths, size):
    """The rule word by word: a list of bins, one document at a time."""
    bins, reached = [], []
    for clock, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        fitting = [b for b, (room, _) in enumerate(reached) if room >= lengths[index]]
        if fitting:
            b = min(fitting, key=lambda b: reached[b])
        else:
            bins.append([])
            reached.append((size, clock))
            b = len(bins) - 1
        bins[b].append(index)
        reached[b] = (reached[b][0] - lengths[index], clock + 1)
    return bins


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 20).flatmap(lambda s: st.tuples(st.just(s), st.lists(st.integers(1, s), min_size=1, max_size=60)))
)
def test_placement_is_best_fit_decreasing_document_by_document(case):
    size, lengths = case
    order, counts = best_fit_decreasing(np.array(lengths), size)
    cuts = np.cumsum(counts)[:-1]
    assert [part.tolist() for part in np.split(order, cuts)] == slow_best_fit(lengths, size)


DOCS = st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    DOCS,
    st.integers(1, 9),
    st.sampled_from(["bfd_split", "wrapped"]),
    st.sampled_from(["plain", "slice", "pick", "shuffle"]),
)
def test_no_token_is_lost_or_doubled_however_the_dataset_is_indexed(documents, size, strategy, view):
    data = dataset(documents)
    if view == "slice":
        data = data.select(range(len(data) // 3, len(data)))
    elif view == "pick":
        data = data.select(list(range(0, len(data), 2)))
    elif view == "shuffle":
        data = data.shuffle(seed=1)
    out = pack_dataset(data, size, strategy, map_kwargs={"batch_size": 7})
    assert tokens(out) == tokens(data)
    for row, lengths in zip(out["input_ids"], out["seq_lengths"], strict=True):
        assert sum(lengths) == len(row) <= size
        assert min(lengths) > 0


@settings(max_examples=40, deadline=None)
@given(DOCS, st.integers(1, 9))
def test_bfd_cuts_long_documents_and_keeps_the_others_whole(documents, size):
    out = pack_dataset(dataset(documents), size, "bfd")
    pieces = Counter()
    for row, lengths in zip(out["input_ids"], out["seq_lengths"], strict=True):
        start = 0
        for length in lengths:
            pieces[tuple(row[start : start + length])] += 1
            start += length
    assert pieces == Counter(tuple(d[:size]) for d in documents if d)


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_many_windows_of_a_real_dataset_keep_every_pair_of_token_and_label(strategy):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, rng.integers(0, 20)).tolist() for _ in range(2500)]
    data = datasets.Dataset.from_dict({"input_ids": documents, "labels": [[-t for t in d] for d in documents]})
    for view in (data, data.select(range(100, 2300)), data.shuffle(seed=3), data.to_iterable_dataset(3)):
        before = Counter(t for d in view for t in d["input_ids"])
        out = list(pack_dataset(view, 64, strategy, map_kwargs={"batch_size": 1000}))
        assert Counter(t for row in out for t in row["input_ids"]) == before
        assert all([-t for t in row["input_ids"]] == row["labels"] for row in out)


def test_two_processes_pack_what_one_does():
    documents = [[i] * (i % 7) for i in range(300)]
    out = pack_dataset(dataset(documents), 8, "wrapped", map_kwargs={"num_proc": 2, "batch_size": 50})
    assert tokens(out) == Counter(t for d in documents for t in d)


def test_format_and_features_are_given_back():
    data = dataset(DOCUMENTS).with_format("numpy", columns=["input_ids"])
    out = pack_dataset(data, 5)
    assert out.format["type"] == "numpy"
    assert set(out.format["columns"]) == {"input_ids", "seq_lengths"}
    assert isinstance(out[0]["seq_lengths"], np.ndarray)


def test_rows_of_a_window_are_shuffled_by_seed_unless_order_is_asked_for():
    documents = [[i] * (1 + i % 5) for i in range(200)]
    one, two, other = (pack_dataset(dataset(documents), 5, seed=s)["input_ids"][:] for s in (1, 1, 2))
    ordered = pack_dataset(dataset(documents), 5, preserve_order=True)["input_ids"][:]
    assert one == two != other
    assert sorted(one) == sorted(ordered) != ordered


def test_splits_are_packed_each_for_itself():
    both = datasets.DatasetDict(train=dataset(DOCUMENTS), test=dataset([[1], [2]]))
    assert pack_dataset(both, 5)["test"]["seq_lengths"][:] == [[1, 1]]


@pytest.mark.parametrize(
    ("data", "options", "error", "match"),
    [
        (dataset([[1]]), {"seq_length": 0}, ConfigError, "seq_length=0"),
        (dataset([[1]]), {"seq_length": 4, "strategy": "bdf"}, ConfigError, "did you mean 'bfd'"),
        (datasets.Dataset.from_dict({"a": [1]}), {"seq_length": 4}, ArgumentTypeError, "'a' has type int64"),
        (
            datasets.Dataset.from_dict({"a": [[1], [1, 2]], "b": [[1], [1]]}),
            {"seq_length": 4},
            DataError,
            "row 1: column 'a' has 2 items, but column 'b' has 1",
        ),
        (
            datasets.Dataset.from_dict({"input_ids": [[1]], "seq_lengths": [[1]]}),
            {"seq_length": 4},
            DataError,
            "already packed",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(data, options, error, match):
    with pytest.raises(error, match=match):
        pack_dataset(data, **options)


def test_empty_input_gives_an_empty_dataset():
    assert len(pack_dataset(dataset([[], []]), 4)) == 0
    assert len(pack_dataset(dataset([]), 4)) == 0


def test_truncation_cuts_list_columns_only():
    data = datasets.Dataset.from_dict({"input_ids": DOCUMENTS, "name": list("abcde")})
    out = truncate_dataset(data, 2)
    assert out["input_ids"][:] == [d[:2] for d in DOCUMENTS]
    assert out["name"][:] == list("abcde")
    stream = truncate_dataset(data.to_iterable_dataset(), 2)
    assert [row["input_ids"] for row in stream] == [d[:2] for d in DOCUMENTS]
    with raises(DataError):
        truncate_dataset(pack_dataset(dataset(DOCUMENTS), 5), 2)


# Pieces that train nothing -------------------------------------------------------------------------------------------


@given(
    documents=st.lists(st.lists(st.booleans(), min_size=1, max_size=23), min_size=1, max_size=12),
    size=st.integers(2, 7),
    start=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_split_trained_keeps_every_piece_with_a_trained_token_and_no_other(documents, size, start):
    rows = [
        {
            "input_ids": [100 * n + i for i in range(len(flags))],
            "labels": [100 * n + i if f else -100 for i, f in enumerate(flags)],
        }
        for n, flags in enumerate(documents)
    ]
    dataset = datasets.Dataset.from_list(rows).select(range(min(start, len(rows) - 1), len(rows)))
    expected = [
        {name: row[name][at : at + size] for name in ("input_ids", "labels")}
        for row in dataset
        for at in range(0, len(row["labels"]), size)
        if any(label != -100 for label in row["labels"][at + 1 : at + size])
    ]
    assert split_trained(dataset, size).to_list() == expected


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_sft_packs_no_piece_and_no_row_that_trains_nothing(tiny_tokenizer, strategy):
    rows = datasets.Dataset.from_list([{"prompt": "word " * 60, "completion": f" yes {i}"} for i in range(8)])
    options = SupervisedOptions(max_length=32, packing=strategy)
    packed, report = prepare_sft_dataset(rows, tiny_tokenizer, options)
    loose, _ = prepare_sft_dataset(rows, tiny_tokenizer, SupervisedOptions(max_length=None))
    for row in packed:
        pieces, at = [], 0
        for length in row["seq_lengths"]:
            pieces.append(row["labels"][at + 1 : at + length])
            at += length
        learnt = [any(label != -100 for label in piece) for piece in pieces]
        assert all(learnt) if strategy == "bfd_split" else any(label != -100 for label in row["labels"])
    trained = sum(label != -100 for row in packed for label in row["labels"])
    whole = sum(label != -100 for row in loose for label in row["labels"])
    assert trained >= whole - len(rows)  # A piece or row that begins with a lone trained token can teach nothing of it.
    assert (report.untrained_pieces > 0) == (strategy == "bfd_split")
    stream, _ = prepare_sft_dataset(rows.to_iterable_dataset(), tiny_tokenizer, options)
    assert sorted(len(row["input_ids"]) for row in stream) == sorted(len(row["input_ids"]) for row in packed)
