"""Output heads that compute log-probs of tokens or scores of sequences at selected positions, without materializing full
logits.
"""

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
from posttrain.models.architecture import attention_name, config_of, experts_per_token, text_of
from posttrain.models.lean_layers import keep_inputs_only
from posttrain.models.logprob import token_logprobs
from posttrain.types import WHOLE, TokenLoss, Truncation

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

# Names of text modules in a multimodal model. Modules with these names belong neither to the vision tower nor to the
# projector.
LANGUAGE = ("language_model", "text_model", "lm_head")


class Float32Linear(nn.Linear):
    """Linear layer with float32 weights. The layer disables autocast, so that logits are not rounded to bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        """Map hidden states ``(..., H)`` of any dtype to float32 logits ``(..., V)``."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.float())


def cast_head_to_fp32(model: nn.Module) -> None:
    """Replace the output layer of a causal language model with a `Float32Linear`, in place.

    If the input embeddings are tied to the output layer, the embeddings' output is cast back to the previous dtype.

    Args:
        model: A transformers model without a peft wrapper.

    Raises:
        ConfigError: The output layer has an adapter.
        ModelError: The output layer is not a plain linear layer, e.g. because it is quantized.

    Reference: MiniMax-M1, arXiv:2506.13585
    """
    head = model.get_output_embeddings()
    name = type(head).__name__
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        raise ConfigError(
            f"cast_lm_head_to_fp32=True cannot be combined with an adapter on the output layer ({name}). Fix: remove lm_head "
            "from target_modules and modules_to_save, or set cast_lm_head_to_fp32=False."
        )
    if type(head) is Float32Linear:
        return
    if type(head) is not nn.Linear:
        raise ModelError(f"cast_lm_head_to_fp32=True needs a plain linear output layer, but this model has a {name}.")
    embeddings = model.get_input_embeddings()
    before = embeddings.weight.dtype
    tied = head.weight is embeddings.weight
    wide = nn.utils.skip_init(Float32Linear, head.in_features, head.out_features, bias=head.bias is not None)
    wide.weight, wide.bias = head.float().weight, head.bias
    model.set_output_embeddings(wide)
    if tied:
        embeddings.weight = wide.weight  # ``float()`` can create a new parameter, so tie the embeddings to it.
        if before != torch.float32:
            embeddings.register_forward_hook(lambda module, args, output: output.to(before))


# Names of config fields. A field in MULTIPLIERS contains a factor by which logits are multiplied. A field in CAPS contains a
# softcap of the logits.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Model types that multiply logits by ``logits_scaling``. Granite models divide logits by it.
SCALES_UP = ("hyperclovax",)
# Outputs per token that can be requested together with log-probs.
PER_TOKEN = ("entropy", "correct", "mean_logit", "collision")
SCORE_LAYERS = ("score", "classifier", "classification_head")


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Scale and softcap with which an architecture computes logits from ``hidden @ W.T``. For example, Gemma caps the logits,
    Cohere multiplies the logits by a factor, and Granite divides the logits by a number.
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> LogitRule:
        """Return the logit rule that a model's (text) config describes."""
        text = config.get_text_config()
        scale = 1.0
        for name in MULTIPLIERS:
            scale *= float(getattr(text, name, None) or 1.0)
        divisor = float(getattr(text, "logits_scaling", None) or 1.0)
        scale = scale * divisor if text.model_type in SCALES_UP else scale / divisor
        caps = (getattr(text, name, None) for name in CAPS)
        return cls(scale, next((cap for cap in caps if cap), None))

    def logits(self, product: Tensor) -> Tensor:
        """Return the logits ``cap(scale * product)`` in float32, with gradients. ``product`` is the result of the output
        layer and can have any shape.
        """
        scaled = product.float() * self.scale
        return self.softcap * torch.tanh(scaled / self.softcap) if self.softcap else scaled


