"""Prompt of a seat, names of its actions, and the action that an answer names: pure functions of a state.

A prompt is a function of the seat and its information state string if the game hides information, else of the seat
and the current board. Two different ones of a seat never share a prompt. The form that
`pyspiel.convert_to_turn_based` gives a game of simultaneous moves has the same prompts: they are made from the
simultaneous state inside it, never from its own strings, which hold the choices of seats that come before.

`WORDINGS` has the games with words of their own; any other game gets OpenSpiel's own text of the state. A wording gets
only strings of OpenSpiel that hold nothing a seat may not see, so no prompt can leak more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TURN_BASED = "turn_based_simultaneous_game"
"""OpenSpiel's name of a game that `convert_to_turn_based` made."""
LEGAL_ACTIONS = "Legal actions:"
"""Beginning of the last line of each prompt; the names of the actions follow in brackets."""
Situation = Callable[[int, str], str]
"""Function from (seat, OpenSpiel's string for it) to text. Two different strings of a seat give two different texts."""
ActionName = Callable[[str, int, str], str]
"""Function from (OpenSpiel's string for the seat, action, OpenSpiel's name of it) to its name in prompts."""

_BRACKETED = re.compile(r"\[([^\[\]]*)\]")
_ROUND = str.maketrans("[]{}", "()()")
_RANKS = ("3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
"""Ranks from the lowest. A deck has the highest ones, one more than there are players."""


@dataclass(frozen=True, slots=True)
class Wording:
    title: str
    rules: str = ""
    """Rules with the game's own parameters."""
    situation: Situation = lambda _seat, shown: shown.rstrip("\n")
    action_name: ActionName = lambda _shown, _action, name: name


_loaded: dict[str, Wording] = {}


def prompt(state: Any, pid: int) -> str:
    """Return the text for seat `pid` at a state in which it acts. `state`: `pyspiel.State`, in either form."""
    wording, node, shown = _seen(state, pid)
    rules = f" {wording.rules}" if wording.rules else ""
    actions = " ".join(f"[{name}]" for name in _names(pid, wording, node, shown))
    return (
        f"You are Player {pid} in {wording.title}.{rules}\n{wording.situation(pid, shown)}\n{LEGAL_ACTIONS} {actions}"
    )


def action_names(state: Any, pid: int) -> dict[str, int]:
    """Return the legal actions of seat `pid` by the names that its prompt lists; all names differ."""
    return _names(pid, *_seen(state, pid))


def _names(pid: int, wording: Wording, node: Any, shown: str) -> dict[str, int]:
    names: dict[str, int] = {}
    for action in node.legal_actions(pid):
        # On one line, without the brackets and braces that mark an answer.
        words = " ".join(wording.action_name(shown, action, node.action_to_string(pid, action)).split())
        name = (words[1:-1] if _BRACKETED.fullmatch(words) else words).translate(_ROUND)
        names[name if name and name not in names else f"{name} ({action})".strip()] = action
    return names


def read_action(answer: str, names: Iterable[str]) -> str | None:
    """Return the name that an answer means, or None.

    A single pair of brackets counts, with any text around it; without brackets the whole answer. Case and spaces do not
    count unless they are the only difference between two names.
    """
    known, groups = list(names), _BRACKETED.findall(answer)
    said = groups[0] if len(groups) == 1 else answer
    simplifications: tuple[Callable[[str], str], ...] = (
        str.strip,
        lambda text: " ".join(text.casefold().split()),
        lambda text: "".join(text.casefold().split()),
    )
    for simplified in simplifications:
        same = [name for name in known if simplified(name) == simplified(said)]
        if len(same) == 1:
            return same[0]
    return None


def _seen(state: Any, pid: int) -> tuple[Wording, Any, str]:
    """Return the game's words, the state or the simultaneous one inside it, and OpenSpiel's string for the seat."""
    node = state.simultaneous_game_state() if state.get_game().get_type().short_name == TURN_BASED else state
    game = node.get_game()
    kind, key = game.get_type(), str(game)
    if key not in _loaded:
        own = WORDINGS.get(kind.short_name)
        parameters = key.partition("(")[2].removesuffix(")")
        title = kind.long_name + (f" ({parameters})" if parameters else "")
        _loaded[key] = (own and own(game, game.get_parameters())) or Wording(title)
    is_open = kind.information.name == "PERFECT_INFORMATION"
    return _loaded[key], node, str(node if is_open else node.information_state_string(pid))


def _tic_tac_toe(_game: Any, _parameters: Mapping[str, Any]) -> Wording:
    def situation(seat: int, shown: str) -> str:
        cells = [str(cell) if mark == "." else mark for cell, mark in enumerate(shown.replace("\n", ""))]
        return _board(seat, [" ".join(cells[start : start + 3]) for start in (0, 3, 6)])

    rules = "Players mark empty cells in turn. Three marks in a row, column or diagonal win; a full board is a draw."
    return Wording("TicTacToe", rules, situation, lambda _shown, action, _: str(action))


def _connect_four(_game: Any, parameters: Mapping[str, Any]) -> Wording:
    columns = parameters["columns"]

    def situation(seat: int, shown: str) -> str:
        return _board(seat, [" ".join(map(str, range(columns))), *(" ".join(line) for line in shown.split())])

    rules = (
        f"The board has {parameters['rows']} rows and {columns} columns. Players drop a disc into a column in turn. "
        f"{parameters['x_in_row']} discs in a row, column or diagonal win; a full board is a draw."
    )
    return Wording("ConnectFour", rules, situation, lambda _shown, action, _: f"col {action}")


def _board(seat: int, lines: Iterable[str]) -> str:
    return f"Your mark: {'xo'[seat]}\nBoard:\n" + "\n".join(lines)


def _nim(_game: Any, parameters: Mapping[str, Any]) -> Wording:
    def situation(_seat: int, shown: str) -> str:
        sizes = shown.partition(":")[2].split()
        return "Piles: " + ", ".join(f"pile {pile} has {size}" for pile, size in enumerate(sizes))

    def action_name(_shown: str, _action: int, openspiel_name: str) -> str:
        pile, taken = re.findall(r"\d+", openspiel_name)  # such as `pile:1, take:2;`
        return f"{int(pile) - 1} {taken}"

    who = "loses" if parameters["is_misere"] else "wins"
    rules = (
        f"Players take objects from one pile in turn. Whoever takes the last object {who}. [0 2] takes 2 from pile 0."
    )
    return Wording("Nim", rules, situation, action_name)


def _liars_dice(_game: Any, parameters: Mapping[str, Any]) -> Wording | None:
    sides, dice = parameters["dice_sides"], parameters["numdice"]
    if sides > 9:
        return None  # OpenSpiel's string does not separate these dice

    def situation(_seat: int, shown: str) -> str:
        own, *bids = shown.split(" ")
        made = [f"Player {turn % 2} bid {' of face '.join(bid.split('-'))}" for turn, bid in enumerate(bids)]
        return f"Your dice: {' '.join(own)}\nBids: {_listed(made)}"

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


def _pig(_game: Any, parameters: Mapping[str, Any]) -> Wording | None:
    if parameters["piglet"]:
        return None  # each roll adds 1 in it

    def situation(_seat: int, shown: str) -> str:
        scores, total = re.findall(r"Scores: ([\d ]+), Turn total: (\d+)", shown)[0]
        return f"Scores: {_by_player(scores.split())}\nYour turn total: {total}"

    rules = (
        f"The first with {parameters['winscore']} points wins. [roll] adds a die of {parameters['diceoutcomes']} sides "
        "to your turn total, but a 1 ends your turn without points. [hold] adds the turn total to your score and ends "
        "your turn."
    )
    return Wording("Pig", rules, situation, lambda _shown, action, _: ("roll", "hold")[action])


def _kuhn(game: Any, _parameters: Mapping[str, Any]) -> Wording:
    players = game.num_players()
    ranks = _RANKS[-players - 1 :]

    def name(shown: str, action: int) -> str:
        return ("fold", "call")[action] if "b" in shown else ("check", "bet")[action]

    def situation(_seat: int, shown: str) -> str:
        history = shown.lstrip("0123456789")  # the letters of the bets, after the number of the card
        bets = [name(history[:turn], "pb".index(move)) for turn, move in enumerate(history)]
        acted = [f"Player {turn % players} {bet}" for turn, bet in enumerate(bets)]
        return f"Your card: {ranks[int(shown.removesuffix(history))]}\nBets: {_listed(acted)}"

    rules = (
        f"Everyone pays 1 chip and gets one card of {', '.join(ranks)}. A bet or a call costs 1 more chip. "
        "The highest card of those who did not fold wins all chips."
    )
    return Wording("Kuhn poker", rules, situation, lambda shown, action, _: name(shown, action))


def _leduc(game: Any, parameters: Mapping[str, Any]) -> Wording | None:
    if parameters["action_mapping"]:
        return None  # an illegal action counts as another one
    ranks = _RANKS[-game.num_players() - 1 :]

    def card(number: int) -> str:
        if parameters["suit_isomorphism"]:
            return ranks[number]
        return f"{ranks[number // 2]} of {('spades', 'hearts')[number % 2]}"

    def fields(shown: str) -> dict[str, str]:
        return dict(re.findall(r"\[(\w+): ([\d ]*)\]", shown))

    def name(action: int, earlier: Sequence[str]) -> str:
        return ("fold", "call" if "2" in earlier else "check", "raise")[action]

    def bets(sequence: list[str]) -> str:
        return _listed([name(int(action), sequence[:turn]) for turn, action in enumerate(sequence)])

    def situation(_seat: int, shown: str) -> str:
        found = fields(shown)
        lines, public = [f"Your card: {card(int(found.get('Private') or 0))}"], found.get("Public")
        lines += [f"Public card: {card(int(public))}"] if public else []
        lines += [f"Round 1: {bets(found['Round1'].split())}"]
        lines += [f"Round 2: {bets(found['Round2'].split())}"] if public else []
        paid = [str(100 - int(left)) for left in found["Money"].split()]
        return "\n".join([*lines, f"Chips paid: {_by_player(paid)}"])

    def action_name(shown: str, action: int, _openspiel_name: str) -> str:
        found = fields(shown)
        return name(action, found["Round2" if found.get("Public") else "Round1"].split())

    first = f"Player {parameters['starting_player']} acts first in each round. "
    rules = (
        f"The deck is {', '.join(ranks)}, each twice. Everyone pays 1 chip and gets one card; after the first round of "
        f"bets a public card is shown. {first}A raise is 2 chips in round 1 and 4 in round 2, at most twice a round. "
        "A pair with the public card wins, else the highest card; equal hands share."
    )
    return Wording("Leduc poker", rules, situation, action_name)


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


def _matrix(game: Any, _parameters: Mapping[str, Any]) -> Wording:
    start = game.new_initial_state()
    actions = [start.legal_actions(pid) for pid in (0, 1)]

    def name(pid: int, action: int) -> str:
        return str(start.action_to_string(pid, action)).lower()

    def payoff(pid: int, own: int, other: int) -> float:
        state = start.clone()
        state.apply_actions([own, other] if pid == 0 else [other, own])
        return float(state.returns()[pid])

    def table(pid: int) -> str:
        rows = ["Your points:"]
        for own in actions[pid]:
            points = [f"{payoff(pid, own, other):g} against {name(1 - pid, other)}" for other in actions[1 - pid]]
            rows.append(f"{name(pid, own)}: {', '.join(points)}")
        return "\n".join(rows)

    tables = (table(0), table(1))  # OpenSpiel's string says only who observes: there is one decision
    return Wording(
        MATRIX_GAMES[game.get_type().short_name],
        "Both players choose once, at the same time.",
        lambda seat, _shown: tables[seat],
        lambda _shown, _action, own: own.lower(),
    )


def _goofspiel(game: Any, parameters: Mapping[str, Any]) -> Wording:
    """Return the wording for hidden bids, where winners are announced, and for open bids, where all hands are shown."""
    is_hidden = game.get_type().information.name == "IMPERFECT_INFORMATION"
    order = {"random": "in random order", "descending": "from the highest", "ascending": "from the lowest"}
    goal = {
        "win_loss": "Most points win.",
        "point_difference": "Your result is your points minus the mean of all.",
        "total_points": "Your result is your points.",
    }

    def situation(seat: int, shown: str) -> str:
        lines = {name: text.split() for name, _, text in (line.partition(":") for line in shown.splitlines())}
        *earlier, prize = lines["Point card sequence"]
        texts = [f"Prize: {prize}", f"Earlier prizes: {_listed(earlier)}"]
        if is_hidden:
            bids = [str(int(bid) + 1) for bid in lines[f"P{seat} action sequence"]]
            # OpenSpiel writes a negative number for a tie.
            winners = [f"Player {winner}" if int(winner) >= 0 else "no player" for winner in lines["Win sequence"]]
            texts += [f"Your earlier bids: {_listed(bids)}", f"Won by: {_listed(winners)}"]
        else:
            others = [pid for pid in range(game.num_players()) if pid != seat]
            texts += [f"Cards of Player {pid}: {', '.join(lines[f'P{pid} hand'])}" for pid in others]
        texts += [f"Points: {_by_player(lines['Points'])}"]
        return "\n".join([*texts, f"Your cards: {', '.join(lines[f'P{seat} hand'])}"])

    cards = parameters["num_cards"]
    rounds = f" in {parameters['num_turns']} rounds" if parameters["num_turns"] > 0 else ""
    rules = (
        f"Everyone has the cards 1 to {cards}. Prizes of 1 to {cards} points come {order[parameters['points_order']]}"
        f"{rounds}; for each, all players bid one card at the same time and lose it. The highest bid wins the prize, "
        f"in a tie no player. {goal[parameters['returns_type']]}"
    )
    return Wording("Goofspiel", rules, situation, lambda _shown, _action, own: re.sub(r".*Bid: ", "", own))


def _listed(items: list[str]) -> str:
    return ", ".join(items) or "none"


def _by_player(values: Iterable[str]) -> str:
    """Return one value for each player, such as `Player 0: 3, Player 1: 1`."""
    return ", ".join(f"Player {pid}: {value}" for pid, value in enumerate(values))


WORDINGS: dict[str, Callable[[Any, Mapping[str, Any]], Wording | None]] = {
    "kuhn_poker": _kuhn,
    "leduc_poker": _leduc,
    "liars_dice": _liars_dice,
    "pig": _pig,
    "goofspiel": _goofspiel,
    "tic_tac_toe": _tic_tac_toe,
    "connect_four": _connect_four,
    "nim": _nim,
    **dict.fromkeys(MATRIX_GAMES, _matrix),
}
"""Function from (game, its parameters) to the words of it, by game; None for parameters that it has no words for."""
