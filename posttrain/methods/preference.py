"""Configs, metrics and reference log-probs that methods for pairs of answers and methods for labeled answers share."""

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


# A dataset is treated as sorted by label if more than this number of consecutive batches contain only one label.
SORTED = 10
# Maximum recommended ratio of the total weight of good answers to the total weight of bad answers (KTO paper, section 4.2).
BALANCED = 1.33


# Answers and their metrics --------------------------------------------------------------------------------------------


def answer_mask(batch: Batch, size: int, which: int) -> Tensor:
    """Return a mask ``(B, T)`` of the loss tokens of one answer per row. ``size`` is the number of answers per row, and
    ``which`` is the index of the selected answer.
    """
    wanted = torch.tensor([origin % size == which for origin in batch.origin], device=batch.sequence.device)
    return batch.loss_mask & (batch.sequence >= 0) & wanted[batch.sequence.clamp_min(0)]


def logit_metrics(out: ModelOutputs, **masks: Tensor) -> dict[str, Metric]:
    """Compute the metric ``logits/NAME`` for each mask ``(B, T)``. The metric is the mean logit over the vocabulary,
    averaged over the tokens at which the mask is True.
    """
    assert out.mean_logit is not None
    return {f"logits/{side}": mean(out.mean_logit, mask) for side, mask in masks.items()}


def pair_metrics(
    out: ModelOutputs, batch: Batch, values: dict[str, Tensor], beta: float, pairs: Sequence[tuple[Tensor, ...]]
) -> dict[str, Metric]:
    """Compute the metrics of a method that trains on pairs and uses a reference model.

    For every loss, the logged reward of an answer is ``beta`` times its log-ratio of policy and reference.
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
    """Compute metrics of the rewards and log-probs ``(P,)`` of chosen and rejected answers, and the mean entropy of loss
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
    """Compute the metrics of a method that trains on pairs without a reference model.

    ``rewards`` and ``logps`` are tensors ``(P, branches)``. Their first two columns belong to the chosen and the rejected
    answers.
    """
    size = batch.num_sequences // len(rewards)
    metrics = _reward_metrics(out, batch, (rewards[:, 0], rewards[:, 1]), (logps[:, 0], logps[:, 1]))
    return metrics | logit_metrics(out, chosen=answer_mask(batch, size, 0), rejected=answer_mask(batch, size, 1))


def judged_metrics(out: ModelOutputs, batch: Batch, rewards: Tensor, logp: Tensor, good: Tensor) -> dict[str, Metric]:
    """Compute the mean rewards, log-probs and logits of good and of bad answers.

    Each metric is stored as a sum and a count. An average over batches therefore weights each batch by its number of good or
    bad answers.
    """
    assert out.entropy is not None
    rewards, logp = rewards.detach(), logp.detach()
    metrics: dict[str, Metric] = {}
    for name, selected in (("chosen", good), ("rejected", ~good)):
        metrics[f"rewards/{name}"] = mean(rewards, selected)
        metrics[f"logps/{name}"] = mean(logp, selected)
        on_side = batch.loss_mask & selected[batch.sequence.clamp_min(0)]
        metrics |= logit_metrics(out, **{name: on_side})
    metrics["entropy"] = mean(out.entropy, batch.loss_mask)
    return metrics


def branch_sums(out: ModelOutputs, batch: Batch, branches: int) -> tuple[Tensor, Tensor]:
    """Compute the summed log-prob and the length of each answer, as two tensors ``(P, branches)``.

    P is the number of rows, and ``branches`` is the number of answers per row.
    """
    assert out.logp is not None
    logp, length = sequence_sum(out.logp.float(), *batch.by_sequence), sequence_lengths(*batch.by_sequence)
    return batch.grouped(logp, branches), batch.grouped(length, branches)


