"""Everything that touches a model: loading, masks, forward, log-probs, references, sharding."""
