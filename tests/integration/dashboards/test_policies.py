"""A run of two policies as a person sees it: every metric, result, alarm, spike and saved adapter by policy."""

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fakes.game_records import make_record, make_spec
from fakes.policy_runs import CONFIG, NIM, PolicyRun, whole_run
from fakes.shown_runs import quickstart
from unstable_lite.config import Config
from unstable_lite.dashboards.league import age
from unstable_lite.dashboards.report.curves import lines_by_name, meeting_lines, sections
from unstable_lite.dashboards.report.games import policy_seats, read_games
from unstable_lite.dashboards.report.page import render
from unstable_lite.dashboards.run_directory import Group, RunData, RunDirectory
from unstable_lite.dashboards.terminal import evaluation_tables
from unstable_lite.dashboards.top import MachineLoad, draw
from unstable_lite.files import read_records
from unstable_lite.tracking.displayed_metrics import find_spikes
from unstable_lite.tracking.records import record_to_json
from unstable_lite.tracking.run_directory import rewind
from unstable_lite.tracking.tensorboard import layout
from unstable_lite.types import ModelRef, policy_of

WON = f"evaluation-{NIM} (scripted:random)/checkpoint Points"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("policies")).end()


def read(directory: Path) -> RunData:
    return RunData(directory)


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    return [dict(line) for line in read_records(directory / f"{name}.jsonl")]


def frame(directory: Path, width: int, height: int) -> str:
    view = RunDirectory(directory)
    view.refresh()
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(draw(view, width, height, MachineLoad()), width=width, height=height)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_metric_has_the_name_of_its_policy_unless_it_is_of_the_run(directory):
    names = {name for line in lines(directory, "metrics") for name in line} - {"step", "time"}
    assert {name.partition("/")[0] for name in names} == {"main", "exploiter", "run"}
    for policy in ("main", "exploiter"):
        own = {name.removeprefix(f"{policy}/") for name in names if name.startswith(policy)}
        assert {"learner/loss", WON, f"collection-{NIM}/Points", f"exploration/{NIM}/n"} < own


def test_a_game_of_two_policies_counts_for_each_of_them_with_its_own_result(directory):
    newest: dict[str, float] = {}
    for line in lines(directory, "metrics"):
        newest |= line
    played = {name: newest[f"{name}/collection-{NIM}/step"] for name in ("main", "exploiter")}
    against = [line for line in lines(directory, "league") for line in line["matches"]]
    assert played["main"] + played["exploiter"] == 2 * 20 * 30
    assert 0 < played["exploiter"] < played["main"]
    assert newest[f"exploiter/collection-{NIM}/Points"] < 0.5 < newest[f"main/collection-{NIM}/Points"]
    assert any({policy_of(one), policy_of(other)} == {"main", "exploiter"} for one, other, *_ in against)


def test_windows_and_tallies_survive_a_resume_by_policy(tmp_path):
    run = whole_run(tmp_path, ("main", "exploiter"))
    run.play_beside("exploiter", 3)
    state = json.loads(json.dumps(run.tracker.state_dict()))
    again = run.new_tracker()
    again.resume(state, lines(run.directory, "eval"))
    assert again.state_dict() | {"seconds": state["seconds"]} == state
    assert again.windows.metrics() == run.tracker.windows.metrics()
    assert {model for model, *_ in state["tallies"]} == {"exploiter/ckpt-1"}
    for tracker in (run.tracker, again):
        tracker.close()


def test_an_evaluation_beside_training_has_the_runs_update_and_not_the_policys(tmp_path):
    run = PolicyRun(tmp_path)
    for policy in ("main", "main", "exploiter", "exploiter", "main"):
        run.play_beside("exploiter", 2)
        run.update(policy)
    run.end()
    steps = {line["model"]: line["step"] for line in lines(run.directory, "eval")}
    assert steps == {"exploiter/initial": 0, "exploiter/ckpt-1": 4, "exploiter/ckpt-2": 5}


