"""What online trainers do with a dataset of prompts: check it, repeat each prompt G times, deal them to ranks."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import datasets
from torch.utils.data import DataLoader

from posttrain.data.chat import tokenize_prompts
from posttrain.data.formats import is_conversational, refuse_images
from posttrain.data.samplers import RepeatSampler, check_prompts, repeat_iterable_dataset
from posttrain.errors import ConfigError, DataError
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.rewards.runner import RewardRunner
from posttrain.training.online_config import OnlineConfig
from posttrain.types import Request, Row

if TYPE_CHECKING:
    pass

__all__ = [
    "BalanceMixin",
    "Cost",
    "PromptMixin",
    "ScheduleMixin",
    "deal",
    "describe_schedule",
]

logger = logging.getLogger(__name__)


BEGINNING = 40  # Tokens of a prompt that tell which one it is.
PROMPT_COLUMNS = ("prompt", "image", "images")


class PromptMixin:
    """The part of `OnlineTrainer` between the dataset and a generation."""

    length_option = "max_completion_length"  # What the config calls it, for messages.
    args: OnlineConfig
    rewards: RewardRunner
    processing_class: Any
    model: Any
    train_dataset: Any
    accelerator: Any
    _train_batch_size: int

    # Before the model loads --------------------------------------------------------------------------------------

    def _check_arguments(self, model: Any, args: Any, train_dataset: Any, collator: Any) -> None:
        """As every trainer's; a stream must reach each process by itself and in one piece, or its groups fall apart."""
        own_loader = type(self).get_train_dataloader is not PromptMixin.get_train_dataloader
        if not own_loader and isinstance(train_dataset, datasets.IterableDataset):
            if args.accelerator_config.dispatch_batches:
                raise ConfigError(
                    "accelerator_config has dispatch_batches=True, and train_dataset is a stream: the main process would hand "
                    "its rows out and cut groups up. Leave it out."
                )
            if args.dataloader_num_workers:
                logger.warning(
                    "dataloader_num_workers=%d is set to 0: workers would split the groups of a stream between them.",
                    args.dataloader_num_workers,
                )
                _workers_off(args)
        super()._check_arguments(model, args, train_dataset, collator)  # type: ignore[misc]

    def prepare_datasets(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Refuse prompts that cannot be generated from, then try the reward functions on two rows."""
        head: list[dict[str, Any]] = []
        if self.args.remove_unused_columns:
            many = isinstance(evaluation, dict)
            train, evaluation = (
                _only_prompts(train),
                {k: _only_prompts(v) for k, v in evaluation.items()} if many else _only_prompts(evaluation),
            )
        for name, dataset in {"train_dataset": train, **_splits(evaluation)}.items():
            if dataset is not None and not self.may_read_images:
                refuse_images(dataset, name)
            rows = check_prompts(dataset, name, self.processing_class)
            head = head or rows
        self._check_dataset_size(train)
        if self.args.check_rewards and self.can_dry_run:
            self.rewards.dry_run(head[:2], conversational=is_conversational(head[0]))
        return train, evaluation

    @property
    def may_read_images(self) -> bool:
        """Whether something of the user's own makes of rows what the model reads: a rollout function, an environment."""
        return not self.can_dry_run

    @property
    def can_dry_run(self) -> bool:
        """Whether reward functions get nothing that only a rollout has."""
        return True

    def _check_dataset_size(self, train: Any) -> None:
        if not isinstance(train, datasets.Dataset):
            return
        args = self.args
        wanted = (args.generation_batch_size or 0) // args.num_generations
        if len(train) < wanted:
            raise ConfigError(
                f"train_dataset has {len(train)} prompts, but one generation takes {wanted} (generation_batch_size="
                f"{args.generation_batch_size} / num_generations={args.num_generations}): nothing would ever be trained. "
                f"Give at least {wanted} prompts, or lower per_device_train_batch_size or gradient_accumulation_steps."
            )
        dropped = len(train) % wanted
        if dropped > 0.05 * len(train):
            logger.warning(
                "%d of %d prompts do not fill a last generation of %d and are skipped in every epoch.",
                dropped,
                len(train),
                wanted,
            )

    @property
    def context(self) -> int | None:
        """Most tokens the model can read."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def check_context(self) -> None:
        """Refuse a completion length that leaves no room for any prompt."""
        limit, longest = self.context, self.args.max_completion_length
        if limit is not None and longest >= limit:
            raise ConfigError(
                f"{self.length_option}={longest} leaves no room for a prompt in the model's context of {limit} tokens. Lower it."
            )

    def check_lengths(self, requests: list[Request], completion: int | None = None) -> None:
        """Refuse a prompt that does not fit the context together with its completion (of so many tokens)."""
        completion = self.args.max_completion_length if completion is None else completion
        limit, longest = self.context, max((request.prompt_ids for request in requests), key=len, default=())
        if limit is not None and len(longest) + completion > limit:
            raise DataError(
                f"a prompt of {len(longest)} tokens plus {self.length_option}={completion} does not fit the model's context of "
                f"{limit} tokens. Drop or shorten the prompt, or lower {self.length_option}. It begins: "
                f"{self.processing_class.decode(longest[:BEGINNING])!r}."
            )

    # Loaders -----------------------------------------------------------------------------------------------------

    def collator(self) -> Any:
        """Rows stay rows until their completions exist."""
        return list

    def get_train_dataloader(self) -> DataLoader:
        """Batches of ``per_device_train_batch_size * steps_per_generation`` rows, every prompt repeated G times."""
        args, dataset = self.args, self.train_dataset
        if isinstance(dataset, datasets.IterableDataset):
            shuffled = dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
            dataset = repeat_iterable_dataset(shuffled, args.num_generations, *self._repeats())
        return self._get_dataloader(  # type: ignore[attr-defined]
            dataset=dataset,
            description="Training",
            batch_size=self._train_batch_size * (args.steps_per_generation or 1),
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """As the parent's; a stream to evaluate on comes in the order that the sampler gives rows, and without workers."""
        if is_training or not isinstance(dataset, datasets.IterableDataset):
            return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)  # type: ignore[misc]
        stream = repeat_iterable_dataset(dataset.shuffle(seed=self.args.seed), self.group_size("eval"))
        before = _workers_off(self.args)
        try:
            return super()._get_dataloader(stream, *args, **kwargs)  # type: ignore[misc]
        finally:
            vars(self.args).update(before)

    @property
    def eval_group(self) -> int:
        """Completions of one prompt are consecutive rows."""
        return self.group_size("eval")

    @property
    def answers_per_row(self) -> int:
        """Each prompt is completed so often."""
        return self.group_size("eval")

    def _repeats(self) -> tuple[int, int]:
        args = self.args
        prompts = (args.generation_batch_size or 0) // args.num_generations
        return prompts, args.num_iterations * (args.steps_per_generation or 1)

    def _get_train_sampler(self, train_dataset: Any = None) -> RepeatSampler:
        prompts, repeats = self._repeats()
        return RepeatSampler(
            train_dataset if train_dataset is not None else self.train_dataset,
            mini_repeat_count=self.args.num_generations,
            batch_size=prompts,
            repeat_count=repeats,
            shuffle=self.args.shuffle_dataset,
            seed=self.args.seed,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> RepeatSampler:
        return RepeatSampler(eval_dataset, mini_repeat_count=self.group_size("eval"), seed=self.args.seed)

    def group_size(self, mode: str) -> int:
        """Completions per prompt."""
        args = self.args
        return (args.num_generations_eval or args.num_generations) if mode == "eval" else args.num_generations


def _workers_off(args: Any) -> dict[str, Any]:
    """Let loaders read in this process; returns what was set before."""
    off = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
    before = {name: getattr(args, name) for name in off}
    vars(args).update(off)
    return before


def _only_prompts(dataset: Any) -> Any:
    """A reward function that needs another column is told so by the dry run."""
    names = getattr(dataset, "column_names", None)
    return dataset.select_columns([name for name in names if name in PROMPT_COLUMNS]) if names else dataset


def _splits(evaluation: Any) -> dict[str, Any]:
    if evaluation is None:
        return {}
    if isinstance(evaluation, dict):
        return {f"eval_dataset[{key!r}]": value for key, value in evaluation.items()}
    return {"eval_dataset": evaluation}


TRIED = 256  # Prompts that are tokenised before anything is generated.
SHOWN, ENDING = 400, 60  # Characters of the first prompt, and of its end where it is longer.


def describe_schedule(args: OnlineConfig, prompts: int | None) -> str:
    """Generations, updates and epochs in words.

    Args:
        args: With its batch arithmetic resolved.
        prompts: Rows of the training set; None where it has no length.
    """
    slices, passes = args.steps_per_generation or 1, args.num_iterations
    updates = slices * passes / args.gradient_accumulation_steps
    groups = (args.generation_batch_size or 0) // args.num_generations
    lines = [
        f"each generation is {groups} prompts x {args.num_generations} completions = {args.generation_batch_size}, in "
        f"{slices} slices, each trained {passes} time{'s' if passes > 1 else ''}: {_updates(updates)} a generation."
    ]
    if args.gradient_accumulation_steps % (slices * passes) == 0:
        lines.append(
            "Every slice is trained before the weights move, so the importance ratio is 1: a loss near 0 and a clip ratio of "
            "0 are normal, and grad_norm shows whether something is learned."
        )
    else:
        lines.append(
            f"The last slice is {_updates(max(updates - 1, 0))} old when it is trained (staleness/mean_updates)."
        )
    if prompts:
        generations = prompts // groups
        steps = generations * slices * passes / args.gradient_accumulation_steps
        lines.append(f"An epoch of {prompts} prompts is {generations} generations and {steps:g} optimiser steps.")
        if args.max_steps > 0 and steps:
            lines.append(f"max_steps={args.max_steps} is {args.max_steps / steps:.3g} epochs.")
    return " ".join(lines)


def _updates(count: float) -> str:
    return f"{count:g} update{'' if count == 1 else 's'}"


class ScheduleMixin:
    """The part of `OnlineTrainer` that speaks and looks before the first generation."""

    args: Any
    cuts_prompts = False  # Whether a prompt that is too long loses its beginning instead of being refused.

    def announce(self) -> None:
        """Log the schedule and the first prompt as the model reads it; refuse prompts that leave no room."""
        data = self.train_dataset  # type: ignore[attr-defined]
        if isinstance(self.args, OnlineConfig):
            length = len(data) if hasattr(data, "__len__") else None
            logger.info("schedule: %s", self.schedule_text(length))
        if not hasattr(data, "__len__") or "prompt" not in (getattr(data, "column_names", None) or ()):
            return
        rows = list(itertools.islice(data, TRIED))
        options = self.args.chat_template_kwargs or {}
        # Not through `tokenize`: a subclass that replaces it may not be ready yet.
        prompts = tokenize_prompts(rows, self.processing_class, chat_template_kwargs=options)  # type: ignore[attr-defined]
        self._show(rows[0], prompts[0])
        self._check_room(prompts)

    def schedule_text(self, prompts: int | None) -> str:
        """How generations and updates follow each other."""
        return describe_schedule(self.args, prompts)

    def _show(self, row: dict[str, Any], ids: list[int]) -> None:
        text = self.processing_class.decode(ids)  # type: ignore[attr-defined]
        kind = "rendered by the chat template" if is_conversational(row) else "as text"
        logger.info(
            "the first prompt, %s, %d tokens: %r%s", kind, len(ids), text[:SHOWN],
            f" ... {text[-ENDING:]!r}" if len(text) > SHOWN else "",
        )  # fmt: skip

    def _check_room(self, prompts: list[list[int]]) -> None:
        limit, longest = self.context, self.args.max_completion_length  # type: ignore[attr-defined]
        if self.cuts_prompts or limit is None:
            return
        long = [i for i, ids in enumerate(prompts) if len(ids) + longest > limit]
        if long:
            name = self.length_option  # type: ignore[attr-defined]
            raise DataError(
                f"train_dataset row {long[0]}: a prompt of {len(prompts[long[0]])} tokens plus {name}={longest} does not fit the "
                f"model's context of {limit} tokens ({len(long)} of the first {len(prompts)} rows are too long). Drop or "
                f"shorten these prompts, or lower {name}."
            )


WORTH = 0.9  # The busiest rank must lose a tenth of its tokens, or rows stay where they are.

Cost = tuple[int, list[int]]  # Tokens of a row's prompt, and of each of its completions.
Place = tuple[int, int, int]  # (rank, row of that rank's slice, completion of that row)


def load(rows: Sequence[Cost]) -> int:
    """Tokens of a rank: every prompt once, and all completions."""
    return sum(prompt + sum(completions) for prompt, completions in rows)


def deal(costs: Sequence[Sequence[Cost]]) -> dict[Place, int] | None:
    """Where each completion goes, ``{(rank, row, completion): rank}``; None where moving does not pay.

    The longest completion first, each to the rank that then has the fewest tokens; one that does not hold its prompt yet
    pays for the prompt too, so that groups stay together while that is cheaper.

    Args:
        costs: Of each row, by rank.

    >>> deal([[(2, [10, 10])], [(2, [1, 1])]])
    {(0, 0, 0): 0, (0, 0, 1): 1, (1, 0, 0): 1, (1, 0, 1): 0}
    >>> deal([[(2, [10, 1])], [(2, [10, 1])]]) is None
    True
    """
    world = range(len(costs))
    items = [(-size, r, k, i) for r in world for k, (_, sizes) in enumerate(costs[r]) for i, size in enumerate(sizes)]
    if len(items) < len(costs):
        return None  # A rank without a completion would have nothing to run.
    loads = [0] * len(costs)
    holds: set[tuple[int, int, int]] = set()  # (rank, and whose prompt it holds)
    found: dict[Place, int] = {}
    for size, home, row, completion in sorted(items):
        after = [loads[r] - size + (0 if (r, home, row) in holds else costs[home][row][0]) for r in world]
        target = min(world, key=lambda r, after=after, home=home: (after[r], r != home, r))
        loads[target] = after[target]
        holds.add((target, home, row))
        found[home, row, completion] = target
    pays = min(loads) > 0 and max(loads) <= WORTH * max(map(load, costs))
    return found if pays and set(found.values()) == set(world) else None


def part(row: Row, members: Sequence[int]) -> Row:
    """A row with some of its completions."""

    def chosen(values: list[Any]) -> list[Any]:
        return [values[i] for i in members]

    return dataclasses.replace(
        row,
        completions=chosen(row.completions),
        loss_masks=chosen(row.loss_masks),
        sequence_columns={name: chosen(values) for name, values in row.sequence_columns.items()},
        token_columns={name: chosen(values) for name, values in row.token_columns.items()},
    )


class BalanceMixin:
    """The part of `OnlineTrainer` that evens out the ranks' work.

    Completions never leave their slice, so every optimiser step holds the same ones as before, and its denominators count
    them over all ranks: the gradient does not change.
    """

    args: OnlineConfig
    accelerator: Any
    whole_rows: bool

    def balanced(self, slices: list[list[Row]]) -> list[list[Row]]:
        """The slices of this rank after completions were exchanged, where that pays."""
        if self.accelerator.num_processes == 1 or not self.args.balance_ranks or self.whole_rows:
            return slices
        mine: list[list[Cost]] = [[(len(r.prompt_ids), [len(ids) for ids in r.completions]) for r in s] for s in slices]
        costs = parallel.all_gather_objects([mine], self.accelerator)
        plans = [deal([of_rank[number] for of_rank in costs]) for number in range(len(slices))]
        if any(row.model_kwargs for rows in slices for row in rows):
            plans = [None] * len(slices)  # Images are cut by sample elsewhere.
        parcels = self._parcels(slices, plans)
        if any(plan is not None for plan in plans):  # Known to every rank.
            parcels = parallel.all_gather_objects(parcels, self.accelerator)
        rank = self.accelerator.process_index
        result = [
            rows
            if plans[number] is None
            else [row for slot, target, row in parcels if (slot, target) == (number, rank)]
            for number, rows in enumerate(slices)
        ]
        self._tell(costs, result)
        return result

    def _parcels(self, slices: list[list[Row]], plans: list[dict[Place, int] | None]) -> list[tuple[int, int, Row]]:
        """Rows of this rank, cut up by where their completions go, ``(slice, rank, part)``."""
        rank, found = self.accelerator.process_index, []
        for number, plan in enumerate(plans):
            for k, row in enumerate(slices[number]) if plan is not None else ():
                targets = [plan[rank, k, i] for i in range(len(row.completions))]  # type: ignore[index]
                for target in sorted(set(targets)):
                    found.append((number, target, part(row, [i for i, t in enumerate(targets) if t == target])))
        return found

    def _tell(self, costs: list[list[list[Cost]]], slices: list[list[Row]]) -> None:
        """Tokens of the busiest rank against the mean, before and after."""
        sizes = [sum(len(r.prompt_ids) + sum(map(len, r.completions)) for r in rows) for rows in slices]
        after = parallel.all_gather_objects([sizes], self.accelerator)
        for number in range(len(slices)):
            before = [load(of_rank[number]) for of_rank in costs]
            now = [of_rank[number] for of_rank in after]
            told = {"balance/busiest_rank_before": before, "balance/busiest_rank": now}
            self.log_metrics_now(  # type: ignore[attr-defined]
                {name: mean(max(loads) * len(loads) / max(sum(loads), 1)) for name, loads in told.items()}
            )
