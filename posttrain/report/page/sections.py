"""Sections of the page: state, findings, illnesses, completions and data of each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.report.page.markup import block, cell, chip, details, number, table, text
from posttrain.report.page.pathologies import Verdict
from posttrain.report.page.run import Run
from posttrain.report.page.samples import Sample

__all__ = ["completions", "data", "findings", "overview", "pathologies"]

LONGEST = 4000  # Characters of a completion before its middle is left out.
HEADLINE = {
    "loss": "loss",
    "reward": "reward",
    "rewards/accuracies": "preference accuracy",
    "rewards/margins": "margin",
    "mean_token_accuracy": "token accuracy",
    "kl": "KL (nats)",
    "entropy": "entropy (nats)",
    "completions/mean_length": "mean length",
    "grad_norm": "gradient norm",
    "num_tokens": "tokens seen",
}
STATES = {"running": "running", "finished": "finished", "stopped": "stopped before its end"}
STATUS = {"seen": "seen in", "clear": "not seen", "unknown": "not recorded"}


def overview(runs: Sequence[Run]) -> str:
    """A card a run: how far it is, what could not be read, its main numbers."""
    return '<div class="cards">' + "".join(_card(at, run) for at, run in enumerate(runs)) + "</div>"


def _card(at: int, run: Run) -> str:
    state = run.state
    if state == "stopped" and run.max_steps is not None and run.step >= run.max_steps:
        state = "finished"
    steps = f"step {run.step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "")
    progress = f'<progress max="{run.max_steps}" value="{run.step}" aria-label="{text(steps)}"></progress>'
    tiles = "".join(
        f"<div><dt>{text(label)}</dt><dd>{text(number(value))}</dd></div>"
        for name, label in HEADLINE.items()
        if (value := run.last(name)) is not None
    )
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in run.notes)
    minutes = _minutes(run)
    return (
        f'<section class="card" style="--run: var(--c{at % 8})" aria-label="{text(run.name)}"><h2><i class="dot"></i>'
        f"{text(run.name)} {chip(STATES[state], state)}</h2><p>{text(steps)}{text(minutes)}</p>"
        f'{progress if run.max_steps else ""}<dl class="tiles">{tiles}</dl>{notes}</section>'
    )


def _minutes(run: Run) -> str:
    times = [t for series in run.series.values() for t in series.times if math.isfinite(t)]
    if len(times) < 2:
        return ""
    minutes = (max(times) - min(times)) / 60
    return f" · {minutes / 60:.1f} h" if minutes >= 90 else f" · {minutes:.1f} min"


def findings(runs: Sequence[Run]) -> str:
    """Every kind of finding once, with the steps at which it was told."""
    parts = []
    for at, run in enumerate(runs):
        kinds: dict[tuple[str, str], list[Any]] = {}
        for mark in run.marks:
            kinds.setdefault((mark.finding.code, mark.finding.where), []).append(mark)
        order = ("error", "warning", "info")
        for marks in sorted(kinds.values(), key=lambda found: order.index(found[0].finding.severity)):
            parts.append(_finding(at, run, marks, several=len(runs) > 1))
    if parts:
        return "\n".join(parts)
    return "<p>None recorded: the checks that ran during training said nothing.</p>"


def _finding(at: int, run: Run, marks: Sequence[Any], *, several: bool) -> str:
    finding = marks[-1].finding
    steps = [mark.step for mark in marks]
    when = f"at step {steps[0]:,}" if len(steps) == 1 else f"{len(steps)} times, steps {steps[0]:,} to {steps[-1]:,}"
    whose = f'<i class="dot" style="--run: var(--c{at % 8})"></i>{text(run.name)} · ' if several else ""
    lines = "".join(
        f'<p><span class="soft">{label}:</span> {text(value)}</p>'
        for label, value in (("where", finding.where), ("why", finding.why), ("do", finding.fix))
        if value
    )
    return (
        f'<article class="finding {finding.severity}"><p>{whose}<b class="tone">{finding.severity}</b> '
        f'<code>{text(finding.code)}</code> <span class="soft">{text(when)}</span></p><p>{text(finding.what)}</p>{lines}'
        "</article>"
    )


def pathologies(runs: Sequence[Run], verdicts: Sequence[Sequence[Verdict]]) -> str:
    """Each illness with what it looks like, what to do, and what the runs show of it; those seen come first."""
    by_key: dict[str, list[tuple[int, Verdict]]] = {}
    for at, found in enumerate(verdicts):
        for verdict in found:
            by_key.setdefault(verdict.key, []).append((at, verdict))
    order = list(STATUS)
    cards = sorted(by_key.values(), key=lambda items: min(order.index(v.status) for _, v in items))
    known = [items for items in cards if any(v.status != "unknown" for _, v in items)]
    others = [items for items in cards if items not in known]
    parts = [_grid(runs, known)] if known else []
    if others:
        title = f"{len(others)} more, which the metrics of {'these runs' if len(runs) > 1 else 'this run'} cannot show"
        parts.append(details(title, _grid(runs, others), key="others"))
    return "\n".join(parts)


def _grid(runs: Sequence[Run], cards: Sequence[Sequence[tuple[int, Verdict]]]) -> str:
    return '<div class="illnesses">' + "".join(_illness(runs, items) for items in cards) + "</div>"


def _illness(runs: Sequence[Run], items: Sequence[tuple[int, Verdict]]) -> str:
    first = items[0][1]
    status = min((v.status for _, v in items), key=list(STATUS).index)
    label = "seen" if status == "seen" else STATUS[status]
    shown = "".join(
        f'<p class="evidence"><i class="dot" style="--run: var(--c{at % 8})"></i><b>{text(runs[at].name)}</b>, '
        f"{text(_steps(verdict))}: {text(verdict.evidence)}</p>"
        for at, verdict in items
        if verdict.status == "seen"
    )
    where = ", ".join(f"<code>{text(name)}</code>" for name in first.metrics)
    body = (
        f'<p><span class="soft">looks like:</span> {text(first.looks)}</p><p><span class="soft">do:</span> '
        f'{text(first.do)}</p><p><span class="soft">shows in:</span> {where}</p>'
    )
    return (
        f'<details class="illness {status}" data-keep="{text(first.key)}"{" open" if status == "seen" else ""}><summary>'
        f"{chip(label, status)} {text(first.title)}</summary><div>{shown}{body}</div></details>"
    )


def _steps(verdict: Verdict) -> str:
    spans = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in verdict.spans]
    more = f" and {len(spans) - 4} more" if len(spans) > 4 else ""
    return ("step " if len(spans) == 1 and "to" not in spans[0] else "steps ") + ", ".join(spans[:4]) + more


def completions(runs: Sequence[Run]) -> str:
    """Moments of each run, one shown at a time, moved through with a slider."""
    parts = [_timeline(at, run, several=len(runs) > 1) for at, run in enumerate(runs) if run.samples.moments]
    if not parts:
        return "<p>No completions were recorded: this method samples none, or log_completions is off.</p>"
    legend = (
        '<p class="soft legend">Shading, where log-probs were recorded: <span class="lp" style="--d:0">likely</span> '
        '<span class="lp" style="--d:0.5">p = 0.14</span> <span class="lp" style="--d:1">p ≤ 0.02: a surprise</span></p>'
    )
    shaded = any(s.logps for run in runs for _, groups in run.samples.moments for group in groups for s in group)
    return (legend if shaded else "") + "\n".join(parts)


def _timeline(at: int, run: Run, *, several: bool) -> str:
    moments = run.samples.moments
    last = len(moments) - 1
    name = f'<h3><i class="dot" style="--run: var(--c{at % 8})"></i>{text(run.name)}</h3>' if several else ""
    slider = (
        f'<div class="slider" data-timeline="{at}"><button type="button" data-move="-1" aria-label="earlier">◀</button>'
        f'<input type="range" min="0" max="{last}" value="{last}" aria-label="moment of the run">'
        '<button type="button" data-move="1" aria-label="later">▶</button><output></output></div>'
        if last
        else ""
    )
    shown = "".join(
        f'<div class="moment" data-label="step {step:,}"><h4>step {step:,}</h4>{"".join(map(_group, groups))}</div>'
        for step, groups in moments
    )
    return f'<div class="timeline" id="timeline-{at}">{name}{slider}{shown}</div>'


def _group(group: Sequence[Sample]) -> str:
    prompt = group[0].prompt
    cards = "".join(map(_completion, group))
    short = " ".join(prompt.split())
    title = "Prompt: " + (short if len(short) <= 160 else "… " + short[-160:])
    opened = details(title, block(_middle_out(prompt)), key=prompt[:80])
    return f'<div class="group">{opened}<div class="completions">{cards}</div></div>'


def _completion(sample: Sample) -> str:
    chips = []
    if sample.advantage is not None:
        tone = "good" if sample.advantage > 0 else "bad" if sample.advantage < 0 else ""
        chips.append(chip(f"advantage {sample.advantage:+.3g}", tone))
    for name, value in sample.scores.items():
        if value is None:
            chips.append(chip(f"{name} not scored", "faint"))
        elif isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            chips.append(chip(f"{name} {value:.4g}"))
        else:
            shown = str(value)
            chips.append(chip(f"{name}: {shown if len(shown) <= 60 else shown[:57] + '…'}", "faint"))
    body = _shaded(sample) if sample.logps else block(_middle_out(sample.completion) or "(empty)", "answer")
    return f'<article class="completion"><p>{"".join(chips)}</p>{body}</article>'


def _shaded(sample: Sample) -> str:
    pieces = []
    for token, logp in list(zip(sample.tokens, sample.logps, strict=True))[:LONGEST]:
        shown = text(token.replace("\n", "↵\n"))
        if not math.isfinite(logp):
            pieces.append(shown)
            continue
        depth = min(max(-logp / 4, 0.0), 1.0)
        title = f"log-prob {logp:.3f}, p {math.exp(min(logp, 0.0)):.3f}"
        pieces.append(f'<span class="lp" style="--d:{depth:.2f}" title="{title}">{shown}</span>')
    return f'<pre class="answer shaded">{"".join(pieces)}</pre>'


def _middle_out(value: str) -> str:
    if len(value) <= LONGEST:
        return value
    half = LONGEST // 2
    return f"{value[:half]}\n[… {len(value) - 2 * half:,} characters left out …]\n{value[-half:]}"


def data(runs: Sequence[Run]) -> str:
    """What the model saw in the first step: counts, lengths, and sequences with their mask."""
    parts = [_seen(run, several=len(runs) > 1) for run in runs if run.seen.get("sequences")]
    if parts:
        return '<p class="legend tokens"><span class="t">trained</span> <span>context</span></p>' + "\n".join(parts)
    return (
        "<p>The first batch of this run was not recorded. <code>posttrain inspect</code> shows rows before a run.</p>"
    )


def _seen(run: Run, *, several: bool) -> str:
    sequences = [item for item in run.seen["sequences"] if isinstance(item, Mapping)]
    facts = run.seen.get("facts")
    shown = "".join(
        f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in (facts.items() if isinstance(facts, Mapping) else ())
    )
    lengths = run.seen.get("lengths")
    name = f"<h3>{text(run.name)}</h3>" if several else ""
    bars = _histogram([int(n) for n in lengths if isinstance(n, int)]) if isinstance(lengths, list) else ""
    return f'{name}<dl class="facts">{shown}</dl>{bars}{"".join(map(_sequence, sequences[:8], range(8)))}'


def _sequence(item: Mapping[str, Any], at: int) -> str:
    pieces = [p for p in item.get("pieces", []) if isinstance(p, list) and len(p) == 2]
    body = "".join(
        f'<span class="t">{text(str(p[0]).replace(chr(10), "↵" + chr(10)))}</span>'
        if p[1]
        else f"<span>{text(str(p[0]).replace(chr(10), '↵' + chr(10)))}</span>"
        for p in pieces
    )
    title = str(item.get("title", "sequence"))
    return details(title, f'<div class="tokens">{body}</div>', open_=at < 2)


def _histogram(lengths: Sequence[int], bins: int = 10) -> str:
    if not lengths:
        return ""
    low, high = min(lengths), max(lengths)
    width = max(1, math.ceil((high - low + 1) / bins))
    rows = []
    counts = [(a, sum(a <= n < a + width for n in lengths)) for a in range(low, high + 1, width)]
    most = max(count for _, count in counts)
    for start, count in counts:
        bar = (
            f'<td class="wide"><span class="bar" style="width:{100 * count / most:.0f}%"></span></td>'
            if count
            else "<td></td>"
        )
        span = f"{start}" if width == 1 else f"{start}–{min(start + width - 1, high)}"
        rows.append([cell(span, "number"), bar, cell(count, "number")])
    return table(["tokens", "", "sequences"], rows, "lengths of sequences")
