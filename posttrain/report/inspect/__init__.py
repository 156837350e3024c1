"""What the model will really see: rows summarised as numbers and coloured text, on a terminal or in one HTML file."""

from posttrain.report.inspect.render import to_console, to_html
from posttrain.report.inspect.summary import Piece, Shown, SpecialToken, Summary, summarise

__all__ = ["Piece", "Shown", "SpecialToken", "Summary", "summarise", "to_console", "to_html"]
