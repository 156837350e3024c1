"""Compatibility with TRL: refused overrides, losses on padded batches, module paths and names."""
