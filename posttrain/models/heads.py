"""Output layers at chosen positions only: log-probs of tokens, scores of sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.losses.divergence import collision_logp
from posttrain.models.fp32_head import Float32Linear
from posttrain.models.lean import keep_inputs_only
from posttrain.models.logprob import token_logprobs

__all__ = [
    "LogitRule",
    "ScoreHead",
    "TokenHead",
    "causal_lm",
    "install_token_head",
    "learns_prompts",
    "score",
    "score_layer",
    "trunk",
    "unwrapped",
    "virtual_tokens",
]

# What configs call a factor of the logits, and their cap.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES_UP = ("hyperclovax",)  # Multiplies by ``logits_scaling``; Granite divides by it.
PER_TOKEN = ("entropy", "correct", "mean_logit", "collision")  # What may be asked for beside the log-prob.
SCORE_LAYERS = ("score", "classifier", "classification_head")


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What an architecture does to ``hidden @ W.T`` before the softmax: Gemma caps, Cohere multiplies, Granite divides."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Read the rule from a model's (text) config."""
        text = config.get_text_config()
        scale = 1.0
        for name in MULTIPLIERS:
            scale *= float(getattr(text, name, None) or 1.0)
        divisor = float(getattr(text, "logits_scaling", None) or 1.0)
        scale = scale * divisor if text.model_type in SCALES_UP else scale / divisor
        caps = (getattr(text, name, None) for name in CAPS)
        return cls(scale, next((cap for cap in caps if cap), None))


@dataclass(slots=True)
class TokenHead:
    """What to compute at the loss positions; travels through every wrapper to the patched forward as one argument.

    Attributes:
        rows, columns: ``(N,)`` where the predicting hidden states stand.
        targets: ``(N,)`` token ids they predict.
        temperature: Divides the logits before the softmax.
        chunk_size: Positions whose logits exist at once; None: see `token_logprobs`.
        need_entropy, entropy_grad, need_correct, need_mean_logit, need_collision, need_logits: What else to return.
        balance_over: ``(B, T)`` 1 on real tokens: return the router's load-balancing term over them.
        values: Last hidden states ``(B, T, H)`` to values ``(M,)``, returned beside the log-probs.
    """

    rows: Tensor
    columns: Tensor
    targets: Tensor
    temperature: float = 1.0
    chunk_size: int | None = None
    need_entropy: bool = False
    entropy_grad: bool = False
    need_correct: bool = False
    need_mean_logit: bool = False
    need_collision: bool = False
    need_logits: bool = False
    balance_over: Tensor | None = None
    values: Callable[[Tensor], Tensor] | None = None


@dataclass(slots=True)
class ScoreHead:
    """Read a classification head at some positions: rewards at last tokens, judgements of steps at their ends.

    Attributes:
        rows, columns: ``(N,)`` where the hidden states stand.
    """

    rows: Tensor
    columns: Tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """The model, or the peft wrapper around it, inside what parallelism put on top (DDP's ``module``)."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def causal_lm(model: nn.Module) -> nn.Module:
    """The transformers model (of any task) inside wrappers (DDP, PEFT)."""
    inner = unwrapped(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # type: ignore[operator]


def learns_prompts(model: nn.Module) -> bool:
    """Whether a peft wrapper, switched on, puts virtual tokens before every row, and takes 2-D masks only."""
    bare = unwrapped(model)
    config = getattr(bare, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False)) and not getattr(bare, "_adapters_disabled", False)


def virtual_tokens(model: nn.Module) -> int:
    """Columns that prompt tuning puts before a row's tokens; prefix tuning puts its own into the cache."""
    if not learns_prompts(model):
        return 0
    config: Any = unwrapped(model).active_peft_config
    return 0 if config.peft_type in ("PREFIX_TUNING", "CARTRIDGE") else int(config.num_virtual_tokens)


def trunk(inner: Any) -> Any:
    """The layers below a model's head; Llama 4's text model names a ``base_model`` that it does not have."""
    return inner.base_model if inner.base_model is not inner else inner.model


def install_token_head(model: nn.Module) -> None:
    """Teach a model's forward the argument ``token_head`` (a `TokenHead` or `ScoreHead`); without it, nothing changes.

    Its layers keep less for backward from here on (`keep_inputs_only`).

    The forward is patched, not called around, so that DDP, FSDP, DeepSpeed, autocast and PEFT wrappers keep seeing one
    ordinary forward call. Installing twice is harmless.
    """
    inner: Any = causal_lm(model)
    if _knows_heads(inner.forward):
        return
    keep_inputs_only(inner)
    original = inner.forward

    @functools.wraps(original)
    def patched(*args: Any, token_head: TokenHead | ScoreHead | None = None, **kwargs: Any) -> Any:
        if token_head is None:
            return original(*args, **kwargs)
        if isinstance(token_head, TokenHead) and inner.__dict__.get("own_logits"):
            return _own_forward(inner, original, token_head, *args, **kwargs)
        return _head_forward(inner, token_head, *args, **kwargs)

    patched._posttrain = True  # type: ignore[attr-defined]
    inner.forward = patched


