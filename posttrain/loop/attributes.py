"""Access to trainer attributes by TRL's names. The tables in this module list where each value is stored, and which values
may change during training.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import transformers

if TYPE_CHECKING:
    from transformers import TrainerState

    from posttrain.data.forest import Layout
    from posttrain.loop.checks import Checks
    from posttrain.loop.media import Media
    from posttrain.loop.run import Progress, Run
    from posttrain.losses.reduce import Denominators
    from posttrain.methods.base import Method
    from posttrain.metrics import MetricBuffer
    from posttrain.models.reference import Reference

# Config fields that are read at every step, so that a change during training takes effect.
SETTABLE = frozenset({
    "alpha", "beta", "chat_template_kwargs", "cpo_alpha", "desirable_weight", "f_alpha_divergence_coef",
    "f_divergence_type", "label_smoothing", "loss_weights", "mask_truncated_completions", "max_completion_length", "min_p",
    "multi_objective_aggregation", "normalize_advantages", "num_completions_to_print", "padding_free",
    "repetition_penalty", "reward_clip_range", "scale_rewards", "simpo_gamma", "temperature", "top_k", "top_p", "tpo_alpha",
    "tpo_l_gamma", "undesirable_weight", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
})  # fmt: skip
# Attributes that are read only when the trainer is created, so that a later change has no effect.
FIXED = frozenset({
    "completion_only_loss", "generation_config", "generation_kwargs", "importance_sampling_level", "ld_alpha",
    "log_completions", "loss_type", "max_length", "num_generations", "num_generations_eval", "num_iterations",
    "pad_to_multiple_of", "precompute_ref_logps", "loss_types", "ref_model", "reward_func_names", "reward_funcs",
    "reward_processing_classes", "shuffle_dataset", "top_entropy_quantile", "truncation_mode", "use_vllm", "use_weighting",
    "vllm_gpu_memory_utilization", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_mode",
    "vllm_tensor_parallel_size",
})  # fmt: skip
# Attributes that are stored in other objects. The values are attribute paths that start at the trainer. Reading an attribute
# returns the first value that is not None. Setting an attribute sets the first path.
PATHS: dict[str, tuple[str, ...]] = {
    "chat_template": ("processing_class.chat_template",),
    "completion_only_loss": ("args.completion_only_loss", "prompts_are_given"),
    "epsilon_high": ("args.epsilon_high", "args.epsilon"),
    "epsilon_low": ("args.epsilon",),
    "generation_config": ("args.generation_config",),
    "loss_types": ("args.loss_type",),
    "num_generations_eval": ("args.num_generations_eval", "args.num_generations"),
    "precompute_ref_logps": ("args.precompute_ref_log_probs",),
    "ref_model": ("reference.copy",),
    "reward_func_names": ("rewards.names",),
    "reward_funcs": ("rewards.functions",),
    "reward_processing_classes": ("rewards.processing_classes",),
    "reward_weights": ("rewards.weights",),
    "tokenizer": ("processing_class",),
}
SET = SETTABLE | FIXED | set(PATHS)
OF_TRANSFORMERS = frozenset(transformers.TrainingArguments.__dataclass_fields__)


def of_run(name: str) -> Any:
    """Return a trainer property that gets and sets a field of `posttrain.loop.run.Run`."""
    return property(
        lambda trainer: getattr(trainer.run, name),
        lambda trainer, value: setattr(trainer, "run", replace(trainer.run, **{name: value})),
    )


def of_progress(name: str) -> Any:
    """Return a trainer property that gets and sets a field of `posttrain.loop.run.Progress`."""
    return property(
        lambda trainer: getattr(trainer.progress, name),
        lambda trainer, value: setattr(trainer.progress, name, value),
    )


def paths_of(trainer: object, name: str) -> tuple[str, ...]:
    """Return the paths where a trainer stores the attribute with this TRL name. Return an empty tuple if it does not store
    the attribute.
    """
    config = vars(trainer).get("args")
    fields = type(config).__dataclass_fields__ if config is not None else {}
    if name in fields and name not in OF_TRANSFORMERS and name not in PATHS:
        return (f"args.{name}",)
    paths = PATHS.get(name, ())
    first = paths[0].split(".") if paths else [""]
    exists = first[0] in vars(trainer) or (first[0] == "reference" and vars(trainer)["method"].traits.samples)
    stored = hasattr(config, first[1]) if first[0] == "args" else exists
    return paths if stored else ()


def _at(holder: object, path: str) -> Any:
    return functools.reduce(lambda at, name: None if at is None else getattr(at, name), path.split("."), holder)


def read(trainer: object, name: str) -> Any:
    """Return the value of an attribute that the trainer stores in another object."""
    hidden = inspect.getattr_static(type(trainer), name, None)
    if isinstance(hidden, property | functools.cached_property):
        # The class has a property of this name, whose code has read a missing attribute. Call the property, so that the
        # original error is raised.
        return hidden.__get__(trainer, type(trainer))
    if paths := paths_of(trainer, name):
        return next((value for path in paths if (value := _at(trainer, path)) is not None), None)
    raise_absent(type(trainer), name)


def write(trainer: object, name: str, value: object) -> bool:
    """Set an attribute that is stored in another object. Return False if the attribute is stored in the trainer itself.

    Raises:
        AttributeError: The trainer has already used the value, so a change would have no effect.
    """
    own = inspect.getattr_static(type(trainer), name, None)
    if own is not None and not (isinstance(own, property) and own.fset is None):
        return False
    if not (paths := paths_of(trainer, name)):
        return False
    if name in FIXED:
        raise AttributeError(
            f"{type(trainer).__name__} has already read {paths[0]}. Fix: set it before you create the trainer."
        )
    *holder, last = paths[0].split(".")
    setattr(_at(trainer, ".".join(holder)) if holder else trainer, last, value)
    return True


def raise_absent(kind: type, name: str) -> NoReturn:
    """Raise the error for an unknown attribute. If TRL has a method with this name, the error names the hook that replaces
    the method.

    Raises:
        AttributeError: Always.
    """
    if name.startswith("__"):
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name)
    raise importlib.import_module("posttrain.compat.overrides").missing(kind, name)


class PartsOfRun:
    """Gives access to the components of a trainer's run under the names that transformers and subclasses use."""

    run: Run
    progress: Progress
    checks: Checks
    method: Method[Any]
    vision: Media
    buffers: dict[str, MetricBuffer] = of_progress("buffers")
    _metrics: dict[str, MetricBuffer] = of_progress("buffers")
    counters: dict[str, float] = of_progress("counters")
    denominators: Denominators = of_progress("denominators")
    fresh_adapter: bool = of_run("fresh_adapter")
    layout: Layout = of_run("layout")
    model: Any = of_progress("model")
    model_wrapped: Any = of_progress("wrapped")
    pad_token_id: int = of_run("pad_token_id")
    reduced_by: str | None = of_progress("reduced_by")
    reference: Reference | None = of_run("reference")
    router_coefficient: float = of_run("router_coefficient")
    state: TrainerState = of_progress("state")
