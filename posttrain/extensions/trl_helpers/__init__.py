"""Helpers with TRL's names for user scripts. The trainers of this library do not use them. The helpers are collators, the
BEMA and Weave callbacks, and functions for sequences, tensors, models and the availability of packages.
"""
