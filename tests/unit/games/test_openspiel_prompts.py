"""Prompts of OpenSpiel games show what the seat to move saw and did, and no hidden information."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pyspiel
import pytest

from fakes.openspiel_games import LISTED, random_observations
from unstable_lite.config import Config
from unstable_lite.config.env_ids import PREFIX
from unstable_lite.errors import ConfigError
from unstable_lite.games.env_catalogue import describe_envs
from unstable_lite.games.openspiel.game import (
    INFORMATION_FAULTS,
    OpenSpielGame,
    information_fault,
    load_game,
    why_unplayable,
)
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.games.openspiel.prompts import LEGAL_ACTIONS, action_names, prompt, read_action
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.planning.envs import describe_envs as plan_rows

GOOFSPIEL = "openspiel:goofspiel(imp_info=True,num_cards=4,points_order=descending)"
ENUMERATED = [
    "openspiel:" + name
    for name in (
        "kuhn_poker", "kuhn_poker(players=3)", "leduc_poker", "leduc_poker(starting_player=1,suit_isomorphism=True)",
        "leduc_poker(action_mapping=True,suit_isomorphism=True)", "matrix_rps", "matrix_brps", "matrix_mp",
        "matrix_shapleys_game", "matching_pennies_3p", "nim", "nim(is_misere=False,pile_sizes=3;4;5)", "tic_tac_toe",
        "connect_four(columns=3,rows=3,x_in_row=3)", "liars_dice(dice_sides=3)",
        "liars_dice(bidding_rule=reset-quantity,dice_sides=3)", "liars_dice(dice_sides=2,numdice=2)",
        "pig(winscore=20)", "pig(diceoutcomes=2,piglet=True,winscore=5)", GOOFSPIEL.removeprefix("openspiel:"),
        "goofspiel(imp_info=True,num_cards=3)", "goofspiel(num_cards=3,num_turns=2,returns_type=point_difference)",
        "goofspiel(imp_info=True,num_cards=3,players=3,points_order=ascending)",
    )
]  # fmt: skip
SAMPLED = [
    "openspiel:connect_four", "openspiel:liars_dice", "openspiel:liars_dice(dice_sides=12)",
    "openspiel:leduc_poker(players=4)", "openspiel:kuhn_poker(players=10)", "openspiel:goofspiel",
    "openspiel:goofspiel(imp_info=True,players=4)", "openspiel:pig(players=4)",
]  # fmt: skip


def told(state: Any, pid: int) -> str:
    """Return OpenSpiel's own identity of what the seat knows."""
    has_board = state.get_game().get_type().information == pyspiel.GameType.Information.PERFECT_INFORMATION
    return str(state) if has_board else state.information_state_string(pid)


def acting(state: Any) -> list[int]:
    return list(range(state.num_players())) if state.is_simultaneous_node() else [state.current_player()]


def successors(state: Any) -> Iterator[Any]:
    if not state.is_simultaneous_node():
        yield from (state.child(action) for action in state.legal_actions())
        return
    joint: list[list[int]] = [[]]
    for pid in acting(state):
        joint = [[*chosen, action] for chosen in joint for action in state.legal_actions(pid)]
    for actions in joint:
        after = state.clone()
        after.apply_actions(actions)
        yield after


def all_decisions(game: Any) -> Iterator[Any]:
    """Yield a state for each text that differs, with the history where the game hides information."""
    waiting, known = [game.new_initial_state()], set[str]()
    has_board = game.get_type().information == pyspiel.GameType.Information.PERFECT_INFORMATION
    while waiting:
        state = waiting.pop()
        identity = f"{state.is_chance_node()} {state}" if has_board else str(state.history())
        if state.is_terminal() or identity in known:
            continue
        known.add(identity)
        if not state.is_chance_node():
            yield state
        waiting.extend(successors(state))


def sampled_decisions(game: Any, games: int = 150) -> Iterator[Any]:
    rng = random.Random(0)
    for _ in range(games):
        state = game.new_initial_state()
        while not state.is_terminal():
            if not state.is_chance_node():
                yield state.clone()
            if state.is_simultaneous_node():
                state.apply_actions([rng.choice(state.legal_actions(pid)) for pid in acting(state)])
            else:
                state.apply_action(rng.choice(state.legal_actions()))


@pytest.mark.parametrize("env_id", [*ENUMERATED, *SAMPLED])
def test_prompts_are_equal_exactly_for_states_that_the_seat_cannot_distinguish(env_id):
    prompts_of, told_by = defaultdict[tuple[int, str], set[str]](set), defaultdict[str, set[tuple[int, str]]](set)
    decisions = (all_decisions if env_id in ENUMERATED else sampled_decisions)(load_game(env_id))
    for state in decisions:
        for pid in acting(state):
            identity, text = (pid, told(state, pid)), prompt(state, pid)
            prompts_of[identity].add(text)
            told_by[text].add(identity)
    assert all(len(texts) == 1 for texts in prompts_of.values())
    assert all(len(identities) == 1 for identities in told_by.values())
    assert len(prompts_of) == len(told_by) > 1


