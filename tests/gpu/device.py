"""A device that answers as ``cuda:0`` and computes on the host: the library's branches for a GPU run, with real numbers.

`pretend` builds device.cpp (g++, ten seconds, once for each source and torch), loads it into this process and lets
``torch.cuda`` answer as an H100 would. It must be the first thing after ``import torch``, in a process of its own. What
it cannot show: speed, memory as a GPU lays it out, streams, kernels of CUDA, and rounding that differs from a CPU's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("device.cpp")
TESTED = "2.13"
NAME, CAPABILITY, MEMORY = "a pretended GPU", (9, 0), 80 * 2**30


def why_not() -> str | None:
    """Why no device can be pretended here; None where it can."""
    if shutil.which("g++") is None:
        return "g++ is not installed, which builds the pretended device"
    if torch.version.cuda or torch.version.hip:
        return "this torch knows real GPUs; a pretended one needs its CPU wheel"
    return None


def build() -> Path:
    """The library for this source and this torch, built if it is not there yet."""
    name = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "posttrain-tests")
    built = folder / f"device-{name}.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    home = Path(torch.__file__).parent
    part = folder / f"{built.name}.{os.getpid()}"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{home}/include", str(SOURCE), "-o", str(part)]
    command += [f"-I{home}/include/torch/csrc/api/include", f"-L{home}/lib", f"-Wl,-rpath,{home}/lib"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    subprocess.run([*command, abi, "-ltorch", "-ltorch_cpu", "-lc10"], check=True, capture_output=True, text=True)
    part.replace(built)  # Whoever builds it at the same time writes the same.
    return built


class Waits:
    """How often the host waited for the device, by line of the library: ``"models/x.py f: code of the line"``.

    ``waits`` are answers that the host needs before it goes on; ``uploads`` copies to the device that it waits for.
    """

    def __init__(self) -> None:
        self.by_line: dict[str, Counter[str]] = {"wait": Counter(), "upload": Counter()}
        self.callback: Any = None

    def __call__(self, kind: bytes, operation: bytes) -> None:
        self.by_line[kind.decode()][line_of(sys._getframe(1))] += 1
        if os.environ.get("SHOW_WAITS"):
            print(kind, operation, line_of(sys._getframe(1)), file=sys.stderr)


def line_of(frame: Any) -> str:
    """The innermost line of the package under a frame; the line of another library where none is."""
    outer = frame
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/posttrain/"):
            return f"{path[len(str(ROOT)) + 11 :]} {frame.f_code.co_name}: {code_of(path, frame.f_lineno)}"
        frame = frame.f_back
    return f"outside: {Path(outer.f_code.co_filename).name} {outer.f_code.co_name}"


_texts: dict[str, list[str]] = {}


def code_of(path: str, number: int) -> str:
    """The line's text, which stays what it is while lines above it come and go."""
    lines = _texts.setdefault(path, Path(path).read_text(encoding="utf-8").splitlines())
    return lines[number - 1].strip()


class Stream:
    """The one stream of the device, in whose order everything runs."""

    cuda_stream, stream_id, device_index, device_type = 0, 0, 0, 1
    device = torch.device("cuda", 0)

    def __init__(self, *given: Any, **options: Any) -> None:
        pass

    def _nothing(self, *given: Any, **options: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = record_event = record = wait = __exit__ = _nothing

    def __enter__(self) -> Stream:
        return self

    def query(self) -> bool:
        """Whatever was asked for is done."""
        return True


WAITS = Waits()
_pretended = False


def pretends() -> bool:
    """Whether ``cuda`` is the pretended device in this process."""
    return _pretended


def pretend() -> None:
    """Make this process see one GPU, and count in `WAITS`."""
    global _pretended
    _pretended = True
    library = ctypes.CDLL(str(build()))
    for name in ("pretended_allocated", "pretended_most_allocated"):
        getattr(library, name).restype = ctypes.c_int64
    WAITS.callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(WAITS)  # Kept from being collected.
    library.pretended_on_wait(WAITS.callback)

    def answer(value: Any = None) -> Any:
        return lambda *given, **options: value

    properties = SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY, multi_processor_count=132, uuid="GPU-pretended",
        gcnArchName="", warp_size=32, max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448, L2_cache_size=52428800,
    )  # fmt: skip
    answers: dict[str, Any] = {
        **{"is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0},
        **{"get_device_name": NAME, "get_device_capability": CAPABILITY, "get_device_properties": properties},
        **{"is_bf16_supported": True, "is_tf32_supported": True, "is_current_stream_capturing": False},
        **{"current_stream": Stream(), "default_stream": Stream(), "stream": Stream(), "get_arch_list": ["sm_90"]},
        **dict.fromkeys(
            ("_lazy_init", "init", "set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect")
        ),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_sync_debug_mode")),
        "memory_stats": {},
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, answer(value))
    memory = {
        "memory_allocated": lambda *_: library.pretended_allocated(),
        "memory_reserved": lambda *_: library.pretended_allocated(),
        "max_memory_allocated": lambda *_: library.pretended_most_allocated(),
        "max_memory_reserved": lambda *_: library.pretended_most_allocated(),
        "reset_peak_memory_stats": lambda *_: library.pretended_reset_peak(),
        "mem_get_info": lambda *_: (MEMORY - library.pretended_allocated(), MEMORY),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }
    for name, function in memory.items():
        setattr(torch.cuda, name, function)
        for module in (torch.cuda.memory, torch.cuda.random):
            if hasattr(module, name):
                setattr(module, name, function)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.device = Stream  # type: ignore[assignment, misc]
    torch.cuda.default_generators = (torch.default_generator,)
    torch.backends.cuda.is_built = answer(True)
    torch.compiler.set_stance("force_eager")  # What is compiled for a GPU runs uncompiled.
    # torch makes storage without a tensor for devices that it was built with alone.
    torch.UntypedStorage.clone = lambda storage: torch.empty(
        storage.nbytes(), dtype=torch.uint8, device=storage.device
    ).untyped_storage().copy_(storage)  # fmt: skip
