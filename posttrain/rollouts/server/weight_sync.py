"""Weights to rollout servers in buckets, each checked by its hash, the whole confirmed by its version."""

from __future__ import annotations

import itertools
import json
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor

from posttrain.errors import ConfigError, ModelError, RolloutServerError, WeightSyncError
from posttrain.integrations import require
from posttrain.rollouts.server.replies import (
    CHECKSUM_HEADER,
    SAFETENSORS,
    SHARED_FOLDER,
    checksum,
    hold,
    remove_orphans,
)

if TYPE_CHECKING:
    from posttrain.rollouts.server.client import VLLMClient

__all__ = [
    "BUCKET_BYTES",
    "Bucket",
    "MappedFile",
    "NcclSender",
    "Pusher",
    "SharedFile",
    "buckets",
]

logger = logging.getLogger(__name__)


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


class SharedFile:
    """A file in shared memory that is written again and again, so that its pages are there from the second time on.

    It never shrinks: a bucket is the first so many of its bytes. It goes with the last reference to this object; where the
    process is killed, another one removes it (`posttrain.rollouts.server.replies.remove_orphans`).

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


BUCKET_BYTES = 512 * 2**20
SHARED_BYTES = 64 * 2**20  # Through shared memory there is no round trip to save: small buckets overlap better.
Sent = list[tuple["VLLMClient", Future]]
Result = RolloutServerError | None


class Pusher:
    """Sends one version to several servers at once: a bucket is made while the one before it is being loaded.

    A server on this machine reads buckets from shared memory; another one gets safetensors bytes over HTTP (`posttrain serve`)
    or, where it was started with vLLM's NCCL backend, a broadcast between GPUs.

    Args:
        bucket_bytes: Of one request.
        timeout: Seconds of one call.
        shared: Whether servers on this machine read buckets from shared memory; None: where that exists.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES, timeout: float = 720.0, shared: bool | None = None) -> None:
        self.bucket_bytes, self.timeout = bucket_bytes, timeout
        self.shared = SHARED_FOLDER.is_dir() if shared is None else shared
        self._files: list[SharedFile] = []
        self._lock = threading.Lock()

    def push(
        self, tensors: Iterable[tuple[str, Tensor]], versions: Mapping[VLLMClient, int], *, partial: bool = False
    ) -> dict[VLLMClient, Result]:
        """One whole update of every server; None for each that confirmed it, or the error that ended its part.

        The tensors are read to their end whatever fails: reading may be a collective that other ranks wait in.

        Args:
            tensors: In the engine's dtype.
            versions: The version that each server is given.
            partial: Whether names that are not sent may stay as they are.
        """
        with self._lock, ThreadPoolExecutor(max_workers=max(len(versions), 1)) as pool:
            update = _Update(self, versions, pool)
            update.each(lambda client: client.begin_update())
            iterator = iter(tensors)
            try:
                update.send(iterator)
            finally:
                for _ in iterator:
                    pass
            update.each(lambda client: client.end_update(versions[client], partial=partial))
            return update.results

    def file(self, number: int) -> SharedFile:
        """One of two files: one is written while the other is read."""
        while len(self._files) < 2:
            self._files.append(SharedFile())
        return self._files[number % 2]

    def close(self) -> None:
        """Remove the files."""
        for file in self._files:
            file.close()
        self._files = []


