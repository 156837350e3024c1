"""Evaluation of every trainer: one loss that does not depend on the batch size, and predictions where they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from posttrain.data.forest import Layout, collate
from posttrain.data.samplers import Deal, DealtBatches, DealtStream
from posttrain.losses.reduce import REDUCTIONS, Denominators, reduce
from posttrain.metrics import MetricBuffer
from posttrain.models import parallel
from posttrain.models.forward import forward, virtual_tokens
from posttrain.training.hooks import user_override
from posttrain.types import Batch, Row

__all__ = ["EvaluationMixin", "full_logits"]

IGNORED = -100
OWN = "own"  # What the user's own loss is a mean over.


def full_logits(model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
    """The model's own forward on padded rows, and labels: the slow way, for user functions that want to see logits.

    Returns:
        The model's output with ``logits (B, T, V)``, and ``labels (B, T)``, the token or -100 where it carries no loss.
    """
    assert int(batch.branch.max()) == 0 and int(batch.tree.max()) <= 0, "full logits need one sequence a row"
    output = model(input_ids=batch.input_ids, attention_mask=(batch.tree == 0).long(), use_cache=False)
    output.logits = output.logits[:, virtual_tokens(model) :]
    return output, torch.where(batch.loss_mask, batch.input_ids, IGNORED)


@dataclass(slots=True)
class _Seen:
    """What a user's ``compute_metrics`` is shown of one batch: of each prediction, and of each sequence."""

    predictions: list[Any] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    inputs: list[np.ndarray] = field(default_factory=list)


