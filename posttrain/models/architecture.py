"""What the config of a model says of its architecture, by one name for all families; None where a family has no such field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names of tree attention in transformers' registry, and the backends that it runs for calls without a forest.
OWN_NAMES = {"posttrain_sdpa": "sdpa", "posttrain_eager": "eager"}


def config_of(model: object) -> Any:
    """The config that a model carries; None of what carries none (a network of the user's own, a name)."""
    return getattr(model, "config", None)


def get_config_model_id(config: PretrainedConfig | None) -> str:
    """Where the model came from, or ``""`` for one built in memory."""
    return getattr(config, "_name_or_path", "") or ""


def generation_config_of(model: object) -> Any:
    """How a model generates by itself; None of what generates nothing, such as a classifier."""
    return getattr(model, "generation_config", None)


def text_of(config: PretrainedConfig | None) -> Any:
    """The text part of a config, the whole of it in a text model; None of None."""
    return None if config is None else config.get_text_config()


def attention_name(text: PretrainedConfig | None) -> str | None:
    """Return transformers' name of a model's attention backend, also where tree attention runs around it. None for None."""
    name = getattr(text, "_attn_implementation", None)
    return OWN_NAMES.get(name, name)


def context_length(text: PretrainedConfig | None) -> int | None:
    """Most tokens of a sequence that the model was made for; None without position limits."""
    return getattr(text, "max_position_embeddings", None)


def layer_kinds(text: PretrainedConfig) -> tuple[str, ...]:
    """What each layer is (``full_attention``, ``linear_attention``, ...); empty where all are of one kind."""
    return tuple(getattr(text, "layer_types", None) or ())


def sliding_window(text: PretrainedConfig | None) -> int | None:
    """Tokens that a layer with a window looks back; None without one."""
    return getattr(text, "sliding_window", None)


def experts_per_token(text: PretrainedConfig) -> int:
    """Experts that a router gives each token to; 0 without a router, or where the config does not say."""
    return getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 0


def inner_size(text: PretrainedConfig) -> int:
    """Width inside of a layer's MLP."""
    return getattr(text, "intermediate_size", None) or 4 * text.hidden_size


def query_heads(text: PretrainedConfig) -> int:
    """Attention heads of queries; 0 where layers have none, or each a number of its own."""
    heads = getattr(text, "num_attention_heads", None)
    return heads if isinstance(heads, int) else 0


def key_value_heads(text: PretrainedConfig) -> int:
    """Attention heads of keys and values, as many as of queries where they are not shared."""
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def head_size(text: PretrainedConfig) -> int:
    """Numbers of one attention head."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def key_value_width(text: PretrainedConfig) -> int:
    """Numbers of a token's keys in one layer: key-value heads times the size of a head."""
    return key_value_heads(text) * head_size(text)


def differs_by_layer(text: PretrainedConfig) -> bool:
    """Whether layers have sizes of their own, as Gemma 4's heads do: such a field is none of the whole config's."""
    return getattr(text, "is_heterogeneous", False)


def layer_configs(text: PretrainedConfig) -> list[Any]:
    """A config for each layer: the same, or one of its own where layers differ."""
    if differs_by_layer(text):
        return [text.per_layer_config[i] for i in range(text.num_hidden_layers)]
    return [text] * text.num_hidden_layers


def image_token(config: PretrainedConfig | None) -> int | None:
    """Id of the token that a feature of an image replaces; None of what reads no images."""
    return getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)


def label_count(model: object) -> int | None:
    """Numbers that a classifier gives for a text; None of what is no transformers model."""
    return getattr(config_of(model), "num_labels", None)
