"""A run whose parts are built by hand, so that each can be a custom one: `python examples/standard_script.py`.

docs/migration.md compares it with the script of UnstableBaselines, and says what a custom part needs.
"""

import random
import sys

import unstable_lite as unstable
from unstable_lite.config import Config
from unstable_lite.planning.plan import make_plan

retra = unstable.reward_transformations
samplers = unstable.samplers

config = Config.model_validate(
    {
        "model_name": "builtin:tiny",
        "algorithm": unstable.REINFORCELearner,  # a worker imports the class and makes the learner
        "run": {"learning_steps": int(sys.argv[1]) if len(sys.argv) > 1 else 20, "num_collection_workers": 64},
        "engine": {"temperature": 1.0, "max_generation_len": 16, "max_model_len": 512},
        "learner": {"batch_size": 128, "learning_rate": 1e-3, "gradient_clipping": 0.2},
        "league": {"opponent_sampling_strategy": "fixed", "fixed_opponents": ["scripted:random"]},
        "train_envs": [{"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1, "prompt_template": "tiny"}],
    }
)

registry = unstable.ModelRegistry()
registry.add_fixed("scripted:random")
env_sampler = samplers.UniformRandomEnvSampler(config.train_envs, config.eval_envs)
model_sampler = samplers.FixedOpponentModelSampler(registry, random.Random(0))
scheduler = unstable.GameScheduler(model_sampler, env_sampler, run_seed=0)
buffer = unstable.StepBuffer(
    max_buffer_size=config.buffer_size,
    final_reward_transformation=retra.ComposeFinalRewardTransforms([retra.RoleAdvantageByEnvFormatter(tau=0.01)]),
    step_reward_transformation=retra.ComposeStepRewardTransforms([retra.PenaltyForInvalidMove(penalty=-1.0)]),
    sampling_reward_transformation=retra.ComposeSamplingRewardTransforms([retra.NormalizeRewardsByEnv(z_score=True)]),
    max_staleness=8,
)

run = unstable.Run(
    make_plan(config),
    scheduler=scheduler,
    buffer=buffer,
    tracker=unstable.Tracker,  # the run makes both: they need its directory and its workers
    collector=unstable.Collector,
)
summary = run.start()
print(f"{summary.updates} updates, {summary.games} games, adapter: {summary.checkpoint}")
for uid, model in registry.get_all_models().items():
    if model.games:
        print(f"{uid}: {model.games} games, rating {model.rating.mu:.1f} ± {model.rating.sigma:.1f}")
