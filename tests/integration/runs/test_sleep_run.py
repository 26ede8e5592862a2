"""Sleep mode: engine and learner take turns on one device, and a woken engine is checked before it plays."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import numpy_learner, runs
from unstable_lite.config.reading import read_config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.orchestrator.run import Run
from unstable_lite.planning.plan import make_plan


def train(directory: Path, engine: str, *overrides: str) -> tuple[int, str, str]:
    sleeps = ("engine.when_shared=sleep", f"engine.kind=fakes.sleeping_engines:{engine}")
    run = runs.run if engine == "ForgetsInItsSleep" else runs.run_torchless
    return run("run", runs.write_small(directory), "run.eval_games=0", *sleeps, *overrides)


def diary(directory: Path) -> list[str]:
    return [json.loads(line) for line in (directory / "outputs" / "diary.jsonl").read_text().splitlines()]


def alarms(directory: Path) -> str:
    return (runs.run_directory(directory) / "alarms.jsonl").read_text()


@pytest.mark.nightly
def test_games_wait_for_the_learner_which_saves_before_the_engines_wake(tmp_path: Path) -> None:
    changes = ("algorithm=fakes.slow_learners:TakesFourSeconds", "run.game_timeout_s=3", "run.learning_steps=2")
    runs.output_of(train(tmp_path, "KeepsADiary", *changes))
    did = diary(tmp_path)
    assert '"inference/asleep_s"' in (runs.run_directory(tmp_path) / "metrics.jsonl").read_text()
    assert runs.num_updates(tmp_path) == did.count("sleep") == did.count("wake") == 2
    for start in (index for index, what in enumerate(did) if what == "sleep"):
        asleep = did[start + 1 : did.index("wake", start)]
        assert asleep[-2:] == ["learnt", "saved"] and {*asleep} == {"learnt", "saved"}, "no request and no load"
        assert did[:start].count("request") == did[:start].count("answer")  # earlier requests were answered
    games = (runs.run_directory(tmp_path) / "games.jsonl").read_text()
    assert '"void"' not in games, "the learner's turn does not count as game time"


@pytest.mark.nightly
async def test_engine_apart_from_the_learner_plays_through_its_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy_learner.use(monkeypatch)
    given = ("engine.when_shared=sleep", "engine.kind=fakes.sleeping_engines:SignsItsDiary", "run.eval_games=0")
    slow = ("algorithm=fakes.slow_learners:TakesASecond", "run.learning_steps=2", 'engine.devices=["cpu","cpu"]')
    config, problems = read_config(runs.write_small(tmp_path), (*given, *slow))
    assert config is not None, problems
    # To torch both are the CPU; to the plan they are two devices, as two GPUs are.
    plan = replace(make_plan(config), engine_devices=("cpu", "cpu:0"), learner_devices=("cpu",))
    run = Run(plan, terminal=TerminalInterface(quiet=True))
    await run.execute()
    assert [engine.channel.name for engine in run.training.parts.colocation.others] == ["engine-1"]
    did = diary(tmp_path)
    assert did.count("engine-0 sleep") == did.count("engine-0 wake") == 2
    assert "engine-1 sleep" not in did and "engine-1 wake" not in did
    for start in (index for index, what in enumerate(did) if what == "engine-0 sleep"):
        asleep = did[start + 1 : did.index("engine-0 wake", start)]
        assert asleep.count("engine-1 answer") > 0
        assert {what.split()[0] for what in asleep} <= {"engine-1", "learnt", "saved"}
    assert {"engine-0", "engine-1"} <= {what.split()[0] for what in did[did.index("engine-0 wake") :]}
    for name in ("engine-0", "engine-1"):
        assert did.count(f"{name} load") == 2, "an engine that stayed awake loads each adapter once, too"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("engine", "says"),
    [("ForgetsInItsSleep", r"engine-0 .*version 1\b"), ("NeverSleeps", "engine.when_shared = 'sleep': NeverSleeps ")],
    ids=["loses its adapters", "cannot sleep"],
)
def test_engine_that_does_not_sleep_well_ends_the_run(tmp_path: Path, engine: str, says: str) -> None:
    code, _, err = train(tmp_path, engine, "learner.learning_rate=1e-2")
    assert code == 1
    assert re.search(says, err), err


@pytest.mark.nightly
def test_engine_that_dies_asleep_restarts_after_the_learner_turn(tmp_path: Path) -> None:
    changes = ("algorithm=fakes.slow_learners:TakesItsTime", "run.learning_steps=1")
    runs.output_of(train(tmp_path, "DiesInItsSleep", *changes))
    assert runs.num_updates(tmp_path) == 1
    events = [what for what in diary(tmp_path) if what in ("start", "sleep", "learnt")]
    assert events == ["start", "sleep", "learnt", "start"]
    assert "1 of 5" in alarms(tmp_path)


@pytest.mark.gpu
@pytest.mark.timeout(600)  # vLLM compiles when it starts for the first time
@pytest.mark.parametrize("how", ["engine.when_shared=split", "engine.when_shared=sleep", "run.schedule=sync"])
@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_one_gpu_is_enough_for_a_run(tmp_path: Path, how: str, kind: str) -> None:
    on_it = (how, f"engine.kind={kind}", "engine.devices=[0]", "learner.devices=[0]")
    runs.output_of(runs.finish(runs.start("run", runs.write_small(tmp_path), *on_it), timeout_s=500))
    assert runs.num_updates(tmp_path) == 3
