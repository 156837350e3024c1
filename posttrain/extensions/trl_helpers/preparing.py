"""Preparation of models for training or generation: quantized base models, adapters, activation checkpointing, and
unwrapping.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.extensions.trl_helpers.tensors import first_true_indices
from posttrain.models.architecture import generation_config_of
from posttrain.models.heads import causal_lm, score
from posttrain.models.load import wrap_with_peft
from posttrain.models.memory import recompute_activations, recompute_options, recomputes
from posttrain.models.parallel import whole_parameters
from posttrain.models.quantised import bits_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig


def enable_gradient_checkpointing(model: nn.Module, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> Any:
    """Enable activation checkpointing. Checkpointed layers need inputs that require gradients. Therefore, the outputs of
    the embeddings require gradients afterwards, even if the embeddings are frozen.

    Args:
        model: Transformers or peft model.
        gradient_checkpointing_kwargs: Arguments of `torch.utils.checkpoint`, such as ``use_reentrant``.
    """
    model.enable_input_require_grads()
    recompute_activations(model, gradient_checkpointing_kwargs)
    return model


@contextmanager
def disable_gradient_checkpointing(
    model: nn.Module, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> Iterator[None]:
    """Disable activation checkpointing inside the context, and restore each layer's setting on exit.

    Args:
        model: Transformers or peft model.
        gradient_checkpointing_kwargs: Not used. Accepted for compatibility with TRL. On exit, each layer has its previous
            arguments.
    """
    bare = causal_lm(model)
    layers: list[Any] = [module for module in bare.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


def prepare_model_for_kbit_training(
    model: nn.Module,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Freeze the parameters of a base model. With ``use_gradient_checkpointing``, also enable activation checkpointing and
    gradients of the embeddings' outputs if the model is quantized.

    No parameter is cast to float32. Norms in 16 bits need less memory, and adapters train equally well with such norms.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
    if use_gradient_checkpointing and (bits_of(model) or getattr(model, "quantization_method", None)):
        enable_gradient_checkpointing(model, gradient_checkpointing_kwargs)
    return model


def prepare_peft_model(model: nn.Module, peft_config: PeftConfig | None, args: Any) -> Any:
    """Add an adapter to a base model. If the base model is quantized, freeze its parameters first.

    If ``args.gradient_checkpointing`` is True, this function enables activation checkpointing and sets the option to False,
    so that the trainer does not enable it again.

    Args:
        model: Base model, or a ``PeftModel`` whose training continues. ``peft_config`` must be None for a ``PeftModel``.
        peft_config: Config of the adapter. None: do not add an adapter.
        args: Training arguments with ``gradient_checkpointing``, ``gradient_checkpointing_kwargs`` and ``bf16``.

    Raises:
        ArgumentTypeError: ``peft_config`` is not a peft config.
        ConfigError: The model already has an adapter.
    """
    import peft

    checkpointing, options = recomputes(args), recompute_options(args)
    if bits_of(model) and not isinstance(model, peft.PeftModel):
        model = prepare_model_for_kbit_training(model, checkpointing, options)
    elif checkpointing:
        enable_gradient_checkpointing(model, options)
    if checkpointing:
        args.gradient_checkpointing = False
        if hasattr(args, "activation_checkpointing"):
            args.activation_checkpointing = False
    model = wrap_with_peft(model, peft_config, activation_checkpointing=checkpointing)
    if getattr(args, "bf16", False) and bits_of(model) == 4:
        peft_module_casting_to_bf16(model)
    return model


def peft_module_casting_to_bf16(model: nn.Module) -> None:
    """Cast float32 parameters to bfloat16 in place. Norms and DoRA magnitudes stay in float32, because bfloat16 would round
    away their small updates.
    """
    norms = [name for name, module in model.named_modules() if "norm" in type(module).__name__.lower()]
    for name, parameter in model.named_parameters():
        skip = name.rpartition(".")[0] in norms or "lora_magnitude_vector" in name
        if parameter.dtype == torch.float32 and not skip:
            parameter.data = parameter.data.to(torch.bfloat16)


@contextmanager
def unwrap_model_for_generation(
    model: nn.Module,
    accelerator: Accelerator,
    gather_deepspeed3_params: bool = True,
    generation_kwargs: dict[str, Any] | None = None,
) -> Iterator[Any]:
    """Yield the unwrapped model for generation. Its parameters are gathered, and activation checkpointing is disabled. On
    exit, the previous state is restored.

    Args:
        model: Model that the accelerator wrapped.
        accelerator: Accelerator that wrapped the model.
        gather_deepspeed3_params: Whether to gather the shards of ZeRO-3 (or FSDP).
        generation_kwargs: Fields of the generation config that are set inside the context.
    """
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    config: Any = generation_config_of(bare)
    before = {name: getattr(config, name, None) for name in generation_kwargs or {}} if config is not None else {}
    for name in before:
        setattr(config, name, (generation_kwargs or {})[name])
    try:
        with disable_gradient_checkpointing(bare):
            if gather_deepspeed3_params:
                with whole_parameters(model, accelerator) as whole:
                    yield whole
            else:
                yield bare
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def empty_cache() -> None:
    """Release unused memory of the accelerator, and run the garbage collector. On a CPU, only run the garbage collector."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def get_reward(
    model: nn.Module,
    query_responses: Tensor,
    pad_token_id: int,
    context_length: int,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the score of a sequence classifier at every token, and select the score at the last token of each response.

    Args:
        model: Sequence classifier with one label.
        query_responses: Token ids ``(B, T)``. Queries are padded on the left, and responses are padded on the right.
        pad_token_id: Id of the pad token.
        context_length: Number of columns of the padded queries in ``query_responses``.
        attention_mask: Mask ``(B, T)``, 1 for real tokens. None: all tokens except the pad token are real. If the pad token
            is also the eos token, pass the mask. Otherwise, the final eos token would be treated as padding.

    Returns:
        Scores ``(B, T, 1)``, scores at the last tokens ``(B,)``, and positions of the last tokens ``(B,)``.

    >>> scores, last, where = get_reward(reward_model, ids, tokenizer.pad_token_id, 16)  # doctest: +SKIP
    """
    real = query_responses != pad_token_id if attention_mask is None else attention_mask.bool()
    positions = (real.long().cumsum(1) - real.long()).clamp(min=0)
    inner = causal_lm(model)
    hidden = inner.base_model(
        input_ids=query_responses.masked_fill(~real, 0),
        attention_mask=real.long(),
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state
    scores = score(inner, hidden)
    last = first_true_indices(~real[:, context_length:]) - 1 + context_length
    rows = torch.arange(len(scores), device=scores.device)
    return scores, scores[rows, last].squeeze(-1), last
