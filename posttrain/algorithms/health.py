"""What every trainer asks of its checks while it trains: after the first backward pass, and at every optimiser step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from posttrain.algorithms.preflight import PreflightMixin
from posttrain.checks import training as checks
from posttrain.errors import PosttrainError
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.report.first_batch import describe_batches
from posttrain.types import Batch, Finding

__all__ = ["HealthMixin"]

logger = logging.getLogger(__name__)

BAD_STEPS = 3  # Gradients in a row that are not finite, after which training has diverged.


class HealthMixin(PreflightMixin):
    """Runs `posttrain.checks` for `PostTrainer` and says what they find."""

    args: Any
    accelerator: Any
    model: Any
    layout: Any
    state: Any
    processing_class: Any
    zero_gradient_is_normal = False  # An online step whose groups are all equal moves nothing, rightly.
    _bad_steps = 0
    _first_step_checked = False
    _trained: tuple[float, ...] = ()
    _tokens = (0, 0)  # Of sequences, and computed with padding.
    _steps = 0
    _told_lengths = False
    _lengths_found: list[Finding] = []  # noqa: RUF012  Replaced, never changed.

    def check_start(self) -> None:
        """Precision of what is trained, where layers lie, dense masks over long rows; rows where ``strict_data`` asks."""
        if self.args.strict_data and self.train_dataset is not None:
            self.data_report()
        trainable: dict[str, int] = {}
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                name = str(parameter.dtype).removeprefix("torch.")
                trainable[name] = trainable.get(name, 0) + parameter.numel()
        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(self.accelerator.mixed_precision)
        text = self.model.config.get_text_config() if hasattr(self.model, "config") else None
        implementation = str(getattr(text, "_attn_implementation", None))
        with self.preflight.looking("config", ("PT-C001", "PT-C002", "PT-C003", "PT-C004", "PT-C005")):
            self.tell([
                checks.check_precision(trainable, learning_rate=self.args.learning_rate, autocast=mixed),
                checks.check_devices(
                    visible=max(self.args.n_gpu, 1),
                    processes=self.accelerator.num_processes,
                    placed=(getattr(self.model, "hf_device_map", None) or {}).values(),
                ),
                checks.check_dense_masks(
                    implementation, packed=self.layout.kind == "tree", row_tokens=self.layout.row_tokens
                ),
            ])  # fmt: skip
        self.check_data()

    def check_step(self, batches: Sequence[Batch], tokens: float, sequences: float, alarms: float = 0.0) -> None:
        """Count what an optimiser step holds, and end a run whose latest steps held no trained token.

        Online, steps whose completions are all masked are part of learning: the checks of rewards, lengths and gradients
        tell of those that never end.

        Args:
            batches: Of this rank.
            tokens: That carry loss, over all ranks.
            sequences: Over all ranks.
            alarms: Ranks with something to tell of their own batches (`alarm`).
        """
        with self.preflight.looking("log_step", ("PT-T003",)):
            found = parallel.all_gather_objects(self._lengths_found, self.accelerator) if alarms else []
            self.tell(found[:1])
        if self._steps == 0:
            self.check_first_batch(batches)
        if self._steps == 0 and self.record is not None and self.state.global_step == 0:
            self.record.add_data(lambda: describe_batches(batches, self.processing_class))
        self._trained = (*self._trained, tokens)[-checks.EMPTY_STEPS :]
        if not self.zero_gradient_is_normal:
            with self.preflight.looking("log_step", ("PT-T001",)):
                self.tell([checks.check_trained_tokens([int(count) for count in self._trained])])
        real = sum(batch.num_tokens for batch in batches)
        computed = sum(batch.input_ids.numel() for batch in batches)
        share = 1 - real / computed if computed else 0.0
        self.log_metrics_now({  # type: ignore[attr-defined]
            "documents": mean(sequences),
            "trained_tokens": mean(tokens),
            "padding_share": mean(share, weight=float(computed)),
        })  # fmt: skip
        self._tokens = (self._tokens[0] + real, self._tokens[1] + computed)
        self._check_economy()

    def alarm(self, batches: Sequence[Batch]) -> float:
        """1 where a sequence of this rank is too long for the model, told once; it travels with the step's counts."""
        longest = max((int(batch.position_ids.max()) + 1 for batch in batches if batch.position_ids.numel()), default=0)
        config = getattr(self.model, "config", None)
        text = None if config is None or self._told_lengths else config.get_text_config()
        rotary = any(getattr(text, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
        finding = checks.check_positions(longest, getattr(text, "max_position_embeddings", None), rotary=rotary)
        self._told_lengths = self._told_lengths or finding is not None
        self._lengths_found = [finding] if finding is not None else []
        return float(len(self._lengths_found))

    def _check_economy(self) -> None:
        """Once, when a few steps have shown it: padding that is computed, and memory that lies idle."""
        self._steps += 1
        if self._steps != min(checks.ECONOMY_STEPS + 1, max(int(self.state.max_steps or 1), 1)):
            return
        peak, total = device_memory(self.args.device)
        checkpointing = bool(getattr(self.args, "activation_checkpointing", None) or self.args.gradient_checkpointing)
        with self.preflight.looking("log_step", ("PT-T002", "PT-T004")):
            self.tell([
                checks.check_padding(*self._tokens),
                checks.check_idle_memory(peak=peak, total=total, checkpointing=checkpointing, steps=self._steps - 1),
            ])  # fmt: skip

    def _check_first_step(self, model: nn.Module) -> None:
        if self._first_step_checked or parallel.shards_parameters(self.accelerator) or not sum(self._trained):
            return  # A step without a trained token has no gradient, rightly; the next one will tell.
        self._first_step_checked = True
        norms = {n: _norm(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        if self.zero_gradient_is_normal:
            norms = {name: None if norm is None else max(norm, 1.0) for name, norm in norms.items()}
        with self.preflight.looking("first_batch", ("PT-B001", "PT-B002", "PT-B003")):
            self.tell([checks.check_first_gradients(norms)])

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip; a gradient that is not finite must not reach the weights, and three in a row end the run."""
        norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        if norm is None or self.accelerator.mixed_precision == "fp16" or bool(torch.isfinite(torch.as_tensor(norm))):
            self._bad_steps = 0
            self._check_first_step(model)
            return norm
        self._bad_steps += 1
        logger.warning(
            "step %d: the gradient norm is %s, so this step is skipped (%d in a row).",
            self.state.global_step + 1, norm, self._bad_steps,
        )  # fmt: skip
        if self._bad_steps == BAD_STEPS:
            raise PosttrainError(
                f"{BAD_STEPS} steps in a row had a gradient norm of {norm}. Lower learning_rate or max_grad_norm, try "
                "bf16=False, and look at the rows of these steps; the last checkpoint is intact."
            )
        for parameter in model.parameters():
            parameter.grad = None
        return norm


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of an accelerator that were in use at most, and all of them; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory


def _norm(gradient: torch.Tensor | None) -> float | None:
    return None if gradient is None else float(gradient.float().norm())
