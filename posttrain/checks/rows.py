"""What tokenised rows give away about the data: a code, the rows concerned, why it matters, how to fix it.

A *sequence* is a prompt with one completion (or a prompt alone, where completions are sampled later). Findings count rows;
their indices are those of the list that was given.
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

ROWS_NAMED = 8  # Row indices a finding names before it says "and n more".


@dataclass(frozen=True)
class TokenSequence:
    """One prompt with one completion.

    Attributes:
        row: Index of its row.
        completion: Which one of the row's; None for a prompt whose completion is sampled later.
        ids: Prompt and completion.
        trained: One bool a token; false on a first token, which nothing predicts.
        start: Where the completion starts; ``len(ids)`` when there is none.
    """

    row: int
    completion: int | None
    ids: list[int]
    trained: list[bool]
    start: int


@dataclass(frozen=True)
class RowSample:
    """Rows, and what the checks need to know of their tokenizer, each computed once.

    Attributes:
        rows: The rows; never changed.
        tokenizer: Decodes and encodes.
        limit: Tokens at which rows were cut, or None.
        numbers: Row numbers for messages; None: indices.
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
        return sequences_of(self.rows)

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
        added = self.tokenizer.added_tokens_decoder
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

    @cached_property
    def findings(self) -> list[Finding]:
        """What `RULES` find, at most one a code, the worst first."""
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
    """Every sequence of every row, in order; a trained prompt counts as context."""
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
    """The least, the middle, the mean, what 95 in 100 do not exceed, and the most; empty of nothing.

    >>> quantiles([3, 1, 2])
    {'min': 1, 'median': 2, 'mean': 2.0, 'p95': 3, 'max': 3}
    """
    ordered = sorted(sizes)
    if not ordered:
        return {}
    middle, mean, p95 = statistics.median(ordered), statistics.fmean(ordered), ordered[-(-95 * len(ordered) // 100) - 1]
    return {"min": ordered[0], "median": middle, "mean": mean, "p95": p95, "max": ordered[-1]}


def count_of(part: int, total: int) -> str:
    """``"3 of 40 rows (7.5 %)"``, ``"1,204 of 52,310 rows (2.3 %)"``."""
    share = f"{100 * part / total:.3g} %"
    return f"{part:,} of {total:,} row{'s' if total != 1 else ''} ({share})"


def where(rows: Sequence[int]) -> str:
    """``"rows 3, 5"``, and how many more where they are many."""
    named = ", ".join(map(str, rows[:ROWS_NAMED]))
    more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"


# Duplicates and identical pairs up to one row in a hundred are noise of a real data set.
SHARE_OF_NOISE = 0.01
# Tokens on either side of a boundary that are tokenised again: no merge reaches further than a word.
BOUNDARY_TOKENS = 8
DAMAGED = re.compile("[\ufffd\ud800-\udfff]")

# Rows that are concerned, and how bad that is.
Seen = tuple[Iterable[int], Severity]


def _outside(sample: RowSample) -> Seen:
    size = len(sample.tokenizer)
    return (s.row for s in sample.sequences if s.ids and not 0 <= min(s.ids) <= max(s.ids) < size), "error"


def _bos_double(sample: RowSample) -> Seen:
    """Two bos tokens side by side, or a second one further on where the template does not open turns with it."""
    bos = sample.tokenizer.bos_token_id
    several = [s for s in sample.sequences if bos is not None and s.ids.count(bos) > 1]
    once = bool(several) and not sample.bos_opens_turns and bos != sample.tokenizer.eos_token_id
    return (s.row for s in several if once or (bos, bos) in itertools.pairwise(s.ids)), "warning"


def _eos_double(sample: RowSample) -> Seen:
    """Two eos tokens with nothing but white space between them; a first token that is bos and eos in one ends nothing."""
    eos, bos = sample.tokenizer.eos_token_id, sample.tokenizer.bos_token_id

    def twice(ids: list[int]) -> bool:
        places = [i for i, token in enumerate(ids) if token == eos and (i or eos != bos)]
        return any(all(map(sample.blank, ids[a + 1 : b])) for a, b in itertools.pairwise(places))

    return (s.row for s in sample.sequences if s.ids.count(eos) > 1 and twice(s.ids)), "warning"


def _eos_untrained(sample: RowSample) -> Seen:
    """The last trained token, white space aside, ends no turn; rows cut at the limit are not counted."""
    asked = [s for s in sample.sequences if any(s.trained) and not sample.cut(s)]

    def last(s: TokenSequence) -> int | None:
        pairs = zip(reversed(s.ids), reversed(s.trained), strict=True)
        return next((token for token, trained in pairs if trained and not sample.blank(token)), None)

    bad = [s.row for s in asked if last(s) not in sample.ends]
    return bad, "error" if len(bad) == len(asked) else "warning"


def _untrained(sample: RowSample) -> Seen:
    asked = [s for s in sample.sequences if s.completion is not None and s.start < len(s.ids)]
    bad = [s.row for s in asked if not any(s.trained)]
    return bad, "error" if len(bad) == len(asked) else "warning"


def _empty(sample: RowSample) -> Seen:
    """A completion without tokens, or whose trained tokens are all special or white space."""

    def wordless(s: TokenSequence) -> bool:
        trained = list(itertools.compress(s.ids, s.trained))
        return bool(trained) and all(t in sample.special or sample.blank(t) for t in trained)

    return (
        s.row for s in sample.sequences if s.completion is not None and (s.start == len(s.ids) or wordless(s))
    ), "warning"


def _pair_identical(sample: RowSample) -> Seen:
    """Preference pairs with equal answers; groups that were sampled (they have advantages) may repeat themselves."""
    pairs = [
        (i, row.completions)
        for i, row in enumerate(sample.rows)
        if len(row.completions) == 2 and "advantages" not in row.sequence_columns
    ]
    bad = [index for index, (first, second) in pairs if list(first) == list(second)]
    return bad, "error" if len(bad) > SHARE_OF_NOISE * len(pairs) else "warning"


def _space_would_merge(sample: RowSample, sequence: TokenSequence) -> bool:
    """Whether a prompt ends in a space that the tokenizer would join to the word that follows."""
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
    """Replacement characters or lone surrogates; a character that the limit cut in half is not counted."""
    texts = ((s, sample.decode(s.ids)) for s in sample.sequences)
    return (s.row for s, t in texts if DAMAGED.search(t.strip("\ufffd") if sample.cut(s) else t)), "warning"


def _unknown(sample: RowSample) -> Seen:
    """The unknown token, where it has no other use."""
    tokenizer = sample.tokenizer
    unk = tokenizer.unk_token_id
    if unk is None or unk in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return (), "warning"
    return (s.row for s in sample.sequences if unk in s.ids), "warning"


def _duplicate(sample: RowSample) -> Seen:
    """Rows that equal an earlier one, token by token and mask by mask."""
    seen: set[Any] = set()
    bad = []
    for index, row in enumerate(sample.rows):
        lists = (row.completions, row.loss_masks, row.pictures)
        key = (tuple(row.prompt_ids), *(tuple(map(tuple, one)) for one in lists))
        if key in seen:
            bad.append(index)
        seen.add(key)
    return bad, "warning" if len(bad) > SHARE_OF_NOISE * len(sample.rows) else "info"


@dataclass(frozen=True)
class RowRule:
    """One thing that can be wrong with rows.

    Attributes:
        code: Of the register of checks, which has its name and title.
        look: Finds the rows and the severity.
        what: Follows the count of rows; ``{bos}``, ``{limit}`` and others are filled in.
        why: What comes of it.
        fix: What to do.
    """

    code: str
    look: Callable[[RowSample], Seen]
    what: str
    why: str
    fix: str


RULES: tuple[RowRule, ...] = (
    RowRule(
        "PT-D001", _outside, "hold token ids outside the vocabulary of {size}.",
        "the rows were tokenised with another tokenizer, or labels took the place of ids; a model fails on them, or trains "
        "embeddings that stand for nothing.",
        "tokenise the rows with this model's tokenizer.",
    ),
    RowRule(
        "PT-D002", _bos_double, "begin twice: {bos} stands more than once.",
        "text that already holds the token was tokenised with special tokens on, or prompt and completion each got one. A model "
        "has never seen two, and answers differently after them.",
        "give messages and let the chat template write special tokens, or strip the token from the text; tokenise completions "
        "with add_special_tokens=False.",
    ),
    RowRule(
        "PT-D003", _eos_double, "end twice: {eos} follows itself with only white space between.",
        "the text already ended with the token when another was appended, or rows were padded with it beforehand. The model "
        "learns to say it twice, and trained padding weighs on the loss.",
        "leave the token out of the text (it is appended once for you), strip trailing newlines after it, and give rows without "
        "padding.",
    ),
    RowRule(
        "PT-D004", _eos_untrained, "train no token that ends them (tokens that do: {ends}).",
        "the loss looks healthy, but the model is not taught to stop: at generation it runs to the length limit.",
        "let the loss mask include the end of each turn (inside {% generation %} for assistant_only_loss), or set eos_token to "
        "what the template ends a turn with.",
    ),
    RowRule(
        "PT-D005", _untrained, "train no token at all.",
        "they cost time and teach nothing; a batch of them has loss 0 or no loss at all. Usually the answer was cut off, or the "
        "mask marks none.",
        "raise max_length, shorten prompts, or check completion_mask, assistant_masks and labels.",
    ),
    RowRule(
        "PT-D006", _empty, "have an empty completion: no words are trained.",
        "the model is taught to say nothing. Empty answers, or a boundary between prompt and completion in the wrong place, are "
        "the usual reasons.",
        "drop rows with empty answers; if the answers are there, check where the prompt ends.",
    ),
    RowRule(
        "PT-D013", _pair_identical, "have a chosen and a rejected answer of the same tokens.",
        "such a pair prefers nothing: its loss is a constant and its gradient zero. Answers may differ as text and still be "
        "equal after truncation.",
        "remove pairs with equal answers; where they part only behind the limit, raise max_length.",
    ),
    RowRule(
        "PT-D008",
        lambda sample: ((s.row for s in sample.sequences if _space_would_merge(sample, s)), "warning"),
        "have a prompt that ends in a space of its own, which the tokenizer joins to the next word elsewhere.",
        "words are known to the model with their space in front; after a lone space it has to begin in a way it has hardly "
        "seen, and answers get worse.",
        "end prompts without a space and begin completions with it: 'The sky is' and ' blue'.",
    ),
    RowRule(
        "PT-D009", _damaged, "decode to text with replacement characters (U+FFFD) or lone surrogates.",
        "the file was read in a wrong encoding, or a character was cut in the middle; the model learns the damage.",
        "read the source as UTF-8 (or what it is) again, and cut text between characters, never between bytes.",
    ),
    RowRule(
        "PT-D010", _unknown, "hold {unk}: characters that the tokenizer does not know.",
        "what they said is lost to the model, and it learns to answer with the unknown token.",
        "normalise or remove those characters, or add them to the tokenizer and train the embeddings.",
    ),
    RowRule(
        "PT-D011",
        lambda sample: ((s.row for s in sample.sequences if sample.cut(s)), "warning"),
        "reach the limit of {limit} tokens.",
        "what lay beyond it was cut (a row of exactly that length is whole): its end, with the token that ends the answer, or "
        "under truncation_mode='keep_end' its beginning, with the prompt.",
        "raise max_length, split long rows, or drop them.",
    ),
    RowRule(
        "PT-D007", _duplicate, "repeat an earlier row exactly.",
        "repeats are trained several times an epoch and are memorised; one in a held-out split makes its score a lie.",
        "remove repeats before training, e.g. dataset.to_pandas().drop_duplicates(), unless the weight is meant.",
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
    """Every finding about ``rows``, the worst first; see `RowSample`."""
    return RowSample(rows, tokenizer, limit, numbers, {} if examples is None else examples).findings


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
    if not context.rows:
        return
    sample = context.sample or RowSample(context.rows, context.tokenizer, context.limit)
    for one in sample.findings:
        if one.code in context.parts.get("ignored_codes", frozenset()):
            continue
        stops = one.code == "PT-D005" or (one.code == "PT-D001" and _beyond_model(context))
        yield one if stops or one.severity != "error" else replace(one, severity="warning")


CONTROLS_READ = 1000  # Rows that are searched for control tokens.


@probe("data", "PT-D016")
def typed_control_tokens(context: Context) -> Iterable[Finding]:
    """Find control tokens that messages of users, systems and tools contain as text: they are tokenized as control tokens."""
    dataset, tokenizer = context.train_dataset, inner_tokenizer(context.tokenizer)
    words = {
        t.content for t in getattr(tokenizer, "added_tokens_decoder", {}).values() if t.special and len(t.content) > 1
    }
    names = [n for n in (*CONVERSATIONS, "prompt", *ANSWERS) if n in (getattr(dataset, "column_names", None) or ())]
    if not words or not names or not hasattr(dataset, "select"):  # A stream is read as it comes.
        return
    pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    found: dict[int, str] = {}
    for index, row in enumerate(first_rows(dataset, CONTROLS_READ, names)):
        turns = [turn for name in names for turn in _messages(row.get(name))]
        typed = (
            pattern.search(text)
            for turn in turns
            if isinstance(text := turn.get("content"), str) and not _answers([turn])
        )
        if match := next(filter(None, typed), None):
            found[index] = match.group()
    if found:
        shown = ", ".join(f"row {index} ({found[index]!r})" for index in list(found)[:3])
        yield finding(
            "PT-D016", "warning",
            f"{count_of(len(found), min(len(dataset), CONTROLS_READ))} have control tokens in the text of a message that is not "
            f"the assistant's: {shown}.",
            "the training set",
            "the tokenizer reads such text as control tokens, so its author can end a turn or begin one of another role.",
            "remove these tokens from the text before the conversation is rendered, or leave these rows out.",
        )  # fmt: skip


def _messages(value: object) -> list[Mapping[str, Any]]:
    return [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []


def _beyond_model(context: Context) -> bool:
    """Whether an id has no embedding: a tokenizer may know fewer tokens than the model has rows."""
    text = text_of(context.model_config)
    size = None if text is None else text.vocab_size
    ids = (token for row in context.rows for part in (row.prompt_ids, *row.completions) for token in part)
    return size is None or any(not 0 <= token < size for token in ids)


ROW_CODES = ("PT-D030", "PT-D031", "PT-D032")
CONVERSATIONS = ("messages", "conversations")
WHOLE = (*CONVERSATIONS, "text")  # Each is a row by itself.
ANSWERS = ("completion", "chosen", "rejected", "reference")
SAID = ("content", "value", "tool_calls", "reasoning_content", "thinking")  # What a turn may say, by its key.
SPEAKERS = frozenset({"system", "user", "assistant", "tool", "developer", *ROLES})


def columns_of(
    columns: Sequence[str], *, prompts_only: bool, unread: Collection[str] = (), ids: Collection[str] = TOKENIZED
) -> list[str]:
    """The columns whose content decides whether a row can be trained; none where rows hold token ids.

    Args:
        columns: Of the dataset.
        prompts_only: Whether completions are sampled, so that other columns are the reward functions' business.
        unread: Columns of other tasks.
        ids: Columns of token ids that the method reads in place of text.
    """
    if set(columns) & set(ids):
        return []
    wanted = ("prompt",) if prompts_only else (*CONVERSATIONS, "prompt", *ANSWERS, "text", "label")
    return [name for name in wanted if name in columns and name not in unread]


def fault(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Why a row cannot be trained: nothing in a column that is needed, or a message without a role; "" where it can.

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
            continue  # A prompt that both answers begin with is taken from them; a row needs one form, not all.
        if value is None:
            return f"no `{name}`"
        if isinstance(value, list):
            if not value:
                return f"empty `{name}`"
            if not all(isinstance(turn, Mapping) and (turn.get("role") or turn.get("from")) for turn in value):
                return f"a message of `{name}` without a role"
    return ""


def is_open(row: Mapping[str, Any], filled: bool) -> bool:
    """Whether a row's prompt is empty for an environment to fill; ``filled`` says that there is one."""
    return filled and row.get("prompt") == [{"role": "user", "content": ""}]


def doubt(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """What makes a row unlikely to be meant: nothing an assistant says, an odd turn, a blank answer, two equal answers.

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
    """A role that no template knows, or a turn in which nothing is said; an empty system message is common, and harmless."""
    role = turn.get("role") or turn.get("from")
    if role not in SPEAKERS:
        return f"the role {role!r}"
    if role in ("system", "developer") or any(_filled(turn.get(name)) for name in SAID):
        return ""
    return f"a turn of the {role} without content"


def _answers(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the assistant says or calls something."""
    return any(
        ROLES.get(role := turn.get("role") or turn.get("from"), role) == "assistant"
        and any(_filled(turn.get(name)) for name in SAID)
        for turn in turns
    )


def _filled(value: object) -> bool:
    return bool(value.strip()) if isinstance(value, str) else bool(value)


def answers_of(value: object) -> str:
    """Text of an answer or prompt: messages one after the other with their roles, text as it is."""
    if isinstance(value, list):
        return "\n".join(f"{t.get('role') or t.get('from')}: {t.get('content') or t.get('value') or ''}" for t in value)
    return "" if value is None else str(value)


# Rows that are written down for the user -----------------------------------------------------------------------------

SUSPECTS = "suspect_pairs.jsonl"


def write_lines(folder: str | None, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines into the run's folder."""
    path = Path(folder or ".").expanduser() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def note_suspects(folder: str | None, reason: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put pairs into ``suspect_pairs.jsonl``, in place of what stands there for the same reason.

    Args:
        folder: Of the run.
        reason: Why they are suspected.
        rows: Number and texts.
    """
    path = Path(folder or ".").expanduser() / SUSPECTS
    # Not splitlines: a text may hold other line ends.
    there = list(filter(None, path.read_text(encoding="utf-8").split("\n"))) if path.is_file() else []
    kept = [line for line in map(json.loads, there) if line["reason"] != reason]
    if there or rows:
        write_lines(folder, SUSPECTS, [*kept, *({"reason": reason, **row} for row in rows)])
