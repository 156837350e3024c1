"""`OnlineConfig`: sampling, batch arithmetic and logging fields of every method that generates while it trains."""

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
    """How completions are sampled during training."""

    num_generations: PositiveInt = option(8, "Completions per prompt, the group G; at least 2.")
    num_generations_eval: NonNegativeInt | None = option(None, "G in evaluation; None or 0: the same.")
    max_completion_length: PositiveInt = option(512, "Most tokens of a completion, EOS included.")
    shuffle_dataset: bool = option(True, "Shuffle the prompts of the training set.")
    generation_batch_size: PositiveInt | None = option(
        None,
        "Completions of one generation over all processes. None: per-device batch x processes x steps_per_generation.",
    )
    steps_per_generation: PositiveInt | None = option(
        None, "Micro-batches trained per generation. None: gradient_accumulation_steps."
    )
    temperature: PositiveFloat = option(1.0, "Divides the logits, in sampling and in every log-prob; > 0.")
    top_p: PositiveShare = option(1.0, "Nucleus mass in (0, 1]; 1 is off.")
    top_k: NonNegativeInt | None = option(0, "Keep the k most likely tokens; 0 or None is off.")
    min_p: Share | None = option(None, "Least share of the top probability; None is off.")
    repetition_penalty: PositiveFloat = option(1.0, "Above 1 discourages repeats; 1 is off.")
    generation_kwargs: dict | str | None = option(None, "Override sampling settings by name.")
    chat_template_kwargs: dict | str | None = option(None, "Passed at every template call.")
    cache_implementation: str | None = option(None, "Cache of the hf engine.")
    rollout_engine: Annotated[str, OneOf(("auto", *ENGINES))] = option(
        "auto",
        "native (in process, on the trainer's weights), hf (transformers generate), paged, vllm, or auto: native if "
        "exact; on a GPU vllm, else paged, first.",
    )
    pad_to_multiple_of: int | str | None = option(None, "Rounds row widths up; auto or None: what the layout wants.")
    ds3_gather_for_generation: bool = option(True, "Gather ZeRO-3 shards to generate.")


@dataclass
class VllmFields:
    """Generation by vLLM or by rollout servers."""

    use_vllm: bool = option(False, "Generate with rollout servers, or vLLM.")
    vllm_mode: Literal["server", "colocate"] = option("colocate", "Where vLLM runs.")
    vllm_model_impl: str = option("vllm", "vllm or transformers.")
    vllm_enable_sleep_mode: bool = option(False, "Free vLLM's memory while training.")
    vllm_structured_outputs_regex: str | None = option(None, "Completions match this.")
    vllm_server_base_url: str | None = option(None, "Overrides host and port.")
    vllm_server_host: str = option("0.0.0.0", "Host of the rollout server.")
    vllm_server_port: Port = option(8000, "Port of the rollout server.")
    vllm_server_timeout: PositiveFloat = option(240.0, "Seconds to wait for the server.")
    vllm_group_port: Port = option(51216, "Port of the weight-update group.")
    vllm_gpu_memory_utilization: PositiveShare = option(0.3, "Share of GPU memory, colocate.")
    vllm_max_model_length: PositiveInt | None = option(None, "Context length.")
    vllm_tensor_parallel_size: PositiveInt = option(1, "Colocate only.")
    vllm_importance_sampling_correction: bool = option(True, "Correct for engine mismatch.")
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric"
    ] = option("sequence_mask", "How the ratio of trainer to engine is bounded.")
    vllm_importance_sampling_clip_max: PositiveFloat | None = option(3.0, "Upper bound of the ratio.")
    vllm_importance_sampling_clip_min: NonNegativeFloat | None = option(None, "Lower bound; None is 0.")
    vllm_importance_sampling_cap: PositiveFloat | None = option(
        None, "The old name of vllm_importance_sampling_clip_max."
    )
    use_transformers_continuous_batching: bool = option(False, "Paged generation.")
    transformers_continuous_batching_config: dict | str | None = option(None, "Its settings.")
    use_transformers_paged: bool | None = option(None, "The old name of use_transformers_continuous_batching.")


@dataclass
class ReferenceFields:
    """The KL penalty and the model it is measured against."""

    beta: NonNegativeFloat = option(0.0, "Weight of the KL penalty; 0 needs no reference model.")
    sync_ref_model: bool = option(False, "Let the reference follow the policy (TR-DPO).")
    ref_model_mixup_alpha: PositiveShare = option(0.6, "Share of the policy in each sync.")
    ref_model_sync_steps: PositiveInt = option(512, "Optimiser steps between two syncs.")


