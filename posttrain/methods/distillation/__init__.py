"""Distillation: one method with several options. TRL's distillation trainers are presets of these options."""
