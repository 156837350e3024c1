"""The order of prompts in online training: every prompt G times in a row, every generation replayed as often as needed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from posttrain.errors import DataError

__all__ = ["RepeatSampler", "repeat_iterable_dataset"]

logger = logging.getLogger(__name__)


class RepeatSampler(Sampler[int]):
    """Cuts a permutation into chunks, and emits each chunk ``repeat_count`` times with each index ``mini_repeat_count`` times.

    The incomplete last chunk is dropped. Pass e yields the e-th permutation of one seeded stream, so a resumed run goes on
    with the order that an uninterrupted one would have had.

    Args:
        data_source: Anything with a length n.
        mini_repeat_count: How often an index stands in a row (the group size).
        batch_size: Indices of a chunk (the prompts of one generation).
        repeat_count: How often a chunk is emitted.
        shuffle: False keeps 0..n-1.
        seed: None is a fixed default, not chance.

    Raises:
        DataError: Fewer rows than one chunk, which would train nothing.

    >>> list(RepeatSampler(range(5), mini_repeat_count=3, batch_size=2, repeat_count=1, shuffle=False))
    [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    """

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        self.num_samples = len(data_source)
        if self.num_samples < batch_size:
            raise DataError(
                f"the dataset has {self.num_samples} rows, fewer than the {batch_size} of one chunk: nothing would be sampled."
            )
        self.mini_repeat_count, self.batch_size, self.repeat_count = mini_repeat_count, batch_size, repeat_count
        self.shuffle, self.seed = shuffle, seed
        self._epoch = 0
        dropped = self.num_samples % batch_size
        if dropped:
            logger.info("%d of %d rows do not fill a last chunk of %d and are skipped.", dropped, self.num_samples, batch_size)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is number ``epoch``, counted from 0."""
        self._epoch = epoch

    def _permutation(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator()
        if self.seed is not None:
            generator.manual_seed(self.seed)
        for _ in range(self._epoch):
            torch.randperm(self.num_samples, generator=generator)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        order = self._permutation()
        self._epoch += 1
        for start in range(0, self.num_samples - self.batch_size + 1, self.batch_size):
            chunk = order[start : start + self.batch_size]
            for _ in range(self.repeat_count):
                for index in chunk:
                    yield from [index] * self.mini_repeat_count

    def __len__(self) -> int:
        return self.num_samples // self.batch_size * self.batch_size * self.mini_repeat_count * self.repeat_count


def _repeat_chunk(batch: dict[str, list], mini_repeat_count: int, batch_size: int, repeat_count: int) -> dict[str, list]:
    size = len(next(iter(batch.values())))
    if size < batch_size:
        return {name: [] for name in batch}
    order = [i for _ in range(repeat_count) for i in range(size) for _ in range(mini_repeat_count)]
    return {name: [copy.deepcopy(column[i]) for i in order] for name, column in batch.items()}


def repeat_iterable_dataset(dataset: Any, mini_repeat_count: int, batch_size: int = 1, repeat_count: int = 1) -> Any:
    """The order of an unshuffled `RepeatSampler` over a stream; the incomplete last chunk is dropped, columns are kept.

    Needs ``dispatch_batches=False`` and no loader workers, which would interleave groups.
    """
    settings = {"mini_repeat_count": mini_repeat_count, "batch_size": batch_size, "repeat_count": repeat_count}
    return dataset.map(_repeat_chunk, batched=True, batch_size=batch_size, fn_kwargs=settings)
