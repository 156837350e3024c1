"""Rows as the checks look at them: sequences, their texts, and what their tokenizer calls special."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from posttrain.data.chat import render, terminal_token_ids
from posttrain.data.tokenize import encode
from posttrain.errors import PosttrainError
from posttrain.types import Finding, Row

__all__ = ["RowContext", "TokenSequence", "count_of", "where"]

Severity = Literal["info", "warning", "error"]

NAMED = 8  # Row indices a finding names before it says "and n more".


@dataclass(frozen=True)
class TokenSequence:
    """One prompt with one completion.

    Attributes:
        row: Index of its row.
        ids: Prompt and completion.
        trained: One bool a token; false on a first token, which nothing predicts.
        start: Where the completion starts; ``len(ids)`` when there is none.
        has_completion: False for a prompt whose completion is sampled later.
    """

    row: int
    ids: list[int]
    trained: list[bool]
    start: int
    has_completion: bool


@dataclass(frozen=True)
class RowContext:
    """Rows and what the checks want to know about their tokenizer, each computed once.

    Attributes:
        rows: The rows; never changed.
        tokenizer: Decodes and encodes.
        limit: Tokens at which rows were cut, or None.
        numbers: What each row is called in messages; None: its index.
        examples: Index of one row of each finding, by code; filled while checks run.
    """

    rows: Sequence[Row]
    tokenizer: Any
    limit: int | None = None
    numbers: Sequence[int] | None = None
    examples: dict[str, int] = field(default_factory=dict)
    _blank: dict[int, bool] = field(default_factory=dict)

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """Every sequence of every row, in order."""
        return [sequence for index, row in enumerate(self.rows) for sequence in _sequences(index, row)]

    @cached_property
    def texts(self) -> list[str]:
        """Every sequence decoded, special tokens included."""
        return [self.decode(sequence.ids) for sequence in self.sequences]

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens after which a turn or text is over."""
        try:
            return frozenset(terminal_token_ids(self.tokenizer))
        except PosttrainError:  # A template that refuses the probe says nothing about the end of a turn.
            eos = self.tokenizer.eos_token_id
            return frozenset() if eos is None else frozenset({int(eos)})

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens, those of added vocabulary included."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    @cached_property
    def bos_opens_turns(self) -> bool:
        """Whether the chat template begins every turn with the bos token, as ChatML's ``<|im_start|>`` often is."""
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        try:
            ids = self.encode(render(self.tokenizer, messages))
        except PosttrainError:
            return False
        return ids.count(self.tokenizer.bos_token_id) > 1

    def decode(self, ids: list[int]) -> str:
        """Text of ids; ids outside the vocabulary are left out."""
        size = len(self.tokenizer)
        return self.tokenizer.decode([i for i in ids if 0 <= i < size], skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens added."""
        return encode(self.tokenizer, [text], special=False)[0]

    def blank(self, token: int) -> bool:
        """Whether a token is white space only."""
        if token not in self._blank:
            self._blank[token] = token not in self.special and not self.decode([token]).strip()
        return self._blank[token]

    def cut(self, sequence: TokenSequence) -> bool:
        """Whether a sequence reaches the limit."""
        return self.limit is not None and len(sequence.ids) >= self.limit

    def finding(
        self, code: str, severity: Severity, rows: Sequence[int], *, what: str, why: str, fix: str
    ) -> Finding | None:
        """A finding about ``rows``, or None when there are none."""
        found = sorted(set(rows))
        if not found:
            return None
        self.examples[code] = found[0]
        named = found if self.numbers is None else [self.numbers[index] for index in found]
        return Finding(code, severity, f"{count_of(len(found), len(self.rows))} {what}", where(named), why, fix)


def _sequences(index: int, row: Row) -> list[TokenSequence]:
    prompt = list(row.prompt_ids)
    if not row.completions:
        return [TokenSequence(index, prompt, [False] * len(prompt), len(prompt), False)]
    result = []
    for completion, mask in zip(row.completions, row.loss_masks, strict=True):
        trained = [False] * len(prompt) + [bool(m) for m in mask]
        trained[:1] = [False] * len(trained[:1])
        result.append(TokenSequence(index, prompt + list(completion), trained, len(prompt), True))
    return result


def count_of(part: int, total: int) -> str:
    """``"3 of 40 rows (7.5 %)"``, ``"1,204 of 52,310 rows (2.3 %)"``."""
    share = f"{100 * part / total:.3g} %"
    return f"{part:,} of {total:,} row{'s' if total != 1 else ''} ({share})"


def where(found: Sequence[int]) -> str:
    """``"rows 3, 5"``, and how many more where they are many."""
    named = ", ".join(map(str, found[:NAMED]))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"row{'s' if len(found) > 1 else ''} {named}{more}"
