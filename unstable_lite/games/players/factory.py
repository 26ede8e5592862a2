"""Create the player for the AgentSpec of a seat, and check whether it can play now.

A fixed opponent is a scripted player, a user's class, or a model behind an OpenAI-compatible endpoint. Engines answer
for every model with an adapter version: the policy, checkpoints, frozen players.
"""

from __future__ import annotations

import importlib
import inspect
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from unstable_lite import plugins
from unstable_lite.config.games import OpponentsConfig, parse_player
from unstable_lite.errors import ConfigError, EnvError, UnsupportedEnvError
from unstable_lite.games.api_keys import api_key, endpoint_url, key_variable, url_problem
from unstable_lite.games.openspiel.players import MCTS, CfrPlayer, mcts_class
from unstable_lite.games.players.blind import BlindPlayer
from unstable_lite.games.players.lookahead import GreedyPlayer, OptimalPlayer
from unstable_lite.games.players.policy import (
    Generates,
    LeasesNewest,
    OpenAICompatiblePlayer,
    Player,
    PolicyPlayer,
    ThinkingBudget,
)
from unstable_lite.games.players.scripted import RandomLegalPlayer, ScriptedPlayer
from unstable_lite.games.templates import TEMPLATES, Template
from unstable_lite.rng import derive_seed
from unstable_lite.types import AgentSpec, GameSpec, ModelRef

if TYPE_CHECKING:
    from unstable_lite.games.players.openai_compatible import Endpoint

BLIND = "scripted:blind-"
"""Prefix of the blind player that was searched for against `scripted:NAME`, as in `scripted:blind-greedy`."""
SCRIPTED_PLAYERS: dict[str, type[ScriptedPlayer]] = {
    "scripted:random": RandomLegalPlayer,
    "scripted:greedy": GreedyPlayer,
    "scripted:optimal": OptimalPlayer,
}
SCRIPTED_PLAYERS |= {
    name.replace("scripted:", BLIND): type("BlindPlayer", (BlindPlayer,), {"opponent": opponent})
    for name, opponent in SCRIPTED_PLAYERS.items()
}
SCRIPTED_PLAYERS["scripted:cfr"] = CfrPlayer
DESCRIPTORS_BESIDES = 128
"""File descriptors of a run besides one connection per request to an endpoint; games have none."""


class PlayerFactory:
    """Create the players of one run. Owns the endpoint for remote models."""

    def __init__(
        self,
        generate: Generates,
        templates: Mapping[str, Template] = TEMPLATES,
        opponents: OpponentsConfig | None = None,
        say: Callable[[str], None] = lambda _text: None,
        sampling_seed: int | None = None,
        newest: LeasesNewest | None = None,
        thinking: ThinkingBudget | None = None,
    ) -> None:
        """Create a factory without an endpoint.

        sampling_seed: seed from which each sample's seed is derived, with the game, seat and turn; None: the engines'
        own random streams. newest: lease of the current policy's adapter, for each turn of a trained seat; None: every
        seat keeps its adapter for the game. thinking: budget of every seat that engines serve.
        """
        self._generate = generate
        self._templates = templates
        self._opponents = opponents or OpponentsConfig()
        self._say = say
        self._sampling_seed = sampling_seed
        self._newest = newest
        self._thinking = thinking
        self._endpoint: Endpoint | None = None
        self._spent_before: dict[str, Any] | None = None
        """Budget state of a resumed run."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()

    def players(self, spec: GameSpec) -> dict[int, Player]:
        """Return the players of one game, by seat."""
        return {agent.pid: self._player(spec, agent) for agent in spec.agent_specs}

    def keeps_adapter(self, agent: AgentSpec) -> bool:
        """Return whether the seat has one adapter for the whole game. Trained seats are those of the current policy."""
        return self._newest is None or not agent.collect_data

    def can_play(self, model: ModelRef) -> bool:
        """Return False if a remote model is paused or the budget is spent."""
        return self._endpoint is None or not is_remote(model) or self._endpoint.can_play(_name(model))

    async def wait_for_opponents(self, spec: GameSpec) -> None:
        """Wait until all of a game's players can play. Raises OpponentError if that takes too long."""
        if self._endpoint is not None:
            for name in dict.fromkeys(_name(agent.model) for agent in spec.agent_specs if is_remote(agent.model)):
                await self._endpoint.wait_for(name)

    @property
    def spent(self) -> str | None:
        """Spending limit that is reached, if any."""
        return self._endpoint.budget.spent if self._endpoint is not None else None

    def metrics(self) -> dict[str, float]:
        """Return metrics of the endpoint; none before the first game against a remote model."""
        return self._endpoint.metrics() if self._endpoint is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the spent budget of the endpoint."""
        return {"budget": self._endpoint.budget.state_dict() if self._endpoint is not None else self._spent_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; must precede the first game."""
        assert self._endpoint is None
        self._spent_before = state["budget"]

    def _player(self, spec: GameSpec, agent: AgentSpec) -> Player:
        if agent.model.adapter_version is not None:
            template = plugins.find("prompt_template", agent.prompt_template, self._templates)
            seed, generate = self._sampling_seed, self._generate
            own_seed = None if seed is None else derive_seed(seed, spec.game_idx, agent.pid)
            newest = None if self.keeps_adapter(agent) else self._newest
            if spec.sampling is not None:
                generate = partial(generate, sampling=spec.sampling)
            if self._thinking is not None:
                budget = replace(self._thinking, tags=template.tags)
                generate = partial(budget.generate, generate, template.opened_thinking)
            return PolicyPlayer(generate, template, agent, spec.num_players, own_seed, newest)
        if not is_remote(agent.model):
            # Not the game's seed: with equal streams, moves would correlate with the cards that were dealt.
            seed_of_player = derive_seed(spec.seed, "player", agent.pid)
            return _player_class(_name(agent.model))(env_id=spec.env_id, seed=seed_of_player)
        from unstable_lite.games.players.openai_compatible import Endpoint  # its library takes a second to import

        if self._endpoint is None:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != resource.RLIM_INFINITY and soft < (needed := descriptors_needed(self._opponents)):
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, _most_descriptors()), hard))
            self._endpoint = Endpoint(self._opponents, self._say)
            if self._spent_before is not None:
                self._endpoint.budget.load_state_dict(self._spent_before)
        return OpenAICompatiblePlayer(self._endpoint, agent, spec.num_players)


