"""Rows as they were given: which cannot be trained, and which will hardly be meant."""

from __future__ import annotations

import datasets
import pytest

from posttrain.checks.rows import columns_of, doubt, fault
from posttrain.loop.data_report import bad_rows, doubtful_rows, too_many
from tests.methods.helpers import chats, sft

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "empty `messages`"),
        ({"messages": None}, "no `messages`"),
        ({"messages": [{"content": "hi"}]}, "a message of `messages` without a role"),
        ({"prompt": "2+2?", "completion": None}, "no `completion`"),
        ({"prompt": [], "chosen": [ANSWER], "rejected": [ANSWER]}, "empty `prompt`"),
        ({"prompt": "2+2?", "completion": "4", "label": None}, "no `label`"),
        ({"text": None}, "no `text`"),
        ({"messages": [USER, ANSWER]}, ""),
        ({"conversations": [{"from": "human", "value": "hi"}]}, ""),
        ({"prompt": None, "chosen": [USER, ANSWER], "rejected": [USER, CALL]}, ""),  # Their prompt is taken from them.
        ({"prompt": "", "completion": "4", "label": False}, ""),
    ],
)
def test_a_row_is_bad_where_something_it_needs_is_not_there(row, reason):
    assert fault(row, columns_of(list(row), prompts_only=False)) == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [USER]}, "no assistant turn in `messages`"),
        (
            {"messages": [USER, {"role": "assistant", "content": " "}]},
            "a turn of the assistant without content in `messages`",
        ),
        ({"prompt": [{"role": "user", "content": []}]}, "a turn of the user without content in `prompt`"),
        ({"messages": [USER, {"role": "robot", "content": "4"}]}, "the role 'robot' in `messages`"),
        ({"messages": [USER, CALL, {"role": "tool", "content": "4"}, ANSWER]}, ""),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, ""),
        ({"messages": [USER, CALL]}, ""),
        ({"messages": [{"role": "system", "content": ""}, USER, ANSWER]}, ""),
        ({"text": " \n"}, "blank `text`"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "blank `rejected`"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "equal `chosen` and `rejected`"),
        ({"prompt": [USER], "completion": [ANSWER]}, ""),
    ],
)
def test_a_row_is_doubtful_where_nothing_is_answered(row, reason):
    assert doubt(row, columns_of(list(row), prompts_only=False)) == reason


def test_what_a_reward_reads_is_not_looked_at_where_completions_are_sampled():
    assert columns_of(["prompt", "completion", "label"], prompts_only=True) == ["prompt"]
    assert columns_of(["input_ids", "text"], prompts_only=False) == []


def test_bad_rows_are_told_with_counts_reasons_and_numbers():
    reasons = dict.fromkeys(range(17, 27), "empty `messages`") | {93: "no `prompt`"}
    (found,) = bad_rows(reasons, 400)
    assert (found.code, found.severity) == ("PT-D030", "error")
    assert (
        found.what
        == (
            "11 of 400 rows (2.75 %) cannot be trained: 10 empty `messages`, 1 no `prompt`. First rows: 17, 18, 19, 20, 21, ..."
        )
        + "."
    )
    assert "bad_rows='drop'" in found.fix
    (dropped,) = bad_rows(reasons, 400, dropped=True)
    assert dropped.severity == "warning" and "were dropped" in dropped.what
    assert bad_rows({}, 400) == doubtful_rows({}, 400) == []
    assert doubtful_rows({3: "blank `text`"}, 4)[0].severity == "warning"


def test_dropping_more_than_the_limit_is_refused():
    assert too_many(20, 400, most=0.05) is None
    found = too_many(21, 400, most=0.05)
    assert found.severity == "error" and "21 of 400 rows (5.25 %)" in found.what and "bad_rows_max=0.06" in found.fix


@pytest.mark.parametrize("column", ["label", "reference"])
@pytest.mark.parametrize("value", [None, [], ["one", "two"]])
def test_a_column_that_the_method_does_not_read_is_not_looked_at(tiny_tokenizer, tmp_path, column, value):
    """A class or references beside the rows of another task are no reason to refuse them."""
    rows = [row | {column: value} for row in chats()]
    kind = datasets.List(datasets.Value("string")) if value is not None else datasets.Value("string")
    data = datasets.Dataset.from_list(rows, features=datasets.Features(chats().features | {column: kind}))
    trainer = sft(tmp_path, tiny_tokenizer, data=data)
    assert "PT-D03" not in "".join(finding.code for finding in trainer.preflight.reported)


def test_of_a_short_stream_the_rows_that_were_read_are_counted(tiny_tokenizer, tmp_path, caplog):
    rows = [{"messages": [USER, ANSWER]}] * 5 + [{"messages": [USER]}]
    sft(tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows).to_iterable_dataset(), max_steps=1)
    assert "PT-D031: 1 of 6 rows" in caplog.text
