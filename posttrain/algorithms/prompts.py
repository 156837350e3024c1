"""What online trainers do with a dataset of prompts: check it, repeat each prompt G times, deal them to ranks."""

from __future__ import annotations

import logging
from typing import Any

import datasets
from torch.utils.data import DataLoader

from posttrain.algorithms.online_config import OnlineConfig
from posttrain.data.formats import is_conversational
from posttrain.data.prompts import check_prompts
from posttrain.data.raw import refuse_images
from posttrain.data.samplers import RepeatSampler, repeat_iterable_dataset
from posttrain.errors import ConfigError, DataError
from posttrain.rewards.base import RewardRunner
from posttrain.types import Request

__all__ = ["PromptMixin"]

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
