"""Prefix trees of token sequences: common prefixes are stored once, at every depth.

Each token belongs to the completion of at most one sequence. A prompt may run through another row's completion (the next turn
of an episode begins with the previous turn), and prompts may share a prefix (a system prompt). Two completions never share a
token, even if their ids agree, because each trains the token with its own values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError
from posttrain.types import Row

if TYPE_CHECKING:
    from posttrain.types import Batch, Segment

# Minimum number of common tokens for joining rows. For fewer, an additional attention segment costs more than sharing saves.
SHARED_LEAST = 16
# Maximum share of a long tree's tokens that repeated prompts may add. Memory and time grow with the tokens of a pass. With a
# prompt of 400 tokens and 8 answers of 1,024 tokens, three passes hold a third of the activations for 9 % more tokens.
REPEATED_MOST = 0.1


@dataclass(slots=True)
class Member:
    """One completion of a row.

    Attributes:
        row: Row of the completion.
        number: Index of the row among the collated rows.
        index: Index of the completion in its row.
        origin: Index in the flat list of completions.
    """

    row: Row
    number: int
    index: int
    origin: int

    @property
    def ids(self) -> list[int]:
        """Token ids of the completion."""
        return self.row.completions[self.index]


@dataclass(slots=True)
class Node:
    """Run of tokens from one prompt or one completion.

    Attributes:
        ids: Token ids of the run.
        row: Row that the run belongs to.
        member: Completion that the run belongs to. None: the run belongs to a prompt.
        start: Index of the first token in the prompt or completion.
        children: Nodes that continue the run. If a prompt split a completion, the rest of the completion is the first child,
            so that its tokens stay adjacent.
        empty: Completions without tokens that end here.
        trained: True for a prompt that is trained. It is trained once, with the row's first completion.
    """

    ids: list[int]
    row: Row
    member: Member | None = None
    start: int = 0
    children: list[Node] = field(default_factory=list)
    empty: list[Member] = field(default_factory=list)
    trained: bool = False

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens and move the rest, with the current children, into a new child."""
        rest = Node(self.ids[length:], self.row, self.member, self.start + length, self.children, self.empty)
        self.ids, self.children, self.empty = self.ids[:length], [rest], []


@dataclass(slots=True)
class Tree:
    """Prefix tree: a root and its descendants.

    Attributes:
        root: First run of tokens.
        size: Number of tokens, each counted once.
        longest: Number of tokens of the longest sequence.
        members: Completions in the tree.
    """

    root: Node
    size: int
    longest: int
    members: list[Member]


def grow(members: Sequence[Member], *, most: int, joined: int, comfortable: int = 0) -> list[Tree]:
    """Build prefix trees of the completions of several rows.

    Args:
        members: Completions in the order of rows; the completions of a row are adjacent.
        most: Maximum number of tokens of a tree from one row. The remaining completions get trees of their own, with the
            prompt repeated.
        joined: Maximum number of tokens of a tree that several rows share; 0: every row has its own trees.
        comfortable: Number of tokens above which a tree is also split if that is cheap, see `REPEATED_MOST`; 0: never.
    """
    trees: list[Tree] = []
    beginnings: dict[tuple[int, ...], list[Tree]] = {}
    # Short prompts first: a prompt that runs through another row's completion then finds it in a tree.
    for row in sorted(_by_row(members), key=lambda row: len(row[0].row.prompt_ids)):
        first = row[0].row
        begins = tuple(first.prompt_ids[:SHARED_LEAST])
        # Rows that train their prompt or carry model_kwargs get trees of their own.
        apart = not joined or len(begins) < SHARED_LEAST or first.prompt_mask is not None or bool(first.model_kwargs)
        if apart or not any(_join(tree, row, joined) for tree in beginnings.get(begins, ())):
            for part in _parts(row, min(most, _cheap_split(row, comfortable))):
                trees.append(_plant(part))
                if not apart and len(part) == len(row):
                    beginnings.setdefault(begins, []).append(trees[-1])
    return sorted(trees, key=lambda tree: min(member.number for member in tree.members))


