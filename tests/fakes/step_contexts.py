"""Context of a turn, for tests that replace the fields they are about."""

from __future__ import annotations

from unstable_lite.types import Opponent, StepContext

CONTEXT = StepContext(
    env_id="E",
    game_idx=0,
    group_idx=None,
    pid=0,
    opponents=(Opponent(pid=1, uid="base", kind="checkpoint"),),
    turn=0,
    player_turn=0,
    num_turns=6,
    num_player_turns=3,
    final_reward=1.0,
    outcome="win",
    end="natural",
    is_invalid=False,
    is_cut_off=False,
    format_ok=True,
)
"""First turn of the first player in a game of six turns, which it wins."""
