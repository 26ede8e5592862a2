"""The variance of the policy gradient with groups that start within earlier games, at equal generated tokens.

The control game is OpenSpiel's Nim against a random player, and the policy is a table: one logit for each action in
each state, one token per turn. So the gradient of the expected reward is known exactly, and a batch costs as many
tokens as turns that the policy takes itself; turns that are repeated up to a branch cost none. Games, groups, branches
and advantages are those of a run: its scheduler, `run_game` and its buffer. A round is a seed, which draws the policy.

Two metrics, each over `BATCHES` batches of about `TOKENS` tokens: the variance of the batches' gradients (the trace of
their covariance, times the tokens of a batch) divided by their squared mean, and the cosine between a batch's gradient
and the exact one. Branches change the states that are learned from, and so the mean of the gradient: the first metric
does not count that, the second does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness import Options, Report
from unstable_lite.config import Config
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.openspiel.names import load_game
from unstable_lite.games.openspiel.prompts import action_names, prompt
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import TEMPLATES
from unstable_lite.league.branch_points import BranchPoints
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler
from unstable_lite.orchestrator.wiring import make_buffer
from unstable_lite.planning.algorithm_defaults import resolve_defaults
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.types import Generation

GAME = "openspiel:nim(pile_sizes=3;4;5,is_misere=False)"
TOKENS = 256
BATCHES = 200
SPREAD = 1.0
"""Standard deviation of the policy's logits."""


@dataclass(frozen=True, slots=True)
class Arm:
    branching: dict[str, Any] = field(default_factory=dict)
    group_size: int = 4
    only_branch: bool = False
    """Whether only the turn at the branch is learned from, not those after it."""


ARMS = {
    "start": Arm(),
    "no groups, mean reward of the role": Arm(group_size=1),
    "half at random turns": Arm({"share": 0.5, "chance": "same"}),
    "90% at random turns": Arm({"share": 0.9, "chance": "same"}),
    "90% at random turns, only that turn": Arm({"share": 0.9, "chance": "same"}, only_branch=True),
    "90% at uncertain turns": Arm({"share": 0.9, "chance": "same", "at": "uncertain"}),
    "90% at random turns, fresh chance": Arm({"share": 0.9, "chance": "fresh"}),
}
"""Groups are compared by RLOO."""

Vector = npt.NDArray[np.float64]


class Table:
    """The policy: logits by prompt, and its probabilities."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._sampling = random.Random(seed)
        self.logits: dict[str, Vector] = {}
        self.actions: dict[str, list[str]] = {}
        self.first: dict[str, int] = {}
        """Place of a state's first action in a gradient."""
        self.size = 0

    def add(self, state: str, actions: Sequence[str]) -> None:
        if state not in self.logits:
            self.logits[state] = self._rng.normal(0, SPREAD, len(actions))
            self.actions[state], self.first[state] = list(actions), self.size
            self.size += len(actions)

    def probabilities(self, state: str) -> Vector:
        exponentials = np.exp(self.logits[state] - self.logits[state].max())
        return np.asarray(exponentials / exponentials.sum(), np.float64)

    def score(self, state: str, action: str) -> tuple[slice, Vector]:
        """Return the gradient of the action's log-probability, and its place."""
        gradient = -self.probabilities(state)
        gradient[self.actions[state].index(action)] += 1
        return slice(self.first[state], self.first[state] + len(gradient)), gradient

    async def generate(self, state: str, version: int, *_: object) -> Generation:
        (action,) = self._sampling.choices(self.actions[state], self.probabilities(state).tolist())
        return Generation(
            prompt_ids=np.array([1], np.int32),
            completion_ids=np.array([2], np.int32),
            logprobs=np.array([0.0], np.float32),
            text=f"\\boxed{{[{action}]}}",
            finish_reason="stop",
            adapter_version=version,
        )


def exact_gradient(table: Table) -> Vector:
    """Add every state to the table; return the gradient of the mean reward of both seats against a random player."""
    states = dict[str, Any]()  # each after all that can follow it

    def visit(state: Any) -> None:
        if str(state) in states or state.is_terminal():
            return
        for action in state.legal_actions():
            visit(state.child(action))
        states[str(state)] = state

    start = load_game(GAME).new_initial_state()
    visit(start)
    for state in states.values():
        table.add(shown(state), list(action_names(state, state.current_player())))
    gradient = np.zeros(table.size)
    for seat in (0, 1):
        chances, values, returns = dict[str, Vector](), dict[str, float](), dict[str, Vector]()
        for key, state in states.items():
            uniform = np.full(len(state.legal_actions()), 1 / len(state.legal_actions()))
            chances[key] = table.probabilities(shown(state)) if state.current_player() == seat else uniform
            children = [state.child(action) for action in ordered_actions(state)]
            returns[key] = np.array(
                [child.returns()[seat] if child.is_terminal() else values[str(child)] for child in children]
            )
            values[key] = float(chances[key] @ returns[key])
        reached = dict.fromkeys(states, 0.0) | {str(start): 1.0}
        for key, state in reversed(states.items()):
            if state.current_player() == seat:
                place = table.first[shown(state)]
                share = reached[key] / 2 * chances[key] * (returns[key] - values[key])
                gradient[place : place + len(share)] += share
            for chance, action in zip(chances[key], ordered_actions(state), strict=True):
                child = str(state.child(action))
                if child in reached:
                    reached[child] += reached[key] * chance
    return gradient


