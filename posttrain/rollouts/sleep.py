"""When a colocated engine may sleep, and what must happen before it generates again: a state machine of three states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from posttrain.errors import WeightSyncError

__all__ = ["LEVELS", "Sleeper", "choose_level"]

State = Literal["awake", "asleep1", "asleep2"]
LEVELS = ("auto", "1", "2")
ROOM = 1.2  # Host memory that level 1 asks for, in sizes of the weights of all ranks of a host.


class Sleeps(Protocol):
    """The part of an engine that gives memory back."""

    def sleep(self, level: int) -> Any: ...
    def wake_up(self, tags: Sequence[str] | None = None) -> Any: ...


def choose_level(choice: str, *, generations_per_push: float, model_bytes: int, ranks: int, free_bytes: int) -> int:
    """1 keeps the weights in host memory, where one push serves several generations and they fit; 2 drops them.

    >>> choose_level("auto", generations_per_push=2.0, model_bytes=10, ranks=1, free_bytes=12)
    1
    >>> choose_level("auto", generations_per_push=1.0, model_bytes=10, ranks=1, free_bytes=12)
    2
    """
    if choice != "auto":
        return int(choice)
    return 1 if generations_per_push > 1 and free_bytes >= ROOM * model_bytes * ranks else 2


class Sleeper:
    """Keeps ``{awake, asleep1, asleep2}`` and whether the weights are those that were pushed.

    From ``asleep2`` only a whole push leads to generation, and nothing ever reads weights from disk: those of the
    checkpoint are not the policy any more once training began.

    Args:
        engine: With ``sleep`` and ``wake_up``.
        level: Of its sleep; None: it never sleeps.
        valid: Whether what it loaded at its start may be sampled from; not in training, where a push comes first.

    Attributes:
        state: Where it is.
        valid: Whether it holds the weights of the last push.
    """

    def __init__(self, engine: Sleeps, level: int | None, *, valid: bool = True) -> None:
        self.engine, self.level, self.valid = engine, level, valid
        self.state: State = "awake"
        self._without_cache = False

    def before_push(self) -> None:
        """Memory for weights, without that of keys and values: gathering wants room."""
        if self.state != "awake":
            self.engine.wake_up(["weights"])
            self.state, self._without_cache = "awake", True
        self.valid = False

    def pushed(self) -> None:
        """A whole set of weights arrived."""
        self.valid = True

    def before_generate(self) -> None:
        """Awake, with weights and room for keys and values.

        Raises:
            WeightSyncError: The weights were dropped, or never pushed.
        """
        if not self.valid:
            raise WeightSyncError(
                f"the engine is {self.state} without the trainer's weights. Push them (load_weights) before generating; it "
                "never reads them from disk again.",
                phase="generate",
            )
        if self.state == "asleep1":
            self.engine.wake_up(None)
        elif self._without_cache:
            self.engine.wake_up(["kv_cache"])
        self.state, self._without_cache = "awake", False

    def sleep(self) -> None:
        """Training wants the memory."""
        if self.level is None or self.state != "awake":
            return
        self.engine.sleep(self.level)
        self.state, self._without_cache = ("asleep1", False) if self.level == 1 else ("asleep2", False)
        self.valid = self.valid and self.level == 1
