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
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from unstable_lite.config import Config
from unstable_lite.learner import LEARNERS, load_learner
from unstable_lite.learner.client import train_items
from unstable_lite.orchestrator.wiring import make_buffer
from unstable_lite.planning.defaults import resolve_defaults
from unstable_lite.types import AgentSpec, GameRecord, GameSpec, Generation, ModelRef, PlayerTrajectory, Step

ENV, VOCAB, BOUND = "Nim-v0-train", 8, 0.075
SEEDS = range(3)
BATCH, GROUP = 96, 8
SHIFT = 30.0
PROMPTS = np.array([[1, 7], [2, 7], [3, 7]], np.int32)
"""Prompts of the states."""
MODEL = ModelRef(uid="current", kind="checkpoint", adapter_version=0)
AGENT = AgentSpec(pid=0, model=MODEL, collect_data=True, prompt_template="default", action_extraction_fn="default")

Probabilities = npt.NDArray[np.float64]
"""Probability of each token in each state, of shape `SV`."""


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

    def value(self, probability_SV: Probabilities) -> float:
        """Return the expected discounted reward; a state only leads to states with a higher number."""
        values = np.zeros(self.num_states)
        for state in reversed(range(self.num_states)):
            outcomes = [self.turn(state, token) for token in range(VOCAB)]
            paid = [self.discount * values[each] if isinstance(each, int) else each for each in outcomes]
            values[state] = probability_SV[state] @ paid
        return float(values[: self.num_starts].mean())


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


GAMES = {
    "bandit": Game(num_starts=2, num_states=2, turn=bandit, optimum=1.0, num_updates=30),
    "control": Game(num_starts=1, num_states=3, turn=control, optimum=1.0, num_updates=40),
    "chain": Game(num_starts=1, num_states=3, turn=chain, optimum=0.8, num_updates=20, discount=0.7),
}


@pytest.fixture(scope="module")
def base_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a base model of 17,000 weights for each seed. Every token has a probability of at least 0.02."""
    torch.set_num_threads(1)  # the model is too small for two
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(
        **shape, vocab_size=VOCAB, num_key_value_heads=1, head_dim=8, max_position_embeddings=8, initializer_range=0.1
    )
    paths = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        paths.append(tmp_path_factory.mktemp("policy"))
        Qwen3ForCausalLM(config).save_pretrained(paths[-1])
    return paths


def make_config(base_model: Path, algorithm: str, seed: int, gamma: float) -> Config:
    config = {
        "model_name": str(base_model),
        "algorithm": algorithm,
        "run": {"seed": seed, "group_size": GROUP if algorithm in ("grpo", "rloo") else 1},
        "engine": {"temperature": 1.0, "max_generation_len": 1},
        "learner": {
            "batch_size": BATCH,
            "dtype": "float32",
            "gamma": gamma,
            "learning_rate": 5e-3,
            "critic_learning_rate": 1e-2,
            "gradient_clipping": 1.0,
            "ppo_epochs": 3,
            "activation_checkpointing": False,
        },
        "lora": {"lora_rank": 4, "lora_alpha": 8},
        "train_envs": [{"env_id": ENV, "num_players": 1, "num_actors": 1}],
    }
    return resolve_defaults(Config.model_validate(config))


def distributions(learner: Any) -> Probabilities:
    with torch.no_grad(), learner.policy.evaluating():
        logits_SV = learner.policy.model(input_ids=torch.tensor(PROMPTS)).logits[:, -1]
    probability_SV: Probabilities = logits_SV.double().softmax(-1).numpy()
    return probability_SV


def play(
    game: Game, probability_SV: Probabilities, start: int, version: int, rng: np.random.Generator
) -> tuple[list[Step], float]:
    steps: list[Step] = []
    where: int | float = start
    while isinstance(where, int):
        token = int(rng.choice(VOCAB, p=probability_SV[where]))
        generation = Generation(
            prompt_ids=PROMPTS[where],
            completion_ids=np.array([token], np.int32),
            logprobs=np.log(probability_SV[where, [token]]).astype(np.float32),
            text=str(token),
            finish_reason="stop",
            adapter_version=version,
        )
        feedback = {"correct_answer_format": True, "invalid_move": False}
        step = Step(pid=0, obs="", act="", reward=0.0, env_id=ENV, generation=generation, format_feedback=feedback)
        steps.append(step)
        where = game.turn(where, token)
    return steps, where


def record_of(steps: list[Step], reward: float, number: int) -> GameRecord:
    group = {"group_idx": number // GROUP, "agent_specs": (AGENT,), "num_players": 1, "max_turns": 9}
    spec = GameSpec(game_idx=number, kind="train", env_id=ENV, seed=0, **group)
    trajectory = PlayerTrajectory(
        pid=0, env_id=ENV, game_idx=number, model=MODEL, steps=steps, final_reward=reward, num_turns=len(steps)
    )
    return GameRecord(
        spec=spec, turns=[], trajectories=[trajectory], rewards={0: reward}, outcomes={0: "na"}, end="natural"
    )


def distance(base_models: list[Path], algorithm: str, name: str, seed: int) -> float:
    """Train, and return the distance of the policy's value from the optimum."""
    game, kind = GAMES[name], LEARNERS[algorithm]
    config = make_config(base_models[seed], algorithm, seed, game.discount)
    learner: Any = load_learner(config, "cpu")
    buffer, rng = make_buffer(config), np.random.default_rng(seed)
    paid_discount = 1.0 if kind.has_critic else game.discount
    shift = SHIFT if config.group_baseline else 0.0
    number = start = 0
    for version in range(game.num_updates // (2 if kind.is_clipped else 1)):
        probability_SV = distributions(learner)
        while not buffer.has_batch(BATCH, version) or number % GROUP:
            if number % GROUP == 0:
                start = int(rng.integers(game.num_starts))
            steps, reward = play(game, probability_SV, start, version, rng)
            reward = reward * paid_discount ** (len(steps) - 1) - shift * start
            buffer.add_game(record_of(steps, reward, number))
            number += 1
        batch = asyncio.run(buffer.get_batch(BATCH, version))
        assert learner.update(train_items(batch), version + 1).skipped is None
    return game.optimum - game.value(distributions(learner))


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
    ]
    distances = [GAMES[name].optimum - GAMES[name].value(np.stack(policy)) for name, policy in ignorant]
    assert BOUND == pytest.approx(min(distances) / 4, abs=0.003)


@pytest.mark.parametrize(
    ("algorithm", "name", "seeds"),
    [
        *((algorithm, "bandit", SEEDS[:1]) for algorithm in ("reinforce", "ppo", "rloo")),
        *(pytest.param(*each, SEEDS, marks=pytest.mark.nightly) for each in product(LEARNERS, GAMES)),
    ],
)
def test_every_seed_comes_within_the_bound_of_the_optimum(base_models, algorithm, name, seeds):
    distances = [distance(base_models, algorithm, name, seed) for seed in seeds]
    assert max(distances) <= BOUND, distances
