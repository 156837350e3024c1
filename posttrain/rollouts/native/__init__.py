"""The native rollout engine. It runs in the trainer's process, samples from the trained weights without a copy, and computes
each prompt once for all of its completions.
"""
