"""Trainers that are experimental in TRL or rarely used: A2PO, GMPO, PPO, GOLD, online DPO, and variants of distillation."""
