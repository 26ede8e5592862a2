"""Stage `agree`: compare the log-probabilities of engine and learner, with the base and with three adapters.

64 requests of 64 new tokens each, all at once on one engine worker that holds the three adapters; then a learner scores
the same tokens with each adapter in turn. An engine that ignored its adapters would miss by their distance to the base,
which is reported beside.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.engine import MODELS, RANKS, config_of, make
from bench.handoff import step
from bench.harness import Failure, Options, Report, Target, cores, letters, started_engines
from unstable_lite.config import Config
from unstable_lite.engines.devices import choose_engine, vllm_usable
from unstable_lite.learner.client import train_items
from unstable_lite.learner.model import Policy
from unstable_lite.planning.plan import ENGINE_THREADS_ON_GPU
from unstable_lite.types import Generation

Errors = NDArray[np.float32]
VERSIONS = (0, 1, 2, 3)
"""The base and the adapters of `bench.engine.make`."""
NUM_PROMPTS, NUM_TOKENS = 64, 64
LIMITS = {"cuda": (0.05, 0.2), "cpu": (1e-4, 1e-3)}
"""Largest mean and 99th percentile of |Δ log p|, in nats: bfloat16 on CUDA, float32 on the CPU. On the CPU bfloat16 and
float32 differ by 0.013 (base) and 0.017 (adapter) with 28 layers of size 1,024; wrong weights differ by about 1."""


def agree(options: Options, _out: Path) -> Report:
    report = Report(bench="agree", question="|Δ log p| of engine and learner, in nats", options=options)
    device = options.device
    sampled = {"prompts": 8 if options.small else NUM_PROMPTS, "new": 16 if options.small else NUM_TOKENS}
    report.sizes = {**sampled, "model": MODELS[device], "lora_rank": RANKS[device], "versions": len(VERSIONS)}
    if device == "cuda":
        is_usable, why = vllm_usable([0])
        if not is_usable:
            raise Failure(why)
    kind, _ = choose_engine("auto", ["cpu" if device == "cpu" else 0])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make({"directory": name, "seed": options.seed, "device": device})
        config = config_of(directory, kind, device)
        if device == "cpu":  # a CPU may have bfloat16, which "auto" would choose
            config = config.changed(engine={"dtype": "float32"}, learner={"dtype": "float32"})
        generations = asyncio.run(_generations(config, directory, options, **sampled))
        errors, distances = _compare(config, directory, generations, device)
    mean_limit, high_limit = LIMITS[device]
    for version in VERSIONS:
        what = f"adapter {version}" if version else "base"
        error = errors[version]
        report.add(f"{what}: mean", "nats", [float(error.mean())], f"of {len(error)} tokens")
        report.add(f"{what}: 99th percentile", "nats", [float(np.quantile(error, 0.99))])
        report.add(f"{what}: maximum", "nats", [float(error.max())])
    every = np.concatenate(list(errors.values()))
    mean = float(every.mean())
    report.add_figure(f"mean of {len(every)} tokens", "nats", [mean], Target(bound="≤", value=mean_limit))
    high = float(np.quantile(every, 0.99))
    report.add_figure("99th percentile", "nats", [high], Target(bound="≤", value=high_limit))
    report.add_figure(
        "adapters: distance to the base ÷ mean", "×", [distances / max(mean, 1e-9)], Target(bound="≥", value=3)
    )
    return report


async def _generations(
    config: Config, directory: Path, options: Options, prompts: int, new: int
) -> dict[int, list[Generation]]:
    rng = random.Random(options.seed)
    texts = [letters(rng, 100) for _ in range(prompts)]
    threads = cores() if options.device == "cpu" and not options.small else ENGINE_THREADS_ON_GPU
    async with started_engines(config, 1, threads, device=options.device) as (pool, _):
        (engine,) = pool.engines
        for version in VERSIONS[1:]:
            await pool.load_adapter(version, directory / f"v{version}")
        asked = [engine.generate(text, version, max_tokens=new) for version in VERSIONS for text in texts]
        generations = await asyncio.gather(*asked)
    return {version: generations[index * prompts :][:prompts] for index, version in enumerate(VERSIONS)}


def _compare(
    config: Config, directory: Path, generations: dict[int, list[Generation]], device: str
) -> tuple[dict[int, Errors], float]:
    """Return |Δ log p| of each token by version, and the adapters' mean distance to the base on their own tokens."""
    policy = Policy(config, "cuda:0" if device == "cuda" else "cpu")
    errors, distances = dict[int, Errors](), list[Errors]()
    for version, made in generations.items():
        if version:
            policy.load_adapter(directory / f"v{version}")
        scored = policy.score(train_items([step(generation, 0.0) for generation in made]))
        base = np.concatenate([scores.base for scores in scored])
        own = np.concatenate([scores.adapter for scores in scored]) if version else base
        errors[version] = np.abs(_logprobs(made) - own)
        if version:
            distances.append(np.abs(own - base))
    return errors, float(np.concatenate(distances).mean())


def _logprobs(generations: Sequence[Generation]) -> Errors:
    return np.concatenate([generation.logprobs for generation in generations])
