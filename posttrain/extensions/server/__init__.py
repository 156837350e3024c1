"""Rollouts from servers: the client, a pool of servers, weight updates, and code shared by clients and servers."""
