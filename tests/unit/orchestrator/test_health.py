"""A run's reactions to its alarms, with its real tracker and buffer."""

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from test_alarms import evaluation as evaluation_of

from fakes.game_records import RANDOM, make_record, make_spec, make_step, make_trajectory
from unstable_lite.config import Config
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.files import read_part
from unstable_lite.orchestrator.alarms import ALARMS, SAY_EVERY
from unstable_lite.orchestrator.health import TrainingHealth
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.tracking.run_directory import PAUSED
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import BranchPoint, GameEnd, GameKind, GameRecord, ModelRef, Outcome, PastTurn, Sampling, Turn

POLICY = ModelRef(uid="ckpt-1", kind="checkpoint", adapter_version=1)
evaluation = partial(evaluation_of, n=100)
OLDER = ModelRef(uid="base", kind="checkpoint", adapter_version=0)


class Watched:
    def __init__(self, directory: Path, batch_size: int = 384, **alarms: dict[str, Any]) -> None:
        self.config = Config.model_validate(
            {
                "train_envs": [{"env_id": "E", "num_players": 2, "num_actors": 1}],
                "learner": {"batch_size": batch_size},
                "alarms": alarms,
            }
        )
        self.directory = directory
        self.buffer = StepBuffer(100, filter_opponent_invalid=True)
        self.logged: list[str] = []
        self.tracker = Tracker(directory, [], TrackerConfig(), self.logged.append)
        self.stop = asyncio.Event()
        self.health = self.new_guard()
        self.watching: asyncio.Task[None] | None = None

    def new_guard(self) -> TrainingHealth:
        buffers, say = {"": self.buffer}, self.logged.append
        return TrainingHealth(self.config, self.directory, buffers, self.tracker, say, self.stop)

    def start(self) -> None:
        """Let the guard look at the time until the end of the test."""
        self.watching = asyncio.create_task(self.health.run())

    def add_record(self, record: GameRecord) -> None:
        self.tracker.add_record(record)
        self.health.add_record(record)

    def collect(self, *records: GameRecord) -> None:
        """Count training games, and give them to the buffer."""
        for record in records:
            self.add_record(record)
            self.buffer.add_game(record)

    def play(self, count: int, *outcome: Any, **made: Any) -> None:
        for _ in range(count):
            self.add_record(game(*outcome, **made))

    def check(self, updates: Iterable[int], metrics: Mapping[str, float] = MappingProxyType({})) -> None:
        for update in updates:
            self.health.check_update(update, metrics)

    async def save(self) -> tuple[Path | None, int]:
        return self.directory / "checkpoints" / "ckpt-1", 1

    async def paused(self, saved: tuple[Path | None, int] | None = None) -> asyncio.Task[None]:
        """Wait until the run is paused, after an attempt to save it with this result."""

        async def save() -> tuple[Path | None, int]:
            return saved or await self.save()

        pausing = asyncio.create_task(self.health.pause_if_asked(save))
        while not (self.directory / PAUSED).exists():
            await asyncio.sleep(0.01)
        return pausing


@pytest.fixture
async def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Watched]]:
    """Yield a function that makes a guard with the given alarms, raised after their own number of `updates`."""
    made: list[Watched] = []

    def make(batch_size: int = 384, **alarms: dict[str, Any]) -> Watched:
        for name, settings in alarms.items():
            updates = settings.pop("updates", ALARMS[name].updates)
            monkeypatch.setitem(ALARMS, name, dataclasses.replace(ALARMS[name], updates=updates))
        made.append(Watched(tmp_path, batch_size, **alarms))
        return made[-1]

    yield make
    for watched in made:
        if watched.watching is not None:
            watched.watching.cancel()
        watched.tracker.close()


@pytest.fixture
async def watched(watch: Callable[..., Watched]) -> Watched:
    return watch()


def game(
    outcome: Outcome = "win",
    opponent: ModelRef = RANDOM,
    kind: GameKind = "train",
    end: GameEnd = "natural",
    **made: Any,
) -> GameRecord:
    """Return a game with the policy at seat 0."""
    is_training = kind == "train"
    of_spec = {name: made.pop(name) for name in ("eval_label", "start", "sampling") if name in made}
    spec = make_spec(POLICY, opponent, kind=kind, trained=[0] * is_training, **of_spec)
    trajectories = [make_trajectory(make_step(), model=POLICY)] * (is_training and end != "void")
    outcomes = {0: outcome, 1: "loss" if outcome == "win" else "win"}
    return make_record(spec, 1.0, -1.0, trajectories=trajectories, outcomes=outcomes, end=end, **made)


