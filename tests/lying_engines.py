"""Engines that do what real ones have been seen to do; loaded by real worker processes as `lying_engines:Class`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unstable_lite.engines.transformers import TransformersEngine
from unstable_lite.opponent_pool import FIRST_RETURNED_VERSION
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import Generate, Generated


class ServesBase(TransformersEngine):
    """Accepts every adapter, and answers from the base in silence."""

    def load_adapter(self, version: int, path: Path) -> None:
        pass

    def unload_adapter(self, version: int) -> None:
        pass

    def add_request(self, request: Generate) -> None:
        super().add_request(replace(request, adapter_version=0))

    def step(self) -> list[Generated]:
        return [
            replace(done, generation=replace(done.generation, adapter_version=self._newest)) for done in super().step()
        ]

    _newest = 0


class ServesBaseUnderTheRightName(ServesBase):
    """The same, and says that it used what was asked for."""

    def __init__(self, spec: object) -> None:
        super().__init__(spec)  # type: ignore[arg-type]
        self._asked: dict[int, int] = {}

    def add_request(self, request: Generate) -> None:
        self._asked[request.request_id] = request.adapter_version
        super().add_request(request)

    def step(self) -> list[Generated]:
        return [
            replace(done, generation=replace(done.generation, adapter_version=self._asked.pop(done.request_id)))
            for done in super().step()
        ]


class HotterThanItSays(TransformersEngine):
    """Samples at another temperature than it is asked to."""

    def add_request(self, request: Generate) -> None:
        super().add_request(replace(request, temperature=2 * request.temperature))


class ServesBaseForSome(ServesBaseUnderTheRightName):
    """Loads what it is given, and answers from the base where `lies_about` says so."""

    def load_adapter(self, version: int, path: Path) -> None:
        TransformersEngine.load_adapter(self, version, path)

    def unload_adapter(self, version: int) -> None:
        TransformersEngine.unload_adapter(self, version)

    def add_request(self, request: Generate) -> None:
        version = request.adapter_version
        self._asked[request.request_id] = version
        TransformersEngine.add_request(
            self, replace(request, adapter_version=0 if self.lies_about(version) else version)
        )

    def lies_about(self, version: int) -> bool:
        raise NotImplementedError


class ServesBaseForWhatReturns(ServesBaseForSome):
    """Honest about new adapters; the base answers for one that comes back."""

    def lies_about(self, version: int) -> bool:
        return version >= FIRST_RETURNED_VERSION


class ServesBaseAfterItsDeath(ServesBaseForSome):
    """Honest in its first life; the one that takes its place answers from the base."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._is_honest = not spec.identity.endswith(".1")

    def lies_about(self, version: int) -> bool:
        return not self._is_honest
