"""Probes that run a model on small packed prefix trees. The log-probs and gradients are compared with those of separate
sequences.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from posttrain.data.forest import Layout, collate
from posttrain.errors import ConfigError, ModelError, PosttrainError
from posttrain.models import tree_attention
from posttrain.models.architecture import (
    attention_name,
    config_of,
    head_size,
    key_value_heads,
    layer_configs,
    layer_kinds,
    query_heads,
)
from posttrain.models.heads import (
    adapter_kind,
    adapters_of,
    causal_lm,
    evaluating,
    learns_prompts,
    picture_encoder,
    score_layer,
    unwrapped,
)
from posttrain.models.recurrent import table as recurrent
from posttrain.models.reference import use_adapter
from posttrain.types import Row

if TYPE_CHECKING:
    from torch.nn import Module
from posttrain.models.attention import (
    FIXED,
    KINDS,
    PROBED,
    SHRINKABLE,
    coarsest_dtype,
    dense_layers,
    has_recurrent_layers,
    layout_for,
    padded_layout,
    rounds_to_tf32,
)

logger = logging.getLogger(__name__)


# Maximum allowed difference between outputs and reference values, as a fraction of the reference values' standard deviation.
# In half precision, the maximum is 0.1.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}


# Rounding error of float32 log-probs, as a fraction of the largest absolute log-prob.
ROUNDING = 8 * torch.finfo(torch.float32).eps


TF32_EPS = 2.0**-10  # Relative precision of TF32, whose mantissa has 10 bits.


# ROUNDED is the number of times that a comparison is repeated, each time with different rounding errors. FEW is the maximum
# share of compared values that may differ because of rounding.
ROUNDED, FEW = 16, 0.25


# Size in tokens to which a probe reduces attention windows. All sequences of a probe are longer than this size.
NARROW = 4


SHORT = 7  # Length of a probe prompt in tokens, unless a window needs a longer prompt.


# Maximum length of a probe prompt in tokens, which must be larger than attention windows that cannot be reduced.
LONGEST = 1024


def probe_key(model: Module) -> str:
    """Return the cache key of a probe's result, from the model's class, config, attention backend, dtype, device type and
    adapters.
    """
    inner: Any = causal_lm(model)
    adapters = {name: str(adapter) for name, adapter in adapters_of(model).items()}
    text = inner.config.get_text_config()
    return json.dumps([
        type(inner).__module__, type(inner).__qualname__, inner.config.to_dict(), str(attention_name(text)), adapters,
        str(getattr(unwrapped(model), "active_adapter", "")), learns_prompts(model),
        str(coarsest_dtype(model)), next(model.parameters()).device.type, picture_encoder(model) is not None,
    ], sort_keys=True, default=str)  # fmt: skip


def disagreement(values: Tensor, truth: Tensor, share: float) -> str:
    """Describe the difference between ``values`` and ``truth``. Return "" if the difference is at most ``share`` times the
    standard deviation of ``truth``.

    The tolerance is relative to the standard deviation, because a model with tiny logits has almost the same log-probs even if
    attention is wrong.
    """
    values, truth = values.float().cpu(), truth.float().cpu()
    gap, allowed = float((values - truth).abs().max()), _allowed(truth, share)
    return "" if gap <= allowed else f"outputs differ by {gap:.2g}, allowed {allowed:.2g}"


def _allowed(truth: Tensor, share: float) -> float:
    return max(share * float(truth.std(unbiased=False)), ROUNDING * float(truth.abs().max()))


def steady_disagreement(model: Module, values: Tensor, compute: Callable[[], Tensor], share: float) -> str:
    """Describe the difference between ``values`` and ``compute()`` (see `disagreement`). Ignore a few values that differ only
    because of rounding.

    Rounding can change the expert that a router chooses. In half precision, a different expert can change single log-probs a
    lot, even if the mixture-of-experts model is correct. If few values differ, ``compute`` is therefore repeated with
    different rounding errors.
    """
    truth = compute()
    if not (fault := disagreement(values, truth, share)):
        return ""
    values, truth = values.float().cpu(), truth.float().cpu()
    allowed = _allowed(truth, share)
    far = ~((values - truth).abs() <= allowed)
    with rounded_otherwise(model):
        for _ in range(ROUNDED if float(far.float().mean()) <= FEW else 0):
            far &= ~((compute().float().cpu() - truth).abs() > allowed)
            if not far.any():
                return ""
    return fault


@contextmanager
def rounded_otherwise(model: Module) -> Iterator[None]:
    """Add small errors to the outputs of a model's modules inside the context. The errors have the size of rounding errors in
    the modules' dtype (or TF32).
    """
    generators, tf32 = dict[torch.device, torch.Generator](), rounds_to_tf32()

    def change(module: Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        generator = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(0))
        share = torch.rand(output.shape, generator=generator, device=output.device) - 0.5
        eps = TF32_EPS if tf32 and output.dtype == torch.float32 else torch.finfo(output.dtype).eps
        return (output * (1 + eps * share)).to(output.dtype)

    handles = [m.register_forward_hook(change) for m in model.modules() if next(m.children(), None) is None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def probe_cases(model: Module) -> list[tuple[int, AbstractContextManager[None]]]:
    """Return the cases of a probe. Each case consists of the length of its longest prompt in tokens and a context in which
    the model runs.

    The first case is the unchanged model. The second case reduces the model's attention windows to `NARROW` inside the context,
    because they are longer than the sequences of a probe. A window that cannot be reduced is tested with a longer prompt.

    Raises:
        ModelError: A window that cannot be reduced is longer than `LONGEST`, or unsupported layers mix tokens without
            attention. Unsupported layers are detected in the config, because a probe with the current weights might not
            detect them.
    """
    cases: list[tuple[int, AbstractContextManager[None]]] = [(SHORT, nullcontext())]
    inner: Any = causal_lm(model)
    text = inner.config.get_text_config()
    kinds = layer_kinds(text)
    if has_recurrent_layers(model) and not recurrent.replaced(inner):
        raise ModelError(f"the model has layers that mix tokens without attention ({sorted(set(kinds) - KINDS)})")
    sizes = {name: getattr(text, name, None) for name in (*SHRINKABLE, *FIXED)}
    windows = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}
    if kinds and all(kind == "full_attention" for kind in kinds):
        windows.pop("sliding_window", None)
    shrinkable = {name: size for name, size in windows.items() if name in SHRINKABLE and size > NARROW}
    if shrinkable:
        cases.append((SHORT, _narrowed(model, shrinkable)))
        rows, before = _probe_rows(text.vocab_size), _truth(model, _probe_rows(text.vocab_size))
        with _narrowed(model, shrinkable):
            shrunk = bool(disagreement(_truth(model, rows), before, TOLERANCE[torch.float32]))
        windows = {name: size for name, size in windows.items() if not shrunk or name not in shrinkable}
    longest = max(windows.values(), default=0)
    if longest > LONGEST:
        raise ModelError(f"a window of {longest} tokens cannot be reduced to the {LONGEST} tokens of a probe")
    return [*cases, (longest + SHORT, nullcontext())] if longest else cases


@contextmanager
def _narrowed(model: Module, windows: dict[str, int]) -> Iterator[None]:
    """Set the attention windows in ``windows`` to the size `NARROW` in the model's configs and layers, inside the context."""
    configs = [config_of(module) for module in model.modules()]
    configs += [obj.get_text_config() for obj in configs if isinstance(obj, PretrainedConfig)]
    holders = {id(obj): obj for obj in (*model.modules(), *configs) if obj is not None}.values()
    windowed = [(obj, name, size) for obj in holders for name, size in windows.items() if vars(obj).get(name) == size]
    try:
        for obj, name, _ in windowed:
            setattr(obj, name, NARROW)
        yield
    finally:
        for obj, name, size in windowed:
            setattr(obj, name, size)


