"""The report as a person uses it: opened from disk in a browser without a network.

Its results are those of `eval.jsonl` and of the terminal: one number everywhere.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from playwright.sync_api import Browser, Page, expect
from rich.console import Console
from typer.testing import CliRunner

from fakes import shown_runs
from fakes.byte_tokens import BYTE_TOKENS, ids_of
from fakes.game_records import BASE, RANDOM, make_generation, make_record, make_spec
from fakes.odd_tokenizers import make_odd_tokenizer
from unstable_lite.adapters.frozen import update_of
from unstable_lite.adapters.store import try_lock
from unstable_lite.cli.app import app
from unstable_lite.config import Config
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.dashboards.report import write_report
from unstable_lite.dashboards.report.curves import evaluation_charts, lines_by_name, metric_points
from unstable_lite.dashboards.report.games import Sample, pieces, read_games, templates_by_env
from unstable_lite.dashboards.run_directory import Group, RunData, RunDirectory
from unstable_lite.dashboards.terminal import evaluation_tables
from unstable_lite.errors import UnstableError
from unstable_lite.files import write_whole
from unstable_lite.games.templates import TEMPLATES
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.models import BUILTIN
from unstable_lite.models.local_tokenizer import CUT
from unstable_lite.tracking.evaluations import Tally
from unstable_lite.tracking.intervals import points_interval
from unstable_lite.tracking.records import JsonlSink, step_to_json
from unstable_lite.tracking.result_rows import ResultRow, to_markdown
from unstable_lite.tracking.run_directory import to_toml
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import GameRecord, Generation, ModelRef, PlayerTrajectory, Step, Turn

TOKENIZER = tokenizers.Tokenizer.from_file(str(BUILTIN["builtin:tiny"] / "tokenizer.json"))
CKPT = ModelRef(uid="ckpt-2", kind="checkpoint", adapter_version=2)
NIM, TTT = "Nim-v0-train", "TicTacToe-v0-train"
RULES = "Rules, line 1\nRules, line 2\nRules, line 3\n"
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "</pre></details><b id=hacked>bold</b>",
    "{{ 7 * 7 }}{% raw %}{{ self.__init__ }}",
    "line\u2028separator\u2029paragraph",
    "\x1b[31mred\x1b[0m\x07",
    "nul \x00 and lone \ud800 and \udfff",
    "\u202ereversed\u202c \ufeff",
    "javascript:alert(1) --> ]]> &lt;b&gt; &amp;",
    "x" * 300_000,
)


def sampled(text: str, version: int = 2) -> Generation:
    """Return `text` as the tiny model would have written it, with its end token."""
    ids = [*TOKENIZER.encode(text).ids, TOKENIZER.token_to_id("<|im_end|>")]
    return make_generation(ids, np.linspace(-0.1, -3.0, len(ids)), text=text, adapter_version=version)


def game(
    number: int,
    policy: ModelRef = CKPT,
    opponent: ModelRef | None = RANDOM,
    env_id: str = NIM,
    text: str = "I take two. \\boxed{[2 2]}",
    **changes: Any,
) -> GameRecord:
    """Return a game of three turns, the policy's first and last. With `opponent` None the policy has both seats."""
    kind, models = changes.pop("kind", "train"), (policy, opponent or policy)
    trained = [pid for pid, model in enumerate(models) if kind == "train" and model is policy]
    spec = make_spec(*models, kind=kind, trained=trained, game_idx=number, env_id=env_id, seed=2 * number)
    is_tokens = len(text) < 1000 and "\ud800" not in text  # no tokens encode a lone surrogate
    generation = sampled(text) if is_tokens else None
    turns = [
        Turn(
            pid=pid,
            observation=f"{RULES}Turn {turn}: board of game {number}",
            text=text if pid == 0 else "[1 1]",
            action="[2 2]" if pid == 0 else "[1 1]",
            format_ok=True,
            seconds=0.25,
            generation=generation if pid == 0 else None,
        )
        for turn, pid in enumerate((0, 1, 0))
    ]
    return dataclasses.replace(make_record(spec, 1.0, -1.0, turns=turns), **changes)


LOST = {"rewards": {0: -1.0, 1: 1.0}, "outcomes": {0: "loss", 1: "win"}}
OWN_INVALID = {**LOST, "end": "invalid", "invalid_pids": (0,)}
OTHERS_INVALID = {"end": "invalid", "invalid_pids": (1,)}
VOID = {"rewards": {}, "outcomes": {}, "end": "void", "error": "EnvError: the board broke"}
TRAINED = 4
"""Number of tokens of a trained turn that the learner did not cut off."""
GAMES = [
    game(0, BASE, kind="eval"),
    game(1, BASE, kind="eval", **LOST),
    game(2, BASE, **OWN_INVALID),
    game(3, BASE, **OTHERS_INVALID),
    game(4, BASE, opponent=None),
    game(5, BASE, **VOID),
    game(6, CKPT, opponent=BASE, env_id=TTT),
    game(7, CKPT, opponent=BASE, env_id=TTT, rewards={0: 0.0, 1: 0.0}, outcomes={0: "draw", 1: "draw"}),
    game(8, CKPT, kind="eval"),
    game(9, CKPT, text="H\u00e9! \U0001f389 \\boxed{[2 2]}"),
]


STAGES = {"raw_reward": 1.0, "env_reward": 0.625, "step_reward": 0.375}


def step_of(record: GameRecord, turn: int) -> Step:
    """Return the batch entry of a turn; each stage has a different reward."""
    one = record.turns[turn]
    assert one.generation is not None
    return Step(
        pid=one.pid,
        obs=f"<|im_start|>user\n{one.observation}<|im_end|>",
        act=one.text,
        reward=0.875,
        env_id=record.spec.env_id,
        generation=one.generation,
        step_info={"game_idx": record.spec.game_idx, "turn": turn, **STAGES},
    )


