"""The sequence-parallel group of this process. The extension ``sequence_parallel`` creates it and runs its forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from posttrain.models.forward import Pass


class TokenSplit(Protocol):
    """A sequence-parallel group: processes that compute their batches together. See
    `posttrain.extensions.sequence_parallel.split`.
    """

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        ...

    def forward(self, model: nn.Module, request: Pass, compare: Callable[..., dict[str, Any]] | None) -> dict[str, Any]:
        """Run a forward pass. Each process computes a part of the columns."""
        ...

    def help_with(self, model: nn.Module, owner: int) -> Tensor:
        """Compute this process's columns of a training pass that process ``owner`` owns. Call backward on the result."""
        ...

    def turns(self, last: bool) -> Iterator[tuple[int | None, bool]]:
        """See `turns`."""
        ...

    def attention(
        self, whole: Callable[..., tuple[Tensor, Any]], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ratio: int | None
    ) -> Tensor:  # fmt: skip
        """Compute attention for this process's columns."""
        ...

    def check_alone(self, model: nn.Module) -> None:
        """Raise an error if the model needs all processes of the group for a forward pass."""
        ...

    def refuse_predict(self) -> None:
        """Raise an error, because ``predict`` is not supported."""
        ...


# Sequence-parallel group of this process. All trainers in the process use it, like accelerate's state.
_active: TokenSplit | None = None


def active() -> TokenSplit | None:
    """Return the sequence-parallel group of this process. Return None if there is none."""
    return _active


def activate(split: TokenSplit | None) -> None:
    """Set the sequence-parallel group that computes `posttrain.models.forward.forward`. None: this process computes
    forward passes alone.
    """
    global _active
    _active = split


@contextmanager
def alone(model: nn.Module | None = None) -> Iterator[None]:
    """Disable sequence parallelism inside the context, so that every process computes its own batches alone.

    Raises:
        ModelError: The ``model`` is sharded, so that its forward pass needs all processes of the group.
    """
    before = _active
    if before is not None and model is not None:
        before.check_alone(model)
    activate(None)
    try:
        yield
    finally:
        activate(before)


def turns(last: bool) -> Iterator[tuple[int | None, bool]]:
    """Yield one item per process of the group. The batches of the processes are computed one after the other.

    Yields:
        Group rank of the process whose batch is computed (None: this process), and whether this is the last pass before
        the update.
    """
    return iter([(None, last)]) if _active is None else _active.turns(last)
