"""The calls of an episode as a trie: what is context, what is trained, and what a file keeps."""

import json
import multiprocessing
import pickle
from collections import Counter

import pytest

from posttrain.errors import DataError
from posttrain.extensions.agents.session import CapturedCall, Recorded, Session, read_sessions, record_session
from posttrain.types import Rollout
from tests.wordings import raises


def call(session, prompt, *completions, parent=None, state="answered", version=0):
    """An answered call, as the proxy records it."""
    rollouts = [Rollout([], list(ids), [-0.5] * len(ids), "stop", version) for ids in completions]
    made = session.begin(CapturedCall(0, list(prompt), parent=parent, messages=[{"role": "user", "content": "q"}]))
    made.completions, made.state = rollouts, state
    made.answers = [{"role": "assistant", "content": str(ids)} for ids in completions]
    return made


def masks(session):
    return [(b.episode.prompt_ids, b.episode.token_ids, b.episode.tool_mask) for b in session.branches()]


def test_a_prompt_that_runs_through_a_completion_extends_its_branch_with_context_between():
    session = Session("k")
    call(session, [1, 2], [3, 4])
    call(session, [1, 2, 3, 4, 9], [5], parent=(0, 0))
    assert masks(session) == [([1, 2], [3, 4, 9, 5], [1, 1, 0, 1])]


def test_a_second_prompt_through_the_same_completion_forks_and_trains_no_token_twice():
    session = Session("k")
    call(session, [1, 2], [3, 4])
    call(session, [1, 2, 3, 4, 9], [5], parent=(0, 0))
    call(session, [1, 2, 3, 4, 8], [6, 7], parent=(0, 0))
    assert masks(session)[1] == ([1, 2, 3, 4, 8], [6, 7], [1, 1])
    assert [branch.forked for branch in session.branches()] == [0, 4]
    trained = sum(sum(mask) for _, _, mask in masks(session))
    assert trained == sum(len(r.token_ids) for c in session.calls for r in c.completions)
    assert (session.tokens_seen(), session.tokens_once()) == (4 + 6 + 7, 9)


def test_choices_of_a_call_are_branches_of_one_prompt_and_each_may_be_continued():
    session = Session("k")
    call(session, [1, 2], [3], [4])
    call(session, [1, 2, 4, 9], [5], parent=(0, 1))
    assert masks(session) == [([1, 2], [3], [1]), ([1, 2], [4, 9, 5], [1, 0, 1])]


def test_a_call_that_nobody_read_is_no_branch_and_nothing_runs_through_it():
    session = Session("k")
    cancelled = call(session, [1, 2], [3], state="cancelled")
    cancelled.ends = ["ab"]
    assert session.branches() == [] and session.rollout() is None and session.messages() == []
    assert session.parent_of_text("abc") is None and session.parent_of_ids([1, 2, 3, 4]) is None


def test_branches_name_the_version_of_every_run_of_sampled_tokens():
    session = Session("k")
    call(session, [1, 2], [3, 4], version=1)
    call(session, [1, 2, 3, 4, 9], [5], parent=(0, 0), version=2)
    rollout = session.rollout()
    assert rollout.spans == [(1, 2), (2, 1)] and rollout.logp == [-0.5, -0.5, 0.0, -0.5]


def test_a_recorded_session_is_read_back_whole(tmp_path):
    session = Session("k", 7)
    call(session, [1, 2], [3, 4])
    call(session, [1, 2, 3, 4, 9], [5], [6], parent=(0, 0))
    session.counts.received = session.counts.answered = 2
    path = tmp_path / "episodes.jsonl"
    for error in (None, "ValueError: x"):
        record_session(path, Recorded({"prompt": "q"}, session, 0.5, error))
    one, other = read_sessions(path)
    assert masks(pickle.loads(pickle.dumps(session))) == masks(session), "rewards that run in processes get it"
    assert json.dumps(one.session.to_dict()) == json.dumps(session.to_dict()) and one.session.closed
    assert masks(one.session) == masks(session)
    assert (one.task, one.result, one.error, other.error) == ({"prompt": "q"}, 0.5, None, "ValueError: x")


def test_other_line_ends_and_half_characters_of_a_text_do_not_end_its_line(tmp_path):
    """JSON leaves U+0085, U+2028 and U+2029 as they are, and `str.splitlines` takes them for line ends."""
    session = Session("k")
    call(session, [1, 2], [3]).answers[0]["content"] = "one\u2028two\x85three\u2029"
    path = tmp_path / "episodes.jsonl"
    record_session(path, Recorded({"prompt": "q"}, session, {"reward": 1.0, "file": "\udcff"}))
    # As versions before wrote it.
    older = json.loads(path.read_text()) | {"result": None}
    path.write_text(path.read_text() + json.dumps(older, ensure_ascii=False) + "\n", encoding="utf-8")
    one, other = read_sessions(path)
    assert one.session.calls[0].answers == other.session.calls[0].answers == session.calls[0].answers
    assert one.result == {"reward": 1.0, "file": "\udcff"}


def _record_many(path, mark):
    session = Session("k")
    call(session, [1, 2], [3])
    for _ in range(20):
        record_session(path, Recorded({"prompt": mark * 50_000}, session, 0.5))


def test_processes_record_into_one_file_line_by_line(tmp_path):
    path = tmp_path / "episodes.jsonl"
    begun = [multiprocessing.get_context("fork").Process(target=_record_many, args=(path, mark)) for mark in "abc"]
    for process in begun:
        process.start()
    for process in begun:
        process.join()
    assert Counter(one.task["prompt"][0] for one in read_sessions(path)) == {"a": 20, "b": 20, "c": 20}


def test_a_file_that_holds_no_sessions_names_the_line(tmp_path):
    path = tmp_path / "episodes.jsonl"
    with raises(DataError, "episodes.jsonl"):
        list(read_sessions(path))
    for line, values in (("{", "line 1"), ("[]", "list"), (json.dumps({"format": 9}), "format=9")):
        path.write_text(line)
        with raises(DataError, values):
            list(read_sessions(path))
    path.write_text(json.dumps({"format": 1, "key": "k", "seed": 0, "counts": {}, "calls": [{}]}))
    with raises(DataError, "line 1"):
        list(read_sessions(path))


@pytest.mark.parametrize("prompt, parent", [([1, 2, 3, 9], (0, 0)), ([1, 2, 4], None), ([1, 2], None)])
def test_prompts_of_token_ids_are_matched_by_ids(prompt, parent):
    session = Session("k")
    call(session, [1, 2], [3])
    assert session.parent_of_ids(prompt) == parent
