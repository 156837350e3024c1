"""Summaries of tokenized rows for a terminal or an HTML file, with statistics and colored text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from posttrain.checks.rows import TokenSequence, quantiles, sequences_of
from posttrain.errors import DataError
from posttrain.extensions.images.picture import Picture
from posttrain.report.templates import environment
from posttrain.types import Finding, Row
from posttrain.values import visible

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

TEMPLATES = Path(__file__).with_name("templates")

BINS = 12
# Sequences above the 99th percentile share the last bin if the maximum length is more than TAIL times this percentile.
TAIL = 3
ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
# Maximum number of tokens per row on a terminal (about one screen). For a longer row, the middle is omitted.
SCREEN_TOKENS = 400
FILE_TOKENS = 2000  # Maximum number of tokens per row in a file (about ten screens).
BAR = 40
STYLES = {  # Each key is (trained, special).
    (True, False): "bold green",
    (False, False): "dim",
    (True, True): "bold magenta underline",
    (False, True): "dim magenta",
}
SEVERITIES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}


@dataclass(frozen=True)
class Piece:
    """Text of one token, or of several tokens that encode one character together.

    Attributes:
        text: Decoded text.
        ids: Token ids.
        trained: Whether the tokens contribute to the loss.
        role: Role of a special token, for example ``"eos, pad"`` or ``"special"``. Empty for ordinary text.
    """

    text: str
    ids: tuple[int, ...]
    trained: bool
    role: str = ""


@dataclass(frozen=True)
class ShownSequence:
    """A sequence that a summary shows: a prompt with one completion.

    Attributes:
        row, completion: Numbers of the row and of the completion. ``completion`` is None if the row has only a prompt.
        completions: Number of completions of the row.
        pieces: Pieces of text that form the sequence.
        tokens, trained: Number of tokens, and number of tokens that contribute to the loss.
        bos, eos: Number of bos tokens, and number of eos tokens.
        codes: Codes of the findings for which the sequence is an example.
        pictures: Images of the sequence, in reading order.
    """

    row: int
    completion: int | None
    completions: int
    pieces: list[Piece]
    tokens: int
    trained: int
    bos: int
    eos: int
    codes: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class SpecialToken:
    """Number of occurrences of a special token in the rows.

    Attributes:
        text, id, role: Text, id and role of the token.
        total, trained: Number of occurrences in all sequences, and number of occurrences that contribute to the loss.
        least, most: Minimum and maximum number of occurrences in a sequence.
    """

    text: str
    id: int
    role: str
    total: int
    trained: int
    least: int
    most: int


@dataclass(frozen=True)
class Bin:
    """Bin of a histogram: ``count`` sequences have from ``low`` to ``high`` tokens, inclusive."""

    low: int
    high: int
    count: int

    @property
    def span(self) -> str:
        """Range of lengths of the bin, as text."""
        return f"{self.low}" if self.low == self.high else f"{self.low}–{self.high}"


@dataclass(frozen=True)
class Summary:
    """Summary of a list of tokenized rows, as the model receives them.

    Attributes:
        title: Title with the command and the data.
        rows: Number of rows.
        sequences: Number of sequences (a prompt with one completion) over all rows.
        prompts_only: Whether rows have no completions, because completions are sampled during training.
        tokens, trained_tokens: Number of tokens, and number of tokens that contribute to the loss, in all sequences. The
            first token of a sequence never contributes, because no token precedes it.
        lengths: Statistics of the number of tokens per sequence: ``min``, ``median``, ``mean``, ``p95`` and ``max``.
        histogram: Histogram of lengths. All bins have equal width, except the last bin if there are outliers.
        limit: Number of tokens to which sequences are truncated. None: no limit.
        truncated: Number of truncated sequences. If the number is unknown, it is the number of sequences that are at
            least as long as the limit.
        duplicates: Number of rows that are equal to an earlier row.
        batch_size: Number of rows per batch that ``padding_share`` assumes.
        padding_share: Fraction of padding, from 0 to 1, if shuffled batches were padded to their longest sequence.
        special: Special tokens in the rows, most frequent first.
        shown: Sequences to show as text.
        findings: Findings of the checks.
        images: Text with the number of images and of image tokens. Empty if rows have no images.
    """

    title: str
    rows: int
    sequences: int
    prompts_only: bool
    tokens: int
    trained_tokens: int
    lengths: dict[str, float]
    histogram: list[Bin]
    limit: int | None
    truncated: int
    duplicates: int
    batch_size: int
    padding_share: float
    special: list[SpecialToken]
    shown: list[ShownSequence]
    findings: list[Finding]
    images: str = ""

    @property
    def trained_share(self) -> float:
        """Fraction of tokens that contribute to the loss."""
        return self.trained_tokens / max(self.tokens, 1)

    @property
    def truncated_share(self) -> float:
        """Fraction of sequences that were truncated."""
        return self.truncated / self.sequences


def summarise(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    truncated: int | None = None,
    findings: Sequence[Finding] = (),
    show: int = 8,
    numbers: Sequence[int] | None = None,
    examples: Mapping[str, int] | None = None,
    batch_size: int = 8,
    title: str = "rows",
) -> Summary:
    """Summarize tokenized rows of any method: lengths, special tokens, padding, findings and example texts.

    Args:
        rows: Tokenized rows, at least one.
        tokenizer: Tokenizer of the rows.
        limit: Number of tokens to which sequences were truncated. None: no limit.
        truncated: Number of truncated sequences. None: count the sequences that are at least as long as the limit.
        findings: Findings of the checks.
        show: Number of evenly spaced rows to show as text.
        numbers: Row number of each row for its title. None: the index of the row.
        examples: Mapping from codes of findings to the index of an example row. These rows are also shown.
        batch_size: Number of rows per batch. The fraction of padding depends on it.
        title: Title of the summary.

    Raises:
        DataError: There are no rows.
    """
    if not rows:
        raise DataError("the list of rows is empty. Fix: pass at least one row.")
    flat = sequences_of(rows)
    sizes = [len(item.ids) for item in flat]
    roles = _roles(tokenizer)
    keys = Counter(repr((row.prompt_ids, row.completions, row.loss_masks, row.pictures)) for row in rows)
    if truncated is None:
        truncated = 0 if limit is None else sum(size >= limit for size in sizes)
    wanted = {len(rows) * k // min(show, len(rows)) for k in range(min(show, len(rows)))}
    codes: dict[int, tuple[str, ...]] = {}
    for code, row in (examples or {}).items():
        codes[row] = (*codes.get(row, ()), code)
    shown = [
        _shown(item, rows[item.row], tokenizer, roles, codes.get(item.row, ()), numbers)
        for item in flat
        if item.row in wanted | set(codes)
    ]
    return Summary(
        title=title,
        rows=len(rows),
        sequences=len(flat),
        prompts_only=all(item.completion is None for item in flat),
        tokens=sum(sizes),
        trained_tokens=sum(sum(item.trained) for item in flat),
        lengths=quantiles(sizes),
        histogram=histogram(sizes),
        limit=limit,
        truncated=truncated,
        duplicates=len(rows) - len(keys),
        batch_size=batch_size,
        padding_share=_padding_share(flat, len(rows), batch_size),
        special=_special_tokens(flat, tokenizer, roles),
        shown=shown,
        findings=list(findings),
        images=_images(rows),
    )


def _images(rows: Sequence[Row]) -> str:
    counts = [image.count for row in rows for part in row.pictures for image in part]
    if not counts:
        return ""
    pictured, sizes = sum(any(row.pictures) for row in rows), quantiles(counts)
    return (
        f"{len(counts):,} in {pictured:,} rows, {sizes['median']:,g} tokens each (median; 95 % have up to "
        f"{sizes['p95']:,}; maximum {sizes['max']:,}); each is encoded once for all answers of its row"
    )


def histogram(sizes: Sequence[int]) -> list[Bin]:
    """Count lengths in bins of equal width. If a few sequences are much longer than all others, they share the last bin.

    >>> [(bin.span, bin.count) for bin in histogram([3, 3, 4])]
    [('3', 2), ('4', 1)]
    """
    low, high = min(sizes), max(sizes)
    usual = sorted(sizes)[-(-99 * len(sizes) // 100) - 1]
    if high > TAIL * usual:
        far = [size for size in sizes if size > usual]
        return [*histogram([size for size in sizes if size <= usual]), Bin(min(far), high, len(far))]
    width = -(-(high - low + 1) // BINS)
    counts = Counter((size - low) // width for size in sizes)
    edges = range(low, high + 1, width)
    return [Bin(edge, min(edge + width - 1, high), counts[k]) for k, edge in enumerate(edges)]


def _padding_share(flat: list[TokenSequence], rows: int, batch_size: int) -> float:
    """Compute the fraction of padding if the rows were read in shuffled batches and padded to the longest sequence."""
    sizes: dict[int, list[int]] = {}
    for item in flat:
        sizes.setdefault(item.row, []).append(len(item.ids))
    order = list(range(rows))
    random.Random(0).shuffle(order)
    real = padded = 0
    for start in range(0, rows, batch_size):
        batch = [size for index in order[start : start + batch_size] for size in sizes[index]]
        real += sum(batch)
        padded += max(batch) * len(batch)
    return 1 - real / padded if padded else 0.0


# Special tokens and text ------------------------------------------------------------------------------------------------


def _roles(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the roles of each special token by its id. A token can have several roles."""
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
    uses: dict[int, list[str]] = {i: [] for i in special}
    for role in ROLES:
        token = getattr(tokenizer, f"{role}_token_id", None)
        if token is not None:
            uses.setdefault(token, []).append(role)
    return {i: ", ".join(names) or "special" for i, names in uses.items()}


