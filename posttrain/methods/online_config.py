"""`OnlineConfig`: fields of all methods that sample completions during training: sampling, batch sizes, rewards and
logging.
"""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import transformers

from posttrain.data.chat import inner_tokenizer
from posttrain.errors import ConfigError, MissingDependencyError, check_choice
from posttrain.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    Port,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    Share,
    config,
    option,
)
from posttrain.methods.config import PostTrainingConfig, check_gathering
from posttrain.rollouts.engines import ENGINES, choose_engine
from posttrain.rollouts.episodes.options import HarnessFields
from posttrain.rollouts.sampling import GENERATION_NAMES, generation_fields, structured_guide
from posttrain.types import Truncation

if TYPE_CHECKING:
    from torch import nn
    from transformers import ProcessorMixin

logger = logging.getLogger(__name__)


@dataclass
class GenerationFields:
    """Options of sampling completions during training."""

    num_generations: PositiveInt = option(
        8,
        "Number of completions sampled per prompt (the group size G). It must be at least 2, because advantages compare the "
        "completions of a group, and it must divide generation_batch_size. Increase it if most groups have equal rewards.",
    )
    num_generations_eval: NonNegativeInt | None = option(
        None,
        "Number of completions per prompt in evaluation. A smaller number saves time. None or 0: same as in training.",
    )
    max_completion_length: PositiveInt = option(
        512,
        "Maximum number of tokens per completion, including the end token. Increase it if the logged metric "
        "completions/clipped_ratio is above 0.1.",
    )
    shuffle_dataset: bool = option(
        True,
        "Shuffle the prompts of the training set in every epoch. False keeps the order of the dataset, e.g. for a curriculum.",
    )
    generation_batch_size: PositiveInt | None = option(
        None,
        "Number of completions per generation, over all processes. It must be a multiple of num_generations and of "
        "per_device_train_batch_size x processes. None: per_device_train_batch_size x processes x steps_per_generation. Set "
        "either this field or steps_per_generation.",
    )
    steps_per_generation: PositiveInt | None = option(
        None,
        "Number of micro-batches into which one generation is split for training. None: same as gradient_accumulation_steps, "
        "so that each optimizer step trains on new completions. With a larger value, completions are sampled less often, and "
        "training uses completions of older weights.",
    )
    temperature: PositiveFloat = option(
        1.0,
        "Sampling temperature, above 0. Logits are divided by it, both in sampling and in every log-prob of the loss. Higher "
        "values make completions more diverse. 1 uses the model's own distribution.",
    )
    top_p: PositiveShare = option(
        1.0,
        "Nucleus sampling: sample only from the most likely tokens whose probabilities sum to top_p, above 0 and at most 1. 1 "
        "disables it.",
    )
    top_k: NonNegativeInt | None = option(0, "Sample only from the k most likely tokens. 0 or None disables it.")
    min_p: Share | None = option(
        None,
        "Sample only from tokens whose probability is at least min_p times that of the most likely token, from 0 to 1. Common "
        "values are 0.01 to 0.2. None disables it.",
    )
    repetition_penalty: PositiveFloat = option(
        1.0,
        "Penalty on tokens that are already in the prompt or the completion, above 0. Values above 1 discourage repetition, "
        "values below 1 encourage it, and 1 disables the penalty. Log-probs are computed without the penalty, so they differ "
        "from the sampled distribution.",
    )
    generation_kwargs: dict | str | None = option(
        None,
        "Additional sampling settings as a mapping or JSON: stop_strings, suppress_tokens, logit_bias, min_new_tokens, "
        "no_repeat_ngram_size, eos_token_id, stop_token_ids, max_new_tokens, structured_outputs. temperature, top_p, top_k, "
        "min_p and repetition_penalty override the fields with these names. do_sample=False and a seed are not allowed.",
    )
    chat_template_kwargs: dict | str | None = option(
        None,
        "Arguments of the chat template as a mapping or JSON, for example {'enable_thinking': false}. They apply whenever a "
        "prompt is rendered.",
    )
    cache_implementation: str | None = option(
        None,
        "Key-value cache of transformers' generate, for example 'static'. Only rollout_engine='hf' uses it; other engines "
        "ignore it with a warning. None: transformers' default.",
    )
    rollout_engine: Annotated[str, OneOf(("auto", *ENGINES))] = option(
        "auto",
        "Engine that samples completions. 'native': runs in the trainer's process, on the trainer's weights. 'native_bf16': "
        "same as 'native' on a CPU, with weights rounded to bfloat16. 'hf': transformers' generate, which is slow but correct "
        "for every model. 'paged': transformers' continuous batching. 'vllm': vLLM in the trainer's process. 'server': "
        "rollout servers. 'auto': on a GPU, the first supported engine of vllm, paged, native and hf; on a CPU, native if its "
        "results are exact for the model, else hf.",
    )
    pad_to_multiple_of: int | str | None = option(
        None,
        "Round the width of batches up to a multiple of this number. None or 'auto': no rounding, except for FlexAttention, "
        "which needs multiples of 128.",
    )
    ds3_gather_for_generation: bool = option(
        True,
        "DeepSpeed ZeRO-3: gather the weights on every device for generation. False is an error with use_vllm, and otherwise "
        "ignored with a warning. If the model does not fit on one device, use a rollout server.",
    )


