"""Reading code out of a completion, and tests out of a dataset row."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import RewardError

__all__ = ["code_block", "read_tests"]

PYTHON = ("python", "python3", "py")


def code_block(text: str) -> str | None:
    r"""The last closed block marked as Python, or else the last without a language; what was thought does not count.

    >>> code_block("```python\nx = 1\n```\nIt prints:\n```\n1\n```")
    'x = 1'
    """
    blocks: dict[bool, str] = {}
    fence, marked, wanted = "", False, False
    lines: list[str] = []
    for line in text.rpartition("</think>")[2].splitlines():
        bare = line.strip()
        if not fence and bare.startswith("```"):
            fence = bare[: len(bare) - len(bare.lstrip("`"))]
            language = bare[len(fence) :].strip().lower()
            marked, lines = language in PYTHON, []
            wanted = marked or not language
        elif fence and bare == fence:
            if wanted:
                blocks[marked] = "\n".join(lines)
            fence = ""
        else:
            lines.append(line)
    return blocks.get(True, blocks.get(False))


def read_tests(value: Any) -> list[dict[str, str]]:
    """A row's tests in one form: ``{"code": ...}``, or ``{"input": ..., "output": ...}`` for a program.

    Args:
        value: Python code; a dict with ``input`` and ``output`` (or lists ``inputs`` and ``outputs``); a list of those;
            or one of them written as JSON. None and empty values are no tests.

    Raises:
        RewardError: Something else.

    >>> read_tests(["assert f(1) == 2"]), read_tests('{"inputs": ["1"], "outputs": ["2"]}')
    ([{'code': 'assert f(1) == 2'}], [{'input': '1', 'output': '2'}])
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    if value is None or (isinstance(value, Sequence | Mapping) and not value):
        return []
    if isinstance(value, str):
        return [{"code": value}] if value.strip() else []
    if isinstance(value, Mapping):
        return _programs(value)
    if isinstance(value, Sequence):
        return [test for item in value for test in read_tests(item)]
    raise RewardError(f"tests must be code, or inputs with outputs, or a list of those; got {value!r:.200}.")


def _programs(value: Mapping[str, Any]) -> list[dict[str, str]]:
    given, wanted = (_side(value, name) for name in ("input", "output"))
    if given is None or wanted is None or value.get("fn_name"):
        raise RewardError(
            "a test given as a dict needs input and output, or inputs and outputs, of a program; it has the keys "
            f"{sorted(value)}. Tests of a function are written as code: 'assert f(1) == 2'."
        )
    if len(given) != len(wanted):
        raise RewardError(f"a test has {len(given)} inputs and {len(wanted)} outputs; there must be one each.")
    return [{"input": _lines(i), "output": _lines(o)} for i, o in zip(given, wanted, strict=True)]


def _side(value: Mapping[str, Any], name: str) -> list[Any] | None:
    if name in value:
        return None if value[name] is None else [value[name]]
    several = value.get(f"{name}s")
    return list(several) if isinstance(several, list | tuple) else None


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
