"""Learner ranks on another machine: `torchrun --nproc-per-node N -m unstable_lite.learners.join HOST:PORT`.

HOST:PORT is `learner.rendezvous` of the run that they join. torchrun starts one process for each rank, on as many
machines as it is told to, and starts them again when the group has lost a rank. Everything else, the config included,
comes from rank 0; base model and versions of the libraries must be there, too. Ends when the run does.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace

import torch

from unstable_lite.errors import ConfigError
from unstable_lite.learners import ranks
from unstable_lite.learners.worker import make_worker
from unstable_lite.transport.child import WorkerSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="how long to wait for the run to be there")
    arguments = parser.parse_args()
    own_rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    store = ranks.across_machines(arguments.address, arguments.timeout_s)
    first = WorkerSpec(**json.loads(store.get(ranks.WELCOME)))
    config = first.config
    num_local = first.num_ranks - config.learner.remote_ranks
    if own_rank >= config.learner.remote_ranks:
        raise ConfigError(
            f"learner.remote_ranks = {config.learner.remote_ranks} in the run at {arguments.address}: no place for "
            f"torchrun's rank {own_rank}"
        )
    device = "cpu" if first.device == "cpu" else f"cuda:{local_rank}"
    spec = replace(first, name=f"learner-{num_local + own_rank}", device=device, rank=num_local + own_rank)
    torch.set_num_threads(spec.threads)
    if device != "cpu":
        torch.cuda.set_device(local_rank)
    ranks.join(store, spec.rank, spec.num_ranks, device, config.learner.update_timeout_s)
    make_worker(config, device).follow()
    ranks.leave()


if __name__ == "__main__":
    main()
