"""Alarms of a run in which several policies learn: each is about one of them, and names it."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_alarms import evaluation

from fakes.game_records import RANDOM, make_record, make_spec, make_step, make_trajectory
from unstable_lite.config import Config
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.orchestrator.alarms import Reading
from unstable_lite.orchestrator.health import TrainingHealth
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import GameRecord, ModelRef

MAIN, EXPLOITER = (
    ModelRef(uid=f"{name}/ckpt-1", kind="checkpoint", adapter_version=1) for name in ("main", "exploiter")
)
SICK, WELL = ({"learner/staleness_mean": mean, "learner/num_tokens": 10.0} for mean in (7.0, 0.0))


class Watched:
    def __init__(self, directory: Path, **alarms: Any) -> None:
        self.config = Config.model_validate(
            {
                "train_envs": [
                    {"env_id": "E", "num_players": 2, "num_actors": 1},
                    {"env_id": "openspiel:kuhn_poker", "num_players": 2, "seats": ["main", "exploiter"]},
                ],
                "policies": {"main": {}, "exploiter": {}},
                "learner": {"batch_size": 2},
                "alarms": alarms,
            }
        )
        self.directory = directory
        self.buffers = {name: StepBuffer(100, policy=name) for name in self.config.policies}
        self.logged: list[str] = []
        self.tracker = Tracker(directory, [], TrackerConfig(), self.logged.append)
        self.health = self.new_health()

    def new_health(self) -> TrainingHealth:
        say = self.logged.append
        return TrainingHealth(self.config, self.directory, self.buffers, self.tracker, say, asyncio.Event())

    def play(self, count: int, record: GameRecord) -> None:
        for _ in range(count):
            self.tracker.add_record(record)
            self.health.add_record(record)
            for buffer in self.buffers.values():
                buffer.add_game(record)

    @property
    def alarms(self) -> list[str]:
        return [alarm.partition(" (")[0] for alarm in self.tracker.alarms]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.tracker.close()


@pytest.fixture
def hungry(tmp_path: Path) -> Iterator[Watched]:
    """Yield a run in which policies are starved after 50 ms."""
    watched = Watched(tmp_path, starved={"threshold": 0.05})
    yield watched
    watched.tracker.close()


def game(*models: ModelRef, invalid: tuple[int, ...] = (), is_void: bool = False) -> GameRecord:
    """Return a training game in which every policy's seat is trained, and the first player wins."""
    trained = [pid for pid, model in enumerate(models) if model.policy]
    players = [make_trajectory(make_step(pid=pid), pid=pid, model=models[pid]) for pid in trained]
    end = "void" if is_void else "invalid" if invalid else "natural"
    return make_record(
        make_spec(*models, trained=trained), 1.0, -1.0, trajectories=players, end=end, invalid_pids=invalid
    )


def test_updates_of_another_policy_neither_raise_nor_clear_an_alarm(watched):
    for update in range(1, 11):
        watched.health.check_update(update, SICK if update % 2 else WELL, "main" if update % 2 else "exploiter")
    (alarm,) = watched.alarms
    assert alarm == "update 9: staleness: main: 10 tokens were trained 7.0 updates after they were sampled, on average"
    for update in range(11, 20):
        watched.health.check_update(update, WELL, "exploiter")
    assert "on: staleness" in watched.health.status()
    for update in range(20, 25):
        watched.health.check_update(update, WELL, "main")
    assert watched.logged[-1].startswith("staleness, on since update 9, has ended: main: 10 tokens")


def test_entropy_is_compared_with_the_same_policys_first_update_also_after_a_resume(watched):
    def entropies(*values: float) -> None:
        for number, value in enumerate(values):
            policy = ("main", "exploiter")[number % 2]
            watched.health.check_update(number, {"learner/entropy": value, "learner/num_tokens": 9.0}, policy)

    entropies(0.5, 5.0)
    state = json.loads(json.dumps(watched.health.state_dict()))
    watched.health = watched.new_health()
    watched.health.load_state_dict(state)
    entropies(4.0, 5.0, 4.0, 5.0, 4.0, 5.0)
    assert [alarm.partition(" over 9")[0] for alarm in watched.alarms] == [
        "update 4: high_entropy: main: the policy's entropy"
    ]


def test_the_most_exploitable_policy_is_compared_with_itself(watched):
    found = {"exploitability/openspiel:kuhn_poker": 0.1}
    watched.health.check_exploitability(found, "main")
    watched.health.check_exploitability({name: 0.8 for name in found}, "exploiter")
    assert watched.alarms == []
    watched.health.check_exploitability({name: 0.8 for name in found}, "main")
    assert watched.alarms[0].startswith("update 0: exploitability: main: a best response wins 0.8000 after 0.1000")


def test_an_invalid_move_is_that_of_the_policy_at_its_seat(watched):
    watched.play(100, game(MAIN, EXPLOITER, invalid=(1,)))
    for update in range(1, 11):
        watched.health.check_update(update, {}, "main" if update % 2 else "exploiter")
    (alarm,) = watched.alarms
    assert re.match(r"update 10: invalid_moves: exploiter: 100\.0% of the newest 100 training games of E ended", alarm)


