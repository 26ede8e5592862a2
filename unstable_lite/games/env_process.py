"""The process for games that had better not live with all the others.

It answers one request after the other, each at once, so that the oldest one without an answer is the one that hangs.
Knows nothing of players, nor of what a game is for.
"""

from __future__ import annotations

import json
import traceback
from typing import cast

from unstable_lite.games.environments import Environment
from unstable_lite.transport.child import WorkerSocket, WorkerSpec
from unstable_lite.transport.messages import DropEnv, EnvState, Failed, MakeEnv, Message, Ready, StepEnv, Stop
from unstable_lite.types import Observation


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:  # noqa: ARG001
    games: dict[int, Environment] = {}
    socket.send(Ready(facts={}))
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                return
            if isinstance(message, DropEnv):
                games.pop(message.game, None)
                continue
            assert isinstance(message, (MakeEnv, StepEnv)), message
            socket.send(_answer(games, message))


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
        pid, seen = env.observe()
        is_over, actions = False, message.actions
    else:
        env, actions = games[message.game], (message.action,)
    for action in actions:
        if not (is_over := env.step(action)):
            pid, seen = env.observe()
    if not is_over:
        return EnvState(
            request_id=message.request_id, is_over=False, pid=pid, observation=seen, rewards=(), game_info=""
        )
    rewards, game_info = env.close()
    return EnvState(
        request_id=message.request_id,
        is_over=True,
        pid=0,
        observation="",
        rewards=tuple(rewards[pid] for pid in range(env.num_players)),
        game_info=json.dumps(game_info, default=str),
    )
