"""The server's side of a weight-update group: workers that receive what the trainer broadcasts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ModelError
from posttrain.rollouts.server.nccl import broadcast, weights_group
from posttrain.rollouts.server.replies import RENDEZVOUS_S, UPDATE_TIMEOUT_S
from posttrain.rollouts.workers.shared_weights import as_dtype

__all__ = ["ReceivingGroup"]

JOIN_S = RENDEZVOUS_S - 5.0  # A little less than the other side waits, so that the reason comes from here.


class ReceivingGroup:
    """One worker's place in the group; the trainer is its last rank and the only one that sends.

    Args:
        host: Where rank 0 holds the store.
        port: Of the store.
        world_size: Workers and the trainer.
        rank: Of this worker.
        device: Where tensors arrive: NCCL on a GPU, gloo on a CPU.

    Raises:
        ModelError: Not all came within 115 s.
    """

    def __init__(self, host: str, port: int, world_size: int, rank: int, device: torch.device) -> None:
        self.device, self.root = device, world_size - 1
        host = host if rank == 0 else "127.0.0.1"
        try:
            self.group: Any = weights_group(host, port, world_size, rank, device, seconds=JOIN_S)
        except (RuntimeError, OSError) as error:
            raise ModelError(
                f"the weight-update group on port {port} did not form within {JOIN_S:g} s: {error}"
            ) from error

    def receive(self, parts: list[dict[str, Any]], *, packed: bool) -> list[tuple[str, Tensor]]:
        """The tensors that ``parts`` describe by name, dtype and shape: in one broadcast, or one each.

        Raises:
            ModelError: Dtypes that differ in one broadcast, or are unknown; nothing came in time.
        """
        if not packed:
            return [pair for part in parts for pair in self.receive([part], packed=True)]
        found = {part["dtype"]: as_dtype(part["dtype"]) for part in parts}
        dtypes = set(found.values())
        if len(dtypes) != 1 or None in dtypes:
            raise ModelError(f"one broadcast holds tensors of one dtype; announced were {', '.join(map(repr, found))}.")
        sizes = [torch.Size(part["shape"]).numel() for part in parts]
        whole = torch.empty(sum(sizes), dtype=dtypes.pop(), device=self.device)
        try:
            broadcast(self.group, whole, self.root, UPDATE_TIMEOUT_S)
        except RuntimeError as error:
            raise ModelError(f"the broadcast of {len(parts)} tensors did not come: {error}") from error
        pieces = whole.split(sizes)
        return [(part["name"], piece.view(part["shape"])) for part, piece in zip(parts, pieces, strict=True)]
