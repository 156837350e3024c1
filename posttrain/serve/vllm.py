"""vLLM behind the server: its own scheduler batches what waits, its weights are replaced as a checkpoint is loaded."""

from __future__ import annotations

import json
from typing import Any

from posttrain.integrations import require
from posttrain.rollouts.vllm import VLLMEngine
from posttrain.serve.backends import BatchBackend
from posttrain.serve.config import ServeConfig
from posttrain.serve.jobs import Score, Scored

__all__ = ["VLLMBackend", "create_vllm_backend"]

MOST = 1024  # Completions of one call: vLLM queues within it.


class VLLMBackend(BatchBackend):
    """`VLLMEngine` behind the server.

    Args:
        engine: Loaded.
        tokenizer: Unused; texts are tokenised by the HTTP process.
    """

    scores = True

    def __init__(self, engine: VLLMEngine, tokenizer: Any = None) -> None:
        super().__init__(engine, own_sampling=True, most=MOST, tokenizer=tokenizer)

    def score(self, items: list[Score], top: int, temperature: float) -> list[Scored]:
        """Log-probs of prompts, for which one token is generated and thrown away."""
        vllm = require("vllm", "scoring")
        settings = vllm.SamplingParams(
            max_tokens=1, prompt_logprobs=top, temperature=temperature, detokenize=False, ignore_eos=True
        )
        # The one token must fit: a sequence that fills the context is scored but for its last position.
        most = (self.engine.context or 10**9) - 1
        prompts = [{"prompt_token_ids": item.ids[:most]} for item in items]
        outputs = self.engine.llm.generate(prompts, settings, use_tqdm=False)
        return [_scored(item, output.prompt_logprobs, top) for item, output in zip(items, outputs, strict=True)]

    def reset_cache(self) -> bool:
        """See `Backend`."""
        return self.engine.llm.reset_prefix_cache() is not False

    def info(self) -> dict[str, Any]:
        """See `Backend`."""
        config = self.engine.llm.llm_engine.model_config
        text = config.hf_text_config
        return super().info() | {
            "architectures": list(getattr(config.hf_config, "architectures", None) or []),
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_hidden_layers,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None),
            "vocab_size": self.engine.vocabulary,
            "context": self.engine.context,
            "dtype": str(config.dtype),
            "quantization": config.quantization,
            "vllm_version": require("vllm", "its version").__version__,
        }


def _scored(item: Score, known: Any, top: int) -> Scored:
    """Entries by rank; what the engine has no entry for (the first token, the last of a full context) is NaN."""
    nan = float("nan")
    scored = Scored([], [], [])
    for t in range(item.begin, len(item.ids)):
        token, at = item.ids[t], known[t] if t < len(known) else None
        if at is None:
            scored.actual.append(nan)
            scored.ids.append([token] * top)
            scored.logps.append([nan] * top)
            continue
        ranked = sorted(at.items(), key=lambda pair: pair[1].rank)[:top]
        scored.actual.append(float(at[token].logprob))
        scored.ids.append([i for i, _ in ranked])
        scored.logps.append([float(entry.logprob) for _, entry in ranked])
    return scored


def create_vllm_backend(config: ServeConfig, rank: int) -> VLLMBackend:
    """The engine and its backend as the options say.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """
    engine = VLLMEngine.create(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
        kv_cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        model_impl=config.vllm_model_impl,
        trust_remote_code=config.trust_remote_code,
        distributed_executor_backend=config.distributed_executor_backend,
        speculative_config=None if config.speculative_config is None else json.loads(config.speculative_config),
        max_num_seqs=config.max_num_seqs,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
    )
    return VLLMBackend(engine)
