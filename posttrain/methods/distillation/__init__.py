"""Distillation: one trainer with four axes, and TRL's names as presets."""
