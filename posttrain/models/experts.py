"""Mixtures of experts: whether a model has a router, and how much its balance counts."""

from __future__ import annotations

from typing import Any

from posttrain.errors import ConfigError
from posttrain.models.heads import causal_lm

__all__ = ["router_coefficient"]


def router_coefficient(model: Any, args: Any) -> float:
    """The weight of the load-balancing term: what was asked for, else the architecture's own; 0 without a router.

    Raises:
        ConfigError: A weight was asked for and the model has no router.
    """
    wanted = args.router_aux_loss_coef
    default = type(args).__dataclass_fields__["router_aux_loss_coef"].default
    text = causal_lm(model).config.get_text_config()
    if not hasattr(text, "output_router_logits"):
        if wanted and wanted != default:
            raise ConfigError(
                f"router_aux_loss_coef={wanted}, but {type(causal_lm(model)).__name__} has no router: only mixtures of experts "
                "have a load-balancing term. Leave it out."
            )
        return 0.0
    coefficient = getattr(text, "router_aux_loss_coef", None) if wanted is None else wanted
    # The term is ours to add: the model's own would be divided by tokens and counted once a micro-batch.
    text.output_router_logits = False
    if wanted is not None:
        text.router_aux_loss_coef = wanted
    return float(coefficient or 0.0)
