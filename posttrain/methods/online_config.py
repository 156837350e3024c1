"""`OnlineConfig`: options of all methods that sample completions during training. They control sampling, batch sizes,
rewards and logging.
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
    """Options for sampling completions during training."""

    num_generations: PositiveInt = option(
        8,
        "Number of completions sampled per prompt (the group size G). It must be at least 2, because the advantage of a "
        "completion compares it with the other completions of its group. It must divide generation_batch_size. Increase it if "
        "most groups consist of completions with equal rewards.",
    )
    num_generations_eval: NonNegativeInt | None = option(
        None,
        "Number of completions per prompt in evaluation. A smaller number saves time. None or 0: num_generations.",
    )
    max_completion_length: PositiveInt = option(
        512,
        "Maximum number of tokens per completion, including the end-of-sequence token. Increase it if the logged metric "
        "completions/clipped_ratio (the fraction of truncated completions) is above 0.1.",
    )
    shuffle_dataset: bool = option(
        True,
        "Shuffle the prompts of the training set in every epoch. False: keep the order of the dataset, for example for a "
        "curriculum.",
    )
    generation_batch_size: PositiveInt | None = option(
        None,
        "Number of completions that all processes together sample in one generation. It must be a multiple of num_generations "
        "and of per_device_train_batch_size x processes. None: per_device_train_batch_size x processes x "
        "steps_per_generation. Set either this field or steps_per_generation, not both.",
    )
    steps_per_generation: PositiveInt | None = option(
        None,
        "Number of micro-batches into which the completions of one generation are split for training. None: "
        "gradient_accumulation_steps, so that each optimizer step trains on newly sampled completions. With a larger number, "
        "completions are sampled less often, and some optimizer steps train on completions that older weights have sampled.",
    )
    temperature: PositiveFloat = option(
        1.0,
        "Sampling temperature, above 0. Logits are divided by the temperature, both during sampling and for the log-probs in "
        "the loss. Higher values make completions more diverse. 1: the model's distribution is not changed.",
    )
    top_p: PositiveShare = option(
        1.0,
        "Nucleus sampling: sample only from the smallest set of most likely tokens whose probabilities sum to at least top_p, "
        "above 0 and at most 1. 1 disables nucleus sampling.",
    )
    top_k: NonNegativeInt | None = option(0, "Sample only from the k most likely tokens. 0 or None disables it.")
    min_p: Share | None = option(
        None,
        "Sample only from tokens whose probability is at least min_p times that of the most likely token, from 0 to 1. Common "
        "values are 0.01 to 0.2. None: no minimum.",
    )
    repetition_penalty: PositiveFloat = option(
        1.0,
        "Penalty on tokens that are already in the prompt or the completion, above 0. Values above 1 discourage repetition, "
        "values below 1 encourage it, and 1 disables the penalty. The penalty changes only sampling. The log-probs in the "
        "loss are computed without it, so they do not match the distribution from which completions are sampled.",
    )
    generation_kwargs: dict | str | None = option(
        None,
        "Additional sampling settings as a mapping or JSON. Supported keys: stop_strings, suppress_tokens, logit_bias, "
        "min_new_tokens, no_repeat_ngram_size, eos_token_id, stop_token_ids, max_new_tokens, structured_outputs. The keys "
        "temperature, top_p, top_k, min_p and repetition_penalty override the config fields with the same names. "
        "do_sample=False and a seed are errors, because the completions of a prompt would be identical.",
    )
    chat_template_kwargs: dict | str | None = option(
        None,
        "Additional arguments of the chat template as a mapping or JSON, for example {'enable_thinking': false}. They are "
        "used for all prompts, in training and evaluation.",
    )
    cache_implementation: str | None = option(
        None,
        "Type of key-value cache for transformers' generate, for example 'static'. Only rollout_engine='hf' uses this option. "
        "Other engines log a warning and ignore it. None: transformers' default.",
    )
    rollout_engine: Annotated[str, OneOf(("auto", *ENGINES))] = option(
        "auto",
        "Engine that samples completions. 'native': posttrain's own engine, which runs in the trainer's process and uses the "
        "trainer's weights. 'native_bf16': 'native' with weights rounded to bfloat16, for CPUs. 'hf': transformers' generate, "
        "which is slow but works with every model. 'paged': transformers' continuous batching. 'vllm': vLLM in the trainer's "
        "process. 'server': rollout servers in other processes. 'auto': on a GPU, the first engine that supports the model "
        "and the settings, in the order vllm, paged, native, hf. On a CPU, 'auto' selects native if a probe finds it exact "
        "for the model, else hf.",
    )
    pad_to_multiple_of: int | str | None = option(
        None,
        "Round the length of batch rows up to a multiple of this number of tokens. None or 'auto': lengths are not rounded, "
        "except with FlexAttention, which needs multiples of 128.",
    )
    ds3_gather_for_generation: bool = option(
        True,
        "With DeepSpeed ZeRO-3: gather all weights on every device for generation. Every engine needs the gathered weights. "
        "Therefore False is an error with use_vllm=True, and with other engines it is ignored and a warning is logged. If the "
        "model does not fit on one device, use a rollout server.",
    )


@dataclass
class VllmFields:
    """Options for generation with vLLM, with rollout servers, and with transformers' continuous batching."""

    use_vllm: bool = option(
        False,
        "Sample completions with vLLM or a rollout server instead of an engine that uses the trainer's weights directly. "
        "After weight updates, the trainer sends its weights to vLLM before the next generation. vllm_mode selects where vLLM "
        "runs.",
    )
    vllm_mode: Literal["server", "colocate"] = option(
        "colocate",
        "Where vLLM runs. 'colocate': in the trainer's process, on the same GPUs. 'server': on rollout servers, which you "
        "start with posttrain serve or vllm serve before the run.",
    )
    vllm_model_impl: str = option(
        "vllm",
        "Model implementation that vLLM uses. 'vllm': vLLM's own implementation. 'transformers': the implementation in "
        "transformers, for models that vLLM does not implement.",
    )
    vllm_enable_sleep_mode: bool = option(
        False,
        "With vllm_mode='colocate': put vLLM to sleep during training, so that the trainer can use its GPU memory. Waking up "
        "vLLM before each generation takes time. vllm_sleep_level selects what happens to vLLM's weights.",
    )
    vllm_structured_outputs_regex: str | None = option(
        None,
        "Regular expression that every completion must match (structured outputs). vLLM and the native engine support this "
        "option. The native engine needs the package xgrammar. None: no constraint.",
    )
    vllm_server_base_url: str | None = option(
        None,
        "Address of the rollout server, for example 'http://localhost:8000', or several addresses separated by commas. It "
        "overrides vllm_server_host and vllm_server_port. None: the address is built from vllm_server_host and "
        "vllm_server_port.",
    )
    vllm_server_host: str = option("0.0.0.0", "Host of the rollout server. Ignored if vllm_server_base_url is set.")
    vllm_server_port: Port = option(8000, "Port of the rollout server. Ignored if vllm_server_base_url is set.")
    vllm_server_timeout: PositiveFloat = option(
        240.0,
        "Maximum time in seconds to wait for a rollout server at the start of the run. It is also the maximum time to wait "
        "for a server to return if no server responds during training. After this time, the run ends with an error.",
    )
    vllm_group_port: Port = option(
        51216,
        "Port of the process group through which the trainer sends weights to vLLM servers. Change it only if another program "
        "uses this port.",
    )
    vllm_gpu_memory_utilization: PositiveShare = option(
        0.3,
        "With vllm_mode='colocate': fraction of the GPU's memory that vLLM may use, above 0 and at most 1. The trainer uses "
        "the remaining memory. With vllm_mode='server', set this fraction on the server instead.",
    )
    vllm_max_model_length: PositiveInt | None = option(
        None,
        "With vllm_mode='colocate': maximum number of tokens of a prompt and its completion in vLLM. To save memory, set it "
        "to the length of the longest prompt plus max_completion_length. None: the model's context length.",
    )
    vllm_tensor_parallel_size: PositiveInt = option(
        1,
        "Accepted for compatibility with TRL. It must be 1, because each process runs its own vLLM on one GPU. For models "
        "that do not fit on one GPU, use vllm_mode='server' and set tensor parallelism on the server.",
    )
    vllm_importance_sampling_correction: bool = option(
        True,
        "Correct for differences between engine and trainer by importance sampling: multiply the loss by the probability that "
        "the trainer computes for the completion, divided by the probability that the engine computed. The correction has no "
        "effect if the two probabilities are equal. False: no correction.",
    )
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric"
    ] = option(
        "sequence_mask",
        "How the ratio of vllm_importance_sampling_correction is limited to the range from vllm_importance_sampling_clip_min "
        "to vllm_importance_sampling_clip_max. The truncate modes clamp a ratio to this range. The mask modes set a ratio "
        "outside the range to 0, which excludes its tokens from the loss. 'token_truncate' and 'token_mask' use one ratio per "
        "token. 'sequence_truncate' and 'sequence_mask' use one ratio per completion, the product of its token ratios. "
        "'geometric' uses the token ratios unchanged, but excludes a completion if the geometric mean of its token ratios is "
        "outside the range.",
    )
    vllm_importance_sampling_clip_max: PositiveFloat | None = option(
        3.0,
        "Upper bound of the importance-sampling ratio of vllm_importance_sampling_correction, above 0. "
        "vllm_importance_sampling_mode selects what happens to larger ratios. None: no upper bound.",
    )
    vllm_importance_sampling_clip_min: NonNegativeFloat | None = option(
        None,
        "Lower bound of the importance-sampling ratio of vllm_importance_sampling_correction. The bound must be below "
        "vllm_importance_sampling_clip_max. vllm_importance_sampling_mode selects what happens to smaller ratios. None: no "
        "lower bound.",
    )
    vllm_importance_sampling_cap: PositiveFloat | None = option(
        None, "Deprecated name of vllm_importance_sampling_clip_max. If it is set, it overrides that field."
    )
    use_transformers_continuous_batching: bool = option(
        False,
        "Sample completions with transformers' continuous batching. This is equivalent to rollout_engine='paged'. Continuous "
        "batching supports only text, and only the sampling parameters temperature, top_k and top_p.",
    )
    transformers_continuous_batching_config: dict | str | None = option(
        None,
        "Fields of transformers' ContinuousBatchingConfig as a mapping or JSON. They are used only with continuous batching. "
        "None: transformers' defaults.",
    )
    use_transformers_paged: bool | None = option(None, "Deprecated name of use_transformers_continuous_batching.")


