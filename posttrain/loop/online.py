"""`OnlineTrainer`: the training loop of methods that generate completions, with prompts, rollouts, rewards and advantages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
from torch import nn
from torch.utils.data import DataLoader

from posttrain.data.chat import is_processor
from posttrain.data.samplers import PromptStream, RepeatSampler
from posttrain.errors import RolloutServerError
from posttrain.loop import rollout, samplers, scoring
from posttrain.loop.build import as_config
from posttrain.loop.dynamic_sampling import DynamicSampler
from posttrain.loop.prompts import (
    PromptSource,
    check_stream,
    describe_schedule,
    empty_prompts,
    named_sets,
    without_workers,
)
from posttrain.loop.reward_watch import RewardWatch
from posttrain.loop.rollout import Online
from posttrain.loop.samplers import Sampler, SingleTurn, make_driver
from posttrain.loop.scoring import reward_options, reward_runner, try_rewards
from posttrain.loop.trainer import PostTrainer
from posttrain.loop.weight_sync import WeightSync, engine_of, training_engine
from posttrain.methods.online_config import OnlineConfig
from posttrain.models.heads import causal_lm
from posttrain.models.reference import Reference
from posttrain.report.completions import rollout_table
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch, RolloutWindow
from posttrain.rollouts.episodes.driver import for_trainer, take_harness
from posttrain.rollouts.native.requests import check_top_k
from posttrain.types import Advantages, SampleSettings

if TYPE_CHECKING:
    from posttrain.rollouts.episodes.driver import EpisodeDriver
    from posttrain.types import AnyDataset, EvalSets, LogProbs


class OnlineTrainer(PostTrainer):
    """Trainer for methods that generate completions. It adds generation, scoring and a buffer of scored rollouts to
    `PostTrainer`.

    `posttrain.loop.rollout` creates rollout batches. A subclass may replace three of its functions: `sample` (dataset rows
    to completions), `score` (completions to rewards of all ranks) and `advantages` (rewards to advantages). The window
    stores the rows of a rollout batch until training has used them.

    The trainer's components are `prompt_source` (prompts and their order), `sampler` (converts rows to completions),
    `weight_sync` (the engine and its weights), `driver` (episodes with tools, environments or a rollout function),
    `reward_watch` (checks of rewards) and `dynamic_sampler` (replacement of groups whose rewards are all equal).
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
        arguments = {
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
            "harness": harness,
        }
        args = as_config(self.config_class, args)
        _, arguments["harness"], reward_funcs = take_harness(None, harness, reward_funcs)
        arguments = {name: value for name, value in arguments.items() if value is not None}
        self.driver = make_driver(self.METHOD.traits, type(self).__name__, args, arguments)
        # Tools and environments can return images. A rollout function cannot return images, because it processes images
        # itself.
        self.harness = None if self.driver is None else self.driver.harness
        calls = self.driver is not None and rollout_func is None and self.harness is None
        self._returns_images = calls and is_processor(kwargs.get("processing_class"))
        # These attributes have the same names as in TRL's trainers.
        self.tools, self.rollout_func = list(tools or ()), rollout_func
        self.environments = None if self.driver is None else self.driver.pool
        if train_dataset is None:
            train_dataset = empty_prompts(self.environments, type(self).__name__, args)
        own = kwargs.get("processing_class")
        options = reward_options(reward_funcs, args or self.config_class, reward_processing_classes, own)
        self.rewards = reward_runner(self.runner_class, options, self.environments)
        if args is not None and type(self).get_train_dataloader is OnlineTrainer.get_train_dataloader:
            check_stream(args, train_dataset)
        super().__init__(model, args, train_dataset=train_dataset, **kwargs)
        self.stop_ids, self.ids_without_token = rollout.special_ids(self.run)
        self.window = RolloutWindow(self.args.num_iterations)
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
        looks = [self.reward_watch.log] if self.scores_rewards else []
        self.progress.watchers["rollout"] = [*looks, partial(scoring.add_to_record, self.record)]
        self.sampler = self.make_sampler()
        self.resolve()

    def reads_images(self) -> tuple[bool, bool]:
        """Return two flags: whether prompts may contain images, and whether tools and environments may return images."""
        reads = self.method.traits.reads_images and (self.driver is None or self._returns_images)
        return reads, self._returns_images

    # Parts -------------------------------------------------------------------------------------------------------

    def make_reference(self) -> Reference | None:
        """Create the frozen reference model with the initial weights. Return None if the run needs no KL divergence."""
        needed = self.args.beta or self.args.log_ref_kl
        return Reference(self.model, fresh_adapter=self.fresh_adapter) if needed else None

    def make_engine(self, given: RolloutEngine | None) -> Any:
        """Return the engine that the user passed. If the user passed no engine, create the one that the config selects."""
        return engine_of(self.run, given, self.rewards, self.engine_on)

    def engine_on(self, model: nn.Module) -> Any:
        """Create the in-process engine that the config selects, for the given model."""
        return training_engine(model, self.args, tokenizer=self.processing_class, pad_token_id=self.pad_token_id)

    def make_sampler(self) -> Sampler:
        """Create the object that samples completions. It samples with one engine call per batch, with tools or environments,
        with a harness, or with a rollout function.
        """
        single = SingleTurn(self.weight_sync, self.prompt_source, self.processing_class)
        if self.driver is None:
            return single
        vocabulary = self.model.config.get_text_config().vocab_size
        if self.rollout_func is not None:
            function = for_trainer(self.rollout_func, self)
            return samplers.Function(self.driver, function, self.weight_sync, self.stop_ids, vocabulary)
        if self.harness is not None:
            return samplers.Harness(self.driver, self.weight_sync, vocabulary)
        return samplers.Tools(self.driver, single, self.stop_ids)

    def make_online(self) -> Online:
        """Create the components of `posttrain.loop.rollout`. Functions that a subclass overrides, or that the user assigned
        to this object, replace the defaults.
        """
        own = partial(self._replaced, OnlineTrainer)
        return rollout.online_of(
            self.run,
            self.weight_sync,
            self.stop_ids,
            rollout_func=self.rollout_func is not None,
            window=self.window,
            prompts=self.prompt_source,
            rewards=self.rewards,
            ids_without_token=self.ids_without_token,
            spare=lambda mode: [dict(self.spare_example)],
            sample=own("sample", self.sampler.sample),
            score=own("score", None),
            resample=self._resampled if self.args.dynamic_sampling else None,
            advantages=own("advantages", None),
        )

    def resolve(self) -> None:
        """Store replaced functions as in `PostTrainer`, and recreate the components of `posttrain.loop.rollout`."""
        super().resolve()
        self.run = dataclasses.replace(self.run, online=self.make_online())
        self.progress.truncation = rollout.truncation_of(self.run.online, self.run.online.sampling(self.run))

    @functools.cached_property
    def dynamic_sampler(self) -> DynamicSampler:
        """Object that replaces groups whose rewards are all equal. The object is created at its first use, because a
        subclass may select the training prompts after this trainer was created.
        """
        args = self.args
        return DynamicSampler(
            args.dynamic_sampling,
            self.group_size("train"),
            prompts=PromptStream(self.train_dataset, args.seed + 1_000_003),
            accelerator=self.accelerator,
            rewards=self.rewards,
            sample=lambda rows: rollout.sample_and_score(self.run, rows, "train"),
            flat=lambda table: self.method.without_signal(table, self.group_size("train")),
        )

    def _resampled(self, rollouts: RolloutBatch, rewards: RewardTable) -> Any:
        return self.dynamic_sampler.replace(rollouts, rewards)

    @property
    def engine(self) -> Any:
        """Engine that samples completions. Assigning to this property replaces the engine."""
        return self.weight_sync.engine

    @engine.setter
    def engine(self, engine: Any) -> None:
        self.weight_sync.engine = engine
        self.resolve()

    @property
    def samples_completions(self) -> bool:
        """Whether training samples completions."""
        return True

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of prompt and completion that both the model and the engine support."""
        return self.weight_sync.context

    # Prompts -----------------------------------------------------------------------------------------------------

    def make_prompt_source(self) -> PromptSource:
        """Create the object that checks, orders and tokenizes prompts."""
        pictured = self.vision.prompts if self.vision.images else None
        return PromptSource(self.args, self.processing_class, tokenized=pictured, most=self.prompt_limit)

    def prepare_datasets(self, train: AnyDataset, evaluation: EvalSets | None) -> tuple[Any, Any]:
        """Check that completions can be generated for all prompts. Then test the reward functions on one group of made-up
        completions.
        """
        self.prompt_source = self.make_prompt_source()
        if self.driver is not None:
            train, evaluation = self.prompt_source.for_episodes(self.driver, train, evaluation, self.vision.reader)
        train, evaluation = self.vision.checked_prompts(train, "train"), self.vision.checked_prompts(evaluation, "eval")
        train, evaluation, head = self.prompt_source.prepared(train, evaluation, images=self.may_read_images)
        if self.args.check_rewards and self.can_dry_run:
            rows = self.vision.opened(self.prompt_source.trial_rows(head))
            try_rewards(self.rewards, self.args, rows, evaluation)
        return train, evaluation

    @property
    def may_read_images(self) -> bool:
        """Whether prompts may contain images that this trainer, a rollout function or an environment processes."""
        return self.vision.images or not self.can_dry_run

    @property
    def can_dry_run(self) -> bool:
        """Whether reward functions can be tested before training. A test is possible if they need only dataset columns and
        no environment.
        """
        return self.environments is None and self.rollout_func is None and self.harness is None

    def announce(self) -> None:
        """Log the schedule, and the first prompt in the form that the model receives. Raise an error if a prompt leaves no
        space for a completion.
        """
        length = len(self.train_dataset) if isinstance(self.train_dataset, Sized) else None
        schedule = self.schedule_text(length) if isinstance(self.args, OnlineConfig) else None
        self.prompt_source.announce(self.train_dataset, schedule=schedule)
        limit = self.context if self.samples_completions else None
        for name, dataset in named_sets({"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}):
            self.prompt_source.check_rows(dataset, name, limit)

    def schedule_text(self, prompts: int | None) -> str:
        """Describe the generations and updates of the run. ``prompts`` is the number of training rows, or None if unknown."""
        return describe_schedule(self.args, prompts, has_ratio=self.method.traits.follows_truncation)

    def collator(self) -> Any:
        """Return a collator that leaves dataset rows unchanged. Rows are converted to batches after their completions were
        sampled.
        """
        return list

    def get_train_dataloader(self) -> DataLoader:
        """Return a training loader. Its batches contain ``per_device_train_batch_size * steps_per_generation`` rows, with
        every prompt repeated G times.
        """
        return self._get_dataloader(
            dataset=self.prompt_source.train_rows(self.train_dataset),
            description="Training",
            batch_size=self._train_batch_size * (self.args.steps_per_generation or 1),
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_dataloader(self, dataset: AnyDataset, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """Create a data loader as in the parent class. An evaluation stream is read without worker processes, in the order
        of the evaluation sampler.
        """
        if is_training or not isinstance(dataset, datasets.IterableDataset):
            return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        with without_workers(self.args):
            return super()._get_dataloader(self.prompt_source.eval_rows(dataset), *args, **kwargs)

    def _get_train_sampler(self, train_dataset: AnyDataset | None = None) -> RepeatSampler:
        return self.prompt_source.train_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def _get_eval_sampler(self, eval_dataset: EvalSets | None) -> RepeatSampler:
        return self.prompt_source.eval_sampler(eval_dataset)

    def group_size(self, mode: str) -> int:
        """Return the number of completions per prompt."""
        return self.prompt_source.group_size(mode)

    @property
    def eval_group(self) -> int:
        """Number of completions per prompt in evaluation. The completions of a prompt are consecutive rows."""
        return self.group_size("eval")

    @property
    def answers_per_row(self) -> int:
        """Number of completions per prompt in evaluation."""
        return self.eval_group

    # Functions of a rollout batch that a subclass may replace --------------------------------------------------------

    def sample(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """Return one completion per example; see `posttrain.loop.samplers.Sampler.sample`."""
        return self.sampler.sample(examples, settings)

    def score(self, rollouts: RolloutBatch, mode: str) -> RewardTable:
        """Return the rewards of the completions of all ranks."""
        return scoring.logged_rewards(self.run, self.rewards, rollouts, mode)

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs) -> Advantages:
        """Compute advantages; see `Method.advantages`. Overriding this method is the most common use of a subclass.

        Args:
            rollouts: Completions of this rank, with their ``mode`` and ``group_size``.
            rewards: Rewards of the completions of all ranks. The rewards of this rank begin at ``rewards.start``.
            logps: Log-probs of the completions; see `posttrain.loop.rollout.measured_logps`.
        """
        return self.method.advantages(rollouts, rewards, logps, self.run.ranks)

    @property
    def scores_rewards(self) -> bool:
        """Whether the completions have rewards. If so, the checks of rewards apply."""
        return True

    @functools.cached_property
    def spare_example(self) -> dict[str, Any]:
        """First training row. A rank that has no examples samples completions of this row."""
        return next(iter(self.train_dataset))

    @property
    def prompt_limit(self) -> int | None:
        """Maximum number of tokens of a prompt. The beginning of a longer prompt is removed. None: prompts are not
        truncated.
        """
        return vars(self.args).get("max_prompt_length")  # Only configs of older releases have this field.

    # Logs and checks ---------------------------------------------------------------------------------------------

    def check_start(self) -> None:
        """Run the checks of every trainer. Then move the reward models to their devices and test them."""
        super().check_start()
        check_top_k(self.args.top_k or 0, causal_lm(self.model).config.get_text_config().vocab_size)
        self.reward_watch = RewardWatch(
            self.rewards,
            self.run,
            scaled=str(getattr(self.args, "scale_rewards", "none")) != "none",
            stop_after=self.args.stop_without_signal,
        )
        self.rewards.start(self.args.device)

    # The loop, checkpoints ---------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train the model. If the rollout servers fail permanently, save a checkpoint before the run ends with an error.

        All environments are closed at the end. A later evaluation creates new environments.
        """
        try:
            return super().train(*args, **kwargs)
        except RolloutServerError as error:
            if self.state.global_step > 0:
                self._save_checkpoint(self.model_wrapped, trial=None)
                error.add_note(
                    f"A checkpoint of step {self.state.global_step} was saved in {self.args.output_dir}. Continue with "
                    "resume_from_checkpoint=True when the servers are running again."
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
        """Return the state for a checkpoint. The state includes scored rollouts that were not used for training yet, and the
        position in the window that stores them.
        """
        state = super().state_to_save() | {"online": self.window.state(), "rewards": self.rewards.transforms_state()}
        if self.args.dynamic_sampling:
            state["fresh_prompts"] = self.dynamic_sampler.prompts.state()
        return state

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_to_save` returned."""
        super().load_saved_state(state)
        self.rewards.load_transforms(state.get("rewards", ()))
        if "fresh_prompts" in state:
            self.dynamic_sampler.prompts.load(state["fresh_prompts"])
        processes = self.accelerator.num_processes
        self.window.load(state["online"], before=state.get("processes", processes), now=processes)
