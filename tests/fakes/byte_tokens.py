"""A tokenizer like those of Llama 2, Gemma and Mistral: text without a token becomes tokens of single bytes."""

import tokenizers
from tokenizers import decoders, models

WORDS = ("a", "b", "]", "[", "\u2581a")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

BYTE_TOKENS = tokenizers.Tokenizer(
    models.BPE({token: token_id for token_id, token in enumerate([*BYTES, *WORDS])}, [], byte_fallback=True)
)
BYTE_TOKENS.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])


def ids_of(*parts: bytes | str) -> list[int]:
    """Return the ids of bytes, one each, and of words, one token each."""
    return [
        token_id
        for part in parts
        for token_id in (part if isinstance(part, bytes) else [BYTE_TOKENS.token_to_id(part)])
    ]
