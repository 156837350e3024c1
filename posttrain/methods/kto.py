"""KTO: answers judged good or bad one by one, against a baseline from mismatched answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from posttrain.data.forest import collate
from posttrain.errors import ConfigError
from posttrain.fields import NonNegativeFloat, option
from posttrain.loop.build import attributes
from posttrain.losses.reduce import row_terms
from posttrain.losses.unpaired import KTO_LOSSES, kl_baseline, kl_totals
from posttrain.methods.config import PictureConfig
from posttrain.methods.preference import (
    OF_COMPARED,
    PRECOMPUTED,
    ComparedConfig,
    PreferenceTrainer,
    judged_metrics,
    sequence_logp,
)
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.reference import Reference, precomputed_logps
from posttrain.types import Batch, LossTerms, ModelOutputs, Row

logger = logging.getLogger(__name__)


@dataclass
class KTOConfig(PictureConfig, ComparedConfig):
    """Arguments of `KTOTrainer`."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = option(
        "kto", "kto compares with mismatched answers; apo_zero_unpaired with 0."
    )
    desirable_weight: NonNegativeFloat = option(1.0, "Weight of good answers.")
    undesirable_weight: NonNegativeFloat = option(1.0, "Weight of bad answers.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            if self.loss_type == "kto" and getattr(self, name) < 2:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: the baseline of 'kto' needs an answer to another prompt, so at least 2 rows."
                )


def partners(rows: Sequence[Row]) -> list[int | None]:
    """For each row another row of the batch with another prompt, by the smallest rotation; None where there is none."""
    n = len(rows)
    prompts = [tuple(row.prompt_ids) for row in rows]
    for shift in range(1, n):
        if all(prompts[i] != prompts[i - shift] for i in range(n)):
            return [(i - shift) % n for i in range(n)]
    return [next(((i - s) % n for s in range(1, n) if prompts[i] != prompts[i - s]), None) for i in range(n)]


def _mismatched(example: dict[str, Any], ids: Sequence[int], limit: int | None) -> Row:
    """A prompt with another prompt's answer, in the room that ``max_length`` leaves it."""
    prompt = list(example["prompt_ids"])
    answer = list(ids) if limit is None else list(ids[: max(1, limit - len(prompt))])
    known = example.get("ref_KL_logps")
    return Row(prompt, [answer], [[1] * len(answer)], {} if known is None else {"ref_logps": [float(known)]})


def fixed_partners(prompts: Sequence[Sequence[int]], seed: int) -> list[int | None]:
    """For each row of a whole set another row with another prompt, whatever batches come later; None where there is none.

    Rows in random order, those of one prompt side by side, rotated by the largest number of rows with one prompt: no prompt
    meets itself while it has at most half of the rows, and each answer is then used once.

    >>> fixed_partners([[1], [1], [2], [2]], seed=0) in ([2, 3, 0, 1], [3, 2, 1, 0], [2, 3, 1, 0], [3, 2, 0, 1])
    True
    """
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in order:
        groups.setdefault(tuple(prompts[index]), []).append(index)
    flat = [index for group in groups.values() for index in group]
    shift = max(map(len, groups.values()), default=0)
    rest = [index for group in groups.values() if len(group) < shift for index in group]
    found: list[int | None] = [None] * len(flat)
    for place, index in enumerate(flat):
        other = flat[(place + shift) % len(flat)]
        if tuple(prompts[other]) != tuple(prompts[index]):
            found[index] = other
        elif rest:  # A prompt with more than half of the rows takes the others' answers in turn.
            found[index] = rest[place % len(rest)]
    return found


