"""Ids of OpenSpiel's games have one spelling, and a form for files and tags."""

from __future__ import annotations

import pytest

from unstable_lite.config.env_ids import canonical_env_id, slug, with_slugs
from unstable_lite.config.games import EvalEnvSpec

NIM = "openspiel:nim(is_misere=False,pile_sizes=3;4;5)"


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("openspiel:kuhn_poker", "openspiel:kuhn_poker"),
        ("openspiel:kuhn_poker()", "openspiel:kuhn_poker"),
        ("openspiel:nim(pile_sizes=3;4;5,is_misere=False)", NIM),
        ("openspiel: nim( pile_sizes = 3;4;5 , is_misere = false )", NIM),
        ("openspiel:goofspiel(num_turns=-1)", "openspiel:goofspiel(num_turns=-1)"),
        ("Nim-v0-train", "Nim-v0-train"),
        ("my_module:Nim-v0", "my_module:Nim-v0"),
    ],
)
def test_each_game_has_one_spelling(written: str, canonical: str) -> None:
    assert canonical_env_id(written) == canonical
    assert EvalEnvSpec(env_id=written, num_players=2).env_id == canonical


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("openspiel:", "write openspiel:NAME"),
        ("openspiel:Kuhn", "write openspiel:NAME"),
        ("openspiel:kuhn_poker(players=3", "write openspiel:NAME"),
        ("openspiel:kuhn_poker(players=3)!", "write openspiel:NAME"),
        ("openspiel:kuhn_poker(3)", "'3' is not a parameter"),
        ("openspiel:kuhn_poker(players=3,)", "'' is not a parameter"),
        ("openspiel:kuhn_poker(players=2,players=3)", "the parameter 'players' twice"),
        ("openspiel:chess(fen=8/8)", "'fen=8/8' is not a parameter"),
        ("openspiel:misere(game=kuhn_poker())", "'game=kuhn_poker()' is not a parameter"),
    ],
)
def test_id_that_cannot_be_parsed_says_why(written: str, says: str) -> None:
    with pytest.raises(ValueError, match="openspiel") as caught:
        canonical_env_id(written)
    assert says in str(caught.value)


def test_slug_has_only_characters_for_files_and_tags() -> None:
    assert slug(NIM) == "openspiel-nim-is_misere-False-pile_sizes-3-4-5"
    assert slug("openspiel:goofspiel(num_turns=-1)") != slug("openspiel:goofspiel(num_turns=1)")
    assert slug("Nim-v0-train") == "Nim-v0-train"


def test_metric_names_get_slugs_and_keep_the_opponent() -> None:
    assert (
        with_slugs(f"evaluation-{NIM} (scripted:random)/Points") == f"evaluation-{slug(NIM)} (scripted:random)/Points"
    )
    assert with_slugs("evaluation-openspiel:kuhn_poker (scripted:cfr)/n") == (
        "evaluation-openspiel-kuhn_poker (scripted:cfr)/n"
    )
    assert with_slugs("learner/loss") == "learner/loss"
