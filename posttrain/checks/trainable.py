"""Whether a run can learn at all: before the first backward pass, which would fail without saying why."""

from __future__ import annotations

from posttrain.checks.core import Context, probe
from posttrain.checks.training import check_first_gradients
from posttrain.types import Finding

__all__ = ["nothing_trained"]


@probe("data", "PT-B001")
def nothing_trained(context: Context) -> list[Finding | None]:
    """A model none of whose parameters requires a gradient."""
    parameters = getattr(context.model, "parameters", None)
    if parameters is None or any(parameter.requires_grad for parameter in parameters()):
        return []
    return [check_first_gradients({})]
