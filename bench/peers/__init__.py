"""Alternative designs to compare this project with, written here from their published descriptions.

Each file is one peer and names the design that it represents and the parts that it leaves out. Peers that need Ray are
left out if it is not installed (`pip install 'unstable-lite[peers]'`).
"""

from __future__ import annotations

import importlib.util

HAS_RAY = importlib.util.find_spec("ray") is not None
HAS_VLLM = importlib.util.find_spec("vllm") is not None
