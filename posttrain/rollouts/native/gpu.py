"""The decoding step of the graph path: fixed buffers, one function over them, and one small copy to the host."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, RolloutError, check_choice
from posttrain.rollouts.native.device_sampling import Features, Settings, choose
from posttrain.rollouts.native.graphs import CudaGraphs, Direct, Runner, bucket_of, identity
from posttrain.rollouts.native.paged_attention import ATTENTIONS, GATHERING, measured, possible, stopwatch
from posttrain.rollouts.native.pages import PAGE, PagedStore, Pages, StepView

if TYPE_CHECKING:
    from posttrain.rollouts.native.engine import NativeEngine

__all__ = ["WAYS", "Decoder", "Need", "Told", "decoder_of"]

logger = logging.getLogger(__name__)

SIZES = ("pages", "prompt", "suffix", "draws")
TILE_QUERIES = 64  # Query heads that read a prompt together: a tile of a tensor-core product.


WAYS = ("auto", "graph", "eager")


def decoder_of(engine: NativeEngine, decode: str) -> Decoder | None:
    """What keeps the graph path's buffers, or None for the path that calls the model.

    Args:
        engine: Whose model it is.
        decode: One of `WAYS`.
    """
    check_choice("decode", decode, WAYS)
    on_gpu = next(engine.model.parameters()).device.type == "cuda"
    if decode == "eager" or (decode == "auto" and not on_gpu):
        return None
    if getattr(engine.inner.config.get_text_config(), "is_heterogeneous", False):
        # Pages and kernels are for layers of one shape.
        if decode == "graph":
            raise ConfigError(
                f"decode='graph': layers of {type(engine.inner).__name__} differ in the size of their heads, and its pages "
                "are of one size. Fix: decode='auto', which decodes uncaptured here."
            )
        logger.info("decode='auto': uncaptured, because layers of %s differ in shape.", type(engine.inner).__name__)
        return None
    return Decoder(engine, strict=decode == "graph")


@dataclass(frozen=True, slots=True)
class Need:
    """Sizes of a call; buffers grow to them and never shrink, so that addresses stay.

    Attributes:
        pages: Of the memory, the scratch page included.
        prompt: The longest prompt's pages.
        suffix: The longest suffix's pages.
        draws: Most tokens of a completion.
        features: What its settings need.
        on_host: The host draws, from logits.
    """

    pages: int
    prompt: int
    suffix: int
    draws: int
    features: Features
    on_host: bool


@dataclass(slots=True)
class Told:
    """What rows drew, on its way to the host."""

    numbers: Tensor
    event: Any = None

    def read(self) -> Tensor:
        """``(n, width)`` int32, as soon as it is there."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers


@dataclass(frozen=True, slots=True)
class Kind:
    """Buffers of calls with the same features, so that training and evaluation do not undo each other's captures.

    Attributes:
        settings: Of the slots.
        told: ``(rows, width)`` int32 what each row drew.
        logits: ``(rows, V)`` float32 where the host draws, else without rows.
    """

    settings: Settings
    told: Tensor
    logits: Tensor

    @classmethod
    def of(cls, need: Need, slots: int, rows: int, vocabulary: int, device: torch.device) -> Kind:
        told = torch.zeros(rows, need.features.width, dtype=torch.int32, device=device)
        logits = torch.zeros(rows if need.on_host else 0, vocabulary, device=device)
        return cls(Settings(slots, vocabulary, need.features, device), told, logits)


def _rounded(count: int) -> int:
    """A power of two: calls of about the same size use the same buffers."""
    return 1 << max(0, count - 1).bit_length()