@dataclass
class RewardFields:
    """How completions are scored."""

    reward_weights: list[float] | None = option(None, "One weight per reward; None: ones.")
    reward_timeout: PositiveFloat | None = option(
        None, "Seconds a reward function may take for one generation; None waits for ever."
    )
    reward_transform: list[str] | None = option(
        None, "One per reward, applied before weights: none, clip:a:b, log1p, rank, tanh:s, zscore or running."
    )
    check_rewards: bool = option(
        True, "Call each reward function once on two rows before the model loads, to find its mistakes early."
    )
    check_reward_determinism: bool = option(
        False, "Score 4 rows of the first generation a second time, and warn where a reward changed its mind."
    )


@dataclass
class VllmSyncFields:
    """Fields of ``use_vllm`` that say how weights are pushed and checked."""

    vllm_weight_bucket_mb: PositiveInt = option(512, "MiB of weights sent in one request, at least 1.")
    vllm_sync_timeout: PositiveFloat = option(720.0, "Seconds one call of a weight update may take.")
    vllm_request_timeout: PositiveFloat | None = option(
        None, "Seconds one request to a server may take; None: 600, or 30 and 0.02 a requested token."
    )
    vllm_sync_retries: NonNegativeInt = option(2, "Whole weight updates that are tried again before the run stops.")
    vllm_sleep_level: Literal["auto", "1", "2"] = option(
        "auto",
        "With vllm_enable_sleep_mode: 1 keeps weights in host memory, 2 drops them. auto: 1 where a push serves "
        "several generations, else 2.",
    )
    adapter_sync: Literal["auto", "adapter", "merged"] = option(
        "auto",
        "A LoRA adapter goes to vLLM and to servers alone (adapter), or added to the weights (merged); auto: alone where the "
        "engine takes it, else merged, which is told once.",
    )
    vllm_server_api_key: str | None = option(None, "Bearer token of the rollout servers.")
    mask_ids_without_token: bool = option(
        False,
        "Never sample ids that the tokenizer has no token for. Some models have padded embeddings: more rows than tokens.",
    )
    weight_parity_every: NonNegativeInt | None = option(
        None,
        "Number of weight pushes between two comparisons of log-probs with the engine. None compares as often as it costs "
        "less than 1 % of the run's time. The first push, and each until training has moved the weights, are always compared; "
        "0 compares nothing after these.",
    )
    allow_biased_is: bool = option(
        False, "Allow the correction of engine log-probs with a penalty, a guide or a bias, which biases every ratio."
    )


def reshaped_sampling(cfg: OnlineConfig, *names: str) -> str:
    """The settings that draw from another distribution than the one whose log-probs are computed; empty where none does.

    Args:
        cfg: Of an online trainer.
        names: Further settings that its log-probs do not follow.
    """
    known = {  # Its value, and what is off.
        "repetition_penalty": (cfg.repetition_penalty, 1.0), "top_p": (cfg.top_p, 1.0), "top_k": (cfg.top_k, 0),
        "min_p": (cfg.min_p, None),
    }  # fmt: skip
    options = dict(cfg.generation_kwargs or {})  # type: ignore[arg-type]
    used = {name: known[name] for name in ("repetition_penalty", *names)}
    changed = [f"{name}={value}" for name, (value, off) in used.items() if value not in (off, off or None)]
    if options.get("guide") is not None:
        changed.append(f"generation_kwargs with the guide {options['guide']}")
    # suppress_tokens is followed, see `Sampling.left_out`.
    rules = ("min_new_tokens", "no_repeat_ngram_size", "logit_bias")
    changed += [f"generation_kwargs with {name}={options[name]}" for name in rules if options.get(name)]
    if cfg.vllm_structured_outputs_regex:
        changed.append(f"vllm_structured_outputs_regex={cfg.vllm_structured_outputs_regex!r}")
    return ", ".join(changed)


