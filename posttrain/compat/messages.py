"""Messages with images: placeholders put where pictures belong, and filled with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from posttrain.errors import DataError

__all__ = ["prepare_multimodal_messages", "prepare_multimodal_messages_vllm"]

WRAPPED = (
    "assistant",
    "system",
    "developer",
    "tool",
)  # Roles whose text is wrapped, and that show no picture of their own.


def prepare_multimodal_messages(
    messages: Sequence[dict[str, Any]], images: Sequence[Any] | None = None
) -> list[dict[str, Any]]:
    """Messages whose content is a list of blocks, with one block an image; the given messages are not changed.

    Where no message holds a placeholder, one for each image goes before the text of the first user message. Placeholders
    are filled in reading order; blocks that hold an image already stay, and do not count.

    Args:
        messages: With content as text or blocks.
        images: What fills the placeholders; None leaves them empty, and then there are none to add.

    Raises:
        DataError: An unknown role, a user message without content, or as many placeholders as there are not images.

    >>> prepare_multimodal_messages([{"role": "user", "content": "What is it?"}], images=["cat"])
    [{'role': 'user', 'content': [{'type': 'image', 'image': 'cat'}, {'type': 'text', 'text': 'What is it?'}]}]
    """
    pictures = list(images or ())
    made = [
        {**m, "content": [_without_none(block) if isinstance(block, dict) else block for block in m["content"]]}
        if isinstance(m.get("content"), list)
        else dict(m)
        for m in messages
    ]
    wanted = 0 if any(_empty(message) for message in made) else len(pictures)
    for index, message in enumerate(made):
        role, content = message.get("role"), message.get("content")
        if role != "user" and role not in WRAPPED:
            raise DataError(f"message {index} has the role {role!r}; known are user, {', '.join(WRAPPED)}.")
        if role == "user" and content is None:
            raise DataError(f"message {index} (role 'user') has no content; its keys are {sorted(message)}.")
        if isinstance(content, str):
            before = [{"type": "image"} for _ in range(wanted)] if role == "user" else []
            wanted = 0 if role == "user" else wanted
            message["content"] = [*before, {"type": "text", "text": content}]
    places = [block for message in made for block in _empty(message)]
    if images is not None and len(places) != len(pictures):
        raise DataError(
            f"the messages have {len(places)} image placeholders and there are {len(pictures)} images. Give one image a "
            "{'type': 'image'} block, or none of these blocks and text content."
        )
    for block, picture in zip(places, pictures, strict=False):
        block["image"] = picture
    return made


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    blocks = content if isinstance(content, list) and message.get("role") != "tool" else []
    return [block for block in blocks if isinstance(block, dict) and block.get("type") == "image"]


def _without_none(block: dict[str, Any]) -> dict[str, Any]:
    """A block without the keys that Arrow filled in because other blocks of the column have them."""
    return {key: value for key, value in block.items() if value is not None}


def _empty(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in _blocks(message) if "image" not in block]


def prepare_multimodal_messages_vllm(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A deep copy in which every image block is one that vLLM reads: type ``image_pil``, the image under that name.

    >>> prepare_multimodal_messages_vllm([{"role": "user", "content": [{"type": "image", "image": "cat"}]}])
    [{'role': 'user', 'content': [{'type': 'image_pil', 'image_pil': 'cat'}]}]
    """
    made = copy.deepcopy(list(messages))
    for message in made:
        for block in message["content"] if isinstance(message.get("content"), list) else ():
            if isinstance(block, dict) and block.get("type") == "image":
                block["type"] = "image_pil"
                block["image_pil"] = block.pop("image", None)
    return made
