"""From the AgentSpec of a seat to the player that sits there."""

from __future__ import annotations

import random
from collections.abc import Mapping

from unstable_lite import by_name
from unstable_lite.errors import EnvError, UnsupportedEnvError
from unstable_lite.games.api_keys import API_KEY_VARIABLES, api_key
from unstable_lite.games.players.player import Player
from unstable_lite.games.players.policy import Generates, PolicyPlayer
from unstable_lite.games.players.scripted import legal_actions, random_legal_action
from unstable_lite.games.templates import TEMPLATES, Template
from unstable_lite.types import AgentSpec, GameSpec, Reply

SCRIPTED = "scripted:"


class RandomLegalPlayer:
    """`scripted:random`: any legal action, all equally likely."""

    def __init__(self, env_id: str, seed: int) -> None:
        self._env_id = env_id
        self._random = random.Random(seed)

    async def act(self, observation: str) -> Reply:
        action = random_legal_action(self._env_id, observation, self._random)
        return Reply(action=action, text=action, prompt=observation)


class Seats:
    """What the players of a run need: the engines, the prompt templates."""

    def __init__(self, generate: Generates, templates: Mapping[str, Template] = TEMPLATES) -> None:
        self._generate = generate
        self._templates = templates

    def players(self, spec: GameSpec) -> dict[int, Player]:
        """The players of one game, by seat."""
        return {agent.pid: self._player(spec, agent) for agent in spec.agent_specs}

    def _player(self, spec: GameSpec, agent: AgentSpec) -> Player:
        if agent.model.kind == "checkpoint":
            template = by_name.find("prompt_template", agent.prompt_template, self._templates)
            return PolicyPlayer(self._generate, template, agent, spec.num_players)
        assert agent.model.name is not None
        if agent.model.name.startswith(SCRIPTED):
            return RandomLegalPlayer(spec.env_id, spec.seed ^ agent.pid)
        from unstable_lite.games.players.openai_compatible import OpenAICompatiblePlayer  # imports for half a second

        return OpenAICompatiblePlayer(agent)


def opponent_problem(name: str, env_id: str, observation: str | None) -> str | None:
    """Why the fixed opponent `name` cannot play `env_id`, if so; `observation`: the env's first one, if it starts."""
    if not name.startswith(SCRIPTED):
        if api_key() is None:
            return f"opponent {name!r} needs an API key: set {' or '.join(API_KEY_VARIABLES)}"
        return None
    if name != "scripted:random":
        return f"no scripted opponent {name!r}; there is 'scripted:random'"
    try:
        has_actions = observation is None or legal_actions(env_id, observation)
    except (UnsupportedEnvError, EnvError) as error:
        return f"opponent {name!r} cannot play {env_id!r}: {error}"
    return None if has_actions else f"opponent {name!r} finds no legal action in the first observation of {env_id!r}"