def test_results_have_a_row_for_each_policy_env_and_opponent(directory):
    rows = read(directory).rows
    shown = [(row.label, row.is_concurrent, [one.step for one in row.evaluations][:2]) for row in rows]
    assert shown[:3] == [
        ("main: random", False, [0, 10]),
        ("exploiter: random", False, [0, 10]),
        ("exploiter: policy:main", False, [0, 10]),
    ]
    assert {(row.policy, row.is_concurrent) for row in rows[3:]} == {("main", True), ("exploiter", True)}
    titles = [str(table.title) for table in evaluation_tables(rows)]
    assert titles[0] == f"Points of main against scripted:random in {NIM}"


def test_an_evaluation_against_a_policy_is_the_evaluated_ones_alone(directory):
    (evaluation,) = (
        line for line in lines(directory, "eval") if line["opponent"] == "policy:main" and line["step"] == 20
    )
    assert (evaluation["model"], evaluation["n"]) == ("exploiter/ckpt-5", 40)
    assert f"main/evaluation-{NIM} (policy:main)/n" not in {
        name for line in lines(directory, "metrics") for name in line
    }


def test_rows_of_a_policy_stand_together_in_any_order_of_its_evaluations(tmp_path):
    run = PolicyRun(tmp_path)
    for policy, opponent in (
        ("main", "scripted:random"),
        ("exploiter", "scripted:random"),
        ("main", "policy:exploiter"),
    ):
        run.evaluate(policy, opponent)
    labels = [row.label for row in read(run.end()).rows]
    assert labels == ["main: random", "main: policy:exploiter", "exploiter: random"]


def test_points_against_a_policy_that_learns_are_not_for_alarms(tmp_path):
    run = PolicyRun(tmp_path)
    run.play_beside("main", 2)
    run.count(run.play(run.current("main"), run.registry.eval_opponent("policy:exploiter")))
    judged = [games for kind, games in run.tracker.windows.of("main").judged]
    run.tracker.close()
    assert judged == [f"evaluation games of {NIM} against scripted:random"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 36), (200, 50)])
def test_top_answers_for_each_policy(directory, width, height):
    shown = frame(directory, width, height)
    assert re.search(r"main: random +\d", shown) and re.search(r"exploiter: random +\d", shown)
    headings = [line for line in shown.splitlines() if line.strip() in ("main", "exploiter")]
    assert [line.strip() for line in headings] == ["main", "exploiter"][: 1 + (height == 50)]


def test_a_spike_is_of_one_policy_and_named_after_it():
    updates: list[Mapping[str, Any]] = [
        {"step": update, f"{policy}/learner/loss": 90.0 if (policy, update) == ("exploiter", 30) else 1.0}
        for update in range(1, 40)
        for policy in ("main", "exploiter")
    ]
    (spike,) = find_spikes(updates, ["main", "exploiter"])
    assert spike.text == "update 30: exploiter: loss 90, 90 times the usual 1"


def test_charts_are_grouped_by_policy_and_explained_as_those_of_one_policy(directory):
    run = read(directory)
    titled = {section["title"]: section["charts"] for section in sections([run], run.curves)}
    assert [*titled][:2] == ["main: Does it play better?", "main: Is it healthy?"]
    (loss,) = (chart for chart in titled["exploiter: Is it healthy?"] if chart["name"] == "exploiter/learner/loss")
    assert loss == {"name": "exploiter/learner/loss", "title": "exploiter: Loss", "explain": loss["explain"]}
    assert loss["explain"].startswith("Its level")
    of_run = [chart["name"] for title, charts in titled.items() if title == "How fast is it?" for chart in charts]
    assert of_run == ["run/tokens_per_s"]
    won = lines_by_name([Group(run.label, [run])])[f"exploiter/{WON}"][0]["points"]
    assert [point.step for point in won] == [0, 10, 20] and won[0].low is not None
    rate = lines_by_name([Group(run.label, [run])])[f"main/collection-{NIM}/Win Rate"][0]["points"][-1]
    assert rate.text.endswith("n = 512)")