@dataclass(slots=True)
class _Tally:
    """Sums and counts of one evaluation of this rank; the same names on every rank, whatever rows it has."""

    sums: dict[str, float]
    counts: dict[str, float]
    rounds: int = 0
    seen: list[tuple[int, _Seen]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def named(cls, names: Iterable[str]) -> _Tally:
        """An empty one, for a trainer with these `named_counts`."""
        named = [*names, OWN]
        counts = ("token", "sequence", "pass", *named)
        return cls(dict.fromkeys((*sorted(REDUCTIONS), *named), 0.0), dict.fromkeys(counts, 0.0))

    def loss(self, accelerator: Any) -> float:
        """Each reduction's sum by what it is a mean over, all of it over ranks."""
        totals = parallel.all_reduce_sum([*self.sums.values(), *self.counts.values()], accelerator)
        sums = dict(zip(self.sums, totals, strict=False))
        counts = dict(zip(self.counts, totals[len(sums) :], strict=True))
        return sum(value / max(counts[_divisor(name, counts)], 1.0) for name, value in sums.items())


class EvaluationMixin:
    """`evaluation_loop` for `PostTrainer`."""

    args: Any
    accelerator: Any
    buffers: dict[str, MetricBuffer]
    compute_loss_func: Any
    compute_metrics: Any
    counters: dict[str, float]
    data_collator: Any
    denominators: Denominators
    layout: Layout
    model: Any
    model_wrapped: Any
    needs: frozenset[str]
    preprocess_logits_for_metrics: Any
    answers_per_row = 1  # Sequences of a row of the dataset.
    no_rows: Any = ()  # What a batch without rows is collated to.
    _reduced_by: str | None = None  # The reduction of the loss that `compute_loss` returned last.
    _eval_rounds = 0

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
            output = super().predict(self.prepare_evaluation(test_dataset), *args, **kwargs)  # type: ignore[misc]
        finally:
            self.layout = layout
        self.count_rounds(output.metrics)
        return output

    def count_rounds(self, metrics: dict[str, float]) -> None:
        """Steps a second by the batches there were: transformers divides rows of the dataset by rows of a batch."""
        for name in metrics:
            if name.endswith("_steps_per_second") and not name.startswith("train_"):
                seconds = metrics[name.replace("_steps_per_second", "_runtime")]
                metrics[name] = round(self._eval_rounds / max(seconds, 1e-9), 3)

    # Rows --------------------------------------------------------------------------------------------------------

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        """As the parent's for training; for evaluation one that gives every row to one process, once.

        Accelerate's loaders would fill the last batches up with rows that were there already, or end on some ranks early.
        """
        if is_training:
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, True, dataloader_key)  # type: ignore[misc]
        args = self.args
        place = {"world": self.accelerator.num_processes, "rank": self.accelerator.process_index}
        deal = Deal(batch_size, **place, group=self.eval_group, drop_last=args.dataloader_drop_last)
        options: dict[str, Any] = {
            "collate_fn": partial(_collated, self.data_collator, self.no_rows),
            "num_workers": args.dataloader_num_workers,
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        if isinstance(dataset, IterableDataset):
            loader = DataLoader(DealtStream(dataset, deal), batch_size=None, **options)
        else:
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            sampler = range(len(dataset)) if sampler is None else sampler
            loader = DataLoader(dataset, batch_sampler=DealtBatches(sampler, deal), **options)
        if dataloader_key is not None and args.dataloader_persistent_workers:  # Where the parent looks for it.
            vars(self).setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        return loader

    @property
    def eval_group(self) -> int:
        """Consecutive rows of an evaluation batch that are compared with each other."""
        return 1

    def prepare_evaluation(self, dataset: Any) -> Any:
        """One raw evaluation set, or several by name, as the loop needs them; prepared ones come back equal."""
        if isinstance(dataset, dict):
            return {name: self.prepare(one, name) for name, one in dataset.items()}
        return self.prepare(dataset, "eval")

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """One raw dataset as the collator needs it."""
        return dataset

    def eval_batches(self, inputs: Any) -> list[Batch]:
        """Batches of one evaluation micro-batch, which may be empty; online trainers generate here."""
        return list(inputs)

    # The loop ----------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss over the whole set, divided by its own counts: it does not depend on the evaluation batch size."""
        model = self._model_to_evaluate()
        wanted = self.compute_metrics is not None or description == "Prediction"
        by_batch = self.compute_metrics is not None and self.args.batch_eval_metrics
        tally = _Tally.named(self.named_counts([]))  # type: ignore[attr-defined]
        with torch.no_grad():
            for inputs, last in _with_last(dataloader):
                batches = [batch.to(self.args.device) for batch in self.eval_batches(inputs)]
                seen = _Seen()
                for batch, counts in parallel.in_step(batches, self.accelerator, self.spare_batch):
                    self._eval_pass(model, batch, tally, seen if counts else None)
                if wanted:
                    self._see(model, batches, tally, seen)
                if by_batch:
                    tally.metrics = self._metrics_of(tally, last)
                    tally.seen = tally.seen if description == "Prediction" else []
                tally.rounds += 1
        self._eval_rounds = tally.rounds
        metrics = {f"{metric_key_prefix}_loss": tally.loss(self.accelerator)}
        for name, value in self._reduced("eval").items():  # type: ignore[attr-defined]
            metrics[f"{metric_key_prefix}_{name}"] = value
        # Trained so far: evaluation adds none.
        metrics[f"{metric_key_prefix}_num_tokens"] = self.counters["num_tokens"]
        predictions = labels = None
        if wanted and not (by_batch and description != "Prediction"):
            found = self._shown(tally)
            predictions, labels = found.predictions, found.label_ids
            if self.compute_metrics is not None and not by_batch:
                tally.metrics = self.compute_metrics(found)
        for name, value in tally.metrics.items():
            metrics[name if name.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{name}"] = value
        return EvalLoopOutput(predictions, labels, metrics, num_samples=self._num_rows(dataloader, tally))

    def _model_to_evaluate(self) -> nn.Module:
        model = self.model_wrapped if parallel.shards_parameters(self.accelerator) else self.model
        model.eval()
        if self.accelerator.mixed_precision != "no" and model is self.model and not hasattr(model, "_original_forward"):
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        return model

    def _num_rows(self, dataloader: Any, tally: _Tally) -> int:
        """Rows of the dataset, over all ranks; of a stream, as many as its sequences make."""
        dataset = getattr(dataloader, "dataset", None)
        if hasattr(dataset, "__len__"):
            return len(dataset)  # type: ignore[arg-type]
        (sequences,) = parallel.all_reduce_sum([tally.counts["sequence"]], self.accelerator)
        return round(sequences / self.answers_per_row)

    def spare_batch(self) -> Batch:
        """One token after another: what a rank without rows runs where a forward pass is a collective."""
        token = int(self.pad_token_id)  # type: ignore[attr-defined]
        rows = [Row([token], [[token]], [[1]])]
        return collate(rows, pad_token_id=token, layout=self.layout)[0].to(self.args.device)

    def _eval_pass(self, model: nn.Module, batch: Batch, tally: _Tally, seen: _Seen | None) -> None:
        """Add up the loss of one pass; without ``seen`` it only keeps ranks in step."""
        with self.compute_loss_context_manager():  # type: ignore[attr-defined]
            if seen is None:
                forward(model, batch, self.needs, chunk_size=self.args.logits_chunk_size)
                return
            counts = {"token": batch.num_loss_tokens, "sequence": batch.num_sequences, "pass": 1}
            counts |= self.named_counts([batch])  # type: ignore[attr-defined]
            sums = self._own_loss(model, batch, counts) if self.own_loss else self._terms_of(model, batch)
        for name, value in counts.items():
            tally.counts[name] += value
        for name, value in sums.items():
            tally.sums[name] += value
        loss = sum(value / max(counts[_divisor(name, counts)], 1.0) for name, value in sums.items())
        seen.losses += [loss] * batch.num_sequences

    def _terms_of(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Sums of a pass by what they will be divided by."""
        terms, _ = self.terms(model, batch)  # type: ignore[attr-defined]
        self.buffers["eval"].add(terms.metrics)
        sums: dict[str, float] = {}
        for part in [terms, *terms.extra]:
            key = part.count or part.reduction
            sums[key] = sums.get(key, 0.0) + float(reduce(replace(part, extra=[]), Denominators(1, 1, 1)))
        return sums

    @property
    def own_loss(self) -> bool:
        """Whether the user's code says what the loss is: a subclass's ``compute_loss``, or ``compute_loss_func``."""
        return self.compute_loss_func is not None or user_override(self, "compute_loss") is not None

    def _own_loss(self, model: nn.Module, batch: Batch, counts: dict[str, float]) -> dict[str, float]:
        """The user's loss, the pass taken as an optimiser step of its own; weighed by what that loss is a mean over."""
        before, self._reduced_by = self.denominators, "token" if self.compute_loss_func is not None else None
        named = self.named_counts([batch])  # type: ignore[attr-defined]
        self.denominators = Denominators(counts["token"], counts["sequence"], 1, 1, named)
        try:
            loss = float(self.compute_loss(model, batch))  # type: ignore[attr-defined]
        finally:
            self.denominators = before
        counts[OWN] = counts[_divisor(self._reduced_by or "sequence", counts)]
        return {OWN: loss * counts[OWN]}

    # Predictions -------------------------------------------------------------------------------------------------

    def predictions(self, model: nn.Module, batches: list[Batch]) -> list[tuple[Any, np.ndarray]]:
        """One (logits, labels) a row, in the order of the dataset; ``preprocess_logits_for_metrics`` makes them small.

        What that returns may be a tensor, or a tuple of tensors, whose first dimension is the row.
        """
        found: list[tuple[int, Any, np.ndarray]] = []
        for batch in batches:
            output, labels = full_logits(model, batch)
            logits = output.logits
            if self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            lengths = (batch.tree == 0).sum(1).tolist()
            for row, (origin, length) in enumerate(zip(batch.origin, lengths, strict=True)):
                own = _of_row(logits, row, length, labels.shape[1])
                found.append((origin, own, labels[row, :length].cpu().numpy()))
        return [(prediction, label) for _, prediction, label in sorted(found, key=lambda item: item[0])]

    def _see(self, model: nn.Module, batches: list[Batch], tally: _Tally, seen: _Seen) -> None:
        """Predictions of one evaluation batch, and the ids and losses of its sequences."""
        with self.compute_loss_context_manager():  # type: ignore[attr-defined]
            pairs = self.predictions(model, batches)
            for _ in range(parallel.equal_passes(len(batches), self.accelerator) - len(batches)):
                forward(model, self.spare_batch(), self.needs, chunk_size=self.args.logits_chunk_size)
        seen.predictions, seen.labels = [p for p, _ in pairs], [label for _, label in pairs]
        # As transformers does it: each row has the loss of its batch.
        average = sum(seen.losses) / max(len(seen.losses), 1)
        seen.losses = [average] * len(pairs)
        inputs = []
        for batch in batches:
            lengths = (batch.tree == 0).sum(1).tolist()
            rows = [ids[:length].cpu().numpy() for ids, length in zip(batch.input_ids, lengths, strict=True)]
            inputs += zip(batch.origin, rows, strict=False)
        seen.inputs = [ids for _, ids in sorted(inputs, key=lambda item: item[0])]
        place = tally.rounds * self.accelerator.num_processes + self.accelerator.process_index
        tally.seen.append((place, seen))

    def _metrics_of(self, tally: _Tally, last: bool) -> dict[str, float]:
        """``batch_eval_metrics``: the batch that all ranks just saw, as tensors; a summary after the last one."""
        found = self._shown(replace(tally, seen=tally.seen[-1:]), as_tensors=True)
        return self.compute_metrics(found, compute_result=last) or {}

    def _shown(self, tally: _Tally, *, as_tensors: bool = False) -> EvalPrediction:
        """What all ranks saw, in the order of the dataset: ranks take turns with its batches."""
        batches = [seen for _, seen in sorted(
            parallel.all_gather_objects(tally.seen, self.accelerator), key=lambda item: item[0]
        )]  # fmt: skip
        told = set(self.args.include_for_metrics)
        columns = [
            [item for seen in batches for item in getattr(seen, name)]
            for name in ("predictions", "labels", "inputs", "losses")
        ]
        predictions, labels, inputs, losses = columns[0], columns[1], columns[2], np.array(columns[3])
        shown: list[Any] = [
            _stacked(predictions), _stacked(labels),
            _stacked(inputs) if "inputs" in told else None, losses if told & {"loss", "losses"} else None,
        ]  # fmt: skip
        return EvalPrediction(*(map(_tensors, shown) if as_tensors else shown))


def _divisor(reduction: str, counts: Mapping[str, float]) -> str:
    """The count that a reduction's sum is divided by."""
    if reduction == "local_token":
        return "pass"
    return reduction if reduction in counts else "sequence"


def _collated(collator: Callable[[list[Any]], Any], nothing: Any, rows: list[Any]) -> Any:
    return collator(rows) if rows else nothing


def _with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last one."""
    iterator = iter(batches)
    for item in iterator:
        following = list(itertools.islice(iterator, 1))
        while following:
            yield item, False
            item, following = following[0], list(itertools.islice(iterator, 1))
        yield item, True


def _of_row(values: Any, row: int, length: int, width: int) -> Any:
    """One row of a tensor, or of each of several, without its padding."""
    if isinstance(values, tuple | list):
        return tuple(_of_row(value, row, length, width) for value in values)
    own = values[row]
    own = own[:length] if own.ndim and own.shape[0] in (width, width - 1) else own
    return (own.float() if own.is_floating_point() else own).cpu().numpy()


def _stacked(arrays: list[Any]) -> Any:
    """Arrays of different first lengths as one, padded with -100; of tuples, one array a place."""
    if arrays and isinstance(arrays[0], tuple):
        return tuple(_stacked(list(column)) for column in zip(*arrays, strict=True))
    if not arrays or arrays[0].ndim == 0 or len({a.shape for a in arrays}) == 1:
        return np.stack(arrays) if arrays else np.zeros(0)
    longest = max(len(a) for a in arrays)
    pads = [[(0, longest - len(a))] + [(0, 0)] * (a.ndim - 1) for a in arrays]
    return np.stack([np.pad(a, pad, constant_values=IGNORED) for a, pad in zip(arrays, pads, strict=True)])


def _tensors(values: Any) -> Any:
    if values is None:
        return None
    return tuple(map(_tensors, values)) if isinstance(values, tuple) else torch.from_numpy(values)
