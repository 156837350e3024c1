"""Which pages hold what on the graph path, and the passes that fill them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.rollouts.native.pages import Pages, PieceView
from posttrain.rollouts.native.sampler import Completion

if TYPE_CHECKING:
    from posttrain.rollouts.native.engine import NativeEngine
    from posttrain.rollouts.native.gpu import Decoder

__all__ = ["Line", "Passes", "Prompt", "Shelf", "pages_of"]

NEVER = 2**62  # The position of a column that holds nothing.


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt of the call, for all requests that have it.

    Attributes:
        ids: Its tokens.
        waiting: Completions that nobody writes yet.
        users: Completions that are being written.
        pages: Where its keys and values are; empty while it has none.
        filled: Tokens that are computed.
        logits: ``(V,)`` what first tokens are drawn from.
    """

    ids: list[int]
    waiting: int = 0
    users: int = 0
    pages: list[int] = field(default_factory=list)
    filled: int = 0
    logits: Tensor | None = None


@dataclass(slots=True, eq=False)
class Line:
    """A completion that is being written.

    Attributes:
        completion: What is known of it.
        prompt: Its prompt.
        limit: Most tokens.
        slot: Where the device keeps its state; -1 while it has none.
        pages: Of its suffix.
        drawn: Tokens drawn, those included that the host has not read yet.
        filled: Suffix tokens that are in the pages again after it was set aside.
        over: Its rollout is made.
    """

    completion: Completion
    prompt: Prompt
    limit: int
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    drawn: int = 0
    filled: int = 0
    over: bool = False


@dataclass(slots=True)
class Piece:
    """Tokens of one prompt or suffix that a pass computes.

    Attributes:
        ids: The tokens.
        begin: Number of the first of them in its prompt or suffix.
        pages: Of the prompt or suffix.
        before: The prompt, for a suffix.
    """

    ids: list[int]
    begin: int
    pages: list[int]
    before: Prompt | None = None


