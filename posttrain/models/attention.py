"""What a token forest looks like to an attention backend, and the probe that proves a model respects it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.data.forest import Layout, collate
from posttrain.types import Batch, Row

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PretrainedConfig

__all__ = ["attention_mask", "coarsest_dtype", "forest_mask", "layout_for", "probe_head", "probe_layout"]

logger = logging.getLogger(__name__)

MASKABLE = ("sdpa", "eager", "flex_attention")  # Backends that take an arbitrary mask.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # Half precision is compared at 0.1, see `probe_layout`.


def forest_mask(batch: Batch, window: int | None = None) -> Tensor:
    """Which token may attend to which: earlier, same tree, in the prefix or in its own branch.

    Args:
        batch: A token forest.
        window: Sliding-window size in positions, counted along a branch (so a branch's window reaches into its prefix).

    Returns:
        ``(B, 1, T, T)`` bool, true where row-token attends to column-token. Padding attends to itself only, because a
        softmax over nothing is not a number.
    """
    tree, branch, position = batch.tree, batch.branch, batch.position_ids
    index = torch.arange(tree.shape[1], device=tree.device)
    allowed = (index[:, None] >= index[None, :]) & (tree[:, :, None] == tree[:, None, :]) & (tree[:, None, :] >= 0)
    allowed &= (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    if window is not None:
        allowed &= position[:, :, None] - position[:, None, :] < window
    allowed |= (index[:, None] == index[None, :]) & (tree[:, :, None] < 0)
    return allowed[:, None]


def _block_mask(batch: Batch, window: int | None) -> Any:
    """The same rule as `forest_mask`, block-sparse for FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask

    tree, branch, position = batch.tree, batch.branch, batch.position_ids

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (tree[b, q] == tree[b, k]) & (q >= k)
        seen = (branch[b, k] == 0) | (branch[b, k] == branch[b, q])
        near = seen if window is None else seen & (position[b, q] - position[b, k] < window)
        return (same & near & (tree[b, k] >= 0)) | ((q == k) & (tree[b, q] < 0))

    rows, width = batch.input_ids.shape
    return create_block_mask(rule, B=rows, H=None, Q_LEN=width, KV_LEN=width, device=str(tree.device))


def attention_mask(batch: Batch, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """The ``attention_mask`` argument of a transformers model for this batch.

    Returns:
        None for rows that are one plain sequence each; ``(B, T)`` where such rows are padded; else a 4-D mask in the form
        the backend takes (added to scores for eager and for sdpa on a CPU, bool for sdpa elsewhere, ``BlockMask`` for
        flex), or a dict of them by layer type for models that mix full and sliding layers.
    """
    text = config.get_text_config()
    if int(batch.tree.max()) <= 0 and int(batch.branch.max()) == 0:
        return None if bool((batch.tree == 0).all()) else (batch.tree == 0).long()
    implementation = getattr(text, "_attn_implementation", None) or "sdpa"

    def build(window: int | None) -> Any:
        if implementation == "flex_attention":
            return _block_mask(batch, window)
        allowed = forest_mask(batch, window)
        if implementation == "sdpa" and allowed.device.type != "cpu":
            return allowed
        # On a CPU sdpa makes numbers of a bool mask in every layer anew, and keeps all of them for backward.
        never = -torch.inf if implementation == "sdpa" else torch.finfo(dtype).min
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, never)

    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if not kinds:
        return build(window)
    masks = {kind: build(window if kind == "sliding_attention" else None) for kind in sorted(kinds)}
    return masks if len(masks) > 1 or _takes_mask_by_layer(text) else next(iter(masks.values()))


def _takes_mask_by_layer(text: PretrainedConfig) -> bool:
    """Models of these families index the mask by layer type even when all layers are of one type."""
    return text.model_type.startswith(("gemma", "qwen", "cohere2", "olmo3", "smollm3", "exaone4"))


def layout_for(model: Module) -> Layout:
    """The layout that the model's attention backend is fastest with; not yet proven, see `probe_layout`."""
    config: Any = model.config
    implementation = getattr(config.get_text_config(), "_attn_implementation", None) or "sdpa"
    if implementation not in MASKABLE:
        return Layout("padded", row_tokens=4096)
    if implementation == "flex_attention":
        return Layout("tree", row_tokens=16384, max_tree_tokens=65536, pad_to_multiple_of=128)
    # A dense mask costs T^2 attention and a pass has a fixed cost (gradients are added up): measured on a 135M model and 2
    # cores, six trees of 240 tokens cost 8.0 s one by one, 7.5 s two a row, 6.5 s three rows a pass, 6.0 s all in one pass,
    # and memory grows with the tokens of a pass (4.0 GB at 480, 4.9 GB at 720, optimiser included).
    on_gpu = next(model.parameters()).device.type != "cpu"
    return Layout("tree", row_tokens=2048) if on_gpu else Layout("tree", row_tokens=256, pass_tokens=512)


PROBED: dict[tuple[str, str, str], Layout] = {}


def coarsest_dtype(model: Module) -> torch.dtype:
    """The dtype of the weights that round most; packed ones are whole numbers and round more than any. The first may differ:
    an output layer in float32 on layers in bfloat16, and embeddings that are tied to it.
    """
    kinds = {parameter.dtype for parameter in model.parameters()}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps if kind.is_floating_point else 1.0)


