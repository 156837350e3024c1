"""Methods that a subclass overrides by TRL's names: an adapter calls them, or they are refused with the hook to use.

`adapt` is the one door: a trainer of a class of this package never comes here. Refused names are rows of `REFUSED`; names
that our own loop calls need no row; for the rest an adapter is put around the class of that one trainer.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from posttrain.errors import ConfigError
from posttrain.training.config import PADDED_STEPS, user_override, with_attributes

if TYPE_CHECKING:
    from posttrain.training.trainer import PostTrainer as Trainer
else:
    Trainer = object

# Accepted without a word: TRL sends figures of use with it, and nothing is sent here.
SILENT = ("_send_telemetry",)

LOSS = "objective(outputs, batch), which returns unreduced LossTerms"
PREPARE = "prepare(dataset, name, *, training)"
SAMPLE = "sample(prompts, sampling)"
SCORE = "score(generation, mode)"
ENGINE = "an engine of your own, passed as rollout_engine, whose load_weights does it"
TRANSFER = "weight_transfer, an object with send_weights"
FORWARD = "compute_loss_terms(model, batch)"

# By our class: TRL's method -> the hook that does its job. A subclass inherits the rows of its bases.
GROUPED = {
    "compute_liger_loss": LOSS,
    "_get_per_token_logps_and_entropies": f"{FORWARD} for the policy, logps(model, rows) for older weights",
    "get_off_policy_mask": LOSS,
    "get_gamma_weights": LOSS,
    "get_high_entropy_mask": LOSS,
    "_tool_call_loop": "roll_out(examples, mode), or pass rollout_func",
    "_get_tool_suffix_ids": "roll_out(examples, mode), or pass rollout_func",
    "_log_metric": "log_metrics_now(metrics, mode)",
    "_log_completion_extra": "completion_rows(generation, table)",
}
REFUSED: dict[str, dict[str, str]] = {
    "SFTTrainer": {"_reject_skip_prepare_without_labels": PREPARE},
    "PreferenceTrainer": {
        "_precompute_ref_logps": "with_reference(batch), or give rows the columns of precompute_ref_log_probs",
        "compute_ref_log_probs": "with_reference(batch)",
        "_compute_kl_logps": LOSS,
        "_shift_right": FORWARD,
        "build_tokenized_answer": PREPARE,
        "tokenize_row": PREPARE,
        "concatenated_inputs": "rows(examples)",
        "concatenated_forward": FORWARD,
        "get_batch_logps": "sums(logp, batch)",
        "get_batch_loss_metrics": LOSS,
        "cpo_loss": LOSS,
        "odds_ratio_loss": LOSS,
        "generate_from_model": "LogCompletionsCallback",
        "store_metrics": "log_metrics_now(metrics, mode)",
    },
    "GRPOTrainer": GROUPED,
    "RLOOTrainer": GROUPED,
    "A2POTrainer": {
        "_calculate_rewards": SCORE,
        "_estimate_optimal_values": "estimate_values(sets)",
        "_get_sequence_logps": LOSS,
    },
    "AsyncGRPOTrainer": {
        "_init_lora_sync": TRANSFER,
        "_log_step_metrics": "postprocess_metrics(metrics)",
        "_streaming_iter": "micro_batch(inputs, index)",
        "_sync_weight": TRANSFER,
        "_sync_weight_lora": TRANSFER,
        "_sync_weight_merged": TRANSFER,
    },
    "OnlineDPOTrainer": {
        "_calculate_rewards_from_functions": SCORE,
        "_enable_gradient_checkpointing": "gradient_checkpointing_kwargs of the config",
        "_fix_param_name_to_vllm": ENGINE,
        "_forward": FORWARD,
        "_generate": SAMPLE,
        "_generate_vllm": SAMPLE,
        "_generate_vllm_colocate": SAMPLE,
        "_generate_vllm_server": SAMPLE,
        "_move_model_to_vllm": ENGINE,
        "_move_model_to_vllm_inner": ENGINE,
        "_sync_fsdp1_params_to_vllm": ENGINE,
        "_sync_fsdp2_params_to_vllm": ENGINE,
        "process_vision_row": "tokenize(examples)",
    },
}


def hook_for(cls: type, name: str) -> str | None:
    """What does the job of a method of TRL's that is never called in a trainer; None where it is called."""
    return next((rows[name] for base in cls.__mro__ if name in (rows := REFUSED.get(base.__name__, {}))), None)


