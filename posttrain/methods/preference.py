"""What methods share that learn from answers which were compared or judged: answers as trees, and their reference."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from posttrain.data.preference import answer_rows
from posttrain.errors import ConfigError, DataError
from posttrain.fields import PositiveFloat, PositiveInt, PositiveShare, config, option
from posttrain.losses.likelihood import nll
from posttrain.losses.reduce import row_terms, sequence_lengths, sequence_sum
from posttrain.methods.base import Method, Traits
from posttrain.methods.config import PostTrainingConfig
from posttrain.metrics import Metric, mean
from posttrain.types import Batch, LossTerms, ModelOutputs, Row

logger = logging.getLogger(__name__)


SORTED = 10  # Batches that one label may fill in a row.
BALANCED = 1.33  # Good answers may weigh this much more than bad ones, in all (KTO, section 4.2).


# Answers by sequence, and what is logged of them ----------------------------------------------------------------------


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
    metrics = _reward_metrics(out, batch, (rewards[:, 0], rewards[:, 1]), (logps[:, 0], logps[:, 1]))
    return metrics | logit_metrics(out, chosen=answer_mask(batch, size, 0), rejected=answer_mask(batch, size, 1))


def judged_metrics(out: ModelOutputs, batch: Batch, rewards: Tensor, logp: Tensor, good: Tensor) -> dict[str, Metric]:
    """Rewards and log-probs by label, sums and counts so that a batch of one label counts for what it has."""
    assert out.entropy is not None
    rewards, logp = rewards.detach(), logp.detach()
    metrics: dict[str, Metric] = {}
    for name, kept in (("chosen", good), ("rejected", ~good)):
        metrics[f"rewards/{name}"] = mean(rewards, kept)
        metrics[f"logps/{name}"] = mean(logp, kept)
        on_side = batch.loss_mask & kept[batch.sequence.clamp_min(0)]
        metrics |= logit_metrics(out, **{name: on_side})
    metrics["entropy"] = mean(out.entropy, batch.loss_mask)
    return metrics


def branch_sums(out: ModelOutputs, batch: Batch, branches: int) -> tuple[Tensor, Tensor]:
    """Summed log-probs and lengths by row and branch, ``(P, branches)`` each."""
    assert out.logp is not None
    logp, length = sequence_sum(out.logp.float(), *batch.by_sequence), sequence_lengths(*batch.by_sequence)
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


def check_labels(labels: Sequence[Any], args: AnswerConfig, *, training: bool) -> None:
    """Refuse labels that are no bool; warn of a training set that is sorted by label or out of balance.

    Args:
        labels: One a row.
        args: Of the method.
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
    _check_balance(sum(good), len(good) - sum(good), args.desirable_weight, args.undesirable_weight)


def _check_balance(good: int, bad: int, good_weight: float, bad_weight: float) -> None:
    if good == 0 or bad == 0:
        logger.warning("all %d labels are %s: there is nothing to compare with.", good + bad, good > 0)
    if good == bad or 0 in (good_weight, bad_weight):  # One kind is left out on purpose.
        return
    ratio = max(good, 1) * good_weight / (max(bad, 1) * bad_weight)
    if 1.0 <= round(ratio, 2) <= BALANCED:
        return
    logger.warning(
        "%d good and %d bad answers, weighted, count %.2f : 1; between 1 and %.2f is advised. Set desirable_weight in "
        "[%.2f, %.2f], or undesirable_weight in [%.2f, %.2f], not both.",
        good, bad, ratio, BALANCED, good_weight / ratio, BALANCED * good_weight / ratio,
        bad_weight * ratio / BALANCED, bad_weight * ratio,
    )  # fmt: skip


# What configs and trainers share ------------------------------------------------------------------------------------

CHECKED_ROWS = 1000


