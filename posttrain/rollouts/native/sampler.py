"""The next token of every live completion, as its own request's sampling says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, RolloutError, check_choice
from posttrain.integrations import require
from posttrain.rollouts.native.attention import Block
from posttrain.rollouts.native.draws import Drawn, apply_rules, draw_tokens, ends_with_string, has_rules
from posttrain.types import Request, Sampling

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

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

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: tuple[int, ...]) -> None:
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
            ConfigError: An unknown kind, a text that is no regex, schema or grammar, or one that allows no token.
        """
        if guide not in self._compiled:
            compiled = self._compile(*guide)
            allowed = self.xgrammar.allocate_token_bitmask(1, self.vocabulary)
            Guide(compiled, self.stop_ids).matcher.fill_next_token_bitmask(allowed, 0)
            if not allowed.any():
                raise ConfigError(
                    f"Sampling.guide={guide!r:.200} allows no token at all. Fix: give it an end to its recursion."
                )
            self._compiled[guide] = compiled
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


MASK = 2**63 - 1


@dataclass(slots=True)
class Prompt:
    """Tokens that one request or several begin with, while any of them is served.

    Attributes:
        index: Among the different prompts of the call.
        ids: Its tokens behind the common beginning.
        waiting: Completions that nobody writes yet.
        live: Completions that are being written.
        block: Its keys and values, while any completion needs them.
        logits: ``(V,)`` what first tokens are drawn from, while completions wait.
        shares: Its first tokens that another prompt of the call begins with too, as long as they are worth computing first.
        pictures: Those of its tokens. Such a prompt is computed in one pass, and shares with equal prompts and pictures alone.
        offset: By how much positions behind the prompt differ from the index of a token.
    """

    index: int
    ids: list[int]
    waiting: int = 0
    live: int = 0
    block: Block | None = None
    logits: Tensor | None = None
    shares: int = 0
    pictures: Sequence[Any] = ()
    offset: int = 0


@dataclass(slots=True)
class Asked:
    """One request while it is served.

    Attributes:
        index: Of the request in the call.
        request: What was asked for.
        prompt: Its prompt, which other requests may have too.
        sampling: Its own, or the call's.
        waiting: Completions that nobody writes yet.
        seed: Of its draws.
        number: Of its first completion among all of the call.
        draws: Number of its first completion as the seed counts them.
        kind: What of the settings decides how one token is drawn: requests that share it are drawn together.
    """

    index: int
    request: Request
    prompt: Prompt
    sampling: Sampling
    waiting: int
    seed: int
    number: int
    draws: int
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        self.kind = repr(replace(self.sampling, max_new_tokens=1, seed=None, stop_strings=()))


@dataclass(slots=True)
class Completion:
    """One completion being written; ``before`` it was interrupted it had these tokens."""

    number: int
    asked: Asked
    uniform: list[float]
    guide: Guide | None = None
    before: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


