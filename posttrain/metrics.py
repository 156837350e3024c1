"""Metrics that are reduced over micro-batches and ranks once per logging step.

A metric consists of the name of a reduction and numbers on the device. The host does not synchronize with the device before
`MetricBuffer.compute`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Metric", "MetricBuffer", "maximum", "mean", "minimum", "total"]

Number = "float | Tensor"


@dataclass(slots=True, frozen=True)
class Metric:
    """Logged value with its reduction. For the reduction ``mean``, ``value`` is a weighted sum and ``weight`` the sum of
    weights. Other reductions ignore ``weight``.
    """

    reduction: Literal["mean", "sum", "min", "max"]
    value: float | Tensor
    weight: float | Tensor = 1.0


def mean(values: float | Tensor, mask: Tensor | None = None, weight: float | Tensor | None = None) -> Metric:
    """Return a metric for the mean over the elements at which ``mask`` is True. Without a mask, the mean is over all
    elements. When metrics are merged, means are weighted by their numbers of elements.

    Args:
        values: A number, or a tensor of any shape.
        mask: Mask of the elements to include, in the shape of ``values``.
        weight: Number of items, if ``values`` is already the mean over these items.
    """
    if isinstance(values, int | float):
        count = 1.0 if weight is None else weight
        return Metric("mean", values * count, count)
    values = values.detach().float()
    if weight is not None:
        return Metric("mean", (values * weight).sum(), weight)
    if mask is None:
        return Metric("mean", values.sum(), values.numel())
    selected = mask.bool()
    return Metric("mean", values.masked_fill(~selected, 0.0).sum(), selected.sum())


def total(value: float | Tensor) -> Metric:
    """Return a metric that is summed over micro-batches and ranks."""
    return Metric("sum", value if isinstance(value, int | float) else value.detach().float().sum())


def minimum(values: float | Tensor, mask: Tensor | None = None) -> Metric:
    """Return a metric for the smallest value in the log window among elements at which ``mask`` is True. An empty tensor is
    ignored.
    """
    return _extreme("min", values, mask, math.inf)


def maximum(values: float | Tensor, mask: Tensor | None = None) -> Metric:
    """Return a metric for the largest value in the log window among elements at which ``mask`` is True. An empty tensor is
    ignored.
    """
    return _extreme("max", values, mask, -math.inf)


def _extreme(reduction: Literal["min", "max"], values: float | Tensor, mask: Tensor | None, none: float) -> Metric:
    if isinstance(values, int | float) or not values.numel():
        return Metric(reduction, values if isinstance(values, int | float) else none)
    values = values.detach().float() if mask is None else values.detach().float().masked_fill(~mask.bool(), none)
    return Metric(reduction, values.min() if reduction == "min" else values.max())


class MetricBuffer(MutableMapping[str, "Series"]):
    """Buffer that collects metrics between two logging steps and reduces them over micro-batches and ranks.

    The buffer supports the operations of TRL's dict of lists: ``buffer[name].append(value)``, ``buffer[name][-1]``,
    ``sum(buffer[name])``, ``.items()``.

    >>> buffer = MetricBuffer()
    >>> buffer.add({"entropy": mean(2.0, weight=3), "tokens": total(3)})
    >>> buffer.add({"entropy": mean(1.0, weight=1), "tokens": total(1)})
    >>> buffer.compute()
    {'entropy': 1.75, 'tokens': 4.0}
    """

    def __init__(self) -> None:
        self._items: dict[str, Metric] = {}
        # Values that were appended under names for which no metric was added. Appended values are stored individually, so
        # that callers can read them.
        self._appended: dict[str, list[float]] = {}

    def __getitem__(self, name: str) -> Series:
        """Return the series of ``name``. Values that are appended with ``buffer[name].append(value)`` are averaged."""
        return Series(self, name)

    def __setitem__(self, name: str, values: Iterable[Any]) -> None:
        if isinstance(values, Series) and values.buffer is self and values.name == name:
            # The statement ``buffer[name] += [value]`` has already extended the series.
            return
        floats = [float(value) for value in values]
        self.pop(name, None)
        self[name].extend(floats)

    def __delitem__(self, name: str) -> None:
        del self._items[name]
        self._appended.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def get(self, name: str, default: Any = None) -> Any:
        """Return the series of ``name``, or ``default`` if the buffer has no metric of this name."""
        return self[name] if name in self._items else default

    def pop(self, name: str, *default: Any) -> Any:
        """Remove ``name`` and return its values, or ``default`` if the buffer has no metric of this name.

        Raises:
            KeyError: The buffer has no metric of this name, and no default was passed.
        """
        if name not in self and default:
            return default[0]
        values = list(self[name])
        del self[name]
        return values

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Merge metrics into the buffer. If the buffer already has a metric of the same name, the reduction of that metric is
        used.
        """
        for name, metric in metrics.items():
            existing = self._items.get(name)
            self._items[name] = metric if existing is None else _merge(existing, metric)
            self._appended.pop(name, None)

    def snapshot(self) -> tuple[dict[str, Metric], dict[str, list[float]]]:
        """Return a copy of the buffer's state, which `restore` accepts."""
        return dict(self._items), dict(self._appended)

    def restore(self, snapshot: tuple[dict[str, Metric], dict[str, list[float]]]) -> None:
        """Restore a state that `snapshot` returned, and discard later metrics."""
        self._items, self._appended = dict(snapshot[0]), dict(snapshot[1])

    def compute(
        self, all_gather: Callable[[list[tuple[str, str, float, float]]], list] | None = None
    ) -> dict[str, float]:
        """Reduce all metrics to plain numbers, and empty the buffer.

        Args:
            all_gather: Function that concatenates the lists ``[(name, reduction, value, weight)]`` of all ranks. The function
                is called once, and ranks may have metrics of different names. None: a single process.
        """
        numbers = iter(_on_host([number for m in self._items.values() for number in (m.value, m.weight)]))
        rows = [(name, m.reduction, next(numbers), next(numbers)) for name, m in self._items.items()]
        self.clear()
        if all_gather is not None:
            rows = all_gather(rows)
        merged: dict[str, Metric] = {}
        for name, reduction, value, weight in rows:
            metric = Metric(reduction, value, weight)  # type: ignore[arg-type]
            merged[name] = metric if name not in merged else _merge(merged[name], metric)
        return {name: _finish(metric) for name, metric in merged.items() if _is_defined(metric)}