def write_run(
    directory: Path,
    games: list[GameRecord] = GAMES,
    config: dict[str, Any] | None = None,
    won_after: int = 90,
    alarms: tuple[str, ...] = (),
) -> Path:
    """Write a run directory with a run's own writers: three updates and two evaluations."""
    directory.mkdir(parents=True)
    envs = [{"env_id": NIM, "num_players": 2, "num_actors": 1}]
    whole = Config.model_validate({"train_envs": envs, "run": {"learning_steps": 3}} | (config or {}))
    (directory / "config.toml").write_text(to_toml(whole.model_dump(mode="json")))
    versions = {"commit": "abc123", "packages": {"torch": "2.13.0", "vllm": None}, "machine": {"cores": 2}}
    (directory / "versions.json").write_text(json.dumps(versions))
    registry = ModelRegistry()
    registry.add_fixed("scripted:random")
    tracker = Tracker(directory, [JsonlSink(directory / "metrics.jsonl")], TrackerConfig(keep_tokens=True))
    tracker.registry = registry
    for record in games:
        spec, is_void = record.spec, record.end == "void"
        for model in [agent.model for agent in spec.agent_specs if not is_void]:
            if model.kind == "fixed":
                registry.add_fixed(str(model.name))
            elif model.uid not in registry.get_all_models():
                registry.add_policy(model.uid, 0, update_of(Path(model.uid)) or 0)
        if not is_void:
            registry.update_ratings({of.pid: of.model.uid for of in spec.agent_specs}, record.rewards, spec.env_id)
        if spec.kind == "train" and not is_void:
            trained = [step_of(record, turn) for turn in (0, 2) if record.turns[turn].generation is not None]
            played = PlayerTrajectory(pid=0, env_id=spec.env_id, game_idx=0, model=CKPT, steps=trained)
            record = dataclasses.replace(record, trajectories=[played])
        tracker.add_record(record)
    for label, model, update, wins in (("before", "base", 0, 50), ("after", "ckpt-3", 3, won_after)):
        tally = Tally()
        for number in range(100):
            outcome, reward = ("win", 1.0) if number < wins else ("loss", -1.0)
            tally.add(outcome, reward, own_invalid=False)
        tracker.add_evaluation(tally.evaluation(label, model, update, NIM, "scripted:random"))
    for update in (1, 2, 3):
        if f"ckpt-{update}" not in registry.get_all_models():
            registry.add_policy(f"ckpt-{update}", update, update)
        if not games:
            registry.update_ratings({0: f"ckpt-{update}", 1: RANDOM.uid}, {0: 1.0, 1: 0.0}, NIM)
        rating = registry.get(f"ckpt-{update}").rating
        ratings = {"trueskill/current mu": rating.mu, "trueskill/current sigma": rating.sigma}
        tracker.log_update(update, {"learner/entropy": 2.0 / update, "run/tokens_per_s": 100.0, **ratings})
    for alarm in alarms:
        tracker.alarm(3, alarm)
    of_update = [
        step_to_json(step_of(record, 2), 4, generation.logprobs[:TRAINED] + 0.5 * np.arange(TRAINED))
        for record in games
        if record.spec.game_idx == 9 and (generation := record.turns[2].generation)
    ]
    write_whole(directory / "train_data" / "step-000003.jsonl.gz", of_update)
    tracker.close()
    return directory


OpenReport = Callable[..., Page]


def opened_by(browser: Browser) -> Iterator[OpenReport]:
    """Yield a function that opens a report. Any network request, page error or dialog fails the test."""
    contexts, problems = [], []

    def open_report(path: Path, **options: Any) -> Page:
        # A click while the page still scrolls smoothly lands beside its button.
        shape: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
        context = browser.new_context(offline=True, **(shape | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"a dialog: {dialog.message}"))
        page.on("console", lambda line: line.type == "error" and problems.append(line.text))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert not problems


open_page = pytest.fixture(opened_by, name="open_page")


def report_of(*runs: Path) -> Path:
    """Write a report of these runs beside the first one, and return its path."""
    return write_report(list(runs), runs[0].with_suffix(".html")).path


def text_of(*runs: Path) -> str:
    return report_of(*runs).read_text("utf-8")


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("one") / "12-00-00-mine"
    return report_of(write_run(place, alarms=("mismatch: 0.3. It usually means: M. Try: T",)))


@pytest.fixture(scope="module")
def shared_page(browser: Browser, one_run: Path) -> Iterator[Page]:
    """Yield the open page of `one_run`: to open one takes longer than all that a test does with it."""
    with contextlib.contextmanager(opened_by)(browser) as open_report:
        yield open_report(one_run)


@pytest.fixture
def page(shared_page: Page) -> Page:
    """Return the shared page without filters."""
    shared_page.evaluate("() => { filters.reset(); filters.dispatchEvent(new Event('input')); }")
    return shared_page


IS_EMPTY = "(plot) => !plot.querySelector('svg.main-svg')"
EMPTY_CHARTS = (
    f"[...document.querySelectorAll('.chart-group[open] .plot, #ladder-chart .plot')].filter({IS_EMPTY}).length"
)


def numbers(page: Page) -> list[int]:
    return [int(re.findall(r"#(\d+)", text)[0]) for text in page.locator("#list button").all_inner_texts()]


def choose(page: Page, number: int) -> None:
    page.get_by_role("button", name=re.compile(rf"^#{number} ")).click()
    expect(page.locator("#game h3")).to_contain_text(f"Game {number}:")


