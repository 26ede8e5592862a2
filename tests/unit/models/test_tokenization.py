"""Encoding gives the ids that the model is shown; decoding gives the text of its completion."""

import json
from pathlib import Path

import pytest

from fakes.byte_tokens import BYTE_TOKENS, ids_of
from fakes.chat_configs import ASKED, CHATML, TURNS, chat_config, template_of
from fakes.odd_tokenizers import END, make_odd_tokenizer
from fakes.random_models import make_model, make_tokenizer
from unstable_lite.games.answers import find_extraction
from unstable_lite.games.templates import chats_in_use, own_tags, templates_for
from unstable_lite.models.local_tokenizer import IncrementalDetokenizer, find_tokenizer
from unstable_lite.models.tokenization import StopWatch, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(str(model_dir))


def test_stop_string_is_found_across_and_within_tokens_and_a_special_token_by_its_id(tokenizer):
    watch = tokenizer.watch(("never", "🎲]"))
    ids = tokenizer.encode("wurf [🎲] und mehr").tolist()
    size = next(count for count, token in enumerate(ids, start=1) if watch.is_stopped_by(token))
    assert size == len("wurf [🎲]".encode())
    assert tokenizer.text([], watch) == "wurf ["
    assert tokenizer.stop_strings(("<|end|>", "", "</answer>")) == ["</answer>"]
    (end,) = tokenizer.encode("<|end|>").tolist()
    assert tokenizer.stop_ids_with(("<|end|>", "</answer>")) == tokenizer.stop_ids | {end}
    assert tokenizer.watch(()) is None and tokenizer.watch(("",)) is None