PLAYABLE = [kind.short_name for kind in pyspiel.registered_games() if why_unplayable(kind) is None]


@pytest.mark.parametrize("name", PLAYABLE)
def test_prompt_of_every_playable_game_lists_its_actions_by_different_names(name):
    for number, state in enumerate(sampled_decisions(load_game(f"openspiel:{name}"), games=1)):
        if number == 40:
            return
        for pid in acting(state):
            names = action_names(state, pid)
            assert sorted(names.values()) == sorted(state.legal_actions(pid))
            *_, last = prompt(state, pid).splitlines()
            assert last.startswith(LEGAL_ACTIONS)
            assert legal_actions(f"openspiel:{name}", prompt(state, pid)) == [f"[{name}]" for name in names]
            assert all(read_action(f"[{name}]", names) == name for name in names)


def test_most_games_of_openspiel_are_playable():
    assert len(PLAYABLE) == 91, "docs/games.md and `envs` state the number"


@pytest.mark.parametrize("env_id", LISTED)
def test_random_positions_of_listed_games_have_short_prompts(env_id):
    observations = list(random_observations(env_id, games=5))
    assert observations == list(random_observations(env_id, games=5))
    assert all(len(text) < 600 for text in observations)
    for text in observations:
        assert re.match(r"You are Player [01] in ", text)
        assert legal_actions(env_id, text)


def test_a_prompt_of_kuhn_poker_reads_like_this():
    state = load_game("openspiel:kuhn_poker").new_initial_state()
    for action in (1, 2, 0, 1):
        state.apply_action(action)
    assert prompt(state, 0) == (
        "You are Player 0 in Kuhn poker. Everyone pays 1 chip and gets one card of J, Q, K. A bet or a call costs 1 "
        "more chip. The highest card of those who did not fold wins all chips.\n"
        "Your card: Q\nBets: Player 0 check, Player 1 bet\nLegal actions: [fold] [call]"
    )


def test_payoffs_of_a_matrix_game_are_those_of_the_seat():
    state = load_game("openspiel:matrix_mp").new_initial_state()
    assert "heads: 1 against heads, -1 against tails" in prompt(state, 0)
    assert "heads: -1 against heads, 1 against tails" in prompt(state, 1)


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("openspiel:nim", "takes the last object loses"),
        ("openspiel:nim(is_misere=False)", "takes the last object wins"),
        ("openspiel:liars_dice(dice_sides=3,numdice=2)", "2 hidden dice of 3 sides"),
        ("openspiel:liars_dice(bidding_rule=reset-quantity)", "a higher face, or more dice of the same face"),
        ("openspiel:pig(diceoutcomes=8,winscore=30)", "The first with 30 points wins. [roll] adds a die of 8 sides"),
        ("openspiel:goofspiel(num_cards=5,points_order=descending)", "cards 1 to 5. Prizes of 1 to 5 points come from"),
        ("openspiel:goofspiel(num_turns=3)", "in random order in 3 rounds"),
        ("openspiel:connect_four(rows=5,x_in_row=3)", "5 rows and 7 columns. Players drop a disc into a column"),
        ("openspiel:connect_four(rows=5,x_in_row=3)", "3 discs in a row, column or diagonal win"),
        ("openspiel:leduc_poker(players=3)", "The deck is 10, J, Q, K, each twice"),
        ("openspiel:breakthrough(columns=4,rows=5)", "Breakthrough (columns=4,rows=5)"),
    ],
)
def test_rules_follow_the_parameters(env_id, says):
    assert says in next(iter(prompt(state, acting(state)[0]) for state in sampled_decisions(load_game(env_id))))


FOLDING = ("fold", "raise", "Bid: 1, 2")


@pytest.mark.parametrize(
    ("answer", "names", "name"),
    [
        ("[fold]", FOLDING, "fold"), ("fold", FOLDING, "fold"), ("[ FOLD ]", FOLDING, "fold"),
        ("I think [Fold] is best", FOLDING, "fold"), ("[bid: 1,2]", FOLDING, "Bid: 1, 2"),
        ("[BID:1, 2]", FOLDING, "Bid: 1, 2"), ("I fold", FOLDING, None), ("[call]", FOLDING, None),
        ("[fold] [call]", FOLDING, None), ("", FOLDING, None), ("[]", FOLDING, None),
        # Names that differ only in case or spaces must be exact.
        ("[Bxc3]", ["Bxc3", "bxc3"], "Bxc3"), ("[BXC3]", ["Bxc3", "bxc3"], None),
        ("[1 11]", ["1 11", "11 1"], "1 11"), ("[111]", ["1 11", "11 1"], None),
    ],
)  # fmt: skip
def test_actions_are_read_by_name(answer, names, name):
    assert read_action(answer, names) == name


