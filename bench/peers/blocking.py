"""Games that block their process or thread until each answer arrives, as in all peers.

The same envs, templates, extraction and records as this project's, so that a peer differs by its schedule alone. Only
the text of an answer comes back, as in the reference: no token ids, no log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from unstable_lite.games.answers import find_extraction
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.policy import Player
from unstable_lite.games.templates import TEMPLATES
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import AgentSpec, GameRecord, GameSpec, Generation, Reply

T = TypeVar("T")

Submit = Callable[[str, int, tuple[str, ...]], str]
"""Blocking function of (prompt, adapter version, stop strings) that returns the text of a completion."""


def play(spec: GameSpec, submit: Submit) -> GameRecord:
    """Play one game to its end."""
    record = new_record(spec)
    _finished(run_game(record, make_in_process(spec), _players(spec, submit)))
    return record


class BlockingPlayer:
    """Player at a seat of a model on the engine."""

    def __init__(self, agent: AgentSpec, num_players: int, submit: Submit) -> None:
        assert agent.model.adapter_version is not None
        self._version = agent.model.adapter_version
        self._template = TEMPLATES[agent.prompt_template]
        self._extract = find_extraction(agent.action_extraction_fn)
        self._num_players = num_players
        self._submit = submit

    async def act(self, observation: str) -> Reply:
        prompt = self._template.prompt(observation, self._num_players)
        text = self._submit(prompt, self._version, self._template.stop)
        action, format_ok = self._extract(text)
        return Reply(action=action, text=text, prompt=prompt, format_ok=format_ok, generation=_text_alone(text))


def _players(spec: GameSpec, submit: Submit) -> dict[int, Player]:
    players = PlayerFactory(_asks_no_engine).players(spec)
    served = {agent.pid: agent for agent in spec.agent_specs if agent.model.kind == "checkpoint"}
    return players | {pid: BlockingPlayer(agent, spec.num_players, submit) for pid, agent in served.items()}


async def _asks_no_engine(*_: Any) -> Generation:
    raise AssertionError("a seat of the policy is a BlockingPlayer's")


def _text_alone(text: str) -> Generation:
    nothing = np.empty(0, np.int32)
    return Generation(
        prompt_ids=nothing,
        completion_ids=nothing,
        logprobs=np.empty(0, np.float32),
        text=text,
        finish_reason="stop",
        adapter_version=0,
    )


def _finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits, because its calls block."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("it waited for something")
