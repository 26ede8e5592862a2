"""Means over the newest games of a player, or over its newest turns."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unstable_lite.tracking.diversity import digests
from unstable_lite.tracking.evaluations import POINTS
from unstable_lite.types import GameRecord, PlayerTrajectory, Turn

WINDOW = 512
"""Window of the means of collection and evaluation, in games of a player or in turns (as in the reference)."""

Entries = dict[tuple[str, str], list[float]]
"""Values by sample size (`n`, `n (turns)`, …) and metric name."""


class GameWindows:
    """Windows by group, sample size and metric name."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str, str], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._games_of: Counter[str] = Counter()

    def add(self, group: str, entries: Entries) -> None:
        """Add the values of one player's game."""
        self._games_of[group] += 1
        for (count, name), values in entries.items():
            self._windows[group, count, name].extend(values)

    def metrics(self) -> dict[str, float]:
        """Return every window's mean, every group's sample sizes, and its number of games since the start."""
        metrics: dict[str, float] = {}
        for (group, count, name), window in self._windows.items():
            metrics[f"{group}/{name}"] = sum(window) / len(window)
            metrics[f"{group}/{count}"] = max(metrics.get(f"{group}/{count}", 0), len(window))
        return metrics | {f"{group}/step": games for group, games in self._games_of.items()}

    def mean(self, prefix: str, count: str, name: str) -> float | None:
        """Return one metric's mean over all groups that begin with `prefix`; None if there is no value."""
        values = [
            value
            for (group, *metric), window in self._windows.items()
            if group.startswith(prefix) and metric == [count, name]
            for value in window
        ]
        return sum(values) / len(values) if values else None

    def state_dict(self) -> dict[str, Any]:
        windows = [[*key, list(window)] for key, window in self._windows.items()]
        return {"windows": windows, "games_of": dict(self._games_of)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for group, count, name, values in state["windows"]:
            self._windows[group, count, name].extend(values)
        self._games_of = Counter(state["games_of"])


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
    entries = _outcome(record, pid, "Draw")
    steps, turns = trajectory.steps, [turn for turn in record.turns if turn.pid == pid]
    tokens: list[float] = [len(step.generation.completion_ids) for step in steps]
    seconds = [turn.seconds for turn in turns]
    if steps:
        entries |= {
            ("n (turns)", "Respone Length (char)"): [len(step.act) for step in steps],
            ("n (turns)", "Response Length (token)"): tokens,
            ("n (turns)", "Observation Length (char)"): [len(step.obs) for step in steps],
            ("n (turns)", "Cut Off Rate"): [turn.is_cut_off for turn in turns],
            ("n (turns)", "Thinking Cut Rate"): [is_thinking_cut(turn) for turn in turns],
            ("n (turns)", "Time per Turn (s)"): seconds,
        }
        for name in steps[0].format_feedback:
            entries["n (turns)", f"Format Success Rate - {name}"] = [step.format_feedback[name] for step in steps]
    if num_tokens := sum(tokens):
        versions = {step.generation.adapter_version for step in steps}
        entries |= {
            ("n (answered)", "Time per Token (s)"): [sum(seconds) / num_tokens],
            ("n (answered)", "Adapter Versions"): [len(versions)],
        }
    states, actions = (digests(getattr(turn, name) for turn in turns) for name in ("observation", "action"))
    return Collected(record.spec.env_id, entries, states, actions)


def evaluated(record: GameRecord, pid: int) -> Entries:
    """Return one player's entries of an evaluation game."""
    entries = _outcome(record, pid, "Draw Rate")
    if turns := [turn for turn in record.turns if turn.pid == pid]:
        entries |= {
            ("n (turns)", "Response Length (char)"): [len(turn.text) for turn in turns],
            ("n (turns)", "Format Success Rate - correct_answer_format"): [turn.format_ok for turn in turns],
            ("n (turns)", "Cut Off Rate"): [turn.is_cut_off for turn in turns],
            ("n (turns)", "Thinking Cut Rate"): [is_thinking_cut(turn) for turn in turns],
            ("n (turns)", "Time per Turn (s)"): [turn.seconds for turn in turns],
        }
    return entries


def is_thinking_cut(turn: Turn) -> bool:
    """Return whether the budget for thinking ended the thinking of an engine's answer."""
    return turn.generation is not None and turn.generation.forced is not None


def _outcome(record: GameRecord, pid: int, draw_name: str) -> Entries:
    """Return the result of one player's game, in training or evaluation."""
    own_invalid, outcome = pid in record.invalid_pids, record.outcomes[pid]
    of_seat, reward = f"n (pid={pid})", record.reward_shown(pid)
    entries: dict[tuple[str, str], float] = {
        ("n", "reward" if record.spec.kind == "train" else "Reward"): reward,
        (of_seat, f"Reward (pid={pid})"): reward,
        ("n", "Ended by own invalid move"): own_invalid,
        ("n", "Ended by others' invalid move"): record.end == "invalid" and not own_invalid,
        ("n", "Truncated"): record.end == "truncated",
        ("n", "Game Length"): len(record.turns),
        ("n", "Time per Game (s)"): record.seconds,
    }
    if outcome != "na":
        entries |= {
            ("n", "Points"): POINTS[outcome],
            ("n", "Win Rate"): outcome == "win",
            ("n", "Loss Rate"): outcome == "loss",
            ("n", draw_name): outcome == "draw",
            (of_seat, f"Win Rate (pid={pid})"): outcome == "win",
        }
    return {key: [value] for key, value in entries.items()}
