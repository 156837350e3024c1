"""Conversations of several turns: tools, environments, and rollouts by a user's function."""
