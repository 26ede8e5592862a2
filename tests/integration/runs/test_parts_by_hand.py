"""Every part of a run can be a custom one: a subclass in a script, or an object with the same interface."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unstable_lite as unstable
from fakes import numpy_learner, run_files, runs
from fakes.own_parts import OwnPart
from fakes.sync_runs import SYNC
from unstable_lite.config.reading import read_config
from unstable_lite.league.game_scheduler import STATE as SAMPLER_STATE
from unstable_lite.orchestrator.wiring import INTERFACES
from unstable_lite.planning.plan import make_plan

SCRIPT = """
import json, random, sys
from collections import Counter
from pathlib import Path

import unstable_lite as unstable
from unstable_lite.config.reading import read_config
from unstable_lite.planning.plan import make_plan

samplers, calls = unstable.samplers, Counter()


class MyTracker(unstable.Tracker):
    def log_update(self, step, metrics, histograms=()):
        calls["log_update"] += 1
        super().log_update(step, {**metrics, "mine/answer": 42.0}, histograms)


def that_counts(base, method):
    def count(self, *arguments, **named):
        calls[method] += 1
        return getattr(base, method)(self, *arguments, **named)

    return type("Mine", (base,), {method: count})


MyRegistry = that_counts(unstable.ModelRegistry, "update_ratings")
MyEnvSampler = that_counts(samplers.UniformRandomEnvSampler, "_choose_train")
MyModelSampler = that_counts(samplers.FixedOpponentModelSampler, "sample_opponent")
MyScheduler = that_counts(unstable.GameScheduler, "next_train_job")
MyBuffer = that_counts(unstable.StepBuffer, "get_batch")
MyCollector = that_counts(unstable.Collector, "run")
MyTerminal = that_counts(unstable.TerminalInterface, "say")


class MyLearner(unstable.REINFORCELearner):
    def update(self, items, version):
        result = super().update(items, version)
        result.metrics["mine"] = 7.0
        return result


if __name__ == "__main__":
    config, problems = read_config(Path(sys.argv[1]), (*sys.argv[2:], "run.learning_steps=2", "run.eval_games=0"))
    config = type(config).model_validate({**config.model_dump(), "algorithm": MyLearner})
    registry = MyRegistry()
    registry.add_fixed("scripted:random")
    model_sampler = MyModelSampler(registry, random.Random(0))
    env_sampler = MyEnvSampler(config.train_envs, config.eval_envs)
    run = unstable.Run(
        make_plan(config),
        scheduler=MyScheduler(model_sampler, env_sampler),
        buffer=MyBuffer(config.buffer_size),
        tracker=MyTracker,
        collector=MyCollector,
        terminal=MyTerminal(quiet=True),
    )
    summary = run.start()
    print(json.dumps([str(summary.directory), calls]))
"""


@pytest.mark.nightly
def test_script_replaces_every_part_by_its_own_subclass(tmp_path: Path) -> None:
    script = tmp_path / "my_parts.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, runs.write_small(tmp_path), *runs.SCRIPTED], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    directory, calls = json.loads(done.stdout.splitlines()[-1])
    of_samplers = {"update_ratings", "_choose_train", "sample_opponent"}
    assert calls.keys() == {"log_update", "next_train_job", "get_batch", "run", "say"} | of_samplers
    assert calls["log_update"] == 2 and calls["run"] == 1
    updates = run_files.updates(Path(directory))
    assert [line["mine/answer"] for line in updates] == [42.0, 42.0]
    assert [line["learner/mine"] for line in updates] == [7.0, 7.0]
    assert 'algorithm = "my_parts:MyLearner"' in (Path(directory) / "config.toml").read_text()


def run_of_own_parts(path: Path, steps: int, resume: Path | None = None) -> tuple[unstable.Run, dict[str, OwnPart]]:
    """Return a sync run of which no part is of the package's classes, and the parts by name."""
    few = ("run.eval_games=2", "run.eval_every=2", "run.checkpoint_every=1", f"run.learning_steps={steps}")
    config, problems = read_config(path, (*SYNC[:1], *runs.SCRIPTED, "run.num_collection_workers=6", *few))
    assert config is not None, problems
    own: dict[str, OwnPart] = {}

    def part(name: str, of: Any, names: tuple[str, ...] = ()) -> Any:
        own[name] = OwnPart(of, names or INTERFACES[name])
        return own[name]

    registry = unstable.ModelRegistry()
    registry.add_fixed("scripted:random")
    samplers, sampler_names = unstable.samplers, ("sample", *SAMPLER_STATE)
    env_sampler = samplers.RoundRobinEnvSampler(config.train_envs, config.eval_envs)
    model_sampler = samplers.FixedOpponentModelSampler(part("scheduler.registry", registry), random.Random(0))
    scheduler = unstable.GameScheduler(
        part("model_sampler", model_sampler, ("registry", "sample_opponent", *SAMPLER_STATE)),
        part("env_sampler", env_sampler, sampler_names),
    )
    run = unstable.Run(
        make_plan(config),
        scheduler=part("scheduler", scheduler),
        buffer=part("buffer", unstable.StepBuffer(config.buffer_size)),
        tracker=lambda **given: part("tracker", unstable.Tracker(**given)),
        collector=lambda **given: part("collector", unstable.Collector(**given)),
        terminal=part("terminal", unstable.TerminalInterface(quiet=True)),
        resume=resume,
    )
    return run, own


def test_objects_with_the_interface_make_a_run_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_learner.use(monkeypatch)
    path = runs.write_small(tmp_path)
    run, own = run_of_own_parts(path, steps=1)
    first = run.start()
    assert first is not None and first.updates == 1
    unused = {name: set(INTERFACES[name]) - part.used for name, part in own.items() if name in INTERFACES}
    assert not unused["scheduler"] - {"load_state_dict"} and not unused["tracker"] - {"alarm", "log", "resume"}

    run, own = run_of_own_parts(path, steps=2, resume=first.directory)
    second = run.start()
    assert second is not None and second.updates == 2
    stateful = {"scheduler", "scheduler.registry", "buffer", "collector", "model_sampler", "env_sampler"}
    assert {name for name, part in own.items() if "load_state_dict" in part.used} == stateful
    assert "resume" in own["tracker"].used
    assert second.games > first.games, "the tracker's count continues"


MINE = "from unstable_lite.plugins import name_of\nclass Mine: ...\nprint(name_of('algorithm', Mine))\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(["my_script.py"], "my_script:Mine", id="is named by its file"),
        pytest.param(["-m", "my_script"], "my_script:Mine", id="is named by its module"),
        pytest.param(["-c", MINE], "workers cannot import Mine from a notebook", id="of a command line is refused"),
        pytest.param(["twice.py"], "a script with the name of another module", id="of an ambiguous name is refused"),
    ],
)
def test_class_of_a_script(tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "my_script.py").write_text(MINE)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "twice.py").touch()
    (tmp_path / "twice.py").write_text(f"import sys\nsys.path.insert(0, {str(tmp_path / 'first')!r})\n{MINE}")
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path)
    assert says in (done.stdout or done.stderr).splitlines()[-1]