SICK = {"learner/staleness_mean": 7.0, "learner/num_tokens": 10.0}
WELL = SICK | {"learner/staleness_mean": 0.0}


async def test_warning_is_logged_kept_counted_and_shown_and_the_run_continues(watch):
    watched = watch(staleness={"updates": 2})
    assert watched.health.status() == ""
    assert watched.health.check_update(1, SICK)["alarms/staleness"] == 0
    assert watched.health.check_update(2, SICK)["alarms/staleness"] == 1
    (text,) = watched.tracker.alarms
    assert re.match(r"update 2: staleness: 10\b.* 7\.0\b", text)
    (line,) = (watched.directory / "alarms.jsonl").read_text().splitlines()
    assert json.loads(line).items() >= {"step": 2, "text": text.removeprefix("update 2: ")}.items()
    assert "update 2: staleness: " in watched.logged[0]
    assert "alarms 1, on: staleness" in watched.health.status()
    assert not watched.stop.is_set()
    assert not watched.health.asks_for_pause.is_set()
    watched.check((3, 4), WELL)
    assert re.match(r"staleness\b.*\bupdate 2\b", watched.logged[1])
    assert len(watched.tracker.alarms) == 1
    assert "on:" not in watched.health.status()


async def test_lasting_alarm_is_repeated_and_listed_once_and_its_stop_is_named(watch):
    watched = watch(staleness={"updates": 1, "action": "stop"})
    watched.check([1], SICK)
    assert watched.stop.is_set()
    assert (watched.health.stopped_by or "").startswith("staleness: ")
    watched.check(range(2, 2 + 2 * SAY_EVERY), SICK)
    assert ["still on since update 1" in text for text in watched.logged] == [False, True, True]
    (text,) = watched.tracker.alarms
    assert text.startswith("update 1: staleness: ")
    lines = list(read_part(watched.directory / "alarms.jsonl"))
    assert [line["is_repeat"] for line in lines] == [False, True, True]
    assert text == f"update {lines[0]['step']}: {lines[0]['text']}"


async def test_pause_lasts_until_its_file_is_deleted_and_starts_no_game(watch, tmp_path):
    watched = watch(staleness={"updates": 1, "action": "pause"})
    (tmp_path / "log").touch()
    (tmp_path / PAUSED).symlink_to("log")
    await watched.health.pause_if_asked(watched.save)
    assert not watched.logged
    watched.health.check_update(1, SICK)
    pausing = asyncio.create_task(watched.health.pause_if_asked(watched.save))
    while (tmp_path / PAUSED).is_symlink():
        await asyncio.sleep(0.01)
    assert (tmp_path / "log").read_text() == ""
    text = (tmp_path / PAUSED).read_text()
    assert "update 1: staleness: 10 tokens" in text
    assert "ckpt-1" in text
    assert "elete" in text
    assert not watched.health.unpaused.is_set()
    assert not pausing.done()
    (tmp_path / PAUSED).unlink()
    await pausing
    assert watched.health.unpaused.is_set()
    await watched.health.pause_if_asked(watched.save)
    watched.health.asks_for_pause.set()
    pausing = await watched.paused()
    watched.stop.set()
    await pausing
    assert watched.health.unpaused.is_set() and not (tmp_path / PAUSED).exists(), "a pause ends with the run"
    (tmp_path / PAUSED).write_text("left by a run killed during a pause")
    watched.new_guard()
    assert not (tmp_path / PAUSED).exists()


async def test_pause_reports_that_the_newest_update_could_not_be_saved(watch, tmp_path):
    watched = watch(staleness={"updates": 1, "action": "pause"})
    path = tmp_path / "checkpoints" / "ckpt-10"
    for saved, newest in (((path, 10), str(path)), ((None, 0), "no checkpoint")):
        watched.health.asks_for_pause.set()
        watched.health.check_update(12, SICK)
        pausing = await watched.paused(saved)
        sentence = rf"(?i)update 12\b.*\bnot\b.*{re.escape(newest)}"
        assert re.search(sentence, (tmp_path / PAUSED).read_text())
        assert re.search(sentence, watched.logged[-1])
        (tmp_path / PAUSED).unlink()
        await pausing


