"""Sequence parallelism (``parallelism_config`` with ``sp_size``)."""
