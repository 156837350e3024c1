"""Ulysses sequence parallelism, which is enabled with ``sp_size`` in ``parallelism_config``."""
