"""A run built from keyword arguments: `python examples/build.py [learning_steps]`."""

import sys

import unstable_lite as unstable

run = unstable.build(
    model_name="builtin:tiny",
    train_envs=[
        unstable.TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=1, prompt_template="tiny"),
    ],
    eval_envs=[
        unstable.EvalEnvSpec(
            env_id="Nim-v0-train", num_players=2, prompt_template="tiny", fixed_opponent="scripted:random"
        ),
    ],
    opponent_sampling_strategy={"mirror": 0.5, "fixed": 0.5},
    fixed_opponents=["scripted:random"],
    max_generation_len=16,
    batch_size=128,
    learning_rate=1e-3,
    vllm_config={"temperature": 1.0, "max_model_len": 512},
    run={"eval_games": 40},
)
summary = run.start(
    learning_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20, num_collection_workers=64, num_eval_workers=0
)
for evaluation in summary.evaluations:
    print(evaluation.label, evaluation.describe())
print("adapter:", summary.checkpoint)
