"""Construction of a run: `Spec`, `plan` (no weights), `load_model` and `build`, and checks of arguments and overrides."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import datasets
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.trainer_utils import set_seed

from posttrain.data.forest import Layout
from posttrain.data.formats import plain_rows
from posttrain.data.samplers import with_lengths
from posttrain.errors import ArgumentTypeError, ConfigError, DataError, ModelError
from posttrain.loop import rollout, step
from posttrain.loop.checks import Checks, embedding_rows, log_codes
from posttrain.loop.data_report import warnings_are_errors
from posttrain.loop.evaluation import predicted_rows
from posttrain.loop.media import Media, media_of
from posttrain.loop.prompts import PromptSource
from posttrain.loop.run import Hooks, Progress, Run, with_attributes
from posttrain.loop.samplers import SingleTurn
from posttrain.loop.scoring import reward_options, try_rewards
from posttrain.loop.weight_sync import WeightSync, engine_of
from posttrain.methods.base import Method, Traits
from posttrain.methods.config import PostTrainingConfig, sequence_parallel
from posttrain.models import load, parallel
from posttrain.models.architecture import config_of
from posttrain.models.attention import padded_layout
from posttrain.models.forward import learns_prompts, router_coefficient
from posttrain.models.heads import (
    cast_head_to_fp32,
    causal_lm,
    install_token_head,
    train_new_tokens,
    train_score_head,
    unsaved_encoders,
)
from posttrain.models.load import check_model_source, wrap_with_peft
from posttrain.models.memory import check_offloading, recomputes
from posttrain.models.probe import probe_head, probe_layout
from posttrain.models.quantised import check_quantised
from posttrain.models.reference import Reference, disable_dropout_in_model
from posttrain.models.token_split import activate, alone
from posttrain.report.lock import check_writable
from posttrain.rewards.runner import RewardRunner
from posttrain.rollouts.batch import RolloutWindow
from posttrain.types import ALONE, Batch, Ranks

if TYPE_CHECKING:
    from peft import PeftConfig

    from posttrain.rollouts.base import RolloutEngine
    from posttrain.rollouts.episodes.environments import EnvironmentPool
    from posttrain.types import AnyDataset, EvalSets, Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


def plain_hooks(method: Method[Any], loss_function: Callable[..., Any] | None = None) -> Hooks:
    """Return the default functions of the training loop. A subclass of a trainer may replace them."""
    return Hooks(
        objective=None,
        comparison=None,
        loss_of=step.loss_of if loss_function is None else step.function_loss,
        batches=rollout.training_batches if method.traits.samples else as_yielded,
        eval_batches=rollout.evaluation_batches if method.traits.samples else as_yielded,
        postprocess_metrics=method.derived_metrics,
        predictions=partial(predicted_rows, preprocess=None),
        observe=rollout.gap_of_pass if method.traits.samples else None,
    )


def as_yielded(run: Run, batches: Sequence[Batch], index: int = 0) -> list[Batch]:
    """Return the batches that a data loader item contains as a list. This function is used if the collator creates the
    batches.
    """
    return list(batches)


def as_config(config: type, args: PostTrainingConfig | str | None) -> Any:
    """Return the trainer's config. If ``args`` is a `transformers.TrainingArguments` or an output folder, convert it to such
    a config.

    Raises:
        ArgumentTypeError: ``args`` has an unsupported type, or is a config of another trainer.
    """
    if args is None or isinstance(args, config):
        return args
    if isinstance(args, str):
        return config(args)
    if not isinstance(args, transformers.TrainingArguments) or isinstance(args, PostTrainingConfig):
        raise ArgumentTypeError(f"args must be a {config.__name__}, not {type(args).__name__}.")
    fields = args.to_dict()
    fields.pop("push_to_hub_token", None)
    return config(**fields | {"hub_token": args.hub_token})  # to_dict() hides the token, so add it.


@dataclass(frozen=True)
class Spec:
    """Arguments of a run, from which `plan` prepares the run.

    Attributes:
        method: The algorithm, whose attribute ``cfg`` contains the config.
        model: Hub id, folder or loaded model.
        train_dataset: Training set.
        eval_dataset: Evaluation set, or a dict of several sets by name.
        processing_class: Tokenizer or processor. None: it is loaded from the model's folder.
        peft_config: Config of a new adapter.
        quantization_config: Quantization config for loading the model.
        data_collator: The user's collator.
        compute_loss_func: The user's loss function.
        name: Name of the trainer class, used in messages and file names.
        images: Two flags: whether dataset rows may contain images, and whether tools or environments may return images.
        rewards: Reward functions, for methods that sample: functions, reward models, or a `RewardRunner`.
        environments: Environments that write prompts.
        rollout_engine: Engine that samples completions. None: it is created from the config.
        load_model: Function that loads a model from a path or Hub id.
        prepare: Function that tokenizes and checks the training and evaluation sets of a plan. None: only the prompts of
            online methods are checked, and datasets of other methods must already be tokenized.
    """

    method: Method[Any]
    model: str | nn.Module
    train_dataset: AnyDataset
    eval_dataset: EvalSets | None = None
    processing_class: Tokenizer | None = None
    peft_config: PeftConfig | None = None
    quantization_config: Any = None
    data_collator: Any = None
    compute_loss_func: Callable[..., Any] | None = None
    name: str = "Trainer"
    images: tuple[bool, bool] = (False, False)
    rewards: Any = None
    environments: EnvironmentPool | None = None
    rollout_engine: RolloutEngine | None = None
    load_model: Callable[..., Any] = load.create_model_from_path
    prepare: Callable[[Plan], tuple[Any, Any]] | None = None

    @property
    def args(self) -> Any:
        """Config of the run."""
        return self.method.cfg


@dataclass(frozen=True)
class Plan:
    """Run whose model is not loaded yet. All checks that need no weights have passed.

    Attributes:
        spec: Arguments of the run.
        vision: Object that handles images. It does nothing in a run on text.
        tokenizer: Tokenizer of the policy, with the config's chat template and a pad token.
        checks: Checks of the run and their findings.
        train_dataset: Prepared training set.
        eval_dataset: Prepared evaluation set, or a dict of several prepared sets by name.
        model: Hub id or folder of the model, or the loaded model.
        raw: Training set as passed by the user, before rows were dropped.
        added_tokens: Token ids that a chat template added to the vocabulary.
    """

    spec: Spec
    vision: Media
    tokenizer: Any
    checks: Checks
    train_dataset: Any
    eval_dataset: Any
    model: str | nn.Module
    raw: Any
    added_tokens: Sequence[int] = ()


def plan(spec: Spec) -> Plan:
    """Check the arguments of a run, load its tokenizer and prepare its data. No weights are loaded.

    The model is loaded only if a chat template changes the vocabulary.

    Raises:
        PosttrainError: These arguments, this config or this data make training impossible.
    """
    args, model = spec.args, spec.model
    if args.output_dir:
        # Resolve a relative folder now, because a reward function may change the working directory.
        args.output_dir = os.path.abspath(args.output_dir)
    if spec.method.traits.samples and not isinstance(spec.rewards, RewardRunner):
        spec = replace(spec, rewards=RewardRunner(**reward_options(spec.rewards, args, None, spec.processing_class)))
    refuse_untrainable(
        spec.method.traits, spec.name, model, args, spec.train_dataset, spec.data_collator, spec.eval_dataset
    )
    check_quantised(model, args, spec.peft_config, spec.quantization_config)
    if not isinstance(model, str):
        options = {"model_init_kwargs": args.model_init_kwargs, "quantization_config": spec.quantization_config}
        warn_of_unused(options)
    set_seed(args.seed)
    train, evaluation = map(plain_rows, (spec.train_dataset, spec.eval_dataset))
    model_id, (reads, returned) = load.model_id_of(model, spec.name), spec.images
    vision = media_of(args, spec.processing_class, model_id, (train, evaluation), takes=reads, returned=returned)
    tokenizer, added_tokens = vision.tokenizer, []
    if tokenizer is None:
        revision = dict(args.model_init_kwargs or {}).get("revision")
        tokenizer = load.load_tokenizer(model_id, trust_remote_code=args.trust_remote_code, revision=revision)
    if load.changes_vocabulary(args):
        whole = loaded(spec, model)
        model, tokenizer, added_tokens = load.clone_chat_template(whole, tokenizer, args.chat_template_path)
    load.prepare_tokenizer(tokenizer, args)
    checks = make_checks(spec, vision, tokenizer)
    usable = checks.config(model, train, evaluation, spec.peft_config)
    planned = Plan(spec, vision, tokenizer, checks, usable, evaluation, model, train, added_tokens)
    with parallel.main_process_first(), warnings_are_errors(args.strict_data):
        train, evaluation = (spec.prepare or prepared)(planned)
    needed = 0 if spec.method.traits.samples else args.train_batch_size * args.world_size
    if args.dataloader_drop_last and isinstance(train, datasets.Dataset) and len(train) < needed:
        raise ConfigError(
            f"dataloader_drop_last=True drops the only batch: the prepared training set has {len(train)} rows, and a batch "
            f"on {args.world_size} ranks has {needed}. Fix: remove dataloader_drop_last, or lower per_device_train_batch_size."
        )
    return replace(planned, train_dataset=train, eval_dataset=evaluation)


def prepared(planned: Plan) -> tuple[Any, Any]:
    """Return the datasets of a plan. If the method samples, first check the prompts and test the reward functions."""
    train, evaluation, rewards = planned.train_dataset, planned.eval_dataset, planned.spec.rewards
    if not planned.spec.method.traits.samples:
        return train, evaluation
    source = PromptSource(planned.spec.args, planned.tokenizer)
    train, evaluation, head = source.prepared(train, evaluation)
    if planned.spec.args.check_rewards:
        rows = source.trial_rows(head)
        try_rewards(rewards, planned.spec.args, rows, evaluation)
    return train, evaluation


def loaded(spec: Spec, model: Any) -> Any:
    """Return the model. If it is a string, load it first."""
    if not isinstance(model, str):
        return model
    return spec.load_model(model, **loading_options(spec.args, spec.quantization_config))


def load_model(planned: Plan) -> Any:
    """Load the model of a plan. Set its pad and end tokens, add its adapter, and install an output head for selected tokens."""
    spec, traits = planned.spec, planned.spec.method.traits
    model = loaded(spec, planned.model)
    load.check_distributed(getattr(config_of(model), "distributed_config", None))
    load.mirror_eos(planned.tokenizer, model, spec.args)
    load.resolve_pad_token(planned.tokenizer, model)
    peft_config = planned.vision.prepare(model, spec.peft_config)
    added, generative = planned.added_tokens, traits.generative
    model = prepared_model(model, spec.args, peft_config, added_tokens=added, generative=generative)
    if traits.float32_head:
        cast_head_to_fp32(causal_lm(model))
    return model


def build(
    planned: Plan,
    model: Any = None,
    accelerator: Accelerator | None = None,
    *,
    progress: Progress | None = None,
    layout: Callable[[nn.Module], Layout] | None = None,
    sampling: bool = True,
) -> Run:
    """Create the components of a run, for your own training loop.

    Your loop must accumulate gradients, change the learning rate, save checkpoints and wrap the model for several processes.

    Args:
        planned: Result of `plan`.
        model: Result of `load_model`, on its device. None: this function loads the model.
        accelerator: Accelerator of the run. None: an accelerator with the config's precision is created.
        progress: Progress of the run. None: a new run.
        layout: Function that chooses the row layout of a model. None: `choose_layout`.
        sampling: Whether to create an engine and a sampler for a method that samples. Trainers pass False, because they
            create both themselves.

    Raises:
        ConfigError: The method or an option works only in a trainer.
    """
    if sampling:
        refuse_without_trainer(planned.spec.method)
    if accelerator is None:
        precision = "bf16" if planned.spec.args.bf16 else "fp16" if planned.spec.args.fp16 else "no"
        accelerator = Accelerator(mixed_precision=precision)
    if model is None:
        model = load_model(planned).to(planned.spec.args.device)
    spec, method, args = planned.spec, planned.spec.method, planned.spec.args
    parallel.refuse_lost_sharding(accelerator, args)
    parallel.shard_present_layers(accelerator, model)
    planned.vision.check_shards(model, accelerator)
    chosen = choose_layout(model, args) if layout is None else layout(model)
    load.check_saved_config(model)
    activate(None)  # Deactivate the sequence-parallel group of an earlier trainer.
    if (extension := sequence_parallel(args)) is not None:
        about = {"supported": method.traits.splits_tokens, "name": spec.name}
        chosen = extension.begin_split(args, accelerator, model, chosen, **about)
    planned.checks.set_context(model=model)
    progress = Progress() if progress is None else progress
    progress.model = progress.wrapped = model
    progress.own, progress.watchers = method.start(), watchers(planned.checks, accelerator)
    run = Run(
        args=args,
        method=method,
        name=spec.name,
        tokenizer=planned.tokenizer,
        vision=planned.vision,
        checks=planned.checks,
        accelerator=accelerator,
        ranks=ranks_of(accelerator),
        pad_token_id=padding_id(planned.tokenizer, model),
        layout=chosen,
        hooks=plain_hooks(method, spec.compute_loss_func),
        progress=progress,
        fresh_adapter=spec.peft_config is not None,
        router_coefficient=router_coefficient(model, args),
        loss_function=spec.compute_loss_func,
    )
    return with_sampling(run, planned) if sampling and method.traits.samples else run


def padding_id(tokenizer: Tokenizer, model: nn.Module) -> int:
    """Return the token id used as padding: the tokenizer's pad token, or 0 if the model has no embedding for that token.

    Padding is identified by position, so any id with an embedding can be used.
    """
    rows, token = embedding_rows(model), int(tokenizer.pad_token_id)
    return token if rows is None or token < rows else 0


def refuse_without_trainer(method: Method[Any]) -> None:
    """Raise an error if the run uses a feature that only trainers support, such as dynamic sampling or NEFTune.

    The comparison with a reference, rollouts that the method itself generates, and rollouts of worker processes are such
    features too.
    """
    traits, options = method.traits, vars(method.cfg)
    names = ("dynamic_sampling", "neftune_noise_alpha", "label_smoothing_factor", "sync_ref_model")
    needs = [f"{name}={options[name]!r}" for name in names if options.get(name)]
    if traits.own_rollouts or traits.workers_sample or traits.compares_reference:
        needs.append(type(method).__name__)
    if needs:
        raise ConfigError(
            f"{', '.join(needs)} works only in a trainer, not in a loop created with build(). Fix: use the trainer."
        )


def with_sampling(run: Run, planned: Plan) -> Run:
    """Return the run with additional components for sampling: engine, prompts, rewards and a single-turn sampler; see
    `build`.
    """
    args, rewards = run.args, planned.spec.rewards
    stop_ids, without_token = rollout.special_ids(run)
    sync = WeightSync(engine_of(run, planned.spec.rollout_engine, rewards), run)
    prompts = PromptSource(args, run.tokenizer)
    prompts.check_context(sync.context)
    if sync.needs_weight_sync:
        sync.check_engine(sync.engine)
    frozen = Reference(run.model, fresh_adapter=run.fresh_adapter) if args.beta or args.log_ref_kl else None
    online = rollout.online_of(
        run,
        sync,
        stop_ids,
        window=RolloutWindow(args.num_iterations),
        prompts=prompts,
        rewards=rewards,
        ids_without_token=without_token,
        spare=lambda mode: [dict(next(iter(planned.train_dataset)))],
        sample=SingleTurn(sync, prompts, run.tokenizer).sample,
    )
    run = replace(run, reference=frozen, online=online)
    run.progress.truncation = rollout.truncation_of(online, online.sampling(run))
    return run


def refuse_untrainable(
    traits: Traits,
    name: str,
    model: str | nn.Module,
    args: PostTrainingConfig,
    train_dataset: AnyDataset,
    collator: Any,
    eval_dataset: EvalSets | None = None,
) -> None:
    """Raise an error for arguments that make training impossible, before anything is loaded.

    Args:
        traits: Traits of the method.
        name: Name of the trainer class.
        model: The trainer's argument ``model``.
        args: Config of the trainer.
        train_dataset: The trainer's argument ``train_dataset``.
        collator: The user's ``data_collator``.
        eval_dataset: The trainer's argument ``eval_dataset``.

    Raises:
        ArgumentTypeError: ``train_dataset`` has an unsupported type.
        ConfigError: The method does not support a collator or label smoothing, the training set is a stream and
            ``max_steps`` is not set, or an evaluation is requested without an evaluation set.
        DataError: There is no training set.
    """
    if collator is not None and not traits.takes_collator:
        raise ConfigError(
            f"{name} creates batches from tokenized rows itself, so data_collator={collator!r:.80} "
            "would not be used. Fix: remove data_collator. Use pad_to_multiple_of and max_row_tokens to control the batches."
        )
    if train_dataset is None:
        raise DataError(f"{name} needs train_dataset, but it is None.")
    if not isinstance(train_dataset, datasets.Dataset | datasets.IterableDataset):
        hint = " Pass one split of it: dataset['train']." if isinstance(train_dataset, dict) else ""
        hint = (
            " Fix: convert the list with datasets.Dataset.from_list(rows)." if isinstance(train_dataset, list) else hint
        )
        raise ArgumentTypeError(f"train_dataset must be a datasets.Dataset, not {type(train_dataset).__name__}.{hint}")
    strategy = transformers.IntervalStrategy(args.eval_strategy).value
    if (eval_dataset is None or eval_dataset == {}) and (strategy != "no" or args.eval_on_start):
        option = f"eval_strategy={strategy!r}" if strategy != "no" else "eval_on_start=True"
        raise ConfigError(
            f"{option} needs eval_dataset, but it is {eval_dataset}. Fix: pass eval_dataset, or remove the option."
        )
    if isinstance(train_dataset, datasets.IterableDataset) and args.max_steps <= 0:
        raise ConfigError("a streaming train_dataset has no length: set max_steps (it is not set).")
    if args.accelerator_config.dispatch_batches:
        logger.warning("dispatch_batches=True is set to False: each rank reads train_dataset itself.")
    args.accelerator_config.dispatch_batches = False
    if args.label_smoothing_factor and not traits.takes_loss_func:
        raise ConfigError(
            f"label_smoothing_factor={args.label_smoothing_factor} smooths a loss over label tokens, but {name} does not have "
            "such a loss. Fix: remove label_smoothing_factor."
        )
    if not args.average_tokens_across_devices and args.world_size > 1:
        logger.warning(
            "average_tokens_across_devices=False is ignored: the loss is always the mean over the tokens of all processes, "
            "however the tokens are distributed."
        )
    check_optim_args(args)
    check_offloading(args)
    check_writable(args.output_dir)
    warn_if_replaced(model, args.output_dir)
    check_model_source(model, generative=traits.generative)


def warn_if_replaced(model: str | nn.Module | None, output_dir: str | None) -> None:
    """Log a warning if the run would overwrite the files of its model."""
    if isinstance(model, str) and Path(model).absolute() == Path(output_dir or "").absolute():
        logger.warning("output_dir=%r is the folder of the model, so the run replaces the model's files.", output_dir)


def check_optim_args(args: PostTrainingConfig) -> None:
    """Raise an error if ``optim_args`` is invalid, or if the optimizer does not use it."""
    if not args.optim_args:
        return
    if not all("=" in part for part in args.optim_args.split(",")):
        raise ConfigError(f"optim_args={args.optim_args!r} must have the form 'key=value,key=value'.")
    create = transformers.Trainer.get_optimizer_cls_and_kwargs
    try:
        used = create(args)
        with with_attributes(args, {"optim_args": None}):
            unused = create(args)
    # Some optimizers need the model or a package. The trainer creates such an optimizer later.
    except Exception:
        return
    if used == unused:
        raise ConfigError(
            f"optim_args={args.optim_args!r} has no effect: transformers does not pass it to the optimizer "
            f"{str(args.optim)!r}. Fix: remove it, and set learning_rate, weight_decay, adam_beta1, adam_beta2 or adam_epsilon, "
            "or pass optimizer_cls_and_kwargs to the trainer."
        )


def refuse_foreign_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    """Raise an error if the optimizer that the user passed updates none of the model's trained parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer in optimizers=(optimizer, scheduler) updates none of the trained parameters, so the model would not "
            "change. Fix: create it from the parameters of the model object that you pass, after an adapter was added, or pass "
            "optimizer_cls_and_kwargs."
        )


