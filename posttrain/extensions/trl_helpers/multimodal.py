"""Collators for rows with images, and functions that convert messages with images. These helpers have TRL's names. They are
for custom training loops, and the trainers of this library do not use them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.data.formats import naming
from posttrain.errors import ConfigError, DataError
from posttrain.extensions.images.picture import Picture, read_picture
from posttrain.extensions.images.processors import PictureProcessor
from posttrain.extensions.images.rows import row_segments, spoken_segments
from posttrain.extensions.trl_helpers.collators import IGNORED, Collator, Example, label_of, pad_ids
from posttrain.extensions.trl_helpers.tensors import pad
from posttrain.values import strip_none


class VisionCollator(Collator):
    """Base class of collators for raw rows with images. The rows are tokenized when the batch is built.

    Rows have a column ``image`` or ``images``, or images inside their messages. Batches contain the token tensors and the
    processor's image tensors.
    """

    processor: Any

    def __post_init__(self) -> None:
        tokenizer = self.processor.tokenizer
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        super().__post_init__()

    @functools.cached_property
    def reader(self) -> PictureProcessor:
        """The `PictureProcessor`, which the trainers of this library use too."""
        return PictureProcessor(self.processor)

    def _pieces(self, row: dict[str, Any], branches: Sequence[str]) -> list[tuple[str, list[Any]]]:
        """Return the texts and images of a row: those of the prompt, and those of the answer in each column of ``branches``."""
        return row_segments(row, self.reader, branches, "text")[0]

    def _read(
        self, examples: Sequence[Example], branches: Sequence[str] = ()
    ) -> tuple[list[list[Picture]], list[list[list[int]]]]:
        """Return the images of each row, and the token ids of its prompt and its answers. A row with a document has the
        token ids of the document's parts instead.
        """
        if self.pad_to_multiple_of is not None and "prompt" in examples[0]:
            raise NotImplementedError(
                f"pad_to_multiple_of={self.pad_to_multiple_of} is only supported for whole conversations and texts."
            )
        pictures, rows = [], []
        for row, example in enumerate(examples):
            with naming(f"row {row} of the batch"):
                segments = self._pieces(strip_none(example), branches)
                if "prompt" in example and any(images for _, images in segments[1:]):
                    raise DataError("an answer contains an image. Fix: move it into the prompt.")
                read = [(text, [read_picture(value, "an image") for value in images]) for text, images in segments]
                whole = len(read) > 1
                rows.append([
                    self.reader.encode(text, images, prompt=whole and not at)[0] for at, (text, images) in enumerate(read)
                ])  # fmt: skip
                pictures.append([picture for _, images in read for picture in images])
        return pictures, rows

    def _batch(self, rows: Sequence[Sequence[list[int]]], pictures: Sequence[list[Picture]] = ()) -> dict[str, Any]:
        """Truncate rows to ``max_length``, pad them, and add the image tensors. A row is a list of token sequences. Every
        second sequence is an answer.

        Raises:
            DataError: Truncation would split an image.
        """
        limit, multiple = self.max_length, self.pad_to_multiple_of
        ids = [torch.tensor([token for piece in row for token in piece], dtype=torch.long) for row in rows]
        if limit is not None and any(self.reader.token_id in sequence[limit:] for sequence in ids):
            raise DataError(f"max_length={limit} would split an image of the batch. Fix: use a larger value, or None.")
        answers = [torch.tensor([at % 2 for at, piece in enumerate(row) for _ in piece][:limit]) for row in rows]
        batch = pad_ids([sequence[:limit] for sequence in ids], self.pad_token_id, multiple)
        batch["completion_mask"] = pad(answers, 0, pad_to_multiple_of=multiple)
        starts = torch.tensor([[len(row[0])] for row in rows])  # (B, 1)
        return batch | self.reader.plain_inputs(batch["input_ids"], pictures, starts)


def _ignoring(ids: Tensor, kept: Tensor) -> Tensor:
    """Return labels ``(B, T)``. A label is the token id where ``kept`` is 1, else -100."""
    return ids.masked_fill(kept == 0, IGNORED)


@dataclass
class DataCollatorForVisionLanguageModeling(VisionCollator):
    """Collate rows with images for supervised fine-tuning. Rows contain ``messages``, a text, or ``prompt`` and
    ``completion``.

    The batch has ``input_ids``, ``attention_mask`` and ``labels``, all ``(B, L)``, and the processor's image tensors.

    Attributes:
        processor: Processor with an image processor.
        max_length: Maximum number of tokens of a row, including image tokens. It must not split an image. None: no limit.
        completion_only_loss: Whether to exclude prompts from the loss.
        pad_to_multiple_of: Round L up to a multiple of this number. Not supported for rows with prompt and completion.
        dataset_text_field: Name of the column with text.
        assistant_only_loss: Whether the loss is restricted to the assistant's turns.
        chat_template: Chat template that replaces the processor's chat template.
        return_tensors: Must be ``pt``.
    """

    processor: Any
    max_length: int | None = None
    completion_only_loss: bool = False
    pad_to_multiple_of: int | None = None
    dataset_text_field: str = "text"
    assistant_only_loss: bool = False
    chat_template: str | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        if self.assistant_only_loss and "messages" not in examples[0]:
            raise ConfigError("assistant_only_loss=True needs rows with a column 'messages'.")
        if self.completion_only_loss and "prompt" not in examples[0]:
            raise ConfigError("completion_only_loss=True needs rows with the columns 'prompt' and 'completion'.")
        pictures, rows = self._read(examples)
        batch = self._batch(rows, pictures)
        answers = batch.pop("completion_mask")
        only = self.completion_only_loss or self.assistant_only_loss
        batch["labels"] = _ignoring(batch["input_ids"], answers if only else batch["attention_mask"])
        return batch

    def _pieces(self, row: dict[str, Any], branches: Sequence[str]) -> list[tuple[str, list[Any]]]:
        if self.chat_template is not None:
            row["chat_template_kwargs"] = {
                **(row.get("chat_template_kwargs") or {}),
                "chat_template": self.chat_template,
            }
        if self.assistant_only_loss:
            return spoken_segments(row, self.reader, prompt_too=True)
        return row_segments(row, self.reader, branches, self.dataset_text_field)[0]


@dataclass
class DataCollatorForVisionPreference(VisionCollator):
    """Collate pairs with images for DPO. The first B rows of the batch contain prompts and chosen answers. The next B rows
    contain the same prompts and rejected answers.

    The batch has ``input_ids``, ``attention_mask`` and ``completion_mask``, all ``(2B, L)``, and the processor's image
    tensors. The tensors of each image occur twice.

    Attributes:
        processor: Processor with an image processor.
        max_length: Maximum number of tokens of a row, including image tokens. It must not split an image. None: no limit.
        pad_to_multiple_of: Not supported, must be None.
        return_tensors: Must be ``pt``.
    """

    processor: Any
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        pictures, rows = self._read(examples, ("chosen", "rejected"))
        pairs = [[prompt, chosen] for prompt, chosen, _ in rows] + [[prompt, rejected] for prompt, _, rejected in rows]
        return self._batch(pairs, pictures * 2)


@dataclass
class DataCollatorForVisionUnpairedPreference(VisionCollator):
    """Collate labeled answers with images for KTO. For the KL estimate, each prompt is also combined with the answer of the
    previous row.

    The batch has ``input_ids``, ``attention_mask`` and ``completion_mask``, all ``(B, L)``, ``label (B,)`` bool, and the
    processor's image tensors. The keys ``KL_input_ids``, ``KL_attention_mask`` and ``KL_completion_mask`` contain the
    mismatched sequences.

    Attributes:
        processor: Processor with an image processor.
        max_length: Maximum number of tokens of a row, including image tokens. It must not split an image. None: no limit.
        calculate_kl: Whether to add mismatched sequences for the KL estimate.
        pad_to_multiple_of: Not supported, must be None.
        return_tensors: Must be ``pt``.
    """

    processor: Any
    max_length: int | None = None
    calculate_kl: bool = True
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        pictures, rows = self._read(examples, ("completion",))
        batch = self._batch(rows, pictures)
        if self.calculate_kl:
            others = self._batch([[row[0], rows[at - 1][1]] for at, row in enumerate(rows)])
            batch |= {f"KL_{name}": tensor for name, tensor in others.items()}
        return batch | {"label": torch.tensor([label_of(example, row) for row, example in enumerate(examples)])}


@dataclass
class DataCollatorForVisionLanguageChatML(VisionCollator):
    """Collate prompts and completions with images for distillation. The batch contains training sequences, and separate
    prompts for sampling.

    The training sequences are ``input_ids``, ``attention_mask`` and ``labels``, all ``(B, L)``. Labels are -100 on the
    prompt. ``byte_offsets (B, L, 2)`` contains the start and end of each loss token within its completion, in bytes.
    ``prompts`` and ``prompt_attention_mask`` are padded on the left. ``original_prompt_text`` and
    ``original_completion_text`` are texts without the chat template. The batch also has the image tensors.

    Attributes:
        processor: Processor with an image processor.
        max_length: Maximum number of tokens of a row, including image tokens. It must not split an image. None: no limit.
        return_tensors: Must be ``pt``.
    """

    processor: Any
    max_length: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        pictures, rows = self._read(examples, ("completion",))
        batch = self._batch(rows, pictures)
        labels = _ignoring(batch["input_ids"], batch.pop("completion_mask"))
        prompts = [torch.tensor(prompt) for prompt, _ in rows]
        masks = [torch.ones_like(prompt) for prompt in prompts]
        return {
            **batch,
            "labels": labels,
            "byte_offsets": self._byte_offsets(labels),
            "prompts": pad(prompts, self.pad_token_id, "left")[:, : self.max_length],
            "prompt_attention_mask": pad(masks, 0, "left")[:, : self.max_length],
            "original_prompt_text": [_message_text(example["prompt"]) for example in examples],
            "original_completion_text": [_message_text(example["completion"]) for example in examples],
        }

    def _byte_offsets(self, labels: Tensor) -> Tensor:
        """Compute the byte offsets ``(B, T, 2)`` of loss tokens for a byte-level tokenizer. The string of a token has one
        character per byte in such a tokenizer.
        """
        pieces = self.processor.tokenizer.convert_ids_to_tokens
        sizes = [[0 if token == IGNORED else len(pieces([token])[0]) for token in row] for row in labels.tolist()]
        ends = torch.tensor(sizes).cumsum(1)  # (B, T)
        offsets = torch.stack([ends - torch.tensor(sizes), ends], -1)
        return offsets.masked_fill((labels == IGNORED)[..., None], 0)


def _message_text(value: object) -> str:
    """Return the text of messages, without the chat template and without images."""
    if isinstance(value, str):
        return value
    contents = [message.get("content") or "" for message in value]
    blocks = [[content] if isinstance(content, str) else content for content in contents]
    texts = [[block if isinstance(block, str) else block.get("text") or "" for block in content] for content in blocks]
    return "\n".join(filter(None, ("\n".join(filter(None, lines)) for lines in texts)))


# Roles of messages whose text is converted to a text block, without adding image placeholders.
WRAPPED = (
    "assistant",
    "system",
    "developer",
    "tool",
)


def prepare_multimodal_messages(
    messages: Sequence[dict[str, Any]], images: Sequence[Any] | None = None
) -> list[dict[str, Any]]:
    """Convert the content of messages to lists of blocks, with one block per image. The original messages are not changed.

    If no message has a placeholder, placeholders for all images are added before the text of the first user message.
    Images replace the placeholders in reading order. Blocks that contain an image already stay unchanged and are not
    counted as placeholders.

    Args:
        messages: Messages whose content is text or blocks.
        images: Images for the placeholders. None: placeholders stay empty.

    Raises:
        DataError: A role is unknown, a user message has no content, or there are more or fewer placeholders than images.

    >>> prepare_multimodal_messages([{"role": "user", "content": "What is it?"}], images=["cat"])
    [{'role': 'user', 'content': [{'type': 'image', 'image': 'cat'}, {'type': 'text', 'text': 'What is it?'}]}]
    """
    pictures = list(images or ())
    converted = [
        {**m, "content": [_without_none(block) if isinstance(block, dict) else block for block in m["content"]]}
        if isinstance(m.get("content"), list)
        else dict(m)
        for m in messages
    ]
    wanted = 0 if any(_empty(message) for message in converted) else len(pictures)
    for index, message in enumerate(converted):
        role, content = message.get("role"), message.get("content")
        if role != "user" and role not in WRAPPED:
            raise DataError(f"message {index} has the unknown role {role!r}; the roles are user, {', '.join(WRAPPED)}.")
        if role == "user" and content is None:
            raise DataError(f"message {index} (role 'user') has no content; its keys are {sorted(message)}.")
        if isinstance(content, str):
            before = [{"type": "image"} for _ in range(wanted)] if role == "user" else []
            wanted = 0 if role == "user" else wanted
            message["content"] = [*before, {"type": "text", "text": content}]
    places = [block for message in converted for block in _empty(message)]
    if images is not None and len(places) != len(pictures):
        raise DataError(
            f"the messages have {len(places)} image placeholders, but there are {len(pictures)} images. Use one "
            f"{{'type': 'image'}} block per image, or text content without such blocks."
        )
    for block, picture in zip(places, pictures, strict=False):
        block["image"] = picture
    return converted


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    blocks = content if isinstance(content, list) and message.get("role") != "tool" else []
    return [block for block in blocks if isinstance(block, dict) and block.get("type") == "image"]


def _without_none(block: dict[str, Any]) -> dict[str, Any]:
    """Remove keys whose value is None. Arrow adds such keys to a block if another block of the column has these keys."""
    return {key: value for key, value in block.items() if value is not None}


def _empty(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in _blocks(message) if "image" not in block]


def prepare_multimodal_messages_vllm(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a deep copy of messages in which image blocks have vLLM's type ``image_pil``.

    >>> prepare_multimodal_messages_vllm([{"role": "user", "content": [{"type": "image", "image": "cat"}]}])
    [{'role': 'user', 'content': [{'type': 'image_pil', 'image_pil': 'cat'}]}]
    """
    converted = copy.deepcopy(list(messages))
    for message in converted:
        for block in message["content"] if isinstance(message.get("content"), list) else ():
            if isinstance(block, dict) and block.get("type") == "image":
                block["type"] = "image_pil"
                block["image_pil"] = block.pop("image", None)
    return converted
