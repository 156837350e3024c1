"""The command `posttrain estimate`, which estimates the memory of a training run."""
