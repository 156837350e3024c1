"""Write the two tables of docs/assumptions.md from the register of checks."""

from __future__ import annotations

from pathlib import Path

from posttrain.checks import registry as core

PAGE = Path(__file__).parent.parent / "docs" / "assumptions.md"
ASSUMPTIONS = {
    "a": "The rollout server is up and serves the trainer's architecture and weights",
    "b": "Every row has messages and the columns that are needed",
    "c": "Rollouts come from the weights they train, or from slightly older ones",
    "d": "Answers are compared by what they mean, not by their spelling",
    "e": "All rollouts of a batch fit in memory",
    "f": "The chosen answer is really better than the rejected one",
    "g": "Images and text fit into context and memory",
    "h": "The server's flags match the trainer's settings",
    "i": "Teacher and student have compatible tokenizers",
    "j": "Rewards are in the range that was expected",
    "k": "Several commands do not corrupt each other's checkpoints, data or memory",
    "l": "The batch size suits the memory there is",
    "m": "Optional packages have versions that work together",
}
MOMENTS = {"config": "config", "data": "data", "first_batch": "first batch", "log_step": "training"}


def index() -> list[str]:
    """One row an assumption."""
    checks = core.load().values()
    rows = ["| | What is assumed | Codes |", "|---|---|---|"]
    for letter, title in ASSUMPTIONS.items():
        codes = " ".join(f"`{check.code}`" for check in checks if check.page == letter)
        rows.append(f"| ({letter}) | [{title}](assumptions/{letter}.md) | {codes} |")
    return rows


def codes() -> list[str]:
    """One row a code."""
    rows = ["| Code | Name | Moment | What it means | Page |", "|---|---|---|---|---|"]
    for check in core.load().values():
        page = f"[({check.page})](assumptions/{check.page}.md)" if check.page else "[health](health.md)"
        rows.append(f"| `{check.code}` | `{check.name}` | {MOMENTS[check.moment]} | {check.title} | {page} |")
    return rows


def render(text: str) -> str:
    """The page's text with both tables as they are now."""
    for name, rows in (("index", index()), ("codes", codes())):
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        assert opening and closing, f"{PAGE} has no <!-- {name} --> ... <!-- /{name} -->"
        text = before + opening + "\n" + "\n".join(rows) + "\n\n" + closing + after
    return text


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
