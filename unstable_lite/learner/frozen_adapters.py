"""Read an adapter that the learner does not train as parameters of its policy, to score tokens with it.

The adapter may have a lower rank, another scale and fewer layers than the policy's: its pairs are filled up with zeros,
and the ratio of the scales is multiplied into B, which changes log-probabilities by rounding only.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor

from unstable_lite.adapters.peft_files import lora_scale, read_adapter
from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.learner import distributed
from unstable_lite.learner.base_model import ADAPTER
from unstable_lite.learner.model import Policy


def read_parameters(directory: Path, policy: Policy) -> dict[str, Tensor]:
    """Return parameters for `Policy.logprobs_with` that compute as the adapter in a PEFT directory does.

    With a sharded base every rank must call it, and rank 0 sends the files. Raises RequestError if it cannot be read,
    adapts other layers, or has a higher rank or other sizes than the policy.
    """
    shares = distributed.broadcast_directory if policy.is_sharded else contextlib.nullcontext
    with shares(directory) as found:
        try:
            tensors, config, _ = read_adapter(found)
        except AdapterError as error:
            raise RequestError(str(error)) from error
    ratio = lora_scale(config) / lora_scale(policy.model.peft_config[ADAPTER].to_dict())
    filled = {name: torch.zeros_like(parameter, device="cpu") for name, parameter in policy.parameters.items()}
    for key, tensor in tensors.items():
        name = key.removesuffix(".weight") + f".{ADAPTER}.weight"
        if (place := filled.get(name)) is None:
            raise RequestError(f"{directory} adapts {key}, which the learner's adapter does not")
        rank_dim = 0 if ".lora_A." in key else 1
        rank, other = tensor.shape[rank_dim], tensor.shape[1 - rank_dim]
        if rank > place.shape[rank_dim] or other != place.shape[1 - rank_dim]:
            raise RequestError(
                f"{directory}: {key} has shape {tuple(tensor.shape)}, which does not fit into {tuple(place.shape)} of "
                "the learner's adapter"
            )
        place.narrow(rank_dim, 0, rank).copy_(tensor.float() if rank_dim == 0 else tensor.float() * ratio)
    return filled
