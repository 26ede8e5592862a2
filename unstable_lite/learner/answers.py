"""Log-probabilities of given answers to prompts; a prompt is computed once for all of its answers.

Suffixes: `B` prompts, `P` tokens of a prompt, `K` answers, `A` tokens of an answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor

from unstable_lite.config import Config
from unstable_lite.models import resolve_model
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.types import TokenIds

if TYPE_CHECKING:
    from unstable_lite.learner.model import Policy

Questions = Sequence[tuple[str, Sequence[str]]]
"""Prompts with their answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBatch:
    """Prompts of one length, and answers padded on the right, which under causal attention no token of them sees."""

    prompt_BP: Tensor
    row_K: Tensor
    """Prompt of each answer."""
    answer_KA: Tensor
    is_token_KA: Tensor
    """Whether a token belongs to the answer, and is not padding."""
    answers: tuple[tuple[int, int], ...]
    """Prompt and answer, as numbered by the caller, of each row of `answer_KA`."""

    def sums(self, logp_N: Tensor) -> Tensor:
        """Return the sum over each answer, in float64, of values of the flattened `answer_KA`."""
        return (logp_N.view_as(self.answer_KA).double() * self.is_token_KA).sum(1)

    def to(self, device: torch.device) -> AnswerBatch:
        moved = {name: getattr(self, name).to(device) for name in ("prompt_BP", "row_K", "answer_KA", "is_token_KA")}
        return replace(self, **moved)


class AnswerScores:
    """Scores of answers that are given as text. Loads the tokenizer when it is first asked."""

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
        prompts = [encode(prompt) for prompt, _ in questions]
        answers = [[complete(prompt, text, stop) for text in texts] for prompt, texts in questions]
        logp = [torch.zeros(len(options), dtype=torch.float64) for options in answers]
        for batch in make_answer_batches(prompts, answers, self._policy.max_tokens_per_micro_batch):
            values = self._policy.answer_logprobs(batch.to(self._policy.device)).tolist()
            for (row, option), value in zip(batch.answers, values, strict=True):
                logp[row][option] = value
        return logp


def answer_hidden(decoder: Any, batch: AnswerBatch) -> Tensor:
    """Return the decoder's output at the token before each token of an answer, K × A × D."""
    cache = transformers.DynamicCache(config=decoder.config)
    # transformers renames this argument.
    name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
    read = decoder(input_ids=batch.prompt_BP, use_cache=True, **{name: cache})
    hidden_KAD: Tensor = read.last_hidden_state[batch.row_K, -1:]
    if batch.answer_KA.shape[1] == 1:
        return hidden_KAD
    cache.reorder_cache(batch.row_K)  # type: ignore[arg-type]
    written = decoder(input_ids=batch.answer_KA[:, :-1], use_cache=True, **{name: cache})
    return torch.cat([hidden_KAD, written.last_hidden_state], 1)


def make_answer_batches(
    prompts: Sequence[TokenIds], answers: Sequence[Sequence[TokenIds]], max_tokens: int
) -> Iterator[AnswerBatch]:
    """Yield batches of at most `max_tokens` tokens, in which an answer counts with its prompt, or of one answer."""
    lengths = [len(prompt) for prompt in prompts]
    longest = [max(map(len, options), default=0) for options in answers]
    numbers: list[tuple[int, int]] = []
    num_tokens = 0
    for row in sorted(range(len(prompts)), key=lambda row: (lengths[row], row)):
        for option in range(len(answers[row])):
            needed = lengths[row] + longest[row]
            if numbers and (lengths[row] != lengths[numbers[0][0]] or num_tokens + needed > max_tokens):
                yield _batch(prompts, answers, numbers)
                numbers, num_tokens = [], 0
            numbers.append((row, option))
            num_tokens += needed
    if numbers:
        yield _batch(prompts, answers, numbers)


def _batch(
    prompts: Sequence[TokenIds], answers: Sequence[Sequence[TokenIds]], numbers: Sequence[tuple[int, int]]
) -> AnswerBatch:
    rows = list(dict.fromkeys(row for row, _ in numbers))
    size_K = np.array([len(answers[row][option]) for row, option in numbers])
    answer_KA = np.zeros((len(numbers), size_K.max()), np.int64)
    for ids_A, (row, option) in zip(answer_KA, numbers, strict=True):
        ids_A[: len(answers[row][option])] = answers[row][option]
    return AnswerBatch(
        prompt_BP=torch.from_numpy(np.stack([prompts[row] for row in rows]).astype(np.int64)),
        row_K=torch.tensor([rows.index(row) for row, _ in numbers]),
        answer_KA=torch.from_numpy(answer_KA),
        is_token_KA=torch.from_numpy(np.arange(answer_KA.shape[1]) < size_K[:, None]),
        answers=tuple(numbers),
    )
