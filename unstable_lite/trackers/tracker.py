"""What happened, as numbers: windows over games, one line of metrics per update, every evaluation with its interval.

Metric names follow the reference (`trackers.py`). Every mean has the number that it is of, in its own group: `n` where
a player's game is the entry, `n (turns)` where a turn is, `n (pid=k)` for one seat, `n (answered)` for games in which
the player sampled a token at all. Sinks receive finished numbers and know nothing of games.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, Protocol, runtime_checkable

from unstable_lite.config import TrackerConfig
from unstable_lite.games.players.optimal import is_optimal
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.trackers.diversity import Diversity, digests
from unstable_lite.trackers.in_order import InOrder
from unstable_lite.trackers.league_log import LeagueLog
from unstable_lite.trackers.records import AppendFile, RecordLog, to_line
from unstable_lite.trackers.train_data import Batch, TrainDataFiles
from unstable_lite.trackers.transcripts import transcript
from unstable_lite.types import GameRecord, GameSpec, Histogram, Logprobs, ModelRef, Outcome, PlayerTrajectory, Turn

WINDOW = 512
"""Entries over which the means of collection and evaluation run (reference): a player's games, or their turns."""
INTERFACE_MEANS = (
    ("n", "Game Length"),
    ("n (turns)", "Format Success Rate - correct_answer_format"),
    ("n (turns)", "Format Success Rate - invalid_move"),
)
"""What `get_interface_info` averages over all training envs, and what is counted there."""
Z_95 = 1.96
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t of two-sided 95 % by degrees of freedom, from 1 on (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""
POINTS: dict[Outcome, float] = {"win": 1.0, "draw": 0.5, "loss": 0.0}
"""What a game of several players is worth to one of them."""


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class RichSink(Sink, Protocol):
    """One that can show more than numbers."""

    def log_histograms(self, step: int, histograms: Sequence[Histogram]) -> None: ...

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Texts by name, as they are: whoever shows them sees that nothing in them becomes markup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one model did on one env against one opponent."""

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
    """`wins`, `draws` and `losses` make up `n`, except where there is one player: then they are 0."""
    invalid: int
    """Games that the model ended by an invalid move of its own."""
    void: int
    mean_reward: float
    reward_std: float
    """Of one game's reward."""
    choices: int = 0
    """Moves of the model where some legal move is worse than the best; 0 for a game without `scripted:optimal`."""
    optimal: int = 0
    """Number of those moves that are optimal. An illegal move is not optimal."""
    optimal_interval: tuple[float, float] = (0.0, 1.0)
    """95 % interval of their share; the moves of one game are not independent."""
    scores: tuple[tuple[float | None, ...], ...] = ()
    """Of an evaluation with a quota: by seed, what the model got from each seat in points, or in reward if nobody can
    win; None for a void game."""

    @property
    def win_rate(self) -> float:
        """Not a number where nobody can win: before the first game, and in single-player envs."""
        decided = self.wins + self.draws + self.losses
        return self.wins / decided if decided else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson score interval of the win rate."""
        return wilson_interval(self.wins, self.wins + self.draws + self.losses)

    @property
    def points(self) -> float:
        """Mean of 1 for a win, 1/2 for a draw and 0 for a loss; not a number if nobody can win."""
        decided = self.wins + self.draws + self.losses
        return (self.wins + self.draws / 2) / decided if decided else math.nan

    @property
    def points_interval(self) -> tuple[float, float]:
        """95 % score interval of the points."""
        return points_interval(self.wins, self.draws, self.losses)

    @property
    def reward_interval(self) -> tuple[float, float]:
        """95 % interval of the mean reward, by the normal approximation; no numbers where all rewards are alike, since
        they have no spread to tell one from.
        """
        if not self.reward_std > 0:
            return math.nan, math.nan
        return mean_interval(self.mean_reward, self.reward_std, self.n)

    @property
    def optimal_share(self) -> float:
        """Share of best moves; not a number without a choice."""
        return self.optimal / self.choices if self.choices else math.nan

    @property
    def own_invalid(self) -> str:
        """How many of its games it ended by an invalid move, and which share they are, where there is any."""
        return f"{self.invalid}" + (f" ({self.invalid / self.n:.1%})" if self.n else "")

    def describe(self) -> str:
        if not self.n:
            return f"{self.model} has no result in {self.env_id}: all of its {self.void} games are void"
        invalid = f"{self.invalid} ended by its own invalid move" + f"; {self.void} void" * bool(self.void)
        if not math.isfinite(self.win_rate):
            low, high = self.reward_interval
            return (
                f"{self.model} had a mean reward of {self.mean_reward:.3f} in {self.n} games of {self.env_id}"
                + f" (95 %: {low:.3f} – {high:.3f})" * math.isfinite(low)
                + f"; {invalid}"
            )
        low, high = self.points_interval
        return (
            f"{self.model} scored {self.points:.1%} of the points in {self.n} games of {self.env_id} against "
            f"{self.opponent} (95 %: {low:.1%} – {high:.1%}): {self.wins} won, {self.draws} drawn; {invalid}"
        )

    def describe_change(self, before: Evaluation) -> str | None:
        """Return how it differs from an earlier evaluation of the same env and opponent; None without common seeds."""
        if (gained := paired_difference(before.scores, self.scores)) is None:
            return None
        mean, low, high = gained.mean, gained.low, gained.high
        if math.isfinite(self.points):
            figures = f"{100 * mean:+.1f} points (95 %: {100 * low:+.1f} to {100 * high:+.1f})"
        else:
            figures = f"{mean:+.3f} in mean reward (95 %: {low:+.3f} to {high:+.3f})"
        return f"change since {before.label}: {figures}, of {gained.seeds} seeds that both played"

    def to_json(self) -> dict[str, Any]:
        """A line of eval.jsonl; what is not a number is null."""
        figures = {**asdict(self), "win_rate": self.win_rate, "points": self.points}
        plain = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in figures.items()}
        reward_interval = [x if math.isfinite(x) else None for x in self.reward_interval]
        return plain | {
            "interval": list(self.interval),
            "points_interval": list(self.points_interval),
            "reward_interval": reward_interval,
        }


@dataclass(slots=True)
class _Collected:
    """What one player's training game adds to the windows, without the game."""

    env_id: str
    entries: dict[str, dict[str, list[float]]]
    """By what is counted, by name, as the windows are."""
    states: tuple[int, ...]
    actions: tuple[int, ...]
    """Digests of what the player saw and did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A mean difference with its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int


@dataclass(slots=True)
class _Moves:
    """Choices and best moves among them, and what the error of their ratio needs."""

    choices: int = 0
    optimal: int = 0
    choices_squared: int = 0
    optimal_squared: int = 0
    product: int = 0

    def add(self, choices: int, optimal: int) -> None:
        """Count one game."""
        self.choices += choices
        self.optimal += optimal
        self.choices_squared += choices * choices
        self.optimal_squared += optimal * optimal
        self.product += choices * optimal

    def interval(self, games: int) -> tuple[float, float]:
        """Return the 95 % interval of the share: a ratio estimate over games (Cochran 1977, section 6.4), at least as
        wide as Wilson's, which takes moves for independent."""
        low, high = wilson_interval(self.optimal, self.choices)
        if games < 2 or not self.choices:
            return low, high
        share = self.optimal / self.choices
        squares = self.optimal_squared - 2 * share * self.product + share * share * self.choices_squared
        half = Z_95 * math.sqrt(max(squares, 0.0) * games / (games - 1)) / self.choices
        return min(low, max(0.0, share - half)), max(high, min(1.0, share + half))


class Tally:
    """Counts the games of one model on one env against one opponent."""

    def __init__(self) -> None:
        self.void = self.invalid = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._rewards = self._squares = 0.0
        self._moves = _Moves()

    def add_record(self, record: GameRecord, pid: int) -> None:
        """Count the game as it went for the model at seat `pid`."""
        if record.end == "void":
            self.void += 1
            return
        self.add(record.outcomes[pid], record.rewards[pid], pid in record.invalid_pids)
        env_id = record.spec.env_id
        moves = [is_optimal(env_id, turn.observation, turn.action) for turn in record.turns if turn.pid == pid]
        self._moves.add(len(moves) - moves.count(None), moves.count(True))

    def add(self, outcome: Outcome, reward: float, own_invalid: bool) -> None:
        self._outcomes[outcome] += 1
        self._rewards += reward
        self._squares += reward * reward
        self.invalid += own_invalid

    def state_dict(self) -> dict[str, Any]:
        return {
            "void": self.void,
            "invalid": self.invalid,
            "outcomes": dict(self._outcomes),
            "rewards": self._rewards,
            "squares": self._squares,
            "moves": asdict(self._moves),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.void, self.invalid = state["void"], state["invalid"]
        self._outcomes = Counter(state["outcomes"])
        self._rewards, self._squares = state["rewards"], state["squares"]
        self._moves = _Moves(**state.get("moves", {}))  # a checkpoint of an earlier version has none

    def evaluation(self, label: str, model: str, step: int, env_id: str, opponent: str) -> Evaluation:
        n = self._outcomes.total()
        mean = self._rewards / n if n else math.nan
        squares = self._squares - n * mean * mean
        is_rounding = squares < 1e-12 * self._squares  # so much is left of rewards that are all 0.1
        variance = (0.0 if is_rounding else squares) / (n - 1) if n > 1 else math.nan
        return Evaluation(
            label=label,
            model=model,
            step=step,
            env_id=env_id,
            opponent=opponent,
            n=n,
            wins=self._outcomes["win"],
            draws=self._outcomes["draw"],
            losses=self._outcomes["loss"],
            invalid=self.invalid,
            void=self.void,
            mean_reward=mean,
            reward_std=math.sqrt(variance),
            choices=self._moves.choices,
            optimal=self._moves.optimal,
            optimal_interval=self._moves.interval(n),
        )


def evaluation_group(label: str, env_id: str, opponent: str) -> str:
    """How the names of an evaluation's metrics begin."""
    what = "concurrent checkpoint" if label == "concurrent" else "checkpoint"
    return f"evaluation-{env_id} ({opponent})/{what}"


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson (1927): an interval for a proportion that stays within [0, 1]; all of it where n is 0."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def points_interval(wins: int, draws: int, losses: int, z: float = Z_95) -> tuple[float, float]:
    """Return the score interval of the mean of wins (1), draws (1/2) and losses (0); [0, 1] without a game.

    A mean belongs to the interval if it is within z standard errors of the observed one, where the share of draws is
    the likeliest one that the mean allows (score test with a constrained estimate: Tango 1998, Statistics in Medicine
    17, 891-908; Agresti and Min 2005, Statistics in Medicine 24, 729-740). Without draws it is Wilson's interval, and
    it has a width even if all games were drawn.
    """
    n = wins + draws + losses
    if not draws:
        return wilson_interval(wins, n, z)
    observed = (wins + draws / 2) / n

    def is_inside(mean: float) -> bool:
        win_room, loss_room = 2 * mean, 2 * (1 - mean)  # no larger share of draws leaves this mean possible
        b = 2 * draws + wins * loss_room + losses * win_room
        drawn = (b - math.sqrt(max(b * b - 4 * n * draws * win_room * loss_room, 0.0))) / (2 * n)
        return (observed - mean) ** 2 <= z * z * (mean * (1 - mean) - drawn / 4) / n

    def edge(outside: float) -> float:
        inside = observed
        for _ in range(40):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if is_inside(middle) else (inside, middle)
        return inside

    return edge(0.0), edge(1.0)


def paired_difference(before: Sequence[Sequence[float | None]], after: Sequence[Sequence[float | None]]) -> Gain | None:
    """Compare two evaluations that played the same seeds from the same seats; None for fewer than two common seeds.

    The games of one seed are not independent, so that the t-interval is of the seeds' mean differences.
    """
    gained = []
    for old, new in zip(before, after, strict=False):
        pairs = [y - x for x, y in zip(old, new, strict=False) if x is not None and y is not None]
        if pairs:
            gained.append(fmean(pairs))
    if len(gained) < 2:
        return None
    low, high = mean_interval(fmean(gained), stdev(gained), len(gained), t_95(len(gained) - 1))
    return Gain(mean=fmean(gained), low=low, high=high, seeds=len(gained))


def t_95(freedom: int) -> float:
    """Return Student's t of two-sided 95 %; beyond the table by its expansion (Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def with_points(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of eval.jsonl with its points, which earlier versions did not write."""
    if "points" in line or line.get("win_rate") is None:
        return {"points": None} | line
    wins, draws, losses = line["wins"], line["draws"], line["losses"]
    points = (wins + draws / 2) / (wins + draws + losses)
    return line | {"points": points, "points_interval": list(points_interval(wins, draws, losses))}


def mean_interval(mean: float, std: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Of the mean of n rewards, by the normal approximation; one that never vanishes, for whoever decides by it.

    That rewards are all alike says only that others are rare: then as many may have been others as Wilson's interval
    allows, each as far off as rewards from -1 to 1 can be, or as large as these.
    """
    if std == 0:
        most, largest = wilson_interval(0, n, z)[1], max(1.0, abs(mean))
        return mean - most * (largest + mean), mean + most * (largest - mean)
    half = z * std / math.sqrt(n)
    return mean - half, mean + half


def summarise_evaluation(
    label: str, step: int, model: ModelRef, env_id: str, opponent: str, records: Sequence[GameRecord]
) -> Evaluation:
    """Count what one model did in `records`, from the seats it sat at."""
    tally, scores = Tally(), list[float | None]()
    for record in sorted(records, key=lambda record: record.spec.game_idx):  # as they were drawn: seed by seed
        for agent in record.spec.agent_specs:
            if agent.model == model:
                tally.add_record(record, agent.pid)
                is_void = record.end == "void"
                scores.append(None if is_void else score(record.outcomes[agent.pid], record.rewards[agent.pid]))
    seats = records[0].spec.num_players if records else 1
    by_seed = tuple(tuple(scores[i : i + seats]) for i in range(0, len(scores), seats))
    return replace(tally.evaluation(label, model.uid, step, env_id, opponent), scores=by_seed)


def score(outcome: Outcome, reward: float) -> float:
    """Return the points of a game, or its reward if nobody can win."""
    return reward if outcome == "na" else POINTS[outcome]


class Tracker:
    def __init__(
        self,
        run_directory: Path,
        sinks: Sequence[Sink],
        config: TrackerConfig,
        say: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    ) -> None:
        """`say`: what a user should read at once."""
        self.evaluations: list[Evaluation] = []
        """Those with a quota; all are in eval.jsonl."""
        self.registry: ModelRegistry | None = None
        """For `get_interface_info` and the age of checkpoints."""
        self.games_finished = 0
        self.void_games = 0
        self.alarms: list[str] = []
        self.latest: dict[str, float] = {}
        """The newest value of every metric."""
        self.lost_records = 0
        """Lines, events and files that could not be written."""
        self._sinks = list(sinks)
        self._rich_sinks = [sink for sink in self._sinks if isinstance(sink, RichSink)]
        self._newest_game: GameRecord | None = None
        """Of training; for the next transcript."""
        self._say = say
        self._step = 0
        self._failing: dict[str, str] = {}
        """What cannot be written at the moment, and where it belongs."""
        self._failed_lately: set[str] = set()
        """What failed since the last update."""
        self._config = config
        self._games_file = RecordLog(run_directory / "games.jsonl", config.max_part_mb)
        self._eval_file = AppendFile(run_directory / "eval.jsonl")
        self._alarms_file = AppendFile(run_directory / "alarms.jsonl")
        self._league_log = LeagueLog(run_directory / "league.jsonl")
        self._train_data = TrainDataFiles(run_directory / "train_data") if config.keep_train_data else None
        self._windows: dict[str, dict[str, dict[str, deque[float]]]] = defaultdict(lambda: defaultdict(_new_windows))
        """By group, by what is counted (`n`, `n (turns)`, …), by name."""
        self._collected: InOrder[list[_Collected]] = InOrder()
        """What training games add to the windows, in the order of their numbers."""
        self._games_of: dict[str, int] = defaultdict(int)
        self._diversity: dict[str, Diversity] = defaultdict(lambda: Diversity(WINDOW))
        self._tallies: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
        """Evaluation games without a quota, by (model, env, opponent)."""
        self._started = time.monotonic()
        """Of a run that goes on: as if there had been no break."""

    def begin_game(self, spec: GameSpec) -> None:
        """Note a training game that begins: the windows count no later one before it ends."""
        self._collected.begin(spec.game_idx)

    def add_record(self, record: GameRecord) -> None:
        """Count a finished game and keep its transcript."""
        self.games_finished += 1
        is_void = record.end == "void"
        self.void_games += is_void
        if record.spec.kind == "eval":
            self._add_evaluated(record)
        else:
            self._newest_game = self._newest_game if is_void else record
            collected = [] if is_void else [self._collect(record, trajectory) for trajectory in record.trajectories]
            for of_game in self._collected.end(record.spec.game_idx, collected):
                for of_player in of_game:
                    self._add_collected(of_player)
        if self._config.keep_games == "all" or self._config.keep_games == record.spec.kind:
            with self._surviving("games.jsonl"):
                self._games_file.write(record_to_json(record, self._config.keep_tokens))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """One with a quota: kept for the summary, too."""
        self.evaluations.append(evaluation)
        self._write_evaluation(evaluation)
        self._log_league(evaluation.step)

    def end_evaluations(self, still_playing: Collection[str]) -> None:
        """Write what the evaluation games without a quota told of the checkpoints that play none any more."""
        for key in [key for key in self._tallies if key[0] not in still_playing]:
            model, env_id, opponent = key
            iteration = self.registry.get(model).iteration if self.registry is not None else None
            evaluation = self._tallies.pop(key).evaluation("concurrent", model, iteration or 0, env_id, opponent)
            self._write_evaluation(evaluation)

    async def add_train_data(self, update: int, version: int, batch: Batch, logprobs: Sequence[Logprobs] = ()) -> None:
        """Keep what update number `update` trained on; `version` is that of the policy before it.

        logprobs: of the batch's steps, one by one, as this policy had them; or none.

        Waits for the batch before it to be on disk, and not for this one.
        """
        if self._train_data is not None:
            with self._surviving("train_data"):
                await self._train_data.write(update, version, batch, logprobs)

    def alarm(self, step: int, text: str, is_repeat: bool = False) -> None:
        """Said, and a line of alarms.jsonl; kept for the summary, and counted, when it is not said again only."""
        self._say(f"alarm after update {step}: {text}")
        if not is_repeat:
            self.alarms.append(f"update {step}: {text}")
        with contextlib.suppress(OSError):  # it may be this that is told
            self._alarms_file.write(to_line({"step": step, "time": time.time(), "text": text, "is_repeat": is_repeat}))

    def log_update(self, step: int, metrics: Mapping[str, float], histograms: Sequence[Histogram] = ()) -> None:
        """One line of everything: `metrics` of this update, and the windows over games; and now and then a game."""
        everything = dict(metrics)
        for group, by_count in self._windows.items():
            for count, windows in by_count.items():
                for name, window in windows.items():
                    everything[f"{group}/{name}"] = sum(window) / len(window)
                if windows:  # no turn yet: an opponent's first move may end a game
                    everything[f"{group}/{count}"] = max(map(len, windows.values()))
        for group, games in self._games_of.items():
            everything[f"{group}/step"] = games
        for env_id, diversity in self._diversity.items():
            everything |= {f"exploration/{env_id}/{name}": value for name, value in diversity.metrics().items()}
        everything["run/seconds"] = time.monotonic() - self._started
        everything["run/games"] = self.games_finished
        everything["run/void_games"] = self.void_games
        everything["run/alarms"] = len(self.alarms)
        everything["run/lost_records"] = self.lost_records
        self._send(step, everything)
        for sink in self._rich_sinks:
            with self._surviving(type(sink).__name__):
                self._show(sink, step, histograms)
        self._log_league(step)
        self._tell_of_recovery()

    def get_interface_info(self) -> dict[str, Any]:
        """What a dashboard draws, under the reference's keys; means over every training env, None before the first.

        `gpu_tok_s` by engine, `TS` by model uid, `match_counts` by pair of uids, `exploration` by env.
        """
        registry = self.registry
        return {
            "gpu_tok_s": {
                name.split("/")[1]: value
                for name, value in self.latest.items()
                if name.startswith("inference/") and name.endswith("/tok_s")
            },
            "TS": {uid: asdict(meta) | {"rating": meta.rating} for uid, meta in registry.get_all_models().items()}
            if registry
            else {},
            "match_counts": dict(registry.match_counts) if registry else {},
            "exploration": {env_id: diversity.metrics() for env_id, diversity in self._diversity.items()},
        } | {name: self._mean_over_envs(count, name) for count, name in INTERFACE_MEANS}

    def state_dict(self) -> dict[str, Any]:
        windows = {
            group: {
                count: {name: list(window) for name, window in windows.items()} for count, windows in by_count.items()
            }
            for group, by_count in self._windows.items()
        }
        return {
            "seconds": time.monotonic() - self._started,
            "games": self.games_finished,
            "void_games": self.void_games,
            "alarms": self.alarms,
            "windows": windows,
            "games_of": dict(self._games_of),
            "diversity": {env_id: diversity.state_dict() for env_id, diversity in self._diversity.items()},
            "tallies": [[*key, tally.state_dict()] for key, tally in self._tallies.items()],
        }

    def resume(self, state: dict[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Counts and windows go on. `evaluations`: the lines of eval.jsonl."""
        self._started -= state["seconds"]
        self.games_finished, self.void_games = state["games"], state["void_games"]
        self.alarms = list(state["alarms"])
        for group, by_count in state["windows"].items():
            for count, windows in by_count.items():
                for name, values in windows.items():
                    self._windows[group][count][name].extend(values)
        self._games_of.update(state["games_of"])
        for env_id, diversity in state["diversity"].items():
            self._diversity[env_id].load_state_dict(diversity)
        for *key, tally in state["tallies"]:
            self._tallies[key[0], key[1], key[2]].load_state_dict(tally)
        names = {field.name for field in fields(Evaluation)} - {"scores"}
        known = []
        for line in evaluations:
            figures: dict[str, Any] = {
                name: math.nan if line[name] is None else line[name] for name in names & line.keys()
            }
            known.append(Evaluation(**figures, scores=tuple(map(tuple, line.get("scores", ())))))
        self.evaluations = [evaluation for evaluation in known if evaluation.label != "concurrent"]

    def close(self) -> None:
        """Everything that is known is on disk afterwards."""
        self.end_evaluations(())
        for sink in self._sinks:
            with self._surviving(type(sink).__name__):
                sink.close()
        self._games_file.close()
        self._eval_file.close()
        self._alarms_file.close()
        self._league_log.close()
        if self._train_data is not None:
            self._train_data.close()

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        self.latest.update(metrics)
        self._step = step
        for sink in self._sinks:
            with self._surviving(type(sink).__name__):
                sink.log(step, metrics)

    def _show(self, sink: RichSink, step: int, histograms: Sequence[Histogram]) -> None:
        if histograms:
            sink.log_histograms(step, [replace(one, name=f"learner/{one.name}") for one in histograms])
        game, every = self._newest_game, self._config.transcript_every
        if game is not None and every and step % every == 0:
            sink.log_texts(step, {f"games/{game.spec.env_id}": transcript(game)})

    @contextlib.contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """A run goes on without what cannot be written: games and updates cost more than what is told of them.

        It is counted, and told when it begins and when it is over, by updates: on a disk that is nearly full short
        lines find room between long ones.
        """
        try:
            yield
        except OSError as error:
            self.lost_records += 1
            self._failed_lately.add(what)
            if what not in self._failing:
                self._failing[what] = error.filename or what
                self.alarm(
                    self._step,
                    f"cannot write {self._failing[what]}: {error.strerror}. The run goes on without what belongs there "
                    "(run/lost_records counts it) and goes on trying: make room",
                )

    def _tell_of_recovery(self) -> None:
        for what in self._failing.keys() - self._failed_lately:
            where = self._failing.pop(what)
            self.alarm(
                self._step,
                f"writing works again, which had failed at {where}; {self.lost_records} records were lost in all",
            )
        self._failed_lately.clear()

    def _write_evaluation(self, evaluation: Evaluation) -> None:
        with self._surviving("eval.jsonl"):
            self._eval_file.write(to_line(evaluation.to_json()))
        group = evaluation_group(evaluation.label, evaluation.env_id, evaluation.opponent)
        is_decided = math.isfinite(evaluation.win_rate)
        low, high = evaluation.interval if is_decided else (math.nan, math.nan)
        points_low, points_high = evaluation.points_interval if is_decided else (math.nan, math.nan)
        metrics = {
            f"{group} Reward": evaluation.mean_reward,
            f"{group} Points": evaluation.points,
            f"{group} Points low": points_low,
            f"{group} Points high": points_high,
            f"{group} Win Rate": evaluation.win_rate,
            f"{group} Win Rate low": low,
            f"{group} Win Rate high": high,
            f"{group} Invalid Rate": evaluation.invalid / evaluation.n if evaluation.n else math.nan,
            f"{group} n": evaluation.n,
        }
        if evaluation.choices:
            optimal_low, optimal_high = evaluation.optimal_interval
            metrics |= {
                f"{group} Optimal Moves": evaluation.optimal_share,
                f"{group} Optimal Moves low": optimal_low,
                f"{group} Optimal Moves high": optimal_high,
                f"{group} n (choices)": evaluation.choices,
            }
        self._send(evaluation.step, {name: value for name, value in metrics.items() if math.isfinite(value)})

    def _log_league(self, step: int) -> None:
        if self.registry is not None:
            with self._surviving("league.jsonl"):
                self._league_log.log(step, self.registry)

    def _mean_over_envs(self, count: str, name: str) -> float | None:
        groups = [by_count[count] for group, by_count in self._windows.items() if group.startswith("collection-")]
        values = [value for windows in groups for value in windows.get(name, ())]
        return sum(values) / len(values) if values else None

    def _add_collected(self, collected: _Collected) -> None:
        group = f"collection-{collected.env_id}"
        self._games_of[group] += 1
        for count, by_name in collected.entries.items():
            for name, values in by_name.items():
                self._windows[group][count][name].extend(values)
        self._diversity[collected.env_id].append(collected.states, collected.actions)

    def _collect(self, record: GameRecord, trajectory: PlayerTrajectory) -> _Collected:
        pid = trajectory.pid
        entries: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
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
        return _Collected(record.spec.env_id, entries, states, actions)

    def _add_evaluated(self, record: GameRecord) -> None:
        opponents = [agent.model.name for agent in record.spec.agent_specs if agent.model.name is not None]
        env_id, opponent = record.spec.env_id, opponents[0] if opponents else "none"
        group = f"evaluation-{env_id} ({opponent})"
        for agent in record.spec.agent_specs:
            if agent.model.name is not None:
                continue
            if record.spec.eval_label is None:
                self._tallies[agent.model.uid, env_id, opponent].add_record(record, agent.pid)
            if record.end == "void":
                continue
            self._games_of[group] += 1
            _add_outcome(self._windows[group], record, agent.pid, "Draw Rate")
            of_turns = self._windows[group]["n (turns)"]
            for turn in record.turns:
                if turn.pid == agent.pid:
                    of_turns["Response Length (char)"].append(len(turn.text))
                    of_turns["Format Success Rate - correct_answer_format"].append(turn.format_ok)
                    of_turns["Cut Off Rate"].append(turn.is_cut_off)
                    of_turns["Time per Turn (s)"].append(turn.seconds)


def _add_outcome(
    into: Mapping[str, Mapping[str, MutableSequence[float]]], record: GameRecord, pid: int, draw_name: str
) -> None:
    """Add how one player's game went, in training or in evaluation, to `into` by what is counted and by name."""
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


def _new_windows() -> dict[str, deque[float]]:
    return defaultdict(lambda: deque(maxlen=WINDOW))


def record_to_json(record: GameRecord, keep_tokens: bool) -> dict[str, Any]:
    """A GameRecord as one line of games.jsonl: what a person would read, and what replays the game.

    A turn is `[pid, observation, text, action, format_ok, seconds]`. With `keep_tokens` it has a seventh entry: what
    was sampled, for players that the engines serve, and null for others.
    """
    spec = record.spec
    return {
        "game_idx": spec.game_idx,
        "kind": spec.kind,
        "env_id": spec.env_id,
        "seed": spec.seed,
        "eval_label": spec.eval_label,
        "agents": [
            {"pid": agent.pid, "model": agent.model.uid, "collect_data": agent.collect_data}
            | ({"opponent": agent.model.name} if agent.model.name else {})
            for agent in spec.agent_specs
        ],
        "turns": [
            [turn.pid, turn.observation, turn.text, turn.action, turn.format_ok, round(turn.seconds, 4)]
            + ([_sampled(turn)] if keep_tokens else [])
            for turn in record.turns
        ],
        "rewards": record.rewards,
        "outcomes": record.outcomes,
        "end": record.end,
        "invalid_pids": record.invalid_pids,
        "invalid_turns": [index for index, turn in enumerate(record.turns) if turn.is_invalid],
        "error": record.error,
        "seconds": round(record.seconds, 4),
    }


def _sampled(turn: Turn) -> dict[str, Any] | None:
    generation = turn.generation
    if generation is None:
        return None
    return {
        "completion_ids": generation.completion_ids.tolist(),
        "logprobs": [round(logprob, 4) for logprob in generation.logprobs.tolist()],
        "adapter_version": generation.adapter_version,
        "finish_reason": generation.finish_reason,
    }