def reject_reshaped_sampling(cfg: OnlineConfig) -> None:
    """Refuse a correction of log-probs that the trainer does not compute; top-k, top-p and min-p it does follow.

    Raises:
        ConfigError: A penalty, a guide or a bias with the correction, unless ``allow_biased_is``.
    """
    reshaped = reshaped_sampling(cfg)
    if reshaped and cfg.vllm_importance_sampling_correction and not cfg.allow_biased_is:
        raise ConfigError(
            f"{reshaped} with vllm_importance_sampling_correction=True: the engine's log-probs are of what it makes of the "
            "distribution, and the trainer's are not, so every ratio is off. Fix: leave it out, turn the correction off, or set "
            "allow_biased_is=True."
        )


def check_truncation(cfg: OnlineConfig) -> None:
    """Refuse a mode that truncates the ratio at bounds of which there are none.

    Raises:
        ConfigError: Both bounds are None.
    """
    low, high = cfg.vllm_importance_sampling_clip_min, cfg.vllm_importance_sampling_clip_max
    if (cfg.vllm_importance_sampling_mode or "").endswith("_truncate") and low is None and high is None:
        raise ConfigError(
            f"vllm_importance_sampling_mode={cfg.vllm_importance_sampling_mode!r} truncates the ratio at "
            "vllm_importance_sampling_clip_min and vllm_importance_sampling_clip_max, and both are None. Set one, e.g. "
            "vllm_importance_sampling_clip_max=2.0."
        )


def resolve_auto(args: PostTrainingConfig, model: nn.Module, processor: ProcessorMixin) -> None:
    """Replace ``rollout_engine="auto"`` by the engine that is chosen for this model on a GPU; elsewhere it is chosen when made.

    Args:
        args: A config with ``refused_engines``; vLLM is chosen as ``use_vllm=True`` with ``vllm_mode="colocate"`` would.
        model: The policy.
        processor: Its tokenizer, or a processor with images, from which continuous batching cannot generate.
    """
    on_gpu = next(model.parameters()).device.type == "cuda"
    if args.rollout_engine != "auto" or args.use_vllm or not on_gpu:
        return
    refused = args.refused_engines()
    if inner_tokenizer(processor) is not processor:
        refused.setdefault("paged", "it generates from text alone, and a processor was given")
    name = choose_engine(model, refused)
    if name == "vllm":
        args.use_vllm, args.vllm_mode = True, "colocate"
    else:
        args.rollout_engine = name


# Keys of generation_kwargs: those with a field of their own, which log-probs and checks read, and the others.
OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
FURTHER = ("max_new_tokens", "stop_token_ids", "structured_outputs", "guide", "do_sample", "seed", *GENERATION_NAMES)
# Fields of losses that are corrected for an engine which is not the policy.
CORRECTION = (
    "allow_biased_is",
    *(f"vllm_importance_sampling_{x}" for x in ("correction", "mode", "clip_max", "clip_min")),
)
REFUSED = {"typical_p": "no engine here draws by typical probability; top_p or min_p cuts the tail too"}


