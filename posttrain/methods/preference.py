"""What methods share that learn from answers which were compared or judged: answers as trees, and their reference."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from posttrain.checks.pairs import (
    JUDGED_CODES,
    PAIR_CODES,
    ROW_NUMBER,
    PairWatch,
    check_judged,
    check_pairs,
    reference_prefers_rejected,
)
from posttrain.data.chat import terminal_token_ids
from posttrain.data.forest import unbatched_answers
from posttrain.data.formats import ROW as NUMBER
from posttrain.data.formats import PreparationReport
from posttrain.data.preference import AnswerOptions, answer_rows, extract_and_unpair, prepare_answers
from posttrain.errors import ArgumentTypeError, ConfigError, DataError
from posttrain.loop.config import PostTrainingConfig
from posttrain.loop.trainer import PostTrainer
from posttrain.losses.likelihood import nll
from posttrain.losses.reduce import row_terms, sequence_lengths, sequence_sum
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.reference import Reference, check_reference, precomputed_logps, tell_own_checkpoint
from posttrain.types import (
    Batch,
    Finding,
    LossTerms,
    ModelOutputs,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Row,
    option,
)

logger = logging.getLogger(__name__)


# Arguments that have a position, of trainers that compare with a reference, and of those without one.
OF_COMPARED = (
    "model, ref_model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, "
    "optimizers, quantization_config, peft_config"
)
OF_REFERENCE_FREE = (
    "model, args, data_collator, train_dataset, eval_dataset, processing_class, model_init, callbacks, optimizers, "
    "preprocess_logits_for_metrics, peft_config, compute_metrics"
)
PRECOMPUTED = {"precompute_ref_logps": "args.precompute_ref_log_probs"}  # TRL's name of the attribute.
SORTED = 10  # Batches that one label may fill in a row.
BALANCED = 1.33  # Good answers may weigh this much more than bad ones, in all (KTO, section 4.2).


# Answers by sequence, and what is logged of them ----------------------------------------------------------------------


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


# What configs and trainers share ------------------------------------------------------------------------------------

CHECKED_ROWS = 1000


@dataclass
class AnswerConfig(PostTrainingConfig):
    """Fields of every method on given answers."""

    learning_rate: float = option(1e-6, "Peak learning rate; about 1e-5 for LoRA.")
    disable_dropout: bool = option(True, "Set every dropout to 0.")
    max_length: int | None = option(1024, "Tokens of prompt and answer, at least 2; None never cuts.")
    truncation_mode: Literal["keep_start", "keep_end"] = option("keep_start", "Which end of a long answer is kept.")
    mask_inner_turns: bool = option(False, "Turns of the user or of tools within an answer have no loss.")
    dataset_num_proc: PositiveInt | None = option(None, "Processes that prepare the dataset.")
    pad_to_multiple_of: int | str | None = option(None, "Rounds row widths up; auto or None: what the layout wants.")
    beta: PositiveFloat = option(
        0.1, "Strength of the tie to the reference: with 0 the loss is constant, and some losses divide by it."
    )
    pair_reward_model: str | None = option(
        None, "A reward model that up to 512 pairs are shown to: how often does it agree?"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length={self.max_length} leaves no room for a prompt and an answer; at least 2.")


UNREAD = {
    "max_completion_length": "filter the data, or set max_length",
    "generate_during_eval": "use LogCompletionsCallback",
    "is_encoder_decoder": "train a causal language model",
    "padding_value": "set tokenizer.pad_token; padding has no part in any loss",
}


@dataclass
class UnreadFields:
    """Fields of TRL's CPO and ORPO that nothing reads here; they are refused where they are set."""

    max_completion_length: int | None = option(None, "Leave it out: max_length cuts answers.")
    generate_during_eval: bool = option(False, "Leave it out: use LogCompletionsCallback.")
    is_encoder_decoder: bool | None = option(None, "Leave it out: models are causal.")
    padding_value: int | None = option(None, "Leave it out: the tokenizer has a pad token.")

    def refuse_unread(self) -> None:
        """Raise for each that is set.

        Raises:
            ConfigError: Names the field and what to do instead.
        """
        for name, instead in UNREAD.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ConfigError(f"{name}={value!r} is not read by {type(self).__name__}. Fix: {instead}.")


