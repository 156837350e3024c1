"""Rewards that run code, call servers or need another package: code tests, an OpenAI judge, reasoning-gym."""
