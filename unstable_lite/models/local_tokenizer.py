"""The tokenizer of a model, without transformers, and the text of token ids that arrive one by one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tokenizers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from unstable_lite.errors import ModelError
from unstable_lite.models import model_errors, resolve_model

CUT = "\N{REPLACEMENT CHARACTER}"


@cache
def find_tokenizer(model_name: str) -> tokenizers.Tokenizer | None:
    """Return the tokenizer if this machine has it; nothing is downloaded or converted.

    Raises ModelError if its file is damaged.
    """
    try:
        path = Path(resolve_model(model_name, may_convert=False)) / "tokenizer.json"
        found = str(path) if path.is_file() else try_to_load_from_cache(model_name, "tokenizer.json")
    except (ModelError, HFValidationError):
        return None
    with model_errors(str(found), "is not a tokenizer"):
        if not isinstance(found, str):
            return None
        tokenizer = tokenizers.Tokenizer.from_file(found)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


class IncrementalDetokenizer:
    """Stream that returns each character once its last byte has arrived.

    The `DecodeStream` of tokenizers does the same, but raises a bare Exception if the bytes that it returned turn out,
    with those that follow, not to be characters. Here returned text stays, and the rest is decoded on its own.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        """Newest tokens that gave text, because a token at the beginning may be written differently, and all since."""
        self._num_given = 0
        self._given = ""
        """Text of the first `_num_given` of `_ids`."""

    def step(self, token_id: int) -> str:
        """Return the text that this token adds; "" within a character, and for a token without text."""
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith(CUT):
            return ""
        if not text.startswith(self._given):
            del self._ids[: self._num_given]
            text, self._given, self._num_given = self._decode(), "", 0
        new_text = text[len(self._given) :]
        if new_text:
            del self._ids[: self._num_given]
            self._given, self._num_given = self._decode(), len(self._ids)
        return new_text

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skips_special_tokens)
        return text