@dataclass
class ReferenceFields:
    """Options of the KL penalty and its reference model."""

    beta: NonNegativeFloat = option(
        0.0,
        "Weight of the KL penalty, which keeps the policy close to the reference model. 0: there is no penalty and no "
        "reference model is loaded, which saves memory. DeepSeek-R1 uses 0.001. Increase it if the model loses abilities that "
        "it had before training.",
    )
    sync_ref_model: bool = option(
        False,
        "Move the reference model towards the policy every ref_model_sync_steps steps (TR-DPO, arXiv:2404.09656). This needs "
        "beta above 0. It is not supported with adapters or quantized weights.",
    )
    ref_model_mixup_alpha: PositiveShare = option(
        0.6,
        "With sync_ref_model: mixing weight `a` in `reference = (1 - a) * reference + a * policy`. It must be above 0 and at "
        "most 1. 1 replaces the reference with the policy.",
    )
    ref_model_sync_steps: PositiveInt = option(
        512, "With sync_ref_model: number of optimizer steps between two updates of the reference model, at least 1."
    )


@dataclass
class RewardFields:
    """Options for scoring completions with reward functions."""

    reward_weights: list[float] | None = option(
        None,
        "Weight of each reward function in the total reward, as a list with one number per function. None: every function has "
        "weight 1.",
    )
    reward_timeout: PositiveFloat | None = option(
        None,
        "Maximum time in seconds that a reward function may need to score the completions of one generation. If a function "
        "needs longer, the run ends with an error that contains the function's name. None: no limit.",
    )
    reward_transform: list[str] | None = option(
        None,
        "Transform of the rewards of each function, as a list with one entry per function. It is applied before the rewards "
        "are multiplied by reward_weights. 'none': no transform. 'clip:a:b': clamp to [a, b]. 'log1p': sign(r) * log(1 + "
        "|r|). 'tanh:s': tanh(r / s). 'rank': rank of the reward among the completions of the same prompt, from 0 to 1. "
        "'zscore': subtract the mean and divide by the standard deviation of the rewards of the generation. 'running': divide "
        "by the standard deviation of all rewards since the start of the run. None: no transforms.",
    )
    check_rewards: bool = option(
        True,
        "Before the model is loaded, call each reward function once with made-up completions of one prompt of the dataset. "
        "Errors in a function then occur within seconds. Set it to False if a call is expensive.",
    )
    check_reward_determinism: bool = option(
        False,
        "Score four completions of the first generation twice, and log a warning if a reward function returns different "
        "rewards for the same completion.",
    )


