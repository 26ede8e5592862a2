"""Play one game to its end, and turn each GameSpec into its one GameRecord, even if the game fails.

A game is void if it fails for a reason that does not depend on how it was played: its env does not start, an answer
does not come, it takes too long. Its record says why. An env that fails repeatedly is an error. Knows the env and its
players; knows nothing of engines, sockets, rewards after the game, ratings, or how a game was chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping

from unstable_lite.config.env_ids import is_judged
from unstable_lite.config.games import parse_player
from unstable_lite.config.training import RunConfig
from unstable_lite.errors import (
    Caught,
    ConfigError,
    EnvError,
    EnvRaised,
    OpponentError,
    RequestError,
    WorkerDied,
    described,
    users_frame,
)
from unstable_lite.games.env_pool import EnvPool, GameEnvironment, make_in_process
from unstable_lite.games.environments import outcomes_from_rewards
from unstable_lite.games.local_game import reason_of
from unstable_lite.games.players.factory import PlayerFactory, is_remote
from unstable_lite.games.players.policy import Player
from unstable_lite.games.players.scripted import ScriptedPlayer
from unstable_lite.league.ratings import team_scores
from unstable_lite.rng import derive_seed, digest_of
from unstable_lite.types import (
    CONTEXT_FULL,
    ENV_LOST,
    ENV_RAISED,
    PROMPT_TOO_LONG,
    BranchPoint,
    GameRecord,
    GameSpec,
    ModelRef,
    Opponent,
    OpponentKind,
    PastTurn,
    PlayerTrajectory,
    Reply,
    Step,
    StepContext,
    Turn,
)

log = logging.getLogger(__name__)

MAX_ACTION_CHARS = 2000
"""Longest action; longer ones are cut before they reach the env."""
MAX_VOID_GAMES = 20
"""Number of consecutive games of one env, void or with an exception of its `step`, that ends the run."""

Asked = tuple[int, str]
"""The player who acts next, and its observation."""


def new_record(spec: GameSpec) -> GameRecord:
    """Return the record of an unplayed game: void until `run_game` completes it."""
    trajectories = [
        PlayerTrajectory(pid=agent.pid, env_id=spec.env_id, game_idx=spec.game_idx, model=agent.model)
        for agent in spec.agent_specs
        if agent.collect_data
    ]
    return GameRecord(spec=spec, turns=[], trajectories=trajectories, rewards={}, outcomes={}, end="void")


async def run_game(record: GameRecord, environment: GameEnvironment, players: Mapping[int, Player]) -> None:
    """Play `record.spec` and fill in `record`; if this raises, the record keeps the turns so far and stays void.

    Raises EnvRaised after it has filled in the record of a game that an exception of the env's `step` ended.
    """
    spec, started = record.spec, time.monotonic()
    turn: Asked | None = await _first_turn(record, environment, players)
    raised: EnvRaised | None = None
    offender: int | None = None  # whose invalid move ended the game without a result of the env
    while turn is not None and len(record.turns) < spec.max_turns:
        pid, observation = turn
        asked = time.monotonic()
        try:
            reply = await players[pid].act(observation)
        except RequestError as error:
            if error.reason != PROMPT_TOO_LONG or not record.turns:
                raise
            record.reason, record.error, last = CONTEXT_FULL, str(error), record.turns[-1]
            if last.pid == pid and last.is_invalid:
                is_over = await _is_over_after(environment, pid, last.action, spec.error_allowance)
                turn, offender = None, None if is_over else pid
            break
        if not isinstance(reply, Reply) or not isinstance(reply.action, str):
            raise ConfigError(f"{type(players[pid]).__name__}.act must return a Reply; it returned {reply!r:.200}")
        action = reply.action[:MAX_ACTION_CHARS]
        _add_turn(record, turn, reply, action, time.monotonic() - asked)
        try:
            turn = await environment.advance(action)
        except EnvRaised as error:
            record.reason, record.error, raised, turn, offender = ENV_RAISED, str(error), error, None, pid
        record.turns[-1].is_invalid = environment.was_invalid or raised is not None

    _complete(record, environment, turn, offender)
    record.seconds = time.monotonic() - started
    if raised is not None:
        raise raised


def _add_turn(record: GameRecord, asked: Asked, reply: Reply, action: str, seconds: float) -> None:
    """Add a turn to the record, and a step to its player's trajectory if that is collected."""
    pid, observation = asked
    for trajectory in record.trajectories:
        if trajectory.pid == pid:
            assert reply.generation is not None, "only seats that the engines serve are collected"
            step = Step(
                pid=pid,
                obs=reply.prompt,
                act=reply.text,
                reward=0.0,
                env_id=record.spec.env_id,
                generation=reply.generation,
                step_info={"game_idx": record.spec.game_idx, "turn": len(record.turns), "action": action},
            )
            trajectory.steps.append(step)
    turn = Turn(
        pid=pid,
        observation=observation,
        text=reply.text,
        action=action,
        format_ok=reply.format_ok,
        is_cut_off=reply.is_cut_off,
        seconds=seconds,
        generation=reply.generation,
    )
    record.turns.append(turn)


