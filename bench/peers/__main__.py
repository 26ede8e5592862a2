"""One peer that collects games, as a subject of a bench: `python -m bench.peers ARGUMENTS`."""

from __future__ import annotations

import asyncio
import random

import uvloop

from bench.harness import Questioner
from bench.orchestrator import config_of
from bench.peers import lock_step, ray_tasks, threads
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler


def main() -> None:
    questioner = Questioner()
    config = config_of(questioner.arguments)
    registry = ModelRegistry(beta=config.league.trueskill_beta)
    opponents = build_model_sampler(config, registry, random.Random(config.run.seed))
    next_spec = GameScheduler(opponents, build_env_sampler(config), config.run.seed).next_train_job
    kind = questioner.arguments["kind"]
    if kind == "ray":
        ray_tasks.measure(questioner, config, next_spec)
        return
    measure = {"threads": threads.measure, "lock-step": lock_step.measure, "vllm": lock_step.measure_vllm}[kind]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(questioner, config, next_spec))


if __name__ == "__main__":
    main()