@dataclass
class VllmFields:
    """Options of generation with vLLM, with rollout servers, and with transformers' continuous batching."""

    use_vllm: bool = option(
        False,
        "Generate with vLLM or rollout servers instead of an engine that uses the trainer's weights. The weights are pushed "
        "to vLLM after every update. vllm_mode selects where vLLM runs.",
    )
    vllm_mode: Literal["server", "colocate"] = option(
        "colocate",
        "Where vLLM runs. 'colocate': in the trainer's process, on the same GPUs. 'server': in servers that must be running, "
        "started with posttrain serve or vllm serve.",
    )
    vllm_model_impl: str = option(
        "vllm",
        "Implementation of the model in vLLM. 'vllm': vLLM's own. 'transformers': the transformers backend, for models that "
        "vLLM does not implement.",
    )
    vllm_enable_sleep_mode: bool = option(
        False,
        "Release vLLM's GPU memory while the trainer updates the weights (vllm_mode='colocate'). This saves memory, but "
        "waking up takes time. vllm_sleep_level selects what happens to vLLM's weights.",
    )
    vllm_structured_outputs_regex: str | None = option(
        None,
        "Regular expression that every completion must match (structured outputs). vLLM and the native engine support it; the "
        "native engine needs xgrammar. None: no constraint.",
    )
    vllm_server_base_url: str | None = option(
        None,
        "Address of the rollout server, for example 'http://localhost:8000', or several addresses separated by commas. It "
        "overrides vllm_server_host and vllm_server_port. None: the address is built from these two fields.",
    )
    vllm_server_host: str = option("0.0.0.0", "Host of the rollout server. Ignored if vllm_server_base_url is set.")
    vllm_server_port: Port = option(8000, "Port of the rollout server. Ignored if vllm_server_base_url is set.")
    vllm_server_timeout: PositiveFloat = option(
        240.0,
        "Seconds to wait for a rollout server at the start of the run, and for a server to become available again if all "
        "servers are lost. After this time, the run ends with an error.",
    )
    vllm_group_port: Port = option(
        51216,
        "Port of the process group that sends weights to vLLM servers. Change it only if another program uses it.",
    )
    vllm_gpu_memory_utilization: PositiveShare = option(
        0.3,
        "Fraction of the GPU's memory for vLLM, above 0 and at most 1 (vllm_mode='colocate'). The trainer uses the remaining "
        "memory. With vllm_mode='server', set it on the server instead.",
    )
    vllm_max_model_length: PositiveInt | None = option(
        None,
        "Maximum number of tokens of prompt and completion in vLLM (vllm_mode='colocate'). Set it to the longest prompt plus "
        "max_completion_length to save memory. None: the model's context length.",
    )
    vllm_tensor_parallel_size: PositiveInt = option(
        1,
        "Accepted for compatibility with TRL. It must be 1, because each process runs its own vLLM. For larger models, use "
        "vllm_mode='server' and set tensor parallelism on the server.",
    )
    vllm_importance_sampling_correction: bool = option(
        True,
        "Importance-sampling correction: multiply the loss by the ratio of the trainer's to the engine's probabilities. It has "
        "no effect if both compute exactly the same probabilities. False ignores the difference.",
    )
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric"
    ] = option(
        "sequence_mask",
        "How the ratio of vllm_importance_sampling_correction is limited to the range from clip_min to clip_max. Truncate modes "
        "clamp the ratio to the range. Mask modes set a ratio outside the range to 0, which excludes it from the loss. "
        "'token_truncate', 'token_mask': one ratio per token. 'sequence_truncate', 'sequence_mask': one ratio per completion, "
        "the product of its token ratios. 'geometric': keeps the token ratios, but masks the whole completion if their "
        "geometric mean is outside the range.",
    )
    vllm_importance_sampling_clip_max: PositiveFloat | None = option(
        3.0,
        "Upper bound of the correction's ratio, above 0. The truncate modes clamp a larger ratio to the bound. The mask modes "
        "and 'geometric' set a larger ratio to 0. None: no upper bound.",
    )
    vllm_importance_sampling_clip_min: NonNegativeFloat | None = option(
        None,
        "Lower bound of the correction's ratio, below clip_max. The truncate modes clamp a smaller ratio to the bound. The "
        "mask modes and 'geometric' set a smaller ratio to 0. None: 0, which has no effect.",
    )
    vllm_importance_sampling_cap: PositiveFloat | None = option(
        None, "Deprecated name of vllm_importance_sampling_clip_max. If it is set, it overrides that field."
    )
    use_transformers_continuous_batching: bool = option(
        False,
        "Generate with transformers' continuous batching. Same as rollout_engine='paged'. It supports only text, and only the "
        "sampling parameters temperature, top_k and top_p.",
    )
    transformers_continuous_batching_config: dict | str | None = option(
        None,
        "Fields of transformers' ContinuousBatchingConfig as a mapping or JSON. Only continuous batching uses them. None: "
        "transformers' defaults.",
    )
    use_transformers_paged: bool | None = option(None, "Deprecated name of use_transformers_continuous_batching.")


