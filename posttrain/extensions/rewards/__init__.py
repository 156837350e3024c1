"""Rewards that run code, call a server, or need another package: code tests, an OpenAI judge, reasoning-gym."""
