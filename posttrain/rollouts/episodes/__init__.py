"""Multi-turn rollouts: tools, environments, and rollout functions of the user."""
