"""Distillation: one method with several options, and TRL's trainers as presets."""
