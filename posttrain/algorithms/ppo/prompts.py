"""PPO's prompts: text or messages as every online trainer takes them, or token ids that are prompts already."""

from __future__ import annotations

import logging
from typing import Any

import datasets
import torch

from posttrain.algorithms.ppo.config import PPOConfig
from posttrain.data.formats import is_conversational, refuse_images
from posttrain.data.samplers import check_prompts
from posttrain.errors import ConfigError, DataError
from posttrain.models.load import resolve_pad_token
from posttrain.training.prompts import _splits

__all__ = ["PromptRowsMixin"]

logger = logging.getLogger(__name__)


class PromptRowsMixin:
    """The part of `PPOTrainer` between the dataset and a rollout batch."""

    args: PPOConfig
    processing_class: Any
    rewards: Any
    _given_collator: Any
    _owns_tokenizer: bool

    def prepare_datasets(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Refuse what cannot be generated from or scored, before the policy loads."""
        self._check_pad()
        self.check_vocabularies()  # type: ignore[attr-defined]
        head: list[dict[str, Any]] = []
        for name, dataset in {"train_dataset": train, **_splits(evaluation)}.items():
            if dataset is not None:
                refuse_images(dataset, name)
            rows = self._check_rows(dataset, name)
            head = head or rows
        self._check_size(train)
        if self.args.check_rewards:
            rows = [{**row, "prompt_ids": [0]} for row in self.readable(head[:2])]
            self.rewards.dry_run(rows, conversational=is_conversational(rows[0]))
        return train, evaluation

    def _check_pad(self) -> None:
        """Padding and the end of a response must be two tokens, or rows that come padded could not be told apart."""
        tokenizer = self.processing_class
        if tokenizer.pad_token_id is None:
            resolve_pad_token(tokenizer)
        if tokenizer.pad_token_id != tokenizer.eos_token_id:
            return
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        free = [token for token in (tokenizer.unk_token, *added, tokenizer.bos_token) if token]
        other = next((token for token in free if token != tokenizer.eos_token), None)
        if self._owns_tokenizer and other is not None:
            logger.info("the pad token equals the eos token %r; %r pads instead.", tokenizer.eos_token, other)
            tokenizer.pad_token = other
            return
        fix = f"tokenizer.pad_token = {other!r}" if other else "tokenizer.add_special_tokens({'pad_token': '[PAD]'})"
        raise ConfigError(
            f"the pad token of processing_class equals its eos token {tokenizer.eos_token!r} (id {tokenizer.eos_token_id}): the "
            f"end of a response would be taken for padding. Set another one before training: {fix}."
        )

    def _check_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        first = next(iter(dataset), None)
        if first is None or "input_ids" not in first:
            return check_prompts(dataset, name, self.processing_class)
        if isinstance(dataset, datasets.Dataset):
            rows = dataset.select_columns([c for c in ("input_ids", "attention_mask") if c in first]).with_format(None)
        else:
            rows = dataset.take(64)
        for index, row in enumerate(rows):
            if not self._real(row):
                raise DataError(f"{name} row {index}, column 'input_ids': it holds no token but padding. Drop the row.")
        return [row for _, row in zip(range(2), dataset, strict=False)]

    def _check_size(self, train: Any) -> None:
        args = self.args
        if not isinstance(train, datasets.Dataset):
            return
        if len(train) < args.batch_size:
            raise ConfigError(
                f"train_dataset has {len(train)} rows, and one rollout batch takes {args.batch_size} "
                "(per_device_train_batch_size x gradient_accumulation_steps x processes): nothing would ever be trained. Give at "
                f"least {args.batch_size} rows, or lower per_device_train_batch_size or gradient_accumulation_steps."
            )
        dropped = len(train) % args.batch_size
        if dropped > 0.05 * len(train):
            logger.warning(
                "%d of %d rows do not fill a last rollout batch of %d and are skipped in every epoch.",
                dropped, len(train), args.batch_size,
            )  # fmt: skip

    def _repeats(self) -> tuple[int, int]:
        """Prompts of a rollout batch, and how many micro-batches are trained on it."""
        args = self.args
        return args.batch_size, args.updates * args.gradient_accumulation_steps

    def readable(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows as rewards see them: token ids without padding, and the text they stand for."""
        if not inputs or "input_ids" not in inputs[0]:
            return [dict(row) for row in inputs]
        given = inputs
        if self._given_collator is not None:
            batch = self._given_collator(
                [{k: row[k] for k in ("input_ids", "attention_mask") if k in row} for row in inputs]
            )
            masks = batch.get("attention_mask", [None] * len(inputs))
            given = [{"input_ids": ids, "attention_mask": m} for ids, m in zip(batch["input_ids"], masks, strict=True)]
        ids = [self._real(row) for row in given]
        texts = self.processing_class.batch_decode(ids)
        return [
            {
                **{k: v for k, v in row.items() if k != "attention_mask"},
                "input_ids": real,
                "prompt": row.get("prompt", text),
            }
            for row, real, text in zip(inputs, ids, texts, strict=True)
        ]

    def _real(self, row: dict[str, Any]) -> list[int]:
        """A row's tokens without padding: what its mask keeps, or what stands between pad tokens."""
        ids, mask = _numbers(row["input_ids"]), row.get("attention_mask")
        if mask is not None:
            return [token for token, kept in zip(ids, _numbers(mask), strict=True) if kept]
        pad = self.processing_class.pad_token_id
        real = [i for i, token in enumerate(ids) if token != pad]
        return ids[real[0] : real[-1] + 1] if real else []


def _numbers(values: Any) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else [int(value) for value in values]
