"""Facts that a learner sends with `Ready`.

`adapter_bytes` (of one version), `lora_parameters`, `base_parameters`, `base_bytes` (of this rank's part of the base),
`dtype` (of the base), `device`, `threads`, `vocab_size`, `position_limit` (of sequences, in tokens), and the versions
of `torch`, `transformers` and `peft`.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers

from unstable_lite.learner.model import Policy
from unstable_lite.transport.worker_main import WorkerSpec


def ready_info(policy: Policy, spec: WorkerSpec) -> dict[str, Any]:
    """Return `Ready.info`; see the module."""
    return {
        "adapter_bytes": policy.adapter_bytes,
        "lora_parameters": sum(parameter.numel() for parameter in policy.parameters.values()),
        "base_parameters": policy.num_base_parameters,
        "base_bytes": policy.base_bytes,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "device": spec.device,
        "threads": spec.threads,
        "vocab_size": policy.vocab_size,
        "position_limit": policy.position_limit,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }
