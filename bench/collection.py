"""Tokens per second that collection gets out of an engine, against other ways to keep games in flight.

Two engines: one whose answers take 50 to 150 ms and cost nothing, which shows how a schedule uses waiting time; and the
packaged model, playing itself at ConnectFour. Every side may use all cores. `bench orchestrator` runs the same peers
against an engine that answers at once.
"""

from __future__ import annotations

from typing import Any

from bench.delayed_engine import LATENCY
from bench.harness import Measure, Options, Report, Subject, Subjects, alternate, cores
from bench.orchestrator import MODULE as OURS
from bench.peers import HAS_VLLM, collecting
from bench.peers.collecting import RAY, ROUNDS, THREADS, VLLM, Peers

MEAN_S = 0.1
RAY_GAMES = 8
DELAYED: dict[str, Any] = {"engine": {"kind": "bench.delayed_engine:DelayedEngine"}}
REAL: dict[str, Any] = {
    "engine": {
        "kind": "transformers",
        "temperature": 1.0,
        "max_generation_len": 16,
        "max_model_len": 512,
        "max_parallel_seq": 64,
    },
    "env": {"env_id": "ConnectFour-v0-train"},
}
"""Config sections; the engine's settings are those of examples/quickstart.toml."""
REAL_ON_VLLM: dict[str, Any] = REAL | {"engine": REAL["engine"] | {"kind": "vllm"}}


def run(options: Options) -> Report:
    report = Report(
        bench="collection",
        question="Tokens a second out of an engine, by how games are kept in flight",
        options=options,
    )
    delayed_games, real_games = (32, 8) if options.small else (384, 64)
    report.sizes = {
        "answer_s": MEAN_S,
        "delayed games": delayed_games,
        "real games": real_games,
        "threads": _threads(options),
    }
    many = f"answers of {MEAN_S * 1000:.0f} ms, {delayed_games} games"
    delayed = DELAYED | {"games": delayed_games}
    peers: dict[str, dict[str, Any]] = {
        f"{THREADS}, {many}": delayed | {"kind": "threads"},
        f"{ROUNDS}, {many}": delayed | {"kind": "lock-step"},
    }
    _measure(report, {f"ours, {many}": delayed}, peers)
    some, embedded = f"{real_games} games", f"embedded engine, {real_games} games"
    real, on_vllm = REAL | {"games": real_games}, REAL_ON_VLLM | {"games": real_games}
    # Compiled, as `LLM` does by default; this takes half a minute.
    generate = on_vllm | {"kind": "vllm", "eager": options.small}
    ours = {f"ours, {embedded}": real}
    peers = {
        f"{ROUNDS}, {embedded}": real | {"kind": "lock-step"},
        f"{VLLM}, {some}": generate | {"lora": False},
    }
    if not options.small:
        if HAS_VLLM:
            ours[f"ours, vLLM with room for adapters, {some}"] = on_vllm
        peers |= {
            f"{VLLM}, room for adapters, {some}": generate | {"lora": True},
            f"{THREADS}, {embedded}": real | {"kind": "threads"},
            f"{RAY}, embedded engine, {RAY_GAMES} games": real | {"kind": "ray", "games": RAY_GAMES},
        }
    _measure(report, ours, peers)
    return report


def _measure(report: Report, ours: dict[str, dict[str, Any]], peers: Peers) -> None:
    options, environment = report.options, {LATENCY: str(MEAN_S)}
    common = {"seed": options.seed, "threads": _threads(options), "rated": False, "keep_games": "none"}
    with Subjects() as subjects:
        sides = {
            name: subjects.start_in(environment, OURS, **common, kind="orchestrator", **own)
            for name, own in ours.items()
        }
        sides |= collecting.start(subjects, peers, environment, **common)
        samples = alternate({name: _tokens_per_s(side, options.seconds) for name, side in sides.items()}, options)
    rows = {name: report.add(name, "tokens/s", values) for name, values in samples.items()}
    collecting.add_missing(report, peers, sides, "tokens/s")
    for name in ours:
        collecting.add_ratios(report, rows[name], peers, rows)


def _threads(options: Options) -> int:
    """Return the number of threads of an engine. Two threads hang if tests run beside them."""
    return 1 if options.small else cores()


def _tokens_per_s(subject: Subject, seconds: float) -> Measure:
    return lambda: float(subject.measure(seconds=seconds)["tokens_per_s"])
