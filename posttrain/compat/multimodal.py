"""Messages and raw rows with images by TRL's names, for loops of one's own: our trainers prepare each image by itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.compat.collators import IGNORED, Collator, Example, label_of
from posttrain.compat.tensors import flush_left
from posttrain.data.chat import common_prefix, template_arguments
from posttrain.data.formats import is_messages, pictures_of
from posttrain.data.pictures import conversation_pictures, read_picture
from posttrain.errors import ConfigError, DataError

TYPES = ("token_type_ids", "mm_token_type_ids")  # What a processor says of each token, beside its mask.


class VisionCollator(Collator):
    """Shared by collators of raw rows with images, which are rendered, decoded and prepared batch by batch.

    Rows hold ``image`` or ``images``, or images inside their messages; batches have whatever tensors the processor makes of
    them beside the tokens. Conversations and texts must not be mixed.
    """

    processor: Any

    def __post_init__(self) -> None:
        tokenizer = self.processor.tokenizer
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        super().__post_init__()

    def _answers(
        self, examples: Sequence[Example], columns: Sequence[str]
    ) -> tuple[list[Any], list[str], list[list[str]]]:
        """Images and text of every prompt, and the texts of its answers, by column."""
        if self.pad_to_multiple_of is not None:
            raise NotImplementedError(
                f"pad_to_multiple_of={self.pad_to_multiple_of} is for whole conversations and texts."
            )
        images, prompts = [], []
        answers: list[list[str]] = [[] for _ in columns]
        for row, example in enumerate(examples):
            missing = [name for name in ("prompt", *columns) if name not in example]
            if missing:
                raise DataError(f"row {row} of the batch has no {missing}; its columns are {sorted(example)}.")
            prompt, *texts = example["prompt"], *(example[column] for column in columns)
            held = pictures_of(example)
            if is_messages(prompt):
                messages, held = _conversation(prompt, held)
                prompt, texts = self._rendered(messages, texts, example, row)
            images.append(_decoded(held, row))
            prompts.append(prompt)
            for column, text in zip(answers, texts, strict=True):
                column.append(text)
        return images, prompts, answers

    def _rendered(
        self, messages: list[Any], answers: Sequence[Any], example: Example, row: int
    ) -> tuple[str, list[str]]:
        """Text of a prompt, and what each answer adds to it; where they part is where the texts differ."""
        render, options = self.processor.apply_chat_template, template_arguments(dict(example))
        goes_on = messages[-1]["role"] == "assistant"
        how = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
        begin, wholes = render(messages, tokenize=False, **how, **options), []
        for answer in answers:
            more, held = _conversation(answer, ())
            if held:
                raise DataError(f"row {row} of the batch has an image in an answer. Fix: put it into the prompt.")
            wholes.append(render([*messages, *more], tokenize=False, **options))
        begin = begin[: min(common_prefix(begin, whole) for whole in wholes)]
        return begin, [whole[len(begin) :] for whole in wholes]

    def _processed(self, texts: Sequence[str], side: str, images: Sequence[Any] | None = None) -> Any:
        # A processor refuses a batch of empty lists.
        images = images if images and any(images) else None
        options = {"padding": True, "padding_side": side, "return_tensors": "pt", "add_special_tokens": False}
        return self.processor(images=images, text=list(texts), **options)

    def _joined(self, prompts: Mapping[str, Tensor], answers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Prompts and answers side by side without padding between them, cut to ``max_length``.

        Raises:
            DataError: The cut would go through an image.
        """
        ids = torch.cat([prompts["input_ids"], answers["input_ids"]], 1)  # (B, T)
        mask = torch.cat([prompts["attention_mask"], answers["attention_mask"]], 1)
        trained = torch.cat([torch.zeros_like(prompts["attention_mask"]), answers["attention_mask"]], 1)
        kinds = {name: prompts[name] for name in TYPES if name in prompts}
        blank = torch.zeros_like(answers["input_ids"])
        types = [torch.cat([one, answers.get(name, blank)], 1) for name, one in kinds.items()]
        fill = [self.pad_token_id, *[0] * (len(types) + 1)]
        mask, ids, trained, *types = flush_left(mask, ids, trained, *types, fill_value=fill)
        token = getattr(self.processor, "image_token_id", None)
        if self.max_length is not None and token is not None and bool((ids[:, self.max_length :] == token).any()):
            raise DataError(
                f"max_length={self.max_length} cuts into an image of the batch. Fix: a larger one, or None."
            )
        made = {
            "input_ids": ids,
            "attention_mask": mask,
            "completion_mask": trained,
            **dict(zip(kinds, types, strict=True)),
        }
        return {name: one[:, : self.max_length] for name, one in made.items()}


