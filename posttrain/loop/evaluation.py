"""Evaluation for all trainers. The evaluation loss does not depend on the batch size. Predictions are computed if requested."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from posttrain.data.samplers import EvalShard, ShardedStream
from posttrain.errors import ConfigError
from posttrain.losses.reduce import REDUCTIONS, Denominators, reduce
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.models.forward import forward, virtual_tokens
from posttrain.types import Batch, LossTerms

if TYPE_CHECKING:
    from accelerate import Accelerator

    from posttrain.loop.run import Run
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import AnyDataset

IGNORED = -100
OWN = "own"  # Name of the denominator of a loss that the user defines.


def full_logits(model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
    """Run the model's own forward method on padded rows, and return full logits and labels. This slow path is used only for
    callbacks of the user that need logits.

    Returns:
        The model's output, whose ``logits`` are a tensor ``(B, T, V)``, and the labels ``(B, T)``. Labels are -100 for
        tokens without loss.
    """
    assert batch.one_sequence_a_row, "full logits need one sequence per row"
    output = model(input_ids=batch.input_ids, attention_mask=batch.real.long(), use_cache=False)
    output.logits = output.logits[:, virtual_tokens(model) :]
    return output, torch.where(batch.loss_mask, batch.input_ids, IGNORED)


@torch.no_grad()
def predicted_metrics(logits: torch.Tensor, labels: torch.Tensor, chunk: int = 256) -> dict[str, Metric]:
    """Compute the mean entropy (in nats) and the accuracy of tokens with loss. Inputs are logits ``(B, T, V)`` and
    labels ``(B, T)``, which are -100 for tokens without loss.
    """
    targets = labels[:, 1:]
    selected, targets = logits[:, :-1][targets != -100], targets[targets != -100]
    entropy = torch.cat([torch.special.entr(part.float().softmax(-1)).sum(-1) for part in selected.split(chunk)])
    return {"entropy": mean(entropy), "mean_token_accuracy": mean((selected.argmax(-1) == targets).float())}


@dataclass(slots=True)
class _Seen:
    """Predictions, labels, losses and input ids of one evaluation batch, for the user's ``compute_metrics``."""

    predictions: list[Any] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    inputs: list[np.ndarray] = field(default_factory=list)


