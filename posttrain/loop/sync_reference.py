"""`SyncRefModelCallback` for TR-DPO: every few optimizer steps, the reference model is updated from the policy."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from posttrain.errors import CheckpointError, ConfigError, ModelError
from posttrain.integrations import require
from posttrain.models.heads import adapters_of, unwrapped
from posttrain.models.parallel import is_partitioned, local_part
from posttrain.models.reference import Reference
from posttrain.report.files import whole_file

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)


STATE_FILE = "ref_model.safetensors"


# Attributes that identify parameters sharded by ZeRO-3, FSDP 1, FSDP 2 or tensor parallelism.
SHARD_MARKS = ("ds_id", "_fsdp_flattened", "_is_flat_param", "device_mesh")


def is_sharded(model: nn.Module) -> bool:
    """Return whether any parameter is sharded, so that this process has only a part of it."""
    return any(hasattr(parameter, mark) for parameter in model.parameters() for mark in SHARD_MARKS)


def resumed_from(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Return the checkpoint folder from which this run resumed, or None. The folder is found by comparing trainer states.

    transformers does not pass the folder to callbacks. The candidates are ``args.resume_from_checkpoint`` and the checkpoint
    of the current step in the output directory. A candidate with a different log history belongs to another run and is
    skipped.
    """
    resume = args.resume_from_checkpoint
    candidates = [Path(resume)] if isinstance(resume, str) else []
    candidates.append(Path(args.output_dir or ".") / f"checkpoint-{state.global_step}")
    ours = json.dumps([state.global_step, state.log_history])
    for folder in candidates:
        try:
            saved = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if json.dumps([saved.get("global_step"), saved.get("log_history")]) == ours:
            return folder
    return None


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors and metadata to a safetensors file atomically."""
    from safetensors.torch import save_file

    with whole_file(path) as part:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part, metadata)


class SyncRefModelCallback(transformers.TrainerCallback):
    """Updates the reference model from the policy every ``args.ref_model_sync_steps`` optimizer steps.

    For each parameter, ``ref = (1 - a) * ref + a * policy`` with ``a = args.ref_model_mixup_alpha``. Parameters of reference
    and policy are paired by name. If the reference is in half precision, the update is computed on a float32 copy in main
    memory, because bfloat16 would round away the change for a small ``a``. Every checkpoint contains the updated reference.
    A resumed run restores the reference from it.

    Args:
        ref_model: The frozen model, or a `posttrain.models.reference.Reference` that contains it. None: the callback does
            nothing.
        accelerator: Accelerator of the trainer.

    Raises:
        ModelError: The reference is quantized, has an adapter, or is not a separate model.

    Reference: Learn Your Reference Model for Real Good Alignment (arXiv:2404.09656), soft update.
    """

    def __init__(self, ref_model: Any, accelerator: Accelerator) -> None:
        if isinstance(ref_model, Reference):
            if ref_model.copy is None:
                raise ModelError(
                    "sync_ref_model needs a separate reference model, but this one is the policy with its adapter "
                    "disabled. Merge the adapter first, or train without sync_ref_model."
                )
            ref_model = ref_model.copy
        self.ref_model = ref_model
        self.accelerator = accelerator
        self._masters: dict[str, Tensor] = {}
        self._logged = False
        if ref_model is not None:
            _refuse(ref_model, "reference")

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Check the settings and both models. On resume, restore the reference from the checkpoint."""
        if self.ref_model is None:
            return
        steps, alpha = _settings(args)
        if steps < 1 or not 0.0 <= alpha <= 1.0:
            raise ConfigError(
                f"ref_model_sync_steps={steps} must be at least 1, and ref_model_mixup_alpha={alpha} between 0 and 1."
            )
        _refuse(unwrapped(model), "policy")
        self._pairs(model)
        if state.global_step >= steps:
            self._load(resumed_from(args, state), state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Update the reference if an update is due after this step."""
        steps, alpha = _settings(args)
        if self.ref_model is not None and state.global_step % steps == 0:
            self.sync(model, alpha)

    @torch.no_grad()
    def sync(self, policy: nn.Module, alpha: float) -> None:
        """Update the reference now, with mixing weight ``alpha``. If parameters are sharded, all ranks must call this
        method.
        """
        pairs = self._pairs(policy)
        with _gathered([p for _, ref, theta in pairs for p in (ref, theta)]) as writes:
            for name, ref, theta in pairs if writes else ():
                ref, theta = local_part(ref), local_part(theta)
                exact = torch.promote_types(ref.dtype, torch.float32)
                if ref.dtype == exact:
                    ref.copy_(torch.lerp(ref, theta.to(ref.device, exact), alpha))
                    continue
                master = self._masters.setdefault(name, ref.to("cpu", exact))
                master.lerp_(theta.to("cpu", exact), alpha)
                ref.copy_(master)
        self._mix_buffers(policy, alpha)

    def _mix_buffers(self, policy: nn.Module, alpha: float) -> None:
        """Update the buffers of the reference. Floating-point buffers, such as running statistics, are mixed like weights.
        Other buffers, such as counters, are copied. Buffers are never sharded.
        """
        theirs = dict(unwrapped(policy).named_buffers())
        for name, ours in unwrapped(self.ref_model).named_buffers():
            if name in theirs and ours.shape == theirs[name].shape:
                value = theirs[name].to(ours.device, ours.dtype)
                ours.copy_(torch.lerp(ours, value, alpha) if ours.is_floating_point() else value)

    def _pairs(self, policy: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
        """Return a list of ``(name, reference parameter, policy parameter)``.

        Raises:
            ModelError: The names, shapes or sharding layouts of the parameters differ.
        """
        ours, theirs = _parameters(self.ref_model), _parameters(policy)
        if odd := sorted(ours.keys() ^ theirs.keys()):
            raise ModelError(
                f"the reference has {len(ours)} parameters and the policy {len(theirs)}. {len(odd)} names occur in only "
                f"one of them, for example {odd[0]!r}. Both models must have the same architecture."
            )
        for name, ref in ours.items():
            if _layout(ref) != _layout(theirs[name]):
                raise ModelError(
                    f"parameter {name!r} has the layout {_layout(ref)} in the reference and {_layout(theirs[name])} "
                    "in the policy. Shard both models in the same way (same wrapping and mesh), or neither."
                )
        return [(name, ref, theirs[name]) for name, ref in ours.items()]

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the reference in the policy's checkpoint if the reference has been updated in this run."""
        if self.ref_model is None or state.global_step < _settings(args)[0] or args.save_only_model:
            return
        named = _parameters(self.ref_model)
        if is_sharded(self.ref_model) and not any(is_partitioned(p) for p in named.values()):
            if not self._logged:
                logger.warning(
                    "a reference sharded by FSDP is not saved, so this run cannot be resumed with sync_ref_model."
                )
            self._logged = True
            return
        with _gathered(list(named.values())):
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            if state.is_world_process_zero and folder.is_dir():
                tensors = {name: self._masters.get(name, parameter) for name, parameter in named.items()}
                write_tensors(folder / STATE_FILE, tensors, {"step": str(state.global_step)})

    @torch.no_grad()
    def _load(self, folder: Path | None, step: int) -> None:
        from safetensors.torch import load_file

        path = folder / STATE_FILE if folder is not None else None
        if path is None or not path.is_file():
            raise CheckpointError(
                f"resuming at step {step}: the reference was updated before this step, but "
                f"{path or 'the checkpoint folder'} does not exist. Training would continue with the original "
                "reference. Resume from a checkpoint that this callback saved (in output_dir, or named by "
                "args.resume_from_checkpoint)."
            )
        saved, named = load_file(path), _parameters(self.ref_model)
        if odd := sorted(saved.keys() ^ named.keys()):
            raise CheckpointError(f"{path} belongs to another model: only one of the two has a parameter {odd[0]!r}.")
        with _gathered(list(named.values())) as writes:
            for name, parameter in named.items() if writes else ():
                parameter.copy_(saved[name])
                if saved[name].dtype != parameter.dtype:
                    self._masters[name] = saved[name]


def _settings(args: PostTrainingConfig) -> tuple[int, float]:
    return args.ref_model_sync_steps, args.ref_model_mixup_alpha


def _refuse(model: nn.Module, role: str) -> None:
    if adapters_of(model):
        raise ModelError(
            f"sync_ref_model mixes all weights, but the {role} has an adapter. Merge it first (merge_and_unload), or "
            "train without sync_ref_model."
        )
    dtype = next((p.dtype for p in model.parameters() if not p.is_floating_point()), None)
    if dtype is not None or getattr(model, "quantization_method", None) is not None:
        raise ModelError(
            f"sync_ref_model cannot update quantized weights, and the {role} is quantized. Load it in bfloat16 or "
            "float32."
        )


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters by name, without the prefixes of wrappers."""
    named = unwrapped(model).named_parameters()
    return {name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", ""): p for name, p in named}


def _layout(parameter: Any) -> tuple[Any, ...]:
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return shape, getattr(parameter, "placements", None), getattr(parameter, "device_mesh", None)


@contextmanager
def _gathered(parameters: Sequence[Any]) -> Iterator[bool]:
    """Gather the full parameters inside the context. Yield whether this process may write to them."""
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    if not partitioned:
        yield True
        return
    deepspeed = require("deepspeed", "a reference model sharded by ZeRO-3")
    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0):
        yield torch.distributed.get_rank() == 0
