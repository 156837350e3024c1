"""What PPO is put together from: policy, reference, value function, rewards and prompts; how they are saved and loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.algorithms.ppo.config import PPOConfig
from posttrain.algorithms.ppo.prompts import PromptRowsMixin
from posttrain.errors import CheckpointError, ConfigError, ModelError, did_you_mean
from posttrain.metrics import MetricBuffer
from posttrain.models import parallel
from posttrain.models.attention import probe_layout
from posttrain.models.load import create_model_from_path, load_classifier
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
from posttrain.rewards.token_ids import TokenReward
from posttrain.rollouts.generation import Generation

__all__ = ["PartsMixin"]

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

    def _answers(self, inputs: list[dict[str, Any]]) -> Generation:
        """Of one evaluation batch; a rank without rows samples along, because the others do."""
        examples = self.readable(inputs or self.spare_examples())  # type: ignore[attr-defined]
        rollouts, completions = self.roll_out(examples, "table")  # type: ignore[attr-defined]
        return Generation(examples, rollouts, completions) if inputs else Generation([], [], [])


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
