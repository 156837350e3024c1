"""Output layers at chosen positions only: log-probs of tokens, scores of sequences."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.data.formats import warn_once
from posttrain.errors import ConfigError, ModelError
from posttrain.losses.divergence import collision_logp
from posttrain.losses.truncation import kept_log_mass
from posttrain.models import parallel
from posttrain.models.architecture import config_of, experts_per_token
from posttrain.models.lean_layers import keep_inputs_only
from posttrain.models.logprob import token_logprobs
from posttrain.types import WHOLE, Truncation

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

LANGUAGE = (
    "language_model",
    "text_model",
    "lm_head",
)  # Parts of a model with a tower that are no tower and no projector.


class Float32Linear(nn.Linear):
    """A linear layer with float32 weights that leaves autocast: logits are not rounded to bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        """``(..., H)`` of any dtype to float32 ``(..., V)``."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.float())


def cast_head_to_fp32(model: nn.Module) -> None:
    """Turn the output layer of a causal language model into a `Float32Linear`, in place.

    Where the input embeddings are the same matrix, what they return is cast back, so that the layers see their own dtype.

    Args:
        model: A transformers model, not a peft wrapper around one.

    Raises:
        ConfigError: An adapter sits on the head.
        ModelError: The head is no plain linear layer (a quantised one has no float32).

    Reference: MiniMax-M1, arXiv:2506.13585
    """
    head = model.get_output_embeddings()
    name = type(head).__name__
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        raise ConfigError(
            f"cast_lm_head_to_fp32=True cannot be used with an adapter on the output layer ({name}). Take lm_head out of "
            "target_modules and modules_to_save, or set cast_lm_head_to_fp32=False."
        )
    if type(head) is Float32Linear:
        return
    if type(head) is not nn.Linear:
        raise ModelError(f"cast_lm_head_to_fp32=True needs a plain linear output layer, and this model has a {name}.")
    embeddings = model.get_input_embeddings()
    before = embeddings.weight.dtype
    tied = head.weight is embeddings.weight
    wide = nn.utils.skip_init(Float32Linear, head.in_features, head.out_features, bias=head.bias is not None)
    wide.weight, wide.bias = head.float().weight, head.bias
    model.set_output_embeddings(wide)
    if tied:
        embeddings.weight = wide.weight  # ``float()`` may have made a new parameter.
        if before != torch.float32:
            embeddings.register_forward_hook(lambda module, args, output: output.to(before))


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
    def of(cls, config: PretrainedConfig) -> LogitRule:
        """Read the rule from a model's (text) config."""
        text = config.get_text_config()
        scale = 1.0
        for name in MULTIPLIERS:
            scale *= float(getattr(text, name, None) or 1.0)
        divisor = float(getattr(text, "logits_scaling", None) or 1.0)
        scale = scale * divisor if text.model_type in SCALES_UP else scale / divisor
        caps = (getattr(text, name, None) for name in CAPS)
        return cls(scale, next((cap for cap in caps if cap), None))

    def logits(self, product: Tensor) -> Tensor:
        """``cap(scale * hidden W^T)`` in float32, differentiable, of what the output layer gives, any shape."""
        scaled = product.float() * self.scale
        return self.softcap * torch.tanh(scaled / self.softcap) if self.softcap else scaled


