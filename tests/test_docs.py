"""The documentation knows every public name and every loss type."""

from pathlib import Path

import posttrain
from posttrain.losses.policy import LOSS_TYPES

DOCS = Path(__file__).parents[1] / "docs"


def test_every_public_name_has_its_place_in_the_api_page():
    text = (DOCS / "api.md").read_text()
    missing = [n for n, module in posttrain._PUBLIC.items() if f"::: posttrain.{module}.{n}\n" not in text]
    assert not missing


def test_the_table_of_losses_is_the_table_of_the_code():
    text = (DOCS / "losses.md").read_text()
    assert all(f"| `{name}`" in text for name in LOSS_TYPES)


def test_the_changelog_has_an_unreleased_section():
    assert "## [Unreleased]" in (DOCS.parent / "CHANGELOG.md").read_text()
