"""Harnesses, in which the user's agent runs episodes against an HTTP endpoint of the policy. Also integrations of
OpenEnv, verifiers and TRL's rollout sessions.
"""
