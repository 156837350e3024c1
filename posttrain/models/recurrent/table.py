"""Replacement of the recurrent functions in transformers' modeling files, for prefix trees and sampling: `install`,
`uninstall` and `replaced`.

transformers has no registry for the functions of recurrent layers, so they are replaced in the modeling files. Two arguments
of the model's call reach the functions through the layers: ``forest`` for packed prefix trees, and ``recurrent_states`` for
sampling (`posttrain.models.recurrent.states`). Calls without these arguments run the original function. Projections, norms
and gates are not changed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from posttrain.errors import ModelError
from posttrain.models.recurrent import functions
from posttrain.models.recurrent.trees import Trees

logger = logging.getLogger(__name__)

CONVOLUTION = {"causal_conv1d_fn": functions.convolution}
DELTA = {**CONVOLUTION, "torch_chunk_gated_delta_rule": functions.gated_delta_rule}
STATE_SPACE = {
    **CONVOLUTION,
    "mamba2_chunk_scan": functions.state_space,
    "mamba2_split_conv1d_scan_combined": functions.no_fused_kernel,
}
KIMI = {**CONVOLUTION, "chunk_kimi_delta_attention": functions.kimi_delta_attention}
# Map from the folder of each modeling file to the functions in the file that mix tokens without attention, and their
# replacements.
FAMILIES: dict[str, dict[str, Callable[..., Any]]] = {
    "qwen3_next": DELTA,
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA,
    "olmo_hybrid": DELTA,
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION,
    "nemotron_h": STATE_SPACE,
    "falcon_h1": STATE_SPACE,
    "granitemoehybrid": STATE_SPACE,
    "bamba": STATE_SPACE,
    "zamba2": STATE_SPACE,
    "kimi_linear": KIMI,
    "bailing_hybrid": KIMI,
    "minimax": {"MiniMaxLightningAttention.forward": functions.lightning_attention},
}
KINDS = ("linear_attention", "conv")  # Layer types with recurrent layers. Models create one mask per layer type.
# Names of arguments with which optional kernels separate the sequences of a packed row.
PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")


def replaced(model: nn.Module) -> str:
    """Return the name of the model's modeling file if all recurrent functions in it can be replaced. Otherwise, return ""."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else model
    file = type(decoder).__module__
    library, _, rest = file.partition(".models.")
    if library != "transformers" or rest.split(".")[0] not in FAMILIES:
        return ""
    # Check the functions themselves, because other versions of transformers may lack a function or have other arguments.
    present = all(callable(getattr(holder, last, None)) for holder, last in _places(file).values())
    return file if present and _passes_arguments(file) else ""


@functools.cache
def _passes_arguments(file: str) -> bool:
    """Return whether all methods that call a modeling file's recurrent functions accept arbitrary keyword arguments.

    The methods of LFM2 in transformers 5.17 to 5.19 accept only some keyword arguments, so ``forest`` and
    ``recurrent_states`` would be silently ignored.
    """
    classes = [cls for cls in vars(sys.modules[file]).values() if isinstance(cls, type) and cls.__module__ == file]
    methods = [inspect.unwrap(method) for cls in classes for method in vars(cls).values() if inspect.isfunction(method)]
    callers = [method for method in methods if set(FAMILIES[file.split(".")[2]]) & set(method.__code__.co_names)]
    return all(method.__code__.co_flags & inspect.CO_VARKEYWORDS for method in callers)


def install(model: nn.Module) -> bool:
    """Replace the recurrent functions of a model's modeling file. Return whether the model has such functions."""
    file = replaced(model)
    places = _places(file)
    if new := [name for name, (holder, last) in places.items() if not hasattr(getattr(holder, last), "without_forest")]:
        for name in new:
            holder, last = places[name]
            setattr(holder, last, _switch(getattr(holder, last), FAMILIES[file.split(".")[2]][name]))
        logger.info(
            "Replaced %s of %s: packed prefix trees and the native engine use posttrain's functions in PyTorch. Other calls use "
            "the original functions, and the kernels of fla, causal-conv1d and mamba-ssm if they are installed.",
            ", ".join(new),
            file,
        )
    return bool(places)


def uninstall(model: nn.Module) -> None:
    """Restore the functions that `install` replaced."""
    for holder, last in _places(replaced(model)).values():
        function = getattr(holder, last)
        setattr(holder, last, getattr(function, "without_forest", function))


def _places(file: str) -> dict[str, tuple[Any, str]]:
    """Map each recurrent function of a modeling file to the module or class that contains it, and to its name in that
    object.
    """
    places = {}
    for name in FAMILIES[file.split(".")[2]] if file else ():
        holder, _, last = name.rpartition(".")
        places[name] = (getattr(sys.modules[file], holder, None) if holder else sys.modules[file], last)
    return places


def _switch(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, forest: Any = None, recurrent_states: Any = None, **kwargs: Any) -> Any:
        if recurrent_states is not None:
            return ours(recurrent_states, *args, **kwargs)
        if forest is None:
            return original(*args, **kwargs)
        if forest.split is not None:
            raise ModelError(
                f"sp_size={forest.split.size} is not supported: recurrent layers need whole rows, but each process has only "
                "some columns. Fix: set sp_size=1. For long rows, shard the model (FSDP2)."
            )
        packed = {name: value for name in PACKED if (value := kwargs.pop(name, None)) is not None}
        if packed:
            raise ModelError(
                f"{original.__name__} got {sorted(packed)} for a batch that already separates {len(forest.batch.leaves)} "
                "sequences by its prefix trees. Fix: remove them from model_kwargs."
            )
        return ours(Trees(forest), *args, **kwargs)

    vars(function)["without_forest"] = original
    return function
