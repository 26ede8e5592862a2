"""Games of two turns, every tenth of 120, for an engine that answers after a fixed time."""

import time
from collections import deque

import textarena as ta
from textarena.envs.registration import ENV_REGISTRY, register

from unstable_lite.engines.base import ScriptedEngine
from unstable_lite.transport.messages import Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec

SHORT, LONG = 2, 120
ANSWER_S = 0.03


class LongGames(ta.Env):
    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = ta.TwoPlayerState(num_players=num_players, seed=seed)
        length = LONG if (seed or 0) // 2 % 10 == 0 else SHORT
        self.state.reset(
            game_state={"left": length}, player_prompt_function=lambda player_id, game_state: "Say a word."
        )

    def step(self, action: str) -> tuple[bool, ta.Info]:
        self.state.game_state["left"] -= 1
        if not self.state.game_state["left"]:
            self.state.set_winner(player_id=self.state.current_player_id, reason="The last word wins.")
        return self.state.step()


WRAPPERS = ENV_REGISTRY["Nim-v0-train"].default_wrappers
for env_id, wrappers in (("LongGames-v0", WRAPPERS), ("LongGames-v0-raw", None)):
    register(id=env_id, entry_point="fakes.long_games:LongGames", default_wrappers=wrappers)


class SlowEngine(ScriptedEngine):
    """Scripted engine that answers each request `ANSWER_S` after it came."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._waiting: deque[tuple[float, Generated]] = deque()

    def add_request(self, request: Generate) -> None:
        super().add_request(request)
        self._waiting.append((time.monotonic() + ANSWER_S, self._finished.pop()))

    def step(self) -> list[Generated]:
        time.sleep(0.001)
        ready = []
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            ready.append(self._waiting.popleft()[1])
        return ready

    def has_unfinished(self) -> bool:
        return bool(self._waiting)