def _special_tokens(flat: list[TokenSequence], tokenizer: Tokenizer, roles: dict[int, str]) -> list[SpecialToken]:
    counts = [Counter(i for i in item.ids if i in roles) for item in flat]
    trained = Counter(i for item in flat for i, flag in zip(item.ids, item.trained, strict=True) if flag)
    totals = sum(counts, Counter())
    # List bos and eos even if they do not occur, because their absence can be a mistake.
    listed = set(totals) | {i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None}
    tokens = [
        SpecialToken(
            str(tokenizer.convert_ids_to_tokens(i)),
            i,
            roles[i],
            totals[i],
            trained[i],
            min(count[i] for count in counts),
            max(count[i] for count in counts),
        )
        for i in listed
    ]
    return sorted(tokens, key=lambda token: (-token.total, token.id))


def _shown(
    item: TokenSequence,
    row: Row,
    tokenizer: Tokenizer,
    roles: dict[int, str],
    codes: tuple[str, ...],
    numbers: Sequence[int] | None,
) -> ShownSequence:
    pieces: list[Piece] = []
    at, spans = 0, row.picture_spans(item.completion or 0, item.ids)
    for number, (image, start, end) in enumerate(spans, 1):
        pieces += pieces_of(item.ids[at:start], item.trained[at:start], tokenizer, roles)
        pieces.append(Piece(image.picture.label(number, image.count), tuple(item.ids[start:end]), False, "image"))
        at = end
    return ShownSequence(
        row=item.row if numbers is None else numbers[item.row],
        codes=codes,
        completion=item.completion,
        completions=len(row.completions),
        pieces=[*pieces, *pieces_of(item.ids[at:], item.trained[at:], tokenizer, roles)],
        pictures=tuple(image.picture for image, *_ in spans),
        tokens=len(item.ids),
        trained=sum(item.trained),
        bos=item.ids.count(tokenizer.bos_token_id),
        eos=item.ids.count(tokenizer.eos_token_id),
    )


