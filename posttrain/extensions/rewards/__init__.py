"""Rewards that run code, call a server, or need another package: tests of code, a judge with OpenAI's API, reasoning-gym."""
