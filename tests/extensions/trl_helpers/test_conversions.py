"""Conversions between dataset types: every row of the documented table, and what cannot be made is refused."""

import datasets
import pytest

from posttrain import convert_dataset, describe_dataset
from posttrain.errors import ConfigError, DataError
from posttrain.extensions.trl_helpers.sequences import CONVERSIONS
from tests.wordings import raises


def u(text):
    return {"role": "user", "content": text}


def a(text):
    return {"role": "assistant", "content": text}


PAIR = {"prompt": "2+2=", "chosen": " 4", "rejected": " 5"}
IMPLICIT = {"chosen": "2+2= 4", "rejected": "2+2= 5"}
CHAT_PAIR = {"prompt": [u("2+2?")], "chosen": [a("4")], "rejected": [a("5")]}
STEPS = [
    {"prompt": "9.8 or 9.11?", "completions": ["0.8 > 0.11.", "So 9.8."], "labels": [True, True]},
    {"prompt": "1+1?", "completions": ["It is 2.", "So 3."], "labels": [True, False]},
]
JUDGED = [
    {"prompt": "2+2=", "completion": " 4", "label": True},
    {"prompt": "2+2=", "completion": " 5", "label": False},
]
CASES = [
    ([{"prompt": "a", "completion": " b"}], "language-modeling", [{"text": "a b"}]),
    ([{"prompt": [u("q")], "completion": [a("r")]}], "language-modeling", [{"messages": [u("q"), a("r")]}]),
    ([{"prompt": "a", "completion": " b"}], "prompt-only", [{"prompt": "a"}]),
    ([PAIR], "prompt-completion", [{"prompt": "2+2=", "completion": " 4"}]),
    ([PAIR], "language-modeling", [{"text": "2+2= 4"}]),
    ([PAIR], "prompt-only", [{"prompt": "2+2="}]),
    ([PAIR], "implicit-preference", [IMPLICIT]),
    ([CHAT_PAIR], "implicit-preference", [{"chosen": [u("2+2?"), a("4")], "rejected": [u("2+2?"), a("5")]}]),
    ([PAIR], "unpaired-preference", JUDGED),
    ([IMPLICIT], "preference", [PAIR]),
    ([IMPLICIT], "language-modeling", [{"text": "2+2= 4"}]),
    ([IMPLICIT], "prompt-completion", [{"prompt": "2+2=", "completion": " 4"}]),
    ([IMPLICIT], "prompt-only", [{"prompt": "2+2="}]),
    ([IMPLICIT], "unpaired-preference", JUDGED),
    (JUDGED, "prompt-completion", [{"prompt": "2+2=", "completion": " 4"}]),
    (JUDGED, "language-modeling", [{"text": "2+2= 4"}]),
    (JUDGED, "prompt-only", [{"prompt": "2+2="}] * 2),
    (STEPS, "prompt-completion", [{"prompt": "9.8 or 9.11?", "completion": "0.8 > 0.11.\nSo 9.8."}]),
    (STEPS, "language-modeling", [{"text": "9.8 or 9.11?0.8 > 0.11.\nSo 9.8."}]),
    (STEPS, "prompt-only", [{"prompt": "9.8 or 9.11?"}, {"prompt": "1+1?"}]),
    (
        STEPS,
        "unpaired-preference",
        [
            {"prompt": "9.8 or 9.11?", "completion": "0.8 > 0.11.\nSo 9.8.", "label": True},
            {"prompt": "1+1?", "completion": "It is 2.\nSo 3.", "label": False},
        ],
    ),
]


@pytest.mark.parametrize(("rows", "to", "expected"), CASES)
def test_each_conversion_makes_the_documented_rows(rows, to, expected):
    made = convert_dataset(datasets.Dataset.from_list(rows), to)
    assert made.to_list() == expected
    assert describe_dataset(made)["type"] == to


def test_every_conversion_of_the_table_is_tested():
    tested = {(describe_dataset(datasets.Dataset.from_list(rows))["type"], to) for rows, to, _ in CASES}
    assert tested == {(kind, to) for kind, targets in CONVERSIONS.items() for to in targets}


def test_other_columns_stay_and_all_splits_and_streams_are_converted():
    rows = datasets.Dataset.from_list([{**PAIR, "source": "web"}])
    kept = convert_dataset(datasets.DatasetDict({"train": rows}), "prompt-completion")["train"][0]
    assert kept == {"source": "web", "prompt": "2+2=", "completion": " 4"}
    assert list(convert_dataset(rows.to_iterable_dataset(), "prompt-only")) == [{"source": "web", "prompt": "2+2="}]
    assert len(list(convert_dataset(rows.to_iterable_dataset(), "unpaired-preference"))) == 2


def test_the_separator_stands_between_steps():
    made = convert_dataset(datasets.Dataset.from_list(STEPS[:1]), "prompt-completion", separator=" ")
    assert made[0]["completion"] == "0.8 > 0.11. So 9.8."


def test_what_is_not_in_the_rows_is_refused_with_what_is():
    text = datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}])
    with raises(DataError):
        convert_dataset(text, "preference")
    with raises(ConfigError, "'prompt-only'"):
        convert_dataset(text, "promptonly")
    with raises(DataError):
        convert_dataset(datasets.Dataset.from_list(JUDGED[1:]), "language-modeling")
