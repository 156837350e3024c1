"""Methods that are experimental in TRL or rarely used: A2PO, GMPO, PPO, GOLD, and variants of distillation."""
