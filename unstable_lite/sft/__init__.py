"""Warm start: imitate observation-action pairs before any reinforcement learning.

`session` goes through the steps in order, `pairs` has the filter and the file, and `fine_tuning` trains the adapter; it
is the only page here that loads torch.
"""
