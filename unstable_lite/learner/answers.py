"""Log-probabilities of given answers to prompts; a prompt is computed once for all of its answers.

Suffixes: `B` prompts, `P` tokens of a prompt, `K` answers, `A` tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBatch:
    """Prompts of one length, and answers padded on the right, which under causal attention no token of them sees."""

    prompt_BP: Tensor
    row_K: Tensor
    """Prompt of each answer."""
    answer_KA: Tensor
    is_token_KA: Tensor
    """Whether a token belongs to the answer, and is no padding."""
    answers: tuple[tuple[int, int], ...]
    """Prompt and answer, as numbered by the caller, of each row of `answer_KA`."""


def tokenized(
    tokenizer: Tokenizer, questions: Sequence[tuple[str, Sequence[str]]], stop: tuple[str, ...]
) -> tuple[list[TokenIds], list[list[TokenIds]]]:
    """Return the tokens of each prompt, and of its answers with the token that ends them."""
    answers = [[tokenizer.encode_completion(prompt, text, stop) for text in texts] for prompt, texts in questions]
    return [tokenizer.encode(prompt) for prompt, _ in questions], answers


def make_answer_batches(
    prompts: Sequence[TokenIds], answers: Sequence[Sequence[TokenIds]], max_tokens: int
) -> Iterator[AnswerBatch]:
    """Yield batches of at most `max_tokens` tokens, in which an answer counts with its prompt, or of one prompt."""
    lengths = [len(prompt) for prompt in prompts]
    longest = [max(map(len, options), default=0) for options in answers]
    rows: list[int] = []
    num_tokens = 0
    for row in sorted((row for row in range(len(prompts)) if answers[row]), key=lambda row: (lengths[row], row)):
        needed = len(answers[row]) * (lengths[row] + longest[row])
        if rows and (lengths[row] != lengths[rows[0]] or num_tokens + needed > max_tokens):
            yield _batch(prompts, answers, rows)
            rows, num_tokens = [], 0
        rows.append(row)
        num_tokens += needed
    if rows:
        yield _batch(prompts, answers, rows)


def _batch(prompts: Sequence[TokenIds], answers: Sequence[Sequence[TokenIds]], rows: Sequence[int]) -> AnswerBatch:
    numbers = [(row, option) for row in rows for option in range(len(answers[row]))]
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