@dataclass
class VllmSyncFields:
    """Options for sending weights to vLLM and rollout servers, and for verifying that the weights arrived."""

    vllm_weight_bucket_mb: PositiveInt = option(
        512,
        "Maximum size of a request that sends weights to a server, in MiB, at least 1. Decrease it if a proxy between trainer "
        "and server limits the size of requests.",
    )
    vllm_sync_timeout: PositiveFloat = option(
        720.0,
        "Maximum time in seconds for each request of a weight update. Increase it for large models on slow networks.",
    )
    vllm_request_timeout: PositiveFloat | None = option(
        None,
        "Maximum time in seconds for a generation request to a server. None: 30 s plus 0.02 s per requested token, but at "
        "least 600 s.",
    )
    vllm_sync_retries: NonNegativeInt = option(
        2,
        "Number of times that a failed weight update is repeated from the beginning before the run ends with an error. "
        "0: a failed update ends the run.",
    )
    vllm_sleep_level: Literal["auto", "1", "2"] = option(
        "auto",
        "With vllm_enable_sleep_mode: what happens to vLLM's weights while vLLM sleeps. '1': they are kept in host memory. "
        "'2': they are discarded, and the trainer sends them again before the next generation. 'auto': '1' if several "
        "generations use the same weights and the weights fit into host memory, else '2'.",
    )
    adapter_sync: Literal["auto", "adapter", "merged"] = option(
        "auto",
        "Which weights the trainer sends to the engine if it trains a LoRA adapter. 'adapter': only the adapter. This is an "
        "error if the engine does not support adapters. 'merged': all weights of the model, with the adapter merged into "
        "them. 'auto': 'adapter' if the engine supports adapters. Otherwise, a warning is logged and 'merged' is used.",
    )
    vllm_server_api_key: str | None = option(
        None,
        "Bearer token for the rollout servers. None: the environment variable POSTTRAIN_API_KEY. If this variable is not set, "
        "the token is read from a file that a server of the same user writes on this machine.",
    )
    mask_ids_without_token: bool = option(
        False,
        "Never sample a token id that is not in the tokenizer's vocabulary. Set it for models with a padded embedding, which "
        "has more rows than the tokenizer has tokens.",
    )
    weight_parity_every: NonNegativeInt | None = option(
        None,
        "Compare the log-probs of engine and trainer after every N-th weight update of the engine, to verify that the engine "
        "has the trainer's weights. None: as often as possible within 1 % of the run's time. 0: no regular comparisons. "
        "Regardless of this number, the log-probs are compared after the first update, and after each update until training "
        "has changed the weights.",
    )
    allow_biased_is: bool = option(
        False,
        "Allow the importance-sampling correction together with a repetition penalty, structured outputs or a logit bias. By "
        "default this combination is an error: these settings change the distribution from which the engine samples, but not "
        "the trainer's probabilities, so every importance ratio would be biased.",
    )