@dataclass(slots=True)
class TokenHead:
    """Request for the outputs of a forward pass at loss positions, with the settings of these outputs. The caller passes
    this object to the model, whose wrappers forward it to the patched forward method.

    Attributes:
        rows, columns: ``(N,)`` positions of the hidden states that predict the targets.
        targets: ``(N,)`` predicted token ids.
        temperature: Temperature by which the logits are divided.
        truncation: Truncation of the sampler's distribution, e.g. top-p. With truncation, the log of the remaining
            probability mass is returned too.
        chunk_size: Number of positions per chunk of logits. None: the default of `token_logprobs`.
        expected_grad: Expected gradient of the log-probs; see `token_logprobs`. None if the gradient is unknown.
        needs: Names of additional outputs; see `posttrain.models.forward.forward`.
        balance_over: Mask ``(B, T)`` that is 1 for tokens over which the router's load-balancing term is computed. None: the
            term is not computed.
        values: Function that maps the last hidden states ``(B, T, H)`` to values ``(M,)``. None: no values are
            returned.
        compare: Function that compares two models without full logits, instead of computing log-probs. The function's
            arguments are hidden states ``(N, H)``, the output layer (None if the states are logits), its `LogitRule`,
            and this object.
        inputs: Function that maps the model without wrappers to additional arguments of its forward method, e.g. image
            features.
        total: Function that sums a tensor over the processes that share the batch. None: one process has all tokens of the
            batch.
    """

    rows: Tensor
    columns: Tensor
    targets: Tensor
    temperature: float = 1.0
    truncation: Truncation = WHOLE
    chunk_size: int | None = None
    expected_grad: Tensor | TokenLoss | None = None
    needs: frozenset[str] = frozenset()
    balance_over: Tensor | None = None
    values: Callable[[Tensor], Tensor] | None = None
    compare: Callable[[Tensor, Any, LogitRule, TokenHead], dict[str, Any]] | None = None
    inputs: Callable[[Any], dict[str, Any]] | None = None
    total: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class PassInputs:
    """Inputs of a forward pass that depend on the batch's images.

    Attributes:
        position_ids: ``(B, T)``, or ``(3, B, T)`` for families with three-dimensional positions. None: the model
            computes positions.
        span: ``(B, T)`` index of the bidirectional block of each token. -1: the token is in no block. None: there are
            no blocks.
        inputs: Function that maps the model without wrappers to additional arguments of its forward method. None: no
            additional arguments.
    """

    position_ids: Tensor | None
    span: Tensor | None = None
    inputs: Callable[[Any], dict[str, Any]] | None = None


@dataclass(slots=True)
class ScoreHead:
    """Positions at which a classification head is applied, e.g. the last token of each text for rewards.

    Attributes:
        rows, columns: ``(N,)`` positions of the hidden states.
        inputs: Same as in `TokenHead`.
    """

    rows: Tensor
    columns: Tensor
    inputs: Callable[[Any], dict[str, Any]] | None = None


def unwrapped(model: object) -> Any:
    """Return the model without the wrappers of parallelism (e.g. DDP) and compilation. A peft wrapper is kept."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        inner = getattr(model, "module", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def causal_lm(model: nn.Module) -> Any:
    """Return the transformers model (for any task) that is inside the wrappers of DDP and PEFT."""
    inner = unwrapped(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def output_layer(model: object) -> Any:
    """Return the model's layer that maps hidden states to logits. Return None if the model has no such layer."""
    layer_of = getattr(model, "get_output_embeddings", None)
    return None if layer_of is None else layer_of()


def adapters_of(model: object) -> dict[str, PeftConfig]:
    """Return the configs of a model's adapters by name. Return an empty dict if the model has no adapters."""
    return getattr(unwrapped(model), "peft_config", {})


def adapter_kind(config: PeftConfig) -> str:
    """Return the name of a config's peft method, e.g. ``LORA``."""
    return str(config.peft_type).rsplit(".", 1)[-1]


def unsaved_encoders(model: nn.Module) -> list[str]:
    """Return the names of adapters whose virtual tokens are computed by an encoder that peft does not save."""
    return [
        name
        for name, config in adapters_of(model).items()
        if adapter_kind(config) == "P_TUNING" or getattr(config, "prefix_projection", False)
    ]


def learns_prompts(model: nn.Module) -> bool:
    """Return whether an active peft wrapper prepends virtual tokens to every row. A wrapper with virtual tokens accepts
    only 2-D masks.
    """
    bare = unwrapped(model)
    config = getattr(bare, "active_peft_config", None)
    return config is not None and config.is_prompt_learning and not bare._adapters_disabled


def virtual_tokens(model: nn.Module) -> int:
    """Return the number of columns that an active prompt-tuning adapter prepends to every row. For prefix tuning, the number
    is 0, because the virtual tokens are stored in the key-value cache.
    """
    if not learns_prompts(model):
        return 0
    config: Any = unwrapped(model).active_peft_config
    return 0 if config.peft_type in ("PREFIX_TUNING", "CARTRIDGE") else int(config.num_virtual_tokens)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to eval mode and disable gradients inside the context. Restore each module's mode on exit. Eval mode
    disables activation checkpointing.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def trunk(inner: nn.Module) -> Any:
    """Return the model without its head. Llama 4's text model is handled separately, because its ``base_model_prefix`` is
    not the name of an attribute.
    """
    return inner.base_model if inner.base_model is not inner else inner.model


