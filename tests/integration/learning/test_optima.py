"""Train every algorithm on three small games and compare with the exact optimum, over three seeds.

Games go through the real reward transforms (each algorithm's own defaults), the real buffer and the real learner. The
policy is a language model that reads a state as a prompt of two tokens and answers with one token of eight. Each seed
has its own random base model, LoRA and games. The value of a policy is computed exactly, not sampled.

A policy passes if its value is within BOUND of the optimum. BOUND is about a quarter of the smallest distance between
the optimum and the best policy that has not learnt the point of a game:

- `bandit` requires actions that depend on the state: each of two states has a different right token. A policy that
  ignores the state is at least 0.5 from the optimum. For algorithms with a group baseline, games from the second state
  pay SHIFT less. The baseline removes SHIFT if the games of a group have the same start; otherwise SHIFT hides
  everything else.
- `control` requires that the first turn is credited with the result of the second. Token 4 leads to a good state, all
  others to a bad one, and the tokens that are right in these two states lead to the bad one. So a policy whose first
  turn only imitates its second ends at 0.4, which is 0.6 from the optimum. A policy with the right first turn and a
  random second one is 0.37 from it. The good state pays more than the bad one for every second token. Otherwise a
  policy that learnt the bad state first would be at a local optimum, and even the exact gradient would leave it there.
- `chain` requires that a discount is applied: an even token ends the game at once with 0.8, an odd one leads through
  two more turns to 1.0, which a discount of 0.7 per turn makes 0.49. A policy that ignores the discount, or that is
  paid for the number of its turns, is 0.31 from the optimum. Only algorithms with a critic discount (`learner.gamma`).
  For the others the game itself pays 0.49.
- `credit` requires of a critic that the value of the second state is passed back, discounted, to the first one, which
  pays nothing: odd tokens lead to the second state, in which only the even token 6 wins. Both states are visited at
  the end, so that the critic's estimates must be the values 0.9 and 1 there.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.game_records import make_item
from fakes.token_games import (
    GROUP,
    PROMPTS,
    VOCAB,
    Probabilities,
    distributions,
    make_config,
    make_record,
    make_step,
    save_base,
)
from unstable_lite.learner import LEARNERS, load_learner
from unstable_lite.learner.client import train_items
from unstable_lite.orchestrator.wiring import make_buffer
from unstable_lite.types import Step

BOUND = 0.075
SEEDS = range(2)
BATCH = 96
SHIFT = 30.0
CRITICS = [name for name, kind in LEARNERS.items() if kind.has_critic]


@dataclass(frozen=True)
class Game:
    num_starts: int
    """Number of possible start states, which are the first ones."""
    num_states: int
    turn: Callable[[int, int], int | float]
    """Next state (int), or reward of a game that ends (float), as a function of a state and a token."""
    optimum: float
    num_updates: int
    """Number of updates that suffice; algorithms with several steps per update (`is_clipped`) get half as many."""
    discount: float = 1.0
    """Factor on the reward for every turn before the last one."""

    def values(self, probability_SV: Probabilities) -> list[float]:
        """Return the expected discounted reward from each state, which only leads to states with a higher number."""
        values = np.zeros(self.num_states)
        for state in reversed(range(self.num_states)):
            outcomes = [self.turn(state, token) for token in range(VOCAB)]
            paid = [self.discount * values[each] if isinstance(each, int) else each for each in outcomes]
            values[state] = probability_SV[state] @ paid
        return [float(value) for value in values]

    def value(self, probability_SV: Probabilities) -> float:
        return float(np.mean(self.values(probability_SV)[: self.num_starts]))


def bandit(state: int, token: int) -> float:
    return 1.0 if token == 2 + state else 0.4 if token == 0 else 0.0


def control(state: int, token: int) -> int | float:
    if state == 0:
        return 1 if token == 4 else 2
    if state == 1:
        return 1.0 if token >= 6 else 0.5
    return 0.4 if token == 3 else 0.0


def chain(state: int, token: int) -> int | float:
    if state == 0:
        return 1 if token % 2 else 0.8
    return 2 if state == 1 else 1.0


def credit(state: int, token: int) -> int | float:
    if state == 0:
        return 1 if token % 2 else 0.0
    return 1.0 if token == 6 else 0.0


GAMES = {
    "bandit": Game(num_starts=2, num_states=2, turn=bandit, optimum=1.0, num_updates=30),
    "control": Game(num_starts=1, num_states=3, turn=control, optimum=1.0, num_updates=40),
    "chain": Game(num_starts=1, num_states=3, turn=chain, optimum=0.8, num_updates=20, discount=0.7),
    "credit": Game(num_starts=1, num_states=2, turn=credit, optimum=0.9, num_updates=50, discount=0.9),
}


@pytest.fixture(scope="module")
def base_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a base model of 17,000 weights for each seed. Every token has a probability of at least 0.02."""
    return [save_base(tmp_path_factory.mktemp("policy"), seed, width=64, spread=0.1) for seed in SEEDS]


