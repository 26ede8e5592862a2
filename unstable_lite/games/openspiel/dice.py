"""Wordings of liar's dice, from the information state string alone, and of Pig, from the current scores alone."""

from __future__ import annotations

import re
from typing import Any

from unstable_lite.games.openspiel.wording import Wording, by_player

_PIG = re.compile(r"Scores: ([\d ]+), Turn total: (\d+)")


def liars_dice(game: Any) -> Wording | None:
    """Return the wording; None for dice of ten sides and more, which OpenSpiel's string does not separate."""
    parameters = game.get_parameters()
    sides, dice = parameters["dice_sides"], parameters["numdice"]
    if sides > 9:
        return None

    def situation(_seat: int, shown: str) -> str:
        own, *bids = shown.split(" ")
        made = [f"Player {turn % 2} bid {' of face '.join(bid.split('-'))}" for turn, bid in enumerate(bids)]
        return f"Your dice: {' '.join(own)}\nBids: {', '.join(made) or 'none'}"

    def action_name(_shown: str, _action: int, openspiel_name: str) -> str:
        return "Call" if openspiel_name == "Liar" else f"Bid: {', '.join(openspiel_name.split('-'))}"

    higher = (
        "more dice, or as many of a higher face"
        if parameters["bidding_rule"] == "reset-face"
        else "a higher face, or more dice of the same face"
    )
    each = "a hidden die" if dice == 1 else f"{dice} hidden dice"
    rules = (
        f"Each player has {each} of {sides} sides. [Bid: 2, 1] says that at least "
        f"2 of all dice show 1; a {sides} counts as any face. Each bid must be higher: {higher}. "
        "[Call] ends the game: the last bidder wins if the bid is true, else the caller."
    )
    return Wording("liar's dice", rules, situation, action_name)


def pig(game: Any) -> Wording | None:
    """Return the wording; None for Piglet, in which each roll adds 1."""
    parameters = game.get_parameters()
    if parameters["piglet"]:
        return None

    def situation(_seat: int, shown: str) -> str:
        found = _PIG.match(shown)
        assert found is not None, shown
        return f"Scores: {by_player(found[1].split())}\nYour turn total: {found[2]}"

    rules = (
        f"The first with {parameters['winscore']} points wins. [roll] adds a die of {parameters['diceoutcomes']} sides "
        "to your turn total, but a 1 ends your turn without points. [hold] adds the turn total to your score and ends "
        "your turn."
    )
    return Wording("Pig", rules, situation, lambda _shown, action, _: ("roll", "hold")[action])
