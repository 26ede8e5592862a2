"""Measures of play, by policy: means over the newest games or turns, diversity of a window, repetition in a batch.

Adding a game only hashes its texts; the metrics of diversity are computed once per update, over a window with limits on
trajectories and turns.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from unstable_lite.config.games import is_policy, opponent_shown
from unstable_lite.tracking.displayed_metrics import of_policy
from unstable_lite.tracking.evaluations import POINTS
from unstable_lite.types import BUDGET_SPENT, GameRecord, PlayerTrajectory, Step, Turn

WINDOW = 512
"""Window of the means of collection and evaluation, in games of a player or in turns (as in the reference)."""

Entries = dict[tuple[str, str], list[float]]
"""Values by sample size (`n`, `n (turns)`, …) and metric name."""

Judged = tuple[str, int, str, str, Any]
SCORED, VALID, ENDED = "points", "without an own invalid move", "reasons"
"""Kinds of windows that alarms judge: points in games against one fixed opponent, and of whole games by env."""


class GameWindows:
    """Windows of one policy by group, sample size and metric name, those that alarms judge, and diversity by env.

    The windows of policy "" also hold those of the named policies, and the ends of all games.
    """

    def __init__(self) -> None:
        self.policies: dict[str, GameWindows] = {}
        """Windows of the policies with a name."""
        self.judged: dict[tuple[str, str], deque[Any]] = defaultdict(lambda: deque(maxlen=WINDOW))
        """Newest values by kind and games; those of kind `ENDED` are pairs, see `judged_by_alarms`."""
        self.first_version = 0
        """First adapter of the policy's lineage. Games of earlier ones are not judged."""
        self._windows: dict[tuple[str, str, str], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._games_of: Counter[str] = Counter()
        self._diversity: dict[str, Diversity] = defaultdict(lambda: Diversity(WINDOW))

    def of(self, policy: str) -> GameWindows:
        """Return the windows of one policy, new ones for a new name."""
        return self.policies.setdefault(policy, GameWindows()) if policy else self

    def add_collected(self, one: Collected) -> None:
        """Add one player's training game."""
        self.add(f"collection-{one.env_id}", one.entries)
        self._diversity[one.env_id].append(one.states, one.actions)

    def add(self, group: str, entries: Entries) -> None:
        """Add the values of one player's game."""
        self._games_of[group] += 1
        for (count, name), values in entries.items():
            self._windows[group, count, name].extend(values)

    def metrics(self) -> dict[str, float]:
        """Return every window's mean, every group's sample sizes and games since the start, and diversity."""
        metrics: dict[str, float] = {}
        for (group, count, name), window in self._windows.items():
            metrics[f"{group}/{name}"] = sum(window) / len(window)
            metrics[f"{group}/{count}"] = max(metrics.get(f"{group}/{count}", 0), len(window))
        metrics |= {f"{group}/step": games for group, games in self._games_of.items()}
        for env_id, diversity in self._diversity.items():
            metrics |= {f"exploration/{env_id}/{name}": value for name, value in diversity.metrics().items()}
        of_others = (of_policy(policy, windows.metrics()) for policy, windows in self.policies.items())
        return metrics | {name: value for of_one in of_others for name, value in of_one.items()}

    def state_dict(self) -> dict[str, Any]:
        windows = [[*key, list(window)] for key, window in self._windows.items()]
        judged = [[*key, list(window)] for key, window in self.judged.items()]
        diversity = {env_id: diversity.state_dict() for env_id, diversity in self._diversity.items()}
        policies = {policy: windows_of.state_dict() for policy, windows_of in self.policies.items()}
        state = {"windows": windows, "games_of": dict(self._games_of), "judged": judged, "diversity": diversity}
        begun = {"first_version": self.first_version} if self.first_version else {}
        return state | begun | ({"policies": policies} if policies else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for group, count, name, values in state["windows"]:
            self._windows[group, count, name].extend(values)
        self._games_of = Counter(state["games_of"])
        self.first_version = state.get("first_version", 0)
        for kind, games, values in state.get("judged", ()):
            self.judged[kind, games].extend(values)
        for env_id, diversity in state["diversity"].items():
            self._diversity[env_id].load_state_dict(diversity)
        for policy, of_one in state.get("policies", {}).items():
            self.of(policy).load_state_dict(of_one)


def judged_by_alarms(record: GameRecord) -> Iterator[Judged]:
    """Yield policy, its adapter, kind of window, games, and the value of a finished game.

    Games against another policy give no points. The end, which counts for the run, has the reason (empty for a stop),
    and the fewest tokens of an answer that was cut off, if one was.
    """
    spec = record.spec
    cut = [len(t.generation.completion_ids) for t in record.turns if t.is_cut_off and t.generation is not None]
    yield "", 0, ENDED, spec.env_id, ["" if record.reason == BUDGET_SPENT else record.reason, min(cut, default=None)]
    if record.end == "void" or spec.eval_label is not None or spec.start is not None:
        return
    is_training = spec.kind == "train"
    trained = (a for a in spec.agent_specs if (a.collect_data if is_training else a.model.name is None))
    own = {a.pid: (a.model.policy, a.model.adapter_version or 0) for a in trained}
    others = {a.model.name for a in spec.agent_specs if a.pid not in own}
    opponent = others.pop() if len(others) == 1 else None
    if is_training:
        for of_seats in dict.fromkeys(own.values()) or (("", 0),):
            yield *of_seats, VALID, spec.env_id, float(of_seats not in map(own.get, record.invalid_pids))
    if opponent is None or is_policy(opponent):
        return
    for pid, of_seat in own.items():
        if record.outcomes[pid] != "na":
            games = f"{'training' if is_training else 'evaluation'} games of {spec.env_id} against "
            yield *of_seat, SCORED, games + opponent_shown(opponent, spec.sampling), POINTS[record.outcomes[pid]]


@dataclass(slots=True)
class Collected:
    """Values that one player's training game adds to the windows, without the game."""

    policy: str
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
    return Collected(trajectory.model.policy, record.spec.env_id, entries, states, actions)


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


GRAMS = (1, 2, 3, 4)
MAX_TURNS = 16_384
"""Limit of the turns in a window, so that each metric takes at most a few milliseconds."""


class Diversity:
    """Newest `window` trajectories of one env: the states and actions of one collected player in one game each."""

    def __init__(self, window: int, max_turns: int = MAX_TURNS) -> None:
        self._trajectories: deque[tuple[tuple[int, ...], tuple[int, ...]]] = deque()
        """Hashes of states and of actions."""
        self._window = window
        self._max_turns = max_turns
        self._num_turns = 0

    def append(self, states: tuple[int, ...], actions: tuple[int, ...]) -> None:
        """Add a trajectory, given the digests of its states and of its actions."""
        self._trajectories.append((states, actions))
        self._num_turns += len(actions)
        while len(self._trajectories) > self._window or self._num_turns > self._max_turns:
            self._num_turns -= len(self._trajectories.popleft()[1])

    def state_dict(self) -> list[Any]:
        return [[list(states), list(actions)] for states, actions in self._trajectories]

    def load_state_dict(self, state: list[Any]) -> None:
        for states, actions in state:
            self.append(tuple(states), tuple(actions))

    def metrics(self) -> dict[str, float]:
        """Return shares between 0 and 1, entropies in nats, and the numbers of trajectories and turns."""
        all_states, all_actions = zip(*self._trajectories, strict=True) if self._trajectories else ((), ())
        num_trajectories, num_turns = len(self._trajectories), self._num_turns
        states, actions = Counter(chain.from_iterable(all_states)), Counter(chain.from_iterable(all_actions))
        of_turn = Counter(chain.from_iterable(map(range, map(len, all_actions))))
        at_turn: Counter[Hashable] = Counter(chain.from_iterable(map(enumerate, all_actions)))
        own_entropy = sum(entropy(Counter(actions).values(), len(actions)) for actions in all_actions)
        metrics: dict[str, float] = {}
        for n in GRAMS:
            shifted = ((actions[start:] for start in range(n)) for actions in all_actions)
            if grams := [gram for of_game in shifted for gram in zip(*of_game, strict=False)]:
                metrics[f"Pct. Unique Action {n}-gram"] = len(set(grams)) / len(grams)
        return metrics | {
            "Unique Actions": len(actions),
            "Unique States": len(states),
            "Unique Trajectories": len(set(all_actions)),
            "Action Entropy": entropy(actions.values(), num_turns),
            "State Entropy": entropy(states.values(), num_turns),
            # H(action | turn) = H(action, turn) - H(turn): uncertainty of an action given the number of its turn.
            "Action Entropy (per turn)": entropy(at_turn.values(), num_turns) - entropy(of_turn.values(), num_turns),
            "Action Entropy (trajectory)": own_entropy / max(num_trajectories, 1),
            "n": num_trajectories,
            "n (turns)": num_turns,
        }


def digests(texts: Iterable[str]) -> tuple[int, ...]:
    """Return digests that, unlike `hash`, are the same in every process, because the window survives a resume.

    Two texts of equal length and checksum count as one; this happens in about one of thirty full windows.
    """
    return tuple(len(text) << 32 | zlib.crc32(text.encode("utf-8", "surrogatepass")) for text in texts)


def entropy(counts: Iterable[int], total: int) -> float:
    """Return -Σ p log p of counts; equal counts are taken together, because there are few different ones."""
    return -sum(times * count / total * math.log(count / total) for count, times in Counter(counts).items())


GRAM = 4
_BYTES = 4
"""Bytes per token id."""


def repetition(steps: Iterable[Step]) -> dict[str, float]:
    """Return shares between 0 and 1 and their denominators; a share is 0 if its denominator is 0.

    `repeated_4grams`: share of 4-grams that occurred earlier in the same completion (Welleck et al. 2020,
    arXiv:1908.04319: seq-rep-4, over all completions together). `identical_completions`: share of the most common
    completion.
    """
    completions = [step.generation.completion_ids.astype("<i4").tobytes() for step in steps]
    num_grams = num_distinct = 0
    for ids in completions:
        own = [ids[start : start + GRAM * _BYTES] for start in range(0, len(ids) - (GRAM - 1) * _BYTES, _BYTES)]
        num_grams += len(own)
        num_distinct += len(set(own))
    commonest = max(Counter(completions).values(), default=0)
    return {
        "repeated_4grams": (num_grams - num_distinct) / max(num_grams, 1),
        "num_4grams": num_grams,
        "identical_completions": commonest / max(len(completions), 1),
        "num_completions": len(completions),
    }
