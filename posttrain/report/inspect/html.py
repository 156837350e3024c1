"""A summary of rows as one HTML file: no script, nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

from html import escape

from posttrain.report.inspect.pieces import Piece, elide, visible
from posttrain.report.inspect.summary import Shown, Summary, facts, row_title

__all__ = ["to_html"]

MOST = 2000  # Tokens of a row shown before its middle is left out; some ten screens.

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f7f9; --line: #d9dde3; --text: #1d2229; --soft: #59626e;
  --trained: #d3f0d8; --trained-edge: #1a7f37; --special: #8250df; --bar: #3b82c4;
  --error: #c62828; --warning: #9a6700; --info: #0b63b8; }
@media (prefers-color-scheme: dark) {
  :root { --back: #13161b; --card: #1c2027; --line: #343a44; --text: #e4e7ec; --soft: #9aa4b1;
    --trained: #153a22; --trained-edge: #4ac26b; --special: #c39bff; --bar: #5aa2e0;
    --error: #ff7b72; --warning: #e3b341; --info: #79b8ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 1rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; }
.finding { border: 1px solid var(--line); border-left: 4px solid var(--tone); border-radius: 6px; background: var(--card);
  padding: .6rem .9rem; margin: .6rem 0; }
.finding p { margin: .15rem 0; } .finding .severity { color: var(--tone); font-weight: 600; }
.error { --tone: var(--error); } .warning { --tone: var(--warning); } .info { --tone: var(--info); }
.label { color: var(--soft); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); }
th, td { padding: .15rem 1.4rem .15rem 0; } .number { text-align: right; }
.scroll { overflow-x: auto; } .bars td:nth-child(2) { width: 24rem; }
.bar { display: block; height: .95rem; border-radius: 2px; background: var(--bar); min-width: 2px; }
code, .tokens { font-family: ui-monospace, SFMono-Regular, Consolas, monospace; font-size: .87rem; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; background: var(--card); }
summary { cursor: pointer; padding: .5rem .9rem; font-weight: 500; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; padding: .2rem .9rem .9rem; margin: 0; color: var(--soft); }
.t { background: var(--trained); color: var(--text); box-shadow: inset 0 -2px var(--trained-edge); }
.s { color: var(--special); font-weight: 600; } .legend span { padding: 0 .3rem; margin-right: 1rem; }
.gap { display: block; text-align: center; font-style: italic; padding: .4rem; }
"""


def to_html(summary: Summary) -> str:
    """The whole page."""
    title = escape(visible(summary.title))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join((_facts(summary), _findings(summary), _rows(summary), _histogram(summary), _special(summary)))
        + "\n</body>\n</html>\n"
    )


def _facts(summary: Summary) -> str:
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts(summary).items())
    return f'<dl class="facts">{items}</dl>'


def _findings(summary: Summary) -> str:
    parts = ["<h2>Findings</h2>"]
    if not summary.findings:
        parts.append("<p>None: the checks saw nothing wrong with these rows.</p>")
    for finding in summary.findings:
        lines = "".join(
            f'<p><span class="label">{label}:</span> {escape(visible(text))}</p>'
            for label, text in (("where", finding.where), ("why", finding.why), ("fix", finding.fix))
        )
        parts.append(
            f'<section class="finding {finding.severity}"><p><span class="severity">{finding.severity}</span> '
            f"<code>{escape(finding.code)}</code> {escape(visible(finding.what))}</p>{lines}</section>"
        )
    return "\n".join(parts)


def _rows(summary: Summary) -> str:
    legend = '<p class="legend tokens"><span class="t">trained</span><span>context</span>'
    legend += '<span class="s">special token</span><span class="s t">special token, trained</span></p>'
    return "\n".join(["<h2>What the model sees</h2>", legend, *map(_row, summary.shown)])


def _row(shown: Shown) -> str:
    head, hidden, tail = elide(shown.pieces, MOST)
    gap = f'<span class="gap">{hidden:,} tokens left out</span>' if hidden else ""
    text = "".join(map(_piece, head)) + gap + "".join(map(_piece, tail))
    return f'<details open><summary>{escape(row_title(shown))}</summary><div class="tokens">{text}</div></details>'


def _piece(piece: Piece) -> str:
    kinds = [name for name, holds in (("t", piece.trained), ("s", piece.role)) if holds]
    label = " ".join(map(str, piece.ids)) + (f": {piece.role}" if piece.role else "")
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    text = escape(visible(piece.text).replace("\n", "↵\n"))
    return f'<span{kind} title="{escape(label)}">{text}</span>'


def _histogram(summary: Summary) -> str:
    most = max(item.count for item in summary.histogram)
    lines = []
    for item in summary.histogram:
        span = f"{item.low}" if item.low == item.high else f"{item.low}–{item.high}"
        bar = f'<span class="bar" style="width: {100 * item.count / most:.1f}%"></span>' if item.count else ""
        lines.append(f'<tr><td class="number">{span}</td><td>{bar}</td><td class="number">{item.count}</td></tr>')
    head = '<tr><th class="number">tokens</th><th></th><th class="number">sequences</th></tr>'
    return f'<h2>Lengths</h2>\n<div class="scroll"><table class="bars">{head}{"".join(lines)}</table></div>'


def _special(summary: Summary) -> str:
    head = "<th>token</th><th>is</th>" + "".join(
        f'<th class="number">{name}</th>' for name in ("id", "in all", "trained", "a sequence")
    )
    lines = []
    for token in summary.special:
        span = str(token.least) if token.least == token.most else f"{token.least}–{token.most}"
        numbers = (str(token.id), f"{token.total:,}", f"{token.trained:,}", span)
        cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
        lines.append(
            f"<tr><td><code>{escape(visible(token.text))}</code></td><td>{escape(token.role)}</td>{cells}</tr>"
        )
    return f'<h2>Special tokens</h2>\n<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