@torch.no_grad()
def probe_layout(model: Module, autocast: torch.dtype | None = None, device: torch.device | None = None) -> Layout:
    """Return the fastest layout with which packed prefix trees give the same log-probs and gradients as separate sequences.

    Three layouts are tried in this order: tree attention (`posttrain.models.tree_attention`), a dense mask, and padded rows
    with one sequence each. If a layout is rejected, a warning is logged with the reason.

    The probe runs once per config, attention backend, dtype and adapter. The probe's rows are a prompt with three
    completions, a second tree, and a prefix tree of two turns. The log-probs and gradients of all `probe_cases` are compared
    with those of separate sequences. The model's own forward method and output head compute the separate sequences. The
    tolerance of log-probs is 1e-4 of their standard deviation in float32 (0.1 in half precision). The tolerance of gradients
    is 3e-4 of the largest gradient (0.3 in half precision). Mamba-1 and some custom models fail the probe and are trained on
    padded rows. Models with recurrent layers pass the probe if the functions of these layers support prefix trees
    (`posttrain.models.recurrent`).

    The frequencies of longrope depend on the longest sequence of a pass. The probe does not test long sequences.
    `rope_limits` contains the lengths at which frequencies change, and the layout puts longer sequences into separate passes.

    Args:
        model: Model that is ready to run.
        autocast: Dtype of matrix products under autocast. None: the dtype of the weights. Ignored on a CPU.
        device: Training device, whose kernels are tested. FSDP moves the model to this device after the probe. None: the
            model's current device.
    """
    device = device or next(model.parameters()).device
    autocast = None if device.type == "cpu" else autocast
    trained = any(parameter.requires_grad for parameter in model.parameters())
    key = f"{probe_key(model)} {autocast} {device.type} {trained}"
    if key in PROBED:
        return PROBED[key]
    layout = layout_for(model, autocast=autocast, device=device.type)
    text = causal_lm(model).config.get_text_config()
    name = type(model).__name__ + " " + text.model_type
    backend = str(attention_name(text))
    if layout.dense_mask and backend != "flex_attention":
        logger.warning(
            "%s trains with a dense mask instead of tree attention: %s. Results are correct, but the cost of attention is "
            "quadratic in the row length.",
            name,
            dense_layers(model, autocast, device.type),
        )
    if layout.kind == "tree" and not layout.dense_mask and (fault := _fault(model, layout, device, autocast)):
        dense = layout_for(model, dense_mask=True, device=device.type)
        layout = replace(dense, rope_switch=layout.rope_switch, rope_end=layout.rope_end)
        logger.warning(
            "%s with attn_implementation=%r does not support tree attention (%s), so a dense mask is used. Results are correct, "
            "but the cost of attention is quadratic in the row length.",
            name,
            backend,
            fault,
        )
    if layout.kind == "tree" and layout.dense_mask and (fault := _fault(model, layout, device)):
        logger.warning(
            "%s with attn_implementation=%r gives different results for packed rows with shared prompts than for separate "
            "sequences (%s), so padded rows are used. Results are correct, but training is slower.",
            name,
            backend,
            fault,
        )
        layout = padded_layout(model)
    encoder = picture_encoder(model)
    pictured = encoder.probe_rows() if layout.kind == "padded" and encoder is not None else []
    if pictured and (fault := _layout_fault(model, pictured, layout)):
        raise ModelError(
            f"{type(causal_lm(model)).__name__} gives different results for rows with images and for the processor's own "
            f"tensors, even with one sequence per row ({fault}). Fix: use a model of another family, or rows without images."
        )
    # Skip this check after a successful probe of tree attention. The probe has shown that outputs are finite and that tokens
    # do not attend to later tokens.
    if layout.kind != "tree" or layout.dense_mask:
        _refuse_wrong_outputs(model, layout)
    PROBED[key] = layout
    return layout


