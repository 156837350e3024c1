"""The only file that says DDP, FSDP or ZeRO: what the trainers need to know of several processes."""

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
SHARDING = ("torch.distributed.fsdp", "deepspeed.")  # Where the hooks come from that gather parameters and free them.


def all_gather_objects(items: list[Any], accelerator: Accelerator) -> list[Any]:
    """Concatenate every rank's list, in rank order, on all ranks; every rank must call it."""
    if accelerator.num_processes == 1:
        return items
    gathered: list[list[Any]] = [[] for _ in range(accelerator.num_processes)]
    torch.distributed.all_gather_object(gathered, items)
    return [item for rank in gathered for item in rank]


def gather_objects(item: object, accelerator: Accelerator) -> list[Any]:
    """One object of every rank, in rank order, on the main process; empty elsewhere. Every rank must call it."""
    if accelerator.num_processes == 1:
        return [item]
    gathered: list[Any] | None = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object(item, gathered, dst=0)
    return gathered or []


def scatter_objects(items: list[Any], accelerator: Accelerator) -> Any:
    """To each rank its object of the main process's list; every rank must call it."""
    if accelerator.num_processes == 1:
        return items[0]
    mine: list[Any] = [None]
    torch.distributed.scatter_object_list(mine, items if accelerator.is_main_process else None, src=0)
    return mine[0]


def broadcast_object(item: T, accelerator: Accelerator) -> T:
    """The main process's object on all ranks; every rank must call it. Gathering it would make a copy a rank on each rank."""
    if accelerator.num_processes == 1:
        return item
    shared = [item]
    torch.distributed.broadcast_object_list(shared, src=0)
    return shared[0]


def exchange_objects(parcels: list[list[Any]], accelerator: Accelerator) -> list[Any]:
    """What every rank has for this one, in rank order; every rank must call it.

    Args:
        parcels: Items for each rank; none of them goes anywhere else, so that memory does not grow with the ranks.
        accelerator: Of the run.
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
    """Sum numbers over ranks, all of them in one collective."""
    if accelerator.num_processes == 1:
        return values
    # MPS has no float64.
    device = "cpu" if accelerator.device.type == "mps" else accelerator.device
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(packed)
    return packed.tolist()


def shards_parameters(accelerator: Accelerator) -> bool:
    """Whether a forward pass is a collective (FSDP, ZeRO-3), so that ranks must run equally many."""
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
    """Refuse FSDP that accelerate makes DDP of: it shards on accelerators alone, and says nothing of it on a CPU.

    Raises:
        ConfigError: The config or the launcher asked for FSDP, and several processes hold the whole model each.
    """
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    name = str(accelerator.distributed_type)
    if accelerator.num_processes > 1 and (args.fsdp or launched) and "FSDP" not in name:
        raise ConfigError(
            f"FSDP was asked for, and accelerate runs {name.rpartition('.')[2]} on {accelerator.device.type!r}: every one of "
            f"{accelerator.num_processes} processes would hold the whole model. Fix: leave FSDP out on a CPU (DDP: "
            "--accelerate_config ddp), or show the processes their GPUs."
        )


def shard_present_layers(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """FSDP's units are, by default, layers of all classes that a family may hold: accelerate ends at one that is not there.

    LLaVA lists the text half of CLIP, of which it takes the tower alone.
    """
    plugin = _fsdp_plugin(accelerator)
    if plugin is not None and plugin.transformer_cls_names_to_wrap is None:
        present = {type(module).__name__ for module in model.modules()}
        named = getattr(model, "_no_split_modules", None) or ()
        plugin.transformer_cls_names_to_wrap = [name for name in named if name in present]


def is_prepared_late(accelerator: Accelerator) -> bool:
    """Whether a model only runs once training has prepared it, and gradients are no longer at the parameters.

    So it is with FSDP, and with DeepSpeed of any stage.
    """
    return any(name in str(accelerator.distributed_type) for name in ("FSDP", "DEEPSPEED"))


def equal_passes(count: int, accelerator: Accelerator) -> int:
    """How many passes every rank must run: ``count``, or the largest over ranks where a pass is a collective.

    Forward is one under FSDP and ZeRO-3, and where processes hold pieces of the same rows; backward is one under ZeRO-2, which
    hands gradients to their owners in each.
    """
    if not is_prepared_late(accelerator) and token_split.active() is None:
        return count
    counts = torch.tensor([count], device=accelerator.device)
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX)
    return int(counts)


def in_step(items: Sequence[T], accelerator: Accelerator, spare: Callable[[], T]) -> Iterator[tuple[T, bool]]:
    """Each item with True; then, where a forward pass is a collective, others with False until every rank has run equally many.

    Args:
        items: Of this rank, maybe none.
        accelerator: Of the run; every rank must come by, one without items too.
        spare: Makes what a rank without any item runs in place of one.
    """
    for index in range(equal_passes(len(items), accelerator)):
        if index < len(items):
            yield items[index], True
        else:
            yield (items[-1] if items else spare()), False


def is_deepspeed(model: nn.Module) -> bool:
    """Whether a model is wrapped in DeepSpeed's engine, of any stage."""
    return hasattr(model, "set_gradient_accumulation_boundary")


