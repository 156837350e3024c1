"""The objects that travel from a dataset row to the loss, one dataclass a stage.

Reading order is the way of the data::

    dataset row -> Row -> Batch -> ModelOutputs -> LossTerms -> scalar
    prompts -> Request -> Rollout -> Row            (online methods join at Row)

Shape legend, used in every comment of the package:

=====  =====================================================================
``B``  rows of a batch (what one forward pass sees)
``T``  tokens of a row, padding included
``S``  sequences of a batch: one prompt with one completion each
``N``  tokens that carry loss (``loss_mask.sum()``)
``V``  vocabulary
``H``  hidden size
``P``  prompts
``G``  completions of one prompt (the group)
=====  =====================================================================

Glossary: ``logp`` log-probability under the current policy; ``old_logp`` at the start of the update; ``ref_logp`` under
the frozen reference; ``rollout_logp`` as the engine that sampled the token said; ``advantages`` how much better than the
baseline; ``loss_mask`` tokens that are trained.

One convention removes every off-by-one: **a per-token tensor is aligned with the token it speaks of**. ``logp[b, t]`` is
the log-probability *of* ``input_ids[b, t]`` given what that token may see; ``Batch.predictor[b, t]`` is the column whose
hidden state predicts it. There are no shifted labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from posttrain.errors import ConfigError
from posttrain.redaction import hide_secrets

if TYPE_CHECKING:
    from typing import TypeAlias

    import datasets
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from posttrain.metrics import Metric

    # What signatures say of what comes from other libraries; for type checkers alone, so that no import waits for them.
    Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
    AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
    EvalSets: TypeAlias = AnyDataset | Mapping[str, AnyDataset]
    # Log-probs of sampled tokens by name, a list for each sequence.
    LogProbs: TypeAlias = Mapping[str, list[list[float]]]

__all__ = [
    "ALONE",
    "Advantages",
    "Batch",
    "Finding",
    "FinishReason",
    "Leaf",
    "LossTerms",
    "ModelOutputs",
    "Prompt",
    "Ranks",
    "Reduction",
    "Request",
    "Rollout",
    "Row",
    "Sampling",
    "Segment",
]


FinishReason = Literal["stop", "length", "abort"]
Reduction = Literal["token", "sequence_token", "sequence", "constant", "local_token"]


@dataclass(slots=True, frozen=True)
class Row:
    """One tokenised example: a prompt and its completions (1 for SFT, 2 for a pair, G for a group).

    Attributes:
        prompt_ids: Token ids shared by all completions; may be empty (plain language modelling).
        completions: Token ids of each completion, without the prompt.
        loss_masks: One list a completion, 1 on tokens that are trained.
        sequence_columns: One number a completion, e.g. ``{"advantages": [0.5, -0.5]}``.
        token_columns: One number a completion token, e.g. ``{"rollout_logp": [[-0.1, -2.0], [-0.3]]}``.
        model_kwargs: What the model's forward needs besides ids (images), opaque to the data layer.
        prompt_mask: 1 on prompt tokens that are trained too, once however many completions there are; None: none is.
        pictures: Those of the prompt, then those of each completion; each with the index ``start`` in its segment. Empty: none.
    """

    prompt_ids: list[int]
    completions: list[list[int]]
    loss_masks: list[list[int]]
    sequence_columns: dict[str, list[float]] = field(default_factory=dict)
    token_columns: dict[str, list[list[float]]] = field(default_factory=dict)
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_mask: list[int] | None = None
    pictures: list[list[Any]] = field(default_factory=list)

    def with_columns(self, **columns: list[float]) -> Row:
        """A copy with further `sequence_columns`."""
        return replace(self, sequence_columns=self.sequence_columns | columns)

    def picture_spans(self, index: int, ids: Sequence[int]) -> list[tuple[Any, int, int]]:
        """Pictures of the prompt and of completion ``index``, and where the placeholders of each begin and end in ``ids``.

        Args:
            index: Of a completion.
            ids: The prompt and that completion, or their beginning.
        """
        parts, spans = [*self.pictures[:1], *self.pictures[index + 1 : index + 2]], []
        placed = (
            (image, image.start + part * len(self.prompt_ids))
            for part, pictures in enumerate(parts)
            for image in pictures
        )
        for image, start in placed:
            end, left = start, image.count
            while left and end < len(ids):
                left -= ids[end] == ids[start]
                end += 1
            spans.append((image, start, end))
        return spans


class Segment(NamedTuple):
    """A run of tokens that the same sequences read: an edge of a trie. Everything under it stands directly behind it.

    Attributes:
        row: Row of the batch.
        start, stop: Its columns; its tokens see each other causally.
        end: Column behind the last token under it. Tokens of ``[stop, end)`` see all of ``[start, stop)``.
        parent: Index of the segment that it continues; -1 at the root of a tree.
        position: Of its first token.
    """

    row: int
    start: int
    stop: int
    end: int
    parent: int
    position: int


class Leaf(NamedTuple):
    """Where a sequence ends in a trie.

    Attributes:
        segment: Index of the segment with its last token; -1 for a sequence without tokens.
        prompt: Tokens of its prompt.
        length: Tokens of its prompt and its completion.
        row: Number of the `Row` it is a completion of, among those that were collated together.
    """

    segment: int
    prompt: int
    length: int
    row: int


@dataclass(slots=True, frozen=True)
class Batch:
    """A token forest ready for the model: every row holds one or more tries, whose branches share what they begin with.

    A token sees the tokens before it of its own segment and of the segments that this one continues. Padding, packing, a
    preference pair, a GRPO group and the forks of an agent are all cases of it.

    Attributes:
        input_ids: ``(B, T)`` int64.
        position_ids: ``(B, T)`` int64; every segment continues its parent.
        seen_until: ``(B, T)`` int64, column behind the last token that sees this one; 0 on padding. Column q sees column k
            where ``k <= q < seen_until[k]``.
        predictor: ``(B, T)`` int64, the column whose hidden state predicts this token (meaningful where ``loss_mask``).
        loss_mask: ``(B, T)`` bool, tokens that are trained. Never true on a token without a predictor.
        sequence: ``(B, T)`` int64, index in ``[0, S)`` of the sequence a completion token belongs to; -1 elsewhere.
        num_sequences: S.
        segments: The tries, on the host, in the order of rows and columns.
        leaves: Where each sequence ends; S of them.
        dense_mask: Attention takes a mask, for models that do not take segments (see `Layout`).
        origin: For each sequence, its index in the flat list of completions that was collated.
        advantages: ``(S,)`` or ``(B, T)`` float32.
        old_logp: ``(B, T)`` float32, None while the policy has not moved since the rollout.
        ref_logp: ``(B, T)`` float32.
        rollout_logp: ``(B, T)`` float32.
        expected_grad: ``(B, T)`` gradient of the loss with respect to the log-probs, if it is known before the pass.
        columns: Other per-sequence ``(S,)`` or per-token ``(B, T)`` tensors by name (labels, margins, weights).
        model_kwargs: Passed to the model's forward untouched.
        pictures: Row, column of the first placeholder, and the picture, in the order of the canvas.
    """

    input_ids: Tensor
    position_ids: Tensor
    seen_until: Tensor
    predictor: Tensor
    loss_mask: Tensor
    sequence: Tensor
    num_sequences: int
    segments: tuple[Segment, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    dense_mask: bool = False
    origin: list[int] = field(default_factory=list)
    advantages: Tensor | None = None
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    rollout_logp: Tensor | None = None
    expected_grad: Tensor | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    pictures: list[tuple[int, int, Any]] = field(default_factory=list)
    # Trained tokens, and the version of ``loss_mask`` they were counted in: on a device, to count again is to wait for it.
    _counted: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)

    def to(self, device: torch.device | str) -> Batch:
        """A copy with every tensor on ``device``; on the host, trained tokens are counted first."""
        moved: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                moved[item.name] = {k: v.to(device) if hasattr(v, "to") else v for k, v in value.items()}
            elif hasattr(value, "to"):
                moved[item.name] = value.to(device)
        copy = replace(self, **moved)
        if self._counted is not None or not (self.loss_mask.is_cuda or self.loss_mask.is_meta):
            # A new object: no other code holds it.
            object.__setattr__(copy, "_counted", (self.num_loss_tokens, copy.loss_mask._version))
        return copy

    def __getitem__(self, name: Any) -> Any:
        """Refused: code that reads a batch as a dict of padded tensors would find no labels in it."""
        raise ConfigError(
            f"inputs[{name!r}] is read of a Batch, which is a token forest and no dict of padded tensors. Fix: read its "
            "attributes (inputs.input_ids, inputs.loss_mask), or override objective(outputs, batch) (docs/hooks.md)."
        )

    def keys(self) -> list[str]:
        """For ``model(**inputs)``, which is refused as `__getitem__` is."""
        return ["labels"]

    def grouped(self, values: Tensor, size: int) -> Tensor:
        """Per-sequence values ``(S,)`` as ``(S / size, size)``: the completions of each collated row side by side.

        Right only for batches collated with ``whole_rows=True`` from rows of ``size`` completions each.
        """
        order = sorted(range(self.num_sequences), key=self.origin.__getitem__)
        return values[order].view(-1, size)

    def spread_rows(self, values: Tensor, size: int) -> Tensor:
        """The inverse: one value a collated row, ``(S / size,)``, to each of its sequences, ``(S,)``."""
        order = sorted(range(self.num_sequences), key=self.origin.__getitem__)
        out = values.new_zeros(self.num_sequences)
        out[order] = values.repeat_interleave(size)
        return out

    @property
    def by_sequence(self) -> tuple[Tensor, Tensor, int]:
        """``loss_mask``, ``sequence`` and S: where sums over the trained tokens of each sequence are taken (`losses.reduce`)."""
        return self.loss_mask, self.sequence, self.num_sequences

    @property
    def real(self) -> Tensor:
        """``(B, T)`` bool, false on padding."""
        return self.seen_until > 0

    @property
    def one_sequence_a_row(self) -> bool:
        """Whether every row is one plain sequence, which needs neither a mask nor segments."""
        return all(segment.parent < 0 and segment.start == 0 for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        """Real (non-padding) tokens the model computes."""
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def num_sequence_tokens(self) -> int:
        """Tokens of all sequences, a shared prompt once for each: what metrics call ``num_tokens``."""
        return sum(leaf.length for leaf in self.leaves)

    @property
    def shares(self) -> Tensor | None:
        """``(S,)`` share of its episode's trained tokens that each sequence has; None: every sequence is an episode of its own.

        The branches of an episode are sequences of their own, and means over sequences count it once: its shares add up to 1.
        """
        return self.columns.get("share")

    @property
    def num_episodes(self) -> float:
        """Sequences, the branches of an episode counted as one."""
        shares = self.shares
        return float(self.num_sequences) if shares is None else float(shares.sum())

    @property
    def num_loss_tokens(self) -> int:
        """N, the tokens that carry loss."""
        if self._counted is not None and self._counted[1] == self.loss_mask._version:
            return self._counted[0]
        return int(self.loss_mask.sum())

    def path(self, sequence: int) -> list[range]:
        """Columns of a sequence's tokens from its first on, prompt included."""
        segment, left, runs = self.leaves[sequence].segment, self.leaves[sequence].length, []
        while segment >= 0:
            one = self.segments[segment]
            runs.append(range(one.start, min(one.stop, one.start + left - one.position)))
            segment = one.parent
        return runs[::-1]


