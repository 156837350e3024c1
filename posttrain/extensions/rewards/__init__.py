"""Rewards that run code, call a server, or need another package: code tests, a judge with OpenAI's API, and reasoning-gym."""
