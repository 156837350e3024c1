"""Loss functions. They map tensors to tensors and have no side effects."""