def play(
    game: Game, probability_SV: Probabilities, start: int, version: int, rng: np.random.Generator
) -> tuple[list[Step], float]:
    steps: list[Step] = []
    where: int | float = start
    while isinstance(where, int):
        token, step = make_step(where, probability_SV, version, rng)
        steps.append(step)
        where = game.turn(where, token)
    return steps, where


def train(base_model: Path, algorithm: str, game: Game, seed: int) -> Any:
    """Return the learner after the updates of a game."""
    kind, settings = LEARNERS[algorithm], {"learning_rate": 5e-3, "gradient_clipping": 1.0, "ppo_epochs": 3}
    config = make_config(base_model, algorithm, seed, 1, batch_size=BATCH, gamma=game.discount, **settings)
    learner: Any = load_learner(config, "cpu")
    buffer, rng = make_buffer(config), np.random.default_rng(seed)
    paid_discount = 1.0 if kind.has_critic else game.discount
    shift = SHIFT if config.group_baseline else 0.0
    number = start = 0
    for version in range(game.num_updates // (2 if kind.is_clipped else 1)):
        probability_SV = distributions(learner, len(PROMPTS))
        while not buffer.has_batch(BATCH, version) or number % GROUP:
            if number % GROUP == 0:
                start = int(rng.integers(game.num_starts))
            steps, reward = play(game, probability_SV, start, version, rng)
            reward = reward * paid_discount ** (len(steps) - 1) - shift * start
            buffer.add_game(make_record(number, {0: steps}, {0: reward}))
            number += 1
        batch = asyncio.run(buffer.get_batch(BATCH, version))
        assert learner.update(train_items(batch), version + 1).skipped is None
    return learner


def test_optimum_is_the_value_of_the_best_policy():
    for game in GAMES.values():
        policies = product(range(VOCAB), repeat=game.num_states)
        assert max(game.value(np.eye(VOCAB)[list(tokens)]) for tokens in policies) == pytest.approx(game.optimum)


def test_bound_is_a_quarter_of_the_smallest_distance_without_learning():
    token_V, by_chance = np.eye(VOCAB), np.full(VOCAB, 1 / VOCAB)
    ignorant = [
        *(("bandit", [token_V[token], token_V[token]]) for token in range(VOCAB)),
        ("control", [by_chance, token_V[6], token_V[3]]),
        ("control", [token_V[4], by_chance, by_chance]),
        ("chain", [token_V[1], token_V[0], token_V[0]]),
        ("credit", [by_chance, token_V[6]]),
    ]
    distances = [GAMES[name].optimum - GAMES[name].value(np.stack(policy)) for name, policy in ignorant]
    assert BOUND == pytest.approx(min(distances) / 4, abs=0.003)


@pytest.mark.parametrize(
    ("algorithm", "name", "seeds"),
    [
        ("reinforce", "bandit", SEEDS[:1]),
        (CRITICS[0], "credit", SEEDS[:1]),
        *(
            pytest.param(algorithm, name, SEEDS, marks=pytest.mark.nightly)
            for algorithm, name in product(LEARNERS, GAMES)
            if name != "credit" or algorithm in CRITICS
        ),
    ],
)
def test_every_seed_comes_within_the_bound_of_the_optimum(base_models, algorithm, name, seeds):
    game, distances = GAMES[name], []
    for seed in seeds:
        learner = train(base_models[seed], algorithm, game, seed)
        values = game.values(distributions(learner, len(PROMPTS)))
        distances.append(game.optimum - float(np.mean(values[: game.num_starts])))
        if name == "credit":
            states = [make_item(prompt, [0]) for prompt in PROMPTS[:2]]
            assert learner.training.critic.estimate(states) == pytest.approx(values, abs=0.1)
    assert max(distances) <= BOUND, distances
