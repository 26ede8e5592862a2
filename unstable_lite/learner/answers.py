"""Log-probabilities of answers that are given as text, and those under a policy that never changes, remembered.

Equal steps, which small games repeat, need the latter once; a prompt is computed once for all of its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unstable_lite.config import Config
from unstable_lite.learner.batching import unsampled, whole_ids
from unstable_lite.models import resolve_model
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.types import TrainItem

if TYPE_CHECKING:
    from unstable_lite.learner.model import Policy

Questions = Sequence[tuple[str, Sequence[str]]]
"""Prompts with their answers."""
MOST_BYTES = 1 << 23
"""Bytes of the remembered steps' token ids. Values and bookkeeping of short steps take about twice as much."""


class AnswerScores:
    """Scores of answers. Loads the tokenizer when it is first asked."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy = policy
        self._config = config
        self._tokenizer: Tokenizer | None = None

    def score(self, questions: Questions, stop: tuple[str, ...]) -> list[Tensor]:
        """Return log p of each answer to each question, in nats, in float64 on the CPU.

        Raises ModelError for a model that no token stops.
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(resolve_model(self._config.model_name), self._config.trust_remote_code)
        encode, complete = self._tokenizer.encode, self._tokenizer.encode_completion
        items = [
            unsampled(encode(prompt), complete(prompt, text, stop)) for prompt, texts in questions for text in texts
        ]
        sums = [float(each.double().sum()) for each in self._policy.item_logprobs(items)]
        logp = torch.tensor(sums, dtype=torch.float64)
        return list(torch.split(logp, [len(texts) for _, texts in questions]))


class Remembered:
    def __init__(self) -> None:
        self._logp: dict[tuple[bytes, Any], Tensor] = {}
        self._num_bytes = 0

    def of(
        self, items: Sequence[TrainItem], compute: Callable[[Sequence[TrainItem]], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Return each item's values. `compute` returns those of the items that are new; the oldest are forgotten."""
        keys = [_key(item) for item in items]
        new = {key: item for key, item in zip(keys, items, strict=True) if key not in self._logp}
        if new:
            self._logp.update(zip(new, compute([*new.values()]), strict=True))
            self._num_bytes += sum(len(ids) for ids, _ in new)
        values = [self._logp[key] for key in keys]
        while self._num_bytes > MOST_BYTES:
            oldest = next(iter(self._logp))
            del self._logp[oldest]
            self._num_bytes -= len(oldest[0])
        return values


def _key(item: TrainItem) -> tuple[bytes, Any]:
    """Return the tokens, and those among them that are trained."""
    forced = None if item.forced is None else (item.forced.at, len(item.forced.ids))
    return whole_ids(item).tobytes(), (len(item.prompt_ids), forced)
