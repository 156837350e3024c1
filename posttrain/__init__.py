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
    "OffloadActivations": "models.offload",
    "OnlineConfig": "algorithms.online_config",
    "OnlineTrainer": "algorithms.online",
    "PRMConfig": "algorithms.prm",
    "PRMTrainer": "algorithms.prm",
    "PostTrainer": "algorithms.base",
    "PostTrainingConfig": "algorithms.config",
    "PosttrainError": "errors",
    "RepeatSampler": "data.samplers",
    "Request": "types",
    "RewardConfig": "algorithms.reward",
    "RewardError": "errors",
    "RewardTrainer": "algorithms.reward",
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
    "apply_chat_template": "data.chat",
    "complete": "rollouts.complete",
    "create_model_from_path": "models.load",
    "create_reference_model": "models.reference",
    "describe_dataset": "data.formats",
    "disable_dropout_in_model": "models.reference",
    "extract_prompt": "data.pairs",
    "get_act_offloading_ctx_manager": "models.offload",
    "get_config_model_id": "models.load",
    "get_dataset": "data.mixture",
    "get_dataset_column_names": "data.formats",
    "get_peft_config": "models.load",
    "get_quantization_config": "models.load",
    "is_conversational": "data.formats",
    "is_conversational_from_value": "data.formats",
    "maybe_apply_chat_template": "data.chat",
    "maybe_convert_to_chatml": "data.formats",
    "maybe_extract_prompt": "data.pairs",
    "maybe_unpair_preference_dataset": "data.pairs",
    "pack_dataset": "data.packing",
    "remove_none_values": "data.formats",
    "repeat_iterable_dataset": "data.samplers",
    "strip_none": "data.formats",
    "token_logprobs": "models.logprob",
    "truncate_dataset": "data.packing",
    "unpair_preference_dataset": "data.pairs",
    "use_adapter": "models.reference",
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