@dataclass
class ComparedConfig(AnswerConfig):
    """Fields of every method that compares the policy with a reference."""

    precompute_ref_log_probs: bool = option(
        False, "Compute the reference's log-probs once, before training, and free it."
    )
    precompute_ref_batch_size: PositiveInt | None = option(None, "Rows a pass; None: as in training.")
    sync_ref_model: bool = option(False, "Let the reference follow the policy (TR-DPO).")
    ref_model_mixup_alpha: PositiveShare = option(0.6, "Share of the policy in a sync, in (0, 1].")
    ref_model_sync_steps: PositiveInt = option(512, "Optimiser steps between two syncs.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ConfigError(
                "sync_ref_model=True moves the reference, whose log-probs precompute_ref_log_probs=True fixes."
            )


def check_given(model: Any, ref_model: Any, tokenizer: Any) -> None:
    """Refuse arguments of a constructor that cannot work, before anything is loaded."""
    if isinstance(ref_model, str):
        raise ArgumentTypeError(
            f"ref_model={ref_model!r} must be a loaded model. Load it with create_model_from_path({ref_model!r}), or leave "
            "it out to take the weights of the model itself."
        )
    if ref_model is not None:
        check_reference(ref_model, model)
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise ArgumentTypeError(
            f"processing_class must be a tokenizer, not {type(tokenizer).__name__}. Load it with "
            "AutoTokenizer.from_pretrained, or leave it out to take the model's own."
        )


