"""Weights to rollout servers: begin, buckets, end; each bucket checked by its hash, the whole confirmed by its version."""

from __future__ import annotations

import itertools
import json
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, ModelError, RolloutServerError, WeightSyncError
from posttrain.rollouts.server.client import CONNECT, VLLMClient
from posttrain.rollouts.server.replies import (
    CHECKSUM_HEADER,
    SAFETENSORS,
    SHARED_FOLDER,
    UPDATE_TIMEOUT_S,
    VERSION_HEADER,
    checksum,
    hold,
    remove_orphans,
)

__all__ = [
    "BUCKET_BYTES",
    "Bucket",
    "MappedFile",
    "Pusher",
    "SharedFile",
    "buckets",
    "push",
    "safetensors_bytes",
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
NAMES_SHOWN = 5


class Pusher:
    """Sends one version to several servers at once: a bucket is made while the one before it is being loaded.

    Args:
        bucket_bytes: Of one request.
        timeout: Seconds of one call.
        shared: Whether servers on this machine read buckets from shared memory; None: where that exists.
    """

    def __init__(
        self, bucket_bytes: int = BUCKET_BYTES, timeout: float = UPDATE_TIMEOUT_S, shared: bool | None = None
    ) -> None:
        self.bucket_bytes, self.timeout = bucket_bytes, timeout
        self.asked, self.shared = shared, SHARED_FOLDER.is_dir() if shared is None else shared
        self._files: list[SharedFile] = []
        self._lock = threading.Lock()

    def push(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        versions: Mapping[VLLMClient, int],
        *,
        names: Sequence[str] | None = None,
        adapter: dict[str, Any] | None = None,
        partial: bool = False,
    ) -> dict[VLLMClient, dict[str, Any] | RolloutServerError]:
        """One whole update of every server; what each of them answered, or the error that ended its part.

        The tensors are read to their end whatever fails: reading may be a collective that other ranks wait in.

        Args:
            tensors: In the engine's dtype.
            versions: The version that each server is given.
            names: Of all tensors, so that a server can say at once which it does not know.
            adapter: ``{r, alpha, target_modules}`` where the tensors are an adapter's.
            partial: Whether names that are not sent may stay as they are.
        """
        with self._lock, ThreadPoolExecutor(max_workers=max(len(versions), 1)) as pool:
            update = _Update(self, versions, pool)
            update.begin(names, adapter)
            iterator = iter(tensors)
            try:
                update.send(iterator)
            finally:
                for _ in iterator:
                    pass
            return update.end(partial)

    def files(self) -> list[SharedFile]:
        """Two files: one is written while the other is read."""
        if not self._files:
            self._files = [SharedFile(), SharedFile()]
        return self._files

    def close(self) -> None:
        """Remove the files."""
        for file in self._files:
            file.close()
        self._files = []


class _Update:
    """One update on its way."""

    def __init__(self, pusher: Pusher, versions: Mapping[VLLMClient, int], pool: ThreadPoolExecutor) -> None:
        self.pusher, self.versions, self.pool = pusher, versions, pool
        self.results: dict[VLLMClient, dict[str, Any] | RolloutServerError] = {}
        self.pending: list[tuple[VLLMClient, Future]] = []

    @property
    def live(self) -> list[VLLMClient]:
        """Servers whose part has not failed."""
        return [c for c in self.versions if not isinstance(self.results.get(c), RolloutServerError)]

    def begin(self, names: Sequence[str] | None, adapter: dict[str, Any] | None) -> None:
        """Each server waits for its running requests and takes no others."""
        for client in self.live:
            body: dict[str, Any] = {"version": self.versions[client], "names": None if names is None else list(names)}
            body |= {} if adapter is None else {"adapter": adapter}
            self._submit(client, "begin", "/begin_update/", body)
        self.settle()

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Every bucket to every server, two at once on their way."""
        local = [c for c in self.live if c.is_local and self.pusher.shared and c.communicator is None]
        limit = (
            min(self.pusher.bucket_bytes, SHARED_BYTES) if len(local) == len(self.live) else self.pusher.bucket_bytes
        )
        earlier: list[tuple[VLLMClient, Future]] = []
        for number, bucket in enumerate(buckets(tensors, limit)):
            if not self.live:
                return
            made = self._through_memory(bucket, number, local)
            made += self._through_http(bucket, local)
            self.settle(earlier)
            earlier = made
        self.settle(earlier)

    def _through_memory(self, bucket: Bucket, number: int, local: list[VLLMClient]) -> list[tuple[VLLMClient, Future]]:
        clients = [c for c in local if c in self.live]
        if not clients:
            return []
        file = self.pusher.files()[number % 2]  # Its reader has answered: `send` settled the bucket before the last.
        try:
            size, digest = file.write(bucket)
        except OSError as error:
            logger.warning("weights go through HTTP, because shared memory has no room: %s", error)
            local.clear()
            return []
        body = {"path": str(file.path), "size": size, "checksum": digest}
        return [self._submitted(c, "/update_bucket/", body | {"version": self.versions[c]}) for c in clients]

    def _through_http(self, bucket: Bucket, local: list[VLLMClient]) -> list[tuple[VLLMClient, Future]]:
        clients = [c for c in self.live if c not in local]
        if not clients:
            return []
        made = [(c, self.pool.submit(c.communicator.send, bucket, self.versions[c])) for c in clients if c.communicator]
        plain = [c for c in clients if not c.communicator]
        body = safetensors_bytes(bucket) if plain else b""
        headers = {"Content-Type": SAFETENSORS, CHECKSUM_HEADER: checksum(body)}
        for c in plain:
            made.append(self._submitted(c, "/update_bucket/", body, headers | {VERSION_HEADER: str(self.versions[c])}))
        return made

    def end(self, partial: bool) -> dict[VLLMClient, dict[str, Any] | RolloutServerError]:
        """The servers count what came, forget old keys and values, and generate again."""
        for client in self.live:
            self._submit(client, "end", "/end_update/", {"version": self.versions[client]})
        self.settle()
        for client in self.live:
            error = _unconfirmed(client, dict(self.results[client]), self.versions[client], partial)  # type: ignore[arg-type]
            if error is not None:
                self.results[client] = error
        return self.results

    # Requests ------------------------------------------------------------------------------------------------------

    def _submitted(self, client: VLLMClient, path: str, body: Any, headers: Any = None) -> tuple[VLLMClient, Future]:
        # Never sent twice: a server that had taken the first would take another.
        limits = (CONNECT, self.pusher.timeout)
        return client, self.pool.submit(client.call, "POST", path, body, timeout=limits, headers=headers)

    def _submit(self, client: VLLMClient, phase: str, path: str, body: Any) -> None:
        self.pending.append(self._submitted(client, path, body))

    def settle(self, requests: list[tuple[VLLMClient, Future]] | None = None) -> None:
        """Wait for answers; a server that failed is told to forget the update."""
        waiting, self.pending = (self.pending, []) if requests is None else (requests, self.pending)
        for client, future in waiting:
            try:
                answer = future.result()
                if client in self.live:
                    self.results[client] = answer
            except RolloutServerError as error:
                self._fail(client, error)

    def _fail(self, client: VLLMClient, error: RolloutServerError) -> None:
        if client not in self.live:
            return
        version = self.versions[client]
        phase = getattr(error, "phase", None) or "bucket"
        self.results[client] = error if isinstance(error, WeightSyncError) else _as_sync(error, phase, version, client)
        try:
            client.call("POST", "/abort_update/", {"version": version}, timeout=5.0)
        except RolloutServerError as later:
            logger.info("%s did not take the end of a failed update: %s", client.base_url, later)


def _as_sync(error: RolloutServerError, phase: str, version: int, client: VLLMClient) -> WeightSyncError:
    made = WeightSyncError(
        f"version {version} did not reach {client.base_url}: {error}", phase=phase, version=version, url=client.base_url
    )
    made.__cause__ = error
    return made


def _unconfirmed(client: VLLMClient, answer: dict[str, Any], version: int, partial: bool) -> WeightSyncError | None:
    """What is wrong with the answer that should confirm an update."""
    told = answer.get("version")
    missing = [] if partial else list(answer.get("missing") or [])
    unexpected = list(answer.get("unexpected") or [])
    if told == version and not missing and not unexpected:
        return None
    text = f"{client.base_url} confirmed version {told} after version {version} was sent"
    if told == version:
        names = missing or unexpected
        what = "still has old values of" if missing else "does not know"
        text = f"{client.base_url} {what} {len(names)} weights: {', '.join(names[:NAMES_SHOWN])}"
    return WeightSyncError(
        f"{text}. Serve the model that is trained (same architecture, same names), and push again.",
        phase="end", version=version, url=client.base_url,
    )  # fmt: skip


def push(
    client: VLLMClient,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    shared: bool | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    """Send weights to one server and have them confirmed.

    Args:
        client: Of the server.
        tensors: In the server's dtype, or one it can cast.
        version: Above the server's.
        bucket_bytes: Of one request.
        shared: Whether to go through shared memory where the server is on this machine.
        partial: Whether names that are not sent may stay.

    Returns:
        ``version``, ``loaded``, ``missing``, ``unexpected``.

    Raises:
        WeightSyncError: Names the phase that failed; the server then refuses to generate until a whole update arrives.
    """
    pusher = client.pusher  # Kept with the client: its memory is there from the second push on.
    if pusher is None or (pusher.bucket_bytes, pusher.asked) != (bucket_bytes, shared):
        if pusher is not None:
            pusher.close()
        pusher = client.pusher = Pusher(bucket_bytes, client.sync_timeout, shared)
    names = getattr(tensors, "names", None)
    result = pusher.push(tensors, {client: version}, names=names, partial=partial)[client]
    if isinstance(result, RolloutServerError):
        raise result
    return result