def weights_not_finite(model: Module) -> list[str]:
    """Return the names of parameters that contain NaN or infinity."""
    return [name for name, weight in model.named_parameters() if not weight.isfinite().all()]


def _zero_norms(model: Module) -> dict[str, list[int]]:
    """Return the DoRA layers whose weights have rows with norm 0. Each layer name maps to the indices of these rows."""
    norms = [(n, p) for n, p in causal_lm(model).named_parameters() if ".lora_magnitude_vector." in n]
    zero = {
        n.partition(".lora_magnitude_vector.")[0]: (p.detach().flatten() == 0).nonzero().flatten().tolist()
        for n, p in norms
    }
    return {name: rows for name, rows in zero.items() if rows}


def _refuse_wrong_outputs(model: Module, layout: Layout) -> None:
    """Raise an error if a model's outputs are not finite, or if the log-probs of earlier tokens of a text depend on its last
    token.
    """
    inner: Any = causal_lm(model)
    text, *ends = random_prompts(inner.config.get_text_config().vocab_size, (SHORT, 1, 1))
    mask = [0, *[1] * (len(text) - 1), 0]
    rows = [Row([], [[*text, *end]], [mask]) for end in ends]
    # Some attention kernels return finite values for infinite scores if there is no mask. Rows of the layout have a mask.
    batch = [rows[0], Row([], [text], [mask[:-1]])]
    with evaluating(model):  # With dropout, the two results would differ.
        first, second = (_truth(model, [row]) for row in rows)
        finite = bool(torch.cat([first, packed_logps(model, batch, layout)]).isfinite().all())
    if not finite:
        odd = weights_not_finite(model)
        if not odd and (zero := _zero_norms(model)):
            layers = sorted({name.rsplit(".", 1)[-1] for name in zero})
            raise ModelError(
                f"the outputs of {type(inner).__name__} are NaN. DoRA divides each row of a weight by the row's norm, which is 0 "
                f"in {'; '.join(f'{name}.weight (rows {rows[:4]})' for name, rows in zero.items())}. Fix: set use_dora=False, or "
                f"exclude_modules={layers} in peft_config."
            )
        cause = f"The weights {odd[:4]} contain NaN or infinity" if odd else "All weights are finite"
        if not odd and (kinds := sorted(map(adapter_kind, adapters_of(model).values()))):
            with evaluating(model), use_adapter(model, None):
                finite = bool(packed_logps(model, batch, layout).isfinite().all())
            if finite:
                raise ModelError(
                    f"the outputs of {type(inner).__name__} are NaN or infinite with the adapter {', '.join(kinds)}, and finite "
                    "without it. Fix: change the options of the adapter, or use another peft method."
                )
        raise ModelError(
            f"the outputs of {type(inner).__name__} are NaN or infinite. {cause}. Fix: use an intact checkpoint, or a dtype "
            "with a larger range (bfloat16 or float32)."
        )
    if score_layer(inner) is None and (fault := disagreement(first, second, tolerance_of(model))):
        raise ModelError(
            f"{type(inner).__name__} is not a causal language model: the log-probs of the first {len(text) - 1} tokens of a text "
            f"change with its last token ({fault}), so each token would be predicted with knowledge of itself. Fix: use a "
            "decoder-only model, or set is_decoder=True (or use_bidirectional_attention=False) in its config."
        )


