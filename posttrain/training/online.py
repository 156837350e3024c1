"""`OnlineTrainer`: prompts to rollouts to rewards to advantages to rows, for every method that generates as it trains."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from posttrain.checks import online as log_checks
from posttrain.data.chat import terminal_token_ids, tokenize_prompts
from posttrain.data.forest import collate, split_by_sequence
from posttrain.data.formats import is_conversational
from posttrain.data.samplers import RepeatSampler
from posttrain.errors import ConfigError, RolloutServerError
from posttrain.losses.advantages import MOST
from posttrain.losses.ratio import engine_gap
from posttrain.metrics import Metric, MetricBuffer, mean
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.reference import Reference
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rewards.transform import load_transforms, transforms_state
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch, Spool, balance_rows, completions_for_rewards, prompt_suffixes
from posttrain.rollouts.sampling import generation_fields
from posttrain.training.dynamic_sampling import DynamicSampler, PromptStream, flat_groups
from posttrain.training.episodes import EpisodeDriver, EpisodeParts
from posttrain.training.online_config import OnlineConfig
from posttrain.training.prompts import PromptSource, check_stream, describe_schedule, workers_off
from posttrain.training.rollout_log import (
    WATCHED_CODES,
    RewardWatch,
    completion_lengths,
    completion_rows,
    reward_metrics,
    rollout_metrics,
)
from posttrain.training.trainer import PostTrainer
from posttrain.training.weight_sync import WeightSync, server_engine, training_engine
from posttrain.types import Batch, Finding, LossTerms, ModelOutputs, Request, Rollout, Row, Sampling

__all__ = ["OnlineConfig", "OnlineTrainer", "RolloutBatch"]

logger = logging.getLogger(__name__)


class OnlineTrainer(PostTrainer):
    """Adds generation, scoring and the buffer of scored rollouts to the training loop.

    One generation goes through four methods, each of which a subclass may replace: `roll_out` (prompts to completions),
    `score` (completions to rewards of all ranks), `attach_logps` (log-probs under older or frozen weights) and
    `advantages` (rewards to what each completion is worth). Then its rows wait in the buffer for the objective.

    What it owns: `prompt_source` (which prompts, in which order), `weight_sync` (the engine, and the weights it holds),
    `episode_driver` (turns and tool calls, where tools, environments or a rollout function are given), `reward_watch`
    (rewards that teach nothing) and `dynamic_sampler` (fresh groups in the place of those without variance).
    """

    config_class: ClassVar[type[OnlineConfig]] = OnlineConfig
    runner_class: ClassVar[type[RewardRunner]] = RewardRunner
    # Whether tools, environments and a rollout function are taken.
    takes_episodes: ClassVar[bool] = False
    # Whether a prompt that is too long loses its beginning instead of being refused.
    cuts_prompts = False
    # What the config calls the most tokens of a completion.
    length_option: ClassVar[str] = "max_completion_length"
    zero_gradient_is_normal = True
    signs_of: ClassVar[str] = "R"
    looked_apart: ClassVar[tuple[str, ...]] = WATCHED_CODES
    args: OnlineConfig
    prompt_source: PromptSource
    reward_watch: RewardWatch
    weight_sync: WeightSync
    episode_driver: EpisodeDriver | None = None
    # Environments and further reward columns of the generation under way.
    _environments: list[Any] | None = None
    _extra: dict[str, list[Any]] = {}  # noqa: RUF012 - replaced, never changed
    _spare: dict[str, Any] | None = None

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: OnlineConfig | None = None,
        *,
        train_dataset: Any = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        reward_processing_classes: Any = None,
        rollout_engine: RolloutEngine | None = None,
        **kwargs: Any,
    ) -> None:
        episodes = {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory}
        parts = self._episode_parts(args, episodes)
        if train_dataset is None and parts is not None:
            train_dataset = parts.without_dataset(type(self).__name__, args)
        self.rewards = self.runner_class(
            reward_funcs,
            reward_weights=getattr(args, "reward_weights", None),
            processing_classes=reward_processing_classes,
            transforms=getattr(args, "reward_transform", None),
            timeout=getattr(args, "reward_timeout", None),
            model_options=self._reward_model_options(args),
            score_twice=getattr(args, "check_reward_determinism", False),
            **({"environments": parts.probes} if parts is not None and parts.probes else {}),
        )
        self._step = 0
        self._generations = 0
        self._buffer: Sequence[list[Row]] | None = None
        self._buffer_born = 0
        super().__init__(model, args, train_dataset=train_dataset, **kwargs)
        own_stops = generation_fields(self.args.generation_kwargs or {}).get("stop_token_ids")
        known_stops = terminal_token_ids(self.processing_class, getattr(self.model, "generation_config", None))
        self.stop_ids = tuple(own_stops or known_stops)
        self.weight_sync = self._make_weight_sync(self.make_engine(rollout_engine))
        self.reference = self.make_reference()
        if self.reference is not None and self.reference.copy is not None:
            self.reference.copy.to(self.args.device)
        self.prompt_source.check_context(self.context)
        if self.weight_sync.needs_weight_sync:
            self.weight_sync.check_engine(self.engine)
        self.announce()
        if parts is not None:
            self.rewards.functions = [parts.pooled(function) for function in self.rewards.functions]
            self.episode_driver = self._make_episode_driver(parts)

    # Parts -------------------------------------------------------------------------------------------------------

    def _episode_parts(self, args: OnlineConfig | None, given: dict[str, Any]) -> EpisodeParts | None:
        """What was given for episodes; None where this trainer has none.

        Raises:
            ConfigError: Something was given to a trainer whose completions are single turns.
        """
        for name, value in given.items():
            if value is not None and not self.takes_episodes:
                raise ConfigError(
                    f"{type(self).__name__} has no {name}: its completions are single turns of the engine. Fix: use "
                    f"GRPOTrainer, or leave {name} out."
                )
        self._parts = EpisodeParts(args, **given) if self.takes_episodes else None
        return self._parts

    @property
    def tools(self) -> list[Callable]:
        """Functions that the model may call."""
        return [] if self._parts is None else self._parts.tools

    @property
    def rollout_func(self) -> Callable | None:
        """The user's function that rolls out instead of the engine."""
        return None if self._parts is None else self._parts.rollout_func

    @property
    def environments(self) -> Any:
        """The pool of environments; None where there are none."""
        return None if self._parts is None else self._parts.environments

    @property
    def calls_tools(self) -> bool:
        """Whether the model has anything to call."""
        return self._parts is not None and self._parts.calls_tools

    @staticmethod
    def _reward_model_options(args: OnlineConfig | None) -> dict[str, Any]:
        """How reward models are loaded and run: as the policy is."""
        if args is None:
            return {}
        return {
            "batch_size": args.per_device_train_batch_size,
            "trust_remote_code": args.trust_remote_code,
            "model_init_kwargs": args.model_init_kwargs,
            "chat_template_kwargs": args.chat_template_kwargs,
        }

    def make_reference(self) -> Reference | None:
        """The frozen start of training, where a KL penalty needs it."""
        needed = self.args.beta or getattr(self.args, "log_ref_kl", False)
        return Reference(self.model, fresh_adapter=self.fresh_adapter) if needed else None

    def make_engine(self, given: RolloutEngine | None) -> Any:
        """The engine object that was given, or the one that the config names."""
        if given is not None:
            return given
        bare = self.accelerator.unwrap_model(self.model)
        if not getattr(self.args, "use_vllm", False):
            return self.engine_on(bare)
        if self.args.vllm_mode == "server":
            return server_engine(self.args, self.accelerator)
        from posttrain.rollouts.vllm import VLLMEngine

        return VLLMEngine.for_training(bare, self.args, self.accelerator)

    def engine_on(self, model: Any) -> Any:
        """The engine in process that the config names, on a model."""
        return training_engine(model, self.args, tokenizer=self.processing_class, pad_token_id=self.pad_token_id)

    def _make_weight_sync(self, engine: Any) -> WeightSync:
        return WeightSync(
            engine,
            self.args,
            self.accelerator,
            model=lambda: self.model,
            wrapped=lambda: self.model_wrapped,
            step=lambda: self.state.global_step,
            inference=self.inference,
            log=self.log_metrics_now,
            preflight=self.preflight,
            tell=self.tell,
            record=lambda found: self.record.add_findings(found),
        )

    def _make_episode_driver(self, parts: EpisodeParts) -> EpisodeDriver:
        return EpisodeDriver(
            parts,
            self.args,
            tokenizer=self.processing_class,
            accelerator=self.accelerator,
            sync=self.weight_sync,
            check_lengths=lambda requests: self.prompt_source.check_lengths(requests, self.context),
            stop_ids=self.stop_ids,
            pad_token_id=self.pad_token_id,
            log=self.log_metrics_now,
        )

    @functools.cached_property
    def dynamic_sampler(self) -> DynamicSampler:
        """Made when it is first needed: a subclass may choose the training prompts before that."""
        args = self.args
        return DynamicSampler(
            args.dynamic_sampling,
            self.group_size("train"),
            prompts=PromptStream(self.train_dataset, args.seed + 1_000_003),
            accelerator=self.accelerator,
            rewards=self.rewards,
            generate=lambda rows: self.generate(rows, "train"),
            score=lambda batch: self.score(batch, "train"),
            flat=lambda table: self.flat(table, "train"),
        )

    @property
    def engine(self) -> Any:
        """Samples completions; another one may be put in its place."""
        return self.weight_sync.engine

    @engine.setter
    def engine(self, engine: Any) -> None:
        self.weight_sync.engine = engine

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion, of the model and of the engine."""
        return self.weight_sync.context

    # Prompts -----------------------------------------------------------------------------------------------------

    def make_prompt_source(self) -> PromptSource:
        """Where prompts come from."""
        return PromptSource(self.args, self.processing_class, length_option=self.length_option)

    def _check_arguments(self, model: Any, args: Any, train_dataset: Any, collator: Any) -> None:
        if type(self).get_train_dataloader is OnlineTrainer.get_train_dataloader:
            check_stream(args, train_dataset)
        super()._check_arguments(model, args, train_dataset, collator)

    def prepare_datasets(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Refuse prompts that cannot be generated from, then try the reward functions on two rows."""
        self.prompt_source = self.make_prompt_source()
        if self._parts is not None:
            drops = bool(self.args.remove_unused_columns)
            train, evaluation = self._parts.prepared(train, evaluation, self.processing_class, drops_columns=drops)
        train, evaluation, head = self.prompt_source.prepared(train, evaluation, images=self.may_read_images)
        if self.args.check_rewards and self.can_dry_run:
            rows = self.prompt_source.trial_rows(head)
            self.rewards.dry_run(rows, conversational=is_conversational(rows[0]))
        return train, evaluation

    @property
    def may_read_images(self) -> bool:
        """Whether something of the user's own makes of rows what the model reads: a rollout function, an environment."""
        return not self.can_dry_run

    @property
    def can_dry_run(self) -> bool:
        """Whether reward functions get nothing but columns of the dataset: no environments, no rollout function."""
        return self.environments is None and self.rollout_func is None

    def announce(self) -> None:
        """Log the schedule and the first prompt as the model reads it; refuse prompts that leave no room."""
        if isinstance(self.args, OnlineConfig):
            length = len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None
            logger.info("schedule: %s", self.schedule_text(length))
        self.prompt_source.announce(self.train_dataset, None if self.cuts_prompts else self.context)

    def schedule_text(self, prompts: int | None) -> str:
        """How generations and updates follow each other; ``prompts`` is the length of the training set, if it has one."""
        return describe_schedule(self.args, prompts)

    def collator(self) -> Any:
        """Rows stay rows until their completions exist."""
        return list

    def get_train_dataloader(self) -> DataLoader:
        """Batches of ``per_device_train_batch_size * steps_per_generation`` rows, every prompt repeated G times."""
        return self._get_dataloader(
            dataset=self.prompt_source.train_rows(self.train_dataset),
            description="Training",
            batch_size=self._train_batch_size * (self.args.steps_per_generation or 1),
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """As the parent's; a stream to evaluate on comes in the order that the sampler gives rows, and without workers."""
        if is_training or not isinstance(dataset, datasets.IterableDataset):
            return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        before = workers_off(self.args)
        try:
            return super()._get_dataloader(self.prompt_source.eval_rows(dataset), *args, **kwargs)
        finally:
            vars(self.args).update(before)

    def _get_train_sampler(self, train_dataset: Any = None) -> RepeatSampler:
        return self.prompt_source.train_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> RepeatSampler:
        return self.prompt_source.eval_sampler(eval_dataset)

    def group_size(self, mode: str) -> int:
        """Completions per prompt."""
        return self.prompt_source.group_size(mode)

    @property
    def eval_group(self) -> int:
        """Completions of one prompt are consecutive rows."""
        return self.group_size("eval")

    @property
    def answers_per_row(self) -> int:
        """Each prompt is completed so often."""
        return self.group_size("eval")

    # Micro-batches -----------------------------------------------------------------------------------------------

    def micro_batch(self, inputs: list[dict[str, Any]], index: int) -> list[Batch]:
        """The next slice of the buffer; a new generation first, when the buffer is used up."""
        args = self.args
        slices = args.steps_per_generation or 1
        if self._buffer is None or self._step % (slices * args.num_iterations) == 0:
            generation = self.generate_and_score(inputs, "train")
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = self.spooled(self._balanced(self._slices(generation, slices)))
            self._buffer_born = self.state.global_step
        rows = self._buffer[self._step % slices]
        self._step += 1
        self.log_metrics_now({"staleness/mean_updates": mean(float(self.state.global_step - self._buffer_born))})
        return self.collate(rows)

    def _balanced(self, slices: list[list[Row]]) -> list[list[Row]]:
        """The slices of this rank after completions were exchanged with other ranks, where that pays."""
        if self.accelerator.num_processes == 1 or not self.args.balance_ranks or self.whole_rows:
            return slices
        slices, metrics = balance_rows(slices, self.accelerator)
        for of_slice in metrics:
            self.log_metrics_now(of_slice)
        return slices

    def spooled(self, slices: Sequence[list[Row]]) -> Spool:
        """Slices that are trained later, those beyond ``rollout_buffer_bytes`` on disk."""
        most = getattr(self.args, "rollout_buffer_bytes", None)
        folder = Path(self.args.output_dir, "rollout_buffer")
        return Spool(slices, most=most, folder=folder, rank=self.accelerator.process_index)

    def _slices(self, generation: RolloutBatch, count: int) -> list[list[Row]]:
        """Whole groups in random order, cut into ``count`` equal slices (a group may straddle two)."""
        groups = generation.groups()
        generator = torch.Generator().manual_seed(self.args.seed + self._generations)
        order = [i for g in torch.randperm(len(groups), generator=generator).tolist() for i in groups[g]]
        size = len(order) // count
        skip = self.args.mask_truncated_completions
        return [generation.rows(order[k * size : (k + 1) * size], skip_truncated=skip) for k in range(count)]

    def eval_batches(self, inputs: list[dict[str, Any]]) -> list[Batch]:
        """Generate, score and collate one evaluation batch."""
        generation = self.generate_and_score(inputs, "eval")
        everything = range(len(generation.rollouts))
        return self.collate(generation.rows(everything, skip_truncated=self.args.mask_truncated_completions))

    def collate(self, rows: list[Row]) -> list[Batch]:
        """Rows as forward passes."""
        if not rows:
            return []
        options = {"whole_rows": self.whole_rows, "together": self.together}
        return collate(rows, pad_token_id=self.pad_token_id, layout=self.layout, **options)

    # Generation and scoring --------------------------------------------------------------------------------------

    def generate_and_score(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """Sample a completion for each (already repeated) example, score it, and attach what the loss needs."""
        generation = self.generated(examples, mode)
        table = self.score(generation, mode)
        if mode == "train":
            self.replace_flat_groups(generation, table)
        self.weight_sync.rest()
        self.attach_logps(generation, mode)
        advantages = self.advantages(generation, table, mode)
        mine = advantages[table.start : table.start + len(generation.rollouts)]
        generation.columns["advantages"] = mine.tolist()
        rows = parallel.all_gather_objects(self.completion_rows(generation, table), self.accelerator)
        self.record.add_completions(rows, evaluation=mode == "eval")
        return generation

    def advantages(self, generation: RolloutBatch, table: RewardTable, mode: str) -> Tensor:
        """``(n,)`` advantages of the rows of all ranks; the heart of a subclass.

        Args:
            generation: This rank's completions, with what `attach_logps` gave them.
            table: Rewards of all ranks' completions, groups of `group_size` consecutive; this rank's begin at ``start``.
            mode: ``train`` or ``eval``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define advantages(generation, table, mode).")

    def generated(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """See `generate`. To generate is a collective: a rank without examples samples too, and leaves it behind."""
        if examples:
            return self.generate(examples, mode)
        metrics, self.buffers[mode] = self.buffers[mode], MetricBuffer()
        self.generate(self.spare_examples(), mode)
        self.buffers[mode] = metrics
        return RolloutBatch([], [], [], born=self.state.global_step)

    def spare_examples(self) -> list[dict[str, Any]]:
        """What a rank without examples of its own generates from: the first training row."""
        if self._spare is None:
            self._spare = next(iter(self.train_dataset))
        return [dict(self._spare)]

    def generate(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """One completion per example, decoded and counted; environments are reset first."""
        begin = time.perf_counter()
        self._environments, self._extra = None, {}
        if self.episode_driver is not None:
            number, size = self._generation_number(mode), self.group_size(mode)
            self._environments, examples = self.episode_driver.begin(examples, number=number, group_size=size)
        rollouts, completions = self.roll_out(examples, mode)
        self._generations += mode == "train"
        generation = RolloutBatch(
            examples,
            rollouts,
            completions,
            born=self.state.global_step,
            environments=self._environments,
            extra=self._extra,
        )
        self._log_rollouts(generation, mode, time.perf_counter() - begin)
        return generation

    def _log_rollouts(self, generation: RolloutBatch, mode: str, seconds: float) -> None:
        masked = self.args.mask_truncated_completions
        self.log_metrics_now(rollout_metrics(generation, seconds, masks_truncated=masked), mode)
        if mode == "train":
            tokens = sum(completion_lengths(generation)) + sum(len(r.prompt_ids) for r in generation.rollouts)
            self.counters["num_tokens"] += parallel.all_reduce_sum([float(tokens)], self.accelerator)[0]

    def _generation_number(self, mode: str) -> int:
        """Seeds follow from it: generations of training are counted, those of evaluation go by the step."""
        return self._generations if mode == "train" else 10_000_019 + self.state.global_step

    def roll_out(self, examples: list[dict[str, Any]], mode: str) -> tuple[list[Rollout], list[Any]]:
        """One completion per example, and what reward functions see of each: its text, or a list of messages."""
        if self.episode_driver is not None and self.rollout_func is not None:
            vocabulary = self.model.config.get_text_config().vocab_size
            rollouts, completions, self._extra = self.episode_driver.run_function(examples, self, vocabulary=vocabulary)
            return rollouts, completions
        if self.episode_driver is not None and self.calls_tools:
            sampling, environments = self.sampling(mode), self._environments
            rollouts, completions, _ = self.episode_driver.run_tools(examples, environments, sampling, mode)
            return rollouts, completions
        rollouts = self.sample(self.tokenize(examples), self.sampling(mode))
        texts = self.processing_class.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        for rollout, text in zip(rollouts, texts, strict=True):
            rollout.text = text
        chat = is_conversational(examples[0])
        return rollouts, completions_for_rewards(self.processing_class, rollouts, conversational=chat)

    def tokenize(self, examples: list[dict[str, Any]]) -> list[list[int]]:
        """Prompts as the engine must see them; what an environment added cannot open or end a turn."""
        if self.episode_driver is not None and self.environments is not None:
            return self.episode_driver.tokenize(examples)
        kwargs = self.args.chat_template_kwargs or {}
        return tokenize_prompts(examples, self.processing_class, chat_template_kwargs=kwargs)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """One call to the engine, one completion a prompt; equal neighbours are one request and share their prompt."""
        requests = [Request(prompt, len(list(equal))) for prompt, equal in itertools.groupby(prompts)]
        self.prompt_source.check_lengths(requests, self.context, sampling.max_new_tokens)
        return self.weight_sync.ask([(requests, sampling)])[0]

    def sampling(self, mode: str) -> Sampling:
        """Sampling settings of the next call; the seed is a function of the run's seed, the rank and the call's number."""
        args = self.args
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        number = self._generation_number(mode)
        settings: dict[str, Any] = {
            "max_new_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "stop_token_ids": self.stop_ids,
            "seed": (args.seed * 1_000_003 + number * world + rank) % 2**63,
            "guide": ("regex", regex) if (regex := getattr(args, "vllm_structured_outputs_regex", None)) else None,
        }
        overrides = generation_fields(args.generation_kwargs or {})
        overrides.pop("do_sample", None)
        return Sampling(**(settings | overrides))

    def score(self, generation: RolloutBatch, mode: str) -> RewardTable:
        """Rewards of all ranks' rows."""
        columns = generation.reward_columns()
        prompts = [example["prompt"] for example in generation.examples]
        table = parallel.run_and_share(lambda: self._rewards_of(generation, prompts, columns), self.accelerator)
        counts = parallel.all_gather_objects([len(prompts)], self.accelerator)
        rows = parallel.all_gather_objects(table.values.tolist(), self.accelerator)
        values = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1)
        start = sum(counts[: self.accelerator.process_index])
        groups = [row // self.group_size(mode) for row in range(len(rows))]
        whole = dataclasses.replace(table, values=values, start=start)
        whole = self.rewards.finish(whole, groups=groups, prompts=prompts, columns=columns, training=mode == "train")
        self.log_metrics_now(whole.metrics, mode)
        return whole

    def _rewards_of(self, generation: RolloutBatch, prompts: list[Any], columns: dict[str, list[Any]]) -> RewardTable:
        """Rewards of this rank's rows; without any, no function is called."""
        if not prompts:
            return RewardTable(torch.empty(0, len(self.rewards.names)), list(self.rewards.names), self.rewards.weights)
        return self.rewards(
            prompts=prompts,
            completions=generation.completions,
            completion_ids=[rollout.token_ids for rollout in generation.rollouts],
            columns=columns,
            trainer_state=self.state,
            prompt_suffixes=prompt_suffixes(self.processing_class, generation.rollouts),
            environments=generation.environments,
            judge=False,
        )

    def flat(self, table: RewardTable, mode: str) -> Tensor:
        """Groups of all ranks that teach nothing, ``(n / G,)`` bool."""
        least = getattr(self.args, "min_group_std", 0.0)
        each = getattr(self.args, "multi_objective_aggregation", "") == "normalize_then_sum"
        return flat_groups(table.values, table.weights, self.group_size(mode), least=least, each_function=each)

    def replace_flat_groups(self, generation: RolloutBatch, table: RewardTable) -> None:
        """Put fresh prompts in the place of groups that teach nothing, where ``dynamic_sampling`` asks for it."""
        if self.args.dynamic_sampling:
            self.log_metrics_now(self.dynamic_sampler.replace(generation, table))

    # Log-probs ---------------------------------------------------------------------------------------------------

    @property
    def engine_is_policy(self) -> bool:
        """Whether completions are sampled with the very weights that are trained, so that nothing is to be corrected.

        A rollout function may sample from anything: the log-probs it returns are corrected for.
        """
        return self.rollout_func is None and getattr(self.engine, "in_process", False)

    def terms(self, model: nn.Module, batch: Batch) -> tuple[LossTerms, ModelOutputs]:
        """Run forward and objective; log the log-prob gap to the engine (only rounding error for the in-process engine)."""
        terms, outputs = super().terms(model, batch)
        said, trained = batch.columns.get("engine_logp"), batch.old_logp
        if trained is None or self.old_logp_is_engines:
            moved = model.training and self._buffer_born != self.state.global_step
            trained = None if moved and batch.old_logp is not None else outputs.logp
        if said is not None and trained is not None:
            terms.metrics |= engine_gap(trained, said, batch.loss_mask)
        return terms, outputs

    @property
    def engine_tells_logp(self) -> bool:
        """Whether the log-probs of the engine are real; those of `ScriptedEngine` are placeholders."""
        return getattr(self.engine, "tells_logp", True)

    @property
    def old_logp_is_engines(self) -> bool:
        """Whether the engine's log-probs are the trainer's to rounding, so that no pass computes them again.

        In half precision the two round differently (0.01 nats a token), and ratios would begin away from 1. Log-probs
        returned by a user's ``rollout_func`` are never used.
        """
        exact = getattr(self.engine, "as_trained", False) and not (self.args.bf16 or self.args.fp16)
        return exact and self.engine_is_policy

    def needs_old_logp(self, mode: str) -> bool:
        """Whether a slice may outlive the weights that sampled it."""
        args = self.args
        window = (args.steps_per_generation or 1) * args.num_iterations
        return mode == "train" and args.gradient_accumulation_steps % window != 0

    def attach_logps(self, generation: RolloutBatch, mode: str) -> None:
        """Old log-probs where the buffer outlives its weights, those of a foreign engine, of the reference for a KL."""
        told = [len(r.logp) == len(r.token_ids) for r in generation.rollouts]
        known = all(parallel.all_gather_objects(told, self.accelerator))  # What is computed may be a collective.
        said = [list(rollout.logp) for rollout in generation.rollouts]
        if known and not self.engine_is_policy:
            generation.token_columns["rollout_logp"] = said
        elif known and self.engine_tells_logp:
            generation.token_columns["engine_logp"] = said
        if self.needs_old_logp(mode) and known and self.old_logp_is_engines:
            generation.token_columns["old_logp"] = said
        elif self.needs_old_logp(mode):
            with self.inference() as policy:
                generation.token_columns["old_logp"] = self.logps(policy, generation.every_row())
        if self.reference is not None:
            with self.inference() as policy, self.reference.active(policy) as reference:
                generation.token_columns["ref_logp"] = self.logps(reference, generation.every_row())

    def log_engine_gap(self, rollouts: list[Rollout], trained: list[list[float]], mode: str) -> None:
        """How far the engine's log-probs are from ``trained``, those of the same completions by this trainer's forward."""
        pairs = [
            (torch.tensor(own[: len(r.logp)]), torch.tensor(r.logp))
            for r, own in zip(rollouts, trained, strict=True)
            if len(r.logp) == len(r.token_ids) > 0
        ]
        if pairs and self.engine_tells_logp:
            logp, said = (torch.cat(side) for side in zip(*pairs, strict=True))
            self.log_metrics_now(engine_gap(logp, said, torch.ones_like(said, dtype=torch.bool)), mode)

    @torch.no_grad()
    def logps(self, model: nn.Module, rows: list[Row], temperature: float | None = None) -> list[list[float]]:
        """Per-token log-probs of every completion, by the same forward that trains; at the loss's temperature or another."""
        result: dict[int, list[float]] = {}
        temperature = self.temperature if temperature is None else temperature
        batches = collate(rows, pad_token_id=self.pad_token_id, layout=self.layout) if rows else []
        for batch, counts in parallel.in_step(batches, self.accelerator, self.spare_batch):
            batch = batch.to(self.args.device)
            logp = forward(model, batch, temperature=temperature, chunk_size=self.args.logits_chunk_size).logp
            for origin, values in zip(batch.origin, split_by_sequence(logp, batch) if counts else (), strict=counts):
                result[origin] = values.tolist()
        return [result[i] for i in range(len(result))]

    # Logs and checks ---------------------------------------------------------------------------------------------

    def check_start(self) -> None:
        """As every trainer's; reward models are placed and tried."""
        super().check_start()
        scaled = str(getattr(self.args, "scale_rewards", "none")) != "none"
        self.reward_watch = RewardWatch(self.rewards, self.preflight, self.tell, scaled=scaled)
        self.reward_watch.start(self.args.device, getattr(self.args, "max_completion_length", None))

    @property
    def generations_per_step(self) -> float:
        """Generations of one optimiser step."""
        args = self.args
        return args.gradient_accumulation_steps / ((args.steps_per_generation or 1) * args.num_iterations)

    def signs(self, logs: dict[str, float]) -> Iterable[Finding | None]:
        """Of generating and learning, where a step was logged."""
        yield from super().signs(logs)
        rows = self.state.log_history
        if rows:
            yield from self.reward_watch.tool_findings(rows[-1].get("tools/token_share"))
        if rows and "loss" in rows[-1]:
            yield from log_checks.check_online(rows, generations_per_step=self.generations_per_step)

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Lengths of ended completions are 0 where none ended."""
        if "completions/mean_length" in metrics:
            for kind in ("mean", "min", "max"):
                metrics.setdefault(f"completions/{kind}_terminated_length", 0.0)
        return super().derived(metrics)

    def count_tokens_seen(self, tokens: float) -> None:
        """Counted at generation instead, each prompt once per completion."""

    def bounded(self, advantages: Tensor, mode: str) -> Tensor:
        """Standardised advantages stop at 10, so that no completion is worth a step of its own.

        Args:
            advantages: ``(n,)`` of all ranks, divided by a standard deviation.
            mode: ``train`` or ``eval``.
        """
        sizes = advantages.abs()
        far = sizes > MOST
        self.log_metrics_now({"advantages/clipped_share": mean(far.float())}, mode)
        if mode == "train":
            self.reward_watch.clipped(int(far.sum()), far.numel(), float(sizes.max()) if far.any() else None)
        return advantages.clamp(-MOST, MOST)

    def log_rewards(
        self,
        generation: RolloutBatch,
        table: RewardTable,
        totals: Tensor,
        advantages: Tensor,
        mode: str,
        **std: float | Tensor,
    ) -> None:
        """Log the rewards of all ranks' completions, and watch them in training.

        Args:
            generation: This rank's completions, with the loss masks that rewards saw.
            table: ``values (n, K)``.
            totals: ``(n,)`` weighted rewards before any penalty, NaN where no function applied.
            advantages: ``(n,)``.
            mode: ``train`` or ``eval``.
            std: ``reward_std``, ``frac_reward_zero_std``, as the method defines them.
        """
        lengths = parallel.all_gather_objects(completion_lengths(generation), self.accelerator)
        metrics: dict[str, Metric] = {name: mean(value) for name, value in std.items()}
        self.log_metrics_now(metrics | reward_metrics(table, totals, advantages, lengths), mode)
        if mode == "train":
            self.reward_watch.batch(table, totals, advantages)

    def completion_rows(self, generation: RolloutBatch, table: RewardTable) -> list[dict[str, Any]]:
        """One row a completion of this rank: prompt, completion, each reward, extra columns, advantage."""
        return completion_rows(generation, table, self.processing_class, self.state.global_step)

    # The loop, checkpoints ---------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; where the rollout servers fail for good, save a checkpoint before the error ends the run.

        Environments are closed however it ends; later evaluations make new ones.
        """
        try:
            return super().train(*args, **kwargs)
        except RolloutServerError as error:
            if self.state.global_step > 0:
                self._save_checkpoint(self.model_wrapped, trial=None)
                error.add_note(
                    f"A checkpoint of step {self.state.global_step} was saved in {self.args.output_dir}; go on with "
                    "resume_from_checkpoint=True once the servers are back."
                )
            raise
        finally:
            if self.environments is not None:
                self.environments.close()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's; a generation that fails leaves the position in the window as it was, for the checkpoint."""
        names = ("_step", "_generations", "_buffer", "_buffer_born")
        before = {name: getattr(self, name) for name in names}
        try:
            return super().get_batch_samples(*args, **kwargs)
        except RolloutServerError:
            self.__dict__.update(before)
            raise

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.weight_sync.forget_push()

    def state_to_save(self) -> dict[str, Any]:
        """Where the run stands inside its window, with the scored rollouts it has not trained yet."""
        buffer = None if self._buffer is None else [[dataclasses.asdict(row) for row in rows] for rows in self._buffer]
        online = {"step": self._step, "generations": self._generations, "born": self._buffer_born, "buffer": buffer}
        state = super().state_to_save() | {"online": online, "rewards": transforms_state(self.rewards.transforms)}
        if self.args.dynamic_sampling:
            state["fresh_prompts"] = self.dynamic_sampler.prompts.state()
        return state

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Undo `state_to_save`."""
        super().load_saved_state(state)
        load_transforms(self.rewards.transforms, state.get("rewards", ()))
        if "fresh_prompts" in state:
            self.dynamic_sampler.prompts.load(state["fresh_prompts"])
        online = state["online"]
        self._step, self._generations, self._buffer_born = online["step"], online["generations"], online["born"]
        buffer = online["buffer"]
        slices = None if buffer is None else [[Row(**row) for row in rows] for rows in buffer]
        self._buffer = None if slices is None else self.spooled(slices)
