"""Engine on a vLLM OpenAI-compatible server, which may run anywhere: one worker talks to one server.

Tokenises with the code that all engines share: it sends token ids, and compares the answer with the request. A server
that is gone, hangs or was restarted ends the worker. Its requests then go to other engines, and the worker that
replaces it waits for the server, loads every adapter again and must pass the canary, as for any engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import reprlib
import secrets
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from unstable_lite.engines.adapter_slots import BASE, AdapterVersions
from unstable_lite.engines.lora import bare_model, check_fits, read_adapter
from unstable_lite.engines.request_checks import Throughput, check_length
from unstable_lite.engines.sampling import GREEDY_BELOW
from unstable_lite.engines.vllm_server.config_checks import server_url
from unstable_lite.engines.vllm_server.delivery import delivery_to
from unstable_lite.engines.vllm_server.http import BUSY, Refused, Server
from unstable_lite.engines.vllm_server.server_checks import PLAIN_SAMPLING, Completion, check_server
from unstable_lite.errors import AdapterError, ModelError, RequestError
from unstable_lite.games.api_keys import SERVER_KEY
from unstable_lite.games.templates import chats_in_use
from unstable_lite.models import resolve_model
from unstable_lite.models.positions import longest_sequence, longrope_limit
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.transport.messages import EngineStats, Failed, Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Generation, TokenIds

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_FOR_ANSWERS_S = 0.005
"""Longest wait for answers before the worker looks for new requests."""
DEADLINE_SHARE = 0.95
"""Share of the orchestrator's deadlines after which this worker gives up, so that its error can name the server."""
LOOK_AGAIN_S = 1.0
"""Time between two attempts to reach a server that is not up."""
LOAD_TIMEOUT_S = 240.0
CLOSE_TIMEOUT_S = 2.0


class Card(msgspec.Struct):
    """A model or an adapter in a server's list."""

    id: str
    parent: str | None = None
    max_model_len: int | None = None


