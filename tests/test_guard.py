"""What a run does about its alarms, with its real tracker and buffer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from unstable_lite.alarms import SAY_EVERY
from unstable_lite.buffers import StepBuffer
from unstable_lite.config import Config, TrackerConfig
from unstable_lite.guard import PAUSED, Guard
from unstable_lite.trackers.records import read_part
from unstable_lite.trackers.run_view import alarm_lines
from unstable_lite.trackers.tracker import Evaluation, Tracker
from unstable_lite.types import (
    AgentSpec,
    GameEnd,
    GameKind,
    GameRecord,
    GameSpec,
    Generation,
    ModelRef,
    Outcome,
    PlayerTrajectory,
    Step,
)

POLICY = ModelRef(uid="ckpt-1", kind="checkpoint", adapter_version=1)
OLDER = ModelRef(uid="base", kind="checkpoint", adapter_version=0)
RANDOM = ModelRef(uid="fixed-scripted:random", kind="fixed", name="scripted:random")


class Watched:
    """A guard and what it is given."""

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
        self.said: list[str] = []
        self.tracker = Tracker(directory, [], TrackerConfig(), self.said.append)
        self.going, self.stop = asyncio.Event(), asyncio.Event()
        self.going.set()
        self.guard = self.new_guard()

    def new_guard(self) -> Guard:
        return Guard(self.config, self.directory, self.buffer, self.tracker, self.said.append, self.going, self.stop)

    async def save(self) -> tuple[Path | None, int]:
        return self.directory / "checkpoints" / "ckpt-1", 1


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Callable[..., Watched]]:
    """Makes one with the alarms that are given."""
    made: list[Watched] = []

    def make(batch_size: int = 384, **alarms: dict[str, Any]) -> Watched:
        made.append(Watched(tmp_path, batch_size, **alarms))
        return made[-1]

    yield make
    for watched in made:
        watched.tracker.close()


@pytest.fixture
async def watched(watch: Callable[..., Watched]) -> Watched:
    return watch()


def game(
    outcome: Outcome = "win",
    opponent: ModelRef = RANDOM,
    kind: GameKind = "train",
    end: GameEnd = "natural",
    invalid_pids: tuple[int, ...] = (),
    eval_label: str | None = None,
) -> GameRecord:
    """Seat 0 is the policy's."""
    agents = tuple(
        AgentSpec(pid=pid, model=m, collect_data=c, prompt_template="tiny", action_extraction_fn="default")
        for pid, m, c in ((0, POLICY, kind == "train"), (1, opponent, False))
    )
    spec = GameSpec(
        game_idx=0, kind=kind, env_id="E", num_players=2, seed=2, agent_specs=agents, max_turns=9, eval_label=eval_label
    )
    generation = Generation(
        prompt_ids=np.array([1], np.int32),
        completion_ids=np.array([2], np.int32),
        logprobs=np.zeros(1, np.float32),
        text="a",
        finish_reason="stop",
        adapter_version=1,
    )
    step = Step(pid=0, obs="o", act="a", reward=0.0, env_id="E", generation=generation)
    trajectory = PlayerTrajectory(pid=0, env_id="E", game_idx=0, model=POLICY, steps=[step], final_reward=1.0)
    other: Outcome = "loss" if outcome == "win" else "win"
    return GameRecord(
        spec=spec,
        turns=[],
        trajectories=[trajectory] if kind == "train" and end != "void" else [],
        rewards={0: 1.0, 1: -1.0},
        outcomes={0: outcome, 1: other},
        end=end,
        invalid_pids=invalid_pids,
    )


def evaluation(wins: int, step: int) -> Evaluation:
    return Evaluation(
        label="x",
        model=f"ckpt-{step}",
        step=step,
        env_id="E",
        opponent="O",
        n=100,
        wins=wins,
        draws=0,
        losses=100 - wins,
        invalid=0,
        void=0,
        mean_reward=0.0,
        reward_std=1.0,
    )


SICK = {"learner/staleness_mean": 7.0, "learner/num_tokens": 10.0}
WELL = SICK | {"learner/staleness_mean": 0.0}


async def test_warn_is_said_kept_counted_and_shown_and_the_run_goes_on(watch: Callable[..., Watched]) -> None:
    watched = watch(staleness={"updates": 2})
    assert watched.guard.status() == ""
    assert watched.guard.check_update(1, SICK)["alarms/staleness"] == 0
    assert watched.guard.check_update(2, SICK)["alarms/staleness"] == 1
    (text,) = watched.tracker.alarms
    assert text.startswith("update 2: staleness: 10 tokens were trained 7.0 updates")
    (line,) = (watched.directory / "alarms.jsonl").read_text().splitlines()
    assert json.loads(line).items() >= {"step": 2, "text": text.removeprefix("update 2: ")}.items()
    assert "alarm after update 2: staleness: " in watched.said[0]
    assert "alarms 1, on: staleness" in watched.guard.status()
    assert not watched.stop.is_set()
    assert not watched.guard.asks_for_pause.is_set()
    for update in (3, 4):
        watched.guard.check_update(update, WELL)
    assert watched.said[1].startswith("staleness, on since update 2, is over")
    assert len(watched.tracker.alarms) == 1
    assert "on:" not in watched.guard.status()


