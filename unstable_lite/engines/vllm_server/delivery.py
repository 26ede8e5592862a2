"""Delivery of adapters to the place from which a vLLM server loads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from unstable_lite.adapters.peft_files import CONFIG, WEIGHTS, adapter_digest
from unstable_lite.config.training import EngineConfig
from unstable_lite.engines.vllm_server.http import Server
from unstable_lite.games.api_keys import RECEIVER_KEY


class FolderDelivery:
    """Delivery through a folder that this machine and the server share."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self.advice = f"the server must see engine.adapter_folder = {folder} under the same path"
        self._folder = folder

    async def bring(self, name: str, path: Path) -> tuple[str, str]:
        """Copy an adapter to the server's side; return the directory as the server sees it, and its digest there."""
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
        """Return the names of all delivered adapters, including those of other runs."""
        return sorted({path.name.removeprefix(".") for path in self._folder.glob("*unstable_lite-*")})

    async def close(self) -> None:
        pass


class Received(msgspec.Struct):
    """A side-car's answer to the last file of an adapter."""

    path: str
    digest: str


class Known(msgspec.Struct):
    """A side-car's list of adapters."""

    adapters: list[str]


class UploadDelivery:
    """Delivery to a side-car beside the server; see `sidecar.py`."""

    def __init__(self, receiver: Server) -> None:
        self.place = receiver.url
        self.advice = (
            f"the server must see the side-car's folder under the same path; {RECEIVER_KEY} is their secret; the "
            "side-car must have the run's version of unstable_lite"
        )
        self._receiver = receiver

    async def bring(self, name: str, path: Path) -> tuple[str, str]:
        await self._receiver.send("PUT", f"/adapters/{name}/{CONFIG}", file=path / CONFIG)
        received = await self._receiver.ask(Received, "PUT", f"/adapters/{name}/{WEIGHTS}", file=path / WEIGHTS)
        return received.path, received.digest

    async def remove(self, name: str) -> None:
        await self._receiver.send("DELETE", f"/adapters/{name}")

    async def names(self) -> list[str]:
        return (await self._receiver.ask(Known, "GET", "/adapters")).adapters

    async def close(self) -> None:
        await self._receiver.close()


Delivery = FolderDelivery | UploadDelivery
"""A way to bring a PEFT directory to a place from which a server can read it."""


def delivery_to(engine: EngineConfig, url: str) -> Delivery:
    """Return the delivery that the config names for the server at `url`, an entry of `engine.urls`."""
    if engine.adapter_folder is not None:
        return FolderDelivery(engine.adapter_folder)
    receiver = engine.adapter_receivers[engine.urls.index(url)]
    return UploadDelivery(Server(receiver.rstrip("/"), RECEIVER_KEY))
