"""What happened, as numbers: windows over games, one line of metrics per update, every evaluation with its interval.

Metric names follow the reference (`trackers.py`); every group of means has its `n`. Sinks receive finished numbers and
know nothing of games.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from unstable_lite.types import GameRecord, ModelRef, PlayerTrajectory

WINDOW = 512
"""Games over which the means of collection and evaluation run (reference)."""


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A quota of games of one model on one env against one opponent."""

    label: str
    model: str
    step: int
    env_id: str
    opponent: str
    n: int
    """Games that count; void ones do not."""
    wins: int
    draws: int
    losses: int
    invalid: int
    """Games that the model ended by an invalid move of its own."""
    void: int
    mean_reward: float

    @property
    def win_rate(self) -> float:
        return self.wins / self.n if self.n else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson score interval of the win rate."""
        return wilson_interval(self.wins, self.n)

    def describe(self) -> str:
        low, high = self.interval
        return (
            f"{self.model} won {self.win_rate:.1%} of {self.n} games of {self.env_id} against {self.opponent} "
            f"(95 %: {low:.1%} – {high:.1%}); {self.invalid} ended by its own invalid move"
        )


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson (1927): an interval for a proportion that stays within [0, 1]; all of it where n is 0."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise_evaluation(
    label: str, step: int, model: ModelRef, env_id: str, opponent: str, records: Sequence[GameRecord]
) -> Evaluation:
    """Count what one model did in `records`, from the seats it sat at."""
    whole = [record for record in records if record.end != "void"]
    seats = [
        (record, agent.pid) for record in whole for agent in record.spec.agent_specs if agent.model.uid == model.uid
    ]
    outcomes = [record.outcomes[pid] for record, pid in seats]
    rewards = [record.rewards[pid] for record, pid in seats]
    return Evaluation(
        label=label,
        model=model.uid,
        step=step,
        env_id=env_id,
        opponent=opponent,
        n=len(seats),
        wins=outcomes.count("win"),
        draws=outcomes.count("draw"),
        losses=outcomes.count("loss"),
        invalid=sum(pid in record.invalid_pids for record, pid in seats),
        void=len(records) - len(whole),
        mean_reward=sum(rewards) / len(rewards) if rewards else math.nan,
    )


class Tracker:
    def __init__(self, run_directory: Path, sinks: Sequence[Sink], keep_games: Literal["all", "eval", "none"]) -> None:
        self.evaluations: list[Evaluation] = []
        self.games_finished = 0
        self.void_games = 0
        self.alarms: list[str] = []
        self.latest: dict[str, float] = {}
        """The newest value of every metric."""
        self._sinks = list(sinks)
        self._keep_games = keep_games
        self._games_file = (run_directory / "games.jsonl").open("a", encoding="utf-8")
        self._eval_file = (run_directory / "eval.jsonl").open("a", encoding="utf-8")
        self._windows: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        """By group and name."""
        self._games_of: dict[str, int] = defaultdict(int)
        self._started = time.monotonic()

    def add_record(self, record: GameRecord) -> None:
        """Count a finished game and keep its transcript."""
        self.games_finished += 1
        if record.end == "void":
            self.void_games += 1
        elif record.spec.kind == "train":
            for trajectory in record.trajectories:
                self._add_collected(record, trajectory)
        else:
            self._add_evaluated(record)
        if self._keep_games == "all" or self._keep_games == record.spec.kind:
            self._games_file.write(json.dumps(record_to_json(record), ensure_ascii=False) + "\n")

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        low, high = evaluation.interval
        row = {**asdict(evaluation), "win_rate": evaluation.win_rate, "interval": [low, high]}
        self._eval_file.write(json.dumps(row) + "\n")
        self._eval_file.flush()
        group = f"evaluation-{evaluation.env_id} ({evaluation.opponent})/checkpoint"
        n = max(evaluation.n, 1)
        metrics = {
            f"{group} Win Rate": evaluation.win_rate,
            f"{group} Win Rate low": low,
            f"{group} Win Rate high": high,
            f"{group} Invalid Rate": evaluation.invalid / n,
            f"{group} n": evaluation.n,
        }
        self._send(evaluation.step, metrics)

    def alarm(self, step: int, text: str) -> None:
        self.alarms.append(f"update {step}: {text}")

    def log_update(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of everything: `metrics` of this update, and the windows over games."""
        everything = dict(metrics)
        for (group, name), window in self._windows.items():
            everything[f"{group}/{name}"] = sum(window) / len(window)
        for group, games in self._games_of.items():
            everything[f"{group}/step"] = games
            everything[f"{group}/n"] = min(games, WINDOW)
        everything["run/seconds"] = time.monotonic() - self._started
        everything["run/games"] = self.games_finished
        everything["run/void_games"] = self.void_games
        everything["run/alarms"] = len(self.alarms)
        self._send(step, everything)
        self._games_file.flush()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._games_file.close()
        self._eval_file.close()

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        self.latest.update(metrics)
        for sink in self._sinks:
            sink.log(step, metrics)

    def _add_collected(self, record: GameRecord, trajectory: PlayerTrajectory) -> None:
        group = f"collection-{record.spec.env_id}"
        self._games_of[group] += 1
        self._add_outcome(group, record, trajectory.pid, "Draw")
        for step in trajectory.steps:
            self._add(group, "Respone Length (char)", len(step.act))
            self._add(group, "Response Length (token)", len(step.generation.completion_ids))
            self._add(group, "Observation Length (char)", len(step.obs))
            for name, value in step.format_feedback.items():
                self._add(group, f"Format Success Rate - {name}", value)
        self._add(group, "Game Length", trajectory.num_turns)
        self._add(group, "Ended by own invalid move", trajectory.pid in record.invalid_pids)
        own_invalid = trajectory.pid in record.invalid_pids
        self._add(group, "Ended by others' invalid move", bool(record.invalid_pids) and not own_invalid)
        self._add(group, "Truncated", record.end == "truncated")

    def _add_evaluated(self, record: GameRecord) -> None:
        opponents = [agent.model.name for agent in record.spec.agent_specs if agent.model.kind == "fixed"]
        group = f"evaluation-{record.spec.env_id} ({opponents[0] if opponents else 'none'})"
        self._games_of[group] += 1
        for agent in record.spec.agent_specs:
            if agent.model.kind == "checkpoint":
                self._add_outcome(group, record, agent.pid, "Draw Rate")

    def _add_outcome(self, group: str, record: GameRecord, pid: int, draw_name: str) -> None:
        reward_name = "reward" if record.spec.kind == "train" else "Reward"
        self._add(group, reward_name, record.rewards[pid])
        self._add(group, f"Reward (pid={pid})", record.rewards[pid])
        outcome = record.outcomes[pid]
        if outcome != "na":
            self._add(group, "Win Rate", outcome == "win")
            self._add(group, "Loss Rate", outcome == "loss")
            self._add(group, draw_name, outcome == "draw")

    def _add(self, group: str, name: str, value: float) -> None:
        self._windows[group, name].append(value)


def record_to_json(record: GameRecord) -> dict[str, Any]:
    """A GameRecord as one line of games.jsonl: what a person would read, and what replays the game."""
    spec = record.spec
    return {
        "game_idx": spec.game_idx,
        "kind": spec.kind,
        "env_id": spec.env_id,
        "seed": spec.seed,
        "eval_label": spec.eval_label,
        "agents": [
            {"pid": agent.pid, "model": agent.model.uid, "collect_data": agent.collect_data}
            for agent in spec.agent_specs
        ],
        "turns": [[turn.pid, turn.observation, turn.text, turn.action, turn.format_ok] for turn in record.turns],
        "rewards": record.rewards,
        "outcomes": record.outcomes,
        "end": record.end,
        "invalid_pids": record.invalid_pids,
        "error": record.error,
        "seconds": round(record.seconds, 4),
    }
