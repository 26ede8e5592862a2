"""A tiny random model, so that these tests do not depend on the shipped one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fakes.game_records import make_item
from fakes.random_models import make_tokenizer
from unstable_lite.config import Config
from unstable_lite.learner import load_learner, worker
from unstable_lite.transport.messages import Done, Message, SaveLearner, Update, Updated
from unstable_lite.types import TrainItem

VOCAB = 300

MakeConfig = Callable[..., Config]
MakeLearner = Callable[..., Any]
MakeItems = Callable[..., list[TrainItem]]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: the model is too small for two, and the machine may be busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,  # far from uniform: a wrong temperature or mask must show
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    make_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def make_config(model_path: Path) -> MakeConfig:
    def make(algorithm: str = "reinforce", **sections: dict[str, Any]) -> Config:
        return Config.model_validate(
            {
                "model_name": str(model_path),
                "algorithm": algorithm,
                "engine": {"temperature": 0.7, "max_generation_len": 16} | sections.get("engine", {}),
                "learner": {"dtype": "float32", "learning_rate": 1e-3, "activation_checkpointing": False}
                | sections.get("learner", {}),
                "lora": {"lora_rank": 4, "lora_alpha": 8} | sections.get("lora", {}),
                "run": sections.get("run", {}),
                "buffer": sections.get("buffer", {}),
                "train_envs": [{"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2}],
            }
        )

    return make


@pytest.fixture
def make_learner(make_config: MakeConfig) -> MakeLearner:
    def make(algorithm: str = "reinforce", *, has_signal: bool = True, **sections: dict[str, Any]) -> Any:
        """Make a learner; `has_signal` makes every B matrix and value head non-zero, so that each has a gradient."""
        config = make_config(algorithm, **sections)
        learner: Any = load_learner(config, "cpu")
        learner.config = config  # for a worker around it
        critic = learner.training.critic
        if has_signal:
            generator = torch.Generator().manual_seed(1)
            parameters = learner.policy.parameters | (critic.parameters if critic else {})
            for name, parameter in parameters.items():
                if "lora_B" in name or "value_head" in name:
                    parameter.data.normal_(0.0, 0.1, generator=generator)
        return learner

    return make


@pytest.fixture(scope="session")
def make_items() -> MakeItems:
    def make(num: int = 7, seed: int = 0, adapter_version: int = 0, turns: int = 1) -> list[TrainItem]:
        """Make steps of trajectories of `turns` turns; the last trajectory may be shorter."""
        rng = np.random.default_rng(seed)
        items = []
        for index in range(num):
            num_prompt, num_completion = rng.integers(3, 20), rng.integers(1, 9)
            items.append(
                TrainItem(
                    prompt_ids=rng.integers(0, VOCAB, num_prompt).astype(np.int32),
                    completion_ids=rng.integers(0, VOCAB, num_completion).astype(np.int32),
                    logprobs=rng.uniform(-12, -2, num_completion).astype(np.float32),
                    reward=float(rng.normal()),
                    adapter_version=adapter_version,
                    trajectory=index // turns,
                )
            )
        return items

    return make


def update_and_save(one: worker._Worker, message: Update) -> Message:
    """Answer an update as a client asks for it: with the state saved before the first and after each."""

    def save(name: str) -> None:
        reply = one.answer(SaveLearner(request_id=message.request_id, path=f"{message.path}.{name}"))
        assert isinstance(reply, Done), reply

    if one._state is None:
        save("before")
    updated = one.answer(message)
    if isinstance(updated, Updated) and updated.skipped is None:
        save("state")
    return updated


def turns_of_games(num_games: int) -> list[TrainItem]:
    """Return steps whose prompts grow by the turn and begin alike in all games."""
    rng, items = np.random.default_rng(0), []
    for game in range(num_games):
        read = list(range(20))
        for _ in range(5):
            read = [*read, *rng.integers(0, 300, 9).tolist()]
            items.append(
                make_item(read, rng.integers(0, 300, 4), reward=rng.normal(), adapter_version=0, trajectory=game)
            )
            read = [*read, *items[-1].completion_ids.tolist()]
    return items + [replace(item, reward=-2.0 * item.reward) for item in items[::3]]
