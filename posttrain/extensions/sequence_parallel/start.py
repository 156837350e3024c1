"""Sequence parallelism (``sp_size``): checks of options before training, and a test of whether a model supports it."""

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
from posttrain.extensions.sequence_parallel.split import make_group
from posttrain.methods.config import ASKED, parallel_sizes
from posttrain.models import token_split
from posttrain.models.architecture import attention_name, query_heads
from posttrain.models.attention import MASKABLE, coarsest_dtype
from posttrain.models.forward import forward
from posttrain.models.heads import causal_lm, evaluating, picture_encoder
from posttrain.models.probe import TOLERANCE, disagreement, random_prompts
from posttrain.types import Batch, ModelOutputs, Row

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig

    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)

# Config fields that do not work with sequence parallelism, with the reason for each field.
WITHOUT = {
    "neftune_noise_alpha": "the noise would be equal on all processes",
    "top_entropy_quantile": "the quantile is computed over all processes, but each pass is run by only one group",
    "label_smoothing_factor": "the logits of all tokens would be gathered on one process",
}


@contextmanager
def without_accelerate(args: PostTrainingConfig) -> Iterator[None]:
    """Hide ``sp_size`` from accelerate inside the context, because accelerate would enable DeepSpeed for sequence
    parallelism.
    """
    config, variable = args.parallelism_config, os.environ.pop(ASKED, None)
    args.parallelism_config = None
    try:
        yield
    finally:
        args.parallelism_config = config
        if variable is not None:
            os.environ[ASKED] = variable


