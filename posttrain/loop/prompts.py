"""`PromptSource`: checks the prompts of an online run, repeats them, and distributes them to ranks."""

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
    rows_at,
    shown_prompt,
)
from posttrain.data.samplers import RepeatSampler, check_prompts, repeat_iterable_dataset
from posttrain.errors import ConfigError, DataError
from posttrain.loop.run import with_attributes
from posttrain.methods.online_config import OnlineConfig
from posttrain.rollouts.episodes.environments import EMPTY_PROMPT, EnvironmentPool
from posttrain.types import Prompt, Request

if TYPE_CHECKING:
    from posttrain.extensions.images.processors import PictureProcessor
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.rollouts.episodes.driver import EpisodeDriver
    from posttrain.types import AnyDataset, EvalSets, Tokenizer

logger = logging.getLogger(__name__)


# Options for a data loader that has no worker processes.
IN_PROCESS = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
# Number of prompt tokens that an error message quotes.
TOKENS_QUOTED = 40
# Number of prompts that are tokenized at once in checks before the first generation. If prompts have images, only this many
# prompts are checked.
PROMPTS_TRIED = 256
# Maximum number of prompts that are tokenized to find prompts that are too long.
MOST_TOKENIZED = 20_000
# Number of characters that are logged of the first prompt. If the prompt is longer, its last CHARACTERS_AT_END characters
# are also logged.
CHARACTERS_SHOWN, CHARACTERS_AT_END = 400, 60