async def _first_turn(record: GameRecord, environment: GameEnvironment, players: Mapping[int, Player]) -> Asked:
    """Return who acts first, after a repetition of the seed and the actions before `record.spec.start`, if it is set.

    Scripted players and custom classes may remember their turns, so they take them again; engines and endpoints do not.
    Raises EnvError if the env, or a player in this process, does not do the same as in the earlier game.
    """
    start, first = record.spec.start, environment.observe()
    if start is None:
        return first
    turn: Asked | None = first
    for number, past in enumerate(start.turns):
        pid, observation = _as_before(turn, past, record.spec.env_id, number)
        model = record.spec.agent_specs[pid].model
        if model.adapter_version is None and not is_remote(model):
            action = (await players[pid].act(observation)).action[:MAX_ACTION_CHARS]
            if action != past.action:
                raise EnvError(
                    f"branching: {model.name} played {past.action!r:.100} in turn {number} and, with the same seed, "
                    f"{action!r:.100} when the turn was repeated; its choices must follow from its seed and its "
                    "observations"
                )
        repeated = Turn(pid=pid, observation=observation, text=past.action, action=past.action, format_ok=True)
        record.turns.append(repeated)
        turn = await environment.advance(past.action)
        repeated.is_invalid = environment.was_invalid
    here = _as_before(turn, start, record.spec.env_id, len(start.turns))
    if start.chance_seed is not None:
        environment.reseed(start.chance_seed)
        for pid, player in players.items():
            if isinstance(player, ScriptedPlayer):
                player.reseed(derive_seed(start.chance_seed, "player", pid))
    return here


def _as_before(turn: Asked | None, before: PastTurn | BranchPoint, env_id: str, number: int) -> Asked:
    """Return `turn`. Raises EnvError unless the same player acts and is shown the same as before."""
    if turn is None:
        differs = "the game was over"
    elif turn[0] != before.pid:
        differs = f"player {turn[0]}, not player {before.pid}, had to act"
    elif digest_of(turn[1]) != before.digest:
        differs = f"player {turn[0]} was shown another observation"
    else:
        return turn
    raise EnvError(
        f"branching: {env_id} does not repeat: with the same seed and actions, {differs} in turn {number}. Play the "
        "env with another env sampler"
    )


async def _is_over_after(environment: GameEnvironment, pid: int, action: str, times: int) -> bool:
    """Repeat a player's invalid action until the env allows it no more; return whether that ended the game."""
    for _ in range(times):
        try:
            turn = await environment.advance(action)
        except EnvRaised:
            return False
        if turn is None or turn[0] != pid:
            return turn is None
    return False


