"""A Triton kernel for a decoding step's attention: prompts read once a tile of rows, suffixes once a row, then combined."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.rollouts.native.pages import Rule, StepView

__all__ = ["paged_attention"]

PROGRAMS = 264  # Two for each of the 132 processors of an H200: fewer leave some idle, so long reads are split.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _product(a, b, EXACT: tl.constexpr):
    """In the operands' precision on tensor cores, or in float32 without rounding to fewer bits."""
    if EXACT:  # noqa: SIM108
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b)
    return c


@triton.jit
def _read(keys, values, pages, n, inside, d, SIZE: tl.constexpr, PAGE: tl.constexpr):
    """Keys ``(D, N)`` and values ``(N, D)`` at positions ``n`` of a prompt or suffix whose first page ``pages`` points to."""
    page = tl.load(pages + n // PAGE, mask=inside, other=0).to(tl.int64)
    place = page * PAGE + n % PAGE
    within = d < SIZE
    k = tl.load(keys + place[None, :] * SIZE + d[:, None], mask=inside[None, :] & within[:, None], other=0.0)
    v = tl.load(values + place[:, None] * SIZE + d[None, :], mask=inside[:, None] & within[None, :], other=0.0)
    return k, v


@triton.jit
def _part(  # noqa: PLR0917
    query, keys, values, out, most, total, tiles, pages, lengths, origins, now,
    scale, softcap, window, heads, width, tokens, parts, first_part, span_parts,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of rows, one key-value head and one stretch of keys: unnormalised sums, their maximum and their weight."""
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(tiles + tile * ROWS)
    if first >= 0:
        length = tl.load(lengths + first)
        origin = tl.load(origins + first)
        span = tl.cdiv(tl.cdiv(length, span_parts), N) * N
        begin = part * span
        end = tl.minimum(begin + span, length)
        m = tl.arange(0, M)
        d = tl.arange(0, D)
        row = tl.load(tiles + tile * ROWS + m // GROUP, mask=m // GROUP < ROWS, other=-1)
        real = row >= 0
        row = tl.where(real, row, 0).to(tl.int64)
        line = row * heads + head * GROUP + m % GROUP
        q = tl.load(query + line[:, None] * SIZE + d[None, :], mask=real[:, None] & (d < SIZE)[None, :], other=0.0)
        at = tl.load(now + row)
        best = tl.full([M], float("-inf"), tl.float32)
        weight = tl.zeros([M], tl.float32)
        summed = tl.zeros([M, D], tl.float32)
        base = head.to(tl.int64) * tokens * SIZE
        for start in range(begin, end, N):
            n = start + tl.arange(0, N)
            inside = n < end
            k, v = _read(keys + base, values + base, pages + first.to(tl.int64) * width, n, inside, d, SIZE, PAGE)
            s = _product(q, k, EXACT) * scale
            if CAPPED:
                s = softcap * (2.0 / (1.0 + tl.exp(-2.0 * s / softcap)) - 1.0)
            seen = inside[None, :] & real[:, None]
            if WINDOWED:
                seen = seen & (at[:, None] - (origin + n)[None, :] < window)
            s = tl.where(seen, s, float("-inf"))
            higher = tl.maximum(best, tl.max(s, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            keep = tl.exp(best - level)
            p = tl.exp(s - level[:, None])
            weight = weight * keep + tl.sum(p, 1)
            summed = summed * keep[:, None] + _product(p.to(v.dtype), v, EXACT)
            best = higher
        slot = line * parts + first_part + part
        tl.store(out + slot[:, None] * SIZE + d[None, :], summed, mask=real[:, None] & (d < SIZE)[None, :])
        tl.store(most + slot, best, mask=real)
        tl.store(total + slot, weight, mask=real)


@triton.jit
def _combine(
    parts_out, most, total, out, parts, SIZE: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """One row and head: the parts, each weighed by how far its maximum lies below the highest."""
    line = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    d = tl.arange(0, D)
    best = tl.load(most + line * parts + p, mask=p < parts, other=float("-inf"))
    weight = tl.load(total + line * parts + p, mask=p < parts, other=0.0)
    share = tl.exp(best - tl.max(best, 0))
    place = (line * parts + p)[:, None] * SIZE + d[None, :]
    summed = tl.load(parts_out + place, mask=(p < parts)[:, None] & (d < SIZE)[None, :], other=0.0)
    whole = tl.sum(summed * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(out + line * SIZE + d, whole.to(out.dtype.element_ty), mask=d < SIZE)


def splits(programs: int, most: int) -> int:
    """Stretches into which reads are cut so that all processors have work: a power of two, at most ``most``.

    >>> splits(66, 16), splits(1000, 16)
    (4, 1)
    """
    found = 1
    while found < most and found * programs < PROGRAMS:
        found *= 2
    return found


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, view: StepView, rule: Rule) -> Tensor:
    r"""The same as `posttrain.rollouts.native.paged_attention.plain`.

    Prompt and suffix leave partial softmax sums :math:`(m_i, l_i, o_i)`, combined as

    .. math:: o = \sum_i e^{m_i - m} o_i / \sum_i e^{m_i - m} l_i, \quad m = \max_i m_i

    Reference: FlashAttention, arXiv:2205.14135, section 3.1; sharing a prefix, arXiv:2402.05099, section 3.
    """
    b, heads, size = query.shape
    kv = keys.shape[0]
    query = query.contiguous()
    rows = view.tiles.shape[1]
    prompt_parts = splits(kv * -(-b // rows), 16)
    suffix_parts = splits(kv * b, 8)
    parts = prompt_parts + suffix_parts
    out = query.new_zeros(b, heads, parts, size, dtype=torch.float32)
    most, total = out.new_full((b, heads, parts), -torch.inf), out.new_zeros(b, heads, parts)
    now = view.prompt + view.suffix - 1
    alone = torch.arange(b, dtype=torch.int32, device=query.device)[:, None]
    common: dict[str, Any] = {
        "scale": rule.scale, "softcap": rule.softcap or 0.0, "window": rule.window or 0, "heads": heads,
        "tokens": keys.shape[1], "parts": parts, "GROUP": heads // kv, "SIZE": size, "PAGE": view.size,
        "N": min(64, max(16, view.size)), "D": max(16, triton.next_power_of_2(size)), "CAPPED": rule.softcap is not None,
        "WINDOWED": rule.window is not None, "EXACT": INTERPRETED or query.dtype == torch.float32,
    }  # fmt: skip
    reads = (
        (view.tiles, view.prompt_pages, view.prompt, torch.zeros_like(view.prompt), 0, prompt_parts),
        (alone, view.suffix_pages, view.suffix, view.prompt, prompt_parts, suffix_parts),
    )
    for tiles, pages, lengths, origins, first, count in reads:
        members = tiles.shape[1]
        _part[(len(tiles), kv, count)](
            query, keys, values, out, most, total, tiles, pages, lengths, origins, now,
            width=pages.shape[1], first_part=first, span_parts=count,
            ROWS=members, M=max(16, triton.next_power_of_2(members * (heads // kv))), **common,
        )  # fmt: skip
    result = torch.empty_like(query)
    _combine[(b * heads,)](
        out, most, total, result, parts, SIZE=size, D=common["D"], PARTS=triton.next_power_of_2(parts)
    )
    return result
