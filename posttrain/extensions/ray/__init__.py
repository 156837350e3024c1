"""The launcher `--launcher ray`, which runs the trainer and rollout servers on a Ray cluster."""