def _fault(model: Module, layout: Layout, device: torch.device, autocast: torch.dtype | None = None) -> str:
    """Return the reason why a model cannot use a layout, or "" if it can. If the model raises an exception, the reason is
    the exception's message.
    """
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
    """Return a message if the device's attention kernels compute wrong outputs or gradients for the model's heads, otherwise
    "".
    """
    text, weight = causal_lm(model).config.get_text_config(), next(model.parameters())
    heads = query_heads(text)
    if not heads:
        return ""
    dtype = autocast or (coarsest_dtype(model) if coarsest_dtype(model).is_floating_point else weight.dtype)
    kinds = dict.fromkeys((key_value_heads(layer), head_size(layer)) for layer in layer_configs(text))
    faults = (tree_attention.kernel_fault(device, dtype, heads, kv, size) for kv, size in kinds)
    return next(filter(None, faults), "")


def _forest_fault(model: Module, layout: Layout) -> str:
    """Return a message if packed prefix trees give different log-probs or gradients than separate sequences, otherwise ""."""
    config: Any = model.config
    vocabulary, share = config.get_text_config().vocab_size, tolerance_of(model)
    encoder = picture_encoder(model)
    # Skip prompts without images if the model has bidirectional prompts, because bidirectional prompts always contain an
    # image.
    always = encoder is not None and encoder.always
    for prompt, context in () if always else probe_cases(model):
        rows = _probe_rows(vocabulary, prompt)
        wide = replace(layout, row_tokens=512 + prompt, pass_tokens=0, max_tree_tokens=4 * LONGEST)
        # Run long prompts without gradients, because the autograd graph would store all logits. The same functions are
        # called with and without gradients.
        with context, torch.set_grad_enabled(prompt == SHORT):
            values, truth = packed_logps(model, rows, wide), _truth(model, rows)
            if disagreement(values.detach(), truth.detach(), share):
                fault = steady_disagreement(
                    model, values.detach(), lambda rows=rows: _truth(model, rows).detach(), share
                )
            else:
                fault = _gradient_fault(model, values, truth, share)
        if fault:
            return fault
    pictured = [] if encoder is None else encoder.probe_rows()
    return _layout_fault(model, pictured, layout) if pictured else ""