def reshaped_sampling(cfg: OnlineConfig, *names: str) -> str:
    """List the settings that change the engine's sampling distribution, but not the trainer's log-probs, as a text.

    Return "" if there are no such settings.

    Args:
        cfg: Config of an online trainer.
        names: Config fields to check in addition to the repetition penalty, for example ``top_p``.
    """
    # Current value of each option, and the value that disables the option.
    settings = {
        "repetition_penalty": (cfg.repetition_penalty, 1.0), "top_p": (cfg.top_p, 1.0), "top_k": (cfg.top_k, 0),
        "min_p": (cfg.min_p, None),
    }  # fmt: skip
    options = dict(cfg.generation_kwargs or {})  # type: ignore[arg-type]
    used = {name: settings[name] for name in ("repetition_penalty", *names)}
    changed = [f"{name}={value}" for name, (value, off) in used.items() if value not in (off, off or None)]
    if options.get("guide") is not None:
        changed.append(f"generation_kwargs with the guide {options['guide']}")
    # suppress_tokens is not listed, because the trainer's log-probs also exclude the suppressed tokens (see
    # `Sampling.left_out`).
    rules = ("min_new_tokens", "no_repeat_ngram_size", "logit_bias")
    changed += [f"generation_kwargs with {name}={options[name]}" for name in rules if options.get(name)]
    if cfg.vllm_structured_outputs_regex:
        changed.append(f"vllm_structured_outputs_regex={cfg.vllm_structured_outputs_regex!r}")
    return ", ".join(changed)


