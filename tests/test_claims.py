"""`tools/claims.py`: which claims of before it misses."""

import runpy
from pathlib import Path

import pytest

missing = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "claims.py"))["missing"]

BEFORE = [["test_a", "", ""], ["test_b", "sft", ""], ["test_b", "dpo", ""], ["test_c", "", "Rows stay rows."]]


def test_claims_that_moved_to_another_file_or_gained_cases_are_there():
    assert missing(BEFORE, [*BEFORE, ["test_b", "ppo", ""]], {}) == []


def test_a_claim_that_is_gone_is_named_with_its_case():
    assert missing(BEFORE, [BEFORE[0], BEFORE[1], BEFORE[3]], {}) == ["test_b[dpo]"]


def test_a_renamed_test_is_known_by_its_docstring():
    assert missing(BEFORE, [*BEFORE[:3], ["test_d", "", "Rows stay rows."]], {}) == []
    assert missing(BEFORE, [*BEFORE[:3], ["test_d", "", "Rows."]], {}) == ["test_c"]


def test_cases_merged_into_a_loop_are_named_once_and_the_loop_must_be_there():
    after = [BEFORE[0], ["test_all", "", ""], BEFORE[3]]
    assert missing(BEFORE, after, {"test_b": "test_all"}) == []
    with pytest.raises(SystemExit, match="test_every"):
        missing(BEFORE, after, {"test_b": "test_every"})
