"""TRL's module paths: ``from posttrain.trainer.utils import pad`` works as ``from trl.trainer.utils import pad`` did.

No file stands behind these modules. This file's own path is an entry of the package's search path: Python asks
`Finder` for a module that no file holds, and it answers for the paths in `MODULES`. A name read from such a module is the
public name of ``posttrain``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from types import ModuleType
from typing import Any

# Every module of TRL 1.16 whose names are public, those that the release page of 1.18 names, and those of older versions that
# scripts still import. For a trainer ``X`` under ``trainer``, ``X_trainer`` and ``X_config`` are meant; under ``experimental``
# also ``X`` itself.
_PATHS = """
chat_template_utils core data_utils distributed experimental extras generation import_utils kernels mergekit_utils
scripts trainer
extras.dataset_formatting extras.profiling extras.vllm_client
generation.async_vllm_client generation.vllm_client generation.vllm_generation
kernels.chunked_divergence kernels.chunked_logprob kernels.logprob_entropy
models.activation_offloading
models.selective_activation_checkpointing models.utils
rewards.accuracy_rewards rewards.format_rewards rewards.other_rewards
scripts.distillation scripts.dpo scripts.env scripts.grpo scripts.kto scripts.reward scripts.rloo scripts.sft
scripts.utils scripts.vllm_serve
trainer.base_config trainer.base_trainer trainer.callbacks trainer.judges trainer.model_config trainer.utils
experimental.async_distillation.async_rollout_worker experimental.async_grpo.async_rollout_worker
experimental.async_distillation.vllm_client experimental.async_distillation.weight_transfer
experimental.async_grpo.openenv_harness experimental.async_grpo.packing experimental.async_grpo.vllm_client
experimental.async_grpo.weight_transfer experimental.bema_for_ref_model experimental.bema_for_ref_model.callback
experimental.bema_for_ref_model.dpo_trainer experimental.distillation experimental.harbor experimental.judges
experimental.merge_model_callback experimental.openenv experimental.openreward experimental.sdft.loss_utils
experimental.sdft.teacher_sync experimental.sdpo.loss_utils experimental.sdpo.teacher_sync experimental.utils
experimental.winrate_callback
"""
_STABLE = "sft dpo grpo async_grpo rloo reward kto distillation ppo online_dpo cpo orpo bco nash_md xpo gkd"
_EXPERIMENTAL = (
    "a2po async_distillation async_grpo bco cpo dpo gkd gmpo gold grpo_with_replay_buffer gspo_token iw_opd kto minillm nash_md "
    "online_dpo orpo ppo prm sdft sdpo server_distillation ssd tpo xpo"
)
MODULES = frozenset(
    f"posttrain.{path}"
    for path in [
        *_PATHS.split(),
        *(f"trainer.{name}_{part}" for name in _STABLE.split() for part in ("trainer", "config")),
        *(f"experimental.{name}" for name in _EXPERIMENTAL.split()),
        *(f"experimental.{n}.{n}_{part}" for n in _EXPERIMENTAL.split() for part in ("trainer", "config")),
    ]
)

# Names of TRL without a twin here, and what does their job.
INSTEAD = {
    "AllTrueJudge": "posttrain.BaseBinaryJudge with a method that asks each of your judges",
    "HfPairwiseJudge": "posttrain.OpenAIPairwiseJudge(model, base_url='https://router.huggingface.co/v1')",
    "PairRMJudge": "posttrain.OpenAIPairwiseJudge, or a reward model in reward_funcs (llm-blender needs transformers 4)",
    "add_fused_lm_head": "nothing: log-probs are computed a chunk at a time without it (posttrain.token_logprobs)",
    "maybe_gather_lm_head_ctx": "nothing: sharded heads are gathered by posttrain.token_logprobs",
    "FusedCausalLMOutput": "posttrain.ModelOutputs",
    "DataCollatorForRollout": "posttrain.AsyncGRPOTrainer, which batches rollouts itself",
    "AsyncRolloutWorker": "posttrain.AsyncGRPOTrainer, which starts its workers (num_rollout_workers)",
    "AsyncVLLMClient": "posttrain.VLLMClient, whose calls wait; AsyncGRPOTrainer makes its own",
    "VLLMGeneration": "posttrain.VLLMEngine",
    "build_teacher_request_inputs": "posttrain.VLLMClient.score, which takes token ids and lengths of prompts",
    "is_aiohttp_available": "importlib.util.find_spec('aiohttp')",
    "ProfilingContext": "posttrain.profiling_context",
    "prepare_deepspeed": "accelerator.prepare_model(model, evaluation_mode=True)",
    "prepare_fsdp": "accelerator.prepare_model(model, evaluation_mode=True)",
    "HarborSpec": "harness with a function or command of your own (docs/agents.md), or environment_factory",
    "OpenRewardSpec": "harness with a function or command of your own (docs/agents.md), or environment_factory",
    "DataCollatorForCompletionOnlyLM": "SFTConfig(completion_only_loss=True)",
    "ConstantLengthDataset": "SFTConfig(packing=True)",
    "PRMTrainer": "posttrain.RewardTrainer",
    "PRMConfig": "posttrain.RewardConfig",
    "GRPOWithReplayBufferTrainer": "posttrain.GRPOTrainer with dynamic_sampling, which replaces groups without signal",
    "GRPOWithReplayBufferConfig": "posttrain.GRPOConfig(dynamic_sampling=3)",
    "DataCollatorForChatML": "raw rows, which the trainers tokenise and collate",
    "DPODataCollatorWithPadding": "posttrain.DataCollatorForPreference",
    "encode_with_byte_offsets": "tokenizer(text, return_offsets_mapping=True)",
    "pad_byte_offsets": "tokenizer(text, return_offsets_mapping=True)",
    "add_bos_token_if_needed": "nothing: the trainers add it once",
    "add_eos_token_if_needed": "nothing: the trainers add it once",
    "AutoModelForCausalLMWithValueHead": "posttrain.PPOTrainer, which puts a value head on a plain model",
    "AutoModelForSeq2SeqLMWithValueHead": "posttrain.PPOTrainer, which puts a value head on a plain model",
    "PreTrainedModelWrapper": "posttrain.PPOTrainer, which puts a value head on a plain model",
    "NashMDConfig": "posttrain.OnlineDPOConfig",
    "NashMDTrainer": "posttrain.OnlineDPOTrainer",
    "XPOConfig": "posttrain.OnlineDPOConfig",
    "XPOTrainer": "posttrain.OnlineDPOTrainer",
    "MergeConfig": "mergekit-yaml, on two checkpoints",
    "MergeModelCallback": "mergekit-yaml, on two checkpoints",
    "merge_models": "mergekit-yaml, on two checkpoints",
    "upload_model_to_hf": "huggingface_hub.upload_folder",
    "split_pixel_values_by_grid": "nothing: a row keeps its own pictures (posttrain.Row.pictures)",
    "unsplit_pixel_values_by_grid": "nothing: a row keeps its own pictures (posttrain.Row.pictures)",
    "DataCollatorForTriplePreference": "posttrain.TPOTrainer, which batches triples itself",
}

# Names that TRL has in two modules with two meanings.
BY_MODULE = {"posttrain.trainer.reward_trainer.DataCollatorForPreference": "DataCollatorForReward"}


def public_name(module: str, name: str) -> Any:
    """The public object ``name``, asked for through one of TRL's module paths.

    Raises:
        AttributeError: ``name`` is a dunder that Python looks for in any module.
        ImportError: TRL's name has no twin here; names what does its job.
    """
    import posttrain

    name = BY_MODULE.get(f"{module}.{name}", name)
    if name in posttrain.__all__:
        return getattr(posttrain, name)
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    refuse(module, name)
    fix = "see docs/migration.md for what does its job"
    raise ImportError(f"cannot import {name!r} from {module!r}: posttrain has no such name. Fix: {fix}.", name=name)


def refuse(module: str, name: str) -> None:
    """Raise for a name of TRL's without a twin.

    Raises:
        ImportError: Names what does its job.
    """
    if name in INSTEAD:
        text = f"cannot import {name!r} from {module!r}: posttrain has no such name. Fix: use {INSTEAD[name]}."
        raise ImportError(text, name=name)


class Finder(importlib.abc.Loader):
    """Finds the modules of `MODULES`, and loads each as an empty package that asks `public_name` for its names."""

    def find_spec(self, fullname: str) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for one of TRL's module paths, None for any other."""
        if fullname not in MODULES:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        spec.submodule_search_locations = [__file__]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Give the empty module a ``__getattr__``."""
        module.__getattr__ = lambda name: public_name(module.__name__, name)  # pyright: ignore[reportAttributeAccessIssue]
