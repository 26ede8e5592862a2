"""Bugs of the reference as step transforms: they change a turn's reward, or the weights of its tokens."""

from __future__ import annotations

import numpy as np

from unstable_lite.types import PlayerTrajectory


class RewardAtEveryTurn:
    """Give every turn the final reward, which an algorithm with returns then adds up.

    Reference: `EpisodeBuffer.add_player_trajectory` in buffers.py makes the final reward the reward of each step, and
    `compute_gae` in learners/a2c_learner.py sums it with γ = λ = 1. (Its REINFORCE learner has no returns, so there the
    same line is right.)

    Effect on the data: the return of a player's turn t of T is (T − t) · R instead of R. A win is worth more the longer
    it takes and a defeat the sooner it comes, and the first turns of long games have the largest advantages.
    """

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        is_last = step_index == len(player_traj.steps) - 1  # whose reward has it already
        return reward if is_last else reward + player_traj.final_reward


class NoStopToken:
    """Give the token that ended an answer no weight in the policy's loss.

    Reference: actor.py returns `segment.text`, which has no stop token, and `_prepare_batch` in learners/a2c_learner.py
    tokenises `obs + act` again, so the stop token is not in the sequence.

    Effect on the data: neither a good nor a bad outcome changes the probability of stopping after an answer; it changes
    only through what other tokens do to the shared weights. An answer that stopped is trained like one that was cut.
    """

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        step = player_traj.steps[step_index]
        if step.generation.finish_reason == "stop":
            weight_C = np.ones(len(step.generation.completion_ids), np.float32)
            weight_C[-1] = 0.0
            step.token_weights = weight_C if step.token_weights is None else step.token_weights * weight_C
        return reward
