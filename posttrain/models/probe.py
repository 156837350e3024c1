"""Layouts and pictures are proven on a model: log-probs and gradients of small tries against each sequence alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from posttrain.data.forest import Layout, collate
from posttrain.errors import ModelError
from posttrain.models import tree_attention
from posttrain.models.architecture import (
    attention_name,
    config_of,
    head_size,
    key_value_heads,
    layer_kinds,
    query_heads,
)
from posttrain.models.heads import adapters_of, causal_lm, evaluating, learns_prompts, picture_encoder, unwrapped
from posttrain.models.vision import for_tower, probe_pictures, probe_rows
from posttrain.pictures.picture import Picture, read_picture
from posttrain.types import Row

if TYPE_CHECKING:
    from torch import nn
    from torch.nn import Module

    from posttrain.pictures.processors import PictureProcessor
from posttrain.models.attention import FIXED, KINDS, PROBED, SHRINKABLE, coarsest_dtype, layout_for, padded_layout

logger = logging.getLogger(__name__)


TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # Of the spread of the truth; 0.1 in half precision.


ROUNDING = 8 * torch.finfo(torch.float32).eps  # Of the largest number: log-probs are computed in float32.


REACH = 0.1  # Times a tolerance: nats by which another image must at least move a log-prob.


NARROW = 4  # Tokens of a window that was made short: less than any sequence of a probe has.


LONGEST = 1024  # Tokens of a prompt in a probe that must reach beyond a window as it is.


def probe_key(model: Module) -> str:
    """What a probe's verdict holds for: class, config, backend, dtypes, device and adapters; two configs of a class differ."""
    inner: Any = causal_lm(model)
    adapters = {name: str(one) for name, one in adapters_of(model).items()}
    text = inner.config.get_text_config()
    return json.dumps([
        type(inner).__module__, type(inner).__qualname__, inner.config.to_dict(), str(attention_name(text)), adapters,
        str(getattr(unwrapped(model), "active_adapter", "")), learns_prompts(model),
        str(coarsest_dtype(model)), next(model.parameters()).device.type, picture_encoder(model) is not None,
    ], sort_keys=True, default=str)  # fmt: skip


def disagreement(values: Tensor, truth: Tensor, share: float) -> str:
    """How far numbers are from the truth, as a reason; empty where that is less than ``share`` of the truth's spread.

    The spread, because log-probs of a model with tiny logits differ by little whatever attention it computes.
    """
    values, truth = values.float().cpu(), truth.float().cpu()
    gap = float((values - truth).abs().max())
    allowed = max(share * float(truth.std(unbiased=False)), ROUNDING * float(truth.abs().max()))
    return "" if gap <= allowed else f"outputs differ by {gap:.2g}, allowed {allowed:.2g}"


@torch.no_grad()
def probe_cases(model: Module) -> list[tuple[int, AbstractContextManager[None]]]:
    """What a probe must see: tokens of its longest prompt, and a context in which to look.

    The model as it is; and with its windows, which are longer than a probe can be, made `NARROW` inside the context. A window
    that cannot be made short is looked at with a prompt that is longer than it.

    Raises:
        ModelError: Such a window is longer than `LONGEST`; or layers hand something on from token to token beside attention,
            which is known without a look, and which the weights of today may not show.
    """
    cases: list[tuple[int, AbstractContextManager[None]]] = [(7, nullcontext())]
    inner: Any = causal_lm(model)
    text = inner.config.get_text_config()
    kinds = layer_kinds(text)
    if inner._is_stateful or set(kinds) - KINDS:
        raise ModelError(f"it has layers that mix tokens by other means than attention ({sorted(set(kinds) - KINDS)})")
    sizes = {name: getattr(text, name, None) for name in (*SHRINKABLE, *FIXED)}
    windows = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}
    if kinds and all(kind == "full_attention" for kind in kinds):
        windows.pop("sliding_window", None)
    shrinkable = {name: size for name, size in windows.items() if name in SHRINKABLE and size > NARROW}
    if shrinkable:
        cases.append((7, _narrowed(model, shrinkable)))
        rows, before = _probe_rows(text.vocab_size), _truth(model, _probe_rows(text.vocab_size))
        with _narrowed(model, shrinkable):
            shrunk = bool(disagreement(_truth(model, rows), before, TOLERANCE[torch.float32]))
        windows = {name: size for name, size in windows.items() if not shrunk or name not in shrinkable}
    longest = max(windows.values(), default=0)
    if longest > LONGEST:
        raise ModelError(f"a window of {longest} tokens cannot be made short, and a probe has at most {LONGEST}")
    return [*cases, (longest + 7, nullcontext())] if longest else cases