@dataclass(slots=True)
class TokenHead:
    """What to compute at the loss positions; travels through every wrapper to the patched forward as one argument.

    Attributes:
        rows, columns: ``(N,)`` where the predicting hidden states stand.
        targets: ``(N,)`` token ids they predict.
        temperature: Divides the logits before the softmax.
        truncation: Of the sampler, of which the mass that it leaves is returned.
        chunk_size: Positions whose logits exist at once; None: see `token_logprobs`.
        expected_grad: ``(N,)``, see `token_logprobs`; None: not known before the pass.
        needs: What else to return; see `posttrain.models.forward.forward`.
        balance_over: ``(B, T)`` 1 on real tokens: return the router's load-balancing term over them.
        values: Last hidden states ``(B, T, H)`` to values ``(M,)``, returned beside the log-probs.
        compare: Instead of log-probs: hidden states ``(N, H)``, the output layer (None: they are logits), its `LogitRule` and
            this object to what is returned. How two models are compared without their logits.
        inputs: The model inside of its wrappers to further arguments of its forward: the features of images.
        total: A tensor of this process to its sum over all that hold tokens of the batch; None: all are here.
    """

    rows: Tensor
    columns: Tensor
    targets: Tensor
    temperature: float = 1.0
    truncation: Truncation = WHOLE
    chunk_size: int | None = None
    expected_grad: Tensor | None = None
    needs: frozenset[str] = frozenset()
    balance_over: Tensor | None = None
    values: Callable[[Tensor], Tensor] | None = None
    compare: Callable[[Tensor, Any, LogitRule, TokenHead], dict[str, Any]] | None = None
    inputs: Callable[[Any], dict[str, Any]] | None = None
    total: Callable[[Tensor], Tensor] | None = None


@dataclass(slots=True)
class ScoreHead:
    """Read a classification head at some positions, such as rewards at last tokens.

    Attributes:
        rows, columns: ``(N,)`` where the hidden states stand.
        inputs: As in `TokenHead`.
    """

    rows: Tensor
    columns: Tensor
    inputs: Callable[[Any], dict[str, Any]] | None = None


def unwrapped(model: object) -> Any:
    """The model, or the peft wrapper around it, inside what parallelism (DDP's ``module``) and compilation put on top."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        inner = getattr(model, "module", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def causal_lm(model: nn.Module) -> Any:
    """The transformers model (of any task) inside wrappers (DDP, PEFT)."""
    inner = unwrapped(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def output_layer(model: object) -> Any:
    """The layer that makes logits of hidden states; None of what has none."""
    layer_of = getattr(model, "get_output_embeddings", None)
    return None if layer_of is None else layer_of()


def adapters_of(model: object) -> dict[str, PeftConfig]:
    """Configs of the adapters that a model carries, by their names; none of a bare model."""
    return getattr(unwrapped(model), "peft_config", {})


def adapter_kind(config: PeftConfig) -> str:
    """Return the name of a config's peft method: ``LORA``, say."""
    return str(config.peft_type).rsplit(".", 1)[-1]


def learns_prompts(model: nn.Module) -> bool:
    """Whether a peft wrapper, switched on, puts virtual tokens before every row, and takes 2-D masks only."""
    bare = unwrapped(model)
    config = getattr(bare, "active_peft_config", None)
    return config is not None and config.is_prompt_learning and not bare._adapters_disabled


def virtual_tokens(model: nn.Module) -> int:
    """Columns that prompt tuning puts before a row's tokens; prefix tuning puts its own into the cache."""
    if not learns_prompts(model):
        return 0
    config: Any = unwrapped(model).active_peft_config
    return 0 if config.peft_type in ("PREFIX_TUNING", "CARTRIDGE") else int(config.num_virtual_tokens)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in eval mode without gradients, then restore each module's mode. Checkpointing is idle in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def trunk(inner: nn.Module) -> Any:
    """The layers below a model's head; Llama 4's text model names a ``base_model`` that it does not have."""
    return inner.base_model if inner.base_model is not inner else inner.model