class Models(msgspec.Struct):
    data: list[Card]


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
        self._delivery = delivery_to(engine, spec.device)
        # Shared with every worker that replaces this one in this run, and with no other.
        self._label = f"unstable_lite-{hashlib.sha256(spec.endpoint.encode()).hexdigest()[:12]}-{spec.name}-"
        self._life = secrets.token_hex(4)
        self._adapters = AdapterVersions(engine.max_loras)
        self._names: dict[int, str] = {}
        """The server's names of the versions. None is used twice, because they are keys of its prefix cache."""
        self._throughput = Throughput()
        self._tasks: list[asyncio.Task[Generated | Failed]] = []
        """Requests without a reply. An error of a task concerns no single request; it ends the worker."""
        self._busy_since = 0.0
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(self._max_parallel_seq)
        try:
            version, its_max_len = self._run(self._meet(DEADLINE_SHARE * engine.start_timeout_s))
        except (ModelError, OSError):
            self.close()
            raise
        self._max_model_len = min(longest_sequence(engine.max_model_len, self._bare_model.config), its_max_len)
        self.info: dict[str, Any] = {
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
        prompt_ids = self._tokenizer.prompt_ids(request)
        max_tokens = check_length(len(prompt_ids), request.max_tokens, self._max_model_len)
        body = PLAIN_SAMPLING | {
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
        self._tasks.append(self._loop.create_task(self._serve(request, prompt_ids, body)))

    def step(self) -> list[Generated | Failed]:
        """Return the finished replies. Raises ConnectionError if the server is gone, hangs or was restarted."""
        if not self._tasks:
            return []
        self._run(asyncio.wait(self._tasks, timeout=WAIT_FOR_ANSWERS_S, return_when=asyncio.FIRST_COMPLETED))
        finished = [task.result() for task in self._tasks if task.done()]
        self._tasks = [task for task in self._tasks if not task.done()]
        silent_s = time.monotonic() - max(self._busy_since, self._server.heard_at)
        if self._tasks and silent_s > self._stall_timeout_s:
            raise ConnectionError(
                f"{self._url} has {len(self._tasks)} requests and has answered none for {silent_s:.0f} s "
                "(engine.stall_timeout_s)"
            )
        return finished

    def has_unfinished(self) -> bool:
        return bool(self._tasks)

    def load_adapter(self, version: int, path: Path) -> str:
        self._adapters.check_new(version)
        # vLLM also accepts adapters that it computes wrongly, with unknown modules or for another base.
        pairs, _, _ = read_adapter(path, self._max_rank)
        check_fits(self._bare_model, pairs, path)
        name = f"{self._label}{self._life}-v{version}"
        digest = self._in_time(self._load(version, name, path), f"loading adapter version {version}")
        self._names[version] = name
        return self._adapters.add(version, digest)

    def confirm_adapter(self, version: int) -> str:
        """Return the digest of the delivered files, because the server reports none."""
        return self._adapters.digest(version)

    def unload_adapter(self, version: int) -> None:
        self._adapters.check_unused(version)
        self._in_time(self._unload(self._names[version]), f"unloading adapter version {version}")
        # Only now, so that an unload that the server refused is requested again.
        self._adapters.remove(version)
        del self._names[version]

    def stats(self) -> EngineStats:
        unfinished = len(self._tasks)
        running = min(unfinished, self._max_parallel_seq)
        return self._throughput.report(queued=unfinished - running, running=running)

    def close(self) -> None:
        """Unload and delete the delivered adapters, if the server still answers. A second call has no effect."""
        if self._loop.is_closed():
            return
        for task in self._tasks:
            task.cancel()

        async def leave() -> None:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for end in (self._unload, self._delivery.remove):  # the files go even if the server is gone
                with contextlib.suppress(RequestError, OSError):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        for name in self._names.values():
                            await end(name)
            await self._server.close()
            await self._delivery.close()

        self._run(leave())
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end; requests in flight continue."""
        return self._loop.run_until_complete(work)

    def _in_time(self, work: Coroutine[Any, Any, T], action: str) -> T:
        limit_s = min(LOAD_TIMEOUT_S, DEADLINE_SHARE * self._stall_timeout_s)
        try:
            return self._run(asyncio.wait_for(work, limit_s))
        except TimeoutError as error:
            raise ConnectionError(f"{self._url}: {action} does not end") from error

    async def _serve(self, request: Generate, prompt_ids: TokenIds, body: dict[str, Any]) -> Generated | Failed:
        try:
            async with asyncio.timeout(self._request_timeout_s), self._slots:
                completion = await self._complete(body)
            generation = self._generation(prompt_ids, body, completion)
            return Generated(request_id=request.request_id, generation=generation)
        except TimeoutError:
            error = f"{self._url}: no completion after {self._request_timeout_s:g} s (engine.request_timeout_s)"
        except RequestError as refusal:
            error = str(refusal)
        finally:
            self._adapters.release(request.adapter_version)
        return Failed(request_id=request.request_id, error=error)

    async def _complete(self, body: dict[str, Any]) -> Completion:
        try:
            return await self._server.ask(Completion, "POST", "/v1/completions", body, may_pass=BUSY | {500})
        except Refused as refusal:
            if refusal.status != 404:
                raise
            raise ConnectionError(
                f"{self._url} does not know {body['model']} any more, which it served before: the server was restarted"
            ) from refusal

    def _generation(self, prompt_ids: TokenIds, body: dict[str, Any], completion: Completion) -> Generation:
        """Return the completion. Raises RequestError unless every token of it fits the request."""
        (choice,) = completion.choices
        ids, logprobs, model = choice.token_ids, choice.logprobs.token_logprobs, completion.model
        versions = {self._served: BASE} | {name: version for version, name in self._names.items()}
        if model not in versions:
            raise self._unexpected(f"with model {model[:200]!r} instead of {body['model']!r}", model)
        if choice.prompt_token_ids != body["prompt"]:
            raise self._unexpected(
                f"with a prompt that is not the {len(prompt_ids)} tokens of the request", choice.prompt_token_ids
            )
        if not 1 <= len(ids) <= body["max_tokens"] or not all(0 <= token < self._vocab_size for token in ids):
            raise self._unexpected(
                f"with token ids that are not 1 to {body['max_tokens']} of a vocabulary of {self._vocab_size}", ids
            )
        # One may exceed 0 by a rounding error.
        if len(logprobs) != len(ids) or not all(math.isfinite(one) and one < 1e-3 for one in logprobs):
            raise self._unexpected(f"with log-probabilities that are not those of {len(ids)} tokens", logprobs)
        self._throughput.count(len(ids), len(prompt_ids), completion.num_cached)
        return Generation(
            prompt_ids=prompt_ids,
            completion_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            text=choice.text if isinstance(choice.stop_reason, str) else self._tokenizer.text(ids),
            finish_reason=choice.finish_reason,
            adapter_version=versions[model],
        )

    def _unexpected(self, content: str, answer: object) -> RequestError:
        return RequestError(f"{self._url} answered {content}: {self._server.without_key(reprlib.repr(answer))}")

    async def _load(self, version: int, name: str, path: Path) -> str:
        """Deliver an adapter and make the server load it; return the digest of the delivered files."""
        try:
            place, digest = await self._delivery.bring(name, path)
            body = {"lora_name": name, "lora_path": place}
            try:
                # 404, because a network folder may show new files late.
                await self._server.send("POST", "/v1/load_lora_adapter", body, may_pass=BUSY | {404})
            except Refused as refusal:
                if "already been loaded" not in refusal.reason:  # else the answer to an earlier attempt was lost
                    raise
            return digest
        except (RequestError, OSError) as error:
            with contextlib.suppress(RequestError, OSError):
                await self._delivery.remove(name)
            if isinstance(error, ConnectionError):
                raise
            raise AdapterError(f"adapter version {version}: {error} ({self._delivery.advice})") from error

    async def _unload(self, name: str) -> None:
        try:
            await self._server.send("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except Refused as refusal:
            if refusal.status != 404:
                raise AdapterError(str(refusal)) from refusal
        try:
            await self._delivery.remove(name)
        except (RequestError, OSError) as error:  # files that stay only take up space
            log.warning("%s cannot be removed: %s", name, error)

    async def _meet(self, patience_s: float) -> tuple[str, int]:
        """Wait until the server is up, and check it; return its version and its context length."""
        self._waits_for = "it does not answer"
        try:
            async with asyncio.timeout(patience_s):
                self._served, max_len = await self._introduce()
                absent_name = f"{self._label}{self._life}-nothing"
                return await check_server(self._server, self._served, self._tokenizer, absent_name), max_len
        except TimeoutError as error:
            raise ConnectionError(f"{self._url} is not up after {patience_s:.0f} s: {self._waits_for}") from error

    async def _introduce(self) -> tuple[str, int]:
        """Return the server's name of the base, and its context length."""
        while True:
            try:
                listed = await self._server.ask(Models, "GET", "/v1/models", retry_after_s=())
                delivered = await self._delivery.names()
                break
            except RequestError as error:
                raise ModelError(f"{error}\n(is it the address of a vLLM server, or of its side-car?)") from error
            except ConnectionError as error:
                self._waits_for = str(error)
                log.warning("waiting: %s", error)
            await asyncio.sleep(LOOK_AGAIN_S)
        base = next((card for card in listed.data if card.parent is None), None)
        if base is None or base.max_model_len is None:
            raise ModelError(f"{self._url} is not a vLLM server: {reprlib.repr(listed)}")
        served, max_len = base.id, base.max_model_len
        if max_len > (limit := longrope_limit(self._bare_model.config)):
            raise ModelError(
                f"{self._url} serves {served!r} with a max_model_len of {max_len}: beyond {limit} tokens vLLM rotates "
                "every sequence by the long factors of LongRoPE, but the learner none. Start it with "
                f"--max-model-len {limit}"
            )
        await self._clean_up([card.id for card in listed.data], delivered)
        return served, max_len

    async def _clean_up(self, served: Sequence[str], delivered: Sequence[str]) -> None:
        """Remove the adapters of a worker that died and that this one replaces."""
        for name in {*served, *delivered}:
            if name.startswith(self._label):
                await self._unload(name)
        if others := [name for name in delivered if not name.startswith(self._label)]:
            log.warning(
                "%s holds %d adapters of other runs, some of which may be over", self._delivery.place, len(others)
            )