async def test_run_that_cannot_write_its_pause_file_reports_it_and_continues(watch, tmp_path):
    watched = watch(staleness={"updates": 1, "action": "pause"})
    watched.health.check_update(1, SICK)
    (tmp_path / PAUSED).mkdir()
    await asyncio.wait_for(watched.health.pause_if_asked(watched.save), 30)
    assert re.search("cannot pause.*Is a directory", watched.tracker.alarms[-1])
    assert watched.health.unpaused.is_set()
    assert not watched.health.asks_for_pause.is_set()
    assert [path.name for path in tmp_path.iterdir() if PAUSED in path.name] == [PAUSED], "no part of a file is left"


async def test_collapse_names_the_best_kept_checkpoint(watched):
    for name in ("ckpt-4", "ckpt-10", "ckpt-5-best"):  # the last is a user's copy
        (watched.directory / "checkpoints" / name).mkdir(parents=True)
    watched.health.check_evaluation(evaluation(20, step=0))
    watched.health.check_evaluation(evaluation(90, step=5))
    assert watched.health.collapsed() == []
    watched.health.check_evaluation(evaluation(10, step=10))
    (alarm,) = watched.tracker.alarms
    assert re.search(r"collapse: .*E .*O: ckpt-10 10\.0 %.* 100 ", alarm)
    (collapsed,) = watched.health.collapsed()
    assert collapsed.startswith("collapsed: the last policy is worse than the best one: ")
    assert re.search(r"ckpt-5 90\.0 %.* 100 ", collapsed)
    assert collapsed.endswith(f"{watched.directory / 'checkpoints' / 'ckpt-4'}")
    (watched.directory / "adapters" / "ckpt-5").mkdir(parents=True)
    assert watched.health.collapsed()[0].endswith(f"{watched.directory / 'adapters' / 'ckpt-5'}")
    watched.health.check_evaluation(evaluation(88, step=15))
    assert watched.health.collapsed() == []


async def test_resume_keeps_the_best_result_and_repeats_no_alarm(watched):
    watched.tracker.evaluations = [evaluation(90, step=5), evaluation(10, step=10)]
    watched.health.check_evaluation(watched.tracker.evaluations[0])
    state = json.loads(json.dumps(watched.health.state_dict()))
    resumed = watched.new_guard()
    resumed.load_state_dict(state)
    assert watched.logged == []
    assert resumed.state_dict()["contests"]["evaluation of E against O"]["compared"] == 2
    assert "ckpt-10 10.0 %" in resumed.collapsed()[0]
    resumed.check_evaluation(evaluation(12, step=15))
    assert watched.logged == []
    assert resumed.check_update(16, {})["alarms/collapse"] == 1


async def test_entropy_is_compared_with_the_first_updates_even_after_resume(watched):
    def update(health: TrainingHealth, number: int, entropy: float) -> float:
        metrics = {"learner/entropy": entropy, "learner/num_tokens": 100.0}
        return health.check_update(number, metrics)["alarms/high_entropy"]

    # SmolLM2-135M has 2.8 to 3.7 nats per token in its first updates, which must not raise an alarm.
    assert [update(watched.health, number, entropy) for number, entropy in enumerate([3.4] + [3.7] * 5)] == [0] * 6
    resumed = watched.new_guard()
    resumed.load_state_dict(json.loads(json.dumps(watched.health.state_dict())))
    assert [update(resumed, number, entropy) for number, entropy in enumerate([6.3, 6.5, 6.5, 6.5], 6)] == [0, 0, 0, 1]
    (text,) = watched.logged
    assert re.search(r"\b100 tokens\b.* 3\.10 nats", text)