# Pieces of text ------------------------------------------------------------------------------------------------------


def pieces_of(ids: list[int], trained: list[bool], tokenizer: Tokenizer, roles: dict[int, str]) -> Iterator[Piece]:
    """Yield the text of each token.

    The text of a token can depend on the previous token, for example on whether it starts with a space. It can also be a
    part of a character. Therefore, each piece is the difference between two decoded texts, and tokens are collected until
    their characters are complete.
    """
    size = len(tokenizer)
    # Whether a token gets its own piece instead of being merged with its neighbors.
    whole = [token in roles or not 0 <= token < size for token in ids]
    before: list[int] = []
    pending: list[int] = []
    for position, (token, flag) in enumerate(zip(ids, trained, strict=True)):
        if whole[position]:
            yield _named(token, flag, tokenizer, roles)
            before = [token] if 0 <= token < size else []
            continue
        pending.append(token)
        text = tokenizer.decode(before + pending, skip_special_tokens=False)
        after = position + 1
        last = after == len(ids) or whole[after] or bool(trained[after]) != bool(flag)
        if last or not text.endswith("\ufffd"):
            start = len(tokenizer.decode(before, skip_special_tokens=False))
            yield Piece(text[start:], tuple(pending), bool(flag))
            before, pending = pending, []


def _named(token: int, trained: bool, tokenizer: Tokenizer, roles: dict[int, str]) -> Piece:
    if token in roles:
        return Piece(str(tokenizer.convert_ids_to_tokens(token)), (token,), bool(trained), roles[token])
    return Piece(f"[id {token}]", (token,), bool(trained), "not in the vocabulary")


