"""Helpers with TRL's names that the trainers here do not use: collators, BEMA, Weave, sequences, tensors, models,
availability.
"""
