"""Rows divided over processes: the same log-probs and gradients, and as many bytes as the formula says."""

import pytest
import torch

from posttrain.extensions.sequence_parallel import split
from posttrain.models import token_split
from tests.ranks import run_ranks
from tests.wordings import raises


@pytest.mark.matrix
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, "grouped,one KV head,dense mask,windows and sinks"),
        pytest.param(2, "compiled", marks=pytest.mark.slow),
        (4, "grouped,one KV head,dense mask,windows and sinks"),
    ],
)
def test_a_group_computes_what_each_process_computes_alone(size, names, tmp_path):
    found = run_ranks("tests.extensions.sequence_parallel.split_worker", size, names, processes=size, folder=tmp_path)
    assert set(found) == {f"{name}/{on}" for name in names.split(",") for on in (False, True)}
    for name, apart in found.items():
        assert apart["logp"] < 1e-5 and apart["gradient"] < 1e-5, (name, apart)
        assert apart["sent"] == apart["formula"] > 0, (name, apart)


def test_heads_of_keys_are_repeated_no_more_than_processes_need():
    assert split.repeated_heads(32, 8, 8) == 8  # One each.
    assert split.repeated_heads(32, 8, 16) == 16  # Each twice.
    assert split.repeated_heads(9, 3, 3) == 3
    assert split.repeated_heads(6, 3, 2) == 6  # No common number but that of the queries.


def test_no_turns_without_a_group_and_one_for_each_process_within_one():
    assert list(token_split.turns(True)) == [(None, True)] and list(token_split.turns(False)) == [(None, False)]
    group = split.TokenSplit(None, [4, 5, 6], 1, torch.device("cpu"))
    token_split.activate(group)
    try:
        seen = [(helped, last, group.in_turn) for helped, last in token_split.turns(True)]
        assert seen == [(0, False, False), (None, False, True), (2, True, False)] and not group.in_turn
        with token_split.alone():
            assert token_split.active() is None
        assert token_split.active() is group
    finally:
        token_split.activate(None)


def test_columns_of_a_process_and_a_width_that_cannot_be_divided():
    group = split.TokenSplit(None, [0, 1, 2, 3], 2, torch.device("cpu"))
    assert group.columns(8) == slice(4, 6)
    with raises(split.ModelError, "6 columns"):
        group.columns(6)
