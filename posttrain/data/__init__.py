"""Rows before the model: formats, templates, tokens, packing, collating, sampling."""
