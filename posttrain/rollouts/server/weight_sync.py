"""Weights to rollout servers in buckets, each checked by its hash, the whole confirmed by its version."""

from __future__ import annotations

import functools
import inspect
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.errors import ConfigError, ModelError, RolloutServerError, WeightSyncError
from posttrain.integrations import require

if TYPE_CHECKING:
    from posttrain.rollouts.server.client import VLLMClient


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
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > limit or bucket[0][1].dtype != tensor.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


# Tensors as files in shared memory

SHARED_FOLDER = Path("/dev/shm")


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
    whole, seen = {}, set[int]()
    for name, tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        whole[name] = tensor.clone() if memory in seen else tensor  # Layers of layer_replication share their weights.
        seen.add(memory)
    try:
        save_file(whole, path)
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
    got = _file_checksum(path)
    if got != announced:
        raise ModelError(
            f"the weights' checksum is {got}, and {announced} was announced: their bytes changed on the way."
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelError(f"the weights are not in the safetensors format: {error!r}") from error


def shared_path(path: str) -> Path:
    """Return the file of a bucket or an adapter: ``posttrain-*/*.safetensors`` below `shared_root`, or in a folder below.

    Raises:
        ConfigError: Any other path, a link, no file, or a file or folder of another account.
    """
    file, root = Path(path), shared_root()
    known = any(file.match(f"{root}/posttrain-*/{below}*.safetensors") for below in ("", "*/"))
    if not known or file.resolve() != file or not file.is_file():
        raise ConfigError(
            f"path={path!r} is no regular file {root}/posttrain-*/*.safetensors, the only files that are read."
        )
    # Root may replace any file anyway, and no other account enters a folder that is closed to it.
    folder = root / file.relative_to(root).parts[0]
    owners = {file.stat().st_uid, folder.stat().st_uid} - {os.geteuid(), 0}
    if owners or folder.stat().st_mode & 0o022:
        raise ConfigError(
            f"path={path!r}: another account could replace the weights. {folder} has the mode {folder.stat().st_mode & 0o777:o} "
            f"and the owner {folder.stat().st_uid}, the file has the owner {file.stat().st_uid}, and the server runs as user "
            f"{os.geteuid()}. Fix: run the server and the trainer as one user."
        )
    return file


def shared_root() -> Path:
    """Return where weights for processes of this machine are written: shared memory, else the folder for temporary files."""
    return SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else Path(tempfile.gettempdir()).resolve()


def hold(folder: Path) -> int | None:
    """Lock a folder for as long as this process lives; None where another holds it, or has removed it."""
    import fcntl  # Where there is none, nothing that asks for shared memory runs.

    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)
    except OSError:
        os.close(lock)
        return None
    return lock


