"""`migrate`: the command `posttrain migrate`. Its modules are imported only when it runs."""

from __future__ import annotations


def migrate(argv: list[str]) -> int:
    """Rewrite scripts, notebooks and YAML files of TRL 0.7 to 1.16."""
    from posttrain.extensions.migrate.files import run

    return run(argv)
