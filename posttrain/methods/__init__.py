"""Algorithms: the config and the objective of each method. Trainers are in `posttrain.trainers`."""
