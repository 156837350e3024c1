"""`PPOTrainer`: proximal policy optimization with a value function."""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from posttrain.data.forest import collate, share_prompts, split_by_sequence
from posttrain.data.samplers import check_prompts
from posttrain.errors import CheckpointError, ConfigError, DataError, did_you_mean
from posttrain.extensions.experimental.ppo_config import PPOConfig
from posttrain.extensions.experimental.ppo_method import (
    PPO,
    plain_rows,
    training_rows,
)
from posttrain.loop import rollout
from posttrain.loop.build import as_config
from posttrain.loop.online import OnlineTrainer
from posttrain.loop.prompts import PromptSource
from posttrain.loop.rollout import Online
from posttrain.loop.scoring import completion_rows
from posttrain.metrics import MetricBuffer, mean
from posttrain.models import parallel
from posttrain.models.architecture import config_of, get_config_model_id
from posttrain.models.forward import forward
from posttrain.models.heads import adapters_of
from posttrain.models.load import create_model_from_path, load_classifier, resolve_pad_token
from posttrain.models.reference import Reference, check_reference, disable_dropout_in_model
from posttrain.models.value_head import (
    ValueHead,
    attach_value,
    check_scorer,
    check_vocabulary,
    load_value_state,
    value_of,
    value_state,
    without_value,
)
from posttrain.rewards.model import TokenReward
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch, sampler_gap
from posttrain.trainers.arguments import (
    Adapter,
    Callbacks,
    EvalSets,
    Metrics,
    Model,
    OptimizerClass,
    Optimizers,
    Quantization,
    Tokenizer,
    TrainSet,
)
from posttrain.types import Advantages, Batch, Row, SampleSettings, Sampling

if TYPE_CHECKING:
    from posttrain.loop.run import Hooks, Run
    from posttrain.types import AnyDataset, LogProbs

logger = logging.getLogger(__name__)


TABLE_TEMPERATURE = 0.01  # Sampling temperature of the completions that are logged as tables.
# The k1 estimate of the KL is noisy and can be negative. A warning is logged if its mean is below KL_LOW in KL_UPDATES
# consecutive rollout batches, because noise alone does not explain this.
KL_LOW, KL_UPDATES = -1.0, 5


# File with the value function in a checkpoint. A policy that the user saves with `save_model` does not have this file.
VALUE_FILE = "value_function.safetensors"


