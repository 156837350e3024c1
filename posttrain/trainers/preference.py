"""Base class of trainers on pairs or labeled answers. It prepares the data and the reference model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sized
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import torch
from torch import nn

from posttrain.checks.pairs import (
    JUDGED_CODES,
    PAIR_CODES,
    PairWatch,
    check_judged,
    check_pairs,
    reference_prefers_rejected,
)
from posttrain.data.chat import terminal_token_ids
from posttrain.data.forest import unbatched_answers
from posttrain.data.formats import ROW as NUMBER
from posttrain.data.formats import PreparationReport, first_rows, read_columns
from posttrain.data.preference import AnswerOptions, answer_rows, check_numbers, extract_and_unpair, prepare_answers
from posttrain.errors import ArgumentTypeError, ConfigError, DataError
from posttrain.loop.build import PADDED_STEPS, user_override
from posttrain.loop.precompute import ReferenceSums, precomputed_logps, prepare_references, with_reference
from posttrain.loop.run import Hooks, Run
from posttrain.loop.sync_reference import SyncRefModelCallback
from posttrain.loop.trainer import PostTrainer
from posttrain.methods.preference import CHECKED_ROWS, AnswerMethod, check_labels
from posttrain.models.reference import Reference, check_reference, log_own_checkpoint
from posttrain.types import Batch, LossTerms, ModelOutputs, Row

if TYPE_CHECKING:
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)

# Names of trainer methods. If a user overrides one of them, the override may read or change per-token log-probs of the
# reference model.
SEE_REFERENCE = (*PADDED_STEPS, "objective", "comparison", "with_reference")
# Names of methods in the classes of `posttrain.methods`. If a user overrides one of them, the override may read or change
# per-token log-probs.
SUMS = {"sums", "reference_logp"}


def check_given(model: Any, ref_model: Any, tokenizer: Tokenizer, quantization_config: Any = None) -> None:
    """Check constructor arguments before anything is loaded."""
    if quantization_config and not isinstance(model, str):
        # A reference that is loaded by name would be quantized, but a policy that is already loaded is not.
        raise ConfigError(
            f"quantization_config cannot be applied to a {type(model).__name__} that is already loaded. Fix: quantize the "
            "model when you load it, or pass the model as a string."
        )
    if isinstance(ref_model, str):
        raise ArgumentTypeError(
            f"ref_model={ref_model!r} must be a loaded model. Fix: load it with create_model_from_path({ref_model!r}), or "
            "remove ref_model to use the initial weights of the model as reference."
        )
    if ref_model is not None:
        check_reference(ref_model, model)
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise ArgumentTypeError(
            f"processing_class must be a tokenizer, not {type(tokenizer).__name__}. Fix: load a tokenizer with "
            "AutoTokenizer.from_pretrained, or remove processing_class to use the model's own tokenizer."
        )


class PreferenceTrainer(PostTrainer):
    """Base class of trainers that compare answers to a prompt, or train on labeled answers.

    The answers to a prompt form a prefix tree, so each model computes the prompt only once. See `AnswerMethod`.
    """

    METHOD: ClassVar[type[AnswerMethod[Any]]]
    method: AnswerMethod[Any]
    args: Any

    def __init__(
        self,
        model: str | nn.Module,
        ref_model: nn.Module | None = None,
        args: PostTrainingConfig | None = None,
        **kwargs: Any,
    ) -> None:
        check_given(model, ref_model, kwargs.get("processing_class"), kwargs.get("quantization_config"))
        self.reports: dict[str, PreparationReport] = {}
        self._own_reference = ref_model is None
        super().__init__(model, args, **kwargs)
        if self.method.traits.compares_reference:
            self._make_reference(ref_model)
            self.progress.watchers["pass"] = [self._compare_first_pass]
            self.add_callback(self.reference_sums["train"])
        self._warn_learning_rate()
        for callback in self.callback_handler.callbacks:
            self._share_reference(callback)

    def add_callback(self, callback: Any) -> None:
        """Add a callback as in `transformers.Trainer`. If the callback updates the reference, pass the reference to it."""
        super().add_callback(callback)
        self._share_reference(self.callback_handler.callbacks[-1])

    def _share_reference(self, callback: Any) -> None:
        if hasattr(type(callback), "ref_model") and self.reference is not None and self.reference.copy is not None:
            callback.ref_model = self.reference.copy

    def _warn_learning_rate(self) -> None:
        default = type(self.args).__dataclass_fields__["learning_rate"].default
        if self.fresh_adapter and self.args.learning_rate == default:
            logger.warning(
                "learning_rate=%s is the default for training all weights. At this rate, an adapter learns little. A learning "
                "rate of about %s is usual for adapters.", default, 10 * default,
            )  # fmt: skip

    def _make_reference(self, ref_model: nn.Module | None) -> None:
        args = self.args
        if ref_model is None:
            log_own_checkpoint(self.model)
        if args.precompute_ref_log_probs and ref_model is None and not self.fresh_adapter:
            # No reference is loaded, because the policy with its initial weights is the reference.
            self.train_dataset = self._precompute(self.train_dataset, None, "train")
            self.eval_dataset = self._precompute_all(self.eval_dataset, None)
            return
        if ref_model is not None and self.vision.images:
            self.vision.show(ref_model)
        self.read_also_by(ref_model)
        self.reference = Reference(self.model, fresh_adapter=self.fresh_adapter, given=ref_model)
        if self.reference.copy is not None:
            self.reference.copy.to(args.device)
        if args.precompute_ref_log_probs:
            self.train_dataset = self._precompute(self.train_dataset, self.reference, "train")
            self.eval_dataset = self._precompute_all(self.eval_dataset, self.reference)
            # Release a separate copy of the model. A reference that shares the policy's weights needs no additional memory,
            # so keep it for further evaluation sets.
            if self.reference.copy is not None:
                self.reference = None
        elif args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(self.reference, self.accelerator))

    def _precompute_all(self, dataset: AnyDataset, reference: Reference | None) -> Any:
        if isinstance(dataset, dict):
            return {name: self._precompute(subset, reference, name) for name, subset in dataset.items()}
        return None if dataset is None else self._precompute(dataset, reference, "eval")

    def _precompute(self, dataset: AnyDataset, reference: Reference | None, name: str) -> Any:
        done = precomputed_logps(
            self.run, dataset, reference, self.method.reference_columns, name=name, batches_of=self.batches_of
        )
        if len(self.method.reference_columns) == 2:
            with self.checks.preflight.record_check("data", ("PT-P002",)):
                self.checks.report(
                    [reference_prefers_rejected(*(done[column][:] for column in self.method.reference_columns))]
                )
        return done

    @functools.cached_property
    def reference_sums(self) -> dict[str, ReferenceSums]:
        """Caches of the reference's summed log-probs. The key is the mode. The cache for training is exchanged between ranks
        and saved in checkpoints.
        """
        return {"train": ReferenceSums(self.run), "eval": ReferenceSums(self.run)}

    @functools.cached_property
    def pairs(self) -> PairWatch:
        """Checks of pairs that compare chosen with rejected answers, for example their rewards."""
        options = {"compared": self.method.traits.compares_reference, "given": not self._own_reference}
        return PairWatch(self.args, self.checks, self.processing_class, self.method.branches, **options)

    def check_data(self) -> None:
        """Check the data. If a reward model is set, compare its preferences with the labels too."""
        super().check_data()
        self.pairs.agreement(self._raw, self.accelerator)

    def _compare_first_pass(self, batch: Batch, terms: LossTerms, outputs: ModelOutputs) -> bool:
        """Compare policy and reference in the first training pass, before the first update."""
        if not self.model.training:
            return True
        if self.state.global_step == 0:
            half = self.accelerator.mixed_precision != "no" or next(self.model.parameters()).dtype != torch.float32
            loss = float(terms.terms.detach().mean()) if self.method.starts_at_ln_2() else None
            ratio = lambda: self.method.sums(outputs.logp, batch) - self.method.reference_logp(batch)  # noqa: E731
            self.pairs.first_pass(batch, ratio, half=half, loss=loss)
        return False

    # Rows --------------------------------------------------------------------------------------------------------

    def answer_options(self) -> AnswerOptions:
        """Return the options for converting rows to token ids."""
        args = self.args
        most = vars(args).get("max_prompt_length")  # Only the config of an older release has this option.
        return AnswerOptions(self.method.branches, args.max_length, args.truncation_mode, args.mask_inner_turns, most)

    def prepare(self, dataset: AnyDataset, name: str, *, training: bool = False) -> Any:
        """Tokenize a dataset with `prepare_answers`. Check its labels and its reference log-probs."""
        columns = self.method.reference_columns
        check_numbers(dataset, columns, name)
        if self.method.judged:
            dataset = extract_and_unpair(dataset, self.args.dataset_num_proc)
        if training and columns and self.args.sync_ref_model and set(columns) <= set(dataset.column_names or ()):
            raise ConfigError(
                f"sync_ref_model=True changes the reference, but the columns {list(columns)} of the {name} rows contain fixed "
                "log-probs of the reference. Fix: remove the columns, or set sync_ref_model=False."
            )
        keep = (*columns, *self.method.keep, NUMBER)
        about: dict[str, Any] = {"name": name, "num_proc": self.args.dataset_num_proc, "keep": keep}
        if self.vision.reader is not None:
            if self.answer_options().max_prompt_length:
                raise ConfigError(
                    "max_prompt_length would remove images from prompts. Fix: remove the option, or shorten the "
                    "prompts."
                )
            prepared, self.reports[name] = self.vision.prepare_rows(dataset, branches=self.method.branches, **about)
        else:
            prepared_set = prepare_answers(dataset, self.processing_class, self.answer_options(), **about)
            prepared, self.reports[name] = prepared_set
        if self.method.judged and "label" not in (prepared.column_names or ["label"]):
            raise DataError(
                f"the {name} rows have no column 'label'. Add it with True for good and False for bad answers."
            )
        if not isinstance(prepared, datasets.Dataset):
            return prepared
        if self.method.judged:
            check_labels(read_columns(prepared, ["label"])["label"], self.args, training=training)
        if training:
            sample = list(first_rows(prepared, CHECKED_ROWS))
            options = {"limit": self.args.max_length, "stops": terminal_token_ids(self.processing_class)}
            with self.checks.preflight.record_check("data", JUDGED_CODES if self.method.judged else PAIR_CODES):
                if self.method.judged:
                    self.checks.report([check_judged(self.rows(sample))])
                else:
                    self.checks.report(check_pairs(answer_rows(sample, self.method.branches[:2]), **options))
        return prepared

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert examples to rows with `AnswerMethod.rows`. A user's data collator is called first."""
        if self.user_collator is not None:
            examples = unbatched_answers(self.user_collator(examples), examples, self.method.branches)
        return super().rows(examples)

    # Reference ---------------------------------------------------------------------------------------------------

    @property
    def ref_model(self) -> nn.Module | None:
        """The frozen reference model. None: the reference is the policy without its adapter, or it was released.

        Assigning a model replaces the reference.
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

    def _hooks(self) -> Hooks:
        hooks = super()._hooks()
        if not self.method.traits.compares_reference:
            return hooks
        cached = dict(self.reference_sums) if self._reads_sums() else {}
        # Do not cache values of a stream, because a stream may never repeat its rows.
        if not isinstance(self.train_dataset, Sized):
            cached.pop("train", None)
        if not self.is_in_train:
            cached.pop("eval", None)
        return replace(hooks, prepare=partial(prepare_references, kept=cached, refer=self._refer()))

    def _refer(self) -> Callable[[Run, Batch], Batch]:
        own = self._replaced(PreferenceTrainer, "with_reference", None)
        return partial(with_reference, own=self._own_reference) if own is None else lambda run, batch: own(batch)

    def _reads_sums(self) -> bool:
        """Return whether summed log-probs of the reference are sufficient. This is the case if no code of the user may need
        the log-prob of each token.
        """
        own = any(name in vars(self) or user_override(type(self), name) for name in SEE_REFERENCE)
        own |= type(self.method).__module__.split(".")[0] != "posttrain" or bool(SUMS & vars(self.method).keys())
        return not own

    def state_to_save(self) -> dict[str, Any]:
        """Return the state of the trainer, including the cached reference sums."""
        sums = self.reference_sums["train"]
        return super().state_to_save() | ({"reference": sums.state()} if sums.sums else {})

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_to_save` returned."""
        super().load_saved_state(state)
        if "reference" in state:
            self.reference_sums["train"].load_state(state["reference"])

    def batches_of(self, examples: list[dict[str, Any]]) -> list[Batch]:
        """Collate examples into batches, for which reference log-probs are computed."""
        return self.data_collator(examples)

    def with_reference(self, batch: Batch) -> Batch:
        """Return the batch with ``ref_logp`` and its sums; see `posttrain.loop.precompute.with_reference`."""
        return with_reference(self.run, batch, own=self._own_reference)
