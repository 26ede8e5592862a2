"""What makes a request one that can be served, for every engine alike."""

from __future__ import annotations

from unstable_lite.errors import RequestError


def check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """How many tokens the completion may have. Raises RequestError if the prompt leaves room for none."""
    limit = max_model_len - 1
    if num_prompt_tokens > limit:
        raise RequestError(
            f"prompt has {num_prompt_tokens} tokens; the limit is {limit} "
            f"(max_model_len = {max_model_len}, of which a completion needs one)"
        )
    if num_prompt_tokens == 0:
        raise RequestError("prompt has 0 tokens; there is nothing to go on from")
    if max_tokens < 1:
        raise RequestError(f"max_tokens = {max_tokens}: at least 1")
    return min(max_tokens, max_model_len - num_prompt_tokens)
