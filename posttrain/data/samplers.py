"""Which rows come when, and on which process: prompts in online training, and evaluation sets."""

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

from posttrain.data.chat import encode
from posttrain.data.formats import TOKENIZED, first_rows, is_conversational, known_columns
from posttrain.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)


LARGE_TAIL = 0.05  # A dropped share of the rows above this is worth a warning.


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer of at least 1, or nothing would ever be emitted.")


class RepeatSampler(Sampler[int]):
    """Cuts a permutation into chunks and emits each ``repeat_count`` times, every index ``mini_repeat_count`` times.

    The incomplete last chunk is dropped. Pass e yields the e-th permutation of one seeded stream, so a resumed run goes
    on with the order that an uninterrupted one would have had.

    Args:
        data_source: Anything with a length n.
        mini_repeat_count: How often an index stands in a row (the group size).
        batch_size: Indices of a chunk (the prompts of one generation).
        repeat_count: How often a chunk is emitted.
        shuffle: False keeps 0..n-1.
        seed: None is a fixed default, not chance: two samplers without a seed agree.

    Raises:
        ConfigError: A count below 1.
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
        _check_counts(mini_repeat_count=mini_repeat_count, batch_size=batch_size, repeat_count=repeat_count)
        self.num_samples = len(data_source)
        self.mini_repeat_count, self.batch_size, self.repeat_count = mini_repeat_count, batch_size, repeat_count
        self.shuffle, self.seed = shuffle, seed
        self._epoch = 0
        self._drawn = 0  # Permutations taken from the stream so far; `_state` is the generator right after them.
        self._state: torch.Tensor | None = None
        self._check_size()

    def _check_size(self) -> None:
        n, chunk, group = self.num_samples, self.batch_size, self.mini_repeat_count
        if n < chunk:
            raise DataError(
                f"the dataset has {n} rows, fewer than the {chunk} of one chunk: nothing would be sampled. One "
                f"generation batch of {chunk * group} rows holds {chunk} prompts, {group} times each, so at least "
                f"{chunk} prompts are needed. Add prompts, lower generation_batch_size (or steps_per_generation), "
                "or raise num_generations."
            )
        dropped = n % chunk
        if dropped:
            level = logging.WARNING if dropped > LARGE_TAIL * n else logging.INFO
            logger.log(
                level, "%d of %d rows (%.1f %%) do not fill a last chunk of %d and are skipped in each pass.",
                dropped, n, 100 * dropped / n, chunk,
            )  # fmt: skip

    def set_epoch(self, epoch: int) -> None:
        """The next pass is number ``epoch``, counted from 0."""
        if epoch < 0:
            raise ConfigError(f"epoch={epoch} must be 0 or more.")
        self._epoch = epoch

    def _permutation(self, epoch: int) -> list[int]:
        """The ``epoch``-th permutation of the stream; going forward draws only what is new."""
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
    """The order of an unshuffled `RepeatSampler` over a stream; the incomplete last chunk is dropped, columns are kept.

    Repeated records are deep copies, so changing one leaves the others alone. ``set_epoch`` reaches a shuffle upstream.
    Needs ``dispatch_batches=False`` and no loader workers, which would interleave groups.

    Args:
        dataset: An ``IterableDataset``.
        mini_repeat_count: How often a record stands in a row (the group size).
        batch_size: Records of a chunk.
        repeat_count: How often a chunk is emitted.

    Returns:
        A lazy ``IterableDataset``.

    Raises:
        ConfigError: A count below 1.
    """
    settings = {"mini_repeat_count": mini_repeat_count, "batch_size": batch_size, "repeat_count": repeat_count}
    _check_counts(**settings)
    return dataset.map(_repeat_chunk, batched=True, batch_size=batch_size, fn_kwargs=settings)


@dataclass(frozen=True)
class Deal:
    """How a process takes its part of an evaluation set: of every ``size * world`` rows ``size`` consecutive ones.

    The rows of the last round are split evenly, group by group. So no row comes twice, and all processes have equally many
    batches, of which some may be empty.

    Attributes:
        size: Rows of a batch.
        world: Processes.
        rank: This one.
        group: Consecutive rows that are compared with each other.
        drop_last: Leave a last round out that is not full.

    >>> [list(Deal(2, 2, rank).parts("abcde")) for rank in (0, 1)]
    [[['a', 'b'], ['e']], [['c', 'd'], []]]
    """

    size: int
    world: int = 1
    rank: int = 0
    group: int = 1
    drop_last: bool = False

    def parts(self, items: Iterable[Any]) -> Iterator[list[Any]]:
        """The batches of ``rank``."""
        iterator, whole = iter(items), self.size * self.world
        while len(rows := list(itertools.islice(iterator, whole))) == whole:
            yield rows[self.rank * self.size : (self.rank + 1) * self.size]
        if rows and not self.drop_last:
            groups = -(-len(rows) // self.group)
            start, end = (-(-groups * rank // self.world) * self.group for rank in (self.rank, self.rank + 1))
            yield rows[start:end]


class DealtStream(IterableDataset):
    """A stream as the batches of one process, lists of rows; every process reads all of it.

    Args:
        stream: Anything that yields rows, the same ones on every process.
        deal: Which of them are this process's.
    """

    def __init__(self, stream: Any, deal: Deal) -> None:
        self.stream, self.deal = stream, deal

    def __iter__(self) -> Iterator[list[Any]]:
        return self.deal.parts(self.stream)


LOOKED_AT = 20_000  # Rows whose lengths are read; of a longer set as many, spread over it.
STREAMED = 64


def longest_examples(dataset: AnyDataset, count: int, id_columns: Collection[str] = TOKENIZED) -> list[dict[str, Any]]:
    """By tokens where rows are tokenised (``id_columns`` are read), by characters where not; of a stream, of its first 64."""
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
    """Tokens or characters in a value, whatever holds them.

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
    """Refuse a dataset without usable prompts; returns its first rows.

    Raises:
        DataError: No rows, no ``prompt`` column, a prompt without any token, or strings mixed with message lists.
        ModelError: Conversational prompts and a tokenizer without a chat template.
    """
    head = list(itertools.islice(dataset, 2))
    if not head:
        raise DataError(f"{name} is empty.")
    if "prompt" not in head[0]:
        raise DataError(
            f"{name} has no 'prompt' column; its columns are {sorted(head[0])}. Online methods need prompts."
        )
    chat = is_conversational(head[0])
    count = len(dataset) if isinstance(dataset, datasets.Dataset) else STREAMED
    for index, row in enumerate(first_rows(dataset, count, ["prompt"])):
        _check_prompt(row["prompt"], index, name, chat, tokenizer)
    if chat and not tokenizer.chat_template:
        raise ModelError(
            f"{name} is conversational (prompts are lists of messages), but the tokenizer has no chat template. Set "
            "tokenizer.chat_template, use an instruction-tuned checkpoint, or give prompts as strings."
        )
    return head


