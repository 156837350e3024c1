"""Tests of experimental methods."""