@config
class OnlineConfig(VllmSyncFields, VllmFields, GenerationFields, ReferenceFields, RewardFields, PostTrainingConfig):
    """Arguments of the trainers that sample completions from the policy they train."""

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *PostTrainingConfig._VALID_DICT_FIELDS,
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]

    _least_generations: ClassVar[int] = 2  # Of a group: one completion has nothing to be compared with.
    log_ref_kl, samples_per_step = False, None  # Of methods without these options: no fields.
    _corrects_sampler: ClassVar[bool] = False  # The loss weighs by the ratio to what another engine said of its tokens.

    learning_rate: float = option(1e-6, "Peak learning rate.")
    remove_unused_columns: bool | None = option(False, "Keep only the prompt column; rewards then see no other column.")
    num_iterations: PositiveInt = option(1, "Passes over each generation, mu >= 1.")
    epsilon: NonNegativeFloat = option(0.2, "Lower clip of the importance ratio: 1 - epsilon.")
    epsilon_high: NonNegativeFloat | None = option(None, "Upper clip: 1 + epsilon_high; None: epsilon.")
    mask_truncated_completions: bool = option(False, "Leave completions that hit the length limit out of the loss.")
    dynamic_sampling: NonNegativeInt = option(
        0, "Rounds in which groups whose rewards are all equal are replaced by fresh prompts (DAPO); 0 is off."
    )
    balance_ranks: bool = option(
        True, "Exchange rows between processes where that evens out their tokens; the gradient stays."
    )
    stop_without_signal: PositiveInt | None = option(
        None, "Generations in a row with all advantages 0, after which the run ends; None: it warns and goes on."
    )
    log_completions: bool = option(False, "Print a sample of completions at each log step.")
    log_multimodal: bool = option(True, "Include images in logged tables.")
    num_completions_to_print: NonNegativeInt | None = option(None, "Rows of the printed table; None: all.")
    log_unique_prompts: bool = option(False, "One row a prompt in trackers' tables.")

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
        """What ``generation_kwargs`` overrides is the field itself: log-probs are of the temperature that was sampled at."""
        overrides = dict(self.generation_kwargs or {})  # type: ignore[arg-type]
        for name, value in overrides.items():
            if name in REFUSED and value is not None:
                raise ConfigError(f"generation_kwargs: {name}={value!r}: {REFUSED[name]}. Fix: take {name} out.")
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
            logger.warning("vllm_structured_outputs_regex wins over what generation_kwargs says of structured outputs.")
        elif overrides.get("guide") is not None:
            overrides["guide"] = tuple(overrides["guide"])  # A list, where it comes from a file.
        generation_fields(overrides)
        self.generation_kwargs = overrides or None

    def _check_sampling(self) -> None:
        if self.num_generations < self._least_generations:
            raise ConfigError(
                f"num_generations={self.num_generations} must be at least 2: a group of one has nothing to compare with."
            )
        if self.sync_ref_model and self.beta == 0:
            raise ConfigError(
                "sync_ref_model=True with beta=0.0: there is no reference model to sync. Set beta above 0."
            )
        if self.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size=True would break groups apart as it shrinks the batch. Turn it off."
            )
        do_sample = (self.generation_kwargs or {}).get("do_sample", True)
        if not do_sample:
            raise ConfigError(
                "generation_kwargs={'do_sample': False} makes all completions of a group equal. Remove it."
            )
        if (fixed := (self.generation_kwargs or {}).get("seed")) is not None:
            raise ConfigError(
                f"generation_kwargs={{'seed': {fixed!r}}} draws the same numbers in every generation and on every process: "
                "completions repeat each other and their advantages vanish. Remove it; the config's seed makes runs repeat."
            )

    def check_foreign_logprobs(self) -> None:
        """Refuse settings that do not fit log-probs of an engine that is not the policy; nothing where none are corrected."""

    def check_vllm_settings(self) -> None:
        """Refuse settings with which vLLM, on a server or in process, cannot sample for this method.

        Raises:
            ConfigError: There is one.
        """
        self.check_foreign_logprobs()
        size = (self.generation_kwargs or {}).get("no_repeat_ngram_size")
        if size:
            raise ConfigError(
                f"generation_kwargs: no_repeat_ngram_size={size} with use_vllm=True: vLLM has no such rule. Fix: take it out, or "
                "use rollout_engine='native'."
            )

    def _check_engine(self) -> None:
        engine = ENGINES.get(self.rollout_engine)
        if engine is not None and engine.vllm_mode is not None:
            # Two spellings of one choice; engines for other models (a reference that generates) stay in process.
            self.use_vllm, self.vllm_mode, self.rollout_engine = True, engine.vllm_mode, "auto"
        if self.use_vllm:
            self.check_vllm_settings()
        check_gathering(self)
        self._check_paged()
        for name in () if self._corrects_sampler else CORRECTION:
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={value!r} is not read by {type(self).__name__}: its loss has no ratio to an engine. Leave it out."
                )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}."
            )

    def _check_paged(self) -> None:
        if self.use_transformers_paged is not None:
            warnings.warn(
                "use_transformers_paged is now use_transformers_continuous_batching.", FutureWarning, stacklevel=2
            )
            self.use_transformers_continuous_batching = self.use_transformers_paged
            self.use_transformers_paged = None
        if self.use_transformers_continuous_batching:
            if self.use_vllm or self.rollout_engine not in ("auto", "paged"):
                other = f"use_vllm={self.use_vllm}, rollout_engine={self.rollout_engine!r}"
                raise ConfigError(f"use_transformers_continuous_batching=True with {other}: choose one engine.")
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
                    f"{name}={value} with transformers' continuous batching, which knows temperature, top_k and top_p alone and "
                    "would leave it out. Take it out, or use rollout_engine='native'."
                )

    @property
    def outlives_weights(self) -> bool:
        """Whether completions may be trained after an update of the weights that sampled them."""
        return self.gradient_accumulation_steps % ((self.steps_per_generation or 1) * self.num_iterations) != 0

    @property
    def generation_config(self) -> transformers.GenerationConfig:
        """A copy of the sampling settings for ``model.generate``; changing it changes nothing here."""
        return transformers.GenerationConfig(
            do_sample=True, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, cache_implementation=self.cache_implementation,
            max_new_tokens=self.max_completion_length,
        )  # fmt: skip

    @property
    def generations_per_step(self) -> float:
        """Generations of one optimiser step; less than 1 where one serves several."""
        return self.gradient_accumulation_steps / ((self.steps_per_generation or 1) * self.num_iterations)

    @property
    def truncation(self) -> Truncation:
        """What sampling leaves out of the vocabulary."""
        return Truncation(self.top_k or 0, self.top_p, self.min_p)

    def refused_engines(self) -> dict[str, str]:
        """Engines that these settings rule out for ``rollout_engine="auto"``, with the reasons."""
        reasons = {}
        for name, check in {"vllm": self.check_vllm_settings, "paged": self._check_paged_settings}.items():
            try:
                check()
                self.check_foreign_logprobs()  # In half precision those of continuous batching are foreign too.
            except (ConfigError, MissingDependencyError) as error:
                reasons[name] = str(error)
        return reasons

    def _resolve_batches(self) -> None:
        """The arithmetic of one generation: completions = per-device batch x processes x steps per generation."""
        unit = self.per_device_train_batch_size * self.world_size
        size, steps = self.generation_batch_size, self.steps_per_generation
        if size is not None and steps is not None and size != unit * steps:
            raise ConfigError(
                f"generation_batch_size={size} and steps_per_generation={steps} are both set. Set one; the other follows "
                f"({self.per_device_train_batch_size} per device x {self.world_size} processes x steps)."
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
            rows, group = (
                self.per_device_eval_batch_size * self.world_size,
                self.num_generations_eval or self.num_generations,
            )
            if rows % group:
                whole = group // math.gcd(group, self.world_size)
                raise ConfigError(
                    f"the evaluation batch of {self.per_device_eval_batch_size} per device x {self.world_size} processes = "
                    f"{rows} does not hold whole groups of {group} (num_generations_eval or num_generations). "
                    f"Nearest per_device_eval_batch_size: {_near(self.per_device_eval_batch_size, whole)}."
                )

    def _check_groups(self, unit: int) -> None:
        total, group = self.generation_batch_size or 0, self.num_generations
        if total % group == 0:
            return
        fits = [g for g in range(2, total + 1) if total % g == 0]
        step = group // math.gcd(group, self.world_size * (self.steps_per_generation or 1))
        near = sorted(fits, key=lambda g: abs(g - group))[:3]
        raise ConfigError(
            f"a generation of {total} completions ({self.per_device_train_batch_size} per device x {self.world_size} "
            f"process{'es' if self.world_size > 1 else ''} x {self.steps_per_generation} steps_per_generation) does not "
            f"divide into groups of num_generations={group}. With {self.world_size} process"
            f"{'es' if self.world_size > 1 else ''}: num_generations could be {', '.join(map(str, sorted(near))) or 'none'}; "
            f"or keep {group} and set per_device_train_batch_size to {_near(self.per_device_train_batch_size, step)}, "
            f"or generation_batch_size to {_near(total, math.lcm(unit, group))}."
        )


def _near(value: int, step: int) -> str:
    """The multiples of ``step`` around ``value``, as text."""
    below, above = value // step * step, -(-value // step) * step
    return " or ".join(str(x) for x in sorted({below or above, above}))


@dataclass
class EpisodeFields(HarnessFields):
    """Fields of configs whose trainers let the model call tools; the others do not have them."""

    max_tool_calling_iterations: Annotated[int, Range(least=-1)] | None = option(
        None, "Rounds of tool calls per completion; None: 32; -1: no limit but the tokens."
    )
    max_tool_output_tokens: PositiveInt | None = option(
        None, "A longer tool result is cut in its middle; None: it is left whole."
    )
    tool_workers: NonNegativeInt | None = option(
        None, "Rollouts whose tools run at once; None: all, at most 32; 0: in turn, on the main thread."
    )
    tool_timeout: PositiveFloat | None = option(
        60.0, "Seconds a tool call, a reset or a get_reward may take; None: for ever. Not with tool_workers=0."
    )
    environment_retries: NonNegativeInt = option(
        0, "Further attempts when an environment's reset or get_reward raises."
    )
