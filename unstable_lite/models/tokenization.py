"""Conversion of text to token ids and back, the same for every engine with a model.

Owns the tokenizer and the ends of a completion: the model's end tokens, and the requests' stop strings. Knows no
weights.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
import tokenizers
import transformers

from unstable_lite.errors import ModelError
from unstable_lite.games.templates import MARKUP, ChatTemplate, without_markup
from unstable_lite.games.thinking import END_OF_THINKING
from unstable_lite.models.detokenizer import IncrementalDetokenizer
from unstable_lite.transport.messages import Generate
from unstable_lite.types import TokenIds

KNOWN_PROMPTS = 8192
"""Number of prompts whose tokens are cached, because games of one env open alike."""


_CONTROL_LIKE = re.compile(r"<[^<>]*\w[^<>]*>|\[/?[A-Z][A-Z_]*\]", re.DOTALL)
"""Pattern of added tokens that control a model although they are not marked as special: `</think>`, `[/INST]`.

Not `[0]`, `[rock]` or a run of spaces: a tokenizer made for games may have moves among its added tokens.
"""


class Tokenizer:
    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"{model_path}: no tokenizer can be loaded from it: {error}") from error
        if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
            raise ModelError(
                f"{model_path}: its tokenizer has no fast (Rust) version; use a model with a tokenizer.json"
            )
        self._fast: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        if not self._fast.encode("0").ids:
            # transformers makes an empty tokenizer if there is none.
            raise ModelError(f"{model_path}: its tokenizer returns no token for a text; is its tokenizer.json missing?")
        self._path, self._whole = model_path, tokenizer
        self._bos: str | None = tokenizer.bos_token
        self._eos_id: int | None = tokenizer.eos_token_id
        self.stop_ids = frozenset(_stop_ids(model_path, tokenizer, trust_remote_code))
        added = self._fast.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        # No space can break a token of one character.
        self._control_ids = {
            token.content: token_id
            for token_id, token in added.items()
            if len(token.content) > 1 and (token.special or _CONTROL_LIKE.fullmatch(token.content))
        }
        self.encode = functools.lru_cache(KNOWN_PROMPTS)(self._encode)
        self.stop_ids_with = functools.cache(self._stop_ids_with)

    def prompt_ids(self, request: Generate) -> TokenIds:
        """Return the ids that a request asks to complete."""
        return self.encode(request.prompt) if request.prompt_ids is None else request.prompt_ids

    def _encode(self, prompt: str) -> TokenIds:
        # A template may already begin with this token, and the model has never seen it twice.
        has_bos = self._bos is not None and prompt.startswith(self._bos)
        # Only the batch call does not also compute the characters of each token.
        (encoding,) = self._fast.encode_batch_fast([prompt], add_special_tokens=not has_bos)
        return np.array(encoding.ids, np.int32)

    def _stop_ids_with(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Return the model's end tokens and the stop strings that are a special token: none appears in the text."""
        return self.stop_ids | {self._special_ids[text] for text in stop if text in self._special_ids}

    def stop_strings(self, stop: tuple[str, ...]) -> list[str]:
        """Return the stop strings to search for in the text: those that are not a special token."""
        return [text for text in stop if text and text not in self._special_ids]

    def prompts(self, chats: Sequence[ChatTemplate]) -> dict[str, Any]:
        """Return the facts with which the orchestrator writes this model's prompts; see `templates.templates_for`.

        `special_tokens`: strings that no observation may contain; `chats`: by name, the text of each with the
        placeholders still in it, and the stop strings that close an answer; `end_of_thinking`: ids that end a thinking
        whose budget is spent. Raises ModelError if the tokenizer has no
        chat template, or one that does not accept these messages, or makes a control token of broken markup.
        """
        control_tokens = sorted(self._control_ids)
        self._check_breaking(control_tokens)
        return {
            "special_tokens": control_tokens,
            "chats": {chat.name: self._lay_out(chat) for chat in chats},
            "end_of_thinking": self._continuation(".", END_OF_THINKING),
        }

    def _check_breaking(self, control_tokens: list[str]) -> None:
        """Raise ModelError if an observation could form a control token although its markup is broken."""
        # Any text that a tokenizer does not know may become its token for unknown text.
        control_ids = set(self._control_ids.values()) - {self._whole.unk_token_id}
        markup = (*MARKUP, *control_tokens)
        broken = [without_markup(token, markup) for token in control_tokens]
        for token, text, encoding in zip(
            control_tokens, broken, self._fast.encode_batch_fast(broken, add_special_tokens=False), strict=True
        ):
            if formed := control_ids.intersection(encoding.ids):
                raise ModelError(
                    f"{self._path}: an opponent that writes {token!r} would form a control token of the prompt: it is "
                    f"shown as {text!r}, of which the tokenizer makes {self._fast.id_to_token(formed.pop())!r}. Use a "
                    "tokenizer that keeps spaces and has no such token"
                )

    def conversation(self, messages: list[dict[str, str]], thinking: bool = True) -> tuple[str, tuple[str, ...]]:
        """Return the prompt for the next answer in a conversation, and the stop strings that close the answer.

        messages: `role` and `content` of each. Raises ModelError if the tokenizer has no chat template, or one that
        does not accept these messages.
        """
        chat = ChatTemplate("conversation", "{observation}", thinking=thinking)
        _, end_of_turn = self._lay_out(chat)
        try:
            return self._render(chat, messages), tuple(end_of_turn)
        except (ValueError, TypeError, jinja2.TemplateError) as error:
            raise ModelError(f"the chat template of the model's tokenizer refuses these messages: {error}") from error

    def _lay_out(self, chat: ChatTemplate) -> list[Any]:
        messages = [{"role": "user", "content": chat.user}]
        system = [{"role": "system", "content": chat.system}] if chat.system else []
        try:
            try:
                text = self._render(chat, system + messages)
            except jinja2.TemplateError:
                # Some models have no system role: its text then opens the user's message.
                messages = [{"role": "user", "content": f"{chat.system}\n\n{chat.user}"}]
                text = self._render(chat, messages)
            answer = "ANSWER"
            with_answer = self._render(chat, [*messages, {"role": "assistant", "content": answer}], is_prompt=False)
        except (ValueError, jinja2.TemplateError) as error:
            raise ModelError(
                f"{self._path}: its tokenizer's chat template cannot lay out prompt_template {chat.name!r}: {error}. "
                "Choose a template that brings its own markup"
            ) from error
        if text.count("{observation}") != 1:
            raise ModelError(
                f"{self._path}: its tokenizer's chat template shows the text of prompt_template {chat.name!r} not "
                f"at all or not once: {text!r}"
            )
        closing = with_answer.rpartition(answer)[2].lstrip()
        return [text, [token for token in self._special_ids if closing.startswith(token)]]

    def _render(self, chat: ChatTemplate, messages: list[dict[str, str]], is_prompt: bool = True) -> str:
        text = self._whole.apply_chat_template(
            messages, add_generation_prompt=is_prompt, tokenize=False, enable_thinking=chat.thinking
        )
        assert isinstance(text, str)
        return text

    def encode_completion(self, prompt: str, text: str, stop: tuple[str, ...]) -> TokenIds:
        """Return `text` as a model would write it after `prompt`, with the token that then stops it.

        Raises ModelError for a model that no token stops.
        """
        if (stop_id := self._stop_id(stop)) is None:
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

    def _stop_id(self, stop: tuple[str, ...]) -> int | None:
        """Return the token that ends the template's turn if the engine stops at one, else the model's end token."""
        stop_ids = self.stop_ids_with(stop)
        wanted = [*map(self._fast.token_to_id, stop), self._eos_id, *sorted(stop_ids)]
        return next((token_id for token_id in wanted if token_id in stop_ids), None)

    def text(self, completion_ids: list[int], stop_watch: StopWatch | None = None) -> str:
        """Return a completion as text, without special tokens and without the stop string."""
        if stop_watch is not None and stop_watch.has_stopped:
            return stop_watch.text
        end = -1 if completion_ids[-1] in self.stop_ids else None
        return self._fast.decode(completion_ids[:end], skip_special_tokens=True)

    def watch(self, stop: tuple[str, ...], is_streamed: bool = False) -> StopWatch | None:
        return StopWatch(self._fast, stop) if any(stop) or is_streamed else None


class StopWatch:
    """Reader of one growing completion that finds the first stop string."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, stop: tuple[str, ...]) -> None:
        self.text = ""
        self.has_stopped = False
        self._stop = tuple(filter(None, stop))
        self._num_withheld = max(map(len, self._stop), default=1) - 1
        """Number of the newest characters that may be the beginning of a stop string."""
        self._num_taken = 0
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

    def new_text(self) -> str:
        """Return the text since the last call, as far as no stop string can take it back."""
        start, self._num_taken = self._num_taken, max(self._num_taken, len(self.text) - self._num_withheld)
        return self.text[start : self._num_taken]


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