def _layout_fault(model: Module, rows: Sequence[Row], layout: Layout) -> str:
    return steady_disagreement(
        model, packed_logps(model, rows, layout), lambda: _truth(model, rows), tolerance_of(model)
    )


@torch.no_grad()
def _gradient_fault(model: Module, values: Tensor, truth: Tensor, share: float) -> str:
    """Return a message if gradients of packed log-probs differ from gradients of separate sequences, otherwise "".

    The loss is a random weighted sum of the log-probs of completion tokens, so gradients reach the prompt through the states
    and keys that completions use. For each kind of parameter, only the first layer is compared, because its gradient depends
    on all layers above it.

    Args:
        model: The model.
        values: Log-probs of packed rows, with their autograd graph.
        truth: Log-probs of separate sequences, with their autograd graph.
        share: Tolerance of log-probs. The tolerance of gradients is three times this fraction of the largest gradient.
    """
    named = [(re.sub(r"\d+", "", name), p) for name, p in model.named_parameters() if p.requires_grad]
    chosen = list(dict(reversed(named)).values())
    if not values.requires_grad or not chosen:
        return ""
    weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    mine, exact = (
        torch.autograd.grad(x, chosen, weights.view_as(x).to(x), allow_unused=True, materialize_grads=True)
        for x in (values, truth)
    )
    most = float(torch.stack([gradient.abs().max() for gradient in exact]).max())
    gap = float(torch.stack([(a - b).abs().max() for a, b in zip(mine, exact, strict=True)]).max())
    # Allow three times the usual tolerance, because rounding errors of the forward and the backward pass add up. In bf16
    # models with random weights, gradients differed by up to 0.04 of the largest gradient.
    allowed = 3 * share * most
    return "" if gap <= allowed else f"gradients differ by {gap:.2g}, allowed {allowed:.2g}"


def tolerance_of(model: Module) -> float:
    """Return the maximum difference of a model's log-probs from the reference, as a fraction of the reference's standard
    deviation.
    """
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        return 0.1
    return TOLERANCE.get(coarsest_dtype(model), 0.1)


