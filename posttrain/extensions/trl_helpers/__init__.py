"""Helpers by TRL's names that our own trainers do not use: collators, BEMA, Weave, sequences, tensors, models, availability."""