def shown(state: Any) -> str:
    """Return the prompt of the player who acts."""
    return TEMPLATES["tiny"].prompt(prompt(state, state.current_player()), 2)


def ordered_actions(state: Any) -> list[int]:
    """Return the actions in the order of the table."""
    return list(action_names(state, state.current_player()).values())


@dataclass(frozen=True, slots=True)
class Measured:
    variance: float
    """Variance of a batch's gradient times its tokens, divided by the squared mean gradient."""
    cosine: float
    """Mean cosine between a batch's gradient and the exact one."""
    cosine_of_mean: float


def config_of(arm: Arm) -> Config:
    env = {"env_id": GAME, "num_players": 2, "num_actors": 1, "prompt_template": "tiny"}
    baseline = {"group_baseline": "rloo"} if arm.group_size > 1 else {}
    return resolve_defaults(
        Config.model_validate(
            {
                "run": {"group_size": arm.group_size},
                "buffer": {"buffer_size": 10**6},
                "league": {"opponent_sampling_strategy": "fixed", "fixed_opponents": ["scripted:random"]},
                "rewards": {"step_reward_transformation": [], **baseline},
                "branching": arm.branching,
                "train_envs": [env],
            }
        )
    )


async def measure(arm: Arm, seed: int, batches: int) -> Measured:
    table = Table(seed)
    exact = exact_gradient(table)
    config = config_of(arm)
    registry = ModelRegistry()
    registry.add_policy("ckpt-1", 1, 1)
    size = config.run.group_size
    scheduler = GameScheduler(
        build_model_sampler(config, registry, random.Random(seed)),
        build_env_sampler(config),
        seed,
        size,
        branches=BranchPoints(config.branching, size, seed) if config.branching.share else None,
    )
    factory, buffer = PlayerFactory(table.generate), make_buffer(config)
    assert isinstance(buffer, StepBuffer)
    gradients, tokens = [], []
    for number in range(-5, batches):  # the first batches only fill the store of earlier games
        num_tokens = 0
        while num_tokens < TOKENS:
            for spec in scheduler.next_train_group():
                record = new_record(spec)
                await run_game(record, make_in_process(spec), factory.players(spec), 100)
                scheduler.update(record)
                buffer.add_game(record)
                num_tokens += sum(turn.generation is not None for turn in record.turns)
        gradient = np.zeros(table.size)
        for step in await buffer.get_batch(buffer.size(), 1):
            context = step.context
            assert context is not None
            if arm.only_branch and context.branch_turn not in (None, context.turn):
                continue
            place, score = table.score(step.obs, step.step_info["action"].strip("[]"))
            gradient[place] += step.reward * score / num_tokens
        if number >= 0:
            gradients.append(gradient)
            tokens.append(num_tokens)
    all_of_them, mean_tokens = np.array(gradients), float(np.mean(tokens))
    mean = all_of_them.mean(0)
    total = float(all_of_them.var(0, ddof=1).sum())
    signal = float(mean @ mean) - total / batches  # the mean of a sample has variance, too
    norms = np.linalg.norm(all_of_them, axis=1) * np.linalg.norm(exact)
    return Measured(
        variance=total * mean_tokens / signal,
        cosine=float(np.mean(all_of_them @ exact / norms)),
        cosine_of_mean=float(mean @ exact / np.linalg.norm(mean) / np.linalg.norm(exact)),
    )


def run(options: Options) -> Report:
    report = Report(
        bench="branching",
        question="How noisy is the policy gradient with groups that start within earlier games?",
        options=options,
    )
    batches = 20 if options.small else BATCHES
    report.sizes |= {"game": GAME, "tokens": TOKENS, "batches": batches, "spread of logits": SPREAD}
    rows = {}
    for name, arm in ARMS.items():
        measured = [asyncio.run(measure(arm, options.seed + number, batches)) for number in range(options.rounds)]
        rows[name] = report.add(f"{name}: variance", "tokens", [each.variance for each in measured])
        report.add(f"{name}: cosine with the exact gradient", "", [each.cosine for each in measured])
        report.add(f"{name}: cosine of the mean", "", [each.cosine_of_mean for each in measured])
    for name, row in rows.items():
        if name != "start":
            report.add_ratio(f"variance, {name} ÷ start", row, rows["start"])
    return report
