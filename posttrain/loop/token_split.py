"""``sp_size``: what a run asks for, what is refused before it trains, and the probe that shows that its model can be divided."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.data.forest import Layout, collate
from posttrain.errors import ConfigError, ModelError
from posttrain.methods.config import ASKED, parallel_sizes
from posttrain.models import token_split
from posttrain.models.architecture import attention_name, query_heads
from posttrain.models.attention import MASKABLE, coarsest_dtype
from posttrain.models.forward import forward
from posttrain.models.heads import causal_lm, evaluating
from posttrain.models.probe import TOLERANCE, disagreement, random_prompts
from posttrain.models.vision import picture_encoder, probe_rows
from posttrain.types import Batch, ModelOutputs, Row

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig

    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)

# What no batch of a divided run has, by the field of the config that would ask for it.
WITHOUT = {
    "neftune_noise_alpha": "noise would repeat from process to process",
    "top_entropy_quantile": "the quantile is one over all processes, in a pass that one of a group runs alone",
    "label_smoothing_factor": "logits of all tokens would come together on one process",
}


@contextmanager
def without_accelerate(args: PostTrainingConfig) -> Iterator[None]:
    """Inside, accelerate hears nothing of ``sp_size``: it would hand the run to DeepSpeed."""
    if parallel_sizes(args)["sp_size"] == 1:
        yield
        return
    config, variable = args.parallelism_config, os.environ.pop(ASKED, None)
    args.parallelism_config = None
    try:
        yield
    finally:
        args.parallelism_config = config
        if variable is not None:
            os.environ[ASKED] = variable


def check_heads(config: Any, size: int) -> None:
    """Refuse a model whose heads ``size`` processes cannot share.

    Args:
        config: Of the model.
        size: Processes of a group.

    Raises:
        ConfigError: Heads of queries do not divide, or the backend takes no mask of ours.
    """
    text = config.get_text_config()
    heads = query_heads(text)
    if size > 1 and (not heads or heads % size):
        fits = [n for n in range(2, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"sp_size={size} does not divide the {heads} attention heads of {text.model_type}: every process of a group computes "
            f"attention of as many heads. Fix: sp_size one of {fits or '(none)'}."
        )
    backend = attention_name(text) or "sdpa"
    if size > 1 and (backend not in MASKABLE or backend == "flex_attention"):
        raise ConfigError(
            f"sp_size={size} with attn_implementation={backend!r}: tokens are exchanged for heads around the calls of sdpa and "
            "eager alone. Fix: attn_implementation='sdpa'."
        )


def check_split(args: PostTrainingConfig, config: PretrainedConfig, *, supported: bool, name: str) -> None:
    """Refuse what no processes could divide, before a model is read.

    Args:
        args: The trainer's config.
        config: Of the model.
        supported: Whether the method was shown on divided rows.
        name: Of the trainer.

    Raises:
        ConfigError: A method, heads, a backend or an option that is not divided.
    """
    size = parallel_sizes(args)["sp_size"]
    if size == 1:
        return
    check_heads(config, size)
    if not supported:
        raise ConfigError(f"sp_size={size} was not shown with {name}. Fix: sp_size=1; FSDP2 shards its models.")
    for option, why in WITHOUT.items():
        value = getattr(args, option, None)
        if value and value != type(args).__dataclass_fields__[option].default:
            raise ConfigError(f"sp_size={size} with {option}={value}: {why}. Fix: leave {option} out, or sp_size=1.")
    if args.dry_step or args.auto_batch_size:
        raise ConfigError(f"sp_size={size}: a step is not tried beforehand. Fix: dry_step=False and a number of rows.")
    args.dry_step = False


def begin_split(
    args: PostTrainingConfig, accelerator: Accelerator, model: nn.Module, layout: Layout, *, supported: bool, name: str
) -> Layout:
    """Make the groups of ``sp_size`` processes, once all is known that would refuse them; the layout that they can divide.

    Args:
        args: The trainer's config.
        accelerator: Of the run.
        model: Ready to run, not wrapped by parallelism.
        layout: As the model's probe chose it.
        supported: Whether the method was shown on divided rows.
        name: Of the trainer.

    Raises:
        ConfigError: Groups that are not even, heads that do not divide, a method, layout or option that is not divided.
        ModelError: The probe found that the divided model computes something else.
    """
    sizes, world = parallel_sizes(args), accelerator.num_processes
    size = sizes["sp_size"]
    token_split.activate(None)  # The groups of an earlier trainer.
    if size == 1:
        return layout
    _check_world(sizes, world)
    config: Any = causal_lm(model).config
    check_split(args, config, supported=supported, name=name)
    encoder = picture_encoder(model)
    if encoder is not None and encoder.processor.family.cross:
        raise ConfigError(
            f"sp_size={size} with images that stand beside the text (Mllama): its layers read them whole. Fix: sp_size=1."
        )
    if "DEEPSPEED" in str(accelerator.distributed_type):
        raise ConfigError(
            f"sp_size={size} with DeepSpeed is not done here. Fix: FSDP2 (or DDP), with the same sp_size."
        )
    if layout.kind == "padded":
        raise ConfigError(
            f"sp_size={size} with padded rows: layers of {type(causal_lm(model)).__name__} (or virtual tokens, or functions on "
            "logits) read whole rows beside attention. Fix: sp_size=1; shard the model (FSDP2) for long rows."
        )
    split = token_split.make_group(size, world=world, rank=accelerator.process_index, device=accelerator.device)
    layout = replace(layout, pad_to_multiple_of=math.lcm(layout.pad_to_multiple_of or 1, size))
    token_split.activate(split)
    _probe(model, layout, accelerator, size)
    rows = args.per_device_train_batch_size * world * args.gradient_accumulation_steps
    logger.info(
        "sp_size=%d: %d groups of processes compute their batches in turns, each process 1/%d of the columns. A step has %d "
        "rows: every process brings its own (TRL would take %d).", size, world // size, size, rows, rows // size,
    )  # fmt: skip
    return layout


def _check_world(sizes: dict[str, int], world: int) -> None:
    size, data = sizes["sp_size"], sizes["dp_replicate_size"] * sizes["dp_shard_size"]
    if world % size or world < size:
        raise ConfigError(
            f"sp_size={size} does not divide {world} process{'' if world == 1 else 'es'}: groups would not be even. Fix: start a "
            f"multiple of {size} processes, or another sp_size."
        )
    if data > 1 and data * size != world:
        raise ConfigError(
            f"parallelism_config with dp_replicate_size x dp_shard_size = {data} and sp_size={size} is for {data * size} "
            f"processes, and there are {world}. Fix: leave the dp sizes out, or make the product {world}."
        )


@torch.no_grad()
def _probe(model: nn.Module, layout: Layout, accelerator: Accelerator, size: int) -> None:
    """Log-probs (or scores) of a small forest, divided, must be those of this process alone; all processes look.

    Raises:
        ModelError: They are not: a layer mixes tokens by something else than the attention that is exchanged.
    """
    parameters = list(model.parameters())
    if any(p.is_meta for p in parameters):  # Read by one process, and handed out with the shards.
        return
    config: Any = causal_lm(model).config
    first, second, third = random_prompts(config.get_text_config().vocab_size, (2 * size + 3, 7, 5))
    row = Row(first, [second, third], [[1] * 7, [1] * 5])
    batches = collate([row, *probe_rows(causal_lm(model))], pad_token_id=0, layout=layout, whole_rows=True)
    scored = "Classification" in type(causal_lm(model)).__name__
    needs = frozenset({"scores"}) if scored else frozenset({"logp"})
    split, results = token_split.active(), []
    try:
        with evaluating(model), accelerator.autocast():
            for way in (None, split):
                token_split.activate(way)
                values = []
                for batch in batches:
                    outputs = _tried(model, batch.to(parameters[0].device), needs, size)
                    value = outputs.scores if scored else outputs.logp
                    assert value is not None
                    values.append(value if scored else value[batch.loss_mask.to(value.device)])
                results.append(torch.cat(values))
    finally:
        token_split.activate(split)
    exact = coarsest_dtype(model) in TOLERANCE and accelerator.mixed_precision == "no"
    if reason := disagreement(results[1], results[0], TOLERANCE[torch.float32] if exact else 0.1):
        token_split.activate(None)
        raise ModelError(
            f"sp_size={size}: {type(causal_lm(model)).__name__} divided over processes does not compute what it computes whole "
            f"({reason}): a layer mixes tokens beside attention. Fix: sp_size=1."
        )


def _tried(model: nn.Module, batch: Batch, needs: frozenset[str], size: int) -> ModelOutputs:
    """A forward pass, whose failure says what it is a failure of; processes of a group fail alike."""
    try:
        return forward(model, batch, needs)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        token_split.activate(None)
        name, said = type(causal_lm(model)).__name__, str(error).splitlines()[0][:160]
        raise ModelError(
            f"sp_size={size}: {name} does not run divided over processes ({type(error).__name__}: {said}): its layers do not "
            "hand on what attention must know, or mix tokens beside it. Fix: sp_size=1; shard the model (FSDP2) for long rows."
        ) from error


def refuse_predict(size: int) -> None:
    """Refuse ``predict``, whose full logits want whole rows on one process.

    Raises:
        ConfigError: ``sp_size`` is above 1.
    """
    if size > 1:
        raise ConfigError(
            f"sp_size={size}: predict() reads full logits of whole rows. Fix: predict in a run of its own."
        )
