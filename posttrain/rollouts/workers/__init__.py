"""Asynchronous rollouts: worker processes, their queue, and the ledger of what they wrote."""
