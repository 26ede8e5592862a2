"""Scripted players for OpenSpiel's games. They see only the text that their seat is shown.

`scripted:mcts:N` follows the game: after its own last move it searches the others' moves for a state with its prompt.
It is for games of perfect information, where a prompt determines the state; in others it would look at hidden cards.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import islice
from typing import Any

from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.errors import ConfigError, EnvError, UnsupportedEnvError
from unstable_lite.games.openspiel.game import OpenSpielGame, load_game, pyspiel
from unstable_lite.games.openspiel.game_tree import solved_moves
from unstable_lite.games.openspiel.prompts import action_names, prompt
from unstable_lite.games.players.scripted import ScriptedPlayer

MCTS = "scripted:mcts:"
"""Prefix of the player's name; the number of playouts per move follows."""
MOST_PLAYOUTS = 10_000
"""Largest number of playouts: in ConnectFour these take about 0.06 s, in which no other game continues."""
MOST_FOLLOWED = 20_000
"""Largest number of states that are searched for the one that a player is shown."""
EXPLORATION = 2.0
"""Constant of UCT, as in OpenSpiel's examples for utilities between -1 and 1."""
MOST_DECISIONS = 50_000
"""Largest number of decision histories of a game that `scripted:cfr` solves."""
VISITS = 500_000
"""Number of visits of decision histories over all of its iterations: about 2 s for Leduc poker."""
FEWEST_ITERATIONS, MOST_ITERATIONS = 100, 500
TRIAL_MOVES = 20
"""Number of random moves over which it is tried whether a game can be followed."""


def mcts_class(name: str) -> partial[MctsPlayer]:
    """Return the class for `scripted:mcts:N`. Raises ConfigError for another number of playouts."""
    playouts = name.removeprefix(MCTS)
    if not (playouts.isascii() and playouts.isdecimal()) or not 1 <= int(playouts) <= MOST_PLAYOUTS:
        raise ConfigError(f"opponent {name!r}: write {MCTS}N with N playouts per move, from 1 to {MOST_PLAYOUTS}")
    return partial(MctsPlayer, playouts=int(playouts))


class MctsPlayer(ScriptedPlayer):
    """`scripted:mcts:N`: Monte Carlo tree search with N random playouts per move, and proven wins taken."""

    def __init__(self, env_id: str, seed: int, playouts: int) -> None:
        super().__init__(env_id, seed)
        self._playouts = playouts
        self._after: Any = None
        """State after this player's last move."""

    def candidates(self, observation: str) -> list[str]:
        """Return the best move found. Raises UnsupportedEnvError, or EnvError for a text of another game."""
        game, library, draw = _searchable(self.env_id), pyspiel(), self._random.getrandbits
        state = _find(self.env_id, observation, (self._after, game.new_initial_state()))
        evaluator = library.RandomRolloutEvaluator(1, draw(31))
        bot = library.MCTSBot(game, evaluator, EXPLORATION, self._playouts, 100, True, draw(31), False)
        best = bot.step(state)
        self._after = state.child(best)
        return [f"[{name}]" for name, action in action_names(state, state.current_player()).items() if action == best]


def _find(env_id: str, observation: str, starts: Iterable[Any]) -> Any:
    """Return a state with this prompt that can follow one of `starts`. Raises EnvError if none is found."""
    for start in starts:
        found = None if start is None else next(_shown_as(observation, start), None)
        if found is not None:
            return found
    raise EnvError(f"{env_id}: none of the {MOST_FOLLOWED} nearest states is shown as {observation[-200:]!r}")


def _shown_as(observation: str, start: Any) -> Iterator[Any]:
    """Search breadth-first, up to MOST_FOLLOWED states, and yield those whose player to move is shown `observation`."""
    waiting, known = deque([start]), set[str]()
    while waiting and len(known) < MOST_FOLLOWED:
        state = waiting.popleft()
        if state.is_terminal():
            continue
        text = str(state) if state.is_chance_node() else prompt(state, state.current_player())
        if text == observation:
            yield state
        if text not in known:
            known.add(text)
            waiting.extend(state.child(action) for action in state.legal_actions())


