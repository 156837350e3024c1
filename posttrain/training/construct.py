"""What happens before a trainer trains: arguments are checked, the model is loaded, prepared and laid out."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import datasets
import transformers

from posttrain.data.forest import Layout
from posttrain.data.samplers import with_lengths
from posttrain.errors import ArgumentTypeError, ConfigError, DataError
from posttrain.models.activations import check_offloading
from posttrain.models.attention import padded_layout, probe_head, probe_layout
from posttrain.models.forward import install_token_head, learns_prompts
from posttrain.models.heads import train_new_tokens, train_score_head
from posttrain.models.load import check_model_source, wrap_with_peft
from posttrain.models.reference import disable_dropout_in_model
from posttrain.report.record import check_writable
from posttrain.training.checks import Checks, log_codes

if TYPE_CHECKING:
    from posttrain.training.trainer import PostTrainer

__all__ = [
    "absent",
    "check_arguments",
    "check_hooks",
    "choose_layout",
    "loading_options",
    "make_checks",
    "measured",
    "prepared_model",
    "user_override",
    "warn_of_unused",
]

logger = logging.getLogger(__name__)


def check_arguments(trainer: type, model: Any, args: Any, train_dataset: Any, collator: Any) -> None:
    """Refuse what cannot be trained before anything is loaded.

    Args:
        trainer: The trainer's class: its ``config_class``, ``takes_collator`` and ``generative``.
        model: As it was given.
        args: As it was given.
        train_dataset: As it was given.
        collator: The user's ``data_collator``.

    Raises:
        ArgumentTypeError: ``args`` or ``train_dataset`` is of another type.
        ConfigError: A collator that has no place, a stream without ``max_steps``.
        DataError: There is no training set.
    """
    name: str = trainer.__name__
    if not isinstance(args, transformers.TrainingArguments):
        raise ArgumentTypeError(f"args must be a {trainer.config_class.__name__}, not {type(args).__name__}.")  # type: ignore[attr-defined]
    if collator is not None and not trainer.takes_collator:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{name} makes its own batches of tokenised rows, and data_collator={collator!r:.80} "
            "has no place there. Leave it out; pad_to_multiple_of and max_row_tokens shape batches."
        )
    if train_dataset is None:
        raise DataError(f"{name} needs train_dataset, and it is None.")
    if not isinstance(train_dataset, datasets.Dataset | datasets.IterableDataset):
        hint = " Pass one split of it: dataset['train']." if isinstance(train_dataset, dict) else ""
        raise ArgumentTypeError(f"train_dataset must be a datasets.Dataset, not {type(train_dataset).__name__}.{hint}")
    if isinstance(train_dataset, datasets.IterableDataset):
        if args.max_steps <= 0:
            raise ConfigError("a streaming train_dataset has no length: set max_steps (it is not set).")
        if args.accelerator_config.dispatch_batches:
            logger.warning("dispatch_batches=True with a streaming train_dataset is set to False: ranks read alone.")
        args.accelerator_config.dispatch_batches = False
    check_offloading(args)
    check_writable(args.output_dir)
    check_model_source(model, generative=trainer.generative)  # type: ignore[attr-defined]


def warn_of_unused(given: Mapping[str, Any]) -> None:
    """Warn of options for loading where the model was given as an object."""
    for name in [name for name, value in given.items() if value]:
        logger.warning("%s is ignored: the model was given as an object, already loaded.", name)


def loading_options(args: Any, init: dict[str, Any], quantization_config: Any) -> dict[str, Any]:
    """Keywords for ``from_pretrained``.

    Raises:
        ConfigError: ``quantization_config`` is given twice.
    """
    if quantization_config is not None and init.get("quantization_config") is not None:
        raise ConfigError("quantization_config is given both as an argument and in model_init_kwargs. Give it once.")
    if quantization_config is not None:
        init["quantization_config"] = quantization_config
    init.setdefault("trust_remote_code", args.trust_remote_code)
    return init


def prepared_model(model: Any, args: Any, peft_config: Any, *, added_tokens: Sequence[int], generative: bool) -> Any:
    """The model with its adapter, without dropout where that is asked for, and with a head for chosen tokens.

    Args:
        model: As it was loaded.
        args: The trainer's config.
        peft_config: Of a new adapter, or None.
        added_tokens: New rows of the vocabulary, which are trained beside an adapter.
        generative: Whether it has a language-model head; else its score head is trained.
    """
    if args.disable_dropout:
        disable_dropout_in_model(model)
    peft_config = train_new_tokens(peft_config, model, list(added_tokens))
    if not generative:
        peft_config = train_score_head(peft_config, model)
    checkpointing = bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)
    model = wrap_with_peft(model, peft_config, activation_checkpointing=checkpointing)
    install_token_head(model)
    return model


def choose_layout(model: Any, args: Any, *, padded: bool) -> Layout:
    """How rows are laid out for this model: trees where a probe shows that they are exact, else one sequence a row.

    Args:
        model: Ready to run.
        args: ``max_row_tokens``, ``pad_to_multiple_of``.
        padded: Whether something wants one sequence a row; virtual tokens do in any case.
    """
    probe_head(model)
    layout = padded_layout(model) if padded or learns_prompts(model) else probe_layout(model)
    if args.max_row_tokens is not None:
        layout = replace(layout, row_tokens=args.max_row_tokens)
    multiple = getattr(args, "pad_to_multiple_of", None)
    return replace(layout, pad_to_multiple_of=multiple) if multiple else layout


def make_checks(trainer: PostTrainer, args: Any) -> Checks:
    """The checks of a run, before its model is there.

    Args:
        trainer: With its ``processing_class``; rewards and environments where the method has them.
        args: The trainer's config.
    """
    checks = Checks(
        args,
        trainer=type(trainer).__name__.removesuffix("Trainer").lower(),
        ignored_codes=trainer.ignored_codes,
        log_codes=log_codes(trainer.check_area, trainer.excluded_codes),
        zero_gradient_is_normal=trainer.zero_gradient_is_normal,
        fills_prompts=getattr(trainer, "environments", None) is not None,
    )
    checks.log_checks.append(trainer.log_checks)
    parts = {"trainer": trainer, "rewards": getattr(trainer, "rewards", None)}
    checks.knows(tokenizer=trainer.processing_class, parts=parts)
    return checks


# Steps of transformers' and TRL's trainers whose overrides are written for dicts of padded tensors.
PADDED_STEPS = ("compute_loss", "training_step", "prediction_step", "_compute_loss", "_prepare_inputs")


def user_override(trainer: Any, name: str) -> type | None:
    """The class outside this package that defines ``name`` for a trainer; None where the package's own is in force."""
    if name in vars(trainer):
        return type(trainer)
    # Adapters of compat/ stand around a user's class and take nothing away from it.
    classes = [cls for cls in type(trainer).__mro__ if not cls.__module__.startswith("posttrain.compat.")]
    owner = next((cls for cls in classes if name in vars(cls)), None)
    return None if owner is None or owner.__module__.split(".")[0] in ("posttrain", "transformers") else owner