@config
class AnswerConfig(PostTrainingConfig):
    """Arguments of all methods that train on given answers."""

    desirable_weight = undesirable_weight = 1.0  # Of methods without these options: no fields.

    learning_rate: float = option(
        1e-6, "Peak learning rate. The default suits training of all weights; use about 1e-5 for LoRA."
    )
    disable_dropout: bool = option(
        True,
        "Set every dropout probability of the model to 0, so that policy and reference give equal log-probs for "
        "equal inputs. An adapter's lora_dropout is not changed.",
    )
    max_length: int | None = option(
        1024,
        "Maximum number of tokens of prompt and answer, at least 2. Longer answers are truncated, and rows whose "
        "prompt fills it are dropped. None: no limit. Raise it if the log reports many truncated answers.",
    )
    truncation_mode: Literal["keep_start", "keep_end"] = option(
        "keep_start",
        "Which end of a row above max_length is kept. 'keep_start': the prompt and the beginning of each answer. "
        "'keep_end': the end of each answer, and of the prompt if tokens are left for it; DPO deprecates it.",
    )
    mask_inner_turns: bool = option(
        False,
        "Exclude turns of the user and of tools within an answer from the loss. False trains them like the "
        "model's own text, with a warning. Set it for answers with tool calls.",
    )
    dataset_num_proc: PositiveInt | None = option(
        None,
        "Number of processes that prepare the dataset, at least 1. None: the main process only. Raise it for "
        "large datasets.",
    )
    pad_to_multiple_of: int | str | None = option(
        None,
        "Round the width of batches up to a multiple of this number. None or 'auto': no rounding, except for "
        "FlexAttention, which needs multiples of 128.",
    )
    beta: PositiveFloat = option(
        0.1,
        "Strength of the regularization, above 0. For losses with a reference, a larger value keeps the policy "
        "closer to it. For 'ipo' it is tau: the target gap per token is 1 / (2 beta). Losses that average over "
        "tokens need a value one or two orders of magnitude larger.",
    )
    pair_reward_model: str | None = option(
        None,
        "Folder or Hub id of a reward model that scores up to 512 pairs before training. Its agreement with the "
        "labels is logged, and pairs that it contradicts are listed in a file. None: no scoring.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length={self.max_length} leaves no room for a prompt and an answer; at least 2.")

    def refuse_unread_by_loss(self, **read: bool) -> None:
        """Raise for an option of some losses that is set and that those in ``loss_type`` do not read.

        Raises:
            ConfigError: Names the option and the losses.
        """
        for name, is_read in read.items():
            value = vars(self)[name]
            if not is_read and value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(f"{name}={value} is not read by loss_type={vars(self)['loss_type']!r}. Leave it out.")


UNREAD = {
    "max_completion_length": "filter the data, or set max_length",
    "generate_during_eval": "use LogCompletionsCallback",
    "is_encoder_decoder": "train a causal language model",
    "padding_value": "set tokenizer.pad_token; padding has no part in any loss",
}


@dataclass
class UnreadFields:
    """Fields of TRL's CPO and ORPO configs that have no effect here. Setting one is an error."""

    max_completion_length: int | None = option(
        None, "Not supported. Use max_length, which truncates prompt and answer together, or filter the dataset."
    )
    generate_during_eval: bool = option(
        False, "Not supported. Use LogCompletionsCallback, which generates and logs completions."
    )
    is_encoder_decoder: bool | None = option(None, "Not supported. Only causal language models are trained.")
    padding_value: int | None = option(
        None, "Not supported. Padding is not part of any loss; set pad_token on the tokenizer."
    )

    def refuse_unread(self) -> None:
        """Raise for each that is set.

        Raises:
            ConfigError: Names the field and what to do instead.
        """
        for name, instead in UNREAD.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ConfigError(f"{name}={value!r} is not read by {type(self).__name__}. Fix: {instead}.")