class _Update:
    """One update on its way."""

    def __init__(self, pusher: Pusher, versions: Mapping[VLLMClient, int], pool: ThreadPoolExecutor) -> None:
        self.pusher, self.versions, self.pool = pusher, versions, pool
        self.results: dict[VLLMClient, Result] = dict.fromkeys(versions)

    @property
    def live(self) -> list[VLLMClient]:
        """Servers whose part has not failed."""
        return [client for client, result in self.results.items() if result is None]

    def each(self, step: Callable[[VLLMClient], None]) -> None:
        """One step of the update on every server."""
        self.settle([(client, self.pool.submit(step, client)) for client in self.live])

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Every bucket to every server, two at once on their way."""
        small = all(self._in_memory(client) for client in self.live)
        limit = min(self.pusher.bucket_bytes, SHARED_BYTES) if small else self.pusher.bucket_bytes
        earlier: Sent = []
        for number, bucket in enumerate(buckets(tensors, limit)):
            if not self.live:
                return
            sent = self._through_memory(bucket, number) + self._to_others(bucket)
            self.settle(earlier)
            earlier = sent
        self.settle(earlier)

    def _in_memory(self, client: VLLMClient) -> bool:
        return client.is_local and self.pusher.shared and client.facts.get("transfer") == "shared memory"

    def _through_memory(self, bucket: Bucket, number: int) -> Sent:
        clients = [client for client in self.live if self._in_memory(client)]
        if not clients:
            return []
        file = self.pusher.file(number)  # Its reader has answered: `send` settled the bucket before the last.
        try:
            size, digest = file.write(bucket)
        except OSError as error:
            logger.warning("weights go through HTTP, because shared memory has no room: %s", error)
            self.pusher.shared = False
            return []
        part = {"path": str(file.path), "size": size, "checksum": digest}
        return [(client, self.pool.submit(client.send_part, **part)) for client in clients]

    def _to_others(self, bucket: Bucket) -> Sent:
        clients = [client for client in self.live if not self._in_memory(client)]
        nccl = [client for client in clients if client.facts.get("transfer") == "nccl"]
        sent: Sent = []
        for client in nccl:
            if client.communicator is None:
                client.init_communicator()
            sent.append((client, self.pool.submit(client.communicator.send, bucket)))
        body = (
            save_safetensors({n: t.detach().cpu().contiguous() for n, t in bucket}) if len(nccl) < len(clients) else b""
        )
        headers = {"Content-Type": SAFETENSORS, CHECKSUM_HEADER: checksum(body)}
        for client in (client for client in clients if client not in nccl):
            sent.append((client, self.pool.submit(self._post, client, body, headers)))
        return sent

    def _post(self, client: VLLMClient, body: bytes, headers: dict[str, str]) -> None:
        if not client.facts.get("takes_bytes"):
            raise WeightSyncError(
                f"{client.base_url} takes weights through shared memory of its own machine alone. Fix: train on that machine, or "
                "start it with --weight-transfer-config '{\"backend\": \"nccl\"}'.", phase="bucket", url=client.base_url,
            )  # fmt: skip
        client.call("POST", "/update_weights", body, timeout=self.pusher.timeout, headers=headers)

    def settle(self, sent: Sent) -> None:
        """Wait for answers; a server that failed is told to give the update up."""
        for client, future in sent:
            try:
                future.result()
            except RolloutServerError as error:
                if self.results[client] is None:
                    self.results[client] = self._named(client, error)
                    client.abort_update()

    def _named(self, client: VLLMClient, error: RolloutServerError) -> WeightSyncError:
        """The error with the version and the phase that it ended."""
        version = self.versions[client]
        if isinstance(error, WeightSyncError):
            error.version = version
            return error
        text = f"version {version} did not reach {client.base_url}: {error}"
        made = WeightSyncError(text, phase="bucket", version=version, url=client.base_url)
        made.__cause__ = error
        return made


class NcclSender:
    """The trainer's end of vLLM's own NCCL weight transfer: metadata over HTTP, tensors in packed broadcasts between GPUs.

    For servers that were started with ``--weight-transfer-config '{"backend": "nccl"}'``, as TRL starts them. It has run on no
    machine of ours: shared memory is the default, and this is used where the server's own options ask for it.

    Args:
        client: Of the server.
        device: GPU of this process.
    """

    def __init__(self, client: VLLMClient, device: Any = 0) -> None:
        common = require("vllm.distributed.weight_transfer.nccl_common", "a broadcast of weights to vLLM")
        network = require("vllm.utils.network_utils", "a broadcast of weights to vLLM")
        torch.cuda.set_device(device)
        info = {
            "master_address": network.get_ip(), "master_port": client.group_port or network.get_open_port(),
            "rank_offset": 1, "world_size": client.get_world_size() + 1, "packed": True,
        }  # fmt: skip
        self.client = client
        with ThreadPoolExecutor(max_workers=1) as pool:
            body, limit = {"init_info": info}, client.sync_timeout
            answer = pool.submit(client.call, "POST", "/init_weight_transfer_engine", body, timeout=limit)
            self.group: Any = common.trainer_init(info)  # Both sides meet here.
            answer.result()

    def send(self, bucket: Bucket) -> None:
        """Announce a bucket, then broadcast it in the same order."""
        packed = require("vllm.distributed.weight_transfer.packed_tensor", "a broadcast of weights to vLLM")
        part = {"names": [n for n, _ in bucket], "shapes": [list(t.shape) for _, t in bucket]}
        part["dtype_names"] = [str(t.dtype).removeprefix("torch.") for _, t in bucket]
        with ThreadPoolExecutor(max_workers=1) as pool:
            answer = pool.submit(self.client.send_part, **part)
            packed.packed_nccl_broadcast_producer(
                iterator=((n, t.cuda()) for n, t in bucket),
                group=self.group,
                src=0,
                post_iter_func=lambda item: item[1],
            )
            answer.result()

    def close(self) -> None:
        """Leave the group."""
        self.group.destroy()
