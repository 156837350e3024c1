"""The training loop that all methods share. It does not depend on the algorithm that is trained."""
