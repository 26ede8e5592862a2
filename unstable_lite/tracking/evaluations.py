"""Results of one model in the games of an evaluation, with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from unstable_lite.config.env_ids import is_openspiel, is_questions, questions_path
from unstable_lite.config.games import against
from unstable_lite.games.players.optimal import is_optimal
from unstable_lite.tracking.intervals import (
    Z_95,
    Gain,
    deals_interval,
    mean_interval,
    paired_difference,
    points_interval,
    wilson_interval,
)
from unstable_lite.types import GameRecord, ModelRef, Outcome

POINTS: dict[Outcome, float] = {"win": 1.0, "draw": 0.5, "loss": 0.0}
"""Points of a player for each outcome of a game with several players."""


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
    scores: tuple[tuple[float | None, ...], ...] = ()
    """Score of the model by seed and seat, in points, or in reward in single-player envs; None for a void game.
    Only in an evaluation with a quota."""
    rewards: tuple[tuple[float | None, ...], ...] = ()
    """Reward of the model by seed and seat, like `scores`: in OpenSpiel's games their utility."""

    @property
    def win_rate(self) -> float:
        """Share of wins; NaN before the first game and in single-player envs."""
        decided = self.wins + self.draws + self.losses
        return self.wins / decided if decided else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson score interval of the win rate."""
        return wilson_interval(self.wins, self.wins + self.draws + self.losses)

    @property
    def points(self) -> float:
        """Mean of 1 for a win, 1/2 for a draw and 0 for a loss; NaN if `win_rate` is."""
        decided = self.wins + self.draws + self.losses
        return (self.wins + self.draws / 2) / decided if decided else math.nan

    @property
    def points_interval(self) -> tuple[float, float]:
        """95 % score interval of the points."""
        return points_interval(self.wins, self.draws, self.losses)

    @property
    def reward_interval(self) -> tuple[float, float]:
        """95 % interval of the mean reward by the normal approximation; NaN if all rewards are equal."""
        if not self.reward_std > 0:
            return math.nan, math.nan
        return mean_interval(self.mean_reward, self.reward_std, self.n)

    @property
    def points_over_deals(self) -> Gain | None:
        """Points with their 95 % interval over deals, each played from every seat; None for fewer than two deals."""
        if not math.isfinite(self.points):
            return None
        # Within [-1, 1], as the interval of equal results assumes.
        over = deals_interval([[None if s is None else 2 * s - 1 for s in of_deal] for of_deal in self.scores])
        if over is None:
            return None
        mean, low, high = ((1 + edge) / 2 for edge in (over.mean, over.low, over.high))
        return replace(over, mean=mean, low=max(low, 0.0), high=min(high, 1.0))

    @property
    def reward_over_deals(self) -> Gain | None:
        """Mean reward with its 95 % interval over deals; None for fewer than two deals, and if all deals are equal."""
        whole = [of_deal for of_deal in self.rewards if None not in of_deal]
        is_alike = len({sum(reward for reward in of_deal if reward is not None) for of_deal in whole}) < 2
        return None if is_alike else deals_interval(whole)

    @property
    def optimal_share(self) -> float:
        """Share of optimal moves; NaN without a choice."""
        return self.optimal / self.choices if self.choices else math.nan

    @property
    def own_invalid(self) -> str:
        """Number of games that the model ended by an invalid move, with their share if `n` > 0."""
        return f"{self.invalid}" + (f" ({self.invalid / self.n:.1%})" if self.n else "")

    def describe(self) -> str:
        if not self.n:
            return f"{self.model} has no result in {self.env_id}: all of its {self.void} games are void"
        invalid = f"{self.invalid} ended by its own invalid move" + f"; {self.void} void" * bool(self.void)
        if not math.isfinite(self.win_rate):
            low, high = self.reward_interval
            return (
                f"{self.model} had a mean reward of {self.mean_reward:.3f} in {self.n} games of "
                f"{self.env_id}{against(self.opponent)}"
                + f" (95 %: {low:.3f} – {high:.3f})" * math.isfinite(low)
                + f"; {invalid}"
            )
        low, high = self.points_interval
        if is_questions(self.env_id):
            return (
                f"{self.model} answered {self.points:.1%} of {self.n} questions right (95 %: {low:.1%} – {high:.1%}), "
                f"of {questions_path(self.env_id)}{against(self.opponent)}; {self.invalid} without an answer in a box"
                + f"; {self.void} void"
                * bool(self.void)
            )
        return (
            f"{self.model} scored {self.points:.1%} of the points in {self.n} games of {self.env_id} against "
            f"{self.opponent} (95 %: {low:.1%} – {high:.1%}): {self.wins} won, {self.draws} drawn; {invalid}"
            f"{self._describe_deals()}"
        )

    def _describe_deals(self) -> str:
        """Describe the intervals over deals; of the reward in OpenSpiel's games only, whose points say less than it."""
        points, reward = self.points_over_deals, self.reward_over_deals if is_openspiel(self.env_id) else None
        if points is None:
            return ""
        shown = (
            f"; over {points.seeds} deals played from every seat (95 %): points {points.low:.1%} – {points.high:.1%}"
        )
        return shown + (f", utility {reward.low:+.3f} – {reward.high:+.3f}" if reward else "")

    def describe_change(self, before: Evaluation) -> str | None:
        """Describe the change since an earlier evaluation of the same env and opponent; None without common seeds."""
        if (gained := paired_difference(before.scores, self.scores)) is None:
            return None
        mean, low, high = gained.mean, gained.low, gained.high
        if math.isfinite(self.points):
            change = f"{100 * mean:+.1f} points (95 %: {100 * low:+.1f} to {100 * high:+.1f})"
        else:
            change = f"{mean:+.3f} in mean reward (95 %: {low:+.3f} to {high:+.3f})"
        return f"change since {before.label}: {change}, of {gained.seeds} seeds that both played"

    def to_json(self) -> dict[str, Any]:
        """Return a line of eval.jsonl, in which NaN becomes null."""
        return asdict(self) | {
            "win_rate": self.win_rate,
            "points": self.points,
            "interval": self.interval,
            "points_interval": self.points_interval,
            "reward_interval": self.reward_interval,
            "points_over_deals": asdict(points) if (points := self.points_over_deals) else None,
            "reward_over_deals": asdict(reward) if (reward := self.reward_over_deals) else None,
        }

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
        if math.isfinite(self.win_rate):
            shares += [("Points", self.points, self.points_interval), ("Win Rate", self.win_rate, self.interval)]
        if self.choices:
            shares.append(("Optimal Moves", self.optimal_share, self.optimal_interval))
            metrics["n (choices)"] = self.choices
        for name, share, (low, high) in shares:
            metrics |= {name: share, f"{name} low": low, f"{name} high": high}
        group = evaluation_group(self.label, self.env_id, self.opponent)
        return {f"{group} {name}": value for name, value in metrics.items() if math.isfinite(value)}