class TokenPrompts(PromptSource):
    """Prompts of a PPO run. Each prompt gets one response. Dataset rows may contain token ids instead of text.

    Args:
        args: The trainer's config.
        tokenizer: Tokenizer of the policy.
        collator: Data collator of the user. It converts rows with ``input_ids`` to a padded batch. None: no
            collator.
    """

    args: PPOConfig

    def __init__(self, args: PPOConfig, tokenizer: Tokenizer, *, collator: Any = None) -> None:
        super().__init__(args, tokenizer, length_option="response_length")
        self.collator, self.drops_columns = collator, False

    def token_ids(self, rows: list[dict[str, Any]]) -> list[Any]:
        """Return the token ids of prompts. The ``input_ids`` of a row are used without changes."""
        return [list(row["input_ids"]) for row in rows] if "input_ids" in rows[0] else super().token_ids(rows)

    def trial_rows(self, head: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows with a dummy prompt, as text and as token ids. Reward functions are tested with these rows."""
        return [{**row, "prompt_ids": [0]} for row in self.readable(head[:2])]

    def checked_rows(self, dataset: AnyDataset, name: str) -> list[dict[str, Any]]:
        """Check the rows of a dataset. ``input_ids`` must contain a token other than padding."""
        first = next(iter(dataset), None)
        if first is None or "input_ids" not in first:
            return check_prompts(dataset, name, self.tokenizer)
        if isinstance(dataset, datasets.Dataset):
            rows = dataset.select_columns([c for c in ("input_ids", "attention_mask") if c in first]).with_format(None)
        else:
            rows = dataset.take(64)
        for index, row in enumerate(rows):
            if not self._real(row):
                raise DataError(f"{name} row {index}, column 'input_ids' contains only padding. Remove the row.")
        return [row for _, row in zip(range(2), dataset, strict=False)]

    def repeats(self) -> tuple[int, int]:
        """Return the number of prompts per rollout batch and the number of micro-batches in all passes over a rollout
        batch.
        """
        args = self.args
        return args.batch_size, args.updates * args.gradient_accumulation_steps

    def readable(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows for reward functions. Padding is removed from the token ids, and the prompt is added as text."""
        if not inputs or "input_ids" not in inputs[0]:
            return [dict(row) for row in inputs]
        plain = inputs
        if self.collator is not None:
            batch = self.collator([{k: row[k] for k in ("input_ids", "attention_mask") if k in row} for row in inputs])
            masks = batch.get("attention_mask", [None] * len(inputs))
            plain = [{"input_ids": ids, "attention_mask": m} for ids, m in zip(batch["input_ids"], masks, strict=True)]
        rows = []
        for row, plain_row in zip(inputs, plain, strict=True):
            ids = self._real(plain_row)
            rows.append({"prompt": self.tokenizer.decode(ids), **row, "input_ids": ids})
            rows[-1].pop("attention_mask", None)
        return rows

    def _real(self, row: dict[str, Any]) -> list[int]:
        """Return the token ids of a row without padding. The row's attention mask marks the padding. Without an attention
        mask, pad tokens at the beginning and at the end are removed.
        """
        ids, mask = [int(token) for token in row["input_ids"]], row.get("attention_mask")
        if mask is not None:
            return [token for token, valid in zip(ids, mask, strict=True) if valid]
        pad = self.tokenizer.pad_token_id
        real = [i for i, token in enumerate(ids) if token != pad]
        return ids[real[0] : real[-1] + 1] if real else []


class PPOTrainer(OnlineTrainer):
    """Proximal policy optimization with a learned value function. A KL penalty to a reference model is subtracted from
    the reward.

    Args:
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        processing_class: Tokenizer of the policy. The tokenizer's pad token must differ from its eos token. If None, it
            is loaded from the model's path or Hub id.
        model: Model to train, as a path, Hub id, model object or peft model.
        ref_model: Reference model. None: the initial weights, as a frozen copy or as the model with its new adapter
            disabled.
        reward_model: Sequence classifier with one label that reads the policy's token ids, its Hub id, a reward
            function as in `GRPOTrainer`, or a list of these.
        train_dataset: Dataset with ``input_ids`` (prompts; padding is removed), or with ``prompt`` as text or messages.
        value_model: Sequence classifier with one label (or its Hub id) that is trained with the policy. None: a value
            head on the policy, so that one forward pass computes log-probs and values.
        data_collator: Function that builds a padded batch from rows with ``input_ids``. None: rows are used directly.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        tools: Not supported, must be None. Use `GRPOTrainer`.
        rollout_func: Not supported, must be None. Use `GRPOTrainer`.
        environment_factory: Not supported, must be None. Use `GRPOTrainer`.

    Reference: PPO, arXiv:1707.06347; Learning to summarize from human feedback, arXiv:2009.01325, section 3.4.

    >>> def short(completions, **kwargs):
    ...     return [-len(text) / 100 for text in completions]
    >>> trainer = PPOTrainer(args, tokenizer, model, None, short, prompts, None)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    METHOD = PPO
    method: PPO
    _paper: ClassVar[dict[str, str]] = {"title": "Proximal Policy Optimization Algorithms", "id": "1707.06347"}
    args: PPOConfig
    prompt_source: TokenPrompts
    reference: Reference
    # Number of the optimizer step after which the last table of samples was logged.
    _table_of = -1

    def __init__(
        self,
        args: PPOConfig | None = None,
        processing_class: Tokenizer | None = None,
        model: Model | None = None,
        ref_model: nn.Module | None = None,
        reward_model: nn.Module | None = None,
        train_dataset: TrainSet | None = None,
        value_model: nn.Module | None = None,
        data_collator: Callable | None = None,
        *,
        eval_dataset: EvalSets | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: Adapter | None = None,
        rollout_engine: RolloutEngine | None = None,
        quantization_config: Quantization | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        name = model if isinstance(model, str) else get_config_model_id(config_of(model))
        args = copy.copy(as_config(PPOConfig, args or f"{Path(name).name or 'model'}-PPO"))
        self._given_collator, self._owns_tokenizer = data_collator, processing_class is None
        self._low_kl = 0
        # Number of responses that were trained on before this run, and the time at which this run began.
        self._clock: tuple[float, float] | None = None
        model, self._given_reference, self._given_value = _opened(args, model, ref_model, value_model)
        args.plan(len(train_dataset) if isinstance(train_dataset, Sized) else None)
        self.reward_model, rewards = reward_model, _reward_functions(reward_model, args)
        super().__init__(
            model,
            rewards,
            args,
            processing_class=processing_class,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            rollout_engine=rollout_engine,
            quantization_config=quantization_config,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self._join_value()
        for reward in self._token_rewards():
            reward.model.to(self.args.device)
            reward.pad_token_id = self.pad_token_id
        self.buffers["table"] = MetricBuffer()
        self.counters.setdefault("episode", 0.0)
        # Ids of tokens that end a response.
        self.end_ids = {self.processing_class.eos_token_id, *self.stops}

    def _token_rewards(self) -> list[TokenReward]:
        return [function for function in self.rewards.functions if isinstance(function, TokenReward)]

    def _join_value(self) -> None:
        """Attach the value function to the policy, and choose a batch layout that policy and value function support."""
        value = attach_value(self.model, self._given_value)
        if self.args.disable_dropout:
            disable_dropout_in_model(value)
        if not isinstance(value, ValueHead):
            config: Any = value.config
            config.get_text_config().pad_token_id = self.pad_token_id
            self.read_also_by(value)

    @functools.cached_property
    def stops(self) -> tuple[int, ...]:
        """Token ids at which generation stops."""
        chosen, vocabulary = self.args.stop_token_id, len(self.processing_class)
        if chosen is not None and not 0 <= chosen < vocabulary:
            raise ConfigError(f"stop_token_id={chosen} is not a token. Fix: use an id from 0 to {vocabulary - 1}.")
        if self.args.stop_token == "eos":
            return tuple(self.stop_ids)
        if chosen is None:
            logger.warning(
                "stop_token=None: responses do not stop at an end token and all have response_length=%d tokens. "
                "Set stop_token='eos' to stop at the eos token.", self.args.response_length,
            )  # fmt: skip
        return () if chosen is None else (chosen,)

    def make_prompt_source(self) -> TokenPrompts:
        """Create the source of prompts. Prompts can be text, messages or token ids."""
        return TokenPrompts(self.args, self.processing_class, collator=self._given_collator)

    def prepare_datasets(self, train: AnyDataset, evaluation: EvalSets | None) -> tuple[Any, Any]:
        """Prepare the datasets. Raise an error for an unsupported tokenizer or model before the policy is loaded."""
        _check_pad(self.processing_class, may_change=self._owns_tokenizer)
        for reward in self._token_rewards():
            check_vocabulary(self.processing_class, reward.model, "reward_model")
        if self._given_value is not None and not isinstance(self._given_value, ValueHead):
            check_vocabulary(self.processing_class, self._given_value, "value_model")
        return super().prepare_datasets(train, evaluation)

    def make_reference(self) -> Reference:
        """Create the reference model. It is the model that the user passed, the policy with another adapter or without its
        adapter, or a frozen copy of the policy.
        """
        ref_model, adapter = self._given_reference, self.args.ref_adapter_name
        if ref_model is not None and self.args.disable_dropout:
            disable_dropout_in_model(ref_model)
        self.read_also_by(ref_model)
        return Reference(self.model, fresh_adapter=self.fresh_adapter, given=ref_model, adapter=adapter)

    @property
    def policy_model(self) -> Any:
        """The policy, which the optimizer updates and `save_model` saves."""
        return self.model

    @property
    def ref_model(self) -> Any:
        """The frozen reference model. None if the reference is the policy with another adapter or without its adapter."""
        return self.reference.copy

    @property
    def value_model(self) -> Any:
        """The value function: the model that was passed, or the value head on the policy."""
        return value_of(self.model)

    # One rollout batch -----------------------------------------------------------------------------------------------

    def _hooks(self) -> Hooks:
        return replace(super()._hooks(), batches=self._batches, eval_batches=self._eval_batches)

    def _batches(self, run: Run, inputs: list[dict[str, Any]], index: int) -> list[Batch]:
        """Return the next micro-batch. After all passes over a rollout batch, generate a new one."""
        args = self.args
        pieces = args.num_mini_batches * args.gradient_accumulation_steps
        self.window.passes = args.num_ppo_epochs * pieces
        self._clock = self._clock or (self.counters["episode"], time.perf_counter())
        rows = rollout.next_rows(run, self.prompt_source.readable(inputs), index)
        return rollout.collated(run, share_prompts(self._piece(rows, *divmod(self.window.step - 1, pieces)))[0])

    def _piece(self, rows: list[Row], epoch: int, number: int) -> list[Row]:
        """Return micro-batch ``number`` of pass ``epoch``. Every pass assigns the responses to mini-batches in a new
        random order.
        """
        args = self.args
        seed = (args.seed * 1_000_003 + self.window.generations) * 1_009 + epoch
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed % 2**63))
        mini, micro = divmod(number, args.gradient_accumulation_steps)
        chosen = order.tensor_split(args.num_mini_batches)[mini].tensor_split(args.gradient_accumulation_steps)[micro]
        return [rows[i] for i in chosen.tolist()]

    def _eval_batches(self, run: Run, inputs: list[dict[str, Any]]) -> list[Batch]:
        """Sample and score responses to one evaluation batch, and collate them."""
        rollouts = rollout.rollout_step(run, self.prompt_source.readable(inputs), "eval")
        (rows,) = self._training_rows(run, rollouts)
        return rollout.collated(run, share_prompts(rows)[0])

    def make_online(self) -> Online:
        """Create the components that sample responses, with the sampling temperature and the stop tokens of PPO."""
        online = super().make_online()

        def sampling(run: Run) -> Sampling:
            return replace(online.sampling(run), temperature=self.method.temperature, stop_token_ids=self.stops)

        return replace(online, sampling=sampling, logps=self._measured, slices=self._training_rows)

    def _training_rows(self, run: Run, rollouts: RolloutBatch) -> list[list[Row]]:
        """Convert a rollout batch to training rows. Mini-batches are subsets of these rows."""
        return [training_rows(rollouts, self.args.response_length, self.pad_token_id)]

    def sample(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """Sample responses, and add two columns to the batch. ``prompt_ids`` contains the prompts' token ids for reward
        models. ``ended`` is 1 for responses with an end token.
        """
        batch = super().sample(examples, settings)
        ended = [float(not self.end_ids.isdisjoint(rollout.token_ids)) for rollout in batch.rollouts]
        prompts = [rollout.prompt_ids for rollout in batch.rollouts]
        return replace(batch, columns={"ended": ended}, extra=batch.extra | {"prompt_ids": prompts})

    def _measured(self, run: Run, rollouts: RolloutBatch) -> dict[str, list[list[float]]]:
        """Compute the policy's log-probs and values of all responses with one forward pass of the policy. Compute the
        reference's log-probs with one forward pass of the reference.
        """
        rows = plain_rows(rollouts, self.args.response_length, self.pad_token_id)
        with self.run.inference() as policy:
            measured = self.measure(policy, rows, frozenset({"logp", "values"}))
        with self.run.inference() as policy, self.reference.active(policy) as reference:
            measured["ref_logp"] = self.measure(reference, rows, frozenset({"logp"}))["logp"]
        if self.engine.capabilities.has_logprobs:
            self.run.log(sampler_gap(rollouts.rollouts, measured["logp"]), rollouts.mode)
        names = {"logp": "old_logp", "values": "old_values"}
        return {names.get(name, name): column for name, column in measured.items()}

    @torch.no_grad()
    def measure(self, model: nn.Module, rows: Sequence[Row], needs: frozenset[str]) -> dict[str, list[list[float]]]:
        """Compute log-probs or values of every response token with the forward pass that training uses."""
        chunk = self.args.logits_chunk_size
        size, result = self.args.local_rollout_forward_batch_size, {name: [[]] * len(rows) for name in needs}
        # Each item is a batch and a list with the index in ``rows`` of each response of the batch.
        batches: list[tuple[Batch, list[int]]] = []
        for start in range(0, len(rows), size):
            part, places = share_prompts(rows[start : start + size])
            here = [start + place for place in places]
            batches += [(b, here) for b in collate(part, pad_token_id=self.pad_token_id, layout=self.layout)]
        for (batch, places), counts in parallel.in_step(
            batches, self.accelerator, lambda: (self.run.spare_batch(), [])
        ):
            outputs = forward(
                model, batch.to(self.args.device), needs, temperature=self.method.temperature, chunk_size=chunk
            )
            for name in needs if counts else ():
                # Copy the values of all responses to the host in one transfer.
                pieces = split_by_sequence(getattr(outputs, name).cpu(), batch.to("cpu"))
                for origin, piece in zip(batch.origin, pieces, strict=True):
                    result[name][places[origin]] = piece.tolist()
        return result

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs) -> Advantages:
        """Compute the advantages, count the responses, and warn if the KL estimate is too low."""
        advantages = super().advantages(rollouts, rewards, logps)
        divergence, eos_id = advantages.metrics["objective/kl"], self.processing_class.eos_token_id
        eos = sum(rollout.token_ids.count(eos_id) for rollout in rollouts.rollouts)
        local = [float(divergence.value), float(divergence.weight), eos, len(rollouts.rollouts)]
        kl, responses, eos, rows = parallel.all_reduce_sum(local, self.accelerator)
        if rollouts.mode == "train":
            self.counters["episode"] += rows
            self._watch_kl(kl / max(responses, 1.0))
        return replace(advantages, metrics={**advantages.metrics, "val/num_eos_tokens": mean(eos)})

    def _watch_kl(self, kl: float) -> None:
        self._low_kl = self._low_kl + 1 if kl < KL_LOW else 0
        if self._low_kl == KL_UPDATES:
            logger.warning(
                "objective/kl has been below %g for %d rollout batches (now %.2f), but a KL cannot be negative, so the "
                "policy differs from the model that samples. Common causes: a ref_model that is not the initial "
                "model, different tokenizers, truncated sampling (top-k, top-p), a wrong temperature.",
                KL_LOW, KL_UPDATES, kl,
            )  # fmt: skip

    # One optimizer step ----------------------------------------------------------------------------------------------

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create a learning-rate scheduler of transformers. The rate stays constant during all steps on one rollout batch."""
        users_own = self.lr_scheduler is not None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if not users_own and isinstance(scheduler, LambdaLR):
            updates = self.args.updates
            scheduler.lr_lambdas = [
                lambda step, rate=rate: rate(step // updates * updates) for rate in scheduler.lr_lambdas
            ]
        return scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics together with ``lr`` (learning rate), ``episode`` (number of responses) and ``eps`` (responses
        per second since the start of the run).
        """
        if "loss" in logs and self._clock is not None:
            done, (before, began) = self.counters["episode"], self._clock
            logs |= {"lr": logs.get("learning_rate", math.nan), "episode": done}
            logs["eps"] = (done - before) / max(time.perf_counter() - began, 1e-9)
        super().log(logs, start_time)

    # Saving and loading ----------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # A complete state dict also contains the value function. Keep only the policy's tensors.
        if state_dict is not None:
            state_dict = {k: v for k, v in state_dict.items() if "v_head." not in k and "value_model." not in k}
        with without_value(self.model):
            super()._save(output_dir, state_dict)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy. In a checkpoint, also save the value function to a separate file."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir and self.args.should_save and not parallel.shards_parameters(self.accelerator):
            tensors = {key: tensor.contiguous() for key, tensor in value_state(self.model).items()}
            save_file(tensors, Path(output_dir, VALUE_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load = super()._load_from_checkpoint
        self._load_parts(resume_from_checkpoint, lambda: load(resume_from_checkpoint, model))

    def _load_best_model(self) -> None:
        self._load_parts(self.state.best_model_checkpoint, super()._load_best_model)

    def _load_parts(self, folder: str, load_policy: Callable[[], None]) -> None:
        if parallel.shards_parameters(self.accelerator):
            # A sharded checkpoint contains policy and value function together.
            load_policy()
            return
        with without_value(self.model):
            load_policy()
        path = Path(folder, VALUE_FILE)
        if not path.is_file():
            raise CheckpointError(
                f"the checkpoint {folder!r} has no {VALUE_FILE}: it is not from a PPO run, or it is incomplete. Fix: "
                "resume from another checkpoint, or start a new run with its model."
            )
        load_value_state(self.model, load_file(path))

    # Sample tables ---------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        wanted, step = self.args.num_sample_generations, self.state.global_step
        if not wanted or self.eval_dataset is None or self._table_of == step:
            return
        if step % max(1, self.state.max_steps // wanted) == 0:
            # Store the step, so that the end of training does not log the same table again.
            self._table_of = step
            self.generate_completions(sampling=True)

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]]:
        """Sample answers to the prompts of ``eval_dataset`` at temperature 0.01, score the answers, and write
        ``eval_completions.parquet``.

        Args:
            sampling: Whether to use only the first batch of ``eval_dataset``.

        Returns:
            A table with one row per answer of all processes. The columns are prompt, completion and rewards.
        """
        rows: list[dict[str, Any]] = []
        datasets = self.eval_dataset
        loader = self.get_eval_dataloader(next(iter(datasets)) if isinstance(datasets, dict) else None)
        for inputs in loader:
            rollouts = self._answers(inputs)
            table, step = self.score(rollouts, "table"), self.state.global_step
            rows += completion_rows(rollouts, table, self.processing_class, step, images=False)
            if sampling:
                break
        rows = parallel.all_gather_objects(rows, self.accelerator)
        self.buffers["table"] = MetricBuffer()
        self.record.add_completions(rows, evaluation=True)
        return rows

    def _answers(self, inputs: list[dict[str, Any]]) -> RolloutBatch:
        """Sample answers to one evaluation batch. All ranks must take part in sampling, so a rank without rows samples an
        answer to a spare example and discards the answer.
        """
        examples = self.prompt_source.readable(inputs or [dict(self.spare_example)])
        settings = rollout.settings_of(self.run, "table")
        cold = replace(settings.sampling, temperature=TABLE_TEMPERATURE)
        batch = self.sample(examples, replace(settings, sampling=cold))
        return replace(batch, columns={}) if inputs else RolloutBatch([], [], [])


def _opened(args: PPOConfig, model: nn.Module, ref_model: Any, value_model: Any) -> tuple[Any, Any, Any]:
    """Return policy, reference and value function. Load models that are given as a path or Hub id.

    Raises:
        ConfigError: The reference is the policy itself, or its adapter does not exist.
    """
    if isinstance(ref_model, nn.Module):
        check_reference(ref_model, model)
    adapters = sorted(adapters_of(model))
    for name in (args.model_adapter_name, args.ref_adapter_name):
        if name is not None and name not in adapters:
            raise ConfigError(
                f"the model has no adapter {name!r}; its adapters are {adapters}{did_you_mean(name, adapters)}."
            )
    if args.model_adapter_name is not None:
        model.set_adapter(args.model_adapter_name)
    if isinstance(ref_model, str):
        ref_model = create_model_from_path(ref_model, trust_remote_code=args.trust_remote_code)
    value_model = _classifier(value_model, args)
    if value_model is not None and not isinstance(value_model, ValueHead):
        check_scorer(value_model, "value_model")
    return model, ref_model, value_model


def _reward_functions(reward_model: Any, args: PPOConfig) -> list[Any]:
    """Return reward functions that read token ids. Reward models are wrapped, and other reward functions are returned
    unchanged.
    """
    rewards = list(reward_model) if isinstance(reward_model, list | tuple) else [reward_model]
    if not rewards or any(reward is None for reward in rewards):
        raise ConfigError(
            "reward_model is None. Fix: pass a sequence classifier, a reward function, or a list of them."
        )
    functions: list[Any] = []
    for reward in rewards:
        if isinstance(reward, str | nn.Module):
            reward = _classifier(reward, args, new_head=False)
            check_scorer(reward, "reward_model")
            if args.disable_dropout:
                disable_dropout_in_model(reward)
            reward = TokenReward(reward, batch_size=args.local_rollout_forward_batch_size)
        functions.append(reward)
    return functions


def _classifier(model: str | nn.Module, args: PPOConfig, *, new_head: bool = True) -> Any:
    if not isinstance(model, str):
        return model
    return load_classifier(model, num_labels=1, new_head=new_head, trust_remote_code=args.trust_remote_code)


def _check_pad(tokenizer: Tokenizer, *, may_change: bool) -> None:
    """Reject a pad token that is also the eos token, because the end of a padded response could not be recognized.

    Args:
        tokenizer: Tokenizer of the policy.
        may_change: Whether the trainer loaded the tokenizer and may set another pad token.

    Raises:
        ConfigError: The pad token equals the eos token and cannot be changed.
    """
    if tokenizer.pad_token_id is None:
        resolve_pad_token(tokenizer)
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    free = [token for token in (tokenizer.unk_token, *added, tokenizer.bos_token) if token]
    other = next((token for token in free if token != tokenizer.eos_token), None)
    if may_change and other is not None:
        logger.info(
            "the pad token equals the eos token %r; %r is used for padding instead.", tokenizer.eos_token, other
        )
        tokenizer.pad_token = other
        return
    fix = f"tokenizer.pad_token = {other!r}" if other else "tokenizer.add_special_tokens({'pad_token': '[PAD]'})"
    raise ConfigError(
        f"the pad token of processing_class equals its eos token {tokenizer.eos_token!r} (id {tokenizer.eos_token_id}), so the "
        f"end of a response would be treated as padding. Set another pad token before training: {fix}."
    )
