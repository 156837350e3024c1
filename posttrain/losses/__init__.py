"""Loss functions. They take and return tensors, and have no side effects."""