def install_token_head(model: nn.Module) -> None:
    """Teach a model's forward the argument ``token_head`` (a `TokenHead` or `ScoreHead`); without it, nothing changes.

    Its layers keep less for backward from here on (`keep_inputs_only`).

    The forward is patched, not called around, so that DDP, FSDP, DeepSpeed, autocast and PEFT wrappers keep seeing one
    ordinary forward call. Installing twice is harmless.
    """
    inner: Any = causal_lm(model)
    owner = _owner_of(inner.forward)
    if owner is inner:
        return
    # A copy of a model around whose forward a function was put: that runs the original's layers.
    if owner is not None:
        del inner.forward
        vars(inner).pop("_original_forward", None)
    keep_inputs_only(inner)
    inner.headless_forward = inner.forward

    @functools.wraps(type(inner).forward)
    def forward(inner: Any, *args: Any, token_head: TokenHead | ScoreHead | None = None, **kwargs: Any) -> Any:
        if token_head is None:
            return inner.headless_forward(*args, **kwargs)
        if token_head.inputs is not None:
            kwargs |= token_head.inputs(inner)
        masks = kwargs.get("attention_mask")
        if isinstance(masks, dict) and inner.config.model_type == "paligemma":
            # Its forward takes one mask: layers get those of their kinds (PaliGemma 2) behind it.
            kwargs["attention_mask"] = masks["full_attention"]
            with inner.model.language_model.register_forward_pre_hook(
                lambda _, args, given: (args, {**given, "attention_mask": masks}), with_kwargs=True
            ):
                return _head_forward(inner, inner.headless_forward, token_head, *args, **kwargs)
        return _head_forward(inner, inner.headless_forward, token_head, *args, **kwargs)

    vars(forward)["takes_token_head"] = True
    # A method: a deep copy of the model binds it to itself, with what accelerate puts around it. Around anything else accelerate
    # puts a function, which would run the original's layers.
    inner.forward = MethodType(forward, inner)


def _owner_of(forward: Any) -> Any:
    """The model whose layers a forward runs, below what was put around it too; None where it takes no ``token_head``.

    Accelerate wraps autocast around the forward of a prepared model and keeps no attribute of it but ``__wrapped__``; a second
    patch on top would call the head outside of autocast, and a run in bfloat16 would compute in float32.
    """
    owner, takes_head = None, False
    while forward is not None:
        owner = forward.__self__ if isinstance(forward, MethodType) else owner
        takes_head = takes_head or hasattr(forward, "takes_token_head")
        forward = getattr(forward, "__wrapped__", None)
    return owner if takes_head else None