def likelihood_mask(batch: Batch, branches: int, branch: int) -> Tensor:
    """Return a mask ``(B, T)`` of the tokens in the NLL term. They are the tokens of answer ``branch`` of each row, and
    prompt tokens that contribute to the loss.
    """
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
    """Add the weighted NLL of one answer per row to the row losses ``(P,)``.

    The row losses are averaged over the rows of the optimizer step. The NLL is averaged over its tokens.
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
        f"row {index}, column 'label': {label!r} must be True or False (1 and 0 are accepted). Fix: convert the column to "
        "bool. Python would count every nonempty string as True, including 'False'."
    )


def check_labels(labels: Sequence[Any], args: AnswerConfig, *, training: bool) -> None:
    """Check that labels are valid. Log a warning if the training set is sorted by label or imbalanced.

    Args:
        labels: One label per row.
        args: Config of the method.
        training: Whether the rows are the training set, and not an evaluation set.

    Raises:
        DataError: A label is not True, False, 1 or 0.
    """
    good = [as_label(label, index) for index, label in enumerate(labels)]
    if not training:
        return
    longest = max((len(list(run)) for _, run in itertools.groupby(good)), default=0)
    ordered = args.train_sampling_strategy == "sequential"
    if ordered and len(set(good)) > 1 and longest > SORTED * args.per_device_train_batch_size:
        logger.warning(
            "train_sampling_strategy='sequential', and %d consecutive rows have the same label, so more than %d batches of %d "
            "rows contain only good or only bad answers. Fix: remove train_sampling_strategy, or shuffle the dataset.",
            longest, SORTED, args.per_device_train_batch_size,
        )  # fmt: skip
    weights = (args.desirable_weight, args.undesirable_weight) if "desirable_weight" in vars(args) else (0.0, 0.0)
    _check_balance(sum(good), len(good) - sum(good), *weights)


def _check_balance(good: int, bad: int, good_weight: float, bad_weight: float) -> None:
    if good == 0 or bad == 0:
        logger.warning("all %d labels are %s, but training needs good and bad answers.", good + bad, good > 0)
        return
    # Log no warning if a weight is 0, because the user excludes good or bad answers on purpose. For BCO, log no warning,
    # because it has no weights.
    if good == bad or 0 in (good_weight, bad_weight):
        return
    ratio = max(good, 1) * good_weight / (max(bad, 1) * bad_weight)
    if 1.0 <= round(ratio, 2) <= BALANCED:
        return
    logger.warning(
        "with %d good and %d bad answers, the total weight of good answers is %.2f times that of bad answers. A ratio between "
        "1 and %.2f is recommended. Set desirable_weight in [%.2f, %.2f] or undesirable_weight in [%.2f, %.2f], but not both.",
        good, bad, ratio, BALANCED, good_weight / ratio, BALANCED * good_weight / ratio,
        bad_weight * ratio / BALANCED, bad_weight * ratio,
    )  # fmt: skip


# Configs --------------------------------------------------------------------------------------------------------------

CHECKED_ROWS = 1000


@config
class AnswerConfig(PostTrainingConfig):
    """Arguments of all methods that train on the answers of a dataset."""

    # Constants instead of fields, because only some methods have these options.
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
        "Maximum number of tokens of a prompt and its answer together, at least 2. Longer answers are truncated. Rows whose "
        "prompt alone reaches the maximum are removed. None: no limit. Increase it if the log reports many truncated answers.",
    )
    truncation_mode: Literal["keep_start", "keep_end"] = option(
        "keep_start",
        "Which part of a row is kept if the row is longer than max_length. 'keep_start': the prompt and the beginning of each "
        "answer. 'keep_end': the end of each answer, and as much of the end of the prompt as fits. 'keep_end' is deprecated "
        "for DPO.",
    )
    mask_inner_turns: bool = option(
        False,
        "Exclude user turns and tool results within an answer from the loss. False: the loss includes them like the model's "
        "own text, and a warning is logged. Set it to True if answers contain tool calls.",
    )
    dataset_num_proc: PositiveInt | None = option(
        None,
        "Number of processes that prepare the dataset, at least 1. None: the main process only. Raise it for large datasets.",
    )
    pad_to_multiple_of: int | str | None = option(
        None,
        "Round the length of batch rows up to a multiple of this number of tokens. None or 'auto': lengths are not rounded, "
        "except with FlexAttention, which needs multiples of 128.",
    )
    beta: PositiveFloat = option(
        0.1,
        "Strength of the regularization, above 0. For losses with a reference model, a larger value keeps the policy closer "
        "to the reference. For 'ipo', the target for the difference of log-ratios per token is 1 / (2 beta), and beta is "
        "called tau in the paper. Losses on log-probs per token need a beta that is one or two orders of magnitude larger "
        "than losses on sums.",
    )
    pair_reward_model: str | None = option(
        None,
        "Folder or Hub id of a reward model that checks the preference labels: it scores up to 512 pairs before training. The "
        "log shows how often it prefers the chosen answer. A file lists the pairs for which it prefers the rejected answer. "
        "None: the labels are not checked.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"max_length={self.max_length} must be at least 2, because a row needs at least one prompt token and one "
                "answer token."
            )

    def refuse_unread_by_loss(self, **read: bool) -> None:
        """Raise an error if an option is set that is not used with the selected ``loss_type``.

        Raises:
            ConfigError: An option has no effect with this ``loss_type``.
        """
        for name, is_read in read.items():
            value = vars(self)[name]
            if not is_read and value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={value} has no effect with loss_type={vars(self)['loss_type']!r}. Fix: remove {name}."
                )


UNREAD = {
    "max_completion_length": "filter the data, or set max_length",
    "generate_during_eval": "use LogCompletionsCallback",
    "is_encoder_decoder": "train a causal language model",
    "padding_value": "set tokenizer.pad_token; the loss does not use padding",
}


@dataclass
class UnreadFields:
    """Fields of TRL's CPO and ORPO configs that posttrain does not support. Setting one of these fields is an error."""

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
            ConfigError: An unsupported field is set. The message contains the alternative.
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
        "needs a dataset with a known length, i.e. not a stream. It cannot be combined with sync_ref_model.",
    )
    precompute_ref_batch_size: PositiveInt | None = option(
        None,
        "With precompute_ref_log_probs: number of rows per forward pass of the reference model. None: "
        "per_device_train_batch_size. These passes compute no gradients, so more rows fit into memory. A larger number is "
        "faster.",
    )
    sync_ref_model: bool = option(
        False,
        "Move the reference model towards the policy every ref_model_sync_steps steps (TR-DPO, arXiv:2404.09656). It is not "
        "supported with adapters or quantized weights.",
    )
    ref_model_mixup_alpha: PositiveShare = option(
        0.6,
        "With sync_ref_model: mixing weight `a` in `reference = (1 - a) * reference + a * policy`. It must be above 0 and at "
        "most 1. 1 replaces the reference with the policy.",
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
    """Base class of methods that train on the answers of a dataset. The answers to a prompt are compared with each other, or
    each answer has a label.

    Attributes:
        judged: Whether each row has one answer with the label good or bad. A pair of answers is converted to one good and
            one bad answer.
        likelihood_branch: Index of the answer whose NLL is part of the loss.
        reference_columns: Names of the columns with precomputed reference log-probs, one per answer.
    """

    branches: tuple[str, ...] = ("chosen", "rejected")
    judged: ClassVar[bool] = False
    likelihood_branch: ClassVar[int] = 0
    reference_columns: ClassVar[tuple[str, ...]] = ()

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert examples to rows of token ids; see `answer_rows`. The label of a judged answer is stored as a column."""
        columns = {"ref_logps": self.reference_columns} if self.traits.compares_reference else {}
        rows = answer_rows(examples, self.branches, columns)
        if not self.judged:
            return rows
        labels = [as_label(example["label"], index) for index, example in enumerate(examples)]
        return [row.with_columns(label=[float(label)]) for row, label in zip(rows, labels, strict=True)]

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count the tokens over which the NLL term is averaged, in the batches of an optimizer step."""
        if self.judged:
            return {}
        masks = (likelihood_mask(batch, len(self.branches), self.likelihood_branch) for batch in batches)
        return {"likelihood": float(sum(int(mask.sum()) for mask in masks))}

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the reward margin of judged answers: the mean reward of good answers minus the mean reward of bad answers."""
        if not self.judged or not {"rewards/chosen", "rewards/rejected"} <= set(metrics):
            return metrics
        return metrics | {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}

    # Against a reference -----------------------------------------------------------------------------------------

    def reference_key(self) -> dict[str, Any]:
        """Return the settings that change the reference's log-probs. These settings are part of the key under which
        log-probs are cached.
        """
        cfg = self.cfg
        settings = {"max_length": cfg.max_length, "truncation_mode": cfg.truncation_mode}
        return settings | {"mask_inner_turns": cfg.mask_inner_turns}

    def reference_logp(self, batch: Batch) -> Tensor:
        """Return the reference's summed log-prob of each sequence as a tensor ``(S,)``."""
        if "ref_logps" in batch.columns:
            return batch.columns["ref_logps"]
        if batch.ref_logp is None:
            raise ConfigError(
                "these rows have no precomputed reference log-probs, and the reference model has been released "
                "(precompute_ref_log_probs=True). Fix: pass this dataset as eval_dataset when you create the trainer."
            )
        return self.sums(batch.ref_logp, batch)

    def sums(self, logp: Tensor, batch: Batch) -> Tensor:
        """Return the sum of log-probs over the tokens of each answer, as a tensor ``(S,)``. ``logp`` contains the ``(B, T)``
        log-probs of the policy or of the reference.
        """
        return sequence_sum(logp.float(), *batch.by_sequence)

    def starts_at_ln_2(self) -> bool:
        """Return whether the loss is exactly ln 2 as long as policy and reference are equal."""
        return False


class ReferenceFree(AnswerMethod[Answers]):
    """Base class of methods that compare answers by the policy's log-likelihood. They use no reference model."""

    traits = replace(PAIRS, needs=frozenset({"logp", "entropy", "mean_logit"}))
