"""Guided decoding: a regex, JSON schema, grammar or list of choices that every completion must match."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from posttrain.errors import ConfigError, check_choice
from posttrain.integrations import require

__all__ = ["Guide", "Guides"]

KINDS = ("regex", "json", "grammar", "choices")


class Guide:
    """Where one completion stands in its grammar."""

    def __init__(self, compiled: Any, stop_ids: tuple[int, ...]) -> None:
        xgrammar = require("xgrammar", "Sampling.guide")
        self.matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=list(stop_ids) or None, terminate_without_stop_token=not stop_ids
        )

    @property
    def done(self) -> bool:
        """Nothing may follow."""
        return self.matcher.is_terminated()

    def accept(self, token: int) -> None:
        """The token was drawn."""
        if not self.done:
            self.matcher.accept_token(token)


class Guides:
    """Compiles guides once each, and masks what they forbid.

    Args:
        tokenizer: Of the model; grammars speak of text, the model of tokens.
        vocabulary: V, the width of the logits.
        stop_ids: Tokens that end a completion; allowed only where the text is complete.

    Raises:
        MissingDependencyError: xgrammar is not installed.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, stop_ids: tuple[int, ...]) -> None:
        if tokenizer is None:
            raise ConfigError(
                "Sampling.guide speaks of text: give the engine its tokenizer (NativeEngine(tokenizer=...))."
            )
        self.xgrammar = require("xgrammar", "Sampling.guide")
        self.stop_ids, self.vocabulary = stop_ids, vocabulary
        info = self.xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary, stop_token_ids=list(stop_ids) or None
        )
        self.compiler = self.xgrammar.GrammarCompiler(info)
        self._compiled: dict[tuple[str, str], Any] = {}

    def start(self, guide: tuple[str, str]) -> Guide:
        """A fresh position at the beginning of a guide.

        Raises:
            ConfigError: An unknown kind, or a text that is no regex, schema or grammar.
        """
        if guide not in self._compiled:
            self._compiled[guide] = self._compile(*guide)
        return Guide(self._compiled[guide], self.stop_ids)

    def _compile(self, kind: str, text: str) -> Any:
        check_choice("guide", kind, KINDS)
        make = {
            "regex": self.compiler.compile_regex,
            "json": self.compiler.compile_json_schema,
            "grammar": self.compiler.compile_grammar,
            "choices": lambda lines: self.compiler.compile_regex("|".join(map(re.escape, lines.split("\n")))),
        }[kind]
        try:
            return make(text)
        except Exception as error:  # The compiler's own errors have many types.
            raise ConfigError(f"Sampling.guide=({kind!r}, {text[:80]!r}...) cannot be compiled: {error}") from error

    def mask(self, logits: Tensor, guides: list[Guide]) -> Tensor:
        """Set what each row's guide forbids to minus infinity, in place."""
        bitmask = self.xgrammar.allocate_token_bitmask(len(guides), self.vocabulary)
        for row, guide in enumerate(guides):
            if guide.done:
                bitmask[row] = -1  # All bits: the completion is over.
            else:
                guide.matcher.fill_next_token_bitmask(bitmask, row)
        self.xgrammar.apply_token_bitmask_inplace(logits, bitmask.to(logits.device))
        return logits
