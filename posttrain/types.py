"""Dataclasses for the data of all stages of training, from a dataset row to the loss.

The data flows in this order::

    dataset row -> Row -> Batch -> ModelOutputs -> LossTerms -> scalar
    prompts -> Request -> Rollout -> Row            (online methods join at Row)

Shape letters in all docstrings and comments of the package:

- ``B``: rows of a batch, i.e. of the inputs of one forward pass
- ``T``: tokens of a row, including padding
- ``S``: sequences of a batch. A sequence is one prompt with one completion.
- ``N``: tokens in the loss (``loss_mask.sum()``)
- ``V``: vocabulary size
- ``H``: hidden size
- ``P``: prompts
- ``G``: completions of one prompt (the group size)

Names in all modules:

- ``logp``: log-probability under the current policy
- ``old_logp``: log-probability under the policy at the start of the update
- ``ref_logp``: log-probability under the frozen reference
- ``rollout_logp``: log-probability as reported by the sampling engine
- ``advantages``: rewards relative to a baseline
- ``loss_mask``: mask of tokens in the loss

**Per-token tensors are aligned with the token they describe.** ``logp[b, t]`` is the log-probability *of* the token
``input_ids[b, t]``, given the tokens to which it may attend. ``Batch.predictor[b, t]`` is the column whose hidden state
predicts this token. Labels are never shifted.
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

    # Aliases for types of other libraries. These libraries are imported only for type checkers.
    Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
    AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
    EvalSets: TypeAlias = AnyDataset | Mapping[str, AnyDataset]
    # Type of log-probs of sampled tokens. The key is the name of the log-probs. The value contains one list per sequence.
    LogProbs: TypeAlias = Mapping[str, list[list[float]]]

__all__ = [
    "ALONE",
    "Advantages",
    "Batch",
    "Batches",
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
    """One tokenized example: a prompt and its completions. SFT rows have 1 completion, preference pairs have 2, and rows of
    online methods have G (the group size).

    Attributes:
        prompt_ids: Token ids shared by all completions. May be empty (plain language modeling).
        completions: Token ids of each completion, without the prompt.
        loss_masks: One list per completion. The values are 1 for tokens in the loss and 0 for other tokens.
        sequence_columns: Columns with one number per completion, e.g. ``{"advantages": [0.5, -0.5]}``.
        token_columns: Columns with one number per completion token, e.g. ``{"rollout_logp": [[-0.1, -2.0], [-0.3]]}``.
        model_kwargs: Additional arguments of the model's forward method, such as images, which are passed on unchanged.
        prompt_mask: Mask that is 1 for prompt tokens in the loss. A prompt token contributes to the loss only once,
            regardless of the number of completions. None: no prompt token is in the loss.
        pictures: Lists of images. The first list contains the images of the prompt. Each further list contains the images of
            one completion. The attribute ``start`` of an image is the index of its first placeholder token. Empty: no
            images.
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
        """Return a copy of the row with additional `sequence_columns`."""
        return replace(self, sequence_columns=self.sequence_columns | columns)

    def picture_spans(self, index: int, ids: Sequence[int]) -> list[tuple[Any, int, int]]:
        """Return the images of the prompt and of completion ``index``, each with the range of its placeholders in ``ids``.

        Args:
            index: Index of a completion.
            ids: Token ids of the prompt followed by this completion, possibly truncated at the end.
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
    """Consecutive tokens of a batch row that belong to the same sequences (an edge of a prefix tree). Segments that continue
    a segment directly follow it in the row.

    Attributes:
        row: Row of the batch.
        start, stop: Range of columns of the segment. Tokens of a segment attend to each other causally.
        end: Column after the last token of all segments that continue this segment. Tokens in ``[stop, end)`` attend to all
            tokens in ``[start, stop)``.
        parent: Index of the segment that this segment continues, or -1 for a root.
        position: Position id of the first token.
    """

    row: int
    start: int
    stop: int
    end: int
    parent: int
    position: int


class Leaf(NamedTuple):
    """End of a sequence in a prefix tree.

    Attributes:
        segment: Index of the segment that contains the last token of the sequence. The index is -1 for a sequence without
            tokens.
        prompt: Number of tokens of the prompt of the sequence.
        length: Number of tokens of prompt and completion together.
        row: Index of the `Row` of the sequence, among the rows that were collated together.
    """

    segment: int
    prompt: int
    length: int
    row: int


@dataclass(slots=True, frozen=True)
class Batch:
    """Inputs of one forward pass. Each batch row contains one or more prefix trees. In a prefix tree, sequences with a common
    prefix share the tokens of this prefix.

    A token attends to the earlier tokens of its own segment, and to all segments that this segment continues. Padded rows,
    packed documents, preference pairs, GRPO groups and branches of an agent's history are special cases of prefix trees.

    Attributes:
        input_ids: ``(B, T)`` int64 token ids.
        position_ids: ``(B, T)`` int64 positions. The positions of a segment continue the positions of its parent.
        seen_until: ``(B, T)`` int64 index of the column after the last token that attends to this token. 0 for padding.
            Column q attends to column k if ``k <= q < seen_until[k]``.
        predictor: ``(B, T)`` int64 index of the column whose hidden state predicts this token. The column is valid only
            where ``loss_mask`` is True.
        loss_mask: Bool tensor ``(B, T)``, True for tokens in the loss. A token in the loss always has a predictor.
        sequence: ``(B, T)`` int64 index in ``[0, S)`` of the sequence to which a completion token belongs. The index is -1
            for all other tokens.
        num_sequences: Number of sequences S.
        segments: Segments of all trees, ordered by row and column. Not a tensor.
        leaves: Ends of the S sequences, one `Leaf` per sequence.
        dense_mask: Whether attention uses a dense mask, for models that do not support segments (see `Layout`).
        origin: Index of each sequence in the flat list of collated completions.
        advantages: ``(S,)`` or ``(B, T)`` float32 advantages.
        old_logp: ``(B, T)`` float32 log-probs at the start of the update. None if the policy has not changed since the
            rollout.
        ref_logp: ``(B, T)`` float32 log-probs under the reference.
        rollout_logp: ``(B, T)`` float32 log-probs from the sampling engine.
        expected_grad: ``(B, T)`` gradient of the loss with respect to the log-probs, if it is known before the forward pass.
            The gradient can be a `TokenLoss` if the loss of each token depends only on the token's own log-prob.
        columns: Additional per-sequence ``(S,)`` or per-token ``(B, T)`` tensors by name, e.g. labels, margins and weights.
        model_kwargs: Additional arguments of the model's forward method, which are passed on unchanged.
        pictures: Tuples of row, column of the first placeholder, and image, in column order.
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
    expected_grad: Tensor | TokenLoss | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    pictures: list[tuple[int, int, Any]] = field(default_factory=list)
    # Number of tokens in the loss, and the version of ``loss_mask`` for which the number was computed. The number is cached,
    # because counting on a GPU synchronizes the host with the GPU.
    _counted: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy of the batch with all tensors on ``device``. If the tensors are on the CPU, the tokens in the loss
        are counted before the copy.
        """
        moved: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                moved[item.name] = {k: v.to(device) if hasattr(v, "to") else v for k, v in value.items()}
            elif hasattr(value, "to"):
                moved[item.name] = value.to(device)
        copy = replace(self, **moved)
        if self._counted is not None or not (self.loss_mask.is_cuda or self.loss_mask.is_meta):
            # The dataclass is frozen, but the copy is new and has no other references.
            object.__setattr__(copy, "_counted", (self.num_loss_tokens, copy.loss_mask._version))
        return copy

    def __getitem__(self, name: Any) -> Any:
        """Raise an error with advice for code that reads a batch as a dict of padded tensors."""
        raise ConfigError(
            f"inputs[{name!r}]: a Batch is not a dict of padded tensors. Fix: read its attributes (inputs.input_ids, "
            "inputs.loss_mask), or override objective(outputs, batch) (docs/hooks.md)."
        )

    def keys(self) -> list[str]:
        """Return a key, so that ``model(**inputs)`` calls `__getitem__`, which raises an error with advice."""
        return ["labels"]

    def grouped(self, values: Tensor, size: int) -> Tensor:
        """Reshape per-sequence values ``(S,)`` to ``(S / size, size)``, with one row per collated `Row` and one column per
        completion.

        The result is correct only for batches that were collated with ``whole_rows=True`` from rows with ``size``
        completions each.
        """
        order = sorted(range(self.num_sequences), key=self.origin.__getitem__)
        return values[order].view(-1, size)

    def spread_rows(self, values: Tensor, size: int) -> Tensor:
        """Repeat the ``(S / size,)`` values of collated `Row` objects for each of their sequences. Return ``(S,)`` values.
        `grouped` is the inverse.
        """
        order = sorted(range(self.num_sequences), key=self.origin.__getitem__)
        out = values.new_zeros(self.num_sequences)
        out[order] = values.repeat_interleave(size)
        return out

    @property
    def by_sequence(self) -> tuple[Tensor, Tensor, int]:
        """Tuple of ``loss_mask``, ``sequence`` and S. These are the arguments that follow the values in
        `posttrain.losses.reduce.sequence_sum`.
        """
        return self.loss_mask, self.sequence, self.num_sequences

    @property
    def real(self) -> Tensor:
        """``(B, T)`` bool mask that is False for padding."""
        return self.seen_until > 0

    @property
    def one_sequence_a_row(self) -> bool:
        """Whether every batch row is a single sequence, so that attention needs neither a dense mask nor segments."""
        return all(segment.parent < 0 and segment.start == 0 for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model computes, without padding."""
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def num_sequence_tokens(self) -> int:
        """Number of tokens of all sequences, counting a shared prompt once per sequence. The metric ``num_tokens`` is
        computed from this number.
        """
        return sum(leaf.length for leaf in self.leaves)

    @property
    def shares(self) -> Tensor | None:
        """``(S,)`` weights of sequences. The weight of a sequence is its fraction of the episode's tokens in the loss. None
        if every sequence is a separate episode.

        Each branch of an episode is a sequence. The weights of an episode's sequences sum to 1, so that an episode has the
        weight of one sequence in means.
        """
        return self.columns.get("share")

    @property
    def num_episodes(self) -> float:
        """Number of sequences, counting all branches of an episode together as one sequence."""
        shares = self.shares
        return float(self.num_sequences) if shares is None else float(shares.sum())

    @property
    def num_loss_tokens(self) -> int:
        """Number N of tokens in the loss."""
        if self._counted is not None and self._counted[1] == self.loss_mask._version:
            return self._counted[0]
        return int(self.loss_mask.sum())

    def path(self, sequence: int) -> list[range]:
        """Return the columns of a sequence's tokens in order, including the prompt."""
        segment, left, runs = self.leaves[sequence].segment, self.leaves[sequence].length, []
        while segment >= 0:
            current = self.segments[segment]
            runs.append(range(current.start, min(current.stop, current.start + left - current.position)))
            segment = current.parent
        return runs[::-1]