class Shelf:
    """Pages by what is in them: prompts that begin alike share the pages of their beginning.

    Args:
        pages: The memory, used by nobody.
        prompts: Of the call, in the order in which they are served.
    """

    def __init__(self, pages: Pages, prompts: Sequence[Prompt]) -> None:
        self.pages, self.prompts = pages, prompts
        self.known: dict[tuple[int, tuple[int, ...]], int] = {}  # By the page before and the tokens.
        self.named: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.ready: set[int] = set()

    def hold(self, prompt: Prompt) -> bool:
        """Pages for a prompt, those shared that another prompt has; false where there are not enough."""
        if prompt.pages or self._try_to_hold(prompt):
            return True
        for other in self.prompts:  # Pages that would be shared may keep others from being freed.
            if other.users == 0 and other.pages:
                self.forget(other)
        return self._try_to_hold(prompt)

    def waiting_after(self, first: Prompt) -> Iterator[Prompt]:
        """Prompts behind this one that have completions which nobody writes yet."""
        behind = False
        for prompt in self.prompts:
            if behind and prompt.waiting:
                yield prompt
            behind = behind or prompt is first

    def _try_to_hold(self, prompt: Prompt) -> bool:
        size, ids = self.pages.size, prompt.ids
        found: list[int] = []
        parent = 0
        for number in range((len(ids) - 1) // size):  # The last token is computed in any case: its logits are needed.
            page = self.known.get((parent, tuple(ids[number * size : (number + 1) * size])))
            if page is None:
                break
            found.append(page)
            parent = page
        wanted = pages_of(len(ids), size) - len(found)
        if not self.free(wanted, keep=prompt, held=found):
            return False
        self.pages.share(found)
        prompt.pages = found + self.pages.take(wanted)
        prompt.filled = len(found) * size
        for number in range(len(found), len(ids) // size):
            self._name(prompt.pages[number], (parent, tuple(ids[number * size : (number + 1) * size])))
            parent = prompt.pages[number]
        return True

    def _name(self, page: int, name: tuple[int, tuple[int, ...]]) -> None:
        if name not in self.known:
            self.known[name] = page
            self.named[page] = name

    def drop(self, pages: list[int]) -> None:
        """One user less of these pages; nobody finds those that are free now."""
        for page in self.pages.give_back(pages):
            self.ready.discard(page)
            if page in self.named:
                del self.known[self.named.pop(page)]

    def free(self, wanted: int, *, keep: Prompt | None = None, held: Sequence[int] = ()) -> bool:
        """Whether this many pages are free, if need be after prompts that nobody reads yet give up theirs."""
        for prompt in reversed(self.prompts):
            if len(self.pages.free) >= wanted:
                return True
            if prompt is not keep and prompt.users == 0 and prompt.pages and not set(held) & set(prompt.pages):
                self.forget(prompt)
        return len(self.pages.free) >= wanted

    def forget(self, prompt: Prompt) -> None:
        self.drop(prompt.pages)
        prompt.pages, prompt.filled, prompt.logits = [], 0, None

    def reads_unready(self, prompt: Prompt) -> bool:
        """Whether pages that it shares are still to be computed by another prompt's pass."""
        return not self.ready.issuperset(prompt.pages[: prompt.filled // self.pages.size])

    def filled(self, prompt: Prompt, tokens: int) -> None:
        """So many more tokens of the prompt are in its pages."""
        prompt.filled += tokens
        self.ready.update(prompt.pages[: prompt.filled // self.pages.size])


class Passes:
    """Computes prompts, and suffixes that were set aside, in pieces.

    Attributes:
        computed: Prompt tokens so far.
        found: Prompt tokens that another prompt's pages held.
    """

    def __init__(self, engine: NativeEngine, decoder: Decoder, shelf: Shelf) -> None:
        self.engine, self.decoder, self.shelf = engine, decoder, shelf
        self.pages = shelf.pages
        self.computed = self.found = 0

    def fill(self, wanted: Prompt, *, slots: int, live: int) -> bool:
        """The next piece of a prompt, together with as many after it as fit one pass.

        Args:
            wanted: The prompt.
            slots: Free ones: prompts whose completions would find none wait.
            live: Completions that are being written; each may want a page soon.

        Returns:
            False where there is not enough memory.
        """
        if not self._held(wanted):
            return False
        chosen = self._together(wanted, slots, live)
        width = min(self.engine.prefill_tokens, max(len(p.ids) - p.filled for p in chosen))
        pieces = [Piece(p.ids[p.filled : p.filled + width], p.filled, p.pages) for p in chosen]
        hidden = self._pass(pieces)
        for row, (prompt, piece) in enumerate(zip(chosen, pieces, strict=True)):
            self.shelf.filled(prompt, len(piece.ids))
            self.computed += len(piece.ids)
            if prompt.filled == len(prompt.ids) and prompt.waiting:
                prompt.logits = self.engine.logits(hidden[row, len(piece.ids) - 1 : len(piece.ids)])[0]
        return True

    def _held(self, prompt: Prompt) -> bool:
        before = bool(prompt.pages)
        if not self.shelf.hold(prompt):
            return False
        self.found += 0 if before else prompt.filled
        return True

    def _together(self, wanted: Prompt, slots: int, live: int) -> list[Prompt]:
        """Prompts whose remaining tokens fit a pass beside the first one's."""
        most, chosen = self.engine.prefill_tokens, [wanted]
        width, rows = min(most, len(wanted.ids) - wanted.filled), wanted.waiting
        for prompt in self.shelf.waiting_after(wanted):
            room = pages_of(len(prompt.ids), self.pages.size) + live + rows
            if rows >= slots or width * (len(chosen) + 1) > most or len(self.pages.free) < room:
                break
            if prompt.filled == len(prompt.ids) or not self._held(prompt):
                continue
            wider = max(width, len(prompt.ids) - prompt.filled)
            if wider * (len(chosen) + 1) > most or self.shelf.reads_unready(prompt):
                self.found -= prompt.filled
                self.shelf.forget(prompt)
                continue
            chosen.append(prompt)
            width, rows = wider, rows + prompt.waiting
        return chosen

    def resume(self, line: Line, live: int) -> bool:
        """Compute a piece of the suffix of a completion that was set aside, all but its last token; false: no memory."""
        written, size = line.completion.tokens[:-1], self.pages.size
        wanted = pages_of(len(written), size) - len(line.pages)
        if wanted > 0:
            spare = live + int(pages_of(line.limit, size) > pages_of(len(written), size))
            if not self.shelf.free(wanted + spare, keep=line.prompt):
                return False
            line.pages += self.pages.take(wanted)
        ids = written[line.filled : line.filled + self.engine.prefill_tokens]
        if ids:
            self._pass([Piece(ids, line.filled, line.pages, line.prompt)])
            line.filled += len(ids)
        return True

    def _pass(self, pieces: list[Piece]) -> Tensor:
        """Hidden states ``(P, width, H)`` of the pieces, right-padded; their keys and values go to their pages."""
        width, upload = max(len(p.ids) for p in pieces), self.decoder.upload
        pad = self.engine.pad_token_id
        ids = upload([p.ids + [pad] * (width - len(p.ids)) for p in pieces], torch.long)
        self.decoder.store.view, positions = self._view(pieces, width)
        return self.engine.trunk(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    def _view(self, pieces: list[Piece], width: int) -> tuple[PieceView, Tensor]:
        size, upload = self.pages.size, self.decoder.upload
        lines = [_columns(p, size) for p in pieces]
        most = max(map(len, lines))
        table = upload([line + [(0, 0, 0)] * (most - len(line)) for line in lines], torch.long)
        page, first, filled = table[:, :, :1], table[:, :, 1:2], table[:, :, 2:]
        offsets = torch.arange(size, device=table.device)
        columns = (page * size + offsets).flatten(1)
        seen_at = torch.where(offsets < filled, first + offsets, NEVER).flatten(1)
        facts = [(p.begin, len(p.before.ids) if p.before else 0, len(p.ids)) for p in pieces]
        begin, before, length = upload(facts, torch.long)[:, :, None].unbind(1)
        steps = torch.arange(width, device=table.device)
        owns = [p.pages[p.begin // size :] for p in pieces]
        own = upload([pages + [0] * (max(map(len, owns)) - len(pages)) for pages in owns], torch.long)
        index = begin % size + steps
        places = own.gather(1, (index // size).clamp_max(own.shape[1] - 1)) * size + index % size
        places = torch.where(steps < length, places, 0).flatten()
        positions = before + begin + torch.minimum(steps, length - 1)  # Padding looks where the last token does.
        fresh = all(p.begin == 0 and p.before is None for p in pieces)
        return PieceView(places, positions, columns, seen_at, fresh), positions


def pages_of(tokens: int, size: int) -> int:
    """Pages that hold so many tokens.

    >>> pages_of(64, 64), pages_of(65, 64)
    (1, 2)
    """
    return -(-tokens // size)


def _columns(piece: Piece, size: int) -> list[tuple[int, int, int]]:
    """The pages that a piece may look at, each with the position of its first token and how many it holds."""
    found, base = [], 0
    if piece.before is not None:
        base = len(piece.before.ids)
        found = [(page, i * size, min(size, base - i * size)) for i, page in enumerate(piece.before.pages)]
    end = piece.begin + len(piece.ids)
    own = piece.pages[: pages_of(end, size)]
    return found + [(page, base + i * size, min(size, end - i * size)) for i, page in enumerate(own)]