class PlayedGame(NamedTuple):
    """One game from the view of one model."""

    outcome: Outcome
    reward: float
    own_invalid: bool
    choices: int
    optimal: int


class Tally:
    """Games of one model on one env against one opponent."""

    def __init__(self) -> None:
        self.void = 0
        self._games: list[PlayedGame] = []

    def add_record(self, record: GameRecord, pid: int) -> None:
        """Count a game from the view of the model at seat `pid`."""
        if record.end == "void":
            self.void += 1
            return
        env_id = record.spec.env_id
        moves = [is_optimal(env_id, turn.observation, turn.action) for turn in record.turns if turn.pid == pid]
        choices, optimal = len(moves) - moves.count(None), moves.count(True)
        self.add(record.outcomes[pid], record.reward_shown(pid), pid in record.invalid_pids, choices, optimal)

    def add(self, outcome: Outcome, reward: float, own_invalid: bool, choices: int = 0, optimal: int = 0) -> None:
        self._games.append(PlayedGame(outcome, reward, own_invalid, choices, optimal))

    def state_dict(self) -> dict[str, Any]:
        return {"void": self.void, "games": list(map(list, self._games))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.void, self._games = state["void"], [PlayedGame(*game) for game in state["games"]]

    def evaluation(self, label: str, model: str, step: int, env_id: str, opponent: str) -> Evaluation:
        games = self._games
        outcomes, rewards = Counter(game.outcome for game in games), [game.reward for game in games]
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
            void=self.void,
            mean_reward=fmean(rewards) if games else math.nan,
            reward_std=stdev(rewards) if len(games) > 1 else math.nan,
            choices=sum(game.choices for game in games),
            optimal=sum(game.optimal for game in games),
            optimal_interval=_optimal_interval(games),
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


def evaluation_group(label: str, env_id: str, opponent: str) -> str:
    """Return the prefix of an evaluation's metric names."""
    what = "concurrent checkpoint" if label == "concurrent" else "checkpoint"
    return f"evaluation-{env_id} ({opponent})/{what}"


def summarise_evaluation(
    label: str, step: int, model: ModelRef, env_id: str, opponent: str, records: Sequence[GameRecord]
) -> Evaluation:
    """Return the result of one model in `records`, over all seats that it played."""
    tally, scores, rewards = Tally(), list[float | None](), list[float | None]()
    for record in sorted(records, key=lambda record: record.spec.game_idx):  # as drawn: seed by seed
        for agent in record.spec.agent_specs:
            if agent.model == model:
                tally.add_record(record, agent.pid)
                reward = None if record.end == "void" else record.reward_shown(agent.pid)
                rewards.append(reward)
                scores.append(None if reward is None else score(record.outcomes[agent.pid], reward))
    seats = records[0].spec.num_players if records else 1

    def by_seed(values: Sequence[float | None]) -> tuple[tuple[float | None, ...], ...]:
        return tuple(tuple(values[i : i + seats]) for i in range(0, len(values), seats))

    of_model = tally.evaluation(label, model.uid, step, env_id, opponent)
    return replace(of_model, scores=by_seed(scores), rewards=by_seed(rewards))


def score(outcome: Outcome, reward: float) -> float:
    """Return the points of a game, or its reward in a single-player env."""
    return reward if outcome == "na" else POINTS[outcome]
