"""Text to token ids and back, the same way for every engine with a model.

Owns the tokenizer and what ends a completion: the model's own end tokens, and the requests' stop strings. Knows no
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
from unstable_lite.token_text import TextStream
from unstable_lite.types import TokenIds

KNOWN_PROMPTS = 8192
"""Games of one env open alike: so many prompts are tokenised once."""


_CONTROL_LIKE = re.compile(r"<[^<>]*\w[^<>]*>|\[/?[A-Z][A-Z_]*\]", re.DOTALL)
"""Added tokens that control a model although they are not marked as special: `</think>`, `<tool_call>`, `[/INST]`.

Not `[0]`, `[rock]` or a run of spaces: a tokenizer made for games may have moves among its added tokens.
"""


class Tokenizer:
    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"{model_path}: no tokenizer can be loaded from it: {error}") from error
        if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
            raise ModelError(f"{model_path}: its tokenizer has no fast (Rust) form; use a model with a tokenizer.json")
        self._fast: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        if not self._fast.encode("0").ids:
            # transformers makes up an empty tokenizer where there is none.
            raise ModelError(f"{model_path}: its tokenizer turns text into nothing; is its tokenizer.json missing?")
        self._path, self._whole = model_path, tokenizer
        self._bos: str | None = tokenizer.bos_token
        self._eos_id: int | None = tokenizer.eos_token_id
        self.stop_ids = frozenset(_stop_ids(model_path, tokenizer, trust_remote_code))
        added = self._fast.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        # A token of one character cannot be broken by a space.
        self._control_ids = {
            token.content: token_id
            for token_id, token in added.items()
            if len(token.content) > 1 and (token.special or _CONTROL_LIKE.fullmatch(token.content))
        }
        self.encode = functools.lru_cache(KNOWN_PROMPTS)(self._encode)
        self.stop_ids_with = functools.cache(self._stop_ids_with)

    def _encode(self, prompt: str) -> TokenIds:
        # A template may have written the first token already; twice is a prompt the model has never seen.
        has_bos = self._bos is not None and prompt.startswith(self._bos)
        # The batch call is the one that does not also work out which characters each token came from.
        (encoding,) = self._fast.encode_batch_fast([prompt], add_special_tokens=not has_bos)
        return np.array(encoding.ids, np.int32)

    def _stop_ids_with(self, stop: tuple[str, ...]) -> frozenset[int]:
        """The model's end tokens, and the stop strings that are a special token: those never show up in the text."""
        return self.stop_ids | {self._special_ids[text] for text in stop if text in self._special_ids}

    def stop_strings(self, stop: tuple[str, ...]) -> list[str]:
        """Return the stop strings that must be looked for in the text: those that are not a special token."""
        return [text for text in stop if text and text not in self._special_ids]

    def prompts(self, chats: Sequence[ChatTemplate]) -> dict[str, Any]:
        """What the orchestrator needs to write this model's prompts: `templates.templates_for`.

        `special_tokens`: strings that no observation may contain; `chats`: by name, the text of each with the
        placeholders still in it, and the stop strings that close an answer. Raises ModelError where the tokenizer has
        no chat template, or one that does not take these messages, or makes a control token of broken markup.
        """
        control_tokens = sorted(self._control_ids)
        self._check_breaking(control_tokens)
        return {"special_tokens": control_tokens, "chats": {chat.name: self._lay_out(chat) for chat in chats}}

    def _check_breaking(self, control_tokens: list[str]) -> None:
        """Raise ModelError if an observation could form a control token although its markup is broken."""
        # Whatever a tokenizer does not know may become its token for unknown text.
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

    def _lay_out(self, chat: ChatTemplate) -> list[Any]:
        messages = [{"role": "user", "content": chat.user}]
        system = [{"role": "system", "content": chat.system}] if chat.system else []
        try:
            try:
                text = self._render(chat, system + messages)
            except jinja2.TemplateError:
                # Some models know no system role: what it says opens the user's message.
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
                f"{self._path}: its tokenizer's chat template does not show what prompt_template {chat.name!r} says, "
                f"or not once: {text!r}"
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
        """`text` as a model would write it after `prompt`, and the token that then stops it.

        Raises ModelError for a model that no token stops.
        """
        if (stop_id := self._stop_id(stop)) is None:
            raise ModelError(f"{self._path}: the model has no end-of-sequence token: no answer can be taught to end")
        prompt_ids = self.encode(prompt).tolist()
        # Some tokenizers put a space before the first word of a text, which this is not.
        whole = self._encode(prompt + text).tolist()
        is_continued = whole[: len(prompt_ids)] == prompt_ids
        ids = whole[len(prompt_ids) :] if is_continued else self._fast.encode(text, add_special_tokens=False).ids
        return np.array([*ids, stop_id], np.int32)

    def _stop_id(self, stop: tuple[str, ...]) -> int | None:
        """The token that ends the template's turn if there is one that the engine stops at, else the model's own."""
        stop_ids = self.stop_ids_with(stop)
        wanted = [*map(self._fast.token_to_id, stop), self._eos_id, *sorted(stop_ids)]
        return next((token_id for token_id in wanted if token_id in stop_ids), None)

    def text(self, completion_ids: list[int], stop_watch: StopWatch | None = None) -> str:
        """A completion as text, without special tokens and without what stopped it."""
        if stop_watch is not None and stop_watch.has_stopped:
            return stop_watch.text
        end = -1 if completion_ids[-1] in self.stop_ids else None
        return self._fast.decode(completion_ids[:end], skip_special_tokens=True)

    def watch(self, stop: tuple[str, ...]) -> StopWatch | None:
        return StopWatch(self._fast, stop) if any(stop) else None


class StopWatch:
    """Reads one completion as it grows, and knows where a stop string begins."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, stop: tuple[str, ...]) -> None:
        self.text = ""
        self.has_stopped = False
        self._stop = tuple(filter(None, stop))
        self._stream = TextStream(tokenizer, skip_special_tokens=True)

    def is_stopped_by(self, token_id: int) -> bool:
        """Whether this token completes a stop string; `text` is then what stands before it."""
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


def _stop_ids(model_path: str, tokenizer: transformers.PreTrainedTokenizerBase, trust_remote_code: bool) -> set[int]:
    """The end tokens of the tokenizer, of the model's config, and of its generation config."""
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
