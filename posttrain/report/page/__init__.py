"""HTML report page: curves, findings, pathologies, completions, data and manifest of one or several runs."""

from posttrain.report.page.build import render, write_page
from posttrain.report.page.run import Run, read_run, read_runs

__all__ = ["Run", "read_run", "read_runs", "render", "write_page"]
