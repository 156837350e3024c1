"""Rollouts from servers: the client, a pool of servers, pushes of weights, and code that clients and servers share."""