def install_token_head(model: nn.Module) -> None:
    """Patch a model's forward method to accept ``token_head`` (a `TokenHead` or `ScoreHead`). Calls without this
    argument do not change.

    The function also makes the layers save less for the backward pass (`keep_inputs_only`). With a patched forward method,
    the wrappers of DDP, FSDP, DeepSpeed, autocast and PEFT run one ordinary forward call. Repeated calls of this function have
    no effect.
    """
    inner: Any = causal_lm(model)
    owner = _owner_of(inner.forward)
    if owner is inner:
        return
    # In a copied model, the forward method may still be wrapped in a function that runs the layers of the original model.
    # Remove that function.
    if owner is not None:
        del inner.forward
        vars(inner).pop("_original_forward", None)
    keep_inputs_only(inner)
    _cap_scores(inner)
    inner.headless_forward = inner.forward

    @functools.wraps(type(inner).forward)
    def forward(inner: Any, *args: Any, token_head: TokenHead | ScoreHead | None = None, **kwargs: Any) -> Any:
        if token_head is None:
            return inner.headless_forward(*args, **kwargs)
        if token_head.inputs is not None:
            kwargs |= token_head.inputs(inner)
        masks = kwargs.get("attention_mask")
        if isinstance(masks, dict) and inner.config.model_type == "paligemma":
            # PaliGemma's forward method accepts only a single mask. For PaliGemma 2, a hook passes the dict with one mask
            # per layer type to the text model.
            kwargs["attention_mask"] = masks["full_attention"]
            with inner.model.language_model.register_forward_pre_hook(
                lambda _, args, options: (args, {**options, "attention_mask": masks}), with_kwargs=True
            ):
                return _head_forward(inner, inner.headless_forward, token_head, *args, **kwargs)
        return _head_forward(inner, inner.headless_forward, token_head, *args, **kwargs)

    vars(forward)["takes_token_head"] = True
    # Use a bound method. A deep copy of the model then has a method that is bound to the copy, even if accelerate has
    # wrapped the method. With any other callable, the copy would run the layers of the original model.
    inner.forward = MethodType(forward, inner)


def _cap_scores(inner: nn.Module) -> None:
    """Use eager attention instead of sdpa for models with bounded attention scores (Gemma 2).

    sdpa does not support a cap on scores. Nevertheless, transformers 5.17 to 5.19 use sdpa for these models by default. Newer
    versions use eager attention.
    """
    text = text_of(config_of(inner))
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap and attention_name(text) == "sdpa":
        rename_attention(inner, lambda name: "eager" if name == "sdpa" else name)
        text = "%s: sdpa ignores attn_logit_softcapping=%s, so attn_implementation='eager' is used instead."
        logger.warning(text, type(inner).__name__, cap)


