"""Engine on a vLLM OpenAI-compatible server, which may run anywhere: one worker talks to one server.

It sends token ids, and compares the answer with the request. A server that is gone, hangs or was restarted ends the
worker. Its requests then go to other engines, and the worker that replaces it waits for the server, loads every adapter
again and must pass the canary, as for any engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import reprlib
import secrets
import shutil
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from unstable_lite.adapters.peft_files import CONFIG, WEIGHTS, adapter_digest
from unstable_lite.engines.base import BASE, ENGINE_STALL_S, REQUEST_TIMEOUT_S
from unstable_lite.engines.vllm import VLLMShell
from unstable_lite.engines.vllm_checks import server_url
from unstable_lite.engines.vllm_http import BUSY, PLAIN_SAMPLING, Completion, Refused, Server, check_server
from unstable_lite.errors import AdapterError, ModelError, RequestError
from unstable_lite.models.layers import longrope_limit
from unstable_lite.transport.messages import Failed, Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import TokenIds

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


class VLLMServerEngine(VLLMShell):
    kind = "vllm-server"

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        engine = spec.config.engine
        assert engine.adapter_folder is not None, "the config was checked"
        self._vocab_size = self._bare_model.config.get_text_config().vocab_size
        self._request_timeout_s = DEADLINE_SHARE * REQUEST_TIMEOUT_S
        self._stall_timeout_s = ENGINE_STALL_S
        self._url = server_url(spec.device)
        self._server = Server(self._url)
        self._folder = engine.adapter_folder
        # Shared with every worker that replaces this one in this run, and with no other.
        self._label = f"unstable_lite-{hashlib.sha256(spec.endpoint.encode()).hexdigest()[:12]}-{spec.name}-"
        self._life = secrets.token_hex(4)
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
        self._max_model_len = min(self._max_model_len, its_max_len)
        self.info = self._describe(spec, "the server's", self._vocab_size, device=self._url, vllm=version)

    def _begin(self, request: Generate, prompt_ids: TokenIds, max_tokens: int) -> None:
        model = self._served if request.adapter_version == BASE else self._name(request.adapter_version)
        sampling = self._sampling(request, max_tokens)
        body = PLAIN_SAMPLING | {"model": model, "prompt": prompt_ids.tolist(), **sampling}
        if not self._tasks:
            self._busy_since = time.monotonic()
        self._tasks.append(self._loop.create_task(self._serve(request, prompt_ids, body)))

    def _name(self, version: int) -> str:
        """Return the server's name of a version. None is used twice, because they are keys of its prefix cache."""
        return f"{self._label}{self._life}-v{version}"

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
                f"{self._url} has {len(self._tasks)} requests and has answered none for {silent_s:.0f} s"
            )
        return finished

    def has_unfinished(self) -> bool:
        return bool(self._tasks)

    def _load(self, version: int, path: Path) -> str:
        self._check_fits(path)
        return self._in_time(self._deliver(version, path), f"loading adapter version {version}")

    def _unload(self, version: int) -> None:
        self._in_time(self._withdraw(self._name(version)), f"unloading adapter version {version}")

    def close(self) -> None:
        """Unload and delete the delivered adapters, if the server still answers. A second call has no effect."""
        if self._loop.is_closed():
            return
        for task in self._tasks:
            task.cancel()

        async def leave() -> None:
            names = [self._name(version) for version in self._digests if version != BASE]
            await asyncio.gather(*self._tasks, return_exceptions=True)
            with contextlib.suppress(RequestError, OSError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    for name in names:
                        await self._withdraw(name)
            for name in names:  # the files go even if the server is gone
                self._remove_files(name)
            await self._server.close()

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
            return self._checked(request, prompt_ids, body, completion)
        except TimeoutError:
            error = f"{self._url}: no completion after {self._request_timeout_s:g} s"
        except RequestError as refusal:
            error = str(refusal)
        self._in_use[request.adapter_version] -= 1
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

    def _checked(
        self, request: Generate, prompt_ids: TokenIds, body: dict[str, Any], completion: Completion
    ) -> Generated:
        """Return the reply. Raises RequestError unless every token of the completion fits the request."""
        (choice,) = completion.choices
        ids, logprobs, model = choice.token_ids, choice.logprobs.token_logprobs, completion.model
        versions = {self._name(version): version for version in self._digests} | {self._served: BASE}
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
        self._count(len(ids), len(prompt_ids), completion.num_cached)
        text = choice.text if isinstance(choice.stop_reason, str) else self._tokenizer.text(ids)
        return self._finish(request, prompt_ids, ids, logprobs, text, choice.finish_reason, versions[model])

    def _unexpected(self, content: str, answer: object) -> RequestError:
        return RequestError(f"{self._url} answered {content}: {self._server.without_key(reprlib.repr(answer))}")

    async def _deliver(self, version: int, path: Path) -> str:
        """Copy an adapter into the shared folder, make the server load it, and return the digest of the copy."""
        name = self._name(version)
        whole = self._folder / name
        try:
            digest = self._copy(path, whole)
            try:
                # 404, because a network folder may show new files late.
                body = {"lora_name": name, "lora_path": str(whole)}
                await self._server.send("POST", "/v1/load_lora_adapter", body, may_pass=BUSY | {404})
            except Refused as refusal:
                if "already been loaded" not in refusal.reason:  # else the answer to an earlier attempt was lost
                    raise
            return digest
        except (RequestError, OSError) as error:
            self._remove_files(name)
            if isinstance(error, ConnectionError):
                raise
            raise AdapterError(
                f"adapter version {version}: {error} (the server must see engine.adapter_folder = {self._folder} under "
                "the same path)"
            ) from error

    def _copy(self, path: Path, whole: Path) -> str:
        partial = whole.with_name(f".{whole.name}")
        partial.mkdir()
        for file in (CONFIG, WEIGHTS):
            # Not `copy`, which keeps the permissions: the server may run as another user, who cannot read the store.
            shutil.copyfile(path / file, partial / file)
        partial.rename(whole)
        return adapter_digest(whole)

    async def _withdraw(self, name: str) -> None:
        try:
            await self._server.send("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except Refused as refusal:
            if refusal.status != 404:
                raise AdapterError(str(refusal)) from refusal
        self._remove_files(name)

    def _remove_files(self, name: str) -> None:
        for directory in (self._folder / name, self._folder / f".{name}"):
            try:
                if directory.exists():
                    shutil.rmtree(directory)
            except OSError as error:  # files that stay only take up space
                log.warning("%s cannot be removed: %s", directory, error)

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
                break
            except RequestError as error:
                raise ModelError(f"{error}\n(is it the address of a vLLM server?)") from error
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
        # Remove the adapters of a worker that died and that this one replaces.
        copied = {path.name.removeprefix(".") for path in self._folder.glob("*unstable_lite-*")}
        for name in {*(card.id for card in listed.data), *copied}:
            if name.startswith(self._label):
                await self._withdraw(name)
        if others := [name for name in copied if not name.startswith(self._label)]:
            log.warning("%s holds %d adapters of other runs, some of which may be over", self._folder, len(others))
        return served, max_len