@pytest.mark.browser
def test_every_chart_is_drawn_offline_without_scrolling(shared_page: Page) -> None:
    """The first test, because its page has to be fresh."""
    page = shared_page
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate("scrollY") == 0
    assert page.locator("#charts .chart-group[open] .plot").count() > 2
    assert page.evaluate(EMPTY_CHARTS) == 0
    page.get_by_text("How fast is it?").click()
    page.locator(".chart-group[open]", has_text="How fast is it?").locator("svg.main-svg").first.wait_for()
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate(EMPTY_CHARTS) == 0
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate(EMPTY_CHARTS) == 0
    page.emulate_media(color_scheme="light")
    won = page.locator("figure", has_text="Points against scripted:random").first
    expect(won.locator(".latest")).to_have_text("90.0 % (82.4–94.5, n = 100)")
    won.get_by_text("Values").click()
    expect(won.locator("tbody tr")).to_have_count(2)


@pytest.mark.nightly
@pytest.mark.browser
def test_charts_of_a_large_group_are_drawn_as_they_come_near(tmp_path: Path, open_page: OpenReport) -> None:
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", *(line | {f"mine/{n}": n + line["step"] for n in range(90)} for line in lines))
    page = open_page(report_of(run))
    page.get_by_text("Every recorded curve").click()
    group = page.locator(".chart-group[open]", has_text="Every recorded curve")
    group.locator("svg.main-svg").first.wait_for()
    page.wait_for_selector("html[data-drawn]")
    empty = page.evaluate(EMPTY_CHARTS)
    assert 0 < empty < group.locator(".plot").count()
    group.locator(".plot").last.scroll_into_view_if_needed()
    group.locator(".plot").last.locator("svg.main-svg").first.wait_for()
    assert 0 < page.evaluate(EMPTY_CHARTS) < empty


@pytest.mark.nightly
@pytest.mark.browser
def test_printed_page_shows_charts_that_were_not_drawn_yet(one_run: Path, open_page: OpenReport) -> None:
    page = open_page(one_run, color_scheme="dark")
    page.wait_for_selector("html[data-drawn]")
    page.evaluate(f"window.countEmpty = () => {EMPTY_CHARTS}")
    page.evaluate(
        """() => {
            for (const plot of document.querySelectorAll(".plot")) Plotly.purge(plot);
            addEventListener("beforeprint", () => { window.printed = {
                empty: countEmpty(),
                fixed: document.querySelectorAll(".plot svg.main-svg:not([viewBox])").length,
                paper: getComputedStyle(document.body).backgroundColor,
            }; });
        }"""
    )
    assert page.evaluate(EMPTY_CHARTS) > 2
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.pdf()
    printed = page.evaluate("window.printed")
    assert (printed["empty"], printed["fixed"]) == (0, 0)
    assert printed["paper"] != before  # light, although the screen is dark
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before
    assert page.locator(".plot svg[viewBox]").count() == 0


@pytest.mark.browser
def test_summary_shows_what_training_did_and_the_alarms(page: Page) -> None:
    result, while_training = page.locator(".results tbody tr").all()
    assert result.locator("th, td:not(.shown)").all_inner_texts() == [
        "random\n50.0 % before training",
        "50.0 %\n40.2–59.8, n = 100",
        "90.0 %\nafter update 3\n82.4–94.5, n = 100",
        "+40.0\n+27.6 to +50.8",
        "✓ better than before",
    ]
    expect(while_training).to_contain_text("random, while training")
    expect(page.locator(".alarms li")).to_have_text(re.compile("^⚠ Alarm, update 3: mismatch: 0.3.*#alarm-mismatch$"))
    assert page.title() == "12-00-00-mine: killed, 90.0 % against scripted:random"
    expect(page.locator("#setup")).to_contain_text("abc123")
    expect(page.locator("pre.config")).to_contain_text("learning_steps = 3")
    expect(page.locator("#ladder-chart figure")).to_have_count(1)
    ladder = page.get_by_role("region", name="Ladder of 12-00-00-mine")
    expect(ladder.locator("tbody tr").first).to_contain_text("ckpt-2 strongest")
    last = ladder.locator("tr", has_text="scripted:random").locator("td")
    assert last.all_inner_texts()[-4:] == ["6", "2", "0", "4"]
    matrix = page.get_by_role("region", name="Match matrix of 12-00-00-mine")
    met = ["base", "ckpt-2", "scripted:random"]
    assert matrix.locator("thead th").all_inner_texts() == met
    rows = [matrix.locator("tr", has=page.locator("th[scope=row]", has_text=name)) for name in met]
    cells = {name: row.locator("td").first for name, row in zip(met, rows, strict=True)}
    against_random = re.compile("^2 won, 0 drawn, 2 lost; 95 %: 7.2 % – 92.8 %")
    expect(cells["scripted:random"]).to_have_attribute("title", against_random)
    expect(cells["ckpt-2"]).to_have_attribute("title", re.compile("^1 won, 1 drawn, 0 lost"))
    expect(cells["ckpt-2"]).to_have_text("75 %2")  # of the points, 2 games
    expect(cells["base"]).to_have_text("·")


@pytest.mark.browser
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"env": TTT}, [6, 7]),
        ({"kind": "eval"}, [0, 1, 8]),
        ({"outcome": "win"}, [0, 3, 6, 8, 9]),
        ({"outcome": "loss"}, [1, 2]),
        ({"outcome": "draw"}, [7]),
        ({"outcome": "mirror"}, [4]),
        ({"opponent": "base"}, [6, 7]),
        ({"opponent": "itself"}, [4]),
        ({"checkpoint": "base", "opponent": "fixed-scripted:random"}, [0, 1, 2, 3, 5]),
        ({"end": "invalid"}, [2, 3]),
        ({"end": "own"}, [2]),
        ({"end": "other"}, [3]),
        ({"end": "void"}, [5]),
    ],
    ids=str,
)
def test_filters_leave_the_games_that_they_name(page: Page, chosen, expected) -> None:
    for name, value in chosen.items():
        page.locator(f"#filters [name={name}]").select_option(value)
    expect(page.locator("#count")).to_have_text(f"{len(expected)} of 10 games, newest first")
    assert numbers(page) == expected[::-1]