class Batches(list[Batch]):
    """List of the batches of one micro-batch, which a data loader yields. Unlike in TRL, a batch is not a dict of padded
    tensors.
    """

    def __getitem__(self, index: Any) -> Any:
        """Return the batch at an index. If the index is a string such as ``"input_ids"``, raise an error with advice."""
        if isinstance(index, str):
            raise ConfigError(
                f"{index!r}: the loader yields a list of Batch objects, not a dict of padded tensors. Fix: read attributes "
                "(batches[0].input_ids, batches[0].loss_mask). print(trainer.data_report()) shows which tokens are trained."
            )
        return super().__getitem__(index)

    def items(self) -> Any:
        """Raise an error with advice, because a list of batches has no items."""
        return self["items()"]

    keys = items  # Called by ``model(**batches)``.


@dataclass(slots=True)
class ModelOutputs:
    """Outputs of a forward pass that an objective can use.

    Attributes:
        logp: ``(B, T)`` float32 log-prob of each token; 0 outside ``loss_mask``.
        entropy: ``(B, T)`` float32 entropy in nats of the distribution that predicts each token; 0 outside
            ``loss_mask``.
        correct: Bool tensor ``(B, T)``, True if the token was the most likely token.
        mean_logit: ``(B, T)`` mean logit over the vocabulary at the position that predicts the token; 0 outside
            ``loss_mask``.
        collision: ``(B, T)`` values ``log sum_v p_v^2`` of the distribution that predicts the token; 0 outside
            ``loss_mask``.
        log_mass: ``(B, T)`` logarithm of the total probability of all tokens that the sampler's truncation keeps. The sampled
            token is always included. ``log_mass`` has no gradient.
        scores: ``(S,)`` reward-model scores.
        values: ``(B, T)`` value-head outputs.
        logits: ``(N, V)`` logits of the tokens in the loss, in the order of ``loss_mask``. None if they were not requested.
        aux_loss: Load-balancing loss of mixture-of-experts models, without its coefficient.
        compared: Results of a comparison with another model (distillation) by name. Each result is a tensor ``(N, ...)`` in
            the order of ``loss_mask``.
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


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss in which the term of each token depends only on the token's own log-prob.

    Attributes:
        terms: Function that computes the loss terms ``(n,)`` of n tokens from their log-probs ``(n,)`` and ``columns``.
        columns: Additional arguments of ``terms`` by name, with one number per token.
        scale: Gradient of the loss with respect to each token's term.
    """

    terms: Callable[..., Tensor]
    columns: dict[str, Tensor]
    scale: Tensor | None = None

    def __getitem__(self, index: slice | tuple[Tensor, ...]) -> TokenLoss:
        """Select tokens with an index, like in a tensor."""
        assert self.scale is not None
        return TokenLoss(self.terms, {name: column[index] for name, column in self.columns.items()}, self.scale[index])

    def gradient(self, logp: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to the log-probs ``logp`` of all tokens."""
        import torch

        with torch.enable_grad():
            logp = logp.detach().requires_grad_()
            return torch.autograd.grad(self.terms(logp, **self.columns), logp, self.scale)[0]


@dataclass(slots=True, frozen=True)
class LossTerms:
    """Loss terms before averaging. An objective returns an instance, and `posttrain.losses.reduce` averages its terms.

    Attributes:
        terms: Loss terms ``(B, T)`` of tokens or ``(S,)`` of sequences.
        mask: Bool mask with the shape of ``terms``. Terms are ignored where the mask is False.
        reduction: Name of the reduction, see `posttrain.losses.reduce`.
        sequence: ``(B, T)`` sequence index, needed by ``sequence_token`` and ``constant``.
        num_sequences: Number of sequences S.
        constant: Fixed length by which the reduction ``constant`` divides.
        count: Name of the count in `Denominators.named` by which the reduction ``token`` divides. None: the number of tokens
            in the loss.
        extra: Additional losses that are reduced separately, such as an entropy bonus. The values of additional losses are
            added to the value of this loss.
        metrics: Metrics to log.
        share: ``(S,)`` weights of sequences in means over sequences; see `Batch.shares`. None: all weights are 1.
        sums: Statistics that are summed over the passes of an optimizer step, for `Method.end_step`. None: no
            statistics.
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
    """Truncation of the sampling distribution by top-k, top-p and min-p; see `posttrain.losses.truncation`.

    Attributes:
        top_k: Keep the k most likely tokens; 0 is off.
        top_p: Keep the smallest set with this probability mass; 1 is off.
        min_p: Drop tokens whose probability is below this fraction of the most likely token's probability; None or 0 is off.
        never: Ids that are never sampled. Probabilities of all other tokens are computed without these ids.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    never: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Return whether the truncation excludes any token."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p or self.never)


WHOLE = Truncation()  # No truncation.
# Logit bias that gives a token probability 0. In contrast to minus infinity, the value can be represented in JSON.
NEVER = -1e9


@dataclass(slots=True, frozen=True)
class Sampling:
    """Settings with which an engine samples a completion.

    Attributes:
        max_new_tokens: Maximum number of completion tokens, including EOS.
        temperature: Number by which logits are divided. 0: greedy decoding.
        top_k: Keep the k most likely tokens; 0 is off.
        top_p: Keep the smallest set with this probability mass; 1 is off.
        min_p: Drop tokens whose probability is below this fraction of the most likely token's probability; None or 0 is off.
        repetition_penalty: Number that divides positive logits, and multiplies negative logits, of tokens that already
            occurred. 1: no penalty.
        stop_token_ids: Token ids that end a completion. The stop token is part of the completion.
        seed: Seed of the engine's random generator for one call. None: the generator continues with its current state.
        min_new_tokens: Minimum number of tokens before a stop token may be sampled.
        stop_strings: Texts that end a completion. Sampling ends after the token that completes one of these texts. Stop
            strings need an engine with a tokenizer.
        logit_bias: Pairs (token id, number). The number is added to the token's logit.
        no_repeat_ngram: Size of n-grams that must not occur twice in prompt and completion. 0: no limit.
        guide: Pair (kind, text) that completions must match: ``("regex", pattern)``, ``("json", schema)``,
            ``("grammar", EBNF)`` or ``("choices", lines)``; None is off.
        top_logps: Number of most likely tokens to return for every generated token, with their log-probs.
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
        """Truncation by the fields top_k, top_p and min_p."""
        return Truncation(self.top_k, self.top_p, self.min_p)

    def unseeded(self) -> dict[str, Any]:
        """Return the settings as a dict without the seed. Two such dicts are equal if the settings define the same
        distribution.
        """
        return {name: value for name, value in asdict(self).items() if name != "seed"}

    @property
    def left_out(self) -> Truncation:
        """Truncation by top_k, top_p and min_p, with the ids that ``logit_bias`` excludes as ``never``."""
        never = tuple(sorted({token for token, added in self.logit_bias if added <= NEVER}))
        return replace(self.truncation, never=never)


@dataclass(slots=True, frozen=True)
class SampleSettings:
    """Settings for sampling one rollout batch.

    Attributes:
        sampling: Settings of each call to the engine.
        mode: ``train`` or ``eval``.
        number: Number of the rollout batch, from which seeds are derived.
        group_size: Number of completions per prompt.
    """

    sampling: Sampling
    mode: str = "train"
    number: int = 0
    group_size: int = 1


class Prompt(list[int]):
    """Token ids of a prompt with its images. Two prompts are equal if their ids and their images are equal.

    Args:
        ids: Token ids with one placeholder per image feature.
        pictures: Images in the order of their placeholders. The attribute ``start`` of an image is the index of its first
            placeholder.
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
        """Return the images of a prompt. A plain list of ids has no images."""
        return ids.pictures if isinstance(ids, Prompt) else ()


@dataclass(slots=True, frozen=True)
class Request:
    """Request for ``n`` completions of one prompt. ``sampling`` contains the sampling settings of the request. None: the
    settings of the engine's call.

    ``pictures`` are the images of the prompt, for engines that support them (`Capabilities.pictures`); see `Prompt`.
    The last ``written`` tokens of the prompt are the beginning of an interrupted completion. Stop strings and guides take the
    ``written`` tokens into account.
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
        prompt_ids: Token ids of the prompt that the engine has completed.
        token_ids: Completion tokens, including the stop token.
        logp: Raw log-probability of each completion token. The distribution is that at ``temperature``, before penalties,
            bias, guide, top-k, top-p and min-p are applied. Empty if the engine returns no log-probs.
        finish_reason: ``stop`` for a stop token, ``length`` for the length limit, ``abort`` if sampling was interrupted.
        version: Version of the policy weights with which the completion was sampled.
        tool_mask: Mask that is 1 for tokens of the model, and 0 for tokens of a tool or environment. None if the model has
            sampled all tokens.
        text: Decoded completion. None if the completion was not decoded.
        processed_logp: Log-probability of each token under the distribution from which it was sampled. None if it is equal to
            ``logp``.
        top_logps: Most likely tokens of the raw distribution at each position, as pairs (token id, log-prob). None if they
            were not requested.
        spans: Pairs (version, number of tokens) if the weights changed during sampling. None if all tokens were sampled with
            ``version``.
        pictures: Images of the prompt.
        shown: Images from tools and environments, with their positions in ``token_ids``.
        branches: Other sequences of the same episode, i.e. branches of an agent's history. The prompts of these
            branches may contain this sequence. All sequences of an episode have the same reward and advantage. Together, they
            have the weight of one sequence.
        credit: Number by which the advantage of this sequence is multiplied.
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
    """Return the argument unchanged. Unlike a lambda, this function can be pickled for a worker process."""
    return values


@dataclass(slots=True, frozen=True)
class Ranks:
    """Number of processes of a run, and its collective operations. All ranks must call each of these functions.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        sum: Function that sums each number of a list over all processes.
        gather: Function that concatenates the lists of all processes, in the order of ranks.
        join: Function that concatenates tensors ``(n,)`` of all processes. n may differ between processes.
    """

    rank: int = 0
    size: int = 1
    sum: Callable[[list[float]], list[float]] = list
    gather: Callable[[list[Any]], list[Any]] = list
    join: Callable[[Tensor], Tensor] = _unchanged


ALONE = Ranks()  # A single process. Rollout workers use this value too.


@dataclass(slots=True, frozen=True)
class State:
    """Progress of a run that an objective can read.

    Attributes:
        step: Number of finished optimizer steps.
        epoch: Number of finished epochs, plus the finished fraction of the current epoch.
        ranks: All processes of the run.
        own: State that the method keeps between steps, see `posttrain.methods.base.Method.start`. None: no state.
    """

    step: int = 0
    epoch: float = 0.0
    ranks: Ranks = ALONE
    own: Any = None


@dataclass(slots=True, frozen=True)
class Advantages:
    """Result of `Method.advantages`.

    Attributes:
        values: ``(n,)`` advantages of the completions of all ranks, or ``(n, T)`` advantages of this rank's tokens. Token
            advantages are passed to the objective in ``token_columns``.
        totals: ``(n,)`` weighted rewards of the completions of all ranks, before any penalty. NaN if no reward function has
            scored the completion.
        start: Index in ``values`` of this rank's first completion.
        columns: Columns by name, with one number per completion of this rank. The objective reads them from `Batch.columns`.
        token_columns: Columns by name, with one list per sequence of this rank, such as log-probs that the objective needs.
        left_out: Indices of this rank's completions that are excluded from the loss.
        keep: One mask per completion of this rank, which is 1 for tokens in the loss. None: the loss masks do not change.
        unbounded: ``values`` before clipping to ``±MOST_ADVANTAGE`` (`posttrain.losses.advantages`). None: ``values`` were
            not clipped.
        group_std: ``(n / G,)`` standard deviation of each group of all ranks. None without groups.
        zero_std_share: Fraction of groups with zero standard deviation. None without groups.
        metrics: Metrics to log.
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
    """Problem that a check has found. The fields contain its code and severity, what is wrong, where, why it matters, and how
    to fix it. Secrets are removed from the texts.
    """

    code: str
    severity: Literal["info", "warning", "error"]
    what: str
    where: str
    why: str
    fix: str

    def __post_init__(self) -> None:
        for name, text in asdict(self).items():
            object.__setattr__(self, name, hide_secrets(text))
