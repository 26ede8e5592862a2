"""Conversion of text to token ids and back, the same for every engine with a model.

Owns the tokenizer and the ends of a completion: the model's end tokens, and the requests' stop strings. Knows no
weights.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2
import numpy as np
import tokenizers
import transformers

from unstable_lite.errors import ModelError
from unstable_lite.games.answers import (
    END_OF_THINKING,
    KNOWN_TAGS,
    THINK,
    Tags,
    end_of_thinking,
    find_tags,
    without_thinking,
)
from unstable_lite.games.templates import AS_IS, MARKUP, TRIM, ChatTemplate, without_markup
from unstable_lite.models import model_errors
from unstable_lite.models.local_tokenizer import IncrementalDetokenizer
from unstable_lite.transport.messages import Generate
from unstable_lite.types import TokenIds

KNOWN_PROMPTS = 8192
"""Number of prompts whose tokens are cached, because games of one env open alike."""


_CONTROL_LIKE = re.compile(r"<[^<>]*\w[^<>]*>|\[/?[A-Z][A-Z_]*\]", re.DOTALL)
"""Pattern of added tokens that control a model although they are not marked as special: `</think>`, `[/INST]`.

Not `[0]`, `[rock]` or a run of spaces: a tokenizer made for games may have moves among its added tokens.
"""


_SAMPLE = """[GAME] "The board" {is} 100 % empty.\n\n  a  <b> & 'c' ä 🎲"""
"""Observation with characters that a chat template may change."""
_MOVE = "[a B 1 2]"
"""Answer that any tokenizer must be able to write."""
_SPELLINGS: tuple[Callable[[str], str], ...] = (
    str,
    str.upper,
    lambda text: "".join(chr(ord(one) + 0xFEE0) if "!" <= one <= "~" else one for one in text),
    "\N{ZERO WIDTH SPACE}".join,
    "\N{COMBINING ACUTE ACCENT}".join,
)
"""Spellings of a token, of which a tokenizer that normalises text may make that token."""
ADVICE, ANSWER = "choose a template that brings its own markup", "ANSWER"
_CLOCK = "{%% macro strftime_now(format) %%}%d{%% endmacro %%}"


class Tokenizer:
    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        with model_errors(f"{model_path}: its tokenizer"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
            raise ModelError(
                f"{model_path}: its tokenizer has no fast (Rust) version; use a model with a tokenizer.json"
            )
        self._fast: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        if not self._fast.encode("0", add_special_tokens=False).ids:
            # transformers makes an empty tokenizer if there is none.
            raise ModelError(f"{model_path}: its tokenizer returns no token for a text; is its tokenizer.json missing?")
        self._path, self._whole = model_path, tokenizer
        self._prefix_ids = self._find_prefix()
        prefix = "".join(self._fast.id_to_token(token_id) or "" for token_id in self._prefix_ids)
        self._prefixes = tuple(filter(None, (AS_IS, tokenizer.bos_token, prefix)))
        """Beginnings of a prompt to which nothing is added: the model has never seen its prefix twice."""
        self._eos_id: int | None = tokenizer.eos_token_id
        with model_errors(model_path):
            self.stop_ids = frozenset(_stop_ids(model_path, tokenizer, trust_remote_code))
        added = self._fast.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        # No space can break a token of one character.
        self._control_ids = {
            token.content: token_id
            for token_id, token in added.items()
            if len(token.content) > 1 and (token.special or _CONTROL_LIKE.fullmatch(token.content))
        }
        self._chat_template = ""
        """Chat template for messages without tools; "" if there is none."""
        with contextlib.suppress(ValueError):
            self._chat_template = str(tokenizer.get_chat_template())
        self._tags = find_tags(self._chat_template, self._control_ids)
        self.has_special_tags = False
        """Whether tags of thoughts are special tokens, which other detokenizers leave out."""
        self._show(KNOWN_TAGS)
        self.encode = functools.lru_cache(KNOWN_PROMPTS)(self._encode)
        self.stop_ids_with = functools.cache(self._stop_ids_with)

    def _find_prefix(self) -> list[int]:
        """Return the ids that the tokenizer's post-processor puts before a text; it may also put some after it.

        Raises ModelError if it changes the text itself.
        """
        bare: list[int] = self._fast.encode("0 1", add_special_tokens=False).ids
        whole: list[int] = self._fast.encode("0 1").ids
        starts = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
        if (start := next(starts, None)) is None:
            raise ModelError(f"{self._path}: the post-processor of its tokenizer makes {whole} of the tokens {bare}")
        return whole[:start]

    def _show(self, thoughts: Iterable[Tags]) -> None:
        """Make the special tokens of tags appear in the text of completions, because actions are read from it."""
        encodings = self._fast.encode_batch_fast([tag for tags in thoughts for tag in tags], add_special_tokens=False)
        ids = {token_id for encoding in encodings for token_id in encoding.ids} - {self._whole.unk_token_id}
        if not (shown := {token for token, token_id in self._special_ids.items() if token_id in ids}):
            return
        state = json.loads(self._fast.to_str())
        for token in state["added_tokens"]:
            token["special"] &= token["content"] not in shown
        self._fast = tokenizers.Tokenizer.from_str(json.dumps(state))
        for token in shown:
            del self._special_ids[token]
        self.has_special_tags = True

    def prompt_ids(self, request: Generate) -> TokenIds:
        """Return the ids that a request asks to complete."""
        return self.encode(request.prompt) if request.prompt_ids is None else request.prompt_ids

    def token(self, token_id: int) -> str | None:
        return self._fast.id_to_token(token_id)

    def _encode(self, prompt: str) -> TokenIds:
        prefix = [] if prompt.startswith(self._prefixes) else self._prefix_ids
        # Only the batch call does not also compute the characters of each token.
        (encoding,) = self._fast.encode_batch_fast([prompt.removeprefix(AS_IS)], add_special_tokens=False)
        return np.array([*prefix, *encoding.ids], np.int32)

    def _stop_ids_with(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Return the model's end tokens and the stop strings that are a special token: none appears in the text."""
        return self.stop_ids | {self._special_ids[text] for text in stop if text in self._special_ids}

    def stop_strings(self, stop: tuple[str, ...]) -> list[str]:
        """Return the stop strings to search for in the text: those that are not a special token."""
        return [text for text in stop if text and text not in self._special_ids]

    def prompts(self, chats: Sequence[ChatTemplate], own_tags: Sequence[Tags] = ()) -> dict[str, Any]:
        """Return the facts with which the orchestrator writes this model's prompts; see `templates.templates_for`.

        `special_tokens`: strings that no observation may contain; `chats`: by name, the text of each with the
        placeholders still in it, and the stop strings that close an answer; `dated`: names of those with a date;
        `chat_template`: the tokenizer's own; `end_of_thinking`: ids that end a thinking whose budget is spent;
        `ends_of_thinking`: those for other tags, by text.

        own_tags: tags of thoughts besides the model's. Raises ModelError if the tokenizer has no chat template, or one
        that does not accept or changes these messages, or makes a control token of broken markup, or changes answers.
        """
        control_tokens = sorted(self._control_ids)
        self._check_breaking(control_tokens)
        self._check_writing()
        tags = [*filter(None, (self._tags, *own_tags, *(chat.tags for chat in chats)))]
        self._show(tags)
        return {
            "special_tokens": control_tokens,
            "chats": {chat.name: self._lay_out(chat) for chat in chats},
            "dated": [chat.name for chat in chats if self._is_dated(chat)],
            "chat_template": self._chat_template,
            "end_of_thinking": self._continuation(".", END_OF_THINKING),
            "ends_of_thinking": {end: self._continuation(".", end) for end in map(end_of_thinking, tags)},
        }

    def _check_breaking(self, control_tokens: list[str]) -> None:
        """Raise ModelError if an observation could form a control token although its markup is broken."""
        # Any text that a tokenizer does not know may become its token for unknown text.
        control_ids = set(self._control_ids.values()) - {self._whole.unk_token_id}
        markup, spellings = (*MARKUP, *control_tokens), _SPELLINGS[: None if self._fast.normalizer else 1]
        written = [spelled(token) for token in control_tokens for spelled in spellings]
        broken = [without_markup(text, markup) for text in written]
        for token, text, encoding in zip(
            written, broken, self._fast.encode_batch_fast(broken, add_special_tokens=False), strict=True
        ):
            if formed := control_ids.intersection(encoding.ids):
                raise ModelError(
                    f"{self._path}: an opponent that writes {token!r} would form a control token of the prompt: it is "
                    f"shown as {text!r}, of which the tokenizer makes {self._fast.id_to_token(formed.pop())!r}. Use a "
                    "tokenizer that keeps spaces and has no such token"
                )

    def _check_writing(self) -> None:
        """Raise ModelError if an answer is another text after the tokenizer has written it."""
        text: str = self._fast.decode(self._fast.encode(_MOVE, add_special_tokens=False).ids)
        if text.strip() != _MOVE:
            raise ModelError(
                f"{self._path}: its tokenizer writes the answer {_MOVE!r} as {text!r}, so games would receive a "
                "different move; use a tokenizer that keeps a text as it is"
            )

    def _lay_out(self, chat: ChatTemplate) -> list[Any]:
        event = f"cannot lay out prompt_template {chat.name!r}"
        with model_errors(f"{self._path}: its tokenizer's chat template", event, ADVICE):
            messages = self._accepted(chat, _messages_of(chat))
            text, unprompted = self._render(chat, messages), self._render(chat, messages, is_prompt=False)
            with_answer = self._render(chat, [*messages, {"role": "assistant", "content": ANSWER}], is_prompt=False)
            padded = self._render(chat, _filled(messages, "\t{observation}\t"))
            own = self._whole.apply_chat_template(
                _filled(messages), add_generation_prompt=True, return_dict=False, **_switches(chat)
            )
        if text.count("{observation}") != 1:
            raise ModelError(
                f"{self._path}: its tokenizer's chat template shows the text of prompt_template {chat.name!r} not "
                f"at all or not once: {text!r}"
            )
        (filled,) = _filled([{"content": self._as_is(text)}])
        if (ours := self._encode(filled["content"]).tolist()) != own:
            raise ModelError(
                f"{self._path}: its tokenizer's chat template changes the text of prompt_template {chat.name!r}: a "
                f"prompt would be laid out as the tokens {ours}, and the tokenizer's own are {own}; {ADVICE}"
            )
        closers = self._closers(chat, "" if text != unprompted else text, with_answer)
        trims = [TRIM * (space not in padded) for space in ("\t{observation}", "{observation}\t")]
        return [self._as_is(text).replace("{observation}", "{observation}".join(trims)), closers]

    def _closers(self, chat: ChatTemplate, unprompted: str, with_answer: str) -> list[str]:
        """Return the tokens that close an answer, or the text that does if no token begins it.

        unprompted: the prompt if it does not ask for an answer, else empty. Raises ModelError if an answer has a header
        then.
        """
        before, _, closing = with_answer.rpartition(ANSWER)
        # Some templates move the system text to the last message, so only the text after the question is compared.
        asked, header = (text.rpartition("{observation}")[2] for text in (unprompted, before))
        num_shared = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, header, strict=False))])
        tags = chat.tags or self._tags or THINK
        markup = (without_thinking(header[num_shared:], tags) or "").strip()
        if unprompted and markup and not chat.assistant.startswith(markup):
            raise ModelError(
                f"{self._path}: its tokenizer's chat template writes {header[num_shared:]!r} before an answer, but not "
                "if it asks for one, so the model would have to write that first. Set assistant to this text in a "
                f"template of [templates], or {ADVICE}"
            )
        # A mark that ends a thought does not end the answer.
        closing = closing.strip().partition("\n")[0]
        ends = [token for token in self._control_ids if closing.startswith(token)] or [closing] * bool(closing)
        return [token for token in ends if token not in end_of_thinking(tags)]

    def _as_is(self, text: str) -> str:
        """Mark the text of a chat template that does not begin with the tokenizer's prefix: it gets none."""
        return text if text.startswith(self._prefixes) or not self._prefix_ids else AS_IS + text

    def _accepted(self, chat: ChatTemplate, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the messages, with the system text at the beginning of the user's if the model has no system role.

        Its chat template then raises, or leaves the text out.
        """
        first, *others = messages
        if first["role"] != "system" or not others:
            return messages
        content = first["content"].strip()
        with contextlib.suppress(jinja2.TemplateError):
            if self._render(chat, messages).count(content) > sum(one["content"].count(content) for one in others):
                return messages
        return [others[0] | {"content": f"{first['content']}\n\n{others[0]['content']}"}, *others[1:]]

    def _is_dated(self, chat: ChatTemplate) -> bool:
        clocks = [_CLOCK % year + self._chat_template for year in (2001, 2092)]
        messages = self._accepted(chat, _messages_of(chat))
        try:
            with model_errors(self._path):
                return len({self._render(chat, messages, template=clock) for clock in clocks}) > 1
        except ModelError:  # it computes with the date
            return True

    def _render(
        self, chat: ChatTemplate, messages: list[dict[str, str]], is_prompt: bool = True, template: str | None = None
    ) -> str:
        text = self._whole.apply_chat_template(
            messages,
            chat_template=template,
            add_generation_prompt=is_prompt,
            tokenize=False,
            **_switches(chat),
        )
        assert isinstance(text, str)
        return text

    def encode_completion(self, prompt: str, text: str, stop: tuple[str, ...]) -> TokenIds:
        """Return `text` as a model would write it after `prompt`, with the token that then stops it.

        Raises ModelError for a model that no token stops.
        """
        stop_ids = self.stop_ids_with(stop)
        # The token that ends the template's turn if the engine stops at one, else the model's end token.
        wanted = [*map(self._fast.token_to_id, stop), self._eos_id, *sorted(stop_ids)]
        if (stop_id := next((token_id for token_id in wanted if token_id in stop_ids), None)) is None:
            raise ModelError(
                f"{self._path}: the model has no end-of-sequence token, so it cannot learn to end an answer"
            )
        return np.array([*self._continuation(prompt, text), stop_id], np.int32)

    def _continuation(self, prompt: str, text: str) -> list[int]:
        """Return the ids of `text` after `prompt`."""
        prompt_ids = self.encode(prompt).tolist()
        # Some tokenizers put a space before the first word of a text, and this is not the first.
        whole = self._encode(prompt + text).tolist()
        is_continued = whole[: len(prompt_ids)] == prompt_ids
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return whole[len(prompt_ids) :] if is_continued else ids

    def text(self, completion_ids: list[int], stop_watch: StopWatch | None = None) -> str:
        """Return a completion as text, without special tokens and without the stop string."""
        if stop_watch is not None and stop_watch.has_stopped:
            return stop_watch.text
        end = -1 if completion_ids[-1] in self.stop_ids else None
        return self._fast.decode(completion_ids[:end], skip_special_tokens=True)

    def watch(self, stop: tuple[str, ...]) -> StopWatch | None:
        return StopWatch(self._fast, stop) if any(stop) else None


class StopWatch:
    """Reader of one growing completion that finds the first stop string."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, stop: tuple[str, ...]) -> None:
        self.text = ""
        self.has_stopped = False
        self._stop = tuple(filter(None, stop))
        self._stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)

    def is_stopped_by(self, token_id: int) -> bool:
        """Return whether this token completes a stop string; `text` is then the text before it."""
        new_text = self._stream.step(token_id)
        if not new_text:
            return False
        searched = len(self.text)
        self.text += new_text
        starts = [self.text.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stop]
        found = [start for start in starts if start >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.has_stopped = True
        return self.has_stopped


def _switches(chat: ChatTemplate) -> dict[str, Any]:
    """Return the variables with which chat templates turn thinking on: Qwen's, and that of DeepSeek and Granite."""
    return dict.fromkeys(("enable_thinking", "thinking"), chat.thinking)


def _messages_of(chat: ChatTemplate) -> list[dict[str, str]]:
    system = [{"role": "system", "content": chat.system}] if chat.system else []
    return [*system, {"role": "user", "content": chat.user}]


def _filled(messages: list[dict[str, str]], observation: str = _SAMPLE) -> list[dict[str, str]]:
    """Return messages with an observation in place of the placeholder."""
    return [one | {"content": one["content"].replace("{observation}", observation)} for one in messages]


def _stop_ids(model_path: str, tokenizer: transformers.PreTrainedTokenizerBase, trust_remote_code: bool) -> set[int]:
    """Return the end tokens of the tokenizer, of the model's config, and of its generation config."""
    ids: set[int] = set()
    sources = [getattr(tokenizer, "eos_token_id", None)]
    for read in (transformers.GenerationConfig.from_pretrained, transformers.AutoConfig.from_pretrained):
        try:
            sources.append(read(model_path, trust_remote_code=trust_remote_code).eos_token_id)
        except (OSError, ValueError, AttributeError):
            continue  # the file is optional, and so is its entry
    for source in sources:
        ids.update(source if isinstance(source, list) else [source] if source is not None else [])
    return ids
