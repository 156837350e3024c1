"""Asynchronous training: worker processes write rollouts while the policy trains on earlier ones."""
