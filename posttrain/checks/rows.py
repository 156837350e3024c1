"""Checks of tokenized rows. A finding contains a code, the affected rows, the consequence, and the fix.

A *sequence* is a prompt with one completion, or only a prompt if completions are sampled later. Findings count rows. By
default, row numbers are indices into the checked list of rows.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.checks.registry import Context, Severity, finding, probe
from posttrain.data.chat import common_prefix, encode, inner_tokenizer, render, terminal_token_ids
from posttrain.data.formats import ROLES, TOKENIZED, first_rows
from posttrain.errors import PosttrainError
from posttrain.models.architecture import text_of
from posttrain.types import Finding, Row

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

# Maximum number of row numbers in a finding. Further rows are only counted.
ROWS_NAMED = 8


@dataclass(frozen=True)
class TokenSequence:
    """One completion with its prompt.

    Attributes:
        row: Index of the completion's row.
        completion: Index of the completion in its row, or None if the completion is sampled later.
        ids: Token ids of prompt and completion.
        trained: Whether each token contributes to the loss. The first token never contributes, because no token precedes it.
        start: Index of the first token of the completion. ``len(ids)`` if there is no completion.
    """

    row: int
    completion: int | None
    ids: list[int]
    trained: list[bool]
    start: int


@dataclass(frozen=True)
class RowSample:
    """Rows to check. Findings and some properties of the tokenizer are cached.

    Attributes:
        rows: The rows. They are never changed.
        tokenizer: Tokenizer of the rows.
        limit: Maximum number of tokens to which rows were truncated, or None.
        numbers: Row numbers for messages. If None, messages contain indices.
        examples: Mapping from codes to the index of one affected row, which the checks fill.
    """

    rows: Sequence[Row]
    tokenizer: Any
    limit: int | None = None
    numbers: Sequence[int] | None = None
    examples: dict[str, int] = field(default_factory=dict)
    _blank: dict[int, bool] = field(default_factory=dict)

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """All sequences of all rows, in order."""
        return sequences_of(self.rows)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Token ids that end a turn or a text."""
        try:
            return frozenset(terminal_token_ids(self.tokenizer))
        # The template may reject the conversation with which the end-of-turn token is determined.
        except PosttrainError:
            eos = self.tokenizer.eos_token_id
            return frozenset() if eos is None else frozenset({int(eos)})

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens, including those of the added vocabulary."""
        added = self.tokenizer.added_tokens_decoder
        return frozenset(self.tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    @cached_property
    def bos_opens_turns(self) -> bool:
        """Whether the chat template begins every turn with the bos token. ChatML does this if bos is ``<|im_start|>``."""
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        try:
            ids = self.encode(render(self.tokenizer, messages))
        except PosttrainError:
            return False
        return ids.count(self.tokenizer.bos_token_id) > 1

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text. Skip ids outside the vocabulary."""
        size = len(self.tokenizer)
        return self.tokenizer.decode([i for i in ids if 0 <= i < size], skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens."""
        return encode(self.tokenizer, [text], special=False)[0]

    def blank(self, token: int) -> bool:
        """Return whether a token consists only of whitespace."""
        if token not in self._blank:
            self._blank[token] = token not in self.special and not self.decode([token]).strip()
        return self._blank[token]

    def cut(self, sequence: TokenSequence) -> bool:
        """Return whether a sequence has the maximum length. Such a sequence was probably truncated."""
        return self.limit is not None and len(sequence.ids) >= self.limit

    @cached_property
    def findings(self) -> list[Finding]:
        """Findings of all `RULES`, most severe first. There is at most one finding per code."""
        findings = [finding for rule in RULES if (finding := self._finding(rule)) is not None]
        return sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.severity))

    def _finding(self, rule: RowRule) -> Finding | None:
        bad, severity = rule.look(self)
        rows = sorted(set(bad))
        if not rows:
            return None
        self.examples[rule.code] = rows[0]
        named = rows if self.numbers is None else [self.numbers[index] for index in rows]
        tokenizer = self.tokenizer
        values = {
            "bos": f"{tokenizer.bos_token!r} (id {tokenizer.bos_token_id})",
            "eos": f"{tokenizer.eos_token!r} (id {tokenizer.eos_token_id})",
            "unk": f"{tokenizer.unk_token!r} (id {tokenizer.unk_token_id})",
            "ends": ", ".join(repr(self.decode([i])) for i in sorted(self.ends)) or "none known",
            "limit": self.limit,
            "size": len(tokenizer),
        }
        what = f"{count_of(len(rows), len(self.rows))} {rule.what.format(**values)}"
        return Finding(rule.code, severity, what, where(named), rule.why, rule.fix)


def sequences_of(rows: Sequence[Row]) -> list[TokenSequence]:
    """Return all sequences of all rows, in order. Prompt tokens are treated as tokens without loss."""
    sequences = []
    for index, row in enumerate(rows):
        prompt = list(row.prompt_ids)
        if not row.completions:
            sequences.append(TokenSequence(index, None, prompt, [False] * len(prompt), len(prompt)))
        for number, (completion, mask) in enumerate(zip(row.completions, row.loss_masks, strict=True)):
            trained = [False] * len(prompt) + [bool(m) for m in mask]
            trained[:1] = [False] * len(trained[:1])
            sequences.append(TokenSequence(index, number, prompt + list(completion), trained, len(prompt)))
    return sequences


def quantiles(sizes: Iterable[int]) -> dict[str, float]:
    """Return minimum, median, mean, 95th percentile and maximum of values. If there are no values, return an empty dict.

    >>> quantiles([3, 1, 2])
    {'min': 1, 'median': 2, 'mean': 2.0, 'p95': 3, 'max': 3}
    """
    ordered = sorted(sizes)
    if not ordered:
        return {}
    middle, mean, p95 = statistics.median(ordered), statistics.fmean(ordered), ordered[-(-95 * len(ordered) // 100) - 1]
    return {"min": ordered[0], "median": middle, "mean": mean, "p95": p95, "max": ordered[-1]}


def count_of(part: int, total: int) -> str:
    """Format a count, e.g. ``"3 of 40 rows (7.5 %)"`` or ``"1,204 of 52,310 rows (2.3 %)"``."""
    share = f"{100 * part / total:.3g} %"
    return f"{part:,} of {total:,} row{'s' if total != 1 else ''} ({share})"


def where(rows: Sequence[int]) -> str:
    """Format row numbers, e.g. ``"rows 3, 5"``. If there are many rows, list the first ones and count the rest."""
    named = ", ".join(map(str, rows[:ROWS_NAMED]))
    more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"


# Up to this fraction of the rows, duplicates and identical pairs have a lower severity, because they are common in real
# datasets.
SHARE_OF_NOISE = 0.01
# Number of tokens before and after the end of the prompt that are tokenized again, to find tokens that merge at this
# position. A few tokens are enough, because tokenizers merge characters only within a word.
BOUNDARY_TOKENS = 8
DAMAGED = re.compile("[\ufffd\ud800-\udfff]")

# Type of a rule's result: the indices of the affected rows, and the severity of the finding.
Seen = tuple[Iterable[int], Severity]


def _outside(sample: RowSample) -> Seen:
    size = len(sample.tokenizer)
    return (s.row for s in sample.sequences if s.ids and not 0 <= min(s.ids) <= max(s.ids) < size), "error"


def _bos_double(sample: RowSample) -> Seen:
    """Find rows with two adjacent bos tokens. If the template does not begin every turn with bos, find rows with any later
    bos token too.
    """
    bos = sample.tokenizer.bos_token_id
    several = [s for s in sample.sequences if bos is not None and s.ids.count(bos) > 1]
    once = bool(several) and not sample.bos_opens_turns and bos != sample.tokenizer.eos_token_id
    return (s.row for s in several if once or (bos, bos) in itertools.pairwise(s.ids)), "warning"


def _eos_double(sample: RowSample) -> Seen:
    """Find rows with two eos tokens and only whitespace between them. If bos and eos are the same token, the first token is
    ignored.
    """
    eos, bos = sample.tokenizer.eos_token_id, sample.tokenizer.bos_token_id

    def twice(ids: list[int]) -> bool:
        places = [i for i, token in enumerate(ids) if token == eos and (i or eos != bos)]
        return any(all(map(sample.blank, ids[a + 1 : b])) for a, b in itertools.pairwise(places))

    return (s.row for s in sample.sequences if s.ids.count(eos) > 1 and twice(s.ids)), "warning"


def _eos_untrained(sample: RowSample) -> Seen:
    """Find rows whose last token in the loss is not an end token. From such rows, the model does not learn to stop. Trailing
    whitespace and truncated rows are ignored.
    """
    candidates = [s for s in sample.sequences if any(s.trained) and not sample.cut(s)]

    def last(s: TokenSequence) -> int | None:
        pairs = zip(reversed(s.ids), reversed(s.trained), strict=True)
        return next((token for token, trained in pairs if trained and not sample.blank(token)), None)

    bad = [s.row for s in candidates if last(s) not in sample.ends]
    return bad, "error" if len(bad) == len(candidates) else "warning"


def _untrained(sample: RowSample) -> Seen:
    candidates = [s for s in sample.sequences if s.completion is not None and s.start < len(s.ids)]
    bad = [s.row for s in candidates if not any(s.trained)]
    return bad, "error" if len(bad) == len(candidates) else "warning"


def _empty(sample: RowSample) -> Seen:
    """Find completions without tokens, and completions in which all tokens in the loss are special tokens or whitespace."""

    def wordless(s: TokenSequence) -> bool:
        trained = list(itertools.compress(s.ids, s.trained))
        return bool(trained) and all(t in sample.special or sample.blank(t) for t in trained)

    return (
        s.row for s in sample.sequences if s.completion is not None and (s.start == len(s.ids) or wordless(s))
    ), "warning"


def _pair_identical(sample: RowSample) -> Seen:
    """Find preference pairs with equal answers. Rows with advantages are ignored, because their answers are sampled."""
    pairs = [
        (i, row.completions)
        for i, row in enumerate(sample.rows)
        if len(row.completions) == 2 and "advantages" not in row.sequence_columns
    ]
    bad = [index for index, (first, second) in pairs if list(first) == list(second)]
    return bad, "error" if len(bad) > SHARE_OF_NOISE * len(pairs) else "warning"


def _space_would_merge(sample: RowSample, sequence: TokenSequence) -> bool:
    """Return whether a prompt ends with a space, and the tokenizer would merge this space with the next word."""
    boundary = sequence.trained.index(True) if any(sequence.trained) else sequence.start
    if boundary == 0 or sequence.ids[boundary - 1] in sample.special:
        return False
    tail = sequence.ids[max(0, boundary - BOUNDARY_TOKENS) : boundary]
    before = sample.decode(tail)
    if not before.endswith((" ", "\t")):
        return False
    head = sequence.ids[boundary : boundary + BOUNDARY_TOKENS]
    joined = sample.decode(tail + head) if head else before + "a"
    if not joined.startswith(before) or joined[len(before) :][:1].isspace():
        return False
    alone = sample.encode(before)
    return common_prefix(alone, sample.encode(joined)) < len(alone)


def _damaged(sample: RowSample) -> Seen:
    """Find rows with replacement characters or lone surrogates in their text. A replacement character from a character that
    truncation has split is ignored.
    """
    texts = ((s, sample.decode(s.ids)) for s in sample.sequences)
    return (s.row for s, t in texts if DAMAGED.search(t.strip("\ufffd") if sample.cut(s) else t)), "warning"


def _unknown(sample: RowSample) -> Seen:
    """Find rows that contain the unknown token. If the unknown token is also used as bos, eos or pad, return no rows."""
    tokenizer = sample.tokenizer
    unk = tokenizer.unk_token_id
    if unk is None or unk in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return (), "warning"
    return (s.row for s in sample.sequences if unk in s.ids), "warning"


def _duplicate(sample: RowSample) -> Seen:
    """Find rows with the same tokens and masks as an earlier row."""
    seen: set[Any] = set()
    bad = []
    for index, row in enumerate(sample.rows):
        lists = (row.completions, row.loss_masks, row.pictures)
        key = (tuple(row.prompt_ids), *(tuple(map(tuple, column)) for column in lists))
        if key in seen:
            bad.append(index)
        seen.add(key)
    return bad, "warning" if len(bad) > SHARE_OF_NOISE * len(sample.rows) else "info"


@dataclass(frozen=True)
class RowRule:
    """Rule for one kind of problem in tokenized rows.

    Attributes:
        code: Code in the registry of checks. The registry contains its name and title.
        look: Function that returns the indices of affected rows, and the severity of the finding.
        what: Text after the number of rows. Placeholders such as ``{bos}`` and ``{limit}`` are replaced.
        why: Consequence of the problem.
        fix: Advice for the user.
    """

    code: str
    look: Callable[[RowSample], Seen]
    what: str
    why: str
    fix: str


RULES: tuple[RowRule, ...] = (
    RowRule(
        "PT-D001", _outside, "have token ids outside the vocabulary of {size}.",
        "the rows were tokenized with another tokenizer, or contain labels instead of ids. The model fails on such ids, or "
        "trains embeddings that belong to no token.",
        "tokenize the rows with this model's tokenizer.",
    ),
    RowRule(
        "PT-D002", _bos_double, "contain {bos} more than once.",
        "the text already contained bos when special tokens were added, or bos was added to both prompt and completion. Models "
        "are not trained on texts with two bos tokens. With two bos tokens, their answers change.",
        "pass messages and let the chat template add special tokens, or remove the token from the text; tokenize completions "
        "with add_special_tokens=False.",
    ),
    RowRule(
        "PT-D003", _eos_double, "contain {eos} twice with only whitespace between.",
        "the text already ended with the token when another one was appended, or rows were padded with it beforehand. The model "
        "learns to generate the token twice, and padding counts in the loss.",
        "remove the token from the text (it is appended automatically), remove newlines after it, and pass rows without "
        "padding.",
    ),
    RowRule(
        "PT-D004", _eos_untrained, "have no trained end token (end tokens: {ends}).",
        "the loss looks normal, but the model does not learn to stop. Its completions continue to the length limit.",
        "include the end of each turn in the loss mask (inside {% generation %} for assistant_only_loss), or set eos_token to "
        "the token with which the template ends a turn.",
    ),
    RowRule(
        "PT-D005", _untrained, "have no trained token at all.",
        "such rows take time but have no gradient. A batch of such rows has loss 0 or no loss. The usual causes are an answer "
        "that was truncated, and an empty mask.",
        "increase max_length, shorten prompts, or check completion_mask, assistant_masks and labels.",
    ),
    RowRule(
        "PT-D006", _empty, "have an empty completion, in which no words are trained.",
        "the model learns to give empty answers. The usual causes are empty answers, and a wrong boundary after the prompt.",
        "remove rows with empty answers. If the rows have answers, check where the prompt ends.",
    ),
    RowRule(
        "PT-D013", _pair_identical, "have chosen and rejected answers with the same tokens.",
        "such a pair has a constant loss and no gradient. Answers that differ as text may be equal after truncation.",
        "remove pairs with equal answers. If they differ only beyond the limit, increase max_length.",
    ),
    RowRule(
        "PT-D008",
        lambda sample: ((s.row for s in sample.sequences if _space_would_merge(sample, s)), "warning"),
        "have a prompt that ends in a separate space token, although the tokenizer merges spaces with the next word.",
        "most words are tokenized together with the space before them. After a separate space, the model must continue with "
        "tokens that are rare at this position, which makes answers worse.",
        "end prompts without a space, and begin completions with the space: 'The sky is' and ' blue'.",
    ),
    RowRule(
        "PT-D009", _damaged, "decode to text with replacement characters (U+FFFD) or lone surrogates.",
        "the file was read with a wrong encoding, or a character was split. The model learns the damaged text.",
        "read the source again with the right encoding (usually UTF-8). Split text between characters, not between bytes.",
    ),
    RowRule(
        "PT-D010", _unknown, "contain {unk}, i.e. characters that the tokenizer cannot encode.",
        "the model does not receive these characters, and it learns to generate the unknown token.",
        "normalize or remove these characters, or add them to the tokenizer and train the embeddings.",
    ),
    RowRule(
        "PT-D011",
        lambda sample: ((s.row for s in sample.sequences if sample.cut(s)), "warning"),
        "reach the limit of {limit} tokens.",
        "longer text was truncated (a row of exactly this length may be complete). The end of the answer is missing, including "
        "the end token. With truncation_mode='keep_end', the beginning of the prompt is missing.",
        "increase max_length, split long rows (SFT with packing: packing_strategy='bfd_split' or 'wrapped'), or remove them.",
    ),
    RowRule(
        "PT-D007", _duplicate, "repeat an earlier row exactly.",
        "repeated rows are trained several times per epoch and are memorized. In a held-out split, they inflate the score.",
        "remove repeated rows, e.g. with dataset.to_pandas().drop_duplicates(), unless they are repeated on purpose.",
    ),
)  # fmt: skip


def check_rows(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    numbers: Sequence[int] | None = None,
    examples: dict[str, int] | None = None,
) -> list[Finding]:
    """Return all findings about ``rows``, most severe first. The documentation of `RowSample` describes the arguments."""
    return RowSample(rows, tokenizer, limit, numbers, {} if examples is None else examples).findings


def dropped_rows(before: int, after: int, *, reasons: str = "", missing: Sequence[int] = ()) -> Finding | None:
    """Return a finding about rows that preparation dropped. If no rows were dropped, return None.

    Args:
        before: Number of rows before preparation.
        after: Number of rows after preparation.
        reasons: Reasons with counts, if known.
        missing: Numbers of the dropped rows, if known.
    """
    if after >= before:
        return None
    return Finding(
        "PT-D014",
        "warning",
        f"{count_of(before - after, before)} were dropped during preparation{f': {reasons}' if reasons else ''}.",
        where(missing) if missing else "the sampled rows",
        "after truncation and masking, these rows have no trained token (or the answers of a pair are equal). Training drops "
        "them too.",
        "increase max_length, or check completion_only_loss, assistant_only_loss, the masks, and empty or equal answers.",
    )


def diverged_prompts(diverged: int, total: int) -> Finding | None:
    """Return a finding about prompts whose tokens differ with and without a completion after them. If there are no such
    prompts, return None.
    """
    if not diverged:
        return None
    return Finding(
        "PT-D015",
        "warning",
        f"{count_of(diverged, total)} have a prompt whose end is tokenized differently when the completion follows.",
        "the sampled rows",
        "in training, tokens merge at the boundary, because the prompt ends with a space or the template renders it differently. "
        "In generation, the prompt is tokenized alone, so it ends with tokens after which the model was never trained to write a "
        "completion.",
        "move the space to the start of the completion. For chat rows, check how the template renders the last turn.",
    )


@probe("data", *(f"PT-D{number:03}" for number in (*range(1, 12), 13)))
def sampled_rows(context: Context) -> Iterable[Finding]:
    """Check a sample of the training set. Findings are errors only if no row contributes to the loss, or if an id has no
    embedding.
    """
    if not context.rows:
        return
    sample = context.sample or RowSample(context.rows, context.tokenizer, context.limit)
    for issue in sample.findings:
        if issue.code in context.parts.get("ignored_codes", frozenset()):
            continue
        stops = issue.code == "PT-D005" or (issue.code == "PT-D001" and _beyond_model(context))
        yield issue if stops or issue.severity != "error" else replace(issue, severity="warning")


CONTROLS_READ = 1000  # Number of rows that are searched for control tokens.


@probe("data", "PT-D016")
def typed_control_tokens(context: Context) -> Iterable[Finding]:
    """Find control tokens in the text of user, system and tool messages. The tokenizer would encode such text as control
    tokens.
    """
    dataset, tokenizer = context.train_dataset, inner_tokenizer(context.tokenizer)
    words = {
        t.content for t in getattr(tokenizer, "added_tokens_decoder", {}).values() if t.special and len(t.content) > 1
    }
    names = [n for n in (*CONVERSATIONS, "prompt", *ANSWERS) if n in (getattr(dataset, "column_names", None) or ())]
    if not words or not names or not hasattr(dataset, "select"):  # Streams are not searched.
        return
    pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    tokens: dict[int, str] = {}
    for index, row in enumerate(first_rows(dataset, CONTROLS_READ, names)):
        turns = [turn for name in names for turn in _messages(row.get(name))]
        typed = (
            pattern.search(text)
            for turn in turns
            if isinstance(text := turn.get("content"), str) and not _answers([turn])
        )
        if match := next(filter(None, typed), None):
            tokens[index] = match.group()
    if tokens:
        shown = ", ".join(f"row {index} ({tokens[index]!r})" for index in list(tokens)[:3])
        yield finding(
            "PT-D016", "warning",
            f"{count_of(len(tokens), min(len(dataset), CONTROLS_READ))} have control tokens in the text of a message that is not "
            f"the assistant's: {shown}.",
            "the training set",
            "the tokenizer encodes such text as control tokens, so the author of the text can end a turn, or begin another turn.",
            "remove these tokens from the text before the conversation is rendered, or remove these rows.",
        )  # fmt: skip


def _messages(value: object) -> list[Mapping[str, Any]]:
    return [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []


def _beyond_model(context: Context) -> bool:
    """Return whether a row contains a token id without an embedding. Ids beyond the tokenizer's vocabulary can have an
    embedding, because some models have more embeddings than the tokenizer has tokens.
    """
    text = text_of(context.model_config)
    size = None if text is None else text.vocab_size
    ids = (token for row in context.rows for part in (row.prompt_ids, *row.completions) for token in part)
    return size is None or any(not 0 <= token < size for token in ids)


ROW_CODES = ("PT-D030", "PT-D031", "PT-D032")
CONVERSATIONS = ("messages", "conversations")
WHOLE = (*CONVERSATIONS, "text")  # Columns that contain the complete text of a row.
ANSWERS = ("completion", "chosen", "rejected", "reference")
# Keys of a message that can hold its content.
SAID = ("content", "value", "tool_calls", "reasoning_content", "thinking")
SPEAKERS = frozenset({"system", "user", "assistant", "tool", "developer", *ROLES})


def columns_of(
    columns: Sequence[str], *, prompts_only: bool, unread: Collection[str] = (), ids: Collection[str] = TOKENIZED
) -> list[str]:
    """Return the names of the columns that every row needs. If rows contain token ids, return no names.

    Args:
        columns: Columns of the dataset.
        prompts_only: Whether completions are sampled. In this case, only the prompt is needed, and the columns that reward
            functions read.
        unread: Columns that belong to datasets of other tasks and are not needed.
        ids: Names of columns with token ids. If the dataset has one of them, text columns are not read.
    """
    if set(columns) & set(ids):
        return []
    wanted = ("prompt",) if prompts_only else (*CONVERSATIONS, "prompt", *ANSWERS, "text", "label")
    return [name for name in wanted if name in columns and name not in unread]


def fault(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return the reason why a row cannot be used for training, e.g. that a required column is empty. If the row can be used,
    return "".

    >>> fault({"messages": []}, ["messages"]), fault({"messages": [{"role": "user", "content": "hi"}]}, ["messages"])
    ('empty `messages`', '')
    >>> fault({"messages": None, "text": "a"}, ["messages", "text"]), fault({"text": None}, ["text"])
    ('', 'no `text`')
    """
    pair = bool(row.get("chosen")) and bool(row.get("rejected"))
    whole = any(row.get(name) is not None for name in WHOLE if name in columns)
    for name in columns:
        value = row.get(name)
        if value is None and (
            (name == "prompt" and pair) or whole or (name in WHOLE and row.get("prompt") is not None)
        ):
            # The prompt may be missing if it can be extracted from the two answers. If several columns are alternatives, one
            # of them is enough.
            continue
        if value is None:
            return f"no `{name}`"
        if isinstance(value, list):
            if not value:
                return f"empty `{name}`"
            if not all(isinstance(turn, Mapping) and (turn.get("role") or turn.get("from")) for turn in value):
                return f"a message of `{name}` without a role"
    return ""


def is_open(row: Mapping[str, Any], filled: bool) -> bool:
    """Return whether the prompt of a row is empty and an environment will write it. The argument ``filled`` is True if there
    is an environment.
    """
    return filled and row.get("prompt") == [{"role": "user", "content": ""}]


def doubt(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return the reason why a row is probably wrong: no assistant turn, a blank answer, equal answers, or an odd turn. If
    there is no reason, return "".

    >>> doubt({"messages": [{"role": "user", "content": "hi"}]}, ["messages"])
    'no assistant turn in `messages`'
    >>> doubt({"prompt": [{"role": "usr", "content": "hi"}]}, ["prompt"])
    "the role 'usr' in `prompt`"
    """
    for name in columns:
        value = row.get(name)
        odd = next(filter(None, map(_odd_turn, value)), "") if isinstance(value, list) else ""
        if odd:
            return f"{odd} in `{name}`"
        if isinstance(value, str) and name != "prompt" and not value.strip():
            return f"blank `{name}`"
        if isinstance(value, list) and name != "prompt" and not _answers(value):
            return f"no assistant turn in `{name}`"
    if "chosen" in columns and row.get("chosen") == row.get("rejected"):
        return "equal `chosen` and `rejected`"
    return ""


def _odd_turn(turn: Mapping[str, Any]) -> str:
    """Describe a turn with an unknown role or without content. For normal turns and empty system messages, return ""."""
    role = turn.get("role") or turn.get("from")
    if role not in SPEAKERS:
        return f"the role {role!r}"
    if role in ("system", "developer") or any(_filled(turn.get(name)) for name in SAID):
        return ""
    return f"a turn of the {role} without content"


def _answers(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an assistant turn has content or a tool call."""
    return any(
        ROLES.get(role := turn.get("role") or turn.get("from"), role) == "assistant"
        and any(_filled(turn.get(name)) for name in SAID)
        for turn in turns
    )


def _filled(value: object) -> bool:
    return bool(value.strip()) if isinstance(value, str) else bool(value)


def answers_of(value: object) -> str:
    """Return an answer or a prompt as text. For a list of messages, the text contains their roles."""
    if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
        return "\n".join(f"{t.get('role') or t.get('from')}: {t.get('content') or t.get('value') or ''}" for t in value)
    return "" if value is None else str(value)


# Files that list rows for the user -----------------------------------------------------------------------------------------

SUSPECTS = "suspect_pairs.jsonl"


def write_lines(folder: str | None, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON Lines file to the folder of the run."""
    path = Path(folder or ".").expanduser() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def note_suspects(folder: str | None, reason: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write pairs to ``suspect_pairs.jsonl``. They replace earlier lines with the same reason.

    Args:
        folder: Folder of the run.
        reason: Reason why the pairs are suspicious.
        rows: Row numbers and texts.
    """
    path = Path(folder or ".").expanduser() / SUSPECTS
    # A text may contain line separators other than \n, so splitlines would split it.
    there = list(filter(None, path.read_text(encoding="utf-8").split("\n"))) if path.is_file() else []
    remaining = [line for line in map(json.loads, there) if line["reason"] != reason]
    if there or rows:
        write_lines(folder, SUSPECTS, [*remaining, *({"reason": reason, **row} for row in rows)])
