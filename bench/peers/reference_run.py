"""Whole training as in the reference: `python -m bench.peers.reference_run ARGUMENTS`, for `bench end_to_end`.

Stands for its `build(...).start(...)` on one engine and one learner:
- collecting: blocking calls to an actor on a 20 ms tick (`ticking_engine.py`), here from a thread for each game, which
  costs less than its Ray task;
- the buffer: twice the batch, random eviction beyond that, no bound on age; the learner looks every 0.2 s and starts at
  1.5 times the batch;
- the update (`reference_update.py`), the adapter written to disk, registered, loaded by the engine. A game keeps the
  checkpoint that it began with.

Same as ours, so that the comparison is about the way alone: model, env, template, league mixture, reward transforms,
batch, optimiser, LoRA, games in flight, and the engine inside the actor, which is this project's (vLLM's CPU build with
LoRA makes about a tenth of its tokens). Given besides what the reference gets wrong: what `reference_update.py` says,
the z-score that survives equal rewards, and the sampling distribution that is trained (temperature 1, no top_p).
Leaves out its tracker, its TrueSkill ratings and its evaluation games.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.harness import Questioner
from bench.peers.blocking import play
from bench.peers.reference_update import TextStep, update
from bench.peers.stop_watch import Over, StopWatch
from bench.peers.ticking_engine import in_a_process
from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler
from unstable_lite.learner.model import Policy
from unstable_lite.models import resolve_model
from unstable_lite.planning.defaults import resolve_defaults
from unstable_lite.planning.plan import make_plan
from unstable_lite.reward_transformations import build_reward_transformations
from unstable_lite.rng import derive_seed
from unstable_lite.types import GameRecord, GameSpec, Step

POLL_S = 0.2
DELAY = 1.5
"""Number of waiting steps, in batches, at which a batch is drawn."""


class GameThreads:
    """Games in flight, each in a thread."""

    def __init__(
        self, pool: ThreadPoolExecutor, engine: Any, next_spec: Callable[[], GameSpec], num_games: int
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._next_spec = next_spec
        self._in_flight: dict[Future[GameRecord], GameSpec] = {}
        while len(self._in_flight) < num_games:
            self._launch()

    @property
    def specs(self) -> list[GameSpec]:
        """Specs of the games in flight."""
        return list(self._in_flight.values())

    def next_finished(self, timeout_s: float) -> GameRecord | None:
        """Return the record of a finished game and start another one; None if none ends within the time."""
        done, _ = wait(self._in_flight, timeout_s, FIRST_COMPLETED)
        if not done:
            return None
        game = done.pop()
        del self._in_flight[game]
        self._launch()
        return game.result()

    def _launch(self) -> None:
        spec = self._next_spec()
        self._in_flight[self._pool.submit(play, spec, self._engine.submit_prompt)] = spec


class Buffer:
    """Buffer of steps with their rewards; steps beyond its size replace random ones."""

    def __init__(self, config: Config) -> None:
        self._final, self._step, self._sampling = build_reward_transformations(config.rewards)
        self._capacity = config.buffer_size
        self._rng = random.Random(derive_seed(config.run.seed, "buffer"))
        self._lock = threading.Lock()
        self._steps: list[Step] = []

    def size(self) -> int:
        return len(self._steps)

    def add(self, record: GameRecord) -> None:
        with self._lock:
            for trajectory in record.trajectories:
                reward = self._final(trajectory.final_reward, trajectory.pid, trajectory.env_id)
                for index, step in enumerate(trajectory.steps):
                    step.reward = self._step(trajectory, index, reward)
                self._steps += trajectory.steps
            while len(self._steps) > self._capacity:
                self._take_any()

    def get_batch(self, n: int) -> list[Step]:
        with self._lock:
            return self._sampling([self._take_any() for _ in range(n)])

    def _take_any(self) -> Step:
        return self._steps.pop(self._rng.randrange(len(self._steps)))


class League:
    """Matchmaking; the collecting thread reads it, the learning thread updates it."""

    def __init__(self, config: Config) -> None:
        self._lock = threading.Lock()
        self._registry = ModelRegistry()
        opponents = build_model_sampler(config, self._registry, random.Random(config.run.seed))
        self._scheduler = GameScheduler(opponents, build_env_sampler(config), config.run.seed)

    def next_spec(self) -> GameSpec:
        with self._lock:
            return self._scheduler.next_train_job()

    def add_checkpoint(self, version: int) -> None:
        with self._lock:
            self._registry.add_policy(f"ckpt-{version}", adapter_version=version, iteration=version)


@contextlib.contextmanager
def collecting(config: Config, league: League) -> Iterator[tuple[Any, GameThreads]]:
    """Yield the proxy of a TickingEngine, and the games that ask it."""
    num_games = config.run.num_collection_workers
    pool = ThreadPoolExecutor(num_games)
    try:
        with in_a_process(config, make_plan(config).engine_threads) as engine:
            yield engine, GameThreads(pool, engine, league.next_spec, num_games)
    finally:
        pool.shutdown(cancel_futures=True)  # what still waits for an answer has lost its engine


def train(questioner: Questioner, directory: Path) -> None:
    """Train until the bench ends the run. Raises Over."""
    arguments = questioner.arguments
    config = resolve_defaults(Config.model_validate_json(arguments["config"]))
    torch.set_num_threads(make_plan(config).learner_threads)
    clock, league, buffer = StopWatch(questioner, arguments["limit_s"]), League(config), Buffer(config)
    policy, tokenizer = (
        Policy(config, "cpu"),
        transformers.AutoTokenizer.from_pretrained(resolve_model(config.model_name)),
    )
    policy.model.eval()
    optimizer = torch.optim.AdamW(
        policy.parameters.values(), lr=config.learner.learning_rate, weight_decay=config.learner.weight_decay
    )
    batch_size, version = config.learner.batch_size, 0
    with collecting(config, league) as (engine, games):
        while engine.num_waiting() < config.run.num_collection_workers:  # every game has its process, and asks
            time.sleep(0.1)
        clock.start()
        engine.go_on()
        is_over = threading.Event()
        collector = threading.Thread(target=_collect, args=(games, buffer, is_over), daemon=True)
        collector.start()
        try:
            while True:
                while buffer.size() < DELAY * batch_size:
                    _check(collector, clock, engine)
                    time.sleep(POLL_S)
                batch = buffer.get_batch(batch_size)
                steps = [TextStep(prompt=step.obs, completion=step.act, advantage=step.reward) for step in batch]
                divisor, clipping = config.engine.max_generation_len, config.learner.gradient_clipping
                update(policy, tokenizer, steps, optimizer, divisor=divisor, gradient_clipping=clipping)
                version += 1
                path = directory / f"v{version}"
                peft_files.write_adapter(path, *policy.adapter_state())
                engine.load_adapter(version, str(path), _versions(games) | {version - 1})
                league.add_checkpoint(version)
                if version % arguments["every"] == 0:
                    _stand_still(clock, engine, version, path)
        finally:
            is_over.set()
            engine.go_on()  # lets the games end that the collector waits for
            collector.join()


def _collect(games: GameThreads, buffer: Buffer, is_over: threading.Event) -> None:
    while not is_over.is_set():
        if (record := games.next_finished(0.1)) is not None:
            buffer.add(record)


def _check(collector: threading.Thread, clock: StopWatch, engine: Any) -> None:
    assert collector.is_alive(), "the thread that collects has died; see above"
    if clock.is_late:
        _stand_still(clock, engine, None, None)


def _stand_still(clock: StopWatch, engine: Any, version: int | None, path: Path | None) -> None:
    engine.pause()
    clock.tell(version, path)
    engine.go_on()


def _versions(games: GameThreads) -> set[int]:
    """Return the versions, except the base, that games in flight may still request."""
    versions = {agent.model.adapter_version for spec in games.specs for agent in spec.agent_specs}
    return {version for version in versions if version}


def main() -> None:
    questioner = Questioner()
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(Over):
        train(questioner, Path(directory))


if __name__ == "__main__":
    main()
