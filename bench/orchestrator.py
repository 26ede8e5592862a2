"""Turns per second through the whole orchestrator, against the bare env loop.

The engine is the scripted one: a real process over real ZeroMQ that answers at once, so that the orchestrator's cost
remains: scheduling, prompts, messages, records, ratings, reward transforms, buffer, transcripts. The other side is
`ta.make / reset / get_observation / step` in a loop, one env at a time, with random answers from the same list.
Processor time is that of the measured process alone: the engine's is extra, and may use another core.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import Any

from bench.harness import (
    Options,
    Questioner,
    Report,
    Subjects,
    Target,
    alternate,
    memory_mb,
    started_engines,
)
from bench.playing import playing
from unstable_lite.config import Config
from unstable_lite.games.answers import EXTRACTIONS
from unstable_lite.orchestrator.event_loop import run_in_loop

MODULE = "bench.orchestrator"
ENV_ID = "TicTacToe-v0-train"
REPLIES = tuple(f"\\boxed{{[{cell}]}}" for cell in range(9))
GAMES = 384
BATCH_SIZE = 384
WHOLE = {"games": GAMES, "keep_games": "all", "rated": True}
"""Everything on: every game is rated and written to games.jsonl; an older adapter plays the second seat."""


def run(options: Options) -> Report:
    report = Report(bench="orchestrator", question="Turns a second through the orchestrator", options=options)
    report.sizes = {"env": ENV_ID, "games": GAMES, "batch_size": BATCH_SIZE, "replies": len(REPLIES)}
    whole = f"{GAMES} games"
    variants: dict[str, dict[str, Any]] = {
        whole: {},
        f"{GAMES} games, no games.jsonl": {"keep_games": "none"},
        f"{GAMES} games, none rated": {"rated": False},
        "8 games": {"games": 8},
        "4096 games": {"games": 4096},
    }
    targets = {whole: 0.4, "4096 games": 0.25}
    if options.small:
        del variants["4096 games"]
    with Subjects() as subjects:
        bare = subjects.start(MODULE, kind="bare", seed=options.seed)
        sides = {"bare env loop": bare}
        for name, changes in variants.items():
            sides[name] = subjects.start(MODULE, kind="orchestrator", seed=options.seed, **(WHOLE | changes))
        measures = {name: partial(subject.measure, seconds=options.seconds) for name, subject in sides.items()}
        answers = alternate(measures, options)
        rows = {name: report.add(name, "turns/s", [one["turns_per_s"] for one in answers[name]]) for name in sides}
        cpu = {
            name: report.add(f"processor time, {name}", "µs/turn", [one["cpu_us"] for one in answers[name]])
            for name in sides
        }
        for name in variants:
            target = Target(bound="≥", value=targets[name]) if name in targets else None
            report.add_ratio(f"{name} ÷ bare", rows[name], rows["bare env loop"], target)
        for name in variants:
            report.add_ratio(f"processor time, bare ÷ {name}", cpu["bare env loop"], cpu[name])
            answer = sides[name].measure(seconds=0.0)
            report.notes.append(f"{name}: {answer['turns_per_game']:.1f} turns a game, {answer['void']} void")
    return report


# ------------------------------------------------------------------------------- the bare env loop


def measure_bare(questioner: Questioner) -> None:
    import textarena as ta  # plain, without our deferred imports

    rng = random.Random(questioner.arguments["seed"])
    actions = [EXTRACTIONS["default"](reply)[0] for reply in REPLIES]
    questioner.answer({"import_mb": memory_mb("now")})
    seed = 0
    for request in questioner.requests():
        turns, started, cpu_s = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - started < request["seconds"]:
            env = ta.make(ENV_ID)
            env.reset(num_players=2, seed=seed)
            env.state.error_allowance = 0  # as our games are played
            seed, is_done = seed + 1, False
            while not is_done:
                env.get_observation()
                is_done, _ = env.step(rng.choice(actions))
                turns += 1
            env.close()
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
        questioner.answer({"turns_per_s": turns / seconds, "cpu_us": 1e6 * cpu_s / max(turns, 1)})


# ------------------------------------------------------------------------------ the orchestrator


def config_of(arguments: dict[str, Any]) -> Config:
    is_rated = arguments["rated"]
    env = {"env_id": ENV_ID, "num_players": 2, "num_actors": 1 if is_rated else 2, "prompt_template": "tiny"}
    sections: dict[str, dict[str, Any]] = {
        "run": {"seed": arguments["seed"]},
        "engine": {"kind": "scripted", "replies": REPLIES},
        "learner": {"batch_size": BATCH_SIZE},
        "league": {"opponent_sampling_strategy": "lagged" if is_rated else "none", "opponent_lag": (1, 1)},
        "tracker": {"keep_games": arguments["keep_games"]},
    }
    return Config.model_validate({**sections, "train_envs": [env]})


async def measure_orchestrator(questioner: Questioner) -> None:
    arguments, import_mb = questioner.arguments, memory_mb("now")
    config = config_of(arguments)
    # Two checkpoints, so that the current one always meets another model.
    adapters = 2 if arguments["rated"] else 0
    async with (
        started_engines(config, 1, threads=1) as (pool, _),
        playing(config, pool, arguments["games"], adapters) as played,
    ):
        questioner.answer({"import_mb": import_mb})
        for request in questioner.requests():
            # Answers that arrived while the loop was frozen come in a burst, which is not counted.
            await asyncio.sleep(0.1 + 0.2 * request["seconds"])
            while not played.games:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            tokens, started = pool.generated_tokens, time.perf_counter()
            cpu_s = time.process_time()
            await asyncio.sleep(request["seconds"])
            seconds = time.perf_counter() - started
            tokens = pool.generated_tokens - tokens
            turns = tokens / played.tokens_a_turn
            questioner.answer(
                {
                    "turns_per_s": turns / seconds,
                    "cpu_us": 1e6 * (time.process_time() - cpu_s) / max(turns, 1.0),
                    "memory_mb": memory_mb("now"),
                    "peak_mb": memory_mb("peak"),
                    "turns_per_game": played.turns / max(played.games, 1),
                    "games": played.games,
                    "void": played.void,
                }
            )


if __name__ == "__main__":
    questioner = Questioner()
    if questioner.arguments["kind"] == "bare":
        measure_bare(questioner)
    else:
        run_in_loop(measure_orchestrator(questioner))
