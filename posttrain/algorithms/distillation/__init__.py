"""Distillation: one trainer with four axes (whose tokens, which divergence, which teacher, what else), and TRL's names as presets."""
