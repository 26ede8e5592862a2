"""Encoding gives the ids that the model is shown; decoding gives the text of its completion."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.byte_tokens import BYTE_TOKENS, ids_of
from fakes.random_models import make_model, make_tokenizer
from unstable_lite.models.tokenization import StopWatch, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(str(model_dir))


def test_character_split_into_tokens_is_decoded_whole(tokenizer: Tokenizer) -> None:
    text = "wähle ≤ 3 🎲 oder 日本"
    ids = tokenizer.encode(text).tolist()
    assert len(ids) == len(text.encode())
    assert tokenizer.text(ids) == text
    assert tokenizer.text([*ids, 1]) == text, "the end token has no text"


def test_prompt_that_starts_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    import tokenizers

    make_model(tmp_path)
    make_tokenizer(tmp_path, bos_token="<|pad|>")
    file = tmp_path / "tokenizer.json"
    fast = tokenizers.Tokenizer.from_file(str(file))
    fast.post_processor = tokenizers.processors.TemplateProcessing("<|pad|> $A", special_tokens=[("<|pad|>", 0)])
    fast.save(str(file))
    tokenizer = Tokenizer(str(tmp_path))
    plain, with_bos = tokenizer.encode("hi").tolist(), tokenizer.encode("<|pad|>hi").tolist()
    assert plain == with_bos and plain[0] == 0 and plain.count(0) == 1


def test_stop_string_is_found_across_and_within_tokens(tokenizer: Tokenizer) -> None:
    watch = tokenizer.watch(("never", "🎲]"))
    assert watch is not None
    ids = tokenizer.encode("wurf [🎲] und mehr").tolist()
    size = next(count for count, token in enumerate(ids, start=1) if watch.is_stopped_by(token))
    assert size == len("wurf [🎲]".encode())
    assert tokenizer.text([], watch) == "wurf ["


def test_without_stop_strings_nothing_is_watched(tokenizer: Tokenizer) -> None:
    assert tokenizer.watch(()) is None and tokenizer.watch(("",)) is None


def test_special_token_as_stop_string_is_matched_by_id_only(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_strings(("<|end|>", "", "</answer>")) == ["</answer>"]
    (end,) = tokenizer.encode("<|end|>").tolist()
    assert tokenizer.stop_ids_with(("<|end|>", "</answer>")) == tokenizer.stop_ids | {end}


def test_every_end_token_of_the_model_counts(tmp_path: Path) -> None:
    import transformers

    make_model(tmp_path)
    transformers.GenerationConfig(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    assert Tokenizer(str(tmp_path)).stop_ids == {1, 7}


def test_stop_string_is_found_after_invalid_bytes() -> None:
    watch = StopWatch(BYTE_TOKENS, ("b]",))
    ids = ids_of("a", "é".encode(), b"\x80", "[", "b", "]", "a")
    size = next(count for count, token in enumerate(ids, start=1) if watch.is_stopped_by(token))
    assert size == len(ids) - 1
    assert watch.text == "aé\ufffd["
