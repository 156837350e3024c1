"""The config that all trainers share, and what is made of it before a trainer trains: arguments checked, a model prepared."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import datasets
import torch
import transformers
from torch import nn

from posttrain.checks.registry import silenced_codes
from posttrain.data.forest import Layout
from posttrain.data.samplers import with_lengths
from posttrain.errors import ArgumentTypeError, ConfigError, DataError, ModelError
from posttrain.loop.checks import Checks, log_codes
from posttrain.loop.token_split import check_parallelism
from posttrain.models.attention import padded_layout, probe_head, probe_layout
from posttrain.models.forward import learns_prompts
from posttrain.models.heads import causal_lm, install_token_head, train_new_tokens, train_score_head
from posttrain.models.load import check_model_source, with_dtype, wrap_with_peft
from posttrain.models.memory import check_offloading
from posttrain.models.parallel import bf16_is_faster
from posttrain.models.reference import disable_dropout_in_model
from posttrain.models.token_split import alone
from posttrain.report.record import check_writable
from posttrain.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    check_fields,
    option,
    read_mapping,
)

if TYPE_CHECKING:
    from posttrain.loop.trainer import PostTrainer

logger = logging.getLogger(__name__)

T = TypeVar("T")
AUTO = "auto"
PLANNED = 8  # What 'auto' counts the effective batch from: the default of per_device_train_batch_size.


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


@dataclass
class PostTrainingConfig(transformers.TrainingArguments):
    """Arguments of every trainer: those of `transformers.TrainingArguments` with defaults made for post-training.

    Activations are recomputed in backward unless ``gradient_checkpointing=False`` (or ``activation_checkpointing``, its
    newer name; either spelling works, two that contradict each other are refused).
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *transformers.TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "silence_findings"
    ]  # fmt: skip
    # Options that an older TRL had and this config has not: what to do instead.
    removed: ClassVar[dict[str, str]] = {
        "max_seq_length": "set max_length",
        "max_prompt_length": "filter the data, or set max_length",
    }

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

    def __new__(cls, *args: Any, **kwargs: Any) -> PostTrainingConfig:
        """Refuse what was removed by its name, before the constructor calls it unknown."""
        for name in set(kwargs) & set(cls.removed):
            if name not in cls.__dataclass_fields__:
                raise ConfigError(f"{cls.__name__} has no option {name}={kwargs[name]!r}. Fix: {cls.removed[name]}.")
        return super().__new__(cls)

    def check_fields(self) -> None:
        """Refuse a value that is not of its field's type, or out of its range; see `posttrain.types.check_fields`."""
        check_fields(self, beside=transformers.TrainingArguments)

    def __post_init__(self) -> None:
        self.check_fields()
        for name in self._VALID_DICT_FIELDS:
            if name not in transformers.TrainingArguments._VALID_DICT_FIELDS:
                setattr(self, name, read_mapping(name, getattr(self, name)))
        check_parallelism(self)
        self._resolve_checkpointing()
        if hasattr(self, "pad_to_multiple_of"):
            self.pad_to_multiple_of = row_multiple(self.pad_to_multiple_of)
        self._resolve_bf16()
        self._resolve_batch_size()
        super().__post_init__()
        if self.model_init_kwargs is not None:
            self.model_init_kwargs = with_dtype(self.model_init_kwargs)  # type: ignore[arg-type]
        if getattr(self, "pad_token", None) is not None:
            warnings.warn("pad_token is deprecated: set it on the tokenizer.", FutureWarning, stacklevel=4)
        self._check_preflight()
        # One non-finite loss must not be replaced by an average of good ones: the log would show a healthy run.
        self.logging_nan_inf_filter = False

    def _resolve_batch_size(self) -> None:
        given = self.per_device_train_batch_size
        self.auto_batch_size = given == AUTO
        if self.auto_batch_size:
            self.per_device_train_batch_size = PLANNED
        elif isinstance(given, str):
            if not given.strip().isdigit():
                raise ConfigError(f"per_device_train_batch_size={given!r} must be a number or {AUTO!r}.")
            self.per_device_train_batch_size = int(given)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if isinstance(value := getattr(self, name), int) and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")

    def _check_preflight(self) -> None:
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


