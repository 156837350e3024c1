"""Stage 1 of A*-PO: completions of the frozen reference, and the values of prompts that they give."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from tqdm.auto import tqdm

from posttrain.algorithms.a2po.config import A2POConfig
from posttrain.algorithms.a2po.values import ValueCache, fingerprint, model_hash, row_key
from posttrain.algorithms.checkpoint import STATE_FILE
from posttrain.errors import DataError
from posttrain.losses.advantages import weighted_total
from posttrain.models import parallel
from posttrain.models.reference import Reference
from posttrain.report.checkpoints import last_complete_checkpoint
from posttrain.rollouts.generation import Generation
from posttrain.types import Sampling

__all__ = ["ValueMixin", "named_sets"]

logger = logging.getLogger(__name__)

FILE = "v_star.jsonl"
TOLERANCE = 1e-6  # By which a reward may differ from 0 or 1 and still be one of them.
VALUE_SEED = 20_000_003  # Samples of values have seeds of their own.


class ValueMixin:
    """The part of `A2POTrainer` before the first step: every prompt's value, and which prompts to train on."""

    args: A2POConfig
    accelerator: Any
    cache: ValueCache | None
    engine: Any
    model: Any
    eval_dataset: Any
    processing_class: Any
    reference: Reference
    rewards: Any
    state: Any
    train_dataset: Any
    _filtered: bool
    _own_engine: bool
    _restored: dict[str, Any]
    _value_batch = 0

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Estimate values, leave out prompts that nothing solves, then train."""
        self._restore_values(resume_from_checkpoint)
        self.estimate_values([self.train_dataset, *(d for _, d in named_sets({"eval_dataset": self.eval_dataset}))])
        if not self._filtered:
            self.train_dataset = self.train_dataset.select(self._kept(self.train_dataset))
            self._check_dataset_size(self.train_dataset)  # type: ignore[attr-defined]
            self._filtered = True
        return super().train(resume_from_checkpoint, **kwargs)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As every trainer's; prompts without a value get one first."""
        given = self.eval_dataset if eval_dataset is None or isinstance(eval_dataset, str) else eval_dataset
        self.estimate_values([dataset for _, dataset in named_sets({"eval_dataset": given})])
        return super().evaluate(eval_dataset, *args, **kwargs)

    def estimate_values(self, sets: Iterable[Any]) -> ValueCache:
        """Sample and score completions of the reference for every prompt whose rewards are not known yet."""
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
                part = todo[start + rank * size : start + (rank + 1) * size][:size]
                found = parallel.run_and_share(
                    lambda part=part, s=start: self._sampled_rewards(part, s), self.accelerator
                )
                merged = parallel.all_gather_objects(list(found.items()), self.accelerator)
                cache.add(dict(merged), write=main)
                bar.update(len(merged))
        return cache

    def _open_cache(self) -> ValueCache:
        sampling = self.sampling("value")
        names = [name for name in Sampling.__slots__ if name != "seed"]
        run = fingerprint(
            model=model_hash(self.reference.copy or self.model),
            sampling={name: getattr(sampling, name) for name in names},
            samples=self.args.num_value_samples,
            prompt=[self.args.max_prompt_length, self.args.chat_template_kwargs, self.processing_class.chat_template],
            rewards=list(zip(self.rewards.names, self.rewards.weights.tolist(), strict=True)),
            transforms=self.args.reward_transform,
        )
        cache = ValueCache(Path(self.args.output_dir, FILE), run)
        if self._restored.get("run") == run:
            cache.add(self._restored["rewards"], write=False)
        return cache

    @contextlib.contextmanager
    def _reference_engine(self) -> Iterator[None]:
        """Generate with the reference meanwhile, here in process where the engine has a copy of the policy's weights.

        An engine object that was given, and has none, samples from the policy, which is the reference at first.
        """
        engine, far = self.engine, getattr(self.engine, "holds_copy", False)
        with self.inference() as policy, self.reference.active(policy):
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

    def _sampled_rewards(self, part: Sequence[tuple[str, Any]], number: int) -> dict[str, list[float]]:
        """Weighted rewards of ``num_value_samples`` completions of each of these rows."""
        n = self.args.num_value_samples
        examples = [row for _, row in part for _ in range(n)]
        self._value_batch = number + self.accelerator.process_index
        if not examples:
            self.roll_out(self.spare_examples(), "value")  # To generate is a collective.
            return {}
        rollouts, completions = self.roll_out(examples, "value")
        generation = Generation(examples, rollouts, completions)
        table = self.rewards(
            prompts=[example["prompt"] for example in examples],
            completions=completions,
            completion_ids=[rollout.token_ids for rollout in rollouts],
            columns=generation.reward_columns(),
            trainer_state=self.state,
            prompt_suffixes=self._suffixes(generation),
            judge=False,
        )
        groups = torch.arange(len(part)).repeat_interleave(n)
        values = self.rewards.transformed(table.values, groups)  # As the rewards they are compared with.
        totals = weighted_total(values, table.weights).reshape(-1, n).tolist()
        return {key: rewards for (key, _), rewards in zip(part, totals, strict=True)}

    def sampling(self, mode: str) -> Sampling:
        """As every online trainer's; the samples of values have seeds of their own."""
        settings = super().sampling("eval" if mode == "value" else mode)
        if mode != "value":
            return settings
        seed = (self.args.seed * 1_000_003 + VALUE_SEED + self._value_batch) % 2**63
        return Sampling(**{name: getattr(settings, name) for name in Sampling.__slots__} | {"seed": seed})

    def _kept(self, dataset: datasets.Dataset) -> list[int]:
        """Rows to train on: with a value, and (for rewards of 0 and 1) solved at least once.

        Raises:
            DataError: None is left.
        """
        assert self.cache is not None
        rewards = [[r for r in self.cache.rewards[row_key(row)] if not math.isnan(r)] for row in dataset]
        binary = all(min(abs(r), abs(r - 1)) <= TOLERANCE for row in rewards for r in row)
        if self.args.filter_all_incorrect and not binary:
            logger.warning(
                "filter_all_incorrect=True has no effect: rewards%s are not all 0 or 1, so a sum of 0 does not mean unsolved.",
                "" if not self.args.reward_transform else f" after reward_transform={self.args.reward_transform}",
            )
        strict = self.args.filter_all_incorrect and binary
        kept = [i for i, row in enumerate(rewards) if row and (not strict or sum(row) > TOLERANCE)]
        if not kept:
            raise DataError(
                f"none of the {len(rewards)} training prompts is left: the reference solved none of them in "
                f"{self.args.num_value_samples} attempts (filter_all_incorrect={self.args.filter_all_incorrect}). Take easier "
                "prompts, more num_value_samples, a better start, or check what the reward reads."
            )
        logger.info("%d of %d training prompts have a value to learn from.", len(kept), len(rewards))
        return kept

    def _restore_values(self, checkpoint: Any) -> None:
        """Values from the checkpoint, before the dataset is filtered by them: the place in it must not move."""
        if checkpoint is True:
            checkpoint = last_complete_checkpoint(self.args.output_dir)
        path = Path(checkpoint, f"{self.accelerator.process_index}_{STATE_FILE}") if checkpoint else None
        if path is None or not path.is_file():
            return
        self._restored = json.loads(path.read_text(encoding="utf-8")).get("values") or {}


def named_sets(sets: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Datasets with their names, those of a dict one by one."""
    for name, dataset in sets.items():
        if isinstance(dataset, dict):
            yield from named_sets({f"{name}[{key!r}]": value for key, value in dataset.items()})
        elif dataset is not None:
            yield name, dataset
