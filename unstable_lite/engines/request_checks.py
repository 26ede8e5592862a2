"""Checks of requests and counts of tokens that all engines share."""

from __future__ import annotations

import time

from unstable_lite.errors import RequestError
from unstable_lite.transport.messages import EngineStats


class Throughput:
    """Counts of tokens since the last report."""

    def __init__(self) -> None:
        self._generated = self._prompt = self._cached = 0
        self._reported_at = time.monotonic()
        self.oom_retries = 0
        """Number of steps that were repeated in smaller parts, because memory had run out; never reset."""

    def count(self, generated: int = 0, prompt: int = 0, cached: int = 0) -> None:
        """Count a completion; `cached` of the `prompt` tokens were not computed again."""
        self._generated += generated
        self._prompt += prompt
        self._cached += cached

    def report(self, queued: int, running: int) -> EngineStats:
        now = time.monotonic()
        stats = EngineStats(
            queued=queued,
            running=running,
            tokens_per_s=self._generated / max(now - self._reported_at, 1e-9),
            cached_share=self._cached / max(self._prompt, 1),
            oom_retries=self.oom_retries,
        )
        self._generated = self._prompt = self._cached = 0
        self._reported_at = now
        return stats


def check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Return the token limit of the completion. Raises RequestError if the prompt leaves room for none."""
    limit = max_model_len - 1
    if num_prompt_tokens > limit:
        raise RequestError(
            f"prompt has {num_prompt_tokens} tokens; the limit is {limit} "
            f"(max_model_len = {max_model_len}, of which a completion needs one)"
        )
    if num_prompt_tokens == 0:
        raise RequestError("prompt has 0 tokens; a completion needs at least one")
    if max_tokens < 1:
        raise RequestError(f"max_tokens = {max_tokens}: at least 1")
    return min(max_tokens, max_model_len - num_prompt_tokens)
