"""Chat templates: rendering, the boundary between prompt and completion, assistant masks, tokens that end a turn."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from posttrain.errors import DataError, ModelError

__all__ = ["assistant_mask", "common_prefix", "has_generation_markers", "render", "terminal_token_ids", "turn_end"]

PROBE = "7f3a probe 9c1e"  # Content that no template writes by itself.


def render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Any = None,
    **template_kwargs: Any,
) -> str:
    """One conversation as the text the model sees.

    Raises:
        ModelError: The tokenizer has no chat template. DataError: The template refused the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            "the rows are conversational, but the tokenizer has no chat template. Set tokenizer.chat_template, use an "
            "instruction-tuned checkpoint, or give the rows as strings."
        )
    try:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools or None,
            **template_kwargs,
        )
    except Exception as error:
        raise DataError(f"the chat template refused the messages {_brief(messages)}: {error}") from error


def _brief(messages: Any) -> str:
    text = repr(messages)
    return text if len(text) <= 200 else text[:200] + "..."


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix of two id lists."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def has_generation_markers(template: str | dict | None) -> bool:
    """Whether a template marks what the assistant says with ``{% generation %}``."""
    import re

    if isinstance(template, dict):
        template = template.get("default")
    return bool(template) and re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None  # type: ignore[arg-type]


def turn_end(tokenizer: Any) -> str:
    """What the template writes right after an assistant's words: the end-of-turn token, or ``""``."""
    return _turn_end(tokenizer, str(getattr(tokenizer, "chat_template", "") or ""))


@lru_cache(maxsize=64)
def _turn_end(tokenizer: Any, template: str) -> str:
    if not template:
        return ""
    text = render(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": PROBE}])
    after = text.rsplit(PROBE, 1)[-1]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return tokenizer.decode(ids[:1]) if ids and ids[0] in special else ""


def terminal_token_ids(tokenizer: Any, generation_config: Any = None) -> tuple[int, ...]:
    """Every token after which the model has finished: the tokenizer's eos, the generation config's, the template's.

    One of them alone is not enough: Gemma ends a turn with ``<end_of_turn>``, Phi with ``<|end|>``, and a trainer that
    waits for the tokenizer's eos counts nearly every completion as truncated.
    """
    ids = set()
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    configured = getattr(generation_config, "eos_token_id", None)
    ids.update([configured] if isinstance(configured, int) else configured or [])
    end = turn_end(tokenizer)
    if end:
        ids.add(int(tokenizer.convert_tokens_to_ids(end)))
    return tuple(sorted(ids))


def assistant_mask(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **template_kwargs: Any
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and 1 on what the assistant says, its end of turn included.

    Generation markers decide where the template has them. Where it has none, each assistant turn is found by rendering
    the conversation up to it: with the generation prompt it starts, with the turn it ends.
    """
    if has_generation_markers(tokenizer.chat_template):
        out = tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tools=tools or None,
            **template_kwargs,
        )
        return out["input_ids"], out["assistant_masks"]
    text = render(tokenizer, messages, tools=tools, **template_kwargs)
    spans = _assistant_spans(tokenizer, messages, text, tools, template_kwargs)
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= start < b for a, b in spans)) for start, _ in out["offset_mapping"]]
    return out["input_ids"], mask


def _assistant_spans(tokenizer: Any, messages: list, text: str, tools: Any, kwargs: dict) -> list[tuple[int, int]]:
    end = turn_end(tokenizer)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], add_generation_prompt=True, tools=tools, **kwargs)
        through = render(tokenizer, messages[: index + 1], tools=tools, **kwargs)
        stop = through.rfind(end) + len(end) if end else len(through)
        if not (text.startswith(before) and text.startswith(through[:stop])):
            raise ModelError(
                "the chat template renders earlier turns differently once later ones follow, so what the assistant said "
                "cannot be found. Use a template with {% generation %} markers (chat_template_path)."
            )
        spans.append((len(before), stop))
    return spans
