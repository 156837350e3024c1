"""Helpers with TRL's names for user scripts; the trainers here do not use them. They cover collators, BEMA, Weave,
sequences, tensors, models and the availability of packages.
"""
