"""Metrics of a model's choices at given positions: share of optimal moves, entropy, dependence on the position.

Owns the positions, which are those of seeded games of random legal players, and the metrics, with intervals from a
bootstrap over games. The probabilities are those of `evaluation.scoring`. Loads no model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from unstable_lite.config.env_ids import is_judged
from unstable_lite.config.games import EnvSpec, EvalEnvSpec
from unstable_lite.dashboards.terminal import plain_table
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.plan import Cell
from unstable_lite.evaluation.results import write_csv
from unstable_lite.games.env_catalogue import env_family
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.openspiel.game_tree import renormalised, solved_moves
from unstable_lite.games.players.lookahead import GREEDY_GAMES, greedy_actions, has_solver, optimal_actions
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.rng import derive_seed
from unstable_lite.tracking.intervals import Z_95, percent

Floats = npt.NDArray[np.float64]

COLUMNS = {
    "optimal": "optimal",
    "greedy": "win or block",
    "rest": "not a legal answer",
    "action_entropy": "entropy",
    "state_dependence": "state dependence",
}
"""Metrics, with their names in a terminal's table."""
BOOTSTRAP = 200
MOST_NEWTON_STEPS = 40
CONVERGED = 1e-7
"""Improvement in nats below which the fit ends."""
LONGEST_STEP = 3.0
"""Largest change of a log-weight in one step."""
RIDGE = 1e-6
"""Curvature that is added for weights that no position determines."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionDistribution:
    """Probability of every legal action at one position. `A`: the legal actions."""

    actions: tuple[str, ...]
    probabilities: Floats
    """Probabilities of the actions; their sum is 1 - `rest`."""

    @property
    def rest(self) -> float:
        """Probability of all other answers: illegal moves, and legal ones in another notation."""
        return max(0.0, 1.0 - float(self.probabilities.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    game: int
    turn: int
    """Number of moves of all players before it."""
    observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Metric with its 95 % interval, from a bootstrap over games."""

    value: float
    low: float
    high: float
    n: int
    """Number of positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Metrics of one model at all positions of one env. Shares are between 0 and 1, entropies in nats."""

    model: str
    env_id: str
    positions: int
    games: int
    optimal: Estimate | None
    """Probability of an optimal move, at positions with a worse legal move; None for a game without a solver."""
    greedy: Estimate | None
    """Probability of a winning move, or else a block, at positions with one; None without `scripted:greedy`."""
    rest: Estimate
    """Probability of an answer that is not a legal move, or is in another notation."""
    action_entropy: Estimate
    """Entropy over the legal moves."""
    state_dependence: Estimate
    """See `state_dependence`."""


def with_positions(cells: Sequence[Cell], say: Callable[[str], None]) -> list[Cell]:
    """Return the cells whose env has positions; report those left out with `say`. Raises ConfigError if none is left.

    Questions have none: there is no list of legal answers.
    """
    for env_id in dict.fromkeys(cell.env.env_id for cell in cells if is_judged(cell.env.env_id)):
        say(f"left out: {env_id} has no list of legal answers; evaluate it with `eval`")
    kept = [cell for cell in cells if not is_judged(cell.env.env_id)]
    if not kept:
        raise ConfigError("there is no env to probe: name one that has legal actions with --env")
    return kept


def random_positions(env: EnvSpec, games: int, seed: int = 0) -> list[Position]:
    """Return every position of seeded games between random legal players, as the player to move sees it.

    Raises UnsupportedEnvError for an env family whose legal moves cannot be read.
    """
    positions = []
    for game in range(games):
        rng = random.Random(derive_seed(seed, "probe", env.env_id, game))
        environment = environment_of(env, rng.getrandbits(31))
        is_over, turn = False, 0
        while not is_over and turn < env.max_turns:
            _, observation = environment.observe()
            positions.append(Position(game=game, turn=turn, observation=observation))
            is_over = environment.step(rng.choice(legal_actions(env.env_id, observation)))
            turn += 1
    return positions


def uniform_distribution(env_id: str, observation: str) -> ActionDistribution:
    """Return the distribution of `scripted:random`."""
    actions = legal_actions(env_id, observation)
    return ActionDistribution(actions=tuple(actions), probabilities=np.full(len(actions), 1 / len(actions)))


