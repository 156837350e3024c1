"""Harnesses: a user's agent runs episodes against an endpoint of the policy. OpenEnv, verifiers and TRL's rollout sessions."""