@dataclass
class ReferenceFields:
    """Options of the KL penalty and of the reference model that it is measured against."""

    beta: NonNegativeFloat = option(
        0.0,
        "Weight of the KL penalty, which keeps the policy close to the reference model. 0: no penalty, and no reference model "
        "is loaded, which saves memory. DeepSeek-R1 uses 0.001. Increase it if the model loses earlier skills.",
    )
    sync_ref_model: bool = option(
        False,
        "Move the reference model towards the policy every ref_model_sync_steps steps (TR-DPO, arXiv:2404.09656). It needs "
        "beta above 0. It does not work with adapters or quantized weights.",
    )
    ref_model_mixup_alpha: PositiveShare = option(
        0.6,
        "With sync_ref_model: the fraction a in reference = (1 - a) * reference + a * policy, above 0 and at most 1. 1 "
        "replaces the reference with the policy.",
    )
    ref_model_sync_steps: PositiveInt = option(
        512, "With sync_ref_model: number of optimizer steps between two updates of the reference model, at least 1."
    )


@dataclass
class RewardFields:
    """Options of scoring completions with reward functions."""

    reward_weights: list[float] | None = option(
        None,
        "Weight of each reward function in the sum of rewards, one number per function. None: every function has weight 1.",
    )
    reward_timeout: PositiveFloat | None = option(
        None,
        "Timeout of a reward function for one generation, in seconds. If a function takes longer, the run ends with an error "
        "that contains the function's name. None: no limit.",
    )
    reward_transform: list[str] | None = option(
        None,
        "One transform per reward function, applied before the weights. 'none': no transform. 'clip:a:b': clamp to [a, b]. "
        "'log1p': sign(r) * log(1 + |r|). 'tanh:s': tanh(r / s). 'rank': rank in the group, from 0 to 1. 'zscore': "
        "standardize over the generation. 'running': divide by the standard deviation of all rewards since the start of the "
        "run. None: no transforms.",
    )
    check_rewards: bool = option(
        True,
        "Call each reward function once on two rows with made-up completions before the model is loaded, so that errors in "
        "the function are found early. Set it to False if a call is expensive.",
    )
    check_reward_determinism: bool = option(
        False, "Score 4 rows of the first generation twice, and warn if a reward function returns different rewards."
    )