async def test_training_games_are_compared_with_earlier_better_ones(watched):
    watched.play(512, "win")
    watched.play(512, "win", kind="eval")
    watched.check([1])
    watched.play(512, "loss", opponent=OLDER)
    watched.play(512, "loss", kind="eval", eval_label="of a quota")
    watched.play(512, "loss", end="void")
    start = BranchPoint(turns=(PastTurn(0, "", "a"),), pid=0, digest="")
    watched.play(512, "loss", start=start)
    watched.play(512, "loss", kind="eval", sampling=Sampling(temperature=0.0))
    watched.check([2])
    assert watched.tracker.alarms == [], "those against older checkpoints, of a quota, void, of a branch or greedy"
    watched.play(512, "loss", end="invalid", invalid_pids=(0,))
    watched.check(range(3, 8))
    patterns = (
        r"update 3: decline: .* E: .*update 3 0\.0 %.* 512 .*0\.0–0\.7.*update 1 100\.0 %.* 512 .*99\.3–100\.0",
        r"update 3: decline: .* E .*scripted:random: .*update 3 0\.0 %.* 512 .*update 1 100\.0 %.* 512 .*99\.3",
        r"update 7: invalid_moves: 100\.0%.* 512 .* E .*90%, 5 times",
    )
    for pattern, text in zip(patterns, watched.tracker.alarms, strict=True):
        assert re.match(pattern, text), text
    ends = watched.health.collapsed()
    assert len(ends) == 2 and all(text.startswith("declined: the newest training games, of several") for text in ends)


async def test_ends_outside_of_the_rules_raise_an_alarm_by_reason(watched):
    watched.play(90)
    watched.play(6, end="void", reason="budget_spent")  # a stop
    watched.play(2, end="invalid", reason="env_raised", kind="eval", eval_label="before")
    watched.play(1, end="truncated", reason="context_full")
    watched.health.check_update(1, {})
    assert watched.tracker.alarms == [], "99 games are too few to judge"
    watched.play(2, end="truncated", reason="context_full")
    watched.health.check_update(2, {})
    (alarm,) = watched.tracker.alarms
    assert re.match(r"update 2: ended_early: 3\.0% of the newest 101 games ended early: context_full in E\b.*2%", alarm)
    tracker, health = (json.loads(json.dumps(part.state_dict())) for part in (watched.tracker, watched.health))
    assert tracker == watched.tracker.state_dict() | {"seconds": tracker["seconds"]}, "JSON changes nothing"
    watched.tracker.windows.judged.clear()
    watched.tracker.resume(tracker, [])
    watched.health = watched.new_guard()
    watched.health.load_state_dict(health)
    assert not watched.tracker.alarms[1:]
    watched.play(512)
    watched.health.check_evaluation(evaluation(wins=50, step=3))
    assert re.match(r"ended_early, on since update 2, has ended: 0\.0%.*context_full in E", watched.logged[-1])
    assert watched.health.status() == "  alarms 1"


@pytest.mark.parametrize(("num_tokens", "is_alarm"), [(5, True), (7, False)])
async def test_answers_that_the_context_cut_off_raise_an_alarm(watched, num_tokens, is_alarm):
    watched.config.engine.__dict__["max_generation_len"] = 7
    for _ in range(100):
        record = game()
        (step,) = record.trajectories[0].steps
        whole = dataclasses.replace(
            step.generation, completion_ids=np.ones(num_tokens, np.int32), finish_reason="length"
        )
        turn = Turn(pid=0, observation="o", text="a", action="a", format_ok=True, is_cut_off=True, generation=whole)
        record.turns = [turn]
        watched.add_record(record)
    watched.health.check_update(1, {})
    assert [("context_full in E" in alarm) for alarm in watched.tracker.alarms] == [True] * is_alarm


async def test_game_ended_by_any_own_seat_counts_whole(watched):
    both_seats = game(opponent=POLICY, end="invalid", invalid_pids=(1,))
    seats = tuple(replace(agent, collect_data=True) for agent in both_seats.spec.agent_specs)
    both_seats.spec = replace(both_seats.spec, agent_specs=seats)
    for _ in range(512):
        watched.add_record(both_seats)
    watched.check(range(1, 6))
    (alarm,) = watched.tracker.alarms
    assert re.search(r"invalid_moves: 100\.0%.* 512 .* E ", alarm)


async def test_games_without_steps_starve_the_learner(watch):
    watched = watch(starved={"threshold": 0.05, "action": "stop"})
    watched.start()
    await asyncio.sleep(0.2)
    assert watched.logged == [], "no game has ended"
    watched.collect(game(end="void"), game(end="invalid", invalid_pids=(1,)))
    await asyncio.wait_for(watched.stop.wait(), 30)
    assert watched.health.stopped_by is not None
    assert re.search(
        r" 2 training games .* 1 void, 1 .*run\.filter_opponent_invalid, 0 .* 384", watched.health.stopped_by
    )
    watched.collect(game())
    while "starved" in watched.health.status():
        await asyncio.sleep(0.01)


