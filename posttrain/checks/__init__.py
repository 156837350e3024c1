"""Checks: plain data in, findings out."""