@dataclass(slots=True)
class ModelOutputs:
    """What an objective may see of the forward pass.

    Attributes:
        logp: ``(B, T)`` float32, aligned with the token; 0 outside ``loss_mask``.
        entropy: ``(B, T)`` float32 in nats, of the distribution each token was predicted from; 0 outside ``loss_mask``.
        correct: ``(B, T)`` bool, the token was the most likely one.
        mean_logit: ``(B, T)`` mean over the vocabulary of the logits that a token was predicted from; 0 outside ``loss_mask``.
        collision: ``(B, T)`` ``log sum_v p_v^2`` of the distribution it was predicted from, likewise.
        log_mass: ``(B, T)`` log of the mass that the sampler's truncation leaves of it, the token itself included; no gradient.
        scores: ``(S,)`` reward-model scores.
        values: ``(B, T)`` value-head outputs.
        logits: Only when asked for: ``(N, V)`` at loss positions, in ``loss_mask`` order.
        aux_loss: Router balance term of mixture-of-experts models, unscaled.
        compared: By name, ``(N, ...)`` in ``loss_mask`` order, what a comparison with another model found (distillation).
    """

    logp: Tensor | None = None
    entropy: Tensor | None = None
    correct: Tensor | None = None
    mean_logit: Tensor | None = None
    collision: Tensor | None = None
    log_mass: Tensor | None = None
    scores: Tensor | None = None
    values: Tensor | None = None
    logits: Tensor | None = None
    aux_loss: Tensor | None = None
    compared: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class LossTerms:
    """An unreduced loss: what an objective returns and ``losses.reduce`` divides.

    Attributes:
        terms: ``(B, T)`` per token or ``(S,)`` per sequence.
        mask: Same shape as ``terms``; which of them count.
        reduction: How the terms become one number; see `posttrain.losses.reduce`.
        sequence: ``(B, T)`` sequence index, needed by ``sequence_token`` and ``constant``.
        num_sequences: S.
        constant: The fixed length that the ``constant`` reduction divides by.
        count: Name of the count in `Denominators.named` that ``token`` divides by; None: all tokens that carry loss.
        extra: Further terms with their own reduction (an entropy bonus, a centring penalty), added after the main one.
        metrics: What to log.
        share: ``(S,)`` what a sequence counts among sequences, see `Batch.shares`; None: 1.
        sums: Statistics that are added up over the passes of an optimizer step, for `Method.end_step`; None: none.
    """

    terms: Tensor
    mask: Tensor
    reduction: Reduction
    sequence: Tensor | None = None
    num_sequences: int = 0
    constant: float | None = None
    count: str | None = None
    extra: list[LossTerms] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    share: Tensor | None = None
    sums: Tensor | None = None


