"""The public surface changes only on purpose: `python -m tests.surface` after a line in CHANGELOG."""

import json

from tests.surface import FILE, metrics, names


def known():
    return json.loads(FILE.read_text())


def test_public_names_and_their_signatures_are_what_they_were():
    before, now = known()["names"], names()
    assert sorted(now) == sorted(before)
    changed = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
    assert not changed


def test_a_step_of_every_trainer_logs_what_it_did():
    before, now = known()["metrics"], metrics()
    assert now.keys() == before.keys()
    for name in now:
        assert now[name] == before[name], name
