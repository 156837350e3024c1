"""`TokenSampler`: samples the next token of each unfinished completion with the settings of its request."""

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
from posttrain.rollouts.native.draws import SampledTokens, apply_rules, draw_tokens, ends_with_string, has_rules
from posttrain.types import Request, Sampling

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

KINDS = ("regex", "json", "grammar", "choices")


class Guide:
    """State of the structured output (guide) of one completion."""

    def __init__(self, compiled: Any, stop_ids: tuple[int, ...]) -> None:
        xgrammar = require("xgrammar", "Sampling.guide")
        self.matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=list(stop_ids) or None, terminate_without_stop_token=not stop_ids
        )

    @property
    def done(self) -> bool:
        """Whether the output is complete. If so, no further token is allowed."""
        return self.matcher.is_terminated()

    def accept(self, token: int) -> None:
        """Advance the state by one sampled token."""
        if not self.done:
            self.matcher.accept_token(token)


class Guides:
    """Compiles the structured outputs (guides) of requests, and masks the tokens that guides forbid.

    Args:
        tokenizer: Tokenizer of the model. Guides need it, because they describe text instead of tokens.
        vocabulary: Number of logits per position, V.
        stop_ids: Tokens that end a completion. A guide allows these tokens only where its text may end.

    Raises:
        MissingDependencyError: xgrammar is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: tuple[int, ...]) -> None:
        if tokenizer is None:
            raise ConfigError("Sampling.guide needs a tokenizer: pass it to the engine (NativeEngine(tokenizer=...)).")
        self.xgrammar = require("xgrammar", "Sampling.guide")
        self.stop_ids, self.vocabulary = stop_ids, vocabulary
        info = self.xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary, stop_token_ids=list(stop_ids) or None
        )
        self.compiler = self.xgrammar.GrammarCompiler(info)
        self._compiled: dict[tuple[str, str], Any] = {}

    def start(self, guide: tuple[str, str]) -> Guide:
        """Return the initial state of a guide. The guide is compiled at its first use.

        Raises:
            ConfigError: The kind of the guide is unknown, its text is not a valid regex, schema or grammar, or it allows no
                token.
        """
        if guide not in self._compiled:
            compiled = self._compile(*guide)
            allowed = self.xgrammar.allocate_token_bitmask(1, self.vocabulary)
            Guide(compiled, self.stop_ids).matcher.fill_next_token_bitmask(allowed, 0)
            if not allowed.any():
                raise ConfigError(
                    f"Sampling.guide={guide!r:.200} allows no token. Fix: add a rule that ends its recursion."
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
        except Exception as error:  # For invalid guides, the compiler raises exceptions of many types.
            raise ConfigError(f"Sampling.guide=({kind!r}, {text[:80]!r}...) cannot be compiled: {error}") from error

    def mask(self, logits: Tensor, guides: list[Guide]) -> Tensor:
        """Set the logits of tokens that the row's guide forbids to minus infinity, in place."""
        bitmask = self.xgrammar.allocate_token_bitmask(len(guides), self.vocabulary)
        for row, guide in enumerate(guides):
            if guide.done:
                # This completion has ended, so allow all tokens.
                bitmask[row] = -1
            else:
                guide.matcher.fill_next_token_bitmask(bitmask, row)
        self.xgrammar.apply_token_bitmask_inplace(logits, bitmask.to(logits.device))
        return logits


MASK = 2**63 - 1


@dataclass(slots=True)
class Prompt:
    """Distinct prompt of a call. Several requests may share it.

    Attributes:
        index: Index among the distinct prompts of the call.
        ids: Tokens after the common prefix of all prompts.
        waiting: Number of completions that have not started.
        live: Number of completions in progress.
        block: Block with the keys and values of the prompt, as long as completions need it. Otherwise None.
        logits: Logits ``(V,)`` of the first token of completions. They are stored until all completions have started.
        shares: Length of the prefix that the prompt shares with another prompt of the call. It is 0 if a separate
            computation of the prefix would save no time.
        pictures: Images in the prompt. A prompt with images is computed in one pass. Only requests with the same tokens and
            images share it.
        offset: Difference between the position and the index of tokens after the prompt. It is 0 unless images change
            positions.
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
class RunningRequest:
    """Request of a call that has not been completed.

    Attributes:
        index: Index of the request in the call.
        request: The request.
        prompt: Prompt of the request. Other requests may share this object.
        sampling: Sampling settings of the request. If the request has no settings, these are the settings of the call.
        waiting: Number of completions that have not started.
        seed: Seed of the request's random numbers.
        number: Index of the request's first completion among all completions of the call.
        draws: Index of the request's first completion among all completions of the call with the same seed.
        kind: Text that contains all settings for sampling a token. Requests with equal ``kind`` sample their tokens
            together.
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
    """Completion that has not ended. The field ``before`` contains tokens that were sampled before an interruption."""

    number: int
    running: RunningRequest
    uniform: list[float]
    guide: Guide | None = None
    before: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