@dataclass(slots=True, frozen=True)
class Truncation:
    """What sampling leaves out of the vocabulary; see `posttrain.losses.truncation`.

    Attributes:
        top_k: Keep the k most likely tokens; 0 is off.
        top_p: Keep the smallest set with this probability mass; 1 is off.
        min_p: Drop tokens below this share of the most likely token's probability; None or 0 is off.
        never: Ids that are not drawn at all; the others are measured without them.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    never: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is left out."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p or self.never)


WHOLE = Truncation()  # Nothing is left out.
# A bias from which on a token has no probability: a number that JSON can carry to a server.
NEVER = -1e9


@dataclass(slots=True, frozen=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        max_new_tokens: Upper bound on completion tokens, EOS included.
        temperature: Divides the logits; 0 means greedy.
        top_k: Keep the k most likely tokens; 0 is off.
        top_p: Keep the smallest set with this probability mass; 1 is off.
        min_p: Drop tokens below this share of the most likely token's probability; None or 0 is off.
        repetition_penalty: Divides positive and multiplies negative logits of seen tokens; 1 is off.
        stop_token_ids: Sampling ends after any of these; the stop token is kept.
        seed: Seeds the engine's generator for this call; None continues its stream.
        min_new_tokens: No stop token before this many tokens.
        stop_strings: Sampling ends after the token that completes any of these; needs an engine with a tokenizer.
        logit_bias: Pairs (token id, number added to its logit).
        no_repeat_ngram: No n tokens in a row occur twice, prompt included; 0 is off.
        guide: Pair (kind, text) that completions must match: ``("regex", pattern)``, ``("json", schema)``,
            ``("grammar", EBNF)`` or ``("choices", lines)``; None is off.
        top_logps: Also return this many most likely tokens of every step with their log-probs.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    no_repeat_ngram: int = 0
    guide: tuple[str, str] | None = None
    top_logps: int = 0

    @property
    def truncation(self) -> Truncation:
        """What is left out of the vocabulary, before the draw."""
        return Truncation(self.top_k, self.top_p, self.min_p)

    def unseeded(self) -> dict[str, Any]:
        """All settings but the seed: what the distribution is."""
        return {name: value for name, value in asdict(self).items() if name != "seed"}

    @property
    def left_out(self) -> Truncation:
        """The truncation, with the ids that ``logit_bias`` forbids."""
        never = tuple(sorted({token for token, added in self.logit_bias if added <= NEVER}))
        return replace(self.truncation, never=never)


@dataclass(slots=True, frozen=True)
class SampleSettings:
    """How one rollout batch is sampled.

    Attributes:
        sampling: Settings of each call to the engine.
        mode: ``train`` or ``eval``.
        number: Number of the rollout batch. Seeds depend on it.
        group_size: Completions per prompt.
    """

    sampling: Sampling
    mode: str = "train"
    number: int = 0
    group_size: int = 1


class Prompt(list[int]):
    """Token ids of a prompt with the pictures in it; two prompts are equal where ids and pictures are.

    Args:
        ids: With a placeholder for every feature.
        pictures: Each with the index ``start`` of its first placeholder, in reading order.
    """

    def __init__(self, ids: Iterable[int], pictures: Iterable[Any] = ()) -> None:
        super().__init__(ids)
        self.pictures = tuple(pictures)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and list.__eq__(self, other) and self.pictures == Prompt.pictures_of(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    @staticmethod
    def pictures_of(ids: Sequence[int]) -> tuple[Any, ...]:
        """Those of a prompt; a plain list of ids has none."""
        return ids.pictures if isinstance(ids, Prompt) else ()


@dataclass(slots=True, frozen=True)
class Request:
    """One prompt to complete ``n`` times, as ``sampling`` says (None: as the call says).

    ``pictures`` are those of the prompt, for engines that take them (`Capabilities.pictures`); see `Prompt`. The last ``written``
    tokens of the prompt are the beginning of a completion that was interrupted: stop strings and guides go on from them.
    """

    prompt_ids: Sequence[int]
    n: int = 1
    sampling: Sampling | None = None
    pictures: Sequence[Any] = ()
    written: int = 0


@dataclass(slots=True, frozen=True)
class Rollout:
    """One sampled completion.

    Attributes:
        prompt_ids: The prompt as the engine saw it.
        token_ids: Completion tokens, the stop token included.
        logp: Raw log-probability of each completion token: under the distribution at ``temperature``, before penalties,
            bias, guide, top-k, top-p and min-p change it; empty when the engine cannot say.
        finish_reason: ``stop`` a stop token came; ``length`` the limit was reached; ``abort`` interrupted.
        version: Number of the policy weights that produced it.
        tool_mask: 1 on tokens the model wrote, 0 on tokens a tool or environment wrote; None when all are the model's.
        text: Decoded completion, filled in by whoever has the tokenizer.
        processed_logp: Log-probability under the distribution the token was really drawn from; None where both are one.
        top_logps: For each token the most likely ones of its raw distribution, pairs (token id, log-prob), when asked for.
        spans: Runs of (version, tokens) where the weights changed while it was written; None: all are of ``version``.
        pictures: Those of the prompt.
        shown: Those that tools and environments showed after it, placed in ``token_ids``.
        branches: Further sequences of the same episode, whose prompts may run through this one (forks of an agent's history);
            they have its reward and advantage, and count with it as one sequence.
        credit: What the advantage is multiplied by here.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logp: list[float]
    finish_reason: FinishReason
    version: int = 0
    tool_mask: list[int] | None = None
    text: str | None = None
    processed_logp: list[float] | None = None
    top_logps: list[list[tuple[int, float]]] | None = None
    spans: list[tuple[int, int]] | None = None
    pictures: Sequence[Any] = ()
    shown: Sequence[Any] = ()
    branches: Sequence[Rollout] = ()
    credit: float = 1.0


def _unchanged(values: Tensor) -> Tensor:
    """Return the argument; a lambda could not be sent to a worker process."""
    return values


@dataclass(slots=True, frozen=True)
class Ranks:
    """The processes of a run, for what is computed over all of them. Each function is a collective: all ranks call it.

    Attributes:
        rank: Of this process.
        size: Number of processes.
        sum: Sums a list of numbers over all processes.
        gather: Concatenates the lists of all processes, in their order.
        join: Concatenates values ``(n,)`` of all processes, whose counts may differ.
    """

    rank: int = 0
    size: int = 1
    sum: Callable[[list[float]], list[float]] = list
    gather: Callable[[list[Any]], list[Any]] = list
    join: Callable[[Tensor], Tensor] = _unchanged


ALONE = Ranks()  # One process, and the group of a worker.


@dataclass(slots=True, frozen=True)
class State:
    """Where a run stands: what an objective may read besides outputs and batch.

    Attributes:
        step: Number of optimizer steps that were made.
        epoch: Number of epochs that were trained, with the part of the present one.
        ranks: All processes of the run.
        own: What the method keeps from step to step, see `posttrain.methods.base.Method.start`; None: nothing.
    """

    step: int = 0
    epoch: float = 0.0
    ranks: Ranks = ALONE
    own: Any = None


@dataclass(slots=True, frozen=True)
class Advantages:
    """What each completion is worth: what `Method.advantages` returns.

    Attributes:
        values: ``(n,)`` of the completions of all ranks; or ``(n, T)`` of this rank's tokens, which are trained by
            ``token_columns`` then.
        totals: ``(n,)`` weighted rewards of all ranks before any penalty, NaN where no function applied.
        start: Index in ``values`` of this rank's first completion.
        columns: One number for each completion of this rank, by name; the objective finds them in `Batch.columns`.
        token_columns: One list for each sequence of this rank, by name: what the objective reads of the log-probs, and more.
        left_out: Completions of this rank that carry no loss.
        keep: One mask for each completion of this rank, 1 on tokens that carry loss; None: as they were sampled.
        unbounded: ``values`` before they were bounded by `posttrain.losses.advantages.MOST_ADVANTAGE`; None: they were not.
        group_std: ``(n / G,)`` spread of each group of all ranks; None where there are no groups.
        zero_std_share: Share of groups without spread; None where there are no groups.
        metrics: What to log.
    """

    values: Tensor
    totals: Tensor
    start: int = 0
    columns: Mapping[str, list[float]] = field(default_factory=dict)
    token_columns: Mapping[str, list[list[float]]] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()
    keep: list[list[int]] | None = None
    unbounded: Tensor | None = None
    group_std: Tensor | None = None
    zero_std_share: float | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Finding:
    """One thing a check saw: a stable code, how bad it is, and what, where, why and how to fix it, without secrets."""

    code: str
    severity: Literal["info", "warning", "error"]
    what: str
    where: str
    why: str
    fix: str

    def __post_init__(self) -> None:
        for name, text in asdict(self).items():
            object.__setattr__(self, name, hide_secrets(text))
