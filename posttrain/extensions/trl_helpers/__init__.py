"""Helpers with TRL's names for user scripts. The trainers of this library do not use them. They cover collators, BEMA,
Weave, sequences, tensors, models, and whether packages are available.
"""