def uniforms(seed: int, number: int, count: int) -> list[float]:
    """Return ``count`` random numbers in [0, 1), one per token, for completion ``number`` of the seed.

    Seed and index are mixed with SplitMix64 (Steele et al., OOPSLA 2014). Completions with consecutive indices therefore get
    unrelated numbers.
    """
    z = (seed * 0x9E3779B97F4A7C15 + number + 1) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    z = (z ^ z >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    generator = torch.Generator().manual_seed((z ^ z >> 31) & MASK)
    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


class SickRequests(RolloutError):
    """Error that is raised if no token can be sampled for some requests. ``requests`` contains their indices in the call."""

    def __init__(self, message: str, requests: list[int]) -> None:
        super().__init__(message)
        self.requests = requests


class TokenSampler:
    """Samples tokens, and detects the end of completions.

    Args:
        tokenizer: Tokenizer for stop strings and structured outputs. It may be None if no request uses them.
        vocabulary: Number of logits per position, V.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.guides: dict[tuple[int, ...], Guides] = {}

    def check(self, sampling: Sampling) -> None:
        """Raise an error for settings that need a missing tokenizer, and for guides that cannot be compiled. This check runs
        before any computation.
        """
        if sampling.stop_strings and self.tokenizer is None:
            raise ConfigError(
                "Sampling.stop_strings needs a tokenizer: pass it to the engine (NativeEngine(tokenizer=...))."
            )
        if sampling.guide is not None:
            self._guides(sampling).start(sampling.guide)

    def begin(self, running: RunningRequest, index: int) -> Completion:
        """Create the object for completion ``index`` of a request. It contains no tokens yet."""
        sampling = running.sampling
        guide = self._guides(sampling).start(sampling.guide) if sampling.guide is not None else None
        uniform = uniforms(running.seed, running.draws + index, sampling.max_new_tokens)
        written = running.request.written
        before = list(running.request.prompt_ids[-written:]) if written else []
        if guide is not None:
            for token in before:
                guide.accept(token)
        return Completion(running.number + index, running, uniform, guide, before)

    def _guides(self, sampling: Sampling) -> Guides:
        stops = sampling.stop_token_ids
        if stops not in self.guides:
            self.guides[stops] = Guides(self.tokenizer, self.vocabulary, stops)
        return self.guides[stops]

    def draw(self, logits: Tensor, completions: list[Completion]) -> Tensor:
        """Sample the next token of each completion with the settings of its request."""
        parts: dict[str, list[int]] = {}
        for row, completion in enumerate(completions):
            parts.setdefault(completion.running.kind, []).append(row)
        if len(parts) == 1:
            return self._draw_alike(logits, completions)
        tokens = torch.empty(len(completions), dtype=torch.long, device=logits.device)
        for rows in parts.values():
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = self._draw_alike(logits[index], [completions[row] for row in rows])
        return tokens

    def _draw_alike(self, logits: Tensor, completions: list[Completion]) -> Tensor:
        sampling = completions[0].running.sampling
        uniform = torch.tensor([c.uniform[len(c.tokens)] for c in completions], dtype=torch.float64)
        # Copy without blocking. A blocking copy would wait for the end of the forward pass.
        uniform = uniform.to(logits.device, non_blocking=True)
        history = None
        if sampling.repetition_penalty != 1.0 or sampling.no_repeat_ngram:
            history = [list(c.running.request.prompt_ids) + c.tokens for c in completions]
        changes = has_rules(sampling) or sampling.guide is not None
        change = (lambda x: self._changed(x, sampling, completions, history)) if changes else None
        try:
            drawn = draw_tokens(logits, sampling, uniform, history, change)
            _record(drawn, completions)
        except RolloutError as error:
            sick = logits.isnan().any(-1).tolist()
            failed = sorted({c.running.index for c, nan in zip(completions, sick, strict=True) if nan or not any(sick)})
            advice = "Check the weights for NaN." if any(sick) else "Loosen them."
            raise SickRequests(f"{error} Requests: {failed[:8]}. {advice}", failed) from error
        return drawn.tokens

    def _changed(
        self, x: Tensor, sampling: Sampling, completions: list[Completion], history: list[list[int]] | None
    ) -> Tensor:
        """Return a copy of the logits with rules and structured outputs applied."""
        x = apply_rules(x, sampling, [len(c.tokens) for c in completions], history)
        if sampling.guide is not None:
            x = self._guides(sampling).mask(x, [c.guide for c in completions if c.guide is not None])
        return x

    def stopped(self, completion: Completion) -> bool:
        """Return whether the last sampled token ends the completion."""
        sampling = completion.running.sampling
        if completion.tokens[-1] in sampling.stop_token_ids or (completion.guide is not None and completion.guide.done):
            return True
        if not sampling.stop_strings:
            return False
        return ends_with_string(completion.before + completion.tokens, sampling, self.tokenizer)


def _record(drawn: SampledTokens, completions: list[Completion]) -> None:
    """Append the sampled token and its log-probs to each completion."""
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
