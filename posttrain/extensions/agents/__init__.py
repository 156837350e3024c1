"""Training on the user's own agents. A harness runs the agent, and the agent calls an HTTP endpoint of the policy. The
package also integrates OpenEnv, verifiers and TRL's rollout sessions.
"""
