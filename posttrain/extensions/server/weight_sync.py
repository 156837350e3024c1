"""Weight updates of rollout servers: weights are sent in buckets with checksums, and servers confirm the new version."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, RolloutServerError, WeightSyncError
from posttrain.integrations import require
from posttrain.rollouts.shared_memory import (
    SharedFolder,
    write_tensors,
)

if TYPE_CHECKING:
    from posttrain.extensions.server.client import VLLMClient


Bucket = list[tuple[str, Tensor]]


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Group tensors, in order, into buckets of up to ``limit`` bytes. All tensors of a bucket have one dtype. A tensor
    larger than ``limit`` gets its own bucket.

    >>> pairs = [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(9)), ("d", torch.zeros(1).half())]
    >>> [[name for name, _ in bucket] for bucket in buckets(pairs, 16)]
    [['a', 'b'], ['c'], ['d']]
    """
    if limit < 1:
        raise ConfigError(f"a bucket of {limit} bytes is too small. Fix: set vllm_weight_bucket_mb to at least 1.")
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


BUCKET_BYTES = 512 * 2**20
# Size in bytes of a bucket in shared memory. With small buckets, servers load one bucket while the next one is written.
SHARED_BYTES = 64 * 2**20
Step = Callable[["VLLMClient"], None]
Result = WeightSyncError | None


class Pusher:
    """Sends weights to several servers at the same time. While the servers load a bucket, the next bucket is written.

    Servers on this machine read buckets from shared memory. Servers with vLLM's NCCL backend receive broadcasts between
    GPUs.

    Args:
        bucket_bytes: Size of a bucket in bytes.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._folder: SharedFolder | None = None
        self._lock = threading.Lock()

    def push(
        self, tensors: Iterable[tuple[str, Tensor]], clients: Sequence[VLLMClient], version: str
    ) -> dict[VLLMClient, Result]:
        """Update the weights of all servers. Return None for each server that confirmed the version, and an error for others.

        All tensors are read even after an error, because reading a sharded weight can be a collective operation.

        Args:
            tensors: All weights, in the engine's dtype.
            clients: Clients of the servers.
            version: Name of the new weight version on the servers.
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
                    # The file of this bucket may be overwritten now, because the servers have loaded its previous content.
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
        """Return a function that sends a bucket to a server. If a server reads from shared memory, write the bucket to
        shared memory first.
        """
        path, part = self.file(number), {}
        try:
            if by_memory:
                part = {"path": str(path), "checksum": write_tensors(bucket, path)}
        except OSError as error:
            full = WeightSyncError(
                f"weights cannot be written to {path.parent}: {error}. Fix: increase the size of shared memory (docker run "
                "--shm-size=8g), or decrease vllm_weight_bucket_mb.",
                phase="bucket",
            )
            return functools.partial(_refuse, full)
        return lambda client: client.communicator.send(bucket) if client.communicator else client.send_part(**part)

    @property
    def folder(self) -> Path:
        """Folder in shared memory with the buckets for servers on this machine."""
        self._folder = self._folder or SharedFolder()
        return self._folder.path

    def file(self, number: int) -> Path:
        """Return the path of a bucket's file. Two files are used in turn: one is written while servers read the other one."""
        return self.folder / f"bucket-{number % 2}.safetensors"

    def close(self) -> None:
        """Remove the buckets from shared memory."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def _refuse(error: WeightSyncError, client: VLLMClient) -> None:
    raise error


def as_sync_error(client: VLLMClient, error: RolloutServerError) -> WeightSyncError:
    """Convert any error of a server to a `WeightSyncError` with the server's address and the phase of the update."""
    if isinstance(error, WeightSyncError):
        return error
    wrapped = WeightSyncError(f"weights did not reach {client.base_url}: {error}", phase="bucket", url=client.base_url)
    wrapped.__cause__ = error
    return wrapped


class NcclSender:
    """Trainer's side of vLLM's NCCL weight transfer. Metadata is sent over HTTP, and tensors are broadcast between GPUs
    in packed buffers.

    Servers that were started with ``--weight-transfer-config '{"backend": "nccl"}'`` use this transfer. TRL
    starts servers in this way. This code path has not been tested on a GPU. All other servers get weights through shared
    memory.

    Args:
        client: Client of the server.
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
        # vLLM 0.27 expects this option with each bucket. Later versions expect it in the initialization of the transfer.
        self.extra = {"packed": True}
        if "packed" in inspect.signature(common.NCCLWeightTransferInitInfo).parameters:
            info, self.extra = info | self.extra, {}
        self.client, self.device = client, device
        with ThreadPoolExecutor(max_workers=1) as pool:
            body, limit = {"init_info": info}, client.sync_timeout
            answer = pool.submit(client.call, "POST", "/init_weight_transfer_engine", body, timeout=limit)
            # This call creates the process group of trainer and server.
            self.group: Any = common.trainer_init(info)
            answer.result()

    def send(self, bucket: Bucket) -> None:
        """Send the metadata of a bucket, then broadcast its tensors in the same order."""
        packed = require("vllm.distributed.weight_transfer.packed_tensor", "a broadcast of weights to vLLM")
        part: dict[str, Any] = {"names": [n for n, _ in bucket], "shapes": [list(t.shape) for _, t in bucket]}
        part["dtype_names"] = [str(t.dtype).removeprefix("torch.") for _, t in bucket]
        part |= self.extra
        pairs = ((name, tensor.cuda()) for name, tensor in bucket)
        # Synchronize first, because vLLM packs tensors on its own CUDA streams, which do not wait for this process's streams.
        torch.cuda.synchronize(self.device)
        with ThreadPoolExecutor(max_workers=1) as pool:
            answer = pool.submit(self.client.send_part, **part)
            packed.packed_nccl_broadcast_producer(
                iterator=pairs, group=self.group, src=0, post_iter_func=lambda item: item[1]
            )
            answer.result()

    def close(self) -> None:
        """Leave the NCCL group."""
        self.group.destroy()
