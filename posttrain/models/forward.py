"""One forward pass over a token forest: hidden states at loss positions only, log-probs a chunk at a time."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.attention import attention_mask
from posttrain.models.logprob import token_logprobs
from posttrain.types import Batch, ModelOutputs, Row

__all__ = ["LogitRule", "TokenHead", "causal_lm", "forward", "install_token_head", "sequence_logps"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What an architecture does to ``hidden @ W.T`` before the softmax: Gemma caps, Cohere multiplies, Granite divides."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Read the rule from a model's (text) config."""
        text = config.get_text_config()
        scale = float(getattr(text, "logit_scale", None) or 1.0)
        scale /= float(getattr(text, "logits_scaling", None) or 1.0)
        return cls(scale, getattr(text, "final_logit_softcapping", None))


@dataclass(slots=True)
class TokenHead:
    """What to compute at the loss positions; travels through every wrapper to the patched forward as one argument.

    Attributes:
        rows, columns: ``(N,)`` where the predicting hidden states stand.
        targets: ``(N,)`` token ids they predict.
        temperature: Divides the logits before the softmax.
        need_entropy, entropy_grad, need_correct, need_logits: What else to return.
    """

    rows: Tensor
    columns: Tensor
    targets: Tensor
    temperature: float = 1.0
    need_entropy: bool = False
    entropy_grad: bool = False
    need_correct: bool = False
    need_logits: bool = False


def causal_lm(model: nn.Module) -> nn.Module:
    """The transformers model inside wrappers (DDP, PEFT)."""
    while hasattr(model, "module") and isinstance(model.module, nn.Module):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def install_token_head(model: nn.Module) -> None:
    """Teach a causal language model's forward the argument ``token_head``; without it, nothing changes.

    The forward is patched, not called around, so that DDP, FSDP, DeepSpeed, autocast and PEFT wrappers keep seeing one
    ordinary forward call. Installing twice is harmless.
    """
    inner: Any = causal_lm(model)
    if getattr(inner.forward, "_posttrain", False):
        return
    original = inner.forward

    @functools.wraps(original)
    def patched(*args: Any, token_head: TokenHead | None = None, **kwargs: Any) -> Any:
        if token_head is None:
            return original(*args, **kwargs)
        return _head_forward(inner, token_head, *args, **kwargs)

    patched._posttrain = True  # type: ignore[attr-defined]
    inner.forward = patched


