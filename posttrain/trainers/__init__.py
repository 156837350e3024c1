"""Trainers with TRL's signatures, one per method of `posttrain.methods`."""
