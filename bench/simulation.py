"""Simulation of one orchestrator, one learner and many engines: events in order of time, no process, no clock.

Engines work as in `latency.Latency`. The orchestrator handles one turn after the other, in a fixed time each, and gives
it to the engine with the fewest outstanding tokens. Games are played turn by turn on the adapter that was the newest
when they began. Their steps go to the real buffer of a run with its back-pressure, and while it is full no new game
begins. As in a run, the learner takes a batch, updates, syncs the weights (it waits for an adapter slot, which games
hold until their end; every engine pauses while it loads; every engine's canary is scored), and only then takes the next
batch.

Left out: failures, evaluation, rewards, slow or lossy networks, and everything that `latency` leaves out.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.latency import Latency
from unstable_lite.config import Config
from unstable_lite.config.games import TrainEnvSpec
from unstable_lite.games.trial_games import trial_lengths
from unstable_lite.planning.adapter_slots import active_checkpoints
from unstable_lite.planning.algorithm_defaults import resolve_defaults
from unstable_lite.planning.staleness import steps_per_seat
from unstable_lite.reward_transformations import GROUP_BASELINES
from unstable_lite.rollout.back_pressure import InFlight, max_age
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.rollout.step_counts import StepCounts
from unstable_lite.types import (
    AgentSpec,
    GameRecord,
    GameSpec,
    Generation,
    ModelRef,
    PlayerTrajectory,
    Step,
    Turn,
)

Turns = Sequence[tuple[int, int]]
"""Prompt tokens and new tokens of the turns to draw from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCosts:
    batch_size: int
    """Steps per batch."""
    token_s: float
    """Time per trained token, prompt tokens included."""
    load_s: float
    """Time for which an engine pauses to load a new adapter."""
    canary_s: float
    """Time from a loaded adapter to the canary's last token."""
    score_s: float
    """The learner's fixed time per request to score."""
    scored_token_s: float
    """Time per token of the canaries. Every engine has `SCORED` of them, and one rank scores them all in one request.
    A run scores identical answers of several engines once; here all answers differ, which is the worst case."""
    canaries: int
    canary_tokens: int
    """Tokens of one canary, prompt and answer."""
    buffer_size: int
    max_staleness: int
    max_loras: int = 1 << 30
    pool: int = 1
    """Checkpoints that can be played at once, including the newest."""
    group_size: int = 1
    steps_per_seat: float = 100.0
    """Steps of a seat that the run expects before the first game ends."""

    def sync_seconds(self, engines: int) -> float:
        scored = engines * self.canaries * self.canary_tokens
        return self.load_s + self.canary_s + self.score_s + scored * self.scored_token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Games of one env against one kind of opponent."""

    env_id: str
    lengths: Sequence[int]
    """Game lengths in turns, to draw from."""
    is_mirror: bool = True
    """Whether both seats are collected; otherwise one of two."""
    is_lagged: bool = False
    """Whether the opponent is an older adapter."""
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    engines: int
    latency: Latency
    games: int
    turns: Turns
    turns_per_game: int
    turn_s: float
    """The orchestrator's time per turn."""
    kinds: Sequence[Kind] = ()
    """Empty: games of `turns_per_game` turns, all of them collected."""
    learner: LearnerCosts | None = None
    """None: taking a batch takes no time, and there is never a new adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    turns_per_s: float
    tokens_per_s: float
    """Sampled tokens."""
    occupied_slots: float
    """Share of all slots in use, mean over time."""
    orchestrator_busy: float
    """Share of the time."""
    learner_busy: float
    """Share of the time in updates, without weight sync."""
    weight_sync: float
    """Share of the time."""
    updates: int
    staleness_mean: float
    """Mean staleness of trained steps, in updates."""
    staleness_max: int
    produced: int
    """Steps that entered the buffer, from the beginning."""
    trained: int
    dropped: int
    """Steps dropped because they became too stale."""
    waiting: int
    """Steps in the buffer at the end."""
    counts: dict[tuple[str, str], StepCounts] = field(default_factory=dict)
    """Steps by env and class of game length, from the beginning of the measured time."""
    games_in_flight: float = 0.0
    """Mean over the updates."""
    slot_waits: float = 0.0
    """Share of the time in which the learner waits for an adapter slot."""


class _Game:
    __slots__ = ("held", "length", "new", "outstanding", "played", "prompt", "spec", "version")

    def __init__(self, spec: GameSpec, length: int, version: int, held: tuple[int, ...]) -> None:
        self.spec, self.length, self.version = spec, length, version
        self.held = held
        """Adapter versions of its seats."""
        self.played = 0
        self.prompt = self.new = self.outstanding = 0
        """Tokens of the current turn."""


class _Engine:
    __slots__ = ("began", "first_s", "life", "outstanding", "queued", "running", "scheduled", "step_s", "steps")

    def __init__(self) -> None:
        self.queued: deque[_Game] = deque()
        self.running: list[tuple[int, int, _Game]] = []
        self.outstanding = 0
        self.steps = 0
        self.began = self.first_s = self.step_s = 0.0
        """Current stretch of equal steps: when it began, the time of its first step, and of every other one."""
        self.scheduled = 0
        """Number of steps after which it is interrupted."""
        self.life = 0
        """Number of the interruption that counts; an earlier one is void."""


class Simulation:
    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self._setup = setup
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, int, _Engine | _Game | None]] = []
        """Time, order, the engine's life, and the subject: an engine, a game that takes a turn, or None (learner)."""
        self._order = 0
        self._now = 0.0
        self._engines = [_Engine() for _ in range(setup.engines)]
        self._by_load: list[tuple[int, int]] = [(0, index) for index in range(setup.engines)]
        """Heap of outstanding tokens and engine; it has a true entry for every engine, and outdated ones."""
        self._index = {id(engine): index for index, engine in enumerate(self._engines)}
        self._orchestrator_free = 0.0
        self._idle = setup.games
        """Workers without a game."""
        self._rest_of_group: deque[_Game] = deque()
        self._num_games = 0
        self._kinds = setup.kinds or (Kind(env_id="env", lengths=(setup.turns_per_game,)),)
        self._buffer = _buffer(setup.learner, self._kinds, seed)
        self._version = 0
        self._held: Counter[int] = Counter()
        """Number of games that hold an adapter version."""
        self._pool = [0]
        self._flying: list[int] = []
        self._waits_since: float | None = None
        """Time since which an adapter waits for a slot."""
        self._slot_waits = 0.0
        self._counted: dict[tuple[str, str], StepCounts] = {}
        self._learning: str | None = None
        self._is_measured = False
        self._measured = dict.fromkeys(("turns", "tokens", "slots", "orchestrator", "learning", "weight_sync"), 0.0)
        self._staleness: list[int] = []
        self._updates = 0

    def run(self, warm_up_s: float, seconds: float) -> Outcome:
        """Simulate the warm-up and `seconds` more; return the outcome after the warm-up."""
        self._begin_games()
        self._advance_until(warm_up_s)
        self._measure()
        self._advance_until(warm_up_s + seconds)
        return self._outcome(seconds)

    def run_updates(self, warm_up: int, updates: int) -> Outcome:
        """Simulate `warm_up` and `updates` more updates; return the outcome after the warm-up."""
        self._begin_games()
        self._advance_until(math.inf, warm_up)
        self._measure()
        began = self._now
        self._advance_until(math.inf, warm_up + updates)
        return self._outcome(self._now - began)

    def _measure(self) -> None:
        self._is_measured = True
        self._counted = {key: replace(counts) for key, counts in self._buffer.counts.items()}

    def _outcome(self, seconds: float) -> Outcome:
        totals, setup = self._measured, self._setup
        return Outcome(
            turns_per_s=totals["turns"] / seconds,
            tokens_per_s=totals["tokens"] / seconds,
            occupied_slots=min(1.0, totals["slots"] / (seconds * setup.engines * setup.latency.slots)),
            orchestrator_busy=min(1.0, totals["orchestrator"] / seconds),
            learner_busy=totals["learning"] / seconds,
            weight_sync=totals["weight_sync"] / seconds,
            updates=self._updates,
            staleness_mean=sum(self._staleness) / len(self._staleness) if self._staleness else math.nan,
            staleness_max=max(self._staleness, default=0),
            produced=self._buffer.added,
            trained=self._buffer.taken,
            dropped=self._buffer.dropped_stale,
            waiting=self._buffer.size(),
            counts={key: _less(counts, self._counted.get(key)) for key, counts in self._buffer.counts.items()},
            games_in_flight=sum(self._flying) / len(self._flying) if self._flying else math.nan,
            slot_waits=self._slot_waits / seconds,
        )

    def _advance_until(self, end: float, version: int | None = None) -> None:
        while self._events and self._events[0][0] <= end and self._version != version:
            self._now, _, life, subject = heapq.heappop(self._events)
            if subject is None:
                self._advance_learner()
            elif isinstance(subject, _Game):
                self._send(subject)
            elif life == subject.life:
                self._interrupt(subject)
        if end < math.inf:
            self._now = end

    def _schedule(self, time: float, subject: _Engine | _Game | None) -> None:
        self._order += 1
        life = subject.life if isinstance(subject, _Engine) else 0
        heapq.heappush(self._events, (time, self._order, life, subject))

    # ------------------------------------------------------------------------- orchestrator

    def _ask(self, game: _Game) -> None:
        """Schedule a game's next turn, which waits for the orchestrator's time."""
        self._orchestrator_free = max(self._now, self._orchestrator_free) + self._setup.turn_s
        self._schedule(self._orchestrator_free, game)

    def _send(self, game: _Game) -> None:
        if self._is_measured:
            self._measured["orchestrator"] += self._setup.turn_s
        game.prompt, game.new = self._setup.turns[self._rng.randrange(len(self._setup.turns))]
        game.outstanding = game.prompt + game.new
        engine = self._least_loaded()
        self._change_load(engine, game.outstanding)
        engine.queued.append(game)
        self._arrive(engine)

    def _least_loaded(self) -> _Engine:
        while True:
            load, index = self._by_load[0]
            if self._engines[index].outstanding == load:
                return self._engines[index]
            heapq.heappop(self._by_load)

    def _change_load(self, engine: _Engine, tokens: int) -> None:
        engine.outstanding += tokens
        heapq.heappush(self._by_load, (engine.outstanding, self._index[id(engine)]))
        if len(self._by_load) > 1000 + 8 * len(self._engines):
            self._by_load = [(engine.outstanding, index) for index, engine in enumerate(self._engines)]
            heapq.heapify(self._by_load)

    def _finish_turn(self, game: _Game) -> None:
        game.played += 1
        if self._is_measured:
            self._measured["turns"] += 1
            self._measured["tokens"] += game.new
        if game.played < game.length:
            self._ask(game)
            return
        self._idle += 1
        for version in game.held:
            self._held[version] -= 1
        if self._setup.learner is not None:
            self._buffer.add_game(_record(game, self._rng))
            self._sync_if_possible()
            self._learn_if_possible()
        self._begin_games()

    def _begin_games(self) -> None:
        while self._idle and (self._rest_of_group or self._setup.learner is None or not self._buffer.is_full):
            if not self._rest_of_group:
                self._begin_group()
            self._idle -= 1
            game = self._rest_of_group.popleft()
            if self._setup.learner is None and self._num_games <= self._setup.games:
                game.played = self._rng.randrange(game.length)  # as if they had begun at different times
            self._ask(game)

    def _begin_group(self) -> None:
        learner, rng = self._setup.learner, self._rng
        (kind,) = rng.choices(self._kinds, [kind.weight for kind in self._kinds])
        held = {self._version} | ({rng.choice(self._pool)} if kind.is_lagged else set())
        seats = (0, 1) if kind.is_mirror else (rng.randrange(2),)
        group_size = 1 if learner is None else learner.group_size
        group_idx = self._num_games if group_size > 1 else None
        for _ in range(group_size):
            agents = tuple(
                AgentSpec(pid=pid, model=POLICY, collect_data=pid in seats, prompt_template="", action_extraction_fn="")
                for pid in (0, 1)
            )
            spec = GameSpec(
                game_idx=self._num_games,
                kind="train",
                env_id=kind.env_id,
                num_players=2,
                seed=0,
                agent_specs=agents,
                max_turns=200,
                group_idx=group_idx,
            )
            self._num_games += 1
            self._held.update(held)
            if learner is not None:
                self._buffer.begin_game(spec)
            self._rest_of_group.append(_Game(spec, rng.choice(kind.lengths), self._version, tuple(held)))

    # ------------------------------------------------------------------------------- engines

    def _arrive(self, engine: _Engine) -> None:
        """Let a queued request join at the next step, if there is a slot."""
        if not engine.running:
            self._begin(engine)
        elif len(engine.running) < self._setup.latency.slots:
            since = self._now - engine.began - engine.first_s
            steps = 1 if since <= 0 else 1 + math.ceil(since / engine.step_s)
            if steps < engine.scheduled:
                self._interrupt_after(engine, steps)

    def _begin(self, engine: _Engine) -> None:
        """Begin a stretch of steps, which lasts until the first of its requests is done."""
        latency, prompt_tokens = self._setup.latency, 0
        while engine.queued and len(engine.running) < latency.slots:
            game = engine.queued.popleft()
            prompt_tokens += game.prompt
            self._order += 1
            heapq.heappush(engine.running, (engine.steps + game.new, self._order, game))
        if engine.running:
            rows = len(engine.running)
            engine.began = self._now
            engine.first_s, engine.step_s = latency.step_seconds(rows, prompt_tokens), latency.step_seconds(rows, 0)
            self._interrupt_after(engine, max(1, engine.running[0][0] - engine.steps))

    def _interrupt_after(self, engine: _Engine, steps: int) -> None:
        engine.life += 1
        engine.scheduled = steps
        self._schedule(engine.began + engine.first_s + (steps - 1) * engine.step_s, engine)

    def _interrupt(self, engine: _Engine) -> None:
        engine.steps += engine.scheduled
        if self._is_measured:
            self._measured["slots"] += len(engine.running) * (engine.first_s + (engine.scheduled - 1) * engine.step_s)
        finished = []
        while engine.running and engine.running[0][0] <= engine.steps:
            finished.append(heapq.heappop(engine.running)[2])
        self._begin(engine)
        for game in finished:
            self._change_load(engine, -game.outstanding)
        for game in finished:
            self._finish_turn(game)

    def _stall(self, engine: _Engine, seconds: float) -> None:
        """Make the current step take `seconds` longer."""
        if engine.running:
            engine.began += seconds
            self._interrupt_after(engine, engine.scheduled)

    # ------------------------------------------------------------------------------- learner

    def _learn_if_possible(self) -> None:
        learner = self._setup.learner
        assert learner is not None
        if self._learning is not None or not self._buffer.has_batch(learner.batch_size, self._version):
            return
        for step in _at_once(self._buffer.get_batch(learner.batch_size, self._version)):
            if self._is_measured:
                self._staleness.append(self._version - step.generation.adapter_version)
        if self._is_measured:
            self._flying.append(self._setup.games - self._idle)
        tokens = sum(sum(self._rng.choice(self._setup.turns)) for _ in range(64)) / 64 * learner.batch_size
        self._wait_for_learner("learning", tokens * learner.token_s)
        self._begin_games()

    def _wait_for_learner(self, what: str, seconds: float) -> None:
        self._learning = what
        if self._is_measured:
            self._measured[what] += seconds
        self._schedule(self._now + seconds, None)

    def _advance_learner(self) -> None:
        if self._learning == "learning":
            self._learning, self._waits_since = "waiting", self._now
            self._sync_if_possible()
            return
        assert self._setup.learner is not None
        self._learning = None
        self._version += 1
        self._updates += self._is_measured
        self._pool = [*self._pool, self._version][-self._setup.learner.pool :]
        self._learn_if_possible()
        self._begin_games()

    def _sync_if_possible(self) -> None:
        """Load the next adapter if there is a slot.

        A game holds the adapter of its start. The pool keeps adapters that no game uses only while there is room.
        """
        learner = self._setup.learner
        assert learner is not None
        if self._learning != "waiting" or self._waits_since is None:
            return
        loaded = {version for version, games in self._held.items() if games and version} | {self._version}
        if len(loaded) >= learner.max_loras:
            return
        if self._is_measured:
            self._slot_waits += self._now - self._waits_since
        for engine in self._engines:
            self._stall(engine, learner.load_s)
        self._wait_for_learner("weight_sync", learner.sync_seconds(self._setup.engines))


