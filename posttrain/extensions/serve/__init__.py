"""The rollout server `posttrain serve`: an HTTP server for generation whose weights a trainer updates during a run."""
