"""Warm start: imitate observation-action pairs before any reinforcement learning.

Games are played and filtered in the orchestrator (`session`, which goes through the steps in order, and `pairs`); the
adapter is trained in a process of its own (`worker`, the only page here that loads torch).
"""
