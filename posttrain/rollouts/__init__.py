"""Rollout engines: they sample completions from the policy."""
