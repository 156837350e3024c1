"""Faults put into otherwise good runs, one at a time: what notices them, when, and what is lost."""
