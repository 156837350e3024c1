"""Rollout servers as the trainer sees them: client, pool, weight sync."""
