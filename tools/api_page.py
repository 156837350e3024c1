"""Write docs/api.md from the public names, a section a layer."""

from __future__ import annotations

from pathlib import Path

import posttrain

SECTIONS = {
    "algorithms": "Trainers and configs",
    "training": "What trainers share",
    "types": "Types",
    "errors": "Errors",
    "metrics": "Metrics",
    "data": "Data",
    "models": "Models",
    "losses": "Losses",
    "rollouts": "Rollouts",
    "rewards": "Rewards",
    "checks": "Checks",
    "serve": "Rollout server",
    "report": "Reports and callbacks",
    "integrations": "Integrations",
    "cli": "Command line",
    "compat": "Helpers by TRL's names",
}


def page() -> str:
    """The page's text."""
    parts = ["# API", "Every public name is importable from `posttrain`."]
    for layer, title in SECTIONS.items():
        names = sorted((m, n) for n, m in posttrain._PUBLIC.items() if m.split(".")[0] == layer)
        if names:
            parts += [f"## {title}", *(f"::: posttrain.{module}.{name}" for module, name in names)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "api.md").write_text(page(), encoding="utf-8")
