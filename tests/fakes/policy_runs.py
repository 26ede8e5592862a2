"""A run of two policies that play each other, as the real tracker, sinks and league write it, without any process."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakes.game_records import RANDOM, make_generation, make_record, make_spec, make_step, make_trajectory
from unstable_lite.config import Config
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.tracking.evaluations import Evaluation, summarise_evaluation
from unstable_lite.tracking.records import JsonlSink
from unstable_lite.tracking.run_directory import LIVE, create_run_directory
from unstable_lite.tracking.tensorboard import TensorBoardSink
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import GameRecord, Histogram, ModelRef, Turn

NIM = "Nim-v0-train"
CONFIG: dict[str, Any] = {
    "algorithm": "reinforce",
    "model_name": "builtin:tiny",
    "run": {"learning_steps": 20, "eval_games": 40},
    "policies": {
        "main": {"opponents": {"mirror": 0.5, "policy:exploiter": 0.5}},
        "exploiter": {"opponents": {"policy:main": 1.0}, "share": 0.3},
    },
    "train_envs": [{"env_id": NIM, "num_players": 2, "num_actors": 1, "prompt_template": "tiny"}],
    "eval_envs": [
        {"env_id": NIM, "num_players": 2, "fixed_opponent": opponent} for opponent in ("scripted:random", "policy:main")
    ],
}
GAMES = 30
"""Training games of each update."""
CHANCES = {"main": 0.6, "exploiter": 0.3}
"""Chance that a policy beats `scripted:random` at first; each of its updates adds 0.02."""


class PolicyRun:
    """A run that is played by its chances."""

    def __init__(self, outputs: Path) -> None:
        raw = CONFIG | {"run": CONFIG["run"] | {"output_dir": str(outputs), "name": "two-policies"}}
        self.config = Config.model_validate(raw)
        self.directory = create_run_directory(self.config)
        self.registry = ModelRegistry(policy="main")
        self.views = {"main": self.registry, "exploiter": self.registry.of("exploiter")}
        self.made = dict.fromkeys(self.views, 0)
        """Number of each policy's own updates."""
        self.updates = self.games = 0
        self.said: list[str] = []
        self._rng = random.Random(0)
        for number, (name, view) in enumerate(self.views.items()):
            view.add_policy(f"{name}/initial", (number << 24) + 1, 0)
        self.registry.eval_opponent("scripted:random")
        self.tracker = self.new_tracker()

    def new_tracker(self) -> Tracker:
        board = TensorBoardSink(self.directory / "tensorboard", self.config.eval_cells)
        if not self.updates:
            board.lay_out(self.config)
        sinks = [JsonlSink(self.directory / "metrics.jsonl"), board]
        tracker = Tracker(self.directory, sinks, self.config.tracker, self.said.append)
        tracker.registry = self.registry
        return tracker

    def update(self, policy: str) -> None:
        """Play games, and count an update of one policy."""
        for _ in range(GAMES):
            self.count(self.play(self.current("main"), self.current(self._rng.choice(["main", "exploiter"]))))
        self.updates += 1
        self.made[policy] += 1
        own, number = self.made[policy], [*self.views].index(policy)
        self.views[policy].add_policy(f"{policy}/ckpt-{own}", (number << 24) + own + 1, own)
        metrics = {"learner/loss": 0.1 * own, "learner/entropy": 0.5, "buffer/size": 3.0 * own, "run/tokens_per_s": 9.0}
        rating = self.registry.get(self.views[policy].current.uid).rating
        metrics |= {"trueskill/current mu": rating.mu, "trueskill/current sigma": rating.sigma}
        histogram = Histogram(name="advantage", edges=(0.0, 1.0, 2.0), counts=(3, own))
        self.tracker.log_update(self.updates, metrics, [histogram], policy)
        self.tracker.end_evaluations([view.current.uid for view in self.views.values()])

    def evaluate(self, policy: str, opponent: str = "scripted:random") -> Evaluation:
        """Play an evaluation with a quota."""
        model, other = self.current(policy), self.registry.eval_opponent(opponent)
        label = f"update {self.updates}" if self.updates else "before"
        records = [self.play(model, other, label) for _ in range(self.config.run.eval_games)]
        for record in records:
            self.count(record)
        evaluation = summarise_evaluation(label, self.updates, model, NIM, opponent, records)
        self.tracker.add_evaluation(evaluation)
        return evaluation

    def play_beside(self, policy: str, games: int) -> None:
        """Play evaluation games without a quota."""
        for _ in range(games):
            self.count(self.play(self.current(policy), RANDOM))

    def current(self, policy: str) -> ModelRef:
        return self.views[policy].current

    def chance(self, model: ModelRef) -> float:
        return 0.2 if model.kind == "fixed" else CHANCES[model.policy] + 0.02 * self.made[model.policy]

    def play(self, one: ModelRef, other: ModelRef, label: str | None = None) -> GameRecord:
        """Return a game of two turns: an evaluation of `one` if the other has a name, else a training game of both."""
        is_training = other.name is None
        chance = self.chance(one) / (self.chance(one) + self.chance(other))
        rewards = (1.0, -1.0) if self._rng.random() < chance else (-1.0, 1.0)
        turns = [turn(pid, f"move {self._rng.randrange(3)}") for pid in (0, 1)]
        kind, trained = ("train", (0, 1)) if is_training else ("eval", ())
        spec = make_spec(one, other, kind=kind, trained=trained, env_id=NIM, game_idx=self.games, eval_label=label)  # type: ignore[arg-type]
        self.games += 1
        given = {"env_id": NIM, "game_idx": spec.game_idx}
        steps = [make_step([1, 2], act=one.text, pid=one.pid, env_id=NIM) for one in turns]
        of_seats = zip((one, other), steps, rewards, strict=True)
        players = [make_trajectory(s, pid=s.pid, model=m, final_reward=r, **given) for m, s, r in of_seats]
        return make_record(spec, *rewards, turns=turns, trajectories=players if is_training else [])

    def count(self, record: GameRecord) -> None:
        """Count a game as the collector does."""
        uids = {agent.pid: agent.model.uid for agent in record.spec.agent_specs}
        self.registry.update_ratings(uids, record.rewards, NIM)
        self.tracker.add_record(record)

    def end(self) -> Path:
        """Write live.json and return the directory."""
        self.tracker.close()
        live = {"has_ended": True, "time": 0.0, "pid": 0, "learning_steps": 20, "workers": []}
        live |= {"games": self.games, "eval_games": 0, "void_games": 0, "seconds": 60.0}
        (self.directory / LIVE).write_text(json.dumps(live))
        return self.directory


def turn(pid: int, move: str) -> Turn:
    sampled = make_generation([pid, 1])
    return Turn(pid=pid, observation="board", text=move, action=move, format_ok=True, generation=sampled)


def whole_run(outputs: Path, order: Sequence[str] = ("main", "main", "exploiter", "main") * 5) -> PolicyRun:
    """Play a run with evaluations before its first update, after the tenth and after its last one; it has not ended."""
    run = PolicyRun(outputs)
    for number, policy in enumerate([*order, None]):
        if number % 10 == 0:
            for name in run.views:
                run.evaluate(name)
            run.evaluate("exploiter", "policy:main")
        if policy is not None:
            run.play_beside(policy, 3)
            run.update(policy)
    return run
