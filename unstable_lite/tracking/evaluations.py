"""Results of one model in the games of an evaluation, with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec

from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.config.games import against
from unstable_lite.games.players.lookahead import is_optimal
from unstable_lite.tracking.intervals import (
    Z_95,
    Gain,
    mean_interval,
    paired_difference,
    percent,
    percent_range,
    points_interval,
    share_interval,
    wilson_interval,
)
from unstable_lite.types import CONTEXT_FULL, ENV_RAISED, GameRecord, ModelRef, Outcome, policy_of, uid_of

Deals = tuple[tuple[float | None, ...], ...]
"""Values by deal (env seed) and seat."""
POINTS: dict[Outcome, float] = {"win": 1.0, "draw": 0.5, "loss": 0.0}
"""Points of a player for each outcome of a game with several players."""
EARLY_SHARE, FORFEIT_SHARE = 0.02, 0.1
"""Shares of games, void or ended by a full context, and ended by an invalid move, up to which points stand alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of one model on one env against one opponent."""

    label: str
    model: str
    step: int
    env_id: str
    opponent: str
    n: int
    """Number of games without the void ones."""
    wins: int
    draws: int
    losses: int
    """`wins`, `draws` and `losses` add up to `n`; in single-player envs they are 0."""
    invalid: int
    """Number of games that the model ended by its own invalid move."""
    void: int
    mean_reward: float
    reward_std: float
    """Standard deviation of the reward of one game."""
    choices: int = 0
    """Number of moves for which a legal move is worse than the best; 0 for a game without `scripted:optimal`."""
    optimal: int = 0
    """Number of those moves that are optimal. An illegal move is not optimal."""
    optimal_interval: tuple[float, float] = (0.0, 1.0)
    """95 % interval of the share of optimal moves; the moves of one game are not independent."""
    scores: Deals = ()
    """Score of the model by seed and seat, in points, or in reward in single-player envs; None for a void game.
    Only in an evaluation with a quota."""
    rewards: Deals = ()
    """Reward of the model by seed and seat, like `scores`: in OpenSpiel's games their utility."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Number of games by `GameRecord.reason`, void or not, if they have one."""
    full_points: float = 0.0
    """Points of the model in the games that a full context ended."""
    ended_invalid: int = 0
    """Number of games that an invalid move of any player ended."""

    @property
    def policy(self) -> str:
        """Name of the policy that was evaluated, if the run has several."""
        return policy_of(self.model)

    @property
    def win_rate(self) -> float:
        """Share of wins; NaN before the first game and in single-player envs."""
        return self.wins / self.n if self.is_share else math.nan

    @property
    def points(self) -> float:
        """Mean of 1 for a win, 1/2 for a draw and 0 for a loss; NaN if `win_rate` is."""
        return (self.wins + self.draws / 2) / self.n if self.is_share else math.nan

    @property
    def is_share(self) -> bool:
        """Whether the result is a share of the points; else it is a mean reward."""
        return self.wins + self.draws + self.losses > 0

    @property
    def value(self) -> float:
        """Points, or in single-player envs the mean reward; NaN without games."""
        return self.points if self.is_share else self.mean_reward

    @property
    def value_name(self) -> str:
        return "points" if self.is_share or not self.n else "mean reward"

    @property
    def value_text(self) -> str:
        return "–" if not self.n else percent(self.points) if self.is_share else f"{self.mean_reward:.3f}"

    @property
    def interval_text(self) -> str:
        """Text of the 95 % interval, in per cent for points."""
        low, high = self.interval
        if not self.n or not math.isfinite(low):
            return "–"
        return percent_range(low, high) if self.is_share else f"{low:.3f} to {high:.3f}"

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the result: of the points, or in single-player envs of the mean reward."""
        return self.interval_at(0.95)

    def interval_at(self, level: float) -> tuple[float, float]:
        if not self.is_share:
            return self.reward_interval(level)
        if deals := _played(self.scores):
            return share_interval(deals, level)
        return points_interval(self.wins, self.draws, self.losses, level)

    def reward_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the t-interval of the mean reward, over deals if they are known; all numbers for fewer than two."""
        std, n = self.reward_std, self.n
        if deals := _played(self.rewards):  # a ratio estimate: void games leave deals with fewer games
            squares = sum((sum(deal) - self.mean_reward * len(deal)) ** 2 for deal in deals)
            n = len(deals)
            std = math.sqrt(squares / max(n - 1, 1)) * n / self.n
        return mean_interval(self.mean_reward, std, n, level) if n > 1 else (-math.inf, math.inf)

    @property
    def optimal_text(self) -> str:
        return percent(self.optimal / self.choices) if self.choices else "–"

    @property
    def own_invalid(self) -> str:
        """Number of games that the model ended by an invalid move, with their share if `n` > 0."""
        return f"{self.invalid}" + (f" ({percent(self.invalid / self.n)})" if self.n else "")

    @property
    def remarks(self) -> list[str]:
        """Remarks without which points mislead: on games that an invalid move ended, and on games without a result."""
        remarks = []
        if self.ended_invalid > FORFEIT_SHARE * self.n:
            remarks.append(f"{percent(self.ended_invalid / self.n, 0)} of the games ended by an invalid move")
        early = {reason or "void": count for reason, count in self.reasons.items() if reason != ENV_RAISED}
        num_early, total = self.void + early.get(CONTEXT_FULL, 0), self.n + self.void
        if num_early > EARLY_SHARE * total:
            why = ", ".join(f"{count} {reason}" for reason, count in early.items()) or f"{self.void} void"
            text = f"{why} of {total} games"
            if self.is_share:
                points = self.points * self.n - self.full_points
                lost, won = points / total, (points + num_early) / total
                text += f": {percent(lost)} of the points had all of these been lost, {percent(won)} had they been won"
            remarks.append(text)
        return remarks

    def describe(self) -> str:
        """Return the result, its games and the remarks on them."""
        games = f"{self.n} games of {self.env_id}{against(self.opponent)}"
        text = f"{self.model}: {self.value_name} {self.value_text} (95 %: {self.interval_text}) in {games}"
        faults = [f"{self.invalid} ended by an own invalid move", *[f"{self.void} void"] * bool(self.void)]
        return "; ".join([text, *faults, *self.remarks, *filter(None, [self.utility_text])])

    @property
    def utility_text(self) -> str:
        """Mean utility, of which points say less; empty outside of OpenSpiel's games."""
        low, high = self.reward_interval()
        if not is_openspiel(self.env_id) or not self.is_share or not math.isfinite(low):
            return ""
        return f"mean utility {self.mean_reward:+.3f} (95 %: {low:+.3f} to {high:+.3f})"

    def change_since(self, before: Evaluation) -> Gain | None:
        """Return the change since an earlier evaluation of the same env and opponent; None without common seeds."""
        return paired_difference(before.scores, self.scores, 1.0 if self.is_share else math.inf)

    def to_json(self) -> dict[str, Any]:
        """Return a line of eval.jsonl, in which NaN becomes null."""
        return asdict(self) | {name: getattr(self, name) for name in ("remarks", "win_rate", "points", "interval")}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation of a line of eval.jsonl."""
        known = [one.name for one in fields(cls) if one.name in line]  # an older run's lines have no rewards by seat
        values: dict[str, Any] = {name: math.nan if line[name] is None else line[name] for name in known}
        by_seat = {name: tuple(map(tuple, line[name])) for name in ("scores", "rewards") if name in line}
        return cls(**values | by_seat)

    def metrics(self) -> dict[str, float]:
        """Return the finite numbers as metrics."""
        metrics: dict[str, float] = {"Reward": self.mean_reward, "n": self.n}
        if self.n:
            metrics["Invalid Rate"] = self.invalid / self.n
        shares = []
        if self.is_share:
            won = wilson_interval(self.wins, self.n) if self.draws else self.interval  # points are then wins
            shares += [("Points", self.points, self.interval), ("Win Rate", self.win_rate, won)]
        if self.choices:
            shares.append(("Optimal Moves", self.optimal / self.choices, self.optimal_interval))
            metrics["n (choices)"] = self.choices
        for name, share, (low, high) in shares:
            metrics |= {name: share, f"{name} low": low, f"{name} high": high}
        group = evaluation_group(self.label, self.env_id, self.opponent, self.policy)
        return {f"{group} {name}": value for name, value in metrics.items() if math.isfinite(value)}


def _played(values: Deals) -> tuple[tuple[float, ...], ...]:
    return tuple(played for deal in values if (played := tuple(value for value in deal if value is not None)))


class PlayedGame(NamedTuple):
    """One game from the view of one model."""

    outcome: Outcome
    reward: float
    own_invalid: bool
    choices: int
    optimal: int
    end: str = ""
    reason: str = ""


class Tally:
    """Games of one model on one env against one opponent."""

    def __init__(self) -> None:
        self.void: Counter[str] = Counter()
        """Number of void games by reason."""
        self._games: list[PlayedGame] = []

    def add_record(self, record: GameRecord, pid: int) -> None:
        """Count a game from the view of the model at seat `pid`."""
        if record.end == "void":
            self.void[record.reason] += 1
            return
        env_id = record.spec.env_id
        moves = [is_optimal(env_id, turn.observation, turn.action) for turn in record.turns if turn.pid == pid]
        choices, optimal = len(moves) - moves.count(None), moves.count(True)
        own_invalid, reward = pid in record.invalid_pids, record.reward_shown(pid)
        self.add(record.outcomes[pid], reward, own_invalid, choices, optimal, end=record.end, reason=record.reason)

    def add(
        self, outcome: Outcome, reward: float, own_invalid: bool, choices: int = 0, optimal: int = 0, **ended: str
    ) -> None:
        """Count a game. `ended`: `end` and `reason` of its record."""
        self._games.append(PlayedGame(outcome, reward, own_invalid, choices, optimal, **ended))

    def state_dict(self) -> dict[str, Any]:
        return {"void": dict(self.void), "games": list(map(list, self._games))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        void = msgspec.convert(state["void"], int | dict[str, int])
        self._games = msgspec.convert(state["games"], list[PlayedGame])
        self.void = Counter({"": void} if isinstance(void, int) else void)  # runs of before knew no reasons

    def evaluation(self, label: str, model: str, step: int, env_id: str, opponent: str) -> Evaluation:
        games = self._games
        outcomes, rewards = Counter(game.outcome for game in games), [game.reward for game in games]
        reasons = self.void + Counter(game.reason for game in games if game.reason)
        return Evaluation(
            label=label,
            model=model,
            step=step,
            env_id=env_id,
            opponent=opponent,
            n=len(games),
            wins=outcomes["win"],
            draws=outcomes["draw"],
            losses=outcomes["loss"],
            invalid=sum(game.own_invalid for game in games),
            void=self.void.total(),
            mean_reward=fmean(rewards) if games else math.nan,
            reward_std=stdev(rewards) if len(games) > 1 else math.nan,
            choices=sum(game.choices for game in games),
            optimal=sum(game.optimal for game in games),
            optimal_interval=_optimal_interval(games),
            reasons=dict(reasons.most_common()),
            full_points=sum(POINTS.get(game.outcome, 0.0) for game in games if game.reason == CONTEXT_FULL),
            ended_invalid=sum(game.end == "invalid" for game in games),
        )


def _optimal_interval(games: Sequence[PlayedGame]) -> tuple[float, float]:
    """Return the 95 % interval of the share of optimal moves.

    It is a ratio estimate over games (Cochran 1977, section 6.4), at least as wide as Wilson's interval, which assumes
    independent moves.
    """
    n, choices, optimal = len(games), sum(game.choices for game in games), sum(game.optimal for game in games)
    low, high = wilson_interval(optimal, choices)
    if n < 2 or not choices:
        return low, high
    share = optimal / choices
    squares = sum((game.optimal - share * game.choices) ** 2 for game in games)
    half = Z_95 * math.sqrt(squares * n / (n - 1)) / choices
    return min(low, max(0.0, share - half)), max(high, min(1.0, share + half))


def evaluation_group(label: str, env_id: str, opponent: str, policy: str = "") -> str:
    """Return the prefix of an evaluation's metric names."""
    what = "concurrent checkpoint" if label == "concurrent" else "checkpoint"
    return uid_of(policy, f"evaluation-{env_id} ({opponent})/{what}")