def test_which_policy_beats_which_is_the_sum_over_their_checkpoints(directory):
    run = read(directory)
    (line,) = meeting_lines(run)
    assert line["label"] == "exploiter against main"
    met: dict[tuple[str, str], list[int]] = {}
    for logged in run.lines("league"):
        met |= {(one, other): counts for one, other, _, *counts in logged["matches"]}
    games = sum(
        sum(counts) for (one, other), counts in met.items() if policy_of(one) == "exploiter" and policy_of(other)
    )
    shown = [int(found[1]) for point in line["points"] if (found := re.search(r"n = (\d+)", point.text))]
    assert sum(shown) == games > 100
    assert all(point.low <= point.y <= point.high for point in line["points"])


def test_a_run_of_one_policy_has_no_such_line(tmp_path):
    assert [*meeting_lines(read(quickstart(tmp_path)))] == []


def test_the_ladder_has_each_policys_current_checkpoint(directory):
    current = {standing.uid for standing in read(directory).league().ladder if standing.is_current}
    assert current == {"main/ckpt-15", "exploiter/ckpt-5"}


def test_the_report_is_whole(directory):
    run = read(directory)
    page = render([Group(run.label, [run])], [read_games(directory, None, 5, run.config)], "").decode()
    assert "main: random" in page and "exploiter: policy:main" in page


def test_a_game_of_two_trained_policies_is_listed_for_the_first_and_against_the_other():
    one, other = (
        ModelRef(uid=uid, kind="checkpoint", adapter_version=1) for uid in ("exploiter/ckpt-2", "main/ckpt-7")
    )
    game = record_to_json(make_record(make_spec(one, other, trained=(0, 1)), 1.0, -1.0), keep_tokens=False)
    assert policy_seats(game) == [0]
    mirror = record_to_json(make_record(make_spec(one, one, trained=(0, 1)), 1.0, -1.0), keep_tokens=False)
    assert policy_seats(mirror) == [0, 1]


def test_checkpoints_of_policies_are_no_fixed_opponents():
    uids = ["fixed-run:x/ckpt-3", "main/ckpt-10", "exploiter/ckpt-9", "main/initial", "base"]
    assert sorted(uids, key=age) == ["base", "main/initial", "exploiter/ckpt-9", "main/ckpt-10", "fixed-run:x/ckpt-3"]


def test_tensorboard_draws_a_line_for_each_policy(directory):
    board = EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    tags = board.Tags()
    assert {"main/learner/loss", "exploiter/learner/loss", "Results/main: 1 Nim-v0-train, random"} <= {*tags["tensors"]}
    assert "exploiter/learner/advantage" in tags["tensors"]
    charts = [chart for category in layout(Config.model_validate(CONFIG)).category for chart in category.chart]
    (loss,) = (chart for chart in charts if chart.title == "loss")
    drawn = {tag for tag in tags["tensors"] if re.match(loss.multiline.tag[0], tag)}
    assert drawn == {"exploiter/learner/loss", "main/learner/loss"}
    margins = [chart.margin.series[0].value for chart in charts if chart.title.endswith("95 %")]
    assert len(margins) == 3 and {tag for tag in margins if tag not in tags["tensors"]} == set()


def test_rewinding_removes_the_later_evaluations_of_every_policy(tmp_path):
    directory = whole_run(tmp_path).end()
    rewind(directory, 10, 10**6, (), lambda line: line["model"] == "exploiter/ckpt-2" and line["step"] == 10)
    left = lines(directory, "eval")
    assert {line["model"] for line in left if line["step"] == 10 and line["label"] != "concurrent"} == {"main/ckpt-8"}
    assert max(line["step"] for line in left) == 10
    logged = {(line["step"], name) for line in lines(directory, "metrics") for name in line}
    assert (
        (10, f"main/{WON}") in logged and (10, f"exploiter/{WON}") not in logged and (0, f"exploiter/{WON}") in logged
    )
