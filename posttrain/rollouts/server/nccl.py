"""Weights over the accelerators' own network: a group of the server's workers and this process, which broadcasts.

The metadata of a bucket goes over HTTP, its bytes over NCCL (or gloo, on CPUs). Nothing here is sent twice: a server that
had taken the first would wait for ever for the second.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.errors import WeightSyncError
from posttrain.rollouts.server.client import CONNECT
from posttrain.rollouts.server.replies import RENDEZVOUS_S, WEIGHTS_GROUP

if TYPE_CHECKING:
    from posttrain.rollouts.server.client import VLLMClient
    from posttrain.rollouts.server.weight_sync import Bucket

__all__ = ["Communicator", "broadcast", "weights_group"]


class Communicator:
    """The last rank of a group whose other ranks are a server's workers.

    Args:
        client: Of the server.
        group: What `torch.distributed` process groups are.
        device: Where buckets are put together.
        rank: This process's, the number of workers.
    """

    def __init__(self, client: VLLMClient, group: Any, device: torch.device, rank: int) -> None:
        self.client, self.group, self.device, self.rank = client, group, device, rank

    @classmethod
    def join(cls, client: VLLMClient, device: Any = 0) -> Communicator:
        """Meet the server's workers.

        Raises:
            WeightSyncError: They do not come within 120 s, or sit on this process's accelerator (the server answers 409).
        """
        here = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        here = here if torch.cuda.is_available() else torch.device("cpu")
        uuid = str(torch.cuda.get_device_properties(here).uuid) if here.type == "cuda" else "cpu"
        workers, port = client.get_world_size(), client.group_port or _free_port()
        body = {"host": "0.0.0.0", "port": port, "world_size": workers + 1, "client_device_uuid": uuid}
        with ThreadPoolExecutor(max_workers=1) as pool:
            # The server's rank 0 holds the store and answers once all have met.
            answer = pool.submit(client.call, "POST", "/init_communicator/", body, timeout=(CONNECT, RENDEZVOUS_S + 10))
            try:
                group = weights_group(client.host, port, workers + 1, workers, here)
            except (RuntimeError, OSError) as error:
                answer.result(timeout=RENDEZVOUS_S + 20)
                raise WeightSyncError(
                    f"the group of {client.base_url} on port {port} did not form: {error}", phase="init"
                ) from error
            answer.result(timeout=RENDEZVOUS_S + 20)
        return cls(client, group, here, workers)

    def send(self, bucket: Bucket, version: int) -> dict[str, Any]:
        """One bucket of one dtype: what it holds by HTTP, its elements in one broadcast."""
        entries = [{"name": n, "dtype": str(t.dtype), "shape": list(t.shape)} for n, t in bucket]
        packed = torch.cat([tensor.detach().reshape(-1).to(self.device) for _, tensor in bucket])
        body = {"version": version, "params": entries, "packed": True}
        limits = (CONNECT, self.client.sync_timeout)
        with ThreadPoolExecutor(max_workers=1) as pool:
            answer = pool.submit(self.client.call, "POST", "/update_named_params/", body, timeout=limits)
            self._broadcast(packed)
            return answer.result(timeout=self.client.sync_timeout)

    def _broadcast(self, packed: Tensor) -> None:
        if not broadcast(self.group, packed, self.rank, self.client.sync_timeout):
            raise WeightSyncError(f"{self.client.base_url} did not take a bucket in time", phase="bucket")

    def close(self) -> None:
        """Leave the group."""
        self.client.call("POST", "/close_communicator/", {}, timeout=(CONNECT, 30.0))
        self.group = None


def weights_group(
    host: str, port: int, size: int, rank: int, device: torch.device, *, seconds: float = RENDEZVOUS_S
) -> Any:
    """A process group of its own, beside the trainer's: NCCL on a GPU, gloo on a CPU.

    Args:
        host: Of rank 0, which holds the store.
        port: Of the store.
        size: Workers and the trainer.
        rank: This process's; the trainer is the last.
        device: Where tensors lie.
        seconds: Until all must have come.
    """
    limit = timedelta(seconds=seconds)
    store = torch.distributed.TCPStore(host, port, size, is_master=rank == 0, timeout=limit)
    prefixed = torch.distributed.PrefixStore(WEIGHTS_GROUP, store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return torch.distributed.ProcessGroupNCCL(prefixed, rank, size, timeout=limit)
    return torch.distributed.ProcessGroupGloo(prefixed, rank, size, timeout=limit)


def broadcast(group: Any, tensor: Tensor, root: int, seconds: float) -> bool:
    """Send ``tensor`` from rank ``root``, or receive it; false where it did not pass in time."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return group.broadcast([tensor], options).wait(timedelta(seconds=seconds))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
