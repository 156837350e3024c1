"""`BEMACallback`: a bias-corrected exponential moving average of the trained weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from posttrain.errors import CheckpointError, ConfigError, ModelError
from posttrain.loop.sync_reference import is_sharded, resumed_from, write_tensors
from posttrain.models.heads import adapters_of, unwrapped
from posttrain.models.reference import Reference

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)

FOLDER = "bema"
STATE_FILE = "bema_state.safetensors"
ABSENT: Any = object()


class BEMACallback(transformers.TrainerCallback):
    """Compute a bias-corrected moving average of the trained weights, and save it to ``<output_dir>/bema`` at the end.

    At optimizer step ``t``, ``theta_t`` are the current weights and ``theta_0`` are the weights of the snapshot. The
    formulas are::

        alpha_t = (lag + multiplier * t) ** -bias_power
        beta_t  = max((lag + multiplier * t) ** -ema_power, min_ema_multiplier)
        E       = (1 - beta_t) * E + beta_t * theta_t
        result  = E + alpha_t * (theta_t - theta_0)

    With ``ema_power=0``, ``E`` equals the current weights. With ``bias_power=0``, the correction factor ``alpha_t`` stays
    1. With a large ``bias_power``, it is almost 0. Only trained parameters are averaged, in float32. If an adapter is
    trained, only the adapter's parameters are averaged. The state of the average is saved in every checkpoint and restored
    on resume. The average always includes the weights after the last step, because otherwise a run with few steps would
    save its initial weights.

    Args:
        update_freq: Number of optimizer steps between two updates of the average, counted from ``update_after``.
        ema_power: Exponent of ``beta_t``, at least 0. With a larger exponent, later steps change the average less.
        bias_power: Exponent of ``alpha_t``, at least 0. With a larger exponent, the correction decreases faster.
        lag: Constant ``lag`` in the formulas.
        update_after: Step after which the snapshot ``theta_0`` is taken and averaging begins. 0: before the first step.
        multiplier: Factor of the step ``t`` in the formulas.
        min_ema_multiplier: Lower bound of ``beta_t``, from 0 to 1.
        device: Device on which snapshot and average are stored.
        update_ref_model: Whether to copy the result into the trainer's reference model.
        ref_model_update_freq: Number of steps between two updates of the reference model, counted from
            ``ref_model_update_after``.
        ref_model_update_after: Step before which the reference model is not updated.

    Raises:
        ConfigError: A value is out of range.

    Reference: EMA Without the Lag: Bias-Corrected Iterate Averaging Schemes (arXiv:2508.00180), Algorithm 1.

    >>> callback = BEMACallback(update_freq=2, update_after=3)
    >>> [t for t in range(1, 10) if callback.updates_at(t)]
    [5, 7, 9]
    >>> round(callback.beta(90), 6), round(callback.alpha(90), 6)
    (0.1, 0.398107)
    """

    # Reference model to update if the trainer passes no ``ref_model`` to its callbacks.
    ref_model: Any = ABSENT

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str | torch.device = "cpu",
        *,
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
    ) -> None:
        self.update_freq, self.update_after = update_freq, update_after
        self.ema_power, self.bias_power = ema_power, bias_power
        self.lag, self.multiplier, self.min_ema_multiplier = lag, multiplier, min_ema_multiplier
        self.device = torch.device(device)
        self.update_ref_model = update_ref_model
        self.ref_model_update_freq, self.ref_model_update_after = ref_model_update_freq, ref_model_update_after
        self._check()
        self._forget()

    def _check(self) -> None:
        for name, steps in (("update_freq", self.update_freq), ("ref_model_update_freq", self.ref_model_update_freq)):
            if steps < 1:
                raise ConfigError(f"{name}={steps} must be at least 1 (optimizer steps).")
        numbers = {
            "update_after": self.update_after, "ref_model_update_after": self.ref_model_update_after,
            "ema_power": self.ema_power, "bias_power": self.bias_power, "lag": self.lag, "multiplier": self.multiplier,
        }  # fmt: skip
        for name, value in numbers.items():
            if value < 0:
                raise ConfigError(f"{name}={value} must not be negative.")
        if self.lag + self.multiplier < 1:
            raise ConfigError(
                f"lag={self.lag} + multiplier={self.multiplier} must be at least 1. With a smaller sum the average "
                "would overshoot the weights."
            )
        if not 0.0 <= self.min_ema_multiplier <= 1.0:
            raise ConfigError(f"min_ema_multiplier={self.min_ema_multiplier} must be between 0 and 1.")

    def _forget(self) -> None:
        self._start: dict[str, Tensor] = {}  # Initial weights theta_0, in the dtype of the parameter.
        self._ema: dict[str, Tensor] = {}  # Moving average E, in float32 or a wider dtype.
        # Result of the last update. Only stored with ``update_ref_model``, because the reference model is updated from it.
        self._result: dict[str, Tensor] = {}
        self._final: tuple[int, dict[str, Tensor]] | None = None
        self._moved_reference = False

    def alpha(self, step: int) -> float:
        """Return ``alpha_t``, the size of the bias correction at a step."""
        return (self.lag + self.multiplier * step) ** -self.bias_power

    def beta(self, step: int) -> float:
        """Return ``beta_t``, the weight of the current parameters in the average at a step."""
        return max((self.lag + self.multiplier * step) ** -self.ema_power, self.min_ema_multiplier)

    def updates_at(self, step: int) -> bool:
        """Return whether the average is updated at a step."""
        return step > self.update_after and (step - self.update_after) % self.update_freq == 0

    # Events ------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the snapshot of the initial weights, or restore the state from the checkpoint."""
        model = unwrapped(model)
        self._forget()
        self._refuse(model)
        reference = self._reference(model, kwargs) if self.update_ref_model else None
        if not (state.is_world_process_zero or self.update_ref_model):
            # Without updates of the reference model, only the main process needs the state, because all ranks have equal
            # weights.
            return
        self._snapshot(model)
        if state.global_step > self.update_after:
            self._load(resumed_from(args, state), state.global_step, reference)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Update the average and the reference model if an update is due at this step."""
        if not self._start:
            return
        model, step = unwrapped(model), state.global_step
        if step == self.update_after:
            self._snapshot(model)
        elif self.updates_at(step):
            self._update(model, step)
        since = step - self.ref_model_update_after
        if self.update_ref_model and since >= 0 and since % self.ref_model_update_freq == 0:
            _copy_into(self._reference(model, kwargs), self._result)
            self._moved_reference = True
        if control.should_training_stop or step >= state.max_steps:
            self._finish(model, state)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Compute the result from the current weights. The result cannot be computed at the end of training, because early
        stopping may end training now, and the best weights may then replace the current weights.
        """
        if args.load_best_model_at_end:
            self._finish(unwrapped(model), state)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the state of the average in the new checkpoint."""
        if args.load_best_model_at_end:
            self._finish(unwrapped(model), state)
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        wanted = self._start and state.global_step > self.update_after and not args.save_only_model
        if not (wanted and state.is_world_process_zero and folder.is_dir()):
            return
        parts = {"start": self._start, "ema": self._ema, "result": self._result}
        if self._moved_reference:
            named = dict(unwrapped(self._reference(unwrapped(model), kwargs)).named_parameters())
            parts["reference"] = {name: named[name] for name in self._start}
        tensors = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
        write_tensors(folder / STATE_FILE, tensors, {"step": str(state.global_step)})

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        processing_class: Tokenizer | None = None,
        **_: Any,
    ) -> None:
        """Save the model with the averaged weights."""
        if not (self._start and state.is_world_process_zero):
            return
        model = unwrapped(model)
        if self._final is None or self._final[0] != state.global_step:
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                logger.warning(
                    "BEMA: the best weights have replaced the last weights, so the average of the last update is saved."
                )
                self._final = (state.global_step, self._ema)
            else:
                self._finish(model, state)
        folder = Path(args.output_dir or ".") / FOLDER
        assert self._final is not None
        _save(model, self._final[1], folder)
        if processing_class is not None:
            processing_class.save_pretrained(folder)
        logger.info("BEMA: the averaged weights of step %d are in %s.", state.global_step, folder)

    # The average -------------------------------------------------------------------------------------------------

    def _refuse(self, model: nn.Module) -> None:
        if is_sharded(model):
            raise ModelError(
                "BEMA needs whole parameters on every process, but they are sharded (FSDP, ZeRO-3 or tensor "
                "parallelism). Use DDP or ZeRO-2, or train without BEMA."
            )
        if not hasattr(model, "save_pretrained"):
            raise ModelError(
                f"BEMA saves its model with save_pretrained, but a {type(model).__name__} does not have this method."
            )
        if not _trained(model):
            raise ModelError("BEMA averages trained parameters, but no parameter of the model has requires_grad=True.")

    @torch.no_grad()
    def _snapshot(self, model: nn.Module) -> None:
        self._start = {name: p.detach().to(self.device, copy=True) for name, p in _trained(model).items()}
        self._ema = {name: _exact(value).clone() for name, value in self._start.items()}
        self._result = {name: value.clone() for name, value in self._ema.items()} if self.update_ref_model else {}

    @torch.no_grad()
    def _update(self, model: nn.Module, step: int) -> None:
        named, alpha, beta = dict(model.named_parameters()), self.alpha(step), self.beta(step)
        for name, ema in self._ema.items():
            theta = named[name].detach().to(self.device, ema.dtype)
            ema.lerp_(theta, beta)
            if self._result:
                self._result[name] = ema + alpha * (theta - self._start[name])

    @torch.no_grad()
    def _finish(self, model: nn.Module, state: TrainerState) -> None:
        """Compute the result from the average that includes the current weights. The state of the average is not changed."""
        step = state.global_step
        if not (self._start and state.is_world_process_zero):
            return
        if step < self.update_after:
            logger.warning(
                "BEMA: the run is at step %d, before update_after=%d, so the result is the current weights.",
                step,
                self.update_after,
            )
        if late := _trained(model).keys() - self._start.keys():
            logger.warning("BEMA: %d parameters became trainable after the snapshot and are not averaged.", len(late))
        named, alpha = dict(model.named_parameters()), self.alpha(step)
        beta = 0.0 if self.updates_at(step) else self.beta(step)
        result = {}
        for name, ema in self._ema.items():
            theta = named[name].detach().to(self.device, ema.dtype)
            mixed = torch.lerp(ema, theta, beta) + alpha * (theta - self._start[name])
            result[name] = mixed if step > self.update_after else theta.clone()
        self._final = (step, result)

    # Resume and reference ----------------------------------------------------------------------------------------

    def _load(self, folder: Path | None, step: int, reference: Any) -> None:
        from safetensors.torch import load_file

        path = folder / STATE_FILE if folder is not None else None
        if path is None or not path.is_file():
            raise CheckpointError(
                f"BEMA: cannot resume at step {step}, because {path or 'the checkpoint folder'} with the average does "
                "not exist. Resume from a checkpoint that this callback saved (in output_dir, or set by "
                f"args.resume_from_checkpoint), or set update_after={step} to start a new average."
            )
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in load_file(path, device=str(self.device)).items():
            part, _, parameter = name.partition(".")
            parts.setdefault(part, {})[parameter] = tensor
        shapes = {name: value.shape for name, value in self._start.items()}
        saved = {name: value.shape for name, value in parts["start"].items()}
        if odd := sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name)):
            raise CheckpointError(
                f"BEMA: the parameters in {path} differ from the parameters of this run: {odd[0]!r} has shape "
                f"{_shape(saved.get(odd[0]))} there and {_shape(shapes.get(odd[0]))} here ({len(odd)} differ)."
            )
        self._start, self._ema = parts["start"], parts["ema"]
        if self.update_ref_model:
            self._result = parts.get("result", self._ema)
            if "reference" in parts:
                _copy_into(reference, parts["reference"])
                self._moved_reference = True

    def _reference(self, model: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
        """Return the trainer's reference model. Raise an error if its weights cannot be updated."""
        reference = kwargs.get("ref_model", self.ref_model)
        if reference is ABSENT:
            raise ConfigError(
                "update_ref_model=True, but the trainer passes no ref_model to its callbacks. Use a trainer with a "
                "reference model, or set callback.ref_model."
            )
        if isinstance(reference, Reference):
            reference = reference.copy
        if reference is None or adapters_of(model):
            raise ConfigError(
                "update_ref_model=True needs a separate reference model with all weights, but here it is "
                f"{'the policy without its adapter' if adapters_of(model) else 'None'}. Pass a ref_model to the "
                "trainer, without peft_config, or set update_ref_model=False."
            )
        if unwrapped(reference) is model:
            raise ConfigError(
                "update_ref_model=True, but the reference is the policy itself, which would be overwritten."
            )
        lacking = sorted(_trained(model).keys() - dict(unwrapped(reference).named_parameters()).keys())
        if lacking:
            raise ModelError(
                f"update_ref_model=True: the reference does not have the trained parameter {lacking[0]!r}."
            )
        return reference


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _exact(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32, unless its dtype is wider. In bfloat16, small updates of the average would be lost by
    rounding.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))


@torch.no_grad()
def _copy_into(reference: nn.Module, values: dict[str, Tensor]) -> None:
    named = dict(unwrapped(reference).named_parameters())
    for name, value in values.items():
        named[name].copy_(value)


def _save(model: nn.Module, values: dict[str, Tensor], folder: Path) -> None:
    """Save the model with other values of its parameters. The model itself is not changed, and tied weights stay tied."""
    named = dict(model.named_parameters())
    replaced = {id(named[name]): value.to(named[name].dtype) for name, value in values.items()}
    state = {name: replaced.get(id(v), v.detach()) for name, v in model.state_dict(keep_vars=True).items()}
    adapters: dict[str, Any] = {}
    if hasattr(model, "disable_adapter"):
        adapters["selected_adapters"] = [
            adapter for adapter in model.peft_config if any(f".{adapter}" in name for name in values)
        ]
    model.save_pretrained(folder, state_dict=state, **adapters)
