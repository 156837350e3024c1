"""Post-training of transformer language models, with nothing silently wrong and no token computed twice.

Every public name is importable from here, and is loaded when it is first used: ``import posttrain`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ArgumentTypeError": "errors",
    "Batch": "types",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "DatasetConfig": "data.mixture",
    "DatasetMixtureConfig": "data.mixture",
    "Finding": "types",
    "GRPOConfig": "algorithms.grpo",
    "GRPOTrainer": "algorithms.grpo",
    "HFEngine": "rollouts.hf",
    "LossTerms": "types",
    "Metric": "metrics",
    "MissingDependencyError": "errors",
    "ModelConfig": "models.load",
    "ModelError": "errors",
    "ModelOutputs": "types",
    "NativeEngine": "rollouts.native.engine",
    "OnlineConfig": "algorithms.online_config",
    "OnlineTrainer": "algorithms.online",
    "PostTrainer": "algorithms.base",
    "PostTrainingConfig": "algorithms.config",
    "PosttrainError": "errors",
    "RepeatSampler": "data.samplers",
    "Request": "types",
    "RewardError": "errors",
    "RichProgressCallback": "report.progress",
    "Rollout": "types",
    "RolloutEngine": "rollouts.base",
    "RolloutError": "errors",
    "Row": "types",
    "SFTConfig": "algorithms.sft",
    "SFTTrainer": "algorithms.sft",
    "Sampling": "types",
    "ScriptedEngine": "rollouts.scripted",
    "TrlParser": "cli.parser",
    "complete": "rollouts.complete",
    "create_model_from_path": "models.load",
    "create_reference_model": "models.reference",
    "get_dataset": "data.mixture",
    "get_peft_config": "models.load",
    "get_quantization_config": "models.load",
    "is_conversational": "data.formats",
    "repeat_iterable_dataset": "data.samplers",
    "token_logprobs": "models.logprob",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"posttrain.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