def check_hooks(trainer: Any, compute_loss_func: Any) -> None:
    """Refuse a loss function or an override that would not be called; adapt to methods by TRL's names.

    Raises:
        ConfigError: Names the class and what to override instead.
    """
    if compute_loss_func is not None and not trainer.takes_loss_func:
        raise ConfigError(
            f"compute_loss_func is given, and {type(trainer).__name__} would not call it: its loss compares sequences, and "
            "never holds logits. Fix: override objective(outputs, batch) in a subclass (docs/hooks.md)."
        )
    if type(trainer).__module__.split(".")[0] != "posttrain":
        # The one door to compat/: nothing stands before the calls of a trainer that overrides none of TRL's names.
        importlib.import_module("posttrain.compat.overrides").adapt(trainer)


# Public methods of TRL's trainers that ours lack; compat/ knows what does their job.
PUBLIC_IN_TRL = {
    "build_tokenized_answer",
    "compute_liger_loss",
    "compute_ref_log_probs",
    "concatenated_forward",
    "concatenated_inputs",
    "cpo_loss",
    "generate_from_model",
    "get_batch_logps",
    "get_batch_loss_metrics",
    "get_gamma_weights",
    "get_high_entropy_mask",
    "get_off_policy_mask",
    "odds_ratio_loss",
    "process_vision_row",
    "store_metrics",
    "tokenize_row",
}


def absent(trainer: Any, name: str) -> Any:
    """Raise the error for an attribute that a trainer does not have; of a method of TRL's it names the hook.

    Raises:
        AttributeError: Always, but for a property that read what was not there: its own error comes out again.
    """
    found = inspect.getattr_static(type(trainer), name, None)
    if isinstance(found, property | functools.cached_property):
        return found.__get__(trainer, type(trainer))
    if name not in PUBLIC_IN_TRL:
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}", name=name)
    raise importlib.import_module("posttrain.compat.overrides").missing(type(trainer), name)


def measured(dataset: Any, args: Any) -> Any:
    """The dataset with the lengths of its rows, where the sampling strategy wants rows of like length."""
    if args.train_sampling_strategy not in ("group_by_length", "batch_rebalance"):
        return dataset
    return with_lengths(dataset, args.length_column_name)