def descriptors_needed(opponents: OpponentsConfig) -> int:
    return opponents.max_concurrent_requests + DESCRIPTORS_BESIDES


def _most_descriptors() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def is_remote(model: ModelRef) -> bool:
    """Return whether the endpoint serves the model."""
    return model.kind == "fixed" and model.adapter_version is None and parse_player(_name(model)).kind == "remote"


def opponent_problem(
    name: str, env_id: str, observation: str | None, opponents: OpponentsConfig | None = None
) -> str | None:
    """Return the reason why the fixed opponent `name` cannot play `env_id`, or None.

    observation: the env's first one, if it starts.
    """
    kind = parse_player(name).kind
    if kind == "remote":
        configured = opponents.base_url if opponents else None
        url = endpoint_url(configured)
        if (problem := url_problem(url)) is not None:  # a problem of the config is reported with its key
            return None if configured else f"opponent {name!r}: the environment's OPENAI_BASE_URL: {problem}"
        if api_key(url) is None:
            return f"opponent {name!r} needs an API key for {url}: set {key_variable(url)}"
        if opponents is not None and (needed := descriptors_needed(opponents)) > (most := _most_descriptors()):
            return (
                f"opponent {name!r}: opponents.max_concurrent_requests = {opponents.max_concurrent_requests} needs "
                f"{needed} open files, but this system allows {most} per process (ulimit -Hn); lower it"
            )
        # The library takes a second to import: do it now, not on the event loop in the first game.
        importlib.import_module("unstable_lite.games.players.openai_compatible")
        return None
    try:
        player_class = _player_class(name)
    except ConfigError as error:
        return str(error)
    if kind == "class":
        act = getattr(player_class, "act", None)
        has_interface = inspect.isclass(player_class) and inspect.iscoroutinefunction(act)
        try:
            inspect.signature(player_class).bind(env_id="", seed=0)
        except (TypeError, ValueError):
            has_interface = False
        shape = "__init__(self, env_id: str, seed: int) and async def act(self, observation: str) -> Reply"
        return None if has_interface else f"opponent {name!r} must be a class with {shape}"
    try:
        if observation is not None:
            player = player_class(env_id=env_id, seed=0)
            assert isinstance(player, ScriptedPlayer)
            player.action(observation)
    except (UnsupportedEnvError, EnvError) as error:
        return f"opponent {name!r} cannot play {env_id!r}: {error}"
    return None


def _name(model: ModelRef) -> str:
    assert model.name is not None, model
    return model.name


def _player_class(name: str) -> Callable[..., Player]:
    """Return a local player's class. Raises ConfigError."""
    if name.startswith(MCTS):
        return mcts_class(name)
    if parse_player(name).kind == "scripted" and name not in SCRIPTED_PLAYERS:
        raise ConfigError(f"no scripted opponent {name!r}; there are {', '.join(SCRIPTED_PLAYERS)} and {MCTS}N")
    return plugins.find("opponent", name, SCRIPTED_PLAYERS)
