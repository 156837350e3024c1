"""Attention inputs and layouts for packed prefix trees: `attention_inputs`, `layout_for` and `rope_limits`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.data.forest import Layout
from posttrain.data.trie import check_batch
from posttrain.errors import ModelError
from posttrain.models import tree_attention
from posttrain.models.architecture import attention_name, config_of, layer_kinds, sliding_window, text_of
from posttrain.models.heads import causal_lm, learns_prompts, picture_encoder, unwrapped
from posttrain.models.recurrent import table as recurrent
from posttrain.models.token_split import TokenSplit
from posttrain.types import Batch

if TYPE_CHECKING:
    from torch.nn import Module


logger = logging.getLogger(__name__)

# On a CPU, maximum number of tokens in a packed row. On a GPU, lower bound for the token limit of a forward pass.
ROW_TOKENS = 2048
# On a GPU, the token limit of a forward pass is PASS_WORK divided by the number of the model's parameters. The limit is 30k
# tokens for a 0.5B model, 10k for 1.5B and 2k for 7B. The limit never exceeds MOST_GPU_TOKENS.
PASS_WORK, MOST_GPU_TOKENS = 15 * 10**12, 32768
MASKABLE = ("sdpa", "eager", "flex_attention")  # Attention backends that accept an arbitrary mask.


# Config fields that contain a length in tokens. Models read these fields in every forward pass, so a probe can temporarily
# set smaller values. Llama 4's ``floor_scale`` is such a length too.
SHRINKABLE = ("sliding_window", "attention_chunk_size", "floor_scale")
FIXED = ("window_size", "attention_window_size", "attention_window", "sliding_window_size", "local_attention")
# Config fields that contain the dropout probability of attention weights.
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
# Types of attention layers for which this module can build a mask.
KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


def attention_inputs(
    batch: Batch,
    model: Module,
    dtype: torch.dtype,
    span: Tensor | None = None,
    split: TokenSplit | None = None,
) -> dict[str, Any]:
    """Return keyword arguments for the model's forward method that restrict attention to the sequences of a batch.

    The argument ``span`` is described in `forest_mask`, and the argument ``split`` in `Forest`.

    Returns:
        A dict with ``attention_mask`` and, for tree attention, ``forest``. The mask depends on the batch and the backend:

        - One sequence per row: a padding mask ``(B, T)``, or None if no row is padded.
        - Tree attention: a placeholder with one element; ``forest`` defines the mask (`posttrain.models.tree_attention`).
        - Otherwise a 4-D mask in the backend's format: additive for eager and for sdpa on a CPU, bool for sdpa elsewhere,
          and a ``BlockMask`` for flex.

        For models with several types of layers, the mask is a dict with one mask per layer type. Recurrent layers get no
        mask, because their functions use ``forest`` (`posttrain.models.recurrent`).

    Raises:
        DataError: The batch's segments do not match its rows.
    """
    text = text_of(config_of(model))
    check_batch(batch)
    if split is None and span is None and batch.one_sequence_a_row:
        whole = batch.num_tokens == batch.input_ids.numel()
        return {"attention_mask": None if whole else batch.real.long()}
    implementation = attention_name(text) or "sdpa"
    parts = implementation in tree_attention.BACKENDS and span is None and not batch.dense_mask
    if parts or split is not None:
        tree_attention.install(model)
    stateful = has_recurrent_layers(model) and recurrent.install(model)

    def build(window: int | None, chunk: int | None = None) -> Any:
        if parts:
            return torch.zeros(1, 1, 1, 1, dtype=dtype, device=batch.input_ids.device)
        if implementation == "flex_attention":
            return tree_attention.block_mask(batch, window, chunk, span)
        allowed = tree_attention.forest_mask(batch, window, chunk, span)
        if implementation == "sdpa" and allowed.device.type != "cpu":
            return allowed
        # Convert the mask to floats once. Otherwise, sdpa on a CPU would convert a bool mask in every layer and save each
        # copy for the backward pass.
        return tree_attention.added(allowed, dtype, -torch.inf if implementation == "sdpa" else torch.finfo(dtype).min)

    forest = {"forest": tree_attention.Forest(batch, split)} if parts or stateful or split is not None else {}
    kinds = set(layer_kinds(text))
    window = sliding_window(text)
    if stateful:
        return {"attention_mask": {"full_attention": build(window), **dict.fromkeys(recurrent.KINDS)}, **forest}
    if not kinds:
        return {"attention_mask": build(window), **forest}
    limits = {
        "sliding_attention": (window, None),
        "chunked_attention": (None, getattr(text, "attention_chunk_size", None)),
    }
    masks = {kind: build(*limits.get(kind, (None, None))) for kind in sorted(kinds)}
    # Models of these families expect a dict of masks by layer type, even if all of their layers have the same type.
    families = ("gemma", "qwen", "cohere2", "olmo3", "smollm3", "exaone4", "llama4")
    indexed = len(masks) > 1 or text.model_type.startswith(families)
    return {"attention_mask": masks if indexed else next(iter(masks.values())), **forest}


def has_recurrent_layers(model: Module) -> bool:
    """Return whether the model has recurrent layers, which mix tokens without attention. The function reads the model's class
    and config.
    """
    inner = causal_lm(model)
    return getattr(inner, "_is_stateful", False) or bool(set(layer_kinds(text_of(config_of(inner)))) - KINDS)


def rope_limits(model: Module) -> tuple[int | None, int | None]:
    """Return the sequence lengths above which a model's rotary frequencies depend on the longest sequence of the pass.

    The rope types default, linear, llama3, yarn and proportional of transformers (``ROPE_INIT_FUNCTIONS``) have no such
    limit. With ``longrope``, the whole pass uses different frequencies if its longest sequence exceeds the original context.
    With ``dynamic``, the frequencies depend on the longest sequence of all passes so far.

    Returns:
        Two lengths in tokens. A length is None if the model has no such limit. Up to the first length, ``longrope`` uses the
        frequencies of the original context. Up to the second length, ``dynamic`` uses the same frequencies in all passes.
        The number of virtual tokens is already subtracted from both lengths.
    """
    text = causal_lm(model).config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [rope for rope in (parameters, *parameters.values()) if isinstance(rope, dict) and "rope_type" in rope]
    virtual = int(unwrapped(model).active_peft_config.num_virtual_tokens) if learns_prompts(model) else 0
    switches = [rope["original_max_position_embeddings"] for rope in kinds if rope["rope_type"] == "longrope"]
    ends = [text.max_position_embeddings for rope in kinds if "dynamic" in rope["rope_type"]]
    if len(set(switches)) > 1:
        raise ModelError(
            f"layers with longrope change rotary frequencies at several lengths {sorted(set(switches))}, which is not supported."
        )
    return (min(switches) - virtual if switches else None), (min(ends) - virtual if ends else None)


def padded_layout(model: Module) -> Layout:
    """Return the layout with one padded sequence per row, for models that do not support packed prefix trees."""
    switch, end = rope_limits(model)
    return Layout("padded", row_tokens=4096, rope_switch=switch, rope_end=end)


def layout_for(
    model: Module, *, dense_mask: bool = False, autocast: torch.dtype | None = None, device: str | None = None
) -> Layout:
    """Return the fastest layout that the model's attention backend supports. `probe_layout` checks whether the model's
    results with this layout are correct.

    Args:
        model: The model.
        dense_mask: Whether attention uses a dense mask instead of tree attention.
        autocast: Dtype of matrix products under autocast. None: the dtype of the weights.
        device: Type of the training device, ``cpu`` or ``cuda``. None: the model's current device.
    """
    device = device or next(model.parameters()).device.type
    implementation = attention_name(text_of(config_of(model))) or "sdpa"
    if implementation not in MASKABLE:
        return padded_layout(model)
    switch, end = rope_limits(model)
    fastest = _dense_layout(model, device) if dense_mask else _fastest_layout(model, implementation, autocast, device)
    layout = replace(fastest, rope_switch=switch, rope_end=end)
    encoder = picture_encoder(model)
    if encoder is None:
        return layout
    family = encoder.processor.family
    if family.whole:
        return padded_layout(model)
    if family.cross:
        # Each tree needs a separate pass; `Family.cross` describes the reason.
        return replace(layout, row_tokens=1, pass_tokens=0, joins_rows=False)
    # If prompts have bidirectional attention, do not join prompts that have a common prefix, because the prefix's hidden
    # states depend on the rest of the prompt.
    return replace(layout, joins_rows=family.block != "prompt")


def _fastest_layout(model: Module, implementation: str, autocast: torch.dtype | None, device: str) -> Layout:
    if implementation == "flex_attention":
        return Layout("tree", dense_mask=True, row_tokens=16384, max_tree_tokens=65536, pad_to_multiple_of=128)
    if not dense_layers(model, autocast, device):
        return Layout("tree", row_tokens=ROW_TOKENS if device == "cpu" else gpu_tokens(model), max_tree_tokens=65536)
    return _dense_layout(model, device)


def gpu_tokens(model: Module) -> int:
    """Return the number of tokens per forward pass above which the GPU's computation takes longer than launching the
    kernels.

    On an H200, a training pass of 1,548 tokens of a 0.5B model took 37 ms of GPU time, and launching its kernels took 150
    ms. The time of kernel launches, weight casts and gradient sums does not depend on the number of tokens.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    return min(max(PASS_WORK // max(count, 1) // 128 * 128, ROW_TOKENS), MOST_GPU_TOKENS)


def _dense_layout(model: Module, device: str) -> Layout:
    # With a dense mask, the cost of attention in a row of T tokens is proportional to T^2. In addition, each pass has a
    # fixed cost for accumulating gradients. For a 135M model on 2 cores, a step with six trees of 240 tokens took 8.0 s in
    # separate passes. It took 7.5 s with two trees per row, 6.5 s with three rows per pass, and 6.0 s in one pass. Memory
    # grows with the tokens per pass (4.0 GB for 480 and 4.9 GB for 720 tokens, including the optimizer).
    if device == "cpu":
        return Layout("tree", dense_mask=True, row_tokens=256, pass_tokens=512)
    return Layout("tree", dense_mask=True, row_tokens=ROW_TOKENS, pass_tokens=gpu_tokens(model))


def dense_layers(model: Module, autocast: torch.dtype | None, device: str) -> str:
    """Return the reason why attention on a device needs a dense mask, according to the model's config. Return "" if tree
    attention is possible.
    """
    text = causal_lm(model).config.get_text_config()
    if reason := tree_attention.no_kernel(device, autocast or coarsest_dtype(model)):
        return reason
    if device != "cpu" and getattr(text, "attn_logit_softcapping", None):
        return f"attn_logit_softcapping={text.attn_logit_softcapping}"
    for name in DROPOUTS:
        if share := getattr(text, name, None):
            return f"{name}={share} in the model's config (0 allows tree attention)"
    if device != "cpu" and "chunked_attention" in layer_kinds(text):
        return "its layers use chunked attention"
    return ""


PROBED: dict[str, Layout] = {}


def coarsest_dtype(model: Module) -> torch.dtype:
    """Return the least precise dtype of a model's weights. An integer dtype (quantized weights) is less precise than any
    float dtype.

    Reading the dtype of the first parameter is not enough, because the output layer and tied embeddings can be float32 while
    layers are bfloat16.
    """
    kinds = {parameter.dtype for parameter in model.parameters()}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps if kind.is_floating_point else 1.0)


def rounds_to_tf32() -> bool:
    """Return whether torch computes products of float32 matrices on a GPU in TF32.

    If transformers has set torch's newer option (for ``tf32=True``), reading the older option ``allow_tf32`` raises an
    error.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
