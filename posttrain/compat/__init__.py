"""Compatibility with TRL: checks of overridden methods, losses on padded batches, TRL's module paths, and TRL's names."""