def warn_of_unused(options: Mapping[str, Any]) -> None:
    """Log a warning for each loading option that is set although the model was passed as an object."""
    for name in [name for name, value in options.items() if value]:
        logger.warning("%s is ignored, because the model was passed as an object and is already loaded.", name)


def loading_options(args: PostTrainingConfig, quantization_config: Any) -> dict[str, Any]:
    """Return keyword arguments for ``from_pretrained``.

    Raises:
        ConfigError: ``quantization_config`` is set both as an argument and in ``model_init_kwargs``.
    """
    init = dict(args.model_init_kwargs or {})
    if quantization_config is not None and init.get("quantization_config") is not None:
        raise ConfigError("quantization_config is set as an argument and in model_init_kwargs. Fix: set it only once.")
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
    """Add the adapter and an output head for selected tokens to the model, and return it. Disable dropout if
    ``disable_dropout`` is set.

    Args:
        model: The loaded model.
        args: The trainer's config.
        peft_config: Config of a new adapter, or None.
        added_tokens: Ids of new tokens. If an adapter is trained, the embeddings of these tokens are trained too.
        generative: Whether the model has a language-model head. If not, its score head is trained.
    """
    if args.disable_dropout:
        disable_dropout_in_model(model)
    peft_config = train_new_tokens(peft_config, model, list(added_tokens))
    if not generative:
        peft_config = train_score_head(peft_config, model)
    model = wrap_with_peft(model, peft_config, activation_checkpointing=recomputes(args))
    install_token_head(model)
    refuse_float16(model, args)
    if args.load_best_model_at_end and (encoded := unsaved_encoders(model)):
        raise ConfigError(
            f"load_best_model_at_end=True cannot load the adapter {encoded[0]!r}: checkpoints contain its virtual tokens, but "
            "not the encoder that computes them, because peft does not save it. Fix: set load_best_model_at_end=False, or use "
            "PROMPT_TUNING or prefix_projection=False."
        )
    return model