def _complete(record: GameRecord, environment: GameEnvironment, turn: Asked | None, offender: int | None) -> None:
    """Fill in the results.

    turn: the one that the turn limit or a full context cut off; None: the game is over. offender: player who ended it
    by an invalid move; None: the env has the result.
    """
    if offender is not None:
        others = 1.0 if record.spec.num_players == 2 and environment.teams is None else 0.0
        record.rewards = {pid: -1.0 if pid == offender else others for pid in range(record.spec.num_players)}
        record.game_info = {offender: {"invalid_move": True, "reason": record.error}}
        record.end = "invalid"
    elif turn is None:
        record.rewards, record.game_info = environment.close()
        record.end = "invalid" if record.turns[-1].is_invalid else "natural"
    else:
        record.rewards = environment.rewards_so_far()
        record.end = "truncated"
    last_turns = {turn.pid: turn for turn in record.turns}
    record.invalid_pids = tuple(
        pid for pid, last in last_turns.items() if last.is_invalid and (turn is None or pid != turn[0])
    )
    if is_judged(record.spec.env_id):
        record.outcomes = {pid: "win" if reward > 0 else "loss" for pid, reward in record.rewards.items()}
    else:
        teams = environment.teams
        if teams or (teams is not None and offender is None):  # if it names none, those with the same reward are a team
            record.teams = teams or {pid: str(reward) for pid, reward in record.rewards.items()}
        scores = team_scores(record.rewards, record.teams) if record.teams else record.rewards
        record.outcomes = outcomes_from_rewards(scores, record.teams is not None)
    for trajectory in record.trajectories:
        trajectory.final_reward = record.rewards[trajectory.pid]
        trajectory.num_turns = len(record.turns)
        trajectory.game_info = record.game_info.get(trajectory.pid, {})
        is_out = trajectory.pid in (*record.invalid_pids, *environment.eliminated)
        _set_contexts(trajectory, record, is_out)


def _set_contexts(trajectory: PlayerTrajectory, record: GameRecord, is_out: bool) -> None:
    """Give each step of `trajectory` its context, from a complete record. is_out: whether its player is eliminated."""
    spec, pid, steps = record.spec, trajectory.pid, trajectory.steps
    opponents = tuple(
        Opponent(pid=agent.pid, uid=agent.model.uid, kind=_kind(agent.model, trajectory.model))
        for agent in spec.agent_specs
        if agent.pid != pid
    )
    repeated = () if spec.start is None else spec.start.turns
    num_before = sum(past.pid == pid for past in repeated)
    for player_turn, step in enumerate(steps, start=num_before):
        number: int = step.step_info["turn"]
        turn = record.turns[number]
        step.format_feedback = {"correct_answer_format": turn.format_ok, "invalid_move": turn.is_invalid}
        step.context = StepContext(
            env_id=spec.env_id,
            game_idx=spec.game_idx,
            group_idx=spec.group_idx,
            pid=pid,
            opponents=opponents,
            turn=number,
            player_turn=player_turn,
            num_turns=len(record.turns),
            num_player_turns=num_before + len(steps),
            final_reward=trajectory.final_reward,
            outcome=record.outcomes[pid],
            end=record.end,
            is_invalid=turn.is_invalid,
            is_cut_off=turn.is_cut_off,
            format_ok=turn.format_ok,
            is_out=step is steps[-1] and is_out,
            branch_turn=None if spec.start is None else len(repeated),
            reason=record.reason,
        )


def _kind(model: ModelRef, own: ModelRef) -> OpponentKind:
    """Return the kind of opponent that `model` is for a player whose model is `own`."""
    if model.kind == "checkpoint":
        return "policy" if model.policy != own.policy else "mirror" if model == own else "checkpoint"
    return "scripted" if parse_player(model.name or "").kind == "scripted" else "fixed"


