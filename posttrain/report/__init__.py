"""The run record on disk and what is made from it."""
