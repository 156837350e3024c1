"""A decoding step run directly, or captured once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["BUCKETS", "CudaGraphs", "Direct", "Runner", "bucket_of", "identity", "uncompiled"]

# Batch sizes that steps are captured for: at most a third of a step's rows is padding, from 4 on.
BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
WARM_UPS = 2  # Kernels are compiled and workspaces allocated before a capture, which allows neither.


def bucket_of(rows: int) -> int:
    """The smallest captured batch size that holds this many rows.

    >>> bucket_of(5), bucket_of(64), bucket_of(1500)
    (6, 64, 1536)
    """
    last = BUCKETS[-1]
    return next((size for size in BUCKETS if size >= rows), -(-rows // (last // 2)) * (last // 2))


class Runner(Protocol):
    """Runs a step that reads and writes the same addresses every time."""

    def __call__(
        self, key: Hashable, step: Callable[[], None], parked: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Do what ``step`` does; steps of one key compute the same on the same addresses."""
        ...

    def forget(self) -> None:
        """Addresses or shapes changed: what was captured is wrong now."""
        ...


class Direct:
    """Calls the step."""

    def __call__(
        self, key: Hashable, step: Callable[[], None], parked: Callable[[], AbstractContextManager[None]]
    ) -> None:
        step()

    def forget(self) -> None:
        """Nothing is captured."""


class CudaGraphs:
    """Captures a step at its first use and replays it from then on.

    A replay runs the same kernels on the same addresses: weights that an optimiser changed in place are read as they are.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: dict[Hashable, Any] = {}
        self.pool: Any = None  # Graphs are replayed one after another, so they share memory.

    def __call__(
        self, key: Hashable, step: Callable[[], None], parked: Callable[[], AbstractContextManager[None]]
    ) -> None:
        if key not in self.graphs:
            with parked():
                self.graphs[key] = self._capture(step)
        self.graphs[key].replay()

    def _capture(self, step: Callable[[], None]) -> Any:
        current, aside = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                step()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            step()
        self.pool = graph.pool()
        return graph

    def forget(self) -> None:
        self.graphs, self.pool = {}, None


ADAPTER_SETTINGS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


def identity(model: nn.Module) -> Hashable:
    """What a captured step has baked in: addresses and shapes of all tensors, adapters' settings, autocast.

    Values of parameters are not part of it: an optimiser step in place leaves it as it is.
    """
    tensors = tuple((t.data_ptr(), tuple(t.shape), t.dtype, t.device) for t in (*model.parameters(), *model.buffers()))
    settings = []
    for module in model.modules():
        for name in ADAPTER_SETTINGS:
            value = getattr(module, name, None) if name in dir(type(module)) or name in vars(module) else None
            if value is not None:
                settings.append(repr(value))
    kind = next(model.parameters()).device.type
    known = torch.amp.is_autocast_available(kind)
    autocast = torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else None
    return tensors, tuple(settings), autocast


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Modules run as they are written: a compiled one would be traced anew for every batch size, inside a capture."""
    layers = [m for m in model.modules() if m._compiled_call_impl is not None]
    wrapped = [m for m in model.modules() if isinstance(m, torch._dynamo.OptimizedModule)]
    calls, forwards = [m._compiled_call_impl for m in layers], [m.forward for m in wrapped]
    for module in layers:
        module._compiled_call_impl = None
    for module in wrapped:
        module.forward = module._orig_mod.__call__  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, call in zip(layers, calls, strict=True):
            module._compiled_call_impl = call
        for module, forward in zip(wrapped, forwards, strict=True):
            module.forward = forward  # type: ignore[method-assign]
