"""A run of another person: no text in its files is imported when it is resumed, unless the user is asked first."""

import asyncio
import contextlib
import copy
import gzip
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from fakes import runs
from unstable_lite.adapters.frozen import COPIES, find_adapter
from unstable_lite.adapters.table import AdapterTable
from unstable_lite.config.reading import read_config
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.league.opponents import add_other_opponents, frozen_adapters
from unstable_lite.orchestrator import wiring
from unstable_lite.orchestrator.adapter_sync import AdapterSync
from unstable_lite.orchestrator.canary_checks import CanaryChecks
from unstable_lite.orchestrator.checkpoint import CheckpointSaver, rewind_to_checkpoint
from unstable_lite.orchestrator.checkpoint_pool import CheckpointPool, TrainedPolicy
from unstable_lite.orchestrator.health import TrainingHealth
from unstable_lite.orchestrator.progress import Progress
from unstable_lite.planning.trust import run_config
from unstable_lite.rollout.collector import Collector
from unstable_lite.tracking.run_directory import MANIFEST, sha256, to_toml
from unstable_lite.tracking.tracker import Tracker

EVIL = "evil:Player"
PLAYER = """
class Player:
    def __init__(self, env_id, seed): ...
    async def act(self, observation): ...
"""
CHANGES = ("run.learning_steps=9",)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a short run that another person wrote."""
    tmp_path = tmp_path_factory.mktemp("finished")
    overrides = ("run.learning_steps=1", "run.eval_games=2", "learner.batch_size=4", "run.num_collection_workers=4")
    runs.output_of(runs.run_torchless("run", runs.write_small(tmp_path), *runs.SCRIPTED, *overrides))
    directory = runs.run_directory(tmp_path)
    (directory / "config.seal").unlink()
    return directory


def shortened(run: Path, directory: Path) -> Path:
    """Return a copy of a run without weights and curves, whose logs have few lines and few metrics."""
    shutil.copytree(run, directory, symlinks=True)
    for name in ("games", "metrics"):
        lines = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()[:2]]
        short = [dict([*line.items()][:16]) for line in lines]
        (directory / f"{name}.jsonl").write_bytes(write(Path("x.jsonl"), short))
    for weights in directory.rglob("*.safetensors"):  # only the workers read them
        write_into(directory, weights.relative_to(directory), b"weights")
    for name in ("logs", "tensorboard"):
        shutil.rmtree(directory / name)
        (directory / name).mkdir()
    return directory


def read(path: Path) -> Any:
    """Return the content of a file of a run as a document of tables and lists, or as text."""
    content = path.read_bytes()
    if path.suffix == ".json":
        return json.loads(content)
    if path.suffix == ".toml":
        return tomllib.loads(content.decode())
    if path.suffix in (".jsonl", ".gz"):
        lines = gzip.decompress(content) if path.suffix == ".gz" else content
        return [json.loads(line) for line in lines.splitlines()]
    if path.suffix == ".msgpack":
        return msgpack.unpackb(content[4:])
    return ""


def write(path: Path, document: Any) -> bytes:
    if document == EVIL:
        return EVIL.encode()
    if path.suffix == ".toml":
        return to_toml(document).encode()
    if path.suffix in (".jsonl", ".gz"):
        lines = "".join(json.dumps(line) + "\n" for line in document).encode()
        return gzip.compress(lines) if path.suffix == ".gz" else lines
    if path.suffix == ".msgpack":
        frame = msgpack.packb(document)
        return len(frame).to_bytes(4, "little") + frame
    return json.dumps(document).encode()


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(inner, (*path, key))


def poisoned(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a document with the text at a key path: at all places of a list, at its texts, at one of them."""
    places: dict[str, list[tuple[tuple[Any, ...], Any]]] = defaultdict(list)
    for path, value in nodes(document):
        places[" ".join("*" if isinstance(key, int) else key for key in path)].append((path, value))
    for name, members in places.items():
        texts = [path for path, value in members if isinstance(value, str)]
        for chosen in {(*(path for path, _ in members),), (*texts,), *((path,) for path in texts[:1])} - {()}:
            changed = EVIL if chosen == ((),) else copy.deepcopy(document)
            for path in chosen if changed != EVIL else ():
                inside = changed
                for key in path[:-1]:
                    inside = inside[key]
                inside[path[-1]] = EVIL
            yield name, changed


