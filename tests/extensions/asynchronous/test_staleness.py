"""The account of rollouts, the queue's bounds, the order of prompts, and what ends or slows a run."""

import logging
import queue
import threading
import time

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain import DataError, RolloutError
from posttrain.data.samplers import PromptStream
from posttrain.extensions.asynchronous.ledger import DROP_REASONS, DropWatch, FailureBudget, Ledger, MismatchGuard
from posttrain.extensions.asynchronous.samples import RolloutBuffer, RolloutSample, TaskSource, Trajectory
from tests.wordings import raises


def conversation(tokens=4, group=0, version=1):
    ids = list(range(tokens))
    return Trajectory([RolloutSample("p", "c", ids, [0] + [1] * (tokens - 1), [0.0] * tokens, 0.0, version, group)])


MOVES = st.lists(st.tuples(st.sampled_from(["dispatch", "arrive", "hold", "train", "drop"]), st.integers(0, 9)))


@given(MOVES)
def test_produced_is_always_trained_plus_dropped_plus_in_flight(moves):
    ledger = Ledger()
    for move, count in moves:
        if move == "dispatch":
            ledger.dispatch(count)
        elif move == "arrive":
            ledger.arrive(min(count, ledger.writing))
        elif move == "hold":
            ledger.hold(min(count, ledger.waiting))
        elif move == "train":
            ledger.train()
        else:
            place = ("writing", "waiting", "held")[count % 3]
            ledger.drop(min(count, getattr(ledger, place)), DROP_REASONS[count % len(DROP_REASONS)], place)
        ledger.audit()
        assert ledger.produced == ledger.trained + sum(ledger.dropped.values()) + ledger.in_flight


def test_a_lost_rollout_is_noticed():
    ledger = Ledger()
    ledger.dispatch(4)
    ledger.arrive(3)
    ledger.audit(writing=1, waiting=3)
    with raises(RolloutError, "4", "0", "1"):
        ledger.audit(writing=0, waiting=3)
    ledger.produced += 1
    with raises(RolloutError, "5"):
        ledger.audit()


def test_what_was_in_flight_at_a_checkpoint_is_dropped_for_whoever_resumes():
    ledger, again = Ledger(), Ledger()
    ledger.dispatch(6)
    ledger.arrive(4)
    ledger.hold(2)
    ledger.train()
    again.load(ledger.state())
    again.audit(writing=0, waiting=0)
    assert (again.produced, again.trained, again.dropped["unfinished"]) == (6, 2, 4)


def test_the_queue_is_bounded_in_samples_and_in_tokens():
    buffer = RolloutBuffer(3, max_tokens=10)
    buffer.put(conversation(4))
    assert buffer.room(2, 6)
    assert not buffer.room(2, 7)
    assert not buffer.room(3, 0)
    buffer.put(conversation(5))
    assert (len(buffer), buffer.tokens) == (2, 9)
    assert buffer.get(0).tokens == 4
    assert [c.tokens for c in buffer.drain()] == [5]
    assert (len(buffer), buffer.tokens) == (0, 0)


def test_an_empty_queue_waits_no_longer_than_asked_and_wakes_when_something_comes():
    buffer = RolloutBuffer(3)
    with pytest.raises(queue.Empty):
        buffer.get(timeout=0.01)
    threading.Timer(0.05, lambda: buffer.put(conversation(7))).start()
    began = time.monotonic()
    assert buffer.get(timeout=30).tokens == 7
    assert time.monotonic() - began < 20


def rows(count=5):
    return datasets.Dataset.from_list([{"prompt": str(i)} for i in range(count)])


def tasks(dataset, seed=0, shuffle=True):
    return TaskSource(PromptStream(dataset, seed, shuffle), 2, seed)


def test_every_epoch_has_every_prompt_once_in_another_order():
    source = tasks(rows(), seed=3)
    epochs = [[source.next().row["prompt"] for _ in range(5)] for _ in range(3)]
    assert all(sorted(epoch) == list("01234") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert (source.prompts.passes, source.group) == (2, 15)


def test_prompts_given_back_come_next_as_new_groups_with_other_seeds():
    source = tasks(rows(), shuffle=False)
    first, second = source.next(), source.next()
    source.give_back(first)
    again = source.next()
    assert (again.row, again.attempt) == (first.row, 1)
    assert again.group_id not in (first.group_id, second.group_id)
    assert again.seed not in (first.seed, second.seed)
    assert source.next().row["prompt"] == "2"


def test_trap_s9_a_resumed_source_asks_again_for_what_was_under_way_and_goes_on_from_there():
    source, again = tasks(rows(), seed=5), tasks(rows(), seed=5)
    asked = [source.next() for _ in range(7)]  # The second epoch has begun.
    for task in asked[:5]:
        source.done(task.group_id)
    expected = [source.next().row["prompt"] for _ in range(4)]
    again.load(TaskSource.state(_rewound(source, 4)))
    assert [again.next().row["prompt"] for _ in range(6)] == [t.row["prompt"] for t in asked[5:]] + expected
    assert again.next().group_id >= 7


def _rewound(source, count):
    """The source as it stood before its last ``count`` prompts."""
    for number in range(source.group - count, source.group):
        source._origin.pop(number, None)
    source.group -= count
    prompts = source.prompts
    overall = prompts.passes * len(prompts.dataset) + prompts.position - count
    prompts.passes, prompts.position = divmod(overall, len(prompts.dataset))
    return source


def test_a_stream_is_gone_through_again_and_resumed_by_its_position():
    stream = rows(3).to_iterable_dataset()
    source = tasks(stream, shuffle=False)
    assert [source.next().row["prompt"] for _ in range(5)] == ["0", "1", "2", "0", "1"]
    again = tasks(stream, shuffle=False)
    again.load(source.state())
    assert again.next().row["prompt"] == "2"


def test_an_empty_dataset_is_refused():
    with raises(DataError):
        tasks([]).next()


def test_too_many_failures_stop_the_run_with_the_commonest_error():
    budget = FailureBudget(0.05)
    for _ in range(5):
        budget.add(2, ["ValueError: a", "KeyError: b"][: 1 + _ % 2])
    with raises(RolloutError, "11", "0.05", "200", "9"):
        budget.add(0, ["ValueError: a"] * 4)


def test_failures_long_ago_are_forgotten():
    budget = FailureBudget(0.05)
    for _ in range(10):
        budget.add(199, ["x"] * 9)


def test_trap_s49_drops_are_told_with_three_remedies_and_then_halve_what_is_under_way(caplog):
    watch = DropWatch(max_staleness=4)
    with caplog.at_level(logging.WARNING):
        assert watch.add(63, 37, limit=512) == 512
        assert not caplog.records
        assert watch.add(40, 60, limit=512) == 512
        assert watch.add(40, 60, limit=512) == 256
    said = caplog.records[0].getMessage()
    for part in (
        "60 %",
        "more than 4 weight versions old",
        "max_inflight_tasks (now 512)",
        "max_staleness",
        "weight_sync_steps",
    ):
        assert part in said
    assert watch.add(70, 30, limit=256) == 256
    assert watch.add(10, 90, limit=256) == 256  # The count began again.


def test_a_policy_that_ran_away_is_drained_once_and_then_stops_the_run():
    guard = MismatchGuard(limit=0.5, patience=3)
    assert [guard.add(kl) for kl in (0.6, 0.7, 0.4, 0.6, 0.7)] == [False] * 5
    assert guard.add(0.8)
    assert [guard.add(0.9) for _ in range(2)] == [False, False]
    with raises(RolloutError, "0.9"):
        guard.add(0.9)
