"""Errors in tests: type, code and values stand in the test, the sentence stands in one snapshot.

    with raises(DataError, "row 1", "'messages'"):
        ...

A sentence that was improved on purpose is written anew by ``POSTTRAIN_WORDINGS=write python -m pytest TESTS``.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

SNAPSHOT = Path(__file__).parent / "snapshots" / "wordings.json"
# What differs between runs and machines: quoted values, units of memory, and whatever holds a digit, a path, a name in code or
# a list.
VALUES = re.compile(r"\b[KMGT]iB\b|'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\S*[\d/\\_=<>|{}@]\S*")


@contextmanager
def raises(error: type[BaseException] | tuple[type[BaseException], ...], *values: object) -> Iterator[Any]:
    """The block raises ``error``, its message holds every value, and its sentence is the one in the snapshot.

    Args:
        error: Its type.
        values: What the message must name: codes, fields, rows, numbers.
    """
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    missing = [str(value) for value in values if str(value) not in message]
    assert not missing, f"the message does not name {missing}: {message}"
    test = os.environ["PYTEST_CURRENT_TEST"].split(" (")[0].split("[")[0]
    said = sentence(message)
    if os.environ.get("POSTTRAIN_WORDINGS") == "write":
        _write(test, said)
    known = _snapshot().get(test, [])
    assert said in known, f"{test} knows no sentence {said!r} in {SNAPSHOT.name}, only {known}; see {__name__}"


def sentence(message: str) -> str:
    """The words of a message without its values.

    >>> sentence("row 3, column 'text': it is empty. Fix: drop it.")
    'row column it is empty Fix drop it'
    """
    return " ".join(re.findall(r"[A-Za-z]+", VALUES.sub(" ", message)))


@cache
def _snapshot() -> dict[str, list[str]]:
    return json.loads(SNAPSHOT.read_text(encoding="utf-8")) if SNAPSHOT.exists() else {}


def _write(test: str, said: str) -> None:
    """Add a sentence; several processes may write."""
    with FileLock(Path(tempfile.gettempdir()) / "posttrain-wordings.lock"):
        _snapshot.cache_clear()
        known = _snapshot()
        if said not in known.setdefault(test, []):
            known[test] = sorted([*known[test], said])
            SNAPSHOT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
