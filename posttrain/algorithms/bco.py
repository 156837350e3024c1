"""BCO: answers judged good or bad, by the loss of a binary classifier whose threshold is the running mean reward."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.algorithms.judged import JudgedTrainer, judged_metrics
from posttrain.algorithms.preference import ComparedConfig, sequence_logp
from posttrain.losses.unpaired import BCO_LOSSES, Moments, update_moments
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.types import Batch, LossTerms, ModelOutputs

__all__ = ["BCOConfig", "BCOTrainer"]

logger = logging.getLogger(__name__)


@dataclass
class BCOConfig(ComparedConfig):
    """Arguments of `BCOTrainer`."""

    learning_rate: float = field(default=5e-7, metadata={"help": "Peak learning rate; about ten times more for LoRA."})


class BCOTrainer(JudgedTrainer):
    """``-lsig(r - delta)`` for a good answer and ``-lsig(-(r - delta))`` for a bad one, with ``r = beta`` times the log-ratio.

    delta is the running mean of all rewards so far, those of the current optimiser step included; it is saved with every
    checkpoint, and evaluation reads it without moving it.

    Reference: Binary classifier optimization, arXiv:2404.04656.
    """

    config_class: ClassVar[type[BCOConfig]] = BCOConfig
    _tag_names: ClassVar[list[str]] = ["posttrain", "bco"]
    _name: ClassVar[str] = "BCO"
    _suffix: ClassVar[str] = "BCO"
    args: BCOConfig

    def __init__(
        self, model: str | nn.Module, ref_model: nn.Module | None = None, args: Any = None, **kwargs: Any
    ) -> None:
        self.moments = Moments()
        super().__init__(model, ref_model, args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """All micro-batches of a step; their rewards move delta before the first loss."""
        micro_batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        rewards = [self._rewards(batch) for micro in micro_batches for batch in micro]
        values = torch.cat(rewards).double().cpu() if rewards else torch.zeros(0, dtype=torch.float64)
        sums = [float(values.sum()), float((values**2).sum()), float(len(values))]
        total, squares, count = parallel.all_reduce_sum(sums, self.accelerator)
        if count:
            average = total / count
            self.moments = update_moments(self.moments, average, max(squares / count - average**2, 0.0), count)
        self.log_metrics_now({"delta": mean(self.moments.mean)})
        return micro_batches, items

    def _rewards(self, batch: Batch) -> Tensor:
        batch = batch.to(self.args.device)
        with self.inference() as policy:
            logp = forward(policy, batch).logp
        return self.args.beta * (sequence_logp(logp, batch)[0] - self.reference_logp(batch))  # type: ignore[arg-type]

    def state_to_save(self) -> dict[str, Any]:
        """The running moments too."""
        return super().state_to_save() | {"moments": asdict(self.moments)}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """The running moments too."""
        super().load_saved_state(state)
        self.moments = Moments(**state["moments"])

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """The classifier's loss of each answer, averaged over the answers of the whole optimiser step."""
        assert outputs.logp is not None
        logp, _ = sequence_logp(outputs.logp, batch)
        ratio, good = logp - self.reference_logp(batch), batch.columns["label"] > 0.5
        delta = torch.tensor(self.moments.mean, device=ratio.device, dtype=ratio.dtype)
        values = {"log_ratio": ratio, "desirable": good, "shift": delta, "weight": torch.ones_like(ratio)}
        terms = BCO_LOSSES["bco"](values, beta=self.args.beta)
        metrics = judged_metrics(outputs, batch, self.args.beta * ratio, logp, good)
        return LossTerms(terms, torch.ones_like(terms, dtype=torch.bool), "sequence", metrics=metrics)
