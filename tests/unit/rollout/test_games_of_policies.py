"""Several policies that learn from games with each other: whose steps each batch has, and that none waits for ever."""

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_collector import any_cell

from fakes.game_records import Records, offer
from unstable_lite.adapters.table import IDS_OF_POLICY, AdapterTable, number_of_policy
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.orchestrator.checkpoint_pool import TrainedPolicy
from unstable_lite.orchestrator.progress import Progress
from unstable_lite.orchestrator.wiring import RunParts, make_scheduler
from unstable_lite.planning.plan import Plan, make_plan
from unstable_lite.rollout.collector import Collector
from unstable_lite.types import Step

ROLES = {"env_id": "TicTacToe-v0-train", "num_players": 2, "prompt_template": "tiny"}
NIM = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1, "prompt_template": "tiny"}


def plan_of(policies: dict[str, Any], train_envs: list[dict[str, Any]] | None = None, **sections: Any) -> Plan:
    raw = {
        "engine": {"kind": "scripted", "max_loras": 100} | sections.pop("engine", {}),
        "league": {"fixed_opponents": ["scripted:random"], "opponent_sampling_strategy": "mirror"},
        "policies": policies,
        "learner": {"batch_size": 48},
        "train_envs": train_envs or [NIM],
    }
    return make_plan(Config.model_validate(raw | sections))