@pytest.mark.browser
def test_newest_lost_evaluation_game_is_open_at_first(tmp_path: Path, open_page: OpenReport) -> None:
    lost = [game(number, model, kind="eval", **LOST) for number, model in enumerate((BASE, CKPT, CKPT, BASE))]
    others = [game(number, CKPT, kind="eval") for number in range(4, 200)]
    page = open_page(report_of(write_run(tmp_path / "run", [*lost, *others])))
    expect(page.locator("#game h3")).to_contain_text("Game 2:")
    row = page.locator("#list [aria-current=true]")
    expect(row).to_contain_text("#2 ")
    assert row.evaluate("(row) => row.offsetTop + row.offsetHeight <= list.scrollTop + list.clientHeight")
    assert page.evaluate("[scrollY, location.hash]") == [0, ""]


@pytest.mark.browser
def test_number_finds_a_game_and_an_empty_list_says_why(page: Page) -> None:
    number = page.get_by_label("number")
    for wanted in ("6", " #6"):
        number.fill(wanted)
        expect(page.locator("#count")).to_have_text("1 of 10 games, newest first")
        assert numbers(page) == [6]
    page.locator("#filters [name=outcome]").select_option("draw")
    expect(page.locator("#list")).to_contain_text("No kept game has outcome “drawn” and number “ #6”.")
    page.get_by_role("button", name="Show all games").click()
    assert len(numbers(page)) == 10


def test_each_share_has_the_interval_of_its_own_game_count() -> None:
    group = "evaluation-E (o)"
    run = RunData.__new__(RunData)
    run.steps, run.hours_at = [7], {7: 0.5}
    run.curves = {
        f"{group}/n": [512.0],
        f"{group}/Win Rate": [0.5],
        f"{group}/checkpoint n": [50.0],
        f"{group}/checkpoint Win Rate": [0.5],
        f"{group}/checkpoint Win Rate low": [0.366],
        f"{group}/checkpoint Win Rate high": [0.634],
        f"{group}/Points": [0.625],
        f"{group}/Format Success Rate - invalid_move": [0.5],
        f"{group}/n (turns)": [100.0],
        f"{group}/concurrent checkpoint n": [20.0],
        f"{group}/concurrent checkpoint Invalid Rate": [0.1],
        "learner/entropy": [0.123456],
    }
    of = {name.removeprefix(f"{group}/"): metric_points(run, name)[0] for name in run.curves}
    for name, n in (("Win Rate", 512), ("concurrent checkpoint Invalid Rate", 20)):
        count = round(of[name].y * n)
        assert of[name][3:5] == rounded(points_interval(count, 0, n - count))
        assert of[name].text.endswith(f", n = {n})")
    assert of["checkpoint Win Rate"] == (7, 0.5, 0.5, 0.366, 0.634, "50.0 % (36.6–63.4, n = 50)")
    assert of["Format Success Rate - invalid_move"][3:5] == rounded(points_interval(50, 0, 50))
    assert of["Points"][3:5] == rounded(points_interval(256, 128, 128))
    assert of["checkpoint Win Rate low"] == (7, 0.5, 0.366, None, None, "36.6 % (n = 50)")
    assert of["learner/entropy"].text == "0.123"


def rounded(interval: tuple[float, float]) -> tuple[float, ...]:
    return tuple(float(f"{edge:.4g}") for edge in interval)


@pytest.mark.browser
def test_games_can_be_stepped_through_by_clicks_and_keys(page: Page) -> None:
    choose(page, 9)
    status, game_pane = page.locator(".turnbar [role=status]"), page.locator("#game")
    expect(status).to_contain_text("Turn 1 of 3")
    page.locator("[data-act=next]").click()
    expect(status).to_contain_text("Turn 2 of 3 by player 1")
    page.keyboard.press("ArrowRight")
    expect(status).to_contain_text("Turn 3 of 3")
    expect(page).to_have_url(re.compile(r"#game=0\.9\.3$"))
    expect(game_pane).to_contain_text("3 lines")
    expect(game_pane.locator(".text.thought")).to_have_text("H\u00e9! \U0001f389 ")
    expect(game_pane.locator("mark")).to_have_text("[2 2]")
    expect(game_pane.locator(".action")).to_have_text("[2 2]")
    page.get_by_text("The whole prompt").click()
    prompt = f"<|im_start|>user\n{GAMES[9].turns[2].observation}<|im_end|>"
    assert game_pane.locator("details[open] pre").text_content() == prompt
    page.keyboard.press("k")
    expect(status).to_contain_text("Turn 2 of 3")
    page.keyboard.press("n")
    expect(page.locator("#game h3")).to_contain_text("Game 8:")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent").startswith("#8 ")
    choose(page, 5)
    expect(game_pane).to_contain_text("EnvError: the board broke")


@pytest.mark.browser
def test_prompt_of_an_untrained_turn_is_made_from_its_template(page: Page) -> None:
    choose(page, 2)
    page.get_by_text("The whole prompt, as its template makes it").click()
    prompt = TEMPLATES["default"].prompt(GAMES[2].turns[0].observation, num_players=2)
    assert page.locator("#game details[open] pre").text_content() == prompt
    page.keyboard.press("ArrowRight")
    expect(page.locator("#game")).to_contain_text("player 1")
    expect(page.get_by_text("The whole prompt")).to_have_count(0)
    choose(page, 6)
    expect(page.get_by_text("The whole prompt")).to_have_count(0)


