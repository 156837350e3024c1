"""Checks: functions that take plain data and return findings."""