@dataclass
class VllmSyncFields:
    """Options of pushing weights to vLLM and rollout servers, and of verifying the weights that arrived."""

    vllm_weight_bucket_mb: PositiveInt = option(
        512,
        "Maximum size of a request that sends weights to a server, in MiB, at least 1. Decrease it if a proxy limits the size "
        "of requests.",
    )
    vllm_sync_timeout: PositiveFloat = option(
        720.0, "Timeout of each request of a weight update, in seconds. Increase it for large models on slow networks."
    )
    vllm_request_timeout: PositiveFloat | None = option(
        None,
        "Timeout of a generation request to a server, in seconds. None: 30 plus 0.02 per requested token, but at least 600.",
    )
    vllm_sync_retries: NonNegativeInt = option(
        2, "How many times a failed weight update is retried from the beginning before the run stops. 0: no retries."
    )
    vllm_sleep_level: Literal["auto", "1", "2"] = option(
        "auto",
        "With vllm_enable_sleep_mode: what happens to vLLM's weights. '1' keeps them in host memory. '2' drops them until the "
        "next push. 'auto': '1' if one push serves several generations and the weights fit into host memory, else '2'.",
    )
    adapter_sync: Literal["auto", "adapter", "merged"] = option(
        "auto",
        "Which weights are pushed to the engine if a LoRA adapter is trained. 'adapter': only the adapter; this is an error "
        "if the engine does not support adapters. 'merged': all weights, with the adapter merged into them. 'auto': 'adapter' "
        "if the engine supports adapters, else 'merged' with a warning.",
    )
    vllm_server_api_key: str | None = option(
        None,
        "Bearer token for the rollout servers. None: the environment variable POSTTRAIN_API_KEY. If it is not set, the token "
        "is read from the file that a server of the same user on this machine has written.",
    )
    mask_ids_without_token: bool = option(
        False,
        "Never sample ids for which the tokenizer has no token. Set it for models whose embedding is padded, i.e. has more "
        "rows than the tokenizer has tokens.",
    )
    weight_parity_every: NonNegativeInt | None = option(
        None,
        "Number of weight pushes between two comparisons of the log-probs of engine and trainer. None: as often as possible "
        "within 1 % of the run's time. The log-probs are always compared after the first push, and after each push until "
        "training has changed the weights. 0: no further comparisons.",
    )
    allow_biased_is: bool = option(
        False,
        "Allow the importance-sampling correction together with a repetition penalty, structured outputs or a logit bias. By "
        "default this is an error, because these settings change the sampled distribution, so that every ratio is biased.",
    )


def reshaped_sampling(cfg: OnlineConfig, *names: str) -> str:
    """Describe the settings that change the sampled distribution but not the trainer's log-probs. Return "" if there
    are none.

    Args:
        cfg: Config of an online trainer.
        names: Names of additional settings that do not change the trainer's log-probs.
    """
    # Maps each option to its current value and the value that disables it.
    known = {
        "repetition_penalty": (cfg.repetition_penalty, 1.0), "top_p": (cfg.top_p, 1.0), "top_k": (cfg.top_k, 0),
        "min_p": (cfg.min_p, None),
    }  # fmt: skip
    options = dict(cfg.generation_kwargs or {})  # type: ignore[arg-type]
    used = {name: known[name] for name in ("repetition_penalty", *names)}
    changed = [f"{name}={value}" for name, (value, off) in used.items() if value not in (off, off or None)]
    if options.get("guide") is not None:
        changed.append(f"generation_kwargs with the guide {options['guide']}")
    # suppress_tokens is not listed, because the trainer's log-probs account for it (see `Sampling.left_out`).
    rules = ("min_new_tokens", "no_repeat_ngram_size", "logit_bias")
    changed += [f"generation_kwargs with {name}={options[name]}" for name in rules if options.get(name)]
    if cfg.vllm_structured_outputs_regex:
        changed.append(f"vllm_structured_outputs_regex={cfg.vllm_structured_outputs_regex!r}")
    return ", ".join(changed)


def reject_reshaped_sampling(cfg: OnlineConfig) -> None:
    """Reject settings for which the importance-sampling correction would be wrong.

    Log-probs account for top-k, top-p and min-p, but not for penalties, structured outputs and logit biases.

    Raises:
        ConfigError: Such a setting is combined with the correction, and ``allow_biased_is`` is False.
    """
    reshaped = reshaped_sampling(cfg)
    if reshaped and cfg.vllm_importance_sampling_correction and not cfg.allow_biased_is:
        raise ConfigError(
            f"{reshaped} with vllm_importance_sampling_correction=True: the engine's log-probs include the change of "
            "the distribution, the trainer's log-probs do not, so every ratio is biased. Fix: remove the setting, "
            "disable the correction, or set allow_biased_is=True."
        )


