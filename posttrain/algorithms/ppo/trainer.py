"""`PPOTrainer`: sample, score, estimate how much better each token was than its state promised, take clipped steps."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.algorithms.ppo.config import PPOConfig
from posttrain.algorithms.ppo.gae import attach, episodes, plain_rows, scores_of, training_rows
from posttrain.algorithms.ppo.objective import STATES, ppo_objective, states_mask
from posttrain.algorithms.ppo.prompts import PromptRowsMixin
from posttrain.data.forest import collate, share_prompts, split_by_sequence
from posttrain.errors import CheckpointError, ConfigError, ModelError, did_you_mean
from posttrain.losses.advantages import weighted_total
from posttrain.losses.ppo import Moments, merge_moments
from posttrain.metrics import MetricBuffer, mean
from posttrain.models import parallel
from posttrain.models.attention import probe_layout
from posttrain.models.forward import forward
from posttrain.models.load import create_model_from_path, get_config_model_id, load_classifier
from posttrain.models.reference import Reference, disable_dropout_in_model
from posttrain.models.value_head import (
    ValueHead,
    attach_value,
    check_scorer,
    check_vocabulary,
    value_state,
    without_value,
)
from posttrain.models.value_head import load_value_state as restore_value
from posttrain.rewards.model import TokenReward
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.batch import RolloutBatch
from posttrain.training.online import OnlineTrainer
from posttrain.types import Batch, LossTerms, ModelOutputs, Row, Sampling

__all__ = [
    "PPOTrainer",
    "PartsMixin",
]

logger = logging.getLogger(__name__)


VALUE_FILE = "value_function.safetensors"  # In checkpoints only: a saved policy is a plain model.
TABLE_TEMPERATURE = 0.01  # Sample tables show what the model says at its most certain.


class AdapterReference(Reference):
    """A named adapter of the policy, switched on for the reference pass and off again."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.policy, self.copy, self.adapter = model, None, name