@attributes("beta", "desirable_weight", "undesirable_weight")
@attributes("loss_type", **PRECOMPUTED, fixed=True)
class KTOTrainer(PreferenceTrainer, config=KTOConfig, arguments=OF_COMPARED):
    """Trains on prompts with one answer and a label each; pairs are taken apart.

    The baseline z0 is the mean log-ratio of answers to other prompts of the same batch, over the whole optimiser step and
    all ranks, at least 0 and without a gradient. A column ``KL_completion_ids`` names each row's other answer instead;
    ``precompute_ref_log_probs`` writes it, with the reference's log-probs of both answers.

    Reference: KTO, arXiv:2402.01306.
    """

    takes_images: bool = True
    judged: ClassVar[bool] = True
    branches: ClassVar[tuple[str, ...]] = ("completion",)
    reference_columns: ClassVar[tuple[str, ...]] = ("ref_logps",)
    needs: frozenset[str] = frozenset({"logp", "entropy", "mean_logit"})
    _paper: ClassVar[dict[str, str]] = {
        "title": "KTO: Model Alignment as Prospect Theoretic Optimization",
        "id": "2402.01306",
    }
    keep: ClassVar[tuple[str, ...]] = ("label", "KL_completion_ids", "ref_KL_logps")
    no_rows = ((), ())
    baseline = torch.zeros(())  # z0 of the optimiser step.
    args: KTOConfig

    def collator(self) -> Any:
        """Judged rows and, for the baseline, the same prompts with their partners' answers."""
        judge = super().collator()

        def collate_both(examples: list[dict[str, Any]]) -> tuple[list[Batch], list[Batch]]:
            return judge(examples), self._collate(self._mismatched_rows(examples))

        return collate_both

    def _collate(self, rows: list[Row]) -> list[Batch]:
        return collate(rows, pad_token_id=self.pad_token_id, layout=self.layout) if rows else []

    def _mismatched_rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Prompts with answers to others, cut to ``max_length``: those that the rows name, or the neighbours'."""
        if self.args.loss_type != "kto":
            return []
        if all("KL_completion_ids" in example for example in examples):
            others = [example["KL_completion_ids"] for example in examples]
        else:
            rows = self.rows(examples)
            others = [None if p is None else rows[p].completions[0] for p in partners(rows)]
        return self._mismatch(examples, others)

    def _mismatch(self, examples: list[dict[str, Any]], others: list[list[int] | None]) -> list[Row]:
        """Each prompt, with its pictures, and another row's answer; a row without one is left out."""
        both = [(example, ids) for example, ids in zip(examples, others, strict=True) if ids]
        rows = [_mismatched(example, ids, self.args.max_length) for example, ids in both]
        return self.vision.placed(rows, [example for example, _ in both])

    def batches_of(self, examples: list[dict[str, Any]]) -> list[Batch]:
        """The judged batches alone."""
        return self.data_collator(examples)[0]

    def _precompute(self, dataset: Any, reference: Reference | None, name: str) -> Any:
        """The reference's log-probs of the answers and, for the baseline, of another row's answer, fixed once."""
        done = super()._precompute(dataset, reference, name)
        if self.args.loss_type != "kto":
            return done
        if "KL_completion_ids" not in done.column_names:
            chosen = fixed_partners(done["prompt_ids"][:], self.args.seed)
            answers = done["completion_ids"][:]
            done = done.add_column("KL_completion_ids", [None if p is None else answers[p] for p in chosen])

        def mismatched(examples: list[dict[str, Any]]) -> list[Batch]:
            # A row without a partner needs a number in the column, of its own answer; the baseline leaves it out.
            ids = [example["KL_completion_ids"] or example["completion_ids"] for example in examples]
            return self._collate(self._mismatch(examples, ids))

        return precomputed_logps(self, done, reference, ("ref_KL_logps",), name=name, batches_of=mismatched)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """All micro-batches of a step, and the mismatched ones beside them."""
        self._mismatched: list[Batch] = []
        self._judged = 0
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def before_step(self, micro_batches: list[list[Batch]]) -> None:
        """The baseline of the step."""
        super().before_step(micro_batches)
        self.baseline = self._baseline(self._mismatched)
        self._log_baseline(self._mismatched, self._judged, "train")

    def _log_baseline(self, mismatched: list[Batch], judged: int, mode: str) -> None:
        found = {"kl": mean(self.baseline)}  # The same on every rank.
        if self.args.loss_type == "kto":
            found["kl/valid_fraction"] = mean(sum(b.num_sequences for b in mismatched) / max(judged, 1), weight=judged)
        self.log_metrics_now(found, mode)

    def micro_batch(self, inputs: Any, index: int) -> list[Batch]:
        """Judged batches with the reference's log-probs; the mismatched ones are kept for the baseline."""
        judged, mismatched = inputs
        self._mismatched += mismatched
        self._judged += sum(batch.num_sequences for batch in judged)
        return super().micro_batch(judged, index)

    def eval_batches(self, inputs: Any) -> list[Batch]:
        """As in training, the baseline of each evaluation batch by itself."""
        judged, mismatched = inputs
        self.baseline = self._baseline(mismatched)
        self._log_baseline(mismatched, sum(batch.num_sequences for batch in judged), "eval")
        return super().eval_batches(judged)

    def _baseline(self, mismatched: list[Batch]) -> Tensor:
        """z0 over all ranks; ranks may hold different numbers of batches."""
        totals = torch.zeros(2, dtype=torch.float64)
        for source, counts in parallel.in_step(mismatched, self.accelerator, self.spare_batch):
            batch = self.with_reference(source.to(self.args.device))
            with self.inference() as policy:
                logp = forward(policy, batch, chunk_size=self.args.logits_chunk_size).logp
            if counts:
                assert logp is not None
                ratio = sequence_logp(logp, batch)[0] - self.reference_logp(batch)
                totals += kl_totals(ratio).double().cpu()
        summed = parallel.all_reduce_sum(totals.tolist(), self.accelerator)
        return kl_baseline(torch.tensor(summed)).float().to(self.args.device)

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """The weighted loss of each answer, averaged over the answers of the whole optimiser step."""
        cfg = self.args
        assert outputs.logp is not None
        logp, _ = sequence_logp(outputs.logp, batch)
        ratio, good = logp - self.reference_logp(batch), batch.columns["label"] > 0.5
        values = {"log_ratio": ratio, "desirable": good, "baseline": self.baseline}
        weights = {"desirable_weight": cfg.desirable_weight, "undesirable_weight": cfg.undesirable_weight}
        terms = KTO_LOSSES[cfg.loss_type](values, beta=cfg.beta, **weights)
        metrics = judged_metrics(outputs, batch, cfg.beta * ratio, logp, good)
        return row_terms(batch, terms, metrics=metrics)
