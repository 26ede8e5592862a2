"""Handmade results of evaluations."""

from typing import Any

from unstable_lite.tracking.evaluations import Evaluation


def make_evaluation(wins: int, n: int = 400, step: int = 10, **changes: Any) -> Evaluation:
    """Return an evaluation of `ckpt-STEP`, whose other games are losses by default."""
    of = {"label": "x", "model": f"ckpt-{step}", "env_id": "E", "opponent": "O", "mean_reward": 0.0, "reward_std": 1.0}
    counts = {"draws": 0, "losses": n - wins, "invalid": 0, "void": 0}
    return Evaluation(step=step, n=n, wins=wins, **(of | counts | changes))
