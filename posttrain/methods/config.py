"""`PostTrainingConfig`: the arguments that all methods share."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import os
import warnings
from contextvars import ContextVar
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import transformers
from transformers.trainer_pt_utils import AcceleratorConfig

from posttrain import plugins
from posttrain.checks.registry import silenced_codes
from posttrain.data.chat import check_template_arguments
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

# Number of processes that a command will launch. If it is 0, the number of running processes is used.
LAUNCHED: ContextVar[int] = ContextVar("LAUNCHED", default=0)


AUTO = "auto"
# Minimum similarity, from 0 to 1, at which an unknown attribute is treated as a misspelled option. transformers itself sets
# the attribute `xla_fsdp_config`, whose similarity to every option is lower.
MISSPELT = 0.8


# Supported keys of gradient_checkpointing_kwargs. They are options of posttrain, transformers and torch.
RECOMPUTING = ("use_reentrant", "selective", "every_n_layers", "offload", "preserve_rng_state", "context_fn")
RECOMPUTING += ("determinism_check", "debug", "early_stop")

# Default of per_device_train_batch_size. With 'auto', the effective batch size is the same as with this default.
PLANNED = 8


def check_gathering(config: Any) -> None:
    """Check ``ds3_gather_for_generation``. The value False is an error with vLLM, and causes a warning with other engines.

    All engines need the gathered weights.
    """
    if config.ds3_gather_for_generation:
        return
    if config.use_vllm:
        raise ConfigError(
            "ds3_gather_for_generation=False cannot be used with use_vllm=True, because vLLM needs the gathered weights. Fix: "
            "set ds3_gather_for_generation=True."
        )
    logger.warning(
        "ds3_gather_for_generation=False is ignored: rollout_engine=%r needs whole weights, so the ZeRO-3 shards are "
        "gathered for generation. Use a rollout server (use_vllm=True) for a model larger than the memory of one "
        "device.", config.rollout_engine,
    )  # fmt: skip


# Environment variable that ``accelerate launch`` sets if it passes a parallelism config.
ASKED = "ACCELERATE_USE_PARALLELISM_CONFIG"
# Environment variables that accelerate reads to detect several processes.
SEVERAL = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "cncl", "mccl")
SIZES = ("sp_size", "cp_size", "tp_size", "dp_replicate_size", "dp_shard_size")


def parallel_sizes(config: transformers.TrainingArguments) -> dict[str, int]:
    """Read the sizes of all parallelism axes from ``parallelism_config`` or from the environment variables of
    ``accelerate launch``.
    """
    parallelism = config.parallelism_config
    if parallelism is None and os.environ.get(ASKED, "").lower() == "true":
        return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in SIZES}
    return {name: int(getattr(parallelism, name, None) or 1) for name in SIZES}


def sequence_parallel(config: transformers.TrainingArguments) -> ModuleType | None:
    """Return the extension for sequence parallelism if ``sp_size`` is above 1, else None."""
    return plugins.module("extensions.sequence_parallel.start") if parallel_sizes(config)["sp_size"] > 1 else None


def check_parallelism(config: Any) -> None:
    """Convert ``parallelism_config`` from a dict or JSON to accelerate's class. Reject context and tensor parallelism.

    Raises:
        ConfigError: ``cp_size`` or ``tp_size`` is above 1, or ``parallelism_config`` has an unknown field.
    """
    if isinstance(config.parallelism_config, dict | str):
        from accelerate import ParallelismConfig

        axes = read_mapping("parallelism_config", config.parallelism_config) or {}
        unknown = sorted(set(axes) - set(ParallelismConfig.__dataclass_fields__))
        if unknown:
            raise ConfigError(
                f"parallelism_config has the unknown fields {unknown}. accelerate's ParallelismConfig has the fields "
                f"{', '.join(SIZES)}."
            )
        config.parallelism_config = ParallelismConfig(**axes)
    sizes = parallel_sizes(config)
    if max(sizes["cp_size"], sizes["tp_size"]) > 1:
        listed = ", ".join(f"{name}={sizes[name]}" for name in ("cp_size", "sp_size", "tp_size"))
        raise ConfigError(
            f"parallelism_config with {listed} is not supported. Ring attention (cp_size) would ignore the attention mask of "
            "sequences that share a prompt, and tensor parallelism (tp_size) is not implemented. Fix: set cp_size=1 and "
            "tp_size=1. If rows do not fit on one device, set sp_size (Ulysses), which splits each row over several "
            "processes. If the model does not fit on one device, use FSDP2 or ZeRO-3."
        )


@config
class PostTrainingConfig(transformers.TrainingArguments):
    """Arguments that all trainers share. They include the arguments of `transformers.TrainingArguments`, with defaults for
    post-training.

    By default, activations are recomputed in the backward pass (``gradient_checkpointing=True``), which saves memory and
    costs time. ``activation_checkpointing`` is a newer name of this option. Setting both names to different values is an
    error. ``use_liger_kernel=True`` replaces layers of the model with Liger kernels, but it does not replace the loss.
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *transformers.TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "silence_findings"
    ]  # fmt: skip
    _given: ClassVar[tuple[str, ...]] = ()  # Names of the arguments that were passed to the constructor.
    # Default values of options that only some methods declare as fields. The training loop, the checks and the reports read
    # these options from every config.
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
    sft_model_path = None
    steps_per_generation = None
    teacher_model_name_or_path = None
    teacher_model_server_url = None
    temperature = 1.0
    use_vllm = False
    dataloader_multiprocessing_context = None  # transformers has this field only since version 5.15.

    per_device_train_batch_size: int | str = option(
        PLANNED,
        "Number of rows in a micro-batch on each device, at least 1. 'auto' runs trial steps with rows of the maximum length "
        "and selects the largest number of rows that needs at most 90 % of the free memory. It then sets "
        "gradient_accumulation_steps so that the effective batch size is the same as with 8 rows per micro-batch.",
    )
    # The default is None, so that a value of False set by the user can be detected. Older versions of transformers have the
    # default False.
    gradient_checkpointing: bool | None = option(
        None,
        "Recompute activations in the backward pass, which saves memory and costs time. None: the value of "
        "activation_checkpointing if it is set, else True.",
    )
    parallelism_config: dict[str, Any] | str | None = option(
        None,
        "accelerate's ParallelismConfig, or a mapping with its fields. Its field sp_size is the number of processes in a "
        "sequence-parallel group (Ulysses). The processes of a group split the tokens of each row, so that rows can be longer "
        "than the memory of one device allows. sp_size=1 disables sequence parallelism. cp_size and tp_size must be 1. None: "
        "the sizes that accelerate launch sets.",
    )
    dry_step: bool | None = option(
        None,
        "Before the first step, run one forward and backward pass with rows of the maximum length, to check that the memory "
        "is sufficient. The weights are not updated. None: True on a GPU and False on a CPU. On a CPU this pass is slow, and "
        "the operating system kills the process if memory runs out.",
    )
    memory_limit_gib: PositiveFloat | None = option(
        None,
        "Upper bound on the device memory of this run, in GiB, above 0. Automatic batch sizes and caches stay below this "
        "bound. None: the free memory. Set it if other processes use the same device.",
    )
    logits_chunk_size: PositiveInt | None = option(
        None,
        "Number of token positions whose logits are computed at a time, in the loss and its backward pass. Only the logits of "
        "these positions are in memory. None: as many positions as fit into 24 MiB on a CPU or 64 MiB on an accelerator, but "
        "at least 128. A smaller number needs less memory and more time.",
    )
    logging_steps: float = option(
        10,
        "Number of optimizer steps between two log lines. A value below 1 is a fraction of the run's total number of "
        "steps.",
    )
    bf16: bool | None = option(
        None,
        "Compute in bfloat16 with autocast. None: True if fp16 is off and the device is faster in bfloat16 than in float32. "
        "These devices are GPUs with native bfloat16 and CPUs with AMX or AVX512-BF16.",
    )
    lr_scheduler_kwargs: dict | str | None = option(
        None,
        "Additional arguments of the learning-rate schedule, as a mapping or JSON. For example, {'num_cycles': 1} sets the "
        "number of cycles of the schedule 'cosine_with_restarts'.",
    )
    pad_token: str | None = option(
        None,
        "Padding token to set on the tokenizer, which is saved with the model. It must be in the vocabulary. Training does not "
        "depend on it, but programs that load the model do. None: the tokenizer's own token, or an unused special token.",
    )
    model_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Keyword arguments of from_pretrained as a mapping or JSON, for example {'dtype': 'bfloat16'}. They are used only if "
        "the model is passed as a string (folder or Hub id). A revision in them also applies to the tokenizer.",
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
        "With gradient_checkpointing: number of layers, counted from the last one, whose activations are stored and not "
        "recomputed. More layers make training faster and need more memory. None: as many layers as fit into the memory that "
        "the loss saves by computing logits in chunks. 0: the activations of all layers are recomputed.",
    )
    disable_dropout: bool = option(
        False,
        "Set every dropout probability of the model to 0, so that equal inputs give equal log-probs. The lora_dropout of an "
        "adapter is not changed.",
    )
    strict_data: bool = option(
        False,
        "If a check finds a problem with the data, raise an error instead of logging a warning. This applies to data "
        "preparation and to all later checks of the data.",
    )
    max_hours: PositiveFloat | None = option(
        None,
        "Maximum training time in hours, above 0. After this time, the run finishes the current step, saves a checkpoint and "
        "stops. Set it below the time limit of a cluster job. None: no limit.",
    )
    push_run_record: bool = option(
        False,
        "With push_to_hub, also upload the run record. The run record contains the command line, and text of dataset rows, "
        "prompts and completions. False: only the model, its tokenizer, the model card and the TensorBoard logs are uploaded.",
    )
    preflight: Literal["error", "warn", "off"] = option(
        "error",
        "What happens if a check finds a problem before or during training. Each problem that a check finds is called a "
        "finding. 'error': a finding of severity 'error' stops the run, and other findings are logged. 'warn': all findings "
        "are logged, and no finding stops the run. 'off': the checks do not run.",
    )
    silence_findings: dict[str, str] | str | None = option(
        None,
        "Checks whose findings are ignored, as a mapping or JSON. Each key is the code or the name of a check, and each value "
        "is your reason for ignoring it, for example {'PT-D013': 'a control group'}. Ignored findings are neither logged nor "
        "raised as errors. They are still written to the run record.",
    )
    bad_rows: Literal["error", "drop"] = option(
        "error",
        "What to do with dataset rows that cannot be used for training, for example rows without an answer. 'error': raise an "
        "error. 'drop': remove these rows from the dataset. 'drop' also removes rows from which the model cannot learn, for "
        "example pairs of two equal answers. Removed rows are listed in bad_rows.jsonl in the output folder.",
    )
    bad_rows_max: Share = option(
        0.05,
        "With bad_rows='drop': maximum fraction of rows that may be dropped, from 0 to 1. If more rows would be dropped, an "
        "error is raised, because so many bad rows usually mean that the wrong column is used.",
    )
    max_row_tokens: PositiveInt | None = option(
        None,
        "Maximum number of tokens of a batch row into which several sequences are packed. A larger value uses a GPU better "
        "and needs more memory. None: the default of the attention backend. On a CPU, it is 2,048 for segment attention and "
        "256 for a dense mask. On a GPU, it is 2,048 for a dense mask. For segment attention on a GPU, it is 30,000 for a "
        "model of 0.5B parameters, 10,000 for 1.5B, and 2,048 for 7B or more. On both devices, it is 16,384 for FlexAttention "
        "and 4,096 for models that need padding.",
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise an error for keyword arguments that are neither options nor old names of options."""
        check_arguments(cls, kwargs)
        config = super().__new__(cls)
        names = (item.name for item in fields(cls) if item.init)
        names_given = [*(name for name, _ in zip(names, args, strict=False)), *kwargs]
        config._given = tuple(name for name in names_given if name != "output_dir")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict for trackers and the run record. Secrets, such as tokens, are hidden."""
        return hide_secrets(super().to_dict())

    def check_fields(self) -> None:
        """Validate the type and the range of every field; see `posttrain.fields.check_fields`."""
        check_fields(self, beside=transformers.TrainingArguments)

    def __post_init__(self) -> None:
        self.check_fields()
        for name in self._VALID_DICT_FIELDS:
            if name not in transformers.TrainingArguments._VALID_DICT_FIELDS:
                setattr(self, name, read_mapping(name, getattr(self, name)))
        check_template_arguments(self.chat_template_kwargs or {})
        check_parallelism(self)
        config = self.accelerator_config
        for name in read_mapping("accelerator_config", config) if str(config).startswith("{") else ():
            check_choice("accelerator_config", name, vars(AcceleratorConfig()))
        self._resolve_checkpointing()
        self.pad_to_multiple_of = row_multiple(self.pad_to_multiple_of)
        self._resolve_bf16()
        self._resolve_backend()
        self._resolve_batch_size()
        self._check_numbers()
        if isinstance(self.fsdp, str) and self.fsdp.lower() in ("true", "false"):  # From a command line or a YAML file.
            self.fsdp = self.fsdp.lower() == "true"
        super().__post_init__()
        check_schedule(self)
        if self.load_best_model_at_end and self.eval_strategy == "no":
            raise ConfigError(
                "load_best_model_at_end=True needs evaluations to find the best model, but eval_strategy='no' disables them. "
                "Fix: set eval_strategy to 'steps' or 'epoch', or remove load_best_model_at_end."
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type != "cpu"
        if self.model_init_kwargs is not None:
            self.model_init_kwargs = with_dtype(self.model_init_kwargs)  # type: ignore[arg-type]
            check_distributed(self.model_init_kwargs.get("distributed_config"))
            if "num_labels" in self.model_init_kwargs:
                raise ConfigError("model_init_kwargs sets num_labels, which the trainer sets itself. Fix: remove it.")
        silenced_codes(self.silence_findings)  # type: ignore[arg-type]
        if self.use_liger_kernel:
            # Use Liger's layers, but not its fused loss. Liger's loss would replace the forward pass that computes logits in
            # chunks.
            without = {"cross_entropy": False, "fused_linear_cross_entropy": False}
            self.liger_kernel_config = {**(self.liger_kernel_config or {}), **without}
        # Log a loss of NaN or infinity unchanged. By default, transformers would replace it with the average of earlier
        # finite losses.
        self.logging_nan_inf_filter = False
        self._made = True

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. Raise an error if the attribute is unknown and its name resembles an option.

        A misspelled option would have no effect.

        transformers also sets attributes that are not options. These attributes are accepted, because their names do not
        resemble any option.

        Raises:
            ConfigError: The name is a misspelled option or a removed option. The message contains the correct name or the
                replacement.
        """
        if "_made" in vars(self) and not (name in vars(self) or name.startswith("_") or hasattr(type(self), name)):
            meant = did_you_mean(name, (item.name for item in fields(self)), cutoff=MISSPELT)
            fix = importlib.import_module("posttrain.compat.old_names").fix_of(type(self), name)
            if meant or fix:
                raise ConfigError(
                    f"{type(self).__name__} has no option {name}{meant}, so {name}={value!r} would have no effect."
                    + (f" Fix: {fix}." if fix else "")
                )
        super().__setattr__(name, value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Use a short repr. The default repr of a dataclass would list all of the about 200 fields.
        cls.__repr__ = cls.__str__ = PostTrainingConfig.__repr__

    def __repr__(self) -> str:
        """Return the constructor call with all arguments that differ from their defaults. Secrets are omitted."""
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
                raise ConfigError(f"per_device_train_batch_size={size!r} must be an integer or {AUTO!r}.")
            self.per_device_train_batch_size = int(size)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if isinstance(value := getattr(self, name), int) and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")

    @property
    def least_batch_size(self) -> int:
        """Minimum value of ``per_device_train_batch_size`` for this method."""
        return 1

    @property
    def passes_per_step(self) -> int:
        """Number of micro-batches per optimizer step."""
        return int(self.gradient_accumulation_steps)

    def take_batch_size(self, size: int) -> None:
        """Set the batch size that ``auto`` selected. The effective batch size does not change.

        Later calls of train() use this size and do not search for a batch size again.
        """
        old = int(self.per_device_train_batch_size)
        self.gradient_accumulation_steps = old * int(self.gradient_accumulation_steps) // size
        if self.steps_per_generation is not None:
            self.steps_per_generation = old * int(self.steps_per_generation) // size
        self.per_device_train_batch_size, self.auto_batch_size = size, False

    @property
    def world_size(self) -> int:
        """Number of processes. While a command parses its arguments, it is the number of processes that the command will
        launch.
        """
        return LAUNCHED.get() or super().world_size

    def _check_numbers(self) -> None:
        """Raise an error for negative or non-finite numbers in fields that transformers does not validate.

        Without this check, torch would raise an error later, or the run would have an unintended number of steps.
        """
        numbers = ("learning_rate", "weight_decay", "num_train_epochs", "warmup_steps", "neftune_noise_alpha")
        for name in (*numbers, "label_smoothing_factor", "adam_epsilon", "adam_beta1", "adam_beta2"):
            value: object = vars(self)[name]
            if name == "neftune_noise_alpha" and value is None:
                continue
            limit = 1 if name.startswith("adam_beta") else math.inf
            if not isinstance(value, int | float) or not 0 <= value < limit:
                below = " and below 1" if limit == 1 else ""
                raise ConfigError(f"{name}={value!r} must be a finite number of at least 0{below}.")
        if self.dataloader_prefetch_factor == 0:
            raise ConfigError("dataloader_prefetch_factor=0 must be at least 1. Fix: remove it for the default of 2.")
        if self.learning_rate == 0:
            logger.warning("learning_rate=0: no step changes a weight.")
        if self.label_smoothing_factor > 1:
            raise ConfigError(f"label_smoothing_factor={self.label_smoothing_factor} must be from 0 to 1.")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs == 0):
            raise ConfigError(
                f"max_steps={self.max_steps} and num_train_epochs={self.num_train_epochs} give a run without steps. Fix: set "
                "max_steps to at least 1, or set max_steps=-1 and num_train_epochs above 0."
            )

    def _resolve_checkpointing(self) -> None:
        new_name = hasattr(self, "activation_checkpointing")
        spelled = [self.gradient_checkpointing, self.activation_checkpointing if new_name else None]
        choices = [value for value in spelled if value is not None]
        if len(choices) == 2 and choices[0] != choices[1]:
            raise ConfigError(
                f"gradient_checkpointing={spelled[0]} and activation_checkpointing={spelled[1]} are two names of the same "
                "option and have different values. Fix: set only one of them."
            )
        value = bool(choices[0]) if choices else True
        for name in read_mapping("gradient_checkpointing_kwargs", self.gradient_checkpointing_kwargs) or ():
            check_choice("gradient_checkpointing_kwargs", name, RECOMPUTING)
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
                logger.info("bf16=None selects float32, because this device is not faster in bfloat16.")
        if self.bf16 and not torch.cuda.is_available() and not torch.backends.mps.is_available():
            # With bf16 on a CPU, transformers requires use_cpu=True.
            self.use_cpu = True
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if vars(self)[name]:
                setattr(self, name, False)
                text = "%s=True is ignored, because evaluation uses the precision of training. Fix: remove it, or set %s=True."
                logger.warning(text, name, name[:4])

    def _resolve_backend(self) -> None:
        """Raise an error if ``ddp_backend`` is not available. In a single process, set it to None, because accelerate would
        otherwise use a process group that does not exist.
        """
        if self.ddp_backend is None or not torch.distributed.is_available():
            return
        names = [n for n in BACKENDS if torch.distributed.is_backend_available(n)]
        for part in str(self.ddp_backend).split(","):  # There may be one backend per device: cpu:gloo,cuda:nccl.
            check_choice("ddp_backend", part.split(":")[-1], names)
        if not torch.distributed.is_initialized() and not any(name in os.environ for name in SEVERAL):
            self.ddp_backend = None


# Learning-rate schedules that need additional arguments, or that do not accept every learning rate.
DEMANDING = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial", "warmup_stable_decay")
# Parameters of schedule functions that the trainer passes. Users cannot set them.
OF_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
STEPS_TRIED = 100


def check_schedule(args: PostTrainingConfig) -> None:
    """Check the arguments of the learning-rate schedule by creating the schedule for a dummy optimizer and 100 steps.

    Without this check, the error would occur after the model is loaded, and its message would not contain the name of the
    option.

    Raises:
        ConfigError: The schedule does not accept an argument in ``lr_scheduler_kwargs``, or requires an argument that is
            missing.
    """
    kind, kwargs = transformers.SchedulerType(args.lr_scheduler_type), args.lr_scheduler_kwargs
    if not kwargs and kind.value not in DEMANDING:
        return
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler

    # Create two parameter groups as a trainer does: weights with weight decay and weights without weight decay.
    groups = [{"params": [torch.zeros(1)]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=args.learning_rate)
    options: Any = {"num_warmup_steps": 1, "num_training_steps": STEPS_TRIED, "scheduler_specific_kwargs": kwargs}
    try:
        for rate in getattr(get_scheduler(kind, optimizer, **options), "lr_lambdas", ()):
            _ = [rate(step) for step in range(STEPS_TRIED)]
    except (TypeError, ValueError, ArithmeticError) as error:
        function: Any = TYPE_TO_SCHEDULER_FUNCTION[kind]
        if "kwargs" in inspect.signature(function).parameters:
            function = type(function(optimizer))  # This class has the arguments of the function.
        names = [name for name in inspect.signature(function).parameters if name not in OF_TRAINER]
        raise ConfigError(
            f"lr_scheduler_type={kind.value!r} failed with lr_scheduler_kwargs={kwargs}: {str(error).rstrip('.!')}. Fix: use "
            f"only arguments of {function.__module__}.{function.__name__}: {names}."
        ) from error


def row_multiple(multiple: object) -> int | None:
    """Return ``pad_to_multiple_of`` as a number. Return None for "auto", which means that the attention backend selects the
    multiple.
    """
    if multiple in (None, "auto", "none", "null"):
        return None
    if not str(multiple).isdigit() or int(multiple) < 1:
        raise ConfigError(
            f"pad_to_multiple_of={multiple!r} must be a number of at least 1, or 'auto' or None for the default of the "
            "attention backend."
        )
    return int(multiple)


def warn_keep_end(truncation_mode: str) -> None:
    """Log a warning if ``truncation_mode`` is ``keep_end``. This mode is deprecated, because the model is then trained on
    texts without their beginning.
    """
    if truncation_mode == "keep_end":
        warnings.warn(
            "truncation_mode='keep_end' is deprecated, because it removes the beginning of long rows. The remaining text "
            "begins in the middle, whereas prompts never do. Fix: increase max_length, or shorten the rows of the dataset.",
            FutureWarning,
            stacklevel=5,
        )


@dataclass
class PictureConfig:
    """Options for training on images. Setting one of these options is an error if the model supports only text."""

    freeze_vision: Annotated[str, OneOf(("auto", "tower", True, False))] = option(
        "auto",
        "Which parameters of the vision tower and of the projector stay frozen. True: the tower and the projector are frozen. "
        "'tower': only the tower is frozen. False: both are trained. 'auto': both are trained if rows have images, and both "
        "are frozen if rows contain only text. A new LoRA adapter is added only to the text model, unless this field is False "
        "or the adapter's target modules are in the tower.",
    )
    image_fit: Literal["error", "drop", "resize"] = option(
        "error",
        "What to do with a row if one of its images is unreadable or too large, if it has too many images, or if its images "
        "make it longer than max_length. 'error': raise an error for any unreadable or too large image, and if more than 0.5 "
        "% of the rows are too long or have too many images. 'drop': remove these rows and log their number. 'resize': same "
        "as 'error', but first reduce the size of images that are too large, and of images in rows longer than max_length.",
    )
    image_max_tokens: PositiveInt | None = option(
        None,
        "Maximum number of placeholder tokens per image, at least 1. None: no limit. Set a lower limit if images use too many "
        "of the max_length tokens.",
    )
    image_max_pixels: PositiveInt | None = option(
        None,
        "Maximum number of pixels of an image in the dataset, before the processor resizes it, at least 1. None: no "
        "limit.",
    )
    max_images_per_row: NonNegativeInt | None = option(
        None,
        "Maximum number of images per row. None: no limit. With vllm_mode='colocate', vLLM reserves memory for this number of "
        "images.",
    )
    image_background: Literal["white", "black"] = option(
        "white",
        "Background color of transparent images, 'white' or 'black'. Models read RGB without transparency, so "
        "transparent pixels need a color.",
    )
    check_image_use: bool = option(
        False,
        "For online methods: check whether the model uses the images. Each evaluation samples a second time, with every row's "
        "images replaced by the images of another row, and logs the warning PT-G017 if the reward does not change. This "
        "doubles the sampling time of evaluations.",
    )
    image_cache_gb: NonNegativeFloat = option(
        1.0,
        "Size in GB of a cache in host memory for the image features of a frozen vision tower. The cache avoids computing the "
        "features of an image in every epoch. The least recently used features are removed first. 0 disables the cache.",
    )

    def __post_init__(self) -> None:
        choices = {"True": True, "False": False}
        self.freeze_vision = choices.get(str(self.freeze_vision).capitalize(), self.freeze_vision)  # type: ignore[assignment]
        lengths = (self.image_max_tokens, self.image_max_pixels, self.max_length)
        if self.image_fit == "resize" and lengths == (None, None, None):
            raise ConfigError(
                "image_fit='resize' needs a maximum image size, but none is set. Fix: set image_max_tokens (for example "
                "image_max_tokens=256), image_max_pixels or max_length."
            )
        super().__post_init__()  # Call __post_init__ of the next class in the inheritance order.
