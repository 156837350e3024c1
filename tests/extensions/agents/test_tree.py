"""Episodes of a harness as trees: on the page, and by ``posttrain inspect sessions``."""

import io

import pytest
from rich.console import Console

from posttrain.cli.main import main
from posttrain.errors import DataError
from posttrain.extensions.agents.session import CapturedCall, Recorded, Session, record_session
from posttrain.extensions.agents.tree import LONGEST, episode_tree, to_console
from posttrain.extensions.page.build import render
from posttrain.extensions.page.run import read_runs
from posttrain.report.files import write_rows
from posttrain.types import Rollout
from tests.extensions.page.page_runs import grpo_record
from tests.wordings import raises


@pytest.fixture
def session():
    """Two turns with a tool, a fork whose text is HTML, and a call that nobody read."""
    made = Session("k")
    ask, called = (
        {"role": "user", "content": "2+3?"},
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
    )
    answers = [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "assistant", "content": "5"},
        {"role": "assistant", "content": "<script>alert(1)</script>" + "x" * 2 * LONGEST},
    ]
    calls = [
        CapturedCall(0, [1, 2], messages=[ask]),
        CapturedCall(
            1, [1, 2, 3, 4], parent=(0, 0), messages=[ask, answers[0], {"role": "tool", "content": "the result"}]
        ),
        CapturedCall(2, [1, 2, 3, 9], parent=(0, 0), messages=[ask, answers[0], {"role": "user", "content": "again"}]),
    ]
    for call, answer, ids in zip(calls, answers, ([3], [5], [6, 7]), strict=True):
        call.completions, call.answers, call.state = [Rollout([], ids, [-1.0] * len(ids), "stop")], [answer], "answered"
        made.begin(call)
    made.begin(CapturedCall(3, [1], state="cancelled"))
    made.counts.received, made.counts.answered, made.counts.cancelled = 4, 3, 1
    return made


def test_an_episode_is_a_tree_of_branches_turns_and_tool_calls(session):
    tree = episode_tree(session)
    one, fork = tree["branches"]
    assert [turn["call"] for turn in one["turns"]] == [0, 1] and one["turns"][0]["calls"] == ['add({"a": 2})']
    assert one["turns"][1]["context"] == [{"role": "tool", "text": "the result"}] and one["turns"][1]["text"] == "5"
    assert (fork["forked"], fork["parent"], fork["trained"], fork["tokens"]) == (3, 0, 2, 6)
    assert tree["unread"] == [{"call": 3, "state": "cancelled"}] and (tree["seen"], tree["once"]) == (3 + 5 + 6, 8)
    assert len(fork["turns"][0]["text"]) < LONGEST + 60


def test_the_page_shows_the_tree_and_runs_nothing_of_it(session, tmp_path):
    import json

    folder = grpo_record(tmp_path / "a", steps=1)
    row = {
        "step": 1,
        "prompt": "p",
        "completion": "c",
        "reward": 1.0,
        "advantage": 0.5,
        "episode": json.dumps(episode_tree(session)),
    }
    broken = row | {"episode": "{broken", "prompt": "q"}
    odd = row | {"episode": '{"branches": [{"turns": [3]}]}', "prompt": "r"}
    for file in (folder / "completions").glob("*.parquet"):
        file.unlink()
    write_rows(folder / "completions" / "completions_00001.parquet", [row, broken, odd])
    page = render(read_runs([folder]))
    assert (
        "forks after 3 (call 0)" in page
        and "add({&#34;a&#34;: 2})" in page
        and "call 3: cancelled, not trained" in page
    )
    assert "8 tokens computed of 14 in all calls" in page and "<script>alert(1)" not in page


def test_recorded_sessions_are_shown_on_a_terminal(session, tmp_path, capsys):
    path = tmp_path / "episodes.jsonl"
    record_session(path, Recorded({"prompt": "q"}, session, 0.5))
    record_session(path, Recorded({"prompt": "q"}, session, None, "ValueError: no"))
    text = io.StringIO()
    to_console(path, console=Console(file=text, width=100))
    assert "result 0.5" in text.getvalue() and "failed: ValueError: no" in text.getvalue()
    assert "tool: the result" in text.getvalue() and "2 episodes, 1 failed; 8 calls with 28 tokens" in text.getvalue()
    assert main(["inspect", "sessions", str(path), "--rows", "1"]) == 0
    assert "episode 1" not in capsys.readouterr().out
    path.write_text("")
    with raises(DataError, "episodes.jsonl"):
        to_console(path)


def test_episodes_on_the_terminal_write_terminal_escapes_as_text(session, tmp_path):
    attack = "\x1b]52;c;Y2xpcGJvYXJk\x07\x1b[2J"
    session.calls[0].messages[0]["content"] = attack
    session.calls[1].answers[0]["content"] = attack
    record_session(tmp_path / "episodes.jsonl", Recorded({}, session, error=attack))
    shown = io.StringIO()
    to_console(tmp_path / "episodes.jsonl", console=Console(file=shown, width=200))
    assert "\x1b" not in shown.getvalue() and shown.getvalue().count("\\x1b]52") == 3