def refuse_float16(model: nn.Module, args: PostTrainingConfig) -> None:
    """Raise an error if trained weights are stored in float16, because their gradients overflow. If ``preflight`` is not
    ``"error"``, log a warning instead.

    Raises:
        ConfigError: A trained parameter is stored in float16, and DeepSpeed does not hold a float32 copy.
    """
    count = sum(p.numel() for p in model.parameters() if p.requires_grad and p.dtype == torch.float16)
    if not count or args.deepspeed:
        return
    text = (
        f"{count} trained parameters are stored in float16: gradients below 6e-8 become 0, above 65504 infinite, and gradient "
        "scalers reject them. Fix: load the model with dtype='float32' and set fp16=True or bf16=True, or train an adapter."
    )
    if args.preflight == "error":
        raise ConfigError(text)
    logger.warning("%s", text)


def choose_layout(model: nn.Module, args: PostTrainingConfig, *, padded: bool = False) -> Layout:
    """Choose the row layout for a model: packed prefix trees if a probe shows that they are exact, otherwise one sequence
    per row.

    Args:
        model: Model that is ready to run.
        args: ``max_row_tokens``, ``pad_to_multiple_of``, ``bf16``, ``fp16``, ``device``.
        padded: Whether one sequence per row is required. Models with virtual tokens always require it.
    """
    autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    # Gather the parameters. ZeRO-3 may have sharded them when the model was loaded.
    with alone(), parallel.gathered(model.parameters()):
        probe_head(model)
        layout = padded_layout(model) if padded or learns_prompts(model) else probe_layout(model, autocast, args.device)
    return layout.adjusted(args.max_row_tokens, args.pad_to_multiple_of)