def elide(pieces: list[Piece], most: int) -> tuple[list[Piece], int, list[Piece]]:
    """Return the first pieces, the number of tokens in the omitted middle, and the last pieces. Nothing is omitted if there
    are at most ``most`` pieces.

    The last part is twice as long as the first part, because most problems are at the end of a row.

    >>> elide([Piece(c, (0,), False) for c in "abcdef"], 3)[1]
    3
    """
    if len(pieces) <= most:
        return pieces, 0, []
    head = most // 3
    tail = most - head
    hidden = pieces[head:-tail]
    return pieces[:head], sum(len(piece.ids) for piece in hidden), pieces[-tail:]


# Texts shared by both renderings -----------------------------------------------------------------------------------------


def facts(summary: Summary) -> dict[str, str]:
    """Return the statistics of a summary, as texts by label. The terminal and the HTML file show them."""
    lengths = summary.lengths
    each = " (completions are sampled during training)" if summary.prompts_only else ""
    lines = {
        "rows": f"{summary.rows:,}" + (f" with {summary.sequences:,} sequences" * (summary.sequences > summary.rows)),
        "tokens": f"{summary.tokens:,}{each}",
        "length": ", ".join(f"{name} {value:,.4g}" for name, value in lengths.items()),
        "padding": f"{summary.padding_share:.1%} if shuffled batches of {summary.batch_size} rows were padded",
        "duplicates": f"{summary.duplicates:,} of the rows",
    }
    if summary.images:
        lines["images"] = summary.images
    if not summary.prompts_only:
        lines["trained"] = f"{summary.trained_tokens:,} tokens, {summary.trained_share:.1%}"
    if summary.limit is not None:
        lines["truncated"] = (
            f"{summary.truncated:,} sequences ({summary.truncated_share:.1%}) at the limit of {summary.limit:,} tokens"
        )
    return lines


def row_title(shown: ShownSequence) -> str:
    """Return the title of a sequence with the numbers of its row and completion, and its number of tokens."""
    which = f"row {shown.row}"
    if shown.completions > 1 and shown.completion is not None:
        which += f", completion {shown.completion + 1} of {shown.completions}"
    trained = "prompt only" if shown.completion is None else f"{shown.trained} trained"
    codes = f" ({', '.join(shown.codes)})" if shown.codes else ""
    return f"{which}: {shown.tokens} tokens, {trained}, {shown.bos} bos, {shown.eos} eos{codes}"