@torch.no_grad()
def probe_layout(model: Module) -> Layout:
    """`layout_for`, or the padded layout where the model does not compute a tree as it computes its sequences.

    Runs once per model class, attention backend and dtype: three branches of one prompt beside a second tree, against
    each sequence alone through the model's own forward and its own output head. Log-probs must agree to 1e-4 in float32
    (0.1 in half precision). State-space, linear-attention and some custom models do not pass, and train on padded rows.
    """
    config: Any = model.config
    parameter = next(model.parameters())
    implementation = str(getattr(config.get_text_config(), "_attn_implementation", None))
    dtype = coarsest_dtype(model)
    key = (type(model).__name__ + config.model_type, implementation, f"{dtype}{parameter.device.type}")
    if key in PROBED:
        return PROBED[key]
    layout = layout_for(model)
    if layout.kind == "tree":
        rows = _probe_rows(config.get_text_config().vocab_size)
        training = model.training
        model.eval()
        try:
            (batch,) = collate(rows, pad_token_id=0, layout=Layout("tree", row_tokens=512))
            gap = _gap(model, rows, batch.to(parameter.device))
            reason = "" if gap <= TOLERANCE.get(dtype, 0.1) else f"outputs differ by {gap:.2g}"
        except Exception as error:  # Any failure means the same: this model cannot take a forest.
            reason = f"{type(error).__name__}: {error}"
        finally:
            model.train(training)
        if reason:
            logger.warning(
                "%s with attn_implementation=%r does not compute shared prompts and packed rows as it computes sequences "
                "alone (%s). Training uses padded rows: correct, and slower.",
                *key[:2],
                reason,
            )
            layout = Layout("padded", row_tokens=4096)
    PROBED[key] = layout
    return layout


@torch.no_grad()
def probe_head(model: Module) -> None:
    """Let a model compute its own logits where the chunked head does not say what its forward says.

    Compared on one padded sequence, so that what is wrong can only be the head; a classifier has none.
    """
    from posttrain.models.heads import causal_lm, score_layer

    inner: Any = causal_lm(model)
    if score_layer(inner) is not None:
        return
    parameter = next(model.parameters())
    row = _probe_rows(model.config.get_text_config().vocab_size)[1]
    (batch,) = collate([row], pad_token_id=0, layout=Layout("padded", row_tokens=512))
    training = model.training
    model.eval()
    gap = _gap(model, [row], batch.to(parameter.device))
    model.train(training)
    if gap > TOLERANCE.get(coarsest_dtype(model), 0.1):
        inner.own_logits = True
        logger.warning(
            "%s changes its logits in a way that the chunked head does not know: log-probs differ by %.2g. Training takes the "
            "model's own logits: right, and with more memory.",
            type(inner).__name__, gap,
        )  # fmt: skip


def _gap(model: Module, rows: list[Row], batch: Batch) -> float:
    """Largest difference between a forest's log-probs (or a classifier's scores) and those of its sequences alone."""
    from posttrain.models.forward import forward, sequence_logps, sequence_scores
    from posttrain.models.heads import causal_lm, score_layer

    if score_layer(causal_lm(model)) is not None:
        fast = forward(model, batch, frozenset({"scores"})).scores
        truth = sequence_scores(model, rows)[:, 0][torch.tensor(batch.origin)]
        return float((fast - truth).abs().max() / truth.abs().max().clamp_min(1.0))  # type: ignore[operator]
    return float((forward(model, batch).logp - _on_forest(sequence_logps(model, rows), batch)).abs().max())  # type: ignore[operator]


def _probe_rows(vocabulary: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:
        return torch.randint(0, vocabulary, (n,), generator=generator).tolist()

    group = [draw(5), draw(3), draw(4)]
    return [Row(draw(7), group, [[1] * len(c) for c in group]), Row([], [draw(6)], [[1] * 6])]


def _on_forest(per_sequence: list[Tensor], batch: Batch) -> Tensor:
    """Write one 1-D tensor a completion onto the batch's ``(B, T)`` grid."""
    grid = torch.zeros(batch.input_ids.shape, device=batch.input_ids.device)
    for s, origin in enumerate(batch.origin):
        grid[batch.sequence == s] = per_sequence[origin].to(grid)
    return grid * batch.loss_mask