class PartsMixin(PromptRowsMixin):
    """The part of `PPOTrainer` that does not sample and does not optimise."""

    args: PPOConfig
    model: Any
    rewards: Any
    reference: Reference
    processing_class: Any
    accelerator: Any
    layout: Any
    buffers: dict[str, MetricBuffer]
    stop_ids: tuple[int, ...]
    state: Any
    record: Any
    fresh_adapter: bool
    _table_of = -1

    # Putting together ------------------------------------------------------------------------------------------------

    def take_parts(self, args: PPOConfig, model: Any, ref_model: Any, value_model: Any) -> tuple[Any, Any]:
        """Policy and value function as they were given, strings loaded, wrappers opened."""
        if isinstance(ref_model, nn.Module) and ref_model is model:
            raise ModelError(
                "ref_model is the same object as model, so it would move with training and the divergence would stay 0. Leave "
                "ref_model out: a frozen copy is made (or the adapter is switched off)."
            )
        if hasattr(model, "v_head") and hasattr(model, "pretrained_model"):
            if value_model is not None:
                raise ConfigError(
                    "model already has a value head (it is an AutoModelForCausalLMWithValueHead), and value_model is given "
                    "too. Leave value_model out, or pass model.pretrained_model."
                )
            model, value_model = model.pretrained_model, model.v_head
        ref_model = getattr(ref_model, "pretrained_model", ref_model)
        for name in (args.model_adapter_name, args.ref_adapter_name):
            _check_adapter(model, name)
        if args.model_adapter_name is not None:
            model.set_adapter(args.model_adapter_name)
        if isinstance(ref_model, str):
            ref_model = create_model_from_path(ref_model, trust_remote_code=args.trust_remote_code)
        self._given_reference = ref_model
        self._given_value = value_model = _classifier(value_model, args)
        if value_model is not None and not isinstance(value_model, ValueHead):
            check_scorer(value_model, "value_model")
        return model, value_model

    def plan(self, args: PPOConfig, train_dataset: Any) -> None:
        """How many rollout batches and optimiser steps there will be, and how many micro-batches one of these has."""
        rows = len(train_dataset) if hasattr(train_dataset, "__len__") else None
        args.gradient_accumulation_steps = math.ceil(args.local_mini_batch_size / args.per_device_train_batch_size)
        if args.total_episodes is None and args.max_steps > 0:
            args.num_total_batches = math.ceil(args.max_steps / args.updates)
            args.total_episodes = args.num_total_batches * args.batch_size
        elif args.total_episodes is not None or rows is not None:
            args.total_episodes = args.total_episodes or max(int(args.num_train_epochs * (rows or 0)), 1)
            args.num_total_batches = math.ceil(args.total_episodes / args.batch_size)
            args.max_steps = args.num_total_batches * args.updates

    def reward_functions(self, reward_model: Any, args: PPOConfig) -> list[Any]:
        """Models as readers of token ids, functions as they are."""
        self.reward_model = reward_model
        given = list(reward_model) if isinstance(reward_model, list | tuple) else [reward_model]
        if not given or any(reward is None for reward in given):
            raise ConfigError(
                "reward_model is None: PPO needs a sequence classifier, a reward function, or a list of them."
            )
        functions: list[Any] = []
        for reward in given:
            if isinstance(reward, str | nn.Module):
                reward = _classifier(reward, args)
                check_scorer(reward, "reward_model")
                if args.disable_dropout:
                    disable_dropout_in_model(reward)
                reward = TokenReward(reward, batch_size=args.local_rollout_forward_batch_size)
            functions.append(reward)
        return functions

    def check_vocabularies(self) -> None:
        """Models that read the policy's ids must have its vocabulary."""
        scorers = [("reward_model", f.model) for f in self.rewards.functions if isinstance(f, TokenReward)]
        if self._given_value is not None and not isinstance(self._given_value, ValueHead):
            scorers.append(("value_model", self._given_value))
        for role, model in scorers:
            check_vocabulary(self.processing_class, model, role)

    def make_reference(self) -> Reference:
        """The model that was given, a named adapter, the policy without its adapter, or a frozen copy."""
        given = self._given_reference
        if given is not None:
            if self.args.disable_dropout:
                disable_dropout_in_model(given)
            return Reference(self.model, given=given)
        if self.args.ref_adapter_name is not None:
            return AdapterReference(self.model, self.args.ref_adapter_name)
        return Reference(self.model, fresh_adapter=self.fresh_adapter)

    def join_parts(self, value_model: Any) -> None:
        """Put the value function beside the policy, and the reward models on the device."""
        value = attach_value(self.model, value_model)
        if self.args.disable_dropout:
            disable_dropout_in_model(value)
        if value_model is not None and not isinstance(value_model, ValueHead):
            value.config.get_text_config().pad_token_id = self.pad_token_id  # type: ignore[attr-defined, union-attr, operator]
            if probe_layout(value).kind == "padded":
                self.layout = probe_layout(value)
        for function in self.rewards.functions:
            if isinstance(function, TokenReward):
                function.model.to(self.args.device)
                function.pad_token_id = self.pad_token_id  # type: ignore[attr-defined]
        self.buffers["table"] = MetricBuffer()

    def responses_end(self) -> None:
        """Which tokens end a response, and which show that it came to an end."""
        args, vocabulary = self.args, len(self.processing_class)
        if args.stop_token_id is not None and not 0 <= args.stop_token_id < vocabulary:
            raise ConfigError(
                f"stop_token_id={args.stop_token_id} is no token: the tokenizer has ids 0 to {vocabulary - 1}."
            )
        chosen = () if args.stop_token_id is None else (args.stop_token_id,)
        self.stops = tuple(self.stop_ids) if args.stop_token == "eos" else chosen
        self.end_ids = {self.processing_class.eos_token_id, *self.stops}
        if not self.stops:
            logger.warning(
                "stop_token=None: nothing ends a response, all have response_length=%d tokens and go on behind an end token. "
                "Set stop_token='eos' to stop there.", args.response_length,
            )  # fmt: skip

    @property
    def policy_model(self) -> Any:
        """What is trained and saved."""
        return self.model

    @property
    def ref_model(self) -> Any:
        """The frozen reference; None where it is the policy with another adapter, or none."""
        return self.reference.copy

    @property
    def value_model(self) -> Any:
        """The value function: the model that was given, or the head on the policy's trunk."""
        from posttrain.models.forward import causal_lm

        inner = causal_lm(self.model)
        return getattr(inner, "value_model", None) or getattr(inner, "v_head", None)

    # Saving and loading ----------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is not None:
            mine = set(value_state_keys(self.model, state_dict))
            state_dict = {key: tensor for key, tensor in state_dict.items() if key not in mine}
        with without_value(self.model):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The policy; a checkpoint holds the value function too, in a file of its own."""
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if _internal_call and output_dir and self.args.should_save and not parallel.shards_parameters(self.accelerator):
            tensors = {key: tensor.contiguous() for key, tensor in value_state(self.model).items()}
            save_file(tensors, Path(output_dir, VALUE_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load = super()._load_from_checkpoint  # type: ignore[misc]
        self._load_parts(resume_from_checkpoint, lambda: load(resume_from_checkpoint, model))

    def _load_best_model(self) -> None:
        self._load_parts(self.state.best_model_checkpoint, super()._load_best_model)  # type: ignore[misc]

    def _load_parts(self, folder: str, load_policy: Callable[[], None]) -> None:
        if parallel.shards_parameters(self.accelerator):
            load_policy()  # The sharded state holds both.
            return
        with without_value(self.model):
            load_policy()
        path = Path(folder, VALUE_FILE)
        if not path.is_file():
            raise CheckpointError(
                f"the checkpoint {folder!r} has no {VALUE_FILE}: it is not one of a PPO run, or it is incomplete. Resume from "
                "another one, or start with its model as a new run."
            )
        restore_value(self.model, load_file(path))

    # Sample tables ---------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        wanted, step = self.args.num_sample_generations, self.state.global_step
        if not wanted or self.eval_dataset is None or self._table_of == step:  # type: ignore[attr-defined]
            return
        if step % max(1, self.state.max_steps // wanted) == 0:
            self._table_of = step  # The loop comes by once more when training is over.
            self.generate_completions(sampling=True)

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]]:
        """Answers to the prompts of ``eval_dataset`` at temperature 0.01, scored; kept in ``eval_completions.parquet``.

        Args:
            sampling: Only those of the first evaluation batch.

        Returns:
            One row an answer, of all processes: prompt, completion and rewards.
        """
        rows: list[dict[str, Any]] = []
        datasets = self.eval_dataset  # type: ignore[attr-defined]
        loader = self.get_eval_dataloader(next(iter(datasets)) if isinstance(datasets, dict) else None)  # type: ignore[attr-defined]
        for inputs in loader:
            generation = self._answers(inputs)
            for example, rollout in zip(generation.examples, generation.rollouts, strict=True):
                example["prompt_ids"] = rollout.prompt_ids
            rows += self.completion_rows(generation, self.score(generation, "table"))  # type: ignore[attr-defined]
            if sampling:
                break
        rows = parallel.all_gather_objects(rows, self.accelerator)
        self.buffers["table"] = MetricBuffer()
        self.record.add_completions(rows, evaluation=True)
        for row in rows[:4]:
            logger.info("step %d: %s", self.state.global_step, {k: v for k, v in row.items() if k != "step"})
        return rows

    def _answers(self, inputs: list[dict[str, Any]]) -> RolloutBatch:
        """Of one evaluation batch; a rank without rows samples along, because the others do."""
        examples = self.readable(inputs or self.spare_examples())  # type: ignore[attr-defined]
        rollouts, completions = self.roll_out(examples, "table")  # type: ignore[attr-defined]
        return RolloutBatch(examples, rollouts, completions) if inputs else RolloutBatch([], [], [])


def value_state_keys(policy: nn.Module, state: dict[str, torch.Tensor]) -> list[str]:
    """Keys of a gathered state dict that belong to the value function."""
    return [key for key in state if "v_head." in key or "value_model." in key]


def _classifier(model: Any, args: PPOConfig) -> Any:
    if not isinstance(model, str):
        return model
    return load_classifier(model, "sequence", num_labels=1, trust_remote_code=args.trust_remote_code)


def _check_adapter(model: Any, name: str | None) -> None:
    if name is None:
        return
    known = sorted(getattr(model, "peft_config", {}))
    if name not in known:
        what = f"its adapters are {known}" if known else f"{type(model).__name__} has no adapters"
        raise ConfigError(f"the adapter {name!r} is not one of the model's: {what}{did_you_mean(name, known)}.")


KL_LOW, KL_UPDATES = -1.0, 5  # A mean divergence that stays below is no noise of the k1 estimate.


class PPOTrainer(PartsMixin, OnlineTrainer):
    """Proximal policy optimisation with a learned value function and a divergence charged to the rewards.

    Args:
        args: `PPOConfig`.
        processing_class: The policy's tokenizer; None loads it. Its pad token must not be its eos token.
        model: Hub id, folder, model, peft model, or an `AutoModelForCausalLMWithValueHead`, whose head is then used.
        ref_model: What the divergence is measured from; None is a copy of ``model``, or ``model`` without its adapter.
        reward_model: A sequence classifier with one label (or its id), which reads the policy's token ids; or a function as
            `GRPOTrainer` takes them, ``f(prompts, completions, **columns) -> list[float]``; or a list of these.
        train_dataset: Rows with ``input_ids`` (prompts; padding is taken off) or with ``prompt``, text or messages.
        value_model: A sequence classifier with one label (or its id) that is trained beside the policy; None puts a value
            head on the policy's own trunk: one forward pass gives log-probs and values, and no second model is in memory.
        data_collator: Turns rows with ``input_ids`` into a padded batch first; None needs none.
        rollout_engine: An engine object; None makes the one that ``args.rollout_engine`` names.

    Reference: PPO, arXiv:1707.06347; Learning to summarize from human feedback, arXiv:2009.01325, section 3.4.

    >>> def short(completions, **kwargs):
    ...     return [-len(text) / 100 for text in completions]
    >>> trainer = PPOTrainer(args, tokenizer, model, None, short, prompts, None)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[PPOConfig]] = PPOConfig
    needs: ClassVar[frozenset[str]] = frozenset({"logp", "values", "entropy"})
    length_option: ClassVar[str] = "response_length"
    _tag_names: ClassVar[list[str]] = ["posttrain", "ppo"]
    _name: ClassVar[str] = "PPO"
    _suffix: ClassVar[str] = "PPO"
    _paper: ClassVar[dict[str, str]] = {"title": "Proximal Policy Optimization Algorithms", "id": "1707.06347"}
    args: PPOConfig

    def __init__(
        self,
        args: PPOConfig | None = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        name = model if isinstance(model, str) else get_config_model_id(getattr(model, "config", None))
        args = copy.copy(args) if args is not None else PPOConfig(f"{Path(name).name or 'model'}-PPO")
        self._given_collator, self._owns_tokenizer = data_collator, processing_class is None
        self._low_kl = 0
        self._clock: tuple[float, float] | None = None  # Episodes and time at which this run began.
        model, value_model = self.take_parts(args, model, ref_model, value_model)
        self.plan(args, train_dataset)
        rewards = self.reward_functions(reward_model, args)
        super().__init__(model, rewards, args, processing_class=processing_class, train_dataset=train_dataset, **kwargs)
        self.join_parts(value_model)
        self.counters.setdefault("episode", 0.0)
        self.responses_end()

    # One rollout batch -----------------------------------------------------------------------------------------------

    def micro_batch(self, inputs: list[dict[str, Any]], index: int) -> list[Batch]:
        """The next piece of a mini-batch; a new rollout batch first, when all passes over the last are done."""
        args = self.args
        pieces = args.num_mini_batches * args.gradient_accumulation_steps
        place = self._step % (args.num_ppo_epochs * pieces)
        self._clock = self._clock or (self.counters["episode"], time.perf_counter())
        if self._buffer is None or place == 0:
            self._buffer, self._buffer_born = [self.sampled_rows(inputs, "train")], self.state.global_step
        self._step += 1
        self.log_metrics_now({"staleness/mean_updates": mean(float(self.state.global_step - self._buffer_born))})
        return self.collate(share_prompts(self._piece(self._buffer[0], *divmod(place, pieces)))[0])

    def _piece(self, rows: list[Row], epoch: int, number: int) -> list[Row]:
        """Micro-batch ``number`` of a pass: every pass deals the responses anew, and each to one mini-batch."""
        args = self.args
        seed = (args.seed * 1_000_003 + self._generations) * 1_009 + epoch
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed % 2**63))
        mini, micro = divmod(number, args.gradient_accumulation_steps)
        chosen = order.tensor_split(args.num_mini_batches)[mini].tensor_split(args.gradient_accumulation_steps)[micro]
        return [rows[i] for i in chosen.tolist()]

    def eval_batches(self, inputs: list[dict[str, Any]]) -> list[Batch]:
        """Sample, score and collate one evaluation batch."""
        return self.collate(share_prompts(self.sampled_rows(inputs, "eval"))[0])

    def sampled_rows(self, inputs: list[dict[str, Any]], mode: str) -> list[Row]:
        """A rollout batch, ready to be dealt to mini-batches."""
        generation = self.generate_and_score(self.readable(inputs), mode)
        return training_rows(generation, self.args.response_length, self.pad_token_id)

    def generate_and_score(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """Sample a response for each example, score it, and estimate the advantage of each token."""
        generation = self.generated(examples, mode)
        for example, rollout in zip(generation.examples, generation.rollouts, strict=True):
            example["prompt_ids"] = rollout.prompt_ids
        table = self.score(generation, mode)
        self.attach_logps(generation, mode)
        self.estimate(generation, table, mode)
        rows = parallel.all_gather_objects(self.completion_rows(generation, table), self.accelerator)
        self.record.add_completions(rows, evaluation=mode == "eval")
        return generation

    def tokenize(self, examples: list[dict[str, Any]]) -> list[list[int]]:
        """As the parent's; rows with ``input_ids`` are prompts already."""
        if "input_ids" not in examples[0]:
            return super().tokenize(examples)
        return [list(example["input_ids"]) for example in examples]

    def sampling(self, mode: str) -> Sampling:
        """At the temperature of the log-probs, until a stop token where one is set."""
        temperature = TABLE_TEMPERATURE if mode == "table" else self.temperature
        return dataclasses.replace(super().sampling(mode), temperature=temperature, stop_token_ids=self.stops)

    @property
    def generations_per_step(self) -> float:
        """Rollout batches of one optimiser step."""
        return 1 / self.args.updates

    @property
    def temperature(self) -> float:
        """A hair above the option's, in sampling and in every log-prob alike."""
        return self.args.temperature + 1e-7

    def attach_logps(self, generation: RolloutBatch, mode: str) -> None:
        """Log-probs and values under the policy in one pass, then log-probs under the reference."""
        rows = plain_rows(generation, self.args.response_length, self.pad_token_id)
        with self.inference() as policy:
            found = self.measure(policy, rows, frozenset({"logp", "values"}))
        with self.inference() as policy, self.reference.active(policy) as reference:
            found["ref_logp"] = self.measure(reference, rows, frozenset({"logp"}))["logp"]
        self.log_engine_gap(generation.rollouts, found["logp"], mode)
        names = {"logp": "old_logp", "values": "old_values"}
        generation.token_columns |= {names.get(name, name): column for name, column in found.items()}

    @torch.no_grad()
    def measure(self, model: nn.Module, rows: Sequence[Row], needs: frozenset[str]) -> dict[str, list[list[float]]]:
        """Per-token numbers of every response, by the forward that trains."""
        chunk = self.args.logits_chunk_size
        size, result = self.args.local_rollout_forward_batch_size, {name: [[]] * len(rows) for name in needs}
        batches: list[tuple[Batch, list[int]]] = []  # And where the responses of each stand among the rows.
        for start in range(0, len(rows), size):
            part, places = share_prompts(rows[start : start + size])
            here = [start + place for place in places]
            batches += [(b, here) for b in collate(part, pad_token_id=self.pad_token_id, layout=self.layout)]
        for (batch, places), counts in parallel.in_step(batches, self.accelerator, lambda: (self.spare_batch(), [])):
            batch = batch.to(self.args.device)
            outputs = forward(model, batch, needs, temperature=self.temperature, chunk_size=chunk)
            for name in needs if counts else ():
                pieces = split_by_sequence(getattr(outputs, name), batch)
                for origin, piece in zip(batch.origin, pieces, strict=True):
                    result[name][places[origin]] = piece.tolist()
        return result

    def estimate(self, generation: RolloutBatch, table: RewardTable, mode: str) -> None:
        """Advantages and returns of this rank's responses, and what is said about the rollout batch."""
        args, count = self.args, len(generation.rollouts)
        totals = weighted_total(table.values, table.weights)
        scores = scores_of(
            generation, totals[table.start : table.start + count], self.end_ids, args.missing_eos_penalty
        )
        found = episodes(generation, scores, args, self._merged)
        attach(generation, found)
        generation.columns["scores"] = scores.tolist()
        self.log_rewards(table, totals, found.advantages, mode)
        eos = sum(rollout.token_ids.count(self.processing_class.eos_token_id) for rollout in generation.rollouts)
        kl, responses, eos, rows = parallel.all_reduce_sum(
            [float(found.metrics["objective/kl"].value), float(found.metrics["objective/kl"].weight), eos, count],
            self.accelerator,
        )
        self.log_metrics_now({**found.metrics, "val/num_eos_tokens": mean(eos)}, mode)
        if mode == "train":
            self.counters["episode"] += rows
            self._watch_kl(kl / max(responses, 1.0))

    def _merged(self, part: Moments) -> Moments:
        return merge_moments(parallel.all_gather_objects([part], self.accelerator))

    def _watch_kl(self, kl: float) -> None:
        self._low_kl = self._low_kl + 1 if kl < KL_LOW else 0
        if self._low_kl == KL_UPDATES:
            logger.warning(
                "objective/kl has been below %g for %d rollout batches (now %.2f), and a divergence cannot be negative: the "
                "policy is not the one whose samples are judged. Usual causes: a ref_model that is not the model training "
                "began with, tokenizers that differ, sampling that leaves tokens out (top-k, top-p), a wrong temperature.",
                KL_LOW, KL_UPDATES, kl,
            )  # fmt: skip

    # One optimiser step ----------------------------------------------------------------------------------------------

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `ppo_objective`."""
        return ppo_objective(outputs, batch, self.args)

    def named_counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """States with a value, which the value loss is a mean over."""
        return {STATES: float(sum(states_mask(batch).sum() for batch in batches))}

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """The ratio's mean and variance from those of its distance to 1."""
        if "val/ratio" in metrics:
            excess = metrics["val/ratio"]
            metrics["val/ratio_var"] = max(metrics["val/ratio_var"] - excess * excess, 0.0)
            metrics["val/ratio"] = 1.0 + excess
        return metrics

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers', with a rate that stands still during the steps of one rollout batch."""
        given = self.lr_scheduler is not None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if not given and hasattr(scheduler, "lr_lambdas"):
            updates = self.args.updates
            scheduler.lr_lambdas = [
                lambda step, rate=rate: rate(step // updates * updates) for rate in scheduler.lr_lambdas
            ]
        return scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds ``lr``, ``episode`` and ``eps``, responses a second since training began."""
        if "loss" in logs and self._clock is not None:
            done, (before, began) = self.counters["episode"], self._clock
            logs |= {"lr": logs.get("learning_rate", math.nan), "episode": done}
            logs["eps"] = (done - before) / max(time.perf_counter() - began, 1e-9)
        super().log(logs, start_time)
