"""A run's reactions to its alarms, with its real tracker and buffer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from unstable_lite.config import Config
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.files import read_part
from unstable_lite.orchestrator.alarms import SAY_EVERY
from unstable_lite.orchestrator.health import TrainingHealth
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.run_directory import PAUSED
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import (
    AgentSpec,
    BranchPoint,
    GameEnd,
    GameKind,
    GameRecord,
    GameSpec,
    Generation,
    ModelRef,
    Outcome,
    PastTurn,
    PlayerTrajectory,
    Sampling,
    Step,
)

POLICY = ModelRef(uid="ckpt-1", kind="checkpoint", adapter_version=1)
OLDER = ModelRef(uid="base", kind="checkpoint", adapter_version=0)
RANDOM = ModelRef(uid="fixed-scripted:random", kind="fixed", name="scripted:random")


class Watched:
    """A guard and its inputs."""

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

    def new_guard(self) -> TrainingHealth:
        return TrainingHealth(self.config, self.directory, self.buffer, self.tracker, self.logged.append, self.stop)

    async def save(self) -> tuple[Path | None, int]:
        return self.directory / "checkpoints" / "ckpt-1", 1


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Callable[..., Watched]]:
    """Yield a function that makes a guard with the given alarms."""
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
    """Return a game with the policy at seat 0."""
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


async def test_warning_is_logged_kept_counted_and_shown_and_the_run_continues(watch: Callable[..., Watched]) -> None:
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
    for update in (3, 4):
        watched.health.check_update(update, WELL)
    assert re.match(r"staleness\b.*\bupdate 2\b", watched.logged[1])
    assert len(watched.tracker.alarms) == 1
    assert "on:" not in watched.health.status()


async def test_lasting_alarm_is_repeated_and_listed_once(watch: Callable[..., Watched]) -> None:
    watched = watch(staleness={"updates": 1})
    for update in range(1, 2 + 2 * SAY_EVERY):
        watched.health.check_update(update, SICK)
    assert ["still on since update 1" in text for text in watched.logged] == [False, True, True]
    (text,) = watched.tracker.alarms
    assert text.startswith("update 1: staleness: ")
    lines = list(read_part(watched.directory / "alarms.jsonl"))
    assert [line["is_repeat"] for line in lines] == [False, True, True]
    assert text == f"update {lines[0]['step']}: {lines[0]['text']}"


async def test_stop_ends_the_run_with_the_reason(watch: Callable[..., Watched]) -> None:
    watched = watch(staleness={"updates": 1, "action": "stop"})
    watched.health.check_update(1, SICK)
    assert watched.stop.is_set()
    assert watched.health.stopped_by is not None
    assert watched.health.stopped_by.startswith("staleness: ")


async def test_pause_lasts_until_its_file_is_deleted_and_starts_no_game(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(staleness={"updates": 1, "action": "pause"})
    await watched.health.pause_if_asked(watched.save)
    assert not watched.logged
    watched.health.check_update(1, SICK)
    pausing = asyncio.create_task(watched.health.pause_if_asked(watched.save))
    while not (tmp_path / PAUSED).exists():
        await asyncio.sleep(0.01)
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


async def test_pause_ends_with_the_run_and_a_stale_one_is_removed(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(staleness={"updates": 1, "action": "pause"})
    watched.health.check_update(1, SICK)
    pausing = asyncio.create_task(watched.health.pause_if_asked(watched.save))
    while not (tmp_path / PAUSED).exists():
        await asyncio.sleep(0.01)
    watched.stop.set()
    await pausing
    assert watched.health.unpaused.is_set()
    assert not (tmp_path / PAUSED).exists()
    (tmp_path / PAUSED).write_text("left by a run killed during a pause")
    watched.new_guard()
    assert not (tmp_path / PAUSED).exists()


async def test_pause_reports_that_the_newest_update_could_not_be_saved(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(staleness={"updates": 1, "action": "pause"})
    saved: list[tuple[Path | None, int]] = [(tmp_path / "checkpoints" / "ckpt-10", 10), (None, 0)]

    async def fail() -> tuple[Path | None, int]:
        return saved.pop(0)

    for newest in (str(saved[0][0]), "no checkpoint"):
        watched.health.asks_for_pause.set()
        watched.health.check_update(12, SICK)
        pausing = asyncio.create_task(watched.health.pause_if_asked(fail))
        while not (tmp_path / PAUSED).exists():
            await asyncio.sleep(0.01)
        sentence = rf"(?i)update 12\b.*\bnot\b.*{re.escape(newest)}"
        assert re.search(sentence, (tmp_path / PAUSED).read_text())
        assert re.search(sentence, watched.logged[-1])
        (tmp_path / PAUSED).unlink()
        await pausing


async def test_run_that_cannot_write_its_pause_file_reports_it_and_continues(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(staleness={"updates": 1, "action": "pause"})
    watched.health.check_update(1, SICK)
    (tmp_path / PAUSED).symlink_to("/dev/full")
    await asyncio.wait_for(watched.health.pause_if_asked(watched.save), 30)
    assert "cannot pause" in watched.tracker.alarms[-1]
    assert "No space left on device" in watched.tracker.alarms[-1]
    assert watched.health.unpaused.is_set()
    assert not watched.health.asks_for_pause.is_set()
    assert not (tmp_path / PAUSED).is_symlink()


async def test_collapse_names_the_best_kept_checkpoint(watched: Watched) -> None:
    for name in ("ckpt-4", "ckpt-10", "ckpt-5-best"):  # the last is a user's copy
        (watched.directory / "checkpoints" / name).mkdir(parents=True)
    watched.health.check_evaluation(evaluation(20, 0))
    watched.health.check_evaluation(evaluation(90, 5))
    assert watched.health.collapsed() == []
    watched.health.check_evaluation(evaluation(10, 10))
    (alarm,) = watched.tracker.alarms
    assert re.search(r"collapse: .*E .*O: ckpt-10 10\.0%.* 100 ", alarm)
    (collapsed,) = watched.health.collapsed()
    assert collapsed.startswith("collapsed: the last policy is worse than the best one: ")
    assert re.search(r"ckpt-5 90\.0%.* 100 ", collapsed)
    assert collapsed.endswith(f"{watched.directory / 'checkpoints' / 'ckpt-4'}")
    (watched.directory / "adapters" / "ckpt-5").mkdir(parents=True)
    assert watched.health.collapsed()[0].endswith(f"{watched.directory / 'adapters' / 'ckpt-5'}")
    watched.health.check_evaluation(evaluation(88, 15))
    assert watched.health.collapsed() == []


async def test_resume_keeps_the_best_result_and_repeats_no_alarm(watched: Watched) -> None:
    watched.tracker.evaluations = [evaluation(90, 5), evaluation(10, 10)]
    watched.health.check_evaluation(watched.tracker.evaluations[0])
    state = json.loads(json.dumps(watched.health.state_dict()))
    resumed = watched.new_guard()
    resumed.load_state_dict(state)
    assert watched.logged == []
    assert resumed.state_dict()["contests"]["evaluation of E against O"]["compared"] == 2
    assert "ckpt-10 10.0%" in resumed.collapsed()[0]
    resumed.check_evaluation(evaluation(12, 15))
    assert watched.logged == []
    assert resumed.check_update(16, {})["alarms/collapse"] == 1


async def test_entropy_is_compared_with_the_first_updates_even_after_resume(watched: Watched) -> None:
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


async def test_training_games_are_compared_with_earlier_better_ones(watched: Watched) -> None:
    for _ in range(512):
        watched.health.add_record(game("win"))
        watched.health.add_record(game("win", kind="eval"))
    watched.health.check_update(1, {})
    for _ in range(512):
        watched.health.add_record(game("loss", opponent=OLDER))
        watched.health.add_record(game("loss", kind="eval", eval_label="of a quota"))
        watched.health.add_record(game("loss", end="void"))
    watched.health.check_update(2, {})
    assert watched.tracker.alarms == [], "games against older checkpoints, of a quota or void do not count"
    for _ in range(512):
        watched.health.add_record(game("loss", end="invalid", invalid_pids=(0,)))
    for update in range(3, 8):
        watched.health.check_update(update, {})
    patterns = (
        r"update 3: decline: .* E: .*update 3 0\.0%.* 512 .*0\.0% – 0\.7%.*update 1 100\.0%.* 512 .*99\.3% – 100\.0%",
        r"update 3: decline: .* E .*scripted:random: .*update 3 0\.0%.* 512 .*update 1 100\.0%.* 512 .*99\.3%",
        r"update 7: invalid_moves: 100\.0%.* 512 .* E .*90%, 5 times",
    )
    for pattern, text in zip(patterns, watched.tracker.alarms, strict=True):
        assert re.match(pattern, text), text
    ends = watched.health.collapsed()
    assert len(ends) == 2 and all(text.startswith("declined: the newest training games, of several") for text in ends)


async def test_games_that_start_within_a_game_raise_no_alarm(watched: Watched) -> None:
    for update, outcome in enumerate(("win", "loss")):
        for _ in range(512):
            record = game(outcome)  # type: ignore[arg-type]
            if outcome == "loss":
                start = BranchPoint(turns=(PastTurn(0, "", "a"),), pid=0, digest="")
                record.spec = replace(record.spec, start=start)
            watched.health.add_record(record)
        watched.health.check_update(update, {})
    assert watched.tracker.alarms == []


async def test_samplings_of_an_eval_env_are_not_compared_with_each_other(watched: Watched) -> None:
    for update, (outcome, sampling) in enumerate((("win", None), ("loss", Sampling(temperature=0.0)))):
        for _ in range(512):
            record = game(outcome, kind="eval")
            record.spec = replace(record.spec, sampling=sampling)
            watched.health.add_record(record)
        watched.health.check_update(update, {})
    assert watched.tracker.alarms == []


async def test_game_ended_by_any_own_seat_counts_whole(watched: Watched) -> None:
    both_seats = game(opponent=POLICY, end="invalid", invalid_pids=(1,))
    seats = tuple(replace(agent, collect_data=True) for agent in both_seats.spec.agent_specs)
    both_seats.spec = replace(both_seats.spec, agent_specs=seats)
    for _ in range(512):
        watched.health.add_record(both_seats)
    for update in range(1, 6):
        watched.health.check_update(update, {})
    (alarm,) = watched.tracker.alarms
    assert re.search(r"invalid_moves: 100\.0%.* 512 .* E ", alarm)


async def test_games_without_steps_starve_the_learner(
    watch: Callable[..., Watched],
) -> None:
    watched = watch(starved={"threshold": 0.05, "action": "stop"})
    watching = asyncio.create_task(watched.health.run())
    await asyncio.sleep(0.2)
    assert watched.logged == [], "no game has ended"
    for record in (game(end="void"), game(end="invalid", invalid_pids=(1,))):
        watched.health.add_record(record)
        watched.buffer.add_game(record)
    await asyncio.wait_for(watched.stop.wait(), 30)
    assert watched.health.stopped_by is not None
    assert re.search(
        r" 2 training games .* 1 void, 1 .*run\.filter_opponent_invalid, 0 .* 384", watched.health.stopped_by
    )
    watched.health.add_record(game())
    watched.buffer.add_game(game())
    while "starved" in watched.health.status():
        await asyncio.sleep(0.01)
    watching.cancel()


async def test_steps_that_are_all_dropped_as_stale_do_not_feed_the_learner(watch: Callable[..., Watched]) -> None:
    watched = watch(batch_size=2, starved={"threshold": 0.2, "action": "stop"})
    watched.buffer.max_staleness = 0
    watching = asyncio.create_task(watched.health.run())
    async with asyncio.timeout(30):
        while not watched.stop.is_set():
            for _ in range(2):
                watched.health.add_record(game())
                watched.buffer.add_game(game())
            assert not watched.buffer.has_batch(2, 5)
            await asyncio.sleep(0.01)
    assert "stale" in (watched.health.stopped_by or "")
    watching.cancel()


async def test_env_whose_steps_never_reach_the_learner_is_named(watch: Callable[..., Watched]) -> None:
    watched = watch(starved={"threshold": 0.05})
    (env_id,) = (env.env_id for env in watched.config.train_envs)
    record = game()
    for update in range(1, 4):
        watched.health.add_record(record)
        watched.buffer.add_game(record)
        watched.health.check_update(update, {})
        await asyncio.sleep(0.1)
    assert any("starved" in text and env_id in text for text in watched.logged)
    assert "0 dropped" in " ".join(watched.logged)
    watched.buffer.max_staleness = None
    await watched.buffer.get_batch(1, 0)
    watched.health.check_update(4, {})
    assert "starved" in watched.logged[-1]


async def test_time_in_a_pause_does_not_starve_an_env(watch: Callable[..., Watched], tmp_path: Path) -> None:
    watched = watch(starved={"threshold": 0.2}, staleness={"updates": 1, "action": "pause"})
    watched.health.add_record(game())
    watched.health.check_update(1, SICK)
    pausing = asyncio.create_task(watched.health.pause_if_asked(watched.save))
    await asyncio.sleep(0.3)
    (tmp_path / PAUSED).unlink()
    await pausing
    watched.health.check_update(2, WELL)
    assert not any("starved" in text for text in watched.logged)


async def test_learner_with_a_waiting_batch_does_not_starve(watch: Callable[..., Watched]) -> None:
    watched = watch(batch_size=2, starved={"threshold": 0.05})
    watching = asyncio.create_task(watched.health.run())
    for record in (game(), game(), game(end="void")):
        watched.health.add_record(record)
        watched.buffer.add_game(record)
    for _ in range(40):
        await asyncio.sleep(0.01)
        watched.health.add_record(game(end="void"))
    assert watched.logged == []
    await watched.buffer.get_batch(2, 1)
    async with asyncio.timeout(30):
        while not watched.logged:
            await asyncio.sleep(0.01)
            watched.health.add_record(game(end="void"))
    assert re.search(r"\b0 steps\b.* 2\b", watched.logged[0])
    watching.cancel()


async def test_batches_skipped_in_a_row_stop_the_run(watched: Watched) -> None:
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


async def test_batches_of_steps_and_of_trajectories_are_measured(watched: Watched) -> None:
    steps = game().trajectories[0].steps
    for batch in (steps * 3, [steps * 2, steps]):
        metrics = await watched.health.measure(batch)
        assert metrics["batch/num_completions"] == 3
        assert metrics["batch/identical_completions"] == 1