@cache
def _searchable(env_id: str) -> Any:
    """Return the game. Raises UnsupportedEnvError if the search cannot play it, or would look at hidden information."""
    game = _game(env_id, "mcts")
    kind = game.get_type()
    for fits, problem in (
        (kind.information.name == "PERFECT_INFORMATION", "hides information, which the search would look at"),
        (kind.dynamics.name == "SEQUENTIAL", "has simultaneous moves"),
        (kind.reward_model.name == "TERMINAL", "pays before its end"),
    ):
        if not fits:
            raise UnsupportedEnvError(
                f"scripted:mcts plays sequential games of perfect information that pay at the end; {env_id} {problem}"
            )
    # Random moves show whether each seat's state is found from the state after its last move.
    played, rng = OpenSpielGame(env_id, game.num_players(), seed=0), random.Random(0)
    after = dict.fromkeys(range(game.num_players()), game.new_initial_state())
    for _ in range(TRIAL_MOVES):
        pid, observation = played.observe()
        try:
            state = _find(env_id, observation, (after[pid],))
        except EnvError:
            raise UnsupportedEnvError(
                f"scripted:mcts cannot follow {env_id}: more than {MOST_FOLLOWED} states may come between its moves"
            ) from None
        name, action = rng.choice(list(action_names(state, pid).items()))
        after[pid] = state.child(action)
        if played.step(f"[{name}]"):
            break
    return game


class CfrPlayer(ScriptedPlayer):
    """`scripted:cfr`: looks its prompt up in a policy near the equilibrium, computed once per process."""

    def candidates(self, observation: str) -> list[str]:
        """Return every action of the policy. Raises UnsupportedEnvError, or EnvError for a text of another game."""
        return [action for action, chance in self._policy(observation) if chance > 0]

    def action(self, observation: str) -> str:
        actions, chances = zip(*self._policy(observation), strict=True)
        return str(self._random.choices(actions, chances)[0])

    def _policy(self, observation: str) -> list[tuple[str, float]]:
        try:
            return solved(self.env_id)[observation]
        except KeyError:
            raise EnvError(f"{self.env_id}: no state of the game is shown as {observation[-200:]!r}") from None


@cache
def solved(env_id: str) -> dict[str, list[tuple[str, float]]]:
    """Return the average policy of CFR+ (Tammelin 2014) by prompt: legal answers, in brackets, and their probabilities.

    In a solved board game: equal chances for the optimal moves. Raises UnsupportedEnvError for a game that is not
    zero-sum for two, is too large, or has no information states or one prompt for several of them.
    """
    game, library = _game(env_id, "cfr"), pyspiel()
    if (optimal := solved_moves(env_id)) is not None:
        return {shown: [(move, 1 / len(moves)) for move in moves] for shown, moves in optimal.items()}
    kind = game.get_type()
    if kind.utility.name != "ZERO_SUM" or game.num_players() != 2 or not kind.provides_information_state_string:
        raise UnsupportedEnvError(f"scripted:cfr plays zero-sum games of two with information states; not {env_id}")
    if kind.dynamics.name == "SIMULTANEOUS":
        game = library.convert_to_turn_based(game)
    decisions = list(islice(_decisions(game.new_initial_state()), MOST_DECISIONS + 1))
    if len(decisions) > MOST_DECISIONS:
        raise UnsupportedEnvError(f"scripted:cfr: {env_id} has more than {MOST_DECISIONS} decision histories")
    texts = {state.information_state_string(): state for state in decisions}
    shown = {text: prompt(state, state.current_player()) for text, state in texts.items()}
    if len({*shown.values()}) < len(shown):
        raise UnsupportedEnvError(f"scripted:cfr: in {env_id} several information states have one prompt")
    solver = library.CFRPlusSolver(game)
    for _ in range(min(MOST_ITERATIONS, max(FEWEST_ITERATIONS, VISITS // len(decisions)))):
        solver.evaluate_and_update_policy()
    policy, table = solver.tabular_average_policy().policy_table(), dict[str, list[tuple[str, float]]]()
    for text, state in texts.items():
        chances, names = dict(policy[text]), action_names(state, state.current_player())
        table[shown[text]] = [(f"[{name}]", chances[action]) for name, action in names.items()]
    return table


def _decisions(start: Any) -> Iterator[Any]:
    """Yield each history at which a player acts."""
    waiting = [start]
    while waiting:
        state = waiting.pop()
        if not state.is_terminal():
            if not state.is_chance_node():
                yield state
            waiting.extend(state.child(action) for action in state.legal_actions())


def _game(env_id: str, player: str) -> Any:
    if not is_openspiel(env_id):
        raise UnsupportedEnvError(f"scripted:{player} plays games of OpenSpiel only; not {env_id}")
    return load_game(env_id)
