"""New weights for a model that is being served: every tensor by its name, adapters beside the base."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ModelError
from posttrain.integrations import require
from posttrain.rollouts.server.nccl import broadcast, weights_group
from posttrain.rollouts.server.replies import RENDEZVOUS_S, UPDATE_TIMEOUT_S
from posttrain.rollouts.workers.shared_weights import as_dtype

__all__ = [
    "ReceivingGroup",
    "ServedWeights",
    "described",
]


ADAPTER = "default"


class ServedWeights:
    """The parameters of a model by the names that a trainer sends.

    Args:
        model: As it was loaded, without adapters.

    Attributes:
        model: What is to be run: the model, or the model with the adapter that was pushed last.
    """

    def __init__(self, model: nn.Module) -> None:
        self.base, self.model = model, model
        self.adapter: dict[str, Any] | None = None
        self.touched: set[int] = set()
        self.known = self._by_name()

    def begin(self, adapter: dict[str, Any] | None) -> None:
        """Get ready for a whole new set of weights, or of adapter tensors.

        Raises:
            ModelError: An adapter that does not fit the model.
        """
        self.touched = set()
        if adapter == self.adapter:
            return
        if self.adapter is not None:
            self.base, self.adapter = self.model.unload(), None  # type: ignore[operator]
            self.model = self.base
        if adapter is not None:
            self.model = _with_adapter(self.base, adapter)
            self.adapter = adapter
        self.known = self._by_name()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, list[str]]:
        """Copy tensors into the parameters of their names.

        Returns:
            How many were taken, and the names that the model does not have.

        Raises:
            ModelError: A tensor of another shape.
        """
        loaded, unexpected = 0, []
        with torch.no_grad():
            for name, tensor in tensors:
                target = self.known.get(name)
                if target is None:
                    unexpected.append(name)
                    continue
                if target.shape != tensor.shape:
                    raise ModelError(
                        f"{name}: the server's is {tuple(target.shape)}, what came is {tuple(tensor.shape)}. Serve the model "
                        "that is trained."
                    )
                target.copy_(tensor)
                self.touched.add(id(target))
                loaded += 1
        return loaded, unexpected

    def missing(self) -> list[str]:
        """Parameters that no tensor came for since `begin`; with an adapter, of the adapter alone."""
        names: dict[int, str] = {}
        for name, parameter in self._by_name(buffers=False).items():
            names.setdefault(id(parameter), name)  # Tied weights are one parameter with two names.
        return [name for key, name in names.items() if key not in self.touched]

    def _by_name(self, *, buffers: bool = True) -> dict[str, Tensor]:
        if self.adapter is not None:
            marks = (f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}.")
            pairs = dict(self.model.named_parameters(remove_duplicate=False))
            return {n.replace(f".{ADAPTER}.", "."): p for n, p in pairs.items() if any(mark in n for mark in marks)}
        found: dict[str, Tensor] = dict(self.base.named_parameters(remove_duplicate=False))
        return found | dict(self.base.named_buffers(remove_duplicate=False)) if buffers else found


def described(model: Any) -> dict[str, Any]:
    """What `/info/` says of a transformers model, so that a trainer can compare it with its own."""
    text = model.config.get_text_config()
    return {
        "architectures": [type(model).__name__],
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "num_key_value_heads": getattr(text, "num_key_value_heads", text.num_attention_heads),
        "vocab_size": text.vocab_size,
        "context": getattr(text, "max_position_embeddings", None),
        "dtype": str(next(model.parameters()).dtype),
    }


def _with_adapter(base: nn.Module, adapter: dict[str, Any]) -> nn.Module:
    peft = require("peft", "a pushed adapter")
    modules = adapter["target_modules"]
    config = peft.LoraConfig(
        r=adapter["r"], lora_alpha=adapter["alpha"], target_modules=modules, lora_dropout=0.0, bias="none"
    )
    config.inference_mode = True
    try:
        return peft.get_peft_model(base, config, adapter_name=ADAPTER).eval()
    except ValueError as error:
        raise ModelError(f"adapter on {modules!r} does not fit the served model: {error}") from error


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
