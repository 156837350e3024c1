"""Collators with TRL's names, for custom training loops. The trainers of this library do not use them."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from posttrain.errors import ArgumentTypeError, ConfigError, DataError, check_choice
from posttrain.extensions.trl_helpers.tensors import pad
from posttrain.values import scalar

IGNORED = -100
Example = Mapping[str, Any]


def identity(x: Any) -> Any:
    """Return the argument. Trainers that need raw rows use this function as collator.

    >>> identity([{"prompt": "2 + 2 ="}])
    [{'prompt': '2 + 2 ='}]
    """
    return x


def has_column(examples: Sequence[Example], key: str) -> bool:
    """Return whether the rows of a batch have an optional column. A row whose value is None lacks the column.

    Raises:
        DataError: Only some of the rows have the column.
    """
    present = [example.get(key) is not None for example in examples]
    if any(present) and not all(present):
        raise DataError(
            f"row {present.index(False)} of the batch has no {key!r}, but row {present.index(True)} does. An optional "
            "column must be either in all rows or in no row."
        )
    return present[0]


def token_row(example: Example, key: str, row: int, *, empty: bool = False) -> Tensor:
    """Convert a list of integers in a row's column to an int64 tensor."""
    value = example.get(key)
    if value is None:
        raise DataError(f"row {row} of the batch has no {key!r}; its columns are {sorted(example)}.")
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"row {row} of the batch, column {key!r}, is not a list of integers: {error}") from error
    if ids.numel() == 0 and empty:
        return torch.empty(0, dtype=torch.long)
    if ids.dim() != 1 or ids.numel() == 0 or ids.is_floating_point():
        what = "is empty" if ids.numel() == 0 else f"has shape {tuple(ids.shape)} and dtype {ids.dtype}"
        raise DataError(f"row {row} of the batch, column {key!r}, {what}; it must be a list of at least one integer.")
    return ids.long().cpu()


def floats(examples: Sequence[Example], key: str) -> dict[str, Tensor]:
    """Convert an optional column of numbers to a dict with one float32 tensor ``(B,)``. Return {} if the column is missing."""
    if not has_column(examples, key):
        return {}
    for row, example in enumerate(examples):
        if not isinstance(example[key], numbers.Real) and getattr(example[key], "shape", None) != ():
            raise DataError(f"row {row} of the batch, column {key!r}, is {example[key]!r}; it must be one number.")
    return {key: torch.tensor([float(example[key]) for example in examples], dtype=torch.float32)}


