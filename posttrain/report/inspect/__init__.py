"""What the model will really see: rows summarised as numbers and coloured text, on a terminal or in one HTML file."""

from posttrain.report.inspect.html import to_html
from posttrain.report.inspect.pieces import Piece
from posttrain.report.inspect.summary import Shown, SpecialToken, Summary, summarise
from posttrain.report.inspect.terminal import to_console

__all__ = ["Piece", "Shown", "SpecialToken", "Summary", "summarise", "to_console", "to_html"]