def test_prompt_that_cannot_be_reconstructed_is_omitted() -> None:
    envs = [{"env_id": NIM, "prompt_template": "brief"}, {"env_id": TTT}, {"env_id": TTT, "prompt_template": "tiny"}]
    config = {"train_envs": envs, "eval_envs": [{"env_id": NIM, "prompt_template": "chat"}]}
    (found,) = templates_by_env(config | {"templates": {"brief": {"user": "{observation}"}}}).items()
    assert found[0] == ("train", NIM)
    assert found[1].prompt("board", 2) == "board"
    assert templates_by_env(config | {"templates": {"brief": {"usr": ""}}}) == {}


@pytest.mark.browser
def test_every_stage_of_a_reward_is_shown(one_run: Path, page: Page) -> None:
    page.goto(f"{one_run.as_uri()}#game=0.9.3")
    page.wait_for_selector(".rewards li >> nth=3")
    assert page.locator(".rewards b").all_inner_texts() == ["+1", "+0.625", "+0.375", "+0.875"]
    expect(page.locator("#game")).to_contain_text(re.compile("update 3.* 2 updates"))
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#game")).to_contain_text("not trained")


@pytest.mark.browser
def test_coloured_tokens_are_the_sampled_ones(page: Page) -> None:
    choose(page, 9)
    page.locator(".turns button").last.click()
    page.locator("[data-act=mode]").select_option("logprob")
    tokens = page.locator(".sampled .tok")
    generation = GAMES[9].turns[2].generation
    expected = pieces(generation.completion_ids.tolist(), generation.text, TOKENIZER)
    assert [one.text_content() for one in tokens.all()] == [text for text, _ in expected]
    assert "".join(text for text, _ in expected) == f"{generation.text}<|im_end|>"
    strength = "element => parseFloat(element.style.getPropertyValue('--strength'))"
    strengths = [tokens.nth(i).evaluate(strength) for i, (_, count) in enumerate(expected) if count == 1]
    assert strengths == sorted(strengths)
    assert strengths[0] < strengths[-1]
    tokens.first.click()
    expect(page.locator(".tokbar [role=status]")).to_have_text(
        f"Token 1: number {generation.completion_ids[0]}, log-probability -0.100 (p = 0.905), importance weight 1.000"
    )
    page.locator(".sampled").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tokbar [role=status]")).to_contain_text("Tokens 2 to 3, one character")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tokbar [role=status]")).to_contain_text("Token 1: ")
    expect(page.locator(".turnbar [role=status]")).to_contain_text("Turn 3 of 3")
    page.keyboard.press("c")
    expect(page.locator("#game")).to_contain_text(f"first {TRAINED} tokens")
    words = [re.findall(r", weight (.*)", one.get_attribute("title") or "") for one in tokens.all()]
    ends = np.cumsum([count for _, count in expected])
    trained = [(end - count, end) for (_, count), end in zip(expected, ends, strict=True) if end <= TRAINED]
    weights = [math.exp(0.5 * sum(range(start, end))) for start, end in trained]
    assert words == [*([f"{weight:.3f}"] for weight in weights), *([] for _ in expected[len(trained) :])]
    assert page.locator(".tok.capped").count() == sum(weight > 2.0 for weight in weights) > 0
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#game")).to_contain_text("own models")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#game")).to_contain_text("importance weights")
    page.keyboard.press("c")
    expect(page.locator(".sampled")).to_have_count(0)


def test_pieces_of_a_completion_keep_split_characters_and_bytes_together() -> None:
    ids = TOKENIZER.encode("a \U0001f389 b").ids
    made = pieces(ids, "a \U0001f389 b", TOKENIZER)
    assert sum(count for _, count in made) == len(ids)
    assert ("\U0001f389", 4) in made
    assert pieces(ids[:-3], "a", TOKENIZER)[-1][0] == CUT  # type: ignore[index]
    assert pieces(ids, "another text", TOKENIZER) is None
    assert pieces(ids, "a", None) is None
    ids = ids_of("a", b"\xc3\xa9\x80", "b")
    made = pieces(ids, BYTE_TOKENS.decode(ids), BYTE_TOKENS)
    assert made == [("a", 1), ("é", 2), (f"{CUT}b", 2)]


def test_pieces_of_special_tags_of_a_thought_are_those_of_the_text(tmp_path: Path) -> None:
    path = make_odd_tokenizer(tmp_path, special=["<think>", "</think>", "<|im_end|>"])
    tokenizer = tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json")
    ids = tokenizer.encode("<think>a</think>b<|im_end|>").ids
    made = [("<think>", 1), ("a", 1), ("</think>", 1), ("b", 1), ("<|im_end|>", 1)]
    assert pieces(ids, "<think>a</think>b", tokenizer) == made
    assert pieces(ids, "<think>c</think>b", tokenizer) is None


def test_thought_is_shown_apart_by_the_tags_of_the_run(tmp_path: Path) -> None:
    texts = ["[A]x[/A]y", "[THINK]🎲[/THINK]y", "<think>x</think>y</think>z", "no thought"]
    run = write_run(tmp_path / "run", [game(number, CKPT, text=text) for number, text in enumerate(texts)])
    config = {"templates": {"mine": {"user": "{observation}", "think": ["[A]", "[/A]"]}}}
    games = {one["game_idx"]: one for one in read_games(run, None, 9, config).kept}
    found = [next(turn.get("close") for turn in games[i]["turns"] if turn["text"] == texts[i]) for i in range(4)]
    assert found == ["[/A]", "[/THINK]", "</think>", None]


