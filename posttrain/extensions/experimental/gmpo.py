"""`GMPOTrainer`: GRPO with the geometric mean of token ratios."""

from __future__ import annotations

from posttrain.extensions.experimental.gmpo_method import GMPO, GMPOConfig
from posttrain.trainers.grpo import GRPOTrainer


class GMPOTrainer(GRPOTrainer):
    """Geometric-mean policy optimization: GRPO whose ratio is the geometric mean of clipped token ratios
    (experimental).

    A single outlier token cannot dominate the loss of its completion, because its log-ratio is clipped and averaged.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """

    METHOD = GMPO
    args: GMPOConfig
