"""Tokenization of tool results and observations. Special tokens in their text are encoded as ordinary text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.data.chat import (
    common_prefix,
    encode,
    inner_tokenizer,
    one_bos,
    prompt_text,
    render,
    template_text,
    tokenize_prompts,
    with_template,
)
from posttrain.data.responses import add_response_schema
from posttrain.data.templates import (
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)
from posttrain.errors import ModelError
from posttrain.rollouts.episodes.environments import Observed
from posttrain.types import Prompt
from posttrain.values import strip_none

if TYPE_CHECKING:
    from posttrain.extensions.images.processors import PictureProcessor
    from posttrain.types import Tokenizer


def prepare_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return a copy of a tokenizer for multi-turn rollouts with tools. The original is not changed.

    The copy's chat template never changes earlier turns. If the original template changes earlier turns, it is replaced with
    a training template. The format of tool calls is detected, so that tool calls can be parsed.

    Args:
        tokenizer: A tokenizer, or a processor if tool results may contain images. The chat template of a processor is
            checked, but never replaced.

    Raises:
        ModelError: The chat template does not render tool calls or results, it changes earlier turns, or its tool calls
            cannot be parsed.
    """
    if not supports_tool_calling(tokenizer):
        raise ModelError(
            "tools need a chat template that renders tool calls and results, but this tokenizer's template does "
            f"not{'' if template_text(tokenizer) else ' (it has none)'}. Use a checkpoint trained with tools, or set "
            "tokenizer.chat_template to a template that renders tool_calls and the role 'tool'."
        )
    template, preserved = template_text(tokenizer), is_chat_template_prefix_preserving(tokenizer)
    if not preserved and inner_tokenizer(tokenizer) is tokenizer:
        template = get_training_chat_template(tokenizer) or template
        preserved = is_chat_template_prefix_preserving(with_template(tokenizer, template))
    if not preserved:
        raise ModelError(
            "the chat template renders a tool call differently once its result follows, so the tokens of the loss would "
            "differ from the generated tokens. Set chat_template_path to a template that does not change earlier turns."
        )
    return add_response_schema(with_template(tokenizer, template))


class PlainText:
    """Hides special tokens in texts while a template renders the texts, and encodes the special tokens as ordinary text.

    Special tokens are replaced with placeholder words. These words are random for each instance, so no text can contain
    them. Before tokenization, the words are replaced with the special tokens' texts, so token ids do not depend on the
    words.

    Args:
        tokenizer: Tokenizer whose special tokens are hidden.
        read: Function that converts text to ids. None: the tokenizer converts text, without adding special tokens.

    Attributes:
        escaped: Number of special tokens that were hidden.
    """

    def __init__(self, tokenizer: Tokenizer, read: Callable[[str], list[int]] | None = None) -> None:
        self.tokenizer = inner_tokenizer(tokenizer)
        self.read = read or (lambda piece: encode(self.tokenizer, [piece], special=False)[0])
        named = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        self.special = sorted((t for t in named if len(t.strip()) > 1), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.special))) if self.special else None
        self.word = f"zq{secrets.token_hex(8)}n{{}}zq"
        self.hidden = re.compile(self.word.format(r"(\d+)"))
        self.escaped = 0

    def hide(self, text: str, drop: bool = False) -> str:
        """Replace the special tokens in a text with placeholder words. With ``drop``, remove the special tokens."""
        if self.pattern is None:
            return text
        hidden, count = self.pattern.subn(lambda m: "" if drop else self.word.format(self.special.index(m[0])), text)
        self.escaped += count
        return hidden

    def ids(self, text: str) -> list[int]:
        """Tokenize a text with placeholder words. Hidden special tokens are encoded as ordinary characters."""
        ids: list[int] = []
        for index, part in enumerate(self.hidden.split(text)):
            if index % 2:
                token = self.special[int(part)]
                # Split the text of the special token into two parts, so that the tokenizer does not recognize the special
                # token.
                pieces = [token[:1], token[1:]]
            else:
                pieces = [part]
            for piece in filter(None, pieces):
                ids += self.read(piece)
        return ids


