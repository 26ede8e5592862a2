"""`python -m bench study`: real runs, killed and continued, with a scripted engine."""

import contextlib
import copy
import functools
import itertools
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import pytest
import torch
import typer
from peft import PeftModel
from playwright.sync_api import Browser
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from bench.harness import REPOSITORY
from bench.study import checkpoints
from bench.study import command as study_command
from bench.study.checkpoints import COMPUTED
from bench.study.page import to_html
from bench.study.reading import read_study
from bench.study.statistics import summarise
from fakes import random_models, runs
from fakes.handmade_adapters import fitting, write_adapter
from fakes.studies import places_in, start
from unstable_lite.adapters.peft_files import WEIGHTS
from unstable_lite.adapters.store import try_lock
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.scoring import action_distribution
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.models import resolve_model
from unstable_lite.tracking.run_directory import to_toml

STUDIES = sorted((REPOSITORY / "examples" / "studies").glob("*.toml"))
ENV = "Nim-v0-train"
SCRIPTED: dict[str, Any] = {
    "model_name": "builtin:tiny",
    "run": {
        "learning_steps": 2,
        "eval_games": 4,
        "num_eval_workers": 0,
        "num_collection_workers": 12,
        "checkpoint_every": 1,
    },
    "engine": {"kind": "scripted", "temperature": 1.0, "max_model_len": 512, "max_generation_len": 12},
    "learner": {"batch_size": 12, "activation_checkpointing": False, "canary_tolerance": 10.0},
    "train_envs": [{"env_id": ENV, "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}],
    "eval_envs": [{"env_id": ENV, "num_players": 2, "fixed_opponent": "scripted:random"}],
}
"""The scripted engine has no weights with which the canary could agree."""
SLOW = SCRIPTED | {"algorithm": "fakes.slow_learners:TakesASecond", "run": SCRIPTED["run"] | {"learning_steps": 4}}
Command = Callable[..., tuple[int, str]]
PRIMARY = f"points against scripted:random in {ENV}, last"


def write_study(directory: Path, **changes: Any) -> Path:
    arms = [{"name": "one"}, {"name": "two", "overrides": {"learner": {"learning_rate": 1e-12}}}]
    study = {"name": "tiny", "question": "?", "primary": PRIMARY, "seeds": [1, 2], "base": SCRIPTED, "arms": arms}
    path = directory / "study.toml"
    path.write_text(to_toml({**study, **changes}))
    return path


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Return a function that runs the command in this process. The study must not start a run."""
    bench = typer.Typer()
    bench.command()(study_command.main)

    def call(study: Path, *arguments: str, directory: Path = tmp_path) -> tuple[int, str]:
        ended = CliRunner().invoke(bench, [str(study), *places_in(directory), *arguments])
        return ended.exit_code, ended.output

    return call


def results(directory: Path) -> dict[str, Any]:
    """Return the results; without any before the first were written."""
    with contextlib.suppress(FileNotFoundError):
        content: dict[str, Any] = json.loads((directory / "tiny.json").read_text())
        return content
    return {"runs": []}


def run_directories(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob("outputs/*/*/config.toml"))


def has_checkpoint_of(directory: Path, name: str) -> bool:
    return any(directory.glob(f"outputs/*/*-{name}-*/checkpoints/ckpt-*/manifest.json"))


@pytest.mark.nightly
def test_killed_study_continues_to_the_same_runs(tmp_path: Path, command: Command) -> None:
    begin, study = functools.partial(start, is_torchless=True), write_study(tmp_path, base=SLOW)
    first = begin(study, tmp_path)
    runs.wait_for(lambda: len(results(tmp_path)["runs"]) == 1 and has_checkpoint_of(tmp_path, "two-seed-1"))
    children = runs.children_of(first)
    first.kill()
    first.communicate()
    (whole,) = results(tmp_path)["runs"]
    out = runs.output_of(runs.finish(begin(study, tmp_path, "--jobs", "2")))
    assert runs.are_gone(children)
    content = results(tmp_path)
    found = [(run["seed"], run["arm"]) for run in content["runs"]]
    assert found == [(seed, arm) for seed in (1, 2) for arm in ("one", "two")]
    assert content["runs"][0] == whole and "run 1 of 4" not in out
    assert all(run["updates"] == 4 and run["measures"][PRIMARY] is not None for run in content["runs"])
    assert {path.name for path in run_directories(tmp_path)} == {run["directory"] for run in content["runs"]}
    assert "support no claim" in out and "support no claim" in (tmp_path / "tiny.md").read_text()
    assert re.search(r"run 4 of 4: two, seed 2 \(\d to go, about \d+ s left\)", out), out
    assert (tmp_path / "tiny.svg").exists() and (tmp_path / "outputs" / "study.html").exists()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tiny.json").write_text((tmp_path / "tiny.json").read_text())
    assert command(study, directory=elsewhere)[0] == 0
    assert results(elsewhere) == content and not run_directories(elsewhere)

    (tmp_path / "tiny.json").unlink()
    code, out = command(study)
    assert code == 0 and "run 1" not in out, out
    assert results(tmp_path) == content

    loss = {"loss": {"metric": "learner/loss"}, "points": {"opponent": "scripted:random"}}
    code, out = command(write_study(tmp_path, base=SLOW, measures=loss, primary="loss"), "--show")
    assert code == 0, out
    assert all(run["measures"]["loss"] is not None and run["primary"] == PRIMARY for run in results(tmp_path)["runs"])
    assert out.count(f"the primary measure was {PRIMARY!r} when it ran") == 4


@pytest.mark.nightly
def test_every_run_starts_from_the_warm_start(tmp_path: Path) -> None:
    sft = {"players": ["scripted:random"], "pairs": 20, "epochs": 1, "learning_rate": 1e-3, "holdout": 0.0}
    frozen = {"learner": SCRIPTED["learner"] | {"learning_rate": 1e-12}, "run": SCRIPTED["run"] | {"learning_steps": 1}}
    given = {"base": SCRIPTED | frozen | {"sft": sft}, "arms": [{"name": "one"}], "warm_start": True}
    path = write_study(tmp_path, **given, seeds=[1, 2])
    runs.output_of(runs.finish(start(path, tmp_path)))
    (adapter,) = tmp_path.glob("outputs/warm_start-*")
    made = load_file(adapter / WEIGHTS)
    assert any(weight.any() for name, weight in made.items() if "lora_B" in name)
    for directory in run_directories(tmp_path):
        trained = load_file(directory / "checkpoints" / "ckpt-1" / WEIGHTS)
        assert all(torch.allclose(trained[name], made[name], atol=1e-6) for name in made)
    assert len({run["start"] for run in results(tmp_path)["runs"]}) == 1

    made_at = (adapter / WEIGHTS).stat().st_mtime_ns
    write_study(tmp_path, **given, seeds=[1, 2, 3])
    runs.output_of(runs.finish(start(path, tmp_path, is_torchless=True)))
    assert (adapter / WEIGHTS).stat().st_mtime_ns == made_at
    assert len(results(tmp_path)["runs"]) == 3


def test_failed_warm_start_is_reported_and_nothing_runs(tmp_path: Path, command: Command) -> None:
    code, said = command(write_study(tmp_path, warm_start=True))
    assert code == 1
    assert "no warm start: exited with code 1" in said and "sft.players" in said
    assert not run_directories(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_study_ends_its_runs_and_continues(tmp_path: Path, signum: signal.Signals) -> None:
    base = SLOW | {"run": SCRIPTED["run"] | {"learning_steps": 6}}
    begin, study = functools.partial(start, is_torchless=True), write_study(tmp_path, seeds=[1], base=base)
    first = begin(study, tmp_path, "--jobs", "2")
    runs.wait_for(lambda: has_checkpoint_of(tmp_path, "one-seed-1") and has_checkpoint_of(tmp_path, "two-seed-1"))
    children = runs.children_of(first)
    first.send_signal(signum)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 130, out + err
    assert runs.are_gone(children)
    runs.output_of(runs.finish(begin(study, tmp_path, "--jobs", "2")))
    assert len(run_directories(tmp_path)) == 2 and [run["updates"] for run in results(tmp_path)["runs"]] == [6, 6]


def test_second_study_in_one_folder_and_a_bad_file_are_refused(tmp_path: Path, command: Command) -> None:
    (tmp_path / "outputs").mkdir()
    lock = try_lock(tmp_path / "outputs")
    assert lock is not None
    code, said = command(write_study(tmp_path))
    os.close(lock)
    assert code == 1 and "another process runs this study" in said
    study = write_study(tmp_path, primary="speed")
    code, said = command(study)
    assert code == 1 and not run_directories(tmp_path), said
    assert f"error: {study}: primary = 'speed' is not a measure; known: {PRIMARY}" in said


def test_default_measures_are_points_and_exploitabilities(tmp_path: Path) -> None:
    kuhn = {"env_id": "openspiel:kuhn_poker", "num_players": 2, "prompt_template": "tiny"}
    base = {
        "model_name": "builtin:tiny-games",
        "run": {"exact_every": 2, "eval_games": 4},
        "engine": SCRIPTED["engine"] | {"kind": "transformers"},
        "train_envs": [kuhn | {"num_actors": 2}],
        "eval_envs": [kuhn | {"fixed_opponent": "base"}],
    }
    name = "exploitability/openspiel:kuhn_poker"
    checked = read_study(write_study(tmp_path, base=base, primary=f"{name}, last"))
    assert list(checked.study.measures) == [
        *(f"{name}, {taken}" for taken in ("last", "worst of the last half", "mean")),
        "points against base in openspiel:kuhn_poker, last",
    ]


EXACT: dict[str, Any] = {
    "model_name": "builtin:tiny-games",
    "run": {"exact_every": 2, "eval_games": 0},
    "engine": SCRIPTED["engine"] | {"kind": "transformers"},
    "lora": {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
    "train_envs": [{"env_id": "openspiel:kuhn_poker", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}],
}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Run directory with two handmade adapters of the config `EXACT`."""
    study = write_study(tmp_path, base=EXACT, primary="exploitability/openspiel:kuhn_poker, last")
    config = read_study(study).configs["one"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config.model_dump(mode="json")))
    base, modules = EXACT["model_name"], EXACT["lora"]["target_modules"]
    for number in (1, 2):
        adapter = tmp_path / "run" / "checkpoints" / f"ckpt-{number}"
        write_adapter(adapter, fitting(base, number), base=base, target_modules=modules, bias="none")
    return tmp_path / "run"


def computed(kind: str, directory: Path) -> dict[str, list[tuple[int, float]]]:
    config = read_study(directory.parent / "study.toml").configs["one"]
    return COMPUTED[kind](directory, config, "openspiel:kuhn_poker")


def test_average_policy_is_that_of_the_checkpoints(trained: Path) -> None:
    env_id = "openspiel:kuhn_poker"
    tree = flatten(env_id)
    observations = [state.observation for state in tree.states]
    config = read_study(trained.parent / "study.toml").configs["one"]
    policies = [
        [of.probabilities for of in action_distribution(adapter, env_id, observations, config=config)]
        for adapter in (trained / "checkpoints" / f"ckpt-{number}" for number in (1, 2))
    ]
    exact = tree.exploitability(tree.average(policies, [1, 1]))
    assert computed("exploitability_average", trained) == {
        f"exploitability_average/{env_id}": [(2, pytest.approx(exact))]
    }


def test_dependence_on_the_state_grows_where_an_adapter_looks_at_it(trained: Path) -> None:
    adapter, base, modules = trained / "checkpoints" / "ckpt-3", EXACT["model_name"], EXACT["lora"]["target_modules"]
    strong = {name: 20 * tensor for name, tensor in fitting(base, 2).items()}
    write_adapter(adapter, strong, base=base, target_modules=modules, bias="none")
    ((name, curve),) = computed("state_dependence", trained).items()
    assert name == "state_dependence/openspiel:kuhn_poker" and [update for update, _ in curve] == [0, 3]
    assert curve[0][1] < 0.01 < curve[1][1], "the packaged model does not read its card"


def test_language_is_that_of_merged_weights(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trained / "questions.jsonl").write_text('{"question": "What is 8 - 9?", "answer": -1}\n')
    monkeypatch.setattr(checkpoints, "QUESTIONS", trained / "questions.jsonl")
    monkeypatch.setattr(checkpoints, "TEXTS", 2)
    found = computed("language", trained)
    place = resolve_model(EXACT["model_name"])
    base, tokenizer = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32),
        AutoTokenizer.from_pretrained(place),
    )
    prompt, answer = (tokenizer(text).input_ids for text in ("Question: What is 8 - 9?\nAnswer:", " -1\n"))
    ids = torch.tensor([prompt + answer])
    labels = torch.tensor([[-100] * len(prompt) + answer])
    merged = PeftModel.from_pretrained(copy.deepcopy(base), trained / "checkpoints" / "ckpt-2").merge_and_unload()
    with torch.inference_mode():
        before, after = (-float(model(ids, labels=labels).loss) * len(answer) for model in (base, merged))
    assert found["language/answers"] == [(0, pytest.approx(before)), (2, pytest.approx(after, rel=1e-4))]
    assert found["language/of_base"] == [(0, pytest.approx(before)), (2, pytest.approx(before))]
    parts = (part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) >= checkpoints.LONG)
    texts = [torch.tensor([tokenizer(part).input_ids[:128]]) for part in itertools.islice(parts, 2)]

    @torch.inference_mode()
    def divergence(one: torch.nn.Module, other: torch.nn.Module) -> float:
        """Return KL(one ‖ other) of the next token."""
        pairs = ([torch.log_softmax(model(ids).logits[0], -1) for model in (one, other)] for ids in texts)
        return fmean(float((p.exp() * (p - q)).sum(-1).mean()) for p, q in pairs)

    (_, nothing), (_, kl) = found["language/kl"]
    assert nothing == 0 and kl == pytest.approx(divergence(merged, base), rel=1e-3)
    assert kl != pytest.approx(divergence(base, merged), rel=1e-2)