def probe(
    model: str, env: EvalEnvSpec, positions: Sequence[Position], distributions: Mapping[str, ActionDistribution]
) -> Probe:
    """Return all metrics of one model. `distributions`: by observation."""
    at = [distributions[position.observation] for position in positions]
    games = [position.game for position in positions]

    def share_of(good_actions: Callable[[str, str], Sequence[str]]) -> Estimate:
        good = {observation: good_actions(env.env_id, observation) for observation in distributions}
        shares = [_share(good[position.observation], of) for position, of in zip(positions, at, strict=True)]
        return mean_estimate(shares, games)

    family, solved = env_family(env.env_id.rpartition(":")[2]), solved_moves(env.env_id)
    optimal = share_of(optimal_actions) if has_solver(family) else None
    if solved is not None:
        optimal = share_of(lambda _, observation: solved[observation])
    return Probe(
        model=model,
        env_id=env.env_id,
        positions=len(distributions),
        games=len(set(games)),
        optimal=optimal,
        greedy=share_of(greedy_actions) if family in GREEDY_GAMES else None,
        rest=mean_estimate([of.rest for of in at], games),
        action_entropy=mean_estimate(
            [_entropy(_normalised(of)) if of.probabilities.sum() > 0 else math.nan for of in at], games
        ),
        state_dependence=state_dependence(at, [p.turn for p in positions], games),
    )


def mean_estimate(numbers: Sequence[float], games: Sequence[int]) -> Estimate:
    """Return the mean of the values that are not NaN. `games`: the game of each value."""
    number_N = np.array(numbers)
    counts_N = np.isfinite(number_N)
    if not counts_N.any():
        return Estimate(value=math.nan, low=math.nan, high=math.nan, n=0)
    weight_BN = _bootstrap_weights(games) * counts_N
    weight_BN = weight_BN[weight_BN.sum(1) > 0]
    mean_B = weight_BN @ np.where(counts_N, number_N, 0.0) / weight_BN.sum(1)
    return _around(float(number_N[counts_N].mean()), mean_B, int(counts_N.sum()))


def state_dependence(
    distributions: Sequence[ActionDistribution], turns: Sequence[int], games: Sequence[int]
) -> Estimate:
    """Return the dependence of the choice among legal moves on the rest of the position, in nats.

    It is the mean KL divergence from the policy to the nearest blind one: for each turn one fixed weight
    for every action, shared out among the legal ones. So it is 0 for random legal play, for a constant action and for
    a fixed list of preferences, and where every action is legal it is the mutual information I(action; state | turn).

    The nearest policy is fitted to these positions, which biases the plain value downwards; the bias that the bootstrap
    over games shows is added. `turns`, `games`: turn and game of each distribution.
    """
    turn_N = np.array(turns)
    weight_BN = np.vstack([np.ones(len(turn_N)), _bootstrap_weights(games)])
    total_B = np.zeros(len(weight_BN))
    for turn in sorted(set(turns)):
        at_turn = np.flatnonzero(turn_N == turn)
        total_B += _nats_to_blind([distributions[int(index)] for index in at_turn], weight_BN[:, at_turn])
    total_B /= weight_BN.sum(1)
    value, resampled_B = float(total_B[0]), total_B[1:]
    return _around(2 * value - float(resampled_B.mean()), resampled_B, len(turn_N))


