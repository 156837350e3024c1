"""Harnesses: an agent of the user runs episodes against an HTTP endpoint of the policy. Also integrations of OpenEnv,
verifiers and TRL's rollout sessions.
"""
