"""Shared code of methods that train on compared or judged answers: configs, metrics and the reference's log-probs."""

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


# A dataset counts as sorted by label if more than this number of consecutive batches have the same label.
SORTED = 10
# Maximum ratio between the total weight of good answers and that of bad answers (KTO, section 4.2).
BALANCED = 1.33


# Answers and their metrics --------------------------------------------------------------------------------------------


def answer_mask(batch: Batch, size: int, which: int) -> Tensor:
    """Return a mask ``(B, T)`` of loss tokens in one answer of each row, where each row has ``size`` answers and
    ``which`` is the answer's index.
    """
    wanted = torch.tensor([origin % size == which for origin in batch.origin], device=batch.sequence.device)
    return batch.loss_mask & (batch.sequence >= 0) & wanted[batch.sequence.clamp_min(0)]


def logit_metrics(out: ModelOutputs, **masks: Tensor) -> dict[str, Metric]:
    """Compute ``logits/<side>``: the mean logit over the vocabulary, averaged over the tokens in a mask ``(B, T)`` per
    side.
    """
    assert out.mean_logit is not None
    return {f"logits/{side}": mean(out.mean_logit, mask) for side, mask in masks.items()}


def pair_metrics(
    out: ModelOutputs, batch: Batch, values: dict[str, Tensor], beta: float, pairs: Sequence[tuple[Tensor, ...]]
) -> dict[str, Metric]:
    """Compute the metrics of methods on pairs with a reference.

    Rewards are ``beta`` times the log-ratio, for every loss.
    """
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
    """Compute metrics of rewards and log-probs ``(P,)`` of chosen and rejected answers, and the entropy of trained
    tokens.
    """
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
    """Compute the metrics of methods without a reference.

    ``rewards`` and ``logps`` have the shape ``(P, branches)``, with chosen and rejected first.
    """
    size = batch.num_sequences // len(rewards)
    metrics = _reward_metrics(out, batch, (rewards[:, 0], rewards[:, 1]), (logps[:, 0], logps[:, 1]))
    return metrics | logit_metrics(out, chosen=answer_mask(batch, size, 0), rejected=answer_mask(batch, size, 1))


def judged_metrics(out: ModelOutputs, batch: Batch, rewards: Tensor, logp: Tensor, good: Tensor) -> dict[str, Metric]:
    """Compute rewards and log-probs by label.

    Metrics are sums and counts, so each batch is weighted by its number of answers with the label.
    """
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
    """Compute summed log-probs and lengths by row and branch, ``(P, branches)`` each."""
    assert out.logp is not None
    logp, length = sequence_sum(out.logp.float(), *batch.by_sequence), sequence_lengths(*batch.by_sequence)
    return batch.grouped(logp, branches), batch.grouped(length, branches)


def likelihood_mask(batch: Batch, branches: int, branch: int) -> Tensor:
    """Return a mask ``(B, T)`` of tokens in the NLL term: one branch of each row, and prompt tokens with loss."""
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
    """Combine one loss per row ``(P,)`` with ``weight`` times the NLL.

    The loss is averaged over the rows of the step, the NLL over its tokens.
    """
    assert out.logp is not None
    loss = row_terms(batch, terms, branches=branches, metrics=metrics)
    if weight:
        mask = likelihood_mask(batch, branches, branch)
        loss.extra.append(LossTerms(weight * nll(out.logp), mask, "token", count="likelihood"))
        metrics["nll_loss"] = mean(nll(out.logp), mask)
    return loss


def as_label(label: Any, index: int) -> bool:
    """Convert a label to a bool.

    Raises:
        DataError: The label is not True, False, 1 or 0.
    """
    if isinstance(label, bool) or label in (0, 1):
        return bool(label)
    raise DataError(
        f"row {index}, column 'label': {label!r} must be True or False (1 or 0 are accepted). Convert the column; a "
        "nonempty string would always count as True."
    )


def check_labels(labels: Sequence[Any], args: AnswerConfig, *, training: bool) -> None:
    """Validate labels, and warn about a training set that is sorted by label or imbalanced.

    Args:
        labels: One label per row.
        args: Config of the method.
        training: Whether the rows are the training set.

    Raises:
        DataError: A label is not a bool.
    """
    good = [as_label(label, index) for index, label in enumerate(labels)]
    if not training:
        return
    longest = max((len(list(run)) for _, run in itertools.groupby(good)), default=0)
    ordered = args.train_sampling_strategy == "sequential"
    if ordered and len(set(good)) > 1 and longest > SORTED * args.per_device_train_batch_size:
        logger.warning(
            "train_sampling_strategy='sequential', and %d consecutive rows have the same label, so more than %d batches of "
            "%d rows have nothing to compare. Remove the option, or shuffle the dataset.",
            longest, SORTED, args.per_device_train_batch_size,
        )  # fmt: skip
    _check_balance(sum(good), len(good) - sum(good), args.desirable_weight, args.undesirable_weight)


