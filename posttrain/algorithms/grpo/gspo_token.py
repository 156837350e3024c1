"""GSPO-token: the sequence's importance ratio with each token's own gradient, as a trainer of its own name."""

from __future__ import annotations

from typing import ClassVar

from posttrain.algorithms.grpo.trainer import GRPOTrainer

__all__ = ["GSPOTokenTrainer"]


class GSPOTokenTrainer(GRPOTrainer):
    """`GRPOTrainer` under the name of a method whose scripts set ``importance_sampling_level="sequence_token"``.

    ``log c[i, t] = sg(mean_t d) + logp[i, t] - sg(logp[i, t])``: the value is the sequence's ratio, the gradient each
    token's own. `GRPOConfig` accepts that level itself, so the two trainers are the same; it differs from ``"sequence"``
    only where advantages differ by token. An experimental method.

    Reference: GSPO, arXiv:2507.18071, equation 14.
    """

    _tag_names: ClassVar[list[str]] = ["posttrain", "grpo", "gspo-token"]
    _name: ClassVar[str] = "GSPO-token"
