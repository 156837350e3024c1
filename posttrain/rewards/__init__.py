"""The calling contract of reward functions, and the functions that ship."""