def alone(members: Sequence[Member]) -> list[Tree]:
    """Build one tree per sequence."""
    return [_plant([member]) for member in members]


def _by_row(members: Sequence[Member]) -> Iterator[list[Member]]:
    start = 0
    for stop in range(1, len(members) + 1):
        if stop == len(members) or members[stop].number != members[start].number:
            yield list(members[start:stop])
            start = stop


def _cheap_split(row: list[Member], comfortable: int) -> int:
    """Return the maximum tree size that splits a row into up to the number of trees that `REPEATED_MOST` allows.

    Each tree has on average at least ``comfortable`` tokens of answers.
    """
    prompt, answers = len(row[0].row.prompt_ids), [len(member.ids) for member in row]
    size = prompt + sum(answers)
    if not comfortable or size <= comfortable:
        return size
    repeats = int(REPEATED_MOST * size / max(prompt, 1))
    parts = min(repeats + 1, max(sum(answers) // comfortable, 1), len(row))
    # Answers are not split, so the largest of even parts may exceed their mean by an answer.
    return size if parts == 1 else prompt + -(-sum(answers) // parts) + max(answers) // 2


def _parts(row: list[Member], most: int) -> Iterator[list[Member]]:
    """Yield groups of a row's completions, one tree each."""
    start, prompt = 0, len(row[0].row.prompt_ids)
    size = prompt + len(row[0].ids)
    for stop in range(1, len(row) + 1):
        if stop == len(row) or size + len(row[stop].ids) > most:
            yield row[start:stop]
            start, size = stop, prompt
        if stop < len(row):
            size += len(row[stop].ids)


def _plant(members: list[Member]) -> Tree:
    first = members[0].row
    trained = first.prompt_mask is not None and members[0].index == 0
    tree = Tree(Node(list(first.prompt_ids), first, trained=trained), len(first.prompt_ids), 0, [])
    _hang(tree, tree.root, members)
    return tree


def _hang(tree: Tree, node: Node, members: list[Member]) -> None:
    """Attach completions below the last token of their prompt."""
    tree.members += members
    for member in members:
        if member.ids:
            node.children.append(Node(list(member.ids), member.row, member))
        else:
            node.empty.append(member)
        tree.size += len(member.ids)
        tree.longest = max(tree.longest, len(member.row.prompt_ids) + len(member.ids))


def _join(tree: Tree, members: list[Member], most: int) -> bool:
    """Add a row to a tree if it shares enough tokens and the result has at most ``most`` tokens; return whether it was added."""
    row, answers = members[0].row, sum(len(member.ids) for member in members)
    prompt, depth, node = row.prompt_ids, 0, tree.root
    shared = _shared(node, row, 0)
    while shared == len(node.ids):
        depth += shared
        candidates = [
            (child, _shared(child, row, depth)) for child in node.children if child.ids[0] in prompt[depth : depth + 1]
        ]
        child, shared = max(candidates, key=lambda pair: pair[1], default=(node, 0))
        if shared < min(SHARED_LEAST, len(prompt) - depth) or not shared:
            shared = 0
            break
        node = child
    depth += shared
    if depth < SHARED_LEAST or tree.size + len(prompt) - depth + answers > most:
        return False
    if shared:
        node.cut(shared)
    if depth < len(prompt):
        rest = Node(prompt[depth:], row, None, depth)
        node.children.append(rest)
        node = rest
    tree.size += len(prompt) - depth
    _hang(tree, node, members)
    return True


def _shared(node: Node, row: Row, depth: int) -> int:
    """Count the leading tokens of a node that match a prompt from ``depth`` on."""
    prompt, ids = row.prompt_ids, node.ids
    most = min(len(ids), len(prompt) - depth, *(_first_picture(one, row, depth) for one in (node, row)))
    if ids[:most] == prompt[depth : depth + most]:
        return most
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids[:most], prompt[depth:], strict=False)))


