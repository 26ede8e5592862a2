"""Engines that do what real ones have been seen to do; loaded by real worker processes as `lying_engines:Class`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from unstable_lite.engines.transformers import TransformersEngine
from unstable_lite.opponent_pool import FIRST_RETURNED_VERSION
from unstable_lite.outside_files import CONFIG, WEIGHTS, adapter_digest
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import Generate, Generated


class ServesBase(TransformersEngine):
    """Accepts every adapter, and answers from the base in silence."""

    def load_adapter(self, version: int, path: Path) -> str:
        self._read = adapter_digest(path)
        return self._read

    def confirm_adapter(self, version: int) -> str:
        return self._read

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

    def load_adapter(self, version: int, path: Path) -> str:
        return TransformersEngine.load_adapter(self, version, path)

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


class HotterWithAdapters(TransformersEngine):
    """Honest about the base; samples from adapters at another temperature than it is asked to."""

    def add_request(self, request: Generate) -> None:
        super().add_request(replace(request, temperature=(2 if request.adapter_version else 1) * request.temperature))


class ServesThePreviousVersion(TransformersEngine):
    """Reads the file of the version before."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._copies = Path(spec.config.run.output_dir) / "copies"

    def load_adapter(self, version: int, path: Path) -> str:
        shutil.copytree(path, self._copies / str(version))
        previous = self._copies / str(max(1, version - 1))
        return super().load_adapter(version, previous)


class ServesThePreviousVersionUnderTheRightName(ServesThePreviousVersion):
    """The same, and says that it read what it was given."""

    def load_adapter(self, version: int, path: Path) -> str:
        super().load_adapter(version, path)
        return adapter_digest(path)


class ReadsADamagedFile(TransformersEngine):
    """One bit of one weight is another one."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._copy = Path(spec.config.run.output_dir) / "copy"

    def load_adapter(self, version: int, path: Path) -> str:
        shutil.copytree(path, self._copy, dirs_exist_ok=True)
        content = bytearray((path / WEIGHTS).read_bytes())
        content[-4] ^= 1
        (self._copy / WEIGHTS).write_bytes(content)
        return super().load_adapter(version, self._copy)


class ScalesTwiceAsMuch(TransformersEngine):
    """Holds the right weights, says so, and counts them twice."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._copy = Path(spec.config.run.output_dir) / "copy"

    def load_adapter(self, version: int, path: Path) -> str:
        shutil.copytree(path, self._copy, dirs_exist_ok=True)
        config = json.loads((path / CONFIG).read_text())
        (self._copy / CONFIG).write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
        super().load_adapter(version, self._copy)
        return adapter_digest(path)