def test_points_against_a_fixed_opponent_decline_by_policy(watched):
    watched.play(512, game(MAIN, RANDOM))
    watched.play(512, game(EXPLOITER, RANDOM))
    for policy in ("main", "exploiter"):
        watched.health.check_update(1, {}, policy)
    watched.play(512, game(RANDOM, MAIN))
    for policy in ("main", "exploiter"):
        watched.health.check_update(2, {}, policy)
    texts = [alarm for alarm in watched.alarms if "decline" in alarm]
    assert [text.partition(": up to")[0] for text in texts] == [
        "update 2: decline: main: training games of E against scripted:random"
    ]


def test_a_collapse_is_judged_by_policy_and_not_against_one_that_learns(watched):
    def evaluate(model: str, wins: int, step: int, opponent: str) -> None:
        one = replace(evaluation(wins, step=step), model=model, opponent=opponent)
        watched.tracker.evaluations.append(one)
        watched.health.check_evaluation(one)

    for opponent in ("scripted:random", "policy:exploiter", "policy:exploiter/past"):
        evaluate("main/ckpt-4", 390, 10, opponent)
        evaluate("exploiter/ckpt-2", 20, 10, opponent)
    evaluate("main/ckpt-8", 20, 20, "policy:exploiter")
    evaluate("main/ckpt-8", 20, 20, "policy:exploiter/past")
    assert watched.alarms == []
    evaluate("main/ckpt-8", 20, 20, "scripted:random")
    assert watched.alarms[0].startswith(
        "update 0: collapse: main: evaluation of E against scripted:random: main/ckpt-8"
    )
    (watched.directory / "checkpoints" / "ckpt-10" / "main").mkdir(parents=True)
    (text,) = watched.health.collapsed()
    assert text.endswith(f"That is {watched.directory / 'checkpoints' / 'ckpt-10' / 'main'}")


def test_a_starved_policy_is_named_although_another_one_gets_steps(hungry):
    for _ in range(5):
        hungry.play(1, game(MAIN, RANDOM))
        hungry.play(1, game(EXPLOITER, RANDOM, is_void=True))
        hungry.health.check_update(1, {}, "main")
        hungry.health._judge(map(hungry.health._starvation, hungry.buffers))
        time.sleep(0.03)
    starved = [alarm for alarm in hungry.alarms if "received no step" in alarm]
    assert len(starved) == 1 and starved[0].startswith("update 1: starved: exploiter: the learner has received no step")


def test_a_policy_that_plays_no_game_is_not_starved(hungry):
    for _ in range(4):
        hungry.play(1, game(MAIN, RANDOM, is_void=True))
        hungry.health.check_update(1, {}, "main")
        time.sleep(0.03)
    assert len(hungry.alarms) == 1 and "starved: main: no step of E" in hungry.alarms[0]


def test_skipped_batches_are_counted_by_policy(watched):
    watched.health.check_skipped(50, "a NaN", "exploiter")
    watched.health.check_update(7, {}, "main")
    assert "on: skipped" in watched.health.status() and "skipped: exploiter: 50 batches" in watched.alarms[0]
    watched.health.check_update(8, {}, "exploiter")
    assert "on:" not in watched.health.status()


def test_new_lineage_is_not_compared_with_the_games_of_the_one_before(watched):
    def play(count: int, model: ModelRef, loser: bool = False) -> None:
        for number in range(count):
            models = (RANDOM, model) if loser or number % 8 == 0 else (model, RANDOM)
            watched.play(1, game(*models))

    for update in range(1, 21):
        play(40, EXPLOITER)
        watched.health.check_update(update, WELL, "exploiter")
    watched.health.forget("exploiter", 2)
    play(200, EXPLOITER)  # in flight when the lineage ended
    for update in range(21, 41):
        play(40, ModelRef(uid="exploiter/initial-2", kind="checkpoint", adapter_version=2), loser=True)
        watched.health.check_update(update, WELL, "exploiter")
    assert not [alarm for alarm in watched.alarms if "decline" in alarm]


def test_new_lineage_has_no_alarm_of_the_one_before_and_is_not_compared_with_its_late_evaluation(watched):
    def evaluate(wins: int, step: int) -> None:
        one = replace(evaluation(wins, step=step), model="exploiter/ckpt-1", opponent="scripted:random")
        watched.tracker.evaluations.append(one)
        watched.health.check_evaluation(one)

    found = {"exploitability/openspiel:kuhn_poker": 0.1}
    watched.health.check_exploitability(found, "main")
    evaluate(390, 1)
    evaluate(20, 1)
    assert "on: collapse" in watched.health.status() and watched.health.collapsed()
    watched.health.check_update(2, {}, "exploiter")
    watched.health.forget("exploiter", 2)
    saved = json.loads(json.dumps(watched.health.state_dict()))
    evaluate(390, 1)
    evaluate(20, 2)
    watched.health.check_exploitability({name: 0.8 for name in found}, "main")  # of both seats
    resumed = watched.new_health()
    resumed.load_state_dict(saved)
    for health in (watched.health, resumed):
        assert "on:" not in health.status() and not health.collapsed()
    assert len(watched.alarms) == 1


def test_an_alarm_of_another_policy_at_the_seats_stays_if_a_policy_begins_again(watched):
    kuhn = "openspiel:kuhn_poker"
    for _ in range(5):
        watched.health._judge([Reading(alarm="invalid_moves", value=1.0, n=1000, subject=kuhn)], "main")
    assert "on: invalid_moves" in watched.health.status()
    watched.health.forget("exploiter", 2)
    assert "on: invalid_moves" in watched.health.status()
