"""Asynchronous GRPO: the trainer, the queue it takes rollouts from, and the workers that fill it."""
