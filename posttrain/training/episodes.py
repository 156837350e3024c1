"""What an online trainer needs for rollouts of several turns: tools, environments, or a rollout function of the user's."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets

from posttrain.data.formats import is_conversational
from posttrain.errors import ArgumentTypeError, ConfigError, DataError
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.rewards.call import EnvironmentReward
from posttrain.rewards.runner import RewardRunner
from posttrain.rollouts.base import keeping
from posttrain.rollouts.batch import RolloutBatch, completions_for_rewards
from posttrain.rollouts.episodes.custom import custom_rollouts
from posttrain.rollouts.episodes.driver import Batches, Episode, ToolLoop, share_prompts
from posttrain.rollouts.episodes.environments import EMPTY_PROMPT, EnvironmentPool, PooledReward
from posttrain.rollouts.episodes.tokens import prepare_tokenizer, tokenize_observed
from posttrain.rollouts.episodes.toolbox import ToolBox, ToolRunner
from posttrain.training.prompts import PROMPT_COLUMNS
from posttrain.types import Rollout

__all__ = ["EpisodeMixin"]

logger = logging.getLogger(__name__)


class EpisodeMixin:
    """Goes before `OnlineTrainer` in a trainer's bases and replaces how completions come about.

    Args:
        tools: Functions the model may call, with type hints and Google-style docstrings; plain or asynchronous.
        rollout_func: ``f(prompts, trainer) -> dict`` with ``prompt_ids``, ``completion_ids`` and ``logprobs`` (or None), one
            entry a received prompt, optionally ``env_mask``; other keys go to the reward functions.
        environment_factory: Makes an object with ``reset`` whose public methods are tools; or a dict of factories from which
            each row chooses by its ``environment`` column. One with ``get_reward`` is a reward function too.
    """

    args: Any  # An `OnlineConfig` with `EpisodeFields`.
    processing_class: Any
    accelerator: Any
    state: Any
    engine: Any
    rewards: RewardRunner
    stop_ids: tuple[int, ...]
    pad_token_id: int
    context: int | None
    push_if_due: Callable[[], None]
    _is_far: bool
    _uncorrected_told = False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        if rollout_func is not None and (tools or environment_factory is not None):
            raise ConfigError(
                "rollout_func runs whole episodes itself, so tools and environment_factory have nothing to do beside it. Give "
                "one of the two."
            )
        if rollout_func is not None and not callable(rollout_func):
            raise ArgumentTypeError(f"rollout_func must be callable, and it is {type(rollout_func).__name__}.")
        for name, value in {"rollout_func": rollout_func, "environment_factory": environment_factory}.items():
            if value is not None and not _silenced():
                logger.warning("%s is experimental: its contract may change between versions.", name)
        self.rollout_func, self.tools = rollout_func, list(tools or ())
        self.toolbox = ToolBox.of(self.tools)
        timeout = getattr(args, "tool_timeout", 60.0)
        self.tool_runner = ToolRunner(getattr(args, "tool_workers", None), timeout)
        self.environments = None if environment_factory is None else self._make_pool(environment_factory, args)
        self.tool_tokenizer: Any = None
        if train_dataset is None:
            train_dataset = self._without_dataset(args)
        super().__init__(model, reward_funcs, args, train_dataset=train_dataset, **kwargs)  # type: ignore[call-arg]
        if self.environments is not None:
            self.rewards.functions = [self._pooled(function) for function in self.rewards.functions]

    def _make_pool(self, factory: Any, args: Any) -> EnvironmentPool:
        pool = EnvironmentPool(factory, self.tool_runner, getattr(args, "environment_retries", 0))
        probes = [kind.instances[0] for kind in pool.kinds.values()]
        for probe in probes:
            pool.toolbox(probe, self.toolbox)  # A tool's name given twice is found now.
        self.runner_class = functools.partial(type(self).runner_class, environments=probes)  # type: ignore[attr-defined]
        weakref.finalize(self, pool.close)
        return pool

    def _pooled(self, function: Any) -> Any:
        """A reward that environments give themselves, on the tools' threads, within their time and with their retries."""
        pool = self.environments
        return PooledReward(function.kind, pool) if isinstance(function, EnvironmentReward) and pool else function

    def _without_dataset(self, args: Any) -> Any:
        """One empty prompt for each group of a generation: the environment says what is to be done."""
        if self.environments is None:
            raise DataError(
                f"{type(self).__name__} needs train_dataset, and it is None: only an environment_factory can do without."
            )
        if self.environments.routed:
            raise ConfigError(
                "train_dataset=None with a dict of environments: each row says which it wants, in a column 'environment'. Give "
                "such a dataset, or a single factory."
            )
        if args is None or args.max_steps <= 0:
            given = None if args is None else args.max_steps
            raise ConfigError(f"train_dataset=None has no length: set max_steps above 0 (it is {given}).")
        groups = (args.generation_batch_size or 0) // args.num_generations
        return datasets.Dataset.from_list([{"prompt": list(EMPTY_PROMPT)} for _ in range(groups)])

    # Before the model loads --------------------------------------------------------------------------------------

    @property
    def calls_tools(self) -> bool:
        """Whether the model has anything to call."""
        return bool(self.tools) or (self.environments is not None and self.environments.has_tools)

    def prepare_datasets(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Rows without a prompt get an empty one where an environment speaks first; a template that cannot hold tools fails."""
        if self.environments is not None:
            for dataset in (train, *(evaluation.values() if isinstance(evaluation, dict) else (evaluation,))):
                self._check_columns(dataset)
            train = _with_prompts(train)
            many = isinstance(evaluation, dict)
            evaluation = {k: _with_prompts(v) for k, v in evaluation.items()} if many else _with_prompts(evaluation)
        if self.calls_tools:
            row: dict[str, Any] = next(iter(train), {})
            if "prompt" in row and not is_conversational({"prompt": row["prompt"]}):
                raise DataError(
                    "tools need conversational prompts, and train_dataset has text in 'prompt'. Give lists of messages: "
                    "[{'role': 'user', 'content': ...}]."
                )
            schema, template = [getattr(self.processing_class, f"response_{x}", None) for x in ("schema", "template")]
            if schema is not None and template is None:
                warnings.warn(
                    "response_schema is not read any more: set response_template.", FutureWarning, stacklevel=2
                )
            self.tool_tokenizer = prepare_tokenizer(self.processing_class)
        return super().prepare_datasets(train, evaluation)  # type: ignore[misc]

    def _check_columns(self, dataset: Any) -> None:
        """Refuse to drop what ``reset`` is given."""
        others = sorted(set(getattr(dataset, "column_names", None) or ()) - {*PROMPT_COLUMNS})
        if self.args.remove_unused_columns and others:
            raise ConfigError(
                f"remove_unused_columns=True would leave out {others}, and an environment's reset gets all columns of its row. "
                "Leave it off, or remove the columns from the dataset."
            )

    @property
    def can_dry_run(self) -> bool:
        """Whether rewards get nothing but what the dataset has: no environments, no columns of a rollout function."""
        return self.environments is None and self.rollout_func is None

    @property
    def engine_is_policy(self) -> bool:
        """A rollout function may sample from anything: the log-probs it returns are corrected for."""
        return self.rollout_func is None and super().engine_is_policy  # type: ignore[misc]

    # Generation --------------------------------------------------------------------------------------------------

    def generate(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """Environments are reset first; what they, the tools and a rollout function add goes with the generation."""
        self._environments: list[Any] | None = None
        self._extra: dict[str, list[Any]] = {}
        if self.environments is not None:
            pool, seeds = self.environments, self._group_seeds(len(examples), mode)
            rows = [dict(example) for example in examples]
            self._environments, examples = parallel.run_and_share(lambda: pool.begin(rows, seeds), self.accelerator)
        generation = super().generate(examples, mode)  # type: ignore[misc]
        generation.environments, generation.extra = self._environments, self._extra
        return generation

    def _group_seeds(self, count: int, mode: str) -> list[int]:
        """A number for each row, equal for completions that are compared with each other, over ranks too."""
        number = self._generations if mode == "train" else 10_000_019 + self.state.global_step  # type: ignore[attr-defined]
        before = parallel.all_gather_objects([count], self.accelerator)[: self.accelerator.process_index]
        start = sum(before)
        group = self.group_size(mode)  # type: ignore[attr-defined]
        base = self.args.seed * 1_000_003 + number * 100_003
        return [(base + (start + i) // group) % 2**31 for i in range(count)]

    def roll_out(self, examples: list[dict[str, Any]], mode: str) -> tuple[list[Rollout], list[Any]]:
        """One episode per example."""
        if self.rollout_func is not None:
            return self._roll_out_custom(examples)
        if not self.calls_tools:
            return super().roll_out(examples, mode)  # type: ignore[misc]
        pool, environments = self.environments, self._environments or [None] * len(examples)
        boxes = [self.toolbox if e is None or pool is None else pool.toolbox(e, self.toolbox) for e in environments]
        rows = [{**row, "tools": box.schemas} for row, box in zip(examples, boxes, strict=True)]
        kwargs = self.args.chat_template_kwargs or {}
        prompts = tokenize_observed(rows, self.tool_tokenizer, chat_template_kwargs=kwargs)
        self.check_lengths(share_prompts(prompts), self.args.max_completion_length)  # type: ignore[attr-defined]
        episodes = [Episode(ids, box, e) for ids, box, e in zip(prompts, boxes, environments, strict=True)]
        with keeping(self.engine):
            self._loop(kwargs).run(episodes, self.sampling(mode))  # type: ignore[attr-defined]
        for episode in episodes:
            if episode.tools.lost and pool is not None:
                pool.discard(episode.environment)
        self._log_calls(episodes, mode)
        texts = self.processing_class.batch_decode([e.token_ids for e in episodes], skip_special_tokens=True)
        rollouts = [e.rollout(text) for e, text in zip(episodes, texts, strict=True)]
        return rollouts, [e.messages or [{"role": "assistant", "content": ""}] for e in episodes]

    def tokenize(self, examples: list[dict[str, Any]]) -> list[list[int]]:
        """As every trainer's; what an environment added to a prompt cannot open or end a turn."""
        if self.environments is None:
            return super().tokenize(examples)  # type: ignore[misc]
        kwargs = self.args.chat_template_kwargs or {}
        return tokenize_observed(examples, self.processing_class, chat_template_kwargs=kwargs)

    def _loop(self, template_kwargs: dict[str, Any]) -> ToolLoop:
        args, limit = self.args, self.args.max_tool_calling_iterations

        def generate(batches: Batches) -> list[list[Rollout]]:
            return self.ask_engine([(share_prompts(prompts), sampling) for prompts, sampling in batches])  # type: ignore[attr-defined]

        def any_process(here: bool) -> bool:
            return parallel.all_reduce_sum([float(here)], self.accelerator)[0] > 0

        rounds = {} if limit is None else {"max_iterations": None if limit == -1 else limit}
        return ToolLoop(
            self.tool_tokenizer,
            generate,
            stop_ids=self.stop_ids,
            runner=self.tool_runner,
            max_output_tokens=args.max_tool_output_tokens,
            context=self.context,
            any_process=any_process,
            template_kwargs=template_kwargs,
            **rounds,
        )

    def _log_calls(self, episodes: list[Episode], mode: str) -> None:
        calls, failures = sum(e.calls for e in episodes), sum(e.failures for e in episodes)
        metrics = {
            "tools/call_frequency": mean(calls / max(len(episodes), 1), weight=len(episodes)),
            "tools/failure_frequency": mean(failures / calls, weight=calls) if calls else mean(0.0, weight=1e-9),
        }
        self.log_metrics_now(metrics, mode)  # type: ignore[attr-defined]

    def _roll_out_custom(self, examples: list[dict[str, Any]]) -> tuple[list[Rollout], list[Any]]:
        assert self.rollout_func is not None
        prompts = [example["prompt"] for example in examples]
        function, ends = self.rollout_func, (*self.stop_ids, self.pad_token_id)
        if self._is_far:
            self.push_if_due()  # The function may ask the same servers: with the weights of now.
        limits = {"vocabulary": self.model.config.get_text_config().vocab_size, "most": self.args.max_completion_length}  # type: ignore[attr-defined]
        rollouts, self._extra = parallel.run_and_share(
            lambda: custom_rollouts(function, prompts, self, stop_ids=ends, **limits), self.accelerator
        )
        if self.args.vllm_importance_sampling_correction and not any(r.logp for r in rollouts):
            self._say_uncorrected()
        texts = self.processing_class.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        rollouts = [dataclasses.replace(r, text=text) for r, text in zip(rollouts, texts, strict=True)]
        chat = is_conversational(examples[0])
        return rollouts, completions_for_rewards(self.processing_class, rollouts, conversational=chat)

    def _say_uncorrected(self) -> None:
        if not self._uncorrected_told:
            logger.warning(
                "rollout_func returned no log-probs (logprobs=None): nothing corrects for how far what it sampled from is from "
                "the policy. Return those of the sampler."
            )
        self._uncorrected_told = True

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, then close the environments, however it ends; later evaluations make new ones."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self.environments is not None:
                self.environments.close()


def _silenced() -> bool:
    names = ("POSTTRAIN_EXPERIMENTAL_SILENCE", "TRL_EXPERIMENTAL_SILENCE")
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def _with_prompts(dataset: Any) -> Any:
    """A dataset whose rows all have a ``prompt``."""
    names = getattr(dataset, "column_names", None)
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset) or (names and "prompt" in names):
        return dataset
    if isinstance(dataset, datasets.Dataset):
        return dataset.add_column("prompt", [list(EMPTY_PROMPT)] * len(dataset))
    return dataset.map(lambda row: {"prompt": row.get("prompt") or list(EMPTY_PROMPT)})