def remove_orphans(root: Path | None = None) -> None:
    """Remove folders of weights that no process holds (see `hold`): theirs was killed.

    The lock of the system tells it, since numbers of processes are used again, and mean others in another container.
    """
    for path in (shared_root() if root is None else root).glob("posttrain-[0-9]*-*/"):
        lock = hold(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


class SharedFolder:
    """A folder in shared memory that this process holds; it goes with the last reference to this object.

    Where the process is killed, another one removes it (`remove_orphans`).
    """

    def __init__(self) -> None:
        remove_orphans()
        lock = None
        while lock is None:  # Another process may take it for an orphan before it is held.
            self.path = Path(tempfile.mkdtemp(prefix=f"posttrain-{os.getpid()}-", dir=shared_root()))
            lock = hold(self.path)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder."""
        self._end()


def _remove(path: Path, lock: int, owner: int) -> None:
    os.close(lock)
    if os.getpid() == owner:  # Not a fork of it.
        shutil.rmtree(path, ignore_errors=True)


# Pushing to servers

BUCKET_BYTES = 512 * 2**20
# Through shared memory there is no round trip to save: small buckets overlap better.
SHARED_BYTES = 64 * 2**20
Step = Callable[["VLLMClient"], None]
Result = WeightSyncError | None


class Pusher:
    """Sends one version to several servers at once: a bucket is made while the one before it is being loaded.

    A server on this machine reads buckets from shared memory. One that was started with vLLM's NCCL backend gets broadcasts
    between GPUs.

    Args:
        bucket_bytes: Of one request.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._folder: SharedFolder | None = None
        self._lock = threading.Lock()

    def push(
        self, tensors: Iterable[tuple[str, Tensor]], clients: Sequence[VLLMClient], version: str
    ) -> dict[VLLMClient, Result]:
        """One whole update of every server; None for each that confirmed it, or the error that ended its part.

        The tensors are read to their end whatever fails: reading may be a collective that other ranks wait in.

        Args:
            tensors: All weights, in the engine's dtype.
            clients: Of the servers.
            version: Name of the weights from now on.
        """
        results: dict[VLLMClient, Result] = dict.fromkeys(clients)

        def start(step: Step) -> list[tuple[VLLMClient, Future]]:
            return [(client, pool.submit(step, client)) for client in clients if results[client] is None]

        def settle(sent: list[tuple[VLLMClient, Future]]) -> None:
            for client, future in sent:
                try:
                    future.result()
                except RolloutServerError as error:
                    if results[client] is None:
                        results[client] = as_sync_error(client, error)
                        client.abort_update()

        with self._lock, ThreadPoolExecutor(max_workers=max(len(clients), 1)) as pool:
            settle(start(lambda client: client.begin_update()))
            by_memory = any(client.communicator is None for client in clients)
            limit = min(self.bucket_bytes, SHARED_BYTES) if by_memory else self.bucket_bytes
            iterator, earlier = iter(tensors), []
            try:
                for number, bucket in enumerate(buckets(iterator, limit)):
                    if all(results.values()):
                        break
                    # The readers of the file that is written now have answered: they got the bucket before the last.
                    sent = start(self._sender(bucket, number, by_memory))
                    settle(earlier)
                    earlier = sent
                settle(earlier)
            finally:
                for _ in iterator:
                    pass
            settle(start(lambda client: client.end_update(version)))
        return results

    def _sender(self, bucket: Bucket, number: int, by_memory: bool) -> Step:
        """What gives a bucket to a server; it is in shared memory then, where any server reads it there."""
        path, part = self.file(number), {}
        try:
            if by_memory:
                part = {"path": str(path), "checksum": write_tensors(bucket, path)}
        except OSError as error:
            full = WeightSyncError(
                f"weights cannot be written to {path.parent}: {error}. Fix: give shared memory more room (docker run "
                "--shm-size=8g), or lower vllm_weight_bucket_mb.",
                phase="bucket",
            )
            return functools.partial(_refuse, full)
        return lambda client: client.communicator.send(bucket) if client.communicator else client.send_part(**part)

    @property
    def folder(self) -> Path:
        """In shared memory, for what servers of this machine read."""
        self._folder = self._folder or SharedFolder()
        return self._folder.path

    def file(self, number: int) -> Path:
        """One of two files: one is written while the other is read."""
        return self.folder / f"bucket-{number % 2}.safetensors"

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def _refuse(error: WeightSyncError, client: VLLMClient) -> None:
    raise error


def as_sync_error(client: VLLMClient, error: RolloutServerError) -> WeightSyncError:
    """The error as one of an update."""
    if isinstance(error, WeightSyncError):
        return error
    wrapped = WeightSyncError(f"weights did not reach {client.base_url}: {error}", phase="bucket", url=client.base_url)
    wrapped.__cause__ = error
    return wrapped


class NcclSender:
    """The trainer's end of vLLM's own NCCL weight transfer: metadata over HTTP, tensors in packed broadcasts between GPUs.

    For servers that were started with ``--weight-transfer-config '{"backend": "nccl"}'``, as TRL starts them. It has run on no
    machine of ours: shared memory is the default, and this is used where the server's own options ask for it.

    Args:
        client: Of the server.
        device: GPU of this process.
    """

    def __init__(self, client: VLLMClient, device: torch.device | str = 0) -> None:
        common = require("vllm.distributed.weight_transfer.nccl_common", "a broadcast of weights to vLLM")
        network = require("vllm.utils.network_utils", "a broadcast of weights to vLLM")
        torch.cuda.set_device(device)
        workers = int(client.call("GET", "/get_world_size")["world_size"])
        info = {
            "master_address": network.get_ip(),
            "master_port": client.group_port or network.get_open_port(),
            "rank_offset": 1,
            "world_size": workers + 1,
        }
        # vLLM 0.27 hears with each bucket, later ones here, that tensors come in packed broadcasts.
        self.told = {"packed": True}
        if "packed" in inspect.signature(common.NCCLWeightTransferInitInfo).parameters:
            info, self.told = info | self.told, {}
        self.client, self.device = client, device
        with ThreadPoolExecutor(max_workers=1) as pool:
            body, limit = {"init_info": info}, client.sync_timeout
            answer = pool.submit(client.call, "POST", "/init_weight_transfer_engine", body, timeout=limit)
            # Both sides meet here.
            self.group: Any = common.trainer_init(info)
            answer.result()

    def send(self, bucket: Bucket) -> None:
        """Announce a bucket, then broadcast it in the same order."""
        packed = require("vllm.distributed.weight_transfer.packed_tensor", "a broadcast of weights to vLLM")
        part: dict[str, Any] = {"names": [n for n, _ in bucket], "shapes": [list(t.shape) for _, t in bucket]}
        part["dtype_names"] = [str(t.dtype).removeprefix("torch.") for _, t in bucket]
        part |= self.told
        pairs = ((name, tensor.cuda()) for name, tensor in bucket)
        torch.cuda.synchronize(self.device)  # vLLM packs on streams of its own, which wait for nothing.
        with ThreadPoolExecutor(max_workers=1) as pool:
            answer = pool.submit(self.client.send_part, **part)
            packed.packed_nccl_broadcast_producer(
                iterator=pairs, group=self.group, src=0, post_iter_func=lambda item: item[1]
            )
            answer.result()

    def close(self) -> None:
        """Leave the group."""
        self.group.destroy()
