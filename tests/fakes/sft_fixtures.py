"""The shipped tiny model on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unstable_lite.config import Config

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: the model is too small for two, and the machine may be busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    def make(template: str = "tiny", **sections: dict[str, Any]) -> Config:
        return Config.model_validate(
            {
                "engine": {"temperature": 1.0, "max_generation_len": 16, "max_model_len": 512, "kind": "transformers"}
                | sections.get("engine", {}),
                "learner": {"dtype": "float32", "activation_checkpointing": False} | sections.get("learner", {}),
                "lora": {"lora_rank": 8, "lora_alpha": 16} | sections.get("lora", {}),
                "sft": {"players": ("scripted:random",), "learning_rate": 3e-3} | sections.get("sft", {}),
                "train_envs": [
                    {"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": template}
                ],
            }
        )

    return make