@contextmanager
def _narrowed(model: Module, windows: dict[str, int]) -> Iterator[None]:
    """Inside, these numbers are `NARROW` wherever configs and layers of the model have them."""
    configs = [config_of(module) for module in model.modules()]
    configs += [one.get_text_config() for one in configs if isinstance(one, PretrainedConfig)]
    holders = {id(one): one for one in (*model.modules(), *configs) if one is not None}.values()
    windowed = [(one, name, size) for one in holders for name, size in windows.items() if vars(one).get(name) == size]
    try:
        for one, name, _ in windowed:
            setattr(one, name, NARROW)
        yield
    finally:
        for one, name, size in windowed:
            setattr(one, name, size)


@torch.no_grad()
def probe_layout(model: Module, autocast: torch.dtype | None = None, device: torch.device | None = None) -> Layout:
    """The first of three layouts with which the model computes a forest as it computes each of its sequences alone.

    Segments (`posttrain.models.tree_attention`), a dense mask, or padded rows of one sequence each; the log says which of them a
    run uses and why it is not the one before. Runs once per config, attention backend, dtype and adapter: three branches of one
    prompt beside a second tree and a trie of two turns, against each sequence alone through the model's own forward and its own
    output head, in all `probe_cases`. Log-probs must agree to 1e-4 of their spread in float32 (0.1 in half precision); so must
    gradients of attention by parts. State-space, linear-attention and some custom models do not pass, and train on padded rows.
    That frequencies of longrope depend on the longest sequence of a pass is not probed: it is known (`rope_limits`), and the
    layout keeps such sequences apart.

    Args:
        model: Ready to run.
        autocast: What products are computed in where that is not the dtype of the weights; on a CPU the probe looks without.
        device: On which it trains, and whose kernels are tried, where that is not where it is now: FSDP moves it later.
    """
    device = device or next(model.parameters()).device
    autocast = None if device.type == "cpu" else autocast
    key = f"{probe_key(model)} {autocast} {device.type}"
    if key in PROBED:
        return PROBED[key]
    layout = layout_for(model, autocast=autocast, device=device.type)
    text = causal_lm(model).config.get_text_config()
    name = type(model).__name__ + " " + text.model_type
    backend = str(attention_name(text))
    if layout.kind == "tree" and not layout.dense_mask and (fault := _fault(model, layout, device, autocast)):
        dense = layout_for(model, dense_mask=True, device=device.type)
        layout = replace(dense, rope_switch=layout.rope_switch, rope_end=layout.rope_end)
        logger.warning(
            "%s with attn_implementation=%r does not take segments of sequences (%s). Rows get a dense mask: correct, and "
            "attention costs the square of a row.",
            name,
            backend,
            fault,
        )
    if layout.kind == "tree" and layout.dense_mask and (fault := _fault(model, layout, device)):
        logger.warning(
            "%s with attn_implementation=%r does not compute shared prompts and packed rows as it computes sequences "
            "alone (%s). Training uses padded rows: correct, and slower.",
            name,
            backend,
            fault,
        )
        layout = padded_layout(model)
    pictured = probe_rows(model) if layout.kind == "padded" and picture_encoder(model) is not None else []
    if pictured and (fault := disagreement(_fast(model, pictured, layout), _truth(model, pictured), _share(model))):
        raise ModelError(
            f"{type(causal_lm(model)).__name__} does not compute rows with images as the processor's own tensors do ({fault}), "
            "not even one sequence a row. Fix: a model of another family, or text alone."
        )
    PROBED[key] = layout
    return layout


@torch.no_grad()
def prove_pictures(model: nn.Module) -> None:
    """Find the positions and blocks of a family that is not known: those that give what its processor's own tensors give.

    Args:
        model: With `posttrain.models.vision.install_pictures`, inside of its wrappers.

    Raises:
        ModelError: There are none, with how far each is off.
    """
    reader, training, faults = picture_encoder(model).processor, model.training, []
    orders = dict.fromkeys((reader.family.positions, "plain"))
    choices: list[dict[str, Any]] = [{"positions": p, "block": b} for p in orders for b in ("none", "image")]
    choices.append({"positions": "plain", "block": "none", "whole": True})
    model.eval()
    for choice in choices:
        reader.family = replace(reader.family, **choice)
        try:
            fault = _picture_fault(model, reader)
        except Exception as error:  # A forward that takes no features, say; whatever it is, nothing is proven.
            fault = f"{type(error).__name__}: {error}"
        if not fault:
            break
        faults.append(f"{', '.join(f'{name} {value}' for name, value in choice.items())}: {fault:.200}")
    model.train(training)
    if len(faults) == len(choices):
        del model.picture_encoder
        raise ModelError(
            f"{type(model).__name__} is of no family that is known, and its rows with images could not be shown to give what its "
            f"processor's own tensors give ({'; '.join(faults)}). Fix: a model of a family that is known (docs/vision.md), or "
            "rows without images."
        )
    how = "each sequence a row, with its processor's own tensors" if reader.family.whole else str(choice)
    logger.warning(
        "%s is of no family that is known. Compared with what its processor and its own forward give of two prompts, rows with "
        "images are right: %s.",
        type(model).__name__,
        how,
    )


