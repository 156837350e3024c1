"""Evaluation of every trainer: one loss that does not depend on the batch size, and predictions where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from posttrain.data.forest import Layout
from posttrain.losses.reduce import REDUCTIONS, Denominators, reduce
from posttrain.models import parallel
from posttrain.models.forward import virtual_tokens
from posttrain.types import Batch, LossTerms

__all__ = ["EvaluationMixin", "full_logits"]

IGNORED = -100


def full_logits(model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
    """The model's own forward on padded rows, and labels: the slow way, for user functions that want to see logits.

    Returns:
        The model's output with ``logits (B, T, V)``, and ``labels (B, T)``, the token or -100 where it carries no loss.
    """
    assert int(batch.branch.max()) == 0 and int(batch.tree.max()) <= 0, "full logits need one sequence a row"
    output = model(input_ids=batch.input_ids, attention_mask=(batch.tree == 0).long(), use_cache=False)
    output.logits = output.logits[:, virtual_tokens(model) :]
    return output, torch.where(batch.loss_mask, batch.input_ids, IGNORED)


class EvaluationMixin:
    """`evaluation_loop` for `PostTrainer`."""

    args: Any
    accelerator: Any
    model: Any
    model_wrapped: Any
    compute_metrics: Any
    counters: dict[str, float]
    layout: Layout
    preprocess_logits_for_metrics: Any

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `transformers.Trainer.evaluate`; a raw dataset is prepared first, a string names one given at construction."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self.prepare_evaluation(eval_dataset)
        return super().evaluate(eval_dataset, *args, **kwargs)  # type: ignore[misc]

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer.predict`; a raw dataset is prepared first, and full logits want one sequence a row."""
        layout = self.layout
        self.layout = Layout("padded", row_tokens=layout.row_tokens)
        try:
            return super().predict(self.prepare_evaluation(test_dataset), *args, **kwargs)  # type: ignore[misc]
        finally:
            self.layout = layout

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's, and no row twice: accelerate would fill the last batches of some ranks up with first rows."""
        with self._every_row_once():
            return super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As `get_eval_dataloader`."""
        with self._every_row_once():
            return super().get_test_dataloader(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _every_row_once(self) -> Iterator[None]:
        config = self.accelerator.dataloader_config
        before, dispatch = config.even_batches, config.dispatch_batches
        config.dispatch_batches = False  # A stream's default would cut our batches up as if they were tensors.
        config.even_batches = before and parallel.shards_parameters(self.accelerator)  # There a pass is a collective.
        try:
            yield
        finally:
            config.even_batches, config.dispatch_batches = before, dispatch

    def prepare_evaluation(self, dataset: Any) -> Any:
        """One raw evaluation set, or several by name, as the loop needs them; prepared ones come back equal."""
        if isinstance(dataset, dict):
            return {name: self.prepare(one, name) for name, one in dataset.items()}
        return self.prepare(dataset, "eval")

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """One raw dataset as the collator needs it."""
        return dataset

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss over the whole set, divided by its own counts: it does not depend on the evaluation batch size."""
        sharded = parallel.shards_parameters(self.accelerator)
        model = self.model_wrapped if sharded else self.model
        model.eval()
        if self.accelerator.mixed_precision != "no" and model is self.model and not hasattr(model, "_original_forward"):
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        wanted = self.compute_metrics is not None or description == "Prediction"
        found: list[tuple[int, Any, Any]] = []
        sums: dict[str, float] = {}
        counts = {"token": 0.0, "sequence": 0.0, "pass": 0.0}
        with torch.no_grad():
            for number, inputs in enumerate(dataloader):
                place = number * self.accelerator.num_processes + self.accelerator.process_index
                batches = [batch.to(self.args.device) for batch in self.eval_batches(inputs)]
                for batch in batches:
                    self._eval_pass(model, batch, sums, counts)
                if wanted:
                    with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                        found += [(place, *pair) for pair in self.predictions(model, batches)]
        metrics = {f"{metric_key_prefix}_loss": _eval_loss(sums, counts, self.accelerator)}
        for name, value in self._reduced("eval").items():  # type: ignore[attr-defined]
            metrics[f"{metric_key_prefix}_{name}"] = value
        metrics[f"{metric_key_prefix}_num_tokens"] = self.counters[
            "num_tokens"
        ]  # Trained so far: evaluation adds none.
        predictions = labels = None
        if wanted:
            # Ranks take turns with batches of the dataset; sorting is stable, so rows of a batch stay in order.
            found = sorted(parallel.all_gather_objects(found, self.accelerator), key=lambda item: item[0])
            predictions, labels = _stack([p for _, p, _ in found]), _stack([label for _, _, label in found])
        if self.compute_metrics is not None:
            own = self.compute_metrics(EvalPrediction(predictions, labels))
            metrics |= {
                k if k.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{k}": v for k, v in own.items()
            }
        return EvalLoopOutput(predictions, labels, metrics, num_samples=int(counts["sequence"]))

    def eval_batches(self, inputs: Any) -> list[Batch]:
        """Batches of one evaluation micro-batch; online trainers generate here."""
        return inputs

    def predictions(self, model: nn.Module, batches: list[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
        """One (logits, labels) a row, in the order of the dataset; ``preprocess_logits_for_metrics`` makes them small."""
        found: list[tuple[int, np.ndarray, np.ndarray]] = []
        for batch in batches:
            output, labels = full_logits(model, batch)
            logits = output.logits
            if self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            lengths = (batch.tree == 0).sum(1).tolist()
            for row, (origin, length) in enumerate(zip(batch.origin, lengths, strict=True)):
                found.append((origin, logits[row, :length].float().cpu().numpy(), labels[row, :length].cpu().numpy()))
        return [(prediction, label) for _, prediction, label in sorted(found, key=lambda item: item[0])]

    def _eval_pass(self, model: nn.Module, batch: Batch, sums: dict[str, float], counts: dict[str, float]) -> None:
        with self.compute_loss_context_manager():  # type: ignore[attr-defined]
            terms: LossTerms = self.terms(model, batch)[0]  # type: ignore[attr-defined]
        self.buffers["eval"].add(terms.metrics)  # type: ignore[attr-defined]
        for part in [terms, *terms.extra]:
            alone = replace(part, extra=[])
            key = part.count or part.reduction
            sums[key] = sums.get(key, 0.0) + float(reduce(alone, Denominators(1, 1, 1)))
        counts["token"] += batch.num_loss_tokens
        counts["sequence"] += batch.num_sequences
        counts["pass"] += 1
        for name, value in self.named_counts([batch]).items():  # type: ignore[attr-defined]
            counts[name] = counts.get(name, 0.0) + value


def _eval_loss(sums: dict[str, float], counts: dict[str, float], accelerator: Any) -> float:
    """Divide each reduction's sum by what it is a mean over, all of it over ranks."""
    named = sorted(set(counts) - {"token", "sequence", "pass"})
    reductions = [*sorted(REDUCTIONS), *named]
    order = ["token", "sequence", "pass", *named]
    packed = [sums.get(name, 0.0) for name in reductions] + [counts[name] for name in order]
    totals = parallel.all_reduce_sum(packed, accelerator)
    found = dict(zip(reductions, totals, strict=False))
    whole = dict(zip(order, totals[len(reductions) :], strict=True))
    divisor = {"token": "token", "local_token": "pass"} | {name: name for name in named}
    return sum(found[name] / max(whole[divisor.get(name, "sequence")], 1.0) for name in reductions)


def _stack(arrays: list[np.ndarray]) -> np.ndarray:
    """Arrays of different first lengths as one, padded with -100."""
    if not arrays or arrays[0].ndim == 0 or len({a.shape for a in arrays}) == 1:
        return np.stack(arrays) if arrays else np.zeros(0)
    longest = max(len(a) for a in arrays)
    pads = [[(0, longest - len(a))] + [(0, 0)] * (a.ndim - 1) for a in arrays]
    return np.stack([np.pad(a, pad, constant_values=IGNORED) for a, pad in zip(arrays, pads, strict=True)])
