"""GMPO under its own name: `GRPOTrainer` with ``loss_type="gmpo"`` and clip bounds that are in log space."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from posttrain.algorithms.grpo.config import GRPOConfig
from posttrain.algorithms.grpo.trainer import GRPOTrainer
from posttrain.errors import check_choice

__all__ = ["GMPOConfig", "GMPOTrainer"]


@dataclass
class GMPOConfig(GRPOConfig):
    """Arguments of `GMPOTrainer`; the clip bounds are in log space: ratios in (e^-0.4, e^0.4) = (0.670, 1.492) stay."""

    loss_type: Literal["gmpo"] = field(default="gmpo", metadata={"help": "Only gmpo: the row of `LOSS_TYPES`."})
    epsilon: float = field(default=0.4, metadata={"help": "Lower clip of the log-ratio: -epsilon."})
    epsilon_high: float | None = field(default=None, metadata={"help": "Upper clip of the log-ratio; None: epsilon."})

    def _check_choices(self) -> None:
        check_choice("loss_type", self.loss_type, ("gmpo",))
        super()._check_choices()


class GMPOTrainer(GRPOTrainer):
    """Geometric-mean policy optimisation: GRPO whose ratio is the geometric mean of a completion's clipped token ratios.

    A single token far off cannot decide the loss of its completion: its log-ratio is clipped and averaged. An
    experimental method.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """

    config_class: ClassVar[type[GMPOConfig]] = GMPOConfig
    _tag_names: ClassVar[list[str]] = ["posttrain", "gmpo"]
    _name: ClassVar[str] = "GMPO"
    _suffix: ClassVar[str] = "GMPO"
    args: GMPOConfig
