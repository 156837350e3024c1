"""What a subclass may override; overrides that could not take effect are refused before anything is loaded."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from posttrain.errors import ConfigError

__all__ = ["check_hooks", "user_override"]

# Methods of transformers' and TRL's trainers that are never called here, and what does their job.
NEVER_CALLED = {
    "prediction_step": "eval_batches(inputs) for what is evaluated, or objective(outputs, batch) for its loss",
    "_prepare_inputs": "micro_batch(inputs, index), which returns the batches of one micro-batch",
}
OF_DICTS = ("get", "items", "keys", "pop", "update", "values")


def user_override(trainer: Any, name: str) -> type | None:
    """The class outside this package that defines ``name`` for a trainer; None where the package's own is in force."""
    if name in vars(trainer):
        return type(trainer)
    owner = next((cls for cls in type(trainer).__mro__ if name in vars(cls)), None)
    return None if owner is None or owner.__module__.split(".")[0] in ("posttrain", "transformers") else owner


def check_hooks(trainer: Any, compute_loss_func: Any) -> None:
    """Refuse overrides that would never be called, and losses written for dicts of padded tensors.

    Raises:
        ConfigError: Names the class, the method, and what to override instead.
    """
    for name, instead in NEVER_CALLED.items():
        if owner := user_override(trainer, name):
            raise ConfigError(
                f"{owner.__name__} overrides {name}, which is never called here. Fix: override {instead}."
            )
    if compute_loss_func is not None and not trainer.takes_loss_func:
        raise ConfigError(
            f"compute_loss_func is given, and {type(trainer).__name__} would not call it: its loss compares sequences, and "
            "never holds logits. Fix: override objective(outputs, batch) in a subclass (docs/hooks.md)."
        )
    owner = user_override(trainer, "compute_loss")
    problem = _written_for_dicts(inspect.getattr_static(owner, "compute_loss"), trainer.needs) if owner else None
    if owner and problem:
        raise ConfigError(
            f"{owner.__name__}.compute_loss {problem}. Here inputs is a posttrain.types.Batch, a token forest without padding "
            "or labels, and super().compute_loss(model, inputs) returns the loss of one pass, divided by counts of the whole "
            "optimiser step. Fix: override objective(outputs, batch), which sees log-probs and loss masks (docs/hooks.md)."
        )


def _written_for_dicts(function: Any, needs: frozenset[str]) -> str | None:
    """What in the source of a ``compute_loss(self, model, inputs)`` cannot work with a Batch; None: nothing, or no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None  # `Batch` itself tells, when it is read as a dict.
    definition = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    names = [argument.arg for argument in definition.args.args] if definition is not None else []
    if definition is None or len(names) < 3:
        return None
    nodes = list(ast.walk(definition))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if _told_apart(nodes, calls, names[2]):
        return None
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Subscript) and _is(node.value, names[2]):
            return f"reads {ast.unparse(node)} (its line {line})"
        if isinstance(node, ast.Attribute) and _is(node.value, names[2]) and node.attr in OF_DICTS:
            return f"reads {ast.unparse(node)} (its line {line})"
        if isinstance(node, ast.Call) and any(k.arg is None and _is(k.value, names[2]) for k in node.keywords):
            return f"calls {ast.unparse(node)} (its line {line})"
    forward = any(_is(call.func, names[1]) for call in calls)
    logits = next((n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "logits"), None)
    if logits is not None and not forward and "logits" not in needs:
        return f"reads {ast.unparse(logits)} (its line {logits.lineno}), and no logits are kept: they are not in its `needs`"
    return None


def _told_apart(nodes: list[ast.AST], calls: list[ast.Call], name: str) -> bool:
    """Whether the code looks what its inputs are, or makes others of them."""
    looks = any(_is(call.func, "isinstance") and call.args and _is(call.args[0], name) for call in calls)
    return looks or any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in nodes)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