def reject_reshaped_sampling(cfg: OnlineConfig) -> None:
    """Raise an error for settings that would make the importance-sampling correction wrong.

    The trainer's log-probs account for top-k, top-p and min-p. They do not account for penalties, structured outputs and
    logit biases.

    Raises:
        ConfigError: The correction is combined with a penalty, structured outputs or a logit bias, and ``allow_biased_is``
            is False.
    """
    reshaped = reshaped_sampling(cfg)
    if reshaped and cfg.vllm_importance_sampling_correction and not cfg.allow_biased_is:
        raise ConfigError(
            f"{reshaped} changes the distribution from which the engine samples, but not the trainer's log-probs. With "
            "vllm_importance_sampling_correction=True, every importance ratio would be biased. Fix: remove the setting, set "
            "vllm_importance_sampling_correction=False, or accept the bias with allow_biased_is=True."
        )


def check_truncation(cfg: OnlineConfig) -> None:
    """Raise an error if the importance-sampling correction has a truncate mode, but no bounds.

    Raises:
        ConfigError: Both bounds are None.
    """
    low, high = cfg.vllm_importance_sampling_clip_min, cfg.vllm_importance_sampling_clip_max
    if (cfg.vllm_importance_sampling_mode or "").endswith("_truncate") and low is None and high is None:
        raise ConfigError(
            f"vllm_importance_sampling_mode={cfg.vllm_importance_sampling_mode!r} truncates the ratio at "
            "vllm_importance_sampling_clip_min and vllm_importance_sampling_clip_max, but both are None. Fix: set one of "
            "them, for example vllm_importance_sampling_clip_max=2.0."
        )


def resolve_auto(args: PostTrainingConfig, model: nn.Module, processor: ProcessorMixin) -> None:
    """Replace ``rollout_engine="auto"`` on a GPU with the engine that is selected for this model.

    On a CPU, the engine is selected when it is created.

    Args:
        args: Config, which is modified. If vLLM is selected, ``use_vllm=True`` and ``vllm_mode="colocate"`` are set.
        model: The policy.
        processor: Tokenizer or multimodal processor of the policy. Continuous batching does not support images.
    """
    on_gpu = next(model.parameters()).device.type == "cuda"
    if args.rollout_engine != "auto" or args.use_vllm or not on_gpu:
        return
    refused = args.refused_engines()
    if inner_tokenizer(processor) is not processor:
        refused.setdefault("paged", "it supports text only, and the processor is for images")
    name = choose_engine(model, refused)
    if name == "vllm":
        args.use_vllm, args.vllm_mode = True, "colocate"
    else:
        args.rollout_engine = name


# Supported keys of generation_kwargs. The values of keys in OVERRIDDEN are moved to the config fields with the same names.
# Keys in FURTHER are passed to the engine.
OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
FURTHER = ("max_new_tokens", "stop_token_ids", "structured_outputs", "guide", "do_sample", "seed", *GENERATION_NAMES)
# Config fields of the importance-sampling correction, which corrects for differences between engine and policy.
CORRECTION = (
    "allow_biased_is",
    *(f"vllm_importance_sampling_{x}" for x in ("correction", "mode", "clip_max", "clip_min")),
)
REFUSED = {"typical_p": "no engine supports typical sampling. top_p and min_p also exclude unlikely tokens"}


