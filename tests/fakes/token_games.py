"""A language model that answers with one token of eight, its learner's config, and its games as records."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from unstable_lite.config import Config
from unstable_lite.planning.defaults import resolve_defaults
from unstable_lite.types import AgentSpec, GameRecord, GameSpec, Generation, ModelRef, PlayerTrajectory, Step

ENV, VOCAB, GROUP = "Nim-v0-train", 8, 8
PROMPTS = np.array([[1, 3], [2, 3], [3, 3]], np.int32)
"""Prompts of the states, which their first token distinguishes."""
MODEL = ModelRef(uid="current", kind="checkpoint", adapter_version=0)

Probabilities = npt.NDArray[np.float64]
"""Probability of each token in each state, of shape `SV`."""


def save_base(directory: Path, seed: int, width: int, spread: float) -> Path:
    """Save a base model of one layer, whose weights have a standard deviation of `spread`."""
    torch.set_num_threads(1)  # the model is too small for two
    torch.manual_seed(seed)
    shape = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 2}
    limits = {"vocab_size": VOCAB, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 8}
    Qwen3ForCausalLM(Qwen3Config(**shape, **limits, initializer_range=spread)).save_pretrained(directory)
    return directory


def make_config(base: Path, algorithm: str, seed: int, num_players: int, **learner: Any) -> Config:
    config = {
        "model_name": str(base),
        "algorithm": algorithm,
        "run": {"seed": seed, "group_size": GROUP if algorithm in ("grpo", "rloo") else 1},
        "engine": {"temperature": 1.0, "max_generation_len": 1},
        "learner": {"dtype": "float32", "critic_learning_rate": 1e-2, "activation_checkpointing": False, **learner},
        "lora": {"lora_rank": 4, "lora_alpha": 8},
        "train_envs": [{"env_id": ENV, "num_players": num_players, "num_actors": num_players}],
    }
    return resolve_defaults(Config.model_validate(config))


def distributions(learner: Any, num_states: int) -> Probabilities:
    with torch.no_grad(), learner.policy.evaluating():
        logits_SV = learner.policy.model(input_ids=torch.tensor(PROMPTS[:num_states])).logits[:, -1]
    probability_SV: Probabilities = logits_SV.double().softmax(-1).numpy()
    return probability_SV


def make_step(
    state: int, probability_SV: Probabilities, version: int, rng: np.random.Generator, pid: int = 0
) -> tuple[int, Step]:
    """Return a token that the policy draws in a state, and its step."""
    token = int(rng.choice(VOCAB, p=probability_SV[state]))
    generation = Generation(
        prompt_ids=PROMPTS[state],
        completion_ids=np.array([token], np.int32),
        logprobs=np.log(probability_SV[state, [token]]).astype(np.float32),
        text=str(token),
        finish_reason="stop",
        adapter_version=version,
    )
    feedback = {"correct_answer_format": True, "invalid_move": False}
    of_turn = {"obs": "", "act": "", "reward": 0.0, "generation": generation, "format_feedback": feedback}
    return token, Step(pid=pid, env_id=ENV, **of_turn)


def make_record(number: int, steps: Mapping[int, list[Step]], rewards: dict[int, float]) -> GameRecord:
    """Return the record of a game by its number and the steps and the reward of each player."""
    place = {"env_id": ENV, "game_idx": number}
    seat = {"model": MODEL, "collect_data": True, "prompt_template": "default", "action_extraction_fn": "default"}
    spec = GameSpec(
        kind="train",
        num_players=len(rewards),
        seed=0,
        agent_specs=tuple(AgentSpec(pid=pid, **seat) for pid in rewards),
        max_turns=9,
        group_idx=number // GROUP,
        **place,
    )
    trajectories = [
        PlayerTrajectory(
            pid=pid, model=MODEL, steps=steps[pid], final_reward=reward, num_turns=len(steps[pid]), **place
        )
        for pid, reward in rewards.items()
    ]
    outcomes = dict.fromkeys(rewards, "na")
    return GameRecord(spec=spec, turns=[], trajectories=trajectories, rewards=rewards, outcomes=outcomes, end="natural")
