"""Means over the newest games of a player, or over its newest turns."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any

from unstable_lite.tracking.diversity import digests
from unstable_lite.tracking.evaluations import POINTS
from unstable_lite.types import GameRecord, PlayerTrajectory

WINDOW = 512
"""Window of the means of collection and evaluation, in games of a player or in turns (as in the reference)."""

Entries = dict[str, dict[str, list[float]]]
"""Values by sample size (`n`, `n (turns)`, …) and by metric name."""


class GameWindows:
    """Windows by group, by sample size and by metric name."""

    def __init__(self) -> None:
        self._windows: dict[str, dict[str, dict[str, deque[float]]]] = defaultdict(lambda: defaultdict(_new_windows))
        self._games_of: dict[str, int] = defaultdict(int)

    def add(self, group: str, entries: Entries) -> None:
        """Add the values of one player's game."""
        self._games_of[group] += 1
        for count, by_name in entries.items():
            for name, values in by_name.items():
                self._windows[group][count][name].extend(values)

    def metrics(self) -> dict[str, float]:
        """Return every window's mean, every group's sample sizes, and its number of games since the start."""
        metrics: dict[str, float] = {}
        for group, by_count in self._windows.items():
            for count, windows in by_count.items():
                for name, window in windows.items():
                    metrics[f"{group}/{name}"] = sum(window) / len(window)
                if windows:  # no turn yet if an opponent's first move ended every game
                    metrics[f"{group}/{count}"] = max(map(len, windows.values()))
        return metrics | {f"{group}/step": games for group, games in self._games_of.items()}

    def mean(self, prefix: str, count: str, name: str) -> float | None:
        """Return one metric's mean over all groups that begin with `prefix`; None if there is no value."""
        windows = [by_count[count] for group, by_count in self._windows.items() if group.startswith(prefix)]
        values = [value for window in windows for value in window.get(name, ())]
        return sum(values) / len(values) if values else None

    def state_dict(self) -> dict[str, Any]:
        windows = {
            group: {
                count: {name: list(window) for name, window in by_name.items()} for count, by_name in counts.items()
            }
            for group, counts in self._windows.items()
        }
        return {"windows": windows, "games_of": dict(self._games_of)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for group, by_count in state["windows"].items():
            for count, windows in by_count.items():
                for name, values in windows.items():
                    self._windows[group][count][name].extend(values)
        self._games_of.update(state["games_of"])


@dataclass(slots=True)
class Collected:
    """Values that one player's training game adds to the windows, without the game."""

    env_id: str
    entries: Entries
    states: tuple[int, ...]
    actions: tuple[int, ...]
    """Digests of the player's actions; `states` has those of its observations."""


def collect(record: GameRecord, trajectory: PlayerTrajectory) -> Collected:
    """Return one player's entries of a training game."""
    pid = trajectory.pid
    entries = _no_entries()
    _add_outcome(entries, record, pid, "Draw")
    of_turns = entries["n (turns)"]
    steps, turns = trajectory.steps, [turn for turn in record.turns if turn.pid == pid]
    tokens, seconds = [len(step.generation.completion_ids) for step in steps], [turn.seconds for turn in turns]
    if steps:
        of_turns["Respone Length (char)"].extend([len(step.act) for step in steps])
        of_turns["Response Length (token)"].extend(tokens)
        of_turns["Observation Length (char)"].extend([len(step.obs) for step in steps])
        for name in steps[0].format_feedback:
            of_turns[f"Format Success Rate - {name}"].extend([step.format_feedback[name] for step in steps])
        of_turns["Cut Off Rate"].extend([turn.is_cut_off for turn in turns])
        of_turns["Time per Turn (s)"].extend(seconds)
    if num_tokens := sum(tokens):
        entries["n (answered)"]["Time per Token (s)"].append(sum(seconds) / num_tokens)
    states, actions = (digests(getattr(turn, name) for turn in turns) for name in ("observation", "action"))
    return Collected(record.spec.env_id, entries, states, actions)


def evaluated(record: GameRecord, pid: int) -> Entries:
    """Return one player's entries of an evaluation game."""
    entries = _no_entries()
    _add_outcome(entries, record, pid, "Draw Rate")
    of_turns = entries["n (turns)"]
    for turn in record.turns:
        if turn.pid == pid:
            of_turns["Response Length (char)"].append(len(turn.text))
            of_turns["Format Success Rate - correct_answer_format"].append(turn.format_ok)
            of_turns["Cut Off Rate"].append(turn.is_cut_off)
            of_turns["Time per Turn (s)"].append(turn.seconds)
    return entries


def _add_outcome(
    into: Mapping[str, Mapping[str, MutableSequence[float]]], record: GameRecord, pid: int, draw_name: str
) -> None:
    """Add the result of one player's game, in training or evaluation, to `into` by sample size and metric name."""
    of_games, of_seat = into["n"], into[f"n (pid={pid})"]
    of_games["reward" if record.spec.kind == "train" else "Reward"].append(record.rewards[pid])
    of_seat[f"Reward (pid={pid})"].append(record.rewards[pid])
    outcome = record.outcomes[pid]
    if outcome != "na":
        of_games["Points"].append(POINTS[outcome])
        of_games["Win Rate"].append(outcome == "win")
        of_games["Loss Rate"].append(outcome == "loss")
        of_games[draw_name].append(outcome == "draw")
        of_seat[f"Win Rate (pid={pid})"].append(outcome == "win")
    own_invalid = pid in record.invalid_pids
    of_games["Ended by own invalid move"].append(own_invalid)
    of_games["Ended by others' invalid move"].append(record.end == "invalid" and not own_invalid)
    of_games["Truncated"].append(record.end == "truncated")
    of_games["Game Length"].append(len(record.turns))
    of_games["Time per Game (s)"].append(record.seconds)


def _no_entries() -> Entries:
    return defaultdict(lambda: defaultdict(list))


def _new_windows() -> dict[str, deque[float]]:
    return defaultdict(lambda: deque(maxlen=WINDOW))
