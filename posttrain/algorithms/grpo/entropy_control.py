"""The entropy bonus: its coefficient, steered towards a target where that is asked for, and what is logged of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.losses.reduce import reduce
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.types import Batch, LossTerms, ModelOutputs

if TYPE_CHECKING:
    from posttrain.algorithms.grpo.config import GRPOConfig

__all__ = ["EntropyControlMixin", "EntropyController"]

logger = logging.getLogger(__name__)

STATE_FILE = "entropy_ctrl_state.json"
PATIENCE = 50  # Optimiser steps without a single bonus, after which the target is said to be out of reach.


@dataclasses.dataclass(slots=True)
class EntropyController:
    """Raises the coefficient while the entropy is at or below its target and lowers it while it is above.

    Attributes:
        coefficient: Before the gate.
        target: Nats.
        step: Added or taken away at every optimiser step.
        low, high: Bounds of the coefficient.
        last: Entropy of the last optimiser step; infinite before the first, which therefore has no bonus.

    Reference: Skywork-OR1, arXiv:2505.22312

    >>> controller = EntropyController(0.01, target=0.2, step=0.005, low=0.0, high=1.0)
    >>> controller.applied
    0.0
    >>> controller.update(0.1)
    >>> round(controller.applied, 3)
    0.015
    """

    coefficient: float
    target: float
    step: float
    low: float
    high: float
    last: float = math.inf

    @property
    def applied(self) -> float:
        """What multiplies the entropy now: nothing while the last entropy was above the target."""
        return self.coefficient if self.last <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Take in the entropy of a whole optimiser step."""
        if entropy <= self.target:
            self.coefficient = min(self.coefficient + self.step, self.high)
        else:
            self.coefficient = max(self.coefficient - self.step, self.low)
        self.last = entropy


class EntropyControlMixin:
    """The part of `GRPOTrainer` that knows of the entropy bonus."""

    args: GRPOConfig
    accelerator: Any
    state: Any
    model: Any
    denominators: Any
    _controlled_step = 0
    _ever_applied = False

    def make_controller(self) -> EntropyController | None:
        """The controller of a run that steers its coefficient."""
        args = self.args
        if not args.use_adaptive_entropy:
            return None
        bounds = {"low": args.entropy_coef_min, "high": args.entropy_coef_max}
        return EntropyController(args.entropy_coef, target=args.entropy_target, step=args.entropy_coef_delta, **bounds)

    def start_entropy_control(self) -> None:
        """Nothing seen yet."""
        self.controller = self.make_controller()
        self._window = torch.zeros(
            3, dtype=torch.float64
        )  # Entropy of the tokens it acts on, their count, policy loss.

    @property
    def bonus(self) -> bool:
        """Whether the loss has an entropy term."""
        return bool(self.args.entropy_coef or self.args.use_adaptive_entropy)

    @property
    def entropy_coef(self) -> float:
        """The coefficient, before the gate of the controller."""
        return self.args.entropy_coef if self.controller is None else self.controller.coefficient

    def terms(self, model: nn.Module, batch: Batch) -> tuple[LossTerms, ModelOutputs]:
        """As the parent's; in training, what the controller and the log need is added up over the optimiser step."""
        terms, outputs = super().terms(model, batch)  # type: ignore[misc]
        if self.bonus and model.training:
            self._window += self._seen(terms, outputs).to(self._window)
        return terms, outputs

    @torch.no_grad()
    def _seen(self, terms: LossTerms, outputs: ModelOutputs) -> Tensor:
        mask = terms.extra[0].mask
        policy = reduce(dataclasses.replace(terms, extra=[]), self.denominators) / self.denominators.world_size
        return torch.stack([outputs.entropy[mask].sum(), mask.sum(), policy])  # type: ignore[index]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.bonus and self.state.global_step != self._controlled_step:
            self._controlled_step = self.state.global_step
            self._end_window()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    def _end_window(self) -> None:
        """One update an optimiser step, from the entropy over all its micro-batches and ranks."""
        entropy, tokens, policy = parallel.all_reduce_sum(self._window.tolist(), self.accelerator)
        self._window.zero_()
        if self.controller is not None:
            self.controller.update(entropy / max(tokens, 1.0))
            self._ever_applied = self._ever_applied or self.controller.applied > 0
            if self.state.global_step == PATIENCE and not self._ever_applied:
                logger.warning(
                    "after %d steps the entropy (%.2f nats) never was at or below entropy_target=%s, so there was no bonus "
                    "yet. Set the target near the entropy of the first steps.",
                    PATIENCE, self.controller.last, self.args.entropy_target,
                )  # fmt: skip
        told = {"policy_loss": mean(policy), "entropy_coef": mean(float(self.entropy_coef))}
        self.log_metrics_now(told)  # type: ignore[attr-defined]

    # Checkpoints -------------------------------------------------------------------------------------------------

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self.controller is not None and self.args.should_save:
            last = self.controller.last if math.isfinite(self.controller.last) else None
            state = {"entropy_coef": self.controller.coefficient, "last_world_entropy": last}
            Path(output_dir, STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        self._controlled_step = self.state.global_step
        path = Path(checkpoint or ".", STATE_FILE)
        if self.controller is None or checkpoint is None or not path.is_file():
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        last = state["last_world_entropy"]
        self.controller.coefficient = state["entropy_coef"]
        self.controller.last = math.inf if last is None else last