def _check_balance(good: int, bad: int, good_weight: float, bad_weight: float) -> None:
    if good == 0 or bad == 0:
        logger.warning("all %d labels are %s, so there is nothing to compare.", good + bad, good > 0)
    # A weight of 0 is allowed, because it excludes good or bad answers on purpose.
    if good == bad or 0 in (good_weight, bad_weight):
        return
    ratio = max(good, 1) * good_weight / (max(bad, 1) * bad_weight)
    if 1.0 <= round(ratio, 2) <= BALANCED:
        return
    logger.warning(
        "with %d good and %d bad answers, the total weights of good and bad answers have the ratio %.2f : 1. A ratio between "
        "1 and %.2f is recommended. Set desirable_weight in [%.2f, %.2f] or undesirable_weight in [%.2f, %.2f], not both.",
        good, bad, ratio, BALANCED, good_weight / ratio, BALANCED * good_weight / ratio,
        bad_weight * ratio / BALANCED, bad_weight * ratio,
    )  # fmt: skip


# Configs --------------------------------------------------------------------------------------------------------------

CHECKED_ROWS = 1000


@config
class AnswerConfig(PostTrainingConfig):
    """Arguments of all methods that train on given answers."""

    # These are constants instead of fields, because only some methods have these options.
    desirable_weight = undesirable_weight = 1.0

    learning_rate: float = option(
        1e-6, "Peak learning rate. The default is for full fine-tuning. Use about 1e-5 for LoRA."
    )
    disable_dropout: bool = option(
        True,
        "Set every dropout probability of the model to 0, so that policy and reference give equal log-probs for equal inputs. "
        "An adapter's lora_dropout is not changed.",
    )
    max_length: int | None = option(
        1024,
        "Maximum number of tokens of prompt and answer together, at least 2. Longer answers are truncated, and rows whose "
        "prompt alone reaches the maximum are dropped. None: no limit. Increase it if the log reports many truncated answers.",
    )
    truncation_mode: Literal["keep_start", "keep_end"] = option(
        "keep_start",
        "Which part of a row longer than max_length is kept. 'keep_start': the prompt and the beginning of each answer. "
        "'keep_end': the end of each answer, and as much of the end of the prompt as fits. DPO deprecates 'keep_end'.",
    )
    mask_inner_turns: bool = option(
        False,
        "Exclude user and tool turns within an answer from the loss. False includes them like the model's own text, and logs a "
        "warning. Set it for answers with tool calls.",
    )
    dataset_num_proc: PositiveInt | None = option(
        None,
        "Number of processes that prepare the dataset, at least 1. None: the main process only. Raise it for large datasets.",
    )
    pad_to_multiple_of: int | str | None = option(
        None,
        "Round the width of batches up to a multiple of this number. None or 'auto': no rounding, except for FlexAttention, "
        "which needs multiples of 128.",
    )
    beta: PositiveFloat = option(
        0.1,
        "Strength of the regularization, above 0. For losses with a reference model, a larger value keeps the policy closer "
        "to the reference. For 'ipo', it is tau in the paper: the target gap per token is 1 / (2 beta). Losses that average "
        "over tokens need a value that is one or two orders of magnitude larger.",
    )
    pair_reward_model: str | None = option(
        None,
        "Folder or Hub id of a reward model that scores up to 512 pairs before training. Its agreement with the labels is "
        "logged, and the pairs for which it prefers the rejected answer are listed in a file. None: pairs are not scored.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"max_length={self.max_length} must be at least 2: one token of the prompt and one of the answer."
            )

    def refuse_unread_by_loss(self, **read: bool) -> None:
        """Raise an error if an option is set that the selected loss does not use.

        Raises:
            ConfigError: An option is set but ``loss_type`` does not use it.
        """
        for name, is_read in read.items():
            value = vars(self)[name]
            if not is_read and value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={value} has no effect with loss_type={vars(self)['loss_type']!r}. Remove it."
                )


UNREAD = {
    "max_completion_length": "filter the data, or set max_length",
    "generate_during_eval": "use LogCompletionsCallback",
    "is_encoder_decoder": "train a causal language model",
    "padding_value": "set tokenizer.pad_token; the loss does not use padding",
}


@dataclass
class UnreadFields:
    """Fields of TRL's CPO and ORPO configs that are not supported. Setting one of them is an error."""

    max_completion_length: int | None = option(
        None, "Not supported. Use max_length, which truncates prompt and answer together, or filter the dataset."
    )
    generate_during_eval: bool = option(
        False, "Not supported. Use LogCompletionsCallback, which generates and logs completions."
    )
    is_encoder_decoder: bool | None = option(None, "Not supported. Only causal language models are trained.")
    padding_value: int | None = option(
        None, "Not supported. Padding never affects the loss. To change the pad token, set it on the tokenizer."
    )

    def refuse_unread(self) -> None:
        """Raise an error if an unsupported field is set.

        Raises:
            ConfigError: A field is set; the message contains the alternative.
        """
        for name, instead in UNREAD.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ConfigError(f"{name}={value!r} is not supported by {type(self).__name__}. Fix: {instead}.")


