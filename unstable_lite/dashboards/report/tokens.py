"""Text of each sampled token, which the page colours.

A run keeps only ids; their text comes from the run's tokenizer, if this machine has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from unstable_lite.errors import ModelError
from unstable_lite.models import resolve_model
from unstable_lite.models.detokenizer import CUT, IncrementalDetokenizer


def find_tokenizer(model_name: str) -> tokenizers.Tokenizer | None:
    """Return the tokenizer if this machine has it; nothing is downloaded or converted."""
    try:
        path = Path(resolve_model(model_name, may_convert=False)) / "tokenizer.json"
        if path.is_file():
            return tokenizers.Tokenizer.from_file(str(path))
        cached = try_to_load_from_cache(model_name, "tokenizer.json")
    except (ModelError, HFValidationError):
        return None
    return tokenizers.Tokenizer.from_file(cached) if isinstance(cached, str) else None


def pieces(ids: Sequence[int], text: str, tokenizer: tokenizers.Tokenizer | None) -> list[tuple[str, int]] | None:
    """Return the text of `ids` in order, in pieces with their numbers of tokens; special tokens are visible.

    Tokens that are parts of one character form one piece. None without a tokenizer, or if the tokens do not give
    `text`, because the tokenizer is then not the run's.
    """
    if tokenizer is None:
        return None
    whole: str = tokenizer.decode(ids, skip_special_tokens=True)
    if not whole.startswith(text.rstrip(CUT)):
        return None
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    made: list[tuple[str, int]] = []
    waiting = 0
    for token_id in ids:
        waiting += 1
        if piece := stream.step(token_id):
            made.append((piece, waiting))
            waiting = 0
    if waiting:  # the completion ends within a character
        made.append((CUT, waiting))
    return made
