"""The value function of a policy: a head on its own trunk, or a second model that goes through every forward with it."""

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

HEAD, CRITIC = "v_head", "value_model"  # Where the policy's transformers model keeps the one or the other.


def hidden_size(config: PretrainedConfig) -> int:
    """Width of a model's last hidden states, by the names that configs give it.

    Raises:
        ModelError: The config has none of them.
    """
    places = (config, "word_embed_proj_dim"), (config, "hidden_size")
    nested = (getattr(config, "text_config", None), "hidden_size"), (getattr(config, "decoder", None), "hidden_size")
    for holder, name in (*places, *nested):
        size = getattr(holder, name, None)
        if isinstance(size, int):
            return size
    raise ModelError(
        f"the config {type(config).__name__} does not say how wide its hidden states are: it has none of word_embed_proj_dim, "
        "hidden_size, text_config.hidden_size and decoder.hidden_size. Set config.hidden_size."
    )


class ValueHead(nn.Module):
    """One number a hidden state: what the state is worth.

    Args:
        config: Of the model whose hidden states it reads.

    >>> import torch
    >>> from transformers import LlamaConfig
    >>> ValueHead(LlamaConfig(hidden_size=64))(torch.zeros(2, 3, 64)).shape
    torch.Size([2, 3, 1])
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.summary = nn.Linear(hidden_size(config), 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``(..., H)`` of any dtype to ``(..., 1)`` in the head's own dtype."""
        return self.summary(hidden_states.to(self.summary.weight.dtype))


def attach_value(policy: nn.Module, value: nn.Module | None = None) -> nn.Module:
    """Let ``forward(policy, batch, needs)`` give ``values``: the value function becomes a part of the policy's module.

    Being a part of it, it is wrapped, sharded, put in eval mode and optimised with it. Nothing else of the policy changes.

    Args:
        policy: A causal language model, with adapters or without.
        value: A sequence classifier with one label; a `ValueHead`; None makes a new head, which starts at 0 everywhere.

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
    """The value function that is a part of a policy, its head or a second model; None: it has none."""
    attached = _held(policy)
    return None if attached is None else attached[2]


def critic_of(policy: nn.Module) -> nn.Module | None:
    """The second model that a policy's value function is; None: it is a head, or there is none."""
    value = value_of(policy)
    return None if isinstance(value, ValueHead) else value


@contextmanager
def without_value(policy: nn.Module) -> Iterator[None]:
    """The policy alone, as it is saved and loaded; its value function comes back afterwards, also on an exception."""
    attached = _held(policy)
    if attached is not None:
        del attached[0]._modules[attached[1]]
    try:
        yield
    finally:
        if attached is not None:
            attached[0]._modules[attached[1]] = attached[2]


def value_state(policy: nn.Module) -> dict[str, Tensor]:
    """The value function's own tensors, without the policy's prefix."""
    attached = _held(policy)
    return {} if attached is None else dict(attached[2].state_dict())


def load_value_state(policy: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Undo `value_state`.

    Raises:
        ModelError: The tensors are those of another value function.
    """
    attached = _held(policy)
    assert attached is not None, "no value function is attached"
    try:
        attached[2].load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(
            f"the saved value function does not fit this one ({type(attached[2]).__name__}): {error}"
        ) from error


def check_scorer(model: nn.Module, role: str) -> None:
    """Refuse a reward or value model that does not give one number a text.

    Raises:
        ModelError: Several labels, or no classification head.
    """
    labels = label_count(model)
    if score_layer(model) is None or labels != 1:
        what = "no classification head" if score_layer(model) is None else f"num_labels={labels}"
        raise ModelError(
            f"{role} must be a sequence classifier with one label, and {type(model).__name__} has {what}. Load it with "
            "AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)."
        )


def check_vocabulary(tokenizer: Tokenizer, model: nn.Module, role: str) -> None:
    """Refuse a reward or value model that reads token ids otherwise than the policy's tokenizer writes them.

    Its own tokenizer is looked for where it was loaded from, without any download. A token that only one of the two has
    (an added pad token) does no harm while the model has an embedding for it.

    Raises:
        ModelError: One id stands for two tokens, or the model has fewer embeddings than the policy has tokens.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    ours = {index: token for token, index in tokenizer.get_vocab().items() if index != tokenizer.pad_token_id}
    if max(ours) >= rows:
        raise ModelError(
            f"{role} reads the policy's token ids as they are, and it has {rows} embeddings for ids up to {max(ours)}. Take a "
            "model of the same family, or score texts with a reward function."
        )
    theirs = _own_vocabulary(model)
    other = min((i for i, token in theirs.items() if ours.get(i, token) != token), default=None)
    if other is not None:
        raise ModelError(
            f"{role} reads the policy's token ids as they are, but its vocabulary is another one: id {other} is "
            f"{ours[other]!r} for the policy and {theirs[other]!r} for it. Take a model of the same family, or score texts "
            "with a reward function."
        )


def _own_vocabulary(model: nn.Module) -> dict[int, str]:
    from transformers import AutoTokenizer

    name = model.config._name_or_path
    if not name:
        return {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # Many reward models come without a tokenizer; then only the size can be compared.
        logger.info(
            "the tokenizer of %s cannot be read (%s): its vocabulary is not compared.", name, type(error).__name__
        )
        return {}
    pad = tokenizer.pad_token_id
    return {index: token for token, index in tokenizer.get_vocab().items() if index != pad}