class Series(Sequence[float]):
    """List-like view of one metric. Appended values are averaged with the metric's other values between two logging steps.

    The view contains the appended values. If metrics were added under the same name, it contains only one value, the current
    result of the reduction.
    """

    def __init__(self, buffer: MetricBuffer, name: str) -> None:
        self.buffer, self.name = buffer, name

    def append(self, value: Any) -> None:
        """Append one value."""
        number, name = float(value), self.name
        values = [] if name not in self.buffer else self.buffer._appended.get(name)
        self.buffer.add({name: mean(number)})
        if values is not None:
            self.buffer._appended[name] = [*values, number]

    def extend(self, values: Iterable[Any]) -> None:
        """Append several values."""
        for value in values:
            self.append(value)

    def clear(self) -> None:
        """Remove all values of the metric."""
        self.buffer.pop(self.name, None)

    def __iadd__(self, values: Iterable[Any]) -> Series:
        self.extend(values)
        return self

    def _values(self) -> list[float]:
        metric = self.buffer._items.get(self.name)
        if metric is None or not _is_defined(metric):
            return []
        return self.buffer._appended.get(self.name) or [_finish(metric)]

    def __getitem__(self, index: Any) -> Any:
        return self._values()[index]

    def __len__(self) -> int:
        return len(self._values())

    def __eq__(self, other: object) -> bool:
        return self._values() == list(other) if isinstance(other, Series | list) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._values())


def _merge(a: Metric, b: Metric) -> Metric:
    if a.reduction in ("mean", "sum"):
        return Metric(a.reduction, a.value + b.value, a.weight + b.weight)
    # Put tensors before numbers.
    first, second = sorted((a.value, b.value), key=lambda value: isinstance(value, int | float))
    if isinstance(first, int | float):
        return Metric(a.reduction, min(first, second) if a.reduction == "min" else max(first, second))
    return Metric(a.reduction, first.clamp_max(second) if a.reduction == "min" else first.clamp_min(second))


def _on_host(numbers: list[float | Tensor]) -> list[float]:
    """Convert numbers to floats. All device tensors are copied together, because each copy synchronizes with the device."""
    far = {i: n for i, n in enumerate(numbers) if not isinstance(n, int | float) and not n.is_cpu}
    if far:
        import torch

        copied = torch.stack([number.detach().float().reshape(()) for number in far.values()]).tolist()
        numbers = [copied.pop(0) if i in far else number for i, number in enumerate(numbers)]
    return [float(number) for number in numbers]


def _is_defined(metric: Metric) -> bool:
    return float(metric.weight) > 0 if metric.reduction == "mean" else math.isfinite(float(metric.value))


def _finish(metric: Metric) -> float:
    return float(metric.value) / float(metric.weight) if metric.reduction == "mean" else float(metric.value)