def _owner_of(forward: Any) -> Any:
    """Return the model to which ``forward`` belongs, even if accelerate has wrapped ``forward``. Return None if ``forward``
    does not accept ``token_head``.

    accelerate wraps the forward method of a prepared model in autocast and keeps only ``__wrapped__``. If
    `install_token_head` patched accelerate's wrapper a second time, the head would run outside of autocast. A bfloat16 run
    would then compute the head in float32.
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
    """Run the model and apply the head to its last hidden states. If the model's logits are not ``cap(scale * h W^T)``, apply
    the head to the logits.
    """
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
    """Return the model's classification head, or None if it has none. `SCORE_LAYERS` lists the names of this layer in known
    architectures.
    """
    return next((layer for name in SCORE_LAYERS if (layer := getattr(inner, name, None)) is not None), None)


def train_new_tokens(peft_config: PeftConfig | None, model: nn.Module, added: list[int]) -> Any:
    """Return a copy of an adapter config that also trains the embeddings of added tokens."""
    if peft_config is None or not added or peft_config.is_prompt_learning:
        return peft_config
    config = copy.deepcopy(peft_config)
    embedding = model.get_input_embeddings()
    name = next((n.split(".")[-1] for n, module in model.named_modules() if module is embedding), None)
    if name is None:
        raise ModelError(
            f"the embedding of {type(model).__name__} cannot be found by name. Fix: train new tokens with modules_to_save."
        )
    options = vars(config)
    if name not in (options.get("modules_to_save") or []):
        if "trainable_token_indices" not in options:
            raise ConfigError(
                f"new tokens were added, but {adapter_kind(config)} adapters cannot train their embeddings. Fix: use LoRA, or "
                f"set modules_to_save={[name, 'lm_head']} in peft_config to train all embeddings."
            )
        indices = config.trainable_token_indices or {}
        if isinstance(indices, list):
            indices = {name: indices}
        config.trainable_token_indices = {**indices, name: sorted({*indices.get(name, []), *added})}
    head = model.get_output_embeddings()
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    if head is not None and not tied and "lm_head" not in (config.modules_to_save or []):
        logger.warning("new tokens were added, so lm_head is trained and saved in full with the adapter.")
        config.modules_to_save = [*(config.modules_to_save or []), "lm_head"]
    return config


def train_score_head(peft_config: PeftConfig | None, model: nn.Module) -> Any:
    """Return a copy of an adapter config that also trains and saves the classifier's head, because a new head has random
    weights.

    Args:
        peft_config: Config of a new adapter, or None.
        model: Classifier. If ``peft_config`` is None, the classifier can already have an adapter.

    Raises:
        ModelError: The model has no classification head.
        ConfigError: The adapter trains only token embeddings, so peft would neither train nor save the head.
    """
    used: Any = peft_config or getattr(model, "active_peft_config", None)
    if getattr(used, "peft_type", None) == "TRAINABLE_TOKENS":
        without = "" if peft_config is not None else "pass the model without this adapter, and "
        raise ConfigError(
            "with TrainableTokensConfig, the classification head would be neither trained nor saved, because peft does not "
            f"support modules_to_save with this config. Fix: {without}set peft_config=LoraConfig(target_modules='all-linear', "
            f"trainable_token_indices={vars(used).get('token_indices')}), with which the head is trained and saved too."
        )
    head = score_layer(causal_lm(model)) if peft_config is None and used is not None else None
    if head is not None and not any(parameter.requires_grad for parameter in head.parameters()):
        logger.warning(
            "the classification head of this PeftModel is neither trained nor saved. If the head is new, its values are random, "
            "and an adapter that is loaded later would have a different head. Fix: use task_type='SEQ_CLS' in the adapter's "
            "config, or list the head in modules_to_save."
        )
    if peft_config is None or not hasattr(peft_config, "modules_to_save"):
        return peft_config
    layer = score_layer(model)
    name = next((n.split(".")[-1] for n, module in model.named_modules() if module is layer), None)
    if name is None:
        raise ModelError(
            f"{type(model).__name__} has no classification head. Fix: load it with AutoModelForSequenceClassification."
        )
    config = copy.deepcopy(peft_config)
    if config.task_type == "CAUSAL_LM":
        # CAUSAL_LM is the command line's default. With this task type, peft would expect a language-model head.
        config.task_type = None
    if config.task_type is None and name not in (config.modules_to_save or []):
        logger.info("the head %r is trained and saved in full with the adapter.", name)
        config.modules_to_save = [*(config.modules_to_save or []), name]
    return config


def score(inner: nn.Module, hidden: Tensor) -> Tensor:
    """Apply the classification head to hidden states ``(N, H)``. Return float32 scores ``(N, labels)``."""
    dropout = getattr(inner, "dropout", None)
    return score_layer(inner)(dropout(hidden) if isinstance(dropout, nn.Module) else hidden).float()


def is_one_matrix(layer: nn.Module) -> bool:
    """Return whether an output layer is a plain linear layer. A plain layer has no adapter. Its only hooks are hooks that
    implement sharding.
    """
    return type(layer) in (nn.Linear, Float32Linear) and _unhooked(layer)


def _unhooked(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return all(parallel.shards(hook) for of in hooks for hook in of.values())


def _in_force(layer: Any) -> Any:
    """Return the layer that computes the logits. If peft has wrapped the output layer to train all or some of its rows,
    return the layer without peft's wrapper.
    """
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
    # If the output layer is tied, peft stores its trained rows separately. The property ``weight`` of peft's wrapper inserts
    # these rows into the matrix.
    joined = type(base)(1, 1, bias=False, device="meta")
    del joined.weight
    joined.weight, joined.bias = layer.weight, base.bias
    return joined


def _project(inner: nn.Module, hidden: Tensor, head: TokenHead) -> dict[str, Tensor]:
    """Compute log-probs of the targets from hidden states, and the additional outputs that are listed in ``head.needs``."""
    layer = _in_force(inner.get_output_embeddings())
    rule = LogitRule.of(inner.config)
    if head.compare is not None:
        return head.compare(hidden, layer, rule, head)
    if is_one_matrix(layer) and "logits" not in head.needs:
        # Disable autocast for a float32 output layer. Otherwise, the layer would not compute in float32.
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
    # The code below is the slow path, which computes all logits. It is used for output layers with an adapter or a hook, and
    # for losses that need all logits.
    if type(layer) in (nn.Linear, Float32Linear) and not is_one_matrix(layer):
        warn_once(
            logger, "the output layer has hooks, so all logits of a pass are computed at once, which needs more memory."
        )
    return _from_logits(rule.logits(layer(hidden)), head)


def _from_logits(logits: Tensor, head: TokenHead) -> dict[str, Tensor]:
    """Return log-probs and the additional outputs in ``head.needs`` from the full ``(N, V)`` logits."""
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
    """Return the load-balancing term ``E sum_e f_e P_e`` over all layers and all tokens except padding. The term is not yet
    multiplied by its coefficient.

    ``f_e`` is the mean number of assignments to expert e per token. ``P_e`` is the mean probability of expert e. With
    perfect balance, the term equals top-k. If no layer has a router, the term is 0.

    Raises:
        ModelError: The installed version of transformers does not return router logits for this model.

    Reference: Switch Transformers, arXiv:2101.03961, equation 4.
    """
    text = inner.config.get_text_config()
    if router_logits is None:
        from transformers import __version__

        raise ModelError(
            f"{type(inner).__name__} of transformers {__version__} returns no router logits, so the load-balancing "
            "loss cannot be computed. Fix: set router_aux_loss_coef=0, or update transformers."
        )
    top_k = experts_per_token(text) or 2
    if not router_logits:  # The model has only dense layers, so the term is 0.
        return torch.zeros((), device=real.device)
    mask = real.flatten().bool()
    layers = [logits.reshape(-1, logits.shape[-1])[mask] for logits in router_logits]
    probabilities = torch.cat(layers).float().softmax(-1)  # (layers N, E)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    # Sum ``f_e`` and ``P_e`` over processes before multiplying them, because both are means over the tokens of all
    # processes.
    if total is not None:
        sums = total(torch.stack([chosen.sum(0), probabilities.sum(0), torch.ones_like(chosen).sum(0)]))  # (3, E)
        return probabilities.shape[1] * (sums[0] * sums[1] / sums[2] ** 2).sum()
    return probabilities.shape[1] * (chosen.mean(0) * probabilities.mean(0)).sum()


def has_tower(model: nn.Module) -> bool:
    """Return whether a model has a vision tower."""
    return _encodes_images(causal_lm(model))


def _encodes_images(module: Any) -> bool:
    # Mllama has a vision tower, but no get_image_features, because it uses cross-attention.
    inner = getattr(module, "model", module)
    beside = hasattr(inner, "vision_model") and hasattr(inner, "multi_modal_projector")
    return beside or any(hasattr(holder, "get_image_features") for holder in (module, inner))


def text_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a causal language model except those of the vision tower and its projector."""
    named = dict(model.named_modules())
    if not has_tower(model):
        return list(named.values())
    # Include modules that contain both the vision tower and the text model.
    return [m for name, m in named.items() if set(LANGUAGE) & set(name.split(".")) or _encodes_images(m)]


