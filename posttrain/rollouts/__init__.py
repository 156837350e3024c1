"""Rollout engines, which sample completions from the policy."""
