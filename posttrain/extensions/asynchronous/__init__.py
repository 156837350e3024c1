"""Asynchronous training: worker processes sample rollouts while the policy trains on earlier ones."""
