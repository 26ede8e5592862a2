"""Critic: a player's expected return, from the prompt alone.

A second LoRA adapter and a linear head on the policy's frozen base, which is not copied. Reads the decoder's
output at the last prompt token, the only position that sees the whole prompt and nothing of the answer. Owns its
parameters, its gradient and its files; knows nothing of advantages or optimisers. `I` counts steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.errors import AdapterError, ModelError
from unstable_lite.learner import CRITIC_HEAD, distributed
from unstable_lite.learner.advantages import Floats
from unstable_lite.learner.batching import MicroBatch, make_prompt_batches
from unstable_lite.learner.model import Policy, shapes
from unstable_lite.types import TrainItem

_ADAPTER = "critic"


class Critic:
    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy = policy
        self._config = config.learner
        self.head = nn.Linear(policy.hidden_size, 1, device=policy.device)
        # Every value begins at 0, so that the first advantages are the returns.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.parameters: dict[str, nn.Parameter] = policy.add_adapter(_ADAPTER, config.lora) | {
            f"value_head.{name}": parameter for name, parameter in self.head.named_parameters()
        }
        if config.lora.initial_critic_path is not None:
            self.load(config.lora.initial_critic_path)
        distributed.copy_from_first(self.parameters)

    @torch.no_grad()
    def estimate(self, items: Sequence[TrainItem]) -> Floats:
        """Return the value of each item's prompt, of any length; the ranks divide them."""
        value_I = np.zeros(len(items))
        with self._policy.using(_ADAPTER), self._policy.evaluating():
            for batch in self._batches(items, self._config.infer_mini_batch_size):
                value_I[list(batch.rows)] = self._values(batch).double().cpu().numpy()
        return distributed.sum_metrics(value_I)

    def add_gradient(self, items: Sequence[TrainItem], target_I: Floats) -> float:
        """Add the gradient of half the mean squared error of this rank's share to the parameters; return that loss."""
        loss = 0.0
        # The critic's adapter must also be active in the backward pass.
        with self._policy.using(_ADAPTER):
            for batch in self._batches(items, self._config.mini_batch_size):
                value_B = self._values(batch)
                target_B = torch.from_numpy(target_I[list(batch.rows)]).to(value_B)
                part_loss = 0.5 * (value_B - target_B).square().sum() / len(items)
                part_loss.backward()  # type: ignore[no-untyped-call]
                loss += part_loss.item()
        return loss

    def save(self, directory: Path) -> None:
        """Write adapter and head into an existing directory."""
        peft_files.write_files(directory, *self._policy.adapter_state(_ADAPTER))
        head = {name: tensor.detach().cpu().contiguous() for name, tensor in self.head.state_dict().items()}
        peft_files.write_file(directory / CRITIC_HEAD, safetensors.torch.save(head))

    def load(self, directory: Path) -> None:
        """Load a critic that `save` wrote. Raises ModelError or AdapterError unless it fits base and section lora."""
        try:
            head = peft_files.read_tensors(directory / CRITIC_HEAD)
        except AdapterError as error:
            raise ModelError(f"{directory} is not a critic with {CRITIC_HEAD}: {error}") from error
        if (theirs := shapes(head)) != (ours := shapes(self.head.state_dict())):
            raise ModelError(f"{directory} is for another base: its value head has {theirs}, this run's {ours}")
        self._policy.load_adapter(directory, _ADAPTER)
        self.head.load_state_dict(head)

    def _batches(self, items: Sequence[TrainItem], max_rows: int | None) -> list[MicroBatch]:
        policy = self._policy
        limits = policy.max_tokens_per_micro_batch, max_rows
        batches = make_prompt_batches(items, *limits, policy.share, policy.device.type)
        return [batch.to(policy.device) for batch in batches]

    def _values(self, batch: MicroBatch) -> Tensor:
        hidden_BD = self._policy.last_hidden(batch)
        values_B1: Tensor = self.head(hidden_BD.to(self.head.weight.dtype))
        return values_B1.squeeze(-1)