@config
class ComparedConfig(AnswerConfig):
    """Arguments of all methods that compare the policy with a reference model."""

    precompute_ref_log_probs: bool = option(
        False,
        "Compute the reference's log-probs once, before training, and release the reference model. This saves its "
        "memory. It needs a dataset with a length and cannot be combined with sync_ref_model.",
    )
    precompute_ref_batch_size: PositiveInt | None = option(
        None,
        "With precompute_ref_log_probs: number of rows per forward pass. None: per_device_train_batch_size. A "
        "larger number is faster, because no gradients are stored.",
    )
    sync_ref_model: bool = option(
        False,
        "Move the reference model towards the policy every ref_model_sync_steps steps (TR-DPO, arXiv:2404.09656). "
        "Adapters and quantized weights are refused.",
    )
    ref_model_mixup_alpha: PositiveShare = option(
        0.6,
        "With sync_ref_model: the fraction a in reference = (1 - a) * reference + a * policy, above 0 and at most "
        "1. 1 replaces the reference by the policy.",
    )
    ref_model_sync_steps: PositiveInt = option(
        512, "With sync_ref_model: number of optimizer steps between two updates of the reference model, at least 1."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ConfigError(
                "sync_ref_model=True moves the reference, whose log-probs precompute_ref_log_probs=True fixes."
            )


Answers = TypeVar("Answers", bound=AnswerConfig)
PAIRS = Traits(answers=2, whole_rows=True, takes_collator=True, log_area="P", splits_tokens=True)
JUDGED = replace(PAIRS, answers=1, compares_reference=True, needs=frozenset({"logp", "entropy", "mean_logit"}))


class AnswerMethod(Method[Answers]):
    """Answers to a shared prompt, which were compared or judged.

    Attributes:
        judged: One answer a row, with a label that says whether it is good; pairs become a good and a bad answer.
        likelihood_branch: The answer whose likelihood is raised too.
        reference_columns: Columns of precomputed log-probs of the reference, one a branch.
    """

    branches: tuple[str, ...] = ("chosen", "rejected")
    judged: ClassVar[bool] = False
    likelihood_branch: ClassVar[int] = 0
    reference_columns: ClassVar[tuple[str, ...]] = ()

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """See `answer_rows`; the label of a judged answer is a column."""
        columns = {"ref_logps": self.reference_columns} if self.traits.compares_reference else {}
        rows = answer_rows(examples, self.branches, columns)
        if not self.judged:
            return rows
        labels = [as_label(example["label"], index) for index, example in enumerate(examples)]
        return [row.with_columns(label=[float(label)]) for row, label in zip(rows, labels, strict=True)]

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Tokens of the likelihood term over the step."""
        if self.judged:
            return {}
        masks = (likelihood_mask(batch, len(self.branches), self.likelihood_branch) for batch in batches)
        return {"likelihood": float(sum(int(mask.sum()) for mask in masks))}

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Margins of judged answers are the difference of two means, over whatever the window holds."""
        if not self.judged or not {"rewards/chosen", "rewards/rejected"} <= set(metrics):
            return metrics
        return metrics | {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}

    # Against a reference -----------------------------------------------------------------------------------------

    def reference_key(self) -> dict[str, Any]:
        """Settings beyond data, weights and precision that move the reference's log-probs."""
        cfg = self.cfg
        kept = {"max_length": cfg.max_length, "truncation_mode": cfg.truncation_mode}
        return kept | {"mask_inner_turns": cfg.mask_inner_turns}

    def reference_logp(self, batch: Batch) -> Tensor:
        """The reference's summed log-probs, ``(S,)``."""
        if "ref_logps" in batch.columns:
            return batch.columns["ref_logps"]
        if batch.ref_logp is None:
            raise ConfigError(
                "the rows have no precomputed reference log-probs, and the reference is gone (precompute_ref_log_probs=True). "
                "Give this set at construction, as eval_dataset."
            )
        return self.sums(batch.ref_logp, batch)

    def sums(self, logp: Tensor, batch: Batch) -> Tensor:
        """Log-probs ``(B, T)`` summed over each answer as the loss wants them, ``(S,)``; policy and reference alike."""
        return sequence_sum(logp.float(), *batch.by_sequence)

    def starts_at_ln_2(self) -> bool:
        """Whether the loss is exactly ln 2 as long as the policy is its own reference."""
        return False


class ReferenceFree(AnswerMethod[Answers]):
    """Answers by the policy's own likelihood: there is no reference to compare with."""

    traits = replace(PAIRS, needs=frozenset({"logp", "entropy", "mean_logit"}))
