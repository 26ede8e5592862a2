"""A game small enough to solve by hand, to test that the policy and the critic converge to known values.

The game has two states, which only their first token distinguishes. In the first, odd tokens lead to the second and
even ones end the game with 0; in the second, one even token ends it with 1, all others with 0. So the first turn only
pays through the second, the right action in one state is wrong in the other, and with a discount of 0.9 per turn the
optimal values are 0.9 and 1.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from unstable_lite.config import Config
from unstable_lite.learner import load_learner
from unstable_lite.types import TrainItem

VOCAB, WIN = 8, 6
PROMPTS = [np.array([1, 3], np.int32), np.array([2, 3], np.int32)]
GAMMA = 0.9


def make_learner(directory: Path, algorithm: str, **settings: Any) -> Any:
    torch.set_num_threads(1)  # the model is too small for two
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(
        **shape, vocab_size=VOCAB, num_key_value_heads=1, head_dim=8, max_position_embeddings=8, initializer_range=0.5
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    config = Config.model_validate(
        {
            "model_name": str(directory),
            "algorithm": algorithm,
            "engine": {"temperature": 1.0, "max_generation_len": 1},
            "learner": {
                "dtype": "float32",
                "learning_rate": 1e-2,
                "critic_learning_rate": 1e-2,
                "gamma": GAMMA,
                "gradient_clipping": 10.0,
                "activation_checkpointing": False,
                **settings,
            },
            "lora": {"lora_rank": 4, "lora_alpha": 8},
            "train_envs": [{"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2}],
        }
    )
    return load_learner(config, "cpu")


def distributions(learner: Any) -> np.ndarray:
    """Return the policy's probability of each token in each state, of shape `2V`."""
    with torch.no_grad(), learner.policy.evaluating():
        logits_2V = learner.policy.model(input_ids=torch.tensor(np.stack(PROMPTS))).logits[:, -1]
    return logits_2V.double().softmax(-1).numpy()


def play(probability_2V: np.ndarray, num_games: int, rng: np.random.Generator, version: int) -> list[TrainItem]:
    items: list[TrainItem] = []

    def act(state: int, game: int) -> int:
        token = int(rng.choice(VOCAB, p=probability_2V[state]))
        items.append(
            TrainItem(
                prompt_ids=PROMPTS[state],
                completion_ids=np.array([token], np.int32),
                logprobs=np.log(probability_2V[state, [token]]).astype(np.float32),
                reward=float(state == 1 and token == WIN),
                adapter_version=version,
                trajectory=game,
            )
        )
        return token

    for game in range(num_games):
        if act(0, game) % 2:
            act(1, game)
    return items


def true_values(probability_2V: np.ndarray) -> list[float]:
    second = probability_2V[1, WIN]
    return [GAMMA * probability_2V[0, 1::2].sum() * second, second]


@pytest.mark.parametrize(
    ("algorithm", "settings", "num_updates"),
    [
        pytest.param("a2c", {"gae_lambda": 0.9}, 55, marks=pytest.mark.nightly),
        ("a2c", {"gae_lambda": 1.0, "normalize_adv": False, "critic_warmup_updates": 5}, 70),
        ("ppo", {"gae_lambda": 0.9, "ppo_epochs": 3, "ppo_minibatches": 2}, 25),
    ],
)
def test_policy_and_critic_converge_to_the_known_values(tmp_path, algorithm, settings, num_updates):
    learner, rng = make_learner(tmp_path, algorithm, **settings), np.random.default_rng(0)
    assert true_values(distributions(learner))[0] < 0.4
    for version in range(1, num_updates + 1):
        result = learner.update(play(distributions(learner), 64, rng, version - 1), version)
        assert result.skipped is None
    values = true_values(distributions(learner))
    assert values == pytest.approx([GAMMA, 1.0], abs=0.05)
    states = play(np.eye(VOCAB)[[1, WIN]] + 1e-300, 1, rng, 0)
    assert learner.training.critic.estimate(states) == pytest.approx(values, abs=0.1)
