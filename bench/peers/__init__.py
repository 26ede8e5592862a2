"""Alternative designs to compare this project with, written here from their published descriptions.

Each file is one peer and names the design that it represents and the parts that it leaves out.
"""

from __future__ import annotations

import importlib.util

HAS_VLLM = importlib.util.find_spec("vllm") is not None
