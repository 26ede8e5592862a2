"""A vLLM OpenAI-compatible server, wherever it runs, as an engine: one worker talks to one server.

Owns the HTTP to it and the delivery of adapters. Tokenises by the code that all engines share: token ids go out, and
what comes back is held against what went out. A server that is gone, stuck, or was started again ends the worker: what
it owes is then asked elsewhere, and the worker that takes its place waits for the server, loads every adapter again and
sings the canary, as for any engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import reprlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import numpy as np

from unstable_lite.engines.adapters import BASE, AdapterVersions
from unstable_lite.engines.lora import bare_model, check_fits, read_adapter
from unstable_lite.engines.requests import Throughput, check_length
from unstable_lite.engines.sampling import GREEDY_BELOW
from unstable_lite.engines.servers import server_url
from unstable_lite.engines.tokenization import Tokenizer
from unstable_lite.errors import AdapterError, ModelError, RequestError
from unstable_lite.games.api_keys import RECEIVER_KEY, SERVER_KEY
from unstable_lite.games.templates import chats_in_use
from unstable_lite.models import resolve_model
from unstable_lite.models.positions import longest_sequence, longrope_limit
from unstable_lite.outside_files import CONFIG, WEIGHTS, adapter_digest
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import EngineStats, Failed, Generate, Generated
from unstable_lite.types import Generation, TokenIds

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_FOR_ANSWERS_S = 0.005
"""Before the worker looks for new requests again."""
RETRY_AFTER_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""After a failure that may pass; after the last one the server is taken for gone."""
BUSY = frozenset({429, 502, 503, 504})
NOT_SEEN_YET_S = (0.5, 1.0, 2.0, 4.0)
"""A folder on the network may show what is new a little later."""
DEADLINE_SHARE = 0.95
"""Of the orchestrator's own deadlines: what fails here can still say at which server."""
LOOK_AGAIN_S = 1.0
"""Whether a server that is not up yet is up."""
LOAD_TIMEOUT_S = 240.0
CLOSE_TIMEOUT_S = 2.0
KEEP_ALIVE_S = 4.0
"""Less than a server's own: it must not close a connection while a request is on its way."""
MAX_ANSWER_BYTES = 1 << 26

