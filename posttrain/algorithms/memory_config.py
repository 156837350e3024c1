"""Config fields about memory: how large a micro-batch is, what is tried before training, and what may be used."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.errors import ConfigError

__all__ = ["AUTO", "MemoryFields"]

AUTO = "auto"
PLANNED = 8  # What 'auto' counts the effective batch from: the default of per_device_train_batch_size.


@dataclass
class MemoryFields:
    """A part of `PostTrainingConfig`."""

    per_device_train_batch_size: int | str = field(
        default=PLANNED,
        metadata={
            "help": "Rows of a micro-batch on each device. auto: the largest that fits 90 % of the memory at the longest "
            "lengths, found by dry steps; with gradient_accumulation_steps it makes the effective batch that 8 would make."
        },
    )
    dry_step: bool | None = field(
        default=None,
        metadata={
            "help": "Before step 0, try a step at the longest lengths without an update. None: on a GPU yes, on a CPU no (a step "
            "takes long there, and a system out of memory ends the process instead of telling it)."
        },
    )
    memory_limit_gib: float | None = field(
        default=None, metadata={"help": "Most memory of the device to plan with, in GiB; None: what is free."}
    )

    logits_chunk_size: int | None = field(
        default=None,
        metadata={
            "help": "Positions whose logits exist at once, in the loss and its backward; None: as many as 24 MiB hold on a "
            "CPU, 64 on an accelerator."
        },
    )

    def __post_init__(self) -> None:
        if self.logits_chunk_size is not None and self.logits_chunk_size < 1:
            raise ConfigError(
                f"logits_chunk_size={self.logits_chunk_size} must be at least 1, or None for a size that is fast."
            )
        given = self.per_device_train_batch_size
        self.auto_batch_size = given == AUTO
        if self.auto_batch_size:
            self.per_device_train_batch_size = PLANNED
        elif isinstance(given, str):
            if not given.strip().isdigit():
                raise ConfigError(f"per_device_train_batch_size={given!r} must be a number or {AUTO!r}.")
            self.per_device_train_batch_size = int(given)
        if self.memory_limit_gib is not None and not self.memory_limit_gib > 0:
            raise ConfigError(f"memory_limit_gib={self.memory_limit_gib} must be above 0, or None for what is free.")
        super().__post_init__()  # type: ignore[misc]