async def test_one_that_stays_on_is_said_again_and_listed_once(watch: Callable[..., Watched]) -> None:
    watched = watch(staleness={"updates": 1})
    for update in range(1, 2 + 2 * SAY_EVERY):
        watched.guard.check_update(update, SICK)
    assert ["still on since update 1" in text for text in watched.said] == [False, True, True]
    (text,) = watched.tracker.alarms
    assert text.startswith("update 1: staleness: ")
    lines = list(read_part(watched.directory / "alarms.jsonl"))
    assert len(lines) == 3
    assert alarm_lines(lines) == [text]


async def test_stop_ends_the_run_and_says_why(watch: Callable[..., Watched]) -> None:
    watched = watch(staleness={"updates": 1, "action": "stop"})
    watched.guard.check_update(1, SICK)
    assert watched.stop.is_set()
    assert watched.guard.stopped_by is not None
    assert watched.guard.stopped_by.startswith("staleness: ")


async def test_pause_waits_for_its_file_to_be_deleted_and_starts_no_game_meanwhile(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(staleness={"updates": 1, "action": "pause"})
    await watched.guard.pause_if_asked(watched.save)
    assert not watched.said
    watched.guard.check_update(1, SICK)
    pausing = asyncio.create_task(watched.guard.pause_if_asked(watched.save))
    while not (tmp_path / PAUSED).exists():
        await asyncio.sleep(0.01)
    text = (tmp_path / PAUSED).read_text()
    assert "after update 1: staleness: 10 tokens" in text
    assert "ckpt-1" in text
    assert "Delete this file" in text
    assert not watched.going.is_set()
    assert not pausing.done()
    (tmp_path / PAUSED).unlink()
    await pausing
    assert watched.going.is_set()
    await watched.guard.pause_if_asked(watched.save)
    assert watched.said[-1] == "going on"


async def test_a_pause_ends_with_the_run_and_a_run_begins_without_one(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(staleness={"updates": 1, "action": "pause"})
    watched.guard.check_update(1, SICK)
    pausing = asyncio.create_task(watched.guard.pause_if_asked(watched.save))
    while not (tmp_path / PAUSED).exists():
        await asyncio.sleep(0.01)
    watched.stop.set()
    await pausing
    assert watched.going.is_set()
    assert not (tmp_path / PAUSED).exists()
    (tmp_path / PAUSED).write_text("of a run that was killed while it paused")
    watched.new_guard()
    assert not (tmp_path / PAUSED).exists()


async def test_a_pause_says_so_where_the_newest_update_could_not_be_saved(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(staleness={"updates": 1, "action": "pause"})
    saved: list[tuple[Path | None, int]] = [(tmp_path / "checkpoints" / "ckpt-10", 10), (None, 0)]

    async def fail() -> tuple[Path | None, int]:
        return saved.pop(0)

    for told in (f"the newest checkpoint is {saved[0][0]}.", "there is no checkpoint yet."):
        watched.guard.asks_for_pause.set()
        watched.guard.check_update(12, SICK)
        pausing = asyncio.create_task(watched.guard.pause_if_asked(fail))
        while not (tmp_path / PAUSED).exists():
            await asyncio.sleep(0.01)
        sentence = f"Update 12 could NOT be saved (an alarm says why); {told}"
        assert sentence in (tmp_path / PAUSED).read_text()
        assert sentence in watched.said[-1]
        (tmp_path / PAUSED).unlink()
        await pausing


async def test_a_run_that_cannot_write_why_it_pauses_says_so_and_goes_on(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(staleness={"updates": 1, "action": "pause"})
    watched.guard.check_update(1, SICK)
    (tmp_path / PAUSED).symlink_to("/dev/full")
    await asyncio.wait_for(watched.guard.pause_if_asked(watched.save), 30)
    assert "the run cannot pause and goes on. Everything is saved in" in watched.tracker.alarms[-1]
    assert "No space left on device" in watched.tracker.alarms[-1]
    assert watched.going.is_set()
    assert not watched.guard.asks_for_pause.is_set()
    assert not (tmp_path / PAUSED).is_symlink()


async def test_a_collapse_is_told_with_the_best_checkpoint_that_was_kept(watched: Watched) -> None:
    for name in ("ckpt-4", "ckpt-10", "ckpt-5-best"):  # the last is somebody's own copy
        (watched.directory / "checkpoints" / name).mkdir(parents=True)
    watched.guard.check_evaluation(evaluation(20, 0))
    watched.guard.check_evaluation(evaluation(90, 5))
    assert watched.guard.collapsed() == []
    watched.guard.check_evaluation(evaluation(10, 10))
    (alarm,) = watched.tracker.alarms
    assert "collapse: evaluation of E against O: ckpt-10 10.0% of the points in 100 games" in alarm
    (collapsed,) = watched.guard.collapsed()
    assert "but ckpt-5 90.0% of the points in 100 games" in collapsed
    assert collapsed.endswith(f"the nearest one that was kept is {watched.directory / 'checkpoints' / 'ckpt-4'}")
    (watched.directory / "adapters" / "ckpt-5").mkdir(parents=True)
    assert watched.guard.collapsed()[0].endswith(f"That is {watched.directory / 'adapters' / 'ckpt-5'}")
    watched.guard.check_evaluation(evaluation(88, 15))
    assert watched.guard.collapsed() == []


async def test_after_a_resume_the_best_is_still_the_best_and_nothing_is_told_twice(watched: Watched) -> None:
    watched.tracker.evaluations = [evaluation(90, 5), evaluation(10, 10)]
    watched.guard.check_evaluation(watched.tracker.evaluations[0])
    state = json.loads(json.dumps(watched.guard.state_dict()))
    resumed = watched.new_guard()
    resumed.load_state_dict(state)
    assert watched.said == []
    assert resumed.state_dict()["contests"]["evaluation of E against O"]["compared"] == 2
    assert "ckpt-10 10.0%" in resumed.collapsed()[0]
    resumed.check_evaluation(evaluation(12, 15))
    assert watched.said == []
    assert resumed.check_update(16, {})["alarms/collapse"] == 1


async def test_entropy_is_compared_with_the_first_updates_after_a_resume_too(watched: Watched) -> None:
    def update(guard: Guard, number: int, entropy: float) -> float:
        figures = {"learner/entropy": entropy, "learner/num_tokens": 100.0}
        return guard.check_update(number, figures)["alarms/high_entropy"]

    # SmolLM2-135M, whose first updates have 2.8 to 3.7 nats a token, is not noise.
    assert [update(watched.guard, number, entropy) for number, entropy in enumerate([3.4] + [3.7] * 5)] == [0] * 6
    resumed = watched.new_guard()
    resumed.load_state_dict(json.loads(json.dumps(watched.guard.state_dict())))
    assert [update(resumed, number, entropy) for number, entropy in enumerate([6.3, 6.5, 6.5, 6.5], 6)] == [0, 0, 0, 1]
    (text,) = watched.said
    assert "the policy's entropy over 100 tokens is 3.10 nats a token above the first update's (over 3" in text


async def test_training_games_are_compared_with_better_ones_before_them(watched: Watched) -> None:
    for _ in range(512):
        watched.guard.add_record(game("win"))
        watched.guard.add_record(game("win", kind="eval"))
    watched.guard.check_update(1, {})
    for _ in range(512):
        watched.guard.add_record(game("loss", opponent=OLDER))
        watched.guard.add_record(game("loss", kind="eval", eval_label="of a quota"))
        watched.guard.add_record(game("loss", end="void"))
    watched.guard.check_update(2, {})
    assert watched.tracker.alarms == [], "games against older checkpoints, with a quota or void say nothing of this"
    for _ in range(512):
        watched.guard.add_record(game("loss", end="invalid", invalid_pids=(0,)))
    for update in range(3, 8):
        watched.guard.check_update(update, {})
    assert [text.partition(": their")[0].split(";")[0] for text in watched.tracker.alarms] == [
        "update 3: decline: training games of E: up to update 3 0.0% of 512 games without an own invalid move "
        "(95 %: 0.0% – 0.7%), but up to update 1 100.0% of 512 games without an own invalid move "
        "(95 %: 99.3% – 100.0%)",
        "update 3: decline: training games of E against scripted:random: up to update 3 0.0% of the points in 512 "
        "games (95 %: 0.0% – 0.7%), but up to update 1 100.0% of the points in 512 games (95 %: 99.3% – 100.0%)",
        "update 7: invalid_moves: 100.0% of the newest 512 training games of E were ended by an own invalid move "
        "(over 90%, 5 times in a row). It usually means: the policy does not know the form of a move, or has lost it. "
        "Try: look at games.jsonl for what it says",
    ]


async def test_a_game_that_one_of_the_policys_own_seats_ended_by_an_invalid_move_counts_whole(watched: Watched) -> None:
    both_seats = game(opponent=POLICY, end="invalid", invalid_pids=(1,))
    seats = tuple(replace(agent, collect_data=True) for agent in both_seats.spec.agent_specs)
    both_seats.spec = replace(both_seats.spec, agent_specs=seats)
    for _ in range(512):
        watched.guard.add_record(both_seats)
    for update in range(1, 6):
        watched.guard.check_update(update, {})
    (told,) = watched.tracker.alarms
    assert "invalid_moves: 100.0% of the newest 512 training games of E were ended by an own invalid move" in told


async def test_games_of_which_none_brings_a_step_starve_the_learner_until_one_does(
    watch: Callable[..., Watched],
) -> None:
    watched = watch(starved={"threshold": 0.05, "action": "stop"})
    watching = asyncio.create_task(watched.guard.watch_for_steps())
    await asyncio.sleep(0.2)
    assert watched.said == [], "no game has ended"
    for record in (game(end="void"), game(end="invalid", invalid_pids=(1,))):
        watched.guard.add_record(record)
        watched.buffer.add_game(record)
    await asyncio.wait_for(watched.stop.wait(), 30)
    assert watched.guard.stopped_by is not None
    assert (
        "although 2 training games ended: 1 void, 1 players left out by run.filter_opponent_invalid, 0 steps "
        "dropped as too stale since the start; 0 steps wait, and a batch is 384"
    ) in watched.guard.stopped_by
    watched.guard.add_record(game())
    watched.buffer.add_game(game())
    while not watched.said[-1].endswith("the learner gets steps again"):
        await asyncio.sleep(0.01)
    watching.cancel()


async def test_steps_that_are_all_dropped_as_stale_do_not_feed_the_learner(watch: Callable[..., Watched]) -> None:
    watched = watch(batch_size=2, starved={"threshold": 0.2, "action": "stop"})
    watched.buffer.max_staleness = 0
    watching = asyncio.create_task(watched.guard.watch_for_steps())
    async with asyncio.timeout(30):
        while not watched.stop.is_set():
            for _ in range(2):
                watched.guard.add_record(game())
                watched.buffer.add_game(game())
            assert not watched.buffer.has_batch(2, 5)
            await asyncio.sleep(0.01)
    assert "steps dropped as too stale since the start" in (watched.guard.stopped_by or "")
    watching.cancel()


async def test_an_env_whose_steps_never_reach_the_learner_is_named(watch: Callable[..., Watched]) -> None:
    watched = watch(starved={"threshold": 0.05})
    (env_id,) = (env.env_id for env in watched.config.train_envs)
    record = game()
    for update in range(1, 4):
        watched.guard.add_record(record)
        watched.buffer.add_game(record)
        watched.guard.check_update(update, {})
        await asyncio.sleep(0.1)
    assert any(f"starved: no step of {env_id} has been trained on" in said for said in watched.said)
    assert "0 trained on and 0 dropped" in " ".join(watched.said)
    watched.buffer.max_staleness = None
    await watched.buffer.get_batch(1, 0)
    watched.guard.check_update(4, {})
    assert "is over" in watched.said[-1]


async def test_a_learner_for_whom_a_batch_waits_does_not_starve(watch: Callable[..., Watched]) -> None:
    watched = watch(batch_size=2, starved={"threshold": 0.05})
    watching = asyncio.create_task(watched.guard.watch_for_steps())
    for record in (game(), game(), game(end="void")):
        watched.guard.add_record(record)
        watched.buffer.add_game(record)
    for _ in range(40):
        await asyncio.sleep(0.01)
        watched.guard.add_record(game(end="void"))
    assert watched.said == []
    await watched.buffer.get_batch(2, 1)
    async with asyncio.timeout(30):
        while not watched.said:
            await asyncio.sleep(0.01)
            watched.guard.add_record(game(end="void"))
    assert "0 steps wait, and a batch is 2" in watched.said[0]
    watching.cancel()


async def test_batches_skipped_in_a_row_stop_the_run(watched: Watched) -> None:
    for in_a_row in range(1, 10):
        watched.guard.check_skipped(in_a_row, "not finite: loss nan")
    assert not watched.stop.is_set()
    watched.guard.check_skipped(10, "not finite: loss nan")
    assert watched.stop.is_set()
    assert "on: skipped" in watched.guard.status()
    watched.guard.check_update(1, {})
    assert "on:" not in watched.guard.status()
    assert watched.guard.stopped_by is not None
    assert "10 batches in a row were skipped, the last because of not finite: loss nan" in watched.guard.stopped_by


async def test_a_batch_is_measured_whether_it_is_of_steps_or_of_trajectories(watched: Watched) -> None:
    steps = game().trajectories[0].steps
    for batch in (steps * 3, [steps * 2, steps]):
        figures = await watched.guard.measure(batch)
        assert figures["batch/num_completions"] == 3
        assert figures["batch/identical_completions"] == 1
