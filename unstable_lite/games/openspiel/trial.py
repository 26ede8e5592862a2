"""Trial of an env id in a process of its own: some parameters crash OpenSpiel, hang it, or make it print.

    python -m unstable_lite.games.openspiel.trial ENV_ID NUM_PLAYERS

prints the reason why the game cannot be played, as JSON, or null.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from functools import cache

from unstable_lite.config.env_ids import PREFIX, canonical_env_id
from unstable_lite.errors import ConfigError
from unstable_lite.games.openspiel.game import OpenSpielGame
from unstable_lite.games.openspiel.names import last_line, load_game, pyspiel, why_unplayable
from unstable_lite.games.openspiel.prompts import action_names, prompt

TIMEOUT_S = 20.0
MOVES = 60
"""Number of random moves that are tried."""


@cache
def problem(env_id: str, num_players: int) -> str | None:
    """Return the reason why the game cannot be played by this number of players, or None. Takes 0.2 s."""
    try:
        pyspiel()
        canonical_env_id(env_id)
    except (ConfigError, ValueError) as error:
        return str(error)
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, env_id, str(num_players)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except subprocess.TimeoutExpired:
        return f"OpenSpiel did not start it and play {MOVES} moves within {TIMEOUT_S:g} s; use other parameters"
    if done.returncode == 0:
        found: str | None = json.loads(done.stdout)
        return found
    if done.returncode < 0:
        return f"OpenSpiel crashes with these parameters (signal {-done.returncode}); use others"
    return f"OpenSpiel cannot play it: {last_line(done.stderr)}"


def _try(env_id: str, num_players: int) -> str | None:
    try:
        game = load_game(env_id)
    except ConfigError as error:
        return str(error)
    if (reason := why_unplayable(game.get_type())) is not None:
        return f"cannot be played by text: {reason}"
    if game.num_players() != num_players:
        name = env_id.removeprefix(PREFIX).partition("(")[0]
        more = f", or the game's own parameter: {PREFIX}{name}(players=…)" if "players" in game.get_parameters() else ""
        return f"is a game of {game.num_players()}: set num_players = {game.num_players()}{more}"
    return _play(env_id, num_players)


def _play(env_id: str, num_players: int) -> str | None:
    """Play random moves and return the first problem."""
    rng, game = random.Random(0), OpenSpielGame(env_id, num_players, seed=0)
    for _ in range(MOVES):
        state, pid = game.position
        names = list(action_names(state, pid))
        if not names:
            return "with these parameters a player has no move"
        if "\x1b" in prompt(state, pid):
            return "its text has escape codes for colours; set ansi_color_output=False"
        if game.step(f"[{rng.choice(names)}]"):
            break
    return None


if __name__ == "__main__":
    print(json.dumps(_try(sys.argv[1], int(sys.argv[2]))))  # noqa: T201