def row_multiple(given: Any) -> int | None:
    """``pad_to_multiple_of`` as a number; "auto" is None: what the layout of rows wants."""
    if given in (None, "auto", "none", "null"):
        return None
    if not str(given).isdigit() or int(given) < 1:
        raise ConfigError(
            f"pad_to_multiple_of={given!r} must be at least 1, or 'auto' or None for what the layout wants."
        )
    return int(given)


def warn_keep_end(truncation_mode: str) -> None:
    """``keep_end`` trains on texts without their beginning, which no generation looks like; it will go."""
    if truncation_mode == "keep_end":
        warnings.warn(
            "truncation_mode='keep_end' is deprecated: rows that lost their beginning look like no prompt. Raise max_length, or "
            "shorten rows yourself.",
            FutureWarning,
            stacklevel=4,
        )


def takes(parameters: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a constructor be called with arguments by position, in TRL's order; further ones are keywords.

    ``args`` of `transformers.TrainingArguments` becomes the trainer's own config before the constructor sees it.

    Args:
        parameters: Names of all that have a position, the model first, with commas between.
    """
    names = parameters.split(", ")

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(init).parameters
        standard = {"optimizers": (None, None)}
        ordered = [
            own[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
            if name in own
            else inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=standard.get(name))
            for name in names
        ]
        further = [
            parameter if parameter.kind is parameter.VAR_KEYWORD else parameter.replace(kind=parameter.KEYWORD_ONLY)
            for name, parameter in own.items()
            if name not in ("self", *names)
        ]
        signature = inspect.Signature([own["self"], *ordered, *further])

        @functools.wraps(init)
        def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            if "args" in given:
                given["args"] = as_config(type(self).config_class, given["args"])
            init(**given)

        vars(constructor)["__signature__"] = signature
        return constructor

    return decorate


def named_method(cls: Any, config: type, arguments: str) -> None:
    """Give a trainer's class its config and its names, which are those of the class where its body says no others.

    Args:
        cls: The class.
        config: The class of its arguments.
        arguments: Of its constructor, those that have a position, see `takes`; empty: as the parent's.
    """
    cls.config_class, cls._suffix = config, cls.__name__.removesuffix("Trainer")
    cls._name = vars(cls).get("_name", cls._suffix)
    cls._tag_names = vars(cls).get("_tag_names", ["posttrain", cls._name.lower().replace(" ", "-")])
    if arguments:
        cls.__init__ = takes(arguments)(cls.__init__)


def as_config(config: type, args: Any) -> Any:
    """The config of a trainer: what was given; made of the fields of a plain `transformers.TrainingArguments`, or of a folder.

    Raises:
        ArgumentTypeError: It is something else, or the config of another trainer.
    """
    if args is None or isinstance(args, config):
        return args
    if isinstance(args, str):
        return config(args)
    if not isinstance(args, transformers.TrainingArguments) or isinstance(args, PostTrainingConfig):
        raise ArgumentTypeError(f"args must be a {config.__name__}, not {type(args).__name__}.")
    fields = args.to_dict()
    fields.pop("push_to_hub_token", None)
    return config(**fields | {"hub_token": args.hub_token})  # to_dict() hides the token.


class Alias:
    """An attribute of a trainer by TRL's name: reading and setting it reads and sets what stands at a path.

    Args:
        path: From the trainer, such as ``args.beta``; several, joined by " or ", where None stands for the next one.
        fixed: Setting it is an error, as a trainer that is made would not read it again.
    """

    def __init__(self, path: str, *, fixed: bool = False) -> None:
        self.paths, self.fixed = path.split(" or "), fixed

    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        found = (self._at(trainer, path.split(".")) for path in self.paths)
        return next((value for value in found if value is not None), None)

    def __set__(self, trainer: Any, value: Any) -> None:
        if self.fixed:
            raise AttributeError(
                f"{type(trainer).__name__} has read {self.paths[0]} already. Fix: set it before the trainer is made."
            )
        *holder, name = self.paths[0].split(".")
        setattr(self._at(trainer, holder), name, value)

    def _at(self, trainer: Any, names: list[str]) -> Any:
        return functools.reduce(lambda at, name: None if at is None else getattr(at, name), names, trainer)


def attributes(*fields: str, fixed: bool = False, **paths: str) -> Callable[[type[T]], type[T]]:
    """A class decorator that adds an `Alias` for fields of the config by their names, and for others by their paths."""

    def decorate(cls: type[T]) -> type[T]:
        for name, path in ({name: f"args.{name}" for name in fields} | paths).items():
            setattr(cls, name, Alias(path, fixed=fixed))
        return cls

    return decorate


def check_arguments(trainer: type[PostTrainer], model: Any, args: Any, train_dataset: Any, collator: Any) -> None:
    """Refuse what cannot be trained before anything is loaded.

    Args:
        trainer: The trainer's class: its ``config_class``, ``takes_collator`` and ``generative``.
        model: As it was given.
        args: As it was given.
        train_dataset: As it was given.
        collator: The user's ``data_collator``.

    Raises:
        ArgumentTypeError: ``train_dataset`` is of another type.
        ConfigError: A collator that has no place, a stream without ``max_steps``.
        DataError: There is no training set.
    """
    name: str = trainer.__name__
    if collator is not None and not trainer.takes_collator:
        raise ConfigError(
            f"{name} makes its own batches of tokenised rows, and data_collator={collator!r:.80} "
            "has no place there. Leave it out; pad_to_multiple_of and max_row_tokens shape batches."
        )
    if train_dataset is None:
        raise DataError(f"{name} needs train_dataset, and it is None.")
    if not isinstance(train_dataset, datasets.Dataset | datasets.IterableDataset):
        hint = " Pass one split of it: dataset['train']." if isinstance(train_dataset, dict) else ""
        raise ArgumentTypeError(f"train_dataset must be a datasets.Dataset, not {type(train_dataset).__name__}.{hint}")
    if isinstance(train_dataset, datasets.IterableDataset):
        if args.max_steps <= 0:
            raise ConfigError("a streaming train_dataset has no length: set max_steps (it is not set).")
        if args.accelerator_config.dispatch_batches:
            logger.warning("dispatch_batches=True with a streaming train_dataset is set to False: ranks read alone.")
        args.accelerator_config.dispatch_batches = False
    check_offloading(args)
    check_writable(args.output_dir)
    check_model_source(model, generative=trainer.generative)


def warn_of_unused(given: Mapping[str, Any]) -> None:
    """Warn of options for loading where the model was given as an object."""
    for name in [name for name, value in given.items() if value]:
        logger.warning("%s is ignored: the model was given as an object, already loaded.", name)


def loading_options(args: Any, init: dict[str, Any], quantization_config: Any) -> dict[str, Any]:
    """Keywords for ``from_pretrained``.

    Raises:
        ConfigError: ``quantization_config`` is given twice.
    """
    if quantization_config is not None and init.get("quantization_config") is not None:
        raise ConfigError("quantization_config is given both as an argument and in model_init_kwargs. Give it once.")
    if quantization_config is not None:
        init["quantization_config"] = quantization_config
    init.setdefault("trust_remote_code", args.trust_remote_code)
    return init


def prepared_model(model: Any, args: Any, peft_config: Any, *, added_tokens: Sequence[int], generative: bool) -> Any:
    """The model with its adapter, without dropout where that is asked for, and with a head for chosen tokens.

    Args:
        model: As it was loaded.
        args: The trainer's config.
        peft_config: Of a new adapter, or None.
        added_tokens: New rows of the vocabulary, which are trained beside an adapter.
        generative: Whether it has a language-model head; else its score head is trained.
    """
    if args.disable_dropout:
        disable_dropout_in_model(model)
    peft_config = train_new_tokens(peft_config, model, list(added_tokens))
    if not generative:
        peft_config = train_score_head(peft_config, model)
    checkpointing = bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)
    model = wrap_with_peft(model, peft_config, activation_checkpointing=checkpointing)
    install_token_head(model)
    refuse_float16(model, args)
    return model


def refuse_float16(model: nn.Module, args: Any) -> None:
    """Refuse to train weights in float16, whose gradients leave its range; ``preflight="warn"`` goes on with a warning.

    Raises:
        ConfigError: A trained parameter is stored in float16, and DeepSpeed does not keep a copy in float32.
    """
    count = sum(p.numel() for p in model.parameters() if p.requires_grad and p.dtype == torch.float16)
    if not count or args.deepspeed:
        return
    text = (
        f"{count} trained parameters are stored in float16: gradients below 6e-8 become 0 and those above 65504 infinite, and "
        "no scaler works on them. Fix: load the model with dtype='float32' and set fp16=True or bf16=True, or train an adapter."
    )
    if args.preflight == "error":
        raise ConfigError(text)
    logger.warning("%s", text)


def choose_layout(model: Any, args: Any, *, padded: bool) -> Layout:
    """How rows are laid out for this model: trees where a probe shows that they are exact, else one sequence a row.

    Args:
        model: Ready to run.
        args: ``max_row_tokens``, ``pad_to_multiple_of``, ``bf16``, ``fp16``.
        padded: Whether something wants one sequence a row; virtual tokens do in any case.
    """
    autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    with alone():
        probe_head(model)
        layout = padded_layout(model) if padded or learns_prompts(model) else probe_layout(model, autocast)
    if args.max_row_tokens is not None and layout.row_tokens > 1:
        layout = replace(layout, row_tokens=args.max_row_tokens)
    multiple = getattr(args, "pad_to_multiple_of", None)
    return replace(layout, pad_to_multiple_of=multiple) if multiple else layout


def joint_layout(layout: Layout, other: Any, args: Any) -> Layout:
    """How rows are laid out that another model (a reference, a critic) reads in the same passes: as the more careful needs it.

    Args:
        layout: Of the policy.
        other: Ready to run.
        args: As in `choose_layout`.

    Raises:
        ModelError: Rotary frequencies of the two change at different lengths.
    """
    theirs = choose_layout(other, args, padded=False)
    switches, ends = (
        {length for one in (layout, theirs) if (length := getattr(one, name)) is not None}
        for name in ("rope_switch", "rope_end")
    )
    if len(switches) > 1:
        raise ModelError(
            f"{type(causal_lm(other)).__name__} reads the rows of the policy, and rotary frequencies of the two change at "
            f"different lengths {sorted(switches)} (longrope): no pass is right for both. Fix: two models of one family."
        )
    careful = max(layout, theirs, key=lambda one: (one.kind == "padded", one.dense_mask))
    joins, switch = layout.joins_rows and theirs.joins_rows, min(switches, default=None)
    return replace(careful, joins_rows=joins, rope_switch=switch, rope_end=min(ends, default=None))


def make_checks(trainer: PostTrainer, args: Any) -> Checks:
    """The checks of a run, before its model is there.

    Args:
        trainer: With its ``processing_class``; rewards and environments where the method has them.
        args: The trainer's config.
    """
    checks = Checks(
        args,
        trainer=type(trainer).__name__.removesuffix("Trainer").lower(),
        ignored_codes=trainer.ignored_codes,
        log_codes=log_codes(trainer.check_area, trainer.excluded_codes),
        zero_gradient_is_normal=trainer.zero_gradient_is_normal,
        fills_prompts=getattr(trainer, "environments", None) is not None,
    )
    checks.log_checks.append(trainer.log_checks)
    parts = {"trainer": trainer, "rewards": getattr(trainer, "rewards", None)}
    parts = {**parts, "processor": trainer.vision.processor if trainer.vision.images else None}
    checks.knows(tokenizer=trainer.processing_class, parts=parts)
    return checks


# Methods of transformers' trainer whose overrides are written for dicts of padded tensors.
PADDED_STEPS = (
    "compute_loss",
    "training_step",
    "prediction_step",
    "_prepare_inputs",
    "get_batch_samples",
    "_get_num_items_in_batch",
)


def user_override(trainer: Any, name: str) -> type | None:
    """The class outside this package that defines ``name`` for a trainer; None where the package's own is in force."""
    if name in vars(trainer):
        return type(trainer)
    # Adapters of compat/ stand around a user's class and take nothing away from it.
    classes = [cls for cls in type(trainer).__mro__ if not cls.__module__.startswith("posttrain.compat.")]
    owner = next((cls for cls in classes if name in vars(cls)), None)
    return None if owner is None or owner.__module__.split(".")[0] in ("posttrain", "transformers") else owner


@contextmanager
def with_attributes(holder: Any, given: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a trainer or a config has other attributes."""
    before = {name: getattr(holder, name) for name in given}
    vars(holder).update(given)
    try:
        yield
    finally:
        vars(holder).update(before)


def check_hooks(trainer: Any, compute_loss_func: Any) -> None:
    """Refuse a loss function or an override that would not be called; adapt to methods by TRL's names.

    Raises:
        ConfigError: Names the class and what to override instead.
    """
    if compute_loss_func is not None and not trainer.takes_loss_func:
        raise ConfigError(
            f"compute_loss_func is given, and {type(trainer).__name__} would not call it: its loss compares sequences, and "
            "never holds logits. Fix: override objective(outputs, batch) in a subclass (docs/hooks.md)."
        )
    if type(trainer).__module__.split(".")[0] != "posttrain":
        # The one door to compat/: nothing stands before the calls of a trainer that overrides none of TRL's names.
        importlib.import_module("posttrain.compat.overrides").adapt(trainer)


# Public methods of TRL's trainers that ours lack; compat/ knows what does their job.
PUBLIC_IN_TRL = {
    "build_tokenized_answer",
    "compute_liger_loss",
    "compute_ref_log_probs",
    "concatenated_forward",
    "concatenated_inputs",
    "cpo_loss",
    "generate_from_model",
    "get_batch_logps",
    "get_batch_loss_metrics",
    "get_gamma_weights",
    "get_high_entropy_mask",
    "get_off_policy_mask",
    "odds_ratio_loss",
    "generate_on_policy_outputs",
    "process_vision_row",
    "sample_rollouts",
    "store_metrics",
    "tokenize_row",
}


def absent(trainer: Any, name: str) -> Any:
    """Raise the error for an attribute that a trainer does not have; of a method of TRL's it names the hook.

    Raises:
        AttributeError: Always, but for a property that read what was not there: its own error comes out again.
    """
    found = inspect.getattr_static(type(trainer), name, None)
    if isinstance(found, property | functools.cached_property):
        return found.__get__(trainer, type(trainer))
    if name not in PUBLIC_IN_TRL and (name.startswith("__") or not name.startswith("_")):
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}", name=name)
    raise importlib.import_module("posttrain.compat.overrides").missing(type(trainer), name)


def measured(dataset: Any, args: Any) -> Any:
    """The dataset with the lengths of its rows, where the sampling strategy wants rows of like length."""
    if args.train_sampling_strategy not in ("group_by_length", "batch_rebalance"):
        return dataset
    return with_lengths(dataset, args.length_column_name)
