"""Log-probs of selected tokens, computed from hidden states in chunks of logits.

The full ``(N, V)`` logits are never allocated. The forward pass saves two numbers per token, and the backward pass computes
each chunk of logits a second time. For any loss on the log-probs, the peak memory is O(chunk * V) instead of O(N * V). In two
cases, the forward pass computes the gradients, so that each chunk is computed only once: the gradient of the log-probs is
known before the backward pass, or only hidden states need a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.errors import ConfigError
from posttrain.losses.truncation import kept_log_mass
from posttrain.types import WHOLE, TokenLoss, Truncation

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

# Number of bytes of float32 logits per chunk. On 2 cores with a vocabulary of 49k, chunks of 64 MiB were not faster than
# chunks of 24 MiB, and chunks of 16 MiB or less were slower.
CHUNK_BYTES, ACCELERATOR_CHUNK_BYTES = 24 * 2**20, 64 * 2**20
# Number of bytes of logits whose softmax a CPU computes at a time. Logits of this size stay in the CPU's cache while the
# softmax reads them several times.
CACHE_BYTES = 3 * 2**20
# LEAST_POSITIONS is the minimum number of positions per chunk. With a vocabulary of 152k, a chunk of 24 MiB has only 41
# positions and takes 1.4 times as long per position as a chunk of 128 positions. REPACKED is the minimum number of elements
# of a weight for which oneDNN's matrix products are used. For smaller weights, oneDNN's setup of 1 to 2 ms per new number of
# rows takes too long.
LEAST_POSITIONS, REPACKED = 128, 2**20
# Whether this build of torch has oneDNN's matrix products for linear layers. Builds for x86 have these products.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
NUMBERS = ("entropy", "mean_logit", "collision")
# Maximum difference between the actual and the expected gradient of a log-prob. The unit is the largest gradient of any
# log-prob.
MOST_ERROR = 1e-6


@dataclass(slots=True)
class TokenLogprobs:
    """Outputs of `token_logprobs`. Each output is a tensor ``(N,)``. All outputs except ``logp`` are None unless they were
    requested.
    """

    logp: Tensor
    entropy: Tensor | None = None
    correct: Tensor | None = None
    mean_logit: Tensor | None = None
    collision: Tensor | None = None
    log_mass: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Rule:
    """Parameters with which logits are computed from ``hidden @ W.T + b``. Scale, softcap and division by the temperature are
    applied in this order.

    ``chunk`` is the number of positions whose logits exist at the same time.
    """

    scale: float
    softcap: float | None
    temperature: float
    chunk: int

    def blocks(self, x: Tensor) -> list[slice]:
        """Split logits ``x (n, V)`` into slices of rows. The softmax is computed for one slice at a time."""
        rows = max(2, CACHE_BYTES // (4 * x.shape[1])) if x.device.type == "cpu" else len(x)
        return [slice(i, min(i + rows, len(x))) for i in range(0, len(x), rows)]

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the logits divided by the temperature, in at least float32. Return the logits and the softcap's ``tanh``,
        which the backward pass needs.
        """
        x = output_product(hidden, weight, bias)
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.scale != 1.0:
            x = x.mul_(self.scale)
        bent = None
        if self.softcap is not None:
            bent = x.div_(self.softcap).tanh_()
            x = bent * self.softcap
        if self.temperature != 1.0:
            x = x.div_(self.temperature)
        return x, bent

    def through(self, grad: Tensor, bent: Tensor | None) -> Tensor:
        """Convert the gradient of the logits to the gradient of ``hidden @ W.T + b``, in place."""
        factor = self.scale / self.temperature
        if bent is not None:
            grad = grad.mul_(1.0 - bent.square_())
        return grad if factor == 1.0 else grad.mul_(factor)


