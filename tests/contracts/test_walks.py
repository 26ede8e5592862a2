"""Number of files that one turn passes, and one adapter, by a trace of the functions that are called.

python tests/contracts/test_walks.py     # prints the files, with their functions

The turn: from the loop of a game, through player, prompt, engine and env, to the step in the buffer. The adapter: from
the learner's saved update to the engines, which load it and are checked, until games may ask for it. The learner's own
process is not traced; the files that carry messages between processes count in the turn alone.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # if it is a script

from fakes import numpy_learner
from fakes.walks import ENGINE_FILE, Walks
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.orchestrator.run import Run
from unstable_lite.planning.plan import make_plan

TURN, ADAPTER = 22, 11
"""Largest numbers of files."""
MARKS = {
    ("call", "run_game"): "turn",
    ("return", "_complete"): None,
    ("call", "StepBuffer.add_game"): "turn",
    ("return", "StepBuffer.add_game"): None,
    ("call", "AdapterSync.sync"): "adapter",
    ("return", "AdapterTable.offer"): None,
}


def walks(directory: Path) -> dict[str, dict[str, list[str]]]:
    """Return the functions of each file on each walk, of a run with one update that plays in this process."""
    engine = {"kind": "fakes.walks:TracedEngine", "replies": ["\\boxed{[0 1]}", "\\boxed{[2 1]}"], "threads": 1}
    env = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}
    run = {"learning_steps": 1, "num_collection_workers": 1, "num_eval_workers": 0, "schedule": "sync"}
    config = Config.model_validate(
        {
            "run": run | {"eval_games": 0, "output_dir": directory},
            "engine": engine | {"max_model_len": 4096, "max_generation_len": 32},
            "learner": {"batch_size": 2, "threads": 1, "canary_tolerance": 10.0},
            "train_envs": [env],
        }
    )
    traced = Walks(MARKS)  # type: ignore[arg-type]

    async def execute() -> None:
        sys.setprofile(traced)
        try:
            await Run(make_plan(config), terminal=TerminalInterface(quiet=True)).execute()
        finally:
            sys.setprofile(None)

    asyncio.run(execute())
    of_engine = json.loads((directory / ENGINE_FILE).read_text())
    together = {
        walk: {name: sorted(functions | {*of_engine[walk].get(name, ())}) for name, functions in files.items()}
        for walk, files in traced.files.items()
    }
    found = {walk: of_engine[walk] | files for walk, files in together.items()}
    found["adapter"] = {name: of for name, of in found["adapter"].items() if not name.startswith("transport/")}
    return found


def test_turn_and_adapter_pass_few_files(tmp_path, monkeypatch):
    numpy_learner.use(monkeypatch)
    for timer in "progress.LIVE_EVERY_S", "event_loop.LOOP_STALL_S":  # else a timer's files could be counted
        monkeypatch.setattr(f"unstable_lite.orchestrator.{timer}", 3600.0)
    found = walks(tmp_path)
    of_walk = {walk: {function for of in files.values() for function in of} for walk, files in found.items()}
    assert {"run_game", "_complete", "StepBuffer.add_game"} <= of_walk["turn"], "a renamed mark is never met"
    assert {"AdapterSync.sync", "AdapterTable.offer"} <= of_walk["adapter"], "a renamed mark is never met"
    assert len(found["turn"]) <= TURN, sorted(found["turn"])
    assert len(found["adapter"]) <= ADAPTER, sorted(found["adapter"])


if __name__ == "__main__":
    numpy_learner.use()
    with tempfile.TemporaryDirectory() as place:
        for walk, files in walks(Path(place)).items():
            lines = (f"  {name:40} {', '.join(functions)}\n" for name, functions in sorted(files.items()))
            sys.stdout.write(f"{walk}: {len(files)} files\n{''.join(lines)}")