def _knows_heads(forward: Any) -> bool:
    """Whether `install_token_head` has been here, also below what was put around it since.

    Accelerate wraps autocast around the forward of a prepared model and keeps no attribute of it but ``__wrapped__``; a second
    patch on top would call the head outside of autocast, and a run in bfloat16 would compute in float32.
    """
    while forward is not None:
        if getattr(forward, "_posttrain", False):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _head_forward(inner: Any, head: TokenHead | ScoreHead, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    kwargs.pop("labels", None)
    output = trunk(inner)(*args, **kwargs)
    hidden = output.last_hidden_state[head.rows, head.columns]  # (N, H)
    if isinstance(head, ScoreHead):
        return {"scores": score(inner, hidden)}
    result = _project(inner, hidden, head)
    if head.values is not None:
        result["values"] = head.values(output.last_hidden_state)
    if head.balance_over is not None:
        result["aux_loss"] = _balance(inner, output.router_logits, head.balance_over)
    return result


def _own_forward(inner: Any, original: Any, head: TokenHead, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """The slow way, for architectures whose logits are not ``cap(scale * hidden @ W.T)``: the model's own."""
    kwargs.pop("labels", None)
    if head.values is not None:
        kwargs["output_hidden_states"] = True
    output = original(*args, **kwargs)
    result = _from_logits(output.logits[head.rows, head.columns].float(), head)
    if head.values is not None:
        result["values"] = head.values(output.hidden_states[-1])
    if head.balance_over is not None:
        result["aux_loss"] = _balance(inner, output.router_logits, head.balance_over)
    return result


def score_layer(inner: Any) -> Any:
    """The classification head of a model, by the names that architectures give it; None where there is none."""
    return next((layer for name in SCORE_LAYERS if (layer := getattr(inner, name, None)) is not None), None)


def score(inner: Any, hidden: Tensor) -> Tensor:
    """``(N, H)`` hidden states to ``(N, labels)`` float32 scores."""
    dropout = getattr(inner, "dropout", None)
    return score_layer(inner)(dropout(hidden) if isinstance(dropout, nn.Module) else hidden).float()


def _project(inner: Any, hidden: Tensor, head: TokenHead) -> dict[str, Tensor]:
    """Log-probs of the targets under the model's own output layer."""
    layer = inner.get_output_embeddings()
    if hasattr(layer, "modules_to_save") and not getattr(layer, "disable_adapters", False):  # Trained whole by peft.
        active = getattr(layer, "active_adapters", None) or [getattr(layer, "active_adapter", "default")]
        layer = next((layer.modules_to_save[name] for name in active if name in layer.modules_to_save), layer)
    elif hasattr(layer, "original_module"):
        layer = layer.original_module
    rule = LogitRule.of(inner.config)
    if type(layer) in (nn.Linear, Float32Linear) and not head.need_logits:
        with _own_precision(layer, hidden):
            out = token_logprobs(
                hidden,
                layer.weight,
                head.targets,
                bias=layer.bias,
                logit_scale=rule.scale,
                softcap=rule.softcap,
                temperature=head.temperature,
                chunk_size=head.chunk_size,
                need_entropy=head.need_entropy,
                entropy_grad=head.entropy_grad,
                need_correct=head.need_correct,
                need_mean_logit=head.need_mean_logit,
                need_collision=head.need_collision,
            )
        fields = {name: getattr(out, name) for name in ("logp", *PER_TOKEN)}
        return {name: value for name, value in fields.items() if value is not None}
    return _dense(layer, hidden, head, rule)


def _own_precision(layer: nn.Module, hidden: Tensor) -> Any:
    """A head in float32 is meant to stay there under autocast."""
    return torch.autocast(hidden.device.type, enabled=False) if type(layer) is Float32Linear else nullcontext()


def _dense(layer: nn.Module, hidden: Tensor, head: TokenHead, rule: LogitRule) -> dict[str, Tensor]:
    """The slow path for heads that are not one plain matrix (an adapter on ``lm_head``) and for losses on logits."""
    logits = layer(hidden).float() * rule.scale
    if rule.softcap:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    return _from_logits(logits, head)


def _from_logits(logits: Tensor, head: TokenHead) -> dict[str, Tensor]:
    """Log-probs and what else was asked for, from ``(N, V)`` logits."""
    raw, logits = logits, logits / head.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    result = {"logp": logprobs.gather(-1, head.targets[:, None]).squeeze(-1)}
    if head.need_entropy:
        with nullcontext() if head.entropy_grad else torch.no_grad():
            result["entropy"] = -(logprobs.exp() * logprobs).sum(-1)
    if head.need_correct:
        result["correct"] = logits.argmax(-1) == head.targets
    if head.need_mean_logit:
        result["mean_logit"] = raw.detach().mean(-1)
    if head.need_collision:
        result["collision"] = collision_logp(logits.detach())
    if head.need_logits:
        result["logits"] = logits
    return result


def _balance(inner: Any, router_logits: Any, real: Tensor) -> Tensor:
    """``E sum_e f_e P_e`` over real tokens, all layers pooled: the load-balancing term, unscaled.

    ``f_e`` are assignments per token to expert e and ``P_e`` is its mean probability; top-k at perfect balance.

    Reference: Switch Transformers, arXiv:2101.03961, equation 4.
    """
    text = inner.config.get_text_config()
    top_k = int(getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 2)
    kept = real.flatten().bool()
    layers = [logits.reshape(-1, logits.shape[-1])[kept] for logits in router_logits]
    probabilities = torch.cat(layers).float().softmax(-1)  # (layers N, E)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    return probabilities.shape[1] * (chosen.mean(0) * probabilities.mean(0)).sum()
