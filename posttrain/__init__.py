"""Post-training of transformer language models, with nothing silently wrong and no token computed twice.

Every public name is importable from here, and is loaded when it is first used: ``import posttrain`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ArgumentTypeError": "errors",
    "BEMACallback": "report.callbacks.bema",
    "Batch": "types",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DPODataCollatorWithPadding": "data.legacy_collators",
    "DataCollatorForChatML": "data.legacy_collators",
    "DataCollatorForLanguageModeling": "data.collators",
    "DataCollatorForPreference": "data.collators",
    "DataCollatorForReward": "data.collators",
    "DataCollatorForTriplePreference": "data.collators",
    "DataCollatorForUnpairedPreference": "data.collators",
    "DataError": "errors",
    "DatasetConfig": "data.mixture",
    "DatasetMixtureConfig": "data.mixture",
    "Finding": "types",
    "GRPOConfig": "algorithms.grpo",
    "GRPOTrainer": "algorithms.grpo",
    "HFEngine": "rollouts.hf",
    "LogCompletionsCallback": "report.callbacks.completions",
    "LossTerms": "types",
    "MergeConfig": "report.callbacks.merge",
    "MergeModelCallback": "report.callbacks.merge",
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
    "SyncRefModelCallback": "report.callbacks.sync_reference",
    "TrlParser": "cli.parser",
    "WeaveCallback": "report.callbacks.weave",
    "adjusted_mfu": "models.flops",
    "apply_chat_template": "data.chat",
    "check_template": "data.templates",
    "complete": "rollouts.complete",
    "compute_flops_per_token": "models.flops",
    "compute_mfu": "models.flops",
    "create_model_from_path": "models.load",
    "create_reference_model": "models.reference",
    "describe_dataset": "data.formats",
    "disable_dropout_in_model": "models.reference",
    "encode_with_byte_offsets": "data.sequences",
    "entropy_from_logits": "losses.softmax",
    "exact_div": "data.tensors",
    "extract_prompt": "data.pairs",
    "first_true_indices": "data.tensors",
    "flush_left": "data.tensors",
    "generate_model_card": "report.card",
    "get_act_offloading_ctx_manager": "models.offload",
    "get_config_model_id": "models.load",
    "get_dataset": "data.mixture",
    "get_dataset_column_names": "data.formats",
    "get_peft_config": "models.load",
    "get_quantization_config": "models.load",
    "get_training_chat_template": "data.templates",
    "has_generation_markers": "data.chat",
    "identity": "data.collators",
    "is_chat_template_prefix_preserving": "data.template_abilities",
    "is_chat_template_stop_token_trained": "data.template_abilities",
    "is_conversational": "data.formats",
    "is_conversational_from_value": "data.formats",
    "masked_mean": "data.tensors",
    "masked_var": "data.tensors",
    "masked_whiten": "data.tensors",
    "maybe_apply_chat_template": "data.chat",
    "maybe_convert_to_chatml": "data.formats",
    "maybe_extract_prompt": "data.pairs",
    "maybe_unpair_preference_dataset": "data.pairs",
    "merge_models": "report.callbacks.merge",
    "nanmax": "data.tensors",
    "nanmin": "data.tensors",
    "nanstd": "data.tensors",
    "pack_dataset": "data.packing",
    "pad": "data.tensors",
    "pad_byte_offsets": "data.sequences",
    "pad_to_length": "data.tensors",
    "remove_none_values": "data.formats",
    "repeat_iterable_dataset": "data.samplers",
    "selective_log_softmax": "losses.softmax",
    "selective_log_softmax_and_entropy": "losses.softmax",
    "shuffle_sequence_dict": "data.sequences",
    "split_pixel_values_by_grid": "data.sequences",
    "split_tensor_dict": "data.sequences",
    "strip_none": "data.formats",
    "supports_tool_calling": "data.template_abilities",
    "token_logprobs": "models.logprob",
    "truncate_dataset": "data.packing",
    "truncate_right": "data.tensors",
    "unpair_preference_dataset": "data.pairs",
    "unsplit_pixel_values_by_grid": "data.sequences",
    "upload_model_to_hf": "report.callbacks.merge",
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
