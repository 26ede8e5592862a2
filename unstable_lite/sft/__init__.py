"""Warm start: imitate observation-action pairs before any reinforcement learning.

Games are played and filtered in the orchestrator (`collect`, `pairs`), the adapter is trained in a process of its own
(`worker`, `fine_tuning`: the only pages here that load torch), and `session` goes through the steps in order.
"""
