"""Continuous batching on fixed buffers: the host plans a step ahead, and reads what was drawn one step later."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.errors import RolloutError
from posttrain.rollouts.native.device_sampling import DEAD, NAN, STOPPED, Features, host_decides, is_shaped
from posttrain.rollouts.native.gpu import Need, Told
from posttrain.rollouts.native.gpu_pages import Line, Passes, Prompt, Shelf, pages_of
from posttrain.rollouts.native.graphs import uncompiled
from posttrain.rollouts.native.sampler import Asked, Chooser, Completion, SickRequests
from posttrain.rollouts.native.scheduler import bytes_per_token
from posttrain.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from posttrain.rollouts.native.engine import NativeEngine

__all__ = ["GraphRun"]

SHARE_OF_MEMORY = 0.5  # Of a GPU's free memory at the first call; the rest is for activations and the optimiser.


class GraphRun:
    """One call of `NativeEngine.generate` on the graph path."""

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> None:
        self.engine, self.requests, self.sampling = engine, requests, sampling
        self.decoder: Any = engine.decoder
        self.asked = _asked(engine, requests, sampling)
        self.prompts: list[Any] = list({id(a.prompt): a.prompt for a in self.asked}.values())
        self.done: list[Rollout | None] = [None] * sum(r.n for r in requests)
        self.chooser = Chooser(engine.tokenizer, engine.inner.get_output_embeddings().weight.shape[0])
        self.samplings = list({id(a.sampling): a.sampling for a in self.asked}.values())
        for one in self.samplings:
            self.chooser.check(one)
        self.on_host = any(map(host_decides, self.samplings))
        self.lines: list[Line] = []
        self.aside: deque[Line] = deque()
        self.slots = list(range(engine.max_slots - 1, -1, -1))
        self.tickets: deque[tuple[Told, list[Line]]] = deque()
        self.moved = True  # Rows stand elsewhere than in the last step.
        self.bucket = self.cursor = self.steps = 0
        if self.prompts:
            self.decoder.prepare(self._need())
        self.store = self.decoder.store
        self.pages = self.store.pages
        self.shelf = Shelf(self.pages, self.prompts)
        self.passes = Passes(engine, self.decoder, self.shelf)

    @property
    def live(self) -> list[Completion]:
        """Completions that are being written."""
        return [line.completion for line in self.lines]

    @property
    def paused(self) -> list[Completion]:
        """Completions that wait for memory."""
        return [line.completion for line in self.aside]

    def counts(self) -> dict[str, int]:
        """Prompt tokens computed and found, and decoding steps."""
        return {"prefilled": self.passes.computed, "reused": self.passes.found, "steps": self.steps}

    def to_the_end(self) -> list[Rollout]:
        kind = self.decoder.device.type
        with ExitStack() as stack:
            stack.enter_context(uncompiled(self.engine.model))
            if torch.is_autocast_enabled(kind):  # A capture may not keep half-precision copies of weights that train.
                dtype = torch.get_autocast_dtype(kind)
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            while not self.engine.interrupted.is_set() and self._admit():
                self._step()
        if not self.engine.interrupted.is_set():
            assert not self.aside and self._next() is None, "a request was left waiting"
        return self.so_far()

    def so_far(self) -> list[Rollout]:
        """Every completion of every request, in order; what is not finished says ``abort``."""
        self._read(0)
        for line in (*self.lines, *self.aside):
            self.done[line.completion.number] = self._rollout(line.completion, "abort")
        owners = (asked.request for asked in self.asked for _ in range(asked.request.n))
        return [
            found or Rollout(list(owner.prompt_ids), [], [], "abort", self.engine.version)
            for found, owner in zip(self.done, owners, strict=True)
        ]

    # Memory ------------------------------------------------------------------------------------------------------

    def _need(self) -> Need:
        """Sizes of the buffers: what the call can use at most, within the budget.

        Raises:
            RolloutError: The budget holds not even one completion of the longest request.
        """
        size = self.decoder.size
        prompt = max(pages_of(len(p.ids), size) for p in self.prompts)
        draws = max(s.max_new_tokens for s in self.samplings)
        suffix = pages_of(draws, size)
        slots = min(self.engine.max_slots, len(self.done))
        pages = min(len(self.prompts), slots) * prompt + slots * suffix
        budget = self._budget()
        if budget is not None:
            if budget // size < prompt + suffix:
                needed, each = (prompt + suffix) * size, bytes_per_token(self.engine.inner)
                raise RolloutError(
                    f"kv_tokens={budget} ({budget * each / 1e6:.1f} MB) cannot hold one completion: the longest prompt and "
                    f"max_new_tokens need {needed} tokens in pages of {size}, {needed * each / 1e6:.1f} MB. Raise kv_tokens, "
                    "or shorten the prompt or max_new_tokens."
                )
            pages = min(pages, budget // size)
        features = Features() if self.on_host else Features.of(self.samplings)
        return Need(pages + 1, prompt, suffix, draws, features, self.on_host)

    def _budget(self) -> int | None:
        """Tokens whose keys and values may be held; None is as many as a call can use."""
        if self.engine.kv_tokens is not None or not self.decoder.on_gpu:
            return self.engine.kv_tokens
        if self.decoder.most_tokens:  # What the first call found free is what later ones may use.
            return self.decoder.most_tokens
        free, _ = torch.cuda.mem_get_info(self.decoder.device)
        self.decoder.most_tokens = int(free * SHARE_OF_MEMORY) // bytes_per_token(self.engine.inner)
        return self.decoder.most_tokens

    def _grow(self) -> None:
        """Before a step: every live completion gets the page that it writes to, if need be that of a shorter one."""
        size, added = self.pages.size, []
        for line in sorted(self.lines, key=lambda line: -line.drawn):
            while line.slot >= 0 and len(line.pages) * size < line.drawn:
                if not self.pages.free:
                    self._read(0)  # Some may have ended, and the tokens of those set aside must be known.
                if self.shelf.free(1):
                    if line.slot < 0:
                        break
                    line.pages += self.pages.take(1)
                    added.append((line.slot, len(line.pages) - 1, line.pages[-1]))
                else:
                    self._set_aside(min(self.lines, key=lambda other: other.drawn))
        added = [entry for entry in added if any(line.slot == entry[0] for line in self.lines)]
        if added:
            self.decoder.add_pages(added)

    def _set_aside(self, line: Line) -> None:
        self._leave(line)
        line.filled = 0
        self.aside.append(line)

    # Admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Fill free slots; while others are being written only one pass, so that no prompt stalls them."""
        passes = 1 if self.lines else None  # None: nobody waits for a step.
        while self.slots:
            line = self.aside[0] if self.aside else None
            asked = None if line else self._next()
            if line is None and asked is None:
                break
            prompt = line.prompt if line else asked.prompt  # type: ignore[union-attr]
            computes = prompt.filled < len(prompt.ids) or line is not None
            if (computes and passes == 0) or not self._advance(line, asked, prompt):
                break
            if computes and passes:
                passes -= 1
        return bool(self.lines)

    def _next(self) -> Asked | None:
        while self.cursor < len(self.asked) and self.asked[self.cursor].waiting == 0:
            self.cursor += 1
        return self.asked[self.cursor] if self.cursor < len(self.asked) else None

    def _advance(self, line: Line | None, asked: Asked | None, prompt: Any) -> bool:
        """One pass for a prompt or a suffix, or a start; false where memory has to be waited for."""
        if prompt.filled < len(prompt.ids):
            return self.passes.fill(prompt, slots=len(self.slots), live=len(self.lines))
        if line is not None:
            return self._resume(line)
        assert asked is not None
        if prompt.logits is None:  # Its pages stayed for others, its logits did not.
            prompt.filled = len(prompt.ids) - 1
            return self.passes.fill(prompt, slots=len(self.slots), live=len(self.lines))
        spare = len(self.pages.free) - len(self.lines)
        if spare < 1:
            spare = int(self.shelf.free(len(self.lines) + 1, keep=prompt))
        count = min(asked.waiting, len(self.slots), spare)
        if count > 0:
            self._start(asked, prompt, count)
        return count > 0

    def _resume(self, line: Line) -> bool:
        """A piece of what was set aside; when all of it is there again, writing goes on."""
        if not self.passes.resume(line, len(self.lines)):
            return False
        if line.filled == len(line.completion.tokens) - 1:
            self.aside.popleft()
            where = self._enter([line])
            if line.pages:
                self.decoder.add_pages([(line.slot, i, page) for i, page in enumerate(line.pages)])
            self.decoder.go_on(where, self.decoder.upload(line.completion.tokens[-1:], torch.long), line.drawn)
        return True

    # Starts and steps --------------------------------------------------------------------------------------------

    def _start(self, asked: Asked, prompt: Any, count: int) -> None:
        """Draw the first token of ``count`` completions of a request."""
        begun = asked.request.n - asked.waiting
        lines = [
            Line(self.chooser.begin(asked, begun + i), prompt, asked.sampling.max_new_tokens) for i in range(count)
        ]
        asked.waiting -= count
        prompt.waiting -= count
        where = self._enter(lines)
        for line in lines:
            line.drawn = 1
        if self.on_host:
            completions = [line.completion for line in lines]
            tokens = self.chooser.draw(prompt.logits.repeat(count, 1), completions)
            self.decoder.go_on(where, tokens, 1)
            self._settle(lines)
        else:
            self.tickets.append((self.decoder.first(prompt.logits, where), lines))
            self._let_go(lines)
        if prompt.waiting == 0:
            prompt.logits = None

    def _enter(self, lines: list[Line]) -> Tensor:
        """Completions of one prompt take free slots."""
        prompt = lines[0].prompt
        for line in lines:
            line.slot = self.slots.pop()
        prompt.users += len(lines)
        self.lines = sorted([*self.lines, *lines], key=lambda line: id(line.prompt))  # Rows of a prompt side by side.
        self.moved = True
        slots, completions = [line.slot for line in lines], [line.completion for line in lines]
        samplings = [c.asked.sampling for c in completions]
        if self.on_host:
            samplings = [Sampling(1)] * len(lines)
        where = self.decoder.enter(slots, samplings, [c.uniform for c in completions], prompt)
        if self.decoder.settings.features.penalty:
            self.decoder.mark_seen(where, [prompt.ids + c.tokens for c in completions])
        return where

    def _step(self) -> None:
        """One token for every live completion, planned without knowing the last one."""
        self._grow()
        if not self.lines:
            return
        if self.moved:
            self.bucket = self.decoder.seat([line.slot for line in self.lines], list(self._tiles()))
            self.moved = False
        self.steps += 1
        rows, size = list(self.lines), self.pages.size
        prompt = max(len(line.prompt.pages) for line in rows)
        suffix = pages_of(max(line.drawn for line in rows), size)
        found = self.decoder.step(self.bucket, len(rows), prompt=prompt, suffix=suffix)
        for line in rows:
            line.drawn += 1
        if isinstance(found, Told):
            self.tickets.append((found, rows))
            self._let_go(rows)
            self._read(1)
        else:
            tokens = self.chooser.draw(found, [line.completion for line in rows])
            self.decoder.chosen(self.bucket, tokens)
            self._settle(rows)

    def _tiles(self) -> Iterator[list[int]]:
        """Rows that read the same prompt, in pieces that one tile holds."""
        most = self.decoder.tiles.shape[1]
        for _, group in itertools.groupby(enumerate(self.lines), key=lambda pair: id(pair[1].prompt)):
            rows = [row for row, _ in group]
            yield from (rows[i : i + most] for i in range(0, len(rows), most))

    def _let_go(self, lines: list[Line]) -> None:
        """Completions that are full need no further step, whatever their last token turns out to be."""
        for line in lines:
            if line.slot >= 0 and line.drawn >= line.limit:
                self._leave(line)

    def _leave(self, line: Line) -> None:
        """The completion gives up its slot and its pages."""
        self.lines.remove(line)
        self.slots.append(line.slot)
        line.slot = -1
        self.shelf.drop(line.pages)
        line.pages = []
        self.moved = True
        prompt = line.prompt
        prompt.users -= 1
        if prompt.users == 0 and prompt.waiting == 0:
            self.shelf.forget(prompt)

    # Ends --------------------------------------------------------------------------------------------------------

    def _read(self, lag: int) -> None:
        """Take in what was drawn, all but the last ``lag`` steps, which are still being computed."""
        while len(self.tickets) > lag:
            told, lines = self.tickets.popleft()
            numbers = told.read()
            if bool((numbers[:, 3] & (NAN | DEAD)).any()):
                self._refuse(numbers[:, 3].tolist(), lines)
            k = (numbers.shape[1] - 4) // 2
            tokens, flags, ids = numbers[:, 0].tolist(), numbers[:, 3].tolist(), numbers[:, 4 : 4 + k].tolist()
            raw, processed, *likely = numbers[:, [1, 2, *range(4 + k, 4 + 2 * k)]].view(torch.float32).t().tolist()
            for row, line in enumerate(lines):
                if line.over:
                    continue
                completion, sampling = line.completion, line.completion.asked.sampling
                completion.tokens.append(tokens[row])
                completion.logps.append(raw[row])
                if is_shaped(sampling):
                    completion.processed.append(processed[row])
                if sampling.top_logps:
                    pairs = list(zip(ids[row], (values[row] for values in likely), strict=True))
                    completion.top.append(pairs[: sampling.top_logps])
                self._end(line, bool(flags[row] & STOPPED))

    def _settle(self, lines: list[Line]) -> None:
        """The host drew: tokens are known already."""
        for line in lines:
            self._end(line, False)

    def _end(self, line: Line, stopped: bool) -> None:
        """Make the rollout of a completion whose last token ended it."""
        completion = line.completion
        sampling = completion.asked.sampling
        if not stopped and (sampling.stop_strings or self.on_host):
            stopped = self.chooser.stopped(completion)
        if not stopped and len(completion.tokens) < line.limit:
            return
        self.done[completion.number] = self._rollout(completion, "stop" if stopped else "length")
        line.over = True
        if line.slot >= 0:
            self._leave(line)

    def _refuse(self, flags: list[int], lines: list[Line]) -> None:
        read = [(flag, line) for flag, line in zip(flags, lines, strict=True) if not line.over]
        kind = NAN if any(flag & NAN for flag, _ in read) else DEAD
        rows = [row for row, (flag, _) in enumerate(read) if flag & kind]
        if not rows:
            return
        asked = sorted({read[row][1].completion.asked.index for row in rows})
        if kind == NAN:
            self.pages.erase()
            told, advice = f"the model gave NaN logits for rows {rows}.", "Check the weights for NaN."
        else:
            told, advice = f"no token is allowed in rows {rows}: bias and bans leave none.", "Loosen them."
        raise SickRequests(f"{told} Requests: {asked[:8]}. {advice}", asked)

    def _rollout(self, completion: Completion, reason: Any) -> Rollout:
        found = Rollout(list(completion.asked.request.prompt_ids), completion.tokens, completion.logps, reason)
        found.version = self.engine.version
        found.processed_logp = completion.processed or None
        found.top_logps = completion.top or None
        return found


def _asked(engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> list[Asked]:
    """The requests with their seeds; those with equal prompts share one."""
    seed = engine.new_seed() if sampling.seed is None else sampling.seed
    prompts: dict[tuple[int, ...], Any] = {}
    found: list[Asked] = []
    numbers = itertools.accumulate((r.n for r in requests), initial=0)
    for index, (request, number) in enumerate(zip(requests, numbers, strict=False)):
        ids = tuple(request.prompt_ids)
        prompt = prompts.setdefault(ids, Prompt(list(ids)))
        prompt.waiting += request.n
        own = request.sampling
        seeds = (seed, number, number) if own is None or own.seed is None else (own.seed, number, 0)
        found.append(Asked(index, request, prompt, own or sampling, request.n, *seeds))
    if engine.order == "longest":
        found.sort(key=lambda asked: -asked.sampling.max_new_tokens)
    return found