def uniforms(seed: int, number: int, count: int) -> list[float]:
    """``count`` numbers in [0, 1) that decide every draw of completion ``number`` under ``seed``.

    The seed and the number are mixed as SplitMix64 does (Steele et al., OOPSLA 2014), so that neighbours are unrelated.
    """
    z = (seed * 0x9E3779B97F4A7C15 + number + 1) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    z = (z ^ z >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    generator = torch.Generator().manual_seed((z ^ z >> 31) & MASK)
    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


class SickRequests(RolloutError):
    """Nothing can be drawn for some requests; ``requests`` are their numbers in the call."""

    def __init__(self, message: str, requests: list[int]) -> None:
        super().__init__(message)
        self.requests = requests


class Chooser:
    """Draws tokens and knows when a completion is over.

    Args:
        tokenizer: For stop strings and guides; may be None without them.
        vocabulary: V, the width of the logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.guides: dict[tuple[int, ...], Guides] = {}

    def check(self, sampling: Sampling) -> None:
        """Refuse, before anything is computed, what needs a tokenizer or cannot be compiled."""
        if sampling.stop_strings and self.tokenizer is None:
            raise ConfigError(
                "Sampling.stop_strings are text: give the engine its tokenizer (NativeEngine(tokenizer=...))."
            )
        if sampling.guide is not None:
            self._guides(sampling).start(sampling.guide)

    def begin(self, asked: Asked, index: int) -> Completion:
        """Completion ``index`` of a request, nothing written yet."""
        sampling = asked.sampling
        guide = self._guides(sampling).start(sampling.guide) if sampling.guide is not None else None
        uniform = uniforms(asked.seed, asked.draws + index, sampling.max_new_tokens)
        written = asked.request.written
        before = list(asked.request.prompt_ids[-written:]) if written else []
        if guide is not None:
            for token in before:
                guide.accept(token)
        return Completion(asked.number + index, asked, uniform, guide, before)

    def _guides(self, sampling: Sampling) -> Guides:
        stops = sampling.stop_token_ids
        if stops not in self.guides:
            self.guides[stops] = Guides(self.tokenizer, self.vocabulary, stops)
        return self.guides[stops]

    def draw(self, logits: Tensor, completions: list[Completion]) -> Tensor:
        """The next token of each, by its own request's sampling."""
        parts: dict[str, list[int]] = {}
        for row, completion in enumerate(completions):
            parts.setdefault(completion.asked.kind, []).append(row)
        if len(parts) == 1:
            return self._draw_alike(logits, completions)
        tokens = torch.empty(len(completions), dtype=torch.long, device=logits.device)
        for rows in parts.values():
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = self._draw_alike(logits[index], [completions[row] for row in rows])
        return tokens

    def _draw_alike(self, logits: Tensor, completions: list[Completion]) -> Tensor:
        sampling = completions[0].asked.sampling
        uniform = torch.tensor([c.uniform[len(c.tokens)] for c in completions], dtype=torch.float64)
        uniform = uniform.to(logits.device, non_blocking=True)  # Else it waits for the forward pass.
        history = None
        if sampling.repetition_penalty != 1.0 or sampling.no_repeat_ngram:
            history = [list(c.asked.request.prompt_ids) + c.tokens for c in completions]
        changes = has_rules(sampling) or sampling.guide is not None
        change = (lambda x: self._changed(x, sampling, completions, history)) if changes else None
        try:
            drawn = draw_tokens(logits, sampling, uniform, history, change)
            _record(drawn, completions)
        except RolloutError as error:
            sick = logits.isnan().any(-1).tolist()
            asked = sorted({c.asked.index for c, nan in zip(completions, sick, strict=True) if nan or not any(sick)})
            advice = "Check the weights for NaN." if any(sick) else "Loosen them."
            raise SickRequests(f"{error} Requests: {asked[:8]}. {advice}", asked) from error
        return drawn.tokens

    def _changed(
        self, x: Tensor, sampling: Sampling, completions: list[Completion], history: list[list[int]] | None
    ) -> Tensor:
        """Tempered logits after the rules and the guide; a copy."""
        x = apply_rules(x, sampling, [len(c.tokens) for c in completions], history)
        if sampling.guide is not None:
            x = self._guides(sampling).mask(x, [c.guide for c in completions if c.guide is not None])
        return x

    def stopped(self, completion: Completion) -> bool:
        """Whether its last token ended it."""
        sampling = completion.asked.sampling
        if completion.tokens[-1] in sampling.stop_token_ids or (completion.guide is not None and completion.guide.done):
            return True
        if not sampling.stop_strings:
            return False
        return ends_with_string(completion.before + completion.tokens, sampling, self.tokenizer)


def _record(drawn: Drawn, completions: list[Completion]) -> None:
    """Append what was drawn to each completion."""
    for completion, (token, logp, *more) in zip(completions, drawn.rows(), strict=True):
        completion.tokens.append(int(token))
        completion.logps.append(logp)
        if completion.guide is not None:
            completion.guide.accept(int(token))
        if drawn.processed_logp is not None:
            completion.processed.append(more.pop(0))
        if drawn.top is not None:
            count = drawn.top[0].shape[1]
            completion.top.append(list(zip(map(int, more[:count]), more[count:], strict=True)))
