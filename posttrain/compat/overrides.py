"""Checks of methods of TRL's and transformers' trainers that a user's subclass overrides. An override that would never be
called raises an error with the hook that replaces it.

Only classes of users are checked. Overrides of two groups of methods raise an error. The first group contains methods of
TRL's trainers that this library never calls (in the table `trl_names`). The second group contains hooks that some trainers
do not call (`UNCALLED`). If a method of transformers has different arguments in this library, an adapter calls the override.
All other overrides are called directly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from posttrain.compat import trl_names
from posttrain.errors import ConfigError
from posttrain.loop.build import PADDED_STEPS, is_ours, user_override

SAMPLE = "sample(examples, settings)"
PARTS = f"{SAMPLE}, score(rollouts, mode) or advantages(rollouts, rewards, logps)"


def _rows(methods: dict[str, str]) -> dict[str, str]:
    """Map each method to its hook. ``methods`` maps each hook to the names of the methods that it replaces, separated by
    spaces.
    """
    return {name: hook for hook, names in methods.items() for name in names.split()}


# Map from each trainer class to methods that it never calls. Each method is mapped to the hook that replaces it.
OF_PROMPTS = {"prepare": "prepare_datasets(train, evaluation)", "rows": PARTS}
TAKEN = "taken(batch), which receives the output of the workers, or objective(outputs, batch)"
WORKERS = "reward_funcs, tools and rollout_func, which the workers call, or objective(outputs, batch)"
UNCALLED: dict[str, dict[str, str]] = {
    # Methods of transformers.Trainer that the training loop of this library does not call.
    "PostTrainer": {
        "_prepare_input": "_prepare_inputs(inputs), which gets the whole dict",
        "_prepare_context_parallel_inputs": "_prepare_inputs(inputs); context parallelism is not offered",
        "compute_loss_terms": "objective(outputs, batch), or compute_loss(model, inputs)",
        "log_metrics_now": "run.log(metrics, mode)",
        "named_counts": "counts(batches) of a Method",
        "micro_batch": "data_collator, rows(examples), or sample(examples, settings) of a trainer that samples",
        "eval_batches": "data_collator, rows(examples), or sample(examples, settings) of a trainer that samples",
        "create_optimizer_and_scheduler": "create_optimizer() and create_scheduler(num_training_steps, optimizer)",
    },
    "OnlineTrainer": _rows({PARTS: "generate_and_score", SAMPLE: "generate roll_out tokenize"})
    | {
        "measured_logps": "advantages(rollouts, rewards, logps)",
        "needs_old_logp": "needs_old_logp(outlived) of a Method",
        "completion_rows": "log_extra, which reward functions get (docs/rewards.md)",
    },
    "GRPOTrainer": OF_PROMPTS,
    "RLOOTrainer": OF_PROMPTS,
    "A2POTrainer": OF_PROMPTS,
    "OnlineDPOTrainer": OF_PROMPTS,
    "PPOTrainer": OF_PROMPTS,
    "AsyncGRPOTrainer": OF_PROMPTS
    | _rows({WORKERS: "generate_and_score generate roll_out sample tokenize score measured_logps advantages"}),
    "AsyncDistillationTrainer": _rows({TAKEN: "rows generate_and_score generate roll_out sample tokenize"}),
}
# Types of class attributes that `callable` does not detect, but that a user can override like methods.
DESCRIPTORS = (property, functools.cached_property, classmethod)


def hook_for(cls: type, name: str) -> str | None:
    """Return the hook that replaces a TRL method that a trainer class never calls. Return None for other methods."""
    hooks, ours = trl_names.refused("method"), (base for base in cls.__mro__ if is_ours(base))
    return next((hooks[key] for base in ours if (key := f"{base.__name__}.{name}") in hooks), None)


def missing(cls: type, name: str) -> AttributeError:
    """Create the error for an attribute that a trainer does not have. If a hook or a current name replaces the attribute, the
    message contains it.
    """
    hook, present = hook_for(cls, name), trl_names.renamed_arguments().get(f"Trainer.{name}")
    fix = "" if hook is None else f": posttrain lacks this method of TRL. Fix: use {hook} (docs/hooks.md)."
    if present is not None:
        fix = f": a name of older releases. Fix: use {present}."
    return AttributeError(f"{cls.__name__!r} object has no attribute {name!r}{fix}", name=name)


def table() -> str:
    """Return a Markdown table of the methods that raise an error, with one line per trainer and hook. docs/hooks.md contains
    this table.
    """
    methods: dict[tuple[str, str], list[str]] = {}
    for name, hook in trl_names.refused("method").items():
        trainer, method = name.split(".")
        methods.setdefault((trainer, hook), []).append(method)
    for trainer, hooks in UNCALLED.items():
        for method, hook in hooks.items():
            methods.setdefault((trainer, hook), []).append(method)
    lines = ["| trainer | methods | use instead |", "|---|---|---|"]
    for (trainer, hook), names in methods.items():
        lines.append(f"| `{trainer}` | {', '.join(f'`{name}`' for name in names)} | {hook} |")
    return "\n".join(lines)


def _defined(kind: type) -> Iterator[str]:
    """Yield the names of the methods and properties that the user's classes among a trainer's base classes define."""
    for cls in kind.__mro__:
        if not is_ours(cls):
            for name, value in vars(cls).items():
                if callable(value) or isinstance(value, DESCRIPTORS):
                    yield name


def refuse(trainer: Any) -> None:
    """Raise an error for overridden methods that are never called. If an overridden method needs padded dicts, log that
    training is slower.

    Args:
        trainer: Trainer of a user's class, before its model is loaded.

    Raises:
        ConfigError: The class overrides a TRL method that is never called, or a method in `UNCALLED`. The error is also
            raised if it overrides `_get_num_items_in_batch` although the loss is not divided by that number, or if its
            `get_batch_samples` has TRL's arguments. The message contains the method, its class and the hook to use instead.
    """
    kind = type(trainer)
    rows = {name: hook for name in _defined(kind) if (hook := hook_for(kind, name))}
    for base in reversed(kind.__mro__):
        rows |= UNCALLED.get(base.__name__, {})
    for name, hook in rows.items():
        if owner := user_override(kind, name):
            raise ConfigError(
                f"{owner.__name__} overrides {name}, which posttrain never calls. Fix: use {hook} instead (docs/hooks.md)."
            )
    if (owner := user_override(kind, "_get_num_items_in_batch")) and not trainer.method.traits.takes_loss_func:
        raise ConfigError(
            f"{owner.__name__} overrides _get_num_items_in_batch, but this loss is not a sum over label tokens divided by "
            "its result. Fix: scale the result of super().compute_loss(...), or override counts(batches) of a Method."
        )
    owner = user_override(kind, "get_batch_samples")
    spec = inspect.getfullargspec(owner.get_batch_samples) if owner else None
    if spec and len(spec.args) < 4 and spec.varargs is None:
        raise ConfigError(
            f"{owner.__name__} overrides get_batch_samples({', '.join(spec.args[1:])}) of TRL 0.7 to 0.11, which posttrain "
            "never calls. Fix: use LogCompletionsCallback. The method of transformers with this name has the arguments "
            "(epoch_iterator, num_batches, device)."
        )
    if any(user_override(kind, name) for name in PADDED_STEPS):
        from posttrain.compat import padded_loss

        padded_loss.log_cost(kind)
        # Do not split micro-batches, because in TRL a micro-batch is one dict of inputs.
        trainer.method.traits = replace(trainer.method.traits, single_pass=True)
