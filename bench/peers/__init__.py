"""The other ways to do it, written here from their published design: what this project is measured against.

One peer a file; each says what it stands for and what it leaves out. What Ray is needed for is left out where it is not
installed (`pip install 'unstable-lite[peers]'`).
"""

from __future__ import annotations

import importlib.util

HAS_RAY = importlib.util.find_spec("ray") is not None
HAS_VLLM = importlib.util.find_spec("vllm") is not None
