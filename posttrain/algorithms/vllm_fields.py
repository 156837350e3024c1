"""How an engine with its own copy of the weights gets them, and how far it is trusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.errors import ConfigError, check_choice

__all__ = ["VllmSyncFields", "refuse_truncated", "truncated_sampling"]


@dataclass
class VllmSyncFields:
    """Fields of ``use_vllm`` that say how weights are pushed and checked."""

    vllm_weight_bucket_mb: int = field(
        default=512, metadata={"help": "MiB of weights sent in one request, at least 1."}
    )
    vllm_sync_timeout: float = field(default=720.0, metadata={"help": "Seconds one call of a weight update may take."})
    vllm_request_timeout: float | None = field(
        default=None,
        metadata={"help": "Seconds one request to a server may take; None: 600, or 30 and 0.02 a requested token."},
    )
    vllm_sync_retries: int = field(
        default=2, metadata={"help": "Whole weight updates that are tried again before the run stops."}
    )
    vllm_lora_sync: Literal["auto", "adapter", "merge"] = field(
        default="auto",
        metadata={
            "help": "Send an adapter alone (adapter) or added to a copy of the weights (merge); auto: alone where the servers "
            "take it and still have the base they loaded."
        },
    )
    vllm_sleep_level: Literal["auto", "1", "2"] = field(
        default="auto",
        metadata={
            "help": "With vllm_enable_sleep_mode: 1 keeps weights in host memory, 2 drops them. auto: 1 where a push serves "
            "several generations, else 2."
        },
    )
    vllm_server_api_key: str | None = field(default=None, metadata={"help": "Bearer token of the rollout servers."})
    weight_parity_every: int = field(
        default=50,
        metadata={
            "help": "Pushes between two comparisons of log-probs with the engine, beside that after the first; 0: only that."
        },
    )
    allow_biased_is: bool = field(
        default=False,
        metadata={
            "help": "Allow the correction of engine log-probs with truncated sampling, which biases every ratio."
        },
    )

    def check_far_engine(self) -> None:
        """Refuse what no engine could do with these fields."""
        check_choice("vllm_lora_sync", self.vllm_lora_sync, ("auto", "adapter", "merge"))
        check_choice("vllm_sleep_level", str(self.vllm_sleep_level), ("auto", "1", "2"))
        rules = {
            "vllm_weight_bucket_mb": (self.vllm_weight_bucket_mb >= 1, "must be at least 1"),
            "vllm_sync_timeout": (self.vllm_sync_timeout > 0, "must be above 0 (seconds)"),
            "vllm_request_timeout": ((self.vllm_request_timeout or 1) > 0, "must be above 0 (seconds), or None"),
            "vllm_sync_retries": (self.vllm_sync_retries >= 0, "must be 0 or more"),
            "weight_parity_every": (self.weight_parity_every >= 0, "must be 0 (after the first push alone) or more"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)!r} {rule}.")


def truncated_sampling(cfg: Any) -> str:
    """The settings that draw from another distribution than the one whose log-probs are computed; empty where none does."""
    off = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    given = {name: getattr(cfg, name) for name in off} | dict(cfg.generation_kwargs or {})
    changed = [
        f"{name}={given[name]}" for name, default in off.items() if given[name] not in (default, default or None)
    ]
    if given.get("guide") is not None:
        changed.append(f"generation_kwargs with the guide {given['guide']}")
    if cfg.vllm_structured_outputs_regex:
        changed.append(f"vllm_structured_outputs_regex={cfg.vllm_structured_outputs_regex!r}")
    return ", ".join(changed)


def refuse_truncated(cfg: Any) -> None:
    """Refuse a correction that would divide by the mass that was cut.

    Raises:
        ConfigError: Truncated sampling with the correction, unless ``allow_biased_is``.
    """
    truncated = truncated_sampling(cfg)
    if truncated and cfg.vllm_importance_sampling_correction and not cfg.allow_biased_is:
        raise ConfigError(
            f"{truncated} with vllm_importance_sampling_correction=True: the engine draws from a truncated distribution and "
            "the trainer's log-probs are of the whole one, so every ratio is off by the mass that was cut. Turn the "
            "truncation or the correction off, or set allow_biased_is=True."
        )
