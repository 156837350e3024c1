"""Names of older TRL releases that scripts still import, such as `DataCollatorForCompletionOnlyLM`, `setup_chat_format`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from posttrain.errors import ConfigError
from posttrain.extensions.trl_helpers.collators import pad_ids
from posttrain.extensions.trl_helpers.tensors import pad

SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{message['role'].capitalize() + ': ' + message['content'] + '\n\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SIMPLE_QUERY_CHAT_TEMPLATE = "{% for message in messages %}{{' ' + message['content']}}{% endfor %}"
SIMPLE_SFT_CHAT_TEMPLATE = SIMPLE_QUERY_CHAT_TEMPLATE + "{{ eos_token }}"
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
START, END = "<|im_start|>", "<|im_end|>"


def is_peft_available() -> bool:
    """Return True, because peft is always installed with this package."""
    return True


def get_kbit_device_map() -> dict[str, int] | None:
    """Return the device map that loads a quantized model onto this process's GPU. Return None without a GPU."""
    return {"": PartialState().local_process_index} if torch.cuda.is_available() else None


def setup_chat_format(
    model: Any, tokenizer: Any, format: str = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """Add the ChatML template and its two special tokens to a tokenizer, and resize the model's embedding.

    Args:
        model: Language model. Modified in place.
        tokenizer: Tokenizer of the model. Modified in place.
        format: Chat format. The only value is ``chatml``.
        resize_to_multiple_of: Round the number of embeddings up to a multiple of this number. None: as many embeddings
            as tokens.

    Returns:
        The model and the tokenizer.

    Raises:
        ConfigError: The format is unknown, or the tokenizer already has a chat template.
    """
    if format != "chatml":
        raise ConfigError(f"format={format!r} is unknown. Fix: use 'chatml', or set tokenizer.chat_template.")
    if tokenizer.chat_template is not None:
        raise ConfigError("the tokenizer already has a chat template. Fix: train without setup_chat_format.")
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END]})
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = START, END, END, CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, model.generation_config):
        if config is not None:
            config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


class DataCollatorForCompletionOnlyLM:
    """Collator that masks the labels of all tokens except answers, so that only answers contribute to the loss.

    An answer begins after a response template. With an instruction template, each answer ends at the next instruction
    template, and all answers of a conversation contribute to the loss. Without an instruction template, the text after the
    last response template is the only answer.

    Args:
        response_template: Text or token ids after which an answer begins. Pass token ids if the tokenizer encodes the text
            differently within a conversation.
        instruction_template: Text or token ids at which a user's turn begins.
        tokenizer: Tokenizer of the model.
        mlm: Must be False.
        ignore_index: Label of tokens that do not contribute to the loss.

    Shapes:
        ``input_ids``, ``attention_mask`` and ``labels`` of the result are ``(B, L)`` int64, padded on the right.

    >>> collator = DataCollatorForCompletionOnlyLM([7, 8], tokenizer=tokenizer)  # doctest: +SKIP
    >>> collator([{"input_ids": [1, 7, 8, 5, 2]}])["labels"]  # doctest: +SKIP
    tensor([[-100, -100, -100,    5,    2]])
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        *,
        tokenizer: Any = None,
        mlm: bool = False,
        ignore_index: int = -100,
        **unread: Any,
    ) -> None:
        if mlm or unread:
            args = {"mlm": mlm} | unread
            raise ConfigError(
                f"DataCollatorForCompletionOnlyLM only supports next-token prediction with one row per sequence, but got {args}."
            )
        self.tokenizer, self.ignore_index = tokenizer, ignore_index
        self.response = self._ids(response_template)
        self.instruction = None if instruction_template is None else self._ids(instruction_template)

    def _ids(self, template: str | Sequence[int]) -> list[int]:
        return (
            self.tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else list(template)
        )

    def trained(self, ids: Sequence[int]) -> list[bool]:
        """Return one bool per token. It is True for tokens that contribute to the loss."""
        starts = [at + len(self.response) for at in _places(ids, self.response)]
        ends = [len(ids)] if self.instruction is None else [*_places(ids, self.instruction), len(ids)]
        spans = [
            (start, min(end for end in ends if end >= start)) for start in (starts if self.instruction else starts[-1:])
        ]
        if not spans:
            warnings.warn(
                f"the response template {self.response} does not occur in a row of {len(ids)} tokens, so the row has "
                "no loss. Fix: pass the template's token ids as they occur in the rows.",
                UserWarning,
                stacklevel=3,
            )
        return [any(start <= index < end for start, end in spans) for index in range(len(ids))]

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Pad the ``input_ids`` of rows, and add labels and an attention mask."""
        rows = [torch.tensor(list(example["input_ids"])) for example in examples]
        masks = [torch.tensor(self.trained(ids.tolist())) for ids in rows]
        labels = [torch.where(keep, ids, self.ignore_index) for ids, keep in zip(rows, masks, strict=True)]
        return pad_ids(rows, int(self.tokenizer.pad_token_id or 0), None) | {"labels": pad(labels, self.ignore_index)}


def _places(ids: Sequence[int], part: Sequence[int]) -> list[int]:
    """Return the positions at which ``part`` begins in ``ids``."""
    return [at for at in range(len(ids) - len(part) + 1) if list(ids[at : at + len(part)]) == list(part)]
