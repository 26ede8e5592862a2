"""`python -m unstable_lite.transport MODULE`: run a worker whose `main` is in MODULE."""

import sys

from unstable_lite.transport.worker_main import run_worker

if __name__ == "__main__":
    run_worker(sys.argv[1])
