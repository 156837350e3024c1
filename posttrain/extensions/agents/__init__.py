"""Training on the user's own agents: a harness runs the agent, whose calls go to an HTTP endpoint of the policy. Also
integrations of OpenEnv, verifiers and TRL's rollout sessions.
"""
