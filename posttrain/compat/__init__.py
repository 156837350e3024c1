"""Compatibility with TRL: overridden methods that raise an error, losses on padded batches, TRL's module paths, and
TRL's names.
"""
