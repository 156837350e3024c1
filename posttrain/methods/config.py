"""`PostTrainingConfig`: the arguments that all methods share."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import transformers

from posttrain.checks.registry import silenced_codes
from posttrain.errors import ConfigError, did_you_mean
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
MISSPELT = 0.8  # How near a name is to an option's that can be meant by nothing else, of 1; `xla_fsdp_config` is transformers'.


PLANNED = 8  # What 'auto' counts the effective batch from: the default of per_device_train_batch_size.


def check_gathering(config: Any) -> None:
    """Refuse or tell that shards stay apart (``ds3_gather_for_generation=False``): every rollout engine reads whole weights."""
    if config.ds3_gather_for_generation:
        return
    if config.use_vllm:
        raise ConfigError(
            "ds3_gather_for_generation=False with use_vllm=True: vLLM is sent whole weights. Leave it at True."
        )
    logger.warning(
        "ds3_gather_for_generation=False is ignored: rollout_engine=%r reads whole weights, so ZeRO-3's shards are gathered to "
        "generate. A model above one device's memory needs a rollout server: use_vllm=True.", config.rollout_engine,
    )  # fmt: skip


ASKED = "ACCELERATE_USE_PARALLELISM_CONFIG"  # Set by ``accelerate launch`` where its file has a parallelism config.
SIZES = ("sp_size", "cp_size", "tp_size", "dp_replicate_size", "dp_shard_size")


def parallel_sizes(config: Any) -> dict[str, int]:
    """Sizes of the axes that ``parallelism_config`` has, or the variables that ``accelerate launch`` makes of its file."""
    parallelism = config.parallelism_config
    if parallelism is None and os.environ.get(ASKED, "").lower() == "true":
        return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in SIZES}
    return {name: int(getattr(parallelism, name, None) or 1) for name in SIZES}


def check_parallelism(config: Any) -> None:
    """Take ``parallelism_config`` as a dict too, and refuse context and tensor parallelism.

    Raises:
        ConfigError: ``cp_size`` or ``tp_size`` above 1, or a size that does not exist.
    """
    if isinstance(config.parallelism_config, dict | str):
        from accelerate import ParallelismConfig

        axes = read_mapping("parallelism_config", config.parallelism_config) or {}
        unknown = sorted(set(axes) - set(ParallelismConfig.__dataclass_fields__))
        if unknown:
            raise ConfigError(
                f"parallelism_config has {unknown}, which accelerate does not know. Fix: {', '.join(SIZES)}."
            )
        config.parallelism_config = ParallelismConfig(**axes)
    sizes = parallel_sizes(config)
    if max(sizes["cp_size"], sizes["tp_size"]) > 1:
        said = ", ".join(f"{name}={sizes[name]}" for name in ("cp_size", "sp_size", "tp_size"))
        raise ConfigError(
            f"parallelism_config with {said}: ring attention (cp_size) would drop the mask by which sequences share a prompt, "
            "and tensor parallelism (tp_size) is not done here. Fix: for rows longer than a device sp_size (Ulysses: tokens of "
            "a row over processes, heads within attention); for models larger than one FSDP2 or ZeRO-3, with both sizes at 1."
        )


@config
class PostTrainingConfig(transformers.TrainingArguments):
    """Arguments of every trainer: those of `transformers.TrainingArguments` with defaults made for post-training.

    Activations are recomputed in backward unless ``gradient_checkpointing=False`` (or ``activation_checkpointing``, its
    newer name; either spelling works, two that contradict each other are refused).
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *transformers.TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "silence_findings"
    ]  # fmt: skip
    _given: ClassVar[tuple[str, ...]] = ()  # Names of what the constructor got, of each instance.
    # What loop, checks and reports read of every config, as it is for a method without such an option: these are no fields.
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
    dataloader_multiprocessing_context = None  # A field of transformers since 5.15.

    per_device_train_batch_size: int | str = option(
        PLANNED,
        "Rows of a micro-batch on each device. auto: the largest that fits 90 % of the memory at the longest "
        "lengths, found by dry steps; with gradient_accumulation_steps it makes the effective batch that 8 would make.",
    )
    parallelism_config: dict[str, Any] | str | None = option(
        None,
        "Of accelerate, as an object or a mapping. sp_size: processes that share each row by tokens (Ulysses); 1 is off.",
    )
    dry_step: bool | None = option(
        None,
        "Before step 0, try a step at the longest lengths without an update. None: on a GPU yes, on a CPU no (a step "
        "takes long there, and a system out of memory ends the process instead of telling it).",
    )
    memory_limit_gib: PositiveFloat | None = option(
        None, "Most memory of the device to plan with, in GiB; None: what is free."
    )
    logits_chunk_size: PositiveInt | None = option(
        None,
        "Positions whose logits exist at once, in the loss and its backward; None: as many as 24 MiB hold on a "
        "CPU, 64 on an accelerator.",
    )
    logging_steps: float = option(10, "Optimiser steps between two log lines; below 1 a share of all steps.")
    bf16: bool | None = option(
        None, "Autocast to bfloat16. None turns it on where fp16 is off and the device is really faster."
    )
    lr_scheduler_kwargs: dict | str | None = option(None, "Extra arguments of the schedule.")
    model_init_kwargs: dict[str, Any] | str | None = option(
        None, "Keywords for from_pretrained when the model is given as a string."
    )
    trust_remote_code: bool = option(False, "Allow code from the model's repository, for model and tokenizer.")
    router_aux_loss_coef: NonNegativeFloat | None = option(
        None, "Weight of the load-balancing term of mixtures of experts. None: the model's own; 0: none."
    )
    activation_offloading: bool = option(
        False, "Keep activations in the host's memory between forward and backward (CUDA)."
    )
    kept_layers: NonNegativeInt | None = option(
        None,
        "With gradient_checkpointing: last layers that keep their activations instead of computing them again. "
        "None: as many as fit where full logits and their gradient would have been; 0: none.",
    )
    disable_dropout: bool = option(False, "Set every dropout to 0.")
    strict_data: bool = option(False, "Make every warning about the data, while it is prepared and after, an error.")
    max_hours: PositiveFloat | None = option(
        None, "Hours after which the run saves a checkpoint and ends, as a job's time limit asks; None: no limit."
    )
    push_run_record: bool = option(
        False,
        "With push_to_hub, upload the run record too. It holds rows of the data, prompts and completions as text, and the "
        "command line. False: upload the model, its tokenizer, the model card and TensorBoard's logs.",
    )
    preflight: Literal["error", "warn", "off"] = option(
        "error", "Checks: error stops on what cannot be meant and warns of the rest; warn never stops; off: none."
    )
    silence_findings: dict[str, str] | str | None = option(
        None, "Findings that are known to be fine here: a reason by code or name, {'PT-D013': 'a control group'}."
    )
    bad_rows: Literal["error", "drop"] = option(
        "error", "Rows that cannot be trained: error refuses them, drop leaves them out and lists them in a file."
    )
    bad_rows_max: Share = option(0.05, "Share of rows that bad_rows='drop' may leave out before it refuses, in [0, 1].")
    max_row_tokens: PositiveInt | None = option(
        None,
        "Tokens a packed row may hold. None picks 2048 where attention takes segments, 512 with a dense mask on a CPU, 2048 "
        "with one on a GPU, 16384 with FlexAttention. More fills a GPU better; less needs less memory.",
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse keywords that are neither options nor names of older releases that are converted."""
        check_arguments(cls, kwargs)
        config = super().__new__(cls)
        names = (item.name for item in fields(cls) if item.init)
        names_given = [*(name for name, _ in zip(names, args, strict=False)), *kwargs]
        config._given = tuple(name for name in names_given if name != "output_dir")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the fields without secrets: trackers and the run record get them."""
        return hide_secrets(super().to_dict())

    def check_fields(self) -> None:
        """Refuse a value that is not of its field's type, or out of its range; see `posttrain.fields.check_fields`."""
        check_fields(self, beside=transformers.TrainingArguments)

    def __post_init__(self) -> None:
        self.check_fields()
        for name in self._VALID_DICT_FIELDS:
            if name not in transformers.TrainingArguments._VALID_DICT_FIELDS:
                setattr(self, name, read_mapping(name, getattr(self, name)))
        check_parallelism(self)
        self._resolve_checkpointing()
        self.pad_to_multiple_of = row_multiple(self.pad_to_multiple_of)
        self._resolve_bf16()
        self._resolve_batch_size()
        self._check_numbers()
        super().__post_init__()
        if self.load_best_model_at_end and self.eval_strategy == "no":
            raise ConfigError(
                "load_best_model_at_end=True with eval_strategy='no': no evaluation says which model is the best. Fix: set "
                "eval_strategy, or leave load_best_model_at_end out."
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type != "cpu"
        if self.model_init_kwargs is not None:
            self.model_init_kwargs = with_dtype(self.model_init_kwargs)  # type: ignore[arg-type]
            check_distributed(self.model_init_kwargs.get("distributed_config"))
        silenced_codes(self.silence_findings)  # type: ignore[arg-type]
        if self.use_liger_kernel:
            # Its loss would take the place of the forward that reads the output layer in chunks; its layers are taken.
            without = {"cross_entropy": False, "fused_linear_cross_entropy": False}
            self.liger_kernel_config = {**(self.liger_kernel_config or {}), **without}
        # One non-finite loss must not be replaced by an average of good ones: the log would show a healthy run.
        self.logging_nan_inf_filter = False
        self._made = True

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse a name that is nearly an option's: nothing would read it. transformers sets names of its own, far from any.

        Raises:
            ConfigError: Names the nearest option, or what to do instead of one that was removed.
        """
        if "_made" in vars(self) and not (name in vars(self) or name.startswith("_") or hasattr(type(self), name)):
            meant = did_you_mean(name, (item.name for item in fields(self)), cutoff=MISSPELT)
            fix = importlib.import_module("posttrain.compat.old_names").fix_of(type(self), name)
            if meant or fix:
                raise ConfigError(
                    f"{type(self).__name__} has no option {name}{meant}: {name}={value!r} would change nothing."
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
        if own and cls.__doc__:  # What `help` and a notebook's tooltip show.
            cls.__doc__ = "\n".join([cls.__doc__.rstrip(), "", "Args:", *own])
        # A dataclass would write its own, with all of some 200 fields.
        cls.__repr__ = cls.__str__ = PostTrainingConfig.__repr__

    def __repr__(self) -> str:
        """What was given and is no default, as it would be written; secrets stay out."""
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
    def passes_per_step(self) -> int:
        """Micro-batches of an optimiser step."""
        return int(self.gradient_accumulation_steps)

    def take_batch_size(self, size: int) -> None:
        """The batch size that ``auto`` found: the effective batch stays, and a second call of train() looks for none."""
        old = int(self.per_device_train_batch_size)
        self.gradient_accumulation_steps = old * int(self.gradient_accumulation_steps) // size
        if self.steps_per_generation is not None:
            self.steps_per_generation = old * int(self.steps_per_generation) // size
        self.per_device_train_batch_size, self.auto_batch_size = size, False

    def _check_numbers(self) -> None:
        """Numbers of transformers' own, which it does not look at: torch would refuse them later, or other steps be taken."""
        for name in ("learning_rate", "weight_decay", "num_train_epochs", "warmup_steps"):
            value: object = vars(self)[name]
            if not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"{name}={value!r} must be a number of at least 0.")
        if self.max_steps == 0:
            raise ConfigError("max_steps=0: a run takes at least 1 step. Fix: -1 lets num_train_epochs say how many.")

    def _resolve_checkpointing(self) -> None:
        new_name = hasattr(self, "activation_checkpointing")
        spelled = [self.gradient_checkpointing, self.activation_checkpointing if new_name else None]
        choices = [value for value in spelled if value is not None]
        if len(choices) == 2 and choices[0] != choices[1]:
            raise ConfigError(
                f"gradient_checkpointing={spelled[0]} and activation_checkpointing={spelled[1]} are two names of one "
                "switch and contradict each other. Set one of them."
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
            self.use_cpu = True  # transformers allows bf16 on a CPU only when it is asked for by name.


def row_multiple(multiple: object) -> int | None:
    """``pad_to_multiple_of`` as a number; "auto" is None: what the layout of rows wants."""
    if multiple in (None, "auto", "none", "null"):
        return None
    if not str(multiple).isdigit() or int(multiple) < 1:
        raise ConfigError(
            f"pad_to_multiple_of={multiple!r} must be at least 1, or 'auto' or None for what the layout wants."
        )
    return int(multiple)


def warn_keep_end(truncation_mode: str) -> None:
    """``keep_end`` trains on texts without their beginning, which no generation looks like; it will go."""
    if truncation_mode == "keep_end":
        warnings.warn(
            "truncation_mode='keep_end' is deprecated: rows that lost their beginning look like no prompt. Raise max_length, or "
            "shorten rows yourself.",
            FutureWarning,
            stacklevel=5,
        )


@dataclass
class PictureConfig:
    """Options of training on images; a text model refuses them."""

    freeze_vision: Annotated[str, OneOf(("auto", "tower", True, False))] = option(
        "auto",
        "True: tower and projector; tower: the tower alone; False: nothing; auto: nothing, with an adapter both.",
    )
    image_fit: Literal["error", "drop", "resize"] = option(
        "error",
        "Rows whose images do not fit or cannot be read: an error above 0.5 %, or dropped and counted; resize: an "
        "error, but images above their limits, or of rows above max_length, are made smaller.",
    )
    image_max_tokens: PositiveInt | None = option(None, "Placeholders an image may have; None: any number.")
    image_max_pixels: PositiveInt | None = option(
        None, "Pixels an image may have before it is prepared; None: any number."
    )
    max_images_per_row: NonNegativeInt | None = option(None, "Images a row may have; None: any number.")
    image_background: Literal["white", "black"] = option("white", "What shows through transparent pixels.")
    check_image_use: bool = option(
        False, "Online: evaluation also samples with images exchanged between rows, for PT-G017."
    )
    image_cache_gb: NonNegativeFloat = option(1.0, "Host memory for features of a frozen tower, in GB; 0 keeps none.")

    def __post_init__(self) -> None:
        choices = {"True": True, "False": False}
        self.freeze_vision = choices.get(str(self.freeze_vision).capitalize(), self.freeze_vision)  # type: ignore[assignment]
        lengths = (self.image_max_tokens, self.image_max_pixels, self.max_length)
        if self.image_fit == "resize" and lengths == (None, None, None):
            raise ConfigError("image_fit='resize' needs a size. Fix: image_max_tokens=256, say.")
        super().__post_init__()  # Of the config that it is a part of.
