"""The rollout server: an HTTP server for generation. A trainer updates its weights while it runs."""
