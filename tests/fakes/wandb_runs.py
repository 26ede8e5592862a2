"""Weights & Biases without its server: the command of a sweep's agent, and the records of offline runs.

W&B keeps an offline run as Protocol Buffers in a log in LevelDB's format.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_HEADER, BLOCK, HEADER = 7, 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4
"""Types of a piece with which a record ends."""


def agent_command(sweep: dict[str, Any], values: dict[str, Any]) -> list[str]:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    arguments = create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    macros = {f"${{{name}}}": words for name, words in arguments.items() if name.startswith("args")}
    return [word for part in create_sweep_command(sweep["command"]) for word in macros.get(part, [part])]


@dataclass
class OfflineRun:
    id: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    """None: the run did not end in an orderly way."""

    def values(self, name: str) -> list[Any]:
        return [line[name] for line in self.history if name in line]


def offline_runs(directory: Path) -> list[OfflineRun]:
    """Return the W&B runs of a run directory in the order of their start."""
    return [_read(path) for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))]


def _read(path: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record  # not at the top: each of pytest's workers would load it

    run = OfflineRun()
    for record in map(Record.FromString, _records(path.read_bytes())):
        match record.WhichOneof("record_type"):
            case "run":
                run.id, run.project = record.run.run_id, record.run.project
                run.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            case "history":
                items = record.history.item
                run.history.append(
                    {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                )
            case "exit":
                run.exit_code = record.exit.exit_code
    return run


def _records(log: bytes) -> Iterator[bytes]:
    at, record = FILE_HEADER, b""
    while at + HEADER.size <= len(log):
        if BLOCK - at % BLOCK < HEADER.size:  # the rest of a block has no room for a header
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(log, at)
        at += HEADER.size
        record += log[at : at + length]
        at += length
        if kind in (WHOLE, LAST):
            yield record
            record = b""
