"""How a model is told who sees whom in a token forest, and the probe that proves that it respects it."""

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
from posttrain.models.token_split import TokenSplit
from posttrain.types import Batch

if TYPE_CHECKING:
    from torch.nn import Module


logger = logging.getLogger(__name__)

MASKABLE = ("sdpa", "eager", "flex_attention")  # Backends that take an arbitrary mask.


# Read anew in every pass, so a probe may make them short; Llama 4 counts ``floor_scale`` in columns instead of positions.
SHRINKABLE = ("sliding_window", "attention_chunk_size", "floor_scale")
FIXED = ("window_size", "attention_window_size", "attention_window", "sliding_window_size", "local_attention")
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # Of attention's probabilities.
KINDS = {"full_attention", "sliding_attention", "chunked_attention"}  # Layers whose mask is known.


def attention_inputs(
    batch: Batch,
    model: Module,
    dtype: torch.dtype,
    span: Tensor | None = None,
    split: TokenSplit | None = None,
) -> dict[str, Any]:
    """What tells a transformers model who sees whom in this batch; ``span`` as in `forest_mask`, ``split`` as in `Forest`.

    Returns:
        ``attention_mask``: None for rows that are one plain sequence each; ``(B, T)`` where such rows are padded; else, of layers
        that take segments, a placeholder of one number beside the ``forest`` (`posttrain.models.tree_attention`); of others a
        4-D mask in the form that the backend takes (added to scores for eager and for sdpa on a CPU, bool for sdpa elsewhere,
        ``BlockMask`` for flex). A dict of them by layer type for models that mix kinds of layers.

    Raises:
        DataError: Segments of the batch are not those of its rows.
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

    def build(window: int | None, chunk: int | None = None) -> Any:
        if parts and chunk is None:
            return torch.zeros(1, 1, 1, 1, dtype=dtype, device=batch.input_ids.device)
        if implementation == "flex_attention":
            return tree_attention.block_mask(batch, window, chunk, span)
        allowed = tree_attention.forest_mask(batch, window, chunk, span)
        if implementation == "sdpa" and allowed.device.type != "cpu":
            return allowed
        # On a CPU sdpa makes numbers of a bool mask in every layer anew, and keeps all of them for backward.
        return tree_attention.added(allowed, dtype, -torch.inf if implementation == "sdpa" else torch.finfo(dtype).min)

    forest = {"forest": tree_attention.Forest(batch, split)} if parts or split is not None else {}
    kinds = set(layer_kinds(text))
    window = sliding_window(text)
    if not kinds:
        return {"attention_mask": build(window), **forest}
    limits = {
        "sliding_attention": (window, None),
        "chunked_attention": (None, getattr(text, "attention_chunk_size", None)),
    }
    masks = {kind: build(*limits.get(kind, (None, None))) for kind in sorted(kinds)}
    # Models of these families index the mask by layer type even when all layers are of one type.
    families = ("gemma", "qwen", "cohere2", "olmo3", "smollm3", "exaone4", "llama4")
    indexed = len(masks) > 1 or text.model_type.startswith(families)
    return {"attention_mask": masks if indexed else next(iter(masks.values())), **forest}


def rope_limits(model: Module) -> tuple[int | None, int | None]:
    """Lengths at which the rotary frequencies of a pass begin to depend on its longest sequence.

    Of the types that transformers has (``ROPE_INIT_FUNCTIONS``), default, linear, llama3, yarn and proportional do not.
    ``longrope`` takes other frequencies for a whole pass whose longest sequence exceeds the original context. ``dynamic`` makes
    them from the longest sequence seen, and keeps those of a longer one for the passes after it.

    Returns:
        The most tokens of a sequence below the switch of longrope, and the most that ``dynamic`` computes alike in all passes;
        None where the model has no such limit. Virtual tokens count, so they are subtracted.
    """
    text = causal_lm(model).config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [rope for rope in (parameters, *parameters.values()) if isinstance(rope, dict) and "rope_type" in rope]
    virtual = int(unwrapped(model).active_peft_config.num_virtual_tokens) if learns_prompts(model) else 0
    switches = [rope["original_max_position_embeddings"] for rope in kinds if rope["rope_type"] == "longrope"]
    ends = [text.max_position_embeddings for rope in kinds if "dynamic" in rope["rope_type"]]
    if len(set(switches)) > 1:
        raise ModelError(
            f"layers with longrope change at different lengths {sorted(set(switches))}: no pass can be right."
        )
    return (min(switches) - virtual if switches else None), (min(ends) - virtual if ends else None)


def padded_layout(model: Module) -> Layout:
    """One padded row a sequence, for models that cannot take a forest."""
    switch, end = rope_limits(model)
    return Layout("padded", row_tokens=4096, rope_switch=switch, rope_end=end)


def layout_for(
    model: Module, *, dense_mask: bool = False, autocast: torch.dtype | None = None, device: str | None = None
) -> Layout:
    """The layout that the model's attention backend is fastest with; not yet proven, see `probe_layout`.

    Args:
        model: The model.
        dense_mask: Attention must take a mask.
        autocast: What products are computed in where that is not the dtype of the weights.
        device: ``cpu`` or ``cuda``: on which it trains; None: where it is now.
    """
    device = device or next(model.parameters()).device.type
    implementation = attention_name(text_of(config_of(model))) or "sdpa"
    if implementation not in MASKABLE:
        return padded_layout(model)
    switch, end = rope_limits(model)
    fastest = _dense_layout(device) if dense_mask else _fastest_layout(model, implementation, autocast, device)
    layout = replace(fastest, rope_switch=switch, rope_end=end)
    encoder = picture_encoder(model)
    if encoder is None:
        return layout
    family = encoder.processor.family
    if family.whole:
        return padded_layout(model)
    if family.cross:
        # Every tree a pass of its own, see `Family.cross`.
        return replace(layout, row_tokens=1, pass_tokens=0, joins_rows=False)
    # Where a prompt is read both ways, its tokens are what its end makes of them.
    return replace(layout, joins_rows=family.block != "prompt")


def _fastest_layout(model: Module, implementation: str, autocast: torch.dtype | None, device: str) -> Layout:
    if implementation == "flex_attention":
        return Layout("tree", dense_mask=True, row_tokens=16384, max_tree_tokens=65536, pad_to_multiple_of=128)
    if not dense_layers(model, autocast, device):
        return Layout("tree", row_tokens=2048, max_tree_tokens=65536)
    return _dense_layout(device)


def _dense_layout(device: str) -> Layout:
    # A dense mask costs T^2 attention and a pass has a fixed cost (gradients are added up): measured on a 135M model and 2
    # cores, six trees of 240 tokens cost 8.0 s one by one, 7.5 s two a row, 6.5 s three rows a pass, 6.0 s all in one pass,
    # and memory grows with the tokens of a pass (4.0 GB at 480, 4.9 GB at 720, optimiser included).
    on_cpu = Layout("tree", row_tokens=256, pass_tokens=512)
    return replace(on_cpu if device == "cpu" else Layout("tree", row_tokens=2048), dense_mask=True)


def dense_layers(model: Module, autocast: torch.dtype | None, device: str) -> str:
    """Why attention of a model needs a mask on a device, as far as its config tells; empty where it takes segments."""
    text = causal_lm(model).config.get_text_config()
    if reason := tree_attention.no_kernel(device, autocast or coarsest_dtype(model)):
        return reason
    if getattr(text, "attn_logit_softcapping", None):
        return f"attn_logit_softcapping={text.attn_logit_softcapping}"
    for name in DROPOUTS:
        if share := getattr(text, name, None):
            return f"{name}={share}"
    if "chunked_attention" in layer_kinds(text):
        return "layers attend within chunks"
    return ""


PROBED: dict[str, Layout] = {}


def coarsest_dtype(model: Module) -> torch.dtype:
    """The dtype of the weights that round most; packed ones are whole numbers and round more than any. The first may differ:
    an output layer in float32 on layers in bfloat16, and embeddings that are tied to it.
    """
    kinds = {parameter.dtype for parameter in model.parameters()}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps if kind.is_floating_point else 1.0)


def rounds_to_tf32() -> bool:
    """Return whether products of float32 matrices on a GPU are computed in TF32.

    torch refuses to read ``allow_tf32`` once its newer setting was written, as transformers does for ``tf32=True``.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
