"""Tokenizers of bytes with any added tokens, post-processor and chat template."""

from collections.abc import Sequence
from pathlib import Path

END = "<|end|>"


def make_odd_tokenizer(
    directory: Path,
    *,
    special: Sequence[str] = (),
    plain: Sequence[str] = (),
    around: tuple[Sequence[str], Sequence[str]] = ((), ()),
    chat_template: str | None = None,
    **named: str,
) -> str:
    """Save a tokenizer and return its path.

    special, plain: added tokens. around: tokens that the post-processor puts before and after a text.
    """
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|pad|>": 0, END: 1} | {symbol: index + 2 for index, symbol in enumerate(alphabet)}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    fast.add_special_tokens([END, "<|pad|>", *special])
    fast.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in plain])
    before, after = around
    if before or after:
        fast.post_processor = tokenizers.processors.TemplateProcessing(
            " ".join([*before, "$A", *after]),
            special_tokens=[(token, fast.token_to_id(token)) for token in dict.fromkeys([*before, *after])],
        )
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END, pad_token="<|pad|>", **named)
    whole.chat_template = chat_template
    whole.save_pretrained(directory)
    return str(directory)