def tokenize_observed(
    rows: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    reader: PictureProcessor | None = None,
) -> Sequence[list[int]]:
    """Tokenize prompts as `tokenize_prompts` does. In observations that ``reset`` added, special tokens are encoded as
    ordinary text.

    Args:
        rows: Conversational rows. Prompts with observations are `Observed` objects.
        tokenizer: Tokenizer with a chat template.
        chat_template_kwargs: Arguments of the chat template.
        reader: Image processor, if prompts may contain images. The results are then `Prompt` objects.
    """
    if reader is not None:
        plain = PlainText(tokenizer, reader.ids)
        hidden = [
            {**row, "prompt": row["prompt"].through(plain.hide)} if isinstance(row["prompt"], Observed) else row
            for row in rows
        ]
        images = plugins.module("extensions.images.rows")
        return images.picture_prompts(reader, hidden, chat_template_kwargs or {}, plain.ids)
    prompts = tokenize_prompts(rows, tokenizer, chat_template_kwargs=chat_template_kwargs)
    observed = [i for i, row in enumerate(rows) if isinstance(row["prompt"], Observed)]
    plain = PlainText(tokenizer) if observed else None
    for i in observed:
        assert plain is not None
        row, hidden = rows[i], rows[i]["prompt"].through(plain.hide)
        if hidden != row["prompt"]:
            text = prompt_text(tokenizer, strip_none(row | {"prompt": hidden}), chat_template_kwargs or {})
            prompts[i] = one_bos(plain.ids(text), plain.tokenizer.bos_token_id)
    return prompts


class ToolSuffix:
    """Computes the token ids of tool results that follow a turn of the model.

    The function renders a dummy conversation twice, with and without the tool results. The ids are the difference between
    the two renderings. Text that the model sampled is therefore never rendered or tokenized again. Special tokens in a tool
    result are encoded as ordinary text. A tool result can therefore neither end its turn nor begin a turn of the model.

    Args:
        tokenizer: Result of `prepare_tokenizer`.
        stop_ids: Tokens that end a turn.
        template_kwargs: Arguments of the chat template.
        reader: Image processor, if tool results may contain images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        template_kwargs: dict[str, Any] | None = None,
        reader: PictureProcessor | None = None,
    ) -> None:
        self.text, self.reader = PlainText(tokenizer), reader
        self.tokenizer, self.stop_ids = self.text.tokenizer, frozenset(stop_ids)
        self.template_kwargs = dict(template_kwargs or {})

    def __call__(self, results: list[dict[str, Any]], *, closed: bool = True) -> Prompt:
        """Return the tokens between the end of the model's turn and the beginning of its next turn, including image
        placeholders.

        Args:
            results: Messages of the tools.
            closed: Whether the model's turn ended with its end token. If it ended without one (for example, at a stop
                string), the end token is added.

        Raises:
            ModelError: The template renders a tool call differently if a tool result follows.
            DataError: The template does not render an image, or the image processor rejects the image.
        """
        hidden = [self._hidden(message) for message in results]
        call = {"type": "function", "function": {"name": hidden[0]["name"] or "tool", "arguments": {}}}
        begin = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        _, before, _ = self._rendered(begin)
        text, after, pictures = self._rendered(begin + hidden, add_generation_prompt=True)
        ends = [i for i, token in enumerate(before) if token in self.stop_ids]
        cut = ends[-1] + 1 if ends else len(before)
        if self.tokenizer.decode(before[cut:]).strip():
            # The template writes no end token after a tool call, so the last end token belongs to the user's turn before it.
            cut = len(before)
        if common_prefix(before, after) < cut:
            raise ModelError(
                "the chat template renders a tool call differently if its result follows, so the tokens of the "
                f"result cannot be determined: {text!r:.200}"
            )
        if not closed and ends and cut == ends[-1] + 1:
            cut -= 1
        return Prompt(after[cut:], () if self.reader is None else self.reader.place(after[cut:], pictures))

    def _hidden(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a tool result with hidden special tokens."""
        hide, content = self.text.hide, message["content"]
        if isinstance(content, str):
            content = hide(content)
        else:
            content = [{**b, "text": hide(b["text"])} if b["type"] == "text" else b for b in content]
        return {**message, "name": hide(message["name"], drop=True), "content": content}

    def _rendered(self, messages: list[dict[str, Any]], **how: Any) -> tuple[str, list[int], list[Any]]:
        """Render messages, and return their text, token ids and images."""
        if self.reader is None:
            text = render(self.tokenizer, messages, **how, **self.template_kwargs)
            return text, self.text.ids(text), []
        return self.reader.conversation(messages, self.text.ids, **how, **self.template_kwargs)

    def plain(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens. Special tokens in the text are encoded as ordinary text."""
        return self.text.ids(self.text.hide(text))
