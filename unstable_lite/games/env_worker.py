"""The process that runs isolated envs.

It answers one request at a time and records in a file which game's call is running: the file survives if the process
is killed, unsent messages do not. Knows nothing of players or of a game's purpose.
"""

from __future__ import annotations

import json
import os
import traceback

from unstable_lite.errors import EnvRaised, described
from unstable_lite.files import plain
from unstable_lite.games.env_start import NO_GAME, LocalEnvironment, environment_of, file_of_call, write_game
from unstable_lite.games.local_game import reason_of
from unstable_lite.transport.codec import encode
from unstable_lite.transport.messages import DropEnv, EnvState, Failed, MakeEnv, Message, Ready, StepEnv, Stop
from unstable_lite.transport.worker_main import WorkerSocket, WorkerSpec


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    games: dict[int, LocalEnvironment] = {}
    under_way = os.open(file_of_call(spec.endpoint, spec.name), os.O_RDWR | os.O_CREAT, 0o600)
    write_game(under_way, NO_GAME)
    socket.send(Ready(info={}))
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                return
            if isinstance(message, DropEnv):
                games.pop(message.game, None)
                continue
            assert isinstance(message, (MakeEnv, StepEnv)), message
            write_game(under_way, message.game)
            frame = encode([_answer(games, message)])  # may fail: an env can return values that no message can hold
            # Before sending: a process that dies after its answer did not die in this game's call.
            write_game(under_way, NO_GAME)
            socket.send_frame(frame)


def _answer(games: dict[int, LocalEnvironment], message: MakeEnv | StepEnv) -> Message:
    try:
        return _advance(games, message)
    except Exception as error:  # any exception of an env ends that game only
        traceback.print_exc()
        games.pop(message.game, None)
        text = str(error) if isinstance(error, EnvRaised) else described(error)
        return Failed(request_id=message.request_id, error=text, reason=reason_of(error))


def _advance(games: dict[int, LocalEnvironment], message: MakeEnv | StepEnv) -> EnvState:
    if isinstance(message, MakeEnv):
        env = games[message.game] = environment_of(message, message.seed)
        turn: tuple[int, str] | None = env.observe()
    else:
        env = games[message.game]
        if message.chance_seed is not None:
            env.reseed(message.chance_seed)
        turn = env.play(message.action)
    pid, seen = turn or (0, "")
    rewards, game_info = (env.rewards_so_far(), {}) if turn is not None else env.close()
    return EnvState(
        request_id=message.request_id,
        is_over=turn is None,
        was_invalid=env.was_invalid,
        teams=None if env.teams is None else tuple(env.teams.values()),
        eliminated=env.eliminated,
        pid=pid,
        observation=seen,
        rewards=tuple(rewards.values()),
        game_info=json.dumps(game_info, default=plain),
    )
