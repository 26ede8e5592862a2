"""The process for games that had better not live with all the others.

It answers one request after the other, and keeps in a file which game's call is under way: what it had not sent yet
when it is killed is lost, what it had written is not. Knows nothing of players, nor of what a game is for.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any, cast

import numpy as np

from unstable_lite.games.environments import Environment
from unstable_lite.transport.child import WorkerSocket, WorkerSpec
from unstable_lite.transport.messages import DropEnv, EnvState, Failed, MakeEnv, Message, Ready, StepEnv, Stop
from unstable_lite.types import Observation

NO_GAME = -1


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    games: dict[int, Environment] = {}
    under_way = os.open(file_of_call(spec.endpoint, spec.name), os.O_RDWR | os.O_CREAT, 0o600)
    _write(under_way, NO_GAME)
    socket.send(Ready(facts={}))
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                return
            if isinstance(message, DropEnv):
                games.pop(message.game, None)
                continue
            assert isinstance(message, (MakeEnv, StepEnv)), message
            _write(under_way, message.game)
            socket.send(_answer(games, message))  # which may fail, too: an env may say what no message can hold
            _write(under_way, NO_GAME)


def file_of_call(endpoint: str, name: str) -> Path:
    """Beside the socket, where nobody else can look."""
    return Path(endpoint.removeprefix("ipc://")).with_name(f"{name}.call")


def game_under_way(path: Path) -> int:
    """The game whose call is under way, or was when the process died."""
    return int.from_bytes(path.read_bytes(), "little", signed=True)


def _write(file: int, game: int) -> None:
    os.pwrite(file, game.to_bytes(8, "little", signed=True), 0)


def _answer(games: dict[int, Environment], message: MakeEnv | StepEnv) -> Message:
    try:
        return _advance(games, message)
    except Exception as error:  # an env's own, whatever it is: that game is over, and no other
        traceback.print_exc()
        games.pop(message.game, None)
        return Failed(request_id=message.request_id, error=f"{type(error).__name__}: {error}")


def _advance(games: dict[int, Environment], message: MakeEnv | StepEnv) -> EnvState:
    if isinstance(message, MakeEnv):
        observation = cast(Observation, message.observation)
        env = games[message.game] = Environment(message.env_id, message.num_players, message.seed, observation)
        turn: tuple[int, str] | None = env.observe()
    else:
        env = games[message.game]
        turn = env.play(message.action)
    if turn is not None:
        pid, seen = turn
        return EnvState(
            request_id=message.request_id,
            is_over=False,
            was_invalid=env.was_invalid,
            has_teams=env.has_teams,
            pid=pid,
            observation=seen,
            rewards=tuple(env.rewards_so_far().values()),
            game_info="",
        )
    rewards, game_info = env.close()
    return EnvState(
        request_id=message.request_id,
        is_over=True,
        was_invalid=env.was_invalid,
        has_teams=env.has_teams,
        pid=0,
        observation="",
        rewards=tuple(rewards[pid] for pid in range(env.num_players)),
        game_info=json.dumps(game_info, default=_plain),
    )


def _plain(value: Any) -> Any:
    """What JSON does not know: the numbers of NumPy as what they are, anything else as text."""
    return value.item() if isinstance(value, np.generic) else str(value)
