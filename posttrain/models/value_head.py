"""Value functions of a policy: a head on the policy's last hidden states, or a second model that runs in each forward pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from posttrain.errors import ModelError
from posttrain.models.architecture import label_count
from posttrain.models.heads import causal_lm, install_token_head, score_layer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)

# Attributes of the policy's transformers model that hold the value function.
HEAD, CRITIC = "v_head", "value_model"


def hidden_size(config: PretrainedConfig) -> int:
    """Return the width of a model's last hidden states, from the config fields of known architectures.

    Raises:
        ModelError: The config has none of these fields.
    """
    places = (config, "word_embed_proj_dim"), (config, "hidden_size")
    nested = (getattr(config, "text_config", None), "hidden_size"), (getattr(config, "decoder", None), "hidden_size")
    for holder, name in (*places, *nested):
        size = getattr(holder, name, None)
        if isinstance(size, int):
            return size
    raise ModelError(
        f"the config {type(config).__name__} has no width of hidden states (word_embed_proj_dim, hidden_size, "
        "text_config.hidden_size or decoder.hidden_size). Fix: set config.hidden_size."
    )


class ValueHead(nn.Module):
    """Linear layer that maps each hidden state to a value.

    Args:
        config: Config of the model whose hidden states are the inputs.

    >>> import torch
    >>> from transformers import LlamaConfig
    >>> ValueHead(LlamaConfig(hidden_size=64))(torch.zeros(2, 3, 64)).shape
    torch.Size([2, 3, 1])
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.summary = nn.Linear(hidden_size(config), 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute values ``(..., 1)``, in the head's dtype, from hidden states ``(..., H)`` of any dtype."""
        return self.summary(hidden_states.to(self.summary.weight.dtype))


def attach_value(policy: nn.Module, value: nn.Module | None = None) -> nn.Module:
    """Attach a value function to the policy as a submodule, so that ``forward(policy, batch, needs)`` can return ``values``.

    As a submodule, the value function is wrapped, sharded, optimized and set to eval mode together with the policy.

    Args:
        policy: A causal language model, with or without adapters.
        value: A sequence classifier with one label, or a `ValueHead`. None: a new head, whose initial values are all 0.

    Returns:
        The value function.
    """
    inner: Any = causal_lm(policy)
    parameter = next(inner.parameters())
    if value is None:
        value = ValueHead(inner.config)
        nn.init.zeros_(value.summary.weight)
        nn.init.zeros_(value.summary.bias)
    if isinstance(value, ValueHead):
        inner.v_head = value.to(parameter.device).requires_grad_(True)
        return value
    check_scorer(value, "value_model")
    install_token_head(value)
    inner.value_model = value.to(parameter.device)
    return value


def _held(policy: nn.Module) -> tuple[Any, str, nn.Module] | None:
    inner: Any = causal_lm(policy)
    for name in (CRITIC, HEAD):
        if name in inner._modules:
            return inner, name, inner._modules[name]
    return None


def value_of(policy: nn.Module) -> nn.Module | None:
    """Return the policy's value function, which is a head or a second model. Return None if no value function is attached."""
    attached = _held(policy)
    return None if attached is None else attached[2]


def critic_of(policy: nn.Module) -> nn.Module | None:
    """Return the policy's value model. Return None if the policy has a value head or no value function."""
    value = value_of(policy)
    return None if isinstance(value, ValueHead) else value


@contextmanager
def without_value(policy: nn.Module) -> Iterator[None]:
    """Detach the value function inside the context, so that the policy can be saved or loaded alone. The value function is
    attached again on exit.
    """
    attached = _held(policy)
    if attached is not None:
        del attached[0]._modules[attached[1]]
    try:
        yield
    finally:
        if attached is not None:
            attached[0]._modules[attached[1]] = attached[2]


def value_state(policy: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the policy's value function, without the policy's prefix in the names. Return an empty dict
    without a value function.
    """
    attached = _held(policy)
    return {} if attached is None else dict(attached[2].state_dict())


def load_value_state(policy: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict that `value_state` returned into the policy's value function.

    Raises:
        ModelError: The tensors do not fit the value function.
    """
    attached = _held(policy)
    assert attached is not None, "no value function is attached"
    try:
        attached[2].load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(
            f"the saved value function does not fit the value function of this run ({type(attached[2]).__name__}): {error}"
        ) from error


def check_scorer(model: nn.Module, role: str) -> None:
    """Raise an error if a reward model or value model does not return exactly one number per text.

    Raises:
        ModelError: The model does not have exactly one label, or has no classification head.
    """
    labels = label_count(model)
    if score_layer(model) is None or labels != 1:
        what = "no classification head" if score_layer(model) is None else f"num_labels={labels}"
        raise ModelError(
            f"{role} must be a sequence classifier with one label, but {type(model).__name__} has {what}. Fix: load it with "
            "AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)."
        )


def check_vocabulary(tokenizer: Tokenizer, model: nn.Module, role: str) -> None:
    """Raise an error if the vocabulary of a reward model or value model does not match the policy's tokenizer.

    The model's tokenizer is loaded from the model's path or the local cache, without a download. A token may exist in only
    one of the vocabularies (e.g. an added pad token), if the model has an embedding for the token's id.

    Raises:
        ModelError: The same id stands for different tokens, or the model has too few embeddings for the policy's ids.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    ours = {index: token for token, index in tokenizer.get_vocab().items() if index != tokenizer.pad_token_id}
    if max(ours) >= rows:
        raise ModelError(
            f"{role} gets the policy's token ids, up to {max(ours)}, but has only {rows} embeddings. Fix: use a "
            "model of the same family, or score texts with a reward function."
        )
    theirs = _own_vocabulary(model)
    other = min((i for i, token in theirs.items() if ours.get(i, token) != token), default=None)
    if other is not None:
        raise ModelError(
            f"{role} gets the policy's token ids, but its vocabulary differs: id {other} is {ours[other]!r} for the policy and "
            f"{theirs[other]!r} for this model. Fix: use a model of the same family, or score texts with a reward function."
        )


def _own_vocabulary(model: nn.Module) -> dict[int, str]:
    from transformers import AutoTokenizer

    name = model.config._name_or_path
    if not name:
        return {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    # Many reward models have no tokenizer. In this case, only the sizes of the vocabularies can be compared.
    except Exception as error:
        logger.info(
            "the tokenizer of %s cannot be loaded (%s), so its vocabulary is not compared.", name, type(error).__name__
        )
        return {}
    pad = tokenizer.pad_token_id
    return {index: token for token, index in tokenizer.get_vocab().items() if index != pad}
