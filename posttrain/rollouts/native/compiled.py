"""The functions of `layer.c`, compiled for this machine and one head size where a C compiler is at hand."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["Memory", "Step", "compiled"]

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("layer.c")
# Sums may be reordered where the source says so (`omp simd reduction`), and nowhere else: no -ffast-math, NaN stay NaN.
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
LIMIT = 60  # Seconds that a compiler may take; it takes one.
LONG, FLOAT, ADDRESS, INT = ctypes.c_long, ctypes.c_float, ctypes.c_void_p, ctypes.c_int


class Step(ctypes.Structure):
    """``struct step`` of the source: what a step's rows read, the same for all layers but for the memory itself."""

    _fields_ = [
        *((name, LONG) for name in ("heads", "kv", "common", "longest", "window", "chunks")),
        *((name, ADDRESS) for name in ("begins", "order", "prompt", "lengths", "places", "scratch")),
        ("scale", FLOAT),
        ("threads", INT),
    ]


class Memory(ctypes.Structure):
    """``struct memory`` of the source: one layer's keys and values."""

    _fields_ = [
        *((name, ADDRESS) for name in ("common_keys", "common_values", "blocks", "keys", "values")),
        ("capacity", LONG),
    ]


SIGNATURES = {
    "normalise": [*[ADDRESS] * 4, LONG, LONG, FLOAT, INT],
    "gated": [ADDRESS, ADDRESS, LONG, LONG, INT],
    "rotate": [*[ADDRESS] * 5, LONG, LONG, LONG, FLOAT, INT],
    "attend": [ctypes.POINTER(Step), ctypes.POINTER(Memory), ADDRESS, ADDRESS, LONG],
}


@functools.cache
def compiled(size: int) -> ctypes.CDLL | None:
    """The library for heads of ``size`` elements, built at first use and kept; None where it cannot be built."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    command = [compiler, *FLAGS, f"-DSIZE={size}"]
    try:
        path = folder() / f"layer-{fingerprint(command)}.so"
        if not path.exists():
            build(command, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        logger.info(
            "Decoding stays with torch's operations: %s could not compile %s (%s).", compiler, SOURCE.name, told
        )
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def build(command: list[str], path: Path) -> None:
    """Compile beside ``path`` and move there in one step, as another process may do at the same time."""
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        made = Path(beside) / path.name
        whole = [*command, "-o", str(made), str(SOURCE), "-lm"]
        subprocess.run(whole, check=True, capture_output=True, text=True, timeout=LIMIT)
        made.replace(path)


def folder() -> Path:
    """Where libraries are kept, for this user alone."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain" / "compiled"
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    return base


def fingerprint(command: list[str]) -> str:
    """Of everything that decides what comes out: the source, the command, and the machine it is compiled for."""
    try:
        machine = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Feat"))
        )
    except (OSError, StopIteration):
        machine = platform.processor()
    parts = (SOURCE.read_text(), " ".join(command), platform.machine(), machine)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
