"""One orchestrator, one learner, many engines, as a computation: events in order of time, no process, no clock.

Engines work as `latency.Latency` says. The orchestrator takes one turn after the other, each for so long, and gives it
to the engine with the fewest outstanding tokens. Games are played turn by turn on the adapter that was the newest when
they began; their steps go to a buffer, and while it is full no new game begins. The learner takes a batch, updates,
publishes (every engine stands still while it loads; every engine's canary is scored), and only then looks for the
next batch: as a run does.

Left out: failures, evaluation, opponents on older adapters, networks that are slow or lossy, and everything that
`latency` leaves out.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.latency import Latency

Turns = Sequence[tuple[int, int]]
"""Prompt tokens and new tokens of turns that are drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCosts:
    batch_size: int
    """Steps."""
    token_s: float
    """Of a trained token, prompt tokens included."""
    load_s: float
    """How long an engine stands still for a new adapter."""
    canary_s: float
    """From a loaded adapter to the canary's last token."""
    score_s: float
    """The learner's time for a request to score, however little it is."""
    scored_token_s: float
    """And for each token of the canaries, of which every engine has `SCORED`: one rank scores them all, in one go.
    What several engines say alike is scored once, which is left out: that no two do is the worst there is."""
    canaries: int
    canary_tokens: int
    """Of one canary, prompt and answer."""
    buffer_size: int
    max_staleness: int

    def publish_seconds(self, engines: int) -> float:
        scored = engines * self.canaries * self.canary_tokens
        return self.load_s + self.canary_s + self.score_s + scored * self.scored_token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    engines: int
    latency: Latency
    games: int
    turns: Turns
    turns_per_game: int
    turn_s: float
    """The orchestrator's time for a turn."""
    learner: LearnerCosts | None = None
    """None: whoever takes the batches takes no time, and there is never a new adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    turns_per_s: float
    tokens_per_s: float
    """Sampled ones."""
    occupied_slots: float
    """Share of all slots, on average over time."""
    orchestrator_busy: float
    """Share of the time."""
    learner_busy: float
    """Share of the time in updates; publishing apart."""
    publishing: float
    """Share of the time."""
    updates: int
    staleness_mean: float
    """Of trained steps, in updates."""
    staleness_max: int
    produced: int
    """Steps that came to the buffer, from the beginning."""
    trained: int
    dropped: int
    """Steps that became too stale."""
    waiting: int
    """Steps in the buffer at the end."""


class _Game:
    __slots__ = ("length", "new", "outstanding", "played", "prompt", "version")

    def __init__(self, length: int, played: int) -> None:
        self.length, self.played = length, played
        self.version = 0
        self.prompt = self.new = self.outstanding = 0
        """Of the turn at hand."""


class _Engine:
    __slots__ = ("began", "first_s", "life", "outstanding", "queued", "running", "scheduled", "step_s", "steps")

    def __init__(self) -> None:
        self.queued: deque[_Game] = deque()
        self.running: list[tuple[int, int, _Game]] = []
        self.outstanding = 0
        self.steps = 0
        self.began = self.first_s = self.step_s = 0.0
        """Of the stretch of like steps that is under way: when it began, its first step, every other one."""
        self.scheduled = 0
        """After how many steps it is interrupted."""
        self.life = 0
        """Of the interruption that counts; an earlier one is void."""


class Simulation:
    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self._setup = setup
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, int, _Engine | _Game | None]] = []
        """Time, order, the engine's life, whom it concerns: an engine, a game that is asked for a turn, the learner."""
        self._order = 0
        self._now = 0.0
        self._engines = [_Engine() for _ in range(setup.engines)]
        self._by_load: list[tuple[int, int]] = [(0, index) for index in range(setup.engines)]
        """Outstanding tokens and engine, of all engines and of some that no longer are true."""
        self._index = {id(engine): index for index, engine in enumerate(self._engines)}
        self._orchestrator_free = 0.0
        self._parked: deque[_Game] = deque()
        self._buffer: list[int] = []
        """Versions of the steps that wait."""
        self._version = 0
        self._learning: str | None = None
        self._is_measured = False
        self._measured = dict.fromkeys(("turns", "tokens", "slots", "orchestrator", "learning", "publishing"), 0.0)
        self._staleness: list[int] = []
        self._updates = self._produced = self._trained = self._dropped = 0

    def run(self, warm_up_s: float, seconds: float) -> Outcome:
        """Play so long, and tell what happened after the warm-up."""
        length = self._setup.turns_per_game
        for _ in range(self._setup.games):
            self._ask(_Game(length, self._rng.randrange(length)))  # as if they had begun at different times
        self._go_on_until(warm_up_s)
        self._is_measured = True
        self._go_on_until(warm_up_s + seconds)
        told, setup = self._measured, self._setup
        return Outcome(
            turns_per_s=told["turns"] / seconds,
            tokens_per_s=told["tokens"] / seconds,
            occupied_slots=min(1.0, told["slots"] / (seconds * setup.engines * setup.latency.slots)),
            orchestrator_busy=min(1.0, told["orchestrator"] / seconds),
            learner_busy=told["learning"] / seconds,
            publishing=told["publishing"] / seconds,
            updates=self._updates,
            staleness_mean=sum(self._staleness) / len(self._staleness) if self._staleness else math.nan,
            staleness_max=max(self._staleness, default=0),
            produced=self._produced,
            trained=self._trained,
            dropped=self._dropped,
            waiting=len(self._buffer),
        )

    def _go_on_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self._now, _, life, subject = heapq.heappop(self._events)
            if subject is None:
                self._learner_goes_on()
            elif isinstance(subject, _Game):
                self._send(subject)
            elif life == subject.life:
                self._interrupt(subject)
        self._now = end

    def _schedule(self, time: float, subject: _Engine | _Game | None) -> None:
        self._order += 1
        life = subject.life if isinstance(subject, _Engine) else 0
        heapq.heappush(self._events, (time, self._order, life, subject))

    # ------------------------------------------------------------------------- orchestrator

    def _ask(self, game: _Game) -> None:
        """The next turn of a game, which waits for the orchestrator's time."""
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
        learner = self._setup.learner
        game.played = 0
        if learner is not None:
            self._buffer.extend([game.version] * game.length)
            self._produced += game.length
            self._learn_if_possible()
            if len(self._buffer) >= learner.buffer_size:
                self._parked.append(game)
                return
        game.version = self._version
        self._ask(game)

    # ------------------------------------------------------------------------------- engines

    def _arrive(self, engine: _Engine) -> None:
        """A request is queued. It joins at the next step, if there is a slot."""
        if not engine.running:
            self._begin(engine)
        elif len(engine.running) < self._setup.latency.slots:
            since = self._now - engine.began - engine.first_s
            steps = 1 if since <= 0 else 1 + math.ceil(since / engine.step_s)
            if steps < engine.scheduled:
                self._interrupt_after(engine, steps)

    def _begin(self, engine: _Engine) -> None:
        """A stretch of steps, until the first of its requests is done."""
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
        """The step that is under way takes so much longer."""
        if engine.running:
            engine.began += seconds
            self._interrupt_after(engine, engine.scheduled)

    # ------------------------------------------------------------------------------- learner

    def _learn_if_possible(self) -> None:
        learner = self._setup.learner
        assert learner is not None
        if self._learning is not None or len(self._buffer) < learner.batch_size:
            return
        fresh = [version for version in self._buffer if self._version - version <= learner.max_staleness]
        self._dropped += len(self._buffer) - len(fresh)
        self._buffer = fresh
        if len(fresh) < learner.batch_size:
            return
        for _ in range(learner.batch_size):
            index = self._rng.randrange(len(fresh))
            fresh[index], fresh[-1] = fresh[-1], fresh[index]
            version = fresh.pop()
            if self._is_measured:
                self._staleness.append(self._version - version)
        self._trained += learner.batch_size
        tokens = sum(sum(self._rng.choice(self._setup.turns)) for _ in range(64)) / 64 * learner.batch_size
        self._wait_for_learner("learning", tokens * learner.token_s)
        self._begin_parked()

    def _wait_for_learner(self, what: str, seconds: float) -> None:
        self._learning = what
        if self._is_measured:
            self._measured[what] += seconds
        self._schedule(self._now + seconds, None)

    def _learner_goes_on(self) -> None:
        learner = self._setup.learner
        assert learner is not None
        if self._learning == "learning":
            for engine in self._engines:
                self._stall(engine, learner.load_s)
            self._wait_for_learner("publishing", learner.publish_seconds(self._setup.engines))
            return
        self._learning = None
        self._version += 1
        self._updates += self._is_measured
        self._learn_if_possible()
        self._begin_parked()

    def _begin_parked(self) -> None:
        learner = self._setup.learner
        assert learner is not None
        while self._parked and len(self._buffer) < learner.buffer_size:
            game = self._parked.popleft()
            game.version = self._version
            self._ask(game)