class PreferenceTrainer(PostTrainer):
    """Answers to a shared prompt are one tree, computed once by the policy and once by the reference.

    A subclass gives the objective and these:

    Attributes:
        branches: Columns of the answers, in the order of a row's sequences.
        compared: Whether the loss compares the policy with a reference.
        judged: One answer a row, with a label that says whether it is good; pairs become a good and a bad answer.
        likelihood_branch: The answer whose likelihood is raised too.
        reference_columns: Columns of precomputed log-probs of the reference, one a branch.
        keep: Further columns that the loss reads.
    """

    check_area: ClassVar[str] = "P"
    splits_tokens = True
    branches: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    compared: ClassVar[bool] = True
    judged: ClassVar[bool] = False
    likelihood_branch: ClassVar[int] = 0
    keep_groups_together: ClassVar[bool] = True
    reference_columns: ClassVar[tuple[str, ...]] = ("ref_chosen_logps", "ref_rejected_logps")
    keep: ClassVar[tuple[str, ...]] = ()
    takes_collator: ClassVar[bool] = True
    args: Any

    def __init__(
        self, model: str | nn.Module, ref_model: nn.Module | None = None, args: Any = None, **kwargs: Any
    ) -> None:
        check_given(model, ref_model, kwargs.get("processing_class"))
        self.reports: dict[str, PreparationReport] = {}
        self._own_reference = ref_model is None
        self.reference: Reference | None = None
        super().__init__(model, args, **kwargs)
        if self.compared:
            self._make_reference(ref_model)
        self._tell_learning_rate()
        for callback in self.callback_handler.callbacks:
            self._share_reference(callback)

    def _load(self, model: Any, args: Any, init: dict[str, Any], quantization_config: Any) -> Any:
        # The reference is loaded anew from its name: with a quantisation that the policy does not have.
        if quantization_config and not isinstance(model, str) and not self.added_tokens:
            raise ConfigError(
                f"quantization_config is given with a {type(model).__name__} that is loaded already. Quantise it on "
                "loading, or give the model as a string."
            )
        return super()._load(model, args, init, quantization_config)

    def add_callback(self, callback: Any) -> None:
        """As `transformers.Trainer.add_callback`; callbacks that move the reference are given it."""
        super().add_callback(callback)
        self._share_reference(self.callback_handler.callbacks[-1])

    def _share_reference(self, callback: Any) -> None:
        if hasattr(type(callback), "ref_model") and self.reference is not None and self.reference.copy is not None:
            callback.ref_model = self.reference.copy

    def _tell_learning_rate(self) -> None:
        default = type(self.args).__dataclass_fields__["learning_rate"].default
        if self.fresh_adapter and self.args.learning_rate == default:
            logger.warning(
                "learning_rate=%s is the default for all weights, and an adapter alone is trained: it learns little at that "
                "rate. About %s is usual.", default, 10 * default,
            )  # fmt: skip

    def _make_reference(self, given: nn.Module | None) -> None:
        args = self.args
        if given is None:
            tell_own_checkpoint(self.model)
        if args.precompute_ref_log_probs and given is None and not self.fresh_adapter:
            # The policy as it is now is the reference: no copy is needed.
            self.train_dataset = self._precompute(self.train_dataset, None, "train")
            self.eval_dataset = self._precompute_all(self.eval_dataset, None)
            return
        if given is not None and self.vision.images:
            self.vision.show(given)
        self.read_also_by(given)
        self.reference = Reference(self.model, fresh_adapter=self.fresh_adapter, given=given)
        if self.reference.copy is not None:
            self.reference.copy.to(args.device)
        if args.precompute_ref_log_probs:
            self.train_dataset = self._precompute(self.train_dataset, self.reference, "train")
            self.eval_dataset = self._precompute_all(self.eval_dataset, self.reference)
            if self.reference.copy is not None:  # Without a copy it costs nothing, and other sets may be evaluated.
                self.reference = None
        elif args.sync_ref_model:
            from posttrain.report.sync_reference import SyncRefModelCallback

            self.add_callback(SyncRefModelCallback(self.reference, self.accelerator))

    def _precompute_all(self, dataset: Any, reference: Reference | None) -> Any:
        if isinstance(dataset, dict):
            return {name: self._precompute(one, reference, name) for name, one in dataset.items()}
        return None if dataset is None else self._precompute(dataset, reference, "eval")

    def _precompute(self, dataset: Any, reference: Reference | None, name: str) -> Any:
        done = precomputed_logps(self, dataset, reference, self.reference_columns, name=name)
        if len(self.reference_columns) == 2:
            with self.checks.preflight.record_check("data", ("PT-P002",)):
                self.checks.report(
                    [reference_prefers_rejected(*(done[column][:] for column in self.reference_columns))]
                )
        return done

    @functools.cached_property
    def pairs(self) -> PairWatch:
        """Whether chosen answers are really better."""
        options = {"compared": self.compared, "given": not self._own_reference}
        return PairWatch(self.args, self.checks, self.processing_class, self.branches, **options)

    def check_data(self) -> None:
        """As every trainer's; then a reward model's opinion of pairs, where one is named."""
        super().check_data()
        self.pairs.agreement(self._raw, self.accelerator)

    def log_checks(self, logs: dict[str, float]) -> Iterable[Finding | None]:
        """What the rewards of pairs say."""
        yield from super().log_checks(logs)
        yield from self.pairs.log_checks(logs, self.state, self._raw, self.train_dataset)

    def compute_loss_terms(self, model: nn.Module, batch: Batch) -> tuple[LossTerms, ModelOutputs]:
        """As every trainer's; policy and reference are compared before the first update, and margins are kept."""
        terms, outputs = super().compute_loss_terms(model, batch)
        if self.compared and model.training:
            half = self.accelerator.mixed_precision != "no" or next(self.model.parameters()).dtype != torch.float32
            loss = float(terms.terms.detach().mean()) if self.state.global_step == 0 and self.starts_at_ln_2() else None
            known = {"step": self.state.global_step, "half": half, "loss": loss}
            ratio = lambda: self.sums(outputs.logp, batch) - self.reference_logp(batch)  # noqa: E731
            self.pairs.see(batch, ratio, **known, main=self.accelerator.is_main_process)
        return terms, outputs

    # Rows --------------------------------------------------------------------------------------------------------

    def answer_options(self) -> AnswerOptions:
        """How rows become ids."""
        return AnswerOptions(self.branches, self.args.max_length, self.args.truncation_mode, self.args.mask_inner_turns)

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """Tokenise one set, as `prepare_answers` does; check labels, and what came of the first rows of the training set."""
        if self.judged:
            dataset = extract_and_unpair(dataset, self.args.dataset_num_proc)
        keep = (*self.reference_columns, *self.keep, NUMBER)
        about: dict[str, Any] = {"name": name, "num_proc": self.args.dataset_num_proc, "keep": keep}
        if self.vision.reader is not None:
            prepared, self.reports[name] = self.vision.prepare_rows(dataset, branches=self.branches, **about)
        else:
            found = prepare_answers(dataset, self.processing_class, self.answer_options(), **about)
            prepared, self.reports[name] = found
        if self.judged and "label" not in (prepared.column_names or ["label"]):
            raise DataError(f"the {name} rows have no 'label'. Give True for good answers and False for bad ones.")
        if not hasattr(prepared, "select"):
            return prepared
        if self.judged:
            check_labels(prepared["label"][:], self.args, training=training)
        if training:
            sample = list(prepared.select(range(min(CHECKED_ROWS, len(prepared)))))
            options = {"limit": self.args.max_length, "stops": terminal_token_ids(self.processing_class)}
            with self.checks.preflight.record_check("data", JUDGED_CODES if self.judged else PAIR_CODES):
                if self.judged:
                    self.checks.report([check_judged(self.rows(sample))])
                else:
                    self.checks.report(check_pairs(answer_rows(sample, self.branches[:2]), **options))
        return self.pairs.numbered(prepared) if training else prepared

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """See `answer_rows`; the label of a judged answer is a column."""
        if self.user_collator is not None:
            examples = unbatched_answers(self.user_collator(examples), examples, self.branches)
        columns = {"ref_logps": self.reference_columns} if self.compared else {}
        columns[ROW_NUMBER] = (ROW_NUMBER,) * len(self.branches)
        rows = answer_rows(examples, self.branches, columns)
        if self.judged:
            for index, (row, example) in enumerate(zip(rows, examples, strict=True)):
                row.sequence_columns["label"] = [float(as_label(example["label"], index))]
        return rows

    def named_counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Tokens of the likelihood term over the step."""
        if self.judged:
            return {}
        masks = (likelihood_mask(batch, len(self.branches), self.likelihood_branch) for batch in batches)
        return {"likelihood": float(sum(int(mask.sum()) for mask in masks))}

    def postprocess_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Margins of judged answers are the difference of two means, over whatever the window holds."""
        if not self.judged or not {"rewards/chosen", "rewards/rejected"} <= set(metrics):
            return metrics
        return metrics | {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}

    # Reference ---------------------------------------------------------------------------------------------------

    @property
    def ref_model(self) -> nn.Module | None:
        """The frozen model that is the reference; None where it is the policy with its adapter off, or is not kept.

        Setting it makes another frozen model the reference.
        """
        return None if self.reference is None else self.reference.copy

    @ref_model.setter
    def ref_model(self, model: nn.Module) -> None:
        check_given(self.model, model, None)
        self.read_also_by(model)
        self.reference = Reference(self.model, given=model.to(self.args.device))
        self._own_reference = False
        for callback in self.callback_handler.callbacks:
            self._share_reference(callback)

    def before_step(self, micro_batches: list[list[Batch]]) -> None:
        """The reference's log-probs, of batches that have been counted."""
        for batches in micro_batches:
            batches[:] = PreferenceTrainer.eval_batches(self, batches)

    def eval_batches(self, inputs: list[Batch]) -> list[Batch]:
        """Batches with the reference's log-probs."""
        ran = parallel.in_step(inputs, self.accelerator, self.spare_batch)
        return [batch for batch, counts in [(self.with_reference(one), counts) for one, counts in ran] if counts]

    @property
    def answers_per_row(self) -> int:
        """Each branch is a sequence."""
        return len(self.branches)

    def batches_of(self, examples: list[dict[str, Any]]) -> list[Batch]:
        """Examples as the batches whose log-probs the loss reads."""
        return self.data_collator(examples)

    def reference_key(self) -> dict[str, Any]:
        """Settings beyond data, weights and precision that move the reference's log-probs."""
        names = ("max_length", "truncation_mode", "mask_inner_turns")
        return {name: getattr(self.args, name) for name in names}

    def with_reference(self, batch: Batch) -> Batch:
        """Add ``ref_logp``, from the reference in eval mode and under the training precision."""
        if not self.compared or "ref_logps" in batch.columns:
            return batch
        if self.reference is None and (not self._own_reference or self.state.global_step):
            return batch
        batch = batch.to(self.args.device)
        # Before the first update a policy without another reference is its own.
        active = contextlib.nullcontext if self.reference is None else self.reference.active
        with self.inference() as policy, active(policy) as reference:
            logp = forward(reference, batch, chunk_size=self.args.logits_chunk_size).logp
        return replace(batch, ref_logp=logp)

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
        return sequence_logp(logp, batch)[0]

    def starts_at_ln_2(self) -> bool:
        """Whether the loss is exactly ln 2 as long as the policy is its own reference."""
        return False


class ReferenceFreeTrainer(PreferenceTrainer):
    """Answers by the policy's own likelihood: there is no reference to compare with."""

    compared: ClassVar[bool] = False
    reference_columns: ClassVar[tuple[str, ...]] = ()
    needs: frozenset[str] = frozenset({"logp", "entropy", "mean_logit"})

    def __init__(self, model: str | nn.Module, args: Any = None, **kwargs: Any) -> None:
        super().__init__(model, None, args, **kwargs)
