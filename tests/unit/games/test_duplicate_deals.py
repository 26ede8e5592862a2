"""The same cards and dice come for both orders of the seats, for any moves and any number of draws by the players."""

from __future__ import annotations

import pytest

from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.evaluation.models import EvaluatedModel, opponent
from unstable_lite.evaluation.plan import Cell, game_spec
from unstable_lite.games.openspiel.game import OpenSpielGame
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.scripted import ScriptedPlayer
from unstable_lite.rng import derive_seed
from unstable_lite.types import GameSpec, Generation, ModelRef

KUHN, LEDUC = "openspiel:kuhn_poker", "openspiel:leduc_poker"
DICE = "openspiel:liars_dice(dice_sides=3)"
PIG = "openspiel:pig(winscore=20)"


async def no_engine(prompt: str, version: int, stop: tuple[str, ...], seed: int | None) -> Generation:
    raise AssertionError("no seat is a model's")


def ref(model: EvaluatedModel) -> ModelRef:
    return ModelRef(uid=model.name, kind="fixed", name=model.name)


def played(spec: GameSpec) -> tuple[list[int], list[tuple[int, int]]]:
    """Play the game; return its chance outcomes, and the moves with their players."""
    game, players = OpenSpielGame(spec.env_id, spec.num_players, spec.seed), PlayerFactory(no_engine).players(spec)
    turn: tuple[int, str] | None = game.observe()
    while turn is not None:
        player = players[turn[0]]
        assert isinstance(player, ScriptedPlayer)
        turn = game.play(player.action(turn[1]))
    events = [(event.player, event.action) for event in game.position[0].full_history()]
    return [action for player, action in events if player == -1], [event for event in events if event[0] >= 0]


@pytest.mark.parametrize(
    ("env_id", "names"),
    [
        (KUHN, ("scripted:cfr", "scripted:random")), (LEDUC, ("scripted:cfr", "scripted:random")),
        (DICE, ("scripted:cfr", "scripted:random")), (PIG, ("scripted:mcts:20", "scripted:random")),
    ],
)  # fmt: skip
def test_swapped_seats_get_the_same_cards_also_if_moves_differ(env_id: str, names: tuple[str, str]) -> None:
    model, other = map(opponent, names)
    cell = Cell(model=model, opponent=other, env=EvalEnvSpec(env_id=env_id, num_players=2))
    deals, differently_played = set(), 0
    for number in range(0, 40, 2):
        first, second = (game_spec(cell, number + seat, 0, ref) for seat in (0, 1))
        assert first.seed == second.seed
        assert [agent.model.name for agent in first.agent_specs] == list(names)
        assert [agent.model.name for agent in second.agent_specs] == list(names[::-1])
        (cards, moves), (other_cards, other_moves) = played(first), played(second)
        common = min(len(cards), len(other_cards))
        assert common > 0
        assert cards[:common] == other_cards[:common]
        deals.add(tuple(cards[:common]))
        differently_played += moves != other_moves
    assert len(deals) > 1
    assert differently_played > 5


def test_chance_does_not_depend_on_how_much_the_players_draw() -> None:
    env = EvalEnvSpec(env_id=PIG, num_players=2)
    dice = []
    for name in ("scripted:random", "scripted:mcts:5", "scripted:mcts:50"):
        cell = Cell(model=opponent(name), opponent=opponent(name), env=env)
        dice.append([played(game_spec(cell, number, 0, ref))[0] for number in range(10)])
    for of_game in zip(*dice, strict=True):
        common = min(map(len, of_game))
        assert common > 3
        assert len({tuple(rolls[:common]) for rolls in of_game}) == 1


def test_streams_of_chance_and_of_players_have_different_seeds() -> None:
    for seed in range(50):
        streams = [derive_seed(seed, "deal", index) for index in range(5)]
        streams += [derive_seed(seed, "player", pid) for pid in range(2)]
        assert len({*streams, seed}) == 8