def joint_layout(layout: Layout, other: Any, args: PostTrainingConfig) -> Layout:
    """Choose a row layout that is exact for both the policy and another model that runs on the same batches.

    Args:
        layout: Layout of the policy.
        other: Other model, such as a reference or a critic, that is ready to run.
        args: The trainer's config; see `choose_layout`.

    Raises:
        ModelError: The rotary frequencies of the two models change at different lengths.
    """
    theirs = choose_layout(other, args)
    switches, ends = {layout.rope_switch, theirs.rope_switch} - {None}, {layout.rope_end, theirs.rope_end} - {None}
    if len(switches) > 1:
        raise ModelError(
            f"{type(causal_lm(other)).__name__} reads the rows of the policy, but the rotary frequencies of the two models "
            f"change at different lengths {sorted(switches)} (longrope), so no forward pass is correct for both models. Fix: "
            "use two models of one family."
        )
    careful = max(layout, theirs, key=lambda candidate: (candidate.kind == "padded", candidate.dense_mask))
    joins, switch = layout.joins_rows and theirs.joins_rows, min(switches, default=None)
    return replace(careful, joins_rows=joins, rope_switch=switch, rope_end=min(ends, default=None))


def make_checks(spec: Spec, vision: Media, tokenizer: Tokenizer) -> Checks:
    """Create the checks of a run before its model is loaded."""
    traits = spec.method.traits
    checks = Checks(
        spec.args,
        command=spec.name.removesuffix("Trainer").lower(),
        ignored_codes=traits.ignored_codes,
        log_area=traits.log_area,
        log_codes=log_codes(traits.log_area, traits.other_moments),
        zero_gradient_is_normal=traits.still_steps,
        fills_prompts=spec.environments is not None,
    )
    processor = vision.processor if vision.images else None
    parts = {"run": spec, "method": spec.method, "vision": vision, "rewards": spec.rewards, "processor": processor}
    checks.set_context(tokenizer=tokenizer, parts=parts)
    return checks