def missing(cls: type, name: str) -> AttributeError:
    """The error for an attribute that a trainer does not have; of a method of TRL's it names the hook."""
    hook = hook_for(cls, name)
    fix = "" if hook is None else f": TRL's method has no twin here. Fix: use {hook} (docs/hooks.md)."
    return AttributeError(f"{cls.__name__!r} object has no attribute {name!r}{fix}", name=name)


def table() -> str:
    """Refused methods as Markdown, for the page on hooks."""
    lines = ["| trainer | method of TRL's | use instead |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{cls}` | `{name}` | {hook} |" for cls, rows in REFUSED.items() for name, hook in rows.items())]
    )


def adapt(trainer: Any) -> None:
    """Refuse what would never be called; put adapters around the class of this trainer for what must be called.

    Args:
        trainer: Of a user's class, before its model is loaded.

    Raises:
        ConfigError: A method of `REFUSED` is overridden: names it, its class, and the hook.
    """
    bases = {base.__name__ for base in type(trainer).__mro__ if base.__module__.split(".")[0] == "posttrain"}
    for name in dict.fromkeys(name for base in type(trainer).__mro__ for name in REFUSED.get(base.__name__, {})):
        if owner := user_override(trainer, name):
            raise ConfigError(
                f"{owner.__name__} overrides {name}, which is never called here: rows share their prompts, and nothing is "
                f"padded. Fix: use {hook_for(type(trainer), name)} instead (docs/hooks.md)."
            )
    before: list[type] = []
    behind: list[type] = []
    if any(user_override(trainer, name) for name in PADDED_STEPS):
        from posttrain.compat import padded_loss

        padded_loss.tell_cost(trainer)
        before, behind = [padded_loss.BeforeUser], [padded_loss.BehindUser]
    if {"GRPOTrainer", "RLOOTrainer"} & bases:
        from posttrain.compat import grpo_overrides

        if before or any(user_override(trainer, name) for name in grpo_overrides.TAKEN):
            behind.append(grpo_overrides.GRPOOverrides)
    if user_override(trainer, "_prepare_dataset"):
        behind.append(OwnPreparation)
    if behind:
        trainer.__class__ = _between(type(trainer), tuple(before), tuple(behind))


@functools.cache
def _between(cls: type, before: tuple[type, ...], behind: tuple[type, ...]) -> type:
    """``cls`` between adapters; those behind it stand before our own classes, so that its ``super()`` reaches them."""
    ours = next(base for base in cls.__mro__ if base.__module__.split(".")[0] == "posttrain")
    for adapter in reversed(behind):
        ours = type(adapter.__name__, (adapter, ours), {"__module__": adapter.__module__})
    return type(cls.__name__, (*before, cls, ours), {"__module__": cls.__module__, "__doc__": cls.__doc__})


class OwnPreparation(Trainer):
    """Calls a subclass's ``_prepare_dataset``, and gives its ``super()`` our `prepare`."""

    _current: tuple[str, bool] = ("eval", False)
    _by_parent = False

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """Through ``_prepare_dataset``; rows that it did not tokenise are tokenised afterwards."""
        self._current, self._by_parent = (name, training), False
        more = (self._packs(training), self.formatting_func) if hasattr(self, "formatting_func") else ()
        prepared = self._prepare_dataset(dataset, self.processing_class, self.args, *more, name)
        return prepared if self._by_parent else super().prepare(prepared, name, training=training)

    def _packs(self, training: bool) -> Any:
        evaluation = getattr(self.args, "eval_packing", None)
        return self.args.packing if training or evaluation is None else evaluation

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *more: Any, **named: Any) -> Any:
        """TRL's: tokenise one set with what is given here, whatever the trainer itself has."""
        known = (
            ("packing", "formatting_func", "dataset_name") if hasattr(self, "formatting_func") else ("dataset_name",)
        )
        values = dict(zip(known, more, strict=False)) | named
        name, training = self._current
        given = {"processing_class": processing_class, "args": args}
        if "packing" in values and values["packing"] != self._packs(training):
            given["args"] = args = copy.copy(args)
            args.packing = args.eval_packing = values["packing"]
        if "formatting_func" in values:
            given["formatting_func"] = values["formatting_func"]
        with with_attributes(self, given):
            prepared = super().prepare(dataset, values.get("dataset_name", name), training=training)
        self._by_parent = True
        return prepared
