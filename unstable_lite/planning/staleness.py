"""Prediction of the number of games in flight, and of the age of their steps when the learner trains on them.

Assumes the lengths of random games and a learner that is faster than the engines, because games age most then.
Knows nothing of processes or of a run's measurements, which replace the prediction as soon as games end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from unstable_lite.config import Config
from unstable_lite.config.games import EnvSpec, LeagueConfig, TrainEnvSpec, parse_player
from unstable_lite.league.opponents import draws_fixed, frozen_adapters, strategies, training_opponents
from unstable_lite.planning.defaults import active_checkpoints, changing_slots, holds_games, policy_configs
from unstable_lite.rollout.back_pressure import InFlight, ages_by_turn, max_age, spread_of
from unstable_lite.rollout.rejection import MOST_JUDGED

SYNC_SPARE = 1.1
"""Expected steps of a sync round, as a multiple of a batch; with 1, every second round would lack a few."""
GROUPS = 64
"""Number of groups that are drawn to estimate the length of a group's longest game."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Predicted pace of a run; in a sync schedule, ages have no meaning."""

    games: float
    """Number of games in flight, or in a round of a sync schedule."""
    steps_per_game: float
    spread: float
    """Lifetime of a long game as a multiple of the mean lifetime."""
    mean_age: float
    """Updates from the sampling of a step to the training on it, on average; if all turns of a game have the version of
    its start, from that start."""
    most_age: float
    """The same for the oldest steps of the longest games."""
    adapters: int
    """Number of adapter versions that are loaded at once."""


def mean_turns(config: Config, lengths: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the expected turns of a game of each training env; its turn cap if no lengths are known."""
    return {spec.env_id: fmean(lengths.get(spec.env_id) or [spec.max_turns]) for spec in config.train_envs}


def steps_per_game(config: Config, lengths: Mapping[str, Sequence[int]]) -> float:
    """Return the expected steps of a training game, which are those of the policy's turns."""
    turns = mean_turns(config, lengths)
    return max(fmean(_collected_share(env, config.league) * turns[env.env_id] for env in config.train_envs), 1e-9)


def in_flight(config: Config, lengths: Mapping[str, Sequence[int]], num_frozen: int | None = None) -> InFlight:
    """Return the limit on games in flight for a policy's buffer. `lengths`: turns of some games, by env id.

    num_frozen: number of frozen players with an adapter; default: those of the config.
    """
    least = config.buffer.batch_delay_buffer * config.learner.batch_size
    slots, staleness = changing_slots(config, num_frozen), config.buffer.max_staleness
    oldest = max_age(staleness, slots) if holds_games(config) else staleness
    if config.run.schedule == "sync":
        least *= SYNC_SPARE if staleness else 1.0
        oldest = 0
    least = min(math.ceil(least), config.buffer_size)
    max_turn_age = None if holds_games(config) else slots - 1
    turns = mean_turns(config, lengths)
    steps_per_seat = {spec.env_id: turns[spec.env_id] / spec.num_players for spec in config.train_envs}
    return InFlight(config.learner.batch_size, least, oldest, steps_per_seat, max_turn_age)


def predict(config: Config, lengths: Mapping[str, Sequence[int]]) -> Pace:
    """Return the predicted pace of a policy's games. `lengths`: turns of some games, for every training env."""
    run, batch_size = config.run, config.learner.batch_size
    lifetimes = list[tuple[float, float]]()
    for spec in config.train_envs:
        lifetimes += _lifetimes(lengths[spec.env_id], _collected_share(spec, config.league), run.group_size)
    steps, limit = steps_per_game(config, lengths), in_flight(config, lengths)
    limit.set_spreads(lifetimes)
    games = min(run.num_collection_workers, max(max(limit.limit, limit.least) / steps, run.group_size))
    updates = games * steps / batch_size
    """Updates during a mean lifetime."""
    mean = fmean(lifetime for lifetime, _ in lifetimes)
    ages = lifetimes if config.league.adapter_policy == "game" else list(ages_by_turn(lifetimes))
    mean_of_steps = sum(age * n for age, n in ages) / sum(n for _, n in ages)
    spread, most_age = spread_of(lifetimes), 1 + limit.spread * updates
    held = most_age if holds_games(config) else limit.turn_spread * updates
    """Updates during which an adapter is held by a long game, or by a long turn."""
    return Pace(
        games=games,
        steps_per_game=steps,
        spread=spread,
        mean_age=updates * mean_of_steps / mean,
        most_age=most_age,
        adapters=math.floor(held) + 1 + active_checkpoints(config) + len(frozen_adapters(config)),
    )


def describe_games(config: Config, lengths: Mapping[str, Sequence[int]]) -> str:
    """Return how many games, and how many requests to endpoints, one update needs; evaluations with a quota are apart.

    Games of unknown length are taken to last until the turn cap.
    """
    run, envs, turns = config.run, config.train_envs, mean_turns(config, lengths)
    games = config.learner.batch_size / steps_per_game(config, lengths)
    weights = {name: options["weight"] for name, options in strategies(config.league).items()}
    fixed = sum(weight for name, weight in weights.items() if draws_fixed(name)) / sum(weights.values())
    opponents = training_opponents(config)
    asked: list[tuple[EnvSpec, float, int, Sequence[str]]] = [
        (spec, games / len(envs) * fixed, spec.num_actors, opponents.get(spec.env_id, ())) for spec in envs
    ]
    text = f"{'about' if all(map(lengths.get, turns)) else 'at least'} {games:,.{games < 10:d}f} training"
    if config.rewards.reject_zero_signal:
        text += f", up to {MOST_JUDGED} times as many if their results are alike"
    if config.eval_envs and run.num_eval_workers and run.schedule == "async":
        evaluations = games * run.eval_share / (1 - run.eval_share) if run.eval_share < 1 else math.inf
        text += f", {_number(evaluations)} evaluation"
        asked += [(spec, evaluations / len(config.eval_envs), 1, [spec.fixed_opponent]) for spec in config.eval_envs]
    requests = 0.0
    for spec, number, own, names in asked:
        of_endpoints = sum(parse_player(name).kind == "remote" for name in names)
        if own < spec.num_players and of_endpoints:
            of_others = (1 - own / spec.num_players) * turns.get(spec.env_id, spec.max_turns)
            requests += number * of_others * of_endpoints / len(names)
    return text + f"; {_number(requests)} requests to endpoints" * (requests > 0)


def _number(expected: float) -> str:
    return f"about {expected:,.{expected < 10:d}f}" if expected < math.inf else "unlimited"


def describe(config: Config, lengths: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, str]]:
    """Yield readable rows (name, prediction) for each policy of a run, and a row "warning" for every contradiction."""
    paces = dict[str, Pace]()
    policies = policy_configs(config)
    for name, own in policies.items():
        start = f"{name}: " * bool(name)
        yield "games an update", start + describe_games(own, lengths)
        if unknown := [spec.env_id for spec in own.train_envs if not lengths.get(spec.env_id)]:
            text = f"the run measures the length of games of {', '.join(unknown)}; few are in flight until then"
            yield "back-pressure", start + text
            continue
        pace = predict(own, lengths)
        share = f"a game brings {pace.steps_per_game:.1f} steps, if moves are random"
        if config.run.schedule == "sync":
            yield "back-pressure", f"{start}rounds of about {pace.games:.0f} games: enough for a batch; {share}"
            continue
        paces[name] = pace
        yield (
            "back-pressure",
            f"{start}about {pace.games:.0f} of {config.run.num_collection_workers} games in flight; {share}; a long "
            f"one lasts {pace.spread:.1f} times the mean",
        )
        yield (
            "staleness",
            f"{start}about {pace.mean_age:.1f} updates on average and {pace.most_age:.1f} for the longest games, if "
            f"the learner waits for games; buffer.max_staleness = {config.buffer.max_staleness}",
        )
        slots = config.engine.max_loras
        yield "adapters loaded", f"{start}about {pace.adapters} at that staleness; engine.max_loras = {slots}"
    yield from (("warning", text) for text in _warnings(config, policies, paces))


