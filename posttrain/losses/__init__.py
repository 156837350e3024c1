"""The maths, as pure functions of tensors."""
