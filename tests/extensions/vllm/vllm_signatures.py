"""Names and parameters of what the library calls of vLLM, read from its sources without importing them.

``python -m tests.extensions.vllm.vllm_signatures VERSION FOLDER`` adds those of an unpacked wheel to the table
(tests/snapshots/vllm_signatures.json); `fake` makes of a table's row a package ``vllm`` that takes these arguments alone.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(__file__).parents[2] / "snapshots" / "vllm_signatures.json"
TRANSFER = "vllm/distributed/weight_transfer"
# File, and what is called of it; a class alone: the fields that it is made with.
CALLED: dict[str, tuple[str, ...]] = {
    "vllm/entrypoints/llm.py": (
        *("LLM.__init__", "LLM.generate", "LLM.collective_rpc", "LLM.reset_prefix_cache", "LLM.sleep", "LLM.wake_up"),
    ),
    "vllm/engine/arg_utils.py": ("EngineArgs",),
    "vllm/v1/engine/llm_engine.py": ("LLMEngine.reset_encoder_cache",),
    "vllm/sampling_params.py": ("SamplingParams", "StructuredOutputsParams"),
    "vllm/config/vllm.py": ("set_current_vllm_config",),
    "vllm/config/model.py": ("ModelConfig.get_vocab_size",),
    "vllm/model_executor/model_loader/reload/layerwise.py": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ),
    "vllm/model_executor/models/registry.py": ("_ModelRegistry.get_supported_archs",),
    "vllm/platforms/interface.py": ("Platform.is_cpu", "Platform.is_sleep_mode_available"),
    "vllm/utils/network_utils.py": ("get_ip", "get_open_port"),
    "vllm/distributed/device_communicators/pynccl.py": ("PyNcclCommunicator.broadcast", "PyNcclCommunicator.destroy"),
    f"{TRANSFER}/factory.py": ("WeightTransferEngineFactory.register_engine",),
    f"{TRANSFER}/base.py": (
        *("WeightTransferEngine.init_transfer_engine", "WeightTransferEngine.start_weight_update"),
        *("WeightTransferEngine.update_weights", "WeightTransferEngine.receive_weights"),
        *("WeightTransferEngine.finish_weight_update", "WeightTransferEngine.shutdown"),
    ),
    f"{TRANSFER}/nccl_common.py": ("trainer_init", "NCCLWeightTransferInitInfo"),
    f"{TRANSFER}/nccl_engine.py": ("NCCLWeightTransferUpdateInfo",),
    f"{TRANSFER}/packed_tensor.py": ("packed_nccl_broadcast_producer",),
}


def read(folder: Path) -> dict[str, list[str]]:
    """Parameters by ``file:name``, as in a signature (``a``, ``b=``, ``*``, ``**c``), and ``routes`` of its server."""
    found = {f"{path}:{name}": _parameters(folder / path, name) for path, names in CALLED.items() for name in names}
    routes = set()
    for path in sorted((folder / "vllm/entrypoints").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            of = node.func if isinstance(node, ast.Call) else None
            if isinstance(of, ast.Attribute) and of.attr in ("get", "post") and getattr(of.value, "id", "") == "router":
                routes.add(f"{of.attr.upper()} {ast.literal_eval(node.args[0])}")
    return found | {"routes": sorted(routes)}


def _parameters(path: Path, name: str) -> list[str]:
    scope: Any = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        scope = next(node for node in scope.body if getattr(node, "name", None) == part)
    if isinstance(scope, ast.ClassDef):  # Fields of a dataclass or a msgspec struct.
        fields = [node for node in scope.body if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.dump(node)]
        names = [(node.target.id, node.value is not None) for node in fields if isinstance(node.target, ast.Name)]
        return [f"{field}{'=' if default else ''}" for field, default in names if not field.startswith("_")]
    args = scope.args
    plain = [*args.posonlyargs, *args.args]
    first = len(plain) - len(args.defaults)
    found = [f"{one.arg}{'=' if i >= first else ''}" for i, one in enumerate(plain)]
    found += [f"*{args.vararg.arg}"] if args.vararg else ["*"] if args.kwonlyargs else []
    found += [f"{one.arg}{'=' if value else ''}" for one, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return found + ([f"**{args.kwarg.arg}"] if args.kwarg else [])


def signature(parameters: list[str]) -> inspect.Signature:
    """One that `bind` refuses what vLLM would refuse with; fields of a class may be given by name in any order."""
    kind, found = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for text in parameters:
        name, default = text.strip("*="), None if text.endswith("=") else inspect.Parameter.empty
        if text.startswith("**"):
            found.append(inspect.Parameter(name, inspect.Parameter.VAR_KEYWORD))
        elif text.startswith("*"):
            kind = inspect.Parameter.KEYWORD_ONLY
            found += [inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL)] if name else []
        else:
            found.append(inspect.Parameter(name, kind, default=default))
    order = {inspect.Parameter.KEYWORD_ONLY: 3, inspect.Parameter.VAR_KEYWORD: 4, inspect.Parameter.VAR_POSITIONAL: 2}
    found.sort(key=lambda one: order.get(one.kind, int(one.default is not inspect.Parameter.empty)))
    return inspect.Signature(found)


def checked(row: dict[str, list[str]], place: str, does: Any) -> Any:
    """``does``, called only with arguments that vLLM's function of that ``file:name`` takes."""
    known = signature(row[place])

    def call(*given: Any, **named: Any) -> Any:
        known.bind(*given, **named)
        return does(*given, **named)

    return call


def module(name: str, **content: Any) -> ModuleType:
    """A module of these names."""
    made = ModuleType(name)
    vars(made).update(content)
    return made


if __name__ == "__main__":
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    known[sys.argv[1]] = read(Path(sys.argv[2]))
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
