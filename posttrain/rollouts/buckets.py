"""Tensors on their way to other processes: in buckets of one dtype, in the safetensors format, through memory that is shared."""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, ModelError
from posttrain.rollouts.wire import SHARED_FOLDER, checksum, hold, remove_orphans

__all__ = ["Bucket", "MappedFile", "SharedFile", "buckets", "safetensors_bytes"]

# How the safetensors format calls its dtypes: https://github.com/huggingface/safetensors#format
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
FLAGS = os.O_RDWR | os.O_CREAT | os.O_TRUNC
_numbers = itertools.count(1)
LONGEST_HEADER = 100 * 10**6  # Bytes, the limit of the safetensors library.

Bucket = list[tuple[str, Tensor]]


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Tensors in their order, together up to ``limit`` bytes and one dtype; a larger tensor goes alone.

    >>> pairs = [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(9)), ("d", torch.zeros(1).half())]
    >>> [[name for name, _ in bucket] for bucket in buckets(pairs, 16)]
    [['a', 'b'], ['c'], ['d']]
    """
    if limit < 1:
        raise ConfigError(f"a bucket of {limit} bytes holds nothing. Set vllm_weight_bucket_mb to at least 1.")
    bucket: Bucket = []
    held = 0
    for name, tensor in tensors:
        if bucket and (held + tensor.nbytes > limit or bucket[0][1].dtype != tensor.dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket


# The format ------------------------------------------------------------------------------------------------------------


def _header(bucket: Bucket) -> tuple[bytes, int]:
    """The safetensors header with its length, and the bytes behind it."""
    table, end = {}, 0
    for name, tensor in bucket:
        begin, end = end, end + tensor.nbytes
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Readers want the data aligned.
    return len(text).to_bytes(8, "little") + text, end


def _write(bucket: Bucket, header: bytes, target: Any) -> None:
    """A bucket in the safetensors format, without a copy in between."""
    target[: len(header)] = header
    offset = len(header)
    for _, tensor in bucket:
        if tensor.nbytes:
            whole = torch.frombuffer(target, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
            whole.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        offset += tensor.nbytes


def safetensors_bytes(bucket: Bucket) -> bytearray:
    """A bucket as a safetensors file in memory."""
    header, size = _header(bucket)
    body = bytearray(len(header) + size)
    _write(bucket, header, body)
    return body


def _read(data: Any, size: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors over the first ``size`` bytes of a buffer, which hold a safetensors file.

    Raises:
        ValueError: They do not; a `KeyError` or `TypeError` where the header lacks something.
    """
    length = int.from_bytes(data[:8], "little")
    if size < 8 or length > min(size - 8, LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    table = json.loads(bytes(data[8 : 8 + length]))
    table.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(table.items(), key=lambda pair: pair[1]["data_offsets"]):
        dtype, shape, (begin, stop) = BY_NAME[entry["dtype"]], [int(n) for n in entry["shape"]], entry["data_offsets"]
        if begin != end or stop - begin != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"{name} of shape {shape} stands at {begin} to {stop}, and {end} was next")
        end = stop
        if 8 + length + end > size:
            break
        count = math.prod(shape)
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=8 + length + begin) if count else torch.empty(0)
        yield name, flat.to(dtype).view(shape)
    if 8 + length + end != size:
        raise ValueError(f"tensors up to byte {8 + length + end} in a file of {size}")


# Files in memory -------------------------------------------------------------------------------------------------------


class SharedFile:
    """A file in shared memory that is written again and again, so that its pages are there from the second time on.

    It never shrinks: a bucket is the first so many of its bytes. It goes with the last reference to this object; where the
    process is killed, another one removes it (`posttrain.rollouts.wire.remove_orphans`).

    Args:
        path: None: ``/dev/shm/posttrain-<process>-<number>.safetensors``.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path, self._file = _own_file() if path is None else (path, os.open(path, FLAGS, 0o600))
        self._map: mmap.mmap | None = None
        self._end = weakref.finalize(self, _remove, self.path, self._file, os.getpid())

    def write(self, bucket: Bucket) -> tuple[int, str]:
        """Replace the content.

        Returns:
            Bytes of the bucket, and their `checksum`.

        Raises:
            OSError: No room is left in shared memory (a container's is often 64 MB).
        """
        header, size = _header(bucket)
        total = len(header) + size
        if self._map is None or len(self._map) < total:
            _reserve(self._file, total)
            self._map = mmap.mmap(self._file, total)  # The former one goes with the last tensor over it.
        _write(bucket, header, self._map)
        return total, checksum(memoryview(self._map)[:total])

    def leave(self) -> Path:
        """Let the file lie for others, written for the last time."""
        self._map = None
        self._end.detach()
        os.close(self._file)
        return self.path

    def close(self) -> None:
        """Remove the file."""
        self._map = None
        self._end()


def _reserve(file: int, size: int) -> None:
    """Take the file's pages now: one that cannot be had while it is written ends the process (SIGBUS)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _own_file() -> tuple[Path, int]:
    """A new file in shared memory, held by this process."""
    remove_orphans(SHARED_FOLDER)
    while True:
        path = SHARED_FOLDER / f"posttrain-{os.getpid()}-{next(_numbers)}.safetensors"
        held = hold(path, FLAGS)
        if held is not None:  # None: another process took it for an orphan before it was held.
            return path, held


def _remove(path: Path, file: int, owner: int) -> None:
    os.close(file)
    if os.getpid() == owner:  # Not a fork of it.
        path.unlink(missing_ok=True)


class MappedFile:
    """A safetensors file that another process wrote, read where it lies."""

    def __init__(self, path: str | Path) -> None:
        with open(path, "rb") as file:
            # Private and writable: tensors over memory that is not writable are warned of.
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def checksum(self, size: int | None = None) -> str:
        """Of the first ``size`` bytes, or of all."""
        return checksum(memoryview(self.data)[:size])

    def tensors(self, size: int | None = None) -> Bucket:
        """Of the first ``size`` bytes, or of all; they are the file's memory, so that who keeps one copies it.

        Raises:
            ModelError: It is not in the safetensors format.
        """
        try:
            return list(_read(self.data, len(self.data) if size is None else size))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ModelError(f"it is not in the safetensors format: {error!r}") from error
