"""Wordings of games with simultaneous moves: two-player matrix games and Goofspiel."""

from __future__ import annotations

import re
from typing import Any

from unstable_lite.games.openspiel.wording import Wording, by_player

MATRIX_GAMES = {
    "matrix_rps": "rock paper scissors",
    "matrix_brps": "biased rock paper scissors",
    "matrix_mp": "matching pennies",
    "matrix_rpsw": "rock paper scissors water",
    "matrix_bos": "Bach or Stravinsky",
    "matrix_cd": "Chicken-Dare",
    "matrix_coordination": "the coordination game",
    "matrix_pd": "the prisoner's dilemma",
    "matrix_sh": "the stag hunt",
    "matrix_shapleys_game": "Shapley's game",
}
"""Titles of OpenSpiel's two-player matrix games."""


def matrix(game: Any) -> Wording:
    """Return a wording with every payoff."""
    start = game.new_initial_state()
    actions = [start.legal_actions(pid) for pid in (0, 1)]

    def name(pid: int, action: int) -> str:
        return str(start.action_to_string(pid, action)).lower()

    def payoff(pid: int, own: int, other: int) -> float:
        state = start.clone()
        state.apply_actions([own, other] if pid == 0 else [other, own])
        return float(state.returns()[pid])

    def table(pid: int) -> str:
        rows = [
            f"{name(pid, own)}: "
            + ", ".join(f"{payoff(pid, own, other):g} against {name(1 - pid, other)}" for other in actions[1 - pid])
            for own in actions[pid]
        ]
        return "\n".join(["Your points:", *rows])

    tables = (table(0), table(1))
    rules = "Both players choose once, at the same time."
    # The string says only who observes: there is one decision.
    return Wording(
        MATRIX_GAMES[game.get_type().short_name],
        rules,
        lambda seat, _shown: tables[seat],
        lambda _shown, _action, own: own.lower(),
    )


def goofspiel(game: Any) -> Wording:
    """Return the wording for hidden bids, where winners are announced, and for open bids, where all hands are shown."""
    parameters, is_hidden = game.get_parameters(), game.get_type().information.name == "IMPERFECT_INFORMATION"
    order = {"random": "in random order", "descending": "from the highest", "ascending": "from the lowest"}
    goal = {
        "win_loss": "Most points win.",
        "point_difference": "Your result is your points minus the mean of all.",
        "total_points": "Your result is your points.",
    }

    def situation(seat: int, shown: str) -> str:
        lines = dict(line.partition(":")[::2] for line in shown.splitlines())
        prizes = lines["Point card sequence"].split()
        texts = [f"Prize: {prizes[-1]}", f"Earlier prizes: {', '.join(prizes[:-1]) or 'none'}"]
        if is_hidden:
            bids = [str(int(bid) + 1) for bid in lines[f"P{seat} action sequence"].split()]
            winners = [_winner(int(winner)) for winner in lines["Win sequence"].split()]
            texts += [f"Your earlier bids: {', '.join(bids) or 'none'}", f"Won by: {', '.join(winners) or 'none'}"]
        else:
            others = [pid for pid in range(game.num_players()) if pid != seat]
            texts += [f"Cards of Player {pid}: {', '.join(lines[f'P{pid} hand'].split())}" for pid in others]
        texts += [f"Points: {by_player(lines['Points'].split())}"]
        return "\n".join([*texts, f"Your cards: {', '.join(lines[f'P{seat} hand'].split())}"])

    cards = parameters["num_cards"]
    rounds = f" in {parameters['num_turns']} rounds" if parameters["num_turns"] > 0 else ""
    rules = (
        f"Everyone has the cards 1 to {cards}. Prizes of 1 to {cards} points come {order[parameters['points_order']]}"
        f"{rounds}; for each, all players bid one card at the same time and lose it. The highest bid wins the prize, "
        f"in a tie no player. {goal[parameters['returns_type']]}"
    )
    return Wording("Goofspiel", rules, situation, lambda _shown, _action, own: re.sub(r".*Bid: ", "", own))


def _winner(number: int) -> str:
    """Return the winner of a prize; OpenSpiel writes a negative number for a tie."""
    return f"Player {number}" if number >= 0 else "no player"
