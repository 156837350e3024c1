"""Harnesses: a user's agent runs episodes against an HTTP endpoint of the policy. Integrations of OpenEnv, verifiers
and TRL's rollout sessions.
"""