@pytest.mark.nightly
@pytest.mark.browser
def test_model_text_stays_text(tmp_path: Path, open_page: OpenReport) -> None:
    hostile_model = ModelRef(uid=f"fixed-{HOSTILE[1]}", kind="fixed", name=HOSTILE[1])
    games = [game(number, CKPT, opponent=hostile_model, text=text) for number, text in enumerate(HOSTILE)]
    for record, text in zip(games, HOSTILE, strict=True):
        record.turns = [
            dataclasses.replace(turn, observation=f"{text}\n{turn.observation}", action=text) for turn in record.turns
        ]
    games.append(game(len(games), CKPT, **{**VOID, "error": HOSTILE[0]}))
    run = write_run(tmp_path / "12-00-00-<i>run", games, alarms=HOSTILE[:-1])
    page = open_page(report_of(run))
    elements = "[...document.body.querySelectorAll('script, img, iframe, b#hacked, i:not([style])')].length"
    before = page.evaluate(elements)
    for number, text in enumerate(HOSTILE):
        choose(page, number)
        answer = page.locator("#game pre:not(.thought):not(details pre)").nth(1)
        shown = answer.text_content() or ""
        if text.isprintable():
            assert shown == text[: len(shown)] and len(shown) >= min(len(text), 20_000)
        else:
            assert not re.search("[\x00\x07\x1b\u2028\u202e\ufeff]", shown)
            assert page.locator("#game .ctl").count() > 0
        has_tokens = games[number].turns[0].generation is not None
        expect(page.locator("[data-act=mode]")).to_have_count(int(has_tokens))
        for mode in ("logprob", "weight", "off") if has_tokens else ():
            page.locator("[data-act=mode]").select_option(mode)
    page.get_by_role("button", name="Show all 300,000 characters").first.click()
    choose(page, len(HOSTILE))
    page.get_by_text("Every recorded curve").click()
    page.locator("#ladder-chart").scroll_into_view_if_needed()
    expect(page.locator("#ladder-chart svg.main-svg").first).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate(elements) == before
    expect(page.locator(".alarms li").nth(3)).to_have_text("⚠ Alarm, update 3: {{ 7 * 7 }}{% raw %}{{ self.__init__ }}")


@pytest.mark.nightly
@pytest.mark.browser
def test_report_works_in_dark_light_and_on_a_phone(one_run: Path, open_page: OpenReport) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(one_run), open_page(one_run, color_scheme="dark")
    assert dark.evaluate(background) != light.evaluate(background)

    phone = open_page(one_run, viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    expect(phone.locator("#list")).to_be_hidden()
    phone.get_by_role("button", name="All games").click()
    choose(phone, 9)
    expect(phone.locator("#list")).to_be_hidden()
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    for entry in phone.locator("nav a").all():
        box = entry.bounding_box()
        assert box is not None
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    evaluations = phone.locator("#evaluations .scroll").first
    expect(evaluations).to_have_attribute("data-more", "")
    evaluations.evaluate("(box) => box.scrollTo(box.scrollWidth, 0)")
    expect(evaluations).not_to_have_attribute("data-more", "")


@pytest.mark.browser
def test_every_control_has_a_name_and_every_chart_a_description(page: Page) -> None:
    choose(page, 9)
    page.locator("figure .plot").first.scroll_into_view_if_needed()
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, select, input, a, summary")].filter((one) =>
            !(one.getAttribute("aria-label") || one.labels?.length
              || one.textContent.trim() && one.tagName !== "SELECT"))
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    labels = page.locator("figure .plot").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    assert labels
    assert all(re.search(r"from .* to ", label) for label in labels)
    assert page.evaluate("[...document.querySelectorAll('table')].every(one => one.caption || one.closest('.values'))")


@pytest.mark.nightly
@pytest.mark.browser
def test_ten_thousand_games_are_listed_and_found(tmp_path: Path, open_page: OpenReport) -> None:
    run = write_run(tmp_path / "12-00-00-long", [])
    template = (write_run(tmp_path / "one", [GAMES[9]]) / "games.jsonl").read_text()
    with (run / "games.jsonl").open("w") as file:
        file.writelines(
            template.replace('"game_idx":9,', f'"game_idx":{number},').replace("board of game 9", f"board {number}")
            for number in range(10_000)
        )
    sampled = write_report([run], tmp_path / "sampled.html")
    assert (sampled.games, sampled.games_read) == (1250, 10_000)
    whole = write_report([run], tmp_path / "whole.html", max_games=10_000)
    assert whole.games == 10_000
    page = open_page(whole.path)
    expect(page.locator("#count")).to_have_text("10,000 of 10,000 games, newest first")
    expect(page.locator("#list li")).to_have_count(50)
    page.locator("#list").evaluate("(list) => list.scrollTo(0, list.scrollHeight)")
    expect(page.locator("#list li")).to_have_count(100)
    assert numbers(page) == list(range(9999, 9899, -1))
    page.get_by_label("number").fill("37")  # 1 of two digits, 10 of three, 100 of four
    expect(page.locator("#count")).to_have_text("111 of 10,000 games, newest first")
    assert numbers(page)[:2] == [3799, 3798]
    page.get_by_label("number").fill("9876")
    assert numbers(page) == [9876]
    choose(page, 9876)
    expect(page.locator("#game pre").first).to_contain_text("board 9876")


@pytest.mark.nightly
@pytest.mark.browser
def test_several_runs_are_drawn_with_mean_and_interval(tmp_path: Path, open_page: OpenReport) -> None:
    seeds = []
    for seed in (0, 1):
        config = {"run": {"learning_steps": 3, "seed": seed}}
        seeds.append(write_run(tmp_path / f"12-00-0{seed}-a", config=config, won_after=80 + 10 * seed))
    other = write_run(tmp_path / "12-00-05-b", config={"learner": {"learning_rate": 0.5}, "run": {"learning_steps": 3}})
    page = open_page(report_of(seeds[0], other, seeds[1]))
    result = page.locator(".results tbody tr").first
    assert page.locator(".results thead th").all_inner_texts() == ["against", "config A, 2 seeds", "12-00-05-b"]
    seeded, alone = result.locator("td").all()
    expect(seeded).to_contain_text("50.0 % → 85.0 %after update 321.5–100.0, n = 200, 2 seeds")
    expect(alone).to_contain_text("50.0 % → 90.0 %")
    won = page.locator("figure", has_text="Points against scripted:random").first
    won.get_by_text("Values").click()
    expect(won.locator("tbody")).to_contain_text("85.0 % (21.5–100.0, n = 200, 2 seeds)")
    page.get_by_label("show").select_option("runs")
    marks = page.locator("#legend .mark").all_inner_texts()
    assert len(set(marks)) == 3
    expect(page.get_by_role("region", name="Differences")).to_contain_text("learner.learning_rate")
    page.locator("#filters [name=run]").select_option("2")
    expect(page.locator("#count")).to_have_text("10 of 30 games, newest first")


