from collections import Counter
from dataclasses import astuple
from pathlib import Path

import pytest

from unstable_lite.adapters.frozen import FrozenAdapter
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.evaluation.exact import models_by_env
from unstable_lite.evaluation.models import BASE_MODEL, EvaluatedModel, opponent
from unstable_lite.evaluation.plan import Cell, game_spec, in_rounds, make_cells, read_key
from unstable_lite.games.openspiel.game import OpenSpielGame
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.scripted import ScriptedPlayer
from unstable_lite.types import GameSpec, Generation, ModelRef

NIM = EvalEnvSpec(env_id="Nim-v0-train", num_players=2)
DICE = EvalEnvSpec(env_id="LiarsDice-v0-small-train", num_players=3)
FROZEN = EvalEnvSpec(env_id="FrozenLake-v0-train", num_players=1)
RANDOM = EvaluatedModel(name="scripted:random", key="scripted:random", is_fixed=True)


def adapter(number: int, name: str = "") -> EvaluatedModel:
    name, key = name or f"ckpt-{number}", f"digest {number}"
    facts = FrozenAdapter(path=Path(f"/somewhere/{name}"), key=key, rank=4, base="", sizes={})
    return EvaluatedModel(name=name, key=key, adapter=facts)


def ref(model: EvaluatedModel) -> ModelRef:
    return ModelRef(uid=model.name, kind="checkpoint", adapter_version=0)


def test_every_model_meets_the_same_seeds_at_balanced_seats():
    cells = make_cells([BASE_MODEL, adapter(1)], [RANDOM], [NIM])
    one, other = ([game_spec(cell, number, 7, ref) for number in range(20)] for cell in cells)
    assert [spec.seed for spec in one] == [spec.seed for spec in other]
    assert set(Counter(spec.seed for spec in one).values()) == {2}  # once from either seat
    assert all(spec.seed % 2 for spec in one)
    for specs, name in ((one, "base"), (other, "ckpt-1")):
        seats = Counter(agent.pid for spec in specs for agent in spec.agent_specs if agent.model.uid == name)
        assert seats == {0: 10, 1: 10}
    assert game_spec(cells[0], 0, 8, ref).seed != one[0].seed


def test_models_of_cells_that_differ_only_in_sampling_are_asked_once():
    samplings = [{}, {"temperature": 0.0}, {"top_p": 0.5}]
    cells = make_cells([BASE_MODEL, adapter(1)], [RANDOM], [NIM.changed(**of) for of in samplings])
    assert len({cell.key for cell in cells}) == 6
    assert models_by_env(cells) == {NIM.changed(fixed_opponent=""): [BASE_MODEL, adapter(1)]}


def test_one_model_sits_alone_among_several_seats():
    (cell,) = make_cells([adapter(0)], [adapter(1)], [DICE])
    assert [a.model.uid for a in game_spec(cell, 1, 0, ref).agent_specs] == ["ckpt-1", "ckpt-0", "ckpt-1"]


@pytest.mark.parametrize("slots", [2, 3, 5, 100])
def test_rounds_fit_the_adapter_slots_and_lose_no_cell(slots):
    models = [BASE_MODEL, RANDOM, *(adapter(n) for n in range(6))]
    cells = make_cells(models, models, [NIM])
    rounds = in_rounds(cells, slots)
    assert [cell for round_ in rounds for cell in round_] == cells
    for round_ in rounds:
        assert len(set().union(*(cell.adapters for cell in round_))) <= slots
    assert (len(rounds) == 1) == (slots >= 6)


def test_cell_is_identified_by_contents_not_by_names():
    cells = make_cells([adapter(1), adapter(1, "the best")], [RANDOM], [NIM])
    assert len(cells) == 2 and cells[0].key == cells[1].key


def test_cell_key_contains_how_the_cell_is_played():
    env = DICE.model_copy(update={"prompt_template": "tiny", "max_turns": 9, "observation": "first-last"})
    cells = [*make_cells([adapter(1)], [RANDOM], [env]), *make_cells([BASE_MODEL], [RANDOM, BASE_MODEL], [FROZEN])]
    assert [astuple(read_key(cell.key)) for cell in cells] == [
        ("digest 1", "scripted:random", DICE.env_id, 3, "tiny", "max_turns=9, observation=first-last"),
        ("base", "none", FROZEN.env_id, 1, "default", ""),
    ]


KUHN = "openspiel:kuhn_poker"
LIARS_DICE = "openspiel:liars_dice(dice_sides=3)"
PIG = "openspiel:pig(winscore=20)"


async def no_engine(prompt: str, version: int, stop: tuple[str, ...], seed: int | None) -> Generation:
    raise AssertionError("no seat is a model's")


def ref_of(model: EvaluatedModel) -> ModelRef:
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
        (KUHN, ("scripted:cfr", "scripted:random")), 
        (LIARS_DICE, ("scripted:cfr", "scripted:random")), (PIG, ("scripted:mcts:20", "scripted:random")),
    ],
)  # fmt: skip
def test_swapped_seats_get_the_same_cards_also_if_moves_differ(env_id, names):
    model, other = map(opponent, names)
    cell = Cell(model=model, opponent=other, env=EvalEnvSpec(env_id=env_id, num_players=2))
    deals, differently_played = set(), 0
    for number in range(0, 40, 2):
        first, second = (game_spec(cell, number + seat, 0, ref_of) for seat in (0, 1))
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
