"""Parts of a run that a checkpoint keeps continue as if nothing had happened, after their state was JSON."""

import inspect
import json
from typing import Any

import pytest

from bench.shuffled_rewards import ShuffledRewards
from fakes.game_records import BASE, make_record, make_spec, make_step, make_trajectory
from unstable_lite import reward_transformations as transforms
from unstable_lite.config import Config
from unstable_lite.config.tracking import AlarmsConfig
from unstable_lite.orchestrator.alarms import Alarms, Reading
from unstable_lite.orchestrator.wiring import make_buffer, make_scheduler
from unstable_lite.planning.defaults import resolve_defaults
from unstable_lite.rollout.back_pressure import InFlight
from unstable_lite.tracking.windows import Diversity, digests
from unstable_lite.types import GameRecord, GameSpec, Turn


def config(**sections: Any) -> Config:
    league = {"opponent_sampling_strategy": "fixed", "fixed_opponents": ["x", "y"], **sections.pop("league", {})}
    envs = {"train_envs": [{"env_id": one, "num_players": 2, "num_actors": 1} for one in "AB"]}
    envs["eval_envs"] = [{"env_id": one, "num_players": 2, "fixed_opponent": "x"} for one in "AB"]
    return resolve_defaults(Config.model_validate({"league": league, **envs, **sections}))


def finished(spec: GameSpec, number: int) -> GameRecord:
    """Return a game of six turns, of which each trained seat has three steps; results follow from `number`."""
    reward, own = (1.0, -1.0, 0.0)[number % 3], [agent.pid for agent in spec.agent_specs if agent.collect_data]
    turns = [Turn(pid=n % 2, observation=str(n), text="x", action="x", format_ok=True) for n in range(6)]
    of = {"env_id": spec.env_id, "game_idx": spec.game_idx, "final_reward": reward}
    steps = [[make_step(env_id=spec.env_id) for _ in range(3)] for _ in own]
    trajectories = [make_trajectory(*each, pid=pid, **of) for pid, each in zip(own, steps, strict=True)]
    rewards = [reward if pid in own else -reward for pid in range(2)]
    return make_record(spec, *rewards, turns=turns, trajectories=trajectories)


class League:
    """A scheduler with its samplers, and its registry, which is saved beside it."""

    def __init__(self, **sections: Any) -> None:
        self.scheduler = make_scheduler(config(**sections))
        self.parts: dict[str, Any] = {"scheduler": self.scheduler, "registry": self.scheduler.registry}

    def use(self, n: int) -> Any:
        """Play a group and an evaluation game; every fifth group follows a new checkpoint."""
        if n % 5 == 0:
            self.scheduler.registry.add_policy(f"ckpt-{n}", n + 1, n)
        group = self.scheduler.next_train_group()
        for number, spec in enumerate(group):
            self.scheduler.update(finished(spec, n + number))
        self.scheduler.update(finished(evaluation := self.scheduler.next_eval_job(), n))
        return group, evaluation, self.scheduler.registry.get_all_models()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def buffer_of(**sections: Any) -> Any:
    buffer = make_buffer(config(**sections))
    buffer.in_flight = InFlight(4, 4, 8, {"A": 3.0})
    return buffer


async def fill(buffer: Any, n: int) -> Any:
    """Play a group, take a batch and leave nothing behind."""
    for number in range(2):
        spec = make_spec(BASE, BASE, trained=[0, 1], game_idx=2 * n + number, group_idx=2 * n, env_id="A")
        buffer.begin_game(spec)
        buffer.add_game(finished(spec, n + number))
    batch = await buffer.get_batch(2, 1)
    return (
        str(batch),
        buffer.drain(),
        buffer.counts.metrics(),
        buffer.added,
        buffer.in_flight.limit,
        buffer.in_flight.steps,
    )


def pay(transform: Any, n: int) -> Any:
    return transform(n**0.5 % 1, n % 2, "AB"[n % 3 % 2])


def normalise(transform: Any, n: int) -> Any:
    results = (1.0, -1.0) if n < 40 else (0.01, -0.01)  # so much smaller that the floor counts
    return [step.reward for step in transform([make_step(reward=(-1) ** n * reward) for reward in results])]


def judge(alarms: Alarms, n: int) -> Any:
    readings = [Reading(alarm="staleness", value=6.0 * (n // 7 % 3 > 0), n=3)]
    return [change.text for change in alarms.judge(n, readings)], alarms.counts()


def show(diversity: Diversity, n: int) -> Any:
    diversity.append(digests([str(n), str(n % 4)]), digests(["a", str(n % 3)]))
    return diversity.metrics()


GROUPS = {"algorithm": "rloo", "run": {"group_size": 2}, "rewards": {"step_reward_transformation": []}}
DEALS = {"run": {"group_size": 2}, "rewards": {"group_baseline": "duplicate", "step_reward_transformation": []}}
BRANCHES = {"examples.branching:Branching": {"share": 0.9, "at": "uncertain", "chance": "fresh"}}
MIXTURE = {"mirror": 1, "lagged": 1, "pfsp": 2, "fixed": 2}
LEAGUES: dict[str, dict[str, Any]] = {
    "pfsp": {"league": {"opponent_sampling_strategy": "pfsp", "env_sampling_strategy": "round-robin"}},
    "mixture": {"league": {"opponent_sampling_strategy": MIXTURE, "env_sampling_strategy": "learning-progress"}},
    "shares by steps": {"league": {"opponent_sampling_strategy": MIXTURE, "shares_by": "steps"}},
    "groups": GROUPS,
    "duplicates": DEALS,
    "branches": GROUPS | {"league": {"env_sampling_strategy": BRANCHES}},
}
CASES: dict[str, tuple[Any, Any]] = {
    **{name: (lambda of=of: League(**of), League.use) for name, of in LEAGUES.items()},
    "buffer of steps": (buffer_of, fill),
    "buffer of episodes": (lambda: buffer_of(algorithm="a2c"), fill),
    "buffer of groups": (lambda: buffer_of(**GROUPS), fill),
    "buffer of duplicates": (lambda: buffer_of(**DEALS), fill),
    "role average": (lambda: transforms.RoleAdvantageFormatter(tau=0.1), pay),
    "shuffled rewards": (ShuffledRewards, pay),
    "z-scores": (lambda: transforms.NormalizeRewards(z_score=True), normalise),
    "alarms": (lambda: Alarms(AlarmsConfig.model_validate({"staleness": {"threshold": 5}})), judge),
    "diversity": (lambda: Diversity(window=50), show),
}


@pytest.mark.parametrize("name", CASES)
async def test_restored_part_continues_as_the_original(name):
    make, use = CASES[name]

    async def used(part: Any, steps: range) -> list[str]:
        shown = [use(part, n) for n in steps]
        return [str(await one if inspect.isawaitable(one) else one) for one in shown]

    original, restored, fresh = make(), make(), make()
    assert await used(original, range(40)) == await used(make(), range(40)), "the config's seed decides"
    state = json.loads(json.dumps(original.state_dict()))
    restored.load_state_dict(state)
    assert restored.state_dict() == original.state_dict() == state
    expected = await used(original, range(40, 60))
    assert await used(restored, range(40, 60)) == expected
    assert restored.state_dict() == original.state_dict()
    assert await used(fresh, range(40, 60)) != expected, "the state makes a difference"