def _nats_to_blind(distributions: Sequence[ActionDistribution], weight_BN: Floats) -> Floats:
    """Return, for each row of position weights, the weighted sum of the divergences from the best blind policy.

    `N` positions of one turn, `A` actions. Minimises a convex function of log-weights by Newton's method; a step is
    limited, and the least of the values counts, so that a step that was too long does no harm.
    """
    actions = sorted({action for of in distributions for action in of.actions})
    column_of = {action: column for column, action in enumerate(actions)}
    p_NA = np.zeros((len(distributions), len(actions)))
    offset_NA = np.full(p_NA.shape, -np.inf)  # 0 for legal actions
    for row, of in enumerate(distributions):
        columns = [column_of[action] for action in of.actions]
        p_NA[row, columns], offset_NA[row, columns] = _normalised(of), 0.0
    entropy_N = np.array([_entropy(_normalised(of)) for of in distributions])
    logit_BA, least_B = np.zeros((len(weight_BN), p_NA.shape[1])), np.full(len(weight_BN), np.inf)
    diagonal = np.arange(p_NA.shape[1])
    for _ in range(MOST_NEWTON_STEPS):
        logit_BNA = logit_BA[:, None, :] + offset_NA
        top_BN1 = logit_BNA.max(-1, keepdims=True)
        q_BNA = np.exp(logit_BNA - top_BN1)
        total_BN1 = q_BNA.sum(-1, keepdims=True)
        q_BNA /= total_BN1
        cross_BN = (top_BN1 + np.log(total_BN1))[..., 0] - logit_BA @ p_NA.T
        loss_B = (weight_BN * cross_BN).sum(1)
        is_converged_B = np.abs(loss_B - least_B) < CONVERGED
        least_B = np.minimum(loss_B, least_B)
        if is_converged_B.all():
            break
        slope_BA = np.einsum("bn,bna->ba", weight_BN, q_BNA - p_NA)
        curvature_BAA = -np.einsum("bn,bna,bnc->bac", weight_BN, q_BNA, q_BNA, optimize=True)
        curvature_BAA[:, diagonal, diagonal] += np.einsum("bn,bna->ba", weight_BN, q_BNA) + RIDGE
        step_BA = -np.linalg.solve(curvature_BAA, slope_BA[..., None])[..., 0]
        logit_BA += step_BA * np.minimum(1.0, LONGEST_STEP / np.maximum(np.abs(step_BA).max(1, keepdims=True), 1e-12))
    nats_B: Floats = np.maximum(least_B - weight_BN @ entropy_N, 0.0)
    return nats_B


def _bootstrap_weights(games: Sequence[int]) -> Floats:
    """Return the count of each position in each of BOOTSTRAP samples of as many whole games."""
    names, game_N = np.unique(games, return_inverse=True)
    share = np.full(len(names), 1 / len(names))
    drawn_BG = np.random.default_rng(0).multinomial(len(names), share, size=BOOTSTRAP)
    return drawn_BG[:, game_N].astype(np.float64)


def _around(value: float, resampled_B: Floats, n: int) -> Estimate:
    half = Z_95 * float(resampled_B.std(ddof=1))
    return Estimate(value=value, low=value - half, high=value + half, n=n)


def _share(good: Sequence[str], of: ActionDistribution) -> float:
    """Return the probability of the good actions; NaN if all legal actions are good."""
    if len(good) == len(of.actions):
        return math.nan
    return float(sum(p for action, p in zip(of.actions, of.probabilities, strict=True) if action in good))


def _normalised(of: ActionDistribution) -> Floats:
    """Return the probabilities of the legal actions given that the answer is one of them."""
    return renormalised([of.probabilities])[0]


def _entropy(p_A: Floats) -> float:
    return -float((p_A * np.log(np.where(p_A > 0, p_A, 1.0))).sum())


def write_probes(path: Path, probes: Sequence[Probe]) -> None:
    """Write a CSV file with a row for each model and env; a metric has its value, `_low`, `_high` and `_n`."""
    rows = []
    for of in probes:
        row = asdict(of)
        for name in COLUMNS:
            parts = row.pop(name) or dict.fromkeys(("value", "low", "high", "n"))
            row |= {name: parts.pop("value")} | {f"{name}_{part}": number for part, number in parts.items()}
        rows.append(row)
    write_csv(path, list(rows[0]), rows)


def probe_tables(probes: Sequence[Probe]) -> list[Table]:
    """Return one table for each env, with 95 % intervals and the metrics that the env has."""
    tables = []
    for env_id in dict.fromkeys(of.env_id for of in probes):
        rows = [of for of in probes if of.env_id == env_id]
        names = [name for name in COLUMNS if any(getattr(of, name) is not None for of in rows)]
        title = f"{env_id}: choices at {rows[0].positions} random positions"
        tables.append(plain_table(title, ["model"], [COLUMNS[name] for name in names]))
        for of in rows:
            tables[-1].add_row(of.model, *(_shown(name, getattr(of, name)) for name in names))
    return tables


def _shown(name: str, estimate: Estimate | None) -> str:
    if estimate is None or not estimate.n:
        return "–"
    half = estimate.high - estimate.value
    if name in ("action_entropy", "state_dependence"):  # in nats
        return f"{estimate.value:.3f} ± {half:.3f}"
    return f"{percent(estimate.value)} ± {percent(half)} (n={estimate.n})"
