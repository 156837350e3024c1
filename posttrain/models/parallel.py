"""Functions for runs on several processes (DDP, FSDP, ZeRO): collective operations, gathered parameters, sharded
checkpoints, and errors that one process shares with all processes.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.state import GradientState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from posttrain.errors import CheckpointError, ConfigError, PosttrainError
from posttrain.integrations import require
from posttrain.models import token_split

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState
    from torch import nn

    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
WHOLE = "neither FSDP nor DeepSpeed"
# Names of Python modules that define hooks which gather and free parameters.
SHARDING = ("torch.distributed.fsdp", "deepspeed.")


def all_gather_objects(items: list[Any], accelerator: Accelerator) -> list[Any]:
    """Concatenate the lists of all ranks in rank order, and return the result on all ranks. Every rank must call the
    function.
    """
    if accelerator.num_processes == 1:
        return items
    gathered: list[list[Any]] = [[] for _ in range(accelerator.num_processes)]
    torch.distributed.all_gather_object(gathered, items)
    return [item for rank in gathered for item in rank]


def gather_objects(item: object, accelerator: Accelerator) -> list[Any]:
    """Return the objects of all ranks, in rank order, on the main process. Other ranks get an empty list. Every rank must
    call the function.
    """
    if accelerator.num_processes == 1:
        return [item]
    gathered: list[Any] | None = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object(item, gathered, dst=0)
    return gathered or []


def scatter_objects(items: list[Any], accelerator: Accelerator) -> Any:
    """Send one item of the main process's list to each rank. Return the item for this rank. Every rank must call the
    function.
    """
    if accelerator.num_processes == 1:
        return items[0]
    mine: list[Any] = [None]
    torch.distributed.scatter_object_list(mine, items if accelerator.is_main_process else None, src=0)
    return mine[0]


def broadcast_object(item: T, accelerator: Accelerator) -> T:
    """Return the main process's object on all ranks. Every rank must call the function.

    With an all-gather, every rank would instead receive one copy per rank.
    """
    if accelerator.num_processes == 1:
        return item
    shared = [item]
    torch.distributed.broadcast_object_list(shared, src=0)
    return shared[0]


def exchange_objects(parcels: list[list[Any]], accelerator: Accelerator) -> list[Any]:
    """Send a list of items to each rank. Return the items that were sent to this rank, in rank order. Every rank must call
    the function.

    Args:
        parcels: One list of items per destination rank. Each list is sent only to that rank, so that memory does not grow
            with the number of ranks.
        accelerator: Accelerator of the run.
    """
    if accelerator.num_processes == 1:
        return parcels[0]
    packed = [torch.frombuffer(bytearray(pickle.dumps(items)), dtype=torch.uint8) for items in parcels]
    mine = torch.tensor([len(data) for data in packed], device=accelerator.device)  # (ranks,) bytes
    theirs = torch.empty_like(mine)
    torch.distributed.all_to_all_single(theirs, mine)
    sent = torch.cat(packed).to(accelerator.device)
    got = torch.empty(int(theirs.sum()), dtype=torch.uint8, device=accelerator.device)
    torch.distributed.all_to_all_single(got, sent, theirs.tolist(), mine.tolist())
    return [item for data in got.cpu().split(theirs.tolist()) for item in pickle.loads(data.numpy().tobytes())]


def all_reduce_sum(values: list[float], accelerator: Accelerator) -> list[float]:
    """Sum each number of a list over ranks. All numbers are summed in one collective operation."""
    if accelerator.num_processes == 1:
        return values
    # MPS does not support float64, so use the CPU.
    device = "cpu" if accelerator.device.type == "mps" else accelerator.device
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(packed)
    return packed.tolist()


def shards_parameters(accelerator: Accelerator) -> bool:
    """Return whether parameters are sharded (FSDP, ZeRO-3), so that a forward pass is a collective operation. All ranks must
    then run the same number of passes.
    """
    name = str(accelerator.distributed_type)
    if "FSDP" in name:
        return True
    plugin = _deepspeed_plugin(accelerator)
    return "DEEPSPEED" in name and plugin is not None and plugin.zero_stage == 3


def _deepspeed_plugin(accelerator: Accelerator) -> Any:
    return getattr(accelerator.state, "deepspeed_plugin", None)


def _fsdp_plugin(accelerator: Accelerator) -> Any:
    return getattr(accelerator.state, "fsdp_plugin", None)


def refuse_lost_sharding(accelerator: Accelerator, args: PostTrainingConfig) -> None:
    """Raise an error if FSDP is requested but accelerate silently uses DDP, for example on a CPU.

    Raises:
        ConfigError: The config or the launcher requests FSDP, but each of the processes would hold the whole model.
    """
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    name = str(accelerator.distributed_type)
    if accelerator.num_processes > 1 and (args.fsdp or launched) and "FSDP" not in name:
        raise lost_sharding(name.rpartition(".")[2], accelerator.device.type, accelerator.num_processes)


def lost_sharding(kind: str, device: str, processes: int) -> ConfigError:
    """Create the error for a run that requests FSDP although accelerate uses the distributed type ``kind``."""
    return ConfigError(
        f"FSDP is requested, but accelerate uses {kind} on {device!r}, so each of the {processes} processes would have the whole "
        "model. Fix: use DDP on a CPU (--accelerate_config ddp), or make the GPUs visible to the processes."
    )


def shard_present_layers(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Set FSDP's layer classes to the default classes that the model contains, unless the user has set them.

    By default, accelerate wraps all classes in the model's ``_no_split_modules``, and fails if the model has no module of one
    class. For example, LLaVA lists CLIP's text layers, although it uses only CLIP's vision tower.
    """
    plugin = _fsdp_plugin(accelerator)
    if plugin is not None and plugin.transformer_cls_names_to_wrap is None:
        present = {type(module).__name__ for module in model.modules()}
        named = getattr(model, "_no_split_modules", None) or ()
        plugin.transformer_cls_names_to_wrap = [name for name in named if name in present]


