"""A part that a run cannot use is refused before anything starts."""

import random
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import unstable_lite as unstable
from unstable_lite.cli.app import app
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.learner import LEARNERS, load_learner
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.orchestrator.checkpoint import lasting_state
from unstable_lite.orchestrator.wiring import made_part
from unstable_lite.planning.plan import make_plan
from unstable_lite.plugins import find, name_of

ENV = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}


def config_of(algorithm: Any = "reinforce") -> Config:
    return Config.model_validate({"algorithm": algorithm, "train_envs": [ENV], "engine": {"kind": "scripted"}})


class Silent:
    """An object with no part's interface."""


class TooFewArguments(unstable.Tracker):
    def __init__(self, run_directory: Path) -> None:
        super().__init__(run_directory, (), config_of().tracker)


def needs_more(what_is_this: str, **given: Any) -> unstable.Collector:
    raise AssertionError(what_is_this, given)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"scheduler": Silent()}, "scheduler: an object of type Silent has no registry, next_train_group"),
        ({"scheduler": unstable.GameScheduler}, "scheduler: GameScheduler is a class; give an object of it"),
        ({"buffer": []}, "buffer: an object of type list has no batches, begin_game"),
        ({"buffer": unstable.EpisodeBuffer(8)}, "buffer: reinforce learns from steps, not from a EpisodeBuffer"),
        ({"terminal": Silent()}, "terminal: an object of type Silent has no start"),
        ({"tracker": Silent()}, "tracker: an object of type Silent cannot be called; give a class or a function"),
        ({"tracker": Silent}, "tracker 'Silent': unknown keyword 'run_directory'"),
        ({"tracker": TooFewArguments}, "tracker 'TooFewArguments': unknown keyword 'sinks'"),
        ({"collector": needs_more}, "collector 'needs_more': keyword 'what_is_this' is missing"),
        ({"collector": lambda **given: given}, None),
        ({"collector": dict}, "collector: the class dict has no run, play_round"),
    ],
)
def test_wrong_part_is_refused_by_name(part, words):
    if words is None:
        unstable.Run(make_plan(config_of()), **part)  # only the result of a function can be checked
        return
    with pytest.raises(ConfigError) as raised:
        unstable.Run(make_plan(config_of()), **part)
    assert words in str(raised.value)
    if words.startswith("scheduler"):
        with pytest.raises(ConfigError, match=re.escape(words)) as raised:
            unstable.Run(make_plan(config_of()), buffer=Silent(), **part)  # type: ignore[arg-type]
        assert "buffer: " in str(raised.value), "every wrong part is named at once"


def scheduler_with(registry: Any = None, swapped: bool = False) -> unstable.GameScheduler:
    model_sampler = unstable.samplers.MirrorModelSampler(unstable.ModelRegistry(), random.Random(0))
    samplers: list[Any] = [model_sampler, unstable.samplers.UniformRandomEnvSampler(config_of().train_envs)]
    scheduler = unstable.GameScheduler(*samplers[:: -1 if swapped else 1])
    scheduler.registry = registry
    return scheduler


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: made_part("collector", lambda **given: given, scheduler=None),
            "collector: .* dict has no run, play_round",
        ),
        (
            lambda: unstable.Run(make_plan(config_of()), scheduler=scheduler_with(Silent())),
            r"scheduler\.registry: an object of type Silent has no current",
        ),
        (
            lambda: scheduler_with(swapped=True),
            "model_sampler: an object of type UniformRandomEnvSampler has no registry",
        ),
        (lambda: load_learner(config_of(KeepsNothing), "cpu"), "an object of type KeepsNothing has no training"),
    ],
)
def test_part_of_a_part_is_checked_too(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_state_that_json_would_change_is_refused_by_the_name_of_its_part():
    class Tuples(unstable.StepBuffer):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"mine": (1, 2)}

    with pytest.raises(ConfigError, match="buffer Tuples: JSON would change"):
        lasting_state("buffer", Tuples(8))


def test_state_of_a_subclass_without_its_own_state_is_kept():
    class MyRegistry(unstable.ModelRegistry):
        pass

    registry = MyRegistry()
    registry.add_fixed("scripted:random")
    registry.update_ratings({0: "base", 1: "fixed-scripted:random"}, {0: 1.0, 1: -1.0}, "Nim-v0-train")
    restored = MyRegistry()
    restored.load_state_dict(lasting_state("registry", registry))
    assert restored.get("base").rating_in("Nim-v0-train") == registry.get("base").rating_in("Nim-v0-train")
    assert restored.state_dict()["draws"] == registry.state_dict()["draws"] == {"Nim-v0-train": [0, 1]}


def test_algorithm_may_be_a_class_of_the_package_or_another_that_workers_can_import():
    assert config_of(Silent).algorithm == f"{__name__}:Silent"
    assert find("algorithm", name_of("algorithm", Silent), {}) is Silent
    assert config_of(REINFORCELearner).algorithm == "reinforce"
    for name, algorithm in LEARNERS.items():
        if name != "rloo":  # the same class as reinforce
            assert config_of(find("algorithm", algorithm.target, {})).algorithm == name

    class Local(REINFORCELearner):
        pass

    with pytest.raises(ConfigError, match=r"algorithm: workers import .*<locals>\.Local by its name; define it"):
        config_of(Local)


class KeepsNothing:
    def __init__(self, config: Config, device: str) -> None:
        self.settings = config, device

    def update(self, items: object, version: int) -> None: ...


ROOT = Path(__file__).parents[3]
MODULE = """
class Whole:
    def __init__(self, config, device, weight: float = 1.0): ...
    def update(self, items, version): ...

class Empty:
    def __init__(self, config, device): ...
"""


@pytest.mark.parametrize(
    ("learner", "options", "said"),
    [
        ("Whole", "learner.options={ weight = 0.5 }", "quickstart.toml can run"),
        ("Whole", "learner.options={ wieght = 0.5 }", "unknown keyword 'wieght'; did you mean 'weight'?"),
        ("Empty", "learner.options={}", "the class Empty has no update"),
        ("Missing", "learner.options={}", "has no 'Missing'"),
    ],
)
def test_custom_algorithm_is_checked(tmp_path, monkeypatch, learner, options, said):
    name = f"algorithm_{uuid.uuid4().hex}"  # another module for each case, because Python keeps the first
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = str(ROOT / "examples" / "quickstart.toml")
    result = CliRunner().invoke(app, ["check", config, f"algorithm={name}:{learner}", options])
    assert said in " ".join(result.output.split())
    assert (result.exit_code == 0) == ("can run" in said)
    assert "learning_rate" not in result.output
