"""Warm start: imitate observation-action pairs before any reinforcement learning.

Games are played and filtered in the orchestrator (`collect`, `pairs`), the adapter is trained in a process of its own
(`worker`, the only page here that loads torch), and `session` goes through the steps in order.
"""
