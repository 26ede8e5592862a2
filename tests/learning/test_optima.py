"""Every algorithm against the exact optimum of three small games, over five seeds.

Games go through the real reward transforms (each algorithm's own defaults), the real buffer and the real learner, so
that a wrong sign, baseline or discount anywhere between the two shows. Each game's value is computed, not sampled. The
policy is a language model of 2,000 weights that reads a state of two tokens and answers with one token of eight.

A policy passes if it is within BOUND of the optimum. The bound is a quarter of the smallest distance from the optimum
to the best policy that has not learnt what the game is about:

- `bandit`: two states, each with a right token of its own (1.0), and token 0 (0.4) in both. A policy that does not
  read the state gets 0.5 at most.
- `control`: the first token, odd or even, leads to one of two states. One pays 1.0 for its right token, the other
  0.6. A policy without credit over turns chooses at random first and gets 0.8 at most; one without the second turn
  gets 0.125.
- `chain`: an even token ends the game at once with 0.8, an odd one leads through two turns to 1.0. With a discount of
  0.7 a turn the chain is worth 0.49. A policy that does not discount takes the chain and is 0.31 away.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from unstable_lite.algorithms import resolve_defaults
from unstable_lite.config import Config
from unstable_lite.learners import LEARNERS, load_learner
from unstable_lite.learners.client import train_items
from unstable_lite.runtime import make_buffer
from unstable_lite.types import AgentSpec, GameRecord, GameSpec, Generation, ModelRef, PlayerTrajectory, Step

ENV, VOCAB, GAMMA, BOUND = "Nim-v0-train", 8, 0.7, 0.05
SEEDS = range(5)
BATCH, GROUP = 96, 8

Probabilities = npt.NDArray[np.float64]
"""`SV`: of each token in each state."""


@dataclass(frozen=True)
class Game:
    num_starts: int
    num_states: int
    turn: Callable[[int, int], int | float]
    """The next state (int), or what the game pays at its end (float), for a state and a token."""
    optimum: float

    def value(self, probability_SV: Probabilities, gamma: float = 1.0) -> float:
        """Expected discounted reward, exact; a state only leads to states with a higher number."""
        values = np.zeros(self.num_states)
        for state in reversed(range(self.num_states)):
            outcomes = [self.turn(state, token) for token in range(VOCAB)]
            paid = [gamma * values[each] if isinstance(each, int) else each for each in outcomes]
            values[state] = probability_SV[state] @ paid
        return float(values[: self.num_starts].mean())


def bandit(state: int, token: int) -> float:
    return 1.0 if token == 2 + state else 0.4 if token == 0 else 0.0


def control(state: int, token: int) -> int | float:
    if state == 0:
        return 1 + token % 2
    return float(token == 6) if state == 1 else 0.6 * (token == 3)


def chain(state: int, token: int) -> int | float:
    if state == 0:
        return 1 if token % 2 else 0.8
    return 2 if state == 1 else 1.0


GAMES = {
    "bandit": Game(num_starts=2, num_states=2, turn=bandit, optimum=1.0),
    "control": Game(num_starts=1, num_states=3, turn=control, optimum=1.0),
    "chain": Game(num_starts=1, num_states=3, turn=chain, optimum=0.8),
}
NUM_UPDATES = {"reinforce": 40, "rloo": 40, "a2c": 40, "grpo": 16, "ppo": 16}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # the model is too small for two
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(
        **shape, vocab_size=VOCAB, num_key_value_heads=1, head_dim=8, max_position_embeddings=8, initializer_range=0.5
    )
    path = tmp_path_factory.mktemp("policy")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def make_config(model_path: Path, algorithm: str, game: str, seed: int) -> Config:
    config = Config.model_validate(
        {
            "model_name": str(model_path),
            "algorithm": algorithm,
            "run": {"seed": seed, "group_size": GROUP if algorithm in ("grpo", "rloo") else 1},
            "engine": {"temperature": 1.0, "max_generation_len": 1},
            "learner": {
                "batch_size": BATCH,
                "dtype": "float32",
                "learning_rate": 1.5e-2,
                "critic_learning_rate": 3e-2,
                "gamma": GAMMA if game == "chain" else 1.0,
                "gradient_clipping": 1.0,
                "ppo_epochs": 3,
                "activation_checkpointing": False,
            },
            "lora": {"lora_rank": 4, "lora_alpha": 8},
            "train_envs": [{"env_id": ENV, "num_players": 1, "num_actors": 1}],
        }
    )
    return resolve_defaults(config)


def prompt(state: int) -> npt.NDArray[np.int32]:
    return np.array([1 + state, 7], np.int32)


def distributions(learner: Any, num_states: int) -> Probabilities:
    with torch.no_grad(), learner.policy.evaluating():
        tokens = torch.tensor(np.stack([prompt(state) for state in range(num_states)]))
        logits_SV = learner.policy.model(input_ids=tokens).logits[:, -1]
    probability_SV: Probabilities = logits_SV.double().softmax(-1).numpy()
    return probability_SV


def play(
    game: Game, probability_SV: Probabilities, start: int, number: int, version: int, gamma: float, rng: Any
) -> GameRecord:
    """One game; `gamma`: the discount that the game itself takes off what it pays, for each turn before the last."""
    model = ModelRef(uid=f"ckpt-{version}", kind="checkpoint", adapter_version=version)
    agent = AgentSpec(pid=0, model=model, collect_data=True, prompt_template="default", action_extraction_fn="default")
    steps: list[Step] = []
    where: int | float = start
    while isinstance(where, int):
        token = int(rng.choice(VOCAB, p=probability_SV[where]))
        generation = Generation(
            prompt_ids=prompt(where),
            completion_ids=np.array([token], np.int32),
            logprobs=np.log(probability_SV[where, [token]]).astype(np.float32),
            text=str(token),
            finish_reason="stop",
            adapter_version=version,
        )
        feedback = {"correct_answer_format": True, "invalid_move": False}
        steps.append(
            Step(pid=0, obs="", act="", reward=0.0, env_id=ENV, generation=generation, format_feedback=feedback)
        )
        where = game.turn(where, token)
    reward = where * gamma ** (len(steps) - 1)
    trajectory = PlayerTrajectory(
        pid=0, env_id=ENV, game_idx=number, model=model, steps=steps, final_reward=reward, num_turns=len(steps)
    )
    spec = GameSpec(
        game_idx=number,
        kind="train",
        env_id=ENV,
        num_players=1,
        seed=0,
        agent_specs=(agent,),
        max_turns=9,
        group_idx=number // GROUP,
    )
    return GameRecord(
        spec=spec, turns=[], trajectories=[trajectory], rewards={0: reward}, outcomes={0: "na"}, end="natural"
    )


def distance(model_path: Path, algorithm: str, name: str, seed: int) -> float:
    """How far the trained policy's value is from the optimum."""
    game, config = GAMES[name], make_config(model_path, algorithm, name, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner: Any = load_learner(config, "cpu")
    buffer, rng = make_buffer(config), np.random.default_rng(seed)
    # Without a critic nothing discounts but the game.
    discount = GAMMA if name == "chain" else 1.0
    of_game = 1.0 if LEARNERS[algorithm].has_critic else discount
    number = start = 0
    for version in range(NUM_UPDATES[algorithm]):
        probability_SV = distributions(learner, game.num_states)
        while not buffer.has_batch(BATCH, version) or number % GROUP:
            if number % GROUP == 0:
                start = int(rng.integers(game.num_starts))
            buffer.add_game(play(game, probability_SV, start, number, version, of_game, rng))
            number += 1
        batch = asyncio.run(buffer.get_batch(BATCH, version))
        assert learner.update(train_items(batch), version + 1).skipped is None
    return game.optimum - game.value(distributions(learner, game.num_states), discount)


def test_the_optimum_is_the_value_of_the_best_policy() -> None:
    right = {"bandit": [2, 3], "control": [0, 6, 0], "chain": [0, 0, 0]}
    for name, game in GAMES.items():
        discount = GAMMA if name == "chain" else 1.0
        assert game.value(np.eye(VOCAB)[right[name]], discount) == pytest.approx(game.optimum)
    assert GAMES["chain"].value(np.eye(VOCAB)[[1, 0, 0]], GAMMA) == pytest.approx(0.49)


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("algorithm", LEARNERS)
def test_every_seed_comes_within_the_bound_of_the_optimum(model_path: Path, algorithm: str, name: str) -> None:
    distances = [distance(model_path, algorithm, name, seed) for seed in SEEDS]
    assert max(distances) <= BOUND
