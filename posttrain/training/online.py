"""`OnlineTrainer`: prompts to rollouts to rewards to advantages to rows, for every method that generates as it trains."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.data.chat import terminal_token_ids, tokenize_prompts
from posttrain.data.forest import collate, split_by_sequence
from posttrain.data.formats import is_conversational
from posttrain.errors import ConfigError
from posttrain.losses.ratio import engine_gap
from posttrain.metrics import MetricBuffer, mean
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.reference import Reference
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rewards.transform import load_transforms, transforms_state
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch, Spool, completions_for_rewards
from posttrain.rollouts.sampling import generation_fields
from posttrain.training.dynamic_sampling import DynamicSamplingMixin
from posttrain.training.online_config import OnlineConfig
from posttrain.training.prompts import BalanceMixin, PromptMixin, ScheduleMixin
from posttrain.training.rollout_log import RolloutLogMixin
from posttrain.training.trainer import PostTrainer
from posttrain.training.weight_sync import FarRolloutMixin
from posttrain.types import Batch, LossTerms, ModelOutputs, Request, Rollout, Row, Sampling

__all__ = ["OnlineConfig", "OnlineTrainer", "RolloutBatch"]

SUFFIX_TOKENS = 32  # Prompt tokens shown to format rewards: an opening tag that a template prefills lies among them.


def refuse_episodes(trainer: str, given: dict[str, Any]) -> None:
    """Refuse what only trainers with episodes take: these bring it to its end before they come here.

    Raises:
        ConfigError: One of the arguments is there.
    """
    for name in ("tools", "environment_factory", "rollout_func"):
        if name in given:
            raise ConfigError(
                f"{trainer} has no {name}: its completions are single turns of the engine. Fix: use GRPOTrainer, or leave {name} "
                "out."
            )


class OnlineTrainer(
    FarRolloutMixin, PromptMixin, ScheduleMixin, DynamicSamplingMixin, BalanceMixin, RolloutLogMixin, PostTrainer
):
    """Adds generation, scoring and the buffer of scored rollouts to the training loop.

    One generation goes through four methods, each of which a subclass may replace: `roll_out` (prompts to completions),
    `score` (completions to rewards of all ranks), `attach_logps` (what older or frozen weights say of them) and
    `advantages` (rewards to what each completion is worth). Then its rows wait in the buffer for the objective.
    """

    config_class: ClassVar[type[OnlineConfig]] = OnlineConfig
    runner_class: ClassVar[type[RewardRunner]] = RewardRunner
    zero_gradient_is_normal = True
    args: OnlineConfig
    _spare: dict[str, Any] | None = None

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: OnlineConfig | None = None,
        *,
        reward_processing_classes: Any = None,
        rollout_engine: RolloutEngine | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_episodes(type(self).__name__, kwargs)
        self.rewards = self.runner_class(
            reward_funcs,
            reward_weights=getattr(args, "reward_weights", None),
            processing_classes=reward_processing_classes,
            transforms=getattr(args, "reward_transform", None),
            timeout=getattr(args, "reward_timeout", None),
            model_options=self._reward_model_options(args),
            score_twice=getattr(args, "check_reward_determinism", False),
        )
        self._step = 0
        self._generations = 0
        self._buffer: Sequence[list[Row]] | None = None
        self._buffer_born = 0
        super().__init__(model, args, **kwargs)
        own_stops = generation_fields(self.args.generation_kwargs or {}).get("stop_token_ids")
        known_stops = terminal_token_ids(self.processing_class, getattr(self.model, "generation_config", None))
        self.stop_ids = tuple(own_stops or known_stops)
        self.engine = self.make_engine(rollout_engine)
        self.reference = self.make_reference()
        if self.reference is not None and self.reference.copy is not None:
            self.reference.copy.to(self.args.device)
        self.check_context()
        self.check_engine()
        self.announce()

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

    # Micro-batches -----------------------------------------------------------------------------------------------

    def micro_batch(self, inputs: list[dict[str, Any]], index: int) -> list[Batch]:
        """The next slice of the buffer; a new generation first, when the buffer is used up."""
        args = self.args
        slices = args.steps_per_generation or 1
        if self._buffer is None or self._step % (slices * args.num_iterations) == 0:
            generation = self.generate_and_score(inputs, "train")
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = self.spooled(self.balanced(self._slices(generation, slices)))
            self._buffer_born = self.state.global_step
        rows = self._buffer[self._step % slices]
        self._step += 1
        self.log_metrics_now({"staleness/mean_updates": mean(float(self.state.global_step - self._buffer_born))})
        return self.collate(rows)

    def spooled(self, slices: Sequence[list[Row]]) -> Spool:
        """Slices that wait for their turn, those beyond ``rollout_buffer_bytes`` on disk."""
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
        self.rest_engine()
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
        self.buffers[mode], self._lengths = metrics, ()
        return RolloutBatch([], [], [], born=self.state.global_step)

    def spare_examples(self) -> list[dict[str, Any]]:
        """What a rank without examples of its own generates from: the first training row."""
        if self._spare is None:
            self._spare = next(iter(self.train_dataset))
        return [dict(self._spare)]

    def generate(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """One completion per example, decoded and counted."""
        begin = time.perf_counter()
        rollouts, completions = self.roll_out(examples, mode)
        self._generations += mode == "train"
        generation = RolloutBatch(examples, rollouts, completions, born=self.state.global_step)
        self.log_lengths(generation, mode, time.perf_counter() - begin)
        return generation

    def roll_out(self, examples: list[dict[str, Any]], mode: str) -> tuple[list[Rollout], list[Any]]:
        """One completion per example, and what reward functions see of each: its text, or a list of messages."""
        rollouts = self.sample(self.tokenize(examples), self.sampling(mode))
        texts = self.processing_class.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        for rollout, text in zip(rollouts, texts, strict=True):
            rollout.text = text
        chat = is_conversational(examples[0])
        return rollouts, completions_for_rewards(self.processing_class, rollouts, conversational=chat)

    def tokenize(self, examples: list[dict[str, Any]]) -> list[list[int]]:
        """Prompts as the engine must see them."""
        kwargs = self.args.chat_template_kwargs or {}
        return tokenize_prompts(examples, self.processing_class, chat_template_kwargs=kwargs)

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """One call to the engine, one completion a prompt; equal neighbours are one request and share their prompt."""
        requests = [Request(prompt, len(list(equal))) for prompt, equal in itertools.groupby(prompts)]
        self.check_lengths(requests, sampling.max_new_tokens)
        return self.ask_engine([(requests, sampling)])[0]

    def sampling(self, mode: str) -> Sampling:
        """Sampling settings of the next call; the seed is a function of the run's seed, the rank and the call's number."""
        args = self.args
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        number = self._generations if mode == "train" else 10_000_019 + self.state.global_step
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
            prompt_suffixes=self._suffixes(generation),
            environments=generation.environments,
            judge=False,
        )

    def _suffixes(self, generation: RolloutBatch) -> list[str]:
        ends = [rollout.prompt_ids[-SUFFIX_TOKENS:] for rollout in generation.rollouts]
        return self.processing_class.batch_decode(ends)

    @property
    def engine_is_policy(self) -> bool:
        """Whether completions are sampled with the very weights that are trained, so that nothing is to be corrected."""
        return getattr(self.engine, "in_process", False)

    def terms(self, model: nn.Module, batch: Batch) -> tuple[LossTerms, ModelOutputs]:
        """Forward and objective; and how far the engine is from this forward, which for the own engine is rounding."""
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
        """Whether what the engine says of its tokens is meant; a scripted one only says something."""
        return getattr(self.engine, "tells_logp", True)

    @property
    def old_logp_is_engines(self) -> bool:
        """Whether the engine's log-probs are the trainer's to rounding, so that no pass computes them again.

        In half precision the two round differently (0.01 nats a token), and ratios would begin away from 1. What a function
        says that rolls out in the engine's place is not the engine's.
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

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_to_save(self) -> dict[str, Any]:
        """Where the run stands inside its window, with the scored rollouts it has not trained yet."""
        buffer = None if self._buffer is None else [[dataclasses.asdict(row) for row in rows] for rows in self._buffer]
        online = {"step": self._step, "generations": self._generations, "born": self._buffer_born, "buffer": buffer}
        return super().state_to_save() | {"online": online, "rewards": transforms_state(self.rewards.transforms)}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Undo `state_to_save`."""
        super().load_saved_state(state)
        load_transforms(self.rewards.transforms, state.get("rewards", ()))
        online = state["online"]
        self._step, self._generations, self._buffer_born = online["step"], online["generations"], online["born"]
        buffer = online["buffer"]
        slices = None if buffer is None else [[Row(**row) for row in rows] for rows in buffer]
        self._buffer = None if slices is None else self.spooled(slices)
