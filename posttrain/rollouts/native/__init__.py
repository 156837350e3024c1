"""The native rollout engine: it samples in the trainer's process with the trained weights and computes each prompt
once.
"""
