"""Answers to shared prompts: their log-probs by sequence, what is logged of them, and the checks of judged rows."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import DataError
from posttrain.losses.likelihood import nll
from posttrain.losses.reduce import row_terms, sequence_lengths, sequence_sum
from posttrain.metrics import Metric, mean
from posttrain.types import Batch, LossTerms, ModelOutputs

logger = logging.getLogger(__name__)

SORTED = 10  # Batches that one label may fill in a row.
BALANCED = 1.33  # Good answers may weigh this much more than bad ones, in all (KTO, section 4.2).


def sequence_logp(logp: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Summed log-probs ``(S,)`` of the completions, and how many tokens they have, ``(S,)`` float."""
    total = sequence_sum(logp.float(), batch.loss_mask, batch.sequence, batch.num_sequences)
    return total, sequence_lengths(batch.loss_mask, batch.sequence, batch.num_sequences)


def answer_mask(batch: Batch, size: int, which: int) -> Tensor:
    """``(B, T)`` trained tokens of one answer of each row: the ``which``-th of ``size``."""
    wanted = torch.tensor([origin % size == which for origin in batch.origin], device=batch.sequence.device)
    return batch.loss_mask & (batch.sequence >= 0) & wanted[batch.sequence.clamp_min(0)]


def logit_metrics(out: ModelOutputs, **masks: Tensor) -> dict[str, Metric]:
    """``logits/<side>``: mean over a side's trained tokens, a mask ``(B, T)`` each, of the mean logit over the vocabulary."""
    assert out.mean_logit is not None
    return {f"logits/{side}": mean(out.mean_logit, mask) for side, mask in masks.items()}


def pair_metrics(
    out: ModelOutputs, batch: Batch, values: dict[str, Tensor], beta: float, pairs: Sequence[tuple[Tensor, ...]]
) -> dict[str, Metric]:
    """What every method on pairs with a reference logs; rewards are ``beta`` times the log-ratio, whatever the loss."""
    rewards = [beta * values[f"{side}_ratio"] for side in ("chosen", "rejected")]
    chosen, rejected = (answer_mask(batch, 2, which) for which in (0, 1))
    policy, _, (length_c, length_r), _ = pairs
    assert out.correct is not None
    return {
        **_reward_metrics(out, batch, rewards, policy),
        "completions/chosen_length": mean(length_c),
        "completions/rejected_length": mean(length_r),
        "mean_token_accuracy": mean(out.correct.float(), chosen),
        **logit_metrics(out, chosen=chosen, rejected=rejected),
    }


def _reward_metrics(
    out: ModelOutputs, batch: Batch, rewards: Sequence[Tensor], logps: Sequence[Tensor]
) -> dict[str, Metric]:
    """Rewards and log-probs of chosen and rejected answers, ``(P,)`` each, and the entropy of all trained tokens."""
    assert out.entropy is not None
    chosen, rejected = (reward.detach() for reward in rewards)
    return {
        "rewards/chosen": mean(chosen),
        "rewards/rejected": mean(rejected),
        "rewards/margins": mean(chosen - rejected),
        "rewards/accuracies": mean((chosen > rejected).float()),
        "logps/chosen": mean(logps[0]),
        "logps/rejected": mean(logps[1]),
        "entropy": mean(out.entropy, batch.loss_mask),
    }


def reference_free_metrics(out: ModelOutputs, batch: Batch, rewards: Tensor, logps: Tensor) -> dict[str, Metric]:
    """What methods without a reference log; ``rewards`` and ``logps`` are ``(P, branches)``, chosen and rejected first."""
    size = batch.num_sequences // len(rewards)
    found = _reward_metrics(out, batch, (rewards[:, 0], rewards[:, 1]), (logps[:, 0], logps[:, 1]))
    return found | logit_metrics(out, chosen=answer_mask(batch, size, 0), rejected=answer_mask(batch, size, 1))