def output_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``hidden @ weight.T + bias`` without gradient. The function is fast for few rows of ``hidden`` and many rows of
    ``weight``.

    In float32 on an x86 CPU, oneDNN's matrix product is used. For 128 rows and vocabularies of 49k to 152k, oneDNN's product
    takes 0.4 to 0.6 times as long as `F.linear`, which repacks the weight for each chunk (AVX2, 2 cores).
    """
    if hidden.dtype == torch.float32 and hidden.device.type == "cpu" and HAS_ONEDNN and weight.numel() >= REPACKED:
        return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return F.linear(hidden, weight, bias)


class _HeadGradients:
    """Accumulates the gradients of ``z = h W^T + b`` from chunks of positions.

    Args:
        hidden: ``(N, H)`` hidden states.
        weight: ``(V, H)`` output layer.
        bias: ``(V,)`` or None.
        needed: Three flags: whether hidden states, weight and bias need a gradient.
        wide: Dtype in which the gradients of weight and bias are summed.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool], wide: torch.dtype
    ) -> None:
        self.inputs, self.wide = (hidden, weight), wide
        need_hidden, need_weight, need_bias = needed
        self.hidden = torch.empty_like(hidden) if need_hidden else None
        self.weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        self.bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if need_bias and bias is not None else None

    def add(self, part: slice, dz: Tensor) -> None:
        """Add the gradient ``dz (n, V)`` of the logits at the positions ``part``. Each position may be added only once."""
        hidden, weight = self.inputs
        dz = dz.to(weight.dtype)
        if self.hidden is not None:
            self.hidden[part] = dz @ weight
        if self.weight is not None:
            self.weight.addmm_(dz.T, hidden[part]) if self.wide == dz.dtype else self.weight.add_(dz.T @ hidden[part])
        if self.bias is not None:
            self.bias += dz.sum(0, dtype=self.wide)

    def skip(self, part: slice) -> None:
        """Set the gradient of the hidden states at the positions ``part`` to 0."""
        if self.hidden is not None:
            self.hidden[part] = 0.0

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias, in the weight's dtype. A gradient that is not needed
        is None.
        """
        dtype = self.inputs[1].dtype
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(dtype),
            None if self.bias is None else self.bias.to(dtype),
        )


class _Ahead:
    """Gradients that the forward pass computes from its chunks of logits, because the gradient of the log-probs is known in
    advance.

    Args:
        expected: Expected gradient of the log-probs; see `token_logprobs`. None: only hidden states need a gradient. The
            gradient of a hidden state is then a known vector times the gradient of that position's log-prob.
        sums: Accumulator of the gradients.
        logp: ``(N,)`` log-probs, which the forward pass fills chunk by chunk.
    """

    def __init__(self, expected: Tensor | TokenLoss | None, sums: _HeadGradients, logp: Tensor) -> None:
        self.expected, self.sums, self.logp = expected, sums, logp
        self.grad = expected.to(logp.dtype) if isinstance(expected, Tensor) else torch.ones_like(logp)

    def write(self, part: slice, e: Tensor, z: Tensor, targets: Tensor, out: Tensor) -> None:
        """Write the gradient of the logits of n tokens to ``out (n, V)``. The softmax of the logits is ``e / z``, with
        ``e (n, V)`` and ``z (n,)``. ``out`` may be the same tensor as ``e``.
        """
        if isinstance(self.expected, TokenLoss):
            self.grad[part] = self.expected[part].gradient(self.logp[part])
        g = self.grad[part]
        torch.mul(e, (-g / z)[:, None], out=out)
        out.scatter_add_(1, targets[:, None], g[:, None])

    def add(self, part: slice, dz: Tensor) -> None:
        """Add the gradient ``dz (n, V)`` of one chunk of logits."""
        # Skip the chunk if all gradients of its log-probs are 0, for example because all rewards of a group are equal.
        if self.expected is not None and not bool(self.grad[part].any()):
            self.sums.skip(part)
        else:
            self.sums.add(part, dz)

    def scaled(self, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """Scale the accumulated gradients to the actual gradient ``grad (N,)`` of the log-probs. Return None if ``grad`` is
        not a multiple of the expected gradient.
        """
        hidden, weight, bias = self.sums.gradients()
        if self.expected is None:
            assert hidden is not None
            return hidden * grad[:, None].to(hidden.dtype), None, None
        largest = self.grad.abs().argmax()
        factor = grad[largest] / self.grad[largest] if self.grad[largest] else grad.new_ones(())
        error = (grad - factor * self.grad).abs().max()
        # The comparison is negated, so that it also detects NaN and infinite gradients.
        if not error <= MOST_ERROR * grad.abs().max() < math.inf:
            return None
        if factor != 1.0:
            hidden, weight, bias = (None if x is None else x * factor.to(x.dtype) for x in (hidden, weight, bias))
        return hidden, weight, bias


@dataclass(frozen=True, slots=True)
class _LogprobRequest:
    """Arguments of the autograd function of `token_logprobs`. If ``once`` is True, the forward pass also computes the
    gradients for ``expected``; see `_Ahead`.
    """

    rule: _Rule
    wants: frozenset[str]
    truncation: Truncation
    once: bool
    expected: Tensor | TokenLoss | None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        request: _LogprobRequest,
    ) -> tuple[Tensor, ...]:
        rule, wants, truncation = request.rule, request.wants, request.truncation
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        n = targets.shape[0]
        logp, log_z = hidden.new_empty(n, dtype=wide), hidden.new_empty(n, dtype=wide)
        ahead = None
        if request.once:
            sums = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], wide)
            ahead = _Ahead(request.expected, sums, logp)
        entropy, mean_logit, collision = (hidden.new_empty(n * (name in wants), dtype=wide) for name in NUMBERS)
        log_mass = hidden.new_empty(n * bool(truncation), dtype=wide)
        correct = torch.empty(n * ("correct" in wants), dtype=torch.bool, device=hidden.device)
        reads_logits = "entropy" in wants
        for start in range(0, n, rule.chunk):
            chunk = slice(start, start + rule.chunk)
            logits, bent = rule.logits(hidden[chunk], weight, bias)
            for block in rule.blocks(logits):
                part, x = slice(start + block.start, start + block.stop), logits[block]
                chosen = x.gather(1, targets[part, None]).squeeze(1)
                if "correct" in wants and weight.element_size() < 4:
                    # In half precision, several logits are often equal. The first of the largest logits is the most likely
                    # token. Finding its index takes as long as computing an exponential.
                    top, first = x.max(1)
                    correct[part] = first == targets[part]
                else:
                    top = x.amax(1)
                    if "correct" in wants:
                        correct[part] = chosen >= top
                if "mean_logit" in wants:
                    mean_logit[part] = x.mean(1) * rule.temperature
                if truncation:
                    log_mass[part] = kept_log_mass(x, truncation, targets[part, None])
                e = (x - top[:, None] if reads_logits else x.sub_(top[:, None])).exp_()
                z = e.sum(1)
                log_z[part] = top + z.log()
                logp[part] = chosen - log_z[part]
                if reads_logits:
                    entropy[part] = log_z[part] - x.mul_(e).sum(1) / z
                if "collision" in wants:
                    collision[part] = torch.linalg.vecdot(e, e).log() - 2.0 * z.log()
                if ahead is not None:
                    ahead.write(part, e, z, targets[part], x)
            if ahead is not None:
                ahead.add(chunk, rule.through(logits, bent))
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.rule, ctx.wants, ctx.ahead = rule, wants, ahead
        fixed = (correct, mean_logit, collision, log_mass)
        ctx.mark_non_differentiable(*fixed, *(() if "entropy_grad" in wants else (entropy,)))
        return logp, entropy, *fixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: FunctionCtx, grad_logp: Tensor, grad_entropy: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        rule: _Rule = ctx.rule
        # Delete the reference to the gradients. Otherwise, autograd would copy them.
        ahead, ctx.ahead = ctx.ahead, None
        if ahead is not None:
            gradients = ahead.scaled(grad_logp)
            if gradients is not None:
                return *gradients, None, None
        del ahead
        through_entropy = "entropy_grad" in ctx.wants and grad_entropy is not None
        wide = grad_logp.dtype
        sums = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], wide)
        for start in range(0, targets.shape[0], rule.chunk):
            part = slice(start, start + rule.chunk)
            x, bent = rule.logits(hidden[part], weight, bias)
            g = grad_logp[part]
            lp = x.sub_(log_z[part, None])
            if through_entropy:
                # Gradients: d logp_y / dx_v = [v = y] - p_v, and d H / dx_v = -p_v (log p_v + H).
                slope = (lp + entropy[part, None]).mul_(grad_entropy[part, None]).add_(g[:, None]).neg_()
                dx = slope.mul_(lp.exp_())
            else:
                dx = lp.exp_().mul_(-g[:, None])
            dx.scatter_add_(1, targets[part, None], g[:, None])
            sums.add(part, rule.through(dx, bent))
        return *sums.gradients(), None, None


def _prepared(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int | None
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Cast the operands to one dtype, which is autocast's dtype under autocast. Return the operands and the number of
    positions per chunk.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    elif hidden.dtype != weight.dtype:
        hidden = hidden.to(weight.dtype)
    size = CHUNK_BYTES if device == "cpu" else ACCELERATOR_CHUNK_BYTES
    chunk = chunk_size or max(LEAST_POSITIONS, size // (4 * weight.shape[0]))
    return hidden, weight, None if bias is None else bias.to(weight.dtype), chunk


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    truncation: Truncation = WHOLE,
    chunk_size: int | None = None,
    expected_grad: Tensor | TokenLoss | None = None,
    need_entropy: bool = False,
    entropy_grad: bool = False,
    need_correct: bool = False,
    need_mean_logit: bool = False,
    need_collision: bool = False,
) -> TokenLogprobs:
    """Compute ``log_softmax(cap(scale * (h W^T + b)) / temperature)[target]`` for each of N positions.

    Args:
        hidden: ``(N, H)`` hidden states that predict the targets.
        weight: ``(V, H)`` weight of the output layer. The weight gets a gradient if ``weight.requires_grad`` is True.
        targets: ``(N,)`` int64 token ids.
        bias: ``(V,)`` or None.
        logit_scale: Factor of the logits, e.g. for Cohere. For Granite, the factor is the inverse of ``logits_scaling``.
        softcap: Cap ``c`` in ``c tanh(x / c)`` (Gemma 2).
        temperature: Temperature by which the logits are divided, above 0.
        truncation: Truncation of the sampler's distribution, e.g. top-p. If the truncation excludes tokens, the log of the
            remaining probability mass is returned too, without gradient. See `posttrain.losses.truncation`.
        chunk_size: Number of positions per chunk. None: as many as fit into 24 MiB of logits on a CPU or 64 MiB
            elsewhere, but at least 128.
        expected_grad: ``(N,)`` gradient that the log-probs will receive, up to a constant factor, or a `TokenLoss` of the N
            tokens. If it is set, the forward pass also computes the gradients of hidden states and output layer. If the actual
            gradient differs from ``expected_grad``, the backward pass recomputes these gradients. ``expected_grad`` is used
            only on a CPU, because on other devices comparing the gradients would block the host.
        need_entropy: Whether to return the entropy in nats, at ``temperature``.
        entropy_grad: Whether to return the entropy and make it differentiable.
        need_correct: Whether to return a bool per position: whether the target is the most likely token.
        need_mean_logit: Whether to return the mean logit over the vocabulary, before division by ``temperature`` and
            without gradient.
        need_collision: Whether to return ``log sum_v p_v^2`` at ``temperature``, without gradient.

    Returns:
        Log-probs in float32 (float64 for float64 input), regardless of the dtype of the weights. Under autocast, matrix
        products are computed in the autocast dtype, and the weight is cast once.

    Raises:
        ConfigError: ``temperature`` is not above 0.
    """
    if temperature <= 0:
        raise ConfigError(f"temperature={temperature} must be above 0, because the logits are divided by it.")
    hidden, weight, bias, chunk = _prepared(hidden, weight, bias, chunk_size)
    rule = _Rule(logit_scale, softcap, temperature, chunk)
    wanted = {
        "entropy": need_entropy or entropy_grad, "correct": need_correct, "mean_logit": need_mean_logit,
        "collision": need_collision, "log_mass": bool(truncation), "entropy_grad": entropy_grad,
    }  # fmt: skip
    wants = frozenset(name for name, want in wanted.items() if want)
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    has_grad = len(targets) > 0 and (frozen or (expected_grad is not None and hidden.device.type == "cpu"))
    # Exclude float16. Without gradient scaling, small probabilities would underflow in float16.
    once = (
        has_grad
        and torch.is_grad_enabled()
        and hidden.requires_grad
        and hidden.dtype != torch.float16
        and not entropy_grad
    )
    request = _LogprobRequest(rule, wants, truncation, once, None if frozen else expected_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        logp, *rest = _TokenLogprobs.apply(hidden, weight, bias, targets, request)
    return TokenLogprobs(logp, *(value if name in wants else None for name, value in zip(wanted, rest, strict=False)))


Measure = Callable[[Tensor, slice], Tensor]


class _ChunkedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: _Rule,
        measure: Measure,
        columns: int,
    ) -> Tensor:
        measured = []
        for start in range(0, max(len(hidden), 1), rule.chunk):
            part = slice(start, start + rule.chunk)
            measured.append(measure(rule.logits(hidden[part], weight, bias)[0], part))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.rule, ctx.measure, ctx.columns = rule, measure, columns
        return torch.cat(measured)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        rule, wide = ctx.rule, grad.dtype
        sums = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], wide)
        for start in range(0, len(hidden), rule.chunk):
            part = slice(start, start + rule.chunk)
            x, bent = rule.logits(hidden[part], weight, bias)
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                values = ctx.measure(x, part)[:, : ctx.columns]
                (dx,) = torch.autograd.grad(values, x, grad[part, : ctx.columns])
            sums.add(part, rule.through(dx, bent))
        return *sums.gradients(), None, None, None


def chunked_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    measure: Measure,
    *,
    columns: int,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute K values from the logits of each position. Both the forward pass and the backward pass compute the logits in
    chunks.

    Args:
        hidden: ``(N, H)`` hidden states.
        weight: ``(V, H)`` output layer.
        bias: ``(V,)`` or None.
        measure: Function that maps float32 logits ``(n, V)``, and the slice of their positions, to values ``(n, K)``.
            The function is called again in the backward pass, with gradients enabled.
        columns: Number of values with a gradient. Only the first ``columns`` of the K values have a gradient.
        logit_scale: Same as in `token_logprobs`.
        softcap: Same as in `token_logprobs`.
        chunk_size: Same as in `token_logprobs`.
    """
    hidden, weight, bias, chunk = _prepared(hidden, weight, bias, chunk_size)
    rule = _Rule(logit_scale, softcap, 1.0, chunk)
    with torch.autocast(hidden.device.type, enabled=False):
        return _ChunkedRows.apply(hidden, weight, bias, rule, measure, columns)


def raw_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, logit_scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Return the ``(n, V)`` logits ``cap(scale * (h W^T + b))``, in float32 or wider, without gradient."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        bias = None if bias is None else bias.to(weight.dtype)
        return _Rule(logit_scale, softcap, 1.0, 0).logits(hidden.to(weight.dtype), weight, bias)[0]
