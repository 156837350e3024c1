"""What CPO, ORPO and TPO share: answers compared by the policy's own likelihood, and a likelihood term beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from posttrain.algorithms.preference import PreferenceTrainer, answer_mask, logit_metrics, sequence_logp
from posttrain.losses.likelihood import nll
from posttrain.losses.reduce import row_terms
from posttrain.metrics import Metric, mean
from posttrain.types import Batch, LossTerms, ModelOutputs

__all__ = ["ReferenceFreeTrainer", "branch_sums", "reward_metrics"]


def branch_sums(out: ModelOutputs, batch: Batch, branches: int) -> tuple[Tensor, Tensor]:
    """Summed log-probs and lengths by row and branch, ``(P, branches)`` each."""
    assert out.logp is not None
    logp, length = sequence_logp(out.logp, batch)
    return batch.grouped(logp, branches), batch.grouped(length, branches)


def reward_metrics(out: ModelOutputs, batch: Batch, rewards: Tensor, logps: Tensor) -> dict[str, Metric]:
    """What methods without a reference log.

    Args:
        out: With entropy.
        batch: The batch.
        rewards: ``(P, 2)`` chosen and rejected.
        logps: ``(P, 2)`` as the loss reads them.
    """
    chosen, rejected = rewards.detach().unbind(1)
    size = batch.num_sequences // len(rewards)
    return {
        "rewards/chosen": mean(chosen),
        "rewards/rejected": mean(rejected),
        "rewards/margins": mean(chosen - rejected),
        "rewards/accuracies": mean((chosen > rejected).float()),
        "logps/chosen": mean(logps[:, 0]),
        "logps/rejected": mean(logps[:, 1]),
        "entropy": mean(out.entropy, batch.loss_mask),  # type: ignore[arg-type]
        **logit_metrics(out, **{side: answer_mask(batch, size, i) for i, side in enumerate(("chosen", "rejected"))}),
    }


class ReferenceFreeTrainer(PreferenceTrainer):
    """Pairs without a reference model; ``likelihood_branch`` is the answer whose likelihood is raised too."""

    compared = False
    reference_columns: tuple[str, ...] = ()  # type: ignore[misc]
    needs: ClassVar[frozenset[str]] = frozenset({"logp", "entropy", "mean_logit"})
    likelihood_branch = 0

    def __init__(self, model: str | nn.Module, args: Any = None, **kwargs: Any) -> None:
        super().__init__(model, None, args, **kwargs)

    def likelihood_mask(self, batch: Batch) -> Tensor:
        """``(B, T)`` tokens whose likelihood is raised: one branch of each row, and trained prompts."""
        answer = answer_mask(batch, len(self.branches), self.likelihood_branch)
        return answer | batch.loss_mask & (batch.sequence < 0)

    def named_counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Tokens of the likelihood term over the step."""
        return {"likelihood": float(sum(int(self.likelihood_mask(batch).sum()) for batch in batches))}

    def terms_of(
        self, terms: Tensor, out: ModelOutputs, batch: Batch, metrics: dict[str, Metric], *, likelihood: float
    ) -> LossTerms:
        """One term a row ``(P,)``, a mean over the step's rows, and ``likelihood`` times the NLL, a mean over its tokens."""
        assert out.logp is not None
        loss = row_terms(batch, terms, branches=len(self.branches), metrics=metrics)
        if likelihood:
            mask = self.likelihood_mask(batch)
            loss.extra.append(LossTerms(likelihood * nll(out.logp), mask, "token", count="likelihood"))
            metrics["nll_loss"] = mean(nll(out.logp), mask)
        return loss
