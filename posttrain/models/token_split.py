"""The sequence-parallel group of this process. The extension ``sequence_parallel`` creates it and computes its passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from posttrain.models.forward import Pass


class TokenSplit(Protocol):
    """Processes that compute their batches together. See `posttrain.extensions.sequence_parallel.split.TokenSplit`."""

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        ...

    def forward(self, model: nn.Module, asked: Pass, compare: Callable[..., dict[str, Any]] | None) -> dict[str, Any]:
        """Run a forward pass. Each process computes a part of the columns."""
        ...

    def help_with(self, model: nn.Module, owner: int) -> Tensor:
        """Compute this process's columns of a training pass of process ``owner``. The result's backward must be called."""
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
        """Raise an error if one process cannot run the model without the others."""
        ...

    def refuse_predict(self) -> None:
        """Raise an error for ``predict``."""
        ...


# The sequence-parallel group of this process. All trainers of the process share it, like accelerate's state.
_active: TokenSplit | None = None


def active() -> TokenSplit | None:
    """Return the sequence-parallel group of this process, or None."""
    return _active


def activate(split: TokenSplit | None) -> None:
    """Set the group that runs `posttrain.models.forward.forward`. None: only this process runs it."""
    global _active
    _active = split


@contextmanager
def alone(model: nn.Module | None = None) -> Iterator[None]:
    """Disable sequence parallelism inside the block, so that every process computes its own batches.

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
    """Iterate over the processes of the group, whose batches are computed one after the other.

    Yields:
        Group rank of the process whose batch is computed (None for this process), and whether this is the last pass before the
        update.
    """
    return iter([(None, last)]) if _active is None else _active.turns(last)
