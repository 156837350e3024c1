"""The sequence-parallel group of this process. The extension ``sequence_parallel`` creates the group and runs its forward
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from posttrain.models.forward import Pass


class TokenSplit(Protocol):
    """Interface of a sequence-parallel group, whose processes compute their batches together.
    `posttrain.extensions.sequence_parallel.split` implements the interface.
    """

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        ...

    def forward(self, model: nn.Module, request: Pass, compare: Callable[..., dict[str, Any]] | None) -> dict[str, Any]:
        """Run a forward pass on a batch of this process. Each process of the group computes a part of the columns."""
        ...

    def help_with(self, model: nn.Module, owner: int) -> Tensor:
        """Compute this process's columns of a training pass of process ``owner``. The caller must call backward on the
        result.
        """
        ...

    def turns(self, last: bool) -> Iterator[tuple[int | None, bool]]:
        """Yield one item per process of the group; see the function `turns` of this module."""
        ...

    def attention(
        self, whole: Callable[..., tuple[Tensor, Any]], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ratio: int | None
    ) -> Tensor:  # fmt: skip
        """Compute attention over whole rows with the other processes, and return the output for this process's columns."""
        ...

    def check_alone(self, model: nn.Module) -> None:
        """Raise an error if a forward pass of the model needs all processes of the group."""
        ...

    def refuse_predict(self) -> None:
        """Raise an error, because ``predict`` is not supported."""
        ...


# Sequence-parallel group of this process. All trainers in the process share the group, like accelerate's state.
_active: TokenSplit | None = None


def active() -> TokenSplit | None:
    """Return the sequence-parallel group of this process. Return None without sequence parallelism."""
    return _active


def activate(split: TokenSplit | None) -> None:
    """Set the sequence-parallel group that computes forward passes (`posttrain.models.forward.forward`). None: each process
    computes its forward passes alone.
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
    """Yield one item per process of the sequence-parallel group, whose batches are computed one after the other.

    Yields:
        Group rank of the process whose batch is computed (None: this process), and whether this is the last pass before
        the update.
    """
    return iter([(None, last)]) if _active is None else _active.turns(last)
