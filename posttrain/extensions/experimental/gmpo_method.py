"""Config and method of GMPO, GRPO with the geometric mean of token ratios."""

from __future__ import annotations

from typing import Literal

from posttrain.errors import check_choice
from posttrain.fields import NonNegativeFloat, config, option
from posttrain.methods.grpo.config import GRPOConfig
from posttrain.methods.grpo.objective import GRPO


@config
class GMPOConfig(GRPOConfig):
    """Arguments of `GMPOTrainer`. The clip bounds apply to log-ratios. With the default of 0.4, ratios stay within (e^-0.4,
    e^0.4) = (0.670, 1.492).
    """

    loss_type: Literal["gmpo"] = option(
        "gmpo", "Loss. The only value is 'gmpo', the geometric mean of a completion's clipped token ratios."
    )
    epsilon: NonNegativeFloat = option(
        0.4,
        "Clip range of the log-ratio below 0: the log-ratio is clipped at -epsilon. At least 0. Smaller values limit how far "
        "one generation can move the policy.",
    )
    epsilon_high: NonNegativeFloat | None = option(None, "Clip range of the log-ratio above 0. None: same as epsilon.")

    def _check_choices(self) -> None:
        check_choice("loss_type", self.loss_type, ("gmpo",))
        super()._check_choices()


class GMPO(GRPO[GMPOConfig]):
    """Geometric-mean policy optimization. GMPO is GRPO with another importance ratio: the geometric mean of a completion's
    clipped token ratios.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """

    config_class = GMPOConfig
