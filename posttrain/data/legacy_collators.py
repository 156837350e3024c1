"""Collators that read messages, or columns by the ending of their name; kept for imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.data.chat import common_prefix, render
from posttrain.data.collators import IGNORED, Collator, Example, has_column, token_row
from posttrain.data.sequences import encode_with_byte_offsets, is_byte_level
from posttrain.data.tensors import pad
from posttrain.data.tokenize import encode
from posttrain.errors import ConfigError, DataError

__all__ = ["DPODataCollatorWithPadding", "DataCollatorForChatML"]

DEFAULT_MAX_LENGTH = 1024
TEXT_COLUMNS = ("original_prompt_text", "original_completion_text")


@dataclass(slots=True)
class _Chat:
    """A tokenised conversation: ids, where the completion begins, and the bytes of each token if they are known."""

    ids: list[int]
    boundary: int
    offsets: list[tuple[int, int]] | None = None


@dataclass
class DataCollatorForChatML(Collator):
    """Tokenise conversations, train their last message, and keep the **last** ``max_length`` tokens; all left-padded.

    A row holds messages, or ``input_ids`` with a ``completion_mask`` or with messages that say where the completion begins.
    With a byte-level tokenizer the completion begins at the first token that starts behind the prompt's bytes; with another
    one where the tokens of prompt and conversation part.

    The batch has, int64: ``input_ids``, ``attention_mask`` and ``labels``, ``(B, L)``; ``prompts`` and
    ``prompt_attention_mask``, ``(B, P)``; ``byte_offsets (B, L, 2)``, the bytes of the completion that each token stands
    for, zero on the prompt (left out unless the tokenizer is byte-level and every row was tokenised here); and the lists
    ``original_prompt_text`` and ``original_completion_text`` of rows that have them.

    Attributes:
        tokenizer: With a pad token and a chat template.
        ignore_index: Label of what is not trained.
        max_length: None is the tokenizer's limit, at most 1024.
        prompt_key: Column of a prompt (a string, or messages) that replaces all messages but the last, if present.
        messages_key: Column of the conversation.
    """

    tokenizer: Any
    ignore_index: int = IGNORED
    max_length: int | None = None
    prompt_key: str = "prompt"
    messages_key: str = "messages"

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token_id is None:
            raise ConfigError("the tokenizer has no pad token. Set tokenizer.pad_token (the eos token will do).")
        self.pad_token_id = self.tokenizer.pad_token_id
        if self.max_length is None:
            self.max_length = min(self.tokenizer.model_max_length, DEFAULT_MAX_LENGTH)
        super().__post_init__()

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        chats = [self._cut(self._read(example, row), row) for row, example in enumerate(examples)]
        ids = [torch.tensor(chat.ids) for chat in chats]
        labels = []
        for chat, row in zip(chats, ids, strict=True):
            hidden = torch.arange(len(row)) < chat.boundary
            labels.append(row.masked_fill(hidden, self.ignore_index))
        prompts = [row[: chat.boundary] for chat, row in zip(chats, ids, strict=True)]
        batch: dict[str, Any] = {
            "input_ids": pad(ids, self.pad_token_id, "left"),
            "attention_mask": pad([torch.ones_like(row) for row in ids], 0, "left"),
            "labels": pad(labels, self.ignore_index, "left"),
            "prompts": pad(prompts, self.pad_token_id, "left"),
            "prompt_attention_mask": pad([torch.ones_like(row) for row in prompts], 0, "left"),
        }
        spans = [torch.tensor(chat.offsets) for chat in chats if chat.offsets is not None]
        if len(spans) == len(chats):
            batch["byte_offsets"] = pad(spans, 0, "left")
        return batch | {key: [e[key] for e in examples] for key in TEXT_COLUMNS if has_column(examples, key)}

    def _read(self, example: Example, row: int) -> _Chat:
        messages, prompt = example.get(self.messages_key), example.get(self.prompt_key)
        given = token_row(example, "input_ids", row).tolist() if example.get("input_ids") is not None else None
        if given is not None and example.get("completion_mask") is not None:
            return _Chat(given, _first_one(token_row(example, "completion_mask", row), len(given), row))
        if not messages:
            raise DataError(
                f"row {row} of the batch has no {self.messages_key!r}, nor input_ids with a completion_mask; its columns "
                f"are {sorted(example)}."
            )
        if prompt is None:
            prompt = messages[:-1]
        if not prompt:
            raise DataError(f"row {row} of the batch has no message before the completion, so it has no prompt.")
        if not isinstance(prompt, str):
            prompt = render(self.tokenizer, prompt, add_generation_prompt=True)
        if given is not None:
            (ids,) = encode(self.tokenizer, [prompt], special=False)
            return _Chat(given, common_prefix(ids, given))
        return self._tokenised(prompt, render(self.tokenizer, messages))

    def _tokenised(self, prompt: str, text: str) -> _Chat:
        # A template may render the prompt differently once it is answered: only what both share is prompt.
        shared = text[: common_prefix(prompt, text)]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if not is_byte_level(backend):
            ids, prompt_ids = encode(self.tokenizer, [text, shared], special=False)
            return _Chat(ids, common_prefix(prompt_ids, ids))
        if backend.normalizer is not None:
            shared = backend.normalizer.normalize_str(shared)
        (ids,), (spans,) = encode_with_byte_offsets(backend, [text])
        size = len(shared.encode())
        boundary = next((i for i, (start, _) in enumerate(spans) if start >= size), len(ids))
        known = [(0, 0)] * boundary + [(start - size, end - size) for start, end in spans[boundary:]]
        return _Chat(ids, boundary, known)

    def _cut(self, chat: _Chat, row: int) -> _Chat:
        limit = self.max_length or len(chat.ids)
        removed = max(0, len(chat.ids) - limit)
        boundary = chat.boundary - removed
        if boundary <= 0:
            raise DataError(
                f"row {row} of the batch has {len(chat.ids)} tokens, {chat.boundary} of them prompt, and the last "
                f"max_length={limit} hold no prompt token. Raise max_length or shorten the completion."
            )
        if chat.boundary >= len(chat.ids):
            raise DataError(f"row {row} of the batch has no completion token: all {len(chat.ids)} tokens are prompt.")
        offsets = None if chat.offsets is None else chat.offsets[removed:]
        return _Chat(chat.ids[removed:], boundary, offsets)


def _first_one(mask: Tensor, length: int, row: int) -> int:
    if len(mask) != length:
        raise DataError(f"row {row} of the batch has a completion_mask of {len(mask)} entries for {length} input_ids.")
    return int(mask.argmax()) if mask.any() else length


@dataclass
class DPODataCollatorWithPadding(Collator):
    """Pad columns by the ending of their name; the collator of trainers that tokenise pairs beforehand.

    ``*_input_ids`` are filled with the pad id, ``*_labels`` with -100, ``*_attention_mask`` with 0, ``*_pixel_values`` with
    0 as float32; ``*_logps`` become a float32 vector; other columns stay lists. Columns that begin with ``prompt_`` are
    padded on the left, others on the right. For encoder-decoder models everything is padded on the right, and the ids of
    answers (``chosen_``, ``rejected_``, ``completion_``, or ``decoder`` in the name) are filled with -100.

    Attributes:
        pad_token_id: Of ``*_input_ids``.
        is_encoder_decoder: See above.
    """

    pad_token_id: int = 0
    is_encoder_decoder: bool = False

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        keys = list(dict.fromkeys(key for example in examples for key in example))
        batch: dict[str, Any] = {}
        for key in keys:
            missing = [row for row, example in enumerate(examples) if key not in example]
            if missing:
                raise DataError(f"row {missing[0]} of the batch has no {key!r}, and others have.")
            if key.endswith(("_input_ids", "_labels", "_attention_mask", "_pixel_values", "_logps")):
                # A column that is None everywhere says nothing; one that only some rows have is an error.
                if has_column(examples, key):
                    batch[key] = self._column(examples, key)
            else:
                batch[key] = [example[key] for example in examples]
        return batch

    def _column(self, examples: Sequence[Example], key: str) -> Tensor:
        if key.endswith("_logps"):
            return torch.stack([torch.as_tensor(example[key], dtype=torch.float32) for example in examples])
        side = "left" if key.startswith("prompt_") and not self.is_encoder_decoder else "right"
        if key.endswith("_pixel_values"):
            return pad([torch.as_tensor(example[key], dtype=torch.float32) for example in examples], 0, side)
        if key.startswith("pixel_"):  # Masks of pixels have the pixels' dimensions.
            return pad([torch.as_tensor(example[key], dtype=torch.long) for example in examples], 0, side)
        rows = [token_row(example, key, row) for row, example in enumerate(examples)]
        return pad(rows, self._fill(key), side)

    def _fill(self, key: str) -> int:
        if key.endswith("_attention_mask"):
            return 0
        answer = key.startswith(("chosen_", "rejected_", "completion_")) or "decoder" in key
        if key.endswith("_labels") or (self.is_encoder_decoder and answer):
            return IGNORED
        return self.pad_token_id
