"""Prefix trees of token sequences. At every depth of a tree, a common prefix is stored only once.

Prompts may share a prefix, such as a system prompt. A prompt may also contain the completion of another row: in a multi-turn
episode, the next prompt begins with the previous turn. Two completions never share a token, even if their ids are equal,
because each completion has its own values per token, e.g. advantages.
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

# Minimum number of common tokens for joining rows. For a shorter common prefix, the cost of an additional segment is higher
# than the saving.
SHARED_LEAST = 16
# Maximum fraction of tokens that splitting a long tree may add. Splitting adds tokens because each of the resulting trees
# repeats the prompt. Memory and time of a pass grow with its number of tokens. Example: a tree with a prompt of 400 tokens
# and 8 answers of 1,024 tokens is split into three passes. The three passes need a third of the activation memory and 9 %
# more tokens.
REPEATED_MOST = 0.1


@dataclass(slots=True)
class Member:
    """One completion of a row.

    Attributes:
        row: Row of the completion.
        number: Index of the row among the collated rows.
        index: Index of the completion in its row.
        origin: Index of the completion in the flat list of all completions.
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
    """Consecutive tokens of one prompt or one completion.

    Attributes:
        ids: Token ids of the node.
        row: Row to which the tokens belong.
        member: Completion to which the tokens belong, or None if they belong to a prompt.
        start: Index of the node's first token in its prompt or completion.
        children: Nodes that continue this node. If a prompt split a completion, the rest of the completion is the first child,
            so that the tokens of the completion are adjacent.
        empty: Completions without tokens whose prompt ends in this node.
        trained: Whether the node contains prompt tokens that may contribute to the loss. A prompt contributes to the loss
            only once, together with the row's first completion.
    """

    ids: list[int]
    row: Row
    member: Member | None = None
    start: int = 0
    children: list[Node] = field(default_factory=list)
    empty: list[Member] = field(default_factory=list)
    trained: bool = False

    def cut(self, length: int) -> None:
        """Split the node after its first ``length`` tokens. The remaining tokens and the children are moved to a new child."""
        rest = Node(self.ids[length:], self.row, self.member, self.start + length, self.children, self.empty)
        self.ids, self.children, self.empty = self.ids[:length], [rest], []


@dataclass(slots=True)
class Tree:
    """Prefix tree.

    Attributes:
        root: Node with the first tokens of all sequences.
        size: Number of tokens. A token that several sequences share is counted once.
        longest: Number of tokens of the longest sequence.
        members: Completions in the tree.
    """

    root: Node
    size: int
    longest: int
    members: list[Member]


def grow(members: Sequence[Member], *, most: int, joined: int, comfortable: int = 0) -> list[Tree]:
    """Build prefix trees from the prompts and completions of several rows.

    Args:
        members: Completions in the order of rows. The completions of a row are adjacent.
        most: Maximum number of tokens of a tree with completions of a single row. If they do not fit, the remaining
            completions are put into additional trees, which repeat the prompt.
        joined: Maximum number of tokens of a tree with completions of several rows. 0: rows are not joined.
        comfortable: Number of tokens above which a tree is split if splitting repeats only few tokens (see `REPEATED_MOST`).
            0: trees are split only if they exceed ``most``.
    """
    trees: list[Tree] = []
    beginnings: dict[tuple[int, ...], list[Tree]] = {}
    # Process short prompts first. If a longer prompt contains another row's completion, a tree then already contains this
    # completion.
    for row in sorted(_by_row(members), key=lambda row: len(row[0].row.prompt_ids)):
        first = row[0].row
        begins = tuple(first.prompt_ids[:SHARED_LEAST])
        # Rows whose prompt tokens contribute to the loss, and rows with model_kwargs, are not joined with other rows.
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
    """Return the maximum size of the trees into which a row is split, so that at most the fraction `REPEATED_MOST` of tokens
    is repeated.

    On average, each of the resulting trees contains at least ``comfortable`` answer tokens.
    """
    prompt, answers = len(row[0].row.prompt_ids), [len(member.ids) for member in row]
    size = prompt + sum(answers)
    if not comfortable or size <= comfortable:
        return size
    repeats = int(REPEATED_MOST * size / max(prompt, 1))
    parts = min(repeats + 1, max(sum(answers) // comfortable, 1), len(row))
    # Answers are not split, so the largest part may exceed the average size by about half an answer.
    return size if parts == 1 else prompt + -(-sum(answers) // parts) + max(answers) // 2


def _parts(row: list[Member], most: int) -> Iterator[list[Member]]:
    """Distribute the completions of a row to trees of up to ``most`` tokens. Return one list of completions per tree."""
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
    """Add completions to a tree as children of ``node``, which is the last node of their prompt."""
    tree.members += members
    for member in members:
        if member.ids:
            node.children.append(Node(list(member.ids), member.row, member))
        else:
            node.empty.append(member)
        tree.size += len(member.ids)
        tree.longest = max(tree.longest, len(member.row.prompt_ids) + len(member.ids))


def _join(tree: Tree, members: list[Member], most: int) -> bool:
    """Add a row to a tree if both share enough tokens and the tree does not exceed ``most`` tokens. Return whether the row
    was added.
    """
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
    """Count how many of a node's first tokens equal the tokens of a row's prompt from index ``depth`` on."""
    prompt, ids = row.prompt_ids, node.ids
    most = min(len(ids), len(prompt) - depth, *(_first_picture(owner, row, depth) for owner in (node, row)))
    if ids[:most] == prompt[depth : depth + most]:
        return most
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids[:most], prompt[depth:], strict=False)))