class Collator(ABC):
    """Base class of collators that checks options and batches. Subclasses are dataclasses and declare the fields again."""

    pad_token_id: int
    max_length: int | None = None
    truncation_mode: str = "keep_start"
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        if isinstance(self.pad_token_id, bool) or not isinstance(self.pad_token_id, numbers.Integral):
            raise ConfigError(
                f"pad_token_id={self.pad_token_id!r} must be a token id. Set a pad token in the tokenizer (the "
                "eos token is possible)."
            )
        for name, value in (("max_length", self.max_length), ("pad_to_multiple_of", self.pad_to_multiple_of)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1, or None for no limit.")
        check_choice("truncation_mode", self.truncation_mode, ("keep_start", "keep_end"))
        check_choice("return_tensors", self.return_tensors, ("pt",))

    def __call__(self, features: Sequence[Example], return_tensors: str | None = None) -> dict[str, Any]:
        """Collate rows to a batch.

        Raises:
            DataError: ``features`` is empty, or a row is invalid.
        """
        check_choice("return_tensors", return_tensors or "pt", ("pt",))
        if len(features) == 0:
            raise DataError("the collator got an empty batch; it needs at least one row.")
        for row, example in enumerate(features):
            if not isinstance(example, Mapping):
                raise ArgumentTypeError(
                    f"row {row} of the batch is a {type(example).__name__}; rows must be dictionaries."
                )
        return self.torch_call(features)

    @abstractmethod
    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Convert checked rows to a batch. Subclasses override it."""


def pad_ids(rows: Sequence[Tensor], pad_token_id: int, multiple: int | None) -> dict[str, Tensor]:
    """Pad rows of token ids on the right. Return ``input_ids`` and ``attention_mask``."""
    ones = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": pad(rows, pad_token_id, pad_to_multiple_of=multiple),
        "attention_mask": pad(ones, 0, pad_to_multiple_of=multiple),
    }


@dataclass
class DataCollatorForLanguageModeling(Collator):
    """Pad rows to the length of the longest row, or concatenate all rows to a single row without padding.

    Rows have ``input_ids``. They optionally have ``labels`` (default: ``input_ids``) and ``seq_lengths``, the lengths of
    the documents in a packed row.

    A padded batch has ``input_ids``, ``attention_mask`` and ``labels``, all ``(B, L)``.

    A padding-free batch of T tokens has ``input_ids``, ``position_ids`` and ``labels``, all ``(1, T)`` int64. Positions
    start at 0 in every document. The batch also has the document numbers ``seq_idx (1, T)`` int32, the document boundaries
    ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``(documents + 1,)`` int32, and the ints ``max_length_q`` and ``max_length_k``.
    It has no attention mask, because with a mask, documents would attend to each other. The first token of a document has
    no loss, because it would be predicted from another document. Each token that ``pad_to_multiple_of`` adds is a separate
    document.

    Attributes:
        pad_token_id: Value of padding in ``input_ids``.
        padding_free: Whether to concatenate rows instead of padding them.
        return_position_ids: Whether padded batches contain ``position_ids``. Sequence parallelism needs them.
        pad_to_multiple_of: Round L or T up to a multiple of this number.
        return_tensors: Must be ``pt``.
    """

    pad_token_id: int
    padding_free: bool = False
    return_position_ids: bool = False
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        ids = [token_row(example, "input_ids", row) for row, example in enumerate(examples)]
        labels = ids
        if has_column(examples, "labels"):
            labels = [token_row(example, "labels", row) for row, example in enumerate(examples)]
            for row, (a, b) in enumerate(zip(ids, labels, strict=True)):
                if len(a) != len(b):
                    raise DataError(f"row {row} of the batch has {len(b)} labels for {len(a)} input_ids.")
        packed = has_column(examples, "seq_lengths")
        if self.padding_free:
            return self._concatenated(examples, ids, labels, packed)
        if packed:
            raise DataError(
                "the rows are packed (they have 'seq_lengths'), but padding_free=False, so documents of a row would "
                "attend to each other. Set padding_free=True, or remove the column to treat packed rows as single "
                "documents."
            )
        multiple = self.pad_to_multiple_of
        batch = pad_ids(ids, self.pad_token_id, multiple)
        batch["labels"] = pad(labels, IGNORED, pad_to_multiple_of=multiple)
        if self.return_position_ids:
            batch["position_ids"] = pad([torch.arange(len(row)) for row in ids], 0, pad_to_multiple_of=multiple)
        return batch

    def _concatenated(
        self, examples: Sequence[Example], ids: list[Tensor], labels: list[Tensor], packed: bool
    ) -> dict[str, Any]:
        lengths = [[len(row)] for row in ids]
        if packed:
            lengths = [[int(n) for n in example["seq_lengths"]] for example in examples]
        self.get_position_ids_from_packed_seq_lengths(lengths)
        documents: list[dict[str, Any]] = []
        for row, (spans, tokens, row_labels) in enumerate(zip(lengths, ids, labels, strict=True)):
            if sum(spans) != len(tokens):
                raise DataError(
                    f"row {row} of the batch: seq_lengths {spans} have the sum {sum(spans)}, but the row has "
                    f"{len(tokens)} tokens. The row was truncated or packed again after packing."
                )
            parts = zip(tokens.split(spans), row_labels.split(spans), strict=True)
            documents += [{"input_ids": part, "labels": label} for part, label in parts]
        tail = -sum(map(len, ids)) % (self.pad_to_multiple_of or 1)
        documents += [{"input_ids": [self.pad_token_id], "labels": [IGNORED]}] * tail
        return dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(documents, "pt"))

    @staticmethod
    def get_position_ids_from_packed_seq_lengths(batch_seq_lengths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the position ids of packed rows. Positions start at 0 in every document.

        Args:
            batch_seq_lengths: Lengths of the documents of each row, in order.

        Returns:
            One int64 tensor of positions per row.

        Raises:
            DataError: A row has no documents, or a document has no tokens.

        >>> DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths([[2, 2], [3]])
        [tensor([0, 1, 0, 1]), tensor([0, 1, 2])]
        """
        out = []
        for row, documents in enumerate(batch_seq_lengths):
            lengths = torch.as_tensor(documents, dtype=torch.long)
            if lengths.numel() == 0 or int(lengths.min()) < 1:
                raise DataError(f"row {row} of the batch: seq_lengths {list(documents)} must all be at least 1.")
            starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
            out.append(torch.arange(len(starts)) - starts)
        return out


class _PromptCollator(Collator):
    """Base class of collators for rows with a prompt and one or several completions."""

    def _joined(self, examples: Sequence[Example], column: str) -> tuple[list[Tensor], list[Tensor]]:
        """Concatenate prompt and completion of every row and truncate the result to ``max_length``. Return the token
        ids and a mask that is 1 for completion tokens.
        """
        limit = self.max_length
        part = slice(-limit, None) if limit is not None and self.truncation_mode == "keep_end" else slice(limit)
        ids, masks = [], []
        for row, example in enumerate(examples):
            prompt = token_row(example, "prompt_ids", row, empty=True)
            completion = token_row(example, column, row)
            mask = torch.cat([torch.zeros_like(prompt), torch.ones_like(completion)])[part]
            if not mask.any():
                raise DataError(
                    f"row {row} of the batch: the prompt has {len(prompt)} tokens, so max_length={limit} leaves no "
                    f"token of {column!r} to train. Raise max_length or remove the row."
                )
            ids.append(torch.cat([prompt, completion])[part])
            masks.append(mask)
        return ids, masks

    def _stacked(self, examples: Sequence[Example], columns: Sequence[str]) -> dict[str, Tensor]:
        """Build one batch from several completion columns. The first B rows are the prompts with the completions of the
        first column, the next B rows are the prompts with the completions of the second column, and so on.
        """
        ids: list[Tensor] = []
        masks: list[Tensor] = []
        for column in columns:
            for collected, more in zip((ids, masks), self._joined(examples, column), strict=True):
                collected.extend(more)
        batch = pad_ids(ids, self.pad_token_id, self.pad_to_multiple_of)
        return batch | {"completion_mask": pad(masks, 0, pad_to_multiple_of=self.pad_to_multiple_of)}


@dataclass
class DataCollatorForPreference(_PromptCollator):
    """Collate pairs for DPO. The first B rows of the batch contain prompts and chosen answers. The next B rows contain the
    same prompts and rejected answers. Rows are right-padded.

    Rows have ``prompt_ids``, ``chosen_ids``, ``rejected_ids`` and optionally ``ref_chosen_logps`` and
    ``ref_rejected_logps``. The batch has ``input_ids``, ``attention_mask`` and ``completion_mask``, all ``(2B, L)`` int64,
    and the reference log-probs, ``(B,)`` float32. For pairs without a separate prompt, use `DataCollatorForReward`.

    Attributes:
        pad_token_id: Value of padding in ``input_ids``.
        max_length: Maximum number of tokens of a prompt with its completion, without padding. None: no limit.
        truncation_mode: ``keep_start`` truncates the end of a row. ``keep_end`` truncates the start of a row.
        pad_to_multiple_of: Round L up to a multiple of this number.
        return_tensors: Must be ``pt``.

    >>> collate = DataCollatorForPreference(pad_token_id=0)
    >>> collate([{"prompt_ids": [5], "chosen_ids": [6, 7], "rejected_ids": [8]}])["input_ids"]
    tensor([[5, 6, 7],
            [5, 8, 0]])
    """

    pad_token_id: int
    max_length: int | None = None
    truncation_mode: str = "keep_start"
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        batch = self._stacked(examples, ("chosen_ids", "rejected_ids"))
        return batch | floats(examples, "ref_chosen_logps") | floats(examples, "ref_rejected_logps")


@dataclass
class DataCollatorForUnpairedPreference(_PromptCollator):
    """Collate labeled answers for KTO, optionally with mismatched completions for the KL estimate.

    Rows have ``prompt_ids``, ``completion_ids``, ``label`` and optionally ``KL_completion_ids``, ``ref_logps`` and
    ``ref_KL_logps``. The batch has ``input_ids``, ``attention_mask`` and ``completion_mask``, all ``(B, L)`` int64. If rows
    have ``KL_completion_ids``, the batch also has ``KL_input_ids``, ``KL_attention_mask`` and ``KL_completion_mask``,
    whose length may differ. ``label`` is ``(B,)`` bool, and the log-probs are ``(B,)`` float32.

    Attributes:
        pad_token_id: Value of padding in ``input_ids``.
        max_length: Maximum number of tokens of a prompt with its completion. The end is truncated. None: no limit.
        pad_to_multiple_of: Round L up to a multiple of this number.
        return_tensors: Must be ``pt``.
    """

    pad_token_id: int
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        batch = self._stacked(examples, ["completion_ids"])
        if has_column(examples, "KL_completion_ids"):
            batch |= {f"KL_{k}": v for k, v in self._stacked(examples, ["KL_completion_ids"]).items()}
        batch["label"] = torch.tensor([label_of(example, row) for row, example in enumerate(examples)])
        return batch | floats(examples, "ref_logps") | floats(examples, "ref_KL_logps")


def label_of(example: Example, row: int) -> bool:
    """Convert a label (bool, 0 or 1) to a bool."""
    value = scalar(example.get("label"))
    if not isinstance(value, int) or value not in (0, 1):
        raise DataError(f"row {row} of the batch, column 'label', is {value!r}; it must be True or False (or 1 or 0).")
    return bool(value)


@dataclass
class DataCollatorForReward(Collator):
    """Collate pairs for reward models. The first B rows of the batch are chosen answers. The next B rows are rejected
    answers. Rows are right-padded.

    Rows have ``chosen_ids``, ``rejected_ids`` and optionally ``margin``. Both lists of ids include the prompt. The batch has
    ``input_ids`` and ``attention_mask``, ``(2B, L)`` int64, and ``margin (B,)`` float32.

    Attributes:
        pad_token_id: Value of padding in ``input_ids``.
        pad_to_multiple_of: Round L up to a multiple of this number.
        return_tensors: Must be ``pt``.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Example]) -> dict[str, Any]:
        columns = ("chosen_ids", "rejected_ids")
        rows = [token_row(example, column, row) for column in columns for row, example in enumerate(examples)]
        return pad_ids(rows, self.pad_token_id, self.pad_to_multiple_of) | floats(examples, "margin")