def _check_prompt(prompt: Any, index: int, name: str, chat: bool, tokenizer: Tokenizer) -> None:
    if isinstance(prompt, list) != chat:
        raise DataError(
            f"{name} row {index}: the prompt is a {type(prompt).__name__} and in row 0 it is a "
            f"{'list of messages' if chat else 'str'}. Give all rows the same kind."
        )
    if not prompt and (chat or not encode(tokenizer, [prompt], special=True)[0]):
        what = "an empty list of messages" if chat else "empty"
        raise DataError(
            f"{name} row {index}, column 'prompt': it is {what}"
            f"{'' if chat else ', and the tokenizer begins no text with a token'}. "
            f"Give it at least one {'message' if chat else 'character'}."
        )


def with_lengths(dataset: AnyDataset, name: str) -> Any:
    """For samplers that want rows of like length: with a column ``name`` of lengths, where no ``input_ids`` tells them."""
    known = known_columns(dataset)
    if {name, "input_ids"} & set(known):
        return dataset
    columns = [dataset[column][:] for column in known if column.endswith("_ids")]
    lengths = [sum(len(ids or ()) for ids in row) for row in zip(*columns, strict=True)]
    return dataset.add_column(name, lengths) if lengths else dataset


Origin = tuple[int, int]  # Pass over the data, and place in that pass.


class PromptStream:
    """Endless prompts of a dataset in an order of their own, the same on every rank, that a checkpoint can continue.

    Args:
        dataset: Map-style, or a stream.
        seed: Of the order; every pass over the data has another one.
        shuffle: Whether the order is a random one.

    >>> stream = PromptStream(datasets.Dataset.from_list([{"prompt": c} for c in "abc"]), seed=0)
    >>> sorted(row["prompt"] for row in stream.take(3)), stream.state()
    (['a', 'b', 'c'], {'passes': 0, 'position': 3})
    """

    def __init__(self, dataset: AnyDataset, seed: int, shuffle: bool = True) -> None:
        self.dataset, self.seed, self.shuffle = dataset, seed, shuffle
        self.passes = self.position = 0
        self._rows: Iterator[dict[str, Any]] | None = None
        # Pass, and the order of its rows.
        self._ordered: tuple[int, list[int]] | None = None

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next ``count`` rows."""
        return [self.next()[1] for _ in range(count)]

    def next(self) -> tuple[Origin, dict[str, Any]]:
        """The next row, and where it stands."""
        if self._rows is None:
            self._rows = self._rest_of_pass()
        row = next(self._rows, None)
        if row is None:
            if self.position == 0:
                raise DataError("the dataset of prompts is empty: there is nothing to generate from.")
            self.passes, self.position, self._rows = self.passes + 1, 0, None
            return self.next()
        self.position += 1
        return (self.passes, self.position - 1), row

    def at(self, origin: Origin) -> dict[str, Any]:
        """The row of a map-style dataset that came, or comes, at this place."""
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
        """Where it stands."""
        return {"passes": self.passes, "position": self.position}

    def load(self, state: dict[str, int]) -> None:
        """Undo `state`."""
        self.passes, self.position, self._rows = state["passes"], state["position"], None
