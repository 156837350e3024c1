"""What methods share that learn from answers which were compared or judged: answers as trees, and their reference."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from posttrain.algorithms.base import PostTrainer
from posttrain.algorithms.config import PostTrainingConfig, refuse_cut_sequences
from posttrain.algorithms.pair_health import ROW_NUMBER, PairHealthMixin
from posttrain.checks.pairs import PAIR_CODES, check_pairs
from posttrain.checks.preference import reference_prefers_rejected
from posttrain.data.chat import terminal_token_ids
from posttrain.data.preferences import AnswerOptions, AnswerReport, answer_rows, prepare_answers
from posttrain.errors import ArgumentTypeError, ConfigError, check_choice
from posttrain.losses.reduce import sequence_lengths, sequence_sum
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.precompute import precomputed_logps
from posttrain.models.reference import Reference, check_reference, tell_own_checkpoint
from posttrain.types import Batch, ModelOutputs, Row

__all__ = [
    "AnswerConfig",
    "ComparedConfig",
    "PreferenceTrainer",
    "answer_mask",
    "check_given",
    "logit_metrics",
    "pair_metrics",
    "refuse_removed",
    "sequence_logp",
]

logger = logging.getLogger(__name__)

CHECKED_ROWS = 1000


def refuse_removed(removed: Mapping[str, str]) -> Callable[[type], type]:
    """A class decorator for configs: options of the past are refused with what replaced them, not as unknown names."""

    def decorate(cls: type) -> type:
        original: Any = cls.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name in removed:
                    raise ConfigError(f"{cls.__name__} has no option {name!r} any more: {removed[name]}.")
            original(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate


@dataclass
class AnswerConfig(PostTrainingConfig):
    """Fields of every method on given answers."""

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate; about 1e-5 for LoRA."})
    disable_dropout: bool = field(default=True, metadata={"help": "Set every dropout to 0."})
    max_length: int | None = field(
        default=1024, metadata={"help": "Tokens of prompt and answer, at least 2; None never cuts."}
    )
    truncation_mode: Literal["keep_start", "keep_end"] = field(
        default="keep_start", metadata={"help": "Which end of a long answer is kept."}
    )
    mask_inner_turns: bool = field(
        default=False, metadata={"help": "Turns of the user or of tools within an answer have no loss."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the dataset."})
    pad_to_multiple_of: int | None = field(default=None, metadata={"help": "Rounds row widths up."})
    beta: float = field(default=0.1, metadata={"help": "Strength of the tie to the reference, above 0."})
    pair_reward_model: str | None = field(
        default=None, metadata={"help": "A reward model that up to 512 pairs are shown to: how often does it agree?"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_cut_sequences(self, "answers that share their prompt")
        check_choice("truncation_mode", self.truncation_mode, ("keep_start", "keep_end"))
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length={self.max_length} leaves no room for a prompt and an answer; at least 2.")
        if not isinstance(self.beta, int | float) or not self.beta > 0:
            raise ConfigError(
                f"beta={self.beta!r} must be above 0, as a number: with 0 the loss is constant, and some losses divide by it."
            )


@dataclass
class ComparedConfig(AnswerConfig):
    """Fields of every method that compares the policy with a reference."""

    precompute_ref_log_probs: bool = field(
        default=False, metadata={"help": "Compute the reference's log-probs once, before training, and free it."}
    )
    precompute_ref_batch_size: int | None = field(default=None, metadata={"help": "Rows a pass; None: as in training."})
    sync_ref_model: bool = field(default=False, metadata={"help": "Let the reference follow the policy (TR-DPO)."})
    ref_model_mixup_alpha: float = field(default=0.6, metadata={"help": "Share of the policy in a sync, in (0, 1]."})
    ref_model_sync_steps: int = field(default=512, metadata={"help": "Optimiser steps between two syncs."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ConfigError(
                "sync_ref_model=True moves the reference, whose log-probs precompute_ref_log_probs=True fixes."
            )
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ConfigError(f"ref_model_mixup_alpha={self.ref_model_mixup_alpha} must be in (0, 1].")
        if self.ref_model_sync_steps < 1:
            raise ConfigError(f"ref_model_sync_steps={self.ref_model_sync_steps} must be at least 1.")


def sequence_logp(logp: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Summed log-probs ``(S,)`` of the completions, and how many tokens they have, ``(S,)`` float."""
    total = sequence_sum(logp.float(), batch.loss_mask, batch.sequence, batch.num_sequences)
    return total, sequence_lengths(batch.loss_mask, batch.sequence, batch.num_sequences)


