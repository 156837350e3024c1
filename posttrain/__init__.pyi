"""Public names and their modules. Type checkers read this file, and `posttrain/__init__.py` loads the names from it."""

from .extensions.asynchronous.grpo_config import AsyncGRPOConfig as AsyncGRPOConfig
from .methods.bco import BCOConfig as BCOConfig
from .methods.cpo import CPOConfig as CPOConfig
from .extensions.asynchronous.distillation_method import AsyncDistillationConfig as AsyncDistillationConfig
from .methods.distillation.config import DistillationConfig as DistillationConfig
from .methods.distillation.gkd import GKDConfig as GKDConfig
from .extensions.experimental.distillation_methods import (
    IWOPDConfig as IWOPDConfig,
    MiniLLMConfig as MiniLLMConfig,
    SDFTConfig as SDFTConfig,
    SDPOConfig as SDPOConfig,
    SSDConfig as SSDConfig,
    ServerDistillationConfig as ServerDistillationConfig,
)
from .methods.dpo import DPOConfig as DPOConfig
from .extensions.experimental.a2po_method import A2POConfig as A2POConfig
from .extensions.experimental.gmpo_method import GMPOConfig as GMPOConfig
from .methods.grpo import GRPO as GRPO, GRPOConfig as GRPOConfig
from .methods.kto import KTOConfig as KTOConfig
from .extensions.experimental.online_dpo_method import OnlineDPOConfig as OnlineDPOConfig
from .methods.orpo import ORPOConfig as ORPOConfig
from .extensions.experimental.ppo_config import PPOConfig as PPOConfig
from .methods.preference import AnswerConfig as AnswerConfig, ComparedConfig as ComparedConfig
from .methods.reward import RewardConfig as RewardConfig
from .methods.rloo import RLOOConfig as RLOOConfig
from .methods.sft import SFTConfig as SFTConfig
from .methods.tpo import TPOConfig as TPOConfig
from .extensions.experimental.a2po import A2POTrainer as A2POTrainer
from .extensions.asynchronous.distillation import AsyncDistillationTrainer as AsyncDistillationTrainer
from .extensions.asynchronous.grpo import AsyncGRPOTrainer as AsyncGRPOTrainer
from .trainers.bco import BCOTrainer as BCOTrainer
from .trainers.distillation import DistillationTrainer as DistillationTrainer
from .trainers.gkd import GKDTrainer as GKDTrainer
from .extensions.experimental.distillation import (
    IWOPDTrainer as IWOPDTrainer,
    MiniLLMTrainer as MiniLLMTrainer,
    SDFTTrainer as SDFTTrainer,
    SDPOTrainer as SDPOTrainer,
    SSDTrainer as SSDTrainer,
)
from .trainers.dpo import DPOTrainer as DPOTrainer
from .extensions.experimental.gmpo import GMPOTrainer as GMPOTrainer
from .extensions.experimental.gold import GOLDConfig as GOLDConfig, GOLDTrainer as GOLDTrainer
from .trainers.grpo import GRPOTrainer as GRPOTrainer
from .trainers.kto import KTOTrainer as KTOTrainer
from .extensions.experimental.online_dpo import OnlineDPOTrainer as OnlineDPOTrainer
from .extensions.experimental.ppo import PPOTrainer as PPOTrainer
from .trainers.preference import PreferenceTrainer as PreferenceTrainer
from .trainers.reference_free import CPOTrainer as CPOTrainer, ORPOTrainer as ORPOTrainer, TPOTrainer as TPOTrainer
from .trainers.reward import RewardTrainer as RewardTrainer
from .trainers.rloo import RLOOTrainer as RLOOTrainer
from .extensions.experimental.server_distillation import ServerDistillationTrainer as ServerDistillationTrainer
from .trainers.sft import SFTTrainer as SFTTrainer
from .checks.tokenizers import (
    TokenizerMatch as TokenizerMatch,
    check_tokenizers as check_tokenizers,
    compare_tokenizers as compare_tokenizers,
)
from .cli.parser import TrlParser as TrlParser
from .cli.train import ScriptArguments as ScriptArguments
from .extensions.trl_helpers.available import (
    is_deepspeed_available as is_deepspeed_available,
    is_fastapi_available as is_fastapi_available,
    is_harbor_available as is_harbor_available,
    is_jmespath_available as is_jmespath_available,
    is_joblib_available as is_joblib_available,
    is_liger_kernel_available as is_liger_kernel_available,
    is_math_verify_available as is_math_verify_available,
    is_mergekit_available as is_mergekit_available,
    is_openreward_available as is_openreward_available,
    is_pydantic_available as is_pydantic_available,
    is_requests_available as is_requests_available,
    is_unsloth_available as is_unsloth_available,
    is_uvicorn_available as is_uvicorn_available,
    is_vllm_ascend_available as is_vllm_ascend_available,
    is_vllm_available as is_vllm_available,
    is_weave_available as is_weave_available,
)
from .extensions.trl_helpers.bema import BEMACallback as BEMACallback
from .extensions.trl_helpers.collators import (
    DataCollatorForLanguageModeling as DataCollatorForLanguageModeling,
    DataCollatorForPreference as DataCollatorForPreference,
    DataCollatorForReward as DataCollatorForReward,
    DataCollatorForUnpairedPreference as DataCollatorForUnpairedPreference,
    identity as identity,
)
from .extensions.trl_helpers.completions import LogCompletionsCallback as LogCompletionsCallback
from .extensions.trl_helpers.multimodal import (
    DataCollatorForVisionLanguageChatML as DataCollatorForVisionLanguageChatML,
    DataCollatorForVisionLanguageModeling as DataCollatorForVisionLanguageModeling,
    DataCollatorForVisionPreference as DataCollatorForVisionPreference,
    DataCollatorForVisionUnpairedPreference as DataCollatorForVisionUnpairedPreference,
    prepare_multimodal_messages as prepare_multimodal_messages,
    prepare_multimodal_messages_vllm as prepare_multimodal_messages_vllm,
)
from .extensions.trl_helpers.older import (
    SIMPLE_CHAT_TEMPLATE as SIMPLE_CHAT_TEMPLATE,
    DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM,
    get_kbit_device_map as get_kbit_device_map,
    is_peft_available as is_peft_available,
    setup_chat_format as setup_chat_format,
)
from .extensions.trl_helpers.names import (
    EnvironmentFactory as EnvironmentFactory,
    RewardFunc as RewardFunc,
    RolloutFunc as RolloutFunc,
    TRLExperimentalWarning as TRLExperimentalWarning,
    decode_and_strip_padding as decode_and_strip_padding,
    ensure_master_addr_port as ensure_master_addr_port,
    init_zero_verbose as init_zero_verbose,
    profiling_context as profiling_context,
    profiling_decorator as profiling_decorator,
)
from .extensions.trl_helpers.preparing import (
    disable_gradient_checkpointing as disable_gradient_checkpointing,
    empty_cache as empty_cache,
    enable_gradient_checkpointing as enable_gradient_checkpointing,
    get_reward as get_reward,
    peft_module_casting_to_bf16 as peft_module_casting_to_bf16,
    prepare_model_for_kbit_training as prepare_model_for_kbit_training,
    prepare_peft_model as prepare_peft_model,
    unwrap_model_for_generation as unwrap_model_for_generation,
)
from .extensions.trl_helpers.sequences import (
    convert_dataset as convert_dataset,
    shuffle_sequence_dict as shuffle_sequence_dict,
    split_tensor_dict as split_tensor_dict,
)
from .extensions.trl_helpers.tensors import (
    entropy_from_logits as entropy_from_logits,
    first_true_indices as first_true_indices,
    flush_left as flush_left,
    masked_mean as masked_mean,
    masked_var as masked_var,
    masked_whiten as masked_whiten,
    nanmax as nanmax,
    nanmin as nanmin,
    nanstd as nanstd,
    pad as pad,
    pad_to_length as pad_to_length,
    selective_log_softmax as selective_log_softmax,
    selective_log_softmax_and_entropy as selective_log_softmax_and_entropy,
    truncate_right as truncate_right,
)
from .extensions.trl_helpers.weave import WeaveCallback as WeaveCallback
from .data.chat import (
    apply_chat_template as apply_chat_template,
    has_generation_markers as has_generation_markers,
    maybe_apply_chat_template as maybe_apply_chat_template,
)
from .data.formats import (
    describe_dataset as describe_dataset,
    get_dataset_column_names as get_dataset_column_names,
    is_conversational as is_conversational,
    is_conversational_from_value as is_conversational_from_value,
    maybe_convert_to_chatml as maybe_convert_to_chatml,
    remove_none_values as remove_none_values,
)
from .data.mixture import (
    DatasetConfig as DatasetConfig,
    DatasetMixtureConfig as DatasetMixtureConfig,
    get_dataset as get_dataset,
)
from .data.packing import pack_dataset as pack_dataset, truncate_dataset as truncate_dataset
from .data.preference import (
    extract_prompt as extract_prompt,
    maybe_extract_prompt as maybe_extract_prompt,
    maybe_unpair_preference_dataset as maybe_unpair_preference_dataset,
    unpair_preference_dataset as unpair_preference_dataset,
)
from .data.responses import add_response_schema as add_response_schema, parse_response as parse_response
from .data.samplers import RepeatSampler as RepeatSampler, repeat_iterable_dataset as repeat_iterable_dataset
from .data.templates import (
    check_template as check_template,
    get_training_chat_template as get_training_chat_template,
    is_chat_template_prefix_preserving as is_chat_template_prefix_preserving,
    is_chat_template_stop_token_trained as is_chat_template_stop_token_trained,
    supports_tool_calling as supports_tool_calling,
)
from .errors import (
    ArgumentTypeError as ArgumentTypeError,
    BadRequest as BadRequest,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    MissingDependencyError as MissingDependencyError,
    ModelError as ModelError,
    PosttrainError as PosttrainError,
    PreflightError as PreflightError,
    RewardError as RewardError,
    RolloutError as RolloutError,
    RolloutInterrupted as RolloutInterrupted,
    RolloutServerError as RolloutServerError,
    ServerBusy as ServerBusy,
    ServerUnreachable as ServerUnreachable,
    WeightSyncError as WeightSyncError,
    exact_div as exact_div,
)
from .losses.likelihood import dft_loss as dft_loss
from .metrics import Metric as Metric
from .models.architecture import get_config_model_id as get_config_model_id
from .models.load import (
    ModelConfig as ModelConfig,
    clone_chat_template as clone_chat_template,
    create_model_from_path as create_model_from_path,
    get_peft_config as get_peft_config,
    get_quantization_config as get_quantization_config,
)
from .models.logprob import token_logprobs as token_logprobs
from .models.memory import (
    NoOpManager as NoOpManager,
    OffloadActivations as OffloadActivations,
    adjusted_mfu as adjusted_mfu,
    compute_flops_per_token as compute_flops_per_token,
    compute_mfu as compute_mfu,
    get_act_offloading_ctx_manager as get_act_offloading_ctx_manager,
)
from .models.reference import (
    create_reference_model as create_reference_model,
    disable_dropout_in_model as disable_dropout_in_model,
    hash_module as hash_module,
    use_adapter as use_adapter,
)
from .report.card import generate_model_card as generate_model_card
from .report.completions import (
    print_prompt_completions_sample as print_prompt_completions_sample,
)
from .report.progress import RichProgressCallback as RichProgressCallback
from .loop.sync_reference import SyncRefModelCallback as SyncRefModelCallback
from .rewards.format import (
    get_cosine_scaled_reward as get_cosine_scaled_reward,
    get_repetition_penalty_reward as get_repetition_penalty_reward,
    get_soft_overlong_punishment as get_soft_overlong_punishment,
    think_format_reward as think_format_reward,
)
from .rewards.judges import (
    BaseBinaryJudge as BaseBinaryJudge,
    BaseJudge as BaseJudge,
    BasePairwiseJudge as BasePairwiseJudge,
    BaseRankJudge as BaseRankJudge,
    JudgeReward as JudgeReward,
)
from .rewards.math import (
    accuracy_reward as accuracy_reward,
    answers_match as answers_match,
    reasoning_accuracy_reward as reasoning_accuracy_reward,
)
from .extensions.rewards.openai_judge import OpenAIPairwiseJudge as OpenAIPairwiseJudge
from .extensions.rewards.reasoning_gym import reasoning_gym_task as reasoning_gym_task
from .rollouts.base import (
    Capabilities as Capabilities,
    RolloutEngine as RolloutEngine,
    ScriptedEngine as ScriptedEngine,
)
from .rollouts.engines import complete as complete
from .rollouts.episodes.environments import step_environment as step_environment
from .extensions.agents.harness import Harness as Harness, harness_reward as harness_reward, replayed as replayed
from .extensions.agents.openenv import openenv_environment as openenv_environment
from .extensions.agents.sessions import (
    HarnessRolloutOutcome as HarnessRolloutOutcome,
    HarnessRolloutWorker as HarnessRolloutWorker,
    has_tool_call as has_tool_call,
)
from .extensions.agents.verifiers import verifiers_environment as verifiers_environment
from .rollouts.episodes.loop import Episode as Episode, roll_out_with_tools as roll_out_with_tools
from .rollouts.hf import HFEngine as HFEngine
from .rollouts.native.engine import NativeEngine as NativeEngine
from .rollouts.shared_weights import save_merged as save_merged
from .rollouts.paged import PagedEngine as PagedEngine
from .extensions.server.client import VLLMClient as VLLMClient
from .extensions.server.engine import ServerEngine as ServerEngine
from .extensions.vllm.engine import VLLMEngine as VLLMEngine
from .rollouts.base import WeightTransferProtocol as WeightTransferProtocol
from .extensions.asynchronous.samples import (
    RolloutSample as RolloutSample,
    RolloutWorkerProtocol as RolloutWorkerProtocol,
    Trajectory as Trajectory,
)
from .rollouts.shared_weights import SharedWeights as SharedWeights, Weights as Weights
from .extensions.serve.config import ServeConfig as ServeConfig
from .extensions.serve.server import run_server as run_server
from .methods.config import PostTrainingConfig as PostTrainingConfig
from .loop.build import Plan as Plan, Spec as Spec, build as build, plan as plan
from .loop.online import OnlineTrainer as OnlineTrainer
from .loop.rollout import sample as sample, score as score
from .loop.run import Run as Run
from .loop.step import count as count, forward_backward as forward_backward, optim_step as optim_step
from .methods.online_config import OnlineConfig as OnlineConfig
from .loop.trainer import PostTrainer as PostTrainer
from .types import (
    Batch as Batch,
    Finding as Finding,
    LossTerms as LossTerms,
    ModelOutputs as ModelOutputs,
    Request as Request,
    Rollout as Rollout,
    Row as Row,
    Sampling as Sampling,
)
from .values import strip_none as strip_none

__version__: str
__all__: list[str]
