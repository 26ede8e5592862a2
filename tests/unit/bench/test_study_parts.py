"""Study files, measures, aggregates and pages, by hand-made runs. No process is started."""

import asyncio
import itertools
import json
import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.study.page import note_of, number, to_html, to_markdown, to_plots
from bench.study.reading import Checked, Measure, digest, merged, read_study
from bench.study.results import Results, read_results, record_run, remarks, value_of, write_results
from bench.study.running import finished_directory, task_of
from bench.study.statistics import interquartile_mean, interval, summarise
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.orchestrator.checkpoint import save_checkpoint
from unstable_lite.tracking.run_directory import to_toml

ENV = "Nim-v0-train"
NIM = {"env_id": ENV, "num_players": 2, "prompt_template": "tiny"}
BASE: dict[str, Any] = {
    "model_name": "builtin:tiny",
    "run": {"learning_steps": 4, "eval_games": 4, "num_eval_workers": 0, "num_collection_workers": 12},
    "engine": {"kind": "scripted", "temperature": 1.0, "max_model_len": 512, "max_generation_len": 12},
    "learner": {"batch_size": 12},
    "train_envs": [NIM | {"num_actors": 2}],
    "eval_envs": [{"env_id": ENV, "num_players": 2, "fixed_opponent": "scripted:random"}],
}
STUDY: dict[str, Any] = {
    "name": "tiny",
    "question": "Is <this> a question?",
    "primary": "points, last",
    "seeds": [1, 2, 3, 4, 5],
    "scatter": ["points, last", "loss, mean"],
    "base": BASE,
    "measures": {
        "loss, mean": {"metric": "learner/loss", "take": "mean", "of": "last-half"},
        "points, last": {"opponent": "scripted:random"},
    },
    "arms": [{"name": "one"}, {"name": "two & more", "overrides": {"learner": {"learning_rate": 1e-12}}}],
}


def read(directory: Path, study: Mapping[str, Any] = STUDY) -> Checked:
    path = directory / "study.toml"
    path.write_text(to_toml(dict(study)))
    return read_study(path)