def test_average_policy_of_a_game_with_shared_positions_is_refused(tmp_path: Path) -> None:
    env_id = "openspiel:nim(is_misere=False,pile_sizes=2;2)"
    base = EXACT | {"train_envs": [EXACT["train_envs"][0] | {"env_id": env_id}]}
    measures = {"average": {"metric": f"exploitability_average/{env_id}"}}
    with pytest.raises(ConfigError, match="arm 'one' has no exploitability_average"):
        read_study(write_study(tmp_path, base=base, measures=measures, primary="average"))


def test_measures_of_a_run_of_roles_are_those_of_a_policy(tmp_path: Path) -> None:
    kuhn = "openspiel:kuhn_poker"
    env = {"env_id": kuhn, "num_players": 2, "seats": ["main", "second"], "prompt_template": "tiny"}
    policies = {name: {"opponents": "mirror"} for name in ("main", "second", "third")}
    nim = SCRIPTED["train_envs"][0] | {"num_actors": 1}
    base = EXACT | {"policies": policies, "train_envs": [env, nim]}
    base["eval_envs"] = [{"env_id": kuhn, "num_players": 2, "fixed_opponent": "scripted:random"}]

    def measures_of(*metrics: str) -> list[str | None]:
        measures = {metric: {"metric": metric} for metric in metrics}
        first = metrics[0] if metrics else f"main/exploitability/{kuhn}, last"
        checked = read_study(write_study(tmp_path, base=base, measures=measures, primary=first))
        return [measure.metric for measure in checked.study.measures.values()]

    found = [f"main/exploitability/{kuhn}", f"second/exploitability_legal/{kuhn}"]
    assert measures_of(*found) == found and set(measures_of()) == {f"main/exploitability/{kuhn}"}
    kinds = "exploitability", "third/exploitability", "state_dependence", "exploitability_average"  # the third has none
    for metric in (f"{kind}/{kuhn}" for kind in kinds):
        with pytest.raises(ConfigError, match=f"arm 'one' has no {metric}"):
            measures_of(metric)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_shipped_study_can_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem == "smollm2":
        random_models.replace_smollm2(tmp_path, monkeypatch)
    study = read_study(path).study
    assert study.name == path.stem and len(study.seeds) >= 5


@pytest.mark.nightly
@pytest.mark.browser
def test_page_fits_a_desk_and_a_phone(tmp_path: Path, browser: Browser) -> None:
    study, results = read_study(STUDIES[0]).study, list[dict[str, Any]]()
    for number, (seed, arm) in enumerate(itertools.product(study.seeds, study.arms)):
        values = {name: (7 * number % 20) / 20 for name in study.measures}
        curves = {"exploitability/openspiel:kuhn_poker": [(update, update * number) for update in range(0, 128, 8)]}
        record = {"arm": arm.name, "seed": seed, "updates": 128, "games": 9999, "seconds": 130, "alarms": 0}
        results.append(record | {"directory": "10-00-00-run", "measures": values, "curves": curves})
    content = {"runs": results, **summarise(study, results)}
    (tmp_path / "study.html").write_text(to_html(study, content, ["A note."]))
    said: list[str] = []
    for width in (1280, 390):
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.on("console", lambda message: said.append(message.text))
        page.goto((tmp_path / "study.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("svg").count() == 1 + len(study.measures) + len(study.arms)
    assert not said
