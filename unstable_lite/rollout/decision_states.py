"""Ask one player in every decision state of a game, and count its answers as its games would read them."""

from __future__ import annotations

from msgspec.structs import replace

from unstable_lite.errors import OpponentError
from unstable_lite.games.openspiel.game_tree import GameTree
from unstable_lite.games.openspiel.prompts import read_action
from unstable_lite.games.openspiel.sampled_policy import SampledPolicy
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.rng import derive_seed
from unstable_lite.rollout.collector import LockStep, play_all
from unstable_lite.rollout.run_game import MAX_ACTION_CHARS
from unstable_lite.types import GameSpec, Reply

TRIES = 8
"""Number of attempts to get one answer of an endpoint, each with its client's own retries."""


async def sample_policy(
    seats: PlayerFactory,
    spec: GameSpec,
    tree: GameTree,
    samples: int,
    concurrency: int,
    lock_step: LockStep | None = None,
) -> SampledPolicy:
    """Return the counts of `samples` answers, at least two, of seat 0's player in each decision state.

    Every answer is the first one of a new player, sampled as in training. spec: game that names the player; its number
    and those below it seed the answers of a run that repeats exactly. lock_step: receiver of the seats' requests in
    such a run. Raises the errors of `Player.act`, possibly in an ExceptionGroup.
    """
    counted = SampledPolicy(tree)
    questions = [(state, number) for state in range(len(tree.states)) for number in range(samples)]

    async def ask(question: tuple[int, int]) -> None:
        state, number = question
        asked = tree.states[state]
        index = state * samples + number
        game = replace(spec, game_idx=spec.game_idx - index, seed=derive_seed(spec.seed, index), sampling=None)
        reply = await _answer(seats, game, asked.observation)
        counted.add(state, number % 2, read_action(reply.action[:MAX_ACTION_CHARS], asked.actions))

    if lock_step is None:
        await play_all(questions, ask, concurrency)
    else:
        for start in range(0, len(questions), concurrency):
            await lock_step.play([ask(question) for question in questions[start : start + concurrency]])
    return counted


async def _answer(seats: PlayerFactory, spec: GameSpec, observation: str, tries: int = TRIES) -> Reply:
    player = seats.players(spec)[0]
    try:
        await seats.wait_for_opponents(spec)
        return await player.act(observation)
    except OpponentError:
        if tries == 1:
            raise
        return await _answer(seats, spec, observation, tries - 1)