def _first_picture(one: Node | Row, row: Row, depth: int) -> int:
    """Return the number of tokens before the first image of a node or prompt. Different prompts share only tokens before
    their images.
    """
    if isinstance(one, Row):
        starts = [picture.start - depth for picture in (one.pictures or [()])[0]]
    else:
        part = 0 if one.member is None else one.member.index + 1
        starts = [picture.start - one.start for picture in one.row.pictures[part]] if one.row.pictures else []
    return max(min((start for start in starts if start >= 0), default=len(row.prompt_ids)), 0)


def pictures_of(node: Node) -> list[tuple[int, Any]]:
    """Return the images that begin in a node, each with the index of its first placeholder token within the node."""
    if not node.row.pictures:
        return []
    placed = node.row.pictures[0 if node.member is None else node.member.index + 1]
    return [(image.start - node.start, image) for image in placed if 0 <= image.start - node.start < len(node.ids)]


def check_segments(segments: Sequence[Segment], width: int) -> None:
    """Check that the segments of a batch form prefix trees in depth-first order.

    Args:
        segments: Segments, ordered by row and column.
        width: Number of columns of a row.

    Raises:
        DataError: A segment is empty, exceeds its row or its parent, leaves a gap, or has a wrong parent or position.
    """
    for index, segment in enumerate(segments):
        if segment.stop <= segment.start:
            raise DataError(f"segment {index} is empty: columns {segment.start} to {segment.stop}. Fix: remove it.")
        if not segment.stop <= segment.end <= width:
            raise DataError(
                f"segment {index} has the columns {segment.start} to {segment.stop}, and its subtree ends at column "
                f"{segment.end}, but a row has {width} columns. Fix: make sure that start < stop <= end <= {width}."
            )
        before = segments[index - 1] if index else None
        column = before.stop if before is not None and before.row == segment.row else 0
        if segment.start != column:
            raise DataError(
                f"segment {index} begins at column {segment.start} of row {segment.row}, but the previous segment ends at "
                f"{column}. Fix: list the segments in depth-first order, without gaps."
            )
        if segment.parent >= index or segment.parent < -1:
            raise DataError(f"segment {index} has the parent {segment.parent}, but a parent must precede its children.")
        if segment.parent < 0:
            position = 0
        else:
            parent = segments[segment.parent]
            if parent.row != segment.row or not parent.stop <= segment.start < segment.end <= parent.end:
                raise DataError(
                    f"segment {index} (row {segment.row}, columns {segment.start} to {segment.end}) is not inside its parent, "
                    f"segment {segment.parent} (row {parent.row}), whose subtree has the columns {parent.stop} to {parent.end}."
                )
            position = parent.position + parent.stop - parent.start
        if segment.position != position:
            raise DataError(
                f"segment {index} begins at position {segment.position}, but its parent ends before position {position}. Fix: "
                f"set position={position}."
            )


def check_batch(batch: Batch) -> None:
    """Check that the segments of a batch exist and are valid. Without segments, a model would treat each row as one
    sequence.

    Raises:
        DataError: The segments are invalid (see `check_segments`), a row with tokens has no segment, or the last segment of a
            sequence does not exist.
    """
    rows, width = batch.input_ids.shape
    check_segments(batch.segments, width)
    used = {segment.row for segment in batch.segments}
    bare = [row for row in range(rows) if row not in used]
    ends = max((leaf.segment for leaf in batch.leaves), default=-1)
    if not used <= set(range(rows)) or ends >= len(batch.segments) or (bare and bool(batch.seen_until[bare].any())):
        raise DataError(
            f"a Batch with {rows} rows has {len(batch.segments)} segments, which are in rows {sorted(used)}, and the last "
            f"segment of a sequence is {ends}. Fix: create the batch with collate (posttrain.data.forest)."
        )
