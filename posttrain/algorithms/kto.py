"""KTO: answers judged good or bad one by one, against a baseline from mismatched answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from posttrain.algorithms.judged import JudgedTrainer, judged_metrics
from posttrain.algorithms.preference import ComparedConfig, sequence_logp
from posttrain.data.forest import collate
from posttrain.errors import ConfigError, check_choice
from posttrain.losses.reduce import row_terms
from posttrain.losses.unpaired import KTO_LOSSES, kl_baseline, kl_totals
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.types import Batch, LossTerms, ModelOutputs, Row

__all__ = ["KTOConfig", "KTOTrainer", "partners"]

logger = logging.getLogger(__name__)


@dataclass
class KTOConfig(ComparedConfig):
    """Arguments of `KTOTrainer`."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = field(
        default="kto", metadata={"help": "kto compares with mismatched answers; apo_zero_unpaired with 0."}
    )
    desirable_weight: float = field(default=1.0, metadata={"help": "Weight of good answers."})
    undesirable_weight: float = field(default=1.0, metadata={"help": "Weight of bad answers."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loss_type", self.loss_type, KTO_LOSSES)
        if self.precompute_ref_log_probs and self.loss_type == "kto":
            raise ConfigError(
                "precompute_ref_log_probs=True with loss_type='kto': its baseline needs the reference on answers of other "
                "prompts, which change with the batch. Set it to False, or use loss_type='apo_zero_unpaired'."
            )
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


class KTOTrainer(JudgedTrainer):
    """Trains on prompts with one answer and a label each; pairs are taken apart.

    The baseline z0 is the mean log-ratio of answers to other prompts of the same batch, over the whole optimiser step and
    all ranks, at least 0 and without a gradient.

    Reference: KTO, arXiv:2402.01306.
    """

    config_class: ClassVar[type[KTOConfig]] = KTOConfig
    _tag_names: ClassVar[list[str]] = ["posttrain", "kto"]
    _name: ClassVar[str] = "KTO"
    _suffix: ClassVar[str] = "KTO"
    _paper: ClassVar[dict[str, str]] = {
        "title": "KTO: Model Alignment as Prospect Theoretic Optimization",
        "id": "2402.01306",
    }
    args: KTOConfig

    def __init__(
        self, model: str | nn.Module, ref_model: nn.Module | None = None, args: Any = None, **kwargs: Any
    ) -> None:
        self.baseline = torch.zeros(())
        super().__init__(model, ref_model, args, **kwargs)

    def collator(self) -> Any:
        """Judged rows and, for the baseline, the same prompts with their partners' answers."""
        judge = super().collator()

        def collate_both(examples: list[dict[str, Any]]) -> tuple[list[Batch], list[Batch]]:
            if self.args.loss_type != "kto":
                return judge(examples), []
            rows = self.rows(examples)
            mismatched = [
                Row(row.prompt_ids, rows[p].completions, rows[p].loss_masks)
                for row, p in zip(rows, partners(rows), strict=True)
                if p is not None
            ]
            kl = collate(mismatched, pad_token_id=self.pad_token_id, layout=self.layout) if mismatched else []
            return judge(examples), kl

        return collate_both

    def batches_of(self, examples: list[dict[str, Any]]) -> list[Batch]:
        """The judged batches alone."""
        return self.data_collator(examples)[0]

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """All micro-batches of a step, and their baseline."""
        self._mismatched: list[Batch] = []
        result = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.baseline = self._baseline(self._mismatched)
        self.log_metrics_now({"kl": mean(self.baseline)})
        return result

    def micro_batch(self, inputs: Any, index: int) -> list[Batch]:
        """Judged batches with the reference's log-probs; the mismatched ones are kept for the baseline."""
        judged, mismatched = inputs
        self._mismatched += mismatched
        self._idle = judged[:1]
        return super().micro_batch(judged, index)

    def eval_batches(self, inputs: Any) -> list[Batch]:
        """As in training, the baseline of each evaluation batch by itself."""
        judged, mismatched = inputs
        self._idle = judged[:1]
        self.baseline = self._baseline(mismatched)
        self.log_metrics_now({"kl": mean(self.baseline)}, "eval")
        return super().eval_batches(judged)

    def _baseline(self, mismatched: list[Batch]) -> Tensor:
        """z0 over all ranks; ranks may hold different numbers of batches."""
        totals = torch.zeros(2, dtype=torch.float64)
        passes = parallel.equal_passes(len(mismatched), self.accelerator)
        for index in range(passes):
            # A rank without a batch left computes any, because a pass may be a collective; it counts for nothing.
            source = mismatched[index] if index < len(mismatched) else self._idle[0]
            batch = self.with_reference(source.to(self.args.device))
            with self.inference() as policy:
                logp = forward(policy, batch).logp
            if index < len(mismatched):
                ratio = sequence_logp(logp, batch)[0] - self.reference_logp(batch)  # type: ignore[arg-type]
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
