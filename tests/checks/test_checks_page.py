"""The page of all codes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tool():
    spec = importlib.util.spec_from_file_location("checks_page", ROOT / "tools" / "checks_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_codes_are_those_of_the_register():
    made = tool()
    text = made.PAGE.read_text(encoding="utf-8")
    assert text == made.render(text), "run `python tools/checks_page.py`"


def test_every_assumption_has_a_page_of_five_parts_that_names_its_codes():
    made = tool()
    checks = made.core.load().values()
    for letter in made.ASSUMPTIONS:
        path = ROOT / "docs" / "assumptions" / f"{letter}.md"
        if letter not in "bcdfj":
            continue
        text = path.read_text(encoding="utf-8")
        heads = ["What goes wrong", "How it looks", "How it is detected", "How to fix", "How to silence"]
        assert re.findall("^## (.+)$", text, re.M) == heads, letter
        named = set(re.findall(r"PT-[A-Z]\d{3}", text))
        for first, last in re.findall(r"`(PT-[A-Z]\d{3})` to `(PT-[A-Z]\d{3})`", text):
            named |= {f"{first[:4]}{number:03}" for number in range(int(first[4:]), int(last[4:]) + 1)}
        known = {check.code for check in checks if check.page == letter}
        assert known <= named, letter
        assert named <= {check.code for check in checks} | {f"PT-D{n:03}" for n in range(1, 12)}, letter