def check_truncation(cfg: OnlineConfig) -> None:
    """Raise an error for a truncate mode of the correction without a bound.

    Raises:
        ConfigError: Both bounds are None.
    """
    low, high = cfg.vllm_importance_sampling_clip_min, cfg.vllm_importance_sampling_clip_max
    if (cfg.vllm_importance_sampling_mode or "").endswith("_truncate") and low is None and high is None:
        raise ConfigError(
            f"vllm_importance_sampling_mode={cfg.vllm_importance_sampling_mode!r} truncates the ratio at "
            "vllm_importance_sampling_clip_min and vllm_importance_sampling_clip_max, but both are None. Set one, "
            "for example vllm_importance_sampling_clip_max=2.0."
        )


def resolve_auto(args: PostTrainingConfig, model: nn.Module, processor: ProcessorMixin) -> None:
    """Replace ``rollout_engine="auto"`` on a GPU by the engine that is selected for this model.

    On a CPU the engine is selected when it is created.

    Args:
        args: Config with ``refused_engines``. vLLM is selected as ``use_vllm=True`` with ``vllm_mode="colocate"``.
        model: The policy.
        processor: Tokenizer of the policy, or a processor with images. Continuous batching does not support images.
    """
    on_gpu = next(model.parameters()).device.type == "cuda"
    if args.rollout_engine != "auto" or args.use_vllm or not on_gpu:
        return
    refused = args.refused_engines()
    if inner_tokenizer(processor) is not processor:
        refused.setdefault("paged", "it supports text only, and the processor has images")
    name = choose_engine(model, refused)
    if name == "vllm":
        args.use_vllm, args.vllm_mode = True, "colocate"
    else:
        args.rollout_engine = name


# Supported keys of generation_kwargs. Those in OVERRIDDEN are moved to the config field of the same name, and those in FURTHER
# are passed on.
OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
FURTHER = ("max_new_tokens", "stop_token_ids", "structured_outputs", "guide", "do_sample", "seed", *GENERATION_NAMES)
# Config fields of losses that correct for the difference between engine and policy by importance sampling.
CORRECTION = (
    "allow_biased_is",
    *(f"vllm_importance_sampling_{x}" for x in ("correction", "mode", "clip_max", "clip_min")),
)
REFUSED = {"typical_p": "no engine supports typical sampling; top_p and min_p also remove the tail"}


