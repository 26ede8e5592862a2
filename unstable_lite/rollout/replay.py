"""Bring a new game to a state within an earlier one: repeat its seed and actions, and compare the observations.

Scripted players and custom classes may remember their turns, so they take them again. Engines and endpoints do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from unstable_lite.errors import EnvError
from unstable_lite.games.env_pool import GameEnvironment
from unstable_lite.games.players.factory import is_remote
from unstable_lite.games.players.player import Player
from unstable_lite.games.players.scripted import ScriptedPlayer
from unstable_lite.league.branch_points import digest_of
from unstable_lite.rng import derive_seed
from unstable_lite.types import AgentSpec, BranchPoint, GameRecord, PastTurn, Turn


async def first_turn(
    record: GameRecord, environment: GameEnvironment, players: Mapping[int, Player], max_action_chars: int
) -> tuple[int, str]:
    """Return the player who acts first and its observation, after a repetition of the turns before `record.spec.start`.

    Appends these turns to those of `record`. Raises EnvError if the env, or a player in this process, does not do the
    same as in the earlier game.
    """
    spec, start = record.spec, record.spec.start
    if start is None:
        return environment.observe()
    turn: tuple[int, str] | None = environment.observe()
    for number, past in enumerate(start.turns):
        pid, observation = _as_before(turn, past, spec.env_id, number)
        if _remembers(spec.agent_specs[pid]):
            action = (await players[pid].act(observation)).action[:max_action_chars]
            if action != past.action:
                raise EnvError(
                    f"branching: {spec.agent_specs[pid].model.name} played {past.action!r:.100} in turn {number} and, "
                    f"with the same seed, {action!r:.100} when the turn was repeated; its choices must follow from its "
                    "seed and its observations"
                )
        record.turns.append(
            Turn(pid=pid, observation=observation, text=past.action, action=past.action, format_ok=True)
        )
        turn = await environment.advance(past.action)
        record.turns[-1].is_invalid = environment.was_invalid
    here = _as_before(turn, start, spec.env_id, len(start.turns))
    if start.chance_seed is not None:
        environment.reseed(start.chance_seed)
        for pid, player in players.items():
            if isinstance(player, ScriptedPlayer):
                player.reseed(derive_seed(start.chance_seed, "player", pid))
    return here


def _as_before(
    turn: tuple[int, str] | None, before: PastTurn | BranchPoint, env_id: str, number: int
) -> tuple[int, str]:
    """Return `turn`. Raises EnvError unless the same player acts and is shown the same as before."""
    if turn is not None and turn[0] == before.pid and digest_of(turn[1]) == before.digest:
        return turn
    differs = "the game was over" if turn is None else f"player {turn[0]} was shown another observation"
    if turn is not None and turn[0] != before.pid:
        differs = f"player {turn[0]}, not player {before.pid}, had to act"
    raise EnvError(
        f"branching: {env_id} does not repeat: with the same seed and actions, {differs} in turn {number}. Set "
        "branching.share = 0, or leave out the env"
    )


def _remembers(agent: AgentSpec) -> bool:
    return agent.model.adapter_version is None and not is_remote(agent.model)
