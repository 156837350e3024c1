"""PPO's prompts: text or messages as every online trainer takes them, or token ids that are prompts already."""

from __future__ import annotations

import logging
from typing import Any

import datasets
import torch

from posttrain.algorithms.ppo.config import PPOConfig
from posttrain.data.samplers import check_prompts
from posttrain.errors import ConfigError, DataError
from posttrain.models.load import resolve_pad_token
from posttrain.training.prompts import PromptSource

__all__ = ["TokenPrompts", "check_pad"]

logger = logging.getLogger(__name__)


class TokenPrompts(PromptSource):
    """Prompts of a PPO run, of which each is completed once; rows may hold token ids.

    Args:
        args: Of the trainer.
        tokenizer: Of the policy.
        collator: The user's, which turns rows with ``input_ids`` into a padded batch first; None needs none.
    """

    args: PPOConfig

    def __init__(self, args: PPOConfig, tokenizer: Any, *, collator: Any = None) -> None:
        super().__init__(args, tokenizer, length_option="response_length")
        self.collator, self.drops_columns = collator, False

    def trial_rows(self, head: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With the text of token ids, and with the ids that a rollout brings."""
        return [{**row, "prompt_ids": [0]} for row in self.readable(head[:2])]

    def checked_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """As the parent's; rows with ``input_ids`` must hold a token that is no padding."""
        first = next(iter(dataset), None)
        if first is None or "input_ids" not in first:
            return check_prompts(dataset, name, self.tokenizer)
        if isinstance(dataset, datasets.Dataset):
            rows = dataset.select_columns([c for c in ("input_ids", "attention_mask") if c in first]).with_format(None)
        else:
            rows = dataset.take(64)
        for index, row in enumerate(rows):
            if not self._real(row):
                raise DataError(f"{name} row {index}, column 'input_ids': it holds no token but padding. Drop the row.")
        return [row for _, row in zip(range(2), dataset, strict=False)]

    def check_size(self, train: Any) -> None:
        """Refuse a training set that does not fill one rollout batch; warn where many rows of an epoch are skipped."""
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

    def repeats(self) -> tuple[int, int]:
        """Prompts of a rollout batch, and how many micro-batches are trained on it."""
        args = self.args
        return args.batch_size, args.updates * args.gradient_accumulation_steps

    def readable(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows as rewards see them: token ids without padding, and the text they stand for."""
        if not inputs or "input_ids" not in inputs[0]:
            return [dict(row) for row in inputs]
        given = inputs
        if self.collator is not None:
            batch = self.collator([{k: row[k] for k in ("input_ids", "attention_mask") if k in row} for row in inputs])
            masks = batch.get("attention_mask", [None] * len(inputs))
            given = [{"input_ids": ids, "attention_mask": m} for ids, m in zip(batch["input_ids"], masks, strict=True)]
        ids = [self._real(row) for row in given]
        texts = self.tokenizer.batch_decode(ids)
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
        pad = self.tokenizer.pad_token_id
        real = [i for i, token in enumerate(ids) if token != pad]
        return ids[real[0] : real[-1] + 1] if real else []


def check_pad(tokenizer: Any, *, may_change: bool) -> None:
    """Padding and the end of a response must be two tokens, or rows that come padded could not be told apart.

    Args:
        tokenizer: Of the policy.
        may_change: Whether it is ours, so that another pad token may be set.

    Raises:
        ConfigError: They are one token.
    """
    if tokenizer.pad_token_id is None:
        resolve_pad_token(tokenizer)
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    free = [token for token in (tokenizer.unk_token, *added, tokenizer.bos_token) if token]
    other = next((token for token in free if token != tokenizer.eos_token), None)
    if may_change and other is not None:
        logger.info("the pad token equals the eos token %r; %r pads instead.", tokenizer.eos_token, other)
        tokenizer.pad_token = other
        return
    fix = f"tokenizer.pad_token = {other!r}" if other else "tokenizer.add_special_tokens({'pad_token': '[PAD]'})"
    raise ConfigError(
        f"the pad token of processing_class equals its eos token {tokenizer.eos_token!r} (id {tokenizer.eos_token_id}): the "
        f"end of a response would be taken for padding. Set another one before training: {fix}."
    )


def _numbers(values: Any) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else [int(value) for value in values]