def _picture_fault(model: nn.Module, reader: PictureProcessor) -> str:
    """Why padded rows with pictures do not give what each sequence alone gives; empty where they do.

    Each sequence alone is what the processor makes of all of its text and pictures, and the model's own forward.
    """
    share, mark, (first, second, _) = _share(model), reader.placeholder, probe_pictures(reader)
    # Where a run of placeholders is one image to the processor, rows have none (see `PictureProcessor.place`).
    gap = " " if reader.family.positions == "grid" else ""
    several = f"a {mark} b {mark}{gap}{mark} c"
    rows, truth, moved = [], [], []
    for text, pictures in ((f"a {mark} b", [first]), (several, [second, first, second]), ("no picture", [])):
        for answer in (" left, or right?", " it is blue"):
            ids, placed = reader.encode(text + answer, pictures)
            inputs = _own_inputs(reader, text + answer, pictures)
            if ids != inputs["input_ids"][0].tolist():
                return f"the processor writes {inputs['input_ids'].shape[1]} tokens, and {len(ids)} were expected"
            # Pictures behind the first stand in the answer.
            start = placed[0].start + placed[0].count if placed else 1
            after = [replace(one, start=one.start - start) for one in placed[1:]]
            judged = [int(token != reader.token_id) for token in ids[start:]]
            rows.append(Row(ids[:start], [ids[start:]], [judged], pictures=[placed[:1], after]))
            truth.append(_own_logps(model, inputs)[start - 1 :])
            changed = torch.cat([inputs["input_ids"][:, :-1], inputs["input_ids"][:, :1]], 1)
            if gap := disagreement(
                _own_logps(model, {**inputs, "input_ids": changed})[start - 1 : -1], truth[-1][:-1], share
            ):
                return f"earlier tokens see later ones: {gap}"
            others = [read_picture(one.load().rotate(180)) for one in pictures]
            moved.append(_own_logps(model, _own_inputs(reader, text + answer, others))[start - 1 :])
    judged = _judged(rows)
    told, other = torch.cat(truth)[judged], torch.cat(moved)[judged]
    padded = _fast(model, rows, Layout("padded", row_tokens=4096)).float().cpu()
    gap, reach = (float((one - told).abs().max()) for one in (padded, other))
    # What images do must stand out from what the two roads differ by, else their agreement says nothing of images.
    if not (fault := disagreement(padded, told, share)) and reach <= max(10 * gap, share * REACH):
        return f"PT-G005: other images move log-probs by {reach:.2g}, and rows differ from sequences alone by {gap:.2g}"
    return fault


def _own_inputs(reader: PictureProcessor, text: str, pictures: Sequence[Picture]) -> dict[str, Tensor]:
    """What a user of `transformers` gets of a text with one placeholder a picture."""
    images = [[picture.load() for picture in pictures]] if pictures else None
    inputs = reader.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    return {name: value for name, value in inputs.items() if name not in ("attention_mask", "labels")}


def _own_logps(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """``(T - 1,)`` log-probs of the tokens of one sequence behind its first, by the model's own forward."""
    ids = inputs["input_ids"][0]
    logits = model(**for_tower(model, inputs), use_cache=False).logits[0].float().cpu()
    return torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0]


def _fault(model: Module, layout: Layout, device: torch.device, autocast: torch.dtype | None = None) -> str:
    """Why a model cannot take this layout; empty where it can. Any failure means the same."""
    here = next(model.parameters()).device.type
    computed = nullcontext() if autocast is None or here == "cpu" else torch.autocast(here, dtype=autocast)
    try:
        with evaluating(model), tree_attention.uninstalled(model):
            if layout.dense_mask:
                return _forest_fault(model, layout)
            with tree_attention.refusing(), computed:
                return _kernel_fault(model, device, autocast) or _forest_fault(model, layout)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _kernel_fault(model: Module, device: torch.device, autocast: torch.dtype | None) -> str:
    """What log-probs alone do not show: gradients of the kernels that a device has, at the heads of this model."""
    text, weight = causal_lm(model).config.get_text_config(), next(model.parameters())
    heads = query_heads(text)
    if not heads:
        return ""
    dtype = autocast or (coarsest_dtype(model) if coarsest_dtype(model).is_floating_point else weight.dtype)
    return tree_attention.kernel_fault(device, dtype, heads, key_value_heads(text), head_size(text))