class Decoder:
    """Keeps the memory, what each slot is doing, and the captured steps, from call to call.

    Args:
        engine: Whose model and head are used.
        runner: How steps are run; None is captured on a CUDA device and direct elsewhere.
        strict: A step that cannot be captured is an error, not a warning.
        attention: One of `ATTENTIONS`; None measures those that can serve the model, at their first use.
        page: Tokens of a page.
    """

    def __init__(
        self,
        engine: NativeEngine,
        *,
        runner: Runner | None = None,
        strict: bool = False,
        attention: str | None = None,
        page: int = PAGE,
    ) -> None:
        self.engine, self.strict, self.attention = engine, strict, attention
        self.device = next(engine.model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.runner: Runner = runner or (CudaGraphs(self.device) if self.on_gpu else Direct())
        self.slots, self.size = engine.max_slots, page
        self.need: Need | None = None
        self.known: Any = None
        self.most_tokens = 0  # That memory is taken for, where no budget is given.
        self.kinds: dict[tuple[Features, bool], Kind] = {}
        self.store = PagedStore(Pages(1, page))

    # Buffers -----------------------------------------------------------------------------------------------------

    def prepare(self, need: Need) -> None:
        """Make room for a call; forget captured steps where an address, a shape or what they compute changed."""
        old = self.need
        if old is not None:
            need = replace(need, **{name: max(getattr(old, name), getattr(need, name)) for name in SIZES})
        found = (identity(self.engine.model), *(getattr(need, name) for name in SIZES))
        if found != self.known:
            self.runner.forget()
            self._allocate(need, old)
        self.known, self.need = found, need
        self.store.pages.reset()
        self.kind = (need.features, need.on_host)
        if self.kind not in self.kinds:
            self.kinds[self.kind] = Kind.of(need, self.slots, len(self.rows), self.vocabulary, self.device)
        self.settings = self.kinds[self.kind].settings

    def release(self) -> None:
        """Free the memory and the captured steps; the next call makes them again."""
        self.runner.forget()
        self.need, self.known, self.most_tokens = None, None, 0
        self.kinds, self.store = {}, PagedStore(Pages(1, self.size))

    def _allocate(self, need: Need, old: Need | None) -> None:
        device, n = self.device, self.slots + 1
        if old is None or need.pages > old.pages:
            self.store = PagedStore(Pages(need.pages, self.size))
        rows = bucket_of(self.slots)
        self.vocabulary = self.engine.inner.get_output_embeddings().weight.shape[0]
        self.rows = torch.full((rows,), self.slots, dtype=torch.long, device=device)
        self.tiles = torch.full((rows, self._tile()), -1, dtype=torch.int32, device=device)
        self.token, self.prompt = (torch.zeros(n, dtype=torch.long, device=device) for _ in range(2))
        self.drawn = torch.ones(n, dtype=torch.long, device=device)
        self.prompt_pages = torch.zeros(n, _rounded(need.prompt), dtype=torch.long, device=device)
        self.suffix_pages = torch.zeros(n, _rounded(need.suffix), dtype=torch.long, device=device)
        self.uniform = torch.zeros(n, _rounded(need.draws), dtype=torch.float64, device=device)
        self.kinds = {}

    def _tile(self) -> int:
        config = self.engine.inner.config.get_text_config()
        kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return max(1, TILE_QUERIES // (config.num_attention_heads // kv))

    # What the host tells -----------------------------------------------------------------------------------------

    def upload(self, data: Any, dtype: torch.dtype) -> Tensor:
        """A tensor on the device, from memory that the copy may read while the host goes on."""
        return torch.tensor(data, dtype=dtype, pin_memory=self.on_gpu).to(self.device, non_blocking=True)

    def seat(self, rows: Sequence[int], tiles: Sequence[Sequence[int]]) -> int:
        """Slots by row, and rows that share a prompt; returns the batch size of the step."""
        bucket = bucket_of(len(rows))
        width = self.tiles.shape[1]
        padded = [*rows, *[self.slots] * (bucket - len(rows))]
        grid = [[*tile, *[-1] * (width - len(tile))] for tile in tiles] + [[-1] * width] * (bucket - len(tiles))
        both = self.upload([[a, *b] for a, b in zip(padded, grid, strict=True)], torch.long)
        self.rows[:bucket].copy_(both[:, 0])
        self.tiles[:bucket].copy_(both[:, 1:])
        return bucket

    def enter(
        self, slots: Sequence[int], samplings: Sequence[Any], uniforms: Sequence[Sequence[float]], prompt: Any
    ) -> Tensor:
        """Completions of one prompt take these slots; returns the slots on the device.

        Args:
            slots: Free ones.
            samplings: Of each.
            uniforms: Numbers that decide the draws of each.
            prompt: With its ``ids`` (all tokens) and its ``pages``.
        """
        where = self.upload(slots, torch.long)
        numbers, ids = self.settings.rows(samplings)
        self.settings.put(where, self.upload(numbers, torch.float64), self.upload(ids, torch.long))
        most = max(map(len, uniforms))
        padded = [[*row, *[0.0] * (most - len(row))] for row in uniforms]
        self.uniform[:, :most].index_copy_(0, where, self.upload(padded, torch.float64))
        pages = self.upload(prompt.pages, torch.long).expand(len(slots), -1)
        self.prompt_pages[:, : len(prompt.pages)].index_copy_(0, where, pages)
        self.prompt.index_fill_(0, where, len(prompt.ids))
        return where

    def mark_seen(self, where: Tensor, lines: Sequence[Sequence[int]]) -> None:
        """Tokens that a repetition penalty knows of, for each of these slots."""
        self.settings.seen.index_fill_(0, where, False)
        pairs = [(i, token) for i, line in enumerate(lines) for token in set(line)]
        at = self.upload(list(zip(*pairs, strict=True)), torch.long)
        self.settings.seen.index_put_((where[at[0]], at[1]), self.upload([True], torch.bool))

    def add_pages(self, added: Sequence[tuple[int, int, int]]) -> None:
        """Suffix pages, each (slot, number in the suffix, page)."""
        at = self.upload(added, torch.long)
        self.suffix_pages.index_put_((at[:, 0], at[:, 1]), at[:, 2])

    def go_on(self, where: Tensor, tokens: Tensor, drawn: int) -> None:
        """These slots read ``tokens`` next, the last of ``drawn`` ones."""
        self.token.index_copy_(0, where, tokens)
        self.drawn.index_fill_(0, where, drawn)

    # What the device does ----------------------------------------------------------------------------------------

    def first(self, logits: Tensor, where: Tensor) -> Told:
        """Draw the first token of completions in these slots from their prompt's ``(V,)`` logits."""
        n = len(where)
        drawn = torch.zeros(n, dtype=torch.long, device=self.device)
        uniform = self.uniform.index_select(0, where)[:, 0]
        token, told = choose(logits.expand(n, -1).clone(), self.settings, where, drawn, uniform)
        self.go_on(where, token, 1)
        return self._copy(told)

    def step(self, bucket: int, rows: int, *, prompt: int, suffix: int) -> Told | Tensor:
        """One token for ``rows`` rows; ``prompt`` and ``suffix`` are the pages of the longest ones.

        Returns:
            What they drew, on its way; or their logits ``(rows, V)`` where the host draws.
        """
        assert self.need is not None
        if self.attention is None:
            self.attention = self._fastest(bucket)
        widths = (self.prompt_pages.shape[1], self.suffix_pages.shape[1])
        if self.attention in GATHERING:
            widths = (min(widths[0], _rounded(prompt)), min(widths[1], _rounded(suffix)))
        key = (bucket, widths, self.attention, self.kind, self.store.pages.allocations)
        kind = self.kinds[self.kind]
        try:
            self.runner(key, lambda: self._step(bucket, widths), self._parked)
        except RuntimeError as error:
            self._cannot_capture(error)
            self._step(bucket, widths)
        return kind.logits[:rows] if self.need.on_host else self._copy(kind.told[:rows])

    def _cannot_capture(self, error: RuntimeError) -> None:
        if isinstance(self.runner, Direct) or isinstance(error, torch.OutOfMemoryError):
            raise error
        told = f"the decoding step of {type(self.engine.inner).__name__} cannot be captured as a CUDA graph: {error}"
        if self.strict:
            raise RolloutError(f"{told}. Use NativeEngine(decode='auto'), which then runs it uncaptured.") from error
        logger.warning("%s. It runs uncaptured: right, and slower.", told)
        self.runner = Direct()

    def _step(self, bucket: int, widths: tuple[int, int]) -> None:
        rows = self.rows[:bucket]
        token, drawn = self.token.index_select(0, rows), self.drawn.index_select(0, rows)
        view = self._view(bucket, widths, self.prompt.index_select(0, rows), drawn)
        positions = view.prompt.long() + drawn - 1
        self.store.view = view
        hidden = self.engine.trunk(
            input_ids=token[:, None], position_ids=positions[:, None], use_cache=False
        ).last_hidden_state[:, 0]
        logits = self.engine.logits(hidden)
        kind = self.kinds[self.kind]
        if self.kind[1]:
            kind.logits[:bucket].copy_(logits)
            return
        width = self.uniform.shape[1]
        uniform = torch.take(self.uniform, rows * width + drawn.clamp_max(width - 1))
        token, told = choose(logits, self.settings, rows, drawn, uniform)
        self.token.index_copy_(0, rows, token)
        kind.told[:bucket].copy_(told)
        self._count(rows, drawn)

    def _count(self, rows: Tensor, drawn: Tensor) -> None:
        self.drawn.index_copy_(0, rows, drawn + 1)
        self.drawn[self.slots :].fill_(1)  # Rows that nobody reads write the scratch page's first place for ever.

    def chosen(self, bucket: int, tokens: Tensor) -> None:
        """The host drew ``tokens`` for the first rows of the last step."""
        rows = self.rows[:bucket]
        self.token.index_copy_(0, rows[: len(tokens)], tokens)
        self._count(rows, self.drawn.index_select(0, rows))

    def _view(self, bucket: int, widths: tuple[int, int], prompt: Tensor, drawn: Tensor) -> StepView:
        rows = self.rows[:bucket]
        prompt_pages = self.prompt_pages[:, : widths[0]].index_select(0, rows)
        suffix_pages = self.suffix_pages[:, : widths[1]].index_select(0, rows)
        index = drawn - 1
        page = suffix_pages.gather(1, (index // self.size)[:, None]).squeeze(1)
        places = page * self.size + index % self.size
        assert self.attention is not None
        return StepView(
            places, prompt_pages, prompt.to(torch.int32), suffix_pages, drawn.to(torch.int32), self.tiles[:bucket],
            self.size, ATTENTIONS[self.attention],
        )  # fmt: skip

    @contextmanager
    def _parked(self) -> Iterator[None]:
        """All rows stand on the scratch slot: what runs now changes nothing that anybody reads."""
        rows, tiles = self.rows.clone(), self.tiles.clone()
        self.rows.fill_(self.slots)
        self.tiles.fill_(-1)
        try:
            yield
        finally:
            self.rows.copy_(rows)
            self.tiles.copy_(tiles)

    def _copy(self, told: Tensor) -> Told:
        """Start a copy to the host; it is read while the next step runs."""
        if not self.on_gpu:
            return Told(told.clone())
        host = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
        host.copy_(told, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return Told(host, event)

    # Choice of the product ---------------------------------------------------------------------------------------

    def _fastest(self, bucket: int) -> str:
        """The way of attention that is fastest for this model here, by measurement."""
        keys, values = self.store.pages.keys, self.store.pages.values
        layer = next(iter(keys))
        squeezes = any(rule.softcap is not None for rule in self.store.rules.values())
        names = possible(self.device, squeezes=squeezes, size=keys[layer].shape[2], value_size=values[layer].shape[2])
        if len(names) == 1:
            return names[0]
        return self.measure_attention(names, bucket)

    def measure_attention(self, names: Sequence[str], bucket: int) -> str:
        """Time these ways on one layer of each kind with full tables of pages, in groups of a tile; see `measured`."""
        pages, device = self.store.pages, self.device
        layer = next(iter(pages.keys))
        key, value = pages.keys[layer], pages.values[layer]
        rules = dict.fromkeys(self.store.rules.values())  # Sliding and full layers are each looked at.
        assert self.need is not None
        tile = self.tiles.shape[1]
        order = torch.arange(bucket, device=device)
        prompts, own = self.need.prompt, max(1, self.need.suffix // 2)
        usable = max(1, pages.count - 1)

        def numbered(first: Tensor, count: int) -> Tensor:
            return 1 + (first[:, None] * count + torch.arange(count, device=device)) % usable

        tiles = torch.full((bucket, tile), -1, dtype=torch.int32, device=device)
        for i in range(math.ceil(bucket / tile)):
            tiles[i, : min(tile, bucket - i * tile)] = order[i * tile : (i + 1) * tile].to(torch.int32)
        # Distinct memory for each row where there is enough of it: pages that repeat would sit in the cache.
        suffix_pages = numbered(order + math.ceil(bucket / tile) * prompts, own)
        full = {"dtype": torch.int32, "device": device}
        view = StepView(
            suffix_pages[:, -1] * self.size, numbered(order // tile, prompts),
            torch.full((bucket,), prompts * self.size, **full), suffix_pages,
            torch.full((bucket,), own * self.size - 1, **full), tiles, self.size, ATTENTIONS["plain"],
        )  # fmt: skip
        query = torch.randn(bucket, self.store.heads, key.shape[2], device=device).to(key.dtype)

        def run(name: str) -> Tensor:
            return torch.cat([ATTENTIONS[name](query, key, value, replace(view, made={}), rule) for rule in rules])

        return measured(names, run, clock=stopwatch(device))