def _head_forward(inner: Any, head: TokenHead, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    kwargs.pop("labels", None)
    output = inner.base_model(*args, **kwargs)
    hidden = output.last_hidden_state[head.rows, head.columns]  # (N, H)
    result = _project(inner, hidden, head)
    router_logits = getattr(output, "router_logits", None)
    if router_logits is not None:
        result["aux_loss"] = _balance(inner, router_logits, kwargs.get("attention_mask"))
    return result


def _project(inner: Any, hidden: Tensor, head: TokenHead) -> dict[str, Tensor]:
    """Log-probs of the targets under the model's own output layer."""
    layer = inner.get_output_embeddings()
    layer = (
        getattr(layer, "modules_to_save", {}).get(getattr(layer, "active_adapter", None) or "default", layer)
        if (hasattr(layer, "modules_to_save"))
        else layer
    )
    rule = LogitRule.of(inner.config)
    if type(layer) is nn.Linear and not head.need_logits:
        out = token_logprobs(
            hidden,
            layer.weight,
            head.targets,
            bias=layer.bias,
            logit_scale=rule.scale,
            softcap=rule.softcap,
            temperature=head.temperature,
            need_entropy=head.need_entropy,
            entropy_grad=head.entropy_grad,
            need_correct=head.need_correct,
        )
        fields = {"logp": out.logp, "entropy": out.entropy, "correct": out.correct}
        return {name: value for name, value in fields.items() if value is not None}
    return _dense(layer, hidden, head, rule)


def _dense(layer: nn.Module, hidden: Tensor, head: TokenHead, rule: LogitRule) -> dict[str, Tensor]:
    """The slow path for heads that are not one plain matrix (an adapter on ``lm_head``) and for losses on logits."""
    logits = layer(hidden).float() * rule.scale
    if rule.softcap:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    logits = logits / head.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    result = {"logp": logprobs.gather(-1, head.targets[:, None]).squeeze(-1)}
    if head.need_entropy:
        with nullcontext() if head.entropy_grad else torch.no_grad():
            result["entropy"] = -(logprobs.exp() * logprobs).sum(-1)
    if head.need_correct:
        result["correct"] = logits.argmax(-1) == head.targets
    if head.need_logits:
        result["logits"] = logits
    return result


def _balance(inner: Any, router_logits: Any, mask: Any) -> Tensor:
    """The architecture's own load-balancing term, unscaled."""
    import importlib

    module = importlib.import_module(type(inner).__module__)
    two_dimensional = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    return module.load_balancing_loss_func(router_logits, inner.num_experts, inner.num_experts_per_tok, two_dimensional)


def forward(
    model: nn.Module,
    batch: Batch,
    needs: frozenset[str] = frozenset({"logp"}),
    *,
    temperature: float = 1.0,
) -> ModelOutputs:
    """Run the model on a forest and put what was asked for on its ``(B, T)`` grid.

    Args:
        model: A causal language model, wrapped or not, on which `install_token_head` was called.
        batch: A token forest on the model's device.
        needs: Any of ``logp``, ``entropy``, ``entropy_grad``, ``correct``, ``logits``.
        temperature: Divides the logits, so that log-probs are those of the distribution that was sampled from.

    Returns:
        Log-probs, entropies and hits aligned with the tokens they speak of, zero outside ``loss_mask``.
    """
    install_token_head(model)
    inner: Any = causal_lm(model)
    rows, columns = batch.loss_mask.nonzero(as_tuple=True)
    head = TokenHead(
        rows=rows,
        columns=batch.predictor[rows, columns],
        targets=batch.input_ids[rows, columns],
        temperature=temperature,
        need_entropy="entropy" in needs or "entropy_grad" in needs,
        entropy_grad="entropy_grad" in needs,
        need_correct="correct" in needs,
        need_logits="logits" in needs,
    )
    parameter = next(inner.parameters())
    result = model(
        input_ids=batch.input_ids,
        attention_mask=attention_mask(batch, inner.config, parameter.dtype),
        position_ids=batch.position_ids,
        use_cache=False,
        token_head=head,
        **batch.model_kwargs,
    )
    return ModelOutputs(
        logp=_place(result["logp"], batch),
        entropy=_place(result.get("entropy"), batch),
        correct=_place(result.get("correct"), batch),
        logits=result.get("logits"),
        aux_loss=result.get("aux_loss"),
    )


def _place(values: Tensor | None, batch: Batch) -> Tensor | None:
    """``(N,)`` values at loss positions onto the ``(B, T)`` grid."""
    if values is None:
        return None
    grid = torch.zeros(batch.input_ids.shape, dtype=values.dtype, device=values.device)
    return grid.masked_scatter(batch.loss_mask, values)


@torch.no_grad()
def sequence_logps(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """Log-probs of every completion, each sequence alone through the model's own forward and its full logits.

    The plain way, kept as the truth that the fast way is compared with.
    """
    inner: Any = causal_lm(model)
    device = next(inner.parameters()).device
    result = []
    for row in rows:
        for ids, mask in zip(row.completions, row.loss_masks, strict=True):
            sequence = torch.tensor([row.prompt_ids + ids], device=device)
            logits = inner(input_ids=sequence, use_cache=False).logits[0].float()
            logp = torch.log_softmax(logits[:-1], -1).gather(-1, sequence[0, 1:, None]).squeeze(-1)
            tail = torch.cat([logp.new_zeros(1), logp])[len(row.prompt_ids) :]
            result.append(tail * torch.tensor(mask, device=device))
    return result
