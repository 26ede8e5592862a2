"""Lineages: rules by which a policy restarts (`policies.NAME.restart`), and the restart.

A lineage is a policy from its first adapter to the last update before a restart. The numbers of updates and the ids of
adapters continue; moments, schedules, averages and ratings begin again, and waiting steps are dropped.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from unstable_lite.config.games import RestartConfig, evaluated_against
from unstable_lite.league.opponents import draws_population, kept_policies, policies_met
from unstable_lite.orchestrator.checkpoint_pool import TrainedPolicy
from unstable_lite.planning.policies import final_updates
from unstable_lite.reward_transformations import build_reward_transformations
from unstable_lite.rng import derive_seed
from unstable_lite.rollout.collector import GameListener
from unstable_lite.tracking.evaluations import POINTS
from unstable_lite.tracking.intervals import percent, percent_range, share_interval
from unstable_lite.types import INITIAL, GameRecord, uid_of

if TYPE_CHECKING:
    from unstable_lite.orchestrator.wiring import RunParts

MEETING_GAMES = 100
"""Number of games in each env between a player that is kept and each other one."""


class Lineages(GameListener):
    def __init__(self, parts: RunParts) -> None:
        config = parts.plan.config
        self._parts = parts
        self._rules = {name: policy.restart for name, policy in config.policies.items() if policy.restart is not None}
        met = {name: policies_met(config.of_policy(name)) for name in self._rules}
        self._named = {name: {each.removesuffix("/past") for each in met[name]} for name in met}
        """Policies in the `opponents` of each policy with a rule."""
        self._meeting_kept = {name for name in met if draws_population(config.of_policy(name))}
        """Policies with a rule that have the population in their `opponents`."""

    def add_record(self, record: GameRecord) -> None:
        """Count the points of lineages in a training game."""
        if not self._rules or record.spec.kind != "train" or record.end == "void" or record.spec.start is not None:
            return
        spec, population = record.spec, self._parts.registry.population
        for name, rule in self._rules.items():
            policy, kept = self._parts.policies[name], population if name in self._meeting_kept else ()
            own = {one.pid: one.model for one in spec.agent_specs if one.collect_data and one.model.policy == name}
            points = [POINTS[record.outcomes[pid]] for pid in own if record.outcomes[pid] != "na"]
            others = [one.model for one in spec.agent_specs if one.pid not in own]
            is_met = any(one.policy in self._named[name] or one.uid in kept for one in others)
            is_of_lineage = all((one.adapter_version or 0) >= policy.buffer.first_version for one in own.values())
            if points and is_met and is_of_lineage:
                deal = spec.game_idx if spec.group_idx is None else spec.group_idx
                policy.results = [*policy.results, (deal, fmean(points))][-rule.games :]

    async def restart_if_due(self, policy: TrainedPolicy) -> None:
        """Keep the policy's checkpoint and begin a new lineage, if its rule says so after an update.

        After the policy's last one no lineage begins. A stop changes nothing, so that a resumed run does the same.
        """
        rule, parts = self._rules.get(policy.name), self._parts
        if rule is None or (reason := _reason(policy, rule)) is None:
            return
        made = {name: each.updates for name, each in parts.policies.items()}
        if final_updates(parts.plan.config, made)[policy.name] == policy.updates:
            return
        version, last = policy.next_version, policy.registry.current.uid
        if is_kept := policy.name in kept_policies(parts.plan.config):
            await policy.pool.settled()  # a checkpoint that begins next needs the copy
            await self._keep(last)
        seed = derive_seed(policy.config.run.seed, "lineage", policy.lineage)
        policy.make_room(parts.policies.values())
        async with parts.colocation.learner():
            digest = await policy.learner.write_adapter(version, parts.store, seed, self._start(rule))
        await parts.adapter_sync.sync(version, digest)
        policy.lineage, policy.began = policy.lineage + 1, policy.updates
        policy.results.clear()
        policy.buffer.begin_again(version, build_reward_transformations(policy.config.rewards))
        policy.pool.admit(uid_of(policy.name, f"{INITIAL}-{policy.lineage}"), version, policy.updates, inherit=False)
        parts.health.forget(policy.name, version)
        parts.collector.tell_new_checkpoint()
        kept = f"{last} is kept as a player" if is_kept else f"{last} was its last checkpoint"
        parts.terminal.say(f"{policy.name} begins again, from {rule.start}, after {reason}; {kept}")

    async def _keep(self, uid: str) -> None:
        """Make a checkpoint a player of the population, and let it meet the other ones there."""
        registry, run = self._parts.registry, self._parts.plan.config.run
        others = [other for other in registry.population if registry.get(other).active]
        registry.population[uid] = None
        model = registry.eval_opponent(f"policy:{uid}")
        envs = [env for env in self._parts.plan.config.train_envs if env.num_players > 1]
        for env, other in product(envs, others):
            against, label = evaluated_against(env, f"policy:{other}"), f"population {uid}"
            await self._parts.collector.evaluate(against, model, MEETING_GAMES, label, run.num_collection_workers)

    def _start(self, rule: RestartConfig) -> Path | None:
        """Return the directory of the adapter that a new lineage begins with; None: a fresh one."""
        if rule.start == INITIAL:
            return self._parts.plan.config.lora.initial_lora_path
        if rule.start in self._parts.policies:
            return self._parts.store.path(self._parts.policies[rule.start].version)
        return None


def _reason(policy: TrainedPolicy, rule: RestartConfig) -> str | None:
    """Return why the present lineage ends now, if it does."""
    updates, results = policy.updates - policy.began, policy.results
    if rule.at_updates is not None and updates >= rule.at_updates:
        return f"{updates} updates"
    if rule.at_points is None or len(results) < rule.games:
        return None
    deals = defaultdict[int, list[float]](list)
    for deal, points in results:
        deals[deal].append(points)
    low, high = share_interval([*deals.values()])
    if low <= rule.at_points:
        return None
    mean = fmean(points for _, points in results)
    return f"{percent(mean)} of the points in {len(results)} games (95 %: {percent_range(low, high)})"
