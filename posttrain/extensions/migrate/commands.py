"""The command `migrate`. The modules that implement it are imported when the command runs."""

from __future__ import annotations


def migrate(argv: list[str]) -> int:
    """Rewrite scripts, notebooks and YAML files that were written for TRL 0.7 to 1.16."""
    from posttrain.extensions.migrate.files import run

    return run(argv)
