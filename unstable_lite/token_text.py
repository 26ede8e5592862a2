"""Text of token ids that come one by one. Knows no stop strings and no model."""

from __future__ import annotations

import tokenizers

CUT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Gives out each character once its last byte is there.

    The `DecodeStream` of tokenizers does this too, until the bytes of what it gave out turn out, with those that
    follow, to be no characters: then it raises a bare Exception. Here what was given out stays, and what follows it is
    read by itself.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        """The last ones that gave text, for what comes may be written otherwise at the beginning; and all since."""
        self._num_given = 0
        self._given = ""
        """The text of the first `_num_given` of `_ids`."""

    def step(self, token_id: int) -> str:
        """What this token adds to the text; "" within a character, and for a token that is not shown."""
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