def check_given(config: type, model: Any, ref_model: Any, args: Any, tokenizer: Any) -> None:
    """Refuse arguments of a constructor that cannot work, before anything is loaded."""
    if isinstance(ref_model, str):
        raise ArgumentTypeError(
            f"ref_model={ref_model!r} must be a loaded model. Load it with create_model_from_path({ref_model!r}), or leave "
            "it out to take the weights of the model itself."
        )
    if ref_model is not None and ref_model is model:
        raise ConfigError(
            "ref_model is the model itself, so both would move together. Leave it out to take a frozen copy."
        )
    if args is not None and not isinstance(args, config):
        raise ArgumentTypeError(f"args must be a {config.__name__}, not {type(args).__name__}.")
    if ref_model is not None:
        check_reference(ref_model)
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise ArgumentTypeError(
            f"processing_class must be a tokenizer, not {type(tokenizer).__name__}. Load it with "
            "AutoTokenizer.from_pretrained, or leave it out to take the model's own."
        )


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
    (policy_c, policy_r), _, (length_c, length_r), _ = pairs
    return {
        "rewards/chosen": mean(rewards[0]),
        "rewards/rejected": mean(rewards[1]),
        "rewards/margins": mean(rewards[0] - rewards[1]),
        "rewards/accuracies": mean((rewards[0] > rewards[1]).float()),
        "logps/chosen": mean(policy_c),
        "logps/rejected": mean(policy_r),
        "completions/chosen_length": mean(length_c),
        "completions/rejected_length": mean(length_r),
        "entropy": mean(out.entropy, batch.loss_mask),  # type: ignore[arg-type]
        "mean_token_accuracy": mean(out.correct.float(), chosen),  # type: ignore[union-attr]
        **logit_metrics(out, chosen=chosen, rejected=rejected),
    }


class PreferenceTrainer(PairHealthMixin, PostTrainer):
    """Answers to a shared prompt are one tree, computed once by the policy and once by the reference.

    A subclass gives ``branches`` (columns of the answers), ``compared`` (whether it needs a reference) and the objective.
    """

    signs_of: ClassVar[str] = "P"
    branches: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    compared: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = True
    reference_columns: ClassVar[tuple[str, ...]] = ("ref_chosen_logps", "ref_rejected_logps")
    keep: ClassVar[tuple[str, ...]] = ()
    args: Any

    def __init__(
        self, model: str | nn.Module, ref_model: nn.Module | None = None, args: Any = None, **kwargs: Any
    ) -> None:
        check_given(self.config_class, model, ref_model, args, kwargs.get("processing_class"))
        self.reports: dict[str, AnswerReport] = {}
        self.watch_pairs(ref_model)
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
        if args.precompute_ref_log_probs and given is None:
            # The policy as it is now is the reference: no copy is needed.
            self.train_dataset = self._precompute(self.train_dataset, None, "train")
            self.eval_dataset = self._precompute_all(self.eval_dataset, None)
            return
        self.reference = Reference(self.model, fresh_adapter=self.fresh_adapter, given=given)
        if self.reference.copy is not None:
            self.reference.copy.to(args.device)
        if args.precompute_ref_log_probs:
            self.train_dataset = self._precompute(self.train_dataset, self.reference, "train")
            self.eval_dataset = self._precompute_all(self.eval_dataset, self.reference)
            self.reference = None
        elif args.sync_ref_model:
            from posttrain.report.callbacks.sync_reference import SyncRefModelCallback

            self.add_callback(SyncRefModelCallback(self.reference, self.accelerator))

    def _precompute_all(self, dataset: Any, reference: Reference | None) -> Any:
        if isinstance(dataset, dict):
            return {name: self._precompute(one, reference, name) for name, one in dataset.items()}
        return None if dataset is None else self._precompute(dataset, reference, "eval")

    def _precompute(self, dataset: Any, reference: Reference | None, name: str) -> Any:
        done = precomputed_logps(self, dataset, reference, self.reference_columns, name=name)
        if len(self.reference_columns) == 2:
            with self.preflight.looking("data", ("PT-P002",)):
                self.tell([reference_prefers_rejected(*(done[column][:] for column in self.reference_columns))])
        return done

    # Rows --------------------------------------------------------------------------------------------------------

    def answer_options(self) -> AnswerOptions:
        """How rows become ids."""
        return AnswerOptions(self.branches, self.args.max_length, self.args.truncation_mode, self.args.mask_inner_turns)

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """Tokenise one set, as `prepare_answers` does, and look at what came of it."""
        prepared, self.reports[name] = prepare_answers(
            dataset,
            self.processing_class,
            self.answer_options(),
            name=name,
            num_proc=self.args.dataset_num_proc,
            keep=(*self.reference_columns, *self.keep),
        )
        if training and hasattr(prepared, "select") and len(self.branches) > 1:
            sample = prepared.select(range(min(CHECKED_ROWS, len(prepared))))
            stops = terminal_token_ids(self.processing_class)
            with self.preflight.looking("data", PAIR_CODES):
                self.tell(check_pairs(answer_rows(sample, self.branches[:2]), limit=self.args.max_length, stops=stops))
        return self.numbered(prepared) if training else prepared

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """See `answer_rows`."""
        columns = {"ref_logps": self.reference_columns} if self.compared else {}
        columns[ROW_NUMBER] = (ROW_NUMBER,) * len(self.branches)
        return answer_rows(examples, self.branches, columns)

    # Reference ---------------------------------------------------------------------------------------------------

    def micro_batch(self, inputs: list[Batch], index: int) -> list[Batch]:
        """Batches with the reference's log-probs."""
        ran = parallel.in_step(inputs, self.accelerator, self.spare_batch)
        return [batch for batch, counts in [(self.with_reference(one), counts) for one, counts in ran] if counts]

    def eval_batches(self, inputs: list[Batch]) -> list[Batch]:
        """Batches with the reference's log-probs."""
        return PreferenceTrainer.micro_batch(self, inputs, 0)

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
        if self.reference is None or "ref_logps" in batch.columns:
            return batch
        batch = batch.to(self.args.device)
        with self.inference() as policy, self.reference.active(policy) as reference:
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
