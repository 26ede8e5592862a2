"""Bugs of the reference that change what is learnt, each as the smallest patch of this project's A2C.

The reference is UnstableBaselines v0.2; the files that docstrings name are its own, under `unstable/`. Its A2C learner
has all five bugs. A patch changes nothing else, so an arm of examples/studies/reference_bugs.toml differs from the
correct one by one bug. rewards.py has the patches that a run loads without torch.
"""