def backward(accelerator: Accelerator, loss: torch.Tensor) -> None:
    """Backward of a loss that is divided by the counts of the whole optimiser step: DeepSpeed must not divide it again."""
    deepspeed = "DEEPSPEED" in str(accelerator.distributed_type)
    accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))


@contextmanager
def inference(model: torch.nn.Module, accelerator: Accelerator) -> Iterator[torch.nn.Module]:
    """The model outside of DDP in eval mode, without gradients, under the run's precision; training mode is restored.

    DDP's forward broadcasts buffers, now and then: a collective, in a pass that other ranks may not run.
    """
    model = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            yield model
    finally:
        model.train(training)


@contextmanager
def no_sync(model: nn.Module, last: bool) -> Iterator[None]:
    """Hold gradient averaging back until the last of several backward passes; with DeepSpeed, also the optimiser's step."""
    if last or not hasattr(model, "no_sync"):
        yield
        return
    # Its own no_sync refuses stages 2 and 3, and accelerate steps at every backward of the last batch.
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
    """The bare model with all its parameters present, for in-process generation: a forward in it is no collective."""
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
    """No module gathers or frees its parameters in its forward: ranks run different numbers of forwards meanwhile."""
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
    """Whether a forward of any of these modules is a collective by itself; not inside `whole_parameters`."""
    return any(shards(hook) for module in modules for hook in module._forward_pre_hooks.values())


def shards(hook: Any) -> bool:
    """Whether a hook gathers parameters and frees them."""
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
    """Refuse a checkpoint whose optimizer this run cannot read: transformers would begin with a new one, or end in its depths.

    Of FSDP it is read with FSDP and without, of ZeRO with the same division of parameters, by any number of processes.

    Raises:
        CheckpointError: There is none, it is of another kind, or a shard is not there.
    """
    files = {
        "ZeRO-3": "global_step*/zero_pp_rank_*_model_states.pt", "ZeRO below 3": "global_step*/*_model_states.pt",
        "FSDP": "pytorch_model_fsdp*", WHOLE: "optimizer.pt",
    }  # fmt: skip
    wrote = next((kind for kind, pattern in files.items() if any(folder.glob(pattern))), None)
    if wrote is None:
        raise CheckpointError(
            f"{str(folder)!r} holds no optimizer, as save_only_model=True leaves it out: a resumed run would begin with a new "
            "one, and its learning rate as in step 1. Fix: give the folder as the model of a new run; and "
            "save_only_model=False where a run is to be resumed."
        )
    name, runs = str(accelerator.distributed_type), WHOLE
    if "FSDP" in name:
        runs = "FSDP"
    elif "DEEPSPEED" in name:
        runs = "ZeRO-3" if shards_parameters(accelerator) else "ZeRO below 3"
    before, now = len(list(folder.glob("rng_state*.pth"))), accelerator.num_processes
    said = [f"{count} process{'' if count == 1 else 'es'}" for count in (before, now)]
    if wrote is not None and wrote != runs and (wrote, runs) != ("FSDP", WHOLE):
        raise CheckpointError(
            f"the optimizer of {str(folder)!r} was written by {said[0]} with {wrote}, and this run is {said[1]} with {runs}: "
            f"it would go on with a new one. Fix: resume with {wrote}, or give the folder as the model of a new run."
        )
    shards = zero_shards(folder)
    if shards and len(shards) != before:
        raise CheckpointError(
            f"{str(shards[0].parent)!r} holds {len(shards)} of {before} shards of the optimizer. Fix: bring them back (each node "
            "may have kept its own), or resume from another checkpoint."
        )


def zero_shards(folder: Path) -> list[Path]:
    """The optimizer's shards in a checkpoint of ZeRO, one a process; empty for another."""
    return sorted(folder.glob("global_step*[0-9]/*_optim_states.pt"))


@contextmanager
def reading_zero(accelerator: Accelerator, engine: Callable[[], Any], folder: str | None) -> Iterator[None]:
    """Shards of ZeRO are read by another number of processes through DeepSpeed's universal checkpoint.

    The first process makes it beside the shards and removes it once it was read; one that a user made is taken and stays.

    Args:
        accelerator: Of the run.
        engine: The model as the run wraps it, now.
        folder: A checkpoint; None: nothing is read.
    """
    shards = zero_shards(Path(folder)) if folder is not None and _deepspeed_plugin(accelerator) is not None else []
    latest, wrote = Path(folder or "", "latest_universal"), 0
    if shards:  # In DeepSpeed's hands the process that fails would leave the others in a collective.
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
    # Stage 3 gives all groups of parameters the settings of the first, its weight decay too, and one count of steps to share.
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
    """What DeepSpeed loads is a universal checkpoint: an engine made inside reads the config, one that is there has read it."""
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
    """DeepSpeed's ``ds_to_universal``; it names the folder it made last, in a file, so that half of one is never read."""
    source = shards[0].parent
    universal = source.with_name(f"{source.name}_universal")
    shutil.rmtree(universal, ignore_errors=True)  # Half of one, of a run that was killed.
    places = {"input_folder": str(source), "output_folder": str(universal)}
    work = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    logger.info("The shards of %d processes in %s are joined for another number, in %s.", wrote, source, universal.name)
    try:
        if len(shards) != wrote:
            raise ValueError(f"{len(shards)} of them are here")
        if (kept := _read(shards[0])["kept"]) != ["exp_avg", "exp_avg_sq", "step"]:
            raise ValueError(f"DeepSpeed joins the states of Adam, and this optimizer keeps {kept}")
        with redirect_stdout(sys.stderr):
            converter = require("deepspeed.checkpoint.ds_to_universal", "ZeRO")
            converter.main(SimpleNamespace(**places, **work, inject_missing_state=True, strict=True))
    except Exception as error:
        shutil.rmtree(universal, ignore_errors=True)
        raise CheckpointError(
            f"the shards of {wrote} processes in {str(source)!r} could not be joined for another number: "
            f"{type(error).__name__}: {error}. Fix: resume on {wrote}, or from another checkpoint."
        ) from error


