"""The snapshot of sentences: values do not count in it, words do, and a message must name its values."""

from __future__ import annotations

import json

import pytest

from posttrain.errors import DataError
from tests import wordings
from tests.wordings import raises, sentence


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """An empty snapshot of its own."""
    monkeypatch.setattr(wordings, "SNAPSHOT", tmp_path / "wordings.json")
    wordings._snapshot.cache_clear()
    yield tmp_path / "wordings.json"
    wordings._snapshot.cache_clear()


def refuse(message: str) -> None:
    raise DataError(message)


def test_values_are_no_part_of_a_sentence():
    one = "row 3, column 'text': max_length=8 cuts it at 0.5. Fix: raise max_length (see /tmp/a-1)."
    other = "row 11, column 'body': max_length=64 cuts it at 2. Fix: raise max_length (see /var/b)."
    assert sentence(one) == sentence(other) == "row column cuts it at Fix raise see"


def test_a_sentence_that_changed_is_noticed_and_can_be_written(snapshot, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_WORDINGS", "write")
    with raises(DataError, "row 1"):
        refuse("row 1 is empty.")
    assert list(json.loads(snapshot.read_text()).values()) == [["row is empty"]]
    monkeypatch.delenv("POSTTRAIN_WORDINGS")
    with raises(DataError, "row 7"):
        refuse("row 7 is empty.")
    with pytest.raises(AssertionError, match="row was lost"), raises(DataError):
        refuse("row 7 was lost.")


def test_a_value_that_the_message_does_not_name_is_noticed(snapshot):
    with pytest.raises(AssertionError, match="row 2"), raises(DataError, "row 2"):
        refuse("row 1 is empty.")
