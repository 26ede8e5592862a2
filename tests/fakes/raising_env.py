"""Games whose moves say what happens: an exception of `step`, an invalid move, the end, or the next turn."""

import subprocess
from typing import Any

import textarena as ta
from textarena.envs.registration import register


class RateLimitError(Exception):
    """An exception that an env defines for its API."""


def failed_call() -> Exception:
    """Return an exception that was raised from one of a network."""
    try:
        try:
            raise ConnectionResetError("the API hung up")
        except ConnectionResetError as error:
            raise ValueError("no answer") from error
    except ValueError as error:
        return error


class NetworkXNoPath(Exception):
    """An exception of networkx about a graph."""


def of_package(name: str) -> Exception:
    return type("Refused", (Exception,), {"__module__": name})("refused")  # type: ignore[no-any-return]


RAISED: dict[str, BaseException] = {
    "[value]": ValueError("no number in '²'"),
    "[graph]": NetworkXNoPath("no path"),
    "[own package]": of_package("together_we_win.rules"),
    "[exit]": SystemExit(2),
    "[recursion]": RecursionError("too deep"),
    "[file]": FileNotFoundError("words.txt"),
    "[api]": RateLimitError("slow down"),
    "[client]": of_package("together.errors"),
    "[chained]": failed_call(),
    "[group]": ExceptionGroup("calls", [KeyError("model"), ConnectionRefusedError("no server")]),
    "[memory]": MemoryError(),
    "[timeout]": TimeoutError("no answer in time"),
    "[process]": subprocess.CalledProcessError(-9, "judge"),
}


class RaisingEnv(ta.Env):
    def __init__(self, has_teams: bool = False) -> None:
        self.has_teams = has_teams

    def reset(self, num_players: int, seed: int | None = None) -> None:
        states: list[Any] = [ta.SinglePlayerState, ta.TwoPlayerState, ta.FFAMultiPlayerState, ta.TeamMultiPlayerState]
        self.state = states[3 if self.has_teams else num_players - 1](num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "Say a word. ")

    def get_observation(self) -> Any:
        pid, seen = super().get_observation()
        if self.state.game_state.get("shows_nothing"):
            raise ValueError("no board")
        return pid, seen

    def step(self, action: str) -> tuple[bool, ta.Info]:
        pid = self.state.current_player_id
        if action in RAISED:
            raise RAISED[action]
        self.state.add_observation(
            from_id=pid, message=f"{action} " * 10, observation_type=ta.ObservationType.PLAYER_ACTION
        )
        if action == "[invalid]":
            self.state.set_invalid_move(reason="It is not a word.")
        self.state.game_state["shows_nothing"] = action == "[blank]"
        self.state.done = action == "[no rewards]"
        return self.state.step()


WRAPPERS = [ta.wrappers.LLMObservationWrapper]
register(id="Raising-v0", entry_point="fakes.raising_env:RaisingEnv", default_wrappers=WRAPPERS)
