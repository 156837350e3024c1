"""Attention of a decoding step over a prompt's pages and a suffix's pages, in ways that are chosen by name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.rollouts.native.pages import Rule, StepView, masked_attention

__all__ = ["ATTENTIONS", "flex", "measured", "plain", "possible", "sdpa"]

logger = logging.getLogger(__name__)

Attention = Callable[[Tensor, Tensor, Tensor, StepView, Rule], Tensor]
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-6}  # Else 2e-2: a faster way must say what the plain one says.


def plain(query: Tensor, keys: Tensor, values: Tensor, view: StepView, rule: Rule) -> Tensor:
    """The definition: gather all columns of every row, products, softmax in float32.

    Args:
        query: ``(b, heads, size)``.
        keys: ``(KV heads, tokens, size)``, the layer's whole memory.
        values: The same of values.
        view: Of the step.
        rule: Of the layer.

    Returns:
        ``(b, heads, size)``.
    """
    columns, hidden = view.columns(rule.window)
    key, value = keys[:, columns].transpose(0, 1), values[:, columns].transpose(0, 1)
    return masked_attention(query[:, :, None], key, value, hidden[:, None], rule)[:, 0]


def sdpa(query: Tensor, keys: Tensor, values: Tensor, view: StepView, rule: Rule) -> Tensor:
    """Gather as `plain`, and one call of torch's own kernel; cannot squeeze scores."""
    columns, hidden = view.columns(rule.window)
    key, value = keys[:, columns].transpose(0, 1), values[:, columns].transpose(0, 1)
    mask = ~hidden[:, None, None]
    out = F.scaled_dot_product_attention(
        query[:, :, None], key, value, attn_mask=mask, scale=rule.scale, enable_gqa=True
    )
    return out[:, :, 0]


def flex(query: Tensor, keys: Tensor, values: Tensor, view: StepView, rule: Rule) -> Tensor:
    """FlexAttention over the whole memory, each row with a block mask of its own pages; nothing is gathered."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Any = _compiled(flex_attention) if query.device.type == "cuda" else flex_attention

    def squeezed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return rule.softcap * torch.tanh(score / rule.softcap)  # type: ignore[operator]

    mask = view.made.setdefault(("mask", rule.window), None) or _page_mask(view, rule.window, keys.shape[1])
    view.made["mask", rule.window] = mask
    out = kernel(
        query[:, :, None],
        keys[None],
        values[None],
        score_mod=None if rule.softcap is None else squeezed,
        block_mask=mask,
        scale=rule.scale,
        enable_gqa=query.shape[1] != keys.shape[0],
    )
    return out[:, :, 0]


COMPILATIONS = 128  # One for each batch size and kind of layer; torch gives up after 8 and would run it uncompiled.
_kernels: dict[Any, Any] = {}


def _compiled(function: Any) -> Any:
    if function not in _kernels:
        compiled = torch.compile(function, dynamic=False)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
                return compiled(*args, **kwargs)

        _kernels[function] = call
    return _kernels[function]


def _page_mask(view: StepView, window: int | None, tokens: int) -> Any:
    """Which pages each row reads, and which of their tokens, as FlexAttention wants it said."""
    from torch.nn.attention.flex_attention import BlockMask

    size, device = view.size, view.places.device
    both = torch.cat([view.prompt_pages, view.suffix_pages], 1)  # (b, P + Q)
    prompt, suffix = view.prompt.long()[:, None], view.suffix.long()[:, None]
    begin = torch.arange(both.shape[1], device=device)[None] * size
    own = begin - view.prompt_pages.shape[1] * size
    first = torch.where(own >= 0, prompt + own, begin)  # The position of each page's first token.
    filled = torch.where(own >= 0, (suffix - own).clamp(0, size), (prompt - begin).clamp(0, size))
    # By physical page: where it begins, and how much of it this row reads. Scratch entries come last and read nothing.
    at = torch.zeros(len(both), tokens // size, dtype=torch.long, device=device)
    fill = torch.zeros_like(at)
    used = filled > 0
    target = torch.where(used, both, 0)
    at.scatter_(1, target, torch.where(used, first, 0))
    fill.scatter_(1, target, torch.where(used, filled, 0))
    fill[:, 0] = torch.where((view.places < size), suffix[:, 0].clamp_max(size), 0)  # Parked rows read scratch.
    at[:, 0] = 0
    order = used.logical_not().to(torch.int8).argsort(dim=1, stable=True)
    indices = target.gather(1, order).to(torch.int32)[:, None, None]
    counts = used.sum(1).to(torch.int32)[:, None, None]
    now = (prompt + suffix - 1)[:, 0]

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        page, offset = k // size, k % size
        seen = offset < fill[b, page]
        return seen if window is None else seen & (now[b] - at[b, page] - offset < window)

    return BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=(1, size), mask_mod=rule, seq_lengths=(1, tokens), compute_q_blocks=False
    )


def triton(query: Tensor, keys: Tensor, values: Tensor, view: StepView, rule: Rule) -> Tensor:
    """Our kernel: each prompt is read once by all rows of a tile, each suffix once by its own row."""
    from posttrain.rollouts.native.paged_kernel import paged_attention

    return paged_attention(query, keys, values, view, rule)


ATTENTIONS: dict[str, Attention] = {"plain": plain, "sdpa": sdpa, "flex": flex, "triton": triton}
GATHERING = ("plain", "sdpa")  # Their cost follows the tables' widths, so tables are cut to what is in use.


def possible(device: torch.device, *, squeezes: bool, size: int, value_size: int) -> list[str]:
    """Ways that can serve a model, in the order in which ties are broken.

    Args:
        device: Where the weights are.
        squeezes: Some layer has a softcap.
        size: Of a head's keys.
        value_size: Of a head's values.
    """
    if device.type != "cuda":
        return ["plain"]
    found = ["plain"] if squeezes else ["sdpa", "plain"]
    if size == value_size and size & (size - 1) == 0:
        found = ["flex", *found]
    if size == value_size and size <= 256 and _has_triton():
        found = ["triton", *found]
    return found


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def measured(
    names: Sequence[str],
    run: Callable[[str], Tensor],
    *,
    clock: Callable[[Callable[[], Any]], float],
) -> str:
    """The fastest way that agrees with the plain one; tells all times.

    Args:
        names: Ways to try; one alone is not measured.
        run: Computes the same attention by the named way.
        clock: Seconds of a call.

    Returns:
        A name; ``plain`` where no other one runs and agrees.
    """
    if len(names) == 1:
        return names[0]
    truth = run("plain").float()
    times: dict[str, float] = {}
    for name in names:
        try:
            out = run(name)
            gap = float((out.float() - truth).abs().max())
            if gap > CLOSE.get(out.dtype, 2e-2):
                logger.warning("Attention %r differs from the plain one by %.2g here and is not used.", name, gap)
                continue
            times[name] = clock(lambda name=name: run(name))
        except Exception as error:  # A kernel that does not compile here is a slower way, not an end.
            logger.warning("Attention %r does not run here and is not used: %s: %s", name, type(error).__name__, error)
    best = min(times, key=times.__getitem__, default="plain")
    told = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in times.items())
    logger.info("Decoding attention: %s. A step of one layer of each kind: %s.", best, told)
    return best


def stopwatch(device: torch.device, repeats: int = 20) -> Callable[[Callable[[], Any]], float]:
    """Seconds of one of ``repeats`` calls on the device, after three that are not counted."""

    def clock(function: Callable[[], Any]) -> float:
        for _ in range(3):
            function()
        _wait(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            function()
        _wait(device)
        return (time.perf_counter() - begin) / repeats

    return clock


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
