"""Loss functions that map tensors to tensors and have no side effects."""
