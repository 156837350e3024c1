"""The launcher `--launcher ray`."""
