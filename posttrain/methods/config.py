"""`PostTrainingConfig`: the arguments that all methods share."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import os
import warnings
from dataclasses import Field, dataclass, fields
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import transformers
from transformers.trainer_pt_utils import AcceleratorConfig

from posttrain import plugins
from posttrain.checks.registry import silenced_codes
from posttrain.errors import ConfigError, check_choice, did_you_mean
from posttrain.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Share,
    check_arguments,
    check_fields,
    config,
    option,
    read_mapping,
)
from posttrain.models.load import check_distributed, with_dtype
from posttrain.models.parallel import bf16_is_faster
from posttrain.redaction import hide_secrets

logger = logging.getLogger(__name__)


AUTO = "auto"
# An unknown attribute counts as a misspelled option if its similarity to an option (0 to 1) is above this value. The similarity
# of `xla_fsdp_config`, which transformers sets, is below it.
MISSPELT = 0.8


# Default of per_device_train_batch_size. 'auto' keeps the effective batch size that this default gives.
PLANNED = 8


def check_gathering(config: Any) -> None:
    """Reject or warn about ``ds3_gather_for_generation=False``: every rollout engine needs whole weights."""
    if config.ds3_gather_for_generation:
        return
    if config.use_vllm:
        raise ConfigError(
            "ds3_gather_for_generation=False with use_vllm=True: vLLM needs the gathered weights. Set it to True."
        )
    logger.warning(
        "ds3_gather_for_generation=False is ignored: rollout_engine=%r needs whole weights, so the ZeRO-3 shards are "
        "gathered for generation. Use a rollout server (use_vllm=True) for a model larger than the memory of one "
        "device.", config.rollout_engine,
    )  # fmt: skip


# Environment variable that ``accelerate launch`` sets for a parallelism config.
ASKED = "ACCELERATE_USE_PARALLELISM_CONFIG"
SIZES = ("sp_size", "cp_size", "tp_size", "dp_replicate_size", "dp_shard_size")


def parallel_sizes(config: transformers.TrainingArguments) -> dict[str, int]:
    """Return the sizes of all parallelism axes, from ``parallelism_config`` or the variables of ``accelerate launch``."""
    parallelism = config.parallelism_config
    if parallelism is None and os.environ.get(ASKED, "").lower() == "true":
        return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in SIZES}
    return {name: int(getattr(parallelism, name, None) or 1) for name in SIZES}


def sequence_parallel(config: transformers.TrainingArguments) -> ModuleType | None:
    """Return the extension that runs configs with ``sp_size`` above 1. None for other configs."""
    return plugins.module("extensions.sequence_parallel.start") if parallel_sizes(config)["sp_size"] > 1 else None


def check_parallelism(config: Any) -> None:
    """Convert ``parallelism_config`` from a dict or JSON, and reject context and tensor parallelism.

    Raises:
        ConfigError: ``cp_size`` or ``tp_size`` is above 1, or the name of a size is unknown.
    """
    if isinstance(config.parallelism_config, dict | str):
        from accelerate import ParallelismConfig

        axes = read_mapping("parallelism_config", config.parallelism_config) or {}
        unknown = sorted(set(axes) - set(ParallelismConfig.__dataclass_fields__))
        if unknown:
            raise ConfigError(
                f"parallelism_config has the unknown fields {unknown}. accelerate has {', '.join(SIZES)}."
            )
        config.parallelism_config = ParallelismConfig(**axes)
    sizes = parallel_sizes(config)
    if max(sizes["cp_size"], sizes["tp_size"]) > 1:
        said = ", ".join(f"{name}={sizes[name]}" for name in ("cp_size", "sp_size", "tp_size"))
        raise ConfigError(
            f"parallelism_config with {said}: ring attention (cp_size) would ignore the mask with which sequences share a "
            "prompt, and tensor parallelism (tp_size) is not supported. Fix: if rows do not fit on one device, set sp_size "
            "(Ulysses, which splits each row over processes). If the model does not fit, use FSDP2 or ZeRO-3 and keep "
            "both sizes at 1."
        )


@config
class PostTrainingConfig(transformers.TrainingArguments):
    """Arguments that all trainers share: those of `transformers.TrainingArguments`, with defaults for post-training.

    Activations are recomputed in the backward pass (``gradient_checkpointing=True``), which saves memory and costs time.
    ``activation_checkpointing`` is the newer name of this switch. Two values that differ raise an error.
    ``use_liger_kernel=True`` replaces layers of the model by Liger kernels; the loss is not replaced.
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *transformers.TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "silence_findings"
    ]  # fmt: skip
    _given: ClassVar[tuple[str, ...]] = ()  # Names of the arguments that were passed to the constructor, per instance.
    # Default values of options that only some methods declare as fields. The training loop, checks and reports read these
    # options from every config.
    assistant_only_loss = False
    chat_template_kwargs = None
    chat_template_path = None
    eos_token = None
    freeze_vision = "auto"
    generations_per_step = 1.0
    max_images_per_row = None
    max_completion_length = None
    max_length = None
    packing = False
    pad_to_multiple_of = None
    pad_token = None
    sft_model_path = None
    steps_per_generation = None
    teacher_model_name_or_path = None
    teacher_model_server_url = None
    temperature = 1.0
    use_vllm = False
    dataloader_multiprocessing_context = None  # This is a field of transformers only since 5.15.

    per_device_train_batch_size: int | str = option(
        PLANNED,
        "Number of rows in a micro-batch on each device, at least 1. 'auto' runs trial steps at the maximum lengths and "
        "selects the largest size that needs at most 90 % of the free memory. It then sets gradient_accumulation_steps so "
        "that the effective batch size is the same as with a micro-batch of 8 rows.",
    )
    # The default is None. In older versions of transformers it is False, which cannot be distinguished from a False set by the
    # user.
    gradient_checkpointing: bool | None = option(
        None,
        "Recompute activations in the backward pass, which saves memory and costs time. None means True, unless "
        "activation_checkpointing is set.",
    )
    parallelism_config: dict[str, Any] | str | None = option(
        None,
        "accelerate's ParallelismConfig, or a mapping with its fields. sp_size is the size of a sequence-parallel group: the "
        "processes of a group share the tokens of each row (Ulysses). 1 disables it. Use it for rows that are too long for "
        "one device. Values of cp_size and tp_size above 1 are errors. None uses the sizes set by accelerate launch.",
    )
    dry_step: bool | None = option(
        None,
        "Run one forward and backward pass at the maximum lengths before the first step, without an update, to check that the "
        "memory is sufficient. None: True on a GPU, and False on a CPU, where this pass is slow and the process is killed if "
        "the memory is not sufficient.",
    )
    memory_limit_gib: PositiveFloat | None = option(
        None,
        "Upper bound on the device memory of this run, in GiB, above 0. Batch sizes and caches are chosen to stay below it. "
        "None: the free memory. Set it if other processes use the same device.",
    )
    logits_chunk_size: PositiveInt | None = option(
        None,
        "Number of positions per chunk of logits in the loss and its backward pass. Only the logits of one chunk are in "
        "memory at a time. None: as many positions as fit into 24 MiB on a CPU or 64 MiB on an accelerator, but at "
        "least 128. Smaller chunks need less memory and more time.",
    )
    logging_steps: float = option(
        10, "Number of optimizer steps between two log lines. A value below 1 is a fraction of all steps."
    )
    bf16: bool | None = option(
        None,
        "Compute in bfloat16 with autocast. None: True if fp16 is off and the device is faster in bfloat16, i.e. on a GPU "
        "with native bfloat16 or a CPU with AMX or AVX512-BF16.",
    )
    lr_scheduler_kwargs: dict | str | None = option(
        None,
        "Additional arguments of the learning-rate schedule as a mapping or JSON, for example {'num_cycles': 1} for cosine "
        "with restarts.",
    )
    model_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Keyword arguments of from_pretrained as a mapping or JSON, for example {'dtype': 'bfloat16'}. They apply only if the "
        "model is given as a string. The tokenizer is loaded from the same revision.",
    )
    trust_remote_code: bool = option(
        False,
        "Allow Python code from the model's repository to run when models, tokenizers and reward models are loaded. Enable it "
        "only for repositories that you trust.",
    )
    router_aux_loss_coef: NonNegativeFloat | None = option(
        None,
        "Weight of the load-balancing loss of mixture-of-experts models, at least 0. None: the value in the model's config. 0 "
        "disables it. A positive value is an error for models without a router.",
    )
    activation_offloading: bool = option(
        False,
        "Keep activations in host memory between the forward and the backward pass. This saves accelerator memory and costs "
        "transfer time. It is an error on a CPU.",
    )
    kept_layers: NonNegativeInt | None = option(
        None,
        "With gradient_checkpointing: number of last layers that keep their activations instead of recomputing them. None: as "
        "many layers as fit into the memory that chunked logits save. 0: no layers, which needs the least memory.",
    )
    disable_dropout: bool = option(
        False,
        "Set every dropout probability of the model to 0, so that equal inputs give equal log-probs. An adapter's "
        "lora_dropout is not changed.",
    )
    strict_data: bool = option(
        False,
        "Raise an error instead of logging a warning for every problem with the data, during preparation and in later checks.",
    )
    max_hours: PositiveFloat | None = option(
        None,
        "Maximum training time in hours, above 0. When it has passed, the run finishes the current step, saves a checkpoint "
        "and stops. Set it below the time limit of a cluster job. None: no limit.",
    )
    push_run_record: bool = option(
        False,
        "With push_to_hub, also upload the run record. It contains rows of the data, prompts and completions as text, and the "
        "command line. False uploads the model, its tokenizer, the model card and TensorBoard's logs.",
    )
    preflight: Literal["error", "warn", "off"] = option(
        "error",
        "Effect of the findings of checks before and during training. 'error': findings of severity 'error' stop the run, and "
        "all other findings are logged. 'warn': all findings are logged, and no finding stops the run. 'off': no checks.",
    )
    silence_findings: dict[str, str] | str | None = option(
        None,
        "Findings to ignore, as a mapping or JSON. Each key is the code or the name of a check, and each value is the reason, "
        "for example {'PT-D013': 'a control group'}. Ignored findings are recorded, but they are neither logged nor raised.",
    )
    bad_rows: Literal["error", "drop"] = option(
        "error",
        "How to treat rows that cannot be used for training, such as rows without an answer. 'error': raise an error. 'drop': "
        "drop these rows, and also rows without a training signal, such as pairs with equal answers. Dropped rows are listed "
        "in bad_rows.jsonl in the output folder.",
    )
    bad_rows_max: Share = option(
        0.05,
        "With bad_rows='drop': maximum fraction of rows to drop, from 0 to 1. If more rows are bad, an error is raised, "
        "because many bad rows usually mean that a wrong column is used.",
    )
    max_row_tokens: PositiveInt | None = option(
        None,
        "Maximum number of tokens of a packed batch row. None: the default of the attention backend, which is 2048 for "
        "segment attention on a CPU, 256 for a dense mask on a CPU, 2048 for a dense mask on a GPU, 16384 for "
        "FlexAttention, and 4096 for models that need padding. For segment attention on a GPU it is 30,000 for a model of "
        "0.5B parameters, 10,000 for 1.5B, and 2,048 for 7B or more. A larger value uses a GPU better and needs more memory.",
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Reject keywords that are neither options nor convertible names of older releases."""
        check_arguments(cls, kwargs)
        config = super().__new__(cls)
        names = (item.name for item in fields(cls) if item.init)
        names_given = [*(name for name, _ in zip(names, args, strict=False)), *kwargs]
        config._given = tuple(name for name in names_given if name != "output_dir")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the fields without secrets, for trackers and the run record."""
        return hide_secrets(super().to_dict())

    def check_fields(self) -> None:
        """Validate the type and the range of every field; see `posttrain.fields.check_fields`."""
        check_fields(self, beside=transformers.TrainingArguments)

    def __post_init__(self) -> None:
        self.check_fields()
        for name in self._VALID_DICT_FIELDS:
            if name not in transformers.TrainingArguments._VALID_DICT_FIELDS:
                setattr(self, name, read_mapping(name, getattr(self, name)))
        check_parallelism(self)
        given = self.accelerator_config
        for name in read_mapping("accelerator_config", given) if str(given).startswith("{") else ():
            check_choice("accelerator_config", name, vars(AcceleratorConfig()))
        self._resolve_checkpointing()
        self.pad_to_multiple_of = row_multiple(self.pad_to_multiple_of)
        self._resolve_bf16()
        self._resolve_batch_size()
        self._check_numbers()
        if isinstance(self.fsdp, str) and self.fsdp.lower() in ("true", "false"):  # From a command line or a YAML file.
            self.fsdp = self.fsdp.lower() == "true"
        super().__post_init__()
        check_schedule(self)
        if self.load_best_model_at_end and self.eval_strategy == "no":
            raise ConfigError(
                "load_best_model_at_end=True needs evaluations to find the best model, but eval_strategy='no'. Fix: "
                "set eval_strategy or remove load_best_model_at_end."
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type != "cpu"
        if self.model_init_kwargs is not None:
            self.model_init_kwargs = with_dtype(self.model_init_kwargs)  # type: ignore[arg-type]
            check_distributed(self.model_init_kwargs.get("distributed_config"))
        silenced_codes(self.silence_findings)  # type: ignore[arg-type]
        if self.use_liger_kernel:
            # Use only Liger's layers. Its fused loss would replace the forward pass that computes logits in chunks.
            without = {"cross_entropy": False, "fused_linear_cross_entropy": False}
            self.liger_kernel_config = {**(self.liger_kernel_config or {}), **without}
        # Log a non-finite loss as it is. transformers would replace it with the average of finite losses.
        self.logging_nan_inf_filter = False
        self._made = True

    def __setattr__(self, name: str, value: object) -> None:
        """Reject an attribute whose name is similar to an option, because nothing would read it.

        The names of attributes that transformers sets itself are not similar to any option.

        Raises:
            ConfigError: The message contains the most similar option, or the replacement of a removed option.
        """
        if "_made" in vars(self) and not (name in vars(self) or name.startswith("_") or hasattr(type(self), name)):
            meant = did_you_mean(name, (item.name for item in fields(self)), cutoff=MISSPELT)
            fix = importlib.import_module("posttrain.compat.old_names").fix_of(type(self), name)
            if meant or fix:
                raise ConfigError(
                    f"{type(self).__name__} has no option {name}{meant}: {name}={value!r} would have no effect."
                    + (f" Fix: {fix}." if fix else "")
                )
        super().__setattr__(name, value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = [
            f"    {k}: {v.metadata['help']}"
            for k, v in vars(cls).items()
            if isinstance(v, Field) and "help" in v.metadata
        ]
        # `help` and the tooltips of notebooks show this text.
        if own and cls.__doc__:
            cls.__doc__ = "\n".join([cls.__doc__.rstrip(), "", "Args:", *own])
        # Use a short repr. The repr of a dataclass would list all of about 200 fields.
        cls.__repr__ = cls.__str__ = PostTrainingConfig.__repr__

    def __repr__(self) -> str:
        """Return the constructor call with the arguments that differ from their defaults, without secrets."""
        defaults = {item.name: item.default for item in fields(self)}
        values = {name: getattr(self, name) for name in self._given if name in defaults}
        shown = [f"{k}={v!r}" for k, v in values.items() if v != defaults[k] and not k.endswith("token")]
        return f"{type(self).__name__}({', '.join([repr(self.output_dir), *shown])})"

    __str__ = __repr__

    def _resolve_batch_size(self) -> None:
        size = self.per_device_train_batch_size
        self.auto_batch_size = size == AUTO
        if self.auto_batch_size:
            self.per_device_train_batch_size = PLANNED
        elif isinstance(size, str):
            if not size.strip().isdigit():
                raise ConfigError(f"per_device_train_batch_size={size!r} must be a number or {AUTO!r}.")
            self.per_device_train_batch_size = int(size)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if isinstance(value := getattr(self, name), int) and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")

    @property
    def least_batch_size(self) -> int:
        """Minimum number of rows per device in training."""
        return 1

    @property
    def passes_per_step(self) -> int:
        """Number of micro-batches per optimizer step."""
        return int(self.gradient_accumulation_steps)

    def take_batch_size(self, size: int) -> None:
        """Set the batch size that ``auto`` selected, and keep the effective batch size.

        A second call of train() does not search again.
        """
        old = int(self.per_device_train_batch_size)
        self.gradient_accumulation_steps = old * int(self.gradient_accumulation_steps) // size
        if self.steps_per_generation is not None:
            self.steps_per_generation = old * int(self.steps_per_generation) // size
        self.per_device_train_batch_size, self.auto_batch_size = size, False

    def _check_numbers(self) -> None:
        """Validate numbers that transformers does not validate.

        Without this check, torch would reject them later, or the run would have an unintended number of steps.
        """
        numbers = ("learning_rate", "weight_decay", "num_train_epochs", "warmup_steps", "neftune_noise_alpha")
        for name in (*numbers, "label_smoothing_factor"):
            value: object = vars(self)[name]
            if name == "neftune_noise_alpha" and value is None:
                continue
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r} must be a finite number of at least 0.")
        if self.learning_rate == 0:
            logger.warning("learning_rate=0: no step changes a weight.")
        if self.label_smoothing_factor > 1:
            raise ConfigError(f"label_smoothing_factor={self.label_smoothing_factor} must be from 0 to 1.")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs == 0):
            raise ConfigError(
                f"max_steps={self.max_steps}, num_train_epochs={self.num_train_epochs}: a run needs at least 1 step. Fix: "
                "set max_steps to at least 1, or max_steps=-1 and num_train_epochs above 0."
            )

    def _resolve_checkpointing(self) -> None:
        new_name = hasattr(self, "activation_checkpointing")
        spelled = [self.gradient_checkpointing, self.activation_checkpointing if new_name else None]
        choices = [value for value in spelled if value is not None]
        if len(choices) == 2 and choices[0] != choices[1]:
            raise ConfigError(
                f"gradient_checkpointing={spelled[0]} and activation_checkpointing={spelled[1]} are two names of the "
                "same option and have different values. Set one of them."
            )
        value = bool(choices[0]) if choices else True
        if new_name:
            self.activation_checkpointing, self.gradient_checkpointing = value, None
            if self.gradient_checkpointing_kwargs is not None and self.activation_checkpointing_kwargs is None:
                self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
            self.gradient_checkpointing_kwargs = None
        else:
            self.gradient_checkpointing = value

    def _resolve_bf16(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and bf16_is_faster(on_cpu=self.use_cpu)
            if not self.bf16 and not self.fp16:
                logger.info("bf16=None: computing in float32, because this device is not faster in bfloat16.")
        if self.bf16 and not torch.cuda.is_available() and not torch.backends.mps.is_available():
            # With bf16 on a CPU, transformers requires use_cpu=True.
            self.use_cpu = True


# Learning-rate schedules that require arguments, or that do not support every learning rate.
DEMANDING = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial", "warmup_stable_decay")
# Parameters of schedule functions that the trainer sets.
OF_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
STEPS_TRIED = 100


def check_schedule(args: PostTrainingConfig) -> None:
    """Create the learning-rate schedule for a dummy optimizer and 100 steps, if the schedule has or needs arguments.

    Without this check the error comes after the model is loaded, without the name of an option.

    Raises:
        ConfigError: ``lr_scheduler_kwargs`` has an argument that the schedule does not accept, or lacks one that it needs.
    """
    kind, given = transformers.SchedulerType(args.lr_scheduler_type), args.lr_scheduler_kwargs
    if not given and kind.value not in DEMANDING:
        return
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler

    # Two groups: weights with and without weight decay, as in a trainer.
    groups = [{"params": [torch.zeros(1)]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=args.learning_rate)
    options: Any = {"num_warmup_steps": 1, "num_training_steps": STEPS_TRIED, "scheduler_specific_kwargs": given}
    try:
        for rate in getattr(get_scheduler(kind, optimizer, **options), "lr_lambdas", ()):
            _ = [rate(step) for step in range(STEPS_TRIED)]
    except (TypeError, ValueError, ArithmeticError) as error:
        function: Any = TYPE_TO_SCHEDULER_FUNCTION[kind]
        if "kwargs" in inspect.signature(function).parameters:
            function = type(function(optimizer))  # This class is called with the function's arguments.
        names = [name for name in inspect.signature(function).parameters if name not in OF_TRAINER]
        raise ConfigError(
            f"lr_scheduler_type={kind.value!r} with lr_scheduler_kwargs={given}: {str(error).rstrip('.!')}. Fix: use the "
            f"arguments of {function.__module__}.{function.__name__}: {names}."
        ) from error


def row_multiple(multiple: object) -> int | None:
    """Return ``pad_to_multiple_of`` as a number. For "auto" return None, so that the row layout sets the multiple."""
    if multiple in (None, "auto", "none", "null"):
        return None
    if not str(multiple).isdigit() or int(multiple) < 1:
        raise ConfigError(
            f"pad_to_multiple_of={multiple!r} must be at least 1, or 'auto' or None for the default of the layout."
        )
    return int(multiple)


def warn_keep_end(truncation_mode: str) -> None:
    """Warn that ``keep_end`` is deprecated: it trains on texts without their beginning."""
    if truncation_mode == "keep_end":
        warnings.warn(
            "truncation_mode='keep_end' is deprecated: rows without their beginning do not look like any prompt. "
            "Raise max_length, or shorten the rows yourself.",
            FutureWarning,
            stacklevel=5,
        )


@dataclass
class PictureConfig:
    """Options of training on images. Setting one of them is an error if the model reads only text."""

    freeze_vision: Annotated[str, OneOf(("auto", "tower", True, False))] = option(
        "auto",
        "Which parameters of the vision tower and the projector are frozen. True: all of their parameters. 'tower': the "
        "parameters of the tower only. False: no parameters. 'auto': no parameters if rows have images, and all of their "
        "parameters if rows contain only text. A new adapter covers only the text model, unless this field is False or the "
        "adapter's target modules are in the tower.",
    )
    image_fit: Literal["error", "drop", "resize"] = option(
        "error",
        "How to treat rows with unreadable images, images that are too large, or too many images. 'error': raise an error for "
        "any unreadable or too large image, and if more than 0.5 % of the rows are too long or have too many images. 'drop': "
        "drop these rows and log their number. 'resize': same as 'error', but an image is made smaller if it is too large, or "
        "if its row is longer than max_length.",
    )
    image_max_tokens: PositiveInt | None = option(
        None,
        "Maximum number of placeholder tokens per image, at least 1. None: no limit. Decrease it if images use too much of "
        "max_length.",
    )
    image_max_pixels: PositiveInt | None = option(
        None, "Maximum number of pixels per image before the processor prepares it, at least 1. None: no limit."
    )
    max_images_per_row: NonNegativeInt | None = option(
        None,
        "Maximum number of images per row. None: no limit. vLLM in the trainer's process reserves memory for this number.",
    )
    image_background: Literal["white", "black"] = option(
        "white", "Color behind transparent pixels, 'white' or 'black'. It is needed because models read RGB."
    )
    check_image_use: bool = option(
        False,
        "For online methods: in each evaluation, sample a second time with the images exchanged between rows, and warn if the "
        "reward does not change (PT-G017). This doubles the sampling time in evaluation.",
    )
    image_cache_gb: NonNegativeFloat = option(
        1.0,
        "Size of the cache, in host memory, for the features of a frozen vision tower, in GB. The least recently used "
        "features are evicted first. 0 disables the cache.",
    )

    def __post_init__(self) -> None:
        choices = {"True": True, "False": False}
        self.freeze_vision = choices.get(str(self.freeze_vision).capitalize(), self.freeze_vision)  # type: ignore[assignment]
        lengths = (self.image_max_tokens, self.image_max_pixels, self.max_length)
        if self.image_fit == "resize" and lengths == (None, None, None):
            raise ConfigError(
                "image_fit='resize' needs a maximum size. Fix: set one, for example image_max_tokens=256."
            )
        super().__post_init__()  # Call the method of the config class that inherits these fields.
