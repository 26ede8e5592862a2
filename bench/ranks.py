"""Speed-up of an update by two learner ranks over one.

Each rank has one thread, so that two have twice the cores of one; a third side is one rank with two threads. Times the
work of a run: rank 0 broadcasts the whole batch, each rank computes its share, gradients and metrics are summed, every
rank makes the step. All sides report the norm of the gradient, and the norms must agree.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.harness import Options, Questioner, Report, Subjects, Target, alternate, cores
from bench.learner import check_agreement, config_of, items_of, tokens_per_s
from unstable_lite.learner import distributed, worker
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.orchestrator.workers import KEEP_MEMORY
from unstable_lite.transport.messages import Stop, Update

MODULE = "bench.ranks"
ONE, TWO, THREADS = "one rank", "two ranks", "one rank with two threads"
SIDES = {ONE: (1, 1), TWO: (2, 1), THREADS: (1, 2)}
"""Side to (ranks, threads of each)."""
SIZES: dict[str, Any] = {"items": 400, "prompt": (40, 120), "completion": (6, 40), "vocab_size": None}
SMALL: dict[str, Any] = SIZES | {"items": 8}


def run(options: Options) -> Report:
    report = Report(bench="ranks", question="Tokens a second of an update by two learner ranks", options=options)
    sizes = SMALL if options.small else SIZES
    report.sizes = {**sizes, "cores": cores()}
    with tempfile.TemporaryDirectory() as name, Subjects() as subjects:
        arguments = {"directory": name, "seed": options.seed, **sizes}
        subjects.start("bench.learner", kind="make", **arguments).close()
        sides = {
            side: subjects.start_in(KEEP_MEMORY, MODULE, num_ranks=num_ranks, threads=threads, **arguments)
            for side, (num_ranks, threads) in SIDES.items()
        }
        check_agreement(sides, "cpu")
        samples = alternate({side: tokens_per_s(subject, options.seconds) for side, subject in sides.items()}, options)
    rows = {side: report.add(side, "tokens/s", samples[side]) for side in SIDES}
    target = Target(bound="≥", value=1.7) if cores() >= 2 else None
    report.add_ratio("tokens/s, two ranks ÷ one", rows[TWO], rows[ONE], target)
    report.add_ratio("tokens/s, two ranks ÷ one with two threads", rows[TWO], rows[THREADS])
    if target is None:
        report.notes.append("one core: two ranks cannot be faster than one, and there is no target")
    return report


# --------------------------------------------------------------------------------------- subjects


def main() -> None:
    questioner = Questioner()
    arguments = questioner.arguments
    rank, num_ranks = arguments.get("rank", 0), arguments["num_ranks"]
    torch.set_num_threads(arguments["threads"])
    meeting, others = Path(arguments["directory"], "meeting"), list[subprocess.Popen[bytes]]()
    if num_ranks > 1:
        for other in range(1, num_ranks) if rank == 0 else ():
            command = [sys.executable, "-m", MODULE, json.dumps(arguments | {"rank": other})]
            others.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        distributed.join(distributed.on_this_machine(meeting, num_ranks), rank, num_ranks, "cpu", timeout_s=600)
    config = config_of(Path(arguments["directory"]))
    one = worker._Worker(REINFORCELearner(config, "cpu"), config)
    if rank:
        worker.follow({"": one})
        return
    items = tuple(items_of(arguments, one.learner.training.policy))
    num_tokens = sum(len(item.prompt_ids) + len(item.completion_ids) for item in items)
    update = Update(request_id=1, items=items, version=1, path="")
    questioner.answer({"tokens": num_tokens})
    for request in questioner.requests():
        updates, started, norm = 0, time.perf_counter(), 0.0
        while updates == 0 or time.perf_counter() - started < request["seconds"]:
            distributed.broadcast(update)
            norm = one._make(update).metrics["policy_grad_norm"]
            updates += 1
        seconds = time.perf_counter() - started
        questioner.answer({"tokens_per_s": updates * num_tokens / seconds, "grad_norm": norm})
    distributed.broadcast(Stop())
    for process in others:
        process.wait()


if __name__ == "__main__":
    main()
