"""What a trainer is made of before it trains: arguments that were checked, a prepared model, a layout, checks."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import datasets
import torch
import transformers
from torch import Tensor, nn

from posttrain.data.forest import Layout
from posttrain.data.samplers import with_lengths
from posttrain.errors import ArgumentTypeError, ConfigError, DataError, ModelError
from posttrain.loop.checks import Checks, log_codes
from posttrain.methods.base import Traits
from posttrain.methods.config import PostTrainingConfig
from posttrain.models import parallel
from posttrain.models.attention import padded_layout
from posttrain.models.forward import learns_prompts
from posttrain.models.heads import causal_lm, install_token_head, train_new_tokens, train_score_head
from posttrain.models.load import check_model_source, wrap_with_peft
from posttrain.models.memory import check_offloading, recomputes
from posttrain.models.probe import probe_head, probe_layout
from posttrain.models.reference import disable_dropout_in_model
from posttrain.models.token_split import alone
from posttrain.report.lock import check_writable
from posttrain.types import ALONE, Ranks

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig

    from posttrain.loop.run import Run
    from posttrain.rewards.runner import RewardRunner
    from posttrain.types import AnyDataset

logger = logging.getLogger(__name__)

T = TypeVar("T")


def as_config(config: type, args: PostTrainingConfig | str | None) -> Any:
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


def check_arguments(
    traits: Traits,
    name: str,
    model: str | nn.Module,
    args: PostTrainingConfig,
    train_dataset: AnyDataset,
    collator: Any,
) -> None:
    """Refuse what cannot be trained before anything is loaded.

    Args:
        traits: Of the method.
        name: Of the trainer's class.
        model: As it was given.
        args: As it was given.
        train_dataset: As it was given.
        collator: The user's ``data_collator``.

    Raises:
        ArgumentTypeError: ``train_dataset`` is of another type.
        ConfigError: A collator or a smoothing that has no place, a stream without ``max_steps``.
        DataError: There is no training set.
    """
    if collator is not None and not traits.takes_collator:
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
    if args.label_smoothing_factor and not traits.takes_loss_func:
        raise ConfigError(
            f"label_smoothing_factor={args.label_smoothing_factor} smooths a loss of label tokens, which {name} has not. Leave "
            "it out."
        )
    if not args.average_tokens_across_devices and args.world_size > 1:
        logger.warning(
            "average_tokens_across_devices=False is not read: a loss is a mean over the tokens of all processes, however they "
            "are spread over them."
        )
    check_offloading(args)
    check_writable(args.output_dir)
    check_model_source(model, generative=traits.generative)


def warn_of_unused(options: Mapping[str, Any]) -> None:
    """Warn of options for loading where the model was given as an object."""
    for name in [name for name, value in options.items() if value]:
        logger.warning("%s is ignored: the model was given as an object, already loaded.", name)


def loading_options(args: PostTrainingConfig, init: dict[str, Any], quantization_config: Any) -> dict[str, Any]:
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


def prepared_model(
    model: nn.Module,
    args: PostTrainingConfig,
    peft_config: PeftConfig | None,
    *,
    added_tokens: Sequence[int],
    generative: bool,
) -> Any:
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
    model = wrap_with_peft(model, peft_config, activation_checkpointing=recomputes(args))
    install_token_head(model)
    refuse_float16(model, args)
    return model


def refuse_float16(model: nn.Module, args: PostTrainingConfig) -> None:
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


def choose_layout(model: nn.Module, args: PostTrainingConfig, *, padded: bool) -> Layout:
    """How rows are laid out for this model: trees where a probe shows that they are exact, else one sequence a row.

    Args:
        model: Ready to run.
        args: ``max_row_tokens``, ``pad_to_multiple_of``, ``bf16``, ``fp16``, ``device``.
        padded: Whether something wants one sequence a row; virtual tokens do in any case.
    """
    autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    with alone():
        probe_head(model)
        layout = padded_layout(model) if padded or learns_prompts(model) else probe_layout(model, autocast, args.device)
    if args.max_row_tokens is not None and layout.row_tokens > 1:
        layout = replace(layout, row_tokens=args.max_row_tokens)
    return replace(layout, pad_to_multiple_of=args.pad_to_multiple_of) if args.pad_to_multiple_of else layout


def joint_layout(layout: Layout, other: Any, args: PostTrainingConfig) -> Layout:
    """How rows are laid out that another model (a reference, a critic) reads in the same passes: as the more careful needs it.

    Args:
        layout: Of the policy.
        other: Ready to run.
        args: As in `choose_layout`.

    Raises:
        ModelError: Rotary frequencies of the two change at different lengths.
    """
    theirs = choose_layout(other, args, padded=False)
    switches, ends = {layout.rope_switch, theirs.rope_switch} - {None}, {layout.rope_end, theirs.rope_end} - {None}
    if len(switches) > 1:
        raise ModelError(
            f"{type(causal_lm(other)).__name__} reads the rows of the policy, and rotary frequencies of the two change at "
            f"different lengths {sorted(switches)} (longrope): no pass is right for both. Fix: two models of one family."
        )
    careful = max(layout, theirs, key=lambda one: (one.kind == "padded", one.dense_mask))
    joins, switch = layout.joins_rows and theirs.joins_rows, min(switches, default=None)
    return replace(careful, joins_rows=joins, rope_switch=switch, rope_end=min(ends, default=None))


def make_checks(run: Run, rewards: RewardRunner | None = None, environments: Any = None) -> Checks:
    """The checks of a run, before its model is there.

    Args:
        run: With its method, pictures and tokenizer.
        rewards: Of methods that have them.
        environments: That write prompts; None: the dataset does.
    """
    traits, vision = run.method.traits, run.vision
    checks = Checks(
        run.args,
        command=run.name.removesuffix("Trainer").lower(),
        ignored_codes=traits.ignored_codes,
        log_area=traits.log_area,
        log_codes=log_codes(traits.log_area, traits.other_moments),
        zero_gradient_is_normal=traits.still_steps,
        fills_prompts=environments is not None,
    )
    processor = vision.processor if vision.images else None
    parts = {"run": run, "method": run.method, "vision": vision, "rewards": rewards, "processor": processor}
    checks.knows(tokenizer=run.tokenizer, parts=parts)
    return checks


def watchers(checks: Checks, accelerator: Accelerator) -> dict[str, list[Callable[..., bool | None]]]:
    """Return `Progress.watchers`."""
    sharded = parallel.is_prepared_late(accelerator)  # A parameter's gradient is spread over ranks.
    on_step = [checks.first_batch, checks.empty_steps, checks.economy]
    on_log = [checks.log_line] if checks.reads_log else []
    return {"step": on_step, "log": on_log, "gradient": [] if sharded else [checks.first_gradients]}


# Methods of transformers' trainer whose overrides are written for dicts of padded tensors.
PADDED_STEPS = (
    "compute_loss",
    "training_step",
    "prediction_step",
    "_prepare_inputs",
    "get_batch_samples",
    "_get_num_items_in_batch",
)


def is_ours(cls: type) -> bool:
    """Return whether a class is of this package or a base from transformers, and not a user's."""
    return cls.__module__.split(".")[0] in ("posttrain", "transformers", "builtins")