class World:
    """Scheduler, buffers and collector of a run, with players that need no engine, and updates without a learner."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.parts = RunParts(plan, Path(), TerminalInterface(quiet=True), asyncio.Event(), None)
        self.parts.scheduler = make_scheduler(plan.config)
        self.parts.registry, self.parts.frozen = self.parts.scheduler.registry, ()
        self.policies = self.parts.policies = self.parts._policies(None)
        self.progress, self.table, self.records = Progress(self.parts), AdapterTable(100_000), Records()
        for policy in self.policies.values():
            self.publish(policy, "initial")
        first = next(iter(self.policies.values())).buffer
        seats = PlayerFactory(any_cell)
        self.collector = Collector(self.parts.scheduler, first, seats, self.table, plan.config.run, [self.records])

    def publish(self, policy: TrainedPolicy, name: str) -> None:
        offer(self.table, version := policy.next_version)
        policy.registry.add_policy(f"{policy.name}/{name}", version, policy.updates)

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.collector.run(self.plan.config.run.num_collection_workers, 0))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def update(self) -> tuple[TrainedPolicy, list[Step]]:
        policy = self.progress.next_to_learn
        batch: Any = await asyncio.wait_for(policy.next_batch(), 30)
        policy.updates += 1
        self.publish(policy, f"ckpt-{policy.updates}")
        return policy, batch


def mixture(rng: random.Random, names: list[str]) -> dict[str, float]:
    others = [f"policy:{name}{past}" for name in names for past in ("", "/past")]
    chosen = rng.sample(["mirror", "uniform", "fixed", *others], rng.randint(1, 3))
    return {name: rng.choice([0.1, 0.5, 1.0]) for name in chosen}


def random_plan(seed: int) -> Plan:
    """Draw a run of two or three policies: their shares, opponents, batches, envs with and without roles, groups."""
    rng = random.Random(seed)
    names = ["main", "exploiter", "third"][: rng.randint(2, 3)]
    left = [rng.choice([0.1, 0.5, 1.0]) for _ in names]
    policies = {
        name: {
            "share": round(part / sum(left), 3) if number else None,
            "opponents": mixture(rng, names),
            "learner": {"batch_size": rng.choice([4, 16, 60])},
        }
        for number, (name, part) in enumerate(zip(names, left, strict=True))
    }
    envs = [NIM, {**ROLES, "seats": rng.sample(names, 2)}] if rng.random() < 0.5 else [NIM]
    group_size = rng.choice([1, 1, 3])
    return plan_of(
        policies,
        envs,
        run={"num_collection_workers": rng.choice([1, 3, 40]), "group_size": group_size},
        buffer={"max_staleness": rng.choice([0, 1, 8])},
        rewards={"group_baseline": "mean"} if group_size > 1 else {},
    )


@pytest.mark.parametrize("seed", range(16))
async def test_each_policy_gets_its_batches_in_any_mixture(seed):
    world = World(random_plan(seed))
    made = dict.fromkeys(world.policies, 0)
    async with world.playing():
        for _ in range(20):
            policy, batch = await world.update()
            made[policy.name] += 1
            assert {number_of_policy(step.generation.adapter_version) for step in batch} == {policy.number}
            assert all(step.context.opponent_kinds for step in batch)
    for name, policy in world.policies.items():
        assert abs(made[name] - 20 * world.plan.config.shares[name]) < 1.5, "updates follow the shares"
        buffer = policy.buffer
        assert buffer.added == buffer.taken + buffer.dropped_stale + buffer.size(), "no step is lost or counted twice"


@pytest.mark.parametrize(
    ("envs", "updates"),
    [([NIM], 60), ([NIM, {**ROLES, "seats": ["main", "exploiter"]}], 220)],
    ids=["alone", "and roles"],
)
async def test_each_policy_meets_its_opponents_by_its_own_shares_and_both_learn_from_games_that_both_want(
    envs, updates
):
    mixture = {"mirror": 0.5, "policy:exploiter": 0.3, "fixed": 0.2}
    policies = {"main": {"opponents": mixture}, "exploiter": {"opponents": "policy:main", "share": 0.7}}
    world = World(plan_of(policies, envs))
    async with world.playing():
        for _ in range(updates):
            await world.update()
    of_main, both = Counter[str](), 0
    for record in world.records:
        if record.spec.env_id != NIM["env_id"]:
            continue
        own = {trajectory.model.policy for trajectory in record.trajectories}
        both += len(own) == 2
        if "main" in own:
            (other, *_) = [*(a.model for a in record.spec.agent_specs if a.model.policy != "main"), None]
            of_main["mirror" if other is None else other.policy or "fixed"] += 1
    n = of_main.total()
    assert n > 200 and both > 20
    for name, share in (("mirror", 0.5), ("exploiter", 0.3), ("fixed", 0.2)):
        assert abs(of_main[name] / n - share) < 4 * math.sqrt(share * (1 - share) / n), of_main


def test_run_that_resumes_with_other_shares_plays_these_at_once():
    def scheduler_of(share: float) -> GameScheduler:
        mixture = {"mirror": 1 - share, "policy:exploiter": share}
        return World(plan_of({"main": {"opponents": mixture}, "exploiter": {"opponents": "mirror"}})).parts.scheduler

    def share_met(scheduler: GameScheduler, num_games: int) -> float:
        games = [scheduler.next_train_job(wanting=["main"]) for _ in range(num_games)]
        return sum(agent.model.policy == "exploiter" for game in games for agent in game.agent_specs) / num_games

    first, same, changed = scheduler_of(0.6), scheduler_of(0.6), scheduler_of(0.2)
    assert 0.55 < share_met(first, 1000) < 0.65
    state = json.loads(json.dumps(first.state_dict()))
    for scheduler in (same, changed):
        scheduler.load_state_dict(state)
    assert same.state_dict()["met"] == state["met"]
    assert 0.15 < share_met(changed, 400) < 0.25


async def test_full_policy_does_not_stop_the_other():
    world = World(plan_of({"main": {"opponents": "policy:exploiter"}, "exploiter": {"opponents": "policy:main"}}))
    main = world.policies["main"].buffer
    main.in_flight, main.max_buffer_size = None, 1
    async with world.playing():
        await asyncio.sleep(0.1)
        num_steps, before = main.size(), len(world.records)
        for _ in range(3):
            await asyncio.wait_for(world.policies["exploiter"].next_batch(), 30)
    assert main.is_full and len(world.records) > before + 10
    assert main.size() <= num_steps + 40 * 10, "only games that had begun"


async def test_policies_of_roles_keep_their_seats():
    envs = [{**ROLES, "seats": ["exploiter", "main"]}]
    world = World(plan_of({"main": {}, "exploiter": {}}, envs))
    async with world.playing():
        for _ in range(4):
            await world.update()
    seats = {tuple(agent.model.policy for agent in record.spec.agent_specs) for record in world.records}
    assert seats == {("exploiter", "main")}
    assert any(len(record.trajectories) == 2 for record in world.records)


async def test_ids_of_a_policy_are_consecutive_and_none_is_used_twice():
    world = World(plan_of({"main": {"opponents": "mirror"}, "exploiter": {"opponents": "mirror"}}))
    async with world.playing():
        for _ in range(6):
            await world.update()
    assert [*world.table.adapters] == sorted({*world.table.adapters}, key=[*world.table.adapters].index)
    for policy in world.policies.values():
        own = [id for id in world.table.adapters if number_of_policy(id) == policy.number]
        assert own == [policy.number * IDS_OF_POLICY + number for number in (1, 2, 3, 4)]