def _warnings(config: Config, policies: Mapping[str, Config], paces: Mapping[str, Pace]) -> Iterable[str]:
    slots, staleness, of_run = config.engine.max_loras, config.buffer.max_staleness, len(frozen_adapters(config))
    for name, pace in paces.items():
        own, start = policies[name], f"{name}: " * bool(name)
        if pace.most_age > staleness:
            yield (
                f"{start}steps of long games will be {pace.most_age:.1f} updates old, but buffer.max_staleness = "
                f"{staleness}: some will be dropped. Raise buffer.max_staleness or learner.batch_size, or lower "
                "run.num_collection_workers"
            )
        is_held_back = pace.games < config.run.num_collection_workers
        if is_held_back and holds_games(own) and changing_slots(own) < staleness:
            yield (
                f"{start}engine.max_loras = {slots} keeps games younger than buffer.max_staleness = {staleness} "
                f"allows: with engine.max_loras = {len(policies) * (staleness + 1) + of_run} more could be in flight"
            )
        of_group, batch_size = config.run.group_size * pace.steps_per_game, own.learner.batch_size
        if config.run.group_size > 1 and of_group > 2 * batch_size:
            yield (
                f"{start}a group of run.group_size = {config.run.group_size} games brings about {of_group:.0f} steps "
                f"at once, {of_group / batch_size:.1f} batches of learner.batch_size = {batch_size}: raise "
                "learner.batch_size"
            )
    adapters = of_run + sum(pace.adapters - len(frozen_adapters(policies[name])) for name, pace in paces.items())
    if paces and adapters > slots:
        holders = "games in flight and opponents"
        if config.league.adapter_policy == "turn":
            held = "evaluation games and games against checkpoints"
            holders = held if holds_games(config) else "turns in flight"
        yield (
            f"{holders} will need {adapters} adapter slots, but engine.max_loras = {slots}: updates "
            f"will wait until they end. Raise engine.max_loras to {adapters}, or lower buffer.max_staleness"
        )


def _collected_share(spec: TrainEnvSpec, league: LeagueConfig) -> float:
    """Return the policy's share of a game's turns."""
    weights: dict[str, float] = {name: options["weight"] for name, options in strategies(league).items()}
    mirrored = weights.get("mirror", 0.0) / sum(weights.values())
    return (spec.num_actors + mirrored * spec.num_drawn) / spec.num_players


def _lifetimes(lengths: Sequence[int], collected: float, group_size: int) -> list[tuple[float, float]]:
    """Return `GROUPS` pairs (lifetime in turns, number of steps), one for each drawn group."""
    rng = random.Random(0)
    groups = [rng.choices(lengths, k=group_size) for _ in range(GROUPS)]
    return [(float(max(group)), collected * sum(group)) for group in groups]