# On a terminal and in a file -----------------------------------------------------------------------------------------


def to_console(summary: Summary, console: Console | None = None) -> None:
    """Print a summary. If the terminal has no colors, trained text is enclosed in ``[[ ]]``."""
    console = console if console is not None else Console()
    marked = console.color_system is None
    console.print(Text(visible(summary.title), style="bold"))
    for shown in summary.shown:
        console.print(_row(shown, marked))
    console.print(_legend(marked))
    console.print(Group(Text("\nlengths in tokens", style="bold"), _histogram(summary.histogram)))
    console.print(_facts_table(summary))
    console.print(_special(summary))
    console.print(_findings(summary))


def _row(shown: ShownSequence, marked: bool) -> Panel:
    head, hidden, tail = elide(shown.pieces, SCREEN_TOKENS)
    text = _text(head, marked)
    if hidden:
        text.append(f"\n... {hidden:,} tokens omitted ...\n", style="italic dim")
        text.append_text(_text(tail, marked))
    return Panel(text, title=Text(row_title(shown)), title_align="left", border_style="dim")


def _text(pieces: list[Piece], marked: bool) -> Text:
    text = Text()
    for trained, run in groupby(pieces, key=lambda piece: piece.trained):
        text.append("[[" if marked and trained else "")
        for special, part in groupby(run, key=lambda piece: bool(piece.role)):
            words = visible("".join(piece.text for piece in part))
            text.append(words.replace("\n", "↵\n"), style=STYLES[trained, special])
        text.append("]]" if marked and trained else "")
    return text


def _legend(marked: bool) -> Text:
    if marked:
        return Text("[[trained text]]  all other text is context")
    names = {(True, False): "trained", (False, False): "context"}
    names |= {(False, True): "special token", (True, True): "special token, trained"}
    return Text("  ").join(Text(name, style=STYLES[key]) for key, name in names.items())


def _histogram(bins: list[Bin]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for justify in ("right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    most = max(item.count for item in bins)
    for item in bins:
        length = max(1, round(BAR * item.count / most)) if item.count else 0
        table.add_row(item.span, Text("█" * length, style="cyan"), str(item.count))
    return table


def _facts_table(summary: Summary) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, value in facts(summary).items():
        table.add_row(label, Text(value))
    return table


def _special(summary: Summary) -> Table:
    table = Table(title="special tokens", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 1))
    for column in ("token", "role"):
        table.add_column(column, header_style="dim")
    for column in ("id", "total", "trained", "per sequence"):
        table.add_column(column, justify="right", header_style="dim")
    for token in summary.special:
        span = str(token.least) if token.least == token.most else f"{token.least}-{token.most}"
        cells = (visible(token.text), token.role, str(token.id), f"{token.total:,}", f"{token.trained:,}", span)
        table.add_row(*map(Text, cells))
    return table


def _findings(summary: Summary) -> Group:
    if not summary.findings:
        return Group(Text("\nno findings: the checks found no problems in these rows", style="green"))
    parts: list[Text] = [Text("\nfindings", style="bold")]
    for finding in summary.findings:
        head = Text.assemble(
            (finding.severity, SEVERITIES[finding.severity]), " ", (finding.code, "bold"), " ", visible(finding.what)
        )
        parts.append(head)
        for label, value in (("where", finding.where), ("why", finding.why), ("fix", finding.fix)):
            parts.append(Text.assemble((f"  {label}: ", "dim"), visible(value)))
    return Group(*parts)


def to_html(summary: Summary) -> str:
    """Return a summary as an HTML page."""
    rows = [
        (row_title(shown), [image.thumbnail() for image in shown.pictures], *elide(shown.pieces, FILE_TOKENS))
        for shown in summary.shown
    ]
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    template = environment(TEMPLATES).get_template("inspect.html.jinja")
    return template.render(summary=summary, facts=facts(summary), rows=rows, style=style)