POLICY = ModelRef(uid="policy", kind="checkpoint", adapter_version=0)
NO_TOKENS, NO_LOGPROBS = np.zeros(1, np.int32), np.zeros(1, np.float32)
A_TURN = Turn(pid=0, observation="", text="", action="", format_ok=True)


def setup_of(config: Config, update_turns: float) -> Setup:
    """Return the setup for a run's config. update_turns: mean time of an update, in mean times of a turn.

    Games are as long as random ones. Turns take 2 to 20 steps of one engine that is never full.
    """
    config = resolve_defaults(config)
    lengths = {spec.env_id: trial_lengths(spec) for spec in config.train_envs}
    turns = [(1, new) for new in range(2, 21)]
    learner, engine = config.learner, Latency(step_s=1 / 11, row_s=0.0, prompt_token_s=0.0, slots=1 << 20)
    return Setup(
        engines=1,
        latency=engine,
        games=config.run.num_collection_workers,
        turns=turns,
        turns_per_game=1,
        turn_s=0.0,
        kinds=[kind for spec in config.train_envs for kind in _kinds(config, spec, lengths[spec.env_id])],
        learner=LearnerCosts(
            batch_size=learner.batch_size,
            token_s=update_turns / learner.batch_size / 12,
            load_s=0.0,
            canary_s=0.0,
            score_s=0.0,
            scored_token_s=0.0,
            canaries=0,
            canary_tokens=0,
            buffer_size=config.buffer_size,
            max_staleness=config.buffer.max_staleness,
            max_loras=config.engine.max_loras,
            pool=active_checkpoints(config),
            group_size=config.run.group_size,
            steps_per_seat=max(steps_per_seat(config, lengths).values()),
        ),
    )


