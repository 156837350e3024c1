"""`GMPOTrainer`."""

from __future__ import annotations

from posttrain.extensions.experimental.gmpo_method import GMPO, GMPOConfig
from posttrain.trainers.grpo import GRPOTrainer


class GMPOTrainer(GRPOTrainer):
    """Geometric-mean policy optimisation: GRPO whose ratio is the geometric mean of a completion's clipped token ratios.

    A single token far off cannot decide the loss of its completion: its log-ratio is clipped and averaged. An
    experimental method.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """

    METHOD = GMPO
    args: GMPOConfig
