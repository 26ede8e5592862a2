"""A policy that is known from answers alone: their counts by decision state, and the exploitability that they show.

The answers of each state are in two halves. A best response to one half is valued against the other, and the reverse,
so that answers which look weak by chance do not count as a weakness. On average that is at most the exploitability of
the policy, and a best response to all answers, valued against the same answers, wins at least as much. The 95 %
interval reaches from 1.96 standard errors below the first value to 1.96 above the second.
Source: Mak, Morton, Wood 1999, "Monte Carlo bounding techniques for determining solution quality in stochastic
programs".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from unstable_lite.errors import OpponentError
from unstable_lite.games.openspiel.game_tree import DecisionState, GameTree, Policy
from unstable_lite.games.openspiel.prompts import read_action
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.rng import derive_seed
from unstable_lite.rollout.collector import LockStep, play_all
from unstable_lite.rollout.run_game import MAX_ACTION_CHARS
from unstable_lite.types import GameSpec, Reply

Floats = npt.NDArray[np.float64]

RESAMPLES = 200
PRIOR = 1.0
"""Number of answers of which each state's resamples have more than its counts, spread over all possible answers. An
answer that was never given is rare, not impossible, so the interval has a width."""
Z_95 = 1.96
TRIES = 8
"""Number of attempts to get one answer of an endpoint, each with its client's own retries."""


def _shares(counts_OR: Floats) -> Floats:
    return np.asarray(counts_OR[:-1] / counts_OR.sum(0))


def _legal_shares(counts_OR: Floats) -> Floats:
    """Return the shares among legal answers; uniform if there are none, as in a resample."""
    total_R = counts_OR[:-1].sum(0)
    return np.where(total_R > 0, counts_OR[:-1] / np.maximum(total_R, 1), 1 / (len(counts_OR) - 1))


def _with_resamples(counts_2O: Floats, rng: np.random.Generator) -> Floats:
    """Return counts of shape `(2, O, R)`: the given ones, then those of resamples."""
    weight_O = counts_2O.sum(0) + PRIOR / counts_2O.shape[1]
    sizes = counts_2O.sum(1).astype(int)[:, None]
    drawn_2RO = rng.multinomial(sizes, weight_O / weight_O.sum(), size=(2, RESAMPLES))
    return np.concatenate([counts_2O[:, :, None], drawn_2RO.transpose(0, 2, 1)], axis=2)


class SampledPolicy:
    """Counts of answers. Shapes: `A` legal actions, `O` these and any other answer, `R` counts, then resamples."""

    def __init__(self, tree: GameTree) -> None:
        self._tree = tree
        self.counts_2O = [np.zeros((2, len(state.actions) + 1)) for state in tree.states]
        """Counts in both halves of each decision state's legal actions, and of all other answers."""

    def add(self, state: int, half: int, action: str | None) -> None:
        """Count an answer in one of the halves 0 and 1. `action`: None for an answer that is not legal."""
        actions = self._tree.states[state].actions
        self.counts_2O[state][half, len(actions) if action is None else actions.index(action)] += 1

    @property
    def num_answers(self) -> int:
        return int(sum(counts.sum() for counts in self.counts_2O))

    @property
    def rest(self) -> float:
        """Mean share of answers that are not legal, over the decision states."""
        return float(np.mean([counts[:, -1].sum() / counts.sum() for counts in self.counts_2O]))

    def halves(self) -> tuple[Policy, Policy]:
        """Return the shares of the legal actions in each half; the rest are other answers."""
        first, second = ([_shares(counts[half]) for counts in self.counts_2O] for half in (0, 1))
        return first, second

    def metrics(self) -> dict[str, float]:
        """Return both exploitabilities with their intervals, and `rest`, the share of other answers.

        That of the legal answers is left out unless each half has one in every decision state.
        """
        found = {"exploitability": self.exploitability()}
        if all(counts[:, :-1].any(axis=1).all() for counts in self.counts_2O):
            found["exploitability_legal"] = self.exploitability(_legal_shares)
        ends = ("", "_low", "_high")
        metrics = {f"{name}{end}": x for name, each in found.items() for end, x in zip(ends, each, strict=True)}
        return metrics | {"rest": self.rest}

    def exploitability(self, shares: Callable[[Floats], Floats] = _shares) -> tuple[float, float, float]:
        """Return an estimate and its interval. `shares`: function from counts to shares of the legal actions."""
        tree, rng = self._tree, np.random.default_rng(0)
        counts_2OR = [_with_resamples(counts, rng) for counts in self.counts_2O]
        first, second = ([shares(counts[half]) for counts in counts_2OR] for half in (0, 1))
        whole = [shares(counts.sum(0)) for counts in counts_2OR]

        def won(fitted: Policy, valued: Policy) -> Floats:
            """Return the mean utility over both seats of best responses to the counts, by counts and resamples."""
            counted = [shares_AR[:, 0] for shares_AR in fitted]
            return np.asarray(sum(of.utility for of in tree.best_outcomes(counted, valued)) / 2)

        least_R, most_R = (won(first, second) + won(second, first)) / 2, won(whole, whole)
        value, low = float(least_R[0]), least_R[0] - Z_95 * least_R[1:].std(ddof=1)
        return value, float(low), max(value, float(most_R[0] + Z_95 * most_R[1:].std(ddof=1)))


async def sample_policy(
    seats: PlayerFactory,
    spec: GameSpec,
    tree: GameTree,
    samples: int,
    concurrency: int,
    lock_step: LockStep | None = None,
) -> SampledPolicy:
    """Return the counts of `samples` answers, at least two, of the seat's player in each decision state.

    Every answer is the first one of a new player, sampled as in training. spec: game that names the players; its number
    and those below it seed the answers of a run that repeats exactly. lock_step: receiver of the seats' requests in
    such a run. Raises the errors of `Player.act`, possibly in an ExceptionGroup.
    """
    counted = SampledPolicy(tree)
    questions = [(state, number) for state in range(len(tree.states)) for number in range(samples)]

    async def ask(question: tuple[int, int]) -> None:
        state, number = question
        asked = tree.states[state]
        index = state * samples + number
        game = replace(spec, game_idx=spec.game_idx - index, seed=derive_seed(spec.seed, index), sampling=None)
        reply = await _answer(seats, game, asked)
        counted.add(state, number % 2, read_action(reply.action[:MAX_ACTION_CHARS], asked.actions))

    if lock_step is None:
        await play_all(questions, ask, concurrency)
    else:
        for start in range(0, len(questions), concurrency):
            await lock_step.play([ask(question) for question in questions[start : start + concurrency]])
    return counted


async def _answer(seats: PlayerFactory, spec: GameSpec, asked: DecisionState, tries: int = TRIES) -> Reply:
    player = seats.players(spec)[asked.seat]
    try:
        await seats.wait_for_opponents(spec)
        return await player.act(asked.observation)
    except OpponentError:
        if tries == 1:
            raise
        return await _answer(seats, spec, asked, tries - 1)
