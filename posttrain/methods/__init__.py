"""One file an algorithm: config, objective, thin trainer."""
