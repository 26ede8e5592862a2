"""Engines with faults seen in real ones; real worker processes load them as `fakes.lying_engines:Class`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from unstable_lite.adapters.frozen import FIRST_FROZEN_VERSION
from unstable_lite.adapters.peft_files import CONFIG, adapter_digest
from unstable_lite.engines.base import ScriptedEngine
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.orchestrator.checkpoint_pool import FIRST_RETURNED_VERSION
from unstable_lite.transport.messages import Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec


class ServesBase(TransformersEngine):
    """Accepts every adapter and silently answers from the base."""

    def load_adapter(self, version: int, path: Path) -> str:
        self._read = adapter_digest(path)
        return self._read

    def confirm_adapter(self, version: int) -> str:
        return self._read

    def unload_adapter(self, version: int) -> None:
        pass

    def add_request(self, request: Generate) -> None:
        super().add_request(structs.replace(request, adapter_version=0))

    def step(self) -> list[Generated]:
        return [
            structs.replace(done, generation=replace(done.generation, adapter_version=self._newest))
            for done in super().step()
        ]

    _newest = 0


class ServesBaseUnderTheRightName(ServesBase):
    """Answers from the base, and reports the requested version."""

    def __init__(self, spec: object) -> None:
        super().__init__(spec)  # type: ignore[arg-type]
        self._asked: dict[int, int] = {}

    def add_request(self, request: Generate) -> None:
        self._asked[request.request_id] = request.adapter_version
        super().add_request(request)

    def step(self) -> list[Generated]:
        return [
            structs.replace(done, generation=replace(done.generation, adapter_version=self._asked.pop(done.request_id)))
            for done in super().step()
        ]


class HotterThanItSays(TransformersEngine):
    """Samples at another temperature than requested."""

    def add_request(self, request: Generate) -> None:
        super().add_request(structs.replace(request, temperature=2 * request.temperature))


class ServesBaseForFrozenPlayers(ServesBaseUnderTheRightName):
    """Loads every adapter, answers honestly for the run's own ones, and from the base for frozen players."""

    def load_adapter(self, version: int, path: Path) -> str:
        return TransformersEngine.load_adapter(self, version, path)

    def confirm_adapter(self, version: int) -> str:
        return TransformersEngine.confirm_adapter(self, version)

    def unload_adapter(self, version: int) -> None:
        TransformersEngine.unload_adapter(self, version)

    def add_request(self, request: Generate) -> None:
        self._asked[request.request_id] = version = request.adapter_version
        is_frozen = FIRST_FROZEN_VERSION <= version < FIRST_RETURNED_VERSION
        TransformersEngine.add_request(self, structs.replace(request, adapter_version=0 if is_frozen else version))


class ReadsAnotherFrozenPlayer(ScriptedEngine):
    def load_adapter(self, version: int, path: Path) -> str:
        if version >= FIRST_FROZEN_VERSION:
            self._first = getattr(self, "_first", path)
            path = self._first
        return super().load_adapter(version, path)


class ServesThePreviousVersion(TransformersEngine):
    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._copies = Path(spec.config.run.output_dir) / "copies"

    def load_adapter(self, version: int, path: Path) -> str:
        shutil.copytree(path, self._copies / str(version))
        previous = self._copies / str(max(1, version - 1))
        return super().load_adapter(version, previous)


class ServesThePreviousVersionUnderTheRightName(ServesThePreviousVersion):
    """Reads the file of the previous version, and reports the digest of the right one."""

    def load_adapter(self, version: int, path: Path) -> str:
        super().load_adapter(version, path)
        return adapter_digest(path)


class ScalesTwiceAsMuch(TransformersEngine):
    """Holds the right weights and reports them, but scales them twice as much."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._copy = Path(spec.config.run.output_dir) / "copy"

    def load_adapter(self, version: int, path: Path) -> str:
        shutil.copytree(path, self._copy, dirs_exist_ok=True)
        config = json.loads((path / CONFIG).read_text())
        (self._copy / CONFIG).write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
        super().load_adapter(version, self._copy)
        return adapter_digest(path)


class CompletesThePromptAgain(TransformersEngine):
    """Knows no `Generate.prompt_ids`, like an engine that was written before there were any."""

    def add_request(self, request: Generate) -> None:
        super().add_request(structs.replace(request, prompt_ids=None))