def judged_metrics(out: ModelOutputs, batch: Batch, rewards: Tensor, logp: Tensor, good: Tensor) -> dict[str, Metric]:
    """Rewards and log-probs by label, sums and counts so that a batch of one label counts for what it has."""
    assert out.entropy is not None
    rewards, logp = rewards.detach(), logp.detach()
    found: dict[str, Metric] = {}
    for name, kept in (("chosen", good), ("rejected", ~good)):
        if bool(kept.any()):
            found[f"rewards/{name}"] = mean(rewards, kept)
            found[f"logps/{name}"] = mean(logp, kept)
            on_side = batch.loss_mask & kept[batch.sequence.clamp_min(0)]
            found |= logit_metrics(out, **{name: on_side})
    found["entropy"] = mean(out.entropy, batch.loss_mask)
    return found


def branch_sums(out: ModelOutputs, batch: Batch, branches: int) -> tuple[Tensor, Tensor]:
    """Summed log-probs and lengths by row and branch, ``(P, branches)`` each."""
    assert out.logp is not None
    logp, length = sequence_logp(out.logp, batch)
    return batch.grouped(logp, branches), batch.grouped(length, branches)


def likelihood_mask(batch: Batch, branches: int, branch: int) -> Tensor:
    """``(B, T)`` tokens whose likelihood is raised: one branch of each row, and trained prompts."""
    return answer_mask(batch, branches, branch) | batch.loss_mask & (batch.sequence < 0)


def likelihood_terms(
    terms: Tensor,
    out: ModelOutputs,
    batch: Batch,
    metrics: dict[str, Metric],
    *,
    weight: float,
    branches: int,
    branch: int,
) -> LossTerms:
    """One term a row ``(P,)``, a mean over the step's rows, and ``weight`` times the NLL, a mean over its tokens."""
    assert out.logp is not None
    loss = row_terms(batch, terms, branches=branches, metrics=metrics)
    if weight:
        mask = likelihood_mask(batch, branches, branch)
        loss.extra.append(LossTerms(weight * nll(out.logp), mask, "token", count="likelihood"))
        metrics["nll_loss"] = mean(nll(out.logp), mask)
    return loss


def as_label(label: Any, index: int) -> bool:
    """A label as a bool.

    Raises:
        DataError: It is neither True nor False (nor 1 nor 0).
    """
    if isinstance(label, bool) or label in (0, 1):
        return bool(label)
    raise DataError(
        f"row {index}, column 'label': {label!r} must be True or False (0 and 1 are read so). A text is true whatever it says: "
        "convert the column."
    )


def check_labels(labels: Sequence[Any], args: Any, *, training: bool) -> None:
    """Refuse labels that are no bool; warn of a training set that is sorted by label or out of balance.

    Args:
        labels: One a row.
        args: `AnswerConfig`, with ``desirable_weight`` and ``undesirable_weight`` where the method has them.
        training: Whether it is the training set.

    Raises:
        DataError: A label that is neither True nor False.
    """
    good = [as_label(label, index) for index, label in enumerate(labels)]
    if not training:
        return
    longest = max((len(list(run)) for _, run in itertools.groupby(good)), default=0)
    ordered = args.train_sampling_strategy == "sequential"
    if ordered and len(set(good)) > 1 and longest > SORTED * args.per_device_train_batch_size:
        logger.warning(
            "train_sampling_strategy='sequential', and %d rows in a row have the same label, more than %d batches of %d, "
            "which hold nothing to compare. Leave it out, or shuffle the dataset.",
            longest, SORTED, args.per_device_train_batch_size,
        )  # fmt: skip
    weights = [getattr(args, f"{side}_weight", 1.0) for side in ("desirable", "undesirable")]
    _check_balance(sum(good), len(good) - sum(good), *weights)


def _check_balance(good: int, bad: int, good_weight: float, bad_weight: float) -> None:
    if good == 0 or bad == 0:
        logger.warning("all %d labels are %s: there is nothing to compare with.", good + bad, good > 0)
    ratio = max(good, 1) * good_weight / (max(bad, 1) * bad_weight)
    if good == bad or 1.0 <= round(ratio, 2) <= BALANCED:
        return
    logger.warning(
        "%d good and %d bad answers, weighted, count %.2f : 1; between 1 and %.2f is advised. Set desirable_weight in "
        "[%.2f, %.2f], or undesirable_weight in [%.2f, %.2f], not both.",
        good, bad, ratio, BALANCED, good_weight / ratio, BALANCED * good_weight / ratio,
        bad_weight * ratio / BALANCED, bad_weight * ratio,
    )  # fmt: skip