def _forest_fault(model: Module, layout: Layout) -> str:
    """Why a forest is not what its sequences are alone; empty where it is."""
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    share = _share(model)
    encoder = picture_encoder(model)
    # Where a whole prompt is read both ways, there is no prompt without a picture.
    always = encoder is not None and encoder.processor.family.block == "prompt"
    for prompt, context in () if always else probe_cases(model):
        rows = _probe_rows(vocabulary, prompt)
        wide = replace(layout, row_tokens=512 + prompt, pass_tokens=0, max_tree_tokens=4 * LONGEST)
        with context:
            fault = disagreement(_fast(model, rows, wide), _truth(model, rows), share)
        if fault:
            return fault
    pictured = [] if encoder is None else probe_rows(model)
    return disagreement(_fast(model, pictured, layout), _truth(model, pictured), share) if pictured else ""


def _share(model: Module) -> float:
    """Of the truth's spread, by which numbers may differ."""
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        return 0.1
    return TOLERANCE.get(coarsest_dtype(model), 0.1)


@torch.no_grad()
def probe_head(model: Module) -> None:
    """Let a model compute its own logits where the chunked head does not say what its forward says.

    Compared on one padded sequence, so that what is wrong can only be the head; a classifier has none.
    """
    from posttrain.models.heads import score_layer

    inner: Any = causal_lm(model)
    if score_layer(inner) is not None:
        return
    rows = [_probe_rows(model.config.get_text_config().vocab_size)[1]]
    with evaluating(model):
        chunked, truth = _fast(model, rows, Layout("padded", row_tokens=512)), _truth(model, rows)
    fault = disagreement(chunked, truth, _share(model))
    if fault:
        inner.own_logits = True
        logger.warning(
            "%s changes its logits in a way that the chunked head does not know: %s. Training takes the model's own logits: "
            "right, and with more memory.",
            type(inner).__name__,
            fault,
        )


def _fast(model: Module, rows: Sequence[Row], layout: Layout) -> Tensor:
    """Log-probs of a forest's completions, in the order of the rows, or a classifier's scores."""
    from posttrain.data.forest import split_by_sequence
    from posttrain.models.forward import forward
    from posttrain.models.heads import score_layer

    scored = score_layer(causal_lm(model)) is not None
    by_completion: dict[int, Tensor] = {}
    for batch in collate(rows, pad_token_id=0, layout=layout):
        batch = batch.to(next(model.parameters()).device)
        out: Any = forward(model, batch, frozenset({"scores"}) if scored else frozenset({"logp"}))
        parts = out.scores[:, None] if scored else split_by_sequence(out.logp, batch)
        by_completion |= dict(zip(batch.origin, parts, strict=True))
    values = torch.cat([by_completion[i] for i in range(len(by_completion))])
    return values if scored else values[_judged(rows)]


def _truth(model: Module, rows: Sequence[Row]) -> Tensor:
    """What each sequence alone says, through the model as it was given."""
    from posttrain.models.forward import sequence_logps, sequence_scores
    from posttrain.models.heads import score_layer

    if score_layer(causal_lm(model)) is not None:
        return sequence_scores(model, rows)[:, 0]
    return torch.cat(sequence_logps(model, rows))[_judged(rows)]


def _judged(rows: Sequence[Row]) -> Tensor:
    """Which completion tokens have a log-prob; zeros of the others would widen the spread."""
    return torch.tensor([bool(m) for row in rows for mask in row.loss_masks for m in mask])


def random_prompts(vocabulary: int, sizes: Sequence[int]) -> list[list[int]]:
    """Made-up sequences of these lengths, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    # Placeholders of images, which would want some, are added behind the words.
    return [torch.randint(0, vocabulary // 2, (n,), generator=generator).tolist() for n in sizes]


def _probe_rows(vocabulary: int, prompt: int = 7) -> list[Row]:
    *group, shared, alone = random_prompts(vocabulary, (5, 3, 4, prompt, 6))
    # The next turn of an episode begins with the one before it, and forks off another answer.
    turn = Row([*shared, *group[0], *alone[:2]], [alone[2:], alone[3:]], [[1] * 4, [1] * 3])
    return [Row(shared, group, [[1] * len(c) for c in group]), Row([], [alone], [[0] + [1] * 5]), turn]