def make_run(checked: Checked, arm: int, seed: int, directory: Path, points: float) -> Path:
    """Write what a run of four updates leaves behind, as far as a study reads it."""
    task = task_of(checked, checked.study.arms[arm], seed, directory)
    run = directory / "2026-11-25" / f"10-00-00-{task.name}"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(task.config.model_dump(mode="json")))
    (run / "versions.json").write_text(
        json.dumps({"commit": "abc", "packages": {"torch": "2"}, "machine": {"cores": 2}})
    )
    metrics = [{"step": 0, "time": 1e9, "learner/loss": 99.0}]
    metrics += [
        {"step": step, "time": 1e9 + step, "run/seconds": 7.0 * step, "run/games": 10 * step, "learner/loss": step / 8}
        for step in range(1, 5)
    ]
    result = {"model": "m", "env_id": ENV, "opponent": "scripted:random", "n": 4, "win_rate": 0.0, "mean_reward": 0.0}
    result |= dict.fromkeys(("wins", "draws", "invalid", "void"), 0) | {"losses": 4, "reward_std": 0.0}
    evaluations = [
        result | {"label": "before", "step": 0, "points": 0.0},
        result | {"label": "after", "step": 4, "points": points},
        result | {"label": "concurrent", "step": 4, "points": 0.99},
    ]
    for name, lines in (("metrics", metrics), ("eval", evaluations), ("alarms", [])):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def make_results(checked: Checked, directory: Path, seeds: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Results:
    results = Results()
    for (index, arm), seed in itertools.product(enumerate(checked.study.arms), seeds):
        run = make_run(checked, index, seed, directory, points=0.1 * seed + 0.2 * index + 0.02 * index * (seed - 3))
        record_run(checked, arm, seed, run, results)
    return results


def changed(**changes: Any) -> dict[str, Any]:
    return {**STUDY, **changes}


def test_overrides_replace_keys_of_sections_and_whole_values():
    base = {"run": {"seed": 1, "name": "a"}, "league": {"s": {"mirror": 1, "lagged": 1}}, "train_envs": [1, 2]}
    own = {"run": {"name": "b"}, "league": {"s": {"fixed": 1}}, "train_envs": [3], "algorithm": "ppo"}
    assert merged(base, {"run": {"name": "c"}}, own) == {
        "run": {"seed": 1, "name": "b"},
        "league": {"s": {"fixed": 1}},
        "train_envs": [3],
        "algorithm": "ppo",
    }
    assert base["run"] == {"seed": 1, "name": "a"}


def test_arms_become_checked_configs_with_shared_overrides(tmp_path):
    (tmp_path / "base.toml").write_text(to_toml({**BASE, "run": BASE["run"] | {"seed": 9, "name": "mine"}}))
    checked = read(tmp_path, changed(base="base.toml", overrides={"run": {"learning_steps": 7}}))
    assert [config.run.learning_steps for config in checked.configs.values()] == [7, 7]
    assert [config.learner.learning_rate for config in checked.configs.values()][1] == 1e-12
    assert checked.study.measures["points, last"].env_id == ENV
    task = task_of(checked, checked.study.arms[1], 3, tmp_path)
    assert (task.config.run.seed, task.config.run.output_dir) == (3, tmp_path)
    assert task.name == f"two-more-seed-3-{digest(checked.configs['two & more'])[:8]}"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (changed(qestion="?"), "unknown key 'qestion'; did you mean 'question'?"),
    "unknown key of a config": (
        changed(arms=[{"name": "a", "overrides": {"learner": {"batch_sise": 2}}}]),
        "arm 'a': unknown key 'learner.batch_sise'; did you mean 'batch_size'?",
    ),
    "config that cannot run": (
        changed(arms=[{"name": "a", "overrides": {"engine": {"max_model_len": 8}}}]),
        "arm 'a': engine.max_",
    ),
    "missing key": ({key: value for key, value in STUDY.items() if key != "primary"}, "'primary' is missing"),
    "seed twice": (changed(seeds=[1, 1]), "seeds: 1 occurs twice"),
    "arms with one name": (changed(arms=[{"name": "a + b"}, {"name": "a-b"}]), "arms: 'a-b' occurs twice"),
    "name of a folder": (changed(name="../other"), "name = '../other'"),
    "wrong primary": (changed(primary="points last"), "primary = 'points last' is not a measure; did you mean 'poin"),
    "seed of its own": (changed(overrides={"run": {"seed": 3}}), "arm 'one': remove run.seed, which the study sets"),
    "no base": (changed(base="nowhere.toml"), "base = 'nowhere.toml': "),
    "opponent that is not evaluated": (
        changed(measures={"points, last": {"opponent": "scripted:optimal"}}),
        "measures.points, last: arm 'one' has no points against scripted:optimal",
    ),
    "points of no main policy": (
        changed(base=BASE | {"policies": {"first": {"opponents": "mirror"}}}),
        "measures.points, last: arm 'one' has no points against scripted:random",
    ),
    "points of main against itself": (
        changed(
            base=BASE | {"policies": {"main": {}}, "eval_envs": [NIM | {"fixed_opponent": "policy:main"}]},
            measures={"points, last": {"opponent": "policy:main"}},
        ),
        "measures.points, last: arm 'one' has no points against policy:main",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_study_file_is_refused_with_file_and_key(tmp_path, case):
    study, message = BAD[case]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, study)
    assert message in str(caught.value) and all(str(tmp_path / "study.toml") in line for line in caught.value.problems)


def test_measures_take_what_they_say():
    curve = [(0, 9.0), (2, 1.0), (4, 5.0), (6, 2.0), (8, 3.0)]
    for take, of_all, of_last_half in (("last", 3.0, 3.0), ("mean", 2.75, 2.5), ("min", 1.0, 2.0), ("max", 5.0, 3.0)):
        for of, value in (("all", of_all), ("last-half", of_last_half)):
            assert value_of(Measure(metric="x", take=take, of=of), curve) == value  # type: ignore[arg-type]
    assert value_of(Measure(metric="x"), [(0, 9.0)]) is None
    assert value_of(Measure(metric="x", take="change"), curve) == -6.0
    assert value_of(Measure(metric="x", take="change"), curve[1:]) is None


def test_interquartile_means_have_the_intervals_of_all_resamples():
    assert interquartile_mean([100.0, 0.0, 10.0, 20.0, 40.0]) == pytest.approx(70 / 3)
    assert interquartile_mean([1.0, 4.0]) == 2.5
    values = [0.31, 0.02, 0.47, 0.11, 0.23]
    every = np.array([interquartile_mean(sample) for sample in itertools.product(values, repeat=5)])
    found = interval(values)
    assert found == interval(values) and found is not None
    for edge, share in zip(found, (0.025, 0.975), strict=True):  # of 3,125 equally likely resamples
        assert abs(np.mean(every <= edge) - share) < 0.02
    assert interval([0.0, 1.0]) == (0.0, 1.0)
    assert interval([1.0]) is None and interval([]) is None


async def test_run_is_over_only_after_the_evaluations_of_every_policy(tmp_path):
    policies = {"second": {"opponents": "policy:main"}, "main": {"opponents": "mirror"}}
    checked = read(tmp_path, changed(base=BASE | {"policies": policies}))
    task, run = task_of(checked, checked.study.arms[0], 1, tmp_path), make_run(checked, 0, 1, tmp_path, points=0.5)
    await save_checkpoint(run / "checkpoints", 4, {}, [], lambda _: asyncio.sleep(0))
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    for models, is_over in ((["second/ckpt-2"], False), (["second/ckpt-2", "main/ckpt-2"], True)):
        written = [line | {"model": model} for line in lines for model in models]
        (run / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
        assert finished_directory(task) == (run if is_over else None)


def test_aggregates_and_differences_are_the_hand_computed_ones(tmp_path):
    study = read(tmp_path).study
    points = {"one": {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 1.0}, "two & more": {1: 0.4, 2: 0.3, 3: 0.9, 5: 0.9, 7: 5.0}}
    records = [
        {"arm": arm, "seed": seed, "measures": {"points, last": value, "loss, mean": None}}
        for arm, values in points.items()
        for seed, value in values.items()
    ]
    content = summarise(study, records)
    one, two = (row for row in content["aggregates"] if row["measure"] == "points, last")
    assert (one["n"], one["mean"], one["iqm"]) == (5, 0.4, 0.3)
    assert (two["n"], two["mean"], two["iqm"]) == (5, 1.5, 0.733333)
    (paired,) = (row for row in content["differences"] if row["measure"] == "points, last")
    # +.3, +.1, +.6, -.1: seeds 4 and 7 have no pair
    assert (paired["n"], paired["seeds"], paired["from"]) == (4, [1, 2, 3, 5], "one")
    assert (paired["mean"], paired["iqm"]) == (0.225, 0.2)
    half = 3.182446 * np.std([0.3, 0.1, 0.6, -0.1], ddof=1) / 2  # of three degrees of freedom
    assert paired["interval_of_mean"] == pytest.approx([0.225 - half, 0.225 + half], rel=1e-5)
    said = (
        f"from one, with 95 % t intervals: two & more 0.225 ({number(0.225 - half)} to {number(0.225 + half)}; n = 4)."
    )
    assert said in to_markdown(study, content, [])
    for record in records:
        record["measures"]["points, last"] = 0.2 * (record["arm"] == "one")
    equal = next(row for row in summarise(study, records)["differences"] if row["measure"] == "points, last")
    assert (equal["mean"], equal["interval_of_mean"]) == (-0.2, None), "equal differences have no t interval"
    unknown = [row for row in content["aggregates"] if row["measure"] == "loss, mean"]
    assert [(row["n"], row["mean"], row["interval"]) for row in unknown] == [(0, None, None)] * 2


def test_record_has_measures_curves_and_versions_of_its_run(tmp_path):
    checked, results = read(tmp_path), Results()
    run = make_run(checked, 1, 3, tmp_path, points=0.75)
    record = record_run(checked, checked.study.arms[1], 3, run, results)
    assert record["measures"] == {"points, last": 0.75, "loss, mean": 7 / 16}
    assert record["curves"] == {
        "learner/loss": [(0, 99.0), (1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)],
        f"points against scripted:random in {ENV}": [(0, 0.0), (4, 0.75)],
    }
    assert (record["arm"], record["seed"], record["seconds"], record["games"]) == ("two & more", 3, 28.0, 40)
    assert (record["commit"], record["machine"], record["primary"]) == ("abc", {"cores": 2}, "points, last")
    assert not remarks(checked, [record])
    assert remarks(checked, [record | {"primary": "loss, mean", "measures": {"loss, mean": 1.0}}]) == [
        "two & more, seed 3: no value of 'points, last'",
        "two & more, seed 3: the primary measure was 'loss, mean' when it ran",
    ]
    assert not remarks(checked, [record | {"curves": {}}]), "of a measure that had another metric when it ran"
    early = {name: [point for point in curve if point[0] < 4] for name, curve in record["curves"].items()}
    assert remarks(checked, [record | {"curves": early}]) == [
        "two & more, seed 3: 'points, last' is of update 0, the last one is 4"
    ]
    assert remarks(checked, [record, record | {"commit": "def"}]) == ["The runs are of several commits: abc, def"]


def test_results_survive_their_file_and_other_content_is_refused(tmp_path):
    checked, path = read(tmp_path), tmp_path / "deep" / "tiny.json"
    written = json.loads(json.dumps(write_results(path, checked, make_results(checked, tmp_path, (1, 2)))))
    assert [(run["seed"], run["arm"]) for run in written["runs"][:3]] == [(1, "one"), (1, "two & more"), (2, "one")]
    assert json.loads(json.dumps(write_results(path, checked, read_results(path, "tiny")))) == written
    assert json.loads(path.read_text()) == written
    write_results(path, checked, Results())
    with pytest.raises(UnstableError, match="results of study 'tiny'"):
        read_results(path, "other")
    whole, first = path.read_text(), '"runs": ['
    partial = [whole.replace(first, first + run) for run in ('{"arm": "one"}', '{"arm": "one", "seed": 1}')]
    for text in ("{", "[]", '{"format": 1}', *partial):
        path.write_text(text)
        with pytest.raises(UnstableError, match=r"tiny\.json"):
            read_results(path, "tiny")


def test_run_of_another_config_is_named_and_left_out(tmp_path):
    results = make_results(read(tmp_path), tmp_path)
    arms = [STUDY["arms"][0], {"name": "two & more", "overrides": {"learner": {"learning_rate": 1e-3}}}]
    now = read(tmp_path, changed(arms=arms))
    assert results.changed(now, "one", 1) == []
    assert results.changed(now, "two & more", 1) == ["learner.learning_rate: 1e-12 → 0.001"]
    assert {record["arm"] for record in results.of(now)} == {"one"}
    offset = read(tmp_path, changed(arms=[{"name": "one", "seed_offset": 50}]))
    assert results.changed(offset, "one", 1) == ["run.seed: 1 → 51"]


def cells(page: str, table: str) -> list[list[str]]:
    (body,) = re.findall(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', page, re.S)
    return [
        [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in re.findall(r"<tr>(.*?)</tr>", body)
    ]


def test_page_and_table_show_the_numbers_of_the_file(tmp_path):
    checked, path = read(tmp_path), tmp_path / "tiny.json"
    write_results(path, checked, make_results(checked, tmp_path))
    content = json.loads(path.read_text())
    page, table = to_html(checked.study, content, []), to_markdown(checked.study, content, [])
    shown = cells(page, "aggregates")
    assert shown[0][:4] == ["points, last (primary)", "one", "5", "0.3"] and len(shown) == len(content["aggregates"])
    for row in content["aggregates"]:
        low, high = map(number, row["interval"])
        numbers = [str(row["n"]), number(row["mean"]), number(row["iqm"]), f"{low} – {high}"]
        mark = " (primary)" * (row["measure"] == "points, last")
        assert [row["measure"] + mark, row["arm"], *numbers] in shown
        assert f"| {row['arm']} | {' | '.join(numbers)} |" in table
    assert [row[1] for row in cells(page, "differences")] == ["two & more"] * 2
    assert "arm, minus one" in page and "from one, with 95 % t intervals: two &amp; more 0.2 (" in page
    assert cells(page, "differences")[1][2:] == ["5", "0.2", "0.2", "0.1667 – 0.2333", "1, 2, 3, 4, 5"]
    assert [float(row[3]) for row in cells(page, "runs")] == [
        run["measures"]["points, last"] for run in content["runs"]
    ]
    assert (
        "Is &lt;this&gt; a question?" in page
        and "<script" not in page
        and "http:" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    )


@pytest.mark.parametrize("num_seeds", [0, 1, 4, 5])
def test_every_output_of_few_seeds_says_that_it_supports_no_claim(tmp_path, num_seeds):
    checked = read(tmp_path)
    results = make_results(checked, tmp_path, tuple(range(1, num_seeds + 1)))
    content = write_results(tmp_path / "tiny.json", checked, results)
    notes = note_of(checked.study, content)
    assert len(notes) == (num_seeds < 5)
    for text in (to_html(checked.study, content, notes), to_markdown(checked.study, content, notes)):
        assert ("support no claim" in text) == (num_seeds < 5)
    assert all(plot.startswith("<svg") for plot in to_plots(checked.study, content).values())


def test_row_of_several_arms_resamples_the_runs_of_each_arm_by_themselves(tmp_path):
    checked = read(tmp_path, changed(pools={"both": ["one", "two & more"]}))
    runs = [
        {"arm": arm.name, "seed": seed, "measures": {"points, last": 0.75 * index}}
        for (index, arm), seed in itertools.product(enumerate(checked.study.arms), checked.study.seeds)
    ]
    rows = {row["arm"]: row for row in summarise(checked.study, runs)["aggregates"] if row["measure"] == "points, last"}
    assert list(rows) == ["one", "two & more", "both"]
    assert (rows["both"]["n"], rows["both"]["mean"], rows["both"]["iqm"]) == (10, 0.375, 0.375)
    assert rows["both"]["interval"] == (0.375, 0.375)  # each draw has five runs of either arm
