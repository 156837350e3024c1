"""Checks of configs, data, tokenizers, models, machines and logs. A check is a function that returns findings. A finding
describes a problem.
"""
