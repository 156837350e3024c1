"""Config fields that several methods share, each documented once."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import transformers

from posttrain.checks.registry import MODES, silenced_codes
from posttrain.errors import ConfigError, check_choice
from posttrain.models.load import with_dtype
from posttrain.models.parallel import bf16_is_faster

__all__ = [
    "AUTO",
    "GenerationFields",
    "MemoryFields",
    "PostTrainingConfig",
    "ReferenceFields",
    "VllmFields",
    "check_gathering",
    "refuse_cut_sequences",
    "warn_keep_end",
]

logger = logging.getLogger(__name__)


AUTO = "auto"
PLANNED = 8  # What 'auto' counts the effective batch from: the default of per_device_train_batch_size.


@dataclass
class MemoryFields:
    """A part of `PostTrainingConfig`."""

    per_device_train_batch_size: int | str = field(
        default=PLANNED,
        metadata={
            "help": "Rows of a micro-batch on each device. auto: the largest that fits 90 % of the memory at the longest "
            "lengths, found by dry steps; with gradient_accumulation_steps it makes the effective batch that 8 would make."
        },
    )
    dry_step: bool | None = field(
        default=None,
        metadata={
            "help": "Before step 0, try a step at the longest lengths without an update. None: on a GPU yes, on a CPU no (a step "
            "takes long there, and a system out of memory ends the process instead of telling it)."
        },
    )
    memory_limit_gib: float | None = field(
        default=None, metadata={"help": "Most memory of the device to plan with, in GiB; None: what is free."}
    )

    logits_chunk_size: int | None = field(
        default=None,
        metadata={
            "help": "Positions whose logits exist at once, in the loss and its backward; None: as many as 24 MiB hold on a "
            "CPU, 64 on an accelerator."
        },
    )

    def __post_init__(self) -> None:
        if self.logits_chunk_size is not None and self.logits_chunk_size < 1:
            raise ConfigError(
                f"logits_chunk_size={self.logits_chunk_size} must be at least 1, or None for a size that is fast."
            )
        given = self.per_device_train_batch_size
        self.auto_batch_size = given == AUTO
        if self.auto_batch_size:
            self.per_device_train_batch_size = PLANNED
        elif isinstance(given, str):
            if not given.strip().isdigit():
                raise ConfigError(f"per_device_train_batch_size={given!r} must be a number or {AUTO!r}.")
            self.per_device_train_batch_size = int(given)
        if self.memory_limit_gib is not None and not self.memory_limit_gib > 0:
            raise ConfigError(f"memory_limit_gib={self.memory_limit_gib} must be above 0, or None for what is free.")
        super().__post_init__()  # type: ignore[misc]


def check_gathering(config: Any) -> None:
    """Refuse or tell that shards stay apart (``ds3_gather_for_generation=False``): every rollout engine reads whole weights."""
    if config.ds3_gather_for_generation:
        return
    if getattr(config, "use_vllm", False):
        raise ConfigError(
            "ds3_gather_for_generation=False with use_vllm=True: vLLM is sent whole weights. Leave it at True."
        )
    logger.warning(
        "ds3_gather_for_generation=False is ignored: rollout_engine=%r reads whole weights, so ZeRO-3's shards are gathered to "
        "generate. A model above one device's memory needs a rollout server: use_vllm=True.", config.rollout_engine,
    )  # fmt: skip


def refuse_cut_sequences(config: Any, what: str) -> None:
    """Refuse context and sequence parallelism, which give each process a piece of every sequence.

    Args:
        config: A trainer's.
        what: Cannot be cut.

    Raises:
        ConfigError: ``parallelism_config`` asks for it.
    """
    sizes = [getattr(config.parallelism_config, name, 1) for name in ("cp_size", "sp_size")]
    if max(sizes) > 1:
        raise ConfigError(
            f"parallelism_config with cp_size={sizes[0]} and sp_size={sizes[1]}: {what} cannot be cut along their tokens here. "
            "Set both to 1."
        )


@dataclass
class PostTrainingConfig(MemoryFields, transformers.TrainingArguments):
    """Arguments of every trainer: those of `transformers.TrainingArguments` with defaults made for post-training.

    Activations are recomputed in backward unless ``gradient_checkpointing=False`` (or ``activation_checkpointing``, its
    newer name; either spelling works, two that contradict each other are refused).
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *transformers.TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "silence_findings"
    ]  # fmt: skip

    logging_steps: float = field(
        default=10, metadata={"help": "Optimiser steps between two log lines; below 1 a share of all steps."}
    )
    bf16: bool | None = field(
        default=None,
        metadata={"help": "Autocast to bfloat16. None turns it on where fp16 is off and the device is really faster."},
    )
    lr_scheduler_kwargs: dict | str | None = field(default=None, metadata={"help": "Extra arguments of the schedule."})
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keywords for from_pretrained when the model is given as a string."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Allow code from the model's repository, for model and tokenizer."}
    )
    router_aux_loss_coef: float | None = field(
        default=None,
        metadata={"help": "Weight of the load-balancing term of mixtures of experts. None: the model's own; 0: none."},
    )
    activation_offloading: bool = field(
        default=False, metadata={"help": "Keep activations in the host's memory between forward and backward (CUDA)."}
    )
    kept_layers: int | None = field(
        default=None,
        metadata={
            "help": "With gradient_checkpointing: last layers that keep their activations instead of computing them again. "
            "None: as many as fit where full logits and their gradient would have been; 0: none."
        },
    )
    disable_dropout: bool = field(default=False, metadata={"help": "Set every dropout to 0."})
    strict_data: bool = field(
        default=False, metadata={"help": "Make every warning about the data, while it is prepared and after, an error."}
    )
    preflight: Literal["error", "warn", "off"] = field(
        default="error",
        metadata={
            "help": "Checks: error stops on what cannot be meant and warns of the rest; warn never stops; off: none."
        },
    )
    silence_findings: dict[str, str] | str | None = field(
        default=None,
        metadata={
            "help": "Findings that are known to be fine here: a reason by code or name, {'PT-D013': 'a control group'}."
        },
    )
    bad_rows: Literal["error", "drop"] = field(
        default="error",
        metadata={
            "help": "Rows that cannot be trained: error refuses them, drop leaves them out and lists them in a file."
        },
    )
    bad_rows_max: float = field(
        default=0.05,
        metadata={"help": "Share of rows that bad_rows='drop' may leave out before it refuses, in [0, 1]."},
    )
    max_row_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens a packed row may hold. None picks 512 on a CPU, 2048 with dense masks on a GPU, 16384 with "
            "FlexAttention. More fills a GPU better; less needs less memory."
        },
    )

    def __post_init__(self) -> None:
        self._resolve_checkpointing()
        self._resolve_bf16()
        super().__post_init__()
        for item in fields(self):
            if item.name in type(self)._VALID_DICT_FIELDS and isinstance(getattr(self, item.name), str):
                value = getattr(self, item.name)
                if item.name in ("model_init_kwargs", "silence_findings"):
                    raise ConfigError(f"{item.name}={value!r} must be a mapping or a JSON object string.")
        if self.model_init_kwargs is not None:
            self.model_init_kwargs = with_dtype(self.model_init_kwargs)  # type: ignore[arg-type]
        if getattr(self, "pad_token", None) is not None:
            warnings.warn("pad_token is deprecated: set it on the tokenizer.", FutureWarning, stacklevel=4)
        self._check_preflight()
        # One non-finite loss must not be replaced by an average of good ones: the log would show a healthy run.
        self.logging_nan_inf_filter = False

    def _check_preflight(self) -> None:
        check_choice("preflight", self.preflight, MODES)
        check_choice("bad_rows", self.bad_rows, ("error", "drop"))
        if not 0 <= self.bad_rows_max <= 1:
            raise ConfigError(f"bad_rows_max={self.bad_rows_max} must be a share of the rows, from 0 to 1.")
        silenced_codes(self.silence_findings)  # type: ignore[arg-type]

    def _resolve_checkpointing(self) -> None:
        new_name = hasattr(self, "activation_checkpointing")
        spelled = [self.gradient_checkpointing, getattr(self, "activation_checkpointing", None)]
        given = [value for value in spelled if value is not None]
        if len(given) == 2 and given[0] != given[1]:
            raise ConfigError(
                f"gradient_checkpointing={spelled[0]} and activation_checkpointing={spelled[1]} are two names of one "
                "switch and contradict each other. Set one of them."
            )
        value = bool(given[0]) if given else True
        if new_name:
            self.activation_checkpointing, self.gradient_checkpointing = value, None
            if self.gradient_checkpointing_kwargs is not None and self.activation_checkpointing_kwargs is None:
                self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
            self.gradient_checkpointing_kwargs = None
        else:
            self.gradient_checkpointing = value

    def _resolve_bf16(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and bf16_is_faster()
            if not self.bf16 and not self.fp16:
                logger.info("bf16=None: computing in float32, because this device is not faster in bfloat16.")
        if self.bf16 and not torch.cuda.is_available() and not torch.backends.mps.is_available():
            self.use_cpu = True  # transformers allows bf16 on a CPU only when it is asked for by name.


def warn_keep_end(truncation_mode: str) -> None:
    """``keep_end`` trains on texts without their beginning, which no generation looks like; it will go."""
    if truncation_mode == "keep_end":
        warnings.warn(
            "truncation_mode='keep_end' is deprecated: rows that lost their beginning look like no prompt. Raise max_length, or "
            "shorten rows yourself.",
            FutureWarning,
            stacklevel=4,
        )


@dataclass
class GenerationFields:
    """How completions are sampled during training."""

    num_generations: int = field(default=8, metadata={"help": "Completions per prompt, the group G; at least 2."})
    num_generations_eval: int | None = field(default=None, metadata={"help": "G in evaluation; None or 0: the same."})
    max_completion_length: int = field(default=512, metadata={"help": "Most tokens of a completion, EOS included."})
    shuffle_dataset: bool = field(default=True, metadata={"help": "Shuffle the prompts of the training set."})
    generation_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Completions of one generation over all processes. None: per-device batch x processes x steps_per_generation."
        },
    )
    steps_per_generation: int | None = field(
        default=None, metadata={"help": "Micro-batches trained per generation. None: gradient_accumulation_steps."}
    )
    temperature: float = field(
        default=1.0, metadata={"help": "Divides the logits, in sampling and in every log-prob; > 0."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Nucleus mass in (0, 1]; 1 is off."})
    top_k: int = field(default=0, metadata={"help": "Keep the k most likely tokens; 0 is off."})
    min_p: float | None = field(default=None, metadata={"help": "Least share of the top probability; None is off."})
    repetition_penalty: float = field(default=1.0, metadata={"help": "Above 1 discourages repeats; 1 is off."})
    generation_kwargs: dict | str | None = field(default=None, metadata={"help": "Override sampling settings by name."})
    chat_template_kwargs: dict | str | None = field(default=None, metadata={"help": "Passed at every template call."})
    cache_implementation: str | None = field(default=None, metadata={"help": "Cache of the hf engine."})
    rollout_engine: str = field(
        default="auto",
        metadata={
            "help": "native (in process, on the trainer's weights), hf (transformers generate), paged, vllm, or auto: native if "
            "exact; on a GPU vllm, else paged, first."
        },
    )
    pad_to_multiple_of: int | None = field(default=None, metadata={"help": "Rounds row widths up."})
    ds3_gather_for_generation: bool = field(default=True, metadata={"help": "Gather ZeRO-3 shards to generate."})


@dataclass
class VllmFields:
    """Generation by vLLM or by rollout servers."""

    use_vllm: bool = field(default=False, metadata={"help": "Generate with rollout servers, or vLLM."})
    vllm_mode: Literal["server", "colocate"] = field(default="colocate", metadata={"help": "Where vLLM runs."})
    vllm_model_impl: str = field(default="vllm", metadata={"help": "vllm or transformers."})
    vllm_enable_sleep_mode: bool = field(default=False, metadata={"help": "Free vLLM's memory while training."})
    vllm_structured_outputs_regex: str | None = field(default=None, metadata={"help": "Completions match this."})
    vllm_server_base_url: str | None = field(default=None, metadata={"help": "Overrides host and port."})
    vllm_server_host: str = field(default="0.0.0.0", metadata={"help": "Host of the rollout server."})
    vllm_server_port: int = field(default=8000, metadata={"help": "Port of the rollout server."})
    vllm_server_timeout: float = field(default=240.0, metadata={"help": "Seconds to wait for the server."})
    vllm_group_port: int = field(default=51216, metadata={"help": "Port of the weight-update group."})
    vllm_gpu_memory_utilization: float = field(default=0.3, metadata={"help": "Share of GPU memory, colocate."})
    vllm_max_model_length: int | None = field(default=None, metadata={"help": "Context length."})
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "Colocate only."})
    vllm_importance_sampling_correction: bool = field(default=True, metadata={"help": "Correct for engine mismatch."})
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric"
    ] = field(default="sequence_mask", metadata={"help": "How the ratio of trainer to engine is bounded."})
    vllm_importance_sampling_clip_max: float | None = field(default=3.0, metadata={"help": "Upper bound of the ratio."})
    vllm_importance_sampling_clip_min: float | None = field(default=None, metadata={"help": "Lower bound; None is 0."})
    use_transformers_continuous_batching: bool = field(default=False, metadata={"help": "Paged generation."})
    transformers_continuous_batching_config: dict | str | None = field(default=None, metadata={"help": "Its settings."})
    use_transformers_paged: bool | None = field(
        default=None, metadata={"help": "The old name of use_transformers_continuous_batching."}
    )


@dataclass
class ReferenceFields:
    """The KL penalty and the model it is measured against."""

    beta: float = field(default=0.0, metadata={"help": "Weight of the KL penalty; 0 needs no reference model."})
    sync_ref_model: bool = field(default=False, metadata={"help": "Let the reference follow the policy (TR-DPO)."})
    ref_model_mixup_alpha: float = field(default=0.6, metadata={"help": "Share of the policy in each sync."})
    ref_model_sync_steps: int = field(default=512, metadata={"help": "Optimiser steps between two syncs."})
