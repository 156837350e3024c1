"""Functions that read fields of model configs. The names of these fields differ between model families. Most functions
return None if a config lacks the field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names under which tree attention is registered in transformers. Each name maps to the attention backend that computes
# attention if the call has no argument `Forest`.
OWN_NAMES = {"posttrain_sdpa": "sdpa", "posttrain_eager": "eager"}


def config_of(model: object) -> Any:
    """Return a model's config. Return None for an object without a config, such as a custom network or a model name."""
    return getattr(model, "config", None)


def get_config_model_id(config: PretrainedConfig | None) -> str:
    """Return the Hub id or folder of a model. Return ``""`` for a model that was built in memory."""
    return getattr(config, "_name_or_path", "") or ""


def generation_config_of(model: object) -> Any:
    """Return a model's generation config. Return None for models that do not generate, e.g. classifiers."""
    return getattr(model, "generation_config", None)


def text_of(config: PretrainedConfig | None) -> Any:
    """Return the text config of a multimodal config, or the config itself for a text model. Return None for None."""
    return None if config is None else config.get_text_config()


def attention_name(text: PretrainedConfig | None) -> str | None:
    """Return transformers' name of a model's attention backend, even if tree attention wraps it. Return None for None."""
    name = getattr(text, "_attn_implementation", None)
    return OWN_NAMES.get(name, name)


def context_length(text: PretrainedConfig | None) -> int | None:
    """Return the model's maximum sequence length in tokens. Return None if the number of positions is not limited."""
    return getattr(text, "max_position_embeddings", None)


def layer_kinds(text: PretrainedConfig) -> tuple[str, ...]:
    """Return the type of each layer (``full_attention``, ``linear_attention``, ...). Return an empty tuple if the config does
    not list them.
    """
    return tuple(getattr(text, "layer_types", None) or ())


def sliding_window(text: PretrainedConfig | None) -> int | None:
    """Return the size of the sliding attention window in tokens. Return None if there is no window."""
    return getattr(text, "sliding_window", None)


def experts_per_token(text: PretrainedConfig) -> int:
    """Return the number of experts to which each token is routed. Return 0 if the config does not contain the number."""
    return getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 0


def inner_size(text: PretrainedConfig) -> int:
    """Return the inner width of the MLP in a layer."""
    return getattr(text, "intermediate_size", None) or 4 * text.hidden_size


def query_heads(text: PretrainedConfig) -> int:
    """Return the number of query heads. Return 0 if the config does not contain the number, or if it differs by layer."""
    heads = getattr(text, "num_attention_heads", None)
    return heads if isinstance(heads, int) else 0


def key_value_heads(text: PretrainedConfig) -> int:
    """Return the number of key-value heads. Without grouped-query attention, this number equals the number of query heads."""
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def head_size(text: PretrainedConfig) -> int:
    """Return the size of one attention head."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def key_value_width(text: PretrainedConfig) -> int:
    """Return the number of elements of one token's keys in one layer, which is the number of key-value heads times the head
    size.
    """
    return key_value_heads(text) * head_size(text)


def differs_by_layer(text: PretrainedConfig) -> bool:
    """Return whether layers have different sizes, for example different head sizes in Gemma 4. The config then has no single
    value for a size.
    """
    return getattr(text, "is_heterogeneous", False)


def layer_configs(text: PretrainedConfig) -> list[Any]:
    """Return a list with one config per layer. All items are the same config object unless sizes differ by layer."""
    if differs_by_layer(text):
        return [text.per_layer_config[i] for i in range(text.num_hidden_layers)]
    return [text] * text.num_hidden_layers


def image_token(config: PretrainedConfig | None) -> int | None:
    """Return the id of the image placeholder token. Return None for models without images."""
    return getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)


def label_count(model: object) -> int | None:
    """Return the number of labels of a classifier. Return None if the config has no such field."""
    return getattr(config_of(model), "num_labels", None)


def shape_of(text: Any) -> dict[str, Any]:
    """Return the model dimensions that rollout servers report. The trainer compares the reported dimensions with the
    dimensions of its own model.

    Args:
        text: Config of the language model.
    """
    names = ("hidden_size", "num_hidden_layers", "num_key_value_heads")
    return {name: getattr(text, name, None) for name in names}