def _first_picture(one: Node | Row, row: Row, depth: int) -> int:
    """Return the number of tokens before a run's first image. Only equal prompts share later tokens, see `share_prompts`."""
    if isinstance(one, Row):
        starts = [picture.start - depth for picture in (one.pictures or [()])[0]]
    else:
        part = 0 if one.member is None else one.member.index + 1
        starts = [picture.start - one.start for picture in one.row.pictures[part]] if one.row.pictures else []
    return max(min((start for start in starts if start >= 0), default=len(row.prompt_ids)), 0)


def pictures_of(node: Node) -> list[tuple[int, Any]]:
    """Return the images that begin in a node, each with the index of its first placeholder in the node."""
    if not node.row.pictures:
        return []
    placed = node.row.pictures[0 if node.member is None else node.member.index + 1]
    return [(image.start - node.start, image) for image in placed if 0 <= image.start - node.start < len(node.ids)]


def check_segments(segments: Sequence[Segment], width: int) -> None:
    """Check that segments are tries in depth-first order.

    Args:
        segments: In the order of rows and columns.
        width: Columns of a row.

    Raises:
        DataError: A segment is empty or ends beyond its row, its parent does not exist or does not hold it, it does not
            begin where it must, or its position does not follow from its parent's.
    """
    for index, segment in enumerate(segments):
        if segment.stop <= segment.start:
            raise DataError(f"segment {index} is empty: columns {segment.start} to {segment.stop}. Fix: leave it out.")
        if not segment.stop <= segment.end <= width:
            raise DataError(
                f"segment {index} has columns {segment.start} to {segment.stop} and ends with what is under it at "
                f"{segment.end}, in a row of {width} columns. Fix: start < stop <= end <= {width}."
            )
        before = segments[index - 1] if index else None
        column = before.stop if before is not None and before.row == segment.row else 0
        if segment.start != column:
            raise DataError(
                f"segment {index} begins at column {segment.start} of row {segment.row}, and the one before ends at {column}. "
                "Fix: list segments depth first, without gaps."
            )
        if segment.parent >= index or segment.parent < -1:
            raise DataError(f"segment {index} continues segment {segment.parent}, which does not stand before it.")
        if segment.parent < 0:
            position = 0
        else:
            parent = segments[segment.parent]
            if parent.row != segment.row or not parent.stop <= segment.start < segment.end <= parent.end:
                raise DataError(
                    f"segment {index} (row {segment.row}, columns {segment.start} to {segment.end}) continues segment "
                    f"{segment.parent} (row {parent.row}), under which stand columns {parent.stop} to {parent.end}."
                )
            position = parent.position + parent.stop - parent.start
        if segment.position != position:
            raise DataError(
                f"segment {index} begins at position {segment.position}, and its parent ends before position {position}. Fix: "
                f"position={position}."
            )


def check_batch(batch: Batch) -> None:
    """Check that a batch's segments say who sees whom in every row. A model would take each row for one sequence otherwise.

    Raises:
        DataError: Segments are no tries (`check_segments`), a row with tokens has none, or a sequence ends in none.
    """
    rows, width = batch.input_ids.shape
    check_segments(batch.segments, width)
    known = {segment.row for segment in batch.segments}
    bare = [row for row in range(rows) if row not in known]
    ends = max((leaf.segment for leaf in batch.leaves), default=-1)
    if not known <= set(range(rows)) or ends >= len(batch.segments) or (bare and bool(batch.seen_until[bare].any())):
        raise DataError(
            f"a Batch of {rows} rows has {len(batch.segments)} segments, of rows {sorted(known)}, and a sequence ends in "
            f"segment {ends}. Fix: lay rows out with collate (posttrain.data.forest)."
        )
