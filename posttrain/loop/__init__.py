"""The training loop that all methods share; the trainer core does not know which algorithm runs."""
