"""Environments and harnesses of other libraries: OpenEnv, verifiers, and TRL's rollout sessions."""
