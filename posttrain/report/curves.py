"""Pictures of a run, made of its ``metrics.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.errors import DataError
from posttrain.integrations import require

__all__ = ["plot_curves", "read_metrics"]

# What is worth a panel, in order; a panel appears when the run logged it.
PANELS: dict[str, tuple[str, ...]] = {
    "reward": ("reward", "eval_reward"),
    "accuracy": ("rewards/accuracy/mean", "mean_token_accuracy", "eval_mean_token_accuracy"),
    "loss": ("loss", "eval_loss"),
    "completion length (tokens)": ("completions/mean_length",),
    "entropy (nats)": ("entropy",),
    "KL to the reference (nats)": ("kl",),
    "gradient norm": ("grad_norm",),
    "rollout tokens per second": ("rollouts/tokens_per_second",),
}


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl``; a last line that a crash cut off is left out.

    Raises:
        DataError: There is no such file, or nothing in it.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{str(run_dir)!r} holds no metrics.jsonl: it is not the folder of a run.")
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    if not rows:
        raise DataError(f"{path} is empty: the run has not logged a step yet.")
    return rows


def plot_curves(run_dir: str | Path, path: str | Path | None = None) -> Path:
    """Draw the run's curves, one panel a quantity.

    Args:
        run_dir: Folder of a run.
        path: Where to write; the suffix decides the format. None is ``curves.png`` in the folder.

    Returns:
        The path written.
    """
    matplotlib = require("matplotlib", "the picture of the curves")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(run_dir)
    panels = {title: keys for title, keys in PANELS.items() if any(k in row for row in rows for k in keys)}
    if not panels:
        raise DataError(f"{str(run_dir)!r} has logged nothing that can be drawn yet.")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 2.8 * lines), squeeze=False)
    for axis, (title, keys) in zip(axes.flat, panels.items(), strict=False):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if key in row and "train_runtime" not in row]
            if points:
                label = "held out" if key.startswith("eval_") else "training"
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.6, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("optimiser step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if len(axis.lines) > 1:
            axis.legend(fontsize=8, frameon=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout()
    target = Path(path) if path is not None else Path(run_dir) / "curves.png"
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target
