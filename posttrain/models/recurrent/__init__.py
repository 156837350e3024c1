"""Recurrent layers of hybrid models on packed prefix trees: chunks, scans, and the table of replaced functions."""
