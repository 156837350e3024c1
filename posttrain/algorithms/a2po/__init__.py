"""A*-PO: optimal values estimated once from the reference, then one completion a prompt."""

from posttrain.algorithms.a2po.config import A2POConfig
from posttrain.algorithms.a2po.trainer import A2POTrainer, a2po_objective

__all__ = ["A2POConfig", "A2POTrainer", "a2po_objective"]
