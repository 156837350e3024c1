"""Extension of vLLM's workers. It receives weights through shared memory, and loads them in the way in which vLLM loads a
checkpoint. This module can only be imported if vLLM is installed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from posttrain.errors import ModelError
from posttrain.models.architecture import shape_of
from posttrain.rollouts.shared_memory import file_tensors, shared_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

# Name of this weight-transfer backend in ``--weight-transfer-config``.
BACKEND = "posttrain"
ADAPTERS_MAY_COME = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").lower() in ("1", "true")
Pair = tuple[str, Tensor]


class Reload:
    """One weight update of a worker's model, with vLLM's layerwise reload. Tensors have the same names and layout as in
    the model's checkpoint.

    Args:
        model: vLLM model of the worker.
        config: vLLM's config, a ``VllmConfig``.
    """

    def __init__(self, model: nn.Module, config: PretrainedConfig) -> None:
        self.model, self.config = model, config
        self.loaded: set[str] = set()
        initialize_layerwise_reload(model)

    def load(self, pairs: Iterable[Pair]) -> None:
        """Load a part of the tensors. The tensors are copied, so the caller may overwrite them afterwards.

        Raises:
            ModelError: The name or shape of a tensor does not fit vLLM's model. The update ends, and the weights stay
                incomplete.
        """
        try:
            self.loaded |= set(self.model.load_weights(pairs) or ())  # type: ignore[operator]
        except Exception as error:
            self.end()
            raise ModelError(
                f"vLLM could not load the pushed weights: {type(error).__name__}: {error}. Fix: serve the model that "
                "is trained (same architecture, same names), and push all weights again."
            ) from error

    def end(self) -> list[str]:
        """End the update: convert the weights to the layout of vLLM's kernels. Return the names of parameters that were not
        received.
        """
        finalize_layerwise_reload(self.model, self.config.model_config)
        for module in self.model.modules():
            # Also convert the output layer if it is tied to the embeddings. It receives no weights itself, so vLLM's CPU
            # kernels would otherwise keep a converted copy of its old weights.
            if hasattr(module, "cpu_linear") and type(module).__name__ == "ParallelLMHead":
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]
        # Ignore adapter weights, because adapters are loaded separately. In layers that support adapters, the weights of the
        # base model are stored under ``base_layer``.
        names = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters() if ".lora_" not in name}
        return sorted(names - {name.replace(".base_layer.", ".") for name in self.loaded})


def reload(worker: Any, pairs: Iterable[Pair]) -> list[str]:
    """Replace all weights of a worker's model, using `Reload`. Return the names of parameters that were not received."""
    with set_current_vllm_config(worker.vllm_config):
        update = Reload(worker.model_runner.get_model(), worker.vllm_config)
        update.load(pairs)
        return update.end()


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Initialization message. It has no fields."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Message of a weight update. It describes one bucket, or reports that all buckets were sent.

    Attributes:
        path: Path of a bucket's safetensors file in shared memory.
        checksum: Hash of the bytes of this file.
        complete: Whether all buckets were sent.
    """

    path: str = ""
    checksum: str = ""
    complete: bool = False


class SharedMemoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Backend ``posttrain`` of vLLM's weight transfer. It reads buckets from shared memory, and verifies the hash of each
    bucket.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    _update: Reload | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing, because shared memory needs no connection."""

    def start_weight_update(self) -> None:
        """Begin a weight update. If an earlier update was not finished, end the earlier update first."""
        self.finish_weight_update()
        self._update = Reload(self.model, self.vllm_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Process a message with `receive_weights`. If an error occurs, end the update."""
        try:
            super().update_weights(update_info)
        except BaseException:
            self.finish_weight_update()
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one bucket, or check that all weights were received.

        Raises:
            ModelError: A hash differs, a name is unknown, or a weight was not received.
        """
        if self._update is None:
            raise ModelError("no update was started.")
        if update_info.complete:
            update, self._update = self._update, None
            # Reject an incomplete update. vLLM fuses several weights into one parameter, so a weight that was not received
            # would leave uninitialized memory in it.
            if missing := update.end():
                raise ModelError(
                    f"vLLM still has old values of {len(missing)} weights: {', '.join(missing[:5])}. Fix: serve the model that "
                    "is trained (same architecture, same names), and push all of its weights."
                )
            return
        tensors = file_tensors(shared_path(update_info.path), update_info.checksum)
        # Copy the tensors. vLLM stores them until a layer is complete, and the next bucket may overwrite the file before that.
        self._update.load((name, tensor.clone()) for name, tensor in tensors.items())

    def finish_weight_update(self) -> None:
        """End the current weight update, if an update was started."""
        update, self._update = self._update, None
        if update is not None:
            update.end()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise an error. vLLM 0.27 requires this method, but `posttrain.extensions.server.weight_sync.Pusher` sends the
        weights instead.
        """
        raise NotImplementedError("posttrain's trainer sends weights with its Pusher instead.")

    def shutdown(self) -> None:
        """Do nothing, because this backend has no resources to release."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


def model_facts(config: PretrainedConfig) -> dict[str, Any]:
    """Return the properties of the server that a trainer compares with its own model.

    Args:
        config: vLLM's config, a ``VllmConfig``.
    """
    model, scheduler, transfer = config.model_config, config.scheduler_config, config.weight_transfer_config
    backend = None if transfer is None else transfer.backend
    facts = {
        "engine": "vllm",
        "architectures": list(getattr(model.hf_config, "architectures", None) or []) or None,
        **shape_of(model.hf_text_config),
        "vocab_size": model.get_vocab_size(),
        "max_model_len": model.max_model_len,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "revision": model.revision,
        "logprobs_mode": str(model.logprobs_mode),
        "max_logprobs": model.max_logprobs,
        "max_num_seqs": scheduler.max_num_seqs,
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "device": str(config.device_config.device_type),
        "transfer": "shared memory" if backend == BACKEND else backend,
        "checkpoint_names": True,
    }
    lora, replicas = config.lora_config, config.parallel_config.data_parallel_size
    # Adapters can only be loaded into a server with one replica. `posttrain.extensions.vllm.engine.ADAPTED` lists the supported
    # layers.
    if lora is not None and ADAPTERS_MAY_COME and replicas == 1 and lora.target_modules:
        facts |= {"adapter_rank": int(lora.max_lora_rank), "adapter_layers": sorted(lora.target_modules)}
    if backend not in (BACKEND, "nccl"):
        facts["takes_no_weights"] = f"its --weight-transfer-config names {backend}, not {BACKEND} or nccl"
    return facts


class WorkerExtension:
    """Extension of vLLM's workers. Importing its module registers the backend ``posttrain``."""

    def posttrain_facts(self) -> dict[str, Any]:
        """Return the properties of the server's model."""
        return model_facts(self.vllm_config)  # type: ignore[attr-defined]