class PromptSource:
    """Checks, orders and tokenizes the prompts of a run. It also checks that prompts and completions fit into the context.

    Args:
        args: The trainer's config.
        tokenizer: Tokenizer of the policy.
        length_option: Name of the config field with the maximum completion length, used in messages.
        tokenized: Function that converts rows to prompts (token ids with images). None: prompts are tokenized as text.
        most: Maximum number of tokens of a prompt. The beginning of a longer prompt is removed. None: prompts are not
            truncated.
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
        # Whether columns that do not belong to prompts are dropped.
        self.drops_columns = bool(args.remove_unused_columns)
        self.tokenized = tokenized or self._tokenized
        self._cut_logged = False

    # Before the model loads --------------------------------------------------------------------------------------

    def prepared(
        self, train: AnyDataset, evaluation: EvalSets | None, *, images: bool = False
    ) -> tuple[Any, Any, list[dict[str, Any]]]:
        """Check that completions can be generated for all prompts of the training and evaluation sets.

        Args:
            train: The training set.
            evaluation: A dataset, a mapping from names to datasets, or None.
            images: Whether rows may have images.

        Returns:
            Training and evaluation set in the form that generation needs, and the first rows of the training set.

        Raises:
            DataError: A row has no usable prompt.
            ConfigError: The training set has fewer prompts than one generation needs.
        """
        if self.drops_columns:
            many = isinstance(evaluation, dict)
            if dropped := sorted({*known_columns(train)} - {*PROMPT_COLUMNS}):
                logger.warning(
                    "remove_unused_columns=True drops the columns %s: reward functions do not get them.", dropped
                )
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
        """Prepare datasets for an episode driver. Every row gets a prompt, which must be a list of messages if the model can
        call tools.

        Args:
            driver: Episode driver of the run.
            train: The training set.
            evaluation: A dataset, a mapping from names to datasets, or None.
            reader: Image processor, if rows, tools or environments may provide images.

        Raises:
            DataError: The model may call tools, but prompts are text.
            ModelError: The chat template does not support tool calls.
        """
        for name, dataset in named_sets({"train": train, "eval": evaluation} if driver.pool is None else {}):
            if driver.calls_tools and reader is None:
                refuse_images(dataset, name)
        if driver.pool is not None or driver.harness is not None:
            train, evaluation = [with_prompts(data, drops_columns=self.drops_columns) for data in (train, evaluation)]
        row: dict[str, Any] = next(iter(train), {}) if driver.calls_tools else {}
        if "prompt" in row and not is_conversational({"prompt": row["prompt"]}):
            raise DataError(
                "tools need conversational prompts, but train_dataset has text in its column 'prompt'. Use lists of messages: "
                "[{'role': 'user', 'content': ...}]."
            )
        driver.use_tokenizer(self.tokenizer, reader)
        return train, evaluation

    def checked_rows(self, dataset: AnyDataset, name: str) -> list[dict[str, Any]]:
        """Check all prompts of a dataset, and return its first rows."""
        return check_prompts(dataset, name, self.tokenizer)

    def trial_rows(self, head: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return two of the dataset's first rows, in the format that reward functions receive."""
        return head[:2]

    def check_size(self, train: AnyDataset) -> None:
        """Raise an error if the training set has fewer prompts than one generation needs. Warn if many prompts are
        skipped in each epoch.
        """
        if not isinstance(train, datasets.Dataset):
            return
        args = self.args
        wanted = (args.generation_batch_size or 0) // args.num_generations
        if len(train) < wanted:
            raise ConfigError(
                f"train_dataset has {len(train)} prompts, but a generation batch takes {wanted} "
                f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}): no step is "
                f"possible. Pass at least {wanted} prompts, or lower per_device_train_batch_size or "
                "gradient_accumulation_steps."
            )
        dropped = len(train) % wanted
        if dropped > 0.05 * len(train):
            logger.warning(
                "the last %d of %d prompts are skipped in every epoch: they do not fill a generation batch of %d prompts.",
                dropped,
                len(train),
                wanted,
            )

    # Order -------------------------------------------------------------------------------------------------------

    def group_size(self, mode: str) -> int:
        """Return the number of completions per prompt. ``mode`` is ``train`` or ``eval``."""
        args = self.args
        return (args.num_generations_eval or args.num_generations) if mode == "eval" else args.num_generations

    def repeats(self) -> tuple[int, int]:
        """Return the number of prompts per generation, and how often the loader yields each of them. A prompt is yielded
        once for each micro-batch that uses it.
        """
        args = self.args
        prompts = (args.generation_batch_size or 0) // args.num_generations
        return prompts, args.num_iterations * (args.steps_per_generation or 1)

    def train_rows(self, dataset: AnyDataset) -> Any:
        """Return a shuffled training stream with repeated prompts. A `Dataset` is returned unchanged, because
        `train_sampler` shuffles and repeats its rows.
        """
        if not isinstance(dataset, datasets.IterableDataset):
            return dataset
        shuffled = dataset.shuffle(seed=self.args.seed) if self.args.shuffle_dataset else dataset
        return repeat_iterable_dataset(shuffled, self.args.num_generations, *self.repeats())

    def eval_rows(self, stream: datasets.IterableDataset) -> Any:
        """Return a shuffled evaluation stream with repeated prompts, in the order in which `eval_sampler` yields them."""
        return repeat_iterable_dataset(stream.shuffle(seed=self.args.seed), self.group_size("eval"))

    def train_sampler(self, dataset: AnyDataset) -> RepeatSampler:
        """Return a sampler that yields every prompt G times. The sampler yields the prompts of a generation once for each
        micro-batch that uses them.
        """
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
        """Return a sampler for evaluation that yields every prompt once per completion."""
        return RepeatSampler(dataset, mini_repeat_count=self.group_size("eval"), seed=self.args.seed)

    # Lengths -----------------------------------------------------------------------------------------------------

    def check_context(self, limit: int | None) -> None:
        """Raise an error if the maximum completion length leaves no space for a prompt in a context of ``limit`` tokens."""
        longest = self.args.max_completion_length
        if limit is not None and longest >= limit:
            raise ConfigError(
                f"{self.length_option}={longest} leaves no room for a prompt in the model's context of {limit} tokens. Lower it."
            )

    def check_lengths(self, requests: list[Request], limit: int | None, completion: int | None = None) -> None:
        """Raise an error if a prompt and its completion do not fit into a context of ``limit`` tokens.

        Args:
            requests: Requests of one engine call.
            limit: Maximum number of tokens of prompt and completion. None: no limit.
            completion: Maximum number of tokens of a completion. None: the value of the config.
        """
        completion = self.args.max_completion_length if completion is None else completion
        longest = max((request.prompt_ids for request in requests), key=len, default=())
        if limit is not None and len(longest) + completion > limit:
            raise DataError(
                f"a prompt of {len(longest)} tokens plus {self.length_option}={completion} does not fit the model's context of "
                f"{limit} tokens. Drop or shorten the prompt, or lower {self.length_option}. The prompt begins: "
                f"{self.tokenizer.decode(longest[:TOKENS_QUOTED])!r}."
            )

    def token_ids(self, rows: list[dict[str, Any]]) -> list[Any]:
        """Return prompts as token ids for the engine. Only the last ``most`` tokens of a prompt are kept. A warning is
        logged at the first truncation.
        """
        prompts, most = self.tokenized(rows), self.most
        long = sum(most is not None and len(prompt) > most for prompt in prompts)
        if long and not self._cut_logged:
            self._cut_logged = True
            text = "%d of %d prompts lose their first tokens: max_length or max_prompt_length limits a prompt to %d tokens."
            logger.warning(text, long, len(prompts), most)
        return [cut_prompt(prompt, most) for prompt in prompts] if long else prompts

    def _tokenized(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        return tokenize_prompts(rows, self.tokenizer, chat_template_kwargs=self.args.chat_template_kwargs or {})

    def announce(self, dataset: AnyDataset, *, schedule: str | None) -> None:
        """Log the schedule of the run, and the first prompt in the form that the model receives."""
        if schedule is not None:
            logger.info("schedule: %s", schedule)
        if not isinstance(dataset, Sized) or "prompt" not in known_columns(dataset):
            return
        rows = list(first_rows(dataset, 1))
        prompts = self.tokenized(rows)
        text = shown_prompt(self.tokenizer, prompts[0], Prompt.pictures_of(prompts[0]))
        kind = "rendered by the chat template" if is_conversational(rows[0]) else "as text"
        logger.info(
            "the first prompt, %s, %d tokens: %r%s", kind, len(prompts[0]), text[:CHARACTERS_SHOWN],
            f" ... {text[-CHARACTERS_AT_END:]!r}" if len(text) > CHARACTERS_SHOWN else "",
        )  # fmt: skip

    def check_rows(self, dataset: AnyDataset, name: str, limit: int | None) -> None:
        """Raise an error if a prompt of a dataset and its completion do not fit into a context of ``limit`` tokens.

        Only prompts that may be too long are tokenized. The number of bytes of a prompt is an upper bound on its number of
        tokens. The chat template is assumed to add at most as many tokens as the whole first prompt has. If rows have
        images, only the first rows are checked.
        """
        columns = known_columns(dataset)
        if limit is None or not isinstance(dataset, datasets.Dataset) or "prompt" not in columns:
            return
        completion, tried = self.args.max_completion_length, range(min(len(dataset), PROMPTS_TRIED))
        if not {"image", "images"} & set(columns):
            room = limit - completion - len(self.tokenized(list(first_rows(dataset, 1)))[0])
            texts = first_rows(dataset, len(dataset), ["prompt"])
            tried = [i for i, row in enumerate(texts) if len(str(row["prompt"]).encode()) > room][:MOST_TOKENIZED]
        lengths = {}
        for start in range(0, len(tried), PROMPTS_TRIED):
            indices = tried[start : start + PROMPTS_TRIED]
            prompts = self.tokenized(list(rows_at(dataset, indices)))
            # Prompts above `most` are truncated before sampling.
            lengths |= {i: min(len(p), self.most or len(p)) for i, p in zip(indices, prompts, strict=True)}
        long = [i for i, length in lengths.items() if length + completion > limit]
        if long:
            raise DataError(
                f"{name} row {long[0]}: a prompt of {lengths[long[0]]} tokens plus {self.length_option}={completion} does not "
                f"fit the model's context of {limit} tokens ({len(long)} rows are too long). Drop or shorten these prompts, "
                f"or lower {self.length_option}."
            )


def check_stream(args: PostTrainingConfig, train_dataset: AnyDataset) -> None:
    """Raise an error if a stream would be split between processes. This split would separate the rows of a group.

    Raises:
        ConfigError: The main process would distribute the rows of the stream.
    """
    if not isinstance(train_dataset, datasets.IterableDataset):
        return
    if args.accelerator_config.dispatch_batches:
        raise ConfigError(
            "accelerator_config has dispatch_batches=True, but train_dataset is a stream. The main process would "
            "distribute its rows and split groups. Remove dispatch_batches."
        )
    if args.dataloader_num_workers:
        logger.warning(
            "dataloader_num_workers=%d is set to 0: workers would split the groups of a stream between them.",
            args.dataloader_num_workers,
        )
        vars(args).update(IN_PROCESS)


def without_workers(args: PostTrainingConfig) -> AbstractContextManager[None]:
    """Return a context in which data loaders use no worker processes."""
    return with_attributes(args, IN_PROCESS)


def named_sets(sets: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return datasets as a list of pairs (name, dataset). Dicts of datasets are flattened, and datasets that are None are
    omitted.
    """
    pairs = []
    for name, dataset in sets.items():
        several = {f"{name}[{key!r}]": subset for key, subset in dataset.items()} if isinstance(dataset, dict) else None
        pairs += list(named_sets(several)) if several is not None else [(name, dataset)]
    return [(name, dataset) for name, dataset in pairs if dataset is not None]


def empty_prompts(pool: EnvironmentPool | None, name: str, args: PostTrainingConfig | None) -> datasets.Dataset:
    """Return a training set with one empty prompt per group of a generation, for environments that write the prompts.

    Args:
        pool: Environments. None: no environments were passed.
        name: Name of the trainer, used in messages.
        args: The trainer's config. None: no config was passed.

    Raises:
        DataError: There is no environment.
        ConfigError: There are several environments, so that a dataset must select an environment for each row, or
            ``max_steps`` is not set.
    """
    if pool is None:
        raise DataError(f"{name} needs train_dataset, but it is None. It may only be None with an environment_factory.")
    if pool.routed:
        raise ConfigError(
            "train_dataset=None with a dict of environments: each row must choose one in a column 'environment'. "
            "Pass such a dataset, or a single factory."
        )
    if args is None or args.max_steps <= 0:
        max_steps = None if args is None else args.max_steps
        raise ConfigError(f"train_dataset=None has no length: set max_steps above 0 (it is {max_steps}).")
    groups = (args.generation_batch_size or 0) // args.num_generations
    return datasets.Dataset.from_list([{"prompt": list(EMPTY_PROMPT)} for _ in range(groups)])


def with_prompts(dataset: AnyDataset, *, drops_columns: bool) -> Any:
    """Add an empty ``prompt`` to every row without one, in one dataset or in several by name. An environment writes these
    prompts later.

    Raises:
        ConfigError: Columns would be dropped, but the environment's ``reset`` receives all columns.
    """
    if isinstance(dataset, dict):
        return {name: with_prompts(subset, drops_columns=drops_columns) for name, subset in dataset.items()}
    names = known_columns(dataset)
    others = sorted(set(names) - {*PROMPT_COLUMNS})
    if drops_columns and others:
        raise ConfigError(
            f"remove_unused_columns=True would drop {others}, but an environment's reset gets all columns of its row. Set "
            "remove_unused_columns=False, or remove the columns from the dataset."
        )
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset) or "prompt" in names:
        return dataset
    if isinstance(dataset, datasets.Dataset):
        return dataset.add_column("prompt", [list(EMPTY_PROMPT)] * len(dataset))
    return dataset.map(lambda row: {"prompt": row.get("prompt") or list(EMPTY_PROMPT)})


def _only_prompts(dataset: AnyDataset) -> Any:
    """Drop all columns except the prompt. A reward function that needs another column then fails in the dry run."""
    names = known_columns(dataset)
    return dataset.select_columns([name for name in names if name in PROMPT_COLUMNS]) if names else dataset


def describe_schedule(args: OnlineConfig, prompts: int | None, *, has_ratio: bool = True) -> str:
    """Describe how many generations, updates and epochs a run has.

    Args:
        args: Config whose batch sizes have been resolved.
        prompts: Number of rows of the training set. None: unknown.
        has_ratio: Whether the loss contains an importance ratio. If so, the text describes its effect.
    """
    slices, passes = args.steps_per_generation or 1, args.num_iterations
    updates = slices * passes / args.gradient_accumulation_steps
    groups = (args.generation_batch_size or 0) // args.num_generations
    lines = [
        f"each generation is {groups} prompts x {args.num_generations} completions = {args.generation_batch_size}, in "
        f"{slices} slices, each used {passes} time{'s' if passes > 1 else ''}: {_updates(updates)} per generation."
    ]
    if args.gradient_accumulation_steps % (slices * passes):
        lines.append(
            f"The last slice is trained on {_updates(max(updates - 1, 0))} after it was sampled (staleness/mean_updates)."
        )
    elif has_ratio:
        lines.append(
            "The weights change only after every slice was used, so the importance ratio is 1. A loss near 0 and a "
            "clip ratio of 0 are normal, and grad_norm shows whether the model learns."
        )
    if prompts:
        generations = prompts // groups
        steps = generations * slices * passes / args.gradient_accumulation_steps
        lines.append(f"An epoch of {prompts} prompts is {generations} generations and {steps:g} optimizer steps.")
        if args.max_steps > 0 and steps:
            lines.append(f"max_steps={args.max_steps} is {args.max_steps / steps:.3g} epochs.")
    return " ".join(lines)


def _updates(count: float) -> str:
    return f"{count:g} update{'' if count == 1 else 's'}"