@pytest.mark.browser
def test_run_that_has_just_begun_has_a_report(tmp_path: Path, open_page: OpenReport) -> None:
    run = write_run(tmp_path / "12-00-00-new", [])
    for name in ("metrics.jsonl", "eval.jsonl", "games.jsonl", "league.jsonl", "alarms.jsonl"):
        (run / name).unlink()
    page = open_page(report_of(run))
    expect(page.locator("#summary")).to_contain_text("No evaluation was recorded")
    expect(page.locator("#game")).to_contain_text("no games")
    expect(page.locator("#games")).to_contain_text("No game has ended yet.")


def test_sample_that_grows_too_large_stays_even() -> None:
    sample = Sample(10)
    for number in range(1000):
        sample.add({"turns": [], "game_idx": number})
    assert sample.stride == 128
    assert [one["game_idx"] for one in sample.games] == list(range(0, 1000, 128))


def test_late_evaluation_is_placed_at_its_own_update(tmp_path: Path) -> None:
    run = write_run(tmp_path / "12-00-00-late")
    write_lines(
        run / "metrics.jsonl",
        {"step": 0, "time": 0.0, "evaluation/before": 0.1},
        {"step": 1, "time": 3600.0, "run/seconds": 3600.0, "run/games": 9},
        {"step": 2, "time": 99999.0, "run/seconds": 7200.0, "run/games": 18},  # after a pause overnight
        {"step": 1, "time": 9000.0, "evaluation/of 1": 0.5},
        {"step": 0, "time": 9999.0, "evaluation/of 0": 0.5},
    )
    evaluations = map(json.loads, (run / "eval.jsonl").read_text().splitlines())
    before, after = (line for line in evaluations if line["label"] != "concurrent")
    write_lines(run / "eval.jsonl", before, after | {"step": 20}, after | {"step": 10, "wins": 40, "losses": 60})
    data = RunData(run)
    assert (data.steps, data.hours_at) == ([0, 1, 2], {0: 0.0, 1: 1.0, 2: 2.0})
    assert data.curves["evaluation/of 1"] == [None, 0.5, None]
    (row,) = data.rows
    assert [(one.step, one.value) for one in row.evaluations] == [(0, 0.5), (10, 0.4), (20, 0.9)]


def test_charts_of_evaluations_are_in_the_order_of_the_config(tmp_path: Path) -> None:
    envs = [{"env_id": NIM, "num_players": 2, "fixed_opponent": name} for name in ("scripted:optimal", "base")]
    run = write_run(tmp_path / "run", [], {"eval_envs": envs})
    (line,) = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()][:1]
    names = ("base", "scripted:optimal")
    write_lines(
        run / "eval.jsonl",
        *(line | {"opponent": name, "label": label} for name in names for label in ("concurrent", "before")),
    )
    data = RunData(run)
    charts = evaluation_charts([data])
    titles = [f"Points against {name} in {NIM}" for name in reversed(names)]
    assert [chart["title"] for chart in charts] == [*titles, *(f"{title}, while training" for title in titles)]
    (line,) = lines_by_name([Group("run", [data])])[charts[0]["name"]]
    assert [point.text for point in line["points"]] == ["50.0 % (40.2–59.8, n = 100)"]


def test_state_of_the_run_is_in_the_first_screen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "12-00-00-mine")
    (run / "lock").touch()

    def first_screen() -> str:
        text = text_of(run)
        return re.sub(r"<[^>]*>", "", text[text.index("<title>") : text.index('<section id="curves"')])

    (run / "live.json").write_text(json.dumps({"pid": 1, "time": time.time(), "has_ended": True, "learning_steps": 9}))
    assert "ended at update 3 of 9, written" in first_screen()
    lock = try_lock(run)
    assert lock is not None
    text = first_screen()
    os.close(lock)
    assert re.search(r"running, update 3 of 9, written \d\d:\d\d", text)
    assert "12-00-00-mine: running, 90.0 % against scripted:random" in text
    assert re.search(r"\w+, 3 updates, \d+ games in [\d a-z]+, seed \d+", text)
    assert "No alarm was raised" in text


def test_run_without_evaluations_is_compared_with_one_that_has_some(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [], {"run": {"seed": seed}}) for seed, name in enumerate(("some", "none"))]
    (runs[1] / "eval.jsonl").write_text("")
    text = text_of(*runs)
    assert text.count(f'title="Points against scripted:random in {NIM}"') == 1


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_model_appears_once_in_the_matrix(tmp_path: Path) -> None:
    others = [ModelRef(uid=f"fixed-gemini-{n}", kind="fixed", name=f"gemini-{n}") for n in range(20)]
    checkpoints = [ModelRef(uid=f"ckpt-{n}", kind="checkpoint", adapter_version=n) for n in range(30)]
    for name, few, many in (("others", checkpoints[:3], others), ("checkpoints", checkpoints, others[:3])):
        games = [game(n, few[n % len(few)], other) for n, other in enumerate(many * len(few))]
        text = text_of(write_run(tmp_path / name, games))
        matrix = text[text.index('<h3 id="matches"') : text.index('<section id="games"')]
        rows = re.findall(r'<th scope="row">((?:ckpt|gemini)-\d+)</th>', matrix)
        columns = re.findall(r'<th scope="col"><span>((?:ckpt|gemini)-\d+)</span></th>', matrix)
        assert len(rows) == len(set(rows)) <= 16
        assert len(columns) == len(set(columns)) <= 16
        own = sorted(int(uid.removeprefix("ckpt-")) for uid in {*rows, *columns} if uid.startswith("ckpt-"))
        assert own == [0, 1, 2] if name == "others" else (len(own), own[0], own[-1] > 24) == (13, 0, True)


