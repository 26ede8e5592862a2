"""Delivery of adapters to the place from which a vLLM server loads them."""

from __future__ import annotations

import reprlib
import shutil
from pathlib import Path
from typing import Protocol

from unstable_lite.adapters.peft_files import CONFIG, WEIGHTS, adapter_digest
from unstable_lite.config.training import EngineConfig
from unstable_lite.engines.vllm_server.http import Server
from unstable_lite.errors import RequestError
from unstable_lite.games.api_keys import RECEIVER_KEY


def delivery_to(engine: EngineConfig, url: str) -> Delivery:
    """Return the delivery that the config names for the server at `url`, an entry of `engine.urls`."""
    if engine.adapter_folder is not None:
        return FolderDelivery(engine.adapter_folder)
    receiver = engine.adapter_receivers[engine.urls.index(url)]
    return UploadDelivery(Server(receiver.rstrip("/"), RECEIVER_KEY))


class Delivery(Protocol):
    """A way to bring a PEFT directory to a place from which a server can read it."""

    place: str
    advice: str

    async def open(self) -> None: ...

    async def bring(self, name: str, path: Path) -> tuple[str, str]:
        """Copy an adapter to the server's side; return the directory as the server sees it, and its digest there."""

    async def remove(self, name: str) -> None: ...

    async def names(self) -> list[str]:
        """Return the names of all delivered adapters, including those of other runs."""

    async def close(self) -> None: ...


class FolderDelivery:
    """Delivery through a folder that this machine and the server share."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self.advice = f"the server must see engine.adapter_folder = {folder} under the same path"
        self._folder = folder

    async def open(self) -> None:
        pass

    async def bring(self, name: str, path: Path) -> tuple[str, str]:
        partial, whole = self._folder / f".{name}", self._folder / name
        partial.mkdir()
        for file in (CONFIG, WEIGHTS):
            # Not `copy`, which keeps the permissions: the server may run as another user, who cannot read the store.
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
    """Delivery to a side-car beside the server; see `sidecar.py`."""

    def __init__(self, receiver: Server) -> None:
        self.place = receiver.url
        self.advice = f"the server must see the side-car's folder under the same path; {RECEIVER_KEY} is their secret"
        self._receiver = receiver

    async def open(self) -> None:
        await self._receiver.open()

    async def bring(self, name: str, path: Path) -> tuple[str, str]:
        answer = None
        for file in (CONFIG, WEIGHTS):
            answer = await self._receiver.ask("PUT", f"/adapters/{name}/{file}", file=path / file)
        if not isinstance(answer, dict) or not isinstance(answer.get("path"), str):
            raise RequestError(f"{self._receiver.url} is not an adapter receiver: {reprlib.repr(answer)}")
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
            raise RequestError(f"{self._receiver.url} is not an adapter receiver: {reprlib.repr(answer)}")
        return [str(name) for name in names]

    async def close(self) -> None:
        await self._receiver.close()