def summarise_evaluation(
    label: str, step: int, model: ModelRef, env_id: str, opponent: str, records: Sequence[GameRecord]
) -> Evaluation:
    """Return the result of one model in `records`, over all seats that it played."""
    tally, played, num_games = Tally(), dict[int, tuple[float, float]](), 0
    for record in sorted(records, key=lambda record: record.spec.game_idx):  # as drawn: seed by seed
        for agent in (agent for agent in record.spec.agent_specs if agent.model == model):
            tally.add_record(record, agent.pid)
            if record.end != "void":
                reward = record.reward_shown(agent.pid)
                played[num_games] = score(record.outcomes[agent.pid], reward), reward
            num_games += 1
    scores, rewards = by_deal(played, num_games, records[0].spec.num_players if records else 1)
    return replace(tally.evaluation(label, model.uid, step, env_id, opponent), scores=scores, rewards=rewards)


def by_deal(played: Mapping[int, tuple[float, float]], num_games: int, seats: int) -> tuple[Deals, Deals]:
    """Return scores and rewards by deal and seat, given those of each game by number; None for a game without."""
    deals = [[played.get(first + seat, (None, None)) for seat in range(seats)] for first in range(0, num_games, seats)]
    scores, rewards = (tuple(tuple(of_game[i] for of_game in of_deal) for of_deal in deals) for i in (0, 1))
    return scores, rewards


def score(outcome: Outcome, reward: float) -> float:
    """Return the points of a game, or its reward in a single-player env."""
    return reward if outcome == "na" else POINTS[outcome]
