"""Tests of rollouts from servers."""
