"""What tokenised rows give away about the data: a code, the rows concerned, why it matters, how to fix it.

A *sequence* is a prompt with one completion (or a prompt alone, where completions are sampled later). Findings count rows;
their indices are those of the list that was given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from posttrain.checks.registry import Context, probe
from posttrain.data.chat import common_prefix, encode, render, terminal_token_ids
from posttrain.errors import PosttrainError
from posttrain.types import Finding, Row

__all__ = [
    "CHECKS",
    "RowContext",
    "TokenSequence",
    "check_rows",
    "count_of",
    "diverged_prompts",
    "dropped_rows",
    "where",
]


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


RARE = 0.01  # Duplicates and identical pairs up to one row in a hundred are noise of a real data set.
WINDOW = 8  # Tokens on either side of a boundary that are tokenised again: no merge reaches further than a word.
DAMAGED = re.compile("[\ufffd\ud800-\udfff]")


def bos_double(context: RowContext) -> Finding | None:
    """Two bos tokens side by side, or a second one further on where the template does not open turns with it."""
    bos = context.tokenizer.bos_token_id
    if bos is None:
        return None
    once = not context.bos_opens_turns and bos != context.tokenizer.eos_token_id
    bad = [
        s.row
        for s in context.sequences
        if any(a == b == bos for a, b in zip(s.ids, s.ids[1:], strict=False)) or (once and s.ids.count(bos) > 1)
    ]
    return context.finding(
        "PT-D002",
        "warning",
        bad,
        what=f"begin twice: {context.tokenizer.bos_token!r} (id {bos}) stands more than once.",
        why="text that already holds the token was tokenised with special tokens on, or prompt and completion each got one. "
        "A model has never seen two, and answers differently after them.",
        fix="give messages and let the chat template write special tokens, or strip the token from the text; tokenise "
        "completions with add_special_tokens=False.",
    )


def eos_double(context: RowContext) -> Finding | None:
    """Two eos tokens with nothing but white space between them."""
    eos = context.tokenizer.eos_token_id
    if eos is None:
        return None
    bad = [s.row for s in context.sequences if _ends_twice(context, s.ids, eos)]
    return context.finding(
        "PT-D003",
        "warning",
        bad,
        what=f"end twice: {context.tokenizer.eos_token!r} (id {eos}) follows itself with only white space between.",
        why="the text already ended with the token when another was appended, or rows were padded with it beforehand. The "
        "model learns to say it twice, and trained padding weighs on the loss.",
        fix="leave the token out of the text (it is appended once for you), strip trailing newlines after it, and give rows "
        "without padding.",
    )


def _ends_twice(context: RowContext, ids: list[int], eos: int) -> bool:
    last: int | None = None
    for position, token in enumerate(ids):
        if token == eos:
            if last is not None:
                return True
            # A first token that is bos and eos in one opens the text; it ends nothing.
            last = None if position == 0 and eos == context.tokenizer.bos_token_id else position
        elif not context.blank(token):
            last = None
    return False


def eos_untrained(context: RowContext) -> Finding | None:
    """The last trained token, white space aside, ends no turn; rows cut at the limit are not counted."""
    asked = [s for s in context.sequences if any(s.trained) and not context.cut(s)]
    bad = [s.row for s in asked if not _trains_its_end(context, s)]
    names = ", ".join(repr(context.decode([i])) for i in sorted(context.ends)) or "none known"
    return context.finding(
        "PT-D004",
        "error" if len(bad) == len(asked) else "warning",
        bad,
        what=f"train no token that ends them (tokens that do: {names}).",
        why="the loss looks healthy, but the model is not taught to stop: at generation it runs to the length limit.",
        fix="let the loss mask include the end of each turn (inside {% generation %} for assistant_only_loss), or set "
        "eos_token to what the template ends a turn with.",
    )


def _trains_its_end(context: RowContext, sequence: TokenSequence) -> bool:
    for token, trained in zip(reversed(sequence.ids), reversed(sequence.trained), strict=True):
        if trained and not context.blank(token):
            return token in context.ends
    return False


def duplicate(context: RowContext) -> Finding | None:
    """Rows that equal an earlier one, token by token and mask by mask."""
    seen: set[Any] = set()
    bad = []
    for index, row in enumerate(context.rows):
        key = (tuple(row.prompt_ids), tuple(map(tuple, row.completions)), tuple(map(tuple, row.loss_masks)))
        if key in seen:
            bad.append(index)
        seen.add(key)
    return context.finding(
        "PT-D007",
        "warning" if len(bad) > RARE * len(context.rows) else "info",
        bad,
        what="repeat an earlier row exactly.",
        why="repeats are trained several times an epoch and are memorised; one in a held-out split makes its score a lie.",
        fix="remove repeats before training, e.g. dataset.to_pandas().drop_duplicates(), unless the weight is meant.",
    )


def untrained_row(context: RowContext) -> Finding | None:
    """A completion in which no token is trained."""
    asked = [s for s in context.sequences if s.has_completion and s.start < len(s.ids)]
    bad = [s.row for s in asked if not any(s.trained)]
    return context.finding(
        "PT-D005",
        "error" if len(bad) == len(asked) else "warning",
        bad,
        what="train no token at all.",
        why="they cost time and teach nothing; a batch of them has loss 0 or no loss at all. Usually the answer was cut off, or "
        "the mask marks none.",
        fix="raise max_length, shorten prompts, or check completion_mask, assistant_masks and labels.",
    )


def pair_identical(context: RowContext) -> Finding | None:
    """Preference pairs with equal answers; groups that were sampled (they have advantages) may repeat themselves."""
    pairs = [
        (i, r) for i, r in enumerate(context.rows) if len(r.completions) == 2 and "advantages" not in r.sequence_columns
    ]
    bad = [index for index, row in pairs if list(row.completions[0]) == list(row.completions[1])]
    return context.finding(
        "PT-D013",
        "error" if len(bad) > RARE * len(pairs) else "warning",
        bad,
        what="have a chosen and a rejected answer of the same tokens.",
        why="such a pair prefers nothing: its loss is a constant and its gradient zero. Answers may differ as text and still be "
        "equal after truncation.",
        fix="remove pairs with equal answers; where they part only behind the limit, raise max_length.",
    )


def empty_completion(context: RowContext) -> Finding | None:
    """A completion without tokens, or whose trained tokens are all special or white space."""
    bad = []
    for s in context.sequences:
        said = [t for t, trained in zip(s.ids, s.trained, strict=True) if trained]
        nothing = bool(said) and all(t in context.special or context.blank(t) for t in said)
        if s.has_completion and (s.start == len(s.ids) or nothing):
            bad.append(s.row)
    return context.finding(
        "PT-D006",
        "warning",
        bad,
        what="have an empty completion: no words are trained.",
        why="the model is taught to say nothing. Empty answers, or a boundary between prompt and completion in the wrong place, "
        "are the usual reasons.",
        fix="drop rows with empty answers; if the answers are there, check where the prompt ends.",
    )


def truncated(context: RowContext) -> Finding | None:
    """Rows as long as the limit."""
    bad = [s.row for s in context.sequences if context.cut(s)]
    return context.finding(
        "PT-D011",
        "warning",
        bad,
        what=f"reach the limit of {context.limit} tokens.",
        why="what lay beyond it was cut (a row of exactly that length is whole); with the end goes the token that ends the "
        "answer.",
        fix="raise max_length, split long rows, or drop them.",
    )


def damaged_text(context: RowContext) -> Finding | None:
    """Replacement characters or lone surrogates in the decoded text; a character that the limit cut in half is not counted."""
    bad = []
    for sequence, text in zip(context.sequences, context.texts, strict=True):
        if DAMAGED.search(text.strip("\ufffd") if context.cut(sequence) else text):
            bad.append(sequence.row)
    return context.finding(
        "PT-D009",
        "warning",
        bad,
        what="decode to text with replacement characters (U+FFFD) or lone surrogates.",
        why="the file was read in a wrong encoding, or a character was cut in the middle; the model learns the damage.",
        fix="read the source as UTF-8 (or what it is) again, and cut text between characters, never between bytes.",
    )


def unknown_token(context: RowContext) -> Finding | None:
    """The unknown token, where it has no other use."""
    tokenizer = context.tokenizer
    unk = tokenizer.unk_token_id
    if unk is None or unk in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return None
    bad = [s.row for s in context.sequences if unk in s.ids]
    return context.finding(
        "PT-D010",
        "warning",
        bad,
        what=f"hold {tokenizer.unk_token!r} (id {unk}): characters that the tokenizer does not know.",
        why="what they said is lost to the model, and it learns to answer with the unknown token.",
        fix="normalise or remove those characters, or add them to the tokenizer and train the embeddings.",
    )


def id_out_of_range(context: RowContext) -> Finding | None:
    """Ids that the tokenizer does not have."""
    size = len(context.tokenizer)
    bad = [s.row for s in context.sequences if s.ids and not 0 <= min(s.ids) <= max(s.ids) < size]
    return context.finding(
        "PT-D001",
        "error",
        bad,
        what=f"hold token ids outside the vocabulary of {size}.",
        why="the rows were tokenised with another tokenizer, or labels took the place of ids; a model fails on them, or trains "
        "embeddings that stand for nothing.",
        fix="tokenise the rows with this model's tokenizer.",
    )


def whitespace_merge(context: RowContext) -> Finding | None:
    """A prompt that ends in a space which the tokenizer would join to the word that follows."""
    bad = [s.row for s in context.sequences if _space_would_merge(context, s)]
    return context.finding(
        "PT-D008",
        "warning",
        bad,
        what="have a prompt that ends in a space of its own, which the tokenizer joins to the next word elsewhere.",
        why="words are known to the model with their space in front; after a lone space it has to begin in a way it has hardly "
        "seen, and answers get worse.",
        fix="end prompts without a space and begin completions with it: 'The sky is' and ' blue'.",
    )


def _space_would_merge(context: RowContext, sequence: TokenSequence) -> bool:
    boundary = sequence.trained.index(True) if any(sequence.trained) else sequence.start
    if boundary == 0 or sequence.ids[boundary - 1] in context.special:
        return False
    tail = sequence.ids[max(0, boundary - WINDOW) : boundary]
    before = context.decode(tail)
    if not before.endswith((" ", "\t")):
        return False
    head = sequence.ids[boundary : boundary + WINDOW]
    joined = context.decode(tail + head) if head else before + "a"
    if not joined.startswith(before) or joined[len(before) :][:1].isspace():
        return False
    alone = context.encode(before)
    return common_prefix(alone, context.encode(joined)) < len(alone)


CHECKS: tuple[Callable[[RowContext], Finding | None], ...] = (
    id_out_of_range,
    bos_double,
    eos_double,
    eos_untrained,
    untrained_row,
    empty_completion,
    pair_identical,
    whitespace_merge,
    damaged_text,
    unknown_token,
    truncated,
    duplicate,
)


def check_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    limit: int | None = None,
    numbers: Sequence[int] | None = None,
    examples: dict[str, int] | None = None,
) -> list[Finding]:
    """Every finding about ``rows``, the worst first.

    Args:
        rows: Tokenised rows of any method; not changed.
        tokenizer: The tokenizer they were made with.
        limit: Tokens at which sequences were cut (``max_length``), or None.
        numbers: What to call each row, such as its place in the dataset; None: its index in ``rows``.
        examples: Gets the index of one row of each finding, by code.

    Returns:
        Findings, at most one a code; none when nothing was found.
    """
    context = RowContext(rows, tokenizer, limit, numbers, {} if examples is None else examples)
    found = [finding for check in CHECKS if (finding := check(context)) is not None]
    return sorted(found, key=lambda finding: ("error", "warning", "info").index(finding.severity))


def dropped_rows(before: int, after: int, *, reasons: str = "", missing: Sequence[int] = ()) -> Finding | None:
    """Rows that preparation left out, if any.

    Args:
        before: Rows given.
        after: Rows left.
        reasons: Why, with counts, where that is known.
        missing: Numbers of the rows that were left out, where they are known.
    """
    if after >= before:
        return None
    return Finding(
        "PT-D014",
        "warning",
        f"{count_of(before - after, before)} were left out when the rows were prepared{f': {reasons}' if reasons else ''}.",
        where(missing) if missing else "the sampled rows",
        "nothing is left in them to learn from once they are cut and masked (or, of a pair, compared); training leaves them out "
        "too.",
        "raise max_length, or check completion_only_loss, assistant_only_loss, the masks, and empty or equal answers.",
    )


def diverged_prompts(diverged: int, total: int) -> Finding | None:
    """Prompts that tokenise differently once their completion follows, if any; from what preparation counted."""
    if not diverged:
        return None
    return Finding(
        "PT-D015",
        "warning",
        f"{count_of(diverged, total)} have a prompt whose end tokenises differently once the completion follows.",
        "the sampled rows",
        "training joins the two over the boundary (a space at the prompt's end, a template that renders both otherwise), while "
        "at generation the prompt stands alone: the model starts from tokens it was not trained after.",
        "move the space to the start of the completion; for chat rows, see what the template does to the last turn.",
    )


@probe("data", *(f"PT-D{number:03}" for number in (*range(1, 12), 13)))
def sampled_rows(context: Context) -> Iterable[Finding]:
    """What a sample of the training set gives away; an error only where every row is untrained or has unknown ids."""
    beside = context.parts.get("beside_the_point", frozenset())
    for found in check_rows(context.rows, context.tokenizer, limit=context.limit) if context.rows else ():
        if found.code in beside:
            continue
        stops = found.code == "PT-D005" or (found.code == "PT-D001" and _beyond_model(context))
        yield found if stops or found.severity != "error" else replace(found, severity="warning")


def _beyond_model(context: Context) -> bool:
    """Whether an id has no embedding: a tokenizer may know fewer tokens than the model has rows."""
    config = context.model_config
    size = getattr(config.get_text_config() if config is not None else None, "vocab_size", None)
    ids = (token for row in context.rows for part in (row.prompt_ids, *row.completions) for token in part)
    return size is None or any(not 0 <= token < size for token in ids)
