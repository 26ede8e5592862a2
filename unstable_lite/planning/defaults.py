"""Settings that a config leaves open, decided by its algorithm and league: batches, reward transforms, adapter slots.

Knows the algorithms' entries in `LEARNERS`, not their code. `num_frozen`: number of frozen players with an adapter,
those added by hand included; default: those of the config.
"""

from __future__ import annotations

from typing import Any

from unstable_lite.adapters.frozen import with_members
from unstable_lite.config import Config
from unstable_lite.config.games import is_policy
from unstable_lite.config.training import Transformation
from unstable_lite.league.opponents import (
    frozen_adapters,
    kept_policies,
    met_opponents,
    policies_met,
    strategies,
    uses_checkpoints,
)
from unstable_lite.learner import LEARNERS, Algorithm


def _transformation(name: str, **keywords: float | bool) -> Transformation:
    return Transformation.model_validate({"name": name, **keywords})


_STEP_REWARDS = (
    _transformation("RewardForFormat", reward=1.5),
    _transformation("PenaltyForInvalidMove", reward=1.0, penalty=-1.0),
)
"""Step rewards of the reference, which hides the +1.0 for each valid step that is written out here."""
_STEP_PENALTIES = (
    _transformation("RewardForFormat", penalty=-1.5),
    _transformation("PenaltyForInvalidMove", penalty=-2.0),
)
"""Same differences as penalties: returns add up over a player's turns, so a bonus per turn would reward length."""
_NORMALIZED = (_transformation("NormalizeRewardsByEnv", z_score=True),)


def algorithm_of(config: Config) -> Algorithm:
    """Return the named algorithm, or the assumptions about a `module:Class`."""
    return LEARNERS.get(config.algorithm, Algorithm(target=config.algorithm))


def resolve_defaults(config: Config) -> Config:
    """Return the config with each setting that it leaves open set to the default of its algorithm and league.

    With several policies, settings that depend on a policy's algorithm stay open: see `policy_configs`.
    """
    config = _with_members(config)
    if not config.policies:
        kind = algorithm_of(config).batches if config.buffer.kind == "auto" else config.buffer.kind
        # A critic or a group is already a baseline; a role average or the batch mean would be a second one.
        has_baseline = config.group_baseline is not None or kind == "episodes"
        open_ones = {
            "final_reward_transformation": () if has_baseline else ("RoleAdvantageByEnvFormatter",),
            "step_reward_transformation": _STEP_PENALTIES if kind == "episodes" else _STEP_REWARDS,
            "sampling_reward_transformation": () if has_baseline else _NORMALIZED,
        }
        rewards = {name: value for name, value in open_ones.items() if getattr(config.rewards, name) is None}
        config = config.changed(buffer={"kind": kind}, rewards=rewards)
    engine, needed = config.engine, adapter_slots_needed(config)
    # Games in flight hold slots too, as many as the updates that happen while they last.
    held = config.buffer.max_staleness // 2 * len(config.shares)
    if "max_loras" in engine.model_fields_set or needed + held * bool(config.policies) <= engine.max_loras:
        return config
    return config.changed(engine={"max_loras": needed + held})


def policy_configs(config: Config, num_frozen: int | None = None) -> dict[str, Config]:
    """Return the resolved config of each policy by its name, with its number of active checkpoints.

    Its `engine.max_loras` is an equal part of the slots that frozen players leave, and the slots of those it meets.
    """
    config, policies = resolve_defaults(config), dict[str, Config]()
    part, sizes = changing_slots(config, num_frozen) // len(config.shares), pool_sizes(config, num_frozen)
    for name in config.policies:
        own = resolve_defaults(config.of_policy(name))
        engine, league = {"max_loras": part + _frozen(own, num_frozen)}, {"max_active_checkpoints": sizes[name]}
        policies[name] = own.changed(engine=engine, league=league)
    return policies or {"": config}


