"""Where a curve becomes a sign of something wrong: shared by the checks that run while training and by the report's page.

Starting values; those without a source were set here and are meant to be looked at beside the curve.
"""

from __future__ import annotations

__all__ = ["CLIPPED_TOKENS", "CUT", "ENTROPY_LEFT", "FLAT_SHARE", "KL_GROWTH", "KL_LARGE"]

FLAT_SHARE = 0.8  # Of the groups, without spread.
KL_LARGE, KL_GROWTH = 0.5, 5.0  # Nats a token, and times what it was at first.
CLIPPED_TOKENS = 0.3  # Of all.
ENTROPY_LEFT = 0.1  # Of what the run began with.
CUT = 0.5  # Of the completions, at the length limit.
