"""What a PPO run is made of: policy, reference, value function, reward models, prompts, ends of responses."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.algorithms.ppo.config import PPOConfig
from posttrain.data.forest import Layout
from posttrain.data.samplers import check_prompts
from posttrain.errors import CheckpointError, ConfigError, DataError, ModelError, did_you_mean
from posttrain.models.attention import probe_layout
from posttrain.models.load import create_model_from_path, load_classifier, resolve_pad_token
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
from posttrain.training.prompts import PromptSource

__all__ = [
    "AdapterReference",
    "Models",
    "TokenPrompts",
    "check_pad",
    "check_vocabularies",
    "join_value",
    "load_with_value",
    "open_models",
    "place_rewards",
    "plan",
    "response_ends",
    "reward_functions",
    "save_value",
    "value_state_keys",
]

logger = logging.getLogger(__name__)


# In checkpoints only: a saved policy is a plain model.
VALUE_FILE = "value_function.safetensors"


class AdapterReference(Reference):
    """A named adapter of the policy, switched on for the reference pass and off again."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.policy, self.copy, self.adapter = model, None, name


@dataclasses.dataclass(frozen=True)
class Models:
    """What a run was given, strings loaded and wrappers opened.

    Attributes:
        policy: Model or id.
        reference: Model; None: a copy of the policy, or the policy without its adapter.
        value: A sequence classifier or a head; None: a new head on the policy's trunk.
    """

    policy: Any
    reference: Any
    value: Any


def open_models(args: PPOConfig, model: Any, ref_model: Any, value_model: Any) -> Models:
    """The models of a run, as `PPOTrainer` was given them.

    Raises:
        ModelError: The reference is the policy itself.
        ConfigError: Two value functions, or an adapter that the policy does not have.
    """
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
    value_model = _classifier(value_model, args)
    if value_model is not None and not isinstance(value_model, ValueHead):
        check_scorer(value_model, "value_model")
    return Models(model, ref_model, value_model)


def plan(args: PPOConfig, train_dataset: Any) -> None:
    """Set how many rollout batches and optimiser steps there will be, and how many micro-batches one of these has."""
    rows = len(train_dataset) if hasattr(train_dataset, "__len__") else None
    args.gradient_accumulation_steps = math.ceil(args.local_mini_batch_size / args.per_device_train_batch_size)
    if args.total_episodes is None and args.max_steps > 0:
        args.num_total_batches = math.ceil(args.max_steps / args.updates)
        args.total_episodes = args.num_total_batches * args.batch_size
    elif args.total_episodes is not None or rows is not None:
        args.total_episodes = args.total_episodes or max(int(args.num_train_epochs * (rows or 0)), 1)
        args.num_total_batches = math.ceil(args.total_episodes / args.batch_size)
        args.max_steps = args.num_total_batches * args.updates


def reward_functions(reward_model: Any, args: PPOConfig) -> list[Any]:
    """Models as readers of token ids, functions as they are."""
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


def check_vocabularies(tokenizer: Any, functions: list[Any], value_model: Any) -> None:
    """Models that read the policy's ids must have its vocabulary.

    Args:
        tokenizer: Of the policy.
        functions: Rewards.
        value_model: As it was given, or None.
    """
    scorers = [("reward_model", f.model) for f in functions if isinstance(f, TokenReward)]
    if value_model is not None and not isinstance(value_model, ValueHead):
        scorers.append(("value_model", value_model))
    for role, model in scorers:
        check_vocabulary(tokenizer, model, role)


def join_value(model: Any, value_model: Any, *, disable_dropout: bool, pad_token_id: int) -> Layout | None:
    """Put the value function beside the policy.

    Args:
        model: The policy.
        value_model: As it was given, or None.
        disable_dropout: Whether its dropout is set to 0.
        pad_token_id: Of the policy.

    Returns:
        The layout that the value function needs, where it cannot read the policy's.
    """
    value = attach_value(model, value_model)
    if disable_dropout:
        disable_dropout_in_model(value)
    if value_model is not None and not isinstance(value_model, ValueHead):
        value.config.get_text_config().pad_token_id = pad_token_id  # type: ignore[attr-defined, union-attr, operator]
        layout = probe_layout(value)
        return layout if layout.kind == "padded" else None
    return None


def place_rewards(functions: list[Any], device: Any, pad_token_id: int) -> None:
    """Put reward models on the device."""
    for function in functions:
        if isinstance(function, TokenReward):
            function.model.to(device)
            function.pad_token_id = pad_token_id


def response_ends(args: PPOConfig, tokenizer: Any, stop_ids: tuple[int, ...]) -> tuple[tuple[int, ...], set[int]]:
    """Tokens at which generation stops, and tokens that show that a response came to an end.

    Args:
        args: With ``stop_token`` and ``stop_token_id``.
        tokenizer: Of the policy.
        stop_ids: At which the policy stops by itself.
    """
    vocabulary = len(tokenizer)
    if args.stop_token_id is not None and not 0 <= args.stop_token_id < vocabulary:
        raise ConfigError(
            f"stop_token_id={args.stop_token_id} is no token: the tokenizer has ids 0 to {vocabulary - 1}."
        )
    chosen = () if args.stop_token_id is None else (args.stop_token_id,)
    stops = tuple(stop_ids) if args.stop_token == "eos" else chosen
    if not stops:
        logger.warning(
            "stop_token=None: nothing ends a response, all have response_length=%d tokens and go on behind an end token. "
            "Set stop_token='eos' to stop there.", args.response_length,
        )  # fmt: skip
    return stops, {tokenizer.eos_token_id, *stops}


