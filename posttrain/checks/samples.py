"""Rows as they were given, before anything is tokenised: those that cannot be trained, and those that will hardly be meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.checks.registry import Severity, finding, register
from posttrain.checks.rows import count_of
from posttrain.data.formats import ROLES
from posttrain.types import Finding

__all__ = ["ROW_CODES", "answers_of", "bad_rows", "columns_of", "doubt", "doubtful_rows", "fault", "too_many"]

register("PT-D030", "bad-rows", moment="data", title="rows that cannot be trained", page="b")
register("PT-D031", "doubtful-rows", moment="data", title="rows without an answer, blank or equal ones", page="b")
register("PT-D032", "too-many-bad-rows", moment="data", title="more bad rows than may be dropped", page="b")

ROW_CODES = ("PT-D030", "PT-D031", "PT-D032")
CONVERSATIONS = ("messages", "conversations")
WHOLE = (*CONVERSATIONS, "text")  # Each is a row by itself.
ANSWERS = ("completion", "chosen", "rejected", "reference")
TOKENISED = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")
SAID = ("content", "value", "tool_calls", "reasoning_content", "thinking")  # What a turn may say, by its key.
SPEAKERS = frozenset({"system", "user", "assistant", "tool", "developer", *ROLES})
SHOWN = 5


def columns_of(columns: Sequence[str], *, prompts_only: bool) -> list[str]:
    """The columns whose content decides whether a row can be trained; none where rows hold token ids.

    Args:
        columns: Of the dataset.
        prompts_only: Whether completions are sampled, so that other columns are the reward functions' business.
    """
    if set(columns) & set(TOKENISED):
        return []
    wanted = ("prompt",) if prompts_only else (*CONVERSATIONS, "prompt", *ANSWERS, "text", "label")
    return [name for name in wanted if name in columns]


def fault(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Why a row cannot be trained: nothing in a column that is needed, or a message without a role; "" where it can.

    >>> fault({"messages": []}, ["messages"]), fault({"messages": [{"role": "user", "content": "hi"}]}, ["messages"])
    ('empty `messages`', '')
    >>> fault({"messages": None, "text": "a"}, ["messages", "text"]), fault({"text": None}, ["text"])
    ('', 'no `text`')
    """
    pair = bool(row.get("chosen")) and bool(row.get("rejected"))
    whole = any(row.get(name) is not None for name in WHOLE if name in columns)
    for name in columns:
        value = row.get(name)
        if value is None and (
            (name == "prompt" and pair) or whole or (name in WHOLE and row.get("prompt") is not None)
        ):
            continue  # A prompt that both answers begin with is taken from them; a row needs one form, not all.
        if value is None:
            return f"no `{name}`"
        if isinstance(value, list):
            if not value:
                return f"empty `{name}`"
            if not all(isinstance(turn, Mapping) and (turn.get("role") or turn.get("from")) for turn in value):
                return f"a message of `{name}` without a role"
    return ""


def doubt(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """What makes a row unlikely to be meant: nothing an assistant says, an odd turn, a blank answer, two equal answers.

    >>> doubt({"messages": [{"role": "user", "content": "hi"}]}, ["messages"])
    'no assistant turn in `messages`'
    >>> doubt({"prompt": [{"role": "usr", "content": "hi"}]}, ["prompt"])
    "the role 'usr' in `prompt`"
    """
    for name in columns:
        value = row.get(name)
        odd = next(filter(None, map(_odd_turn, value)), "") if isinstance(value, list) else ""
        if odd:
            return f"{odd} in `{name}`"
        if isinstance(value, str) and name != "prompt" and not value.strip():
            return f"blank `{name}`"
        if isinstance(value, list) and name != "prompt" and not _answers(value):
            return f"no assistant turn in `{name}`"
    if "chosen" in columns and row.get("chosen") == row.get("rejected"):
        return "equal `chosen` and `rejected`"
    return ""


def _odd_turn(turn: Mapping[str, Any]) -> str:
    """A role that no template knows, or a turn in which nothing is said; an empty system message is common, and harmless."""
    role = turn.get("role") or turn.get("from")
    if role not in SPEAKERS:
        return f"the role {role!r}"
    if role in ("system", "developer") or any(_filled(turn.get(name)) for name in SAID):
        return ""
    return f"a turn of the {role} without content"


def _answers(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the assistant says or calls something."""
    return any(
        ROLES.get(role := turn.get("role") or turn.get("from"), role) == "assistant"
        and any(_filled(turn.get(name)) for name in SAID)
        for turn in turns
    )


def _filled(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else bool(value)


def answers_of(value: Any) -> str:
    """Text of an answer or prompt: messages one after the other with their roles, text as it is."""
    if isinstance(value, list):
        return "\n".join(f"{t.get('role') or t.get('from')}: {t.get('content') or t.get('value') or ''}" for t in value)
    return "" if value is None else str(value)


def _about(
    code: str, severity: Severity, reasons: Mapping[int, str], total: int, *, verb: str, why: str, fix: str
) -> Finding | None:
    """A finding about rows, with how many there are of each reason and which come first; None where there are none."""
    if not reasons:
        return None
    counts = Counter(reasons.values()).most_common()
    listed = ", ".join(f"{count} {reason}" for reason, count in counts)
    first = sorted(reasons)
    shown = ", ".join(map(str, first[:SHOWN])) + (", ..." if len(first) > SHOWN else "")
    what = f"{count_of(len(first), total)} {verb}: {listed}. First rows: {shown}."
    return finding(code, severity, what, "the training set", why, fix)


def bad_rows(reasons: Mapping[int, str], total: int, *, dropped: bool = False) -> Finding | None:
    """Rows that cannot be trained; an error, unless they were dropped.

    Args:
        reasons: By number of the row.
        total: Rows that were looked at.
        dropped: Whether they were left out.
    """
    advice = "mend them, or set bad_rows='drop' to leave them out (bad_rows.jsonl then lists them)."
    return _about(
        "PT-D030",
        "warning" if dropped else "error",
        reasons,
        total,
        verb="were dropped" if dropped else "cannot be trained",
        why="such a row has nothing to learn from; alone in a batch it would make the loss 0 or not a number.",
        fix="nothing, if that is meant: bad_rows.jsonl lists them." if dropped else advice,
    )


def doubtful_rows(reasons: Mapping[int, str], total: int) -> Finding | None:
    """Rows that can be trained and teach nothing good; a warning.

    Args:
        reasons: By number of the row.
        total: Rows that were looked at.
    """
    return _about(
        "PT-D031",
        "warning",
        reasons,
        total,
        verb="look wrong",
        why="a conversation without an answer, a blank answer or two equal ones teach nothing, or to say nothing.",
        fix="look at these rows with posttrain inspect; bad_rows='drop' leaves them out.",
    )


def too_many(dropped: int, total: int, *, most: float) -> Finding | None:
    """More rows to be dropped than a healthy set can have.

    Args:
        dropped: Rows that would be left out.
        total: All rows.
        most: The share that may be (``bad_rows_max``).
    """
    if dropped <= most * total:
        return None
    return finding(
        "PT-D032",
        "error",
        f"bad_rows='drop' would leave out {count_of(dropped, total)}, more than bad_rows_max={most:g} allows.",
        "the training set",
        "so many bad rows are seldom accidents: usually a column has another name or form than was thought.",
        f"look at bad_rows.jsonl; mend the set, or set bad_rows_max={dropped / total + 0.005:.2f} if they may go.",
    )
