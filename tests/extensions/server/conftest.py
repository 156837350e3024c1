"""Fixtures of tests with rollout servers."""

import pytest


@pytest.fixture
def made():
    """What is to be closed."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()
