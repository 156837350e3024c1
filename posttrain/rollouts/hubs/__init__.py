"""Adapters of hubs of environments: each makes a harness, or an environment factory, of what a hub's package has."""
