"""Data pipeline: dataset formats, chat templates, tokenization, packing, collation and sampling."""
