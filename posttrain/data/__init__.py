"""Data pipeline: load datasets, apply chat templates, tokenize, pack, collate and sample rows."""