@config
class OnlineConfig(VllmSyncFields, VllmFields, GenerationFields, ReferenceFields, RewardFields, PostTrainingConfig):
    """Arguments of all trainers that sample completions from the policy during training."""

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *PostTrainingConfig._VALID_DICT_FIELDS,
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]

    # Minimum group size. Advantages compare at least two completions.
    _least_generations: ClassVar[int] = 2
    # Class attributes instead of fields, because only some methods have these options.
    log_ref_kl, samples_per_step = False, None
    # Whether the loss supports the importance-sampling correction for differences between trainer and engine.
    _corrects_sampler: ClassVar[bool] = False

    learning_rate: float = option(
        1e-6, "Peak learning rate. The default is for full fine-tuning. Use about ten times this value for LoRA."
    )
    remove_unused_columns: bool | None = option(
        False,
        "Remove all columns of the dataset except the prompt. Reward functions then do not receive the removed columns. Keep "
        "the default False if a reward function needs a column, for example the reference answer.",
    )
    num_iterations: PositiveInt = option(
        1,
        "Number of times that training uses the completions of each generation (mu in the papers), at least 1. If it is above "
        "1, every use after the first is off-policy, and the loss clips the importance ratio.",
    )
    epsilon: NonNegativeFloat = option(
        0.2,
        "Lower clip range: the importance ratio is clipped at 1 - epsilon. At least 0. A smaller value limits more strictly "
        "how far the policy can move on the completions of one generation. With loss_type='gmpo', the logarithm of the ratio "
        "is clipped instead.",
    )
    epsilon_high: NonNegativeFloat | None = option(
        None,
        "Upper clip range: the importance ratio is clipped at 1 + epsilon_high. None: the value of epsilon. DAPO uses 0.28, "
        "so that unlikely tokens can become more likely. With loss_type='cispo', the ratio is limited to epsilon_high itself, "
        "which must then be at least 1 (5.0 is common).",
    )
    mask_truncated_completions: bool = option(
        False,
        "Exclude completions that were truncated at max_completion_length from the loss. The mean and standard deviation of "
        "their group still include their rewards. Set it, as DAPO does, if good answers get low rewards only because they are "
        "truncated.",
    )
    dynamic_sampling: NonNegativeInt = option(
        0,
        "Maximum number of additional sampling rounds per generation (dynamic sampling of DAPO). Groups whose rewards are all "
        "equal give no gradient. Each round replaces these groups with completions of new prompts. 0: no additional rounds.",
    )
    balance_ranks: bool = option(
        True,
        "Exchange completions between processes so that all processes train on similar numbers of tokens and no process has to "
        "wait. Completions are exchanged only if this saves time. The gradient does not change.",
    )
    stop_without_signal: PositiveInt | None = option(
        None,
        "End the run with an error after this number of consecutive generations in which all advantages are 0. None: the run "
        "continues with a warning.",
    )
    log_completions: bool = option(
        False,
        "At each logging step, print completions with their rewards, and send them as a table to the trackers in "
        "report_to.",
    )
    log_multimodal: bool = option(
        True, "Include images in the logged tables of completions. Set it to False if the logs become too large."
    )
    num_completions_to_print: NonNegativeInt | None = option(
        None,
        "With log_completions: number of randomly selected completions to print at each logging step. None: all completions. "
        "0: no completions.",
    )
    log_unique_prompts: bool = option(
        False, "With log_completions: send only one completion per prompt to the trackers. False: send all completions."
    )

    def __post_init__(self) -> None:
        self.vllm_sleep_level = str(self.vllm_sleep_level)  # type: ignore[assignment]
        super().__post_init__()
        self.top_k = self.top_k or 0
        if self.vllm_importance_sampling_cap is not None:
            text = "vllm_importance_sampling_cap is deprecated. Use vllm_importance_sampling_clip_max instead."
            warnings.warn(text, FutureWarning, stacklevel=4)
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        self._take_overrides()
        self._check_sampling()
        self._check_engine()
        self._resolve_batches()

    def _take_overrides(self) -> None:
        """Move values from ``generation_kwargs`` to the config fields with the same names.

        The log-probs in the loss are then computed with the sampling temperature.
        """
        overrides = dict(self.generation_kwargs or {})  # type: ignore[arg-type]
        for name, value in overrides.items():
            if name in REFUSED and value is not None:
                raise ConfigError(
                    f"generation_kwargs with {name}={value!r} is not supported: {REFUSED[name]}. Fix: remove {name}."
                )
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
            overrides["guide"] = tuple(overrides["guide"])  # A guide from a file is a list.
        generation_fields(overrides)
        self.generation_kwargs = overrides or None

    def _check_sampling(self) -> None:
        if self.num_generations < self._least_generations:
            raise ConfigError(
                f"num_generations={self.num_generations} must be at least 2, because the advantage of a completion compares it "
                "with other completions of the same prompt."
            )
        if self.sync_ref_model and self.beta == 0:
            raise ConfigError(
                "sync_ref_model=True has no effect with beta=0.0, because no reference model is loaded. Fix: set beta above "
                "0, or remove sync_ref_model."
            )
        if self.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size=True is not supported, because a smaller batch size could split the completions of a "
                "prompt. Fix: set auto_find_batch_size=False."
            )
        do_sample = (self.generation_kwargs or {}).get("do_sample", True)
        if not do_sample:
            raise ConfigError(
                "generation_kwargs={'do_sample': False} makes all completions of a prompt identical. Fix: remove do_sample."
            )
        if (fixed := (self.generation_kwargs or {}).get("seed")) is not None:
            raise ConfigError(
                f"generation_kwargs={{'seed': {fixed!r}}} would use the same random numbers in every generation and on every "
                "process. Completions would repeat and advantages would be 0. Fix: remove seed from generation_kwargs. To "
                "make runs reproducible, set the config field seed."
            )

    def check_foreign_logprobs(self) -> None:
        """Raise an error for settings that are invalid if the engine's log-probs differ from the policy's log-probs.

        This base implementation accepts all settings. It is used for losses without an importance-sampling correction.
        """

    def check_vllm_settings(self) -> None:
        """Raise an error for settings that vLLM does not support, in process or on a server.

        Raises:
            ConfigError: A setting is not supported.
        """
        self.check_foreign_logprobs()
        size = (self.generation_kwargs or {}).get("no_repeat_ngram_size")
        if size:
            raise ConfigError(
                f"generation_kwargs contains no_repeat_ngram_size={size}, which vLLM does not support. Fix: remove "
                "no_repeat_ngram_size, or set use_vllm=False and rollout_engine='native'."
            )

    def _check_engine(self) -> None:
        engine = ENGINES.get(self.rollout_engine)
        if engine is not None and engine.vllm_mode is not None:
            # The engines 'vllm' and 'server' are selected by use_vllm=True. From now on, rollout_engine='auto' applies to
            # the engines of other models, for example a reference. These engines always run in this process.
            self.use_vllm, self.vllm_mode, self.rollout_engine = True, engine.vllm_mode, "auto"
        if self.use_vllm:
            self.check_vllm_settings()
        check_gathering(self)
        self._check_paged()
        for name in () if self._corrects_sampler else CORRECTION:
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={value!r} has no effect with {type(self).__name__}, because its loss does not use the engine's "
                    f"log-probs. Fix: remove {name}."
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
                raise ConfigError(
                    f"use_transformers_continuous_batching=True contradicts {other}. Fix: select only one engine."
                )
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
                    f"transformers' continuous batching would ignore {name}={value}, because it supports only temperature, "
                    f"top_k and top_p. Fix: remove {name}, or use rollout_engine='native'."
                )

    @property
    def outlives_weights(self) -> bool:
        """Whether a completion may be used for training after an optimizer step has changed the weights that sampled it."""
        return self.gradient_accumulation_steps % ((self.steps_per_generation or 1) * self.num_iterations) != 0

    @property
    def generation_config(self) -> transformers.GenerationConfig:
        """Copy of the sampling settings for ``model.generate``. Changes of the copy do not affect the trainer."""
        return transformers.GenerationConfig(
            do_sample=True, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, cache_implementation=self.cache_implementation,
            max_new_tokens=self.max_completion_length,
        )  # fmt: skip

    @property
    def generations_per_step(self) -> float:
        """Number of generations per optimizer step. The number is below 1 if several optimizer steps use one generation."""
        return self.gradient_accumulation_steps / ((self.steps_per_generation or 1) * self.num_iterations)

    @property
    def truncation(self) -> Truncation:
        """Truncation of the sampling distribution by top-k, top-p and min-p."""
        return Truncation(self.top_k or 0, self.top_p, self.min_p)

    def refused_engines(self) -> dict[str, str]:
        """Return the engines that ``rollout_engine="auto"`` must not select with these settings, with the reason for each
        engine.
        """
        reasons = {}
        for name, check in {"vllm": self.check_vllm_settings, "paged": self._check_paged_settings}.items():
            try:
                check()
                # Check whether the loss supports engines whose log-probs differ from the policy's log-probs. An example of
                # such an engine is continuous batching in half precision.
                self.check_foreign_logprobs()
            except (ConfigError, MissingDependencyError) as error:
                reasons[name] = str(error)
        return reasons

    def _resolve_batches(self) -> None:
        """Set ``steps_per_generation`` and ``generation_batch_size``. Check that a generation consists of whole groups."""
        unit = self.per_device_train_batch_size * self.world_size
        size, steps = self.generation_batch_size, self.steps_per_generation
        if size is not None and steps is not None and size != unit * steps:
            raise ConfigError(
                f"generation_batch_size={size} and steps_per_generation={steps} contradict each other, because "
                f"generation_batch_size must be {self.per_device_train_batch_size} per device x {self.world_size} processes x "
                "steps_per_generation. Fix: set only one of them."
            )
        if size is not None and size % unit:
            raise ConfigError(
                f"generation_batch_size={size} must be a multiple of per_device_train_batch_size x processes = "
                f"{self.per_device_train_batch_size} x {self.world_size} = {unit}. Fix: set it to {_near(size, unit)}."
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
                    f"the evaluation batch of {self.per_device_eval_batch_size} per device x {self.world_size} processes = "
                    f"{rows} completions is not a multiple of the group size {group} (num_generations_eval or "
                    "num_generations). Fix: set per_device_eval_batch_size to "
                    f"{_near(self.per_device_eval_batch_size, whole)}."
                )

    def _check_groups(self, unit: int) -> None:
        total, group = self.generation_batch_size or 0, self.num_generations
        if total % group == 0:
            return
        fits = [g for g in range(2, total + 1) if total % g == 0]
        step = group // math.gcd(group, self.world_size * (self.steps_per_generation or 1))
        near = sorted(sorted(fits, key=lambda g: abs(g - group))[:3])
        others = f"set num_generations to one of {', '.join(map(str, near))}, or " if near else ""
        raise ConfigError(
            f"a generation of {total} completions ({self.per_device_train_batch_size} per device x {self.world_size} "
            f"process{'es' if self.world_size > 1 else ''} x {self.steps_per_generation} steps_per_generation) cannot be "
            f"divided into groups of num_generations={group}. Fix: {others}keep num_generations={group} and set "
            f"per_device_train_batch_size to {_near(self.per_device_train_batch_size, step)}, or generation_batch_size to "
            f"{_near(total, math.lcm(unit, group))}."
        )


