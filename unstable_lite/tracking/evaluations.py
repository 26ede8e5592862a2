"""Results of one model in the games of an evaluation, with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from unstable_lite.games.players.optimal import is_optimal
from unstable_lite.tracking.intervals import Z_95, mean_interval, paired_difference, points_interval, wilson_interval
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
        """Return a line of eval.jsonl; NaN becomes null."""
        values = {**asdict(self), "win_rate": self.win_rate, "points": self.points}
        plain = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in values.items()}
        reward_interval = [x if math.isfinite(x) else None for x in self.reward_interval]
        return plain | {
            "interval": list(self.interval),
            "points_interval": list(self.points_interval),
            "reward_interval": reward_interval,
        }

    def metrics(self) -> dict[str, float]:
        """Return the finite numbers as metrics."""
        group = evaluation_group(self.label, self.env_id, self.opponent)
        is_decided = math.isfinite(self.win_rate)
        low, high = self.interval if is_decided else (math.nan, math.nan)
        points_low, points_high = self.points_interval if is_decided else (math.nan, math.nan)
        metrics = {
            f"{group} Reward": self.mean_reward,
            f"{group} Points": self.points,
            f"{group} Points low": points_low,
            f"{group} Points high": points_high,
            f"{group} Win Rate": self.win_rate,
            f"{group} Win Rate low": low,
            f"{group} Win Rate high": high,
            f"{group} Invalid Rate": self.invalid / self.n if self.n else math.nan,
            f"{group} n": self.n,
        }
        if self.choices:
            optimal_low, optimal_high = self.optimal_interval
            metrics |= {
                f"{group} Optimal Moves": self.optimal_share,
                f"{group} Optimal Moves low": optimal_low,
                f"{group} Optimal Moves high": optimal_high,
                f"{group} n (choices)": self.choices,
            }
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


@dataclass(slots=True)
class _Moves:
    """Number of choices and of optimal moves, and the sums for the error of their ratio."""

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
        """Return the 95 % interval of the share of optimal moves.

        It is a ratio estimate over games (Cochran 1977, section 6.4), at least as wide as Wilson's interval, which
        assumes independent moves.
        """
        low, high = wilson_interval(self.optimal, self.choices)
        if games < 2 or not self.choices:
            return low, high
        share = self.optimal / self.choices
        squares = self.optimal_squared - 2 * share * self.product + share * share * self.choices_squared
        half = Z_95 * math.sqrt(max(squares, 0.0) * games / (games - 1)) / self.choices
        return min(low, max(0.0, share - half)), max(high, min(1.0, share + half))


class Tally:
    """Counts of one model's games on one env against one opponent."""

    def __init__(self) -> None:
        self.void = self.invalid = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._rewards = self._squares = 0.0
        self._moves = _Moves()

    def add_record(self, record: GameRecord, pid: int) -> None:
        """Count a game from the view of the model at seat `pid`."""
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
        self._moves = _Moves(**state.get("moves", {}))  # absent in a checkpoint of an earlier version

    def evaluation(self, label: str, model: str, step: int, env_id: str, opponent: str) -> Evaluation:
        n = self._outcomes.total()
        mean = self._rewards / n if n else math.nan
        squares = self._squares - n * mean * mean
        is_rounding = squares < 1e-12 * self._squares  # such a remainder is left if all rewards are 0.1
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
    """Return the prefix of an evaluation's metric names."""
    what = "concurrent checkpoint" if label == "concurrent" else "checkpoint"
    return f"evaluation-{env_id} ({opponent})/{what}"


def summarise_evaluation(
    label: str, step: int, model: ModelRef, env_id: str, opponent: str, records: Sequence[GameRecord]
) -> Evaluation:
    """Return the result of one model in `records`, over all seats that it played."""
    tally, scores = Tally(), list[float | None]()
    for record in sorted(records, key=lambda record: record.spec.game_idx):  # as drawn: seed by seed
        for agent in record.spec.agent_specs:
            if agent.model == model:
                tally.add_record(record, agent.pid)
                is_void = record.end == "void"
                scores.append(None if is_void else score(record.outcomes[agent.pid], record.rewards[agent.pid]))
    seats = records[0].spec.num_players if records else 1
    by_seed = tuple(tuple(scores[i : i + seats]) for i in range(0, len(scores), seats))
    return replace(tally.evaluation(label, model.uid, step, env_id, opponent), scores=by_seed)


def score(outcome: Outcome, reward: float) -> float:
    """Return the points of a game, or its reward in a single-player env."""
    return reward if outcome == "na" else POINTS[outcome]


def with_points(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of eval.jsonl with its points, which earlier versions omitted."""
    if "points" in line or line.get("win_rate") is None:
        return {"points": None} | line
    wins, draws, losses = line["wins"], line["draws"], line["losses"]
    points = (wins + draws / 2) / (wins + draws + losses)
    return line | {"points": points, "points_interval": list(points_interval(wins, draws, losses))}