def watchers(checks: Checks, accelerator: Accelerator) -> dict[str, list[Callable[..., bool | None]]]:
    """Return the watchers that run the checks; see `Progress.watchers`."""
    # If parameters are sharded over ranks, a rank cannot check the gradients of single parameters.
    sharded = parallel.is_prepared_late(accelerator)
    on_step = [checks.first_batch, checks.empty_steps, checks.economy]
    on_log = [checks.log_line] if checks.reads_log else []
    return {"step": on_step, "log": on_log, "gradient": [] if sharded else [checks.first_gradients]}


# Names of methods of `transformers.Trainer`. If a user overrides one of these methods, the override expects dicts of padded
# tensors.
PADDED_STEPS = (
    "compute_loss",
    "training_step",
    "prediction_step",
    "_prepare_inputs",
    "get_batch_samples",
    "_get_num_items_in_batch",
)


def is_ours(cls: type) -> bool:
    """Return whether a class is defined in this package, in transformers or in Python, and not by the user."""
    return cls.__module__.split(".")[0] in ("posttrain", "transformers", "builtins")


def user_override(kind: type, name: str) -> type | None:
    """Return the user's class that overrides ``name`` for a trainer class. Return None if the package's definition is used."""
    # Skip the adapter classes of compat/, because they contain no methods of the user.
    classes = [cls for cls in kind.__mro__ if not cls.__module__.startswith("posttrain.compat.")]
    owner = next((cls for cls in classes if name in vars(cls)), None)
    return None if owner is None or is_ours(owner) else owner


