"""Legal actions, read from an observation, and a player that picks one at random.

Owns one reader of observation text per env family, and one for OpenSpiel. Knows nothing of models or engines:
a reader takes the observation of a seat, `-train` variant or whole transcript, and reads its last
state.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.errors import EnvError, UnsupportedEnvError
from unstable_lite.games.openspiel.prompts import LEGAL_ACTIONS as LISTED
from unstable_lite.types import Reply

T = TypeVar("T")
_BRACKETED = re.compile(r"\[[^\[\]]+\]")
_CONNECT_FOUR_SIZE = re.compile(r"has (\d+) rows and (\d+) columns")
_CONNECT_FOUR_DROP = re.compile(r"dropped their disk \([XO]\) into column (\d+)\.")
_NIM_PILE = re.compile(r"pile (\d+): (\d+)")
_LIARS_DICE_COUNT = re.compile(r"Player \d+: (\d+)")
_LIARS_DICE_BID = re.compile(r"Player \d+ bids (\d+) of face (\d+)\.")


def _after_last(marker: str, observation: str) -> str:
    """Return the text after the last `marker`: a transcript has one per turn, the last is the current state."""
    _, found, rest = observation.rpartition(marker)
    if not found:
        raise EnvError(f"no {marker!r} in the observation {observation[-200:]!r}")
    return rest


def _listed_after(marker: str) -> Callable[[str], list[str]]:
    """Return a reader for games that list their legal actions on the line that starts with `marker`."""

    def read(observation: str) -> list[str]:
        line, _, _ = _after_last(marker, observation).partition("\n")
        return _BRACKETED.findall(line)

    return read


def _connect_four(observation: str) -> list[str]:
    """Return the columns whose top cell is empty; in the blind variant, those with fewer drops than rows."""
    if "Board state:\n" in observation:
        header, _, top_row, *_ = _after_last("Board state:\n", observation).splitlines()
        cells = zip(header.split(), top_row.split(), strict=True)
        return [f"[col {column}]" for column, cell in cells if cell == "."]
    rows, columns = connect_four_size(observation)
    drops = connect_four_drops(observation)
    return [f"[col {column}]" for column in range(columns) if drops.count(column) < rows]


def connect_four_size(observation: str) -> tuple[int, int]:
    """Return the numbers of rows and columns, read from the rules. Raises EnvError."""
    size = _CONNECT_FOUR_SIZE.search(observation)
    if size is None:
        raise EnvError(f"no board and no board size in the observation {observation[-200:]!r}")
    return int(size[1]), int(size[2])


def connect_four_drops(observation: str) -> list[int]:
    """Return the columns of all discs in the order in which they were dropped."""
    return [int(column) for column in _CONNECT_FOUR_DROP.findall(observation)]


def nim_piles(observation: str) -> dict[int, int]:
    """Return the size of each pile. Raises EnvError."""
    return {int(pile): int(size) for pile, size in _NIM_PILE.findall(_after_last("Current Pile:\n", observation))}


def _nim(observation: str) -> list[str]:
    piles = nim_piles(observation)
    return [f"[{pile} {quantity}]" for pile, size in piles.items() for quantity in range(1, size + 1)]


def _liars_dice(observation: str) -> list[str]:
    """Return call, if there is a bid, and every higher bid of at most as many dice as are left.

    The env accepts any quantity; a bid above the number of dice is legal and always false.
    """
    this_round = _after_last("New round - Remaining dice:", observation)
    counts, _, events = this_round.partition("\n")
    total = sum(map(int, _LIARS_DICE_COUNT.findall(counts)))
    bids = _LIARS_DICE_BID.findall(events)
    quantity, face = map(int, bids[-1]) if bids else (0, 0)
    higher = [
        f"[Bid: {q}, {f}]"
        for q in range(max(quantity, 1), total + 1)
        for f in range(max(face, 1), 7)
        if (q, f) != (quantity, face)
    ]
    return ["[Call]", *higher] if bids else higher


_openspiel = _listed_after(LISTED)

LEGAL_ACTIONS: dict[str, Callable[[str], list[str]]] = {
    "TicTacToe": _listed_after("Available Moves:"),
    "ConnectFour": _connect_four,
    "SimpleTak": _listed_after("Available Moves:"),
    "Nim": _nim,
    "KuhnPoker": _listed_after("Your available actions are:"),
    "LiarsDice": _liars_dice,
    "IteratedRockPaperScissors": lambda _observation: ["[rock]", "[paper]", "[scissors]"],
    "PigDice": _listed_after("Available actions:"),
}
"""Reader by env family (`KuhnPoker` for `KuhnPoker-v0-short-train`)."""


def legal_actions(env_id: str, observation: str) -> list[str]:
    """Return every legal action of the player who sees `observation`, in the env's notation.

    Raises UnsupportedEnvError for an env family without a reader, and EnvError if the text is not
    from that env.
    """
    if is_openspiel(env_id):
        return _openspiel(observation)
    return reader_of(LEGAL_ACTIONS, env_id, "scripted player", ", and for every game of OpenSpiel")(observation)


def lists_actions(env_id: str) -> bool:
    """Return whether the legal actions can be read from an observation of the env."""
    return is_openspiel(env_id) or env_id.partition("-v0")[0] in LEGAL_ACTIONS


def reader_of(readers: Mapping[str, T], env_id: str, kind: str, others: str = "") -> T:
    """Return a table's entry for the env's family. Raises UnsupportedEnvError if the table has none."""
    if (family := env_id.partition("-v0")[0]) in readers:
        return readers[family]
    known = ", ".join(readers)
    raise UnsupportedEnvError(f"no {kind} for {env_id!r}: there is one for any variant of {known}{others}")


def random_legal_action(env_id: str, observation: str, rng: random.Random) -> str:
    """Return a legal action, all equally likely. Raises EnvError if there is none."""
    return _any_of(legal_actions(env_id, observation), rng, env_id, observation)


def _any_of(actions: Sequence[str], rng: random.Random, env_id: str, observation: str) -> str:
    if not actions:
        raise EnvError(f"{env_id}: no legal action in the observation {observation[-200:]!r}")
    return rng.choice(actions)


class ScriptedPlayer:
    """A player that chooses among `candidates`, all equally likely. The same seed makes the same choices."""

    def __init__(self, env_id: str, seed: int) -> None:
        self.env_id = env_id
        self._random = random.Random(seed)

    def reseed(self, seed: int) -> None:
        """Draw further choices from another stream."""
        self._random.seed(seed)

    def candidates(self, observation: str) -> list[str]:
        """Return the actions to choose from. Raises UnsupportedEnvError, EnvError."""
        raise NotImplementedError

    def action(self, observation: str) -> str:
        """Choose an action. Raises UnsupportedEnvError, EnvError."""
        return _any_of(self.candidates(observation), self._random, self.env_id, observation)

    async def act(self, observation: str) -> Reply:
        action = self.action(observation)
        return Reply(action=action, text=action, prompt=observation)


class RandomLegalPlayer(ScriptedPlayer):
    """`scripted:random`: any legal action, all equally likely."""

    def candidates(self, observation: str) -> list[str]:
        return legal_actions(self.env_id, observation)
