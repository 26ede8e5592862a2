"""Learner ranks on another machine: `torchrun --nproc-per-node N -m unstable_lite.learner.remote_rank HOST:PORT`.

HOST:PORT is `learner.rendezvous` of the run that they join. torchrun starts one process for each rank on its
machines, and restarts all of them if the group loses a rank. Everything else, also the config, comes from rank 0; the
base model and the same versions of the libraries must be present. Ends with the run.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace

import torch

from unstable_lite.errors import ConfigError
from unstable_lite.learner import UPDATE_TIMEOUT_S, distributed
from unstable_lite.learner.worker import follow, make_workers
from unstable_lite.transport.worker_main import WorkerSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="longest wait for the run")
    arguments = parser.parse_args()
    own_rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    store = distributed.across_machines(arguments.address, arguments.timeout_s)
    first = WorkerSpec(**json.loads(store.get(distributed.WELCOME)))
    config = first.config
    num_local = first.num_ranks - config.learner.remote_ranks
    if own_rank >= config.learner.remote_ranks:
        raise ConfigError(
            f"learner.remote_ranks = {config.learner.remote_ranks} in the run at {arguments.address}: torchrun's "
            f"rank {own_rank} is one too many"
        )
    device = "cpu" if first.device == "cpu" else f"cuda:{local_rank}"
    spec = replace(first, name=f"learner-{num_local + own_rank}", device=device, rank=num_local + own_rank)
    torch.set_num_threads(spec.threads)
    if device != "cpu":
        torch.cuda.set_device(local_rank)
    distributed.join(store, spec.rank, spec.num_ranks, device, UPDATE_TIMEOUT_S)
    follow(make_workers(config, device))
    distributed.leave()


if __name__ == "__main__":
    main()