def rename_attention(model: nn.Module, name: Callable[[str], str]) -> list[tuple[Any, str]]:
    """Rename the attention backend in the configs of a model's text layers. Return each config and its previous name."""
    configs = {id(config): config for config in map(config_of, text_modules(model))}
    named = [cfg for cfg in configs.values() if hasattr(cfg, "_attn_implementation_internal")]
    former = [(config, config._attn_implementation_internal) for config in named]
    for config, backend in former:
        config._attn_implementation_internal = name(backend)
    return former


@contextmanager
def attention_renamed(model: nn.Module, name: Callable[[str], str]) -> Iterator[None]:
    """Rename the attention backend in the configs of a model's text layers inside the context, and restore the previous names
    on exit.
    """
    former = rename_attention(model, name)
    try:
        yield
    finally:
        for config, backend in former:
            config._attn_implementation_internal = backend


def placeholder_of(model: nn.Module) -> int | None:
    """Return the id of the image placeholder token. Return None if the model was not prepared for images."""
    encoder = picture_encoder(model)
    return None if encoder is None else encoder.processor.token_id


def picture_encoder(model: nn.Module) -> Any:
    """Return the image encoder that `install_pictures` of the images extension added to the model, or None."""
    return causal_lm(model).__dict__.get("picture_encoder")