class GameRunner:
    def __init__(self, seats: PlayerFactory, config: RunConfig, environments: EnvPool | None = None) -> None:
        """Create a runner. Without `environments`, every env runs in this process."""
        self._seats = seats
        self._config = config
        self._environments = environments
        self._failures_in_a_row: Counter[str] = Counter()
        self._deadlines: dict[asyncio.Timeout, float] = {}
        """Deadlines of the running games, in the order of their start."""
        self._timer: asyncio.TimerHandle | None = None
        self._stopped_at: float | None = None
        """Time of the event loop at which the games' clock was stopped; None: it runs."""

    async def play(self, spec: GameSpec, waits_for_opponents: bool = True) -> GameRecord:
        """Play one game and return its record.

        waits_for_opponents: False if the caller has made sure that they can play now.
        Raises EnvError if an env fails `MAX_VOID_GAMES` times in a row, WorkerDied if no engine is left, ConfigError
        if a player's answer is not a Reply.
        """
        record, environments = new_record(spec), self._environments
        await asyncio.sleep(0)  # other tasks must run, too, even if no game ever waits
        caught, timeout = Caught(), asyncio.timeout(None)
        with caught:
            if waits_for_opponents:
                await self._seats.wait_for_opponents(spec)
            async with timeout:
                self._start_clock(timeout)
                try:
                    environment = make_in_process(spec) if environments is None else await environments.make(spec)
                    try:
                        await run_game(record, environment, self._seats.players(spec))
                    finally:
                        environment.drop()
                finally:
                    self._deadlines.pop(timeout, None)
        self._settle(record, caught.error, timeout.expired())
        return record

    @contextlib.contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Stop the games' clock while no game can continue."""
        loop = asyncio.get_running_loop()
        self._stopped_at = loop.time()
        try:
            yield
        finally:
            stopped_s = loop.time() - self._stopped_at
            self._stopped_at = None
            self._deadlines = {timeout: deadline + stopped_s for timeout, deadline in self._deadlines.items()}
            if self._timer is None:
                self._end_overdue(loop)

    def _start_clock(self, timeout: asyncio.Timeout) -> None:
        """Start a game's clock. All games share one timer: one per game would cost more than a turn's messages."""
        loop = asyncio.get_running_loop()
        started = loop.time() if self._stopped_at is None else self._stopped_at
        self._deadlines[timeout] = started + self._config.game_timeout_s
        if self._timer is None:
            self._end_overdue(loop)

    def _end_overdue(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the games that are over their time and set the timer to the next deadline, if the clock runs."""
        self._timer, now = None, loop.time()
        while self._deadlines and self._stopped_at is None:
            timeout, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                self._timer = loop.call_at(deadline, self._end_overdue, loop)
                return
            del self._deadlines[timeout]
            timeout.reschedule(now)

    def _settle(self, record: GameRecord, error: Exception | None, is_overdue: bool) -> None:
        """Count and log a game that failed or whose env raised. Raise an error that no other game can survive."""
        spec, env_id = record.spec, record.spec.env_id
        if error is None:
            # Otherwise perhaps no prompt of the env fits, and another player moved first.
            if record.reason != CONTEXT_FULL or len({turn.pid for turn in record.turns}) == spec.num_players:
                self._failures_in_a_row[env_id] = 0
            return
        if isinstance(error, WorkerDied | ConfigError):
            raise error
        if is_overdue:  # a remote opponent may be the slow part
            kind = OpponentError if any(is_remote(agent.model) for agent in spec.agent_specs) else EnvError
            error = kind(f"not over after run.game_timeout_s = {self._config.game_timeout_s:g}", reason="game_timeout")
        if record.end == "void" or not isinstance(error, EnvRaised):
            record.end, record.error, reason = "void", described(error), reason_of(error)
            record.reason = EnvError.reason if reason == ENV_RAISED else reason  # at a turn of an earlier game
        if record.reason == ENV_LOST or (isinstance(error, OpponentError) and record.reason != PROMPT_TOO_LONG):
            log.warning("void game %d of %s: %s", spec.game_idx, env_id, record.error)
            return  # no reason to end the run
        actions = [(turn.pid, turn.action) for turn in record.turns]
        game = f"game {spec.game_idx} of {env_id} (seed {spec.seed}, after {actions})"
        log.warning("%s %s: %s", record.end, game, record.error, exc_info=error)
        if spec.start is not None:  # perhaps only this state is not reached again, and the run forgets it
            return
        self._failures_in_a_row[env_id] += 1
        if (failures := self._failures_in_a_row[env_id]) >= MAX_VOID_GAMES:
            remedy = "Correct that line" if users_frame(error) else "Remove the env from the config"
            raise EnvError(
                f"{failures} games of {env_id} in a row failed, the last one with {record.error} (seed {spec.seed}, "
                f"actions {actions}). {remedy}, or see logs/orchestrator.log for the tracebacks."
            ) from error