_PROBE = "The rules:\nmove 17 is [3], and \\boxed{[0]} ends é 🎲."
_PLAIN_SAMPLING = {
    "n": 1,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""Said in every request: a server's defaults may come from the model's generation config."""


class VLLMServerEngine:
    def __init__(self, spec: WorkerSpec) -> None:
        config, engine = spec.config, spec.config.engine
        path = resolve_model(config.model_name)
        self._tokenizer = Tokenizer(path, config.trust_remote_code)
        self._bare_model = bare_model(path, config.trust_remote_code)
        self._vocab_size = self._bare_model.config.get_text_config().vocab_size
        self._max_rank = config.lora.lora_rank
        self._max_parallel_seq = engine.max_parallel_seq
        self._request_timeout_s = DEADLINE_SHARE * engine.request_timeout_s
        self._stall_timeout_s = engine.stall_timeout_s
        self._url = server_url(spec.device)
        self._server = Server(self._url, SERVER_KEY)
        self._delivery: Delivery
        if engine.adapter_folder is not None:
            self._delivery = FolderDelivery(engine.adapter_folder)
        else:
            receiver = engine.adapter_receivers[engine.urls.index(spec.device)]
            self._delivery = UploadDelivery(Server(receiver.rstrip("/"), RECEIVER_KEY))
        # The same for every worker that takes this one's place in this run, and for nobody else.
        self._label = f"unstable_lite-{hashlib.sha256(spec.endpoint.encode()).hexdigest()[:12]}-{spec.name}-"
        self._life = secrets.token_hex(4)
        self._adapters = AdapterVersions(engine.max_loras)
        self._names: dict[int, str] = {}
        """What the server calls the versions. Never used again: they are its prefix cache's key."""
        self._throughput = Throughput()
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: list[Generated | Failed] = []
        self._lost: BaseException | None = None
        """What no reply can tell: the worker ends of it."""
        self._busy_since = 0.0
        self._loop = asyncio.new_event_loop()
        self._has_news = asyncio.Event()
        self._slots = asyncio.Semaphore(self._max_parallel_seq)
        try:
            version, its_max_len = self._run(self._meet(DEADLINE_SHARE * engine.start_timeout_s))
        except (ModelError, OSError):
            self.close()
            raise
        self._max_model_len = min(longest_sequence(engine.max_model_len, self._bare_model.config), its_max_len)
        self.facts: dict[str, Any] = {
            "kind": "vllm-server",
            "model": config.model_name,
            "device": self._url,
            "dtype": "the server's",
            "threads": spec.threads,
            "max_model_len": self._max_model_len,
            "vocab_size": self._vocab_size,
            "prompts": self._tokenizer.prompts(chats_in_use(config)),
            "vllm": version,
        }

    def add_request(self, request: Generate) -> None:
        version = request.adapter_version
        self._adapters.check_loaded(version)
        prompt_ids = self._tokenizer.encode(request.prompt)
        max_tokens = check_length(len(prompt_ids), request.max_tokens, self._max_model_len)
        body = _PLAIN_SAMPLING | {
            "model": self._names.get(version, self._served),
            "prompt": prompt_ids.tolist(),
            "max_tokens": max_tokens,
            # vLLM raises temperatures between 0 and 0.01 to 0.01, and then samples.
            "temperature": 0.0 if request.temperature < GREEDY_BELOW else request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop": self._tokenizer.stop_strings(request.stop),
            "stop_token_ids": sorted(self._tokenizer.stop_ids_with(request.stop)),
            "logprobs": 0,
        }
        self._adapters.acquire(version)
        if not self._tasks:
            self._busy_since = time.monotonic()
        task = self._loop.create_task(self._serve(request, prompt_ids, body))
        self._tasks.add(task)
        task.add_done_callback(self._is_over)

    def step(self) -> list[Generated | Failed]:
        """What finished. Raises ConnectionError where the server is gone, stuck, or not the one that it was."""
        self._run(self._wait_for_news())
        if self._lost is not None:
            raise self._lost
        finished, self._finished = self._finished, []
        silent_s = time.monotonic() - max(self._busy_since, self._server.heard_at)
        if self._tasks and silent_s > self._stall_timeout_s:
            raise ConnectionError(
                f"{self._url} has {len(self._tasks)} requests and has answered none for {silent_s:.0f} s "
                "(engine.stall_timeout_s)"
            )
        return finished

    def has_unfinished(self) -> bool:
        # What was lost while an adapter was loaded is told by the next step, even if nothing is in flight any more.
        return bool(self._tasks or self._finished or self._lost)

    def load_adapter(self, version: int, path: Path) -> str:
        self._adapters.check_new(version)
        # vLLM takes more than it computes rightly: an adapter of unknown modules or of another base may pass.
        pairs, _, _ = read_adapter(path, self._max_rank)
        check_fits(self._bare_model, pairs, path)
        name = f"{self._label}{self._life}-v{version}"
        digest = self._in_time(self._load(version, name, path), f"loading adapter version {version}")
        self._names[version] = name
        return self._adapters.add(version, digest)

    def confirm_adapter(self, version: int) -> str:
        """Return the digest of the files that were delivered. What the server holds it does not tell."""
        return self._adapters.digest(version)

    def unload_adapter(self, version: int) -> None:
        self._adapters.check_unused(version)
        self._in_time(self._unload(self._names[version]), f"unloading adapter version {version}")
        # Only now: what the server refused is asked of it again.
        self._adapters.remove(version)
        del self._names[version]

    def stats(self) -> EngineStats:
        unfinished = len(self._tasks)
        running = min(unfinished, self._max_parallel_seq)
        return self._throughput.report(queued=unfinished - running, running=running)

    def close(self) -> None:
        """Take back what was delivered, as far as the server still listens. Nothing the second time."""
        if self._loop.is_closed():
            return
        for task in self._tasks:
            task.cancel()

        async def leave() -> None:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            with contextlib.suppress(RequestError, OSError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    for name in self._names.values():
                        await self._unload(name)
            with contextlib.suppress(RequestError, OSError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    for name in self._names.values():
                        await self._delivery.remove(name)
            await self._server.close()
            await self._delivery.close()

        self._run(leave())
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Meanwhile the requests in flight go on."""
        return self._loop.run_until_complete(work)

    def _in_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        async def bounded() -> T:
            try:
                async with asyncio.timeout(min(LOAD_TIMEOUT_S, DEADLINE_SHARE * self._stall_timeout_s)):
                    return await work
            except TimeoutError as error:
                raise ConnectionError(f"{self._url}: {what} does not come to an end") from error

        return self._run(bounded())

    async def _wait_for_news(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_FOR_ANSWERS_S):
                await self._has_news.wait()
        self._has_news.clear()

    async def _serve(self, request: Generate, prompt_ids: TokenIds, body: dict[str, Any]) -> None:
        reply: Generated | Failed
        try:
            async with asyncio.timeout(self._request_timeout_s), self._slots:
                answer = await self._complete(body)
            generation = self._generation(prompt_ids, body, answer)
            reply = Generated(request_id=request.request_id, generation=generation)
        except TimeoutError:
            error = f"{self._url}: no completion after {self._request_timeout_s:g} s (engine.request_timeout_s)"
            reply = Failed(request_id=request.request_id, error=error)
        except RequestError as refusal:
            reply = Failed(request_id=request.request_id, error=str(refusal))
        finally:
            self._adapters.release(request.adapter_version)
        self._finished.append(reply)

    def _is_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lost = self._lost or error
        self._has_news.set()

    async def _complete(self, body: dict[str, Any]) -> Any:
        try:
            return await self._server.ask("POST", "/v1/completions", body, may_pass=BUSY | {500})
        except Refused as refusal:
            if refusal.status != 404:
                raise
            raise ConnectionError(
                f"{self._url} does not know {body['model']} any more, which it served before: it was started again"
            ) from refusal

    def _generation(self, prompt_ids: TokenIds, body: dict[str, Any], answer: Any) -> Generation:
        """Raises RequestError for an answer that is not, to the last token, one to what was asked."""
        try:
            (choice,) = answer["choices"]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            shown, text, reason, stopped_by = (
                choice[key] for key in ("prompt_token_ids", "text", "finish_reason", "stop_reason")
            )
            model, usage = answer["model"], answer.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self._odd("what is no completion with token ids and log-probabilities", answer) from None
        versions = {self._served: BASE} | {name: version for version, name in self._names.items()}
        if not isinstance(model, str) or model not in versions:
            raise self._odd(f"by a model {str(model)[:200]!r}, where {body['model']!r} was asked for")
        if not _are_ids(shown, self._vocab_size) or shown != body["prompt"]:
            raise self._odd(f"another prompt than the {len(prompt_ids)} tokens that it was sent", shown)
        if not _are_ids(ids, self._vocab_size) or not 1 <= len(ids) <= body["max_tokens"]:
            raise self._odd(
                f"token ids that are not 1 to {body['max_tokens']} of a vocabulary of {self._vocab_size}", ids
            )
        if not _are_logprobs(logprobs) or len(logprobs) != len(ids):
            raise self._odd(f"log-probabilities that are not those of {len(ids)} tokens", logprobs)
        if reason not in ("stop", "length") or not isinstance(text, str) or type(cached) is not int:
            raise self._odd("a completion that did not come to its end", choice)
        self._throughput.count(len(ids), len(prompt_ids), cached)
        return Generation(
            prompt_ids=prompt_ids,
            completion_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            text=text if isinstance(stopped_by, str) else self._tokenizer.text(ids),
            finish_reason=reason,
            adapter_version=versions[model],
        )

    def _odd(self, what: str, answer: Any = None) -> RequestError:
        shown = f": {self._server.without_key(reprlib.repr(answer))}" if answer is not None else ""
        return RequestError(f"{self._url} answered {what}{shown}")

    async def _load(self, version: int, name: str, path: Path) -> str:
        """Deliver an adapter and have the server load it; return the digest of the files that it was pointed to."""
        try:
            place, digest = await self._delivery.bring(name, path)
            for wait_s in (*NOT_SEEN_YET_S, None):
                try:
                    await self._server.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": place})
                except Refused as refusal:
                    if "already been loaded" in refusal.reason:  # the answer to the first attempt was lost
                        return digest
                    if refusal.status != 404 or wait_s is None:
                        raise
                    await asyncio.sleep(wait_s)
                else:
                    return digest
            raise AssertionError("the last attempt returns or raises")
        except (RequestError, OSError) as error:
            with contextlib.suppress(RequestError, OSError):
                await self._delivery.remove(name)
            if isinstance(error, ConnectionError):
                raise
            raise AdapterError(f"adapter version {version}: {error} ({self._delivery.advice})") from error

    async def _unload(self, name: str) -> None:
        try:
            await self._server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except Refused as refusal:
            if refusal.status != 404:
                raise AdapterError(str(refusal)) from refusal
        try:
            await self._delivery.remove(name)
        except (RequestError, OSError) as error:  # what cannot be removed takes up room, and no more
            log.warning("%s cannot be removed: %s", name, error)

    async def _meet(self, patience_s: float) -> tuple[str, int]:
        """Wait until the server is up, and check it; its version and its context length."""
        await self._server.open()
        await self._delivery.open()
        self._waits_for = "it is asked, and does not answer"
        try:
            async with asyncio.timeout(patience_s):
                self._served, max_len = await self._introduce()
                return await self._check_server(), max_len
        except TimeoutError as error:
            raise ConnectionError(f"{self._url} is not up after {patience_s:.0f} s: {self._waits_for}") from error

    async def _introduce(self) -> tuple[str, int]:
        """What the server calls the base, and its context length."""
        while True:
            try:
                listed = await self._server.ask("GET", "/v1/models", retry_after_s=())
                delivered = await self._delivery.names()
                break
            except RequestError as error:
                raise ModelError(f"{error}\n(is it the address of a vLLM server, or of its side-car?)") from error
            except ConnectionError as error:
                self._waits_for = str(error)
                log.warning("waiting: %s", error)
            await asyncio.sleep(LOOK_AGAIN_S)
        try:
            base = next(card for card in listed["data"] if card.get("parent") is None)
            served, max_len = base["id"], base["max_model_len"]
            names = [card["id"] for card in listed["data"]]
        except (LookupError, TypeError, AttributeError, StopIteration):
            raise ModelError(f"{self._url} is no vLLM server: {reprlib.repr(listed)}") from None
        if not isinstance(served, str) or type(max_len) is not int or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{self._url} is no vLLM server: {reprlib.repr(listed)}")
        if max_len > (limit := longrope_limit(self._bare_model.config)):
            raise ModelError(
                f"{self._url} serves {served!r} with a max_model_len of {max_len}: past {limit} tokens vLLM rotates "
                f"every sequence by the long factors of LongRoPE, and the learner none; start it with "
                f"--max-model-len {limit}"
            )
        await self._clean_up(names, delivered)
        return served, max_len

    async def _clean_up(self, served: Sequence[str], delivered: Sequence[str]) -> None:
        """What a worker left that died in this one's place: nobody asks for it any more."""
        for name in {*served, *delivered}:
            if name.startswith(self._label):
                await self._unload(name)
        if others := [name for name in delivered if not name.startswith(self._label)]:
            log.warning(
                "%s holds %d adapters of others, runs that are over included", self._delivery.place, len(others)
            )

    async def _check_server(self) -> str:
        """That it was started as this engine needs it; its version. Raises ModelError with the flag that is missing."""
        try:
            version = (await self._server.ask("GET", "/version"))["version"]
            await self._check_tokenizer()
            await self._check_logprobs()
        except (Refused, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{self._url} is no vLLM server that tells token ids: {error}") from error
        nothing = {"lora_name": f"{self._label}{self._life}-nothing", "lora_path": "/nonexistent/unstable_lite"}
        try:
            await self._server.ask("POST", "/v1/load_lora_adapter", nothing)
        except Refused as refusal:
            if "lora_path" in refusal.reason or "/nonexistent/unstable_lite" in refusal.reason:
                return str(version)
            if refusal.status in (404, 405):
                raise ModelError(
                    f"{self._url} loads no adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 set"
                ) from refusal
            raise ModelError(f"{refusal}; it cannot load adapters: start it with --enable-lora") from refusal
        raise ModelError(f"{self._url} loads an adapter that does not exist; it is no vLLM server as we know it")

    async def _check_tokenizer(self) -> None:
        try:
            answer = await self._server.ask("POST", "/tokenize", {"model": self._served, "prompt": _PROBE})
        except Refused as refusal:
            if refusal.status == 404:  # not offered; the canary remains
                return
            raise
        ours = self._tokenizer.encode(_PROBE).tolist()
        if answer["tokens"] != ours:
            raise ModelError(
                f"{self._url} serves {self._served!r}, whose tokenizer is not that of model_name: {_PROBE!r} is "
                f"{reprlib.repr(answer['tokens'])} there and {reprlib.repr(ours)} here"
            )

    async def _check_logprobs(self) -> None:
        """Twice the temperature halves the differences of log-probabilities, if they are what was sampled from."""
        cool, hot = [await self._top_logprobs(temperature) for temperature in (1.0, 2.0)]
        common = sorted(cool.keys() & hot.keys(), key=cool.__getitem__)
        gaps = [logprobs[common[-1]] - logprobs[common[0]] for logprobs in (cool, hot)]
        if sum(map(math.exp, cool.values())) > 1.01 or gaps[1] > 0.75 * gaps[0] > 0.1:
            raise ModelError(
                f"{self._url} does not report the log-probabilities of what it samples from (they differ by "
                f"{gaps[0]:.3f} at temperature 1, by {gaps[1]:.3f} at 2): start it with "
                "--logprobs-mode processed_logprobs"
            )

    async def _top_logprobs(self, temperature: float) -> dict[str, float]:
        body = _PLAIN_SAMPLING | {
            "model": self._served,
            "prompt": self._tokenizer.encode(_PROBE).tolist(),
            "max_tokens": 1,
            "temperature": temperature,
            "top_p": 1.0,
            "seed": 0,
            "logprobs": 5,
        }
        answer = await self._server.ask("POST", "/v1/completions", body)
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        return {str(token): float(logprob) for token, logprob in top.items()}


class Refused(RequestError):
    """A server answered, and what it answered is a refusal."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(f"{url} answers {status}: {reason}")


class Server:
    """The HTTP of one server. Each failure names its URL, none the key."""

    def __init__(self, url: str, key_variable: str) -> None:
        self.url = url
        self.heard_at = time.monotonic()
        self._key_variable = key_variable
        self._key = os.environ.get(key_variable, "")
        self._session: aiohttp.ClientSession

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            auto_decompress=False,
        )

    async def close(self) -> None:
        if hasattr(self, "_session"):
            await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        file: Path | None = None,
        may_pass: frozenset[int] = BUSY,
        retry_after_s: Sequence[float] | None = None,
    ) -> Any:
        """The JSON that it answers (None for what is no JSON at all, where nothing was to be told).

        Raises Refused, RequestError for an answer that is none, ConnectionError if there is none.
        """
        for wait_s in (*(RETRY_AFTER_S if retry_after_s is None else retry_after_s), None):
            try:
                async with self._sent(method, path, body, file) as response:
                    status, content = response.status, await self._read(response)
            except aiohttp.ClientConnectorError as error:
                raise ConnectionError(f"{self.url} cannot be reached: {error}") from None
            except (aiohttp.ClientError, ConnectionError) as error:
                status, reason = 0, f"{type(error).__name__}: {error}"
            else:
                self.heard_at = time.monotonic()
                if status in (200, 201):
                    return self._json(content, path)
                reason = self.without_key(_message(content))
                if status in (401, 403):
                    reason += f" (its key is taken from the environment variable {self._key_variable})"
                if status not in may_pass:
                    raise Refused(self.url, status, reason)
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        if status and status not in BUSY:
            raise Refused(self.url, status, reason)
        raise ConnectionError(f"{self.url} does not answer: {f'{status} ' * bool(status)}{reason}")

    @contextlib.asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: Any, file: Path | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        with contextlib.ExitStack() as files:
            content: dict[str, Any] = {"json": body} if file is None else {"data": files.enter_context(file.open("rb"))}
            # A redirection would carry the key to wherever it points.
            async with self._session.request(method, self.url + path, allow_redirects=False, **content) as response:
                yield response

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise RequestError(f"{self.url} answered more than {MAX_ANSWER_BYTES} bytes")
        return bytes(content)

    def _json(self, content: bytes, path: str) -> Any:
        if path.endswith("lora_adapter"):  # a sentence
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            shown = self.without_key(reprlib.repr(content))
            raise RequestError(f"{self.url}{path} answered what is no JSON: {shown}") from None

    def without_key(self, text: str) -> str:
        return text.replace(self._key, "<key>") if len(self._key) > 4 else text


class Delivery(Protocol):
    """How a PEFT directory gets to where a server can read it."""

    place: str
    advice: str

    async def open(self) -> None: ...

    async def bring(self, name: str, path: Path) -> tuple[str, str]:
        """Copy an adapter to the server's side; return the directory as the server sees it, and its digest there."""

    async def remove(self, name: str) -> None: ...

    async def names(self) -> list[str]:
        """Of everything that was brought, whoever brought it."""

    async def close(self) -> None: ...


class FolderDelivery:
    """A folder that this machine and the server share."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self.advice = f"the server must see engine.adapter_folder = {folder} under this very path"
        self._folder = folder

    async def open(self) -> None:
        pass

    async def bring(self, name: str, path: Path) -> tuple[str, str]:
        partial, whole = self._folder / f".{name}", self._folder / name
        partial.mkdir()
        for file in (CONFIG, WEIGHTS):
            # Not `copy`: in the arena nobody else may read them, and a server may be another user's.
            shutil.copyfile(path / file, partial / file)
        partial.rename(whole)
        return str(whole), adapter_digest(whole)

    async def remove(self, name: str) -> None:
        for directory in (self._folder / name, self._folder / f".{name}"):
            if directory.exists():
                shutil.rmtree(directory)

    async def names(self) -> list[str]:
        return sorted({path.name.removeprefix(".") for path in self._folder.glob("*unstable_lite-*")})

    async def close(self) -> None:
        pass


class UploadDelivery:
    """A side-car beside the server: `adapter_receiver.py`."""

    def __init__(self, receiver: Server) -> None:
        self.place = receiver.url
        self.advice = f"the side-car's folder must be the server's, too; {RECEIVER_KEY} must be the same on both sides"
        self._receiver = receiver

    async def open(self) -> None:
        await self._receiver.open()

    async def bring(self, name: str, path: Path) -> tuple[str, str]:
        answer = None
        for file in (CONFIG, WEIGHTS):
            answer = await self._receiver.ask("PUT", f"/adapters/{name}/{file}", file=path / file)
        if not isinstance(answer, dict) or not isinstance(answer.get("path"), str):
            raise RequestError(f"{self._receiver.url} is no adapter receiver: {reprlib.repr(answer)}")
        if not isinstance(answer.get("digest"), str):
            raise RequestError(
                f"{self._receiver.url} does not say which adapter it received; start the side-car from the same "
                "version of unstable_lite as the run"
            )
        return answer["path"], answer["digest"]

    async def remove(self, name: str) -> None:
        await self._receiver.ask("DELETE", f"/adapters/{name}")

    async def names(self) -> list[str]:
        answer = await self._receiver.ask("GET", "/adapters")
        if not isinstance(answer, dict) or not isinstance(names := answer.get("adapters"), list):
            raise RequestError(f"{self._receiver.url} is no adapter receiver: {reprlib.repr(answer)}")
        return [str(name) for name in names]

    async def close(self) -> None:
        await self._receiver.close()


def _are_ids(ids: Any, vocab_size: int) -> bool:
    return isinstance(ids, list) and all(type(token) is int and 0 <= token < vocab_size for token in ids)


def _are_logprobs(logprobs: Any) -> bool:
    """A rounding error over 0 is none."""
    return isinstance(logprobs, list) and all(
        isinstance(logprob, float | int) and math.isfinite(logprob) and logprob < 1e-3 for logprob in logprobs
    )


def _message(content: bytes) -> str:
    """What a refusal says, in vLLM's form or in any other."""
    try:
        answer = json.loads(content)
        error = answer.get("error", answer)
        text = error.get("message") if isinstance(error, dict) else error
        return str(text or answer)[:1000]
    except (ValueError, AttributeError, RecursionError):
        return repr(content[:200])
