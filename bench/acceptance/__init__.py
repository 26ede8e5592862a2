"""Proof on one machine that the program works there: ten stages, each a process with a limit.

`command.py` runs them and writes their results, `stages.py` lists them, and the other modules are the stages.
"""