def _conversation(messages: Sequence[Any], images: Sequence[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages of blocks whose image blocks are empty, and the images in reading order."""
    return conversation_pictures(prepare_multimodal_messages(messages, images=list(images)))


def _decoded(images: Sequence[Any], row: int) -> list[Any]:
    return [read_picture(image, f"row {row} of the batch").load() for image in images]


def _labels(batch: Mapping[str, Tensor], *, answers: bool) -> Tensor:
    """``(B, T)`` ids, -100 on padding, and before the answer where only that is trained."""
    kept = batch["completion_mask"] if answers else batch["attention_mask"]
    return batch["input_ids"].masked_fill(kept == 0, IGNORED)


@dataclass
class DataCollatorForVisionLanguageModeling(VisionCollator):
    """Rows of ``messages``, of text, or of ``prompt`` and ``completion``, with images, for supervised fine-tuning.

    The batch has ``input_ids``, ``attention_mask`` and ``labels``, ``(B, L)``, and the processor's tensors of images.

    Attributes:
        processor: With an image processor.
        max_length: Tokens that are kept, images included; an error where they end inside an image. None keeps all.
        completion_only_loss: Prompt and completion: whether the prompt is not trained.
        pad_to_multiple_of: Rounds L up; messages and texts alone.
        dataset_text_field: Column of texts.
        assistant_only_loss: Messages: train what the template marks as the assistant's alone.
        chat_template: Instead of the processor's.
        return_tensors: Only ``pt``.
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
            raise ConfigError("assistant_only_loss=True needs rows of 'messages'.")
        if "messages" not in examples[0] and self.dataset_text_field not in examples[0]:
            images, prompts, (answers,) = self._answers(examples, ("completion",))
            processed = self._processed(prompts, "left", images)
            joined = self._joined(processed, self._processed(answers, "right"))
            labels = _labels(joined, answers=self.completion_only_loss)
            del joined["completion_mask"]
            return {**processed, **joined, "labels": labels}
        if self.completion_only_loss:
            raise ConfigError("completion_only_loss=True needs rows of 'prompt' and 'completion'.")
        batch = self._whole(examples)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        if self.assistant_only_loss:
            batch["labels"] = batch["labels"].masked_fill(batch.pop("assistant_masks") == 0, IGNORED)
        return batch

    def _whole(self, examples: Sequence[Example]) -> dict[str, Any]:
        options: dict[str, Any] = {
            "padding": True, "padding_side": "right", "pad_to_multiple_of": self.pad_to_multiple_of,
            "truncation": self.max_length is not None, "max_length": self.max_length, "add_special_tokens": False,
        }  # fmt: skip
        if "messages" not in examples[0]:
            images = [_decoded(pictures_of(example), row) for row, example in enumerate(examples)]
            texts = [example[self.dataset_text_field] for example in examples]
            images = images if any(images) else None
            return dict(self.processor(images=images, text=texts, return_tensors="pt", **options))
        made = []
        for row, example in enumerate(examples):
            messages, held = _conversation(example["messages"], pictures_of(example))
            made.append(prepare_multimodal_messages(messages, images=_decoded(held, row)))
        found = self.processor.apply_chat_template(
            made, chat_template=self.chat_template, tokenize=True, return_dict=True, return_tensors="pt",
            return_assistant_tokens_mask=self.assistant_only_loss, processor_kwargs=options,
        )  # fmt: skip
        return dict(found)


@dataclass
class DataCollatorForVisionPreference(VisionCollator):
    """Pairs with images for DPO: the first B rows are prompt and chosen, the next B prompt and rejected.

    The batch has ``input_ids``, ``attention_mask`` and ``completion_mask``, ``(2B, L)``, and the processor's tensors of
    images, those of every prompt twice.

    Attributes:
        processor: With an image processor.
        max_length: Tokens that are kept, images included; an error where they end inside an image. None keeps all.
        pad_to_multiple_of: Refused.
        return_tensors: Only ``pt``.
    """

    processor: Any
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        images, prompts, (chosen, rejected) = self._answers(examples, ("chosen", "rejected"))
        processed = self._processed(prompts * 2, "left", images * 2)
        return {**processed, **self._joined(processed, self._processed(chosen + rejected, "right"))}


@dataclass
class DataCollatorForVisionUnpairedPreference(VisionCollator):
    """Labelled answers with images for KTO, and each prompt with the answer of the row before it for the KL.

    The batch has ``input_ids``, ``attention_mask`` and ``completion_mask``, ``(B, L)``, the same with the prefix ``KL_``,
    ``label (B,)`` bool, and the processor's tensors of images.

    Attributes:
        processor: With an image processor.
        max_length: Tokens that are kept, images included; an error where they end inside an image. None keeps all.
        calculate_kl: Whether there are sequences for the KL.
        pad_to_multiple_of: Refused.
        return_tensors: Only ``pt``.
    """

    processor: Any
    max_length: int | None = None
    calculate_kl: bool = True
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        images, prompts, (answers,) = self._answers(examples, ("completion",))
        processed = self._processed(prompts, "left", images)
        batch = {**processed, **self._joined(processed, self._processed(answers, "right"))}
        if self.calculate_kl:
            others = self._joined(processed, self._processed(answers[-1:] + answers[:-1], "right"))
            batch |= {f"KL_{name}": one for name, one in others.items()}
        return batch | {"label": torch.tensor([label_of(example, row) for row, example in enumerate(examples)])}


@dataclass
class DataCollatorForVisionLanguageChatML(VisionCollator):
    """Prompts and completions with images for distillation: what is trained, and the prompts alone to sample from.

    The batch has ``input_ids``, ``attention_mask``, ``labels`` (-100 on the prompt) and ``byte_offsets (B, L, 2)``, where a
    trained token begins and ends in its completion, in bytes; ``prompts`` and ``prompt_attention_mask``, padded on the left;
    the texts ``original_prompt_text`` and ``original_completion_text`` without template; and the tensors of images.

    Attributes:
        processor: With an image processor.
        max_length: Tokens that are kept, images included; an error where they end inside an image. None keeps all.
        return_tensors: Only ``pt``.
    """

    processor: Any
    max_length: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        images, prompts, (answers,) = self._answers(examples, ("completion",))
        processed = self._processed(prompts, "left", images)
        joined = self._joined(processed, self._processed(answers, "right"))
        labels = _labels(joined, answers=True)
        del joined["completion_mask"]
        return {
            **processed,
            **joined,
            "labels": labels,
            "byte_offsets": self._byte_offsets(labels),
            "prompts": processed["input_ids"][:, : self.max_length],
            "prompt_attention_mask": processed["attention_mask"][:, : self.max_length],
            "original_prompt_text": [_said(example["prompt"]) for example in examples],
            "original_completion_text": [_said(example["completion"]) for example in examples],
        }

    def _byte_offsets(self, labels: Tensor) -> Tensor:
        """``(B, T, 2)``; a token of a byte-level tokenizer has as many bytes as its piece has characters."""
        pieces = self.processor.tokenizer.convert_ids_to_tokens
        sizes = [[0 if one == IGNORED else len(pieces([one])[0]) for one in row] for row in labels.tolist()]
        ends = torch.tensor(sizes).cumsum(1)  # (B, T)
        offsets = torch.stack([ends - torch.tensor(sizes), ends], -1)
        return offsets.masked_fill((labels == IGNORED)[..., None], 0)


def _said(value: Any) -> str:
    """The text of messages without their template and images."""
    if isinstance(value, str):
        return value
    contents = [message.get("content") or "" for message in value]
    blocks = [[one] if isinstance(one, str) else one for one in contents]
    texts = [[one if isinstance(one, str) else one.get("text") or "" for one in content] for content in blocks]
    return "\n".join(filter(None, ("\n".join(filter(None, one)) for one in texts)))


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