@torch.no_grad()
def probe_head(model: Module) -> None:
    """Compare log-probs of the chunked head with log-probs of the model's own forward method. Set ``own_logits`` if they
    differ.

    The comparison uses one padded sequence, so that only the head can cause a difference. Classifiers are skipped.
    """
    inner: Any = causal_lm(model)
    if score_layer(inner) is not None:
        return
    rows = [_probe_rows(model.config.get_text_config().vocab_size)[1]]
    try:
        with evaluating(model):
            fault = _layout_fault(model, rows, Layout("padded", row_tokens=512))
    except Exception as error:
        adapter = getattr(model, "active_peft_config", None)
        if adapter is None or isinstance(error, PosttrainError | torch.OutOfMemoryError):
            raise
        kind, cause = str(adapter.peft_type).rpartition(".")[2], str(error).rstrip(".")
        raise ConfigError(
            f"the {kind} adapter cannot run on {type(inner).__name__}: {type(error).__name__}: {cause}. Fix: use "
            "LoRA, or another peft method."
        ) from error
    if fault:
        inner.own_logits = True
        logger.warning(
            "%s changes its logits in a way that the chunked head does not support (%s), so the model's own logits are used. "
            "Results are correct, but need more memory.",
            type(inner).__name__,
            fault,
        )


def packed_logps(model: Module, rows: Sequence[Row], layout: Layout) -> Tensor:
    """Run packed rows. Return the log-probs of all completions in the order of the rows, or a classifier's scores."""
    from posttrain.data.forest import split_by_sequence
    from posttrain.models.forward import forward

    scored = score_layer(causal_lm(model)) is not None
    by_completion: dict[int, Tensor] = {}
    for batch in collate(rows, pad_token_id=0, layout=layout):
        batch = batch.to(next(model.parameters()).device)
        out: Any = forward(model, batch, frozenset({"scores"}) if scored else frozenset({"logp"}))
        parts = out.scores[:, None] if scored else split_by_sequence(out.logp, batch)
        by_completion |= dict(zip(batch.origin, parts, strict=True))
    values = torch.cat([by_completion[i] for i in range(len(by_completion))])
    return values if scored else values[has_logp(rows)]


def _truth(model: Module, rows: Sequence[Row]) -> Tensor:
    """Return the log-probs or scores that the unmodified model computes for separate sequences."""
    from posttrain.models.forward import alone_logps, sequence_scores

    if score_layer(causal_lm(model)) is not None:
        return sequence_scores(model, rows)[:, 0]
    return torch.cat(alone_logps(model, rows))[has_logp(rows)]


def has_logp(rows: Sequence[Row]) -> Tensor:
    """Return a mask of the completion tokens in the loss. The log-probs of other tokens are zeros, which would increase the
    standard deviation.
    """
    return torch.tensor([bool(m) for row in rows for mask in row.loss_masks for m in mask])


def random_prompts(vocabulary: int, sizes: Sequence[int]) -> list[list[int]]:
    """Return random token sequences of the lengths ``sizes``. Calls with equal arguments return equal sequences."""
    generator = torch.Generator().manual_seed(0)
    # Use only ids from the first half of the vocabulary. Image placeholders have higher ids, and they would require images.
    return [torch.randint(0, vocabulary // 2, (n,), generator=generator).tolist() for n in sizes]


def _probe_rows(vocabulary: int, prompt: int = SHORT) -> list[Row]:
    *group, shared, alone = random_prompts(vocabulary, (5, 3, 4, prompt, 6))
    # ``turn`` is the second turn of an episode. The row starts with the first turn and has two answers.
    turn = Row([*shared, *group[0], *alone[:2]], [alone[2:], alone[3:]], [[1] * 4, [1] * 3])
    return [Row(shared, group, [[1] * len(c) for c in group]), Row([], [alone], [[0] + [1] * 5]), turn]
