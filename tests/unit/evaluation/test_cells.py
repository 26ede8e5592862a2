from __future__ import annotations

from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from unstable_lite.adapters.frozen import FrozenAdapter
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.models import BASE_MODEL, NO_OPPONENT, EvaluatedModel
from unstable_lite.evaluation.plan import Cell, as_trained, game_spec, in_rounds, make_cells, read_key
from unstable_lite.types import ModelRef

NIM = EvalEnvSpec(env_id="Nim-v0-train", num_players=2)
DICE = EvalEnvSpec(env_id="LiarsDice-v0-small-train", num_players=3)
FROZEN = EvalEnvSpec(env_id="FrozenLake-v0-train", num_players=1)
RANDOM = EvaluatedModel(name="scripted:random", key="scripted:random", is_fixed=True)


def adapter(number: int) -> EvaluatedModel:
    name, key = f"ckpt-{number}", f"digest {number}"
    return EvaluatedModel(name=name, key=key, adapter=facts(key, Path(f"/somewhere/{name}")))


def facts(key: str, path: Path) -> FrozenAdapter:
    return FrozenAdapter(path=path, key=key, rank=4, base="", sizes={})


def ref(model: EvaluatedModel) -> ModelRef:
    return ModelRef(uid=model.name, kind="checkpoint", adapter_version=0)


def test_every_model_meets_every_opponent_in_every_env() -> None:
    cells = make_cells([BASE_MODEL, adapter(1)], [RANDOM, BASE_MODEL], [NIM, FROZEN])
    assert [(c.env.env_id, c.model.name, c.opponent.name) for c in cells] == [
        ("Nim-v0-train", "base", "scripted:random"),
        ("Nim-v0-train", "base", "base"),
        ("Nim-v0-train", "ckpt-1", "scripted:random"),
        ("Nim-v0-train", "ckpt-1", "base"),
        ("FrozenLake-v0-train", "base", "none"),
        ("FrozenLake-v0-train", "ckpt-1", "none"),
    ]


def test_every_model_meets_the_same_seeds_at_balanced_seats() -> None:
    cells = make_cells([BASE_MODEL, adapter(1)], [RANDOM], [NIM])
    one, other = ([game_spec(cell, number, 7, ref) for number in range(20)] for cell in cells)
    assert [spec.seed for spec in one] == [spec.seed for spec in other]
    assert set(Counter(spec.seed for spec in one).values()) == {2}  # once from either seat
    assert all(spec.seed % 2 for spec in one)
    for specs, name in ((one, "base"), (other, "ckpt-1")):
        seats = Counter(agent.pid for spec in specs for agent in spec.agent_specs if agent.model.uid == name)
        assert seats == {0: 10, 1: 10}
    assert game_spec(cells[0], 0, 8, ref).seed != one[0].seed


def test_cells_that_differ_only_in_sampling_are_one_as_trained() -> None:
    samplings = [{}, {"temperature": 0.0}, {"top_p": 0.5}]
    cells = make_cells([BASE_MODEL, adapter(1)], [RANDOM], [NIM.model_copy(update=of) for of in samplings])
    assert len({cell.key for cell in cells}) == 6
    assert as_trained(cells) == make_cells([BASE_MODEL, adapter(1)], [RANDOM], [NIM])


def test_one_model_sits_alone_among_several_seats() -> None:
    (cell,) = make_cells([adapter(0)], [adapter(1)], [DICE])
    assert [a.model.uid for a in game_spec(cell, 1, 0, ref).agent_specs] == ["ckpt-1", "ckpt-0", "ckpt-1"]


@pytest.mark.parametrize("slots", [2, 3, 5, 100])
def test_rounds_fit_the_adapter_slots_and_lose_no_cell(slots: int) -> None:
    models = [BASE_MODEL, RANDOM, *(adapter(n) for n in range(6))]
    cells = make_cells(models, models, [NIM])
    rounds = in_rounds(cells, slots)
    assert [cell for round_ in rounds for cell in round_] == cells
    for round_ in rounds:
        assert len(set().union(*(cell.adapters for cell in round_))) <= slots
    assert (len(rounds) == 1) == (slots >= 6)


def test_pair_that_does_not_fit_the_slots_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_loras = 1: ckpt-0 .*ckpt-1 .*2"):
        in_rounds(make_cells([adapter(0)], [adapter(1)], [NIM]), 1)


def test_cell_is_identified_by_contents_not_by_names() -> None:
    renamed = EvaluatedModel(name="the best", key="digest 1", adapter=facts("digest 1", Path("/elsewhere")))
    assert Cell(model=adapter(1), opponent=RANDOM, env=NIM).key == Cell(model=renamed, opponent=RANDOM, env=NIM).key
    changes = ({"prompt_template": "tiny"}, {"observation": "first-last"})
    envs = [NIM, *(NIM.model_copy(update=change) for change in changes), DICE]
    keys = {Cell(model=adapter(1), opponent=RANDOM, env=env).key for env in envs}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("cell", "key"),
    [
        (
            Cell(
                model=adapter(1),
                opponent=RANDOM,
                env=DICE.model_copy(update={"prompt_template": "tiny", "max_turns": 9, "observation": "first-last"}),
            ),
            ("digest 1", "scripted:random", DICE.env_id, 3, "tiny", "max_turns=9, observation=first-last"),
        ),
        (
            Cell(model=BASE_MODEL, opponent=NO_OPPONENT, env=FROZEN),
            ("base", "none", FROZEN.env_id, 1, "default", ""),
        ),
    ],
)
def test_cell_key_contains_how_the_cell_is_played(cell: Cell, key: tuple[Any, ...]) -> None:
    assert astuple(read_key(cell.key)) == key
