"""Fixtures of commands that load no weights."""

from tests.cli.conftest import pictured, sums, unread_model

__all__ = ["pictured", "sums", "unread_model"]