VARIANTS = [
    "dark_hex(num_rows=2,num_cols=2)",
    "dark_hex(num_rows=2,num_cols=2,obstype=reveal-numturns)",
    "dark_hex(num_rows=2,num_cols=2,gameversion=adh)",
    "goofspiel(imp_info=True,num_cards=4)",
    "kuhn_poker(players=3)",
    "phantom_ttt(obstype=reveal-numturns)",
]
SLOW = ("battleship", "bridge", "colored_trails")
RARE = {"go_fish": 2000, "liars_dice_ir": 2000}
"""Number of playouts after which a fault is found that few games show."""
PUBLIC = {
    "kriegspiel": "the umpire announces failed attempts to both players, and an observation has only the last message",
    "universal_poker": "an observation lacks the public cards",
}
"""Games whose prompts show more than their observations, as their rules say; each was compared by hand."""


def hidden_games() -> list[str]:
    kinds = [load_game(PREFIX + name).get_type() for name in PLAYABLE]
    is_hidden = {
        kind.short_name: kind.information.name != "PERFECT_INFORMATION" or kind.dynamics.name == "SIMULTANEOUS"
        for kind in kinds
    }
    return [*(name for name in PLAYABLE if is_hidden[name]), *VARIANTS]


def faults_of(name: str, playouts: int, most_moves: int = 30) -> set[str]:
    """Return "forgets" if one prompt stands for different own actions, "leaks" if one history has several prompts.

    A game of perfect information, whose moves are simultaneous, may forget how its board came about.
    """
    rng, num_players = random.Random(name), load_game(PREFIX + name).num_players()
    kind = load_game(PREFIX + name).get_type()
    shows_board, has_observations = kind.information.name == "PERFECT_INFORMATION", kind.provides_observation_string
    acted, shown = defaultdict[Any, set[Any]](set), defaultdict[Any, set[str]](set)
    for seed in range(playouts):
        game = OpenSpielGame(PREFIX + name, num_players, seed)
        own, seen = ([[] for _ in range(num_players)] for _ in range(2))
        for _ in range(most_moves):
            state, pid = game.position
            if has_observations:
                for player, history in enumerate(seen):
                    if not history or history[-1] != state.observation_string(player):
                        history.append(state.observation_string(player))
            text, action = prompt(state, pid), rng.choice(list(action_names(state, pid)))
            acted[pid, text].add(tuple(own[pid]))
            shown[pid, tuple(seen[pid])].add(text)
            own[pid].append(action)
            seen[pid].append(action)
            if game.step(f"[{action}]"):
                break
    forgets = not shows_board and any(len(histories) > 1 for histories in acted.values())
    leaks = has_observations and any(len(texts) > 1 for texts in shown.values())
    return {fault for fault, is_found in (("forgets", forgets), ("leaks", leaks)) if is_found}


@pytest.mark.parametrize("playouts", [20, pytest.param(120, marks=pytest.mark.nightly)])
def test_prompts_hold_what_their_seat_saw_and_did(playouts):
    known = {name for name in hidden_games() if information_fault(PREFIX + name) is not None}
    most = {name: playouts // 10 + 1 if name in SLOW else playouts for name in hidden_games()}
    found = {name: faults_of(name, max(60, number) if name in known else number) for name, number in most.items()}
    faulty = {name for name, faults in found.items() if faults - ({"leaks"} if name in PUBLIC else set())}
    assert known - set(RARE) <= faulty <= known


@pytest.mark.nightly
@pytest.mark.parametrize("name", RARE)
def test_rare_fault_of_a_prompt_is_still_there(name):
    assert faults_of(name, RARE[name]) == {"forgets"}


def test_game_with_a_faulty_prompt_is_remarked_and_has_no_exact_value():
    env_id = "openspiel:dark_hex(num_rows=2,num_cols=2)"
    remarks = {name: remark for name, _, remark in describe_envs()}
    assert all(text in remarks[PREFIX + name] for name, text in INFORMATION_FAULTS.items())
    env = {"env_id": env_id, "num_players": 2, "num_actors": 2}
    name, text = next(iter(plan_rows(Config.model_validate({"train_envs": [env]}))))
    assert name == "warning" and "dark_hex" in text and "failed attempts" in text
    with pytest.raises(ConfigError, match="failed attempts"):
        flatten(env_id, is_forced=True)
    flatten("openspiel:dark_hex(num_rows=2,num_cols=2,gameversion=adh)")