def check_heads(config: Any, size: int) -> None:
    """Raise an error if ``size`` processes cannot share the attention heads of a model.

    Args:
        config: Config of the transformers model.
        size: Number of processes in a sequence-parallel group.

    Raises:
        ConfigError: ``size`` does not divide the number of query heads, or the attention backend does not support the masks of
            this library.
    """
    text = config.get_text_config()
    heads = query_heads(text)
    if not heads or heads % size:
        fits = [n for n in range(2, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"sp_size={size} does not divide the {heads} attention heads of {text.model_type}. Every process of a "
            f"group computes the same number of heads. Fix: set sp_size to one of {fits or '(none)'}."
        )
    backend = attention_name(text) or "sdpa"
    if backend not in MASKABLE or backend == "flex_attention":
        raise ConfigError(
            f"sp_size={size} does not work with attn_implementation={backend!r}. Only calls of sdpa and eager "
            "exchange tokens and heads between processes. Fix: set attn_implementation='sdpa'."
        )


def check_split(args: PostTrainingConfig, config: PretrainedConfig, *, supported: bool, name: str) -> None:
    """Raise an error for settings that do not work with sequence parallelism, before a model is loaded.

    Args:
        args: The trainer's config.
        config: Config of the model.
        supported: Whether the method has been tested with sequence parallelism.
        name: Name of the trainer.

    Raises:
        ConfigError: The method, the number of attention heads, the attention backend or an option does not support sequence
            parallelism.
    """
    size = parallel_sizes(args)["sp_size"]
    check_heads(config, size)
    if not supported:
        raise ConfigError(
            f"sp_size={size} was not tested with {name}. Fix: set sp_size=1 and shard the model with FSDP2."
        )
    for option, why in WITHOUT.items():
        value = getattr(args, option, None)
        if value and value != type(args).__dataclass_fields__[option].default:
            raise ConfigError(f"sp_size={size} with {option}={value}: {why}. Fix: remove {option}, or set sp_size=1.")
    if args.dry_step or args.auto_batch_size:
        raise ConfigError(
            f"sp_size={size} does not support a dry step. Fix: set dry_step=False and a fixed batch size."
        )
    args.dry_step = False


def begin_split(
    args: PostTrainingConfig, accelerator: Accelerator, model: nn.Module, layout: Layout, *, supported: bool, name: str
) -> Layout:
    """Run all checks of sequence parallelism, and create the groups of ``sp_size`` processes. Return a batch layout that
    works with sequence parallelism.

    Args:
        args: The trainer's config.
        accelerator: Accelerator of the run.
        model: Model on its device. It is not yet wrapped by DDP or FSDP.
        layout: Batch layout that was chosen without sequence parallelism.
        supported: Whether the method has been tested with sequence parallelism.
        name: Name of the trainer.

    Raises:
        ConfigError: The processes cannot be divided into equal groups, or a group cannot share the attention heads equally.
            The error is also raised if the method, the layout or an option does not support sequence parallelism.
        ModelError: The model gives different results for a small batch with sequence parallelism.
    """
    sizes, world = parallel_sizes(args), accelerator.num_processes
    size = sizes["sp_size"]
    _check_world(sizes, world)
    config: Any = causal_lm(model).config
    check_split(args, config, supported=supported, name=name)
    encoder = picture_encoder(model)
    if encoder is not None and encoder.processor.family.cross:
        raise ConfigError(
            f"sp_size={size} does not work with images outside the text sequence (Mllama), because its layers "
            "need whole images. Fix: set sp_size=1."
        )
    if "DEEPSPEED" in str(accelerator.distributed_type):
        raise ConfigError(
            f"sp_size={size} does not work with DeepSpeed. Fix: use FSDP2 (or DDP) with the same sp_size."
        )
    if layout.kind == "padded":
        raise ConfigError(
            f"sp_size={size} does not work with padded rows: layers of {type(causal_lm(model)).__name__} (or virtual "
            "tokens, or functions on logits) read whole rows outside attention. Fix: set sp_size=1, and shard the "
            "model (FSDP2) for long rows."
        )
    split = make_group(size, world=world, rank=accelerator.process_index, device=accelerator.device)
    layout = replace(layout, pad_to_multiple_of=math.lcm(layout.pad_to_multiple_of or 1, size))
    token_split.activate(split)
    _probe(model, layout, accelerator, size)
    rows = args.per_device_train_batch_size * world * args.gradient_accumulation_steps
    logger.info(
        "sp_size=%d: each of %d groups computes the batches of its processes in turns, and each process computes "
        "1/%d of the columns. A step has %d rows, because every process loads different rows (TRL would use %d).",
        size, world // size, size, rows, rows // size,
    )  # fmt: skip
    return layout


def _check_world(sizes: dict[str, int], world: int) -> None:
    size, data = sizes["sp_size"], sizes["dp_replicate_size"] * sizes["dp_shard_size"]
    if world % size or world < size:
        raise ConfigError(
            f"sp_size={size} does not divide {world} process{'' if world == 1 else 'es'}, so the groups would not be "
            f"equal. Fix: start a multiple of {size} processes, or choose another sp_size."
        )
    if data > 1 and data * size != world:
        raise ConfigError(
            f"parallelism_config with dp_replicate_size x dp_shard_size = {data} and sp_size={size} needs "
            f"{data * size} processes, but there are {world}. Fix: remove the dp sizes, or make the product {world}."
        )


@torch.no_grad()
def _probe(model: nn.Module, layout: Layout, accelerator: Accelerator, size: int) -> None:
    """Check that a small batch gives the same log-probs (or scores) with and without sequence parallelism. All processes
    must call this function.

    Raises:
        ModelError: The results differ. The reason is a layer that mixes tokens outside attention.
    """
    parameters = list(model.parameters())
    # Skip the check if the weights are not loaded yet. With FSDP, one process loads the weights and sends shards to all
    # processes.
    if any(p.is_meta for p in parameters):
        return
    config: Any = causal_lm(model).config
    first, second, third = random_prompts(config.get_text_config().vocab_size, (2 * size + 3, 7, 5))
    row = Row(first, [second, third], [[1] * 7, [1] * 5])
    encoder = picture_encoder(model)
    pictured = [] if encoder is None else encoder.probe_rows()
    batches = collate([row, *pictured], pad_token_id=0, layout=layout, whole_rows=True)
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
            f"sp_size={size}: {type(causal_lm(model)).__name__} gives different results with sequence parallelism "
            f"({reason}), because a layer mixes tokens outside attention. Fix: set sp_size=1."
        )


def _tried(model: nn.Module, batch: Batch, needs: frozenset[str], size: int) -> ModelOutputs:
    """Run a forward pass. If it fails, raise an error that names the model. The pass fails in the same way on all processes
    of a group.
    """
    try:
        return forward(model, batch, needs)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        token_split.activate(None)
        name, reason = type(causal_lm(model)).__name__, str(error).splitlines()[0][:160]
        raise ModelError(
            f"sp_size={size}: {name} does not run with sequence parallelism ({type(error).__name__}: {reason}). Its "
            "layers do not pass all arguments to attention, or mix tokens outside it. Fix: set sp_size=1, and shard the "
            "model (FSDP2) for long rows."
        ) from error
