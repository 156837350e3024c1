"""The frozen reference policy: adapters switched off, a frozen adapter, or a frozen copy of the given weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from posttrain.errors import ModelError

__all__ = ["Reference", "create_reference_model", "disable_dropout_in_model", "use_adapter"]

REF_ADAPTER = "ref"


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


@contextmanager
def use_adapter(model: Any, name: str | None) -> Iterator[None]:
    """Activate the adapter ``name`` (None: the bare base model) and restore the previous one, also on an exception."""
    if not _is_peft(model):
        raise ModelError(f"use_adapter needs a peft model, not {type(model).__name__}.")
    if name is None:
        with model.disable_adapter():
            yield
        return
    previous = model.active_adapter
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(previous)


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set the probability of every dropout to 0: modules of any kind, and the rates that configs hand to functions."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def create_reference_model(model: nn.Module) -> nn.Module:
    """A frozen deep copy in eval mode; the given model is left as it was."""
    inner: Any = model
    patched = inner.__dict__.pop(
        "forward", None
    )  # A patched forward is bound to the original: the copy must not use it.
    try:
        reference = copy.deepcopy(model)
    finally:
        if patched is not None:
            inner.forward = patched
    return reference.requires_grad_(False).eval()


class Reference:
    """Log-probs under the frozen start of training, by the cheapest way that is exact.

    A new adapter: the base model, adapters off; no second model in memory. A model that came with a trained adapter: a
    frozen copy of that adapter. Otherwise a frozen copy of the **given** weights, which are not always the hub's.
    """

    def __init__(self, model: nn.Module, *, fresh_adapter: bool = False) -> None:
        self.adapter: str | None = None
        self.copy: nn.Module | None = None
        self.policy = model if _is_peft(model) else None
        if self.policy is None:
            self.copy = create_reference_model(model)
        elif not fresh_adapter:
            self._freeze_adapter(model)

    def _freeze_adapter(self, model: Any) -> None:
        active = model.active_adapter
        model.add_adapter(REF_ADAPTER, copy.deepcopy(model.peft_config[active]))
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                if f".{REF_ADAPTER}." in name or name.endswith(f".{REF_ADAPTER}"):
                    parameter.copy_(parameters[name.replace(f".{REF_ADAPTER}", f".{active}")])
                    parameter.requires_grad_(False)
        model.set_adapter(active)
        self.adapter = REF_ADAPTER

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The model to run while computing reference log-probs; ``policy`` may be wrapped (DDP)."""
        if self.copy is not None:
            yield self.copy
            return
        with use_adapter(self.policy, self.adapter):
            try:
                yield policy
            finally:
                if self.adapter is not None:
                    for name, parameter in self.policy.named_parameters():  # type: ignore[union-attr]
                        if f".{REF_ADAPTER}" in name:
                            parameter.requires_grad_(False)  # peft re-enables gradients of the adapter it activates.

    @torch.no_grad()
    def mix_in(self, policy: nn.Module, alpha: float) -> None:
        """TR-DPO: ``ref = (1 - alpha) * ref + alpha * policy``, by name, in float32 so that a small alpha is not lost."""
        if self.copy is None:
            raise ModelError("the reference is the same model with its adapter off; it cannot follow the policy.")
        ours = dict(policy.named_parameters()) | dict(policy.named_buffers())
        for name, value in [*self.copy.named_parameters(), *self.copy.named_buffers()]:
            if value.is_floating_point():
                value.copy_(torch.lerp(value.float(), ours[name].float(), alpha))
