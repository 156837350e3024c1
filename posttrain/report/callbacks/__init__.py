"""Callbacks for any trainer: averaged weights, moving references, sampled completions, merged checkpoints."""
