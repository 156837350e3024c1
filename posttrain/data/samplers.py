"""Samplers that determine the order of prompts in online training, and the rows that each rank evaluates."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch.utils.data import IterableDataset, Sampler

from posttrain.data.chat import check_messages, encode
from posttrain.data.formats import TOKENIZED, first_rows, is_conversational, known_columns, naming
from posttrain.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)


# Maximum fraction of rows in the incomplete last chunk, which is dropped. If the fraction is larger, a warning is logged.
LARGE_TAIL = 0.05


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer and at least 1. Otherwise no row is sampled.")


class RepeatSampler(Sampler[int]):
    """Sampler that splits a permutation of the rows into chunks. The sampler repeats each chunk, and each index inside a
    chunk.

    An incomplete last chunk is dropped. All permutations come from one seeded generator. A resumed run therefore continues
    with the order of an uninterrupted run.

    Args:
        data_source: Dataset with n rows, of which only the length is used.
        mini_repeat_count: Number of consecutive repetitions of an index (the group size).
        batch_size: Number of different indices per chunk (the prompts of one generation batch).
        repeat_count: Number of repetitions of a chunk.
        shuffle: Whether to shuffle. If False, the order is 0..n-1.
        seed: Seed of the permutations. None: a fixed default seed, so that two samplers without a seed yield the same order.

    Raises:
        ConfigError: A count is below 1.
        DataError: The dataset has fewer rows than one chunk.

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
        _check_counts(mini_repeat_count=mini_repeat_count, batch_size=batch_size, repeat_count=repeat_count)
        self.num_samples = len(data_source)
        self.mini_repeat_count, self.batch_size, self.repeat_count = mini_repeat_count, batch_size, repeat_count
        self.shuffle, self.seed = shuffle, seed
        self._epoch = 0
        # `_drawn` is the number of permutations so far. `_state` is the state of the random generator after the last
        # permutation.
        self._drawn = 0
        self._state: torch.Tensor | None = None
        self._check_size()

    def _check_size(self) -> None:
        n, chunk, group = self.num_samples, self.batch_size, self.mini_repeat_count
        if n < chunk:
            raise DataError(
                f"the dataset has {n} rows, but one chunk needs {chunk}, so no row would be sampled. One generation batch of "
                f"{chunk * group} rows contains {chunk} prompts, each repeated {group} times. Fix: use a dataset with at least "
                f"{chunk} prompts, decrease generation_batch_size (or steps_per_generation), or raise num_generations."
            )
        dropped = n % chunk
        if dropped:
            level = logging.WARNING if dropped > LARGE_TAIL * n else logging.INFO
            logger.log(
                level, "%d of %d rows (%.1f %%) are skipped in each epoch, because they do not fill a chunk of %d.",
                dropped, n, 100 * dropped / n, chunk,
            )  # fmt: skip

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The first epoch is 0."""
        if epoch < 0:
            raise ConfigError(f"epoch={epoch} must be 0 or more.")
        self._epoch = epoch

    def _permutation(self, epoch: int) -> list[int]:
        """Return the permutation of an epoch. If the epoch is later than the last computed epoch, continue from the stored
        state of the random generator.
        """
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator()
        if self._state is not None and self._drawn <= epoch:
            generator.set_state(self._state)
        else:
            self._drawn = 0
            if self.seed is not None:
                generator.manual_seed(self.seed)
        while self._drawn <= epoch:
            order = torch.randperm(self.num_samples, generator=generator)
            self._drawn += 1
        self._state = generator.get_state()
        return order.tolist()

    def __iter__(self) -> Iterator[int]:
        order = self._permutation(self._epoch)
        self._epoch += 1
        return self._emit(order)

    def _emit(self, order: list[int]) -> Iterator[int]:
        for start in range(0, self.num_samples - self.batch_size + 1, self.batch_size):
            chunk = order[start : start + self.batch_size]
            for _ in range(self.repeat_count):
                for index in chunk:
                    for _ in range(self.mini_repeat_count):
                        yield index

    def __len__(self) -> int:
        return self.num_samples // self.batch_size * self.batch_size * self.mini_repeat_count * self.repeat_count


def _repeat_chunk(
    batch: dict[str, list], mini_repeat_count: int, batch_size: int, repeat_count: int
) -> dict[str, list]:
    size = len(next(iter(batch.values())))
    if size < batch_size:
        return {name: [] for name in batch}
    order = [i for _ in range(repeat_count) for i in range(size) for _ in range(mini_repeat_count)]
    return {name: [copy.deepcopy(column[i]) for i in order] for name, column in batch.items()}


def repeat_iterable_dataset(
    dataset: AnyDataset, mini_repeat_count: int, batch_size: int = 1, repeat_count: int = 1
) -> Any:
    """Repeat the rows of a stream in the order of an unshuffled `RepeatSampler`. An incomplete last chunk is dropped.

    Repeated rows are deep copies, so that changing a row does not change its repetitions. ``set_epoch`` is passed to the
    upstream dataset. The data loader must use ``dispatch_batches=False`` and ``num_workers=0``, because groups would otherwise
    be mixed.

    Args:
        dataset: An ``IterableDataset``.
        mini_repeat_count: Number of consecutive repetitions of a row (the group size).
        batch_size: Number of different rows per chunk.
        repeat_count: Number of repetitions of a chunk.

    Returns:
        An ``IterableDataset`` that reads rows on demand.

    Raises:
        ConfigError: A count is below 1.
    """
    settings = {"mini_repeat_count": mini_repeat_count, "batch_size": batch_size, "repeat_count": repeat_count}
    _check_counts(**settings)
    return dataset.map(_repeat_chunk, batched=True, batch_size=batch_size, fn_kwargs=settings)


@dataclass(frozen=True)
class EvalShard:
    """Selection of the evaluation rows of one rank: ``size`` consecutive rows out of every ``size * world`` rows.

    If fewer than ``size * world`` rows remain at the end, their groups are distributed evenly over ranks. No row is evaluated
    twice. All ranks have the same number of batches, but the last batch of a rank may be empty.

    Attributes:
        size: Number of rows per batch.
        world: Number of ranks.
        rank: Index of this rank.
        group: Number of consecutive rows that are compared with each other and must be on the same rank.

    >>> [list(EvalShard(2, 2, rank).parts("abcde")) for rank in (0, 1)]
    [[['a', 'b'], ['e']], [['c', 'd'], []]]
    """

    size: int
    world: int = 1
    rank: int = 0
    group: int = 1

    def parts(self, items: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield the batches of items of this rank."""
        iterator, whole = iter(items), self.size * self.world
        while len(rows := list(itertools.islice(iterator, whole))) == whole:
            yield rows[self.rank * self.size : (self.rank + 1) * self.size]
        if rows:  # ``dataloader_drop_last`` applies only to training.
            groups = -(-len(rows) // self.group)
            start, end = (-(-groups * rank // self.world) * self.group for rank in (self.rank, self.rank + 1))
            yield rows[start:end]


class ShardedStream(IterableDataset):
    """Stream of one rank's batches, each a list of rows. Every rank reads the whole stream.

    Args:
        stream: Iterable of rows, which must yield the same rows on every rank.
        shard: Selection of this rank's rows.
    """

    def __init__(self, stream: Any, shard: EvalShard) -> None:
        self.stream, self.shard = stream, shard

    def __iter__(self) -> Iterator[list[Any]]:
        return self.shard.parts(self.stream)


LOOKED_AT = 20_000  # Maximum number of evenly spaced rows whose lengths are read.
STREAMED = 64


def longest_examples(dataset: AnyDataset, count: int, id_columns: Collection[str] = TOKENIZED) -> list[dict[str, Any]]:
    """Return the ``count`` longest rows. Length is measured in tokens if rows are tokenized, otherwise in characters. Only
    the first 64 rows of a stream are read.
    """
    if isinstance(dataset, datasets.IterableDataset) or not isinstance(dataset, Sized):
        drawn = list(itertools.islice(dataset, STREAMED))
        ids = [{k: v for k, v in row.items() if k in id_columns} or row for row in drawn]
        best = sorted(range(len(drawn)), key=lambda i: weight(ids[i]), reverse=True)
        return [drawn[i] for i in best[:count]]
    total = len(dataset)
    places = range(0, total, max(1, -(-total // LOOKED_AT)))
    names = [name for name in dataset.column_names if name in id_columns] or None
    part = dataset.select(places) if len(places) < total else dataset
    weights = [weight(row) for row in (part.select_columns(names) if names else part)]
    best = sorted(range(len(weights)), key=lambda i: weights[i], reverse=True)[:count]
    return [dataset[places[i]] for i in best]


def weight(example: Any) -> int:
    """Count the token ids or characters in a nested value.

    >>> weight({"input_ids": [1, 2, 3]}), weight({"messages": [{"role": "user", "content": "Hello"}]})
    (3, 9)
    """
    if isinstance(example, str):
        return len(example)
    if isinstance(example, dict):
        return sum(map(weight, example.values()))
    if isinstance(example, list):
        return len(example) if not example or isinstance(example[0], int) else sum(map(weight, example))
    return 0


def check_prompts(dataset: AnyDataset, name: str, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Check that a dataset has usable prompts, and return its first rows.

    Raises:
        DataError: The dataset has no rows or no ``prompt`` column, a prompt has no tokens, a message has no role or no
            content, or only some prompts are conversational.
        ModelError: Prompts are conversational and the tokenizer has no chat template.
    """
    head = list(itertools.islice(dataset, 2))
    if not head:
        raise DataError(f"{name} is empty.")
    if "prompt" not in head[0]:
        raise DataError(
            f"{name} has no 'prompt' column, which online methods need. Its columns are {sorted(head[0])}. Fix: pass a dataset "
            "with a 'prompt' column that is not tokenized. The trainer tokenizes prompts."
        )
    chat = is_conversational(head[0])
    count = len(dataset) if isinstance(dataset, datasets.Dataset) else STREAMED
    for index, row in enumerate(first_rows(dataset, count, ["prompt"])):
        _check_prompt(row["prompt"], index, name, chat, tokenizer)
    if chat and not tokenizer.chat_template:
        raise ModelError(
            f"{name} is conversational (prompts are lists of messages), but the tokenizer has no chat template. Fix: set "
            "tokenizer.chat_template, use an instruction-tuned checkpoint, or convert the prompts to strings."
        )
    return head


def _check_prompt(prompt: Any, index: int, name: str, chat: bool, tokenizer: Tokenizer) -> None:
    if not isinstance(prompt, str | list):
        raise DataError(
            f"{name} row {index}: column 'prompt' must be a string or a list of messages, not a {type(prompt).__name__}. Fix: "
            "put a single message into a list."
        )
    if isinstance(prompt, list) != chat:
        raise DataError(
            f"{name} row {index}: the prompt is a {type(prompt).__name__}, but the prompt of row 0 is a "
            f"{'list of messages' if chat else 'str'}. Fix: use the same type in all rows."
        )
    if not prompt and (chat or not encode(tokenizer, [prompt], special=True)[0]):
        what = "an empty list of messages" if chat else "empty"
        raise DataError(
            f"{name} row {index}, column 'prompt': it is {what}"
            f"{'' if chat else ', and the tokenizer does not add a bos token'}. "
            f"Fix: add at least one {'message' if chat else 'character'}."
        )
    if chat:
        with naming(f"{name} row {index}, column 'prompt'"):
            check_messages(prompt)


def with_lengths(dataset: AnyDataset, name: str) -> Any:
    """Add a column ``name`` with row lengths, which length-grouped samplers need. An existing column of that name is not
    replaced.
    """
    names = known_columns(dataset)
    if {name, "input_ids"} & set(names):
        return dataset
    columns = [dataset[column][:] for column in names if column.endswith("_ids")]
    lengths = [sum(len(ids or ()) for ids in row) for row in zip(*columns, strict=True)]
    return dataset.add_column(name, lengths) if lengths else dataset


Origin = tuple[int, int]  # A position in a `PromptStream`: epoch, and index within the epoch.


class PromptStream:
    """Endless stream of prompts. All ranks get the same order, and the position in the stream is saved in checkpoints.

    Args:
        dataset: Map-style dataset or stream.
        seed: Random seed of the order. Every epoch has a different order.
        shuffle: Whether to shuffle.

    >>> stream = PromptStream(datasets.Dataset.from_list([{"prompt": c} for c in "abc"]), seed=0)
    >>> sorted(row["prompt"] for row in stream.take(3)), stream.state()
    (['a', 'b', 'c'], {'passes': 0, 'position': 3})
    """

    def __init__(self, dataset: AnyDataset, seed: int, shuffle: bool = True) -> None:
        self.dataset, self.seed, self.shuffle = dataset, seed, shuffle
        self.passes = self.position = 0
        self._rows: Iterator[dict[str, Any]] | None = None
        # Number of the current epoch, and the order of rows in this epoch.
        self._ordered: tuple[int, list[int]] | None = None

    def take(self, count: int) -> list[dict[str, Any]]:
        """Return the next ``count`` rows."""
        return [self.next()[1] for _ in range(count)]

    def next(self) -> tuple[Origin, dict[str, Any]]:
        """Return the origin of the next row, and the row."""
        if self._rows is None:
            self._rows = self._rest_of_pass()
        row = next(self._rows, None)
        if row is None:
            if self.position == 0:
                raise DataError("the dataset of prompts is empty. Fix: pass a dataset with at least one prompt.")
            self.passes, self.position, self._rows = self.passes + 1, 0, None
            return self.next()
        self.position += 1
        return (self.passes, self.position - 1), row

    def at(self, origin: Origin) -> dict[str, Any]:
        """Return the row at an origin. The method requires a map-style dataset."""
        passes, position = origin
        return self.dataset[self._order(passes)[position]]

    def _rest_of_pass(self) -> Iterator[dict[str, Any]]:
        data, passes, start = self.dataset, self.passes, self.position
        if isinstance(data, Sized):
            yield from (self.at((passes, position)) for position in range(start, len(data)))
            return
        if self.shuffle:
            data = data.shuffle(seed=self.seed + passes)
        yield from data.skip(start)

    def _order(self, passes: int) -> list[int]:
        if self._ordered is None or self._ordered[0] != passes:
            size = len(self.dataset)
            generator = torch.Generator().manual_seed(self.seed + passes)
            order = torch.randperm(size, generator=generator).tolist() if self.shuffle else list(range(size))
            self._ordered = (passes, order)
        return self._ordered[1]

    def state(self) -> dict[str, int]:
        """Return the epoch and position of the next row."""
        return {"passes": self.passes, "position": self.position}

    def load(self, state: dict[str, int]) -> None:
        """Restore a position that `state` returned."""
        self.passes, self.position, self._rows = state["passes"], state["position"], None
