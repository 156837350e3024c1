"""The command `posttrain estimate`."""
