"""`KTOTrainer`, with TRL's signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.data.forest import collate
from posttrain.loop.precompute import log_ratios, precomputed_logps, with_references
from posttrain.loop.run import Hooks, Prepare, Run
from posttrain.losses.unpaired import kl_baseline, kl_totals
from posttrain.methods.kto import KTO, KTOConfig, fixed_partners, mismatched, partners
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.reference import Reference
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
from posttrain.trainers.preference import PreferenceTrainer
from posttrain.types import Batch, Row

if TYPE_CHECKING:
    from posttrain.types import AnyDataset


class KTOTrainer(PreferenceTrainer):
    """Trainer of KTO, which trains on answers labeled good or bad. Pairs in a dataset are split into one good and one bad
    answer.

    The baseline z0 is the mean log-ratio of mismatched rows. A mismatched row consists of a prompt and the answer to another
    prompt of the batch. z0 is averaged over the optimizer step and all ranks, is at least 0 and has no gradient. The column
    ``KL_completion_ids`` can set the mismatched answer of each row. ``precompute_ref_log_probs`` adds this column. It adds
    two further columns, which contain the reference's log-probs of the answer and of the mismatched answer.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        ref_model: Reference model. If None, the reference is a frozen copy of the initial policy. With ``peft_config``, it
            is the policy with its adapter disabled.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Function that builds batches from prepared rows. If None, the trainer builds batches itself.
        train_dataset: Dataset with ``prompt``, ``completion`` and ``label`` (True for a good answer), or with pairs.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.

    Reference: KTO, arXiv:2402.01306.
    """

    METHOD = KTO
    method: KTO
    _paper: ClassVar[dict[str, str]] = {
        "title": "KTO: Model Alignment as Prospect Theoretic Optimization",
        "id": "2402.01306",
    }
    no_rows = ((), ())
    args: KTOConfig

    def __init__(
        self,
        model: Model,
        ref_model: nn.Module | None = None,
        args: KTOConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
        *,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ) -> None:
        super().__init__(
            model,
            ref_model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )

    def collator(self) -> Any:
        """Return a function that collates labeled rows, and mismatched rows for the baseline."""
        judge = super().collator()

        def collate_both(examples: list[dict[str, Any]]) -> tuple[list[Batch], list[Batch]]:
            return judge(examples), self._collate(self._mismatched_rows(examples))

        return collate_both

    def _collate(self, rows: list[Row]) -> list[Batch]:
        return collate(rows, pad_token_id=self.pad_token_id, layout=self.layout) if rows else []

    def _mismatched_rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Create mismatched rows: prompts with answers to other prompts, from ``KL_completion_ids`` or from the batch."""
        if self.args.loss_type != "kto":
            return []
        if all("KL_completion_ids" in example for example in examples):
            others = [example["KL_completion_ids"] for example in examples]
        else:
            rows = self.rows(examples)
            others = [None if p is None else rows[p].completions[0] for p in partners(rows)]
        return self._mismatch(examples, others)

    def _mismatch(self, examples: list[dict[str, Any]], others: list[list[int] | None]) -> list[Row]:
        """Create one row per example, with its prompt and images and another row's answer. Skip examples without such an
        answer.
        """
        both = [(example, ids) for example, ids in zip(examples, others, strict=True) if ids]
        rows = [mismatched(example, ids, self.args.max_length) for example, ids in both]
        return self.vision.placed(rows, [example for example, _ in both])

    def batches_of(self, examples: list[dict[str, Any]]) -> list[Batch]:
        """Collate only the labeled rows, without the mismatched rows."""
        return self.data_collator(examples)[0]

    def _precompute(self, dataset: AnyDataset, reference: Reference | None, name: str) -> Any:
        """Add columns with the reference's log-probs of the answers and of fixed mismatched answers."""
        done = super()._precompute(dataset, reference, name)
        if self.args.loss_type != "kto":
            return done
        if "KL_completion_ids" not in done.column_names:
            chosen = fixed_partners(done["prompt_ids"][:], self.args.seed)
            answers = done["completion_ids"][:]
            done = done.add_column("KL_completion_ids", [None if p is None else answers[p] for p in chosen])

        def mismatched(examples: list[dict[str, Any]]) -> list[Batch]:
            # The column needs a value even if a row has no mismatched answer. In this case, the value is computed for the
            # answer of the row itself, and the baseline excludes it.
            ids = [example["KL_completion_ids"] or example["completion_ids"] for example in examples]
            return self._collate(self._mismatch(examples, ids))

        return precomputed_logps(self.run, done, reference, ("ref_KL_logps",), name=name, batches_of=mismatched)

    def _hooks(self) -> Hooks:
        hooks = super()._hooks()
        assert hooks.prepare is not None
        prepare = partial(with_baseline, prepare=hooks.prepare, refer=self._refer())
        return replace(hooks, batches=judged_batches, eval_batches=judged_batches, prepare=prepare)


def judged_batches(run: Run, inputs: tuple[list[Batch], list[Batch]], index: int = 0) -> list[Batch]:
    """Return the batches of labeled rows in a micro-batch. The batches of mismatched rows are excluded."""
    return list(inputs[0])


def with_baseline(
    run: Run,
    inputs: list[tuple[list[Batch], list[Batch]]],
    micro_batches: list[list[Batch]],
    mode: str,
    *,
    prepare: Prepare,
    refer: Callable[[Run, Batch], Batch],
) -> list[list[Batch]]:
    """Return the judged micro-batches with the reference's log-probs. In addition, compute the baseline, store it in
    `Progress.own`, and log it.

    Args:
        run: Run of `KTO`.
        inputs: Judged and mismatched batches of each micro-batch.
        micro_batches: Judged batches of each micro-batch.
        mode: ``train`` or ``eval``.
        prepare: Function that adds the reference's log-probs; see `Hooks.prepare`.
        refer: Function that adds the reference's log-probs to one batch.
    """
    micro_batches = prepare(run, inputs, micro_batches, mode)
    mismatched = [batch for _, others in inputs for batch in others]
    if mode == "eval":
        (compared,) = prepare(run, inputs, [mismatched], mode)
    # Do not cache these sums, because each epoch pairs prompts with different mismatched answers.
    else:
        compared = with_references(run, mismatched, mode, None, refer)
    run.progress.own = baseline(run, compared)
    judged = sum(batch.num_sequences for batches in micro_batches for batch in batches)
    metrics = {"kl": mean(run.progress.own, weight=judged)}  # The baseline is equal on every rank.
    if run.args.loss_type == "kto":
        share = sum(batch.num_sequences for batch in mismatched) / max(judged, 1)
        metrics["kl/valid_fraction"] = mean(share, weight=judged)
    run.log(metrics, mode)
    return micro_batches


def baseline(run: Run, mismatched: list[Batch]) -> Tensor:
    """Compute the baseline z0 over all ranks, from batches with the reference's log-probs. The number of batches may differ
    between ranks.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    for ratio in log_ratios(run, mismatched):
        totals += kl_totals(ratio).double().cpu()
    summed = parallel.all_reduce_sum(totals.tolist(), run.accelerator)
    return kl_baseline(torch.tensor(summed)).float().to(run.args.device)