def test_matrix_of_a_run_that_kept_no_games_is_from_its_league_log(tmp_path: Path) -> None:
    run = write_run(tmp_path / "12-00-00-none", [])
    text = text_of(run)
    matrix = text[text.index('<h3 id="matches"') : text.index('<section id="games"')]
    assert re.findall(r'<th scope="col"><span>(.*?)</span></th>', matrix) == ["scripted:random"]
    rows = dict(re.findall(r'<th scope="row">(.*?)</th>\s*<td[^>]*title="(.*?);', matrix))
    assert rows == {f"ckpt-{update}": "1 won, 0 drawn, 0 lost" for update in (1, 2, 3)}


def test_report_command_writes_beside_the_run_and_reports_omissions(tmp_path: Path) -> None:
    run = write_run(tmp_path / "12-00-00-mine")
    lines = map(json.loads, (run / "games.jsonl").read_text().splitlines())
    without_reasons = [{key: line[key] for key in line if key != "reason"} for line in lines]  # of an earlier version
    write_lines(run / "games.jsonl", *without_reasons)
    done = CliRunner().invoke(app, ["report", str(run), "--games", "2"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{run / 'report.html'}: 5 of 10 games")
    assert b"every 4th" in (run / "report.html").read_bytes()
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (done.exit_code, "run directory" in done.output) == (1, True)


def test_non_run_directory_and_missing_dependency_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnstableError, match=r"config\.toml"):
        write_report([tmp_path], tmp_path / "report.html")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UnstableError, match=r"pip install 'unstable-lite\[report\]'"):
        write_report([tmp_path], tmp_path / "report.html")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the finished quickstart, which got 349 of 400 points against the base: 87.25 %, which rounds to 87.2 %."""
    return shown_runs.quickstart(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def quickstart_page(browser: Browser, quickstart: Path) -> Iterator[Page]:
    with contextlib.contextmanager(opened_by)(browser) as open_report:
        yield open_report(report_of(quickstart))


def rows_of(run: Path) -> list[ResultRow]:
    directory = RunDirectory(run)
    directory.refresh()
    return directory.results()


@pytest.mark.browser
def test_each_number_is_that_of_eval_and_of_the_terminal(quickstart: Path, quickstart_page: Page) -> None:
    lines = [json.loads(line) for line in (quickstart / "eval.jsonl").read_text().splitlines()]
    rows = rows_of(quickstart)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*evaluation_tables(rows))
    terminal = re.sub(r"[ %]+", " ", console.export_text())
    shown = [line.locator("th, td").all_inner_texts() for line in quickstart_page.locator(".results tbody tr").all()]
    assert [cells[0].split("\n")[0] for cells in shown] == [row.label for row in rows]
    for row, (_, before, newest, _, change, *_, words) in zip(rows, shown, strict=True):
        of_row = [line for line in lines if line["opponent"] == row.opponent]
        for line, one, cell in ((of_row[0], row.before, before), (of_row[-1], row.newest, newest)):
            assert cell.split("\n") == [one.value_text, f"{one.interval_text}, n = {one.n}"]
            value, low, high, n = (float(number) for number in re.findall(r"[\d.]+", cell))
            in_json = [100 * line["points"], *(100 * edge for edge in line["interval"])]
            assert ([value, low, high], n) == (pytest.approx(in_json, abs=0.0501), line["n"])
            assert f" {value} {one.interval_text} " in terminal
        assert change.split("\n") == [row.change_text, row.change_interval_text]
        assert words.endswith(row.verdict_text)


@pytest.mark.browser
def test_half_of_a_tenth_is_rounded_once(quickstart: Path, quickstart_page: Page) -> None:
    against_base = json.loads((quickstart / "eval.jsonl").read_text().splitlines()[-1])
    assert (against_base["opponent"], against_base["wins"], against_base["points"]) == ("base", 349, 0.8725)
    chart = quickstart_page.locator("figure", has_text="Points against base").first
    expect(chart.locator(".latest b")).to_have_text("87.2 %")
    chart.get_by_text("Values").click()
    expect(chart.locator(".values tr").last).to_contain_text("87.2 %")
    expect(quickstart_page.locator("#evaluations")).to_contain_text("87.2 %")
    assert "87.3" not in quickstart_page.locator("body").inner_text()


def test_time_of_a_run_without_a_clock_in_live_json_is_that_of_its_metrics(tmp_path: Path) -> None:
    run = shown_runs.quickstart(tmp_path)
    live = json.loads((run / "live.json").read_text())
    (run / "live.json").write_text(json.dumps({name: value for name, value in live.items() if name != "seconds"}))
    newest = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert RunData(run).totals().seconds == newest["run/seconds"] > 0


@pytest.mark.browser
def test_results_are_copied_as_markdown(quickstart: Path, quickstart_page: Page) -> None:
    table = to_markdown({"": rows_of(quickstart)})
    quickstart_page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    quickstart_page.locator("#copy").click()
    expect(quickstart_page.locator("#copy")).to_have_text("Copied")
    assert quickstart_page.evaluate("navigator.clipboard.readText()") == table
    assert "| base | 50.5 % | 87.2 % (" in table
