"""`A2POTrainer`: estimates each prompt's optimal value once, then trains log-ratios to equal the reward minus the value."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from tqdm.auto import tqdm

from posttrain.data.formats import plain_rows
from posttrain.errors import DataError
from posttrain.extensions.experimental.a2po_method import A2PO, A2POConfig
from posttrain.loop.checkpoint import last_complete_checkpoint, saved_state
from posttrain.loop.online import OnlineTrainer
from posttrain.loop.prompts import named_sets
from posttrain.loop.rollout import Online, settings_of
from posttrain.loop.scoring import score_rollouts
from posttrain.losses.advantages import weighted_total
from posttrain.models import parallel
from posttrain.models.reference import Reference, disable_dropout_in_model, fingerprint, hash_module, hash_tensors
from posttrain.report.files import read_line
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch
from posttrain.trainers.arguments import (
    Adapter,
    Callbacks,
    EvalSets,
    Metrics,
    Model,
    OptimizerClass,
    Optimizers,
    Quantization,
    Rewards,
    Tokenizer,
    TrainSet,
)
from posttrain.types import SampleSettings

if TYPE_CHECKING:
    from posttrain.loop.run import Run

logger = logging.getLogger(__name__)


def optimal_value(rewards: Sequence[float], beta1: float) -> float:
    """Compute ``V* = beta1 log mean_i exp(r_i / beta1)`` over all rewards that are not NaN. If all rewards are NaN, the result
    is NaN.

    Args:
        rewards: Rewards of the reference model's completions of one prompt. NaN means that no reward function applied.
        beta1: Temperature, above 0.

    Reference: A*-PO, arXiv:2505.20686, equation 5.

    >>> [round(optimal_value([1.0] * k + [0.0] * (8 - k), 0.5), 5) for k in (0, 1, 4, 8)]
    [0.0, 0.29351, 0.71689, 1.0]
    """
    valid = [reward for reward in rewards if not math.isnan(reward)]
    if not valid:
        return math.nan
    highest = max(valid)
    total = math.fsum(math.exp((reward - highest) / beta1) for reward in valid)
    return highest + beta1 * math.log(total / len(valid))


def row_key(example: Mapping[str, Any]) -> str:
    """Return a hash of a dataset row. The hash covers the prompt and the columns that reward functions read."""
    text = json.dumps(dict(example), sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _computed_by(function: Callable) -> str:
    """Return a text that identifies a reward function: its source code, or a hash of the reward model's weights. The text
    is empty if the source code is not available.
    """
    if isinstance(model := getattr(function, "model", None), torch.nn.Module):
        return hash_module(model)
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


class ValueCache:
    """Cache of the rewards of the reference model's completions for each prompt. The cache is in memory and in a file.

    Args:
        path: JSON Lines file. Rewards are appended as soon as they are computed, so that an interrupted estimate can
            continue.
        run: Hash of all settings, weights and code that the rewards depend on, computed by `fingerprint`. Lines with
            another hash are ignored.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.rewards: dict[str, list[float]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            entry = read_line(line)
            if entry is None:
                logger.warning("%s has an incomplete line; the prompt of this line is sampled again.", path)
            elif entry["run"] == run:
                self.rewards[entry["prompt"]] = entry["rewards"]

    def add(self, sampled: Mapping[str, list[float]], *, write: bool) -> None:
        """Add rewards to the cache. With ``write``, also append them to the file. Only one process may write."""
        new = {key: rewards for key, rewards in sampled.items() if key not in self.rewards}
        self.rewards.update(new)
        if write and new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                for key, rewards in new.items():
                    file.write(json.dumps({"run": self.run, "prompt": key, "rewards": rewards}) + "\n")

    def value(self, example: Mapping[str, Any], beta1: float) -> float:
        """Return the value of the row's prompt, or NaN if all rewards of the prompt are NaN."""
        return optimal_value(self.rewards[row_key(example)], beta1)


FILE = "v_star.jsonl"
# Rewards are treated as binary if each reward differs from 0 or from 1 by at most TOLERANCE.
TOLERANCE = 1e-6
# Offset of the seed with which the reference model samples completions for the values. Training samples use other seeds.
VALUE_SEED = 20_000_003


class A2POTrainer(OnlineTrainer):
    """A*-PO: trains the log-ratio of each completion to equal its reward minus the optimal value of its prompt
    (experimental).

    A2PO needs neither groups of completions nor a value model. Before the first step, the frozen reference model
    samples ``num_value_samples`` completions of each prompt. The value of the prompt, ``V* = beta1 log mean exp(r /
    beta1)``, is estimated from their rewards. Values are stored in ``output_dir/v_star.jsonl`` and in checkpoints, with
    a hash of everything that they depend on. After that, each training step samples one completion per prompt.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        reward_funcs: Reward function ``f(prompts, completions, **columns) -> list[float | None]``, reward model, path
            or Hub id of a reward model, or a list of these.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with the column ``prompt``. A stream is not supported, because the values of all prompts
            are computed before training.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        reward_processing_classes: Tokenizer, or list of tokenizers, of the reward models. If None, they are loaded
            together with the reward models.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        tools: Not supported, must be None. Use `GRPOTrainer`.
        rollout_func: Not supported, must be None. Use `GRPOTrainer`.
        environment_factory: Not supported, must be None. Use `GRPOTrainer`.

    Reference: Accelerating RL for LLM reasoning with optimal advantage regression, arXiv:2505.20686.
    """

    METHOD = A2PO
    args: A2POConfig

    def __init__(
        self,
        model: Model,
        reward_funcs: Rewards | None = None,
        args: A2POConfig | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        *,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        rollout_engine: RolloutEngine | None = None,
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
        data_collator: Callable | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        for name, dataset in named_sets({"train_dataset": train_dataset, "eval_dataset": eval_dataset}):
            if isinstance(dataset, datasets.IterableDataset):
                raise DataError(
                    f"{name} is a stream, but A2PO estimates the value of every prompt first. Pass a Dataset."
                )

        self._own_engine = rollout_engine is None
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            reward_processing_classes=reward_processing_classes,
            rollout_engine=rollout_engine,
            quantization_config=quantization_config,
            peft_config=peft_config,
            data_collator=data_collator,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        disable_dropout_in_model(self.model)  # Dropout would add noise to the log-ratio.
        # Rewards of the reference model's completions. None until they are computed.
        self.cache: ValueCache | None = None
        # Index of the current batch of completions from which values are estimated. The batch's seed depends on this index.
        self._value_batch = 0
        self._restored: dict[str, Any] = {}
        self._filtered = False

    def make_reference(self) -> Reference:
        """Create the reference model. It samples the completions for the values, and the loss uses its log-probs."""
        return Reference(self.model, fresh_adapter=self.fresh_adapter)

    # Stage 1: values of all prompts ------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Estimate the values of all prompts, exclude training prompts that the reference model never solved, and train."""
        self._restore_values(resume_from_checkpoint)
        self.estimate_values([self.train_dataset, *(d for _, d in named_sets({"eval_dataset": self.eval_dataset}))])
        if not self._filtered:
            self.train_dataset = self.train_dataset.select(self._solvable(self.train_dataset))
            self.prompt_source.check_size(self.train_dataset)
            self._filtered = True
        return super().train(resume_from_checkpoint, **kwargs)

    def evaluate(self, eval_dataset: EvalSets | None = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Estimate the values of evaluation prompts without a value, then evaluate as the parent class does."""
        eval_dataset = plain_rows(eval_dataset)
        sets = self.eval_dataset if eval_dataset is None or isinstance(eval_dataset, str) else eval_dataset
        self.estimate_values([dataset for _, dataset in named_sets({"eval_dataset": sets})])
        return super().evaluate(eval_dataset, *args, **kwargs)

    def estimate_values(self, sets: Iterable[Any]) -> ValueCache:
        """Sample the reference model's completions of every prompt that is not in the cache, and compute their rewards."""
        cache = self.cache = self.cache or self._open_cache()
        rows = {row_key(row): row for dataset in sets for row in dataset}
        todo = [(key, row) for key, row in rows.items() if key not in cache.rewards]
        if not todo:
            return cache
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        size = max(1, self.args.per_device_eval_batch_size)
        main = self.accelerator.is_main_process
        quiet = self.args.disable_tqdm or not main
        with self._reference_engine(), tqdm(total=len(todo), desc="Values", unit="prompt", disable=quiet) as bar:
            for start in range(0, len(todo), size * world):
                part = todo[start + rank * size : start + (rank + 1) * size]
                self._value_batch = start + rank
                with parallel.failing_together(self.accelerator):
                    rewards = self._sampled_rewards(part)
                merged = parallel.all_gather_objects(list(rewards.items()), self.accelerator)
                cache.add(dict(merged), write=main)
                bar.update(len(merged))
        return cache

    def _sampled_rewards(self, part: Sequence[tuple[str, Any]]) -> dict[str, list[float]]:
        """Sample ``num_value_samples`` completions of each row. Return the total reward of each completion, after
        transformations and weights.
        """
        n = self.args.num_value_samples
        examples = [row for _, row in part for _ in range(n)]
        if not examples:
            # All ranks must take part in sampling, so a rank without rows samples completions of a spare example.
            self.sample([dict(self.spare_example)], self._value_settings())
            return {}
        generation = self.sample(examples, self._value_settings())
        table = score_rollouts(self.rewards, generation, self.processing_class, self.state)
        groups = torch.arange(len(part)).repeat_interleave(n)
        totals = weighted_total(self.rewards.transformed(table.values, groups), table.weights)  # (prompts n,)
        return {key: rewards for (key, _), rewards in zip(part, totals.reshape(-1, n).tolist(), strict=True)}

    def _solvable(self, dataset: datasets.Dataset) -> list[int]:
        """Return the indices of the rows to train on. Rows without a value are excluded. With ``filter_all_incorrect`` and
        binary rewards, rows that the reference model never solved are excluded too.

        Raises:
            DataError: All rows are excluded.
        """
        assert self.cache is not None
        rewards = [[r for r in self.cache.rewards[row_key(row)] if not math.isnan(r)] for row in dataset]
        binary = all(min(abs(r), abs(r - 1)) <= TOLERANCE for row in rewards for r in row)
        if self.args.filter_all_incorrect and not binary:
            logger.warning(
                "filter_all_incorrect=True has no effect: rewards%s are not all 0 or 1, so a sum of 0 does not mean that a "
                "prompt is unsolved.",
                "" if not self.args.reward_transform else f" after reward_transform={self.args.reward_transform}",
            )
        strict = self.args.filter_all_incorrect and binary
        selected = [i for i, row in enumerate(rewards) if row and (not strict or sum(row) > TOLERANCE)]
        if not selected:
            raise DataError(
                f"none of the {len(rewards)} training prompts remains: the reference solved none of them in "
                f"{self.args.num_value_samples} attempts (filter_all_incorrect={self.args.filter_all_incorrect}). "
                "Fix: use easier prompts, more num_value_samples or a better initial model, or check the reward "
                "function."
            )
        logger.info(
            "%d of %d training prompts are used. All other prompts have no value or were never solved.",
            len(selected),
            len(rewards),
        )
        return selected

    def _open_cache(self) -> ValueCache:
        model, sampling = self.reference.copy or self.model, self._value_settings().sampling
        run = fingerprint(
            # Do not include the trained adapter in the hash, because the reference model runs without it.
            model=hash_tensors({name: p for name, p in model.named_parameters() if not p.requires_grad}),
            sampling=sampling.unseeded(),
            samples=self.args.num_value_samples,
            prompt=[self.args.max_prompt_length, self.args.chat_template_kwargs, self.processing_class.chat_template],
            rewards=list(zip(self.rewards.names, self.rewards.weights.tolist(), strict=True)),
            transforms=self.args.reward_transform,
            code=[_computed_by(function) for function in self.rewards.functions],
        )
        cache = ValueCache(Path(self.args.output_dir, FILE), run)
        if self._restored.get("run") == run:
            cache.add(self._restored["rewards"], write=False)
        return cache

    @contextlib.contextmanager
    def _reference_engine(self) -> Iterator[None]:
        """Replace the trainer's engine inside the context with an engine that samples from the reference model. A second
        in-process engine is created if the trainer's engine has its own copy of the policy.

        If the user passed an engine object without its own copy of the weights, this engine samples from the policy. At the
        beginning of training, the policy equals the reference model.
        """
        engine, far = self.engine, self.engine.capabilities.needs_weight_sync
        with self.run.inference() as policy, self.reference.active(policy):
            copy = self.reference.copy
            if far or (self._own_engine and copy is not None):
                model = copy if copy is not None else self.accelerator.unwrap_model(self.model)
                self.engine = self.engine_on(model)
            try:
                yield
            finally:
                if self.engine is not engine:
                    self.engine.close()
                self.engine = engine

    def _value_settings(self) -> SampleSettings:
        """Return the sampling settings of evaluation, with a seed that depends on the batch of completions."""
        settings = settings_of(self.run, "eval")
        seed = (self.args.seed * 1_000_003 + VALUE_SEED + self._value_batch) % 2**63
        return replace(settings, sampling=replace(settings.sampling, seed=seed))

    def _restore_values(self, checkpoint: Any) -> None:
        """Load the values from the checkpoint. Values must be loaded before prompts are excluded, because the saved
        position in the dataset counts the remaining prompts.
        """
        if checkpoint is True:
            checkpoint = last_complete_checkpoint(self.args.output_dir)
        self._restored = saved_state(checkpoint or None, self.accelerator).get("values") or {}

    # Stage 2: one completion per prompt ------------------------------------------------------------------------------

    @property
    def prompt_limit(self) -> int | None:
        """Maximum number of tokens of a prompt. The beginning of a longer prompt is removed."""
        return self.args.max_prompt_length

    def make_online(self) -> Online:
        """Create the components that sample completions. Their ``logps`` function also returns the value of each
        completion's prompt.
        """
        online = super().make_online()

        def logps(run: Run, rollouts: RolloutBatch) -> dict[str, list[list[float]]]:
            assert self.cache is not None
            values = [[self.cache.value(example, self.args.beta1)] for example in rollouts.examples]
            return online.logps(run, rollouts) | {"v_star": values}

        return replace(online, logps=logps)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_to_save(self) -> dict[str, Any]:
        """Return the parent's state with the rewards from which prompt values are computed."""
        values = None if self.cache is None else {"run": self.cache.run, "rewards": self.cache.rewards}
        return super().state_to_save() | {"values": values}
