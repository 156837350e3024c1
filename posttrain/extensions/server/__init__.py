"""Rollouts from servers: the client, a pool of servers, pushes of weights, and what both ends of HTTP share."""
