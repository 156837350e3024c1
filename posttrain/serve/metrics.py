"""Counters of the server, as Prometheus reads them (text format 0.0.4)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.serve.service import RolloutService

__all__ = ["Metrics", "exposition"]

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
HELP = {
    "requests": "Requests answered, by path and status.",
    "prompts": "Prompts completed.",
    "completions": "Completions returned.",
    "scored_sequences": "Sequences scored.",
    "repeated_requests": "Requests answered from the answer to an earlier one of the same id.",
    "updates": "Weight updates that ended, by result.",
    "update_bytes": "Bytes of weights received over HTTP.",
    "worker_deaths": "Workers that ended by themselves.",
    "generate_seconds": "Seconds from a generation request to its completions.",
    "generated_tokens": "Tokens written.",
    "running": "Completions that are being written.",
    "waiting": "Completions that are not begun.",
    "admitted_requests": "Requests that wait or run.",
    "weight_version": "Version of the weights.",
    "weights_valid": "1 while the weights are whole.",
    "paused": "1 while generation is paused.",
    "asleep": "Level of sleep, 0 awake.",
    "lease_held": "1 while a trainer holds the lease.",
    "worker_up": "1 while a worker lives.",
}


class Metrics:
    """Counts by name and labels, and histograms of seconds."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self.histograms: dict[str, list[float]] = {}

    def count(self, name: str, by: float = 1, **labels: Any) -> None:
        """Add to a counter."""
        self.counts[name, tuple(sorted((k, str(v)) for k, v in labels.items()))] += by

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram: a count for each bound and one for all, and the sum."""
        line = self.histograms.setdefault(name, [0.0] * (len(SECONDS) + 2))
        for i, bound in enumerate(SECONDS):
            line[i] += seconds <= bound
        line[-2] += 1
        line[-1] += seconds

    def requests(self) -> dict[str, int]:
        """Answered requests by status."""
        found: dict[str, int] = defaultdict(int)
        for (name, labels), value in self.counts.items():
            if name == "requests":
                found[dict(labels)["status"]] += int(value)
        return dict(found)


def _line(name: str, labels: tuple[tuple[str, str], ...], value: float) -> str:
    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inner = ",".join(f'{k}="{escape(v)}"' for k, v in labels)
    return f"posttrain_{name}{{{inner}}} {value:g}" if inner else f"posttrain_{name} {value:g}"


def exposition(service: RolloutService) -> str:
    """All metrics of a server."""
    lines: list[str] = []

    def head(name: str, kind: str, full: str) -> None:
        lines.extend((f"# HELP posttrain_{full} {HELP[name]}", f"# TYPE posttrain_{full} {kind}"))

    counts = dict(service.metrics.counts)
    for rank in service.ranks.all:
        counts["generated_tokens", (("rank", str(rank.rank)),)] = rank.tokens
    for name in sorted({key[0] for key in counts}):
        head(name, "counter", f"{name}_total")
        lines += [_line(f"{name}_total", labels, v) for (n, labels), v in sorted(counts.items()) if n == name]
    for name, line in service.metrics.histograms.items():
        head(name, "histogram", name)
        bounds = [*(f"{bound:g}" for bound in SECONDS), "+Inf"]
        lines += [_line(f"{name}_bucket", (("le", b),), v) for b, v in zip(bounds, line[:-1], strict=True)]
        lines += [_line(f"{name}_sum", (), line[-1]), _line(f"{name}_count", (), line[-2])]
    state = service.state
    gauges: dict[str, float] = {
        "running": sum(rank.beat.running for rank in service.ranks.all),
        "waiting": sum(rank.beat.waiting for rank in service.ranks.all),
        "admitted_requests": state.admitted,
        "weight_version": state.weight_version,
        "weights_valid": state.weights_valid,
        "paused": state.paused is not None,
        "asleep": state.asleep,
        "lease_held": state.lease is not None,
    }
    for name, value in gauges.items():
        head(name, "gauge", name)
        lines.append(_line(name, (), value))
    head("worker_up", "gauge", "worker_up")
    lines += [_line("worker_up", (("rank", str(r.rank)),), r.dead is None) for r in service.ranks.all]
    return "\n".join(lines) + "\n"
