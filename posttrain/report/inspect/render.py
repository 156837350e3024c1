"""A summary of rows on a terminal, or as one HTML file without scripts that loads nothing from elsewhere."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from posttrain.report.inspect.summary import Piece, Shown, Summary, elide, facts, row_title, visible
from posttrain.report.templates import TEMPLATES, environment

__all__ = ["to_console", "to_html"]

SCREEN = 400  # Tokens of a row shown on a terminal before its middle is left out: about a screen.
MOST = 2000  # The same in a file: some ten screens.
BAR = 40
STYLES = {  # (trained, special)
    (True, False): "bold green",
    (False, False): "dim",
    (True, True): "bold magenta underline",
    (False, True): "dim magenta",
}
SEVERITIES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}


def to_console(summary: Summary, console: Console | None = None) -> None:
    """Print a summary; without colours, trained text stands in ``[[ ]]``."""
    console = console if console is not None else Console()
    marked = console.color_system is None
    console.print(Text(visible(summary.title), style="bold"))
    for shown in summary.shown:
        console.print(_row(shown, marked))
    console.print(_legend(marked))
    console.print(Group(Text("\nlengths in tokens", style="bold"), _histogram(summary)))
    console.print(_facts_table(summary))
    console.print(_special(summary))
    console.print(_findings(summary))


def _row(shown: Shown, marked: bool) -> Panel:
    head, hidden, tail = elide(shown.pieces, SCREEN)
    text = _text(head, marked)
    if hidden:
        text.append(f"\n... {hidden:,} tokens left out ...\n", style="italic dim")
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
        return Text("[[trained text]]  everything else is context")
    names = {(True, False): "trained", (False, False): "context"}
    names |= {(False, True): "special token", (True, True): "special token, trained"}
    return Text("  ").join(Text(name, style=STYLES[key]) for key, name in names.items())


def _histogram(summary: Summary) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    most = max(item.count for item in summary.histogram)
    for item in summary.histogram:
        length = max(1, round(BAR * item.count / most)) if item.count else 0
        span = f"{item.low}" if item.low == item.high else f"{item.low}-{item.high}"
        table.add_row(span, Text("█" * length, style="cyan"), str(item.count))
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
    for column in ("token", "is"):
        table.add_column(column, header_style="dim")
    for column in ("id", "in all", "trained", "a sequence"):
        table.add_column(column, justify="right", header_style="dim")
    for token in summary.special:
        span = str(token.least) if token.least == token.most else f"{token.least}-{token.most}"
        cells = (visible(token.text), token.role, str(token.id), f"{token.total:,}", f"{token.trained:,}", span)
        table.add_row(*map(Text, cells))
    return table


def _findings(summary: Summary) -> Group:
    if not summary.findings:
        return Group(Text("\nno finding: the checks saw nothing wrong with these rows", style="green"))
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
    """The whole page."""
    rows = [(row_title(shown), *elide(shown.pieces, MOST)) for shown in summary.shown]
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    template = environment().get_template("inspect.html.jinja")
    return template.render(summary=summary, facts=facts(summary), rows=rows, style=style)
