"""Our own engine: in the trainer's process, on the trainer's own weights, each prompt computed once."""
