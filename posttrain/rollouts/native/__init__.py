"""The native rollout engine. It samples in the trainer's process, uses the trained weights directly, and computes each
prompt once.
"""