def save_value(model: nn.Module, folder: str) -> None:
    """Write the value function of a policy into a checkpoint."""
    tensors = {key: tensor.contiguous() for key, tensor in value_state(model).items()}
    save_file(tensors, Path(folder, VALUE_FILE))


def load_with_value(model: nn.Module, folder: str, load_policy: Callable[[], None]) -> None:
    """Load a policy from a checkpoint with ``load_policy``, and its value function.

    Raises:
        CheckpointError: The checkpoint has no value function.
    """
    with without_value(model):
        load_policy()
    path = Path(folder, VALUE_FILE)
    if not path.is_file():
        raise CheckpointError(
            f"the checkpoint {folder!r} has no {VALUE_FILE}: it is not one of a PPO run, or it is incomplete. Resume from "
            "another one, or start with its model as a new run."
        )
    restore_value(model, load_file(path))


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


class TokenPrompts(PromptSource):
    """Prompts of a PPO run, of which each is completed once; rows may hold token ids.

    Args:
        args: Of the trainer.
        tokenizer: Of the policy.
        collator: The user's, which turns rows with ``input_ids`` into a padded batch first; None needs none.
    """

    args: PPOConfig

    def __init__(self, args: PPOConfig, tokenizer: Any, *, collator: Any = None) -> None:
        super().__init__(args, tokenizer, length_option="response_length")
        self.collator, self.drops_columns = collator, False

    def trial_rows(self, head: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With the text of token ids, and with the ids that a rollout brings."""
        return [{**row, "prompt_ids": [0]} for row in self.readable(head[:2])]

    def checked_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """As the parent's; rows with ``input_ids`` must hold a token that is no padding."""
        first = next(iter(dataset), None)
        if first is None or "input_ids" not in first:
            return check_prompts(dataset, name, self.tokenizer)
        if isinstance(dataset, datasets.Dataset):
            rows = dataset.select_columns([c for c in ("input_ids", "attention_mask") if c in first]).with_format(None)
        else:
            rows = dataset.take(64)
        for index, row in enumerate(rows):
            if not self._real(row):
                raise DataError(f"{name} row {index}, column 'input_ids': it holds no token but padding. Drop the row.")
        return [row for _, row in zip(range(2), dataset, strict=False)]

    def repeats(self) -> tuple[int, int]:
        """Prompts of a rollout batch, and how many micro-batches are trained on it."""
        args = self.args
        return args.batch_size, args.updates * args.gradient_accumulation_steps

    def readable(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows as rewards see them: token ids without padding, and the text they stand for."""
        if not inputs or "input_ids" not in inputs[0]:
            return [dict(row) for row in inputs]
        given = inputs
        if self.collator is not None:
            batch = self.collator([{k: row[k] for k in ("input_ids", "attention_mask") if k in row} for row in inputs])
            masks = batch.get("attention_mask", [None] * len(inputs))
            given = [{"input_ids": ids, "attention_mask": m} for ids, m in zip(batch["input_ids"], masks, strict=True)]
        ids = [self._real(row) for row in given]
        texts = self.tokenizer.batch_decode(ids)
        return [
            {
                **{k: v for k, v in row.items() if k != "attention_mask"},
                "input_ids": real,
                "prompt": row.get("prompt", text),
            }
            for row, real, text in zip(inputs, ids, texts, strict=True)
        ]

    def _real(self, row: dict[str, Any]) -> list[int]:
        """A row's tokens without padding: what its mask keeps, or what stands between pad tokens."""
        ids, mask = _numbers(row["input_ids"]), row.get("attention_mask")
        if mask is not None:
            return [token for token, kept in zip(ids, _numbers(mask), strict=True) if kept]
        pad = self.tokenizer.pad_token_id
        real = [i for i, token in enumerate(ids) if token != pad]
        return ids[real[0] : real[-1] + 1] if real else []


def check_pad(tokenizer: Any, *, may_change: bool) -> None:
    """Padding and the end of a response must be two tokens, or rows that come padded could not be told apart.

    Args:
        tokenizer: Of the policy.
        may_change: Whether it is ours, so that another pad token may be set.

    Raises:
        ConfigError: They are one token.
    """
    if tokenizer.pad_token_id is None:
        resolve_pad_token(tokenizer)
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    free = [token for token in (tokenizer.unk_token, *added, tokenizer.bos_token) if token]
    other = next((token for token in free if token != tokenizer.eos_token), None)
    if may_change and other is not None:
        logger.info("the pad token equals the eos token %r; %r pads instead.", tokenizer.eos_token, other)
        tokenizer.pad_token = other
        return
    fix = f"tokenizer.pad_token = {other!r}" if other else "tokenizer.add_special_tokens({'pad_token': '[PAD]'})"
    raise ConfigError(
        f"the pad token of processing_class equals its eos token {tokenizer.eos_token!r} (id {tokenizer.eos_token_id}): the "
        f"end of a response would be taken for padding. Set another one before training: {fix}."
    )


def _numbers(values: Any) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else [int(value) for value in values]