def user_override(kind: type, name: str) -> type | None:
    """The class outside this package that defines ``name`` for a trainer; None where the package's own is in force."""
    # Adapters of compat/ stand around a user's class and take nothing away from it.
    classes = [cls for cls in kind.__mro__ if not cls.__module__.startswith("posttrain.compat.")]
    owner = next((cls for cls in classes if name in vars(cls)), None)
    return None if owner is None or is_ours(owner) else owner


@contextmanager
def with_attributes(holder: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a trainer or a config has other attributes."""
    before = {name: getattr(holder, name) for name in attributes}
    for name, value in attributes.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


def adapted(kind: type) -> type:
    """The class that is made where ``kind`` is asked for: a user's one that overrides steps on padded dicts gets adapters."""
    if kind.__module__.split(".")[0] == "posttrain" or not any(user_override(kind, name) for name in PADDED_STEPS):
        return kind
    return importlib.import_module("posttrain.compat.padded_loss").between(kind)


def check_hooks(trainer: Any, compute_loss_func: Any) -> None:
    """Refuse a loss function or an override that would not be called.

    Raises:
        ConfigError: Names the class and what to override instead.
    """
    if compute_loss_func is not None and not trainer.method.traits.takes_loss_func:
        raise ConfigError(
            f"compute_loss_func is given, and {type(trainer).__name__} would not call it: its loss compares sequences, and "
            "never holds logits. Fix: override objective(outputs, batch) in a subclass (docs/hooks.md)."
        )
    if type(trainer).__module__.split(".")[0] != "posttrain":
        importlib.import_module("posttrain.compat.overrides").refuse(trainer)


def measured(dataset: AnyDataset, args: PostTrainingConfig) -> Any:
    """The dataset with the lengths of its rows, where the sampling strategy wants rows of like length."""
    if args.train_sampling_strategy not in ("group_by_length", "batch_rebalance"):
        return dataset
    return with_lengths(dataset, args.length_column_name)


# No value that methods gather is as low.
PADDING = -1e9


def ranks_of(accelerator: Accelerator) -> Ranks:
    """The processes of a run."""

    def join(values: Tensor) -> Tensor:
        padded = accelerator.pad_across_processes(values, dim=0, pad_index=PADDING)
        whole = accelerator.gather(padded)
        return whole[whole != PADDING]

    if accelerator.num_processes == 1:
        return ALONE
    total = partial(parallel.all_reduce_sum, accelerator=accelerator)
    gather = partial(parallel.all_gather_objects, accelerator=accelerator)
    return Ranks(accelerator.process_index, accelerator.num_processes, total, gather, join)
