"""What a run did as one HTML page: curves, findings, pathologies, completions, data, manifest, and runs side by side."""

from posttrain.report.page.build import render, write_page
from posttrain.report.page.run import Run, read_run, read_runs

__all__ = ["Run", "read_run", "read_runs", "render", "write_page"]
