"""An HTTP server on loopback that answers as vLLM's does, without a model, until a test makes it misbehave."""

import contextlib
import functools
import json
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fakes.http_servers import QuietHandler, http_server
from unstable_lite.models import BUILTIN
from unstable_lite.models.tokenization import Tokenizer

BASE = "tiny"
IDS, LOGPROBS = [5, 6, 7], [-0.5, -1.25, -2.0]
Answer = tuple[int, Any]
"""Status and body: bytes are sent unchanged, anything else as JSON."""


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(str(BUILTIN["builtin:tiny"]))


class FakeVLLM:
    def __init__(self) -> None:
        self.tokenizer = _tokenizer()
        self.loras: dict[str, str] = {}
        """LoRA paths by name."""
        self.seen: list[tuple[str, str, Any]] = []
        """Key, path and body of each request."""
        self.misbehave: Callable[[str, Any], Answer | None] = lambda _path, _body: None
        """Return an answer that replaces the right one, or None."""
        self.cut_next = 0
        """Number of connections to close without an answer."""
        self.hangs = threading.Event()
        self.is_restart = threading.Event()
        self.is_raw = False
        """Whether log-probabilities are reported before temperature is applied."""
        self.url = ""

    def answer(self, path: str, body: Any) -> Answer:
        if (instead := self.misbehave(path, body)) is not None:
            return instead
        if path == "/v1/models":
            card = {"id": BASE, "root": BASE, "parent": None, "max_model_len": 512}
            return 200, {
                "data": [card, *({"id": name, "root": root, "parent": BASE} for name, root in self.loras.items())]
            }
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/tokenize":
            return 200, {"tokens": self.tokenizer.encode(body["prompt"]).tolist()}
        if path == "/v1/load_lora_adapter":
            return self._load(body)
        if path == "/v1/unload_lora_adapter":
            gone = self.loras.pop(body["lora_name"], None)
            return (200, b"Success") if gone else error(404, "cannot be found")
        if body["model"] != BASE and body["model"] not in self.loras:
            return error(404, f"The model `{body['model']}` does not exist.")
        return 200, self.completion(body)

    def _load(self, body: Any) -> Answer:
        if body["lora_path"].startswith("/nonexistent"):
            return error(404, f"Loading lora failed: No adapter found for {body['lora_path']}")
        if body["lora_name"] in self.loras:
            return error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        self.loras[body["lora_name"]] = body["lora_path"]
        return 200, b"Success"

    def completion(self, body: Any, **changes: Any) -> Any:
        """Return a right completion with changes: `model`, `logprobs` or any field of a choice."""
        logits = [-index / (1.0 if self.is_raw else body["temperature"]) for index in range(1 + body["logprobs"])]
        total = math.log(sum(map(math.exp, logits)) + 0.5)
        top = {f"token_id:{index}": logit - total for index, logit in enumerate(logits)}
        model = changes.pop("model", body["model"])
        logprobs = {"token_logprobs": changes.pop("logprobs", LOGPROBS), "top_logprobs": [top]}
        choice = {
            "text": "text",
            "logprobs": logprobs,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": IDS,
            "prompt_token_ids": body["prompt"],
        }
        return {"model": model, "choices": [choice | changes], "usage": {"prompt_tokens": 1}}


def error(status: int, message: str) -> Answer:
    return status, {"error": {"message": message, "code": status}}


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[FakeVLLM]:
    fake = FakeVLLM()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.respond(None)

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def respond(self, body: Any) -> None:
            fake.seen.append((self.headers["authorization"] or "", self.path, body))
            if fake.hangs.is_set() and self.path == "/v1/completions":
                fake.is_restart.wait(20)
            if fake.cut_next:
                fake.cut_next -= 1
                self.close_connection = True
                return
            status, answer = fake.answer(self.path, body)
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with http_server(Handler, port) as fake.url:
        try:
            yield fake
        finally:
            fake.is_restart.set()