@config
class OnlineConfig(VllmSyncFields, VllmFields, GenerationFields, ReferenceFields, RewardFields, PostTrainingConfig):
    """Arguments of the trainers that sample completions from the policy while they train it."""

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *PostTrainingConfig._VALID_DICT_FIELDS,
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]

    # Minimum group size. It is 2, because advantages compare at least two completions.
    _least_generations: ClassVar[int] = 2
    # These are constants instead of fields, because only some methods have these options.
    log_ref_kl, samples_per_step = False, None
    # Whether the loss is corrected by importance sampling, with the ratio of the trainer's to the engine's probabilities.
    _corrects_sampler: ClassVar[bool] = False

    learning_rate: float = option(
        1e-6, "Peak learning rate. The default is for full fine-tuning. Use about ten times this value for LoRA."
    )
    remove_unused_columns: bool | None = option(
        False,
        "Drop all columns of the dataset except the prompt. Reward functions then do not receive these columns. Leave it "
        "False if a reward function needs a column, for example the reference answer.",
    )
    num_iterations: PositiveInt = option(
        1,
        "Number of training passes over each generation (mu in the papers), at least 1. If it is above 1, later passes are "
        "off-policy, and the importance ratio is clipped.",
    )
    epsilon: NonNegativeFloat = option(
        0.2,
        "Clip range of the importance ratio below 1: the ratio is clipped at 1 - epsilon. At least 0. Smaller values limit "
        "how far one generation can move the policy. loss_type='gmpo' clips the log of the ratio instead.",
    )
    epsilon_high: NonNegativeFloat | None = option(
        None,
        "Clip range of the importance ratio above 1: the ratio is clipped at 1 + epsilon_high. None: same as epsilon. DAPO "
        "uses 0.28, so that unlikely tokens can still become more likely. loss_type='cispo' limits the ratio to epsilon_high "
        "itself, which must then be at least 1 (5.0 is common).",
    )
    mask_truncated_completions: bool = option(
        False,
        "Exclude completions that were truncated at max_completion_length from the loss. Their rewards still count in the "
        "statistics of their group. Set it, as DAPO does, if good answers get low rewards because they are truncated.",
    )
    dynamic_sampling: NonNegativeInt = option(
        0,
        "Maximum number of additional sampling rounds in which groups with equal rewards, which have no gradient, are "
        "replaced with groups of new prompts (DAPO). 0 disables it.",
    )
    balance_ranks: bool = option(
        True,
        "Exchange rows between processes so that all processes compute similar numbers of tokens, if this saves time. The "
        "gradient does not change.",
    )
    stop_without_signal: PositiveInt | None = option(
        None,
        "Number of consecutive generations with only zero advantages after which the run ends with an error. None: log a "
        "warning and continue.",
    )
    log_completions: bool = option(
        False, "Print completions and rewards at each log step, and send them as a table to the trackers in report_to."
    )
    log_multimodal: bool = option(
        True, "Include images in the logged tables of completions. Set it to False if the logs become too large."
    )
    num_completions_to_print: NonNegativeInt | None = option(
        None,
        "Number of completions that log_completions prints. They are selected at random. None: all. 0: no completions.",
    )
    log_unique_prompts: bool = option(False, "Send only one completion per prompt to the trackers. False sends all.")

    def __post_init__(self) -> None:
        self.vllm_sleep_level = str(self.vllm_sleep_level)  # type: ignore[assignment]
        super().__post_init__()
        self.top_k = self.top_k or 0
        if self.vllm_importance_sampling_cap is not None:
            text = "vllm_importance_sampling_cap is deprecated: use vllm_importance_sampling_clip_max."
            warnings.warn(text, FutureWarning, stacklevel=4)
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        self._take_overrides()
        self._check_sampling()
        self._check_engine()
        self._resolve_batches()

    def _take_overrides(self) -> None:
        """Move values in ``generation_kwargs`` to the config fields with the same names.

        Log-probs then use the temperature that sampling uses.
        """
        overrides = dict(self.generation_kwargs or {})  # type: ignore[arg-type]
        for name, value in overrides.items():
            if name in REFUSED and value is not None:
                raise ConfigError(f"generation_kwargs: {name}={value!r}: {REFUSED[name]}. Fix: remove {name}.")
            check_choice("generation_kwargs", name, OVERRIDDEN + FURTHER)
        for name in OVERRIDDEN:
            if overrides.get(name) is not None:
                setattr(self, name, overrides[name])
            overrides.pop(name, None)
        self.check_fields()
        if (structured := overrides.pop("structured_outputs", None)) is not None:
            overrides["guide"] = structured_guide(structured)
        if overrides.get("guide") is not None and self.vllm_structured_outputs_regex:
            del overrides["guide"]
            logger.warning("vllm_structured_outputs_regex overrides the structured outputs in generation_kwargs.")
        elif overrides.get("guide") is not None:
            overrides["guide"] = tuple(overrides["guide"])  # The value is a list if it was read from a file.
        generation_fields(overrides)
        self.generation_kwargs = overrides or None

    def _check_sampling(self) -> None:
        if self.num_generations < self._least_generations:
            raise ConfigError(
                f"num_generations={self.num_generations} must be at least 2, because a single completion has "
                "nothing to be compared with."
            )
        if self.sync_ref_model and self.beta == 0:
            raise ConfigError("sync_ref_model=True with beta=0.0: no reference model is loaded. Set beta above 0.")
        if self.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size=True would split groups when it reduces the batch size. Disable it."
            )
        do_sample = (self.generation_kwargs or {}).get("do_sample", True)
        if not do_sample:
            raise ConfigError(
                "generation_kwargs={'do_sample': False} makes all completions of a group identical. Remove it."
            )
        if (fixed := (self.generation_kwargs or {}).get("seed")) is not None:
            raise ConfigError(
                f"generation_kwargs={{'seed': {fixed!r}}} would use the same random numbers in every generation and "
                "on every process: completions would repeat and advantages would be 0. Remove it. The config's seed "
                "makes runs reproducible."
            )

    def check_foreign_logprobs(self) -> None:
        """Reject settings that are invalid if the engine's log-probs are not the policy's.

        The default accepts everything; it is for losses without a correction.
        """

    def check_vllm_settings(self) -> None:
        """Reject settings that vLLM does not support, on a server or in process.

        Raises:
            ConfigError: A setting is not supported.
        """
        self.check_foreign_logprobs()
        size = (self.generation_kwargs or {}).get("no_repeat_ngram_size")
        if size:
            raise ConfigError(
                f"generation_kwargs: no_repeat_ngram_size={size} with use_vllm=True: vLLM does not support it. Fix: "
                "remove it or use rollout_engine='native'."
            )

    def _check_engine(self) -> None:
        engine = ENGINES.get(self.rollout_engine)
        if engine is not None and engine.vllm_mode is not None:
            # The values 'vllm' and 'server' are equivalent to use_vllm=True. Engines for other models (e.g. a reference) always
            # run in this process.
            self.use_vllm, self.vllm_mode, self.rollout_engine = True, engine.vllm_mode, "auto"
        if self.use_vllm:
            self.check_vllm_settings()
        check_gathering(self)
        self._check_paged()
        for name in () if self._corrects_sampler else CORRECTION:
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={value!r} has no effect with {type(self).__name__}: its loss has no importance ratio "
                    "to the engine. Remove it."
                )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}."
            )

    def _check_paged(self) -> None:
        if self.use_transformers_paged is not None:
            warnings.warn(
                "use_transformers_paged was renamed to use_transformers_continuous_batching.",
                FutureWarning,
                stacklevel=2,
            )
            self.use_transformers_continuous_batching = self.use_transformers_paged
            self.use_transformers_paged = None
        if self.use_transformers_continuous_batching:
            if self.use_vllm or self.rollout_engine not in ("auto", "paged"):
                other = f"use_vllm={self.use_vllm}, rollout_engine={self.rollout_engine!r}"
                raise ConfigError(f"use_transformers_continuous_batching=True with {other}: select one engine.")
            self.rollout_engine = "paged"
        if self.rollout_engine == "paged":
            self._check_paged_settings()

    def _check_paged_settings(self) -> None:
        from posttrain.rollouts.paged import check_paged

        check_paged(self.transformers_continuous_batching_config)  # type: ignore[arg-type]
        fields = generation_fields(self.generation_kwargs or {})
        cut = {
            "min_p": self.min_p,
            "repetition_penalty": None if self.repetition_penalty == 1 else self.repetition_penalty,
            **{name: fields.get(name) for name in ("min_new_tokens", "no_repeat_ngram", "stop_strings", "logit_bias")},
        }
        for name, value in cut.items():
            if value:
                raise ConfigError(
                    f"{name}={value} with transformers' continuous batching, which supports only temperature, top_k "
                    "and top_p and would ignore it. Remove it or use rollout_engine='native'."
                )

    @property
    def outlives_weights(self) -> bool:
        """Whether the model may be trained on completions after the weights that sampled them have changed."""
        return self.gradient_accumulation_steps % ((self.steps_per_generation or 1) * self.num_iterations) != 0

    @property
    def generation_config(self) -> transformers.GenerationConfig:
        """A copy of the sampling settings for ``model.generate``. Changes to the copy have no effect here."""
        return transformers.GenerationConfig(
            do_sample=True, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, cache_implementation=self.cache_implementation,
            max_new_tokens=self.max_completion_length,
        )  # fmt: skip

    @property
    def generations_per_step(self) -> float:
        """Number of generations per optimizer step. It is below 1 if a generation is used in several steps."""
        return self.gradient_accumulation_steps / ((self.steps_per_generation or 1) * self.num_iterations)

    @property
    def truncation(self) -> Truncation:
        """Top-k, top-p and min-p of sampling."""
        return Truncation(self.top_k or 0, self.top_p, self.min_p)

    def refused_engines(self) -> dict[str, str]:
        """Return the engines that these settings exclude for ``rollout_engine="auto"``, with reasons."""
        reasons = {}
        for name, check in {"vllm": self.check_vllm_settings, "paged": self._check_paged_settings}.items():
            try:
                check()
                # Check whether the loss allows log-probs that differ from the policy's, like those of continuous batching in
                # half precision.
                self.check_foreign_logprobs()
            except (ConfigError, MissingDependencyError) as error:
                reasons[name] = str(error)
        return reasons

    def _resolve_batches(self) -> None:
        """Resolve the size of a generation: per-device batch size x processes x steps per generation."""
        unit = self.per_device_train_batch_size * self.world_size
        size, steps = self.generation_batch_size, self.steps_per_generation
        if size is not None and steps is not None and size != unit * steps:
            raise ConfigError(
                f"generation_batch_size={size} and steps_per_generation={steps} contradict each other. Set one of "
                f"them; the other is computed from {self.per_device_train_batch_size} per device x {self.world_size} "
                "processes x steps."
            )
        if size is not None and size % unit:
            raise ConfigError(
                f"generation_batch_size={size} must be a multiple of per_device_train_batch_size x processes = "
                f"{self.per_device_train_batch_size} x {self.world_size} = {unit}. Nearest: {_near(size, unit)}."
            )
        self.steps_per_generation = steps or (size // unit if size else self.gradient_accumulation_steps)
        self.generation_batch_size = unit * self.steps_per_generation
        self._check_evaluation_groups()
        self._check_groups(unit)

    def _check_evaluation_groups(self) -> None:
        if self.do_eval and str(self.eval_strategy) not in ("no", "IntervalStrategy.NO"):
            rows = self.per_device_eval_batch_size * self.world_size
            group = self.num_generations_eval or self.num_generations
            if rows % group:
                whole = group // math.gcd(group, self.world_size)
                raise ConfigError(
                    f"the evaluation batch of {self.per_device_eval_batch_size} per device x {self.world_size} "
                    f"processes = {rows} completions is not a multiple of the group size {group} "
                    "(num_generations_eval or num_generations). Nearest per_device_eval_batch_size: "
                    f"{_near(self.per_device_eval_batch_size, whole)}."
                )

    def _check_groups(self, unit: int) -> None:
        total, group = self.generation_batch_size or 0, self.num_generations
        if total % group == 0:
            return
        fits = [g for g in range(2, total + 1) if total % g == 0]
        step = group // math.gcd(group, self.world_size * (self.steps_per_generation or 1))
        near = sorted(sorted(fits, key=lambda g: abs(g - group))[:3])
        others = f"num_generations could be {', '.join(map(str, near))}; or " if near else ""
        raise ConfigError(
            f"a generation of {total} completions ({self.per_device_train_batch_size} per device x {self.world_size} "
            f"process{'es' if self.world_size > 1 else ''} x {self.steps_per_generation} steps_per_generation) does not "
            f"divide into groups of num_generations={group}. With {self.world_size} process"
            f"{'es' if self.world_size > 1 else ''}: {others}"
            f"keep {group} and set per_device_train_batch_size to {_near(self.per_device_train_batch_size, step)}, "
            f"or generation_batch_size to {_near(total, math.lcm(unit, group))}."
        )


def _near(value: int, step: int) -> str:
    """Return the multiples of ``step`` next to ``value`` as text."""
    below, above = value // step * step, -(-value // step) * step
    return " or ".join(str(x) for x in sorted({below or above, above}))


@dataclass
class EpisodeFields(HarnessFields):
    """Options of trainers that let the model call tools and act in environments."""

    max_tool_calling_iterations: Annotated[int, Range(least=-1)] | None = option(
        None,
        "Maximum number of rounds of tool calls per completion, at least 0. None: 32. -1: limited only by "
        "max_completion_length.",
    )
    max_tool_output_tokens: PositiveInt | None = option(
        None, "Maximum number of tokens of a tool's result. The middle of a longer result is removed. None: no limit."
    )
    tool_workers: NonNegativeInt | None = option(
        None,
        "Number of completions whose tool calls run concurrently. None: all completions, up to 32. 0: tool calls run one "
        "after the other on the main thread, which is needed for tools that are not thread-safe.",
    )
    tool_timeout: PositiveFloat | None = option(
        60.0,
        "Timeout in seconds of a tool call, and of an environment's reset and get_reward. None: no limit. It has no effect "
        "with tool_workers=0.",
    )
    environment_retries: NonNegativeInt = option(
        0, "Number of retries if an environment's reset or get_reward raises an error. 0: the first error ends the run."
    )
