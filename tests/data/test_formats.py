"""Dataset formats: detection that no hash seed and no first row can change, and conversions that lose nothing."""

import subprocess
import sys

import datasets
import pytest

from posttrain.data.formats import (
    describe_dataset,
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
    remove_none_values,
    undecoded,
)
from posttrain.errors import ArgumentTypeError, DataError
from posttrain.values import strip_none
from tests.wordings import raises


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user"}]}, True),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, True),
        ({"messages": [{"role": "assistant", "thinking": "hm", "content": "a"}]}, True),
        ({"prompt": [user("q")], "completion": [assistant("a")]}, True),
        ({"prompt": [], "chosen": [assistant("a")]}, True),
        ({"prompt": [], "chosen": []}, False),
        ({"text": "hello"}, False),
        ({"prompt": "hello"}, False),
        ({"conversations": [{"from": "human", "value": "hi"}]}, False),
    ],
)
def test_conversational_rows_are_told_from_text(row, expected):
    assert is_conversational(row) is expected


def test_a_row_of_mixed_forms_is_refused_under_every_hash_seed():
    code = (
        "from posttrain.data.formats import is_conversational\n"
        "try: print(is_conversational({'prompt': 'a', 'chosen': [{'role': 'user', 'content': 'b'}]}))\n"
        "except ValueError as e: print(e)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": str(seed)}
        ).stdout
        for seed in range(4)
    }
    assert len(said) == 1
    assert "['chosen'] contain messages, but columns ['prompt'] contain text" in said.pop()


def test_from_value_layout_is_found_and_an_empty_list_is_not():
    assert is_conversational_from_value({"conversations": [{"from": "human", "value": "hi"}]})
    assert not is_conversational_from_value({"conversations": []})
    assert not is_conversational_from_value({"messages": [user("hi")]})


def test_sharegpt_becomes_messages_with_roles_of_chat_templates(caplog):
    row = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"},
        ],
        "id": 7,
    }
    before = repr(row)
    assert maybe_convert_to_chatml(row) == {
        "messages": [{"role": "system", "content": "s"}, user("q"), assistant("a")],
        "id": 7,
    }
    assert repr(row) == before
    already = {"messages": [user("q")]}
    assert maybe_convert_to_chatml(already) == already
    with raises(DataError, "'conversations'", "'messages'"):
        maybe_convert_to_chatml({"conversations": [], "messages": []})


def test_none_is_stripped_from_mappings_and_kept_in_lists():
    assert remove_none_values([{"a": None, "b": [None, {"c": None}]}, None]) == [{"b": [None, {}]}, None]
    with raises(ArgumentTypeError):
        remove_none_values(3)


def test_arrow_widening_of_tool_arguments_is_undone():
    calls = [
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"y": "a"}}}]}],
    ]
    row = datasets.Dataset.from_dict({"messages": calls, "score": [None, 1.0]})[0]
    assert row["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"x": 1, "y": None}
    clean = strip_none(row)
    assert clean["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert clean["score"] is None


def described(rows):
    found = describe_dataset(datasets.Dataset.from_list(rows))
    return found["type"], found["format"]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "a"}, "language-modeling"),
        ({"prompt": "a"}, "prompt-only"),
        ({"prompt": "a", "completion": "b"}, "prompt-completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"chosen": "b", "rejected": "c"}, "implicit-preference"),
        ({"prompt": "a", "completion": "b", "label": True}, "unpaired-preference"),
        ({"prompt": "a", "completions": ["b"], "labels": [True]}, "stepwise-supervision"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "reference": "d"}, "triple-preference"),
        ({"prompt": "a", "privileged_context": "b"}, "self-distillation"),
        ({"input_ids": [1]}, "tokenized"),
        ({"chosen_ids": [1], "rejected_ids": [2]}, "tokenized-reward"),
    ],
)
def test_the_type_follows_from_the_columns(row, kind):
    assert described([row]) == (kind, "standard")


def test_conversations_are_described_as_such():
    assert described([{"messages": [user("q"), assistant("a")]}]) == ("language-modeling", "conversational")
    assert described([{"conversations": [{"from": "human", "value": "q"}]}]) == ("language-modeling", "conversational")


def test_mixed_rows_are_refused_by_number_and_not_by_the_first_row():
    rows = [{"prompt": "a"}, {"prompt": [user("b")]}]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    with raises(DataError, "row 1", "row 0"):
        describe_dataset(stream)
    with raises(DataError, "'question'"):
        describe_dataset(datasets.Dataset.from_dict({"question": ["a"]}))
    with raises(DataError):
        describe_dataset(datasets.Dataset.from_dict({"text": []}))


LISTS = [
    datasets.List(datasets.Image()),
    datasets.List(datasets.Image(), length=1),
    datasets.LargeList(datasets.Image()),
]


@pytest.mark.parametrize("kind", [datasets.Image(), *LISTS])
def test_images_are_shown_undecoded_without_a_copy_of_any_row(kind, monkeypatch):
    listed = kind in LISTS
    held = {"bytes": b"not decoded", "path": None}
    dataset = datasets.Dataset.from_dict(
        {"n": [0, 1, 2], "images": [[held] if listed else held] * 3},
        features=datasets.Features({"n": datasets.Value("int64"), "images": kind}),
    )
    monkeypatch.setattr(datasets.Dataset, "map", lambda *_, **__: pytest.fail("rows are written anew"))
    shown = undecoded(dataset.select([2, 0]).with_format("arrow"))
    assert shown.format["type"] == "arrow"
    assert shown.with_format(None)[:] == {"n": [2, 0], "images": [[held] if listed else held] * 2}
    assert undecoded(shown) is shown and dataset.features["images"] == kind
