"""Trees of harness episodes (turns, forks, tool calls), for the report page and for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from posttrain.errors import DataError
from posttrain.extensions.agents.session import Branch, CapturedCall, Recorded, Session, read_sessions
from posttrain.values import visible

# Maximum number of characters of a message on the page or in the terminal.
LONGEST = 600


def episode_tree(session: Session) -> dict[str, Any]:
    """Convert the calls of an episode to dicts and lists.

    Returns:
        A dict with these keys. ``branches``: branches with their turns and the call at which each branch forks. ``unread``:
        calls that belong to no branch. ``counts``: number of calls by outcome. ``seen``: number of prompt and completion
        tokens of all calls. ``once``: number of tokens that are computed. Common prefixes are computed, and counted, once.
    """
    branches = session.branches()
    unread = [{"call": call.number, "state": call.state} for call in session.calls if call.state != "answered"]
    return {
        "branches": [_branch(session, branch) for branch in branches],
        "unread": unread,
        "counts": asdict(session.counts),
        "seen": session.tokens_seen(),
        "once": session.tokens_once(),
    }


def _branch(session: Session, branch: Branch) -> dict[str, Any]:
    first = session.calls[branch.calls[0][0]]
    return {
        "forked": branch.forked,
        "parent": None if first.parent is None else first.parent[0],
        "tokens": len(branch.episode.prompt_ids) + len(branch.episode.token_ids),
        "trained": sum(branch.episode.tool_mask),
        "turns": [_turn(session, session.calls[number], choice) for number, choice in branch.calls],
    }


def _turn(session: Session, call: CapturedCall, choice: int) -> dict[str, Any]:
    rollout, answer = call.completions[choice], call.answers[choice]
    start = 0 if call.parent is None else len(session.calls[call.parent[0]].messages) + 1
    context = [{"role": str(m.get("role")), "text": cut(str(m.get("content") or ""))} for m in call.messages[start:]]
    return {
        "call": call.number,
        "choice": choice,
        "context": context or [{"role": "prompt", "text": cut(call.text[-LONGEST:])}],
        "text": cut(str(answer.get("content") or "")),
        "calls": list(_calls(answer)),
        "tokens": len(rollout.token_ids),
        "version": rollout.version,
        "finish": rollout.finish_reason,
        "retries": call.retries,
    }


def _calls(answer: Mapping[str, Any]) -> Iterator[str]:
    for call in answer.get("tool_calls") or ():
        function = call["function"]
        yield cut(f"{function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})")


def cut(text: str) -> str:
    """Replace the middle of a long text with the number of omitted characters."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [… {len(text) - 2 * half:,} characters …] {text[-half:]}"


def to_console(path: str | Path, *, show: int = 8, console: Console | None = None) -> None:
    """Print the recorded episodes of a replay file as trees.

    Args:
        path: File written by ``harness_record``.
        show: Maximum number of episodes to print.
        console: Console for the output. None: the terminal.

    Raises:
        DataError: The file has no episodes, or is not a replay file.
    """
    episodes = list(read_sessions(path))
    if not episodes:
        raise DataError(f"{path} contains no episodes. Fix: record episodes with harness_record.")
    console = console if console is not None else Console()
    for number, episode in enumerate(episodes[:show]):
        console.print(as_tree(episode, f"episode {number}"))
    seen = sum(recording.session.tokens_seen() for recording in episodes)
    once = sum(recording.session.tokens_once() for recording in episodes)
    failed = sum(recording.error is not None for recording in episodes)
    calls = sum(len(recording.session.calls) for recording in episodes)
    console.print(
        f"{len(episodes)} episodes, {failed} failed; {calls} calls with {seen:,} tokens, of which "
        f"{once:,} are computed ({once / max(seen, 1):.0%})",
        highlight=False,
    )


def as_tree(episode: Recorded, title: str) -> Tree:
    """Build the printable tree of an episode. It has one node per branch, and each branch node has one node per turn."""
    episode_nodes = episode_tree(episode.session)
    end = (
        f"failed: {episode.error}"
        if episode.error is not None
        else f"result {cut(json.dumps(episode.result, default=str))}"
    )
    root = Tree(
        Text(
            f"{title}: {visible(end)}; {episode_nodes['seen']:,} tokens seen, {episode_nodes['once']:,} computed",
            style="bold",
        )
    )
    for index, branch in enumerate(episode_nodes["branches"]):
        root.add(_branch_node(index, branch))
    for call in episode_nodes["unread"]:
        root.add(Text(f"call {call['call']}: {call['state']}, not trained", style="dim"))
    return root


def _branch_node(index: int, branch: Mapping[str, Any]) -> Tree:
    forked = f", forks after {branch['forked']} tokens" if index else ""
    node = Tree(Text(f"branch {index}: {branch['tokens']} tokens, {branch['trained']} trained{forked}", style="blue"))
    for turn in branch["turns"]:
        inside = node.add(Text(f"call {turn['call']}", style="dim"))
        _lines(inside, [(f"{m['role']}: {m['text']}", "dim") for m in turn["context"]])
        _lines(inside, [(turn["text"], "bold green")] * bool(turn["text"]))
        _lines(inside, [(call, "bold magenta") for call in turn["calls"]])
    return node


def _lines(node: Tree, lines: Sequence[tuple[str, str]]) -> None:
    for text, style in lines:
        node.add(Text(visible(text), style=style))