def adapted(kind: type) -> type:
    """Return the trainer class to instantiate for ``kind``. If a user's class overrides methods that expect dicts of padded
    tensors, return a subclass of ``kind`` that converts the inputs of these methods.
    """
    if kind.__module__.split(".")[0] == "posttrain" or not any(user_override(kind, name) for name in PADDED_STEPS):
        return kind
    return importlib.import_module("posttrain.compat.padded_loss").between(kind)


def check_hooks(trainer: Any, compute_loss_func: Any) -> None:
    """Raise an error for a loss function or an override that the trainer would never call.

    Raises:
        ConfigError: The loss function or override is never called. The message contains the method to override instead.
    """
    if compute_loss_func is not None and not trainer.method.traits.takes_loss_func:
        raise ConfigError(
            f"compute_loss_func is set, but {type(trainer).__name__} would not call it, because the trainer's loss compares "
            "sequences and never has full logits. Fix: override objective(outputs, batch) in a subclass (docs/hooks.md)."
        )
    if type(trainer).__module__.split(".")[0] != "posttrain":
        importlib.import_module("posttrain.compat.overrides").refuse(trainer)


def measured(dataset: AnyDataset, args: PostTrainingConfig) -> Any:
    """Add a column with the length of each row to the dataset if the sampling strategy groups rows by length."""
    if args.train_sampling_strategy not in ("group_by_length", "batch_rebalance"):
        return dataset
    return with_lengths(dataset, args.length_column_name)


# Value that fills up tensors to equal lengths before they are gathered. The value is lower than any value that methods
# gather.
PADDING = -1e9


def ranks_of(accelerator: Accelerator) -> Ranks:
    """Return an object with this process's index, the number of processes of the run, and collective operations."""

    def join(values: Tensor) -> Tensor:
        padded = accelerator.pad_across_processes(values, dim=0, pad_index=PADDING)
        whole = accelerator.gather(padded)
        return whole[whole != PADDING]

    if accelerator.num_processes == 1:
        return ALONE
    total = partial(parallel.all_reduce_sum, accelerator=accelerator)
    gather = partial(parallel.all_gather_objects, accelerator=accelerator)
    return Ranks(accelerator.process_index, accelerator.num_processes, total, gather, join)
