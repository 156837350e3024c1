"""Loss functions of tensors, without side effects."""
