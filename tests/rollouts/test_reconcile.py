"""Turns of an agent to rows: what is appended, what is replaced, and where a new row begins."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain import RolloutError
from posttrain.rollouts.reconcile import Turn, reconcile


def turn(prompt, answer, version=1):
    return Turn(list(prompt), list(answer), [-1.0 - 0.1 * i for i in range(len(answer))], version)


def test_a_conversation_that_only_grows_is_one_row():
    found = reconcile([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], version=2)])
    (row,) = found.rows
    assert (row.input_ids, row.mask) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    assert row.logp == [0.0, 0.0, -1.0, -1.1, 0.0, -1.0]
    assert row.spans == [(1, 2), (2, 1)]
    assert (found.realigned, found.forks) == (0, 0)


def test_a_last_answer_that_came_back_in_other_tokens_is_read_and_not_trained():
    """H = [1 2 | 3 4 9], P = [1 2 3 4 8 5]: m = 4 >= s = 2, drift 1: the 9 is gone and 8 is context."""
    found = reconcile([turn([1, 2], [3, 4, 9]), turn([1, 2, 3, 4, 8, 5], [6])])
    (row,) = found.rows
    assert (row.input_ids, row.mask) == ([1, 2, 3, 4, 8, 5, 6], [0, 0, 1, 1, 0, 0, 1])
    assert row.logp == [0.0, 0.0, -1.0, -1.1, 0.0, 0.0, -1.0]
    assert row.spans == [(1, 2), (1, 1)]
    assert (found.realigned, found.forks) == (1, 0)


def test_a_drift_of_the_threshold_forks_so_that_a_dropped_block_stays_trained():
    thinking = list(range(100, 110))
    turns = [turn([1, 2], [*thinking, 3]), turn([1, 2, 3, 5], [6])]
    found = reconcile(turns, fork_threshold_tokens=11)  # Drift is 11: everything after [1, 2].
    assert [row.input_ids for row in found.rows] == [[1, 2, *thinking, 3], [1, 2, 3, 5, 6]]
    assert [sum(row.mask) for row in found.rows] == [11, 1]
    assert found.forks == 1
    assert len(reconcile(turns, fork_threshold_tokens=12).rows) == 1


def test_a_change_before_the_last_answer_forks_however_small_it_is():
    found = reconcile([turn([1, 2], [3]), turn([1, 2, 3, 4], [5]), turn([1, 9, 3, 4, 5, 6], [7])])
    assert [row.input_ids for row in found.rows] == [[1, 2, 3, 4, 5], [1, 9, 3, 4, 5, 6, 7]]
    assert found.forks == 1


def test_rows_that_train_nothing_are_dropped():
    assert reconcile([turn([1, 2], [])]).rows == []


@pytest.mark.parametrize("logp", [[], [-1.0], [-1.0, math.nan], [-1.0, None]])
def test_trap_s31_a_written_token_without_a_log_prob_is_an_error(logp):
    with pytest.raises(RolloutError, match=r"turn 0: 2 tokens were written and [01] have a log-prob"):
        reconcile([Turn([1], [2, 3], logp)])


TOKENS = st.lists(st.integers(0, 3), max_size=5)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5), st.integers(1, 6))
def test_every_answer_stands_whole_behind_its_own_prompt_or_was_rewritten_later(pairs, threshold):
    turns = [turn(prompt, answer, version=i) for i, (prompt, answer) in enumerate(pairs)]
    found = reconcile(turns, fork_threshold_tokens=threshold)
    for row in found.rows:
        assert len(row.input_ids) == len(row.mask) == len(row.logp)
        assert sum(count for _, count in row.spans) == sum(row.mask)
        assert all(logp == 0.0 for logp, kept in zip(row.logp, row.mask, strict=True) if not kept)
    last = turns[-1]
    if last.token_ids:
        assert found.rows[-1].input_ids == last.prompt_ids + last.token_ids  # The last turn is never rewritten.
    lost = sum(len(t.token_ids) for t in turns) - sum(sum(row.mask) for row in found.rows)
    assert 0 <= lost <= found.realigned * (threshold - 1)
