"""The numbers in docstrings of rewards and of what is built on them are what the code gives."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "checks.rewards",
    "losses.ppo",
    "models.value_head",
    "rewards.call",
    "extensions.rewards.code",
    "rewards.format",
    "rewards.judges",
    "rewards.math",
    "rewards.runner",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_what_the_code_gives(name):
    found = doctest.testmod(importlib.import_module(f"posttrain.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0
