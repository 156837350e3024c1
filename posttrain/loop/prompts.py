"""The prompts of an online run, checked, repeated and dealt to ranks; and where their rollouts come from (`RolloutSource`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import datasets

from posttrain.data.chat import cut_prompt, tokenize_prompts
from posttrain.data.formats import (
    PROMPT_COLUMNS,
    first_rows,
    is_conversational,
    known_columns,
    refuse_images,
    shown_prompt,
)
from posttrain.data.samplers import RepeatSampler, check_prompts, repeat_iterable_dataset
from posttrain.errors import ConfigError, DataError
from posttrain.loop.run import with_attributes
from posttrain.methods.online_config import OnlineConfig
from posttrain.rollouts.episodes.environments import EMPTY_PROMPT, EnvironmentPool
from posttrain.types import Prompt, Request

if TYPE_CHECKING:
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.pictures.processors import PictureProcessor
    from posttrain.rollouts.episodes.driver import EpisodeDriver
    from posttrain.types import AnyDataset, EvalSets, Tokenizer

logger = logging.getLogger(__name__)


# Options of a loader without worker processes.
IN_PROCESS = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
# Tokens of a prompt that an error quotes.
TOKENS_QUOTED = 40
# Prompts that are tokenised before anything is generated.
PROMPTS_TRIED = 256
# Characters of the first prompt that are logged, and of its end where it is longer.
CHARACTERS_SHOWN, CHARACTERS_AT_END = 400, 60


class PromptSource:
    """Prompts of a run: what is refused of them, in which order they come, and whether they fit the model.

    Args:
        args: Of the trainer.
        tokenizer: Of the policy.
        length_option: What the config calls the most tokens of a completion, for messages.
        tokenized: Rows to prompts as the model reads them; None: by the tokenizer.
        most: Maximum number of tokens of a prompt; a longer one loses its beginning. None: no prompt is cut.
    """

    def __init__(
        self,
        args: PostTrainingConfig,
        tokenizer: Tokenizer,
        *,
        length_option: str = "max_completion_length",
        tokenized: Callable[[list[dict[str, Any]]], Any] | None = None,
        most: int | None = None,
    ) -> None:
        self.most = most
        self.args, self.tokenizer, self.length_option = args, tokenizer, length_option
        # Whether columns that are not prompts are left out.
        self.drops_columns = bool(args.remove_unused_columns)
        self.tokenized = tokenized or self._tokenized
        self._cut_told = False

    # Before the model loads --------------------------------------------------------------------------------------

    def prepared(
        self, train: AnyDataset, evaluation: EvalSets | None, *, images: bool = False
    ) -> tuple[Any, Any, list[dict[str, Any]]]:
        """Refuse prompts that cannot be generated from.

        Args:
            train: The training set.
            evaluation: A set, or several by name, or None.
            images: Whether rows may have images.

        Returns:
            Both as they are generated from, and the first rows of the training set.

        Raises:
            DataError: A row has no usable prompt.
            ConfigError: A generation takes more prompts than there are.
        """
        if self.drops_columns:
            many = isinstance(evaluation, dict)
            train, evaluation = (
                _only_prompts(train),
                {k: _only_prompts(v) for k, v in evaluation.items()} if many else _only_prompts(evaluation),
            )
        head: list[dict[str, Any]] = []
        for name, dataset in named_sets({"train_dataset": train, "eval_dataset": evaluation}):
            if not images:
                refuse_images(dataset, name)
            rows = self.checked_rows(dataset, name)
            head = head or rows
        self.check_size(train)
        return train, evaluation, head

    def for_episodes(
        self,
        driver: EpisodeDriver,
        train: AnyDataset,
        evaluation: EvalSets | None,
        reader: PictureProcessor | None = None,
    ) -> tuple[Any, Any]:
        """Datasets as a driver of episodes needs them: a prompt in every row, messages where there are tools.

        Args:
            driver: Of the run.
            train: The training set.
            evaluation: A set, or several by name, or None.
            reader: Where rows, tools and environments may have images.

        Raises:
            DataError: The model may call tools, and prompts are text.
            ModelError: The chat template cannot hold tool calls.
        """
        for name, dataset in named_sets({"train": train, "eval": evaluation} if driver.pool is None else {}):
            if driver.calls_tools and reader is None:
                refuse_images(dataset, name)
        if driver.pool is not None or driver.harness is not None:
            train, evaluation = [with_prompts(one, drops_columns=self.drops_columns) for one in (train, evaluation)]
        row: dict[str, Any] = next(iter(train), {}) if driver.calls_tools else {}
        if "prompt" in row and not is_conversational({"prompt": row["prompt"]}):
            raise DataError(
                "tools need conversational prompts, and train_dataset has text in 'prompt'. Give lists of messages: "
                "[{'role': 'user', 'content': ...}]."
            )
        driver.use_tokenizer(self.tokenizer, reader)
        return train, evaluation

    def checked_rows(self, dataset: AnyDataset, name: str) -> list[dict[str, Any]]:
        """The first rows of a dataset, all of whose prompts can be generated from."""
        return check_prompts(dataset, name, self.tokenizer)

    def trial_rows(self, head: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Two of the first rows, as reward functions will see them."""
        return head[:2]

    def check_size(self, train: AnyDataset) -> None:
        """Refuse a training set that does not fill one generation; warn where many prompts of an epoch are skipped."""
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

    # Order -------------------------------------------------------------------------------------------------------

    def group_size(self, mode: str) -> int:
        """Completions per prompt; ``mode`` is ``train`` or ``eval``."""
        args = self.args
        return (args.num_generations_eval or args.num_generations) if mode == "eval" else args.num_generations

    def repeats(self) -> tuple[int, int]:
        """Prompts of one generation, and how often the loader yields them: once for each micro-batch they are trained in."""
        args = self.args
        prompts = (args.generation_batch_size or 0) // args.num_generations
        return prompts, args.num_iterations * (args.steps_per_generation or 1)

    def train_rows(self, dataset: AnyDataset) -> Any:
        """A training stream shuffled and repeated; a Dataset as it is, for `train_sampler`."""
        if not isinstance(dataset, datasets.IterableDataset):
            return dataset
        shuffled = dataset.shuffle(seed=self.args.seed) if self.args.shuffle_dataset else dataset
        return repeat_iterable_dataset(shuffled, self.args.num_generations, *self.repeats())

    def eval_rows(self, stream: datasets.IterableDataset) -> Any:
        """A stream to evaluate on, in the order in which `eval_sampler` gives rows."""
        return repeat_iterable_dataset(stream.shuffle(seed=self.args.seed), self.group_size("eval"))

    def train_sampler(self, dataset: AnyDataset) -> RepeatSampler:
        """Every prompt G times, and every generation as often as it is trained."""
        prompts, repeats = self.repeats()
        return RepeatSampler(
            dataset,
            mini_repeat_count=self.args.num_generations,
            batch_size=prompts,
            repeat_count=repeats,
            shuffle=self.args.shuffle_dataset,
            seed=self.args.seed,
        )

    def eval_sampler(self, dataset: AnyDataset) -> RepeatSampler:
        """Every prompt as often as evaluation completes it."""
        return RepeatSampler(dataset, mini_repeat_count=self.group_size("eval"), seed=self.args.seed)

    # Lengths -----------------------------------------------------------------------------------------------------

    def check_context(self, limit: int | None) -> None:
        """Refuse a completion length that leaves no room for any prompt in a context of ``limit`` tokens."""
        longest = self.args.max_completion_length
        if limit is not None and longest >= limit:
            raise ConfigError(
                f"{self.length_option}={longest} leaves no room for a prompt in the model's context of {limit} tokens. Lower it."
            )

    def check_lengths(self, requests: list[Request], limit: int | None, completion: int | None = None) -> None:
        """Refuse a prompt that does not fit a context of ``limit`` tokens together with its completion.

        Args:
            requests: Of one call to the engine.
            limit: Most tokens of prompt and completion; None is no bound.
            completion: Most tokens of a completion; None: those of the config.
        """
        completion = self.args.max_completion_length if completion is None else completion
        longest = max((request.prompt_ids for request in requests), key=len, default=())
        if limit is not None and len(longest) + completion > limit:
            raise DataError(
                f"a prompt of {len(longest)} tokens plus {self.length_option}={completion} does not fit the model's context of "
                f"{limit} tokens. Drop or shorten the prompt, or lower {self.length_option}. It begins: "
                f"{self.tokenizer.decode(longest[:TOKENS_QUOTED])!r}."
            )

    def token_ids(self, rows: list[dict[str, Any]]) -> list[Any]:
        """Return prompts as the engine reads them: the last ``most`` tokens of each. The first cut is logged."""
        prompts, most = self.tokenized(rows), self.most
        long = sum(most is not None and len(prompt) > most for prompt in prompts)
        if long and not self._cut_told:
            self._cut_told = True
            text = "%d of %d prompts lose their beginning: max_length or max_prompt_length leaves them %d tokens."
            logger.warning(text, long, len(prompts), most)
        return [cut_prompt(prompt, most) for prompt in prompts] if long else prompts

    def _tokenized(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        return tokenize_prompts(rows, self.tokenizer, chat_template_kwargs=self.args.chat_template_kwargs or {})

    def announce(self, dataset: AnyDataset, limit: int | None, *, schedule: str | None) -> None:
        """Log the schedule and the first prompt as the model reads it; refuse prompts that do not fit ``limit`` tokens."""
        if schedule is not None:
            logger.info("schedule: %s", schedule)
        if not isinstance(dataset, Sized) or "prompt" not in known_columns(dataset):
            return
        rows = list(first_rows(dataset, PROMPTS_TRIED))
        prompts = self.tokenized(rows)
        text = shown_prompt(self.tokenizer, prompts[0], Prompt.pictures_of(prompts[0]))
        kind = "rendered by the chat template" if is_conversational(rows[0]) else "as text"
        logger.info(
            "the first prompt, %s, %d tokens: %r%s", kind, len(prompts[0]), text[:CHARACTERS_SHOWN],
            f" ... {text[-CHARACTERS_AT_END:]!r}" if len(text) > CHARACTERS_SHOWN else "",
        )  # fmt: skip
        longest = self.args.max_completion_length
        long = [i for i, ids in enumerate(prompts) if limit is not None and len(ids) + longest > limit]
        if long:
            raise DataError(
                f"train_dataset row {long[0]}: a prompt of {len(prompts[long[0]])} tokens plus {self.length_option}={longest} "
                f"does not fit the model's context of {limit} tokens ({len(long)} of the first {len(prompts)} rows are too "
                f"long). Drop or shorten these prompts, or lower {self.length_option}."
            )


def check_stream(args: PostTrainingConfig, train_dataset: AnyDataset) -> None:
    """A stream must reach each process by itself and in one piece, or its groups fall apart.

    Raises:
        ConfigError: The main process would deal its rows out.
    """
    if not isinstance(train_dataset, datasets.IterableDataset):
        return
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
        vars(args).update(IN_PROCESS)


def without_workers(args: PostTrainingConfig) -> AbstractContextManager[None]:
    """Inside, loaders read in this process."""
    return with_attributes(args, IN_PROCESS)


def named_sets(sets: dict[str, Any]) -> list[tuple[str, Any]]:
    """Datasets with their names, those of a dict one by one, without those that are None."""
    pairs = []
    for name, dataset in sets.items():
        several = {f"{name}[{key!r}]": subset for key, subset in dataset.items()} if isinstance(dataset, dict) else None
        pairs += list(named_sets(several)) if several is not None else [(name, dataset)]
    return [(name, dataset) for name, dataset in pairs if dataset is not None]


def empty_prompts(pool: EnvironmentPool | None, name: str, args: PostTrainingConfig | None) -> datasets.Dataset:
    """One empty prompt for each group of a generation: without a training set, the environment says what is to be done.

    Args:
        pool: Environments, if any were given.
        name: Of the trainer, for messages.
        args: Of the trainer; None where none were given.

    Raises:
        DataError: There is no environment.
        ConfigError: Rows must choose an environment, or nothing bounds the run.
    """
    if pool is None:
        raise DataError(f"{name} needs train_dataset, and it is None: only an environment_factory can do without.")
    if pool.routed:
        raise ConfigError(
            "train_dataset=None with a dict of environments: each row says which it wants, in a column 'environment'. Give "
            "such a dataset, or a single factory."
        )
    if args is None or args.max_steps <= 0:
        max_steps = None if args is None else args.max_steps
        raise ConfigError(f"train_dataset=None has no length: set max_steps above 0 (it is {max_steps}).")
    groups = (args.generation_batch_size or 0) // args.num_generations
    return datasets.Dataset.from_list([{"prompt": list(EMPTY_PROMPT)} for _ in range(groups)])


def with_prompts(dataset: AnyDataset, *, drops_columns: bool) -> Any:
    """A dataset (or several by name) whose rows all have a ``prompt``: an empty one for an environment to fill.

    Raises:
        ConfigError: Columns would be dropped that ``reset`` is given.
    """
    if isinstance(dataset, dict):
        return {name: with_prompts(subset, drops_columns=drops_columns) for name, subset in dataset.items()}
    names = known_columns(dataset)
    others = sorted(set(names) - {*PROMPT_COLUMNS})
    if drops_columns and others:
        raise ConfigError(
            f"remove_unused_columns=True would leave out {others}, and an environment's reset gets all columns of its row. "
            "Leave it off, or remove the columns from the dataset."
        )
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset) or "prompt" in names:
        return dataset
    if isinstance(dataset, datasets.Dataset):
        return dataset.add_column("prompt", [list(EMPTY_PROMPT)] * len(dataset))
    return dataset.map(lambda row: {"prompt": row.get("prompt") or list(EMPTY_PROMPT)})


def _only_prompts(dataset: AnyDataset) -> Any:
    """Without other columns; a reward function that needs one of them learns it in the dry run."""
    names = known_columns(dataset)
    return dataset.select_columns([name for name in names if name in PROMPT_COLUMNS]) if names else dataset


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