def is_prepared_late(accelerator: Accelerator) -> bool:
    """Return whether a model can run only after ``accelerator.prepare`` and stores its gradients outside of
    ``parameter.grad``.

    The result is True for FSDP and for DeepSpeed at any stage.
    """
    return any(name in str(accelerator.distributed_type) for name in ("FSDP", "DEEPSPEED"))


def equal_passes(count: int, accelerator: Accelerator) -> int:
    """Return the number of passes that each rank must run. If ranks must run passes together, the result is the maximum of
    ``count`` over ranks. Otherwise, the result is ``count``.

    With FSDP, ZeRO-3 and sequence parallelism, the forward pass is a collective operation. With ZeRO-2, the backward pass is
    a collective operation, because it reduces gradients in each pass.
    """
    if not is_prepared_late(accelerator) and token_split.active() is None:
        return count
    counts = torch.tensor([count], device=accelerator.device)
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX)
    return int(counts)


def in_step(items: Sequence[T], accelerator: Accelerator, spare: Callable[[], T]) -> Iterator[tuple[T, bool]]:
    """Yield each item with the flag True. If a pass is a collective operation, then also yield filler items with the flag
    False until all ranks have yielded the same number of items. The caller must run a pass for filler items, but must not use
    its result.

    Args:
        items: Items of this rank. The list may be empty.
        accelerator: Accelerator of the run. Every rank must call this function, even if it has no items.
        spare: Function that creates an item on a rank without items.
    """
    for index in range(equal_passes(len(items), accelerator)):
        if index < len(items):
            yield items[index], True
        else:
            yield (items[-1] if items else spare()), False


def is_deepspeed(model: nn.Module) -> bool:
    """Return whether a model is wrapped in DeepSpeed's engine, at any stage."""
    return hasattr(model, "set_gradient_accumulation_boundary")


