"""Log-probabilities of answers that are given as text; a prompt is computed once for all of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unstable_lite.config import Config
from unstable_lite.learner.batching import unsampled
from unstable_lite.models import resolve_model
from unstable_lite.models.tokenization import Tokenizer

if TYPE_CHECKING:
    from unstable_lite.learner.model import Policy

Questions = Sequence[tuple[str, Sequence[str]]]
"""Prompts with their answers."""


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
