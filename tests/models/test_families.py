"""Each row of the table of families in `docs/models.md` is what the family measures today."""

from pathlib import Path

import pytest

from tests.models.families import FAMILIES, HEAD, measure

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
CELLS = [line.strip("| ").split(" | ") for line in PAGE.partition(HEAD)[2].strip().splitlines()]
ROWS = {cells[0].strip("`"): cells for cells in CELLS}
QUICK = {"gemma4_text", "gpt_oss", "qwen3_5_text"}


def test_the_page_has_a_row_for_every_family():
    assert sorted(ROWS) == FAMILIES


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.matrix, pytest.mark.slow]) for kind in FAMILIES],
)
def test_a_family_trains_and_samples_as_the_page_says(kind):
    found = measure(kind)
    assert [found.layout, found.engine] == ROWS[kind][1:3]
    for gap, shown in zip((found.sft, found.dpo, found.grpo), ROWS[kind][3:6], strict=True):
        assert gap < max(1e-5, 2 * float(shown))
