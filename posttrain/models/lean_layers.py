"""Layers that keep their inputs alone between forward and backward, in the place of transformers' own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up``; autograd would keep ``silu(gate)`` beside its two inputs."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class _SwiGLUDown(torch.autograd.Function):
    """``(silu(gate) * up) W^T + b``; the product would keep its input too, which is as wide as gate and up."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(F.silu(gate).mul_(up), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        active, flat = F.silu(gate), grad.flatten(0, -2)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_weight = (flat.T @ (active * up).flatten(0, -2)).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            grad_bias = flat.sum(0).to(ctx.bias_dtype)
        inner = grad @ weight.to(grad.dtype)
        return torch.ops.aten.silu_backward(inner * up, gate), active.mul_(inner), grad_weight, grad_bias


class _RMSNorm(torch.autograd.Function):
    """``w * cast(x r)`` with ``r = (mean x^2 + eps)^(-1/2)`` in float32; autograd would keep ``cast(x r)`` beside x.

    With ``n = x r`` and ``d = g w``:  ``dx = r (d - n mean(d n))``,  ``dw = sum g n``.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x.float() * scale
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normal.to(x.dtype)).flatten(0, -2).sum(0).to(weight.dtype)
        grad_x = (grad * weight).to(x.dtype).float()
        grad_x.addcmul_(normal, (grad_x * normal).mean(-1, keepdim=True), value=-1.0).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


def plain(module: nn.Module) -> bool:
    """Whether calling the module runs its class's forward and nothing else."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not (hooks or "forward" in vars(module) or module._compiled_call_impl)


class _LeanMLP:
    """Before a feed-forward class of the Llama kind."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)  # type: ignore[misc]
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if type(down) is nn.Linear and plain(down):
            return _SwiGLUDown.apply(gate, up, down.weight, down.bias)
        return down(_SwiGLU.apply(gate, up))


class _LeanNorm:
    """Before an RMSNorm class of the Llama kind."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden_states)  # type: ignore[misc]
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


def keep_inputs_only(model: nn.Module) -> int:
    """Let feed-forward and norm layers of the Llama kind keep less for backward, and say how many do.

    A layer of width H and inner width I keeps ``2 H + 2 I`` numbers a token less (of about ``13 H + 4 I``): they are computed
    again from the inputs, elementwise, and no product is. Outputs are the same to the last bit. Every class is proven on
    random numbers first: one that computes anything else stays as it is, and so does a layer whose forward somebody replaced.
    A layer changes its class for a subclass of the same name, so that hooks and adapters work as before. Copied, or pickled whole
    (`torch.save(model)`), it is of transformers' own class again.
    """
    changed = 0
    for module in model.modules():
        twin = None if "forward" in vars(module) else _twin(type(module), type(getattr(module, "act_fn", None)))
        if twin is not None:
            module.__class__ = twin
            changed += 1
    return changed


@functools.cache
def _twin(kind: type, activation: type) -> type | None:
    """The subclass that keeps less; None for a class that computes something else, and for one that is it already."""
    if not kind.__module__.startswith("transformers.models.") or issubclass(kind, (_LeanMLP, _LeanNorm)):
        return None
    base = _LeanMLP if kind.__name__.endswith("MLP") else _LeanNorm if kind.__name__.endswith("RMSNorm") else None
    if base is None:
        return None
    made = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    # The module of its name holds the other class.
    made["__reduce_ex__"] = lambda self, _: (object.__new__, (kind,), vars(self))
    twin = type(kind.__name__, (base, kind), made)
    try:
        # The run's own random numbers stay what they were, and the answer is one for good, wherever it is asked first.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False):
            torch.manual_seed(0)
            parts: dict[str, Any] = {"weight": nn.Parameter(torch.randn(6)), "variance_epsilon": 1e-5}
            if base is _LeanMLP:
                parts = {name: nn.Linear(6, 6) for name in ("gate_proj", "up_proj", "down_proj")}
                parts["act_fn"] = activation()
            same = all(_agree(kind, twin, parts, dtype) for dtype in (torch.float32, torch.bfloat16))
    except Exception:  # It has other parts or takes other arguments: another kind of layer.
        return None
    return twin if same else None


def _agree(kind: type, twin: type, parts: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether small layers of both classes, made of the same parts, answer the same."""
    x, answers = torch.randn(3, 6, dtype=dtype), []
    for one in (kind, twin):
        layer: Any = one.__new__(one)
        nn.Module.__init__(layer)
        for name, part in parts.items():
            setattr(layer, name, part)
        with torch.enable_grad():
            answers.append(layer.to(dtype)(x.clone()))
    return torch.equal(*answers)
