"""Loss functions. Their arguments and return values are tensors, and they have no side effects."""
