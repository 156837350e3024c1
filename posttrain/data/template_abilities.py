"""What a chat template can do, told by rendering short conversations with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from posttrain.data.chat import assistant_mask, common_prefix
from posttrain.data.template_families import inner_tokenizer, template_text, with_template
from posttrain.data.template_probes import PROBES

__all__ = [
    "is_chat_template_prefix_preserving",
    "is_chat_template_stop_token_trained",
    "offsets_find_turns",
    "supports_tool_calling",
]


def offsets_find_turns(processing_class: Any) -> bool:
    """Whether offsets alone find both assistant turns of a conversation, its end of turn included."""
    two = next(probe for probe in PROBES if probe.name == "two turns")
    tokenizer = with_template(processing_class, template_text(processing_class))
    try:
        ids, mask = assistant_mask(tokenizer, list(two.messages))
    except Exception:
        return False
    said = tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
    return all((m["content"] in said) == (m["role"] == "assistant") for m in two.messages)


def _dialogue(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "zq_lookup", "arguments": arguments}}
    return [
        {"role": "user", "content": "zq question"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "zq_lookup", "content": "zq_result_text"},
    ]


ARGUMENTS = {"zq_key": "zq_value"}


def _structured(processing_class: Any, messages: list[dict[str, Any]], image: Any = None) -> list[dict[str, Any]]:
    """Messages as a processor takes them: content as blocks; ``image`` opens the first."""
    if inner_tokenizer(processing_class) is processing_class:
        return messages
    blocks = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    if image is not None:
        blocks[0]["content"].insert(0, {"type": "image", "image": image})
    return blocks


def _with_dict_or_json_arguments(function: Callable[[Any], Any]) -> Any:
    """Call with arguments as a dict, and where a template concatenates strings, as JSON."""
    try:
        return function(dict(ARGUMENTS))
    except TypeError:
        return function(json.dumps(ARGUMENTS))


def supports_tool_calling(processing_class: Any) -> bool:
    """Whether the chat template shows a tool call and its result: name, argument key, argument value and result."""
    template = template_text(processing_class)
    if not template:
        return False

    def shown(arguments: Any) -> bool:
        messages = _structured(processing_class, _dialogue(arguments))
        text = processing_class.apply_chat_template(messages, chat_template=template, tokenize=False)
        return all(word in text for word in ("zq_lookup", "zq_key", "zq_value", "zq_result_text"))

    try:
        return _with_dict_or_json_arguments(shown)
    except Exception:
        return False  # A template that refuses the conversation has no words for tools.


def is_chat_template_prefix_preserving(processing_class: Any) -> bool:
    """Whether the tokens of a tool call stay the same once the tool's result follows.

    Multi-turn training with tools builds its sequences by concatenation: what the model wrote must not change when the
    conversation goes on.
    """
    template = template_text(processing_class)
    if not template:
        return False
    image = None
    if getattr(processing_class, "image_processor", None) is not None:
        from posttrain.integrations import require

        image = require("PIL.Image", "probing a processor's chat template").new("RGB", (8, 8))

    def preserved(arguments: Any) -> bool:
        messages = _structured(processing_class, _dialogue(arguments), image)
        options = {"chat_template": template, "tokenize": True, "return_dict": True}
        shorter = processing_class.apply_chat_template(messages[:2], **options)["input_ids"]
        longer = processing_class.apply_chat_template(messages, add_generation_prompt=True, **options)["input_ids"]
        if shorter and isinstance(shorter[0], list):
            shorter, longer = shorter[0], longer[0]
        return common_prefix(shorter, longer) == len(shorter)

    try:
        return _with_dict_or_json_arguments(preserved)
    except Exception:
        return False


def is_chat_template_stop_token_trained(processing_class: Any, chat_template: str | None = None) -> bool:
    """Whether the last thing trained in an assistant turn is a token of the added vocabulary, such as ``<|im_end|>``.

    A model trained on turns without it never learns to stop.

    Args:
        processing_class: Tokenizer or processor; images are not probed.
        chat_template: Looked at instead of the tokenizer's own.
    """
    tokenizer = with_template(processing_class, chat_template or template_text(processing_class))
    messages = [
        {"role": "user", "content": "zq question"},
        {"role": "assistant", "content": "zq answer"},
        {"role": "user", "content": "zq more"},
    ]
    try:
        ids, mask = assistant_mask(tokenizer, messages)
    except Exception:
        return False
    trained = [token for token, said in zip(ids, mask, strict=True) if said]
    while trained and not tokenizer.decode([trained[-1]]).strip():
        trained.pop()
    return bool(trained) and trained[-1] in set(tokenizer.get_added_vocab().values())
