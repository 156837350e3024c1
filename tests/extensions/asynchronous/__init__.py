"""Tests of asynchronous training."""
