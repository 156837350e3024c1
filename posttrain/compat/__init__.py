"""Compatibility with TRL: overrides that are an error here, losses on padded batches, and TRL's module paths and
names.
"""