@config
class ComparedConfig(AnswerConfig):
    """Arguments of all methods that compare the policy with a reference model."""

    precompute_ref_log_probs: bool = option(
        False,
        "Compute the log-probs of the reference model once, before training, and then release the model to save memory. This "
        "needs a dataset with a length, and cannot be combined with sync_ref_model.",
    )
    precompute_ref_batch_size: PositiveInt | None = option(
        None,
        "With precompute_ref_log_probs: number of rows per forward pass. None: per_device_train_batch_size. A larger number "
        "is faster, because no gradients are stored.",
    )
    sync_ref_model: bool = option(
        False,
        "Move the reference model towards the policy every ref_model_sync_steps steps (TR-DPO, arXiv:2404.09656). It does not "
        "work with adapters or quantized weights.",
    )
    ref_model_mixup_alpha: PositiveShare = option(
        0.6,
        "With sync_ref_model: the fraction a in reference = (1 - a) * reference + a * policy, above 0 and at most 1. 1 "
        "replaces the reference with the policy.",
    )
    ref_model_sync_steps: PositiveInt = option(
        512, "With sync_ref_model: number of optimizer steps between two updates of the reference model, at least 1."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ConfigError(
                "sync_ref_model=True changes the reference during training, so its log-probs cannot be computed "
                "in advance. Set precompute_ref_log_probs=False."
            )


Answers = TypeVar("Answers", bound=AnswerConfig)
PAIRS = Traits(answers=2, whole_rows=True, takes_collator=True, log_area="P", splits_tokens=True)
JUDGED = replace(PAIRS, answers=1, compares_reference=True, needs=frozenset({"logp", "entropy", "mean_logit"}))


class AnswerMethod(Method[Answers]):
    """Base class of methods on compared or judged answers to a prompt.

    Attributes:
        judged: Each row has one answer with a label, good or bad. Pairs are converted to one good and one bad answer.
        likelihood_branch: Index of the answer in the NLL term.
        reference_columns: Columns of precomputed reference log-probs, one per branch.
    """

    branches: tuple[str, ...] = ("chosen", "rejected")
    judged: ClassVar[bool] = False
    likelihood_branch: ClassVar[int] = 0
    reference_columns: ClassVar[tuple[str, ...]] = ()

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert examples with `answer_rows`. The label of a judged answer becomes a column."""
        columns = {"ref_logps": self.reference_columns} if self.traits.compares_reference else {}
        rows = answer_rows(examples, self.branches, columns)
        if not self.judged:
            return rows
        labels = [as_label(example["label"], index) for index, example in enumerate(examples)]
        return [row.with_columns(label=[float(label)]) for row, label in zip(rows, labels, strict=True)]

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count the tokens in the NLL term over the optimizer step."""
        if self.judged:
            return {}
        masks = (likelihood_mask(batch, len(self.branches), self.likelihood_branch) for batch in batches)
        return {"likelihood": float(sum(int(mask.sum()) for mask in masks))}

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the margin of judged answers: the difference of the mean rewards of good and bad answers."""
        if not self.judged or not {"rewards/chosen", "rewards/rejected"} <= set(metrics):
            return metrics
        return metrics | {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}

    # Against a reference -----------------------------------------------------------------------------------------

    def reference_key(self) -> dict[str, Any]:
        """Return the settings, in addition to data, weights and precision, that change the reference's log-probs."""
        cfg = self.cfg
        kept = {"max_length": cfg.max_length, "truncation_mode": cfg.truncation_mode}
        return kept | {"mask_inner_turns": cfg.mask_inner_turns}

    def reference_logp(self, batch: Batch) -> Tensor:
        """Return the reference's summed log-probs, ``(S,)``."""
        if "ref_logps" in batch.columns:
            return batch.columns["ref_logps"]
        if batch.ref_logp is None:
            raise ConfigError(
                "these rows have no precomputed reference log-probs, and the reference model was released "
                "(precompute_ref_log_probs=True). Pass this dataset as eval_dataset when you create the trainer."
            )
        return self.sums(batch.ref_logp, batch)

    def sums(self, logp: Tensor, batch: Batch) -> Tensor:
        """Sum log-probs ``(B, T)`` over each answer, ``(S,)``. Policy and reference use the same sum."""
        return sequence_sum(logp.float(), *batch.by_sequence)

    def starts_at_ln_2(self) -> bool:
        """Return whether the loss is exactly ln 2 while policy and reference are equal."""
        return False


class ReferenceFree(AnswerMethod[Answers]):
    """Base class of methods that compare answers by the policy's likelihood, without a reference model."""

    traits = replace(PAIRS, needs=frozenset({"logp", "entropy", "mean_logit"}))