def _with_members(config: Config) -> Config:
    """Return the config with the checkpoints of each average that it may meet, which a resumed run then has, too."""
    met = met_opponents(config)

    def named(name: str) -> str:
        return with_members(name) if name in met else name

    def with_named(section: Any) -> Any:
        names = section.fixed_opponents
        return section.changed(fixed_opponents=names and tuple(map(named, names)))

    evaluated = tuple(env.changed(fixed_opponent=named(env.fixed_opponent)) for env in config.eval_envs)
    trained = tuple(map(with_named, config.train_envs))
    return config.changed(league=with_named(config.league), train_envs=trained, eval_envs=evaluated)


def pool_sizes(config: Config, num_frozen: int | None = None) -> dict[str, int]:
    """Return each policy's number of checkpoints that can be played at once, its current one included."""
    league, sizes = config.league, dict[str, int | None]()
    least, most = league.opponent_lag
    wanted = 1 + max(1, most - max(least, 1) + 1)
    drawn, kept = policies_met(config), kept_policies(config)
    for name in config.shares:
        own = config.of_policy(name)
        size = wanted if "lagged" in strategies(own.league) else None  # as many as fit
        is_met = name in kept or _plays_checkpoints(own) or f"{name}/past" in drawn
        sizes[name] = league.max_active_checkpoints or (size if is_met else 1)
    taken = sum((size or 0) + _in_transition(config, size) for size in sizes.values())
    left = changing_slots(config, num_frozen) - taken
    fitting = max(2, min(wanted, left // max(1, [*sizes.values()].count(None))))
    return {name: size or fitting for name, size in sizes.items()}


def active_checkpoints(config: Config, num_frozen: int | None = None) -> int:
    """Return the number of checkpoints that can be played at once, the current one of each policy included."""
    return sum(pool_sizes(config, num_frozen).values())


def adapter_slots_needed(config: Config, num_frozen: int | None = None) -> int:
    """Return the number of adapter slots for active checkpoints, adapters in transition and frozen players.

    A frozen player stays in its slot for the whole run.
    """
    sizes = pool_sizes(config, num_frozen).values()
    return _frozen(config, num_frozen) + sum(size + _in_transition(config, size) for size in sizes)


def _in_transition(config: Config, pool_size: int | None) -> int:
    """Return the number of slots of a policy beside those of its active checkpoints.

    One is for the next adapter while the last one is still played, one for an opponent that is replaced by another, one
    for the checkpoint that is evaluated while training continues, and one for another policy that it is evaluated
    against.
    """
    return 1 + (pool_size != 1) + bool(config.run.eval_every) + _evaluates_policies(config)


def _frozen(config: Config, num_frozen: int | None) -> int:
    return len(frozen_adapters(config)) if num_frozen is None else num_frozen


def changing_slots(config: Config, num_frozen: int | None = None) -> int:
    """Return the number of slots that frozen players leave for the adapters of the run itself."""
    return config.engine.max_loras - _frozen(config, num_frozen)


def holds_games(config: Config) -> bool:
    """Return whether some games hold an adapter of the run in a slot until they end.

    With `adapter_policy` "turn" they are those against checkpoints or another policy, and evaluation games beside
    training.
    """
    is_evaluated = config.run.schedule == "async" and bool(config.eval_envs) and config.run.num_eval_workers > 0
    plays_older = any(_plays_checkpoints(config.of_policy(name)) for name in config.shares)
    meets_others = plays_older or bool(policies_met(config)) or _evaluates_policies(config)
    return config.league.adapter_policy == "game" or is_evaluated or meets_others


def _evaluates_policies(config: Config) -> bool:
    return any(is_policy(env.fixed_opponent) for env in config.eval_envs)


def adapters_in_memory(config: Config, num_frozen: int | None = None) -> int:
    """Return the shared memory that a run may need, as a multiple of one adapter's size.

    It holds the loaded adapters except frozen players, which are read from the run directory. Each policy adds the next
    one, one that is loaded again, and in the learner three versions (this one, the next one, and the one that is being
    saved), each with two moments, and the same again for a critic.
    """
    policies = map(config.of_policy, config.shares)
    return changing_slots(config, num_frozen) + sum(2 + 3 * 3 * (1 + algorithm_of(own).has_critic) for own in policies)


def _plays_checkpoints(config: Config) -> bool:
    """Return whether some training games of a policy are against its own checkpoints."""
    return any(spec.num_drawn for spec in config.train_envs) and uses_checkpoints(config.league)