@dataclass(slots=True)
class _Tally:
    """Sums and counts of one evaluation on this rank. All ranks have the same keys, even if a rank has no rows."""

    sums: dict[str, float]
    counts: dict[str, float]
    rounds: int = 0
    seen: list[tuple[int, _Seen]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def named(cls, names: Iterable[str]) -> _Tally:
        """Create a tally with all sums and counts at 0. ``names`` are the keys of `Method.counts`."""
        named = [*names, OWN]
        counts = ("token", "sequence", "pass", *named)
        return cls(dict.fromkeys((*sorted(REDUCTIONS), *named), 0.0), dict.fromkeys(counts, 0.0))

    def loss(self, accelerator: Accelerator) -> float:
        """Return the loss over all ranks. Each loss sum is divided by its count, and the quotients are added."""
        totals = parallel.all_reduce_sum([*self.sums.values(), *self.counts.values()], accelerator)
        sums = dict(zip(self.sums, totals, strict=False))
        counts = dict(zip(self.counts, totals[len(sums) :], strict=True))
        return sum(value / max(counts[_divisor(name, counts)], 1.0) for name, value in sums.items())


class _Evaluation:
    """One pass over an evaluation set. The pass computes the loss, metrics and predictions. The loss is divided by the
    counts of the whole set.

    Args:
        run: Run with the objective and hooks.
        model: Model in evaluation mode.
        compute_metrics: Function of the user that computes metrics from predictions.
        keeps_predictions: Whether predictions are kept even without ``compute_metrics``.
        after_batch: Function called after each batch, on every rank.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        compute_metrics: Callable[..., dict[str, float]] | None,
        *,
        keeps_predictions: bool,
        after_batch: Callable[[], None],
    ) -> None:
        self.after_batch = after_batch
        self.context, self.model, self.keeps_predictions = run, model, keeps_predictions
        self.args, self.accelerator, self.hooks = run.args, run.accelerator, run.hooks
        self.compute_metrics = compute_metrics
        self.wanted = self.compute_metrics is not None or keeps_predictions
        self.by_batch = self.compute_metrics is not None and self.args.batch_eval_metrics
        self.tally = _Tally.named(run.method.counts([]))

    @torch.no_grad()
    def run(self, dataloader: Any) -> float:
        """Iterate over the set, and return the loss over the rows of all ranks."""
        for inputs, last in _with_last(dataloader):
            batches = self.hooks.eval_batches(self.context, inputs)
            if self.hooks.prepare is not None:
                (batches,) = self.hooks.prepare(self.context, [inputs], [batches], "eval")
            batches = [batch.to(self.args.device) for batch in batches]
            seen = _Seen()
            for batch, counts in parallel.in_step(batches, self.accelerator, self.context.spare_batch):
                if counts:
                    self._add(batch, seen)
                else:
                    self._idle(batch)
            if self.wanted:
                self._see(batches, seen)
            if self.by_batch:
                self.tally.metrics = self._metrics_of(last)
                self.tally.seen = self.tally.seen if self.keeps_predictions else []
            self.tally.rounds += 1
            self.after_batch()
        return self.tally.loss(self.accelerator)

    def num_rows(self, dataloader: Any, answers_per_row: int) -> int:
        """Return the number of dataset rows over all ranks. For a stream, return the number of sequences divided by
        ``answers_per_row``.
        """
        dataset = getattr(dataloader, "dataset", None)
        if isinstance(dataset, Sized):
            return len(dataset)  # type: ignore[arg-type]
        (sequences,) = parallel.all_reduce_sum([self.tally.counts["sequence"]], self.accelerator)
        return round(sequences / answers_per_row)

    def results(self) -> tuple[Any, Any, dict[str, float]]:
        """Return the predictions and labels (None if they were not requested) and the user's metrics."""
        if not self.wanted or (self.by_batch and not self.keeps_predictions):
            return None, None, self.tally.metrics
        prediction = self._shown(self.tally.seen)
        metrics = self.tally.metrics
        if self.compute_metrics is not None and not self.by_batch:
            metrics = self.compute_metrics(prediction) or {}
        return prediction.predictions, prediction.label_ids, metrics

    def _idle(self, batch: Batch) -> None:
        """Run a forward pass and ignore its result. A rank without batches calls this method so that all ranks run the same
        number of passes.
        """
        forward(self.model, batch, self.context.method.traits.needs, chunk_size=self.args.logits_chunk_size)

    def _sums(self, batch: Batch, counts: dict[str, float]) -> dict[str, float]:
        """Return one loss sum per reduction for one pass. If the user defines the loss, store its divisor in ``counts``."""
        if self.hooks.own_loss:
            return _own_loss(self.context, self.model, batch, counts)
        loss = self.hooks.loss_of(self.context, self.model, batch, Denominators(1, 1, 1), self.context.now())
        for metrics in loss.metrics:
            self.context.log(metrics, "eval")
        assert loss.terms is not None
        return _loss_sums(loss.terms)

    def _add(self, batch: Batch, seen: _Seen) -> None:
        """Add the loss sums and the counts of one pass to the totals."""
        counts: dict[str, float] = {"token": batch.num_loss_tokens, "sequence": batch.num_episodes, "pass": 1}
        counts |= self.context.method.counts([batch])
        sums = self._sums(batch, counts)
        for name, value in counts.items():
            self.tally.counts[name] += value
        for name, value in sums.items():
            self.tally.sums[name] += value
        loss = sum(value / max(counts[_divisor(name, counts)], 1.0) for name, value in sums.items())
        seen.losses += [loss] * batch.num_sequences

    def _see(self, batches: list[Batch], seen: _Seen) -> None:
        """Store the predictions, token ids and losses of the sequences of one evaluation batch."""
        pairs = self.hooks.predictions(self.model, batches)
        for _ in range(parallel.equal_passes(len(batches), self.accelerator) - len(batches)):
            self._idle(self.context.spare_batch())
        seen.predictions, seen.labels = [p for p, _ in pairs], [label for _, label in pairs]
        # Each row gets the mean loss of its batch, as in transformers.
        average = sum(seen.losses) / max(len(seen.losses), 1)
        seen.losses = [average] * len(pairs)
        inputs = []
        for batch in batches:
            lengths = batch.real.sum(1).tolist()
            rows = [ids[:length].cpu().numpy() for ids, length in zip(batch.input_ids, lengths, strict=True)]
            inputs += zip(batch.origin, rows, strict=False)
        seen.inputs = [ids for _, ids in sorted(inputs, key=lambda item: item[0])]
        place = self.tally.rounds * self.accelerator.num_processes + self.accelerator.process_index
        self.tally.seen.append((place, seen))

    def _metrics_of(self, last: bool) -> dict[str, float]:
        """Call ``compute_metrics`` with the last batch of all ranks as tensors, as ``batch_eval_metrics`` requires. If
        ``last`` is True, ``compute_metrics`` returns the summary over all batches.
        """
        assert self.compute_metrics is not None
        return self.compute_metrics(self._shown(self.tally.seen[-1:], as_tensors=True), compute_result=last) or {}

    def _shown(self, seen: list[tuple[int, _Seen]], *, as_tensors: bool = False) -> EvalPrediction:
        """Gather the data of all ranks, and return it in the order of the dataset. Consecutive batches were processed by
        consecutive ranks.
        """
        batches = [
            batch for _, batch in sorted(parallel.all_gather_objects(seen, self.accelerator), key=lambda item: item[0])
        ]
        included = set(self.args.include_for_metrics)
        columns = [
            [item for batch in batches for item in getattr(batch, name)]
            for name in ("predictions", "labels", "inputs", "losses")
        ]
        predictions, labels, inputs, losses = columns[0], columns[1], columns[2], np.array(columns[3])
        shown: list[Any] = [
            _stacked(predictions), _stacked(labels),
            _stacked(inputs) if "inputs" in included else None, losses if included & {"loss", "losses"} else None,
        ]  # fmt: skip
        return EvalPrediction(*(map(_tensors, shown) if as_tensors else shown))


def evaluate(
    run: Run,
    dataloader: Any,
    prefix: str,
    compute_metrics: Callable[..., dict[str, float]] | None,
    *,
    answers: int,
    predicts: bool,
    after_batch: Callable[[], None],
) -> tuple[EvalLoopOutput, int]:
    """Evaluate a dataset with the loss, metrics and predictions of a run.

    Args:
        run: Run with the model, objective and hooks.
        dataloader: Loader of the set, see `evaluation_loader`.
        prefix: Prefix of metric names.
        compute_metrics: Function of the user that computes metrics from predictions.
        answers: Number of sequences per dataset row.
        predicts: Whether predictions are returned even without ``compute_metrics``.
        after_batch: Function called after each batch, on every rank.

    Returns:
        The result of `transformers.Trainer.evaluation_loop`, and the number of batches.
    """
    accelerator = run.accelerator
    model = run.progress.wrapped if parallel.shards_parameters(accelerator) else run.model
    model.eval()
    if accelerator.mixed_precision != "no" and model is run.model and not hasattr(model, "_original_forward"):
        model = accelerator.prepare_model(model, evaluation_mode=True)
    evaluation = _Evaluation(run, model, compute_metrics, keeps_predictions=predicts, after_batch=after_batch)
    metrics = {"loss": evaluation.run(dataloader)} | run.reduced_metrics("eval")
    # Number of training tokens so far. Evaluation does not increase this number.
    metrics["num_tokens"] = run.progress.counters["num_tokens"]
    metrics = {f"{prefix}_{name}": value for name, value in metrics.items()}
    predictions, labels, own = evaluation.results()
    metrics |= {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in own.items()}
    rows = evaluation.num_rows(dataloader, answers)
    return EvalLoopOutput(predictions, labels, metrics, num_samples=rows), evaluation.tally.rounds


def _own_loss(run: Run, model: nn.Module, batch: Batch, counts: dict[str, float]) -> dict[str, float]:
    """Return the loss of the user's function as a sum, and store its divisor in ``counts``. The pass is treated as one
    optimizer step.
    """
    before = run.progress.denominators
    run.progress.reduced_by = None
    run.progress.denominators = Denominators(counts["token"], counts["sequence"], 1, 1, run.method.counts([batch]))
    try:
        loss = run.hooks.loss_of(run, model, batch, run.progress.denominators, run.now())
    finally:
        run.progress.denominators = before
    for metrics in loss.metrics:
        run.log(metrics, "eval")
    counts[OWN] = counts[_divisor(run.progress.reduced_by or "sequence", counts)]
    return {OWN: float(loss.value) * counts[OWN]}


def evaluation_loader(
    dataset: AnyDataset,
    args: PostTrainingConfig,
    shard: EvalShard,
    collate: Callable[[list[Any]], Any],
    sampler_fn: Callable[[Any], Any] | None,
) -> DataLoader:
    """Create a loader that assigns every row to exactly one process.

    Accelerate's loaders would repeat rows to fill the last batches, or would end earlier on some ranks than on others.

    Args:
        dataset: A `Dataset` or a stream.
        args: The trainer's config, for worker options.
        shard: Object that assigns rows to this process.
        collate: Function that converts rows to the items of the loader. If this process has no row of a batch, it
            receives an empty list.
        sampler_fn: Function that returns a sampler for a `Dataset`. None: the rows are in the order of the dataset.
    """
    options: dict[str, Any] = {
        "collate_fn": collate,
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
        # Use a separate random generator. The loader samples a seed in every pass. With the global generator, this seed
        # would change the random numbers of training.
        "generator": torch.Generator(),
    }
    if isinstance(dataset, IterableDataset):
        return DataLoader(ShardedStream(dataset, shard), batch_size=None, **options)
    sampler = sampler_fn(dataset) if sampler_fn is not None else None
    order = range(len(dataset)) if sampler is None else sampler
    return DataLoader(dataset, batch_sampler=list(shard.parts(order)), **options)


def predicted_rows(
    model: nn.Module, batches: list[Batch], preprocess: Callable[[Any, Tensor], Any] | None
) -> list[tuple[Any, np.ndarray]]:
    """Return a pair (logits, labels) for each row of padded batches, without padding and in the order of the dataset.

    Args:
        model: Model in evaluation mode.
        batches: Batches with one sequence per row.
        preprocess: The user's ``preprocess_logits_for_metrics``. The function may return a tensor or a tuple of tensors
            whose first dimension is the row.
    """
    rows: list[tuple[int, Any, np.ndarray]] = []
    for batch in batches:
        output, labels = full_logits(model, batch)
        logits = output.logits if preprocess is None else preprocess(output.logits, labels)
        lengths = batch.real.sum(1).tolist()
        for row, (origin, length) in enumerate(zip(batch.origin, lengths, strict=True)):
            own = _of_row(logits, row, length, labels.shape[1])
            rows.append((origin, own, labels[row, :length].cpu().numpy()))
    return [(prediction, label) for _, prediction, label in sorted(rows, key=lambda item: item[0])]


def _loss_sums(terms: LossTerms) -> dict[str, float]:
    """Return the loss sums of a pass. The key of each sum is the name of the count that divides it."""
    sums: dict[str, float] = {}
    for part in [terms, *terms.extra]:
        key = part.count or part.reduction
        sums[key] = sums.get(key, 0.0) + float(reduce(replace(part, extra=[]), Denominators(1, 1, 1)))
    return sums


def count_rounds(metrics: dict[str, float], rounds: int) -> None:
    """Compute the metric for steps per second from the number of batches that were run. The value of transformers is wrong
    here, because it is the number of rows divided by the batch size.
    """
    for name in metrics:
        if name.endswith("_steps_per_second") and not name.startswith("train_"):
            seconds = metrics[name.replace("_steps_per_second", "_runtime")]
            metrics[name] = round(rounds / max(seconds, 1e-9), 3)


def _divisor(reduction: str, counts: Mapping[str, float]) -> str:
    """Return the name of the count that divides the sum of this reduction."""
    if reduction == "local_token":
        return "pass"
    return reduction if reduction in counts else "sequence"


def _with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each batch, and whether it is the last batch."""
    end = object()
    for item, following in itertools.pairwise(itertools.chain(batches, [end])):
        yield item, following is end


def _of_row(values: Any, row: int, length: int, width: int) -> Any:
    """Return one row of a tensor, or of each tensor in a tuple, without padding."""
    if isinstance(values, tuple | list):
        return tuple(_of_row(value, row, length, width) for value in values)
    own = values[row]
    own = own[:length] if own.ndim and own.shape[0] in (width, width - 1) else own
    return (own.float() if own.is_floating_point() else own).cpu().numpy()


def _stacked(arrays: list[Any]) -> Any:
    """Pad arrays with -100 to the same first dimension, and stack them. If the items are tuples, stack the arrays at each
    index.
    """
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


def check_best_metric(args: PostTrainingConfig, metrics: Mapping[str, float]) -> None:
    """Raise an error if the evaluation did not return ``metric_for_best_model``.

    Raises:
        ConfigError: The metric is missing. The message contains the metrics with the most similar names.
    """
    name = args.metric_for_best_model
    full = name and f"eval_{name.removeprefix('eval_')}"
    if full and full not in metrics:
        measured = [key for key in metrics if not key.endswith(("_runtime", "_per_second"))]
        near = difflib.get_close_matches(full, measured, n=5, cutoff=0.3) or sorted(measured)[:5]
        raise ConfigError(
            f"metric_for_best_model={name!r}: the evaluation has no such metric. The most similar metrics are {near}. "
            "Fix: use a metric of the evaluation, or return this metric from compute_metrics."
        )