def backward(accelerator: Accelerator, loss: torch.Tensor) -> None:
    """Run the backward pass. DeepSpeed is configured not to divide the loss, because the loss is already normalized over the
    optimizer step.
    """
    deepspeed = "DEEPSPEED" in str(accelerator.distributed_type)
    accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))


@contextmanager
def no_sync(model: nn.Module, last: bool) -> Iterator[None]:
    """Defer the averaging of gradients and DeepSpeed's optimizer step to the last of several backward passes."""
    if last or not hasattr(model, "no_sync"):
        yield
        return
    # Set the gradient state directly. DeepSpeed's no_sync does not support stages 2 and 3, and accelerate would run an
    # optimizer step in every backward pass of the last batch.
    if is_deepspeed(model):
        state = GradientState()
        before = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            yield
        finally:
            state._set_sync_gradients(before)
        return
    with model.no_sync():
        yield


@contextmanager
def whole_parameters(model: torch.nn.Module, accelerator: Accelerator) -> Iterator[torch.nn.Module]:
    """Yield the model without wrappers and with all parameters gathered, for generation. The forward pass of this model is
    not a collective operation.
    """
    name = str(accelerator.distributed_type)
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    if "DEEPSPEED" in name and shards_parameters(accelerator):
        deepspeed = require("deepspeed", "ZeRO")
        with deepspeed.zero.GatheredParameters(list(bare.parameters())), _without_sharding(bare):
            yield bare
    elif "FSDP" in name:
        with _summon_fsdp(model, bare) as whole, _without_sharding(bare):
            yield whole
    else:
        yield bare


@contextmanager
def _without_sharding(model: torch.nn.Module) -> Iterator[None]:
    """Remove the hooks that gather and free parameters inside the context, so that ranks can run different numbers of
    passes.
    """
    removed: list[tuple[Any, list[Any], dict[Any, Any]]] = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            removed.append((hooks, list(hooks), {key: hook for key, hook in hooks.items() if shards(hook)}))
    for hooks, _, taken in removed:
        for key in taken:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, order, taken in removed:
            hooks.update(taken)
            for key in order:
                if key in hooks:
                    hooks.move_to_end(key)


