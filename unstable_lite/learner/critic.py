"""Critic: a player's expected return, from the prompt alone; and the advantages of whole trajectories over it.

A second LoRA adapter and a linear head on the policy's frozen base, which is not copied. Reads the decoder's
output at the last prompt token, the only position that sees the whole prompt and nothing of the answer. Owns its
parameters, its gradient and its files; knows nothing of the policy's loss or of optimisers. `I` counts the steps of a
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor, nn

from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.errors import AdapterError, ModelError, RequestError
from unstable_lite.learner import CRITIC_HEAD, distributed
from unstable_lite.learner.batching import ROUNDING, MicroBatch
from unstable_lite.learner.distributed import Floats
from unstable_lite.learner.model import Policy, shapes
from unstable_lite.reward_transformations.averages import Spread, cell_of
from unstable_lite.types import StepContext, TrainItem

_ADAPTER = "critic"
ROWS_WITHOUT_GRADIENT = 16
"""Most prompts that the critic reads at once if no gradient is needed."""


class Critic:
    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy = policy
        self._config = config.learner
        self.head = nn.Linear(policy.base.config.get_text_config().hidden_size, 1, device=policy.device)
        self.parameters: dict[str, nn.Parameter] = policy.add_adapter(_ADAPTER, config.lora) | {
            f"value_head.{name}": parameter for name, parameter in self.head.named_parameters()
        }
        self._initial = config.lora.initial_critic_path
        self._begin()
        distributed.copy_from_first(self.parameters)

    def _begin(self) -> None:
        # Every value begins at 0, so that the first advantages are the returns.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if self._initial is not None:
            self.load(self._initial)

    def begin_again(self) -> None:
        """Reset adapter and head to their initial values."""
        self._policy.make_fresh(_ADAPTER)
        self._begin()

    @torch.no_grad()
    def estimate(self, items: Sequence[TrainItem]) -> Floats:
        """Return the value of each item's prompt, of any length; the ranks divide them."""
        value_I = np.zeros(len(items))
        with self._policy.using(_ADAPTER), self._policy.evaluating():
            for batch in self._policy.prompt_batches(items, ROWS_WITHOUT_GRADIENT):
                value_I[list(batch.rows)] = self._values(batch).double().cpu().numpy()
        return distributed.sum_metrics(value_I)

    def add_gradient(self, items: Sequence[TrainItem], target_I: Floats) -> float:
        """Add the gradient of half the mean squared error of this rank's share to the parameters; return that loss."""
        loss = 0.0
        # The critic's adapter must also be active in the backward pass.
        with self._policy.using(_ADAPTER):
            for batch in self._policy.prompt_batches(items, self._config.mini_batch_size):
                value_N = self._values(batch)
                target_N = torch.from_numpy(target_I[list(batch.rows)]).to(value_N)
                part_loss = 0.5 * (value_N - target_N).square().sum() / len(items)
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

    def _values(self, batch: MicroBatch) -> Tensor:
        hidden_ND = self._policy.last_hidden(batch)
        value_N1: Tensor = self.head(hidden_ND.to(self.head.weight.dtype))
        return value_N1.squeeze(-1)


def estimate_advantages(
    items: Sequence[TrainItem], value_I: Floats, gamma: float, gae_lambda: float
) -> tuple[Floats, Floats]:
    """Return advantages, by generalised advantage estimation over each player's turns, and the critic's targets.

    The value after a trajectory's last step is 0. If the turn cap ended the game, the trajectory ends before that step
    instead, and its value stands for the rest of the game; the step itself has advantage 0.
    Raises RequestError if the steps of a trajectory are not adjacent, because their returns would be wrong.
    Source: Schulman et al. 2016, arXiv:1506.02438, equation 16; Pardo et al. 2018, arXiv:1712.00378 (turn cap).
    """
    advantage_I, is_judged_I = np.zeros(len(items)), is_judged(items)
    following, next_value, next_advantage = None, 0.0, 0.0
    seen: set[int] = set()
    for i in range(len(items) - 1, -1, -1):
        if items[i].trajectory != following:
            following, next_value, next_advantage = items[i].trajectory, 0.0, 0.0
            if following in seen:
                raise RequestError(f"item {i}: the steps of trajectory {following} are not adjacent")
            seen.add(following)
            if not is_judged_I[i]:
                next_value = value_I[i]
                continue
        surprise = items[i].reward + gamma * next_value - value_I[i]
        advantage_I[i] = surprise + gamma * gae_lambda * next_advantage
        next_value, next_advantage = value_I[i], advantage_I[i]
    return advantage_I, advantage_I + value_I


def is_judged(items: Sequence[TrainItem]) -> npt.NDArray[np.bool_]:
    """Return False for a trajectory's last step if the turn cap ended the game while its player could still move."""
    rows = zip(items, [*(item.trajectory for item in items[1:]), None], strict=True)
    return np.array([item.trajectory == after or not _is_capped(item.context) for item, after in rows], np.bool_)


def _is_capped(context: StepContext | None) -> bool:
    return context is not None and context.end == "truncated" and bool(context.opponents) and not context.is_out


def policy_weights(
    items: Sequence[TrainItem], advantage_I: Floats, gamma: float, is_normalized: bool, spread: Spread
) -> Floats:
    """Return the weight of each item in the policy gradient.

    An advantage is 0 if its cell's returns are all alike, because it would be the critic's error alone, and if
    `is_judged` is False. If `is_normalized` the others get mean 0 and standard deviation 1, or less if they vary far
    less than in earlier batches. `spread` remembers those and is updated.
    """
    return_I, _ = estimate_advantages(items, np.zeros(len(items)), gamma, 1.0)
    cells = [
        cell_of(item.context.env_id, item.context.pid, item.context) if item.context is not None else ""
        for item in items
    ]
    has_signal_I = spread.tells_apart(return_I, cells) & is_judged(items)
    weight_I = np.where(has_signal_I, advantage_I, 0.0)
    if is_normalized:
        weight_I[has_signal_I] = spread.standardized("", advantage_I[has_signal_I])
    return weight_I


def zero_share(advantages: Sequence[float] | Floats) -> float:
    """Return the share of steps whose advantage is 0 up to rounding; 0 without a step."""
    return float((np.abs(advantages) <= ROUNDING).mean()) if len(advantages) else 0.0


def value_metrics(value_I: Floats, target_I: Floats) -> dict[str, float]:
    """Return how well the critic predicted the returns before it learnt from them. Empty without a step.

    `value_dir_acc`: share of the `value_dir_n` targets other than 0 whose sign the value has.
    `explained_variance`: 1 is perfect, 0 no better than the mean; 0 also if all targets are equal.
    """
    if not len(value_I):
        return {}
    has_sign_I = target_I != 0
    num_signed = int(has_sign_I.sum())
    is_right_I = np.sign(value_I[has_sign_I]) == np.sign(target_I[has_sign_I])
    variance = float(target_I.var())
    return {
        "value_mae": float(np.abs(value_I - target_I).mean()),
        "value_dir_acc": float(is_right_I.mean()) if num_signed else 0.0,
        "value_dir_n": float(num_signed),
        "value_mean": float(value_I.mean()),
        "return_mean": float(target_I.mean()),
        "explained_variance": 1 - float((target_I - value_I).var()) / variance if variance else 0.0,
        "num_steps": float(len(value_I)),
    }
