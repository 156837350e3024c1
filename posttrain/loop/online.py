"""`OnlineTrainer`: prompts to rollouts to rewards to advantages to rows, for every method that generates as it trains."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
from torch import Tensor, nn
from torch.utils.data import DataLoader

from posttrain.data.chat import ids_without_token, is_processor, terminal_token_ids
from posttrain.data.forest import collate
from posttrain.data.formats import is_conversational
from posttrain.data.samplers import PromptStream, RepeatSampler
from posttrain.errors import RolloutError, RolloutServerError, check_rules
from posttrain.loop.build import as_config
from posttrain.loop.dynamic_sampling import DynamicSampler
from posttrain.loop.episodes import EpisodeRunner, make_driver
from posttrain.loop.prompts import (
    PromptSource,
    check_stream,
    describe_schedule,
    empty_prompts,
    without_workers,
)
from posttrain.loop.reward_watch import RewardWatch
from posttrain.loop.scoring import (
    Scorer,
    completion_lengths,
    completion_metrics,
    completion_rows,
    reward_options,
    reward_runner,
)
from posttrain.loop.trainer import PostTrainer
from posttrain.loop.weight_sync import WeightSync, training_engine, vllm_engine
from posttrain.losses.advantages import flat_groups
from posttrain.losses.policy import engine_gap
from posttrain.methods.online_config import OnlineConfig, resolve_auto
from posttrain.metrics import Metric, MetricBuffer, mean
from posttrain.models import parallel
from posttrain.models.architecture import generation_config_of
from posttrain.models.forward import batch_logps
from posttrain.models.heads import causal_lm
from posttrain.models.reference import Reference
from posttrain.report.completions import rollout_table
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rollouts.base import RolloutEngine, require_engine
from posttrain.rollouts.batch import (
    RolloutBatch,
    RolloutWindow,
    balance_rows,
    decoded,
    sampled_logps,
    shared_requests,
)
from posttrain.rollouts.episodes.driver import for_trainer
from posttrain.rollouts.episodes.harness import take_harness
from posttrain.rollouts.native.requests import check_top_k
from posttrain.rollouts.sampling import configured_sampling, generation_fields
from posttrain.types import (
    WHOLE,
    Advantages,
    Batch,
    LossTerms,
    ModelOutputs,
    Prompt,
    Rollout,
    Row,
    Sampling,
    Truncation,
)

if TYPE_CHECKING:
    from posttrain.rollouts.episodes.driver import EpisodeDriver
    from posttrain.types import AnyDataset, EvalSets, LogProbs


EVAL_STRIDE = 32_452_843  # Between the numbers of two batches of an evaluation; those of training are smaller.


class OnlineTrainer(PostTrainer):
    """Adds generation, scoring and the buffer of scored rollouts to the training loop.

    One generation goes through four methods, each of which a subclass may replace: `roll_out` (prompts to completions),
    `score` (completions to rewards of all ranks), `measured_logps` (log-probs under older or frozen weights) and
    `advantages` (rewards to what each completion is worth). Then its rows wait in the buffer for the objective.

    What it owns: `prompt_source` (which prompts, in which order), `weight_sync` (the engine, and the weights it holds),
    `driver` (episodes, where tools, environments or a rollout function are given),
    `reward_watch` (rewards that teach nothing) and `dynamic_sampler` (fresh groups in the place of those without variance).
    """

    runner_class: ClassVar[type[RewardRunner]] = RewardRunner
    args: OnlineConfig
    driver: EpisodeDriver | None

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: OnlineConfig | None = None,
        *,
        train_dataset: AnyDataset | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        harness: Any = None,
        reward_processing_classes: Any = None,
        rollout_engine: RolloutEngine | None = None,
        **kwargs: Any,
    ) -> None:
        given = {
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
            "harness": harness,
        }
        args = as_config(self.config_class, args)
        _, given["harness"], reward_funcs = take_harness(None, harness, reward_funcs)
        given = {name: value for name, value in given.items() if value is not None}
        self.driver = make_driver(self.METHOD.traits, type(self).__name__, args, given)
        # Tools and environments may return images; a rollout function reads them itself.
        self.harness = None if self.driver is None else self.driver.harness
        calls = self.driver is not None and rollout_func is None and self.harness is None
        self._returns_images = calls and is_processor(kwargs.get("processing_class"))
        # By the names that TRL's trainers have.
        self.tools, self.rollout_func = list(tools or ()), rollout_func
        self.environments = None if self.driver is None else self.driver.pool
        if train_dataset is None:
            train_dataset = empty_prompts(self.environments, type(self).__name__, args)
        options = reward_options(reward_funcs, args or self.config_class, reward_processing_classes)
        self.rewards = reward_runner(self.runner_class, options, self.environments)
        if args is not None and type(self).get_train_dataloader is OnlineTrainer.get_train_dataloader:
            check_stream(args, train_dataset)
        super().__init__(model, args, train_dataset=train_dataset, **kwargs)
        self.ids_without_token = ids_without_token(
            self.processing_class, self.model.config.get_text_config().vocab_size
        )
        if self.args.mask_ids_without_token:
            options = self.args.generation_kwargs or {}
            never = sorted(self.ids_without_token.union(options.get("suppress_tokens") or ()))
            self.args.generation_kwargs = options | {"suppress_tokens": never}
        self.window = RolloutWindow(self.args.num_iterations)
        own_stops = generation_fields(self.args.generation_kwargs or {}).get("stop_token_ids")
        known_stops = terminal_token_ids(self.processing_class, generation_config_of(self.model))
        self.stop_ids = tuple(own_stops or known_stops)
        self.weight_sync = WeightSync(self.make_engine(rollout_engine), self.run)
        self.reference = self.make_reference()
        if self.reference is not None and self.reference.copy is not None:
            self.reference.copy.to(self.args.device)
        self.prompt_source.check_context(self.context if self.samples_completions else None)
        if self.weight_sync.needs_weight_sync:
            self.weight_sync.check_engine(self.engine)
        self.announce()
        if self.args.log_completions:
            self.add_callback(rollout_table(self.args, self.record, self.rewards.names))

    def reads_images(self) -> tuple[bool, bool]:
        """Pictures of prompts, and those that tools and environments return."""
        reads = self.method.traits.reads_images and (self.driver is None or self._returns_images)
        return reads, self._returns_images

    # Parts -------------------------------------------------------------------------------------------------------

    def _sources(self) -> dict[str, Any]:
        return {"rewards": self.rewards, "environments": self.environments}

    def make_reference(self) -> Reference | None:
        """The frozen start of training, where a KL penalty needs it."""
        needed = self.args.beta or self.args.log_ref_kl
        return Reference(self.model, fresh_adapter=self.fresh_adapter) if needed else None

    def make_engine(self, given: RolloutEngine | None) -> Any:
        """The engine object that was given, or the one that the config names."""
        if given is not None:
            engine = require_engine(given)
            engine.tokenizer = self.processing_class if engine.tokenizer is None else engine.tokenizer
            return engine
        bare = self.accelerator.unwrap_model(self.model)
        resolve_auto(self.args, bare, self.processing_class)
        far = self.args.use_vllm
        engine = vllm_engine(bare, self.args, self.accelerator) if far else self.engine_on(bare)
        return self.vision.check_engine(engine, self.rewards.functions)

    def engine_on(self, model: nn.Module) -> Any:
        """The engine in process that the config names, on a model."""
        return training_engine(model, self.args, tokenizer=self.processing_class, pad_token_id=self.pad_token_id)

    @functools.cached_property
    def episodes(self) -> EpisodeRunner:
        """Runs what takes more than one call to the engine."""
        return EpisodeRunner(
            self.driver,
            self.weight_sync,
            self.prompt_source,
            stop_ids=self.stop_ids,
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
            flat=lambda table: self.without_signal(table, "train"),
        )

    def without_signal(self, table: RewardTable, mode: str) -> Tensor:
        """``(n / G,)`` bool: which groups of all ranks' rewards give no completion an advantage."""
        return flat_groups(table.values, table.weights, self.group_size(mode))

    @property
    def engine(self) -> Any:
        """Samples completions; another one may be put in its place."""
        return self.weight_sync.engine

    @engine.setter
    def engine(self, engine: Any) -> None:
        self.weight_sync.engine = engine

    @property
    def samples_completions(self) -> bool:
        """Whether training samples."""
        return True

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion, of the model and of the engine."""
        return self.weight_sync.context

    # Prompts -----------------------------------------------------------------------------------------------------

    def make_prompt_source(self) -> PromptSource:
        """Where prompts come from."""
        pictured = self.vision.prompts if self.vision.images else None
        return PromptSource(self.args, self.processing_class, tokenized=pictured)

    def prepare_datasets(self, train: AnyDataset, evaluation: EvalSets | None) -> tuple[Any, Any]:
        """Refuse prompts that cannot be generated from, then try the reward functions on two rows."""
        self.prompt_source = self.make_prompt_source()
        if self.driver is not None:
            train, evaluation = self.prompt_source.for_episodes(self.driver, train, evaluation, self.vision.reader)
        train, evaluation = self.vision.checked_prompts(train, "train"), self.vision.checked_prompts(evaluation, "eval")
        train, evaluation, head = self.prompt_source.prepared(train, evaluation, images=self.may_read_images)
        if self.args.check_rewards and self.can_dry_run:
            rows = self.vision.opened(self.prompt_source.trial_rows(head))
            self.rewards.dry_run(rows, conversational=is_conversational(rows[0]))
        return train, evaluation

    @property
    def may_read_images(self) -> bool:
        """Whether prompts may have images: placed here, or read by a rollout function or an environment."""
        return self.vision.images or not self.can_dry_run

    @property
    def can_dry_run(self) -> bool:
        """Whether reward functions get nothing but columns of the dataset: no environments, no rollout function."""
        return self.environments is None and self.rollout_func is None and self.harness is None

    def announce(self) -> None:
        """Log the schedule and the first prompt as the model reads it; refuse prompts that leave no room."""
        length = len(self.train_dataset) if isinstance(self.train_dataset, Sized) else None
        schedule = self.schedule_text(length) if isinstance(self.args, OnlineConfig) else None
        self.prompt_source.announce(
            self.train_dataset, None if self.method.traits.cuts_prompts else self.context, schedule=schedule
        )

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

    def _get_dataloader(self, dataset: AnyDataset, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """As the parent's; a stream to evaluate on comes in the order that the sampler gives rows, and without workers."""
        if is_training or not isinstance(dataset, datasets.IterableDataset):
            return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        with without_workers(self.args):
            return super()._get_dataloader(self.prompt_source.eval_rows(dataset), *args, **kwargs)

    def _get_train_sampler(self, train_dataset: AnyDataset | None = None) -> RepeatSampler:
        return self.prompt_source.train_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def _get_eval_sampler(self, eval_dataset: EvalSets | None) -> RepeatSampler:
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
        return self.eval_group

    # Micro-batches -----------------------------------------------------------------------------------------------

    def micro_batch(self, inputs: list[dict[str, Any]], index: int) -> list[Batch]:
        """The next slice of the buffer; a new generation first, when the buffer is used up."""
        if index == 0:
            self.window.mark()
        if self.window.used_up:
            try:
                generation = self.generate_and_score(inputs, "train")
            except RolloutServerError:  # A checkpoint is saved because of it.
                self.window.rewind()
                raise
            self.window.fill(self._slices(generation, self.args.steps_per_generation or 1), self.state.global_step)
        rows = self.window.take()
        self.run.log({"staleness/mean_updates": mean(float(self.state.global_step - self.window.born))})
        return self.collate(rows)

    def _slices(self, generation: RolloutBatch, count: int) -> list[list[Row]]:
        """Whole groups in random order, cut into ``count`` slices, then exchanged with other ranks where that pays."""
        seed, skip = self.args.seed + self.window.generations, self.args.mask_truncated_completions
        slices = generation.slices(count, seed=seed, skip_truncated=skip)
        if self.accelerator.num_processes == 1 or not self.args.balance_ranks or self.method.traits.whole_rows:
            return slices
        slices, metrics = balance_rows(slices, self.accelerator)
        for of_slice in metrics:
            self.run.log(of_slice)
        return slices

    def eval_batches(self, inputs: list[dict[str, Any]]) -> list[Batch]:
        """Generate, score and collate one evaluation batch."""
        generation = self.generate_and_score(inputs, "eval")
        score = functools.partial(self.scorer.score, state=self.state, group_size=self.eval_group, training=False)
        self.run.log(self.vision.control(inputs, self.eval_group, self.roll_out, score), "eval")
        whole, skip = range(len(generation.rollouts)), self.args.mask_truncated_completions
        return self.collate(generation.rows(whole, skip_truncated=skip))

    def collate(self, rows: list[Row]) -> list[Batch]:
        """Rows as forward passes."""
        return self.run.collate(rows) if rows else []

    # Generation and scoring --------------------------------------------------------------------------------------

    def generate_and_score(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """Sample a completion for each (already repeated) example, score it, and attach what the loss needs."""
        generation = self.generated(examples, mode)
        table = self.score(generation, mode)
        if mode == "train" and self.args.dynamic_sampling:
            generation, table, metrics = self.dynamic_sampler.replace(generation, table)
            self.run.log(metrics)
        self.weight_sync.rest()
        found = self.advantages(generation, table, self.measured_logps(generation, mode))
        self.run.log(found.metrics, mode)
        if self.scores_rewards:
            self.reward_watch.log(generation, table, found, mode)
        generation = generation.worth(found)
        shares = parallel.gather_objects(self.completion_rows(generation, table), self.accelerator)
        self.record.add_completions([row for share in shares for row in share], evaluation=mode == "eval")
        return generation

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs) -> Advantages:
        """What each completion is worth, see `Method.advantages`; the heart of a subclass.

        Args:
            rollouts: This rank's completions; ``mode`` and ``group_size`` say what they are for.
            rewards: Of all ranks' completions; this rank's begin at ``rewards.start``.
            logps: What `measured_logps` returned.
        """
        return self.method.advantages(rollouts, rewards, logps, self.run.ranks)

    @property
    def scores_rewards(self) -> bool:
        """Whether completions have rewards that are to be looked at."""
        return True

    def generated(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """See `generate`. To generate is a collective: a rank without examples samples too, and leaves it behind."""
        if examples:
            return self.generate(examples, mode)
        metrics, self.buffers[mode] = self.buffers[mode], MetricBuffer()
        self.generate([dict(self.spare_example)], mode)
        self.buffers[mode] = metrics
        return RolloutBatch([], [], [], born=self.state.global_step, mode=mode, group_size=self.group_size(mode))

    @functools.cached_property
    def spare_example(self) -> dict[str, Any]:
        """What a rank without examples of its own generates from: the first training row."""
        return next(iter(self.train_dataset))

    def generate(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """One completion per example, decoded and counted; environments are reset first."""
        begin = time.perf_counter()
        self.run.truncation = self.truncation
        number, size = self._generation_number(mode), self.group_size(mode)
        examples = self.episodes.begin(examples, number=number, group_size=size)
        rollouts, completions = self.roll_out(examples, mode)
        self.window.generations += mode == "train"
        rollouts, masked, pictured = self.vision.look_at(rollouts, examples, self.model, self.pad_token_id)
        examples = self.vision.opened(examples)
        generation = RolloutBatch(
            examples, rollouts, completions,
            born=self.state.global_step,
            environments=self.episodes.environments,
            extra=self.episodes.extra,
            left_out=masked,
            failure_reward=None if self.harness is None else self.harness.options.failure,
            mode=mode,
            group_size=size,
        )  # fmt: skip
        seconds, cut = time.perf_counter() - begin, self.args.mask_truncated_completions
        written = sum(completion_lengths(generation))
        speed = {"rollouts/tokens_per_second": mean(written / max(seconds, 1e-9)), "rollouts/seconds": mean(seconds)}
        self.run.log(completion_metrics(generation, cut, self.ids_without_token) | speed | pictured, mode)
        if mode == "train":
            tokens = written + sum(len(r.prompt_ids) for r in rollouts)
            self.counters["num_tokens"] += parallel.all_reduce_sum([float(tokens)], self.accelerator)[0]
        return generation

    def _generation_number(self, mode: str) -> int:
        """Seeds follow from it; evaluation goes by the step and its batches, so that it repeats and they draw apart."""
        if mode == "train":
            return self.window.generations
        return 10_000_019 + self.state.global_step + EVAL_STRIDE * self._eval_rounds

    def roll_out(self, examples: list[dict[str, Any]], mode: str) -> tuple[list[Rollout], list[Any]]:
        """One completion per example, and what reward functions see of each: its text, or a list of messages."""
        if self.rollout_func is not None:
            vocabulary = self.model.config.get_text_config().vocab_size
            function = for_trainer(self.rollout_func, self)
            return self.episodes.run_function(examples, function, vocabulary=vocabulary)
        if self.harness is not None:
            vocabulary, number = self.model.config.get_text_config().vocab_size, self._generation_number(mode)
            settings = {"vocabulary": vocabulary, "number": number}
            return self.episodes.run_harness(examples, self.sampling(mode), mode, **settings)
        if self.driver is not None and self.driver.calls_tools:
            return self.episodes.run_tools(examples, self.sampling(mode), mode)
        rollouts = self.sample(self.tokenize(examples), self.sampling(mode))
        chat = is_conversational(examples[0])
        return decoded(self.processing_class, rollouts, conversational=chat)

    @property
    def prompt_limit(self) -> int | None:
        """Most tokens of a prompt; a longer one loses its beginning. None: no prompt is cut."""
        return None

    def tokenize(self, examples: list[dict[str, Any]]) -> list[Any]:
        """Prompts as the engine must see them, of long ones the end; what an environment added cannot open or end a turn."""
        if self.driver is not None and self.environments is not None:
            return self.driver.tokenize(examples)
        return self.prompt_source.cut(self.prompt_source.tokenized(examples), self.prompt_limit)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """One call to the engine, one completion a prompt; equal neighbours are one request and share their prompt."""
        requests = shared_requests(prompts)
        self.prompt_source.check_lengths(requests, self.context, sampling.max_new_tokens)
        rollouts = self.weight_sync.ask([(requests, sampling)])[0]
        pictures = map(Prompt.pictures_of, prompts)
        return [
            dataclasses.replace(r, pictures=shown) if shown else r for r, shown in zip(rollouts, pictures, strict=True)
        ]

    def sampling(self, mode: str) -> Sampling:
        """Sampling settings of the next call; the seed is a function of the run's seed, the rank and the call's number."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        seed = (self.args.seed * 1_000_003 + self._generation_number(mode) * world + rank) % 2**63
        return self.vision.sampling(configured_sampling(self.args, stop_token_ids=self.stop_ids, seed=seed), self.model)

    def score(self, generation: RolloutBatch, mode: str) -> RewardTable:
        """Rewards of all ranks' rows."""
        training, size = mode == "train", self.group_size(mode)
        table = self.scorer.score(generation, self.state, group_size=size, training=training)
        self.run.log(table.metrics, mode)
        return table

    # Log-probs ---------------------------------------------------------------------------------------------------

    @property
    def truncation(self) -> Truncation:
        """What another engine leaves out as it samples, for methods that compare its log-probs with their own."""
        follows = self.method.traits.follows_truncation and not self.engine_is_policy
        return self.left_out if follows else WHOLE

    @property
    def left_out(self) -> Truncation:
        """What no engine draws: top-k, top-p, min-p, suppressed ids, and those that stand for images."""
        return self.vision.sampling(configured_sampling(self.args, stop_token_ids=(), seed=0), self.model).left_out

    @property
    def engine_is_policy(self) -> bool:
        """Whether completions are sampled with the very weights that are trained, so that nothing is to be corrected.

        A rollout function may sample from anything: the log-probs it returns are corrected for.
        """
        return self.rollout_func is None and self.engine.capabilities.shares_weights

    def observe_pass(self, batch: Batch, terms: LossTerms, outputs: ModelOutputs) -> dict[str, Metric]:
        """Return the gap of log-probs to the engine's (only rounding error for the engine in process)."""
        sampled, trained = batch.columns.get("engine_logp"), batch.old_logp
        if sampled is None:
            return {}
        if trained is None or self.old_logp_is_engines:
            moved = self.model.training and self.window.born != self.state.global_step
            trained = None if moved and batch.old_logp is not None else outputs.logp
        return {} if trained is None else engine_gap(trained, sampled, batch.loss_mask)

    @property
    def old_logp_is_engines(self) -> bool:
        """Whether the engine's log-probs are the trainer's to rounding, so that no pass computes them again.

        In half precision the two round differently (0.01 nats a token), and ratios would begin away from 1. Log-probs
        returned by a user's ``rollout_func`` are never used.
        """
        exact = self.engine.capabilities.logprobs_match_training and not (self.args.bf16 or self.args.fp16)
        return exact and self.engine_is_policy

    def needs_old_logp(self, mode: str) -> bool:
        """Whether a slice may outlive the weights that sampled it."""
        args = self.args
        window = (args.steps_per_generation or 1) * args.num_iterations
        return mode == "train" and args.gradient_accumulation_steps % window != 0

    def measured_logps(self, generation: RolloutBatch, mode: str) -> dict[str, list[list[float]]]:
        """Old log-probs where the buffer outlives its weights, those of a foreign engine, of the reference for a KL."""
        sampled = self.logps_of_sampler(generation)
        complete = [len(x) == len(r.token_ids) for x, r in zip(sampled, generation.sequences(), strict=True)]
        # The same on every rank: the passes below are collectives.
        known = all(parallel.all_gather_objects(complete, self.accelerator))
        columns: dict[str, list[list[float]]] = {}
        if known and not self.engine_is_policy:
            columns["rollout_logp"] = sampled
        elif known and self.engine.capabilities.has_logprobs and self.method.temperature == self.args.temperature:
            columns["engine_logp"] = sampled
        if self.needs_old_logp(mode) and known and self.old_logp_is_engines:
            columns["old_logp"] = sampled
        elif self.needs_old_logp(mode):
            with self.run.inference() as policy:
                if self.truncation:
                    columns["old_logp"], columns["log_mass"] = self._logps(policy, generation.every_row())
                else:
                    columns["old_logp"] = self.logps(policy, generation.every_row())
        if self.reference is not None:
            with self.run.inference() as policy, self.reference.active(policy) as reference:
                columns["ref_logp"] = self.logps(reference, generation.every_row())
        else:
            given = not (self.method.traits.beta_is_kl and self.args.beta)
            check_rules(self.args, [("beta", given, "needs a reference, made with the trainer: set it in the config")])
        return columns

    def logps_of_sampler(self, generation: RolloutBatch) -> list[list[float]]:
        """What the engine said of its tokens: of the policy itself before truncation, of another engine after it.

        Raises:
            RolloutError: They are to be corrected for, and are of the distribution before truncation.
        """
        # A rollout function says what it drew from, and nothing else.
        cut = WHOLE if self.rollout_func is not None else self.truncation
        rollouts = list(generation.sequences())
        sampled = sampled_logps(rollouts, cut)
        if sampled is None and self.args.vllm_importance_sampling_correction:
            raise RolloutError(
                f"the engine {self.engine.name!r} says log-probs of the distribution before {cut}, and tokens were drawn "
                "after it: ratios would be off by the mass that was left out. Fix: an engine that fills Rollout.processed_logp "
                "(native, hf, vLLM), sampling without truncation, or vllm_importance_sampling_correction=False."
            )
        return [[] for _ in rollouts] if sampled is None else sampled

    def logps(self, model: nn.Module, rows: list[Row], temperature: float | None = None) -> list[list[float]]:
        """Per-token log-probs of every completion, by the same forward that trains; at the loss's temperature or another."""
        return self._logps(model, rows, temperature)[0]

    def _logps(
        self, model: nn.Module, rows: list[Row], temperature: float | None = None
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Log-probs, and the logs of the mass that truncation leaves; no masses where nothing is left out."""
        batches = collate(rows, pad_token_id=self.pad_token_id, layout=self.layout) if rows else []
        passes = parallel.in_step(batches, self.accelerator, self.run.spare_batch)
        placed = ((batch.to(self.args.device), counts) for batch, counts in passes)
        temperature = self.method.temperature if temperature is None else temperature
        settings = {"temperature": temperature, "truncation": self.truncation}
        return batch_logps(model, placed, **settings, chunk_size=self.args.logits_chunk_size)

    # Logs and checks ---------------------------------------------------------------------------------------------

    def check_start(self) -> None:
        """As every trainer's; reward models are placed and tried."""
        super().check_start()
        check_top_k(self.args.top_k or 0, causal_lm(self.model).config.get_text_config().vocab_size)
        self.reward_watch = RewardWatch(
            self.rewards,
            self.run,
            scaled=str(getattr(self.args, "scale_rewards", "none")) != "none",
            stop_after=self.args.stop_without_signal,
        )
        self.scorer = Scorer(self.rewards, self.processing_class, self.accelerator)
        self.reward_watch.start(self.args.device, self.args.max_completion_length)

    def completion_rows(self, generation: RolloutBatch, table: RewardTable) -> list[dict[str, Any]]:
        """One row a completion of this rank: prompt, completion, each reward, extra columns, advantage."""
        step, images = self.state.global_step, self.vision.images and self.args.log_multimodal
        self.run.shown = completion_rows(generation, table, self.processing_class, step, images=images)
        return self.run.shown

    # The loop, checkpoints ---------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; where the rollout servers fail for good, save a checkpoint before the error ends the run.

        Environments are closed however it ends; later evaluations make new ones.
        """
        self.run.truncation = self.truncation  # A resumed run may begin with rows that wait.
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
            if self.harness is not None:
                self.harness.close()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.weight_sync.forget_push()

    def state_to_save(self) -> dict[str, Any]:
        """Where the run stands inside its window, with the scored rollouts it has not trained yet."""
        state = super().state_to_save() | {"online": self.window.state(), "rewards": self.rewards.transforms_state()}
        if self.args.dynamic_sampling:
            state["fresh_prompts"] = self.dynamic_sampler.prompts.state()
        return state

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Undo `state_to_save`."""
        super().load_saved_state(state)
        self.rewards.load_transforms(state.get("rewards", ()))
        if "fresh_prompts" in state:
            self.dynamic_sampler.prompts.load(state["fresh_prompts"])
        processes = self.accelerator.num_processes
        self.window.load(state["online"], before=state.get("processes", processes), now=processes)
