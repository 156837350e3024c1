"""What workers of vLLM do with weights that are pushed: take them in checked buckets, load them as a checkpoint is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from posttrain.errors import ModelError
from posttrain.integrations import require
from posttrain.rollouts.server.replies import shape_of, shared_path
from posttrain.rollouts.server.weight_sync import MappedFile

__all__ = ["EXTENSION", "WeightReceiver", "model_facts", "reload", "restart_command"]

logger = logging.getLogger(__name__)

EXTENSION = "posttrain.rollouts.vllm_worker.WeightReceiver"

Pair = tuple[str, Tensor]


def restart_command(model: Any, on_cpu: bool = False) -> str:
    """How a plain vLLM server is started so that a trainer on the same machine can use it."""
    command = (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {model or 'MODEL'} --logprobs-mode processed_logprobs --generation-config vllm "
        f"--worker-extension-cls {EXTENSION}"
    )
    return f"{command} --no-enable-chunked-prefill" if on_cpu else command  # PT-S017.


def reload(worker: Any, pairs: Iterable[Pair]) -> list[str]:
    """Replace all weights of a worker's model, in the names and layout of its checkpoint.

    Args:
        worker: Of vLLM.
        pairs: Read once.

    Returns:
        Parameters, as vLLM names them, that nothing came for.

    Raises:
        ModelError: vLLM knows other names or shapes; its weights are not whole then.
    """
    model = worker.model_runner.get_model()
    own = {name for name, _ in model.named_parameters()}
    load, found, lost = model.load_weights, [], []

    def noted(weights: Iterable[Pair], *args: Any, **kwargs: Any) -> Any:
        found.append(load(weights, *args, **kwargs))
        return found[-1]

    def read() -> Iterator[Pair]:
        try:
            yield from pairs
        except Exception as error:
            lost.append(error)
            raise

    model.load_weights = noted  # vLLM only logs what it says.
    try:
        worker.reload_weights(weights_iterator=read())
    except Exception as error:
        _give_up(worker, model)
        if error in lost:
            raise  # They could not be read: nothing that vLLM did.
        raise ModelError(
            f"vLLM could not load the weights that were pushed: {type(error).__name__}: {error}. Serve the model that is "
            "trained (same architecture, same names), and push all of them again."
        ) from error
    finally:
        del model.load_weights
    _repack_heads(model)
    return sorted(own - found[0]) if found and found[0] is not None else []


def _give_up(worker: Any, model: nn.Module) -> None:
    """End a reload that failed: layers that were half loaded would count the next push's weights on top of this one's."""
    try:
        layers = require("vllm.model_executor.model_loader.reload", "pushing weights")
        with require("vllm.config", "pushing weights").set_current_vllm_config(worker.vllm_config):
            layers.finalize_layerwise_reload(model, worker.vllm_config.model_config)
    except Exception:
        logger.exception("vLLM could not be brought back in order after weights that it does not know; restart it.")


def _repack_heads(model: nn.Module) -> None:
    """A tied output layer is sent no weights of its own, so that vLLM's CPU kernels would keep their packed copy of the old."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]


def model_facts(config: Any) -> dict[str, Any]:
    """What ``/info/`` says of a model that vLLM runs.

    Args:
        config: ``VllmConfig``.
    """
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    text = model.hf_text_config
    return {
        "architectures": list(getattr(model.hf_config, "architectures", None) or []) or None,
        **shape_of(text),
        "vocab_size": model.get_vocab_size(),
        "max_model_len": model.max_model_len,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "revision": model.revision,
        "logprobs_mode": str(model.logprobs_mode),
        "max_logprobs": model.max_logprobs,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "max_num_seqs": scheduler.max_num_seqs,
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "device": str(config.device_config.device_type),
    }


class WeightReceiver:
    """Extension of vLLM's workers that takes weights in buckets: files in shared memory, each checked by its hash.

    ``VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls posttrain.rollouts.vllm_worker.WeightReceiver`` makes a
    plain vLLM server one that a trainer on the same machine can push to. Methods return plain values, which vLLM sends as
    JSON.
    """

    _posttrain_pairs: list[Pair] | None = None

    def posttrain_facts(self) -> dict[str, Any]:
        """What the server runs."""
        return model_facts(self.vllm_config)  # type: ignore[attr-defined]

    def posttrain_begin(self) -> dict[str, Any]:
        """New weights are on their way; what came of an earlier push is forgotten."""
        self._posttrain_pairs = []
        return {}

    def posttrain_bucket(self, path: str, digest: str, size: int | None = None) -> dict[str, Any]:
        """Take the tensors of one file, its first ``size`` bytes, which are written anew afterwards.

        Raises:
            ModelError: No push was begun, or other bytes than were announced.
        """
        if self._posttrain_pairs is None:
            raise ModelError("no update was begun.")
        file = MappedFile(shared_path(path))
        got = file.checksum(size)
        if got != digest:
            raise ModelError(
                f"the bucket's checksum is {got}, and {digest} was announced: its bytes changed on the way."
            )
        pairs = [(name, tensor.clone()) for name, tensor in file.tensors(size)]
        self._posttrain_pairs += pairs
        return {"loaded": len(pairs)}

    def posttrain_end(self) -> dict[str, Any]:
        """Load what came.

        Raises:
            ModelError: See `reload`.
        """
        pairs, self._posttrain_pairs = self._posttrain_pairs, None
        if pairs is None:
            raise ModelError("no update was begun.")
        missing = reload(self, pairs)
        return {"loaded": len(pairs), "missing": missing}

    def posttrain_abort(self) -> dict[str, Any]:
        """Forget what came."""
        self._posttrain_pairs = None
        return {}