def test_tokenizer_that_cuts_and_pads_counts_the_tokens_of_whole_texts(tmp_path):
    make_tokenizer(tmp_path)
    table = json.loads((tmp_path / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<|pad|>"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(table | {"truncation": cut, "padding": pad | {"pad_to_multiple_of": None}})
    )
    (tmp_path / "config.json").write_text("{}")
    tokenizer = find_tokenizer(str(tmp_path))
    assert tokenizer is not None
    assert [len(tokenizer.encode(text).ids) for text in ("a" * 40, "a")] == [40, 1]


def test_every_end_token_of_the_model_counts(tmp_path):
    import transformers

    make_model(tmp_path)
    transformers.GenerationConfig(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    assert Tokenizer(str(tmp_path)).stop_ids == {1, 7}


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|return|>"]
OWN = ("[REASON]", "[/REASON]")


@pytest.mark.parametrize(
    ("special", "chat_template", "own", "opening", "closing"),
    [
        (["<think>", "</think>"], CHATML + ASKED, {}, "<think>", "</think>"),
        (["[THINK]", "[/THINK]"], CHATML + ASKED, {}, "[THINK]", "[/THINK]"),
        (CHANNELS, HARMONY, {}, "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"),
        ([*OWN], CHATML + ASKED, {"think": OWN}, *OWN),
        ([*OWN], None, {"think": OWN, "chat": False}, *OWN),
    ],
)
def test_special_tokens_that_mark_a_thought_stay_in_the_text(tmp_path, special, chat_template, own, opening, closing):
    path = make_odd_tokenizer(tmp_path, special=[*TURNS, *special], chat_template=chat_template)
    tokenizer = Tokenizer(path)
    config = chat_config("mine", {"chat": True} | own)
    prompts = tokenizer.prompts(chats_in_use(config), own_tags(config))
    template = templates_for(config, prompts)["mine"]
    read = find_extraction("default", template.tags)
    assert not set(template.stop) & {closing, "<|end|>"}, "a mark that ends a thought ends no answer"
    unclosed = tokenizer.encode(f"{opening}maybe \\boxed{{[1]}}{TURNS[0]}").tolist()
    whole = tokenizer.encode(f"{opening}maybe \\boxed{{[1]}}{closing}\\boxed{{[2]}}{END}").tolist()
    assert read(tokenizer.text(unclosed)) == ("", False)
    assert TURNS[0] not in tokenizer.text(unclosed), "other special tokens are left out"
    assert read(tokenizer.text(whole)) == ("[2]", True)
    watch = tokenizer.watch(("never",))
    assert watch is not None and not any(map(watch.is_stopped_by, whole[:-1]))
    assert watch.text == tokenizer.text(whole)
    assert tokenizer.has_special_tags
    assert set(special) <= set(prompts["special_tokens"]), "an opponent cannot write them"
    assert len(prompts["ends_of_thinking"]) == 1
    assert chat_template != HARMONY or template.stop == (), "the end of a channel does not end the answer"


def test_added_token_that_is_not_special_ends_a_turn_as_a_string(tmp_path):
    tokenizer = Tokenizer(make_odd_tokenizer(tmp_path, plain=TURNS, chat_template=CHATML + ASKED))
    template = template_of(tokenizer, chat_config("chat"))
    assert template.stop == ("<|im_end|>",)
    watch = tokenizer.watch(template.stop)
    assert watch is not None and any(map(watch.is_stopped_by, tokenizer.encode("so<|im_end|>").tolist()))
    assert watch.text == "so"


def test_thought_that_a_template_opens_itself_ends_by_its_own_tags(tmp_path):
    tokenizer = Tokenizer(make_odd_tokenizer(tmp_path, special=["[THINK]", "[/THINK]"]))
    templates = templates_for(chat_config("default-think"), tokenizer.prompts([]))
    assert templates["default-think"].tags == ("<think>", "</think>")
    assert templates["default-think"].opened_thinking == "<think>"
    assert templates["default"].tags == ("[THINK]", "[/THINK]")


def test_known_tags_stay_in_the_text_also_beside_those_of_the_model(tmp_path):
    special = ["<think>", "</think>", "[THINK]", "[/THINK]"]
    tokenizer = Tokenizer(make_odd_tokenizer(tmp_path, special=special, chat_template=CHATML + ASKED + "{# [THINK] #}"))
    tokenizer.prompts([])
    assert tokenizer.text(tokenizer.encode("<think>a</think>[THINK]b[/THINK]c").tolist()) == (
        "<think>a</think>[THINK]b[/THINK]c"
    )


def test_token_of_unknown_text_stays_out_of_the_text(tmp_path):
    """Some tokenizers make it of the characters of tags that they do not know."""
    import tokenizers
    import transformers

    fast = tokenizers.Tokenizer(tokenizers.models.BPE({"<unk>": 0, "0": 1, " ": 2, "1": 3}, [], unk_token="<unk>"))
    fast.add_special_tokens(["<unk>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>").save_pretrained(tmp_path)
    assert not Tokenizer(str(tmp_path)).has_special_tags


def streamed(ids: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(BYTE_TOKENS, skip_special_tokens=True)
    return [stream.step(token_id) for token_id in ids]


def test_character_comes_out_with_its_last_byte_and_a_stop_string_after_invalid_ones():
    assert streamed(ids_of("a", "\u2581a", "é".encode(), "b")) == ["a", " a", "", "é", "b"]
    watch = StopWatch(BYTE_TOKENS, ("b]",))
    ids = ids_of("a", "é".encode(), b"\x80", "[", "b", "]", "a")
    size = next(count for count, token in enumerate(ids, start=1) if watch.is_stopped_by(token))
    assert size == len(ids) - 1
    assert watch.text == "aé\ufffd["


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (ids_of(b"\xc3\xa9\x80", "b"), "é\ufffdb"),
        (ids_of("a", "🎲".encode(), b"\xc3", "\u2581a", "b"), "a🎲\ufffd ab"),
        (ids_of(b"AB\xc3", "b", b"\x80", "b"), "AB\ufffdb\ufffdb"),
    ],
)
def test_invalid_bytes_do_not_change_text_already_returned(ids, expected):
    assert "".join(streamed(ids)) == expected