def _head_forward(
    inner: nn.Module, original: Any, head: TokenHead | ScoreHead, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """What the head reads of the last hidden states; of the model's own logits where they are not ``cap(scale * h W^T)``."""
    kwargs.pop("labels", None)
    own = isinstance(head, TokenHead) and bool(inner.__dict__.get("own_logits"))
    if own and head.values is not None:
        kwargs["output_hidden_states"] = True
    output = original(*args, **kwargs) if own else trunk(inner)(*args, **kwargs)
    read = (output.logits if own else output.last_hidden_state)[head.rows, head.columns]  # (N, V) or (N, H)
    if isinstance(head, ScoreHead):
        return {"scores": score(inner, read)}
    if not own:
        result = _project(inner, read, head)
    elif head.compare is not None:
        return head.compare(read.float(), None, LogitRule(), head)
    else:
        result = _from_logits(read.float(), head)
    if head.values is not None:
        result["values"] = head.values(output.hidden_states[-1] if own else output.last_hidden_state)
    if head.balance_over is not None:
        result["aux_loss"] = _balance(inner, output.router_logits, head.balance_over, head.total)
    return result


def score_layer(inner: nn.Module) -> Any:
    """The classification head of a model, by the names that architectures give it; None where there is none."""
    return next((layer for name in SCORE_LAYERS if (layer := getattr(inner, name, None)) is not None), None)


def train_new_tokens(peft_config: PeftConfig | None, model: nn.Module, added: list[int]) -> Any:
    """An adapter config that also trains the embeddings of tokens that were just added; the caller's is not changed."""
    if peft_config is None or not added or peft_config.is_prompt_learning:
        return peft_config
    config = copy.deepcopy(peft_config)
    embedding = model.get_input_embeddings()
    name = next((n.split(".")[-1] for n, module in model.named_modules() if module is embedding), None)
    if name is None:
        raise ModelError(
            f"the embedding of {type(model).__name__} cannot be found by name; train its new tokens in full."
        )
    indices = config.trainable_token_indices or {}
    if isinstance(indices, list):
        indices = {name: indices}
    config.trainable_token_indices = {**indices, name: sorted({*indices.get(name, []), *added})}
    head = model.get_output_embeddings()
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    if head is not None and not tied and "lm_head" not in (config.modules_to_save or []):
        logger.warning("new tokens were added: lm_head is trained and saved in full beside the adapter.")
        config.modules_to_save = [*(config.modules_to_save or []), "lm_head"]
    return config


def train_score_head(peft_config: PeftConfig | None, model: nn.Module) -> Any:
    """An adapter config that trains and saves a classifier's head, which is new and random; the caller's is not changed."""
    if peft_config is None or not hasattr(peft_config, "modules_to_save"):
        return peft_config
    layer = score_layer(model)
    name = next((n.split(".")[-1] for n, module in model.named_modules() if module is layer), None)
    if name is None:
        raise ModelError(
            f"{type(model).__name__} has no classification head. Load it with AutoModelForSequenceClassification."
        )
    config = copy.deepcopy(peft_config)
    if config.task_type == "CAUSAL_LM":
        config.task_type = None  # The command line's default; peft would look for a language-model head.
    if config.task_type is None and name not in (config.modules_to_save or []):
        logger.info("the head %r is trained and saved in full beside the adapter.", name)
        config.modules_to_save = [*(config.modules_to_save or []), name]
    return config


def score(inner: nn.Module, hidden: Tensor) -> Tensor:
    """``(N, H)`` hidden states to ``(N, labels)`` float32 scores."""
    dropout = getattr(inner, "dropout", None)
    return score_layer(inner)(dropout(hidden) if isinstance(dropout, nn.Module) else hidden).float()


def is_one_matrix(layer: nn.Module) -> bool:
    """Whether an output layer is its weight and bias and nothing else: neither an adapter nor anybody's hook runs with it."""
    return type(layer) in (nn.Linear, Float32Linear) and _unhooked(layer)


def _unhooked(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return all(parallel.shards(hook) for of in hooks for hook in of.values())


def _in_force(layer: Any) -> Any:
    """The output layer inside of what peft puts around one that is trained beside an adapter, whole or in some rows."""
    if not hasattr(layer, "original_module"):
        return layer
    if layer.disable_adapters:
        return layer.original_module
    if hasattr(layer, "modules_to_save"):
        active = (name for name in layer.active_adapters if name in layer.modules_to_save)
        return next((layer.modules_to_save[name] for name in active), layer)
    base = layer.original_module
    if not (is_one_matrix(base) and _unhooked(layer)):
        return layer
    # Rows of tokens in a head that is tied to the embeddings: they lie beside the matrix, and ``weight`` puts them into it.
    joined = type(base)(1, 1, bias=False, device="meta")
    del joined.weight
    joined.weight, joined.bias = layer.weight, base.bias
    return joined


def _project(inner: nn.Module, hidden: Tensor, head: TokenHead) -> dict[str, Tensor]:
    """Log-probs of the targets under the model's own output layer."""
    layer = _in_force(inner.get_output_embeddings())
    rule = LogitRule.of(inner.config)
    if head.compare is not None:
        return head.compare(hidden, layer, rule, head)
    if is_one_matrix(layer) and "logits" not in head.needs:
        # A head in float32 is meant to stay there under autocast.
        wide = torch.autocast(hidden.device.type, enabled=False) if type(layer) is Float32Linear else nullcontext()
        with wide:
            out = token_logprobs(
                hidden,
                layer.weight,
                head.targets,
                bias=layer.bias,
                logit_scale=rule.scale,
                softcap=rule.softcap,
                temperature=head.temperature,
                truncation=head.truncation,
                chunk_size=head.chunk_size,
                expected_grad=head.expected_grad,
                entropy_grad="entropy_grad" in head.needs,
                **{f"need_{name}": name in head.needs for name in PER_TOKEN},
            )
        fields = {name: getattr(out, name) for name in ("logp", "log_mass", *PER_TOKEN)}
        return {name: value for name, value in fields.items() if value is not None}
    # The slow path for heads that are not one plain matrix (an adapter on ``lm_head``, a hook) and for losses on logits.
    if type(layer) in (nn.Linear, Float32Linear) and not is_one_matrix(layer):
        warn_once(
            logger, "hooks run on the output layer: for them all logits of a pass exist at once, which takes memory."
        )
    return _from_logits(rule.logits(layer(hidden)), head)


def _from_logits(logits: Tensor, head: TokenHead) -> dict[str, Tensor]:
    """Log-probs and what else was asked for, from ``(N, V)`` logits."""
    raw, logits = logits, logits / head.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    result = {"logp": logprobs.gather(-1, head.targets[:, None]).squeeze(-1)}
    if {"entropy", "entropy_grad"} & head.needs:
        with nullcontext() if "entropy_grad" in head.needs else torch.no_grad():
            result["entropy"] = -(logprobs.exp() * logprobs).sum(-1)
    if head.truncation:
        result["log_mass"] = kept_log_mass(logits.detach(), head.truncation, head.targets[:, None])
    if "correct" in head.needs:
        result["correct"] = logits.argmax(-1) == head.targets
    if "mean_logit" in head.needs:
        result["mean_logit"] = raw.detach().mean(-1)
    if "collision" in head.needs:
        result["collision"] = collision_logp(logits.detach())
    if "logits" in head.needs:
        result["logits"] = logits
    return result


def _balance(
    inner: nn.Module, router_logits: Any, real: Tensor, total: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """``E sum_e f_e P_e`` over real tokens, all layers pooled: the load-balancing term, unscaled.

    ``f_e`` are assignments per token to expert e and ``P_e`` is its mean probability; top-k at perfect balance.

    Reference: Switch Transformers, arXiv:2101.03961, equation 4.
    """
    text = inner.config.get_text_config()
    top_k = experts_per_token(text) or 2
    kept = real.flatten().bool()
    layers = [logits.reshape(-1, logits.shape[-1])[kept] for logits in router_logits]
    probabilities = torch.cat(layers).float().softmax(-1)  # (layers N, E)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    if total is not None:  # A product of two means, each over tokens of all processes.
        sums = total(torch.stack([chosen.sum(0), probabilities.sum(0), torch.ones_like(chosen).sum(0)]))  # (3, E)
        return probabilities.shape[1] * (sums[0] * sums[1] / sums[2] ** 2).sum()
    return probabilities.shape[1] * (chosen.mean(0) * probabilities.mean(0)).sum()


def has_tower(model: nn.Module) -> bool:
    """Whether a model encodes images."""
    return _encodes_images(causal_lm(model))


def _encodes_images(module: Any) -> bool:
    # Mllama, whose text attends to images beside it, has no method for their features.
    inner = getattr(module, "model", module)
    beside = hasattr(inner, "vision_model") and hasattr(inner, "multi_modal_projector")
    return beside or any(hasattr(holder, "get_image_features") for holder in (module, inner))


def text_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of a causal language model but those of a vision tower and its projector."""
    named = dict(model.named_modules())
    if not has_tower(model):
        return list(named.values())
    # Whatever holds tower and text model answers for both, and gives them their features.
    return [m for name, m in named.items() if set(LANGUAGE) & set(name.split(".")) or _encodes_images(m)]


def rename_attention(model: nn.Module, name: Callable[[str], str]) -> list[tuple[Any, str]]:
    """Rename the attention backend in the configs of a model's text layers. Return each config with its former name."""
    configs = {id(config): config for config in map(config_of, text_modules(model))}
    named = [one for one in configs.values() if hasattr(one, "_attn_implementation_internal")]
    former = [(config, config._attn_implementation_internal) for config in named]
    for config, backend in former:
        config._attn_implementation_internal = name(backend)
    return former


@contextmanager
def attention_renamed(model: nn.Module, name: Callable[[str], str]) -> Iterator[None]:
    """Rename the attention backend in the configs of a model's text layers, then restore the names."""
    former = rename_attention(model, name)
    try:
        yield
    finally:
        for config, backend in former:
            config._attn_implementation_internal = backend


def placeholder_of(model: nn.Module) -> int | None:
    """Id that a feature of a picture replaces; None: passes of this model hold no pictures."""
    encoder = picture_encoder(model)
    return None if encoder is None else encoder.processor.token_id


def picture_encoder(model: nn.Module) -> Any:
    """What `posttrain.models.vision.install_pictures` put on the model, if anything."""
    return causal_lm(model).__dict__.get("picture_encoder")
