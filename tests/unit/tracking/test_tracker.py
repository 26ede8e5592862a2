import dataclasses
import io
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace as replace_struct
from rich.console import Console

from fakes.game_records import BASE, RANDOM, make_generation, make_record, make_spec, make_step, make_trajectory
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.dashboards.terminal import evaluation_tables, remark_lines
from unstable_lite.files import read_part, read_records, to_line
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.tracking.displayed_metrics import Totals
from unstable_lite.tracking.evaluations import Evaluation, Tally, summarise_evaluation
from unstable_lite.tracking.intervals import mean_interval, paired_difference, points_interval, student, wilson_interval
from unstable_lite.tracking.records import transcript
from unstable_lite.tracking.result_rows import result_rows
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.tracking.windows import WINDOW
from unstable_lite.types import Forced, GameEnd, GameKind, GameRecord, Generation, Histogram, ModelRef, Turn


class RecordingSink:
    """A sink that can also show histograms and texts."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.histograms: list[tuple[int, str]] = []
        self.texts: list[tuple[int, str, str]] = []
        self.is_closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append((step, dict(metrics)))

    def log_histograms(self, step: int, histograms: Sequence[Histogram]) -> None:
        self.histograms += [(step, one.name) for one in histograms]

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self.texts += [(step, name, text) for name, text in texts.items()]

    def close(self) -> None:
        self.is_closed = True


def generation() -> Generation:
    return make_generation([5, 6, 7, 8], [-0.25, -0.5, -1.0, -2.0], prompt_ids=[1, 2], text="answer", adapter_version=3)


def game(
    model: ModelRef = BASE,
    kind: GameKind = "train",
    rewards: tuple[float, float] = (1.0, -1.0),
    end: GameEnd = "natural",
    invalid_pids: tuple[int, ...] = (),
    label: str | None = None,
) -> GameRecord:
    """Return a game of two turns: `model` at seat 0, a fixed opponent at seat 1."""
    info = {"raw_reward": 1.0, "env_reward": 0.75, "step_reward": 0.5, "game_idx": 7, "turn": 0, "action": "a"}
    texts: dict[str, Any] = {"obs": "prompt", "act": "answer", "generation": generation(), "step_info": info}
    step = make_step(is_invalid=0 in invalid_pids, reward=0.5, **texts)
    trajectory = make_trajectory(step, game_idx=7, model=model, final_reward=rewards[0])
    turn = Turn(
        pid=0, observation="state", text="answer", action="a", format_ok=True, seconds=0.5, generation=generation()
    )
    answer = Turn(pid=1, observation="state 2", text="b", action="b", format_ok=True, seconds=0.25)
    is_training = kind == "train"
    return make_record(
        make_spec(model, RANDOM, kind=kind, trained=[0] * is_training, game_idx=7, eval_label=label),
        *rewards,
        turns=[turn, answer],
        trajectories=[trajectory] * is_training,
        end=end,
        invalid_pids=invalid_pids,
        seconds=0.75,
    )


def make_tracker(directory: Path, sink: RecordingSink | None = None, **config: Any) -> Tracker:
    tracker = Tracker(directory, [sink] if sink else [], TrackerConfig(**config))
    tracker.registry = ModelRegistry()
    return tracker


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def tracker(tmp_path: Path, sink: RecordingSink) -> Iterator[Tracker]:
    tracker = make_tracker(tmp_path, sink)
    yield tracker
    tracker.close()


def test_every_mean_covers_as_many_entries_as_its_n_says(tracker, sink):
    tracker.add_record(game())
    tracker.add_record(game(rewards=(-1.0, 1.0), end="invalid", invalid_pids=(0,)))
    cut_off = game(rewards=(0.0, 0.0), end="truncated")
    forced = Forced(at=1, ids=np.array([9], np.int32))
    cut_off.turns[0] = replace(cut_off.turns[0], is_cut_off=True, generation=replace(generation(), forced=forced))
    tracker.add_record(cut_off)
    tracker.add_record(game(end="invalid", invalid_pids=(1,)))
    tracker.add_record(game(end="void"))
    tracker.log_update(1, {})
    metrics = {name.removeprefix("collection-E/"): x for name, x in sink.lines[-1][1].items() if "collection-E" in name}
    ended = {"Ended by own invalid move": 0.25, "Ended by others' invalid move": 0.25, "Truncated": 0.25}
    outcome = {"reward": 0.25, "Points": 0.625, "Win Rate": 0.5, "Loss Rate": 0.25, "Draw": 0.25, **ended}
    seat = {"Reward (pid=0)": 0.25, "Win Rate (pid=0)": 0.5, "n (pid=0)": 4}
    length = {"Respone Length (char)": 6, "Response Length (token)": 4, "Observation Length (char)": 6}
    form = {"correct_answer_format": 1, "invalid_move": 0.25}
    cut = {"Cut Off Rate": 0.25, "Thinking Cut Rate": 0.25}
    time = {"Time per Game (s)": 0.75, "Time per Turn (s)": 0.5, "Time per Token (s)": 0.125}
    counts = {"n": 4, "n (turns)": 4, "n (answered)": 4, "step": 4, "Game Length": 2, "Adapter Versions": 1}
    formats = {f"Format Success Rate - {name}": share for name, share in form.items()}
    assert metrics == outcome | seat | length | formats | cut | time | counts
    assert sink.lines[-1][1]["run/void_games"] == 1
    assert sink.lines[-1][1]["exploration/E/Unique Actions"] == 1


def test_evaluation_without_results_reports_no_rates(tracker, sink):
    policy = tracker.registry.current if tracker.registry else None
    assert policy is not None
    void = summarise_evaluation("before", 0, policy, "E", "scripted:random", [game(kind="eval", end="void")] * 3)
    tracker.add_evaluation(void)
    ((_, metrics),) = sink.lines
    assert metrics == {"evaluation-E (scripted:random)/checkpoint n": 0}
    assert "3 games" in void.describe() and "void" in void.describe()
    after = replace(void, label="after", n=1, wins=1, mean_reward=1.0)
    (table,) = evaluation_tables(result_rows([void, after]))
    assert [list(column.cells) for column in table.columns[3:5]] == [["100.0 %"], ["0.0–100.0"]]
    assert remark_lines([void]) == ["before, E against scripted:random: 3 void of 3 games"]


def nim_game(number: int, pid: int, *actions: str) -> GameRecord:
    """Return a game of the base at seat `pid` against the base as an opponent; each turn shows the piles 3, 4, 5."""
    opponent = ModelRef(uid="base", kind="checkpoint", adapter_version=0, name="base")
    record = game(kind="eval")
    agents = tuple(replace_struct(a, model=BASE if a.pid == pid else opponent) for a in record.spec.agent_specs)
    spec = replace_struct(record.spec, env_id="Nim-v0-train", game_idx=number, agent_specs=agents)
    seen = "Current Pile:\n  pile 0: 3\n  pile 1: 4\n  pile 2: 5\n"
    turns = [Turn(pid=pid, observation=seen, text=a, action=a, format_ok=True) for a in actions]
    turns.append(Turn(pid=1 - pid, observation=seen, text="x", action="[0 2]", format_ok=True))
    return replace(record, spec=spec, turns=turns)


def test_best_moves_are_counted_where_worse_ones_existed(tracker, sink):
    records = [nim_game(0, 0, "[0 2]", "[0 2]", "[0 2]"), nim_game(1, 1, "[0 1]", "[9 9]"), nim_game(2, 0)]
    evaluation = summarise_evaluation("before", 0, BASE, "Nim-v0-train", "base", records)
    assert (evaluation.n, evaluation.wins, evaluation.losses) == (3, 2, 1), "counts one seat of each game"
    assert (evaluation.choices, evaluation.optimal) == (5, 3)
    # Each game's excess over 0.6 of its choices: 3 - 1.8, 0 - 1.2 and 0. The squares sum to 2.88.
    many = summarise_evaluation("before", 0, BASE, "Nim-v0-train", "base", records * 100)
    half = 1.96 * math.sqrt(288 * 300 / 299) / 500
    assert many.optimal_interval == pytest.approx((0.6 - half, 0.6 + half), abs=1e-3)
    assert many.optimal_interval[0] < wilson_interval(300, 500)[0], "moves of one game are not independent"
    tracker.add_evaluation(evaluation)
    group = "evaluation-Nim-v0-train (base)/checkpoint"
    assert tracker.latest[f"{group} Optimal Moves"] == 0.6
    assert tracker.latest[f"{group} n (choices)"] == 5
    (table,) = evaluation_tables(result_rows([evaluation, replace(evaluation, choices=0, optimal=0)]))
    assert list(table.columns[-1].cells) == ["60.0 %", "–"]
    tally, restored = Tally(), Tally()
    for record in records:
        tally.add_record(record, record.spec.game_idx % 2)
    restored.load_state_dict(json.loads(json.dumps(tally.state_dict())))
    assert restored.evaluation("a", "b", 0, "E", "x") == tally.evaluation("a", "b", 0, "E", "x")


def test_rich_sinks_get_histograms_and_sometimes_a_game(tracker, sink, monkeypatch):
    monkeypatch.setattr("unstable_lite.tracking.tracker.TRANSCRIPT_EVERY", 2)
    spread = [Histogram(name="advantage", edges=(0.0, 1.0), counts=(3,))]
    tracker.add_record(game(kind="eval"))
    tracker.log_update(1, {}, spread)
    tracker.log_update(2, {})
    assert (sink.histograms, sink.texts) == ([(1, "learner/advantage")], [])  # no training game yet
    tracker.add_record(game(rewards=(-1.0, 1.0), end="invalid", invalid_pids=(0,)))
    tracker.add_record(game(end="void"))
    tracker.log_update(3, {})
    tracker.log_update(4, {})
    ((step, name, text),) = sink.texts
    assert (step, name) == (4, "games/E")
    for fact in ("game 7, seed 2: player 0 base, player 1 fixed-scripted:random", "invalid: player 0 loss (-1) by an"):
        assert fact in text
    assert text.index("turn 0: player 0") < text.index("state") < text.index("answer") < text.index("turn 1: player 1")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error", [OverflowError("int too big"), KeyError("x"), RuntimeError(), OSError("quota"), UnprintableError()]
)
def test_sink_that_raises_anything_costs_a_line_and_an_alarm(tmp_path, error):
    class FailingSink(RecordingSink):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step < 3:
                raise error
            super().log(step, metrics)

        def log_histograms(self, step: int, histograms: Sequence[Histogram]) -> None:
            raise error

        def close(self) -> None:
            super().close()
            raise error

    failing, healthy, reported = FailingSink(), RecordingSink(), list[str]()
    tracker = Tracker(tmp_path, [failing, healthy], TrackerConfig(), reported.append)
    histograms = [Histogram(name="ratio", edges=(0.0, 1.0), counts=(1,))]
    for step in (1, 2, 3):
        tracker.log_update(step, {"learner/loss": 1.0}, histograms)
    assert len(reported) == len(tracker.alarms) == 1
    assert "cannot write FailingSink: " in reported[0] and "orchestrator.log" in reported[0]
    assert type(error).__name__ in reported[0]
    assert (tracker.failures.lost_records, len(healthy.lines), len(failing.lines)) == (5, 3, 1)
    tracker.close()
    assert failing.is_closed and healthy.is_closed
    with pytest.raises(ValueError, match="closed file"):
        tracker._games_file.write({})
    tracker = Tracker(tmp_path, [FailingSink()], TrackerConfig(), reported.append)
    tracker.close()
    assert len(tracker.alarms) == 1 and "FailingSink" in tracker.alarms[0]
    with pytest.raises(KeyboardInterrupt), tracker.failures.survived("sink"):
        raise KeyboardInterrupt


def test_transcript_length_is_bounded(tmp_path):
    record = game()
    shouted = dataclasses.replace(record.turns[0], text="a" * 100_000 + "\ud800end", observation="b" * 100_000)
    record.turns = [shouted] * 1000
    text = transcript(record)
    assert len(text) < 300_000
    assert "(… 96004 characters …)" in text and "a?end\n" in text and "(and 960 more turns)" in text


def test_means_cover_the_newest_window_while_step_keeps_counting(tracker):
    for _ in range(WINDOW):
        tracker.add_record(game(rewards=(-1.0, 1.0)))
    for _ in range(WINDOW):
        tracker.add_record(game())
    tracker.log_update(1, {})
    assert tracker.latest["collection-E/Win Rate"] == 1
    assert tracker.latest["collection-E/n"] == WINDOW
    assert tracker.latest["collection-E/step"] == 2 * WINDOW


def test_game_without_a_turn_of_the_model_has_no_turn_means(tracker):
    evaluated, trained = game(kind="eval"), game()
    tracker.add_record(dataclasses.replace(evaluated, turns=evaluated.turns[1:]))
    trajectories = [dataclasses.replace(trained.trajectories[0], steps=[])]
    tracker.add_record(dataclasses.replace(trained, turns=trained.turns[1:], trajectories=trajectories))
    tracker.log_update(1, {})
    for group in ("evaluation-E (scripted:random)", "collection-E"):
        assert tracker.latest[f"{group}/n"] == 1
        assert not any("turn" in name for name in tracker.latest if name.startswith(group))
    evaluated.turns[0] = replace(evaluated.turns[0], is_cut_off=True)
    tracker.add_record(evaluated)
    tracker.log_update(2, {})
    assert tracker.latest["evaluation-E (scripted:random)/n (turns)"] == 1
    assert tracker.latest["evaluation-E (scripted:random)/Cut Off Rate"] == 1
    assert tracker.latest["evaluation-E (scripted:random)/Thinking Cut Rate"] == 0


def shown(evaluations: Sequence[Evaluation]) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(*evaluation_tables(result_rows(evaluations)))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_totals_count_evaluation_games_among_all_and_continue_from_the_checkpoint(tracker, tmp_path):
    for record in (game(), game(kind="eval"), game(kind="eval", end="void")):
        tracker.add_record(record)
    assert replace(tracker.totals, seconds=0.0) == Totals(3, 2, 1, 0.0)
    assert tracker.totals.games_text == "3, of which 2 in evaluations; 1 void"
    tracker.log_update(1, {})
    assert (tracker.latest["run/games"], tracker.latest["run/eval_games"]) == (3, 2)
    state = tracker.state_dict()
    for resumed_from, eval_games in ((state, 2), ({key: state[key] for key in state if key != "eval_games"}, 7)):
        resumed = make_tracker(tmp_path)
        evaluations = [Tally().evaluation("before", "base", 0, "E", "none").to_json() | {"n": n} for n in (3, 4)]
        resumed.resume(resumed_from | {"seconds": state["seconds"] + 5000}, evaluations)
        assert replace(resumed.totals, seconds=0.0) == Totals(3, eval_games, 1, 0.0)
        resumed.log_update(2, {})
        assert 5000 <= resumed.latest["run/seconds"] <= resumed.state_dict()["seconds"] < 6000
        resumed.close()


def ended(reason: str, end: GameEnd = "void", **made: Any) -> GameRecord:
    record = game(end=end, **made)
    record.reason = reason
    return record


def test_reasons_of_ends_are_counted_by_env_and_opponent_from_the_first(tracker, sink, tmp_path):
    tracker.log_update(1, {})
    for record in [*[ended("context_full", "truncated")] * 2, ended("network"), game()]:
        tracker.add_record(record)
    mirror = ended("context_full", "truncated")
    agents = tuple(replace_struct(agent, model=BASE) for agent in mirror.spec.agent_specs)
    mirror.spec = replace_struct(mirror.spec, agent_specs=agents)
    tracker.add_record(mirror)
    tracker.log_update(2, {})
    before, after = ({name: x for name, x in line.items() if name.startswith("ended/")} for _, line in sink.lines)
    of_random = {"ended/E (scripted:random)/context_full": 2, "ended/E (scripted:random)/network": 1}
    assert (before, after) == ({}, of_random | {"ended/E (mirror)/context_full": 1})
    assert tracker.ended_early()[0] == "2 context_full in E (scripted:random)"
    resumed = make_tracker(tmp_path / "..")
    state = json.loads(json.dumps(tracker.state_dict()))
    resumed.resume(state, [])
    assert resumed.ended == tracker.ended
    del state["ended"]  # as a run of before saved it
    resumed.resume(state, [])
    lines = list(read_records(tmp_path / "games.jsonl"))
    assert [line["reason"] for line in lines] == ["context_full", "context_full", "network", "", "context_full"]
    resumed.close()


def test_evaluation_says_why_games_have_no_result_and_its_bounds():
    def evaluated(*records: GameRecord) -> Evaluation:
        for index, record in enumerate(records):
            record.spec = replace_struct(record.spec, game_idx=index)
        return summarise_evaluation("before", 0, BASE, "E", "o", records)

    few = evaluated(*[game(kind="eval") for _ in range(49)], ended("network", kind="eval"))
    assert few.remarks == []
    full = [ended("context_full", "truncated", kind="eval", rewards=(0.0, 0.0)) for _ in range(4)]
    many = evaluated(*[game(kind="eval") for _ in range(4)], *full, ended("network", kind="eval"), game(kind="eval"))
    (remark,) = many.remarks
    bounds = "50.0 % of the points had all of these been lost, 100.0 % had they been won"
    assert remark == f"4 context_full, 1 network of 10 games: {bounds}"
    assert remark in many.describe()
    assert remark_lines([many]) == [f"before, E against o: {remark}"]
    line = line_of(many)
    assert line["remarks"] == [remark] and Evaluation.from_json(line).remarks == [remark]
    for name in ("reasons", "full_points", "ended_invalid", "remarks"):
        del line[name]  # as a run of before wrote it
    assert Evaluation.from_json(line).remarks[0].startswith("1 void of 10 games")
    tally = Tally()
    tally.load_state_dict({"void": 3, "games": [["win", 1.0, False, 0, 0]]})
    assert (tally.evaluation("l", "m", 0, "E", "o").void, tally.evaluation("l", "m", 0, "E", "o").n) == (3, 1)


def test_points_of_games_that_invalid_moves_ended_do_not_stand_alone():
    def evaluated(num_invalid: int) -> Evaluation:
        tally = Tally()
        for number in range(10):
            end = "invalid" if number < num_invalid else "natural"
            tally.add("win" if number % 2 else "loss", 0.0, own_invalid=number == 0 < num_invalid, end=end, reason="")
        return tally.evaluation("l", "m", 0, "E", "base")

    assert evaluated(1).remarks == []
    assert evaluated(9).remarks == ["90 % of the games ended by an invalid move"]
    assert "points 50.0 %" in evaluated(9).describe() and "90 % of the games" in evaluated(9).describe()


def test_concurrent_games_are_recorded_once_their_checkpoint_is_done(tracker, tmp_path):
    new = tracker.registry.add_policy("ckpt-5", adapter_version=5, iteration=5)
    for rewards in ((1.0, -1.0), (1.0, -1.0), (0.0, 0.0)):
        tracker.add_record(game(kind="eval", rewards=rewards))
    tracker.add_record(game(kind="eval", end="void"))
    tracker.add_record(game(new, kind="eval", rewards=(-1.0, 1.0), end="invalid", invalid_pids=(0,)))
    tracker.add_record(game(kind="eval", label="before"))  # the quota is recorded separately
    tracker.end_evaluations(still_playing={"base", "ckpt-5"})
    assert (tmp_path / "eval.jsonl").read_text() == ""
    tracker.end_evaluations(still_playing={"ckpt-5"})
    tracker.close()
    base, later = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    counts = {"n": 3, "wins": 2, "draws": 1, "losses": 0, "void": 1, "mean_reward": pytest.approx(2 / 3)}
    counts |= {"points": pytest.approx(5 / 6), "win_rate": pytest.approx(2 / 3)}
    expected = {"label": "concurrent", "model": "base", "step": 0, **counts}
    assert {key: base[key] for key in expected} == expected
    assert base["interval"] == list(points_interval(2, 1, 0))
    assert (later["model"], later["step"], later["n"], later["invalid"]) == ("ckpt-5", 5, 1, 1)
    assert later["interval"] == [0, 1]  # one game has no spread
    assert tracker.evaluations == []


def line_of(evaluation: Evaluation) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(to_line(evaluation.to_json()))
    return line


def test_evaluations_on_the_same_seeds_are_compared_in_pairs():
    def played(seed: int, outcomes: str, label: str) -> Evaluation:
        records = []
        for number, outcome in enumerate(outcomes):
            rewards = {"w": (1.0, -1.0), "d": (0.0, 0.0), "l": (-1.0, 1.0), "v": (0.0, 0.0)}[outcome]
            record = game(kind="eval", rewards=rewards, end="void" if outcome == "v" else "natural", label=label)
            record.spec = msgspec.structs.replace(record.spec, game_idx=seed + number)
            records.append(record)
        random.Random(seed).shuffle(records)  # games end in any order
        return summarise_evaluation(label, 0, BASE, "E", "o", records)

    before, after = played(0, "wdllwwlv", "before"), played(100, "wwlwwwdv", "after")
    assert before.scores == ((1, 0.5), (0, 0), (1, 1), (0, None))
    gain = paired_difference(before.scores, after.scores)
    gained = [0.25, 0.5, 0.0, 0.5]  # per seed, averaged over its seats
    assert gain.mean == pytest.approx(0.3125)
    half = student(3) * np.std(gained, ddof=1) / 2
    assert (gain.low, gain.high) == pytest.approx((0.3125 - half, 0.3125 + half))
    assert after.change_since(before) == gain
    same = paired_difference(before.scores, before.scores)
    assert same.low < 0 == same.mean < same.high
    assert "; 1 void" in after.describe()
    (table,) = evaluation_tables(result_rows([before, after]))
    interval = f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
    assert table.caption == f"change +31.2 (95 %: {interval}): no clear change; about even"
    assert [*table.columns[2].cells] == ["7 (+1 void)"] * 2
    assert after.change_since(Tally().evaluation("l", "m", 0, "E", "o")) is None
    assert Evaluation.from_json(line_of(before)).scores == before.scores


def test_games_without_winners_have_a_reward_and_no_win_rate():
    tally = Tally()
    for reward in (0.25, 0.75):
        tally.add("na", reward, own_invalid=False)
    evaluation = tally.evaluation("l", "m", 0, "E", "none")
    assert math.isnan(evaluation.win_rate) and line_of(evaluation)["win_rate"] is None
    void = replace(evaluation, n=0, mean_reward=math.nan, reward_std=math.nan, rewards=())
    for one in (evaluation, void):
        assert shown([Evaluation.from_json(line_of(one))]) == shown([one]), "nan survives its line"
    half = student(1) * math.sqrt(0.125) / math.sqrt(2)
    assert evaluation.mean_reward == 0.5 and evaluation.interval == pytest.approx((0.5 - half, 0.5 + half))
    assert "mean reward 0.500 (95 %: -2.677 to 3.677) in 2 games" in evaluation.describe()
    table = shown([evaluation])
    assert "reward" in table and "0.500" in table and "nan" not in table + evaluation.describe()


def test_reward_interval_used_for_verdicts_never_vanishes():
    rare = wilson_interval(0, 20, student(19))[1]
    assert mean_interval(1.0, 0.0, 20) == pytest.approx((1 - 2 * rare, 1))
    assert mean_interval(0.0, 0.0, 20) == pytest.approx((-rare, rare))
    assert mean_interval(-5.0, 0.0, 20) == pytest.approx((-5, -5 + 10 * rare))
    assert mean_interval(0.5, 0.2, 100) == pytest.approx((0.5 - student(99) * 0.02, 0.5 + student(99) * 0.02))


async def test_train_data_of_each_update_is_one_file(tracker, tmp_path):
    (step,) = game().trajectories[0].steps
    await tracker.add_train_data(1, 4, [step, step])
    await tracker.add_train_data(2, 5, [[step], [step, step]])  # episodes
    tracker.close()
    files = sorted((tmp_path / "train_data").iterdir())
    assert [file.name for file in files] == ["step-000001.jsonl.gz", "step-000002.jsonl.gz"]
    assert [len(list(read_part(file))) for file in files] == [2, 3]
    said = {"pid": 0, "obs": "prompt", "act": "answer", "reward": 0.5, "env_id": "E", "step_info": step.step_info}
    sampled = {"prompt_tokens": 2, "completion_tokens": 4, "finish_reason": "stop", "adapter_version": 3}
    feedback = {"correct_answer_format": True, "invalid_move": False}
    assert next(read_part(files[0])) == {**said, **sampled, "format_feedback": feedback, "staleness": 1}


async def test_failed_write_of_train_data_is_reported_and_the_next_succeeds(tracker, tmp_path):
    (tmp_path / "train_data").rmdir()
    await tracker.add_train_data(1, 0, [])
    tracker._train_data._thread.submit((tmp_path / "train_data").mkdir)
    await tracker.add_train_data(2, 1, [])
    tracker.close()
    (alarm,) = tracker.alarms
    assert "step-000001.jsonl.gz" in alarm
    assert [path.name for path in (tmp_path / "train_data").iterdir()] == ["step-000002.jsonl.gz"]


@pytest.mark.parametrize("keep_tokens", [False, True])
def test_tokens_and_logprobs_are_kept_if_configured(tmp_path, keep_tokens):
    tracker = make_tracker(tmp_path, keep_tokens=keep_tokens)
    tracker.add_record(game())
    tracker.close()
    (kept,) = read_records(tmp_path / "games.jsonl")
    policy, opponent = kept["turns"]
    assert policy[:6] == [0, "state", "answer", "a", True, 0.5]
    if not keep_tokens:
        assert len(policy) == len(opponent) == 6
        return
    assert policy[6]["completion_ids"] == [5, 6, 7, 8]
    assert policy[6]["logprobs"] == [-0.25, -0.5, -1.0, -2.0]
    assert opponent[6] is None


def test_failed_start_of_a_resume_keeps_open_evaluations(tracker, tmp_path):
    """The registry does not have the evaluated checkpoint yet."""
    tally = Tally()
    tally.add("win", 1.0, False)
    pending = {"tallies": [["ckpt-23", "E", "scripted:random", tally.state_dict()]]}
    tracker.resume(tracker.state_dict() | pending, [])
    tracker.close()
    assert (tmp_path / "eval.jsonl").read_text() == ""