def load_state(directory: Path) -> None:
    """Read a run as `--resume` does, up to the players of the next games, without its workers."""
    own = run_config(directory, CHANGES)
    config, problems = read_config(own, CHANGES)
    if config is None:
        raise ConfigError(*problems)
    said: list[str] = []
    checkpoint = rewind_to_checkpoint(directory, config, said.append)
    scheduler, buffer, table = wiring.make_scheduler(config), wiring.make_buffer(config), AdapterTable(8)
    registry = scheduler.registry
    add_other_opponents(config, registry)
    for name in frozen_adapters(config):
        find_adapter(name, directory / COPIES)
    nobody: Any = None
    tracker = Tracker(directory, [], config.tracker)
    with contextlib.closing(tracker):
        tracker.registry = registry
        wiring.resume_tracker(tracker, checkpoint, directory)
        canaries = CanaryChecks(nobody, [nobody], table, [], 0.1, said.append)
        adapter_sync = AdapterSync(nobody, nobody, table, canaries)
        policy = TrainedPolicy(name="", number=0, config=config, registry=registry, buffer=buffer)
        policy.pool = CheckpointPool(policy, 2, table, nobody, adapter_sync, directory / "adapters", said.append)
        parts: Any = SimpleNamespace(
            registry=registry,
            scheduler=scheduler,
            policies={"": policy},
            adapter_sync=adapter_sync,
            collector=Collector(scheduler, buffer, PlayerFactory(nobody), table, config.run, ()),
            health=TrainingHealth(config, directory, {"": buffer}, tracker, said.append, asyncio.Event()),
            terminal=SimpleNamespace(say=said.append),
        )
        CheckpointSaver(parts, Progress(parts), evaluations=nobody)._restore(checkpoint)  # type: ignore[arg-type]
        specs = [spec for _ in range(4) for spec in (*scheduler.next_train_group(), scheduler.next_eval_job())]
        models = [meta.ref for meta in registry.get_all_models().values() if meta.active]
        specs += [new_game(config.train_envs[0], [model] * 2, 0, "train", 0) for model in models]
        for spec in specs:
            parts.collector.seats.players(spec)


def files_of(directory: Path) -> list[Path]:
    return sorted(
        path.relative_to(directory) for path in directory.rglob("*") if path.is_file() and path.name != "lock"
    )


def write_into(directory: Path, file: Path, content: bytes) -> None:
    """Write one file of a run, and its checksum if it is part of a checkpoint."""
    (directory / file).write_bytes(content)
    checkpoint = (directory / file).parent
    if checkpoint.parent.name == "checkpoints" and file.name != MANIFEST:
        paths = {name: checkpoint / name for name in json.loads((checkpoint / MANIFEST).read_text())}
        manifest = {name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for name, path in paths.items()}
        (checkpoint / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.nightly
async def test_no_text_in_any_file_of_a_run_is_imported_by_a_resume(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(PLAYER)
    monkeypatch.syspath_prepend(str(tmp_path))
    finished = shortened(finished, tmp_path / "finished")
    load_state(directory := shutil.copytree(finished, tmp_path / "run", symlinks=True))
    contents = {file: (finished / file).read_bytes() for file in files_of(finished)}
    num_tried, num_loaded = 0, 0
    for file in contents:
        for name, document in poisoned(read(finished / file)):
            for path, content in contents.items():
                (directory / path).parent.mkdir(exist_ok=True)  # a damaged checkpoint is renamed
                if not (directory / path).exists() or (directory / path).read_bytes() != content:
                    (directory / path).write_bytes(content)
            try:
                write_into(directory, file, write(file, document))
            except TypeError:  # TOML has no such list
                continue
            num_tried += 1
            with contextlib.suppress(UnstableError):  # any other error would end a resume with a traceback
                load_state(directory)
                num_loaded += 1
            assert "evil" not in sys.modules, f"{file}: {name}"
    assert num_tried > 300 and num_loaded > 100


@pytest.mark.parametrize("updates", [1.5, 1.0, True, -1, 10**25, "1"])
def test_number_of_updates_that_is_not_the_checkpoints_is_refused(finished: Path, tmp_path: Path, updates: Any) -> None:
    directory = shortened(finished, tmp_path / "run")
    league = Path("checkpoints/ckpt-1/league.json")
    write_into(directory, league, write(league, read(directory / league) | {"updates": updates}))
    logs = {file: (directory / file).read_bytes() for file in files_of(directory)}
    with pytest.raises(UnstableError, match=r"is intact, but .*updates = "):
        load_state(directory)
    assert logs == {file: (directory / file).read_bytes() for file in files_of(directory)}


@pytest.mark.nightly
@pytest.mark.parametrize("column", ["name", "kind", "uid"])
def test_whole_resume_imports_nothing_that_a_checkpoint_names(finished: Path, tmp_path: Path, column: str) -> None:
    directory = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (checkpoint,) = (directory / "checkpoints").glob("ckpt-*")
    state = json.loads((checkpoint / "league.json").read_text())
    models = state["registry"]["models"]
    fixed = models["uid"].index("fixed-scripted:random")
    models["name"][fixed] = EVIL
    if (
        column != "name"
    ):  # what plays under that name is then a checkpoint, or an opponent that the config does not name
        models[column][fixed] = {"kind": "checkpoint", "uid": f"fixed-{EVIL}"}[column]
    write_into(directory, Path("checkpoints") / checkpoint.name / "league.json", json.dumps(state).encode())
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{PLAYER}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = runs.command("run", "--resume", directory, "run.learning_steps=2", module=runs.TORCHLESS)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0 or "is intact, but" in done.stderr, done.stderr
