"""A router, and real worker processes that connect to it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unstable_lite.config import Config
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.rpc import Router, WorkerChannel, make_socket_directory
from unstable_lite.transport.worker_main import WorkerSpec


@contextlib.contextmanager
def opened_router() -> Iterator[Router]:
    directory = make_socket_directory()
    router = Router(directory)
    try:
        yield router
    finally:
        router.close()
        shutil.rmtree(directory)


def worker_process(
    channel: WorkerChannel, endpoint: str, config: Config, module: str, log_path: Path, **spec: Any
) -> WorkerProcess:
    """Return a worker on the CPU that is not started yet; `spec` has further fields, and `variables` to set."""
    variables = spec.pop("variables", {})
    fields = {"device": "cpu", "threads": 1, "config_json": config.model_dump_json()}
    made = WorkerSpec(name=channel.name, endpoint=endpoint, **fields, **spec)
    return WorkerProcess(channel, log_path, module, made, variables)
