"""The rollout server: an engine behind HTTP whose weights a trainer replaces while it runs."""