def gathers_in_forward(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether a forward pass of any of the modules is a collective operation. Inside `whole_parameters`, the result is
    False.
    """
    return any(shards(hook) for module in modules for hook in module._forward_pre_hooks.values())


def shards(hook: Any) -> bool:
    """Return whether a module hook of FSDP or DeepSpeed gathers or frees parameters."""
    return str(getattr(hook, "__module__", "")).startswith(SHARDING)


@contextmanager
def _summon_fsdp(model: nn.Module, bare: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if flattens_parameters(model):
        with summoned(model):
            yield bare
        return
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.unshard()
    try:
        yield bare
    finally:
        for module in modules:
            module.reshard()


def refuse_other_optimizer(folder: Path, accelerator: Accelerator) -> None:
    """Raise an error if this run cannot load the optimizer of a checkpoint.

    Without this check, transformers would start with a new optimizer, or it would fail with an unclear error.

    An optimizer that was saved with FSDP can be loaded with and without FSDP. An optimizer that was saved with ZeRO can be
    loaded on any number of processes. However, either both runs must use ZeRO-3, or both runs must use a lower stage.

    Raises:
        CheckpointError: The optimizer or the learning-rate schedule is missing, or the optimizer was saved with incompatible
            sharding, or it lacks a shard.
    """
    files = {
        "ZeRO-3": "global_step*/zero_pp_rank_*_model_states.pt", "ZeRO below 3": "global_step*/*_model_states.pt",
        "FSDP": "pytorch_model_fsdp*", WHOLE: "optimizer.pt",
    }  # fmt: skip
    wrote = next((kind for kind, pattern in files.items() if any(folder.glob(pattern))), None)
    if wrote is None:
        raise CheckpointError(
            f"{str(folder)!r} contains no optimizer, e.g. because it was saved with save_only_model=True. A resumed run would "
            "start with a new optimizer and the learning rate of step 1. Fix: use the folder as the model of a new run. To "
            "resume runs in the future, set save_only_model=False."
        )
    if wrote in ("FSDP", WHOLE) and not (folder / "scheduler.pt").exists():
        raise CheckpointError(
            f"{str(folder)!r} has no file scheduler.pt. A resumed run would start with a new optimizer and the learning rate of "
            "step 1. Fix: restore the file, resume from another checkpoint, or use the folder as the model of a new run."
        )
    name, runs = str(accelerator.distributed_type), WHOLE
    if "FSDP" in name:
        runs = "FSDP"
    elif "DEEPSPEED" in name:
        runs = "ZeRO-3" if shards_parameters(accelerator) else "ZeRO below 3"
    before, now = len(list(folder.glob("rng_state*.pth"))), accelerator.num_processes
    ranks = [f"{count} process{'' if count == 1 else 'es'}" for count in (before, now)]
    if wrote is not None and wrote != runs and (wrote, runs) != ("FSDP", WHOLE):
        raise CheckpointError(
            f"the optimizer of {str(folder)!r} was saved by {ranks[0]} with {wrote}, but this run has {ranks[1]} with {runs} and "
            f"would start with a new optimizer. Fix: resume with {wrote}, or use the folder as the model of a new run."
        )
    shards = zero_shards(folder)
    if shards and len(shards) != before:
        raise CheckpointError(
            f"{str(shards[0].parent)!r} has {len(shards)} of {before} shards of the optimizer. Fix: copy the missing shards "
            "there (each node may have its own shards), or resume from another checkpoint."
        )


def zero_shards(folder: Path) -> list[Path]:
    """Return the optimizer shards of a ZeRO checkpoint, one per process. Return an empty list for other checkpoints."""
    return sorted(folder.glob("global_step*[0-9]/*_optim_states.pt"))


@contextmanager
def reading_zero(accelerator: Accelerator, engine: Callable[[], Any], folder: str | None) -> Iterator[None]:
    """Allow ZeRO shards to be loaded on a different number of processes. The shards are first converted to DeepSpeed's
    universal checkpoint format.

    The main process creates the universal checkpoint next to the shards, and deletes it after loading. If the user has
    already created a universal checkpoint, that checkpoint is used and not deleted.

    Args:
        accelerator: Accelerator of the run.
        engine: Function that returns the model with its current wrapper.
        folder: Folder of the checkpoint. None: no checkpoint is loaded.
    """
    shards = zero_shards(Path(folder)) if folder is not None and _deepspeed_plugin(accelerator) is not None else []
    latest, wrote = Path(folder or "", "latest_universal"), 0
    # Read the shards first. If DeepSpeed failed to read a shard on only one process, the other processes would wait forever
    # in a collective operation.
    if shards:
        with failing_together(accelerator):
            wrote = _read(shards[accelerator.process_index % len(shards)])["processes"]
    if not shards or wrote == accelerator.num_processes:
        yield
        return
    makes = accelerator.is_main_process and not latest.is_file()
    with failing_together(accelerator):
        _make_universal(shards, wrote) if makes else None
    universal = latest.with_name(latest.read_text(encoding="utf-8").strip())
    with _loading_universal(accelerator, engine):
        yield
    # Restore the settings of each parameter group. With stage 3, DeepSpeed gives all groups the settings of the first group
    # (e.g. its weight decay) and a single step count.
    optimizer = engine().optimizer.optimizer
    saved = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)["param_groups"]
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})
    for state in optimizer.state.values():
        state["step"] = copy.deepcopy(state["step"])
    accelerator.wait_for_everyone()
    if makes:
        latest.unlink()
        shutil.rmtree(universal)


@contextmanager
def _loading_universal(accelerator: Accelerator, engine: Callable[[], Any]) -> Iterator[None]:
    """Make DeepSpeed load a universal checkpoint, in an existing engine and in an engine that is created inside the context."""
    config = _deepspeed_plugin(accelerator).deepspeed_config
    before = config.get("checkpoint", {})
    config["checkpoint"] = before | {"load_universal": True}
    if is_deepspeed(engine()):
        engine()._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        config["checkpoint"] = before
        if is_deepspeed(engine()):
            engine()._config.load_universal_checkpoint = False


def _make_universal(shards: list[Path], wrote: int) -> None:
    """Convert ZeRO shards with DeepSpeed's ``ds_to_universal``. The file with the name of the result's folder is written
    last, so that an incomplete folder is never used.
    """
    source = shards[0].parent
    universal = source.with_name(f"{source.name}_universal")
    # An existing folder is incomplete, because it is left over from an interrupted run.
    shutil.rmtree(universal, ignore_errors=True)
    places = {"input_folder": str(source), "output_folder": str(universal)}
    work = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    logger.info(
        "Converting the optimizer shards of %d processes in %s for another number of processes, in %s.",
        wrote,
        source,
        universal.name,
    )
    try:
        if len(shards) != wrote:
            raise ValueError(f"only {len(shards)} of them exist")
        if (states := _read(shards[0])["kept"]) != ["exp_avg", "exp_avg_sq", "step"]:
            raise ValueError(
                f"DeepSpeed checkpoints can only be converted for Adam, but this optimizer has the states {states}"
            )
        with redirect_stdout(sys.stderr):
            converter = require("deepspeed.checkpoint.ds_to_universal", "ZeRO")
            converter.main(SimpleNamespace(**places, **work, inject_missing_state=True, strict=True))
    except Exception as error:
        shutil.rmtree(universal, ignore_errors=True)
        raise CheckpointError(
            f"the shards of {wrote} processes in {str(source)!r} could not be converted for another number of processes: "
            f"{type(error).__name__}: {error}. Fix: resume on {wrote} processes, or from another checkpoint."
        ) from error


def _read(shard: Path) -> dict[str, Any]:
    """Read two values from a ZeRO shard: the number of processes that wrote the shards (``processes``), and the names of the
    optimizer states (``kept``).
    """
    # With mmap=True, only the structure of the file is read, and not the data of its tensors.
    try:
        saved = torch.load(shard, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]
        count, inner = saved["partition_count"], saved.get("base_optimizer_state") or saved["optimizer_state_dict"]
        states = sorted({name for group in inner["state"].values() for name in group})
    except Exception as error:
        raise CheckpointError(
            f"{str(shard)!r} cannot be read: {error}. Fix: resume from another checkpoint."
        ) from error
    return {"processes": count[0] if isinstance(count, list) else count, "kept": states}


@contextmanager
def reading_fsdp(accelerator: Accelerator, folder: str | None, *, shards: bool) -> Iterator[bool]:
    """Configure accelerate to load an FSDP checkpoint in the format of its files (full or sharded), even in a process without
    FSDP.

    Yields: True if the folder contains an FSDP checkpoint, otherwise the value of the argument ``shards``.
    """
    saved = sorted(Path(folder).glob("pytorch_model_fsdp*")) if folder is not None else []
    if not saved:
        yield shards
        return
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    state = accelerator.state
    plugin = _fsdp_plugin(accelerator)
    reader = copy.copy(plugin) if shards else FullyShardedDataParallelPlugin(fsdp_version=2)
    reader.state_dict_config = reader.optim_state_dict_config = None
    reader.set_state_dict_type("SHARDED_STATE_DICT" if saved[0].is_dir() else "FULL_STATE_DICT")
    kind = state.distributed_type
    if not shards:
        # A single process has no other ranks to which weights must be sent.
        reader.state_dict_config.rank0_only = state.num_processes > 1 and not saved[0].is_dir()
        state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = reader
    try:
        yield True
    finally:
        state.fsdp_plugin, state.distributed_type = plugin, kind


@contextmanager
def saved_whole(accelerator: Accelerator, wanted: bool) -> Iterator[None]:
    """Make FSDP save the full model inside the context if ``wanted`` is True. If FSDP saved shards, transformers would not
    save the model.
    """
    plugin = _fsdp_plugin(accelerator)
    if plugin is None or not wanted:
        yield
        return
    kind, plugin.state_dict_type = plugin.state_dict_type, "FULL_STATE_DICT"
    try:
        yield
    finally:
        plugin.state_dict_type = kind


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether ZeRO-3 has partitioned a parameter over the processes."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Gather parameters that ZeRO-3 has partitioned, inside the context. Gathering is a collective operation. Without ZeRO-3,
    the context has no effect.
    """
    sharded = [p for p in parameters if is_partitioned(p)]
    if not sharded:
        yield
        return
    deepspeed = require("deepspeed", "ZeRO")
    with deepspeed.zero.GatheredParameters(sharded):
        yield


def frozen_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the local shard of each frozen parameter. A parameter that is not sharded is yielded whole."""
    for module in model.modules():
        # After a forward pass without a backward pass, FSDP2 leaves some parameters gathered. Reshard these parameters.
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            own: Any = getattr(parameter, "ds_tensor", parameter)
            yield name, local_part(own).detach()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor that FSDP2 has sharded. Other tensors are returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Any) -> torch.Tensor:
    """Return the full tensor. For a tensor that FSDP2 has sharded, this is a collective operation, and every rank must call
    the function.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flattens_parameters(model: torch.nn.Module) -> bool:
    """Return whether FSDP1 has flattened the parameters of a module into one tensor, which hides their names."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


@contextmanager
def summoned(model: torch.nn.Module) -> Iterator[None]:
    """Restore the full parameters of FSDP1 under their names inside the context. Without FSDP1, the context has no effect."""
    if not flattens_parameters(model):
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        yield


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the block on the main process first (e.g. to fill a cache), then on one process per node, then on all other
    processes.

    If one process fails, all processes raise an error (`failing_together`). Otherwise, the other processes would wait forever
    in the next collective operation.
    """
    from accelerate import PartialState

    state = PartialState()
    turns = (state.is_main_process, state.is_local_main_process)
    with failing_together(state):
        for _ in range(turns.count(False)):
            state.wait_for_everyone()
        try:
            yield
        # Let the waiting processes continue even if this process fails.
        finally:
            for _ in range(turns.count(True)):
                state.wait_for_everyone()


@contextmanager
def failing_together(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """Raise an exception of one process on all processes, with the index of the process in the message. All processes must
    enter the context.

    Args:
        accelerator: Accelerator of the run, or its `PartialState` before an accelerator exists.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if accelerator.num_processes == 1:
        failures = [(0, error)] if error is not None else []
    else:
        mine = [] if error is None else [(accelerator.process_index, _portable(error))]
        failures = all_gather_objects(mine, accelerator)
    if not failures:
        return
    rank, first = failures[0]
    raised = first if error is None else error
    if len(failures) < accelerator.num_processes:
        where = f"process {rank if error is None else accelerator.process_index}"
        if raised.args and isinstance(raised.args[0], str):
            raised.args = (f"{where}: {raised.args[0]}", *raised.args[1:])
        else:
            raised.add_note(f"It was raised by {where}.")
    raise raised


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled: the error itself, or a `PosttrainError` with the same message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PosttrainError(f"{type(error).__name__}: {error}")
    return error


def run_and_share(function: Callable[[], Any], accelerator: Accelerator) -> Any:
    """Run ``function`` on this rank. If the function fails on any rank, raise an error on all ranks."""
    with failing_together(accelerator):
        return function()


def bf16_is_faster(*, on_cpu: bool = False) -> bool:
    """Return whether bf16 is faster than fp32, i.e. on a GPU with native bf16 and on a CPU with AMX or AVX512-BF16.

    On a CPU with only AVX2, a matrix product in bf16 took three times as long as in fp32.

    Args:
        on_cpu: Whether the run uses the CPU even if a GPU is available.
    """
    if torch.cuda.is_available() and not on_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.backends.mps.is_available() and not on_cpu:
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags
