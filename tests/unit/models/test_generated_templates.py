"""Prompts have the token ids of transformers' own `apply_chat_template`, with any tokenizer and chat template."""

import tempfile
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.chat_configs import ASKED, CHATML, TURNS, chat_config, template_of
from fakes.odd_tokenizers import END, make_odd_tokenizer
from unstable_lite.errors import ModelError
from unstable_lite.games.answers import END_OF_THINKING
from unstable_lite.games.templates import AS_IS, TEMPLATES, ChatTemplate, chats_in_use, without_markup
from unstable_lite.models import BUILTIN
from unstable_lite.models.tokenization import Tokenizer

SYSTEM_ROLES = {
    "shown": "",
    "dropped": "{% if m.role != 'system' %}",
    "raising": "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
}
NAMES = [("<s>", "<s>"), ("[gMASK]<sop>", "[gMASK] <sop>"), ("", "")]
"""Prefix as a chat template writes it and as a post-processor names it."""


def own_ids(path: str, system: str, user: str, thinking: bool = True) -> list[int]:
    """Return the ids that transformers makes of the messages, or of one message if there is no system role."""
    whole = transformers.AutoTokenizer.from_pretrained(path)
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": user}]
    ids: list[int] = whole.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
    )
    return ids


texts = st.text(st.sampled_from("aZ0 \n\té🎲{}&'\"%$\\._-"), max_size=12).filter(str.strip)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_generated_conversation_has_the_tokens_that_transformers_makes(data):
    draw = data.draw
    written, _ = draw(st.sampled_from(NAMES), "prefix of the chat template")
    _, added = draw(st.sampled_from(NAMES), "prefix of the post-processor")
    suffix = draw(st.sampled_from([[], [END], ["<sop>", END]]))
    role, trim = draw(st.sampled_from(sorted(SYSTEM_ROLES))), draw(st.sampled_from(["", " | trim"]))
    opened = draw(st.sampled_from(["", "<think>\n", "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"]))
    is_bare = draw(st.booleans(), "an answer has no header")
    answers = "" if is_bare else "{% if add_generation_prompt %}<|im_start|>assistant\n" + opened + "{% endif %}"
    start, end = ("[INST]", " [/INST]") if is_bare else ("<|im_start|>{{ m.role }}\n", "<|im_end|>\n")
    turn = (
        "{% if m.role == 'assistant' %}" + ("" if is_bare else "<|im_start|>assistant\n") + "{{ m.content }}<|im_end|>"
        "{% else %}" + start + "{{ m.content" + trim + " }}" + end + "{% endif %}"
    )
    turn = SYSTEM_ROLES[role] + turn + "{% endif %}" * (role == "dropped")
    markup = ["<s>", "[gMASK]", "<sop>", *TURNS, "<think>", "</think>", "[INST]", "[/INST]"]
    num_special = draw(st.integers(3, len(markup)))
    system = draw(st.sampled_from(["", "Be brief.", "\nBe brief. {game}\n"]))
    user = draw(st.sampled_from(["{observation}", "See:\n{observation}", "{observation}\n\nMove.", " {observation}. "]))
    thinking = draw(st.booleans())
    with tempfile.TemporaryDirectory() as directory:
        path = make_odd_tokenizer(
            Path(directory),
            special=markup[:num_special],
            plain=markup[num_special:],
            around=(added.split(), suffix),
            chat_template=written + "{% for m in messages %}" + turn + "{% endfor %}" + answers,
            **({"bos_token": "<s>"} if draw(st.booleans(), "the tokenizer names a BOS") else {}),
        )
        tokenizer = Tokenizer(path)
        config = chat_config(mine={"chat": True, "system": system, "user": user, "thinking": thinking})
        template = template_of(tokenizer, config)
        for observation in draw(st.lists(texts, min_size=1, max_size=3)):
            sent = user.replace("{observation}", without_markup(observation))
            game = ChatTemplate("", "{game}{observation}").message("", 2)
            named = system.replace("{game}", game)
            asked = (named, sent) if role == "shown" else ("", f"{named}\n\n{sent}" if system else sent)
            prompt = template.prompt(observation, 2)
            ids = tokenizer.encode(prompt).tolist()
            assert ids == own_ids(path, *asked, thinking)
            answer = tokenizer.encode_completion(prompt, "\\boxed{[0]}", template.stop).tolist()
            assert ids + answer[:-1] == tokenizer.encode(prompt + "\\boxed{[0]}").tolist()
        whole = transformers.AutoTokenizer.from_pretrained(path)
        bare = whole("text", add_special_tokens=False)["input_ids"]
        assert tokenizer.encode("text").tolist() == [*map(whole.convert_tokens_to_ids, added.split()), *bare]
        assert tokenizer.encode(added.replace(" ", "") + "text").tolist() == tokenizer.encode("text").tolist()
        assert template.opened_thinking == ("<think>" if answers and opened == "<think>\n" else "")


@pytest.mark.parametrize("changed", ["m.content | e", "m.content | replace('%', '')", "m.content | tojson"])
def test_chat_template_that_changes_a_text_is_refused_with_both_ids(tmp_path, changed):
    chat_template = CHATML.replace("m.content", changed) + ASKED
    tokenizer = Tokenizer(make_odd_tokenizer(tmp_path, special=TURNS, chat_template=chat_template))
    with pytest.raises(
        ModelError, match=r"changes the text of prompt_template 'mine'.*tokens \[258, .*own are \[258, "
    ):
        tokenizer.prompts(chats_in_use(chat_config(mine={"chat": True, "user": "See {observation}"})))


@pytest.mark.parametrize("header", ["<|im_start|>assistant\n", "<|assistant|>"])
def test_template_without_generation_prompt_is_refused_with_the_header(tmp_path, header):
    turn = "{% if m.role == 'user' %}<|im_start|>user\n{% else %}" + header + "{% endif %}{{ m.content }}<|im_end|>\n"
    chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    tokenizer = Tokenizer(make_odd_tokenizer(tmp_path, special=TURNS, chat_template=chat_template))
    with pytest.raises(ModelError, match=r"writes '<.*assistant.*' before an answer.*Set assistant to this text"):
        tokenizer.prompts(chats_in_use(chat_config(mine={"chat": True, "user": "{observation}"})))
    config = chat_config(mine={"chat": True, "user": "{observation}", "assistant": header})
    template = template_of(tokenizer, config)
    assert template.prompt("o", 2) == f"<|im_start|>user\no<|im_end|>\n{header}"


def test_mark_of_a_prompt_without_prefix_cannot_come_from_an_opponent(tmp_path):
    path = make_odd_tokenizer(tmp_path, special=[*TURNS, "<s>"], around=(["<s>"], []), chat_template=CHATML + ASKED)
    tokenizer, config = Tokenizer(path), chat_config(mine={"chat": True, "user": "{observation}"})
    template = template_of(tokenizer, config)
    assert template.text.startswith(AS_IS + "<|im_start|>user")
    assert tokenizer.encode(template.prompt("o", 2)).tolist()[0] == tokenizer._fast.token_to_id("<|im_start|>")
    assert tokenizer.encode(TEMPLATES["tiny"].prompt(AS_IS, 2)).tolist().count(tokenizer._fast.token_to_id("<s>")) == 1
    assert without_markup(AS_IS) != AS_IS


@pytest.mark.parametrize(
    ("post", "reason"),
    [
        ("$A <|pad|> $A", r"makes \[17, 222, 18, 0, 17, 222, 18\] of the tokens \[17,"),
        ("<|pad|>", "no token for a text"),
    ],
)
def test_post_processor_that_changes_the_text_is_refused(tmp_path, post, reason):
    import tokenizers

    path = make_odd_tokenizer(tmp_path)
    fast = tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json")
    fast.post_processor = tokenizers.processors.TemplateProcessing(post, special_tokens=[("<|pad|>", 0)])
    fast.save(f"{path}/tokenizer.json")
    with pytest.raises(ModelError, match=reason):
        Tokenizer(path)


@pytest.mark.parametrize("model", BUILTIN)
def test_built_in_models_encode_as_their_tokenizer_does(model):
    path = str(BUILTIN[model])
    tokenizer, whole = Tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
    for template in TEMPLATES.values():
        prompt = template.prompt("[GAME] ä 🎲 [0]\n", 2)
        assert tokenizer.encode(prompt).tolist() == whole(prompt)["input_ids"], template.name
        completion = tokenizer.encode_completion(prompt, f"{END_OF_THINKING}\\boxed{{[0]}}", template.stop).tolist()
        assert whole.decode(completion[:-1]) == f"{END_OF_THINKING}\\boxed{{[0]}}"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "Unheard"}}'),
        ("tokenizer_config.json", '{"tokenizer_class": 7}'),
        ("chat_template.jinja", "{% for m in messages %}"),
        ("chat_template.jinja", "{{ messages[0].content[9000:] + 1 }}"),
        ("chat_template.jinja", "{{ 1 // (messages | length - messages | length) }}"),
    ],
)
def test_damaged_tokenizer_is_a_model_error_with_its_path(tmp_path, file, content):
    path = make_odd_tokenizer(tmp_path, special=TURNS, chat_template=CHATML + ASKED)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer(path).prompts(chats_in_use(chat_config(mine={"chat": True, "user": "{observation}"})))
