"""Peers that collect games, compared with this project's orchestrator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.harness import Report, Row, Subject, Subjects
from bench.peers import HAS_RAY, HAS_VLLM

MODULE = "bench.peers"
THREADS, ROUNDS = "peer: a thread per game", "peer: lock-step rounds"
RAY, VLLM = "peer: the reference's way, a Ray task per game", "peer: vLLM's generate in lock-step rounds"
INSTALLED = {"ray": HAS_RAY, "vllm": HAS_VLLM}

Peers = Mapping[str, Mapping[str, Any]]
"""Settings by the name of the row: `kind`, `games`, and others that differ between rows."""


def idle_engine(is_small: bool) -> Peers:
    """Return the peers to measure with an engine that answers at once.

    Their numbers of games are limited by the memory of a small machine.
    """
    peers: dict[str, dict[str, Any]] = {
        f"{THREADS}, 384 games": {"kind": "threads", "games": 384},
        f"{ROUNDS}, 384 games": {"kind": "lock-step", "games": 384},
    }
    return peers | {f"{RAY}, {n} games": {"kind": "ray", "games": n} for n in ((2,) if is_small else (8, 24))}


def start(
    subjects: Subjects, peers: Peers, environment: Mapping[str, str] | None = None, **common: Any
) -> dict[str, Subject]:
    """Yield the installed peers, each as a subject that reports its turns and tokens per second."""
    common = {"threads": 1, "rated": False, "keep_games": "none"} | common
    return {
        name: subjects.start_in(environment or {}, MODULE, **common | dict(own))
        for name, own in peers.items()
        if INSTALLED.get(own["kind"], True)
    }


def add_memory(report: Report, started: Mapping[str, Subject]) -> None:
    for name, subject in started.items():
        measured = subject.measure(seconds=0.05)
        remark = f"all of its {measured['processes']} processes" if "processes" in measured else ""
        report.add(f"memory, {name}", "MB", [measured["memory_mb"]], remark)


def add_missing(report: Report, peers: Peers, started: Mapping[str, Subject], unit: str) -> None:
    """Add a row for each peer that is not installed."""
    for name in peers:
        if name not in started:
            report.add(name, unit, [], "not installed")


def add_ratios(report: Report, ours: Row, peers: Peers, rows: Mapping[str, Row]) -> None:
    """Add the ratios of this project's values to those of each measured peer."""
    for name in peers:
        if name in rows:
            report.add_ratio(f"{ours.name} ÷ {name}", ours, rows[name])