def _near(value: int, step: int) -> str:
    """Return the nearest multiples of ``step`` below and above ``value`` as a text, for example "6 or 8"."""
    below, above = value // step * step, -(-value // step) * step
    return " or ".join(str(x) for x in sorted({below or above, above}))


@dataclass
class EpisodeFields(HarnessFields):
    """Options of trainers with tools and environments."""

    max_tool_calling_iterations: Annotated[int, Range(least=-1)] | None = option(
        None,
        "Maximum number of rounds of tool calls per completion. None: 32 rounds. 0: the model can call no tools. -1: the "
        "number is limited only by max_completion_length.",
    )
    max_tool_output_tokens: PositiveInt | None = option(
        None, "Maximum number of tokens of a tool's result. The middle of a longer result is removed. None: no limit."
    )
    tool_workers: NonNegativeInt | None = option(
        None,
        "Maximum number of completions whose tool calls run at the same time, in threads. None: all completions, up to 32. 0: "
        "tool calls run one after the other on the main thread. Set 0 if a tool is not thread-safe.",
    )
    tool_timeout: PositiveFloat | None = option(
        60.0,
        "Maximum time in seconds for a tool call, and for the methods reset and get_reward of an environment. None: no limit. "
        "It has no effect with tool_workers=0, because calls on the main thread cannot be interrupted.",
    )
    environment_retries: NonNegativeInt = option(
        0,
        "Number of times that a call of an environment's reset or get_reward is repeated if it raises an error. 0: the "
        "first error ends the run.",
    )