def _read(shard: Path) -> dict[str, Any]:
    """How many processes wrote theirs, and which states the optimizer keeps."""
    try:  # Mapped: no tensor is read.
        saved = torch.load(shard, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]
        count, inner = saved["partition_count"], saved.get("base_optimizer_state") or saved["optimizer_state_dict"]
        kept = sorted({name for group in inner["state"].values() for name in group})
    except Exception as error:
        raise CheckpointError(
            f"{str(shard)!r} cannot be read: {error}. Fix: resume from another checkpoint."
        ) from error
    return {"processes": count[0] if isinstance(count, list) else count, "kept": kept}


@contextmanager
def reading_fsdp(accelerator: Accelerator, folder: str | None, *, shards: bool) -> Iterator[bool]:
    """A checkpoint of FSDP is read as it was written, whole or in shards, by a process without FSDP too.

    Yields:
        Whether to read as FSDP does; ``shards`` where the checkpoint is of another kind.
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
        # One process has nobody that waits for what it read.
        reader.state_dict_config.rank0_only = state.num_processes > 1 and not saved[0].is_dir()
        state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = reader
    try:
        yield True
    finally:
        state.fsdp_plugin, state.distributed_type = plugin, kind


@contextmanager
def saved_whole(accelerator: Accelerator, wanted: bool) -> Iterator[None]:
    """What FSDP saves is the whole model, where it is wanted: of a run with sharded checkpoints transformers saves nothing."""
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
    """Whether ZeRO-3 has divided a parameter over the processes."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """A few parameters whole while they are read; a collective under ZeRO-3, nothing elsewhere."""
    sharded = [p for p in parameters if is_partitioned(p)]
    if not sharded:
        yield
        return
    deepspeed = require("deepspeed", "ZeRO")
    with deepspeed.zero.GatheredParameters(sharded):
        yield


def frozen_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """By name what this process holds of parameters that are not trained, a shard where they are sharded; no collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # FSDP2 leaves some whole after a pass without a backward.
            module.reshard()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            own: Any = getattr(parameter, "ds_tensor", parameter)
            yield name, local_part(own).detach()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor that FSDP2 may have cut into shards."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Any) -> torch.Tensor:
    """All of a tensor that FSDP2 may have cut into shards; then a collective that every rank must join."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flattens_parameters(model: torch.nn.Module) -> bool:
    """Whether parameters are flattened into one tensor a module (FSDP1), which hides their names."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


@contextmanager
def summoned(model: torch.nn.Module) -> Iterator[None]:
    """Flattened parameters whole and by their names while they are read (FSDP1 has no other way); elsewhere nothing."""
    if not flattens_parameters(model):
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        yield


@contextmanager
def main_process_first() -> Iterator[None]:
    """One process does the work that fills a cache, then one of each node, then the others read it.

    Where one of them fails, all do (`failing_together`): the others would wait for it in the next collective.
    """
    from accelerate import PartialState

    state = PartialState()
    turns = (state.is_main_process, state.is_local_main_process)
    with failing_together(state):
        for _ in range(turns.count(False)):
            state.wait_for_everyone()
        try:
            yield
        finally:  # Where the first one fails, the others are let go.
            for _ in range(turns.count(True)):
                state.wait_for_everyone()


@contextmanager
def failing_together(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """What one process raises inside is raised on all of them, with the number of the one that failed; all must enter.

    Args:
        accelerator: Of the run, or its `PartialState` while there is none.
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
    """The error, or one that says the same where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PosttrainError(f"{type(error).__name__}: {error}")
    return error


def run_and_share(function: Callable[[], Any], accelerator: Accelerator) -> Any:
    """Run something that may fail on one rank only, and make every rank see the same result: the value, or the error."""
    with failing_together(accelerator):
        return function()


def bf16_is_faster(*, on_cpu: bool = False) -> bool:
    """Whether this device is really faster in bf16: a GPU that has it, or a CPU with AMX or AVX512-BF16.

    On an AVX2 CPU a bf16 product was measured three times slower than an fp32 one.

    Args:
        on_cpu: The CPU is asked about, whatever else there is.
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
