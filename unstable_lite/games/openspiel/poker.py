"""Wordings of Kuhn and Leduc poker, made from the information state string alone."""

from __future__ import annotations

import re
from typing import Any

from unstable_lite.games.openspiel.wording import Wording, by_player

_RANKS = ("3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
"""Ranks from the lowest. A deck has the highest ones, one more than there are players."""
_SUITS = ("spades", "hearts")
_KUHN = re.compile(r"(\d+)([pb]*)")


def kuhn(game: Any) -> Wording:
    players = game.num_players()
    ranks = _RANKS[-players - 1 :]

    def bets(history: str) -> list[str]:
        return [_kuhn_name(history[:turn], "pb".index(move)) for turn, move in enumerate(history)]

    def situation(_seat: int, shown: str) -> str:
        card, history = _kuhn_state(shown)
        acted = [f"Player {turn % players} {bet}" for turn, bet in enumerate(bets(history))]
        return f"Your card: {ranks[card]}\nBets: {', '.join(acted) or 'none'}"

    rules = (
        f"Everyone pays 1 chip and gets one card of {', '.join(ranks)}. A bet or a call costs 1 more chip. "
        "The highest card of those who did not fold wins all chips."
    )
    return Wording("Kuhn poker", rules, situation, lambda shown, action, _: _kuhn_name(_kuhn_state(shown)[1], action))


def _kuhn_state(shown: str) -> tuple[int, str]:
    found = _KUHN.fullmatch(shown)
    assert found is not None, shown
    return int(found[1]), found[2]


def _kuhn_name(history: str, action: int) -> str:
    return ("fold", "call")[action] if "b" in history else ("check", "bet")[action]


def leduc(game: Any) -> Wording | None:
    """Return the wording; None with `action_mapping`, where an illegal action counts as another one."""
    parameters, players = game.get_parameters(), game.num_players()
    if parameters["action_mapping"]:
        return None
    ranks = _RANKS[-players - 1 :]

    def card(number: int) -> str:
        if parameters["suit_isomorphism"]:
            return ranks[number]
        return f"{ranks[number // 2]} of {_SUITS[number % 2]}"

    def situation(_seat: int, shown: str) -> str:
        public = _field("Public", shown)
        lines = [f"Your card: {card(int(_field('Private', shown) or 0))}"]
        lines += [f"Public card: {card(int(public))}"] if public else []
        lines += [f"Round 1: {_leduc_bets('Round1', shown)}"]
        lines += [f"Round 2: {_leduc_bets('Round2', shown)}"] if public else []
        paid = [str(100 - int(left)) for left in (_field("Money", shown) or "").split()]
        return "\n".join([*lines, f"Chips paid: {by_player(paid)}"])

    first = f"Player {parameters['starting_player']} acts first in each round. "
    rules = (
        f"The deck is {', '.join(ranks)}, each twice. Everyone pays 1 chip and gets one card; after the first round of "
        f"bets a public card is shown. {first}A raise is 2 chips in round 1 and 4 in round 2, at most twice a round. "
        "A pair with the public card wins, else the highest card; equal hands share."
    )
    return Wording("Leduc poker", rules, situation, _leduc_action)


def _leduc_action(shown: str, action: int, _openspiel_name: str) -> str:
    sequence = _field("Round2" if _field("Public", shown) else "Round1", shown)
    return _leduc_name(action, "2" in (sequence or ""))


def _leduc_name(action: int, is_raised: bool) -> str:
    return ("fold", "call" if is_raised else "check", "raise")[action]


def _leduc_bets(name: str, shown: str) -> str:
    sequence = (_field(name, shown) or "").split()
    names = [_leduc_name(int(action), "2" in sequence[:turn]) for turn, action in enumerate(sequence)]
    return ", ".join(names) or "none"


def _field(name: str, shown: str) -> str | None:
    found = re.search(rf"\[{name}: ([\d ]*)\]", shown)
    return found[1] if found is not None else None