async def test_steps_that_are_all_dropped_as_stale_do_not_feed_the_learner(watch):
    watched = watch(batch_size=2, starved={"threshold": 0.2, "action": "stop"})
    watched.buffer.max_staleness = 0
    watched.start()
    async with asyncio.timeout(30):
        while not watched.stop.is_set():
            watched.collect(game(), game())
            assert not watched.buffer.has_batch(2, 5)
            await asyncio.sleep(0.01)
    assert "stale" in (watched.health.stopped_by or "")


async def test_env_whose_steps_never_reach_the_learner_is_named(watch):
    watched = watch(starved={"threshold": 0.05})
    (env_id,) = (env.env_id for env in watched.config.train_envs)
    for update in range(1, 4):
        watched.collect(game())
        watched.health.check_update(update, {})
        await asyncio.sleep(0.1)
    assert any("starved" in text and env_id in text for text in watched.logged)
    assert "0 dropped" in " ".join(watched.logged)
    watched.buffer.max_staleness = None
    await watched.buffer.get_batch(1, 0)
    watched.health.check_update(4, {})
    assert "starved" in watched.logged[-1]


async def test_time_in_a_pause_does_not_starve_an_env(watch, tmp_path):
    watched = watch(starved={"threshold": 0.2}, staleness={"updates": 1, "action": "pause"})
    watched.add_record(game())
    watched.health.check_update(1, SICK)
    pausing = await watched.paused()
    await asyncio.sleep(0.3)
    (tmp_path / PAUSED).unlink()
    await pausing
    watched.health.check_update(2, WELL)
    assert not any("starved" in text for text in watched.logged)


async def test_learner_with_a_waiting_batch_does_not_starve(watch):
    watched = watch(batch_size=2, starved={"threshold": 0.05})
    watched.start()
    watched.collect(game(), game(), game(end="void"))
    for _ in range(40):
        await asyncio.sleep(0.01)
        watched.add_record(game(end="void"))
    assert watched.logged == []
    await watched.buffer.get_batch(2, 1)
    async with asyncio.timeout(30):
        while not watched.logged:
            await asyncio.sleep(0.01)
            watched.add_record(game(end="void"))
    assert re.search(r"\b0 steps\b.* 2\b", watched.logged[0])


async def test_batches_skipped_in_a_row_stop_the_run(watched):
    for in_a_row in range(1, 10):
        watched.health.check_skipped(in_a_row, "not finite: loss nan")
    assert not watched.stop.is_set()
    watched.health.check_skipped(10, "not finite: loss nan")
    assert watched.stop.is_set()
    assert "on: skipped" in watched.health.status()
    watched.health.check_update(1, {})
    assert "on:" not in watched.health.status()
    assert watched.health.stopped_by is not None
    assert re.search(r"\b10 batches\b.*not finite: loss nan", watched.health.stopped_by)


async def test_batches_of_steps_and_of_trajectories_are_measured(watched):
    steps = game().trajectories[0].steps
    for batch in (steps * 3, [steps * 2, steps]):
        metrics = await watched.health.measure(batch)
        assert metrics["batch/num_completions"] == 3
        assert metrics["batch/identical_completions"] == 1


@pytest.mark.parametrize(("rising", "is_raised"), [((0.9, 0.35, 1.1), False), ((1.4, 1.2, 1.6), True)])
async def test_estimated_exploitability_has_risen_if_its_intervals_are_apart(watch, rising, is_raised):
    pytest.importorskip("pyspiel")
    watched = watch(exploitability={"updates": 1})

    def metrics(value: float, low: float, high: float) -> dict[str, float]:
        names = ("exploitability", "exploitability_low", "exploitability_high")
        return {f"{name}/openspiel:kuhn_poker": x for name, x in zip(names, (value, low, high), strict=True)}

    watched.health.check_exploitability(metrics(0.3, 0.2, 0.4))
    assert watched.health.check_update(1, WELL | metrics(0.4, 0.3, 0.5))["alarms/exploitability"] == 0
    assert watched.health.check_update(2, WELL | metrics(*rising))["alarms/exploitability"] == is_raised
    exact = {"exploitability/openspiel:kuhn_poker": 0.9}
    assert watched.health.check_update(3, WELL | exact)["alarms/exploitability"] == 1, "(0.9 - 0.4) / 2 is much"