def _kinds(config: Config, spec: TrainEnvSpec, lengths: Sequence[int]) -> list[Kind]:
    strategy = config.league.opponent_sampling_strategy
    if spec.num_actors == spec.num_players:
        strategy = "mirror"
    given = {strategy: 1.0} if isinstance(strategy, str) else strategy
    return [
        Kind(
            env_id=spec.env_id,
            lengths=[2 * max(1, length // spec.num_players) for length in lengths],  # as if two played
            is_mirror=name == "mirror",
            is_lagged=name not in ("mirror", "fixed"),
            weight=weight["weight"] if isinstance(weight, dict) else weight,
        )
        for name, weight in given.items()
    ]


def _buffer(learner: LearnerCosts | None, kinds: Sequence[Kind], seed: int) -> StepBuffer:
    """Make the buffer as a run does."""
    if learner is None:
        return StepBuffer(1)
    buffer = StepBuffer(
        learner.buffer_size,
        max_staleness=learner.max_staleness,
        rng=seed,
        group_size=learner.group_size,
        group_baseline=GROUP_BASELINES["rloo"] if learner.group_size > 1 else None,
    )
    buffer.in_flight = InFlight(
        learner.batch_size,
        least=learner.batch_size,
        max_age=max_age(learner.max_staleness, learner.max_loras),
        steps_per_seat={kind.env_id: learner.steps_per_seat for kind in kinds},
    )
    return buffer


def _record(game: _Game, rng: random.Random) -> GameRecord:
    def steps(pid: int) -> list[Step]:
        generation = Generation(
            prompt_ids=NO_TOKENS,
            completion_ids=NO_TOKENS,
            logprobs=NO_LOGPROBS,
            text="",
            finish_reason="stop",
            adapter_version=game.version,
        )
        own = (game.length + 1 - pid) // 2
        return [
            Step(pid=pid, obs="", act="", reward=0.0, env_id=game.spec.env_id, generation=generation)
            for _ in range(own)
        ]

    return GameRecord(
        spec=game.spec,
        turns=[A_TURN] * game.length,
        trajectories=[
            PlayerTrajectory(
                pid=agent.pid,
                env_id=game.spec.env_id,
                game_idx=game.spec.game_idx,
                model=POLICY,
                steps=steps(agent.pid),
                final_reward=rng.random(),
            )
            for agent in game.spec.agent_specs
            if agent.collect_data
        ],
        rewards={},
        outcomes={},
        end="natural",
    )


def _at_once(coroutine: Coroutine[Any, Any, list[Step]]) -> list[Step]:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: list[Step] = end.value
        return result
    raise AssertionError


def _less(counts: StepCounts, before: StepCounts | None) -> StepCounts:
    before = before or StepCounts()
    return StepCounts(counts.played - before.played, counts.trained - before.trained, counts.dropped - before.dropped)
