"""Weights to rollout servers in buckets, each checked by its hash, the whole confirmed by its version."""

from __future__ import annotations

import logging
import mmap
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from posttrain.errors import ConfigError, ModelError, RolloutServerError, WeightSyncError
from posttrain.integrations import require

if TYPE_CHECKING:
    from posttrain.rollouts.server.client import VLLMClient

__all__ = [
    "BUCKET_BYTES",
    "CHECKSUM_HEADER",
    "SAFETENSORS",
    "SHARED_FOLDER",
    "Bucket",
    "NcclSender",
    "Pusher",
    "SharedFolder",
    "buckets",
    "checked_tensors",
    "checksum",
    "file_tensors",
    "hold",
    "remove_orphans",
    "shared_path",
    "shared_root",
    "write_tensors",
]

logger = logging.getLogger(__name__)

SAFETENSORS = "application/x-safetensors"
CHECKSUM_HEADER = "X-Checksum"
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


# Tensors as files in shared memory -------------------------------------------------------------------------------------

SHARED_FOLDER = Path("/dev/shm")
SHARED_NAME = re.compile(r"posttrain-[A-Za-z0-9_.-]{1,200}/[A-Za-z0-9_-]{1,200}\.safetensors")


def checksum(data: Any) -> str:
    """The 128-bit xxh3 of bytes, as hexadecimal digits.

    >>> checksum(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128(data).hexdigest()


def write_tensors(tensors: Iterable[tuple[str, Tensor]], path: Path) -> str:
    """Write a safetensors file, and return the `checksum` of its bytes.

    Raises:
        OSError: It cannot be written: no room is left in shared memory (a container's is often 64 MB), say.
    """
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return _file_checksum(path)


def _file_checksum(path: Path) -> str:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return checksum(data)


def file_tensors(path: Path, announced: str) -> dict[str, Tensor]:
    """Tensors of a safetensors file, which stay the file's memory: whoever keeps one copies it.

    Raises:
        ModelError: Other bytes than were announced by their checksum, or no safetensors file.
    """
    _compare(_file_checksum(path), announced)
    return _read(load_file, path)


def checked_tensors(data: bytes, announced: str) -> dict[str, Tensor]:
    """As `file_tensors`, of the bytes themselves."""
    _compare(checksum(data), announced)
    return _read(load, data)


def _read(read: Callable[[Any], dict[str, Tensor]], source: Any) -> dict[str, Tensor]:
    try:
        return read(source)
    except SafetensorError as error:
        raise ModelError(f"it is not in the safetensors format: {error!r}") from error


def _compare(got: str, announced: str) -> None:
    if got != announced:
        raise ModelError(
            f"the weights' checksum is {got}, and {announced} was announced: their bytes changed on the way."
        )


def shared_path(path: str) -> Path:
    """The file that a bucket in shared memory may be in: ``/dev/shm/posttrain-*/*.safetensors``.

    Raises:
        ConfigError: Any other path, a link, or no file.
    """
    found = Path(path)
    below = found.parts[len(SHARED_FOLDER.parts) :]
    if SHARED_FOLDER not in found.parents or not SHARED_NAME.fullmatch("/".join(below)):
        raise ConfigError(
            f"path={path!r} is not {SHARED_FOLDER}/posttrain-*/*.safetensors, the only files that are read."
        )
    if found.resolve() != found or not found.is_file():
        raise ConfigError(f"path={path!r} is no regular file on the server's machine.")
    return found


def shared_root() -> Path:
    """Where weights for processes of this machine are written: shared memory, else the folder for temporary files."""
    return SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else Path(tempfile.gettempdir())


def hold(folder: Path) -> int | None:
    """Lock a folder for as long as this process lives; None where another holds it, or has removed it."""
    import fcntl  # Where there is none, nothing that asks for shared memory runs.

    try:
        held = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)
    except OSError:
        os.close(held)
        return None
    return held


def remove_orphans(root: Path | None = None) -> None:
    """Remove folders of weights that no process holds (see `hold`): theirs was killed.

    The lock of the system tells it, since numbers of processes are used again, and mean others in another container.
    """
    for path in (shared_root() if root is None else root).glob("posttrain-[0-9]*-*/"):
        held = hold(path)
        if held is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)


class SharedFolder:
    """A folder in shared memory that this process holds; it goes with the last reference to this object.

    Where the process is killed, another one removes it (`remove_orphans`).
    """

    def __init__(self) -> None:
        remove_orphans()
        held = None
        while held is None:  # Another process may take it for an orphan before it is held.
            self.path = Path(tempfile.mkdtemp(prefix=f"posttrain-{os.getpid()}-", dir=shared_root()))
            held = hold(self.path)
        self._end = weakref.finalize(self, _remove, self.path, held, os.getpid())

    def close(self) -> None:
        """Remove the folder."""
        self._end()


def _remove(path: Path, held: int, owner: int) -> None:
    os.close(held)
    if os.getpid() == owner:  # Not a fork of it.
        shutil.rmtree(path, ignore_errors=True)


# Pushing to servers ----------------------------------------------------------------------------------------------------

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
        self.shared = os.access(SHARED_FOLDER, os.W_OK) if shared is None else shared
        self._folder: SharedFolder | None = None
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

    def file(self, number: int) -> Path:
        """One of two files: one is written while the other is read."""
        self._folder = self._folder or SharedFolder()
        return self._folder.path / f"bucket-{number % 2}.safetensors"

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None


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
        path = self.pusher.file(number)  # Its reader has answered: `send` settled the bucket before the last.
        try:
            part = {"path": str(path), "checksum": write_tensors(bucket, path)}
        except OSError as error:
            logger.warning("weights go through HTTP, because shared memory has no room: %s", error)
            self.pusher.shared = False
            return []
        return [(client, self.pool.submit(client.send_part, **part)) for client in clients]

    def _to_others(self, bucket: Bucket) -> Sent:
        clients = [client for client in self.live if not self._in_memory(client)]
        nccl = [client for client in clients if client.facts.get("transfer") == "nccl"]
        sent: Sent = []
        for client in nccl:
            if client.communicator is None:
                client.init_communicator()
            sent.append((client, self.pool.submit(client.communicator.send, bucket)))
        body = save({n: t.detach().cpu().contiguous() for n, t in bucket}) if len(nccl) < len(clients) else b""
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
